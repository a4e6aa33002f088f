"""Several runs, as one table and as one figure."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from posbench.api.run import LoadedRun
from posbench.errors import UserError
from posbench.results import frame as results
from posbench.results.headline import headline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Columns before what was measured. `label` is the encoding with the options that tell it from the others, `options`
# those alone, `data` the sha256 of the text, `tokens` what it was trained on, `status` done, running, stopped, died or
# why it failed.
_KNOWN = {
    "study": "study", "run": "id", "encoding": "encoding", "label": "label", "options": "options", "seed": "seed",
    "train_length": "train_length", "learning_rate": "learning_rate", "parameters": "parameters",
    "trained_tokens": "tokens", "run_status": "status", "text_sha256": "data",
}  # fmt: skip


def runs(*paths: str | Path) -> pd.DataFrame:
    """Runs as a table, a row each.

    Args:
        paths: run folders, study folders and globs, `outputs/**`; default: `outputs`.

    Returns:
        Besides what tells the runs apart: `tokens` trained on, empty where training failed or has not ended; `options`,
        those that tell runs of one encoding apart in the whole table; `learned`, yes, no or not resolved, as of
        `LoadedRun.learned`, empty where it is not known; `nll_1x`, `nll_2x` .. and `rise_2x`, `rise_4x` .. in nats per
        token of the same target tokens, at so many training lengths and above 1x; `reach`, the longest context in
        tokens up to which the rise is at most 0.05, by its upper bound, empty for a run that has not learned; `uses`,
        the shortest context in tokens whose nll is within 0.02 of `nll_1x`, by the same bound; `seconds` of training;
        `folder`. Where runs on tasks are among them: `task`, `steps_to_gate`, `accuracy_1x` .. and `exact_match_1x` ..,
        shares at so many times the longest trained problem; their `nll_1x` is of the answers' tokens.

    Raises:
        UserError: a path that does not exist, or no run at all. A run that cannot be read is left out with a warning.
    """
    frame = results.read([Path(path) for path in paths or ("outputs",)])
    unreadable = frame["run_status"] == "unreadable"
    for run in frame[unreadable].itertuples():
        warnings.warn(f"left out, unreadable: {run.folder}: {run.run_reason}", stacklevel=2)
    frame = frame[~unreadable]
    measured = {str(folder): headline(rows) for folder, rows in frame.groupby("folder")}
    names = sorted({name for values in measured.values() for name in values} - {"learned"} | {"nll_1x"}, key=_order)
    of_each = frame.drop_duplicates("folder").set_index("folder", drop=False)
    values = pd.DataFrame.from_dict(measured, orient="index", columns=None).reindex(columns=["learned", *names])
    numbers = values.astype(dict.fromkeys(names, "float64")).reindex(of_each.index)
    task = {"trained_task": "task"} if of_each["trained_task"].notna().any() else {}
    last = {"train_seconds": "seconds", "folder": "folder"}
    parts = [of_each[[*_KNOWN]].rename(columns=_KNOWN), numbers[["learned"]], of_each[[*task]].rename(columns=task)]
    parts += [numbers[names], of_each[[*last]].rename(columns=last)]
    return pd.concat(parts, axis=1).reset_index(drop=True).astype({"seconds": "float64", "learning_rate": "float64"})


def plot(*runs: LoadedRun | str | Path, reference: str | None = None) -> "Figure":
    """Curves of runs that may be compared: nll by context, and its rise on the same target tokens.

    One line per scheme: several seeds of it are its band, and a third panel has the differences from the reference.
    Of a task: accuracy by problem length.

    Args:
        runs: what `load` or `train` returned, run folders, study folders or globs.
        reference: the encoding or label that the others are compared with. Its windowed curve is drawn too. Of many
            schemes the twelve with the lowest loss have names. None: `rope`.

    Raises:
        UserError: the runs may not be compared, since they differ in more than the encoding, the learning rate and the
            seed; none of them has ended, or is of the reference; or one cannot be read.
    """
    from posbench.report import charts

    if not runs:
        raise UserError("nothing to plot: give runs, posbench.plot('outputs/demo')")
    folders = [run.folder if isinstance(run, LoadedRun) else Path(run) for run in runs]
    frame = results.read(folders)
    for run in frame[frame["run_status"] == "unreadable"].itertuples():
        raise UserError(f"{run.folder}: {run.run_reason}")
    return charts.of_runs(frame[~frame["repeated"]], reference)  # a seed counts once


def _order(name: str) -> tuple[int, float]:
    """nll by length, rises by length, then reach and use; of tasks the steps to the gate, and answers by length."""
    kind, _, ratio = name.rpartition("_") if name.endswith("x") else (name, "", "")
    order = ("nll", "rise", "reach", "uses", "steps_to_gate", "accuracy", "exact_match")
    return order.index(kind), float(ratio.rstrip("x") or 0)
