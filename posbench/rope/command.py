"""`posbench rope`: what a RoPE configuration means, and where two differ."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from posbench import encodings, files
from posbench.config.schema import Config
from posbench.data import hub
from posbench.encodings.rope import Rotary, frequencies
from posbench.errors import UserError
from posbench.launch import compose
from posbench.rope import engines, overrides
from posbench.rope.imports import transformers
from posbench.rope.keys import OF_IMAGES, Settings
from posbench.rope.parameters import parameters_of
from posbench.rope.reading import (
    ALL,
    ROUNDING,
    Rope,
    bound_by_base,
    by_paper_if_other,
    configuration,
    described,
    findings,
    first_difference,
    in_short,
    of_encoding,
    reading,
    titled,
)
from posbench.rope.traced import FAR
from posbench.rope.words import encoding_choices
from posbench.run import RECORD, find
from posbench.run.folder import load_config
from posbench.run.model import model_of, tokenizer_of

# of an encoding that is described by its name: a head's channels, and tokens
_SIZE = {"head_dim": "128", "train_length": "4096"}


class Read(NamedTuple):
    """What a name stands for."""

    label: str
    ropes: list[Rope]  # by kind of layer
    others: list[str]  # a line for each kind of layer without RoPE
    lines: list[str]  # which keys are read, and what engines do with them


def main(
    schemes: Sequence[tuple[str, list[str]]], lengths: Sequence[int]
) -> dict[str, list[Rope]]:
    """Describe one configuration, or compare two; return the RoPE of each.

    Args:
        schemes: config.json files, folders or names of models, runs, or names of
            encodings, each with its options, `head_dim=` and `train_length=4096`, or
            with overrides of a configuration.
        lengths: what is asked for, in tokens.
    """
    every = []
    for name, options in schemes:
        every.append(ropes_of(name, options))
    for read in every:
        described_lines = describe(read.label, read.ropes, lengths)
        print("\n".join(described_lines))
        for line in [*read.others, *read.lines]:
            print(line)
    name, options = schemes[0]
    compared = every
    if len(every) == 1 and options and every[0].lines:  # of a file
        before = ropes_of(name, [], keys=False)
        before = before._replace(label="without the overrides")
        after = every[0]._replace(label="with them")
        compared = [before, after]
    if len(compared) == 2:
        first, second = compared
        lines = compare_ropes(first, second, lengths)
        print("\n".join(lines))
    return {read.label: read.ropes for read in every}


def ropes_of(name: str, options: Sequence[str], keys: bool = True) -> Read:
    """Return what a name stands for, with the options or overrides after it; `keys`:
    also which keys of a file are read.
    """
    label = " ".join([name, *options])
    if name in encoding_choices():
        config = _configured(name, options)
        return Read(label, [_of_encoding(config.build_encoding(), config)], [], [])

    path = find.of_id(Path(name))
    file = path if path.suffix == ".json" else path / "config.json"
    if (path / RECORD).is_file():
        if options:
            raise UserError(f"'{options[0]}' is not for a run, which is as it is")
        config = load_config(path)
        encoding = config.build_encoding()
        if [*encoding.parameters()]:  # perhaps learned frequencies
            encoding = model_of(path, config, tokenizer_of(path)).encoding
        return Read(label, [_of_encoding(encoding, config)], [], [])
    if path.suffix != ".json" and not file.is_file():
        folder, _ = hub.model_folder(name, ["config.json"])
        file = folder / "config.json"
    settings = overrides.overridden(files.read_json(file, has_nan=True), options)
    if not keys:
        read = reading(configuration(settings))
        return Read(label, read.ropes, read.others, [])
    return of_settings(label, settings)


def of_settings(label: str, settings: Settings) -> Read:
    """Return what a config.json says, which of its keys are read, and what engines are
    known to do with it.
    """
    read = reading(configuration(settings))
    taken, findings_ = findings(settings, read)
    version = transformers().__version__.removesuffix(".0")
    lines = []
    for rope in read.ropes:
        lines += _beside_its_paper(rope, version)
    lines += findings_
    if "auto_map" in settings:
        lines.append(
            "auto_map names code of its authors, which may read other keys than"
            f" transformers' '{settings['model_type']}': it is not run"
        )
    notes: dict[str, None] = {}
    for rope in read.ropes:
        notes.update(dict.fromkeys(engines.notes_on(rope.parameters)))
    said = [f"read: {' '.join(taken) or 'none of its keys'}"]
    for line in [*dict.fromkeys(lines), *notes]:
        said.append(f"! {line}")
    return Read(label, read.ropes, read.others, said)


def _beside_its_paper(rope: Rope, version: str) -> list[str]:
    """Return a line if the library computes other than the type's paper says."""
    for length in sorted({rope.train_length, rope.longest}):
        other = by_paper_if_other(rope, length)
        if other is None:
            continue
        f, factor = other
        line = (
            f"{titled(rope.layers, rope.type)}: by its paper, at {length:,} tokens,"
            f" {stretch_words(rope, f)}; q and k times {factor:.4g}. transformers"
            f" {version} runs what stands above"
        )
        library_f, _ = rope.at(length)
        if rope.type == "longrope" and library_f.equal(rope.at(1)[0]):
            line += ": it never uses the long divisors"
        return [line]
    return []


def _configured(name: str, words: Sequence[str]) -> Config:
    """Return a run's configuration with an encoding's options, whose heads and training
    length are as asked for.
    """
    options = []
    size = dict(_SIZE)
    for word in words:
        key, _, text = word.partition("=")
        if key not in size:
            options.append(f"encoding.{word}")
            continue
        if not text.isdecimal():
            raise UserError(f"{key} is {text}: expected one whole number")
        size[key] = text
    model = [
        f"model.d_model={size['head_dim']}",
        "model.n_heads=1",
        "evaluation.targets=1",
        f"training.train_length={size['train_length']}",
        "training.batch_size=1",
        f"training.tokens={size['train_length']}",
    ]
    return compose.single([f"encoding={name}", *options, *model])


def _of_encoding(encoding: Any, config: Config) -> Rope:
    if not isinstance(encoding, Rotary) or not encodings.architectures(encoding):
        raise UserError(
            f"'{encoding.name}' has no configuration of RoPE: expected rope or its"
            " family"
        )
    train_length = config.training.train_length
    original = getattr(encoding, "original_length", train_length)
    factor = getattr(encoding, "factor", None) or 1.0
    longest = round(factor * original)
    parameters = parameters_of(encoding)
    return of_encoding(lambda length: encoding, parameters, original, longest)


def describe(name: str, layers: Sequence[Rope], lengths: Sequence[int]) -> list[str]:
    """Return lines that say what a configuration means."""
    lines = [name]
    for rope in layers:
        title = titled(rope.layers, rope.share) + described(rope.window, rope.scale)
        lines += ["", title, *_describe_rope(rope, lengths)]
    return lines


def _describe_rope(rope: Rope, lengths: Sequence[int]) -> list[str]:
    trained_f, _ = rope.at(rope.train_length)
    n_turning = 2 * int((trained_f > 0).sum())
    lines = [
        f"  {rope.type}, base {rope.base:,.10g}, {n_turning} channels of a head turn"
    ]
    options = []
    for key, option in rope.parameters.items():
        if key not in ("rope_type", "rope_theta") and option is not None:
            options.append(f"{key}={in_short(option)}")
    if options:
        lines.append(f"  {' '.join(options)}")

    # lengths by what is said of them
    alike: dict[str, list[str]] = {}
    for length in shown_lengths(rope, lengths):
        f, factor = rope.at(length)
        text = f"{stretch_words(rope, f)}; q and k times {factor:.4g}"
        alike.setdefault(text, []).append(f"{length:,}")
    for text, shown in alike.items():
        lines.append(f"  at {' and '.join(shown)} tokens: {text}")

    n_whole_turns = (trained_f * rope.train_length >= 2 * math.pi).sum()
    lines.append(
        f"  {n_whole_turns} of {len(trained_f)} pairs turn once or more within the"
        f" trained {rope.train_length:,} tokens"
    )
    longest = rope.window[0] if rope.window else rope.longest
    bound = bound_by_base(rope.at(longest)[0], longest)
    extent = f"up to {bound:,} of" if bound < longest else "at all"
    lines.append(
        f"  equal tokens stand out of random ones {extent} {longest:,} tokens (Men et"
        " al. 2024)"
    )
    return lines


def stretch_words(rope: Rope, f: Tensor) -> str:
    """Return which pairs turn as in plain RoPE of this base, are slowed the most, lie
    in between, or stand still.
    """
    # inf where a pair stands still
    divisors: list[float] = (frequencies(rope.width, rope.base) / f).tolist()
    finite = [divisor for divisor in divisors if math.isfinite(divisor)]
    largest = max(finite, key=lambda divisor: abs(math.log(divisor)), default=1.0)
    extreme = f"slowed {largest:.4g} times"
    if largest < 1:
        extreme = f"{1 / largest:.4g} times as fast"

    def label_of(pair: int) -> str:
        divisor = divisors[pair]
        if abs(divisor - 1) < ROUNDING:
            return "as plain RoPE"
        if math.isinf(divisor):
            return "at a halt"
        if abs(divisor / largest - 1) < ROUNDING:
            return extreme
        return "in between"

    parts = []
    for label, group in itertools.groupby(range(len(divisors)), label_of):
        first, *others = group
        pairs = f"pairs {first} to {others[-1]}" if others else f"pair {first}"
        parts.append(f"{pairs} {label}")
    return ", ".join(parts)


def compare_ropes(a: Read, b: Read, lengths: Sequence[int] = ()) -> list[str]:
    """Return lines that say where two configurations differ."""
    lines = ["", f"{a.label} and {b.label}"]
    pairs = [*itertools.product(a.ropes, b.ropes)]
    if len(a.ropes) > 1 and len(b.ropes) > 1:
        alike = [pair for pair in pairs if pair[0].layers == pair[1].layers]
        pairs = alike or [*zip(a.ropes, b.ropes, strict=False)]
    for first, second in pairs:
        layers = first.layers or second.layers or ALL
        lines.append(f"  {layers}: {_compared(first, second, lengths)}")
    if a.others != b.others:
        without = ["; ".join(read.others) or "none" for read in (a, b)]
        lines.append(f"  layers without RoPE: {without[0]} and {without[1]}")
    return lines


def _compared(first: Rope, second: Rope, lengths: Sequence[int]) -> str:
    """Return where two RoPEs differ: in inputs of the longest length or, if they are
    alike there, of a shorter one, for which LongRoPE has other frequencies.
    """
    shown = {*shown_lengths(first, lengths), *shown_lengths(second, lengths)}
    length = max(shown)
    turning = "turn alike"
    for each in sorted(shown, reverse=True):
        place = first_difference(first, second, each)
        if place:
            length = each
            turning = f"differ from position {place[0]:,} on, pair {place[1]} first"
            break
    parts = [f"{turning} within {length:,} tokens"]

    a = first.at(length)[1]
    b = second.at(length)[1]
    if abs(a - b) > ROUNDING:
        parts.append(f"q and k times {a:.4g} and {b:.4g}")
    if first.share != second.share and ALL not in (first.share, second.share):
        parts.append(f"in {first.share} and in {second.share}")
    if first.scale != second.scale:
        parts.append(
            f"queries times {first.scale:.4g} and {second.scale:.4g} at position"
            f" {FAR:,}"
        )
    if first.window != second.window:
        parts.append(f"{_window(first)} and {_window(second)}")
    ends = [f"{rope.train_length:,} to {rope.longest:,}" for rope in (first, second)]
    if ends[0] != ends[1]:
        parts.append(f"made for {ends[0]} and for {ends[1]} tokens")
    for key in {**first.parameters, **second.parameters}:
        sections = [rope.parameters.get(key) for rope in (first, second)]
        if OF_IMAGES.search(key) and sections[0] != sections[1]:
            parts.append(f"another {key}, which changes nothing for text alone")
    return "; ".join(parts)


def _window(rope: Rope) -> str:
    return described(rope.window, 1).removeprefix(", ") or "no window"


def shown_lengths(rope: Rope, lengths: Sequence[int]) -> Sequence[int]:
    """Return the requested lengths, by default the training length and the longest
    input that a RoPE is made for.
    """
    return lengths or sorted({rope.train_length, rope.longest})
