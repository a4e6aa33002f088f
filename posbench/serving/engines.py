"""How engines read a configuration differently from transformers 5."""

from collections.abc import Iterator, Mapping

from posbench.errors import UserError, did_you_mean
from posbench.huggingface.load import language_part
from posbench.serving import read
from posbench.serving.read import Rope, Settings

_SECTIONS = ("rope_scaling", "rope_parameters")


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
                for line in _differences(reference, ropes, engine, text)
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
    reference: list[Rope], ropes: list[Rope], engine: str, text: Settings
) -> Iterator[str]:
    """Yield how an engine's rotations differ from the reference, for each kind of
    layer.
    """
    for expected, rope in zip(reference, ropes, strict=True):
        lengths = dict.fromkeys((expected.train_length, reach(expected)))
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
