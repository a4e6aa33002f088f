"""Run folders and saved studies as one tidy frame: a row per run, protocol, variant,
task, length and tokens trained.

A row has the facts of its run, its numbers, and lists by unit of text: `unit_documents`
(the document of each), `unit_tokens`, and in nats `unit_nll`, `unit_ngram` and
`unit_mixture` (`evaluation.ngrams` and `mixture`). A run without results keeps one row.
What is undefined has a `status` and no number. All that is printed or drawn is selected
from the frame.
"""

import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from posbench.errors import PosbenchError, UserError
from posbench.results.settings import with_schemes
from posbench.run import ROWS
from posbench.run import rows as run_rows
from posbench.run.facts import Facts, as_json, facts_of
from posbench.run.find import run_folders
from posbench.run.rows import EvaluationRow, number

SUFFIX = ".parquet"  # of a study that is one file
GATE = 0.99  # share of right tokens, at every trained length, that is a task learned

# The sums by unit of text, with their keys in a row's `units`.
_UNITS = {
    "unit_documents": "document",
    "unit_tokens": "tokens",
    "unit_nll": "nll",
    "unit_ngram": "ngram",
    "unit_mixture": "mixture",
    "unit_cached_ngram": "cached_ngram",  # of kept rows: a weaker mixture
}

# The columns that are read, with their types. Whole numbers may be missing. A text or a
# list that is missing is None.
_OF_A_RUN = {"folder": str, "run": str, **typing.get_type_hints(Facts)}
_OF_A_RUN["steps_to_gate"] = int | None
_HINTS = _OF_A_RUN | typing.get_type_hints(EvaluationRow)
_TYPES = {}
for _name in (*_OF_A_RUN, *run_rows.COLUMNS):
    _TYPES[_name] = "object"
    if _HINTS[_name] in (int, int | None):
        _TYPES[_name] = "Int64"
    elif _HINTS[_name] in (float, float | None):
        _TYPES[_name] = "float64"
_TEXTS = [name for name in _OF_A_RUN if _TYPES[name] == "object"]
_TYPES |= {"variant": "object"}
_TYPES |= dict.fromkeys(("main", "newest", "superseded"), "bool")
_TYPES |= dict.fromkeys(_UNITS, "object")


def read(paths: Iterable[Path], split: str | None = None) -> pd.DataFrame:
    """Read runs into one frame.

    Args:
        paths: run folders, study folders, globs, and studies in one file, as
            `read(...).to_parquet(path)` writes.
        split: the split of the main rows of runs in folders; None: the split that each
            run asks for.

    Returns:
        A row per run, `EVALUATION_KEY` and targets: the columns of `EvaluationRow`,
        sums by unit, and among others `run_status` (done, running, stopped, died,
        unreadable, or why it failed: diverged, oom ...), `setting` (digest of all that
        must be equal in runs that are compared), `scheme` (JSON of what may differ),
        `label` (the encoding, with what sets it apart in its setting), `repeated`
        (another run has the same setting, scheme and seed), `superseded` (a row of an
        older whole curve), `main` (any other row of the split that its run asks for),
        and `newest` (a main row of the newest checkpoint).

    Raises UserError if a path does not exist or there is no run. A run that cannot be
    read is a row that says so.
    """
    paths = list(dict.fromkeys(map(Path, paths)))
    files = [path for path in paths if path.suffix == SUFFIX]
    others = [path for path in paths if path.suffix != SUFFIX]
    folders = run_folders(others) if others or not files else []

    rows = []
    for folder in folders:
        rows += _rows(folder, split)
    parts = []
    for path in files:
        study = _load(path)
        is_copy = study["folder"].isin([str(folder) for folder in folders])
        parts.append(study[~is_copy])
    if rows:
        parts.append(_typed(pd.DataFrame(rows)))

    frame = with_schemes(pd.concat(parts, ignore_index=True))
    # a run without results has no curve: its name is empty
    keys = frame[["protocol", "task", "offset", "extension", "window"]].astype(object)
    named = keys.where(keys.notna(), None).itertuples(index=False)
    frame["curve"] = [run_rows.curve_name(row) for row in named]
    return frame


def _load(path: Path) -> pd.DataFrame:
    if not path.exists():
        raise UserError(f"{path} does not exist: expected a study in one file")
    try:
        frame = pd.read_parquet(path)
        frame["folder"] = [str(path.with_suffix("") / run) for run in frame["run"]]
        frame = _typed(frame)
        _refuse_wrong(frame)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return frame


def _refuse_wrong(frame: pd.DataFrame) -> None:
    """Raise ValueError if rows of a file, in their types, are none that `read` gives,
    or have means that are not those of their units.
    """
    for index, row in enumerate(frame.to_dict("records")):
        row = {name: None if value is pd.NA else value for name, value in row.items()}
        try:
            for name in _TEXTS:
                if not isinstance(row[name], str | None):
                    raise ValueError(f"{name} is {row[name]}: expected text")
            if row["run"] is None or row["run_status"] is None:
                raise ValueError("it has no run or no run_status")
            units = {}
            for name, key in _UNITS.items():
                if row[name] is None:
                    continue
                if np.ndim(row[name]) != 1:
                    raise ValueError(f"{name} is {row[name]}: expected a list")
                units[key] = row[name]
            if row["protocol"] is not None:
                run_rows.refuse_wrong_numbers(row, units)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from None


def _typed(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns that are read, in their types."""
    frame = frame.reindex(columns=[*_TYPES])
    columns = {}
    for name, dtype in _TYPES.items():
        column = frame[name]
        if dtype == "bool":
            column = column.eq(True)
        if dtype == "object":
            column = column.astype(object).where(column.notna(), None)
        if name in _UNITS:  # numbers of one type, as a file has them
            column = column.map(np.float64, na_action="ignore")
        columns[name] = column.astype(dtype)
    return pd.DataFrame(columns)


def _rows(folder: Path, split: str | None) -> list[dict[str, Any]]:
    """Return the rows of a run with its facts. A run without rows, or one that cannot
    be read, has one row of facts.
    """
    facts: dict[str, Any] = {"folder": str(folder), "run": folder.name}
    try:
        of_run = facts_of(folder)
        facts |= vars(of_run)
        if of_run.trained_task:
            facts["steps_to_gate"] = None
            for row in run_rows.training_rows(folder):
                if (number(row.get("val/accuracy")) or 0) >= GATE:
                    facts["steps_to_gate"] = int(row["step"])
                    break
        asked_split = json.loads(of_run.settings).get("evaluation.split", "")
        rows = _measured_rows(folder, split or asked_split)
    except (PosbenchError, OSError) as error:  # its row says so, the others are read
        reason = str(error) or type(error).__name__
        return [facts | {"run_status": "unreadable", "run_reason": reason}]
    if not rows:
        if of_run.run_status == "done":
            cure = f"'{of_run.command}' measures anew"
            reason = f"{folder / ROWS} has no evaluation; {cure}"
            facts |= {"run_status": "unreadable", "run_reason": reason}
        return [facts]
    return [facts | row for row in rows]


def _measured_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    """Return a run's rows by column, with marks and sums by unit."""
    rows = run_rows.every_row(folder)
    split = run_rows.headline_split(rows, split)
    steps = [row.checkpoint_step for row in rows if row.split == split]
    last = max(steps, default=None)

    # those that count, and the older curves that were whole
    whole = run_rows.whole_curves(rows)
    counting = run_rows.counting_rows(rows)
    of_run = [(row, False) for row in counting]
    for row in rows:
        if row.pairs and row.targets_sha256 in whole[row.curve][:-1]:
            of_run.append((row, True))

    lines = []
    for row, is_superseded in of_run:
        line = row.to_json()
        units = line.pop("units", {})
        for name, key in _UNITS.items():
            if key in units:
                line[name] = units[key]
        if row.extension_options:
            line["extension_options"] = as_json(row.extension_options)
        if row.status == "ok" and not row.measured:  # the number was not finite
            line["status"] = "failed"
        line["variant"] = row.variant
        line["superseded"] = is_superseded
        line["main"] = row.split == split and not is_superseded
        line["newest"] = line["main"] and row.checkpoint_step == last
        lines.append(line)
    return lines
