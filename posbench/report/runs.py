"""`posbench runs`: the runs of a folder, what tells them apart, how they ended, and what room they take."""

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

from posbench import files
from posbench.report.render import Column, Table
from posbench.results import frame as frames
from posbench.results.tasks import as_trained
from posbench.terminal import console as terminal

DIGESTS = ("text_sha256", "text_split", "tokenizer_sha256")
LEAST, OTHERS = 16, 40  # characters: of the settings, and of the columns beside id and settings


def main(paths: list[Path]) -> None:
    """Print a line per run below the paths; in a pipe nothing is cut off."""
    runs = listed(frames.read(paths))
    console = terminal.stdout()
    if not console.is_terminal:
        console.width = 1000
    room = max(LEAST, console.width - int(runs["run"].str.len().max()) - OTHERS)
    columns = [
        Column("run", "run", lambda row: row["run"], text=True),
        Column("study", "study", lambda row: row["study"], spare=2, text=True),
        Column("apart", "settings", lambda row: textwrap.shorten(row["apart"], room, placeholder=" ..."), text=True),
        Column("status", "status", lambda row: row["status"], text=True),
        Column("loss", "loss at 1x", lambda row: "" if pd.isna(row["loss"]) else f"{row['loss']:.3f}"),
        Column("size", "MB", lambda row: f"{row['bytes'] / 1e6:,.1f}", spare=1),
    ]
    Table("", runs, columns).filled().print(console)


def listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: `folder`, `run`, `study`, `apart`, `status`, `loss` (nats per token), `bytes`.

    `apart` has the settings that differ within a study, and the options and rates of one encoding.
    """
    headline = as_trained(frame) | (np.array(frames.curve_names(frame)) == "fixed_target")
    at_training_length = frame[frame["newest"] & headline & (frame["length_ratio"] == 1)]
    losses = at_training_length.drop_duplicates("folder").set_index("folder")["nll"]
    runs = frame.drop_duplicates("folder").copy()
    runs["study"] = [Path(folder).parent.name for folder in runs["folder"]]
    settings: dict[tuple[str, str], str] = {}
    for study, same in runs.groupby("study"):
        for setting, values in frames.differing_settings(same).items():
            known = {key: value for key, value in values.items() if value != "null"}
            asked = {key: value for key, value in known.items() if key not in DIGESTS} or known
            settings[study, setting] = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in asked.items())
    others = [settings.get(place, "") for place in zip(runs["study"], runs["setting"], strict=True)]
    return pd.DataFrame({
        "folder": runs["folder"],
        "run": runs["run"],
        "study": runs["study"],
        "apart": [" ".join(filter(None, pair)) for pair in zip(runs["options"], others, strict=True)],
        "status": runs["run_status"],
        "loss": runs["folder"].map(losses),
        "bytes": [files.size(Path(folder)) for folder in runs["folder"]],
    })  # fmt: skip
