"""The rows and the summary that every tracker gets of a run, under the same names.

A row is flat: names and numbers. One of the training has `step` and `tokens` beside `train/...` or `validation/...`;
one of the evaluation has `eval/length`, `eval/length_ratio` and `eval/line` beside `eval/<curve>/...`.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posbench.config.external import Trains
from posbench.run_folder.jsonl import number, read_jsonl
from posbench.run_folder.names import EVALUATION, METRICS
from posbench.run_folder.redaction import redact
from posbench.run_folder.rows import EvaluationRow, RowKey, evaluation_rows

LENGTH, LENGTH_RATIO = "eval/length", "eval/length_ratio"  # in tokens, in training lengths
LINE = "eval/line"  # of evaluation.jsonl, from 1 on
_NAME = re.compile(r"\w+(/\w+)*", re.ASCII)
_CURVE_VALUES = ("nll", "perplexity", "bits_per_byte", "accuracy", "exact_match", "ci_low", "ci_high")


def curve_row(config: Trains, row: EvaluationRow, line: int) -> dict[str, Any]:
    """A row of the evaluation, and its line number, from 1; empty if it is undefined."""
    values = curve_values(config, row)
    return {LENGTH_RATIO: row.length_ratio, LENGTH: row.length, LINE: line, **values} if values else {}


def curve_values(config: Trains, row: EvaluationRow) -> dict[str, Any]:
    """The values of a row to log; empty if it is undefined. Those of a row on the way are curves of their own."""
    if row.status != "ok":
        return {}
    is_last = row.tokens is None or row.checkpoint_step >= config.training.steps
    of = f"eval/{row.curve_name}" if is_last else f"eval/{row.tokens} tokens/{row.curve_name}"
    return {f"{of}/{name}": value for name, value in defined({n: getattr(row, n) for n in _CURVE_VALUES}).items()}


def recorded(config: Trains, folder: Path) -> list[dict[str, Any]]:
    """All rows that a run folder has, each once: those of the training, then those of the evaluation."""
    chosen = {row.key: row for row in evaluation_rows(folder)}
    lines: dict[RowKey, int] = {}
    for line, found in enumerate(read_jsonl(folder / EVALUATION), start=1):
        row = EvaluationRow.from_json(found)
        if row and row == chosen[row.key]:
            lines[row.key] = line
    curve = (curve_row(config, chosen[key], line) for key, line in sorted(lines.items(), key=lambda item: item[1]))
    return [*map(_numbers, read_jsonl(folder / METRICS)), *filter(None, curve)]


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a line of `metrics.jsonl`; a stranger's may have anything beside them."""
    return {name: value for name, value in row.items() if _NAME.fullmatch(name) and number(value) is not None}


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
        found["command"] = redact(str(record["command"]))
    return found


def defined(row: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and values that are not finite, so that a curve shows a gap."""
    finite = {k: v for k, v in row.items() if not (isinstance(v, float) and not math.isfinite(v))}
    return {key: value for key, value in finite.items() if value is not None}
