"""Rows of a run: JSON lines, and what an evaluation row is, its key, its name as a curve, which rows make a curve."""

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.run import ROWS

PLAIN, WINDOWED, RULER = "plain", "windowed", "ruler"  # the last: a protocol, of a benchmark without a loss
PAIRED = ("fixed_target", "nonoverlap", "sliding")  # protocols that score the same targets at every length
EVALUATION_KEY = (
    "protocol", "length", "stride", "window", "extension", "task", "split", "checkpoint_step", "problem_length",
    "offset",
)  # fmt: skip
_curve_of = operator.attrgetter("split", "checkpoint_step", "protocol")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """An evaluation row of `rows.jsonl`: what was measured, on what, and the result. What is undefined is None."""

    protocol: str  # fixed_target, nonoverlap, task, problems, ruler; of earlier versions sliding
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
    units: dict[str, list[Any]] | None = None  # of each unit of text: document, tokens; in nats nll, ngram

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "EvaluationRow":
        """Return the row of a line; of other versions unknown columns are left out, and a missing value is None."""
        return cls(**{name: line.get(name) for name in (*COLUMNS, "units")})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the row's columns in the order of the file, then its sums by unit of text, if it has any."""
        return {name: getattr(self, name) for name in COLUMNS} | ({"units": self.units} if self.units else {})

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in EVALUATION_KEY)

    @property
    def measured(self) -> bool:
        """Whether the row has a number. Numbers that were not finite are null."""
        return self.status == "ok" and (self.accuracy if self.protocol == RULER else self.nll) is not None

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
        return curve_name(self.protocol, self.task, self.offset, self.extension, self.window)


COLUMNS = tuple(field.name for field in dataclasses.fields(EvaluationRow) if field.name != "units")


def curve_name(protocol: str, task: str | None, offset: int | None, extension: str | None, window: int | None) -> str:
    """Return the name of the curve that rows of these columns form: `fixed_target`, `task_recall_windowed`."""
    shifted = f"from_{offset}" if offset else None
    name = "_".join(part for part in (protocol, task, shifted, extension, WINDOWED if window else None) if part)
    return WINDOWED if name == f"fixed_target_{WINDOWED}" else name


def multiple(ratio: float) -> str:
    """Return a context as a multiple of the training length: `1/16x`, `0.75x`, `4x`."""
    return f"1/{1 / ratio:g}x" if ratio < 1 and (1 / ratio).is_integer() else f"{ratio:g}x"


def plain(value: Any) -> Any:
    """Return plain JSON types; tensors and numpy numbers become numbers, what is not finite becomes None."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else value


def number(value: object) -> float | None:
    """Return a finite number from a file, None if it is anything else."""
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None  # type: ignore[arg-type]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder, of training, validation and evaluation; a last line cut short is passed over."""
    *lines, _ = (folder / ROWS).read_bytes().split(b"\n") if (folder / ROWS).exists() else [b""]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(f"{folder / ROWS} has a line that is not JSON: {error}") from None


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's training and validation: `step`, `tokens`, and numbers by name."""
    return [row for row in read_rows(folder) if "protocol" not in row]


def every_row(folder: Path) -> list[EvaluationRow]:
    """Return the last evaluation row of each key and targets. One without a number counts until the next of its key."""
    rows = [EvaluationRow.from_json(row) for row in read_rows(folder) if "protocol" in row]
    last = {row.key: row for row in rows}
    newest = {(row.key, row.targets_sha256): row for row in rows}
    return [row for (key, _), row in newest.items() if row.measured or row is last[key]]


def evaluation_rows(folder: Path, counts: Mapping[str | None, int] | None = None) -> list[EvaluationRow]:
    """Return evaluation rows, one of each key: the last, unless an earlier one pairs with more of its curve.

    So a later evaluation of a few lengths, on other targets, never breaks a curve.
    """
    rows = every_row(folder)
    paired = {id(row) for row in on_shared_targets(rows, counts)}
    chosen = {row.key: row for row in sorted(rows, key=lambda row: (row.measured, id(row) in paired))}
    return [row for row in rows if chosen[row.key] is row]


def headline_split(rows: Sequence[EvaluationRow], split: str) -> str:
    """Return the text of the headline: the one asked for, else another that was evaluated; empty if none was."""
    splits = {row.split for row in rows if row.is_headline}
    return split if split in splits else min(splits, default="")


def on_shared_targets(rows: list[EvaluationRow], counts: Mapping[str | None, int] | None = None) -> list[EvaluationRow]:
    """Return the rows that one line may join: of each split, checkpoint and protocol, those on its shared targets.

    These are the targets with the highest of `counts`, then those that the training length was scored on, then the most
    common from that length on, then in all; of equally many the newer ones. What has no number stays, and so do
    problems, whose rows never pair.
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        if row.protocol in PAIRED and row.measured:
            key, ratio = (_curve_of(row), row.targets_sha256), row.length_ratio if row.kind == PLAIN else 0
            points = ratio == 1, ratio >= 1, 1
            ranks[key] = [sum(pair) for pair in zip(points, ranks.get(key, [0, 0, 0]), strict=True)]
    shared = dict(sorted(ranks, key=lambda key: [(counts or {}).get(key[1], 0), *ranks[key]]))  # the last stays
    unused = {digest for _, digest in ranks} - {*shared.values()}
    rows = [row for row in rows if not (row.protocol == "task" and row.targets_sha256 in unused)]  # `offset`, `shuffle`
    return [row for row in rows if not row.measured or shared.get(_curve_of(row)) in (None, row.targets_sha256)]
