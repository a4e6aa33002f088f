"""Make the table of docs/results.md on whether the optimizer changes which encoding
wins, from kept rows.

    python scripts/optimizers.py
"""

from typing import NamedTuple

import numpy as np
import pandas as pd
from measured import table_of_study
from retrieval import bootstrapped, spearman

MUON = "catalogue_muon"  # seed 1
ADAMW = ("catalogue", "catalogue_again")  # seeds 0 and 1
COLUMNS = {"nll": "loss at 1x", "rise_2x": "rise at 2x", "rise_8x": "rise at 8x"}
CLEAR = 0.05  # nats; the losses of two seeds of a scheme mostly differ by less


class Agreement(NamedTuple):
    """How far two lists of numbers order the same schemes alike."""

    correlation: tuple[float, float, float]  # Spearman's, and its 95 % interval
    clear: int  # pairs that differ by CLEAR in both
    reversed: int  # of these, those whose order is the other way round


def agreement(first: "pd.Series[float]", second: "pd.Series[float]") -> Agreement:
    """Return how far two lists, by scheme, agree on those that both have."""
    both = pd.concat([first, second], axis=1, keys=["first", "second"], join="inner")
    both = both.dropna()
    one, other = np.triu_indices(len(both), k=1)
    values = both.to_numpy()
    differences = values[one] - values[other]  # (pairs, 2)
    is_clear = np.all(np.abs(differences) >= CLEAR, axis=1)
    is_reversed = np.prod(differences, axis=1) < 0
    return Agreement(
        bootstrapped(spearman, both["first"], both["second"]),
        int(is_clear.sum()),
        int((is_clear & is_reversed).sum()),
    )


def agreement_lines() -> list[str]:
    """Return the rows of the table on optimizers: AdamW's two seeds with each other,
    and Muon's with AdamW's of the same seed, on the same schemes.
    """
    first, second = map(table_of_study, ADAMW)
    muon = table_of_study(MUON)
    shared = second.index.intersection(muon.index)
    lines = []
    for column, title in COLUMNS.items():
        adamw = second.loc[shared, column]
        for name, other in {"another seed": first, "Muon": muon}.items():
            agreed = agreement(other[column], adamw)
            spearman_r, low, high = agreed.correlation
            correlation = f"{spearman_r:.2f} \\[{low:.2f}, {high:.2f}\\]"
            pairs = f"{agreed.reversed} of {agreed.clear:,}"
            lines.append(f"| {title} | {name} | {correlation} | {pairs} |")
    return lines


if __name__ == "__main__":
    print("\n".join(agreement_lines()))
