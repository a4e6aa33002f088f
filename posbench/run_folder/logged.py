"""The rows and the summary that every tracker gets of a run, under the same names.

A row is flat: names and numbers. One of the training has `step` and `tokens` beside `train/...` or `validation/...`;
one of the evaluation has `eval/length`, `eval/length_ratio` and `eval/line` beside `eval/<curve>/...`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.config.external import Trains
from posbench.run_folder.jsonl import number, read_jsonl
from posbench.run_folder.names import EVALUATION, METRICS
from posbench.run_folder.rows import PAIRED, EvaluationRow, RowKey, evaluation_rows, shared_targets

LENGTH, LENGTH_RATIO = "eval/length", "eval/length_ratio"  # in tokens, in training lengths
LINE = "eval/line"  # of evaluation.jsonl, from 1 on
_CURVE_VALUES = ("nll", "perplexity", "bits_per_byte", "accuracy", "exact_match", "ci_low", "ci_high")


class Curves:
    """The names of a run's curves. Rows of one name are of one checkpoint and text, on the same targets.

    Args:
        rows: those of the run folder so far. The usual names are those of its curve, as a report joins it; where it has
            none yet, of the first rows that are named.
    """

    def __init__(self, config: Trains, rows: list[EvaluationRow]) -> None:
        self._last_step = config.training.steps
        self._split = rows[0].split if rows else config.evaluation.split
        by_place: dict[tuple[str, int], list[EvaluationRow]] = {}
        for row in rows:
            by_place.setdefault((row.split, row.checkpoint_step), []).append(row)
        self._targets = {place: shared_targets(own) for place, own in by_place.items()}

    def row(self, row: EvaluationRow, line: int) -> dict[str, Any]:
        """A row of the evaluation, and its line number, from 1; empty if it is undefined."""
        values = self.values(row)
        return {LENGTH_RATIO: row.length_ratio, LENGTH: row.length, LINE: line, **values} if values else {}

    def values(self, row: EvaluationRow) -> dict[str, Any]:
        """The values of a row to log; empty if it is undefined."""
        if row.status != "ok":
            return {}
        of = self._name(row)
        return {f"{of}/{name}": value for name, value in defined({n: getattr(row, n) for n in _CURVE_VALUES}).items()}

    def _name(self, row: EvaluationRow) -> str:
        is_last = row.tokens is None or row.checkpoint_step >= self._last_step
        apart = [f"{row.split} text"] * (row.split != self._split) + [f"{row.tokens} tokens"] * (not is_last)
        curve = row.curve_name
        if row.measured and row.protocol in PAIRED:
            known = self._targets.setdefault((row.split, row.checkpoint_step), {})
            if row.targets_sha256 != known.setdefault(row.protocol, row.targets_sha256):
                curve += f" on targets {str(row.targets_sha256)[:6]}"
        return "/".join(["eval", *apart, curve])


def recorded(config: Trains, folder: Path) -> list[dict[str, Any]]:
    """All rows that a run folder has, each once: those of the training, then those of the evaluation."""
    rows = evaluation_rows(folder)
    curves, chosen = Curves(config, rows), {row.key: row for row in rows}
    lines: dict[RowKey, int] = {}
    for line, found in enumerate(read_jsonl(folder / EVALUATION), start=1):
        row = EvaluationRow.from_json(found)
        if row == chosen[row.key]:
            lines[row.key] = line
    curve = (curves.row(chosen[key], line) for key, line in sorted(lines.items(), key=lambda item: item[1]))
    return [*map(_numbers, read_jsonl(folder / METRICS)), *filter(None, curve)]


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a line of `metrics.jsonl`."""
    return {name: value for name, value in row.items() if number(value) is not None}


def facts(config: Trains, record: Mapping[str, Any]) -> dict[str, Any]:
    """The summary beside the headline: what the run is, and what became of it."""
    counts, data = record.get("parameters"), record.get("data")
    tokens, seconds = number(record.get("tokens")), number(record.get("train_seconds"))
    found = {
        "status": record.get("status"),
        "reason": record.get("reason") or "",  # W&B would keep an earlier one
        **{f"parameters/{part}": count for part, count in (counts if isinstance(counts, dict) else {}).items()},
        "data/name": config.data.name,
        "data/sha256": data.get("sha256") if isinstance(data, dict) else None,
        "tokenizer/sha256": record.get("tokenizer_sha256"),
        "tokens_per_second": tokens / seconds if tokens and seconds else None,
    }
    if config.tracking.command and record.get("command"):
        found["command"] = str(record["command"])
    return found


def defined(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and values that are not finite, so that a curve shows a gap."""
    finite = {k: v for k, v in row.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return {key: value for key, value in finite.items() if value is not None}
