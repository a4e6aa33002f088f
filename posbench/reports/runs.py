"""`posbench runs`: the runs of a folder, what tells them apart, how they ended, and
what room they take.
"""

import textwrap
from pathlib import Path

from posbench import files
from posbench.reports.render import Column, Row, Table
from posbench.results.frame import read
from posbench.results.settings import differing_settings
from posbench.results.tasks import as_trained
from posbench.terminal import console as terminal

LEAST_ROOM = 16  # characters for the settings
OTHER_COLUMNS = 40  # characters for all columns beside id and settings
PIPE_WIDTH = 1000  # characters


def main(paths: list[Path]) -> None:
    """Print a line per run below the paths, with the settings that differ in its study;
    a pipe gets whole lines.
    """
    frame = read(paths)
    is_main = as_trained(frame) | (frame["curve"] == "fixed_target")
    at_one = frame[frame["newest"] & is_main & (frame["length_ratio"] == 1)]
    losses = at_one.drop_duplicates("folder").set_index("folder")["nll"]

    runs = frame.drop_duplicates("folder").drop(columns="status")
    runs = runs.rename(columns={"run_status": "status"})
    runs["loss"] = runs["folder"].map(losses)
    runs["study"] = [Path(folder).parent.name for folder in runs["folder"]]
    runs["mb"] = [files.size(Path(folder)) / 1e6 for folder in runs["folder"]]

    # what sets each run apart from the others of its study: `base=500 seed=1`
    runs["apart"] = ""
    for _, study in runs.groupby("study"):
        differing = differing_settings(study)
        for place, run in study.iterrows():
            words = []
            if run["label"] != run["encoding"]:
                words.append(run["label"])
            for key, value in differing.get(run["setting"], {}).items():
                words.append(f"{key.rpartition('.')[2]}={value}")
            runs.loc[place, "apart"] = " ".join(words)

    console = terminal.stdout()
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    longest_name = int(runs["run"].str.len().max())
    room = max(LEAST_ROOM, console.width - longest_name - OTHER_COLUMNS)

    def settings_cell(row: Row, name: str) -> str:
        return textwrap.shorten(row[name], room, placeholder=" ...")

    columns = [
        Column("run", "run", text=True),
        Column("study", "study", spare=2, text=True),
        Column("apart", "settings", settings_cell, text=True),
        Column("status", "status", text=True),
        Column("loss", "loss at 1x", ".3f"),
        Column("mb", "MB", ",.1f", spare=1),
    ]
    Table("", runs, columns).print(console)
