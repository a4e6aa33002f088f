"""Every run and every row as CSV, with the options that tell runs of one encoding apart; also task schemes.

`runs.csv` and `evaluation.csv` cover text and tasks. `tasks.csv` has a line per scheme and tested place of a task.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posbench.evaluation.answers import Place
from posbench.evaluation.levels import Levels
from posbench.report import text
from posbench.report.comparison import standing
from posbench.report.comparison.load import Group, RunData
from posbench.report.comparison.standing import At, Standing
from posbench.run_folder.rows import COLUMNS

_NAMES = ["run", "label", "encoding", "options", "seed", "train_length", "learning_rate"]
_RUN_COLUMNS = [
    *_NAMES, "study", "set", "status", "reason", "message", *Levels.main, "parameters", "encoding_parameters", "tokens",
    "train_seconds", "cpu_seconds", "evaluate_seconds", "tokens_per_second", "peak_memory_bytes", "data_sha256",
    "tokenizer_sha256", "command",
]  # fmt: skip


# Only for runs on tasks; a report on text alone lacks these columns.
_OF_TASKS = ("problem_length", "offset", "n_distinct")
_PLACE = ["variant", "problem_length", "length_ratio", "offset", "kind", "status"]
_SCHEME_COLUMNS = [
    "task", "set", "label", "encoding", "learned", "seeds", "learned_low", "learned_high", "steps_to_gate", "ranked",
    *_PLACE, "seeds_measured", "accuracy_median", "accuracy_min", "accuracy_max", "exact_match_median",
    "exact_match_min", "exact_match_max", "accuracy_median_of_learned", "chance", "trivial",
]  # fmt: skip


def write(folder: Path, groups: list[Group], runs: list[RunData]) -> None:
    """Write the files, a line per run and a line per evaluation row; the runs are those of the groups."""
    labels = {run.folder: scheme.label for group in groups for scheme in group.schemes for run in scheme.runs}
    sets = {run.folder: number for number, group in enumerate(groups, start=1) for run in group.runs}
    names = {run.folder: {**_names(run), "label": labels[run.folder], "set": sets[run.folder]} for run in runs}
    on_tasks = [group for group in groups if group.task is not None]
    lines = [{**_facts(run), **names[run.folder]} for run in runs]
    measured = dict.fromkeys(name for run in runs if run.task for name in run.headline if name not in Levels.main)
    text.write(folder / "runs.csv", csv_text([*_RUN_COLUMNS, *(["task", *measured] if on_tasks else [])], lines))
    gates = {run.folder: {"learned": run.headline["learned"]} for run in runs}
    rows = ({**row.to_json(), **names[run.folder], **gates[run.folder]} for run in runs for row in run.rows)
    columns = ["learned", *(column for column in COLUMNS if on_tasks or column not in _OF_TASKS)]
    text.write(folder / "evaluation.csv", csv_text([*_NAMES, *columns], rows))
    if on_tasks:
        of_schemes = [line for group in on_tasks for line in _of_schemes(group, sets)]
        text.write(folder / "tasks.csv", csv_text(_SCHEME_COLUMNS, of_schemes))


def csv_text(columns: list[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows under these columns, below a line with the columns' names; missing values are empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _of_schemes(group: Group, sets: dict[Path, int]) -> list[dict[str, Any]]:
    found = []
    for one in standing.standings(group):
        low, high = one.interval or (None, None)
        known = {
            "task": group.task, "set": sets[one.scheme.runs[0].folder], "label": one.scheme.label,
            "encoding": one.scheme.name, "learned": one.learned, "seeds": one.seeds, "learned_low": low,
            "learned_high": high, "steps_to_gate": one.steps, "ranked": one.ranked,
        }  # fmt: skip
        found += [
            {**known, **_of_place(place, one.at[place].status), **_spreads(one, at)} for place, at in one.at.items()
        ]
    return found


def _spreads(one: Standing, at: At) -> dict[str, Any]:
    """Over all seeds."""
    found: dict[str, Any] = {
        "problem_length": at.problem_length, "seeds_measured": 0, "chance": at.chance, "trivial": at.trivial,
        "accuracy_median_of_learned": at.of_learned.median if at.of_learned else None,
    }  # fmt: skip
    for name in ("accuracy", "exact_match"):
        if spread := getattr(at, name):
            found |= {"seeds_measured": spread.seeds, f"{name}_median": spread.median}
            found |= {f"{name}_min": spread.low, f"{name}_max": spread.high}
    return found


def _of_place(place: Place, status: str) -> dict[str, Any]:
    named = {"variant": place.variant, "length_ratio": place.ratio, "offset": place.offset, "kind": place.kind}
    return {**named, "status": status}


def _names(run: RunData) -> dict[str, Any]:
    config = run.config
    return {
        "run": run.folder.name,
        "encoding": config.encoding.name,
        "options": json.dumps(config.encoding.options, sort_keys=True),
        "seed": config.seed,
        "train_length": config.training.train_length,
        "learning_rate": config.training.learning_rate,
    }


def _facts(run: RunData) -> dict[str, Any]:
    data = run.record.get("data")
    return {
        **run.record,
        **run.headline,
        "task": run.task,
        "study": run.config.study,
        "parameters": run.parameters("total"),
        "encoding_parameters": run.parameters("encoding"),
        "tokens_per_second": run.tokens_per_second,
        "data_sha256": data.get("sha256") if isinstance(data, dict) else None,
    }
