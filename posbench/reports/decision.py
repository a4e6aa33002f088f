"""The facts that decide between encodings: results, cost, and what is known before any
run.
"""

import pandas as pd

from posbench.listing import known_card
from posbench.reports.render import Column, Row, Table
from posbench.reports.tables import main_table, range_text
from posbench.results.comparison import Comparison, Interval
from posbench.run.rows import PLAIN

BESIDE = "none"  # the encoding of cost 1
PROBE = "passkey"
FARTHER = 4  # training lengths at which the probe and the memory are shown


def card_table(frame: pd.DataFrame, comparison: Comparison) -> Table:
    """Return a table to decide between schemes; `comparison`: what
    `results.compare.compare` returns for rows `frame`.
    """
    is_plain = (frame["run_status"] == "done") & (frame["variant"] == PLAIN)
    rows = frame[is_plain]
    is_far = (rows["length_ratio"] == FARTHER) & rows["newest"] & ~rows["repeated"]
    probed = rows[is_far & (rows["task"] == PROBE)]
    accuracy = probed.groupby("label")["accuracy"].mean().rename("right")

    seconds = rows[["train_seconds", "cpu_seconds"]].min(axis=1)
    on_text = rows[is_far & (rows["protocol"] == "fixed_target")]
    peaks = on_text["peak_memory_bytes"].astype("float64")
    costs = pd.DataFrame(
        {
            "time": seconds.groupby(rows["label"]).min(),
            "memory": peaks.groupby(on_text["label"]).min(),
        }
    )
    costs /= costs.reindex([BESIDE]).iloc[0]

    schemes = comparison.records
    known = [known_card(name) for name in schemes["encoding"]]
    facts = pd.DataFrame(known, schemes["label"])
    joined = schemes.join(pd.concat([costs, accuracy, facts], axis=1), on="label")

    def interval(row: Row, name: str) -> str:
        if row["numbers"] is None:
            return ""
        nll: Interval = row[name]
        return range_text(nll.low, nll.high, ".3f")

    columns = []
    for column in main_table(comparison).columns:
        if column.name in ("encoding", "loss", "holds_to"):
            columns.append(column)
    columns.append(Column("interval", "95 %", interval, of="nll"))
    columns.append(Column("right", f"{PROBE} at {FARTHER}x", ".0%"))
    columns.append(Column("time", f"time ({BESIDE} = 1)", ".2f"))
    columns.append(Column("memory", f"memory ({BESIDE} = 1)", ".2f"))
    columns.append(Column("kernels", "kernels", text=True))
    columns.append(Column("cache", "cache", text=True))
    columns.append(Column("architectures", "exports", text=True))
    columns.append(Column("models", "in transformers", text=True))
    note = (
        f"time: of the fastest seed; memory: at {FARTHER}x; both as multiples of those"
        f" of '{BESIDE}'; kernels: any, with a bias, or posbench's own; cache: whether"
        " keys and values suffice"
    )
    return Table("To decide", joined, columns, note)
