"""Compare retrieval with loss, from kept rows: how far each scheme of the catalogue
finds a passkey, and how far its loss holds.

    python scripts/retrieval.py docs/retrieval.png
"""

import sys
from pathlib import Path
from typing import Any

import encoding_pages
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from measured import table_of_study
from scipy import stats

from posbench.claims.judge import share_bounds
from posbench.reports.charts import GREY, STYLE, image_bytes, scheme_colour
from posbench.results.frame import read
from posbench.results.words import RISE_LIMIT

ROWS = Path(__file__).parents[1] / "docs" / "rows"
SEEDS = ("catalogue", "catalogue_again")  # of the text's models
FAR = 4  # times the training length, where both are compared
TICKS = (-0.1, 0, 0.1, 1, 3)  # of rises
NAMED = ("rope", "alibi", "t5", "fox", "none", "sinusoidal", "xpos", "partial_rope")


def retrieval(rows: pd.DataFrame) -> pd.DataFrame:
    """Return by scheme the share of right tokens at FAR times the trained length,
    `right`, with its bounds, and `finds_to`: the largest length, as a multiple, up to
    which the scheme retrieves at each tested length. 0: at none.
    """
    schemes = {}
    tested = rows[(rows["task"] == "passkey") & (rows["offset"].fillna(0) == 0)]
    # the model has two layers: a pattern of four or six would lack its last ones
    tested = tested[tested["encoding"] != "layered"]
    for label, of_label in tested.sort_values("length_ratio").groupby("label"):
        finds_to = 0.0
        for row in of_label.to_dict("records"):
            if not _retrieves(row):
                break
            finds_to = row["length_ratio"]
        far = of_label[of_label["length_ratio"] == FAR].iloc[0].to_dict()
        low, high = _bounds(far)
        schemes[label] = {
            "finds_to": finds_to,
            "right": far["accuracy"],
            "right_low": low,
            "right_high": high,
        }
    return pd.DataFrame(schemes).T


def _retrieves(row: dict[str, Any]) -> bool:
    """Return whether more answers are shown to be right than a reader has that does not
    retrieve.
    """
    low, _ = _bounds(row)
    return low > row["trivial"]


def _bounds(row: dict[str, Any]) -> tuple[float, float]:
    """Return the 95 % interval of a row's share of right answers."""
    if np.isnan(row["accuracy"]):
        return np.nan, np.nan
    return share_bounds(row["accuracy"], int(row["n_blocks"]))


def both() -> pd.DataFrame:
    """Return retrieval and loss by scheme: `rise` at FAR times the training length, mean
    of two seeds, and `kind`, beside the columns of `retrieval`.
    """
    rises = [table_of_study(study)[f"rise_{FAR}x"] for study in SEEDS]
    table = retrieval(read([ROWS / "passkey.parquet"]))
    table["rise"] = sum(rises) / len(rises)
    table["kind"] = pd.Series(kinds())
    return table


def correlation(table: pd.DataFrame) -> tuple[float, float, float]:
    """Return Spearman's rank correlation of right answers with the rise, and its 95 %
    interval: a bootstrap over schemes.
    """
    complete = table.dropna()
    return bootstrapped(spearman, complete["right"], complete["rise"])


def correlation_within(table: pd.DataFrame) -> tuple[float, float, float]:
    """Return the same within kinds: of what a scheme's ranks are above the mean of its
    kind.
    """
    complete = table.dropna()
    kinds = pd.factorize(complete["kind"])[0]
    return bootstrapped(_within, complete["right"], complete["rise"], kinds)


def bootstrapped(statistic: Any, *columns: Any) -> tuple[float, float, float]:
    """Return a statistic of schemes, and its 95 % interval."""
    interval = stats.bootstrap(
        columns,
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=2000,
        rng=np.random.default_rng(0),
    ).confidence_interval
    return statistic(*columns), interval.low, interval.high


def spearman(right: Any, rise: Any) -> float:
    return float(stats.spearmanr(right, rise).statistic)


def _within(right: Any, rise: Any, kinds: Any) -> float:
    ranks = pd.DataFrame({"right": stats.rankdata(right), "rise": stats.rankdata(rise)})
    ranks -= ranks.groupby(np.asarray(kinds)).transform("mean")
    return float(ranks["right"].corr(ranks["rise"]))


def kinds() -> dict[str, str]:
    """Return the kind of each encoding: where it acts, as the site groups them."""
    kind_of = {}
    for group in encoding_pages.by_place():
        for kind, pages in group.items():
            for page in pages:
                kind_of |= dict.fromkeys(page, kind)
    return kind_of


def cell(scheme: pd.Series) -> str:
    """Return what the catalogue says of a scheme: how far it finds, and % right."""
    reach = f"{scheme['finds_to']:g}x"
    if np.isnan(scheme["right"]):
        return reach
    low = 100 * scheme["right_low"]
    high = 100 * scheme["right_high"]
    return f"{reach}, {low:.0f}-{high:.0f}"


def figure(table: pd.DataFrame) -> Figure:
    """Return the shares of right answers over the rises, a point per scheme."""
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(6.4, 4.2), layout="constrained")
        axes = picture.subplots()
        axes.axvline(RISE_LIMIT, color=GREY, linestyle="dotted")
        axes.set_xscale("symlog", linthresh=0.1)
        axes.set_xticks(TICKS, map(str, TICKS))
        for label, row in table.dropna().iterrows():
            colour = scheme_colour(label) if label in NAMED else GREY
            span = [
                [row["right"] - row["right_low"]],
                [row["right_high"] - row["right"]],
            ]
            axes.errorbar(row["rise"], row["right"], span, fmt="o", ms=4, color=colour)
            if label in NAMED:
                axes.annotate(
                    label,
                    (row["rise"], row["right"]),
                    xytext=(5, 3),
                    textcoords="offset points",
                    color=colour,
                )
        axes.set_xlabel(f"rise of the loss at {FAR}x (dotted: holds)")
        axes.set_ylabel(f"passkey digits right at {FAR}x")
    return picture


if __name__ == "__main__":
    schemes = both()
    print(schemes.sort_values("right", ascending=False).round(3).to_string())
    interval = "{:.2f} [{:.2f}, {:.2f}]"
    print("Spearman's correlation of right with rise")
    print("over all:", interval.format(*correlation(schemes)))
    print("within kinds:", interval.format(*correlation_within(schemes)))
    for kind, of_kind in schemes.dropna().groupby("kind"):
        if len(of_kind) >= 10:
            alone = spearman(of_kind["right"], of_kind["rise"])
            print(f"{kind}, {len(of_kind)}: {alone:.2f}")
    Path(sys.argv[1]).write_bytes(image_bytes(figure(schemes), "png"))
