"""The RoPE that a config.json asks for, by kind of layer, as each engine reads it.

Engines differ in the keys that they read and in what these mean. The facts here are
from their code in autumn 2026: transformers 5.23, 4.57 and 4.55 (modeling_rope_utils),
vLLM 0.25 and SGLang (rotary_embedding), llama.cpp (conversion).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posbench.encodings.rope import SCALINGS, Spectrum, frequencies
from posbench.errors import UserError, did_you_mean
from posbench.huggingface.load import LENGTHS, TESTED, language_part

Settings = Mapping[str, Any]  # the content of a config.json
ALL = "all layers"
NOPE = "none"  # the type of layers without positions
# kinds of layers without queries and keys
_NO_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent")
_LOCAL_ALONE = (
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone4_5",
    "exaone_moe",
    "afmoe",
    "flint",
    "kolibri1",
)
TOLERANCE = 1e-3  # largest difference of cosines that count as equal
_BETAS = {"beta_slow": 1.0, "beta_fast": 32.0}
MSCALE = ("mscale", "mscale_all_dim")
_ATTENTION = ("attention_factor", "attn_factor", *MSCALE)
# The keys of each type, the required ones first, and the number of required keys.
KEYS: dict[str, tuple[tuple[str, ...], int]] = {
    "default": ((), 0),
    "linear": (("factor",), 1),
    "dynamic": (("factor", "alpha"), 1),
    "yarn": (
        (
            "factor",
            "original_max_position_embeddings",
            *_BETAS,
            "truncate",
            *_ATTENTION,
        ),
        1,
    ),
    "llama3": (
        (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
        3,
    ),
    "longrope": (
        (
            "short_factor",
            "long_factor",
            "original_max_position_embeddings",
            "attention_factor",
            "factor",
        ),
        2,
    ),
    "proportional": (("factor",), 0),
}
# types with a key for the trained length; Llama 3.1 was trained beyond it
STRETCHED = ("yarn", "longrope", "llama3")
# Keys of any type that do not change frequencies: they are for several axes, or for the
# model's own attention.
BESIDE = (
    "mrope_section",
    "mrope_interleaved",
    "llama_4_scaling_beta",
    "short_mscale",
    "long_mscale",
)
OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *BESIDE)
# Kinds of models whose layers with windows have plain RoPE, and its base; None: the
# base of the other layers.
LOCAL: dict[str, float | None] = {
    "gemma3_text": 10_000.0,
    "gemma3n_text": 10_000.0,
    "olmo3": None,
}
OTHER_NAMES = {"su": "longrope", "deepseek_yarn": "yarn", "mrope": "default"}


class Engine(NamedTuple):
    """How an engine reads a config.json."""

    # where it looks for RoPE: it reads the first section that exists
    sections: tuple[str, ...]
    unread: tuple[str, ...] = ()  # keys of a section that it ignores
    # keys that multiply YaRN's own factor on queries and keys
    multiplies: tuple[str, ...] = ()
    # it keeps the frequencies of the longest input for all inputs
    one_length: bool = False
    without: tuple[str, ...] = ()  # types that it reads as `default`


_EITHER = ("rope_parameters", "rope_scaling")
ENGINES = {
    "transformers 5": Engine(("rope_scaling", "rope_parameters"), ("attn_factor",)),
    "transformers 4": Engine(
        ("rope_scaling",), ("attn_factor",), without=("proportional",)
    ),
    "transformers 4.55": Engine(
        ("rope_scaling",), ("attn_factor",), without=("proportional",)
    ),
    "vLLM 0.25": Engine(
        _EITHER, ("attention_factor", *MSCALE), ("attn_factor",), one_length=True
    ),
    "SGLang": Engine(_EITHER, ("attention_factor",), ("attn_factor",), one_length=True),
    "llama.cpp": Engine(
        _EITHER, (*_ATTENTION, "truncate"), one_length=True, without=("dynamic",)
    ),
}


class Rope(NamedTuple):
    """The RoPE of one kind of layer."""

    layers: str  # the kind, such as full_attention
    number: int  # the number of layers of this kind
    head_dim: int
    width: int  # channels of a head that turn
    type: str  # a key of KEYS, or NOPE
    base: float
    options: Mapping[str, Any]
    train_length: int  # tokens, before any stretching
    longest: int  # the model's longest input in tokens, by its configuration
    window: int | None
    # all inputs have the frequencies of this length; None: of their own
    fixed_length: int | None = None

    def at(self, length: int) -> tuple[Tensor, float]:
        """Return the radians per position of each pair for inputs of a length, (P,)
        fp64, and the factor on q and k.
        """
        f, options = frequencies(self.width, self.base), dict(self.options)
        length = self.fixed_length or length
        if self.type in (NOPE, "default"):
            return f, 1.0
        if self.type == "yarn":
            share = self._ramp()
            return (
                f * (share / options["factor"] + 1 - share),
                options["attention_factor"],
            )
        if self.type == "proportional":
            turning = torch.arange(len(f)) < int(options["share"] * self.head_dim // 2)
            return torch.where(turning, f, 0.0) / options.get("factor", 1.0), 1.0
        rule = SCALINGS[
            {"linear": "pi", "dynamic": "dynamic_ntk"}.get(self.type, self.type)
        ]
        return rule(
            Spectrum(
                f,
                self.base,
                self.train_length,
                torch.tensor(length, dtype=torch.float64),
            ),
            **options,
        )

    def _ramp(self) -> Tensor:
        """Return how far YaRN slows each pair, from 0 to 1: (P,)."""
        limits = [
            self.width
            * math.log(self.train_length / (2 * math.pi * self.options[beta]))
            / (2 * math.log(self.base))
            for beta in ("beta_fast", "beta_slow")
        ]
        if self.options["truncate"]:
            limits = [math.floor(limits[0]), math.ceil(limits[1])]
        low, high = max(limits[0], 0), min(limits[1], self.width - 1)
        return (
            (torch.arange(self.width // 2, dtype=torch.float64) - low)
            / (high - low or 0.001)
        ).clamp(0, 1)


def ropes(settings: Settings, engine: str = "transformers 5") -> list[Rope]:
    """Return the RoPE of each kind of layer, as an engine reads a configuration.

    Raises UserError if the width of a head, the length or a required key is missing, or
    if the type is unknown.
    """
    text = language_part(settings)
    return [_rope(text, engine, *kind, count) for kind, count in _layers(text).items()]


def section_of(text: Settings, engine: str, layers: str) -> Settings:
    """Return the section that an engine reads for a kind of layers; empty if it finds
    none.
    """
    section: Settings = next(
        (text[name] for name in ENGINES[engine].sections if text.get(name)), {}
    )
    return section[layers] if isinstance(section.get(layers), Mapping) else section


def unread(engine: str, text: Settings) -> tuple[str, ...]:
    """Return the keys of a section that an engine ignores; in DeepSeek's attention
    every engine reads MSCALE.
    """
    keys = ENGINES[engine].unread
    return (
        tuple(key for key in keys if key not in MSCALE)
        if text.get("qk_rope_head_dim")
        else keys
    )


def _layers(text: Settings) -> Counter[tuple[str, bool]]:
    """Return the number of layers by kind, and by whether they turn queries and keys."""
    count = (
        text.get("num_hidden_layers")
        or text.get("n_layer")
        or text.get("num_layers")
        or 1
    )
    model = str(text.get("model_type"))
    period = text.get("sliding_window_pattern") or {"gemma2": 2, "olmo3": 4}.get(model)
    kinds = text.get("layer_types") or [ALL] * count
    if kinds[0] == ALL and isinstance(period, int) and period > 1:
        kinds = [
            "sliding_attention" if (layer + 1) % period else "full_attention"
            for layer in range(count)
        ]
    interval = text.get("no_rope_layer_interval") or (
        4 if model == "llama4_text" else None
    )
    turning = text.get("no_rope_layers") or [
        not interval or (layer + 1) % interval for layer in range(count)
    ]
    if model in _LOCAL_ALONE and (text.get("sliding_window") or model == "afmoe"):
        # their global layers have no positions
        turning = [kind == "sliding_attention" for kind in kinds]
    is_other = (
        "jamba" in model or "nemotron_h" in model or TESTED.get(model, "rope") != "rope"
    )
    # Falcon, Granite 4
    if is_other or text.get("alibi") or text.get("position_embedding_type") == "nope":
        turning = [False] * count
    return Counter(
        (kind, bool(turn) and kind not in _NO_ATTENTION)
        for kind, turn in zip(kinds, turning, strict=False)
    )


def _rope(text: Settings, engine: str, layers: str, turns: bool, count: int) -> Rope:
    part = section_of(text, engine, layers)
    outer_base = text.get("rope_theta") or text.get("rotary_emb_base") or 10_000.0
    base = (
        outer_base
        if "transformers 4" in engine
        else part.get("rope_theta") or outer_base
    )
    local, model = (
        text.get("rope_local_base_freq") or text.get("swa_rope_theta"),
        str(text.get("model_type")),
    )
    if (
        layers == "sliding_attention"
        and "rope_theta" not in part
        and (local or model in LOCAL)
    ):
        part, base = {}, local or LOCAL[model] or base
    longest = next(
        (text[key] for key in LENGTHS if isinstance(text.get(key), int)), None
    )
    if longest is None:
        raise UserError(f"no length of a sequence: expected {LENGTHS[0]}")
    head_dim, width = _widths(text, {} if "transformers 4" in engine else part, layers)
    kind = str(part.get("rope_type") or part.get("type") or "default")
    kind = OTHER_NAMES.get(kind, kind)
    if kind not in KEYS:
        raise UserError(
            f"rope_type is '{kind}'{did_you_mean(kind, KEYS)}: expected"
            f" {', '.join(KEYS)}"
        )
    keys, required = KEYS[kind]
    # Hunyuan: a larger base at every length
    if kind == "dynamic" and part.get("alpha"):
        kind, base, keys, required = (
            "default",
            base * part["alpha"] ** (width / (width - 2)),
            (),
            0,
        )
    if missing_keys := [key for key in keys[:required] if part.get(key) is None]:
        raise UserError(f"rope_type '{kind}' needs {' and '.join(missing_keys)}")
    original = (
        text.get("original_max_position_embeddings")
        or part.get("original_max_position_embeddings")
        or longest
    )
    original = original if kind in STRETCHED else longest
    facts = ENGINES[engine]
    kind = "default" if kind in facts.without else kind
    options = {
        key: part[key]
        for key in keys
        if part.get(key) is not None and key not in unread(engine, text)
    }
    options.pop("original_max_position_embeddings", None)
    fixed_length = None
    if kind == "yarn":
        if engine == "transformers 4.55" and "original_max_position_embeddings" in part:
            # its own key is not used (transformers issue 38224)
            options["factor"] = longest / original
        options = {**_BETAS, "truncate": True, **options}
        options["attention_factor"] = temperature(options, facts.multiplies)
    elif kind == "longrope":
        if facts.one_length or "factor" not in options:
            options["factor"] = max(1.0, longest / original)
        fixed_length = max(longest, original) if facts.one_length else None
    elif kind == "dynamic":
        fixed_length = int(longest * options["factor"]) if facts.one_length else None
    elif kind == "proportional":
        options["share"] = part.get("partial_rotary_factor", 1.0)
    window = text.get(
        "attention_chunk_size" if layers == "chunked_attention" else "sliding_window"
    )
    if layers == "full_attention" or text.get("use_sliding_window") is False:
        window = None
    if not turns:
        return Rope(
            f"{layers}, no positions",
            count,
            head_dim,
            0,
            NOPE,
            1.0,
            {},
            longest,
            longest,
            window,
        )
    width = head_dim if kind == "proportional" else width
    return Rope(
        layers,
        count,
        head_dim,
        width,
        kind,
        float(base),
        options,
        original,
        longest,
        window,
        fixed_length,
    )


def temperature(options: Settings, multiplies: tuple[str, ...]) -> float:
    """Return YaRN's factor on queries and keys; keys in `multiplies` multiply it."""

    def scale(weight: float) -> float:
        return (
            0.1 * weight * math.log(options["factor"]) + 1
            if options["factor"] > 1
            else 1.0
        )

    if (
        options.get("attention_factor") is not None
        and "attention_factor" not in multiplies
    ):
        return float(options["attention_factor"])
    pair = options.get("mscale"), options.get("mscale_all_dim")
    temperature = scale(pair[0]) / scale(pair[1]) if pair[0] and pair[1] else scale(1.0)
    return temperature * float(
        next((options[key] for key in multiplies if options.get(key) is not None), 1.0)
    )


def _widths(text: Settings, part: Settings, layers: str) -> tuple[int, int]:
    """Return the channels of a head, and how many of them turn."""
    hidden, heads = (
        text.get("hidden_size") or text.get("n_embd"),
        text.get("num_attention_heads") or text.get("n_head"),
    )
    # Gemma 4, as transformers saves it
    per_layer = (text.get("per_layer_config") or {}).values()
    wide = text.get("global_head_dim") or next(
        (layer["head_dim"] for layer in per_layer if "head_dim" in layer), None
    )
    head_dim = text.get("qk_rope_head_dim") or (layers == "full_attention" and wide)
    head_dim = (
        head_dim or text.get("head_dim") or (hidden and heads and hidden // heads)
    )
    if not head_dim:
        raise UserError(
            "no width of a head: expected head_dim, or hidden_size and"
            " num_attention_heads"
        )
    shares = (
        part.get("partial_rotary_factor"),
        text.get("partial_rotary_factor"),
        text.get("rotary_pct"),
    )
    share = next((share for share in shares if share is not None), 1.0)
    return head_dim, text.get("rotary_dim") or int(head_dim * share)


def rotating(ropes: Sequence[Rope]) -> list[Rope]:
    """Return the kinds of layers that have positions."""
    return [rope for rope in ropes if rope.type != NOPE]


def first_difference(first: Rope, second: Rope, length: int) -> tuple[int, int] | None:
    """Return the first position up to a length, and its first pair, whose cosines
    differ by more than TOLERANCE.
    """
    (f, _), (g, _) = first.at(length), second.at(length)
    if len(f) != len(g):
        return (1, min(len(f), len(g)))
    if torch.equal(f, g):
        return None
    for start in range(1, length, 4096):
        positions = torch.arange(start, min(start + 4096, length), dtype=torch.float64)[
            :, None
        ]
        differs = ((positions * f).cos() - (positions * g).cos()).abs() > TOLERANCE
        if differs.any():
            position = int(differs.any(1).nonzero()[0])
            return start + position, int(differs[position].nonzero()[0])
    return None


def bound_by_base(f: Tensor, length: int) -> int:
    """Return the first distance with a negative sum of cosines over pairs: below it,
    equal tokens beat random ones.

    Source: Men et al., "Base of RoPE Bounds Context Length" (2024), arXiv:2405.14591,
    section 4. At most `length`.
    """
    for start in range(0, length, 4096):
        negative = (
            torch.arange(start, min(start + 4096, length), dtype=torch.float64)[:, None]
            * f
        ).cos().sum(1) < 0
        if negative.any():
            return start + int(negative.nonzero()[0])
    return length
