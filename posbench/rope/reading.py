"""The frequencies that a configuration of transformers gives, by kind of layer.

The library's own model computes them, from its own configuration class: defaults of a
class, old spellings and exceptions of single models are the library's.
"""

import copy
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.rope import Rotary
from posbench.errors import Undefined, UserError, did_you_mean, unknown
from posbench.rope import trial
from posbench.rope.imports import library_errors, transformers
from posbench.rope.trial import Window, is_rotary

Settings = Mapping[str, Any]  # the content of a config.json
SECTIONS = ("rope_scaling", "rope_parameters")
# types with a factor by which the longest input exceeds the trained length
STRETCHED = ("yarn", "longrope", "llama3", "dynamic")
# keys of single models, which `RopeParameters` of the library lacks
_BESIDE = (
    "type",
    "alpha",
    "interleaved",
    "mrope_interleaved",
    "max_position_embeddings",
    "llama_4_scaling_beta",
    "short_mscale",
    "long_mscale",
)
# keys beside the sections whose values are numbers: rope_theta, rotary_pct, ...
_NUMBER = re.compile("(rope|rotary).*(theta|base|factor|pct|dim)")
ALL = "all layers with RoPE"  # of an encoding
TOLERANCE = 1e-3  # largest difference of cosines that count as equal
# the same, relative, of frequencies: the library's are fp32
ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True)
class Rope:
    """The RoPE of one kind of layer."""

    layers: str | None  # the kind, such as full_attention; None: all that have RoPE
    share: str  # how many layers of the model they are
    key: str | None  # of this kind in `rope_parameters`; None if there is one kind
    parameters: Mapping[str, Any]  # as in `rope_parameters`, of this kind alone
    base: float
    train_length: int  # tokens, before any stretching
    longest: int  # the longest input that it is made for, in tokens
    window: Window  # its tokens, and whether it is a chunk
    is_scaled: bool  # queries are scaled by their position, too
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


def language_part(settings: Settings) -> Settings:
    """Return the part of a config.json on the language model: a section if the model
    has several parts, else all.
    """
    return settings.get("text_config") or settings


def configuration(settings: Settings) -> Any:
    """Return the library's configuration of the language model of a config.json.

    Raises UserError if the library has no such kind of model, or refuses a value.
    """
    kind = settings.get("model_type")
    classes = transformers().CONFIG_MAPPING
    if kind not in classes:
        raise unknown(
            "model_type", str(kind), classes, "expected one that transformers has"
        )
    problem = "; ".join([f"transformers refuses this '{kind}'", *remarks(settings)])
    with library_errors(problem):
        config = classes[kind].from_dict(copy.deepcopy(dict(settings)))
        return config.get_text_config()


def remarks(settings: Settings) -> list[str]:
    """Return a line for each key on RoPE that transformers does not read.

    Raises UserError for a text in place of a number, which the library would compute
    with.
    """
    from transformers.modeling_rope_utils import RopeParameters

    text = language_part(settings)
    known = (*RopeParameters.__annotations__, *_BESIDE)
    for key, value in text.items():
        if _NUMBER.search(key):
            _refuse_text(key, value)

    lines = []
    for path, part in rope_sections(text):
        for key, value in part.items():
            if key not in known:
                lines.append(f"{path}.{key} is not read{did_you_mean(key, known)}")
            elif key not in ("rope_type", "type"):
                _refuse_text(f"{path}.{key}", value)
    return lines


def _refuse_text(key: str, value: Any) -> None:
    if isinstance(value, str):
        raise UserError(f"{key} is '{value}': expected a number")


def rope_sections(text: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield each section on RoPE, or its parts by kind of layer, with its path."""
    for name in SECTIONS:
        section = text.get(name) or {}
        is_nested = False
        for kind, part in section.items():
            if isinstance(part, Mapping):
                is_nested = True
                yield f"{name}.{kind}", part
        if section and not is_nested:
            yield name, section


def unread(settings: Settings, config: Any) -> list[str]:
    """Return a line for each key beside the sections that the library's class keeps,
    but nowhere names.
    """
    sources = ""
    for cls in type(config).__mro__[:-1]:
        sources += inspect.getsource(sys.modules[cls.__module__])
    lines = []
    for key in language_part(settings):
        is_unread = key in vars(config) and key not in sources
        if is_unread and re.search("rope|rotary|ntk|dual_chunk", key):
            lines.append(f"{key} is not read by transformers' '{config.model_type}'")
    return lines


def ropes(config: Any) -> list[Rope]:
    """Return the RoPE of each kind of layer of a configuration of the library."""
    return layers_of(config)[0]


def layers_of(config: Any) -> tuple[list[Rope], list[str]]:
    """Return the RoPE of each kind of layer of a configuration of the library, and a
    line for each kind without.

    Raises Undefined if no layer of the library's model has RoPE, or if the model cannot
    be tried; UserError for an unknown type.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    types = ("default", *ROPE_INIT_FUNCTIONS)
    parameters = getattr(config, "rope_parameters", None)
    for _, part in rope_sections({"rope_parameters": parameters}):
        if part["rope_type"] not in types:
            raise unknown("rope_type", part["rope_type"], types)

    with library_errors(f"transformers cannot try a '{config.model_type}'", Undefined):
        base = trial.Trial(config)
        kinds = trial.kinds_of(config, base)
    names = getattr(config, "layer_types", None) or []
    every_rope = []
    others = []
    for kind, numbers in kinds.items():
        layers = None
        share = f"all {len(numbers)} layers"
        if len(kinds) > 1:
            share = f"{len(numbers)} of {len(base.layers)} layers"
            if len(names) == len(base.layers):
                own_names = dict.fromkeys(names[number] for number in numbers)
                layers = " and ".join(own_names)
        for rotation in kind.rotations:
            part = base.parameters[rotation]
            at = base.rotations[rotation]
            rope = _rope(config, part, layers, share, kind, rotation[0], at)
            every_rope.append(rope)
        if not kind.rotations:
            others.append(f"{titled(layers, share)}: {_without_rope(kind)}")
    if not every_rope:
        raise trial.no_rope(config)
    return sorted(every_rope, key=lambda rope: rope.layers or ""), others


def titled(layers: str | None, share: str) -> str:
    return f"{layers}, {share}" if layers else share


def _without_rope(kind: trial.Layers) -> str:
    if not kind.attends:
        return "no attention"
    return f"no RoPE{described(kind.window, kind.is_scaled)}"


def described(window: Window, is_scaled: bool) -> str:
    """Return what else there is to say of attention."""
    text = ""
    if window is not None:
        tokens, is_chunk = window
        noun = "chunks" if is_chunk else "window"
        text += f", {noun} of {tokens:,} tokens"
    if is_scaled:
        text += ", queries scaled by their position, too"
    return text


def _rope(
    config: Any,
    part: Mapping[str, Any],
    layers: str | None,
    share: str,
    kind: trial.Layers,
    key: trial.Kind,
    turned_until: Callable[[int], Any],
) -> Rope:
    def at(length: int) -> tuple[Tensor, float]:
        factors = trial.factors(turned_until(length - 1))
        return factors.angle(), float(factors[0].abs())

    longest = getattr(config, "max_position_embeddings", None)
    train_length = part.get("original_max_position_embeddings") or longest
    if not train_length:
        raise UserError("no length of a sequence: expected max_position_embeddings")
    factor = 1.0
    if part["rope_type"] in STRETCHED and part.get("factor"):
        factor = part["factor"]
    return Rope(
        layers=layers,
        share=share,
        key=key,
        parameters=part,
        base=float(part["rope_theta"]),
        train_length=train_length,
        longest=max(longest or 0, round(factor * train_length)),
        window=kind.window,
        is_scaled=kind.is_scaled,
        at=at,
    )


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
        is_scaled=False,
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
    """Return the first distance with a negative sum of cosines over pairs: below it,
    equal tokens beat random ones.

    Source: Men et al., "Base of RoPE Bounds Context Length" (2024), arXiv:2405.14591,
    section 4. At most `length`.
    """
    for start in range(0, length, 4096):
        end = min(start + 4096, length)
        distances = torch.arange(start, end, dtype=torch.float64)[:, None]
        negative = (distances * f).cos().sum(1) < 0
        if negative.any():
            return start + int(negative.nonzero()[0])
    return length
