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
        Column("run", "run", text=True),
        Column("study", "study", spare=2, text=True),
        Column("apart", "settings", lambda row, name: textwrap.shorten(row[name], room, placeholder=" ..."), text=True),
        Column("status", "status", text=True),
        Column("loss", "loss at 1x", ".3f"),
        Column("mb", "MB", ",.1f", spare=1),
    ]
    Table("", runs.assign(mb=runs["bytes"] / 1e6), columns).filled().print(console)


def listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: `folder`, `run`, `study`, `apart`, `status`, `loss` (nats per token), `bytes`.

    `apart` has the settings that differ within a study, and the options and rates of one encoding.
    """
    headline = as_trained(frame) | (np.array(frames.curve_names(frame)) == "fixed_target")
    at_training_length = frame[frame["newest"] & headline & (frame["length_ratio"] == 1)]
    runs = frame.drop(columns="status").drop_duplicates("folder").rename(columns={"run_status": "status"})
    runs["loss"] = runs["folder"].map(at_training_length.drop_duplicates("folder").set_index("folder")["nll"])
    runs["study"] = [Path(folder).parent.name for folder in runs["folder"]]
    runs["bytes"] = [files.size(Path(folder)) for folder in runs["folder"]]
    apart: dict[tuple[str, str], str] = {}
    for study, same in runs.groupby("study"):
        for setting, values in frames.differing_settings(same).items():
            known = {key: value for key, value in values.items() if value != "null"}
            asked = {key: value for key, value in known.items() if key not in DIGESTS} or known
            apart[study, setting] = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in asked.items())
    places = zip(runs["options"], runs["study"], runs["setting"], strict=True)
    runs["apart"] = [f"{options} {apart.get((study, setting), '')}".strip() for options, study, setting in places]
    return runs[["folder", "run", "study", "apart", "status", "loss", "bytes"]]
