"""What a configuration of transformers does with positions, by kind of layer.

The library's own model computes it, from its own configuration class: defaults of a
class, old spellings and exceptions of single models are the library's. Which keys are
read is found by changing them.
"""

import copy
import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.rope import Rotary
from posbench.errors import PosbenchError, Undefined, UserError, did_you_mean, unknown
from posbench.rope import traced
from posbench.rope.formulas import by_its_paper
from posbench.rope.imports import library_errors, transformers
from posbench.rope.keys import (
    KNOWN,
    OF_IMAGES,
    SECTIONS,
    Path_,
    Settings,
    changes,
    misspelt,
    of_positions,
    refuse_values,
    rope_sections,
    with_value,
)
from posbench.rope.traced import TracedModel, Window, is_rotary

# types with a factor by which the longest input exceeds the trained length
STRETCHED = ("yarn", "longrope", "llama3", "dynamic")
ALL = "all layers with RoPE"  # of an encoding
TOLERANCE = 1e-3  # largest difference of cosines that count as equal
# the same, relative, of frequencies: the library's are fp32
ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class Rope:
    """The RoPE of one kind of layer."""

    layers: str | None  # the kind, such as full_attention; None: all that have RoPE
    share: str  # how many layers of the model they are, and which
    key: str | None  # of this kind in `rope_parameters`; None if there is one kind
    parameters: Mapping[str, Any]  # as in `rope_parameters`, of this kind alone
    base: float
    train_length: int  # tokens, before any stretching
    longest: int  # the longest input that it is made for, in tokens
    window: Window  # its tokens, and whether it is a chunk
    scale: float  # on queries at position FAR, by their position; 1 without
    # Of inputs of a length: radians per position of each pair, (P,) fp64, and the
    # factor on q and k.
    at: Callable[[int], tuple[Tensor, float]]

    @property
    def type(self) -> str:
        return str(self.parameters["rope_type"])

    @property
    def width(self) -> int:
        """The number of channels of a head that turn."""
        return 2 * len(self.at(self.train_length)[0])


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is read of a configuration of the library."""

    base: TracedModel
    kinds: Mapping[traced.Layers, list[int]]
    ropes: list[Rope]
    others: list[str]  # a line for each kind of layer without RoPE


def configuration(settings: Settings) -> Any:
    """Return the library's configuration of the language model of a config.json.

    Raises UserError if the library has no such kind of model, or refuses a value.
    """
    refuse_values(settings)
    kind = settings.get("model_type")
    classes = transformers().CONFIG_MAPPING
    if not isinstance(kind, str):
        raise UserError(
            "no model_type: expected a config.json of transformers; overrides and GGUF"
            " keys are typed after one, as in config.json rope_parameters.factor=4"
        )
    if kind not in classes:
        raise unknown("model_type", kind, classes, "expected one that transformers has")
    problem = "; ".join([f"transformers refuses this '{kind}'", *misspelt(settings)])
    with library_errors(problem):
        return _of_library(settings)


def _of_library(settings: Settings) -> Any:
    copied = copy.deepcopy(dict(settings))
    for name in SECTIONS:
        if copied.get(name, ...) is None:  # MiMo V2's class cannot read it
            del copied[name]
    config = transformers().CONFIG_MAPPING[copied["model_type"]].from_dict(copied)
    return config.get_text_config()


def ropes(config: Any) -> list[Rope]:
    """Return the RoPE of each kind of layer of a configuration of the library."""
    return reading(config).ropes


def reading(config: Any) -> Reading:
    """Read a configuration of the library.

    Raises Undefined if no layer of the library's model has RoPE, or if the model cannot
    be tried; UserError for an unknown type.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    types = ("default", *ROPE_INIT_FUNCTIONS)
    parameters = getattr(config, "rope_parameters", None)
    for _, part in rope_sections({"rope_parameters": parameters}):
        type_ = str(part.get("rope_type", "default"))
        if type_ not in types:
            raise unknown("rope_type", type_, types)

    with library_errors(f"transformers cannot try a '{config.model_type}'", Undefined):
        base = TracedModel(config).read()
        kinds = traced.kinds_of(config, base)
    names = getattr(config, "layer_types", None) or []
    every_rope = []
    others = []
    for kind, numbers in kinds.items():
        layers = None
        share = f"all {len(numbers)} layers"
        if len(kinds) > 1:
            share = f"{len(numbers)} of {len(base.layers)} layers ({spans(numbers)})"
            if len(names) == len(base.layers):
                own_names = dict.fromkeys(names[number] for number in numbers)
                layers = " and ".join(own_names)
        for rotation in kind.rotations:
            part = base.parameters[rotation]
            at = base.rotations[rotation]
            rope = _rope(config, part, layers, share, kind, rotation[0], at)
            every_rope.append(rope)
        if not kind.rotations:
            text = "no attention"
            if kind.attends:
                text = f"no RoPE{described(kind.window, kind.scale)}"
            others.append(f"{titled(layers, share)}: {text}")
    if not every_rope:
        raise Undefined(
            f"this '{config.model_type}' has no RoPE: no layer hears of it, or no pair"
            " turns"
        )
    every_rope.sort(key=lambda rope: rope.layers or "")
    return Reading(base, kinds, every_rope, others)


def spans(numbers: Sequence[int]) -> str:
    """Return numbers of layers in short: `0-4, 6-10`, or `3, 7 .. 31` in even steps."""
    steps = {b - a for a, b in itertools.pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]} .. {numbers[-1]}"
    parts = []
    start = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        if following != number + 1:
            parts.append(f"{start}" if start == number else f"{start}-{number}")
            start = following
    return ", ".join(parts)


def titled(layers: str | None, share: str) -> str:
    return f"{layers}, {share}" if layers else share


def described(window: Window, scale: float) -> str:
    """Return what else there is to say of attention."""
    text = ""
    if window is not None:
        tokens, is_chunk = window
        noun = "chunks" if is_chunk else "window"
        text += f", {noun} of {tokens:,} tokens"
    if scale != 1:
        text += (
            ", queries scaled by their position, too (times"
            f" {scale:.4g} at {traced.FAR:,})"
        )
    return text


def _rope(
    config: Any,
    part: Mapping[str, Any],
    layers: str | None,
    share: str,
    kind: traced.Layers,
    key: traced.Kind,
    turned_until: Callable[[int], Any],
) -> Rope:
    def at(length: int) -> tuple[Tensor, float]:
        factors = traced.factors(turned_until(length - 1))
        return factors.angle(), float(factors[0].abs())

    longest = _longest(config)
    train_length = longest
    factor = 1.0
    if part["rope_type"] in STRETCHED:
        train_length = part.get("original_max_position_embeddings") or longest
        factor = part.get("factor") or 1.0
    if not train_length:
        raise UserError("no length of a sequence: expected max_position_embeddings")
    if layers and "compressed" in layers:
        layers += " (and a compressed past)"
    return Rope(
        layers=layers,
        share=share,
        key=key,
        parameters=part,
        base=float(part["rope_theta"]),
        train_length=int(train_length),
        longest=max(longest or 0, round(factor * train_length)),
        window=kind.window,
        scale=kind.scale,
        at=at,
    )


def _longest(config: Any) -> int | None:
    """Return the tokens of the longest input, as a configuration has them."""
    return getattr(config, "max_position_embeddings", None)


def findings(settings: Settings, read: Reading) -> tuple[list[str], list[str]]:
    """Return the keys on positions of a config.json that are read, as `key=value`, and
    lines on those that are not: their change moves no frequency, factor, window, layer
    or length.
    """
    moves = _Moves(settings, read)
    taken = []
    unread = []
    of_images = []
    for path, value in of_positions(settings):
        text = ".".join(path)
        name = path[-1]
        if moves(path):
            taken.append(f"{text}={in_short(value)}")
        elif OF_IMAGES.search(name):
            of_images.append(f"{text}={in_short(value)}")
        else:
            is_known = name in KNOWN or len(path) == 1
            unread.append(text + ("" if is_known else did_you_mean(name, KNOWN)))
    lines = []
    if unread:
        kind = settings["model_type"]
        lines.append(f"not read by transformers' '{kind}': {', '.join(unread)}")
    if of_images:
        lines.append(f"nothing for text alone: {', '.join(of_images)}")
    return taken, lines


def in_short(value: Any) -> str:
    """Return a value on one line, a list by what tells it from others."""
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        mean = sum(value) / len(value)
        ends = f"{min(value):g} to {max(value):g}"
        return f"[{len(value)} numbers from {ends}, mean {mean:.7g}]"
    if isinstance(value, list) and value:
        kinds = dict.fromkeys(map(str, value))
        return f"[{len(value)} of {', '.join(kinds)}]"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


class _Moves:
    """Whether another value of a key changes what reaches a layer."""

    def __init__(self, settings: Settings, read: Reading) -> None:
        self.settings = settings
        self.base = read.base
        # the first and the last layer of each kind stand for all
        self.tried = set[int]()
        for numbers in read.kinds.values():
            first, last = numbers[0], numbers[-1]
            self.tried |= {self.base.numbers[first], self.base.numbers[last]}
        lengths = set[int]()
        for rope in read.ropes:
            near = rope.train_length
            lengths |= {near, near + near // 20, rope.longest, 4 * rope.longest}
        self.lengths = sorted(lengths)
        self.turned = self.base.turned(self.base.asked, self.lengths)
        # most kinds give all their rotary modules the configuration itself
        own = [type(rotary.config) for rotary in self.base.rotaries]
        self.is_shared = {*own} == {type(self.base.config)} and not self._turns(
            self.base.config, is_shared=True
        )

    def __call__(self, path: Path_) -> bool:
        """Try other values of a key; one that is refused is read, too: a base beside
        that of a section says the same or is refused.
        """
        value = functools.reduce(operator.getitem, path, self.settings)
        others = changes(value)
        try:
            with library_errors(""):
                if others:
                    refuse_values(with_value(self.settings, path, others[0]))
                configs = [
                    _of_library(with_value(self.settings, path, other))
                    for other in others
                ]
                if {*map(_longest, configs)} - {_longest(self.base.config)}:
                    return True
                if any(self._turns(config, self.is_shared) for config in configs):
                    return True
                # a list may change any layer
                tried = (
                    set(self.base.numbers) if isinstance(value, list) else self.tried
                )
                return any(self._reaches(config, tried) for config in configs[:1])
        except (PosbenchError, ArithmeticError, LookupError, TypeError):
            return True  # operations of torch end in the trial's own frames

    def _turns(self, config: Any, is_shared: bool) -> bool:
        """Return whether rotary modules turn otherwise with a configuration."""
        base = self.base
        if is_shared:
            found = base.turned(base.asked, self.lengths, config)
        else:
            found = TracedModel(config).turned(base.asked, self.lengths)
        pairs = zip(self.turned, found, strict=True)
        return not all(torch.equal(*pair) for pair in pairs)

    def _reaches(self, config: Any, tried: set[int]) -> bool:
        """Return whether the layers that are tried are given other numbers, or have
        other masks.
        """
        base = self.base
        if traced.scale_by_count(config) != traced.scale_by_count(base.config):
            return True
        outputs = {key: base.outputs[key] for key in base.outputs if key not in tried}
        hidden: list[list[Window]] = [[]]
        former = [base.given]
        if len(base.alone) > 1:  # which layers have which of several masks
            window, digests = next(iter(base.alone.items()))
            hidden.append([window])
            former.append(digests)
        for windows, digests in zip(hidden, former, strict=True):
            changed = TracedModel(config, hidden=windows, outputs=outputs).read()
            if [*changed.windows] != [*base.windows]:
                return True
            if any(changed.given[number] != digests[number] for number in tried):
                return True
        return False


def by_paper_if_other(rope: Rope, length: int) -> tuple[Tensor, float] | None:
    """Return the frequencies and the factor that the type's paper gives for inputs of a
    length, where the library's are others.
    """
    f, factor = rope.at(length)
    own_f, own_factor = by_its_paper(
        rope.parameters, len(f), rope.train_length, rope.longest, length
    )
    is_alike = torch.allclose(f, own_f, rtol=10 * ROUNDING, atol=ROUNDING * ROUNDING)
    if is_alike and abs(factor - own_factor) < ROUNDING:
        return None
    return own_f, own_factor


def of_encoding(
    encoding_at: Callable[[int], Rotary],
    parameters: Mapping[str, Any],
    train_length: int,
    longest: int,
) -> Rope:
    """Return the RoPE of an encoding of posbench, which needs no transformers.

    `encoding_at`: returns the encoding for inputs of a length.
    """

    def at(length: int) -> tuple[Tensor, float]:
        encoding = encoding_at(length)
        return encoding.inv_freq(length).detach(), encoding.attention_factor

    encoding = encoding_at(train_length)
    window = None
    if encoding.window:
        window = encoding.window, False
    return Rope(
        layers=None,
        share=ALL,
        key=None,
        parameters=parameters,
        base=encoding.base,
        train_length=train_length,
        longest=longest,
        window=window,
        scale=1.0,
        at=at,
    )


def restore(model: nn.Module) -> None:
    """Reset what earlier inputs left behind: `dynamic` keeps the frequencies of the
    longest one.
    """
    for rotary in filter(is_rotary, model.modules()):
        for name, original in [*rotary.named_buffers()]:
            if not name.endswith("original_inv_freq"):
                continue
            setattr(rotary, name.replace("original_", ""), original.clone())
            longest = name.replace("original_inv_freq", "max_seq_len_cached")
            if hasattr(rotary, longest):
                setattr(rotary, longest, rotary.original_max_seq_len)


def first_difference(first: Rope, second: Rope, length: int) -> tuple[int, int] | None:
    """Return the first position up to a length, and its first pair, whose cosines
    differ by more than TOLERANCE. A pair that one of them lacks stands still there.
    """
    f = first.at(length)[0]
    g = second.at(length)[0]
    n_pairs = max(len(f), len(g))
    f = F.pad(f, (0, n_pairs - len(f)))
    g = F.pad(g, (0, n_pairs - len(g)))
    differing = (f - g).abs() > ROUNDING * torch.maximum(f, g)
    pairs = differing.nonzero()[:, 0]
    if not len(pairs):
        return None
    for start in range(1, length, 4096):
        end = min(start + 4096, length)
        positions = torch.arange(start, end, dtype=torch.float64)[:, None]
        cosines = (positions * f[pairs]).cos() - (positions * g[pairs]).cos()
        differs = cosines.abs() > TOLERANCE  # (positions, pairs)
        if differs.any():
            position = int(differs.any(1).nonzero()[0])
            pair = int(differs[position].nonzero()[0])
            return start + position, int(pairs[pair])
    return None


def bound_by_base(f: Tensor, length: int) -> int:
    """Return the first distance with a negative sum of cosines over the pairs that
    turn: below it, equal tokens beat random ones.

    Source: Men et al., "Base of RoPE Bounds Context Length" (2024), arXiv:2405.14591,
    section 4. At most `length`.
    """
    f = f[f > 0]
    for start in range(0, length, 4096):
        end = min(start + 4096, length)
        distances = torch.arange(start, end, dtype=torch.float64)[:, None]
        negative = (distances * f).cos().sum(1) < 0
        if negative.any():
            return start + int(negative.nonzero()[0])
    return length
