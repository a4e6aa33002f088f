"""The picture of `posbench rope`: how many tokens a turn of each pair takes."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

from posbench import files
from posbench.encodings.rope import frequencies
from posbench.reports import charts
from posbench.rope.command import shown_lengths
from posbench.rope.reading import ALL, ROUNDING, Rope

Ropes = Mapping[str, Sequence[Rope]]


def write(path: Path, ropes: Ropes, lengths: Sequence[int]) -> None:
    """Write the picture of one or two configurations as a PNG file and print its
    name.
    """
    files.write(path, charts.image_bytes(picture(ropes, lengths), "png"))
    print(path)


def picture(ropes: Ropes, lengths: Sequence[int]) -> charts.Picture:
    """Draw the tokens of a whole turn by pair of channels, in a panel for each kind of
    layer, beside plain RoPE and the trained length.
    """
    every_rope = itertools.chain(*ropes.values())
    every_kind = {rope.layers or ALL for rope in every_rope}
    kinds = sorted(every_kind - {ALL}) or [ALL]
    with matplotlib.rc_context(charts.STYLE):
        figure = charts.Picture(figsize=(4.2 * len(kinds), 3.2), layout="constrained")
        panels = figure.subplots(1, len(kinds), squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            colours = itertools.cycle(charts.COLOURS)
            for name, layers in ropes.items():
                prefix = f"{name}: " if len(ropes) > 1 else ""
                for rope in layers:
                    if (rope.layers or kind) == kind:
                        _draw(axes, rope, prefix, lengths, colours)
            axes.set(yscale="log", title=kind)
            axes.set(xlabel="pair of channels", ylabel="tokens for a whole turn")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            # each label once
            lines = {str(line.get_label()): line for line in axes.get_lines()}
            axes.legend(handles=lines.values(), fontsize=7, framealpha=0)
    return figure


def _draw(
    axes: Any, rope: Rope, prefix: str, lengths: Sequence[int], colours: Iterator[str]
) -> None:
    """Draw a RoPE at some lengths, once where these are alike, over plain RoPE."""
    unstretched = frequencies(rope.width, rope.base)
    label = f"plain, base {rope.base:,.10g}"
    axes.plot(_tokens_per_turn(unstretched), color=charts.LIGHT, lw=3, label=label)

    drawn = [unstretched]
    for length in shown_lengths(rope, lengths):
        f = rope.at(length)[0]
        if any(torch.allclose(f, other, ROUNDING, 0) for other in drawn):
            continue
        drawn.append(f)
        label = f"{prefix}{rope.type} at {length:,} tokens"
        axes.plot(_tokens_per_turn(f), color=next(colours), lw=1.5, label=label)

    trained = rope.train_length
    label = f"trained, {trained:,}"
    axes.axhline(trained, color=charts.DARK, ls=":", lw=1, label=label)


def _tokens_per_turn(f: Tensor) -> Tensor:
    return torch.where(f > 0, 2 * math.pi / f, math.nan)
