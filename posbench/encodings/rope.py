"""Rotary position embedding (RoPE), scalings of its frequencies, and schemes that
change nothing but frequencies.

A pair is two neighbouring channels (layout `interleaved`, as in the paper and GPT-J) or
channels p and p + d/2 (`half`, as in GPT-NeoX and Llama). A scaling is one function. It
makes both an encoding, which is scaled from the first step on, and an extension, which
scales a trained RoPE; they have the function's name.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from annotated_types import Ge
from torch import Tensor, nn

from posbench import machine
from posbench.encodings.base import Encoding, Layer, Rotation, Shape, expect
from posbench.errors import UserError
from posbench.options import (
    Above1,
    AtLeast1,
    Divisors,
    Fraction,
    Layout,
    NonNegative,
    Positive,
    Ramp,
    Share,
)

Scaling = tuple[Tensor, float]  # frequencies (P,) or (N, P), and the factor of q and k
CPU = torch.device("cpu")


@functools.lru_cache(64)  # so that they are sent to a device once
@torch.inference_mode(False)  # training may use those of an evaluation
def frequencies(width: int, base: float, device: torch.device = CPU) -> Tensor:
    """Return the radians per position of each pair, fastest first: (width / 2,) fp64,
    on a device (on the CPU for MPS, which has no fp64).
    """
    two_p = torch.arange(0, width, 2, dtype=torch.float64, device=CPU)
    f = base ** (-two_p / width)
    if device.type == "mps":
        return f
    return f.to(device)


def to_fp64(positions: Tensor) -> Tensor:
    """Return positions in fp64 (on the CPU for MPS, which has none), as fp32 angles are
    off by up to 4e-3 at position 65k.
    """
    if positions.device.type == "mps":
        positions = positions.cpu()
    return positions.double()


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Return positions (1|B, T) times frequencies, (P,) or by sequence (1|B, 1, P):
    (1|B, T, P) fp64.
    """
    places = to_fp64(positions)[..., None]
    return places * machine.to_device(inv_freq, places.device)


def cos_sin(angles: Tensor, device: torch.device) -> Tensor:
    """Return the cosines and sines of angles (1|B, T, P), with an axis for heads: (2,
    1|B, 1, T, P) fp32.
    """
    both = torch.stack((angles.cos(), angles.sin()))
    return both.float().to(device)[:, :, None]


def rotate_pairs(x: Tensor, tables: Tensor, layout: Layout) -> Tensor:
    """Return x (B, H, T, d) with its pairs rotated by tables of cosines and sines (2,
    1|B, 1|H, T, P); if they have fewer pairs than x, the first channels rotate.
    """
    width = 2 * tables.shape[-1]
    if width == 0:
        return x
    if width < x.shape[-1]:
        first = rotate_pairs(x[..., :width], tables, layout)
        return torch.cat((first, x[..., width:]), dim=-1)
    cosine, sine = tables
    if layout == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    if torch.compiler.is_compiling():
        a, b = pairs.unbind(-1)
        both = (a * cosine - b * sine, b * cosine + a * sine)
        return torch.stack(both, dim=-1).flatten(-2)
    # The same sums by complex numbers, where no compiler fuses. On a CPU they are three
    # times as fast. On CUDA q and k of a layer of a model in bf16 take 16 launches,
    # forward and backward, instead of 38, and move 80 bytes a channel instead of 192.
    try:
        numbers = torch.view_as_complex(pairs)
    except RuntimeError:  # complex numbers lie at even places in memory
        copied = pairs.clone(memory_format=torch.contiguous_format)
        numbers = torch.view_as_complex(copied)
    product = numbers * torch.complex(cosine, sine)
    return torch.view_as_real(product).flatten(-2)


def rotate_both(
    q: Tensor, k: Tensor, tables: Tensor, layout: Layout
) -> tuple[Tensor, Tensor]:
    """Return q and k, both rotated by tables (2, 1|B, 1|H, T, P)."""
    return rotate_pairs(q, tables, layout), rotate_pairs(k, tables, layout)


def check_pairs(name: str, shape: Shape, multiple: int = 2) -> None:
    """Raise UserError, with an encoding's name, if the head width is no multiple of
    this.
    """
    if shape.head_dim % multiple:
        raise UserError(
            f"head_dim (d_model / n_heads) is {shape.head_dim}: {name} needs a"
            f" multiple of {multiple}"
        )


class Rotary(Encoding):
    """Base of the encodings that rotate q and k by position · `inv_freq`; most differ
    only in the frequencies.

    Once for all layers, `make_tables` takes cosines and sines of `angles`: positions
    times `inv_freq`, which is `own_frequencies` times the ratio of an extension. In
    each layer `rotate` turns q and k by them.
    """

    # multiplies q and k, so the logits by its square; YaRN's temperature
    attention_factor: float = 1.0
    # An extension's frequencies divided by the trained ones, (P,). No buffer, since
    # .to(bfloat16) would round it.
    ratio: Tensor = torch.ones((), dtype=torch.float64)

    def __init__(
        self, shape: Shape, base: Above1 = 1e4, layout: Layout = "interleaved"
    ) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.base, self.layout = base, layout
        self.width = shape.head_dim  # number of rotated channels per head

    def own_frequencies(self, length: Tensor) -> Tensor:
        """Return the frequencies without an extension for inputs of `length`, () or (N,
        1): (P,) or (N, P) fp64.
        """
        return frequencies(self.width, self.base, length.device)

    def inv_freq(self, length: Tensor | float | None = None) -> Tensor:
        """Return the radians per position of each pair for inputs of `length`, by
        default that of training.
        """
        if length is None:
            length = self.shape.train_length
        f = self.own_frequencies(torch.as_tensor(length, dtype=torch.float64))
        if self.ratio.dim() == 0:  # without an extension nothing is sent to the device
            return f
        return f * machine.to_device(self.ratio, f.device)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each pair at positions (1|B, T): (1|B, T, P) fp64."""
        # of each sequence, (1|B, 1); only dynamic NTK and LongRoPE use it
        length = to_fp64(positions).amax(-1, keepdim=True) + 1
        inv_freq = self.inv_freq(length)  # (P,) or (1|B, P)
        return angles(positions, inv_freq[..., None, :])

    def make_tables(self, positions: Tensor) -> Tensor:
        """Return cosines and sines of the pairs at positions (1|B, T), times the
        attention factor: (2, 1|B, 1, T, P) fp32.
        """
        return cos_sin(self.angles(positions), positions.device) * self.attention_factor

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return rotate_both(q, k, layer.tables, self.layout)

    def rotation(self, layer: Layer) -> Rotation | None:
        is_own = type(self).rotate is not Rotary.rotate
        if is_own or "prepare" in self.hooks:
            return None
        return functools.partial(rotate_both, tables=layer.tables, layout=self.layout)

    def rescaled(self, inv_freq: Tensor, attention_factor: float = 1.0) -> Self:
        """Return a copy with shared parameters, these frequencies (P,), and q and k
        multiplied by a further factor.
        """
        current = self.inv_freq()
        ratio = torch.where(current == 0, 1, inv_freq / current)
        copied = self.sharing()
        copied.ratio = self.ratio * ratio.detach()
        copied.attention_factor = self.attention_factor * attention_factor
        return copied


class PureRotary(Rotary):
    """A rotary encoding that rotates q and k alike, each by its own position only."""


class RoPE(PureRotary):
    """Rotary position embedding (RoPE): each pair of channels turns with position, so a
    logit depends on distance only.

        <R(m) q, R(n) k> = <q, R(n - m) k>
        R(m) = blockdiag over pairs p of [[cos a, -sin a], [sin a, cos a]],
        a = m·base^(-2p/d),   p = 0 .. d/2 - 1

    Option `frequencies`: base^(-2p/d) (`geometric`), 2π / round(2π·base^(2p/d))
    (`resonance`), or a number per pair.

    Source: Su et al., "RoFormer" (2021), arXiv:2104.09864, section 3; Wang et al.
    (2024), arXiv:2403.00071 (resonance).
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: transformers Llama (half) and GPT-J (interleaved), whose rotation
    takes any frequencies.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        frequencies: (
            Literal["geometric", "resonance"] | list[NonNegative]
        ) = "geometric",
    ) -> None:
        super().__init__(shape, base, layout)
        self.frequencies = frequencies
        pairs = shape.head_dim // 2
        self.expect(
            isinstance(frequencies, str) or len(frequencies) == pairs,
            "frequencies",
            frequencies,
            f"geometric, resonance or {pairs} numbers, one per pair",
        )
        self.expect(
            isinstance(frequencies, str) or base == 1e4,
            "base",
            base,
            "no base beside the numbers of `frequencies`, which do not depend on it",
        )

    def own_frequencies(self, length: Tensor) -> Tensor:
        f = super().own_frequencies(length)
        if self.frequencies == "geometric":
            return f
        if self.frequencies == "resonance":
            wavelengths = 2 * math.pi / f
            return 2 * math.pi / wavelengths.round()
        return f.new_tensor(self.frequencies)


class PartialRoPE(PureRotary):
    """Partial rotary embedding: RoPE on the first channels of each head, while the
    others carry no position.

        f_p = base^(-2p/r),   r = fraction·d rotated channels

    Source: Wang and Komatsuzaki, "GPT-J-6B" (2021); Black et al., "GPT-NeoX-20B"
    (2022), arXiv:2204.06745, section 2.1.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: transformers GPT-NeoX (half) and GPT-J (interleaved).
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        fraction: Fraction = 0.25,
    ) -> None:
        super().__init__(shape, base, layout)
        self.fraction = fraction
        self.width = int(fraction * shape.head_dim)
        self.expect(
            self.width % 2 == 0,
            "fraction",
            fraction,
            "a share that is an even number of channels",
        )


class LeRoPE(PureRotary):
    """RoPE with learned frequencies (LeRoPE), shared by all layers and heads.

        f_p = base^(-2p/d) · exp(alpha_p),   alpha_p = 0 at first

    Source: "LeRoPE" (2026), arXiv:2607.10134, as in transformers' Mistral Large 4,
    without its scale of the queries.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: transformers Mistral Large 4.
    """

    def __init__(
        self, shape: Shape, base: Above1 = 1e4, layout: Layout = "interleaved"
    ) -> None:
        super().__init__(shape, base, layout)
        self.alpha = nn.Parameter(torch.zeros(shape.head_dim // 2))

    def own_frequencies(self, length: Tensor) -> Tensor:
        alpha = self.alpha.to(length.device).double()
        return super().own_frequencies(length) * alpha.exp()


class GRAPEM(Rotary):
    """Multiplicative GRAPE with commuting planes: RoPE whose frequencies each layer
    learns for itself.

        f_p = base^(-2p/d) · exp(alpha_lp / c),
        alpha_lp = 0 at first, for layer l and pair p

    Source: Zhang et al. (2025), arXiv:2512.07805, section 3, without a norm of q and k;
    c is from the authors' code.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: the exponential of the generator, by torch.linalg.matrix_exp.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        divisor: Positive = 16.0,
    ) -> None:
        super().__init__(shape, base, layout)
        self.divisor = divisor
        self.alpha = nn.Parameter(torch.zeros(shape.n_layers, shape.head_dim // 2))

    def make_tables(self, positions: Tensor) -> Tensor:
        return self.angles(positions)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        alpha = self.alpha[layer.index].to(layer.tables.device).double()
        angles = layer.tables * (alpha / self.divisor).exp()
        factors = cos_sin(angles, q.device) * self.attention_factor
        return rotate_both(q, k, factors, self.layout)


class DroPE(Encoding):
    """RoPE for most of the training, then no positions (DroPE); evaluations have none
    either.

        RoPE turns q and k in the first share `drop_at` of all updates;
        afterwards q and k stay unchanged

    Source: Gelberg et al. (2025), arXiv:2512.12167, where a trained model gets a
    second, shorter training.
    Beyond training length: defined everywhere; as without positions, attention then
    spreads over more keys.
    Checked against: torch scaled_dot_product_attention after the drop; before it, it is
    `rope`.
    """

    def __init__(
        self,
        shape: Shape,
        drop_at: Share = 0.9,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__(shape)
        self.drop_at = drop_at
        self.dropped = True
        self.rope = RoPE(shape, base, layout)

    def set_progress(self, done: float) -> None:
        self.dropped = done >= self.drop_at

    def make_tables(self, positions: Tensor) -> Any:
        if self.dropped:
            return None
        return self.rope.make_tables(positions)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.dropped:
            return q, k
        return self.rope.rotate(q, k, layer)


class Spectrum(NamedTuple):
    """The frequencies of a RoPE, and what else a scaling may look at."""

    f: Tensor  # radians per position of each pair, fastest first: (P,) fp64
    base: float
    train_length: int  # L, in tokens
    length: Tensor  # l, the input's length: () or, for N sequences, (N, 1), fp64


class Scaled(Rotary):
    """RoPE whose frequencies are scaled from the first step on."""

    rule: ClassVar[Callable[..., Scaling]]
    defaults: ClassVar[dict[str, Any]]

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        original_length: Annotated[int, Ge(2)] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(shape, base, layout)
        self.original_length = original_length or shape.train_length
        self.options = self.defaults | options
        vars(self).update(self.options)
        self.attention_factor = self.scaled(torch.ones((), dtype=torch.float64))[1]

    def scaled(self, length: Tensor) -> Scaling:
        """Return frequencies and attention factor for inputs of this length, in
        tokens.
        """
        f = super().own_frequencies(length)
        spectrum = Spectrum(f, self.base, self.original_length, length)
        return type(self).rule(spectrum, **self.options)

    def own_frequencies(self, length: Tensor) -> Tensor:
        return self.scaled(length)[0]


# rules: functions of a spectrum and options
SCALINGS: dict[str, Callable[..., Scaling]] = {}


def scaling(rule: Callable[..., Scaling]) -> Callable[..., Scaling]:
    """Register a scaling rule and make the encoding of its name. Options after a `*`
    are for the extension alone.
    """
    name = rule.__name__
    by_length = name in ("dynamic_ntk", "longrope")
    _, *parameters = inspect.signature(rule).parameters.values()
    options = [p for p in parameters if p.kind != p.KEYWORD_ONLY]
    shape, base, layout, length, _ = inspect.signature(Scaled).parameters.values()
    shared = [shape, base, layout]
    bases: tuple[type, ...] = (Scaled, PureRotary)
    if by_length:
        shared.append(length)
        bases = (Scaled,)

    members = {
        "name": name,
        "rule": staticmethod(rule),
        "defaults": {p.name: p.default for p in options},
        "length_dependent": by_length,
        "__signature__": inspect.Signature([*shared, *options]),
        "__doc__": rule.__doc__,
        "__module__": __name__,
    }
    globals()[f"{name}_encoding"] = type(name, bases, members)
    SCALINGS[name] = rule
    return rule


@scaling
def p_rope(rope: Spectrum, fraction: Fraction = 0.75) -> Scaling:
    """p-RoPE, also called proportional RoPE: the slowest pairs do not turn, and carry
    content without position.

        f_p = base^(-2p/d) for p < floor(fraction·d/2),   0 otherwise

    Source: Barbero et al., "Round and Round We Go!" (2024), arXiv:2410.06205, section
    6.
    Beyond training length: defined everywhere; fewer pairs reach unseen angles than
    with RoPE.
    Checked against: transformers, rope_type `proportional` (Gemma 4).
    """
    pairs = len(rope.f)
    p = torch.arange(pairs, device=rope.f.device)
    return rope.f * (p < int(fraction * pairs)), 1.0


@scaling
def hope(rope: Spectrum) -> Scaling:
    """High-frequency rotary position encoding (HoPE): RoPE for pairs that turn once
    within the training length L.

        f_p = base^(-2p/d) where f_p·L >= 2π,   0 otherwise

    Source: Chen et al. (2024), arXiv:2410.21216; the threshold is that of others'
    implementations.
    Beyond training length: defined everywhere; every pair that turns has been seen at
    all angles.
    Checked against: plain loops; p_rope with as many pairs.
    """
    turns_once = rope.f * rope.train_length >= 2 * math.pi
    return rope.f * turns_once, 1.0


@scaling
def pi(rope: Spectrum, factor: AtLeast1 = 4.0) -> Scaling:
    """Position interpolation (PI): RoPE with all frequencies divided by s, the same as
    positions i/s.

        f_p = base^(-2p/d) / s

    Source: Chen et al., "Extending Context Window of LLMs via Positional Interpolation"
    (2023), arXiv:2306.15595.
    Beyond training length: defined everywhere; angles are unseen from the training
    length on, as for RoPE.
    Checked against: transformers, rope_type `linear`.
    """
    return rope.f / factor, 1.0


@scaling
def ntk(rope: Spectrum, factor: AtLeast1 = 4.0) -> Scaling:
    """NTK-aware RoPE: a larger base, so that the fastest pair keeps its speed and the
    slowest is s times slower.

        b' = b·s^(d/(d-2)),   f_p = b'^(-2p/d) = b^(-2p/d) · s^(-2p/(d-2))

    Source: bloc97, "NTK-Aware Scaled RoPE allows LLaMA models to have extended context
    size" (2023), reddit.com.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: x-transformers RotaryEmbedding, base_rescale_factor.
    """
    last = max(1, len(rope.f) - 1)  # the slowest pair, (d - 2) / 2
    p = torch.arange(len(rope.f), dtype=torch.float64, device=rope.f.device)
    return rope.f * factor ** (-p / last), 1.0


@scaling
def dynamic_ntk(rope: Spectrum, factor: AtLeast1 = 1.0) -> Scaling:
    """Dynamic NTK-aware RoPE: RoPE up to an original length L, then with a base that
    grows with the input's length l.

        f_p = b^(-2p/d) · s^(-2p/(d-2)),   s = max(1, factor·l/L - (factor - 1))

    Source: emozilla, "Dynamically Scaled RoPE" (2023), reddit.com; the rule is
    transformers' rope_type `dynamic`.
    Beyond training length: defined everywhere; slow pairs keep within the angles of L,
    others reach some never seen.
    Checked against: transformers, rope_type `dynamic`.
    """
    s = factor * rope.length / rope.train_length - (factor - 1)
    return ntk(rope, s.clamp(min=1))


@scaling
def ntk_by_parts(
    rope: Spectrum,
    factor: AtLeast1 = 4.0,
    ramp: Ramp = "index",
    alpha: Positive = 1.0,
    beta: Positive = 32.0,
) -> Scaling:
    """NTK-by-parts: YaRN without its temperature.

        f_p = (1 - g_p)·f0_p + g_p·f0_p/s

    g_p is 1 for pairs with at most alpha rotations within the training length L, 0 for
    beta or more. In between it falls with the pair's index (`ramp: index`, as in YaRN's
    code) or its rotations L·f0_p/2π (`rotations`, the paper).

    Source: Peng et al. (2023), arXiv:2309.00071, section 3.2, after bloc97 (2023).
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times
    later than RoPE's.
    Checked against: transformers, rope_type `yarn` without its factor (index);
    rope_type `llama3` (rotations).
    """
    # for llama3 they are its low and high factors
    expect(alpha <= beta, "beta", beta, f"at least alpha, {alpha:g}")
    if ramp == "index":
        # g rises from the pair of beta to the pair of alpha rotations. Both are rounded
        # outwards; others clamp one side of an end.
        last = 2 * len(rope.f) - 1
        low = min(max(math.floor(_pair_of(beta, rope)), 0), last)
        high = min(max(math.ceil(_pair_of(alpha, rope)), 0), last)
        p = torch.arange(len(rope.f), dtype=torch.float64, device=rope.f.device)
        g = ((p - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        rotations = rope.train_length / (2 * math.pi) * rope.f
        g = 1 - ((rotations - alpha) / (beta - alpha or 1e-9)).clamp(0, 1)
    return rope.f * (g / factor + (1 - g)), 1.0


def _pair_of(rotations: float, rope: Spectrum) -> float:
    """Return the index of the pair that turns so often within the training length."""
    of_first_pair = rope.train_length / (2 * math.pi)
    return len(rope.f) * math.log(of_first_pair / rotations) / math.log(rope.base)


@scaling
def yarn(
    rope: Spectrum,
    factor: AtLeast1 = 4.0,
    ramp: Ramp = "index",
    alpha: Positive = 1.0,
    beta: Positive = 32.0,
    *,
    attention_factor: Positive | None = None,
) -> Scaling:
    """YaRN: NTK-by-parts, and q and k multiplied by a, which sharpens attention over
    more keys.

        f_p = (1 - g_p)·f0_p + g_p·f0_p/s,   a = 0.1·ln s + 1,
        g_p as for `ntk_by_parts`

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language
    Models" (2023), arXiv:2309.00071.
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times
    later than RoPE's.
    Checked against: transformers, rope_type `yarn` (index); rope_type `llama3` and a
    plain loop (rotations).
    """
    f, _ = ntk_by_parts(rope, factor, ramp, alpha, beta)
    return f, attention_factor or 0.1 * math.log(factor) + 1


@scaling
def llama3(
    rope: Spectrum,
    factor: AtLeast1 = 8.0,
    low_freq_factor: Positive = 1.0,
    high_freq_factor: Positive = 4.0,
) -> Scaling:
    """Llama 3.1's frequencies: NTK-by-parts along the number of rotations within the
    training length L.

        f_p = (1 - g_p)·f0_p/s + g_p·f0_p,
        g_p = clip((L·f0_p/2π - low) / (high - low), 0, 1)

    Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), arXiv:2407.21783,
    whose base is 500000.
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times
    later than RoPE's.
    Checked against: transformers, rope_type `llama3`.
    """
    expect(
        low_freq_factor <= high_freq_factor,
        "low_freq_factor",
        low_freq_factor,
        f"at most {high_freq_factor:g}",
    )
    return ntk_by_parts(rope, factor, "rotations", low_freq_factor, high_freq_factor)


@scaling
def longrope(
    rope: Spectrum,
    factor: AtLeast1 = 4.0,
    *,
    long_factor: Divisors = None,
    short_factor: Divisors = None,
    attention_factor: Positive | None = None,
) -> Scaling:
    """LongRoPE: one divisor per frequency up to an original length L and another
    beyond; q and k multiplied by a.

        f_p = f0_p / short_factor_p up to L tokens, f0_p / long_factor_p beyond,
        a = sqrt(1 + ln s / ln L)

    Source: Ding et al. (2024), arXiv:2402.13753; here 1 and YaRN's factors replace the
    searched ones, for all tokens.
    Beyond training length: defined everywhere; the frequencies switch there, to
    untrained ones if L is train_length.
    Checked against: transformers, rope_type `longrope`, given the divisors of its
    rope_type `yarn`.
    """
    long, _ = ntk_by_parts(rope, factor)
    if long_factor:
        long = _divided(rope, "long_factor", long_factor)
    short = rope.f
    if short_factor:
        short = _divided(rope, "short_factor", short_factor)
    f = torch.where(rope.length > rope.train_length, long, short)
    a = attention_factor
    if a is None:
        a = math.sqrt(1 + math.log(factor) / math.log(rope.train_length))
    return f, a


def _divided(rope: Spectrum, option: str, divisors: list[float]) -> Tensor:
    """Return the frequencies divided by an option's numbers, one per pair."""
    pairs = len(rope.f)
    fits = len(divisors) == pairs
    expect(fits, option, divisors, f"{pairs} numbers, one per pair")
    return rope.f / rope.f.new_tensor(divisors)
