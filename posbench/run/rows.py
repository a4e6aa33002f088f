"""Rows of a run: JSON lines, and what an evaluation row is, its key, its name as a curve, which rows make a curve.

Files may come from other versions: unknown columns are left out, and a value that is missing is None.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posbench.errors import UserError
from posbench.run import ROWS

PLAIN, WINDOWED = "plain", "windowed"
PAIRED = ("fixed_target", "nonoverlap", "sliding")  # protocols that score the same targets at every length
_OLDER = "metrics.jsonl", "evaluation.jsonl"  # the two files of earlier versions


class RowKey(NamedTuple):
    """The key of a row in a run."""

    protocol: str
    length: int
    stride: int | None
    window: int | None
    extension: str | None
    task: str | None
    split: str
    checkpoint_step: int
    problem_length: int | None = None
    offset: int | None = None


EVALUATION_KEY = RowKey._fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """An evaluation row of `rows.jsonl`: what was measured, on what, and the result. What is undefined is None, not 0.

    The order of the columns is that of the file.
    """

    protocol: str  # fixed_target, nonoverlap, task, problems; of earlier versions sliding
    length: int  # tokens of context; of problems, tokens read
    length_ratio: float  # length / training length; of problems, problem_length / the longest that was trained
    stride: int | None = None  # of `sliding`, of earlier versions: tokens between its windows
    window: int | None = None  # keys each query saw, where attention was narrowed
    extension: str | None = None  # as it was asked for, such as yarn:factor=4; or sinks
    extension_options: dict[str, Any] | None = None  # what it did
    task: str | None = None  # a probe; of problems the task, with the option that a test varies: passkey:depth=0.5
    problem_length: int | None = None  # in what the task counts; None = text, not problems
    offset: int | None = None  # of problems: the position of their first token
    split: str
    documents: str | None = None  # doc, concat
    checkpoint_step: int
    tokens: int | None = None  # that the checkpoint was trained on; rows of earlier versions, models of others: None
    status: str  # ok, undefined, too_short, failed
    reason: str | None = None  # of a status that is not ok; of a selection of tokens, by whom
    dtype: str | None = None
    n_tokens: int | None = None  # scored
    n_bytes: int | None = None  # of the original text of the scored tokens
    n_blocks: int | None = None
    n_distinct: int | None = None  # of problems: how many of the blocks differ; rows of earlier versions: None
    n_documents: int | None = None  # that the blocks stand in
    mean_context: float | None = None  # tokens
    nll: float | None = None  # nats per token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None  # of problems: share of the scored tokens that were the likeliest
    chance: float | None = None  # accuracy of guessing: among candidates, or among all answer tokens of these problems
    trivial: float | None = None  # of problems: accuracy of the task's trivial reader on them
    exact_match: float | None = None  # share of the problems of which all were
    ci_low: float | None = None  # of nll, 95 %, for this checkpoint
    ci_high: float | None = None
    ci_over: str | None = None  # documents, segments, problems; rows of earlier versions: None, of blocks
    ngram_nll: float | None = None  # nats per token of the best n-gram model of the training tokens, same targets
    ngram_order: int | None = None  # that model's; rows of earlier versions: 2, counted on all of the training text
    targets_sha256: str | None = None  # rows that share it scored the same tokens in the same blocks: they pair
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    # Sums over the targets of each unit of text, lists of equal length: `document`, the unit's document in the split;
    # `tokens`; in nats `nll` and, where it is known, `ngram`. Problems have none, nor have rows of earlier versions.
    units: dict[str, list[Any]] | None = None

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "EvaluationRow":
        """A line of the file."""
        values: dict[str, Any] = {name: line.get(name) for name in (*COLUMNS, "units")}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The row's columns in the order of the file, then its sums by unit of text, if it has any."""
        return {name: getattr(self, name) for name in COLUMNS} | ({"units": self.units} if self.units else {})

    @property
    def key(self) -> RowKey:
        return RowKey(*(getattr(self, name) for name in EVALUATION_KEY))

    @property
    def measured(self) -> bool:
        """Whether the row has a number. Numbers that were not finite are null."""
        return self.status == "ok" and self.nll is not None

    @property
    def is_repetitive(self) -> bool:
        """Whether fewer than half of its problems differ; then the row has no interval over problems."""
        return self.n_distinct is not None and self.n_blocks is not None and 2 * self.n_distinct < self.n_blocks

    @property
    def kind(self) -> str:
        """How the model was changed: plain, windowed, or an extension's name (sinks, too, which are windowed)."""
        return self.extension or (WINDOWED if self.window else PLAIN)

    @property
    def is_headline(self) -> bool:
        """Whether the row belongs to the protocol of the headline: of a text fixed_target, of a task problems."""
        return self.protocol == "problems" or (self.protocol == "fixed_target" and self.task is None)

    @property
    def curve_name(self) -> str:
        """`fixed_target`, `windowed`, `nonoverlap_windowed`, `fixed_target_yarn`, `task_recall`, `problems_copy` ..."""
        return curve_name(self.protocol, self.task, self.offset, self.extension, self.window)


COLUMNS = tuple(field.name for field in dataclasses.fields(EvaluationRow) if field.name != "units")


def curve_name(protocol: str, task: str | None, offset: int | None, extension: str | None, window: int | None) -> str:
    """The name of the curve that rows of these columns form."""
    shifted = f"from_{offset}" if offset else None
    name = "_".join(part for part in (protocol, task, shifted, extension, WINDOWED if window else None) if part)
    return WINDOWED if name == f"fixed_target_{WINDOWED}" else name


def multiple(ratio: float) -> str:
    """A context as a multiple of the training length: `1/16x`, `0.75x`, `4x`."""
    return f"1/{1 / ratio:g}x" if ratio < 1 and (1 / ratio).is_integer() else f"{ratio:g}x"


def plain(value: Any) -> Any:
    """Plain JSON types; tensors and numpy numbers become numbers, what is not finite becomes None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else value


def number(value: object) -> float | None:
    """A finite number from a file, None if it is anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None  # type: ignore[arg-type]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if there is no file. A last line cut short is passed over.

    Raises:
        UserError: a whole line is not a JSON object.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows: list[dict[str, Any]] = []
    for line in lines:
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError):
            raise UserError(f"line {len(rows) + 1} of {path} is not a JSON object") from None
    return rows


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run folder in their order: those of training and validation, with `step`, and of evaluation."""
    if (folder / ROWS).exists():
        return read_jsonl(folder / ROWS)
    training, evaluation = (read_jsonl(folder / name) for name in _OLDER)
    names = {"validation/nll": "val/loss"}
    renamed = [{names.get(k, k.replace("validation/", "val/")): v for k, v in row.items()} for row in training]
    return [*renamed, *evaluation]


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's training and validation: `step`, `tokens`, and numbers by name."""
    return [row for row in read_rows(folder) if "protocol" not in row]


def every_row(folder: Path) -> list[EvaluationRow]:
    """Evaluation rows, the last of each key and targets.

    A row without a number lasts until the next of its key. It takes the place of a number on its own targets only.
    """
    found: dict[RowKey, dict[str | None, EvaluationRow]] = {}
    for row in (EvaluationRow.from_json(row) for row in read_rows(folder) if "protocol" in row):
        earlier = found.get(row.key, {})
        measured = {targets: one for targets, one in earlier.items() if one.measured and targets != row.targets_sha256}
        found[row.key] = {**measured, row.targets_sha256: row}
    return [row for of_key in found.values() for row in of_key.values()]


def evaluation_rows(folder: Path) -> list[EvaluationRow]:
    """Evaluation rows, one of each key: the last, unless an earlier one pairs with more of its curve.

    So a later evaluation of a few lengths, on targets of their own, never breaks a curve that is there. Neither does
    one that has no number, say for lack of text.
    """
    found = every_row(folder)
    if len(found) == len({row.key for row in found}):
        return found
    curves: dict[tuple[str, int], list[EvaluationRow]] = {}
    for row in found:
        curves.setdefault((row.split, row.checkpoint_step), []).append(row)
    paired = {(row.key, row.targets_sha256) for curve in curves.values() for row in on_shared_targets(curve)}
    chosen = {
        row.key: row for row in sorted(found, key=lambda row: (row.measured, (row.key, row.targets_sha256) in paired))
    }
    return [row for row in found if chosen[row.key] is row]


def newest_of_split(rows: list[EvaluationRow], split: str) -> list[EvaluationRow]:
    """The rows that may form curves: of one split, from the newest checkpoint evaluated on it."""
    of_split = [row for row in rows if row.split == split]
    newest = max((row.checkpoint_step for row in of_split), default=0)
    return [row for row in of_split if row.checkpoint_step == newest]


def headline_split(rows: Sequence[EvaluationRow], asked: str) -> str:
    """The text of the headline: the one asked for, else another that was evaluated; empty if none was."""
    splits = {row.split for row in rows if row.is_headline}
    return asked if asked in splits else min(splits, default="")


def on_shared_targets(rows: list[EvaluationRow]) -> list[EvaluationRow]:
    """The rows that one line may join: for each protocol of text, the rows on its most common targets.

    What has no number stays, and so do probes and problems, whose rows have targets of their own by definition.
    """
    shared = shared_targets(rows)
    return [
        row for row in rows if not row.measured or row.targets_sha256 == shared.get(row.protocol, row.targets_sha256)
    ]


def shared_targets(rows: list[EvaluationRow]) -> dict[str, str | None]:
    """For each protocol of text its most common targets.

    Those that the training length was scored on come first: the gate and every rise need it. Then the most common from
    that length on, then in all; of equally many the newer ones.
    """
    paired = [row for row in rows if row.protocol in PAIRED and row.measured]
    counted = Counter((row.protocol, row.targets_sha256) for row in paired)
    plain = [row for row in paired if row.kind == PLAIN]
    far = Counter((row.protocol, row.targets_sha256) for row in plain if row.length_ratio >= 1)
    based = {(row.protocol, row.targets_sha256) for row in plain if row.length_ratio == 1}
    shared: dict[str, str | None] = {}
    for protocol, targets in sorted(reversed(counted), key=lambda key: (key not in based, -far[key], -counted[key])):
        shared.setdefault(protocol, targets)
    return shared
