"""Make the table of docs/longer.md on extending patterns of layers, from kept rows.
python scripts/extended_patterns.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from posbench.results.compare import compare, main_rows
from posbench.results.comparison import Comparison, Interval, Scheme
from posbench.results.frame import read
from posbench.results.settings import setting_text
from posbench.results.words import NOT_RESOLVED

ROWS = Path(__file__).parents[1] / "docs" / "rows" / "extend_patterns.parquet"
METHODS = ("pi", "yarn", "abf:base=500000", "temperature:rule=logn")


def table_lines() -> list[str]:
    """Return the rows of the table: of each pattern training alone, then the methods,
    in its global layers and in all.
    """
    rows = read([ROWS])
    lines = []
    for pattern, of_pattern in rows.groupby(rows["settings"].map(_pattern)):
        for cells in _of_pattern(of_pattern):
            lines.append(f"| {pattern} | {' | '.join(cells)} |")
    return lines


def _of_pattern(rows: pd.DataFrame) -> Iterator[list[str]]:
    """Yield the cells of one pattern's rows, after its name."""
    named = rows["command"].map(_method)
    label_of = dict(zip(named, rows["label"], strict=True))
    losses = _losses(rows)
    beside_none = compare(rows, reference=label_of[""])

    def of(label: str) -> list[str]:
        rise = _scheme(beside_none, label).numbers.rises[2.0]
        at_512 = losses[label, 512, True], losses[label, 512, False]
        each = [losses[label, 128, False], *at_512]
        return [*(f"{loss:.3f}" for loss in each), _signed(rise)]

    yield ["training alone", *of(label_of[""]), "", ""]
    for method in METHODS:
        # where there is no window, all layers are global
        label = label_of.get(f"{method}:global") or label_of[f"{method}:all"]
        above_none = _difference(_scheme(beside_none, label))
        above_global = ""
        in_all = label_of.get(f"{method}:all", label)
        if in_all != label:
            beside_global = compare(rows, reference=label)
            above_global = _difference(_scheme(beside_global, in_all))
        yield [f"`{method}`", *of(label), above_none, above_global]


def _pattern(settings: str) -> str:
    """Return the pattern of layers that a run began from: `3 rope + none`."""
    return setting_text(json.loads(settings)["start.options.layers"])


def _method(command: str) -> str:
    """Return what was done to a pattern, `yarn:global`; nothing for training alone."""
    extension = re.search(r"encoding=([\w.:=]+):layers=(\w+)", command)
    return f"{extension[1]}:{extension[2]}" if extension else ""


def _losses(rows: pd.DataFrame) -> "pd.Series[float]":
    """Return the mean losses of seeds by label, length, and whether that is before
    training.
    """
    first = rows[(rows["tokens"] == 0) & (rows["protocol"] == "fixed_target")]
    both = pd.concat([first, main_rows(rows)])
    plain = both[both["variant"] == "plain"]
    return plain.groupby(["label", "length", plain["tokens"] == 0])["nll"].mean()


def _scheme(comparison: Comparison, label: str) -> Scheme:
    (found,) = [each for each in comparison.schemes if each.label == label]
    return found


def _difference(scheme: Scheme) -> str:
    """Return a scheme's difference from the reference, in bold if it is resolved."""
    difference = scheme.nll_difference
    text = _signed(difference.interval)
    is_resolved = difference.word not in ("", NOT_RESOLVED)
    return f"**{text}**" if is_resolved else text


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} ±{interval.half:.3f}"


if __name__ == "__main__":
    print("\n".join(table_lines()))
