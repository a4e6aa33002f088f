"""`runs.csv` and `evaluation.csv`: every run and every row, with what tells runs of one encoding apart."""

import json
from pathlib import Path
from typing import Any

from posbench.comparison.load import Group, RunData
from posbench.evaluation.headline import headline
from posbench.report import text
from posbench.runs.rows import COLUMNS

_HEADLINE = ["nll_1x", "rise_4x", "rise_16x", "reach"]  # as `headline` defines them, for this checkpoint
_NAMES = ["run", "label", "encoding", "options", "seed", "train_length", "learning_rate"]
_RUN_COLUMNS = [
    *_NAMES, "study", "set", "status", "reason", "message", *_HEADLINE, "parameters", "encoding_parameters", "tokens",
    "train_seconds", "cpu_seconds", "evaluate_seconds", "tokens_per_second", "peak_memory_bytes", "data_sha256",
    "tokenizer_sha256", "command",
]  # fmt: skip


def write(folder: Path, groups: list[Group], runs: list[RunData]) -> None:
    """Write both files, a line per run and a line per evaluation row; the runs are those of the groups."""
    labels = {run.folder: scheme.label for group in groups for scheme in group.schemes for run in scheme.runs}
    sets = {run.folder: number for number, group in enumerate(groups, start=1) for run in group.runs}
    names = {run.folder: {**_names(run), "label": labels[run.folder], "set": sets[run.folder]} for run in runs}
    lines = ({**_facts(run), **names[run.folder]} for run in runs)
    text.write(folder / "runs.csv", text.csv_text(_RUN_COLUMNS, lines))
    rows = ({**row.to_json(), **names[run.folder]} for run in runs for row in run.rows)
    text.write(folder / "evaluation.csv", text.csv_text([*_NAMES, *COLUMNS], rows))


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
        **headline(run.levels, run.config.training.train_length),
        "study": run.config.study,
        "parameters": run.parameters("total"),
        "encoding_parameters": run.parameters("encoding"),
        "tokens_per_second": run.tokens_per_second,
        "data_sha256": data.get("sha256") if isinstance(data, dict) else None,
    }
