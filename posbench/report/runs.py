"""`posbench runs`: the runs of a folder, what tells them apart, how they ended, and what room they take."""

import textwrap
from pathlib import Path

import pandas as pd

from posbench import files
from posbench.report.render import Column, Table
from posbench.results import frame as frames
from posbench.results.tasks import as_trained
from posbench.terminal import console as terminal

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
    Table("", runs.assign(mb=runs["bytes"] / 1e6), columns).print(console)


def listed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: `folder`, `run`, `study`, `apart`, `status`, `loss` (nats per token), `bytes`.

    `apart` has the settings that differ within a study, and the options and rates of one encoding.
    """
    headline = as_trained(frame) | (frame["curve"] == "fixed_target")
    losses = frame[frame["newest"] & headline & (frame["length_ratio"] == 1)].drop_duplicates("folder")
    runs = frame.drop(columns="status").drop_duplicates("folder").rename(columns={"run_status": "status"})
    runs["loss"] = runs["folder"].map(losses.set_index("folder")["nll"])
    runs["study"] = [Path(folder).parent.name for folder in runs["folder"]]
    runs["bytes"] = [files.size(Path(folder)) for folder in runs["folder"]]
    settings = {study: frames.differing_settings(same) for study, same in runs.groupby("study")}
    for run in runs.itertuples():
        known = {key: value for key, value in settings[run.study].get(run.setting, {}).items() if value != "null"}
        words = [run.options, *(f"{key.rpartition('.')[2]}={value}" for key, value in known.items())]
        runs.loc[run.Index, "apart"] = " ".join(words).strip()
    return runs[["folder", "run", "study", "apart", "status", "loss", "bytes"]]
