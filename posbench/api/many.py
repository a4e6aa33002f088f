"""Several runs, as one table and as one figure."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from posbench.api.run import LoadedRun
from posbench.errors import UserError
from posbench.report.comparison import load
from posbench.report.comparison.load import RunData
from posbench.run_folder import finding
from posbench.run_folder.jsonl import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns before what was measured. `label` is the encoding with the options that tell it from the others, `data` the
# sha256 of the text, `tokens` what it was trained on, `status` done, running, stopped, died or why it failed.
_KNOWN = (
    "study", "id", "encoding", "label", "seed", "train_length", "learning_rate", "parameters", "tokens", "status",
    "data", "learned",
)  # fmt: skip


def runs(*paths: str | Path) -> pd.DataFrame:
    """Runs as a table, a row each.

    Args:
        paths: run folders, study folders and globs, `outputs/**`; default: `outputs`.

    Returns:
        Besides what tells the runs apart: `tokens` trained on, as in the report's `runs.csv`, empty where training
        failed or has not ended; `learned`, yes, no or not resolved, as of `LoadedRun.learned`, empty where it
        is not known; `nll_1x`, `nll_2x` .. and `rise_2x`, `rise_4x` .. in nats per token of the same target tokens, at
        so many training lengths and above 1x; `reach`, the longest context in tokens up to which the rise is at most
        0.05, by its upper bound, empty for a run that has not learned; `uses`, the shortest context in tokens whose
        nll is within 0.02 of `nll_1x`, by the same bound; `seconds` of training; `folder`. Where runs on
        tasks are among them: `task`, `steps_to_gate`, `accuracy_1x` .. and `exact_match_1x` .., shares at so many times
        the longest trained problem; their `nll_1x` is of the answers' tokens.

    Raises:
        UserError: a path that does not exist, or no run at all. A run that cannot be read is left out with a warning.
    """
    read = list(_readable(finding.run_folders([Path(path) for path in paths or ("outputs",)])))
    labels = {
        run.folder: scheme.label for group in load.groups(read) for scheme in group.schemes for run in scheme.runs
    }
    measured = {run.folder: run.headline for run in read}
    names = sorted(
        {name for values in measured.values() for name in values if name != "learned"} | {"nll_1x"}, key=_measure_order
    )
    rows = [_row(run, labels[run.folder]) | measured[run.folder] for run in read]
    task = ["task"] if any(run.task for run in read) else []
    frame = pd.DataFrame(rows, columns=[*_KNOWN, *task, *names, "seconds", "folder"])
    return frame.astype({"parameters": "Int64", "tokens": "Int64"} | dict.fromkeys([*names, "seconds"], "float64"))


def plot(*runs: LoadedRun | str | Path, reference: str | None = None) -> "Figure":
    """Curves of runs that may be compared: nll by context, and its rise on the same target tokens.

    One line per scheme: several seeds of it are its band, and a third panel has each of them at 4x. Of a task: accuracy
    by problem length, a dot per seed.

    Args:
        runs: what `load` or `train` returned, run folders, study folders or globs.
        reference: the encoding or label that the others are compared with. Its windowed curve is drawn too. Many
            schemes get a row for each family; its curve is in every row. None: `rope`.

    Raises:
        UserError: the runs may not be compared, since they differ in more than the encoding, the learning rate and the
            seed; none of them has ended, or is of the reference; or one cannot be read.
    """
    from posbench.api.figure import figure

    paths = [Path(run) for run in runs if not isinstance(run, LoadedRun)]
    read = [run.data for run in runs if isinstance(run, LoadedRun)]
    read += [load.read(folder) for folder in finding.run_folders(paths)] if paths else []
    if not read:
        raise UserError("nothing to plot: give runs, posbench.plot('outputs/demo')")
    once = list({run.folder.resolve(): run for run in read}.values())
    once.sort(key=lambda run: not run.done)
    repeats = load.repeated(once)  # as in a report, a seed counts once, by a run that ended well where there is one
    return figure([run for run in once if run not in repeats], reference)


def _readable(folders: list[Path]) -> Iterator[RunData]:
    for folder in folders:
        try:
            yield load.read(folder)
        except UserError as error:
            warnings.warn(f"left out, unreadable: {error}", stacklevel=3)


def _row(run: RunData, label: str) -> dict[str, Any]:
    data = run.record.get("data")
    return {
        "study": run.config.study,
        "id": run.record.get("id") or run.folder.name,
        "encoding": run.config.encoding.name,
        "label": label,
        "seed": run.config.seed,
        "train_length": run.config.training.train_length,
        "learning_rate": run.config.training.learning_rate,
        "parameters": run.parameters("total"),
        "tokens": run.record.get("tokens"),
        "status": run.outcome,
        "data": data.get("sha256") if isinstance(data, dict) else None,
        "task": run.task,
        "seconds": number(run.record.get("train_seconds")),
        "folder": str(run.folder),
    }


def _measure_order(name: str) -> tuple[int, float]:
    """nll by length, rises by length, then reach and use; of tasks the steps to the gate, and answers by length."""
    kind, _, ratio = name.rpartition("_") if name.endswith("x") else (name, "", "")
    order = ("nll", "rise", "reach", "uses", "steps_to_gate", "accuracy", "exact_match")
    return order.index(kind), float(ratio.rstrip("x") or 0)
