"""How engines read a configuration differently from transformers 5, and how to give
each of them the same RoPE.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from posbench.errors import UserError, did_you_mean
from posbench.huggingface.load import language_part
from posbench.serving import read
from posbench.serving.read import Rope, Settings

_SECTIONS = ("rope_scaling", "rope_parameters")
FLAGS = {  # llama.cpp's flag for each key of a section
    "rope_theta": "--rope-freq-base",
    "rope_type": "--rope-scaling",
    "factor": "--rope-scale",
    "original_max_position_embeddings": "--yarn-orig-ctx",
    "beta_fast": "--yarn-beta-fast",
    "beta_slow": "--yarn-beta-slow",
}


def remarks(settings: Settings) -> list[str]:
    """Return a line for each key that is misspelt, missing or ignored, and for each
    engine that differs.
    """
    text = language_part(settings)
    sections = {name: text[name] for name in _SECTIONS if text.get(name)}
    lines = [
        line
        for name, section in sections.items()
        for line in _section_remarks(name, section, text)
    ]
    if len(sections) == 2 and sections["rope_scaling"] != sections["rope_parameters"]:
        lines.append(
            "rope_scaling and rope_parameters differ: transformers 5 reads"
            " rope_scaling, vLLM rope_parameters"
        )
    reference = read.ropes(settings)
    for engine in list(read.ENGINES)[1:]:
        try:
            ropes = read.ropes(settings, engine)
            lines += [
                f"{engine} {line}"
                for line in _differences(reference, ropes, engine, text, 0)
            ]
        except UserError as error:
            lines.append(f"{engine} refuses it: {error}")
    return lines


def _section_remarks(name: str, section: Settings, text: Settings) -> Iterator[str]:
    """Yield what is wrong with a section, whichever engine reads it."""
    parts = {
        key: part for key, part in section.items() if isinstance(part, Mapping)
    } or {"": section}
    for layers, part in parts.items():
        path = f"{name}.{layers}" if layers else name
        type_name = str(part.get("rope_type") or part.get("type") or "default")
        kind = read.OTHER_NAMES.get(type_name, type_name)
        keys = read.KEYS.get(kind, ((), 0))[0]
        for key in part:
            if key not in (*keys, *read.OF_ALL):
                yield (
                    f"{path}.{key} is not read by type"
                    f" '{kind}'{did_you_mean(key, (*keys, *read.OF_ALL))}"
                )
        if "rope_theta" not in part and not text.get("rope_theta"):
            yield (
                f"{path} has no rope_theta: it is 10,000 unless the model's class has"
                " another"
            )
        longest, factor = text.get("max_position_embeddings"), part.get("factor")
        original = text.get("original_max_position_embeddings") or part.get(
            "original_max_position_embeddings"
        )
        if kind in read.STRETCHED and longest and not original:
            remark = f"{path} has no original_max_position_embeddings"
            yield (
                f"{remark}: max_position_embeddings, {longest:,}, counts as the trained"
                " length; llama.cpp refuses it"
            )
        elif (
            kind in read.STRETCHED[:2]
            and longest
            and factor
            and longest not in (original, round(factor * original))
        ):
            yield (
                f"max_position_embeddings is {longest:,}: neither the trained"
                f" {original:,} nor {factor:g} times that"
            )
        elif kind in ("linear", "dynamic") and longest and factor:
            limit = (
                f"max_position_embeddings times factor, {longest * factor:,.0f} tokens"
            )
            yield (
                f"vLLM and SGLang read up to {limit}: right only if"
                " max_position_embeddings is the trained length"
            )


def _differences(
    reference: list[Rope], ropes: list[Rope], engine: str, text: Settings, longest: int
) -> Iterator[str]:
    """Yield how an engine's rotations differ from the reference, for each kind of
    layer.
    """
    for expected, rope in zip(reference, ropes, strict=True):
        lengths = dict.fromkeys(
            (expected.train_length, reach(expected), longest or reach(expected))
        )
        a, b = expected.at(reach(expected))[1], rope.at(reach(expected))[1]
        differences = (
            (n, *difference)
            for n in lengths
            if (difference := read.first_difference(expected, rope, n))
        )
        length, position, pair = next(differences, (0, 0, 0))
        inputs = (
            f" for inputs of {length:,} tokens"
            if length == expected.train_length < reach(expected)
            else ""
        )
        turns = (
            f"turns pair {pair} differently from position {position:,} on{inputs}"
            if length
            else ""
        )
        scales = (
            "" if abs(a - b) < 1e-3 else f"multiplies q and k by {b:.4f}, not {a:.4f}"
        )
        if turns or scales:
            of = "" if expected.layers == read.ALL else f" of {expected.layers}"
            yield (
                " and ".join(filter(None, (turns, scales)))
                + of
                + f": {_reason(engine, rope, text)}"
            )


def _reason(engine: str, rope: Rope, text: Settings) -> str:
    """Return why an engine reads a configuration differently from the reference."""
    facts = read.ENGINES[engine]
    part = read.section_of(text, engine, rope.layers)
    if not part or (engine.startswith("transformers 4") and "rope_theta" not in text):
        return "it reads rope_scaling and the rope_theta beside it, not rope_parameters"
    if engine == "transformers 4.55" and rope.type == "yarn":
        return (
            "its factor is max_position_embeddings / original_max_position_embeddings,"
            f" {rope.options['factor']:g}"
        )
    if part.get("rope_type", part.get("type")) in facts.without:
        return (
            "it has no type"
            f" '{rope.type if rope.type != 'default' else part.get('rope_type', part.get('type'))}'"
        )
    if rope.fixed_length:
        return (
            f"it keeps the frequencies of {rope.fixed_length:,} tokens for every input"
        )
    if keys := [key for key in read.unread(engine, text) if part.get(key) is not None]:
        return f"it does not read {' and '.join(keys)}"
    return (
        f"{' and '.join(key for key in facts.multiplies if part.get(key))} multiplies"
        " its own factor"
    )


def reach(rope: Rope) -> int:
    """Return the longest input that a RoPE is made for, in tokens."""
    factor = (
        float(rope.options.get("factor", 1.0))
        if rope.type in (*read.STRETCHED, "dynamic")
        else 1.0
    )
    return max(rope.longest, round(factor * rope.train_length))


class Instruction(NamedTuple):
    """How to give an engine a RoPE."""

    engine: str
    text: str  # keys of config.json as JSON, or a command
    differs: list[str]  # how the engine's rotations still differ with this text


def instructions(
    settings: Settings, model: str = "MODEL", length: int = 0
) -> list[Instruction]:
    """Return for each engine how to give it the RoPE that transformers 5 reads, for
    inputs up to `length` or longer.
    """
    text = language_part(settings)
    reference = read.rotating(read.ropes(settings))
    if not reference:
        raise UserError("no layer has RoPE: there is nothing to tell an engine")
    longest = max(length, *map(reach, reference))
    bare = {
        key: value
        for key, value in text.items()
        if key not in (*_SECTIONS, "rope_theta", "rope_local_base_freq")
    }
    per_engine: list[Instruction] = []
    for engine in (
        "transformers 5",
        "transformers 4",
        "vLLM 0.25",
        "SGLang",
        "llama.cpp",
    ):
        parts = {rope.layers: _parameters(rope, engine, text) for rope in reference}
        first = next(iter(parts.values()))
        by_kind = any(
            isinstance(part, Mapping)
            for part in (text.get("rope_parameters") or {}).values()
        )
        alike = not by_kind and all(part == first for part in parts.values())
        keys: dict[str, Any] = {"rope_parameters": first if alike else parts}
        # there it must be the trained length
        if not any(rope.type in ("linear", "dynamic") for rope in reference):
            keys["max_position_embeddings"] = longest
        if engine == "transformers 4":
            if not alike and text.get("model_type") not in read.LOCAL:
                per_engine.append(
                    Instruction(engine, "", ["has one section for all kinds of layers"])
                )
                continue
            del keys["rope_parameters"]
            section = first if alike else parts["full_attention"]
            keys |= {
                key: section.pop(key)
                for key in ("rope_theta", "partial_rotary_factor")
                if key in section
            }
            keys |= (
                {}
                if alike
                else {"rope_local_base_freq": parts["sliding_attention"]["rope_theta"]}
            )
            keys |= (
                {} if section == {"rope_type": "default"} else {"rope_scaling": section}
            )
        instruction = json.dumps(
            {"text_config": keys} if "text_config" in settings else keys
        )
        ropes = read.rotating(read.ropes(bare | keys, engine))
        differs = [*_differences(reference, ropes, engine, bare | keys, longest)]
        if engine.startswith("vLLM"):
            instruction = (
                f"vllm serve {model} --hf-overrides {shlex.quote(instruction)}"
                f" --max-model-len {longest}"
            )
        elif engine == "SGLang":
            server = (
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python -m"
                f" sglang.launch_server --model-path {model}"
            )
            instruction = (
                f"{server} --json-model-override-args {shlex.quote(instruction)}"
                f" --context-length {longest}"
            )
        elif engine == "llama.cpp":
            instruction, differs = _flags(first if alike else {}, longest, differs)
        per_engine.append(Instruction(engine, instruction, differs))
    return per_engine


def _parameters(rope: Rope, engine: str, text: Settings) -> dict[str, Any]:
    """Return a section that an engine reads as this RoPE, with `rope_theta` in it."""
    section = read.section_of(text, "transformers 5", rope.layers)
    options = {key: value for key, value in rope.options.items() if key != "share"}
    if rope.type == "yarn":
        counts = [
            key
            for key in ("factor", *read.MSCALE)
            if key in options and key not in read.unread(engine, text)
        ]
        default = read.temperature({key: options[key] for key in counts}, ())
        defaults = {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": True}
        options = {
            key: value
            for key, value in options.items()
            if defaults.get(key) != value and key != "attn_factor"
        }
        if abs((factor := options.pop("attention_factor")) - default) > 1e-9:
            key = (
                "attention_factor"
                if engine.startswith("transformers")
                else "attn_factor"
            )
            options[key] = factor if key == "attention_factor" else factor / default
    if rope.type in read.STRETCHED:
        options["original_max_position_embeddings"] = rope.train_length
    if rope.type == "proportional":
        options["partial_rotary_factor"] = rope.options["share"]
    elif rope.width != rope.head_dim:
        options["partial_rotary_factor"] = rope.width / rope.head_dim
    extras = {key: section[key] for key in read.BESIDE if key in section}
    return {"rope_type": rope.type, "rope_theta": rope.base, **options, **extras}


def _flags(part: Settings, longest: int, differs: list[str]) -> tuple[str, list[str]]:
    """Return llama.cpp's command for a converted model, empty if it has no flags for
    this RoPE; and what differs.
    """
    if part.get("rope_type") not in ("default", "linear", "yarn"):
        return "", differs or [
            "has no flags for it: convert a model with the keys of transformers 5"
        ]
    flags = [
        word
        for key, flag in FLAGS.items()
        if part.get(key, "default") != "default"
        for word in (flag, part[key])
    ]
    words = ["llama-server", "-m", "MODEL.gguf", "-c", longest, *flags]
    return (
        shlex.join(
            f"{word:.9g}" if isinstance(word, float) else str(word) for word in words
        ),
        differs,
    )
