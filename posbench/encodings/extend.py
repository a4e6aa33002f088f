"""Context extension: a trained encoding made to reach beyond its training length,
without further training.

The annotation of a method's first parameter lists the encodings that it supports. A
wrapper applies a method to such inner encodings. A factor s is length / train_length by
default (dynamic: nothing changes up to the training length, except by LaMPE).
"""

import functools
import inspect
import math
import re
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posbench.encodings import ABF_BASE, EXTENSIONS, refuse_extension
from posbench.encodings.absolute import Learned, Sinusoidal
from posbench.encodings.base import Encoding, Extended, Layer, Stretch, expect, part_of
from posbench.encodings.distance import FIRE, ALiBi, T5Bias
from posbench.encodings.layered import Layered, is_among
from posbench.encodings.rope import (
    SCALINGS,
    PartialRoPE,
    PureRotary,
    RoPE,
    Rotary,
    Scaling,
    Spectrum,
    rotate_pairs,
    to_fp64,
)
from posbench.encodings.wrapper import Wrapper
from posbench.errors import OptionError, Undefined
from posbench.options import (
    Above1,
    AtLeast1,
    Count,
    Fraction,
    Layout,
    Natural,
    Positive,
    as_typed,
    checked,
)

Pairs = list[tuple[Tensor, Tensor]]  # queries and keys, or their positions


class Method(typing.NamedTuple):
    """A way to extend an encoding: `apply(encoding, stretch, **options)` gives the
    extended one and its facts.
    """

    name: str
    title: str
    source: str
    accepts: Any  # the class of encodings, or the union of classes, that it can extend
    options: dict[str, Any]  # with their defaults
    hints: dict[str, Any]  # annotations of the options
    apply: Callable[..., Extended]


@functools.cache
def methods() -> dict[str, Method]:
    """Return all methods by name."""
    return {
        name: _method(name, SCALINGS.get(name) or globals()[name])
        for name in EXTENSIONS
    }


def _method(name: str, function: Callable[..., Any]) -> Method:
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty}
    accepts = next(iter(hints.values()))
    apply = function
    if accepts is Spectrum:
        accepts = Rotary
        apply = functools.partial(_scaled, function)
        # it follows the length by itself
        if "factor" in options and name != "dynamic_ntk":
            options["factor"] = None
            hints["factor"] = AtLeast1 | None

    title, _, text = inspect.cleandoc(function.__doc__ or "").partition("\n\n")
    title = " ".join(title.split()).rstrip(".")
    source = re.split(r"\nBeyond|\n\n", text.partition("Source: ")[2])[0]
    source = " ".join(source.split())
    return Method(name, title, source, accepts, options, hints, apply)


def methods_of(encoding: Encoding) -> list[str]:
    """Return the names of the methods that can extend an encoding or one of its inner
    encodings.
    """
    if isinstance(encoding, Wrapper):
        names = set[str]()
        for inner in encoding.inner_encodings:
            names.update(methods_of(inner))
        return [name for name in methods() if name in names]
    return [
        method.name
        for method in methods().values()
        if isinstance(encoding, method.accepts)
    ]


def refuse_method(encoding: Encoding, method: str) -> None:
    """Raise Undefined for a method that an encoding does not have."""
    possible = methods_of(encoding)
    if method not in possible:
        raise Undefined(
            f"'{encoding.name}' has no extension '{method}': it supports"
            f" {', '.join(possible) or 'none'}"
        )


def extend_encoding(
    encoding: Encoding,
    method: str,
    length: int,
    train_length: int,
    /,  # options of these names are unknown ones
    layers: str = "all",
    **options: Any,
) -> Extended:
    """Return a trained encoding, extended to `length` tokens with the same parameters,
    and facts for result rows. `layers` are those of a pattern that it changes.
    """
    refuse_extension(method)
    entry = methods()[method]
    options = checked(options, entry.hints, entry.options, method)
    is_among({}, str(layers))  # refuses other names
    refuse_method(encoding, method)
    stretch = Stretch(train_length, length)
    if isinstance(encoding, Wrapper):
        # inner encodings that do not support the method stay as they are
        inners = encoding.inner_encodings
        extended: dict[str, Any] = {}  # facts
        within = layers
        for number, inner in enumerate(inners):
            if isinstance(encoding, Layered):
                within = "all"
                if not is_among(encoding.entries[number], layers):
                    continue
            if method in methods_of(inner):
                reached = encoding.reached(inner, stretch)
                lengths = (reached.length, reached.train_length)
                inners[number], extended[f"{inner.name} {number}"] = extend_encoding(
                    inner, method, *lengths, within, **options
                )
        if not extended:
            raise Undefined(
                f"'{encoding.name}' has no {layers} layers that '{method}' extends"
            )
        dynamic = any(facts["dynamic"] for facts in extended.values())
        return encoding.around(inners), {"dynamic": dynamic, "extended": extended}
    if layers != "all":
        raise Undefined(
            f"layers={layers} is for patterns of layers, such as 'layered':"
            f" '{encoding.name}' has none"
        )
    try:
        copied, facts = entry.apply(encoding, stretch, **entry.options | options)
    except OptionError as error:
        raise error.under("extension") from None
    copied.name, copied.window = encoding.name, encoding.window
    return copied, facts


# -- rotary encodings with other frequencies, and everything else (a decay, a share of
# the channels) as trained


def _scaled(
    rule: Callable[..., Scaling], rope: Rotary, stretch: Stretch, **options: Any
) -> Extended:
    """Return a rotary encoding whose trained (perhaps learned) frequencies a rule has
    changed, and facts.
    """
    dynamic = rule.__name__ == "dynamic_ntk"
    if "factor" in options:
        dynamic = dynamic or options["factor"] is None
        options["factor"], _ = stretch.factor(options["factor"])
    before = rope.inv_freq()
    length = torch.tensor(stretch.length, dtype=torch.float64)
    spectrum = Spectrum(before, rope.base, stretch.train_length, length)
    after, attention_factor = rule(spectrum, **options)
    facts = {
        "dynamic": dynamic,
        "attention_factor": attention_factor,
        "inv_freq_before": _rounded(before),
        "inv_freq_after": _rounded(after),
    }
    return rope.rescaled(after, attention_factor), options | facts


def _rounded(values: Tensor) -> list[float]:
    """Return numbers with six digits."""
    return [float(f"{number:.6g}") for number in values.tolist()]


def abf(rope: Spectrum, base: Above1 = float(ABF_BASE)) -> Scaling:
    """Adjusted base frequency: a larger base at every length; meant for further
    training, here used without it.

    Source: Xiong et al., "Effective Long-Context Scaling of Foundation Models" (2023),
    arXiv:2309.16039, section 4.1.
    """
    pairs = len(rope.f)
    p = torch.arange(pairs, dtype=torch.float64)
    return rope.f * (base / rope.base) ** (-p / pairs), 1.0


def clipped_rope(rope: Spectrum, pairs: Natural | None = None) -> Scaling:
    """Clipped RoPE (its authors' "CoPE"): pairs that turn less than once in training
    are slowed, the last to a halt.

    The factor falls as half a cosine wave over the last `pairs` pairs, by default those
    that turn less than once. A single pair keeps its speed.

    Source: Li et al., "CoPE: Clipped RoPE as A Scalable Free Lunch for Long Context
    LLMs" (2026), arXiv:2602.05258.
    """
    slow = pairs
    if slow is None:
        turns_less = 2 * math.pi / rope.f > rope.train_length
        slow = int(turns_less.sum())
    expect(
        slow <= len(rope.f), "pairs", slow, f"a number of pairs from 0 to {len(rope.f)}"
    )
    wave = 0.5 + 0.5 * torch.linspace(0, math.pi, slow, dtype=torch.float64).cos()
    ones = torch.ones(len(rope.f) - slow, dtype=torch.float64)
    return rope.f * torch.cat((ones, wave)), 1.0


def misread(
    rope: RoPE | PartialRoPE,
    stretch: Stretch,
    layout: Layout | None = None,
    share: Fraction | None = None,
    attention_factor: Positive = 1.0,
) -> Extended:
    """RoPE as a faulty engine reads it: other pairs, another share of the channels, a
    factor on q and k.

    `abf` reads another base; `pi` and `yarn` a scaling that is not there.

    Source: threads about engines, in docs/faults.md; for `share` Black et al. (2022),
    arXiv:2204.06745, section 2.1.
    """
    copied = rope.sharing()
    copied.layout = layout or rope.layout
    copied.attention_factor = rope.attention_factor * attention_factor
    if share is not None:
        is_geometric = isinstance(rope, PartialRoPE) or rope.frequencies == "geometric"
        expect(is_geometric, "share", share, "none, as `frequencies` are not geometric")
        head_dim = rope.shape.head_dim
        copied.width = int(share * head_dim)
        expect(
            copied.width >= 2 and copied.width % 2 == 0,
            "share",
            as_typed(share),
            f"an even number of the {head_dim} channels, at least 2",
        )
    facts = {
        "layout": copied.layout,
        "turning": copied.width,
        "attention_factor": attention_factor,
        "dynamic": False,
    }
    return copied, facts


# -- rotary encodings with more score matrices: near pairs keep their logits, far ones
# get known distances


class FarPairs(Encoding):
    """A rotary encoding with other positions, which `far` returns, for pairs that are
    at least as far apart as each of `starts` says.
    """

    def __init__(
        self,
        rope: PureRotary,
        starts: list[int],
        far: Callable[[Tensor], Pairs],
        chunk: int | None = None,
    ) -> None:
        super().__init__(rope.shape)
        self.rope, self.starts, self.far = rope, starts, far
        # if given, how far apart counts in chunks of this size
        self.chunk = chunk

    def make_tables(self, positions: Tensor) -> Any:
        return self.rope.make_tables(positions)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Pairs:
        far = []
        for of_queries, of_keys in self.far(to_fp64(layer.positions)):
            far.append((self._rotated(q, of_queries), self._rotated(k, of_keys)))
        return far

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        tables = self.rope.make_tables(positions).to(x.device)
        return rotate_pairs(x, tables, self.rope.layout)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return self.rope.rotate(q, k, layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        apart = layer.distance
        if self.chunk:
            i = layer.positions[:, layer.rows, None]
            apart = i // self.chunk - (i - layer.distance) // self.chunk
        for start, (of_q, of_k) in zip(self.starts, layer.state, strict=True):
            of_q = part_of(of_q, layer.rows)
            of_k = part_of(of_k, layer.keys)
            far = of_q @ of_k.mT * self.logit_scale
            logits = torch.where(apart[:, None] >= start, far, logits)
        return logits


def rerope(rope: PureRotary, stretch: Stretch, window: Count | None = None) -> Extended:
    """ReRoPE: distances above `window`, by default a quarter of the training length,
    count as `window`.

    Source: Su, "ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope,
    without its log n scale.
    """
    w = window or max(1, stretch.train_length // 4)

    def far(i: Tensor) -> Pairs:
        return [(torch.full_like(i, w), torch.zeros_like(i))]

    return FarPairs(rope, [w], far), {"window": w, "dynamic": False}


def string(
    rope: PureRotary,
    stretch: Stretch,
    shift: Count | None = None,
    local: Count | None = None,
) -> Extended:
    """STRING: distances of `shift` and more, by default a third of the training length,
    count from `local` on.

    Source: An et al. (2024), arXiv:2410.18745, section 4, where `local` is 128; here a
    quarter of the shift if less.
    """
    s = shift or max(1, stretch.train_length // 3)
    w = local or min(128, max(1, s // 4))

    def far(i: Tensor) -> Pairs:
        return [(i - s + w, i)]

    return FarPairs(rope, [s], far), {"shift": s, "local": w, "dynamic": False}


def leaky_rerope(
    rope: PureRotary,
    stretch: Stretch,
    window: Count | None = None,
    k: AtLeast1 | None = None,
) -> Extended:
    """Leaky ReRoPE: beyond `window`, k tokens count as one; the default k keeps all
    distances within those trained.

    Source: Su, "Leaky ReRoPE" (2023), kexue.fm/archives/9708, github.com/bojone/rerope.
    """
    w = window or max(1, stretch.train_length // 4)
    slow = k or 1.0  # tokens that count as one
    if k is None and stretch.length > stretch.train_length:
        last = stretch.train_length - 1
        expect(w < last, "window", w, f"less than {last}, or k given as well")
        slow = (stretch.length - 1 - w) / (last - w)

    def far(i: Tensor) -> Pairs:
        return [((i + w * (slow - 1)) / slow, i / slow)]

    return FarPairs(rope, [w], far), {"window": w, "k": slow, "dynamic": k is None}


def self_extend(
    rope: PureRotary,
    stretch: Stretch,
    window: Count | None = None,
    group: Count | None = None,
) -> Extended:
    """Self-Extend: beyond `window`, positions count in groups; the default size keeps
    distances within those trained.

    Source: Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without
    Tuning" (2024), arXiv:2401.01325.
    """
    w = window or max(1, stretch.train_length // 4)
    size = group or 1
    if group is None and stretch.length > stretch.train_length:
        expect(
            w < stretch.train_length,
            "window",
            w,
            f"less than {stretch.train_length}, or group given as well",
        )
        last = stretch.length - 1
        while last // size + w - w // size >= stretch.train_length:
            size += 1

    def far(i: Tensor) -> Pairs:
        return [(i // size + (w - w // size), i // size)]

    facts = {"window": w, "group": size, "dynamic": group is None}
    return FarPairs(rope, [w], far), facts


def dual_chunk(
    rope: PureRotary, stretch: Stretch, chunk: Count | None = None
) -> Extended:
    """Dual chunk attention: true distances within a chunk and near its start,
    train_length - 1 to all far keys.

    A chunk holds 3/4 of the training length L. Key n has the position n mod chunk. For
    keys of the chunk before, a query at place r of its chunk has the position min(r +
    chunk, L - 1); for earlier keys it has L - 1.

    Source: An et al. (2024), arXiv:2402.17463, section 3, with its L - 1; the authors'
    code has L.
    """
    longest = stretch.train_length
    size = chunk or max(1, 3 * longest // 4)
    expect(size <= longest, "chunk", size, f"from 1 to the training length {longest}")

    def far(i: Tensor) -> Pairs:
        place = i % size
        of_chunk_before = (place + size).clamp(max=longest - 1)
        of_earlier_ones = torch.full_like(i, longest - 1)
        return [(of_chunk_before, place), (of_earlier_ones, place)]

    facts = {"chunk": size, "window": longest - size, "dynamic": False}
    return FarPairs(rope, [1, 2], far, chunk=size), facts


def jet_long(
    rope: PureRotary, stretch: Stretch, window: Count | None = None
) -> Extended:
    """Jet-Long: beyond `window`, positions count in groups of ceil(length / L).

    L is the training length, up to which nothing changes. Distances up to `window`, by
    default L/16, are true. Self-Extend adds a shift to far distances; here they begin
    again near 0.

    Source: Tang et al., "Jet-Long: Efficient Long-Context Extension with Dynamic
    Bifocal RoPE" (2026), arXiv:2607.07740; L/16 is its code's 2,048 of 32,768.
    """
    w = window or max(1, stretch.train_length // 16)
    size = math.ceil(stretch.length / stretch.train_length)

    def far(i: Tensor) -> Pairs:
        return [(i // size, i // size)]

    return FarPairs(rope, [w + 1], far), {"window": w, "group": size, "dynamic": True}


def lampe(
    rope: PureRotary,
    stretch: Stretch,
    window: Count | None = None,
    tail: Count | None = None,
    mapped: Count | None = None,
) -> Extended:
    """LaMPE: true distances up to `window`, farther positions squeezed to `mapped`.

        distance(i, j) = i - j                            up to `window`
                         i - j - b                        from length - `tail` on
                         floor(c·i) - floor(c·j) + a      between

    c = mapped / (length - 1); a and b join the parts. Below the training length L,
    `mapped` is 3/16 of L; from L on it is a logistic function of length. Its authors
    fit that to each model; the default is their fit of Llama 3 in units of L. `window`
    is L/16 and `tail` L/40. Inputs shorter than two windows keep all distances.

    Source: Zhang et al., "LaMPE: Length-aware Multi-grained Positional Encoding for
    Adaptive Long-context Scaling Without Training" (2025), arXiv:2508.02308, as in its
    code. There q and k are multiplied by 1.07 as well, and `tail` ends with a group.
    Here inputs with nothing to squeeze, c of at least 1, keep all distances, too.
    """
    longest = stretch.train_length
    last = stretch.length - 1
    w = window or max(1, longest // 16)
    if mapped:
        m = mapped
    elif stretch.length < longest:
        m = int(0.1875 * longest)
    else:  # the authors' fit
        growth = 0.859595 * stretch.length / longest - 2.466638
        m = int(0.757374 * longest / (1 + math.exp(-growth)))
    if stretch.length < 2 * w or last <= m:
        return rope.sharing(), {"window": w, "mapped": None, "dynamic": True}
    a = w - 1 - m * w // last

    tail_start = max(w + 1, stretch.length - (tail or max(1, longest // 40)))
    before = tail_start - 1
    b = before - m * before // last - a

    def far(i: Tensor) -> Pairs:
        squeezed = m * i // last
        return [(squeezed + a, squeezed), (i - b, i)]

    facts = {"window": w, "tail_start": tail_start, "mapped": m, "dynamic": True}
    return FarPairs(rope, [w + 1, tail_start], far), facts


class Squeezed(Encoding):
    """An encoding that gets every position and every distance divided by `factor`."""

    def __init__(self, inner: Encoding, factor: float) -> None:
        super().__init__(inner.shape)
        self.inner, self.factor = inner, factor
        self.leave_out(*self.overridden - inner.hooks)

    def token_dim(self) -> int:
        return self.inner.token_dim()

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        squeezed = to_fp64(positions) / self.factor
        return self.inner.embed(x, squeezed.to(positions.device), ids)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        return self.inner.distance_bias(distance / self.factor, layer)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        squeezed = layer.replace(positions=layer.positions / self.factor)
        return self.inner.bias(q, k, squeezed)


def alibi_pi(
    alibi: ALiBi, stretch: Stretch, factor: AtLeast1 | None = None
) -> Extended:
    """ALiBi with its slopes divided by s, which is position interpolation.

    Source: Chen et al. (2023), arXiv:2306.15595, applied to Press et al. (2021),
    arXiv:2108.12409.
    """
    s, facts = stretch.factor(factor)
    return Squeezed(alibi, s), facts


def interpolate(
    encoding: Sinusoidal | Learned | T5Bias | FIRE,
    stretch: Stretch,
    factor: AtLeast1 | None = None,
) -> Extended:
    """Positions and distances divided by s; the table of `learned` stretched linearly
    over s times its length.

    Source: Chen et al. (2023), arXiv:2306.15595; for tables, Dosovitskiy et al. (2020),
    arXiv:2010.11929, section 3.2.
    """
    s, facts = stretch.factor(factor)
    if isinstance(encoding, Learned):
        longer = encoding.sharing()
        longer.max_length = math.ceil(s * stretch.train_length)
        return longer, facts
    return Squeezed(encoding, s), facts
