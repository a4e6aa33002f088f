"""The properties that tutorials want from a positional encoding, measured.

Sources: "Positional Encodings of Attention Mechanisms: Sinusoidal, Rotary Positional
Encodings (Part 2)"; "Evolution of Positional Encoding in the Transformer Module" (fun
ai course, slides) for mean, spread and relative logits.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Shape
from posbench.errors import UserError
from posbench.model.standalone import attention_output
from posbench.reports.render import Column, Row, Table
from posbench.show import command, panels
from posbench.terminal import console

# One head. train_length is above T5's max_distance, and no power of 2: the ends of
# `binary` and `learned` differ.
SHAPE = Shape(d_model=32, n_heads=1, n_layers=2, train_length=160, token_rms=0.02)
LENGTH, LONGEST = 48, 256  # tokens of an input; LONGEST is beyond the training length
FINE = 256  # steps between two positions

# The properties, and what their numbers say.
SAYS: dict[str, Callable[[Any], bool | str]] = {
    "order": lambda share: "partial" if 0.01 < share < 0.99 else share >= 0.99,
    "unique": lambda gap: gap > 1e-6,
    "relative_logit": lambda change: change < 1e-4,
    "relative_code": lambda unevenness: unevenness < 1e-3,
    "continuous": lambda share: share < 1 / 16,
    "invariant": lambda change: change < 1e-5,
    "purpose": str,
    "mean": "{:.3g}".format,
    "spread": "{:.3g}".format,
}


def main(words: list[str] | None = None, as_json: bool = False) -> None:
    """Print a table of what the numbers say, or the numbers themselves as JSON."""
    torch.set_num_threads(1)
    frame = measure(words)
    if as_json:
        print(frame.to_json(orient="records", indent=2))
        return
    columns = [Column("encoding", "encoding", text=True)]
    columns += [
        Column(name, name.replace("relative_", "rel. "), in_words, at, True)
        for at, name in enumerate(SAYS)
    ]
    Table("", frame, columns, "--json has the numbers behind the words").print(
        console.stdout()
    )


def in_words(row: Row, name: str) -> str:
    """Return what the number of a property says: yes, no, or a word; n/a where there is
    none.
    """
    answer = "n/a" if pd.isna(row[name]) else SAYS[name](row[name])
    return answer if isinstance(answer, str) else "yes" if answer else "no"


@torch.no_grad()
def measure(words: list[str] | None = None) -> pd.DataFrame:
    """Return a row of numbers per encoding; words are names, each followed by its
    options. None: all encodings.
    """
    builds = (
        command.builder(*scheme) for scheme in command.split(words or encodings.names())
    )
    rows = [
        {"encoding": name, **_numbers(build(SHAPE, draw=False), build(SHAPE))}
        for name, build in builds
    ]
    return pd.DataFrame(rows)


def _numbers(initial: Encoding, encoding: Encoding) -> dict[str, float | str]:
    # codes at the input; NaN if there are none
    code, raw = torch.full((2, LENGTH, 1), math.nan)
    if "embed" in panels.hooks_of(encoding):
        code = panels.input_code(encoding, panels.positions_of(encoding, LENGTH))
        raw = panels.input_code(
            initial, panels.positions_of(initial, SHAPE.train_length)
        )
    gaps = torch.cdist(code, code)
    vectors = panels.code(encoding, torch.arange(2 * LENGTH)[None])
    differences = (vectors[:, None] - vectors).norm(dim=-1).fill_diagonal_(math.inf)
    moved = panels.moved_logits(
        encoding,
        ["a", "phrase", "with", "the", "query", "and", "its", "key"],
        4,
        7,
        LONGEST,
    )
    tokens = panels.random(1, 2 * LENGTH, encoding.token_dim())
    longer = _output(encoding, tokens)[:, :, :LENGTH] - _output(
        encoding, tokens[:, :LENGTH]
    )
    return {
        "order": _order(encoding),
        "unique": float(differences.min()),  # the smallest distance of two codes
        "relative_logit": float(np.nanmax(moved) - np.nanmin(moved))
        / max(1.0, np.nanmax(np.abs(moved))),
        "relative_code": max(
            float(gaps.diagonal(-r).max() - gaps.diagonal(-r).min())
            for r in range(1, len(gaps))
        ),
        "continuous": _continuous(encoding),
        # change of the first outputs when as many tokens follow
        "invariant": float(longer.abs().max()),
        "purpose": _purpose(encoding),
        "mean": float(raw.mean()),  # of the code at scale 1 at the start of training
        "spread": float(raw.square().mean().sqrt()),
    }


def _output(encoding: Encoding, tokens: Tensor, last: int | None = None) -> Tensor:
    """Return a causal layer's outputs for tokens (B, T, D): (B, 1, last or T, D)."""
    q, k, v, x, positions = panels.read(encoding, tokens)
    return attention_output(encoding, q, k, v, x, positions=positions, last=last)


def _order(encoding: Encoding) -> float:
    """Return the share of swaps of two tokens before the last one that change its
    output.
    """
    first, second = torch.triu_indices(LENGTH - 1, LENGTH - 1, offset=1)
    index, rows = (
        torch.arange(LENGTH).repeat(len(first) + 1, 1),
        torch.arange(len(first)),
    )
    index[rows, first], index[rows, second] = second, first
    tokens = panels.random(LENGTH, encoding.token_dim())
    outputs = torch.cat(
        [_output(encoding, tokens[batch], last=1) for batch in torch.split(index, 32)]
    )
    changes = (outputs[:-1] - outputs[-1]).abs().flatten(1).amax(-1)
    return float((changes > 1e-6 * outputs[-1].abs().max()).double().mean())


def _continuous(encoding: Encoding) -> float:
    """Return the code's largest change in a small step as a share of that in a whole
    one: 1 at a jump, NaN: no code.
    """
    codes, far_codes = (
        panels.code(encoding, positions[None])
        for positions in (torch.arange(8), torch.arange(8) ** 2)
    )
    if torch.allclose(codes, far_codes, atol=1e-6):
        return math.nan  # independent of positions
    try:
        vectors = panels.code(encoding, torch.arange(8 * FINE + 1)[None] / FINE)
    except UserError:
        return 1.0  # defined for whole positions only
    small_step, whole_step = (
        float((vectors[step:] - vectors[:-step]).norm(dim=-1).max())
        for step in (1, FINE)
    )
    return small_step / whole_step


def _purpose(encoding: Encoding) -> str:
    """Return what the encoding changes: scores (logits), values (outputs at equal
    weights), both, or neither.
    """
    tokens = panels.random(1, LENGTH, encoding.token_dim())
    change, weights = panels.logit_change(encoding, tokens)
    change = torch.where(torch.isfinite(change), change, math.nan)
    values = (
        _output(encoding, tokens)
        - weights @ panels.read(encoding, tokens, bare=True)[2]
    )
    acts = {"scores": change - change.nanmean(-1, keepdim=True), "values": values}
    acting = [
        name for name, change in acts.items() if change.abs().nan_to_num().max() > 1e-5
    ]
    return "both" if len(acting) == 2 else "".join(acting) or "neither"
