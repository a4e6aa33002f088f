"""The rows of a run as JSON lines: what an evaluation row has, its key, its curve's
name, which rows make a curve.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posbench.errors import UserError
from posbench.run import ROWS

PLAIN, WINDOWED = "plain", "windowed"
# protocols that score the same targets at every length
PAIRED = ("fixed_target", "nonoverlap")
EVALUATION_KEY = (
    "protocol",
    "length",
    "window",
    "extension",
    "task",
    "split",
    "checkpoint_step",
    "problem_length",
    "offset",
)
_curve_of = operator.attrgetter("split", "checkpoint_step", "protocol")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """An evaluation row of `rows.jsonl`: what was measured, on what, and the result.
    What is undefined is None.
    """

    # fixed_target, nonoverlap, task, problems
    protocol: str
    length: int  # tokens of context; for problems, tokens read
    # length / training length; for problems, problem_length / longest trained one
    length_ratio: float
    window: int | None = None  # keys that each query saw, if attention was narrowed
    extension: str | None = None  # as it was typed, such as yarn:factor=4; or sinks
    extension_options: dict[str, Any] | None = None  # what was done to the model
    # a probe; for problems the task, with the option that a test varies:
    # passkey:depth=0.5
    task: str | None = None
    # in the task's own unit; None = text, not problems
    problem_length: int | None = None
    offset: int | None = None  # for problems: the position of their first token
    split: str
    documents: str | None = None  # doc, concat
    checkpoint_step: int
    # tokens of training; None: unknown
    tokens: int | None = None
    status: str  # ok, undefined, too_short, failed
    # why a status is not ok; for a selection of tokens, who made it
    reason: str | None = None
    dtype: str | None = None
    n_tokens: int | None = None  # scored tokens
    n_bytes: int | None = None  # of the original text of the scored tokens
    n_blocks: int | None = None
    # for problems: how many of the blocks differ
    n_distinct: int | None = None
    n_documents: int | None = None  # documents that the blocks are from
    mean_context: float | None = None  # tokens
    nll: float | None = None  # nats per token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    # for problems: share of the scored tokens that the model found likeliest
    accuracy: float | None = None
    # accuracy of guessing: among candidates, or among all answer tokens of these
    # problems
    chance: float | None = None
    # for problems: accuracy of the task's trivial reader on them
    trivial: float | None = None
    # share of the problems whose scored tokens all were the likeliest
    exact_match: float | None = None
    ci_low: float | None = None  # 95 % interval of nll, for this checkpoint
    ci_high: float | None = None
    # its units: documents, segments, problems
    ci_over: str | None = None
    # nats per token of the training tokens' best n-gram model, on the same targets
    ngram_nll: float | None = None
    # that model's order
    ngram_order: int | None = None
    # rows that share it scored the same tokens in the same blocks: they pair
    targets_sha256: str | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    # per unit of text: document, tokens, and in nats nll, ngram
    units: dict[str, list[Any]] | None = None

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "EvaluationRow":
        """Return the row of a line. Unknown columns of other versions are left out, and
        a missing value is None.
        """
        return cls(**{name: line.get(name) for name in (*COLUMNS, "units")})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """Return the row's columns in the order of the file, then its sums by unit of
        text, if it has any.
        """
        return {name: getattr(self, name) for name in COLUMNS} | (
            {"units": self.units} if self.units else {}
        )

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in EVALUATION_KEY)

    @property
    def measured(self) -> bool:
        """Whether the row has a number. Numbers that were not finite are null."""
        return self.status == "ok" and self.nll is not None

    @property
    def kind(self) -> str:
        """How the model was changed: plain, windowed, or an extension's name (sinks,
        too, which are windowed).
        """
        return self.extension or (WINDOWED if self.window else PLAIN)

    @property
    def curve_name(self) -> str:
        return curve_name(
            self.protocol, self.task, self.offset, self.extension, self.window
        )


COLUMNS = tuple(
    field.name for field in dataclasses.fields(EvaluationRow) if field.name != "units"
)


def curve_name(
    protocol: str,
    task: str | None,
    offset: int | None,
    extension: str | None,
    window: int | None,
) -> str:
    """Return the name of the curve that rows of these columns form: `fixed_target`,
    `task_recall_windowed`.
    """
    shifted = f"from_{offset}" if offset else None
    name = "_".join(
        part
        for part in (protocol, task, shifted, extension, WINDOWED if window else None)
        if part
    )
    return WINDOWED if name == f"fixed_target_{WINDOWED}" else name


def multiple(ratio: float) -> str:
    """Return a context as a multiple of the training length: `1/16x`, `0.75x`, `4x`."""
    return (
        f"1/{1 / ratio:g}x" if ratio < 1 and (1 / ratio).is_integer() else f"{ratio:g}x"
    )


def plain(value: Any) -> Any:
    """Return plain JSON types; tensors and numpy numbers become numbers, what is not
    finite becomes None.
    """
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return plain(value.item()) if hasattr(value, "item") else value


def number(value: object) -> float | None:
    """Return a finite number from a file, None if it is anything else."""
    if type(value) not in (int, float):
        return None
    as_float = float(value)  # type: ignore[arg-type]
    return as_float if math.isfinite(as_float) else None


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder, of training, validation and evaluation; an
    incomplete last line is left out.
    """
    *lines, _ = (
        (folder / ROWS).read_bytes().split(b"\n") if (folder / ROWS).exists() else [b""]
    )
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise UserError(
            f"{folder / ROWS} has a line that is not JSON: {error}"
        ) from None


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's training and validation: `step`, `tokens`, and numbers
    by name.
    """
    return [row for row in read_rows(folder) if "protocol" not in row]


def every_row(folder: Path) -> list[EvaluationRow]:
    """Return the last evaluation row per key and targets. One without a number counts
    until its key has a later row.
    """
    rows = [
        EvaluationRow.from_json(row) for row in read_rows(folder) if "protocol" in row
    ]
    last = {row.key: row for row in rows}
    newest = {(row.key, row.targets_sha256): row for row in rows}
    return [row for (key, _), row in newest.items() if row.measured or row is last[key]]


def evaluation_rows(
    folder: Path, counts: Mapping[str | None, int] | None = None
) -> list[EvaluationRow]:
    """Return one evaluation row per key: the last one, unless an earlier one pairs with
    more rows of its curve.

    A later evaluation of a few lengths on other targets therefore never breaks a curve.
    """
    rows = every_row(folder)
    paired = {id(row) for row in on_shared_targets(rows, counts)}
    chosen = {
        row.key: row
        for row in sorted(rows, key=lambda row: (row.measured, id(row) in paired))
    }
    return [row for row in rows if chosen[row.key] is row]


def headline_split(rows: Sequence[EvaluationRow], split: str) -> str:
    """Return the split of the headline: the requested one, else another that was
    evaluated; empty if none was.
    """
    splits = {row.split for row in rows}
    return split if split in splits else min(splits, default="")


def on_shared_targets(
    rows: list[EvaluationRow], counts: Mapping[str | None, int] | None = None
) -> list[EvaluationRow]:
    """Return the rows that one line may join: for each split, checkpoint and protocol,
    those on its shared targets.

    These targets have the highest of `counts`. Ties go to targets that the training
    length was scored on, then to the most common ones from that length on, then at all
    lengths, then to the newest. Rows without a number stay, and so do problems, whose
    rows never pair.
    """
    ranks: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        if row.protocol in PAIRED and row.measured:
            key, ratio = (
                (_curve_of(row), row.targets_sha256),
                row.length_ratio if row.kind == PLAIN else 0,
            )
            points = ratio == 1, ratio >= 1, 1
            ranks[key] = [
                sum(pair)
                for pair in zip(points, ranks.get(key, [0, 0, 0]), strict=True)
            ]
    # the highest stays
    shared = dict(
        sorted(ranks, key=lambda key: [(counts or {}).get(key[1], 0), *ranks[key]])
    )
    unused = {digest for _, digest in ranks} - {*shared.values()}
    # `offset`, `shuffle`
    rows = [
        row
        for row in rows
        if not (row.protocol == "task" and row.targets_sha256 in unused)
    ]
    return [
        row
        for row in rows
        if not row.measured or shared.get(_curve_of(row)) in (None, row.targets_sha256)
    ]
