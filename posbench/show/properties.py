"""The properties that tutorials want from a positional encoding, measured.

Sources: "Positional Encodings of Attention Mechanisms: Sinusoidal, Rotary Positional
Encodings (Part 2)"; "Evolution of Positional Encoding in the Transformer Module" (fun
ai course, slides) for mean, spread and relative logits.
"""

import logging
import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Shape
from posbench.errors import Undefined, UserError
from posbench.model.standalone import attention_output
from posbench.options import by_name
from posbench.reports.render import Column, Row, Table
from posbench.show import command, flips, panels
from posbench.terminal import console

logger = logging.getLogger(__name__)
# One head. train_length is above T5's max_distance, and no power of 2: the ends of
# `binary` and `learned` differ.
SHAPE = Shape(d_model=32, n_heads=1, n_layers=2, train_length=160, token_rms=0.02)
LENGTH, LONGEST = 48, 256  # tokens of an input; LONGEST is beyond the training length
FINE = 256  # steps between two positions

# What the number of a property has to be above, or below.
ABOVE = {"order": 0.99, "unique": 1e-6}
BELOW = {
    "relative_logit": 1e-4,
    "relative_code": 1e-3,
    "continuous": 1 / 16,
    "invariant": 1e-5,
}
FLIPS = ("flips_1x", "flips_8x")
PROPERTIES = (*ABOVE, *BELOW, "purpose", "mean", "spread", *FLIPS)


def main(words: list[str] | None = None, as_json: bool = False) -> None:
    """Print a table of what the numbers say, or the numbers themselves as JSON."""
    torch.set_num_threads(1)
    if not words:
        logger.info("all %d encodings: a minute", len(encodings.names()))
    frame = measure(words)
    if as_json:
        print(frame.to_json(orient="records", indent=2))
        return
    columns = [Column("encoding", "encoding", text=True)]
    for spare, name in enumerate(PROPERTIES):
        head = name.replace("relative_", "rel. ").replace("_", " ")
        columns.append(Column(name, head, in_words, spare, text=True))
    table = Table("", frame, columns, "--json has the numbers behind the words")
    table.print(console.stdout())


def in_words(row: Row, name: str) -> str:
    """Return what the number of a property says: yes, no, or a word; n/a where there is
    none.
    """
    value = row[name]
    if pd.isna(value):
        return "n/a"
    if name == "purpose":
        return str(value)
    if name in ("mean", "spread"):
        return f"{value:.3g}"
    if name in FLIPS:
        return f"{value:.2f}"
    if name == "order" and 0.01 < value < ABOVE[name]:
        return "partial"
    if name in ABOVE and value < ABOVE[name]:
        return "no"
    if name in BELOW and value >= BELOW[name]:
        return "no"
    return "yes"


@torch.no_grad()
def measure(words: list[str] | None = None) -> pd.DataFrame:
    """Return a row of numbers per encoding; words are names, each followed by its
    options. None: all encodings.
    """
    rows = []
    for scheme in by_name(words or encodings.names()):
        label, build = command.builder(*scheme)
        encoding = build(SHAPE)
        # at scale 1, at the start of training
        code = _input_code(build(SHAPE, draw=False), SHAPE.train_length)
        flips_1x, flips_8x = flips.shares(build)
        row: dict[str, object] = {"encoding": label}
        for name, measured in MEASURED.items():
            try:
                row[name] = measured(encoding)
            except Undefined:  # it ends before the lengths that this takes
                row[name] = math.nan
        row["mean"] = float(code.mean())
        row["spread"] = float(code.square().mean().sqrt())
        row["flips_1x"] = flips_1x
        row["flips_8x"] = flips_8x
        rows.append(row)
    return pd.DataFrame(rows)


def _input_code(encoding: Encoding, length: int) -> Tensor:
    """Return the code of positions at the input (T, D); NaN: there is none."""
    if "embed" not in panels.hooks_of(encoding):
        return torch.full((length, 1), math.nan)
    return panels.input_code(encoding, panels.positions_of(encoding, length))


def unique(encoding: Encoding) -> float:
    """Return the smallest distance of two codes."""
    length = 2 * LENGTH
    if encoding.max_length is not None:  # keys of a query stand at so many distances
        length = min(length, encoding.max_length - panels.MARGIN)
    codes = panels.code(encoding, torch.arange(length)[None])
    distances = (codes[:, None] - codes).norm(dim=-1)
    return float(distances.fill_diagonal_(math.inf).min())


def relative_logit(encoding: Encoding) -> float:
    """Return how much the logit of two words changes as their phrase moves, as a share
    of what is added to it.
    """
    phrase = ["a", "phrase", "with", "the", "query", "and", "its", "key"]
    added = panels.moved_logits(encoding, phrase, 4, 7, LONGEST)
    largest = max(1.0, np.nanmax(np.abs(added)))
    return float((np.nanmax(added) - np.nanmin(added)) / largest)


def relative_code(encoding: Encoding) -> float:
    """Return how unevenly two codes that are equally far apart in tokens differ."""
    code = _input_code(encoding, LENGTH)
    gaps = torch.cdist(code, code)
    unevenness = []
    for distance in range(1, len(gaps)):
        equally_far = gaps.diagonal(-distance)
        unevenness.append(float(equally_far.max() - equally_far.min()))
    return max(unevenness)


def invariant(encoding: Encoding) -> float:
    """Return the change of the first outputs when as many tokens follow."""
    length = LENGTH
    if encoding.max_length is not None:
        length = min(length, encoding.max_length // 2)
    tokens = panels.random(1, 2 * length, encoding.token_dim())
    alone = _output(encoding, tokens[:, :length])
    followed = _output(encoding, tokens)[:, :, :length]
    return float((followed - alone).abs().max())


def _output(encoding: Encoding, tokens: Tensor, last: int | None = None) -> Tensor:
    """Return a causal layer's outputs for tokens (B, T, D): (B, 1, last or T, D)."""
    q, k, v, x, positions = panels.read(encoding, tokens)
    return attention_output(encoding, q, k, v, x, positions=positions, last=last)


def order(encoding: Encoding) -> float:
    """Return the share of swaps of two tokens before the last one that change its
    output.
    """
    first, second = torch.triu_indices(LENGTH - 1, LENGTH - 1, offset=1)
    swaps = torch.arange(len(first))
    places = torch.arange(LENGTH).repeat(len(first) + 1, 1)  # the last row: no swap
    places[swaps, first] = second
    places[swaps, second] = first

    tokens = panels.random(LENGTH, encoding.token_dim())
    batches = torch.split(places, 32)
    outputs = torch.cat([_output(encoding, tokens[batch], last=1) for batch in batches])
    unswapped = outputs[-1]
    changes = (outputs[:-1] - unswapped).abs().flatten(1).amax(-1)
    has_changed = changes > 1e-6 * unswapped.abs().max()
    return float(has_changed.double().mean())


def continuous(encoding: Encoding) -> float:
    """Return the code's largest change in a small step as a share of that in a whole
    one: 1 at a jump, NaN: no code.
    """
    positions = torch.arange(8)
    codes = panels.code(encoding, positions[None])
    far_codes = panels.code(encoding, positions[None] ** 2)
    if torch.allclose(codes, far_codes, atol=1e-6):
        return math.nan  # independent of positions
    try:
        codes = panels.code(encoding, torch.arange(8 * FINE + 1)[None] / FINE)
    except UserError:
        return 1.0  # defined for whole positions only
    small_steps = (codes[1:] - codes[:-1]).norm(dim=-1)
    whole_steps = (codes[FINE:] - codes[:-FINE]).norm(dim=-1)
    return float(small_steps.max()) / float(whole_steps.max())


def purpose(encoding: Encoding) -> str:
    """Return what the encoding changes: scores (logits), values (outputs at equal
    weights), both, or neither.
    """
    tokens = panels.random(1, LENGTH, encoding.token_dim())
    change, weights = panels.logit_change(encoding, tokens)
    change = torch.where(torch.isfinite(change), change, math.nan)
    bare_values = panels.read(encoding, tokens, bare=True)[2]
    has_scores = _acts(change - change.nanmean(-1, keepdim=True))
    has_values = _acts(_output(encoding, tokens) - weights @ bare_values)
    if has_scores and has_values:
        return "both"
    if has_scores:
        return "scores"
    return "values" if has_values else "neither"


def _acts(change: Tensor) -> bool:
    return bool(change.abs().nan_to_num().max() > 1e-5)


# What is measured of an encoding, by the name of its column.
MEASURED: dict[str, Callable[[Encoding], object]] = {
    "order": order,
    "unique": unique,
    "relative_logit": relative_logit,
    "relative_code": relative_code,
    "continuous": continuous,
    "invariant": invariant,
    "purpose": purpose,
}
