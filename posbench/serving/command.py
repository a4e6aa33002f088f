"""`posbench rope`: what a RoPE configuration means, and how each engine reads it."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib
import torch
from torch import Tensor

from posbench import encodings, files
from posbench.config import compose
from posbench.config.overrides import LENGTH, value
from posbench.config.schema import Config
from posbench.data import hub
from posbench.encodings import extend
from posbench.encodings.base import Shape
from posbench.encodings.rope import Rotary, frequencies
from posbench.errors import UserError, unknown
from posbench.evaluation.models import parse_choice
from posbench.huggingface.export import parameters_of
from posbench.huggingface.load import language_part, with_class_defaults
from posbench.huggingface.rope import rope_parameters
from posbench.options import plain
from posbench.report import charts
from posbench.run import find
from posbench.run.model import model_of, tokenizer_of
from posbench.run.run import load_config
from posbench.serving import read
from posbench.serving.engines import reach, remarks
from posbench.serving.read import Rope, Settings

# the last is for an encoding's name
_WORDS = ("length", "extension", "train_length", "head_dim")


def main(words: Sequence[str], png: Path | None) -> None:
    """Describe one configuration, or compare two; draw it.

    Args:
        words: config.json files, folders or names of models, runs, or names of
            encodings with options; then `extension=yarn:factor=4`, `length=16384`,
            `train_length=4096`, and for an encoding's name `head_dim=`.
    """
    values = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if not 1 <= len(names) <= 2 or len(names) + len(values) < len(words):
        raise UserError(
            "expected a config.json, a model, a run or a rotary encoding, or two to"
            " compare; a key= once"
        )
    if not {*names} & {*encodings.names()} and (
        unread_words := sorted(values.keys() - {*_WORDS[:3]})
    ):
        raise unknown(
            "word", f"{unread_words[0]}=", [f"{word}=" for word in _WORDS[:3]]
        )
    for word in ("train_length", "length"):
        lengths = value(LENGTH, values.get(word, ""))
        if not all(type(length) is int and length >= 1 for length in lengths):
            raise UserError(
                f"{word} is {values[word]}: expected lengths in tokens, such as"
                " 4096,16384"
            )
    configurations = [settings_of(name, values) for name in names]
    for name, settings in zip(names, configurations, strict=True):
        print("\n".join(describe_ropes(name, settings, lengths)))
    ropes = [read.ropes(configuration) for configuration in configurations]
    if len(names) == 2:
        print("\n".join(compare_ropes(names, ropes)))
    if png:
        files.write(png, charts.drawn(picture(names, ropes, lengths), "png"))
        print(png)


def settings_of(name: str, values: dict[str, str]) -> Settings:
    """Return the content of a config.json: read from a file, a model or a run, or made
    for an encoding with options.
    """
    path = find.of_id(Path(name))
    if (path / "run.json").is_file():
        settings = _settings_of_encoding(load_config(path), path)
    elif path.suffix == ".json" or (path / "config.json").is_file():
        try:
            settings = json.loads(
                (path if path.suffix == ".json" else path / "config.json").read_bytes()
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"{name} cannot be read as a configuration: {error}"
            ) from None
    elif name in encodings.names():
        options = [
            f"encoding.{key}={text}"
            for key, text in values.items()
            if key not in _WORDS
        ]
        size = [
            f"model.d_model={values.get('head_dim', 128)}",
            "model.n_heads=1",
            "evaluation.targets=1",
        ]
        size.append(f"training.train_length={values.get('train_length', 4096)}")
        settings = _settings_of_encoding(
            compose.single([f"encoding={name}", *options, *size])
        )
    elif not find.is_model(name):
        raise unknown(
            "configuration",
            name,
            encodings.names(),
            "expected a config.json, a model, a run or an encoding",
        )
    else:
        settings = json.loads(
            (hub.model_folder(name, ["config.json"])[0] / "config.json").read_bytes()
        )
    configuration = with_class_defaults(settings)
    return (
        _extended_settings(configuration, values)
        if values.get("extension")
        else configuration
    )


def _settings_of_encoding(config: Config, run: Path | None = None) -> dict[str, Any]:
    """Return the content of a config.json for an encoding; `run`: its folder, which may
    hold learned frequencies.
    """
    rope = config.build_encoding()
    if run and [*rope.parameters()]:
        rope = model_of(run, config, tokenizer_of(run)).encoding
    if not isinstance(rope, Rotary) or not encodings.architectures(rope):
        raise UserError(
            f"'{config.encoding.name}' has no configuration of RoPE: expected rope or"
            " its family"
        )
    settings = {
        "model_type": "posbench",
        "num_hidden_layers": config.model.n_layers,
        "head_dim": rope.shape.head_dim,
    }
    original = getattr(rope, "original_length", config.training.train_length)
    return {
        **settings,
        "max_position_embeddings": original,
        "rope_parameters": parameters_of(rope, partly=True),
    }


def _longest(values: dict[str, str], settings: Settings) -> int:
    """Return an extension's longest input in tokens: the requested length, or its
    factor times the training length.
    """
    factor = parse_choice(values["extension"])[1].get("factor")
    # another type is refused where the factor is used
    factor = factor if isinstance(factor, int | float) else 4.0
    train_length: int = value(
        LENGTH, values.get("train_length", str(read.ropes(settings)[0].train_length))
    )[0]
    return max(
        value(LENGTH, values.get("length", "")), default=round(factor * train_length)
    )


def _extended_settings(settings: Settings, values: dict[str, str]) -> Settings:
    """Return settings whose plain RoPE is extended: `method:option=value:option=value`."""
    method, options = parse_choice(values["extension"])
    turning = read.rotating(read.ropes(settings))
    ropes = [rope for rope in turning if not rope.window] or turning
    if not ropes or any(rope.type != "default" for rope in ropes):
        types = ", ".join(rope.type for rope in ropes)
        raise UserError(
            f"extension={method}: only plain RoPE is extended, and this is {types}"
        )
    rope = ropes[0]._replace(
        train_length=value(
            LENGTH, values.get("train_length", str(ropes[0].train_length))
        )[0]
    )
    shape = Shape(
        d_model=rope.width, n_heads=1, n_layers=1, train_length=rope.train_length
    )
    encoding = cast(Rotary, encodings.build("rope", shape, {"base": rope.base}))
    extended, facts = extend.extend_encoding(
        encoding, method, _longest(values, settings), rope.train_length, **options
    )
    long = cast(Rotary, extended).inv_freq()
    part = rope_parameters(method, facts, encoding, long, long, rope.train_length)
    text = language_part(settings)
    section = read.section_of(text, "transformers 5", rope.layers)
    part = {
        key: section[key]
        for key in ("partial_rotary_factor", *read.BESIDE)
        if key in section
    } | part
    sections = {
        kind: entry
        for kind, entry in (text.get("rope_parameters") or {}).items()
        if isinstance(entry, dict)
    }
    if text.get("model_type") in read.LOCAL:
        sections = {
            other.layers: {"rope_type": "default", "rope_theta": other.base}
            for other in turning
        } | sections
    text = {key: text[key] for key in text if key not in ("rope_scaling", "rope_theta")}
    text["rope_parameters"] = {**sections, rope.layers: part} if sections else part
    return {**settings, "text_config": text} if "text_config" in settings else text


def describe_ropes(name: str, settings: Settings, lengths: Sequence[int]) -> list[str]:
    """Return lines that say what a configuration means, and how engines read it."""
    ropes = read.ropes(settings)
    lines = [
        f"{name}: {language_part(settings).get('model_type', 'model')},"
        f" {sum(r.number for r in ropes)} layers"
    ]
    for rope in ropes:
        window = f", window of {rope.window:,} tokens" if rope.window else ""
        lines += ["", f"{rope.layers} ({rope.number}){window}"]
        if rope.type == read.NOPE:
            continue
        lists = {
            key: f"[{len(option)} numbers]"
            for key, option in rope.options.items()
            if isinstance(option, list)
        }
        options = " ".join(
            f"{key}={plain(option)}"
            for key, option in {**rope.options, **lists}.items()
        )
        share = "" if rope.width == rope.head_dim else f" of {rope.head_dim}"
        lines.append(
            f"  {rope.type}, base {rope.base:,.10g}, {rope.width}{share} channels of a"
            " head turn".rstrip()
        )
        lines += [f"  {options}"] if options else []
        groups: dict[str, list[int]] = {}
        for length in _shown_lengths(rope, lengths):
            f, factor = rope.at(length)
            groups.setdefault(
                f"{stretches(rope, f)}; q and k times {factor:.4g}", []
            ).append(length)
        lines += [
            f"  at {' and '.join(f'{n:,}' for n in group)} tokens: {text}"
            for text, group in groups.items()
        ]
        f = rope.at(rope.train_length)[0]
        longest = rope.window or reach(rope)
        turns = (f * rope.train_length >= 2 * math.pi).sum()
        lines.append(
            f"  {turns} of {len(f)} pairs turn once or more within the trained"
            f" {rope.train_length:,} tokens"
        )
        bound = read.bound_by_base(rope.at(longest)[0], longest)
        extent = f"up to {bound:,} of" if bound < longest else "at all"
        lines.append(
            f"  equal tokens stand out of random ones {extent} {longest:,} tokens (Men"
            " et al. 2024)"
        )
    findings = remarks(settings)
    engines = [
        name
        for name in read.ENGINES
        if not any(line.startswith(f"{name} ") for line in findings)
    ]
    return [
        *lines,
        "",
        f"read alike by {', '.join(engines)}",
        *(f"! {line}" for line in findings),
    ]


def stretches(rope: Rope, f: Tensor) -> str:
    """Return which pairs turn as in plain RoPE of this base, are slowed the most, lie
    in between, or stand still.
    """
    # inf where a pair stands still
    divisors: list[float] = (frequencies(rope.width, rope.base) / f).tolist()
    largest = max(divisors)

    def label_of(pair: int) -> str:
        divisor = divisors[pair]
        if abs(divisor - 1) < 1e-9:
            return "as plain RoPE"
        if math.isinf(divisor):
            return "at a halt"
        return (
            f"slowed {largest:.4g} times"
            if abs(divisor / largest - 1) < 1e-9
            else "in between"
        )

    parts = []
    for label, group in itertools.groupby(range(len(divisors)), label_of):
        pairs = list(group)
        parts.append(
            f"pairs {pairs[0]} to {pairs[-1]} {label}"
            if len(pairs) > 1
            else f"pair {pairs[0]} {label}"
        )
    return ", ".join(parts)


def compare_ropes(names: Sequence[str], ropes: Sequence[list[Rope]]) -> list[str]:
    """Return lines that say where the rotations of two configurations differ."""
    lines = ["", f"{names[0]} and {names[1]}"]
    pairs = [
        (a, b)
        for a, b in itertools.product(*ropes)
        if a.layers == b.layers or 1 in map(len, ropes)
    ]
    for first, second in pairs or zip(*ropes, strict=False):
        length = max(reach(first), reach(second))
        place = read.first_difference(first, second, length)
        turning = (
            f"differ from position {place[0]:,} on, pair {place[1]} first"
            if place
            else "turn alike"
        )
        a = first.at(length)[1]
        b = second.at(length)[1]
        factors = "" if a == b else f"; q and k times {a:.4g} and {b:.4g}"
        layers = first.layers if len(ropes[0]) > 1 else second.layers
        lines.append(f"  {layers}: {turning} within {length:,} tokens{factors}")
    return lines


def picture(
    names: Sequence[str], ropes: Sequence[list[Rope]], lengths: Sequence[int]
) -> charts.Picture:
    """Draw how many tokens a turn of each pair takes, by kind of layer, beside plain
    RoPE and the trained length.
    """
    turning = [
        (name, rope)
        for name, layers in zip(names, ropes, strict=True)
        for rope in read.rotating(layers)
    ]
    kinds = [
        *dict.fromkeys(rope.layers for _, rope in turning if rope.layers != read.ALL)
    ] or [read.ALL]
    with matplotlib.rc_context(charts.STYLE):
        figure = charts.Picture(figsize=(4.2 * len(kinds), 3.2), layout="constrained")
        for axes, kind in zip(
            figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True
        ):
            colours = itertools.cycle(charts.COLOURS)
            for name, rope in (
                (name, rope)
                for name, rope in turning
                if rope.layers in (kind, read.ALL)
            ):
                curves = {
                    f"plain, base {rope.base:,.10g}": frequencies(rope.width, rope.base)
                }
                for length in _shown_lengths(rope, lengths):
                    f = rope.at(length)[0]
                    if not any(torch.equal(f, curve) for curve in curves.values()):
                        curves[
                            f"{f'{name}: ' * (len(names) > 1)}{rope.type} at {length:,}"
                            " tokens"
                        ] = f
                for label, f in curves.items():
                    colour, width = (
                        (charts.LIGHT, 3)
                        if label.startswith("plain, ")
                        else (next(colours), 1.5)
                    )
                    axes.plot(
                        torch.where(f > 0, 2 * math.pi / f, math.nan),
                        color=colour,
                        lw=width,
                        label=label,
                    )
                axes.axhline(
                    at := rope.train_length,
                    color=charts.DARK,
                    ls=":",
                    lw=1,
                    label=f"trained, {at:,}",
                )
            axes.set(
                yscale="log",
                title=kind,
                xlabel="pair of channels",
                ylabel="tokens for a whole turn",
            )
            axes.yaxis.set_major_formatter("{x:,.0f}")
            # each label once
            lines = {str(line.get_label()): line for line in axes.get_lines()}
            axes.legend(handles=lines.values(), fontsize=7, framealpha=0)
    return figure


def _shown_lengths(rope: Rope, lengths: Sequence[int]) -> Sequence[int]:
    """Return the requested lengths, by default the training length and the longest
    input that a RoPE is made for.
    """
    return lengths or sorted({rope.train_length, reach(rope)})
