"""Rotary position embedding (RoPE), the scalings of its frequencies, and the schemes that change nothing else.

Pair p of a head of width d turns by  angle_p = position · f_p,  f_p = base^(-2p/d).  Which two channels are a pair is
the layout, a fixed permutation that a model with learned projections cannot tell:

    interleaved   (x_2p, x_2p+1)      the paper, GPT-J; the default, as such a pair lies in memory as a complex number
    half          (x_p, x_p+d/2)      GPT-NeoX, Llama, the default of transformers

A scaling slows the pairs for a context that is s times longer. It is one function, which makes the encoding of its
name, scaled from the first step on, and the extension of its name, which scales a trained RoPE.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from annotated_types import Ge, Le
from torch import Tensor, nn

from posbench import machine
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError
from posbench.options import Above1, AtLeast1, Count, Positive, Share

CPU = torch.device("cpu")
Layout = Literal["half", "interleaved"]
Ramp = Literal["index", "rotations"]


# -- angles and turns --------------------------------------------------------------------------------------------------


def frequencies(width: int, base: float) -> Tensor:
    """Return the radians per position of each pair, fastest first: (width / 2,) fp64, on the CPU."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


def double(positions: Tensor) -> Tensor:
    """Return positions in fp64, as fp32 angles are off by 2e-4 at position 65k; on the CPU for MPS, which has none."""
    return positions.cpu().double() if positions.device.type == "mps" else positions.double()


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Return positions (1|B, T) times frequencies (P,), or (1|B, 1, P) of each sequence: (1|B, T, P) fp64."""
    places = double(positions)[..., None]
    return places * machine.sent(inv_freq, places.device)


def turns(angles: Tensor, device: torch.device) -> Tensor:
    """Return the rotations e^(i·angle) of angles (1|B, T, P), with an axis for heads: (1|B, 1, T, P) complex64."""
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)[:, None]


def laid_out(turns: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Return turns as `turn` takes them: unchanged if interleaved, cosines and signed sines of all channels if half."""
    if layout == "interleaved":
        return (turns,)
    return torch.cat((turns.real, turns.real), dim=-1), torch.cat((-turns.imag, turns.imag), dim=-1)


def turn(x: Tensor, laid: tuple[Tensor, ...]) -> Tensor:
    """Return x (B, H, T, d), its pairs turned; with fewer turns than pairs, the first channels only."""
    width = laid[0].shape[-1] * (2 if len(laid) == 1 else 1)
    if width < x.shape[-1]:
        return torch.cat((turn(x[..., :width], laid), x[..., width:]), dim=-1) if width else x
    if len(laid) == 1:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * laid[0]).flatten(-2)
    partner = torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1)
    return torch.addcmul(x * laid[0], partner, laid[1])


def turned(q: Tensor, k: Tensor, turns: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return q and k, both turned by turns (1|B, 1|H, T, P)."""
    laid = laid_out(turns, layout)
    return turn(q, laid), turn(k, laid)


def check_pairs(encoding: str, shape: Shape) -> None:
    """Raise UserError if the head width is odd."""
    if shape.head_dim % 2:
        step = 2 * shape.n_heads
        below = shape.d_model - shape.d_model % step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise UserError(
            f"head_dim is {shape.head_dim} (d_model {shape.d_model} / n_heads {shape.n_heads}): "
            f"{encoding} rotates pairs and needs it even; nearest d_model: {nearest}"
        )


# -- encodings ---------------------------------------------------------------------------------------------------------


class Rotary(Encoding):
    """Base of the encodings that rotate q and k by position · `inv_freq`; most differ only in the frequencies."""

    attention_factor: float = 1.0  # multiplies q and k, so the logits by its square; YaRN's temperature
    # Frequencies that replace the base's: (width / 2,) fp64, CPU. Not a buffer: .to(bfloat16) would round it.
    stretched: Tensor | None = None

    def __init__(self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.base = base
        self.layout = layout

    @property
    def width(self) -> int:
        """Number of rotated channels per head."""
        return self.shape.head_dim

    def inv_freq(self, device: torch.device) -> Tensor:
        """Return the radians per position of each pair: (width / 2,) fp64."""
        return machine.sent(frequencies(self.width, self.base) if self.stretched is None else self.stretched, device)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angle of each pair at positions (1|B, T): (1|B, T, width / 2) fp64."""
        places = double(positions)
        return angles(places, self.inv_freq(places.device))

    def rotation(self, positions: Tensor) -> Tensor:
        """Return the complex factors of the pairs at positions (1|B, T): (1|B, 1, T, width / 2) complex64."""
        rotation = turns(self.angles(positions), positions.device)
        return rotation if self.attention_factor == 1 else rotation * self.attention_factor

    def make_tables(self, positions: Tensor) -> Any:
        return laid_out(self.rotation(positions), self.layout)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return turn(q, layer.tables), turn(k, layer.tables)

    def rescaled(self, inv_freq: Tensor, attention_factor: float = 1.0) -> Self:
        """Return the same encoding, sharing its parameters, with other frequencies, (width / 2,) fp64 on the CPU.

        `attention_factor` multiplies q and k, on top of the encoding's own factor.
        """
        copied = self.sharing()
        copied.stretched = inv_freq
        copied.attention_factor = self.attention_factor * attention_factor
        return copied


class PureRotary(Rotary):
    """A rotary encoding that rotates q and k alike, each by its own position only."""


class RoPE(PureRotary):
    """Rotary position embedding (RoPE).

    Turns each pair of query and key channels by an angle proportional to position. Only the difference of two rotations
    remains in a product, so a logit depends on content and distance only:

        <R(m) q, R(n) k> = <q, R(n - m) k>
        R(m) = blockdiag over pairs p of [[cos a, -sin a], [sin a, cos a]],   a = m·base^(-2p/d)

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), arXiv:2104.09864, section
    3.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: transformers Llama (half) and GPT-J (interleaved).
    """


class PartialRoPE(PureRotary):
    """Partial rotary embedding: RoPE on the first channels of each head, while the others carry no position.

        f_p = base^(-2p/r),   r = fraction·d rotated channels

    Source: Wang and Komatsuzaki, "GPT-J-6B" (2021); Black et al., "GPT-NeoX-20B" (2022), arXiv:2204.06745, section 2.1
    (a quarter of the channels).
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: transformers GPT-NeoX (half) and GPT-J (interleaved).
    """

    name = "partial_rope"

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", fraction: float = 0.25
    ) -> None:
        super().__init__(shape, base, layout)
        self.fraction = fraction
        even = 0 <= fraction <= 1 and self.width % 2 == 0
        self.expect(even, "fraction", fraction, f"0 to 1, for an even number of the {shape.head_dim} channels")

    @property
    def width(self) -> int:
        return int(self.fraction * self.shape.head_dim)


class LeRoPE(PureRotary):
    """RoPE with learned frequencies (LeRoPE), shared by all layers and heads.

        f_p = base^(-2p/d) · exp(alpha_p),   alpha_p = 0 at first

    Source: "LeRoPE" (2026), arXiv:2607.10134; the formula is that of transformers' Mistral Large 4, without the scale
    that this model gives its queries.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: transformers Mistral Large 4.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)
        self.alpha = nn.Parameter(torch.zeros(shape.head_dim // 2))

    def inv_freq(self, device: torch.device) -> Tensor:
        inv_freq = super().inv_freq(device)
        if self.stretched is not None:  # an extension has stretched the learned frequencies
            return inv_freq
        return inv_freq * self.alpha.to(device).double().exp()


class GRAPEM(Rotary):
    """Multiplicative GRAPE with commuting planes: RoPE whose frequencies each layer learns for itself.

    A position acts as exp(n·L), where the skew-symmetric L turns the planes of RoPE at learned speeds:

        f_p = base^(-2p/d) · exp(alpha_lp / c),   alpha_lp = 0 at first, for layer l and pair p

    The divisor c makes the optimizer's steps c times smaller. The authors' code learns c·ln f_p and turns the other way
    round, which for a model is the same. Their norm of queries and keys is left out.

    Source: Zhang et al., "Group Representational Position Encoding" (2025), arXiv:2512.07805, section 3, without the
    planes that are learned; c is that of the authors' code.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: the exponential of the generator, by torch.linalg.matrix_exp.
    """

    name = "grape_m"

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", divisor: Positive = 16.0
    ) -> None:
        super().__init__(shape, base, layout)
        self.divisor = divisor
        self.alpha = nn.Parameter(torch.zeros(shape.n_layers, shape.head_dim // 2))

    def make_tables(self, positions: Tensor) -> Tensor:
        return self.angles(positions)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        factors = (self.alpha[layer.index].to(layer.tables.device).double() / self.divisor).exp()
        rotation = turns(layer.tables * factors, q.device) * self.attention_factor
        return turned(q, k, rotation, self.layout)


class DroPE(Encoding):
    """RoPE for most of the training, then no positions (DroPE).

        RoPE turns q and k in the first share `drop_at` of all updates; afterwards q and k stay unchanged

    Evaluation always runs without positions; validation losses logged before the drop are those with RoPE.

    Source: Gelberg et al., "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings" (2025),
    arXiv:2512.12167. There a trained model gets a second, shorter training; the share of 0.1 in one training is ours.
    Without their norm of queries and keys, and without their scale of the softmax for long inputs.
    Beyond training length: defined everywhere; as without positions, attention then spreads over more keys.
    Checked against: torch scaled_dot_product_attention after the drop; before it, it is `rope`.
    """

    def __init__(
        self, shape: Shape, drop_at: Share = 0.9, base: Above1 = 10000.0, layout: Layout = "interleaved"
    ) -> None:
        super().__init__(shape)
        self.drop_at = drop_at
        self.dropped = True
        self.rope = RoPE(shape, base, layout)

    def set_progress(self, done: float) -> None:
        self.dropped = done >= self.drop_at

    def make_tables(self, positions: Tensor) -> Any:
        return None if self.dropped else self.rope.make_tables(positions)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        self.rope.window = self.window
        return (self if self.dropped else self.rope), layer


# -- scalings ----------------------------------------------------------------------------------------------------------


class Spectrum(NamedTuple):
    """The frequencies of a RoPE, and what else a scaling may look at."""

    f: Tensor  # radians per position of each pair, fastest first: (P,) fp64
    base: float
    train_length: int  # L, in tokens
    length: Tensor  # l, of the input: () or, for N sequences, (N, 1), fp64
    expect: Callable[[bool, str, object, str], None]  # refuses an option's value, as `Encoding.expect`
    from_start: bool = False  # scaled from the first step on, as an encoding of its own


class Scaled(NamedTuple):
    """What a scaling makes of a spectrum."""

    f: Tensor  # (P,) or (N, P)
    attention_factor: float = 1.0  # of q and k
    facts: Mapping[str, Any] = MappingProxyType({})  # of an extension, for result rows


Rule = Callable[..., Scaled]


class Fixed(PureRotary):
    """RoPE whose frequencies are scaled from the first step on."""

    rule: ClassVar[Rule]

    def __init__(self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", **options: Any) -> None:
        super().__init__(shape, base, layout)
        vars(self).update(options)
        length = torch.tensor(shape.train_length, dtype=torch.float64)
        spectrum = Spectrum(frequencies(self.width, base), base, shape.train_length, length, self.expect, True)
        self.stretched, self.attention_factor, _ = type(self).rule(spectrum, **options)


class ByLength(Rotary):
    """RoPE whose frequencies are scaled from the first step on, differently by the length of the input."""

    length_dependent = True
    rule: ClassVar[Rule]
    ratio: Tensor | None = None  # of the frequencies of an extension to the trained ones, (P,)

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 10000.0,
        layout: Layout = "interleaved",
        original_length: Count | None = None,
        **options: Any,
    ) -> None:
        super().__init__(shape, base, layout)
        self.original_length = shape.train_length if original_length is None else original_length
        self.options = options
        vars(self).update(options)
        self.attention_factor = self.scaled(torch.ones((), dtype=torch.float64)).attention_factor

    def scaled(self, lengths: Tensor) -> Scaled:
        """Return what the scaling makes of inputs of these lengths, in tokens."""
        f = machine.sent(frequencies(self.width, self.base), lengths.device)
        spectrum = Spectrum(f, self.base, self.original_length, lengths, self.expect, True)
        scaled = type(self).rule(spectrum, **self.options)
        return scaled if self.ratio is None else scaled._replace(f=scaled.f * machine.sent(self.ratio, lengths.device))

    def inv_freq(self, device: torch.device, length: int | None = None) -> Tensor:
        """Return the radians per position of each pair for inputs of a length; None = the training length."""
        return self.scaled(torch.tensor(length or self.shape.train_length, dtype=torch.float64, device=device)).f

    def angles(self, positions: Tensor) -> Tensor:
        return angles(positions, self.scaled(double(positions).amax(-1, keepdim=True) + 1).f[:, None])

    def rescaled(self, inv_freq: Tensor, attention_factor: float = 1.0) -> Self:
        """Return a copy whose frequencies at every length change by the ratio of `inv_freq` to the present ones."""
        copied = super().rescaled(inv_freq, attention_factor)
        ratio = inv_freq / self.inv_freq(CPU)
        copied.ratio = ratio if self.ratio is None else ratio * self.ratio
        return copied


SCALINGS: dict[str, Rule] = {}


def scaling(kind: type[Fixed] | type[ByLength]) -> Callable[[Rule], Rule]:
    """Enter a rule as a scaling, and make the encoding of its name from it, derived from `kind`.

    A rule takes a spectrum and options. The options after a `*` are the extension's alone.
    """

    def enter(rule: Rule) -> Rule:
        options = list(inspect.signature(rule).parameters.values())[1:]
        options = [option for option in options if option.kind is option.POSITIONAL_OR_KEYWORD]
        defaults = {option.name: option.default for option in options}
        common = list(inspect.signature(kind.__init__).parameters.values())[:-1]
        signature = inspect.Signature([*common[:4], *options, *common[4:]])

        def __init__(self: Any, *shape_base_layout: Any, **given: Any) -> None:
            kind.__init__(self, *shape_base_layout, **defaults | given)

        vars(__init__)["__signature__"] = signature
        __init__.__annotations__ = {each.name: each.annotation for each in list(signature.parameters.values())[1:]}
        names = {"name": rule.__name__, "rule": staticmethod(rule), "__doc__": rule.__doc__, "__module__": __name__}
        globals()[f"{rule.__name__}_encoding"] = type(rule.__name__, (kind,), {**names, "__init__": __init__})
        SCALINGS[rule.__name__] = rule
        return rule

    return enter


@scaling(Fixed)
def p_rope(rope: Spectrum, fraction: Annotated[float, Ge(0), Le(1)] = 0.75) -> Scaled:
    """p-RoPE, also called proportional RoPE: the slowest pairs do not turn, and carry content without position.

        f_p = base^(-2p/d) for p < floor(fraction·d/2),   0 otherwise

    Source: Barbero et al., "Round and Round We Go! What makes Rotary Positional Encodings useful?" (2024),
    arXiv:2410.06205, section 6, where 0.75 did best.
    Beyond training length: defined everywhere; the pairs that would reach unseen angles are fewer than RoPE's.
    Checked against: transformers, rope_type `proportional` (Gemma 4).
    """
    return Scaled(torch.where(torch.arange(len(rope.f)) < int(fraction * len(rope.f)), rope.f, 0.0))


@scaling(Fixed)
def hope(rope: Spectrum) -> Scaled:
    """High-frequency rotary position encoding (HoPE): RoPE for pairs that turn once within the training length L.

        f_p = base^(-2p/d) where f_p·L >= 2π,   0 otherwise

    Training shows slower pairs only some of their angles. It is p-RoPE with a share of pairs that follows the training
    length (of 64 channels, 16 pairs at 512 tokens and 9 at 64), and FoPE's frequencies without its mixing.

    Source: Chen et al., "HoPE: A Novel Positional Encoding Without Long-Term Decay for Enhanced Context Awareness and
    Extrapolation" (2024), arXiv:2410.21216; the threshold is that of others' implementations.
    Beyond training length: defined everywhere; every pair that turns has been seen at all angles.
    Checked against: plain loops; p_rope of as many pairs.
    """
    return Scaled(rope.f * (rope.f * rope.train_length >= 2 * math.pi))


@scaling(Fixed)
def pi(rope: Spectrum, factor: AtLeast1 = 4.0) -> Scaled:
    """Position interpolation (PI): RoPE with all frequencies divided by s, the same as positions i/s.

        f_p = base^(-2p/d) / s

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023),
    arXiv:2306.15595; kaiokendev (2023).
    Beyond training length: defined everywhere; angles are unseen from the training length on, as for RoPE.
    Checked against: transformers, rope_type `linear`.
    """
    return Scaled(rope.f / factor)


@scaling(Fixed)
def ntk(rope: Spectrum, factor: AtLeast1 = 4.0) -> Scaled:
    """NTK-aware RoPE: a larger base, so that the fastest pair keeps its speed and the slowest is s times slower.

        b' = b·s^(d/(d-2)),   f_p = b'^(-2p/d) = b^(-2p/d) · s^(-2p/(d-2))

    Source: bloc97, "NTK-Aware Scaled RoPE allows LLaMA models to have extended (8k+) context size" (2023),
    reddit.com/r/LocalLLaMA.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: x-transformers RotaryEmbedding, base_rescale_factor.
    """
    return Scaled(_with_larger_base(rope.f, factor))


@scaling(ByLength)
def dynamic_ntk(rope: Spectrum, factor: AtLeast1 = 1.0) -> Scaled:
    """Dynamic NTK-aware RoPE: plain up to an original length L, then a base that grows with the input's length l.

        f_p = b^(-2p/d) · s^(-2p/(d-2)),   s = max(1, factor·l/L - (factor - 1))

    A longer input changes all its outputs. l is set per sequence; in transformers the longest of a batch sets it for
    all.

    Source: emozilla, "Dynamically Scaled RoPE further increases performance of long context LLaMA with zero
    fine-tuning" (2023), reddit.com/r/LocalLLaMA; the rule is that of transformers' rope_type `dynamic`.
    Beyond training length: defined everywhere; slow pairs keep within the angles of L, others reach some never seen.
    Checked against: transformers, rope_type `dynamic`.
    """
    s = (factor * rope.length / rope.train_length - (factor - 1)).clamp(min=1)
    facts = {} if rope.from_start else {"dynamic": True, "stretch": s.item()}
    return Scaled(_with_larger_base(rope.f, s), facts=facts)


@scaling(Fixed)
def ntk_by_parts(
    rope: Spectrum, factor: AtLeast1 = 4.0, ramp: Ramp = "index", alpha: Positive = 1.0, beta: Positive = 32.0
) -> Scaled:
    """NTK-by-parts: YaRN without its temperature.

        f_p = (1 - g_p)·f0_p + g_p·f0_p/s

    The share g_p is 1 for pairs with at most alpha rotations within the training length L, and 0 for beta or more. In
    between it falls with the pair's index (`ramp: index`, as YaRN's code, transformers and vLLM have it) or its number
    of rotations L·f0_p/2π (`rotations`, as the paper has it); these differ up to threefold. With a beta above L/2π the
    second slows all pairs.

    Source: bloc97 (2023), as told by Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models"
    (2023), arXiv:2309.00071, section 3.2.
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
    Checked against: transformers, rope_type `yarn` without its factor (index); rope_type `llama3` (rotations).
    """
    if rope.from_start:  # an alpha that makes all pairs slow leaves no ramp, nor does a beta that makes none slow
        most, least = (rope.train_length * rope.f[[0, -1]] / (2 * math.pi)).tolist()
        below = f"a number above 0 and below {most:.4g}, the rotations of the fastest pair within train_length"
        rope.expect(alpha < most, "alpha", alpha, below)
        above = f"a number above alpha, {alpha:g}, and above {least:.4g}, the rotations of the slowest pair"
        rope.expect(max(alpha, least) < beta, "beta", beta, above)
    rope.expect(alpha < beta, "beta", beta, f"a number above alpha, {alpha:g}")
    return Scaled(_by_parts(rope, factor, ramp, alpha, beta), facts={"ramp": ramp, "alpha": alpha, "beta": beta})


@scaling(Fixed)
def yarn(
    rope: Spectrum,
    factor: AtLeast1 = 4.0,
    ramp: Ramp = "index",
    alpha: Positive = 1.0,
    beta: Positive = 32.0,
    *,
    attention_factor: Positive | None = None,
) -> Scaled:
    """YaRN: NTK-by-parts, and q and k multiplied by a, which sharpens attention over more keys.

        f_p = (1 - g_p)·f0_p + g_p·f0_p/s,   a = 0.1·ln s + 1,   g_p as for `ntk_by_parts`

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models" (2023), arXiv:2309.00071;
    `ramp: index` as the authors' code, transformers and vLLM have it, `rotations` as the paper has it.
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
    Checked against: transformers, rope_type `yarn` (index); rope_type `llama3` and a plain loop (rotations).
    """
    temperature = 0.1 * math.log(factor) + 1 if attention_factor is None else attention_factor
    return ntk_by_parts(rope, factor, ramp, alpha, beta)._replace(attention_factor=temperature)


@scaling(Fixed)
def llama3(
    rope: Spectrum, factor: AtLeast1 = 8.0, low_freq_factor: Positive = 1.0, high_freq_factor: Positive = 4.0
) -> Scaled:
    """Llama 3.1's frequencies: NTK-by-parts along the number of rotations within the training length L.

        f_p = (1 - g_p)·f0_p/s + g_p·f0_p,   g_p = clip((L·f0_p/2π - low) / (high - low), 0, 1)

    Source: Grattafiori et al., "The Llama 3 Herd of Models" (2024), arXiv:2407.21783; transformers' rope_type `llama3`.
    Llama's own base is 500000.
    Beyond training length: defined everywhere; slow pairs reach unseen angles s times later than RoPE's.
    Checked against: transformers, rope_type `llama3`.
    """
    above = f"a number above low_freq_factor, {low_freq_factor:g}"
    rope.expect(low_freq_factor < high_freq_factor, "high_freq_factor", high_freq_factor, above)
    facts = {"ramp": "rotations", "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
    return Scaled(_by_parts(rope, factor, "rotations", low_freq_factor, high_freq_factor), facts=facts)


@scaling(ByLength)
def longrope(
    rope: Spectrum,
    factor: AtLeast1 = 4.0,
    *,
    long_factor: list[Positive] | None = None,
    short_factor: list[Positive] | None = None,
    attention_factor: Positive | None = None,
) -> Scaled:
    """LongRoPE: one divisor per frequency up to an original length L and another beyond; q and k multiplied by a.

        f_p = f0_p / short_factor_p up to L tokens, f0_p / long_factor_p beyond,   a = sqrt(1 + ln s / ln L)

    The authors search the factors. Without that, `short_factor` is 1 and `long_factor` holds YaRN's divisors (index
    ramp, alpha 1, beta 32). A longer input changes all its outputs. The set is chosen per sequence; in transformers the
    longest of a batch chooses. The paper's uninterpolated first tokens are left out.

    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens" (2024), arXiv:2402.13753;
    Phi-3.
    Beyond training length: defined everywhere; there the frequencies switch, untrained if L is train_length.
    Checked against: transformers, rope_type `longrope`, given the divisors of its rope_type `yarn`.
    """
    rope.expect(rope.train_length >= 2, "original_length", rope.train_length, "at least 2, or null for train_length")
    for option, divisors in (("long_factor", long_factor), ("short_factor", short_factor)):
        fits = divisors is None or len(divisors) == len(rope.f)
        rope.expect(fits, option, divisors, f"{len(rope.f)} numbers, one per pair")
    short = rope.f if short_factor is None else rope.f / torch.tensor(short_factor, dtype=torch.float64)
    long = _by_parts(rope, factor, "index", 1.0, 32.0)
    long = long if long_factor is None else rope.f / torch.tensor(long_factor, dtype=torch.float64)
    beyond = rope.length > rope.train_length
    temperature = math.sqrt(1 + math.log(factor) / math.log(rope.train_length))
    temperature = temperature if attention_factor is None else attention_factor
    facts = {} if rope.from_start else {"divided_by": "long_factor" if beyond else "short_factor"}
    return Scaled(torch.where(beyond, long, short), temperature, facts)


def _with_larger_base(f: Tensor, s: float | Tensor) -> Tensor:
    """Return f_p · s^(-p/(P-1)), the frequencies of the base b·s^(d/(d-2)); s (N, 1) gives (N, P)."""
    return f * s ** (-torch.arange(len(f), dtype=torch.float64, device=f.device) / max(1, len(f) - 1))


def _by_parts(rope: Spectrum, s: float, ramp: Ramp, alpha: float, beta: float) -> Tensor:
    """Return each pair's mixture g·f/s + (1 - g)·f."""
    share = slowness(ramp, rope.f, rope.base, rope.train_length, alpha, beta)
    return rope.f * (share / s + (1 - share))


def slowness(ramp: Ramp, f: Tensor, base: float, train_length: int, alpha: float, beta: float) -> Tensor:
    """Return how far each pair is interpolated: 0 at beta or more rotations in training, 1 at alpha or fewer.

    The index ramp runs from the pair with beta rotations, rounded down, to the pair with alpha, rounded up, and never
    slows the first pair. It counts rotations as plain RoPE of this base makes them, even where frequencies were
    learned. Its ends are clamped to 0 .. 2P-1; others clamp one side of each, so that their ramp reverses when both lie
    off the same end.
    """
    if ramp == "rotations":
        return 1 - ((train_length * f / (2 * math.pi) - alpha) / (beta - alpha)).clamp(0, 1)
    pairs = len(f)
    start, end = (pairs * math.log(train_length / (2 * math.pi * n)) / math.log(base) for n in (beta, alpha))
    low, high = (min(max(place, 0), 2 * pairs - 1) for place in (math.floor(start), math.ceil(end)))
    index = torch.arange(pairs, dtype=torch.float64, device=f.device)
    return ((index - low) / (high - low or 0.001)).clamp(0, 1)
