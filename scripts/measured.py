"""Make the measured section of an encoding's page from the kept rows of docs/rows."""

import functools
from pathlib import Path

import pandas as pd

from posbench.results.compare import compare
from posbench.results.frame import read

ROWS = Path(__file__).parents[1] / "docs" / "rows"
STUDIES = {
    "six": "with Muon, five seeds",
    "catalogue_muon": "with Muon, seed 1",
    "six_reader": "five seeds",
    "six_wide": "larger, five seeds",
    "catalogue": "seed 0",
    "catalogue_again": "seed 1",
}
CHANGES = ("rise_2x", "rise_4x", "rise_8x")
HEAD = """
| | loss at 1x | change at 2x | at 4x | at 8x |
|---|---:|---:|---:|---:|
"""
LEGEND = """
Loss is in nats per token. 1x is the training length. The change is on the same target tokens.

The models have 1.0M parameters (`experiment=reader`). They were trained at 128 tokens, on 4.0M tokens of Python's own
library, with AdamW (`training.optimizer=adamw`) where the row does not say *with Muon*. *Larger* models have 3.7M
parameters (`experiment=reader_wide`). They were trained at 256 tokens, on 8.0M tokens of the same text, and were not
evaluated at 8x.

At 1x the seeds of one encoding differ by up to 0.25 nats.
Those of larger models differ by up to 0.08.
Seeds differ by more in the changes.
A smaller difference between single seeds means nothing.
[Results](../results.md#six-encodings) has verdicts over five seeds.
[All encodings](../catalogue.md) are in one table.
[The protocol](../protocol.md) defines the numbers.
"""


def section(name: str) -> str:
    """Return the section of an encoding, with RoPE's numbers for comparison."""
    rows = []
    for study, seeds in STUDIES.items():
        table = table_of_study(study)
        of_name = table[table["encoding"] == name]
        for label, row in of_name.iterrows():
            rows.append(_row(f"`{label}`, {seeds}", row))
        if len(of_name) and name != "rope":
            rows.append(_row(f"RoPE, {seeds}", table.loc["rope"]))
    if not rows:
        command = f"`posbench train encoding={name} experiment=reader`"
        return f"## Measured\n\nNot yet at the size of the catalogue: {command}.\n"
    return "## Measured\n" + HEAD + "\n".join(rows) + "\n" + LEGEND


@functools.cache
def table_of_study(study: str) -> pd.DataFrame:
    """Return the comparison of a kept study: a row per scheme, by its label."""
    rows = read([ROWS / f"{study}.parquet"])
    # only runs of one precision are compared
    tables = [compare(part).frame for _, part in rows.groupby("dtype")]
    return pd.concat(tables).set_index("label")


def _row(name: str, values: pd.Series) -> str:
    cells = [f"{values['nll']:.3f}"]
    for column in CHANGES:
        cells.append(signed(values[column]) if column in values.index else "")
    return f"| {name} | {' | '.join(cells)} |"


def signed(change: float) -> str:
    """Return a change of the loss with its sign."""
    if pd.isna(change):
        return "undefined"
    return f"{round(change, 3) + 0:+.3f}"  # no -0.000
