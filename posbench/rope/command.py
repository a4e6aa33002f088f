"""`posbench rope`: what a RoPE configuration means, and where two differ."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from posbench import encodings, files
from posbench.config import compose, shipped
from posbench.config.overrides import LENGTH, value
from posbench.config.schema import Config
from posbench.data import hub
from posbench.encodings.rope import Rotary, frequencies
from posbench.errors import UserError, unknown
from posbench.options import by_name, plain
from posbench.rope.parameters import parameters_of
from posbench.rope.reading import (
    ALL,
    ROUNDING,
    Rope,
    bound_by_base,
    configuration,
    described,
    first_difference,
    layers_of,
    of_encoding,
    remarks,
    titled,
    unread,
)
from posbench.run import RECORD, find
from posbench.run.model import model_of, tokenizer_of
from posbench.run.run import load_config

# of an encoding that is described by its name: a head's channels, and tokens
_SIZE = {"head_dim": "128", "train_length": "4096"}


def main(words: Sequence[str]) -> tuple[dict[str, list[Rope]], list[int]]:
    """Describe one configuration, or compare two. Returns the RoPE of each, and the
    lengths that are asked for.

    Args:
        words: config.json files, folders or names of models, runs, or names of
            encodings, each with its options, `head_dim=` and `train_length=4096` after
            it; `length=16384` is for all.
    """
    of_all = [word for word in words if word.startswith("length=")]
    schemes = by_name([word for word in words if word not in of_all])
    if not 1 <= len(schemes) <= 2 or len(of_all) > 1:
        raise UserError(
            "expected a config.json, a model, a run or a rotary encoding, or two to"
            " compare; length= once"
        )
    lengths = _lengths(of_all)
    labels = [" ".join([name, *options]) for name, options in schemes]
    read = [ropes_of(name, options) for name, options in schemes]
    for label, (layers, others) in zip(labels, read, strict=True):
        print("\n".join(describe(label, layers, lengths)))
        for line in others:
            print(line)
    every_rope = [layers for layers, _ in read]
    if len(labels) == 2:
        print("\n".join(compare_ropes(labels, every_rope, lengths)))
    return dict(zip(labels, every_rope, strict=True)), lengths


def _lengths(words: Sequence[str]) -> list[int]:
    """Return the lengths in tokens of `length=16384`; none without it."""
    text = "".join(words).removeprefix("length=")
    lengths: list[int] = value(LENGTH, text)
    if not all(type(length) is int and length >= 1 for length in lengths):
        raise UserError(
            f"length is {text}: expected lengths in tokens, such as 4096,16384"
        )
    return lengths


def ropes_of(name: str, options: Sequence[str]) -> tuple[list[Rope], list[str]]:
    """Return what a name stands for, by kind of layer, and lines on the layers without
    RoPE and on what is not read.
    """
    choices = [*encodings.names(), *shipped.choices("encoding", (), shipped.EVERY)]
    if name in choices:
        config = _configured(name, options)
        return [_of_encoding(config.build_encoding(), config)], []

    path = find.of_id(Path(name))
    file = path if path.suffix == ".json" else path / "config.json"
    is_run = (path / RECORD).is_file()
    is_file = path.suffix == ".json" or file.is_file()
    if not (is_run or is_file or find.is_model(name)):
        raise unknown(
            "configuration",
            name,
            choices,
            "expected a config.json, a model, a run or an encoding",
        )
    if options:
        raise UserError(
            f"'{options[0]}' is not for {name}, which is no encoding's name: expected"
            " length=16384 or nothing"
        )
    if is_run:
        config = load_config(path)
        encoding = config.build_encoding()
        if [*encoding.parameters()]:  # perhaps learned frequencies
            encoding = model_of(path, config, tokenizer_of(path)).encoding
        return [_of_encoding(encoding, config)], []
    if not is_file:
        folder, _ = hub.model_folder(name, ["config.json"])
        file = folder / "config.json"
    return _of_settings(files.read_json(file))


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


def _of_settings(settings: Mapping[str, Any]) -> tuple[list[Rope], list[str]]:
    config = configuration(settings)
    every_rope, others = layers_of(config)
    findings = [*remarks(settings), *unread(settings, config)]
    return every_rope, [*others, *(f"! {finding}" for finding in findings)]


def describe(name: str, layers: Sequence[Rope], lengths: Sequence[int]) -> list[str]:
    """Return lines that say what a configuration means."""
    lines = [name]
    for rope in layers:
        title = titled(rope.layers, rope.share) + described(rope.window, rope.is_scaled)
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
        if isinstance(option, list):
            options.append(f"{key}=[{len(option)} numbers]")
        elif key != "rope_type" and option is not None and option != rope.base:
            options.append(f"{key}={plain(option)}")
    if options:
        lines.append(f"  {' '.join(options)}")

    # lengths by what is said of them
    alike: dict[str, list[str]] = {}
    for length in shown_lengths(rope, lengths):
        f, factor = rope.at(length)
        text = f"{stretches(rope, f)}; q and k times {factor:.4g}"
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


def stretches(rope: Rope, f: Tensor) -> str:
    """Return which pairs turn as in plain RoPE of this base, are slowed the most, lie
    in between, or stand still.
    """
    # inf where a pair stands still
    divisors: list[float] = (frequencies(rope.width, rope.base) / f).tolist()
    largest = max(divisors)
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


def compare_ropes(
    names: Sequence[str], ropes: Sequence[list[Rope]], lengths: Sequence[int] = ()
) -> list[str]:
    """Return lines that say where the rotations of two configurations differ."""
    lines = ["", f"{names[0]} and {names[1]}"]
    pairs = [*itertools.product(ropes[0], ropes[1])]
    if len(ropes[0]) > 1 and len(ropes[1]) > 1:
        alike = [(a, b) for a, b in pairs if a.layers == b.layers]
        pairs = alike or [*zip(ropes[0], ropes[1], strict=False)]
    for first, second in pairs:
        layers = first.layers or second.layers or ALL
        lines.append(f"  {layers}: {_compared(first, second, lengths)}")
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
    if first.is_scaled != second.is_scaled:
        parts.append("queries scaled by their position in one alone")
    if first.window != second.window:
        parts.append(f"{_window(first)} and {_window(second)}")
    return "; ".join(parts)


def _window(rope: Rope) -> str:
    return described(rope.window, False).removeprefix(", ") or "no window"


def shown_lengths(rope: Rope, lengths: Sequence[int]) -> Sequence[int]:
    """Return the requested lengths, by default the training length and the longest
    input that a RoPE is made for.
    """
    return lengths or sorted({rope.train_length, rope.longest})
