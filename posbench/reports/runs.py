"""`posbench runs`: the runs of a folder, what tells them apart, how they ended, and
what room they take.
"""

import textwrap
from pathlib import Path

from posbench import files
from posbench.reports.render import Column, Table
from posbench.results.frame import read
from posbench.results.settings import differing_settings
from posbench.results.tasks import as_trained
from posbench.terminal import console as terminal

# characters: at least for the settings, and for all columns beside id and settings
LEAST, OTHERS = 16, 40


def main(paths: list[Path]) -> None:
    """Print a line per run below the paths, with the settings that differ in its study;
    a pipe gets whole lines.
    """
    frame = read(paths)
    headline = as_trained(frame) | (frame["curve"] == "fixed_target")
    losses = frame[
        frame["newest"] & headline & (frame["length_ratio"] == 1)
    ].drop_duplicates("folder")
    runs = (
        frame.drop(columns="status")
        .drop_duplicates("folder")
        .rename(columns={"run_status": "status"})
    )
    runs["loss"] = runs["folder"].map(losses.set_index("folder")["nll"])
    runs["study"] = [Path(folder).parent.name for folder in runs["folder"]]
    runs["mb"] = [files.size(Path(folder)) / 1e6 for folder in runs["folder"]]
    settings = {
        study: differing_settings(group) for study, group in runs.groupby("study")
    }
    for run in runs.itertuples():
        differing = settings[run.study].get(run.setting, {})
        words = [
            run.options,
            *(f"{key.rpartition('.')[2]}={value}" for key, value in differing.items()),
        ]
        runs.loc[run.Index, "apart"] = " ".join(words).strip()
    console = terminal.stdout()
    if not console.is_terminal:
        console.width = 1000
    room = max(LEAST, console.width - int(runs["run"].str.len().max()) - OTHERS)
    columns = [
        Column("run", "run", text=True),
        Column("study", "study", spare=2, text=True),
        Column(
            "apart",
            "settings",
            lambda row, name: textwrap.shorten(row[name], room, placeholder=" ..."),
            text=True,
        ),
        Column("status", "status", text=True),
        Column("loss", "loss at 1x", ".3f"),
        Column("mb", "MB", ",.1f", spare=1),
    ]
    Table("", runs, columns).print(console)
