"""The rows of a run as JSON lines: what an evaluation row has, its key, its curve's
name, which rows make a curve.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posbench import files
from posbench.errors import OUT_OF_MEMORY, UserError
from posbench.run import ROWS
from posbench.run.saved import cure, json_types, load_record, other_run

PLAIN = "plain"
WINDOWED = "windowed"
# Protocols that score the same targets of a text at every length; `nonoverlap` only if
# the length divides the longest.
PAIRED: tuple[Literal["fixed_target", "nonoverlap"], ...] = (
    "fixed_target",
    "nonoverlap",
)

# The columns that tell one evaluation of a run from another.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """An evaluation row of `rows.jsonl`: what was measured, on what, and the result.
    What is undefined is None.
    """

    protocol: str  # fixed_target, nonoverlap, task, problems
    length: int  # tokens of context; for problems, tokens read
    length_ratio: float  # to the training length; of problems to the longest trained
    window: int | None = None  # keys that each query saw, if attention was narrowed
    extension: str | None = None  # as it was typed, such as yarn:factor=4; or sinks
    extension_options: dict[str, Any] | None = None  # what was done to the model
    task: str | None = None  # a probe or a task, with what varies: passkey:depth=0.5
    problem_length: int | None = None  # in the task's own unit; None: text
    offset: int | None = None  # for problems: the position of their first token
    split: str
    documents: str | None = None  # doc, concat
    checkpoint_step: int
    tokens: int | None = None  # tokens of training; None: unknown
    status: str  # ok, undefined, too_short, failed
    reason: str | None = None  # of the status; of a selection of tokens, who made it
    dtype: str | None = None
    n_tokens: int | None = None  # scored tokens
    n_bytes: int | None = None  # of the original text of the scored tokens
    n_blocks: int | None = None
    n_distinct: int | None = None  # for problems: how many of the blocks differ
    n_documents: int | None = None  # documents that the blocks are from
    mean_context: float | None = None  # tokens
    nll: float | None = None  # nats per token
    perplexity: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None  # for problems: share of right tokens
    chance: float | None = None  # accuracy of guessing, among candidates or all answers
    trivial: float | None = None  # for problems: accuracy of the trivial reader
    exact_match: float | None = None  # share of problems with all tokens right
    ci_low: float | None = None  # 95 % interval of nll, for this checkpoint
    ci_high: float | None = None
    ci_over: str | None = None  # its units: documents, segments, problems
    ngram_nll: float | None = None  # of the best n-gram model on the same targets
    ngram_order: int | None = None
    # rows that share it scored the same tokens in the same blocks: they pair
    targets_sha256: str | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    # per unit of text: document, tokens, and in nats nll, ngram, mixture
    units: dict[str, list[Any]] | None = None

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "EvaluationRow":
        """Return the row of a line. A missing value is None."""
        values: dict[str, Any] = {name: line.get(name) for name in COLUMNS}
        return cls(**values, units=line.get("units"))

    def to_json(self) -> dict[str, Any]:
        """Return the row's columns in the order of the file, then its sums by unit of
        text, if it has any.
        """
        line = {name: getattr(self, name) for name in COLUMNS}
        if self.units:
            line["units"] = self.units
        return line

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in EVALUATION_KEY)

    @property
    def measured(self) -> bool:
        """Whether the row has a number. Numbers that were not finite are null."""
        return self.status == "ok" and self.nll is not None

    @property
    def is_to_repeat(self) -> bool:
        """Whether the row failed where another attempt may find more room."""
        out_of_memory = (self.reason or "").startswith(OUT_OF_MEMORY)
        return self.status == "failed" and out_of_memory

    @property
    def curve(self) -> tuple[str, int, str]:
        """What the row's targets are chosen for."""
        return self.split, self.checkpoint_step, self.protocol

    @property
    def pairs(self) -> bool:
        """Whether the row has a number that pairs with others on its targets."""
        return self.measured and self.protocol in PAIRED

    @property
    def variant(self) -> str:
        """How the model was changed: plain, windowed, or an extension's name (sinks,
        too, which are windowed).
        """
        if self.extension:
            return self.extension
        return WINDOWED if self.window else PLAIN

    @property
    def curve_name(self) -> str:
        return curve_name(self)


COLUMNS = tuple(
    field.name for field in dataclasses.fields(EvaluationRow) if field.name != "units"
)
ROW_STATUSES = ("ok", "undefined", "too_short", "failed")
LARGEST = 700  # nats per token that have a perplexity

_KINDS = json_types(EvaluationRow)
_KINDS_OF_TRAINING: dict[str, set[type]] = {"step": {int}}


def curve_name(row: Any) -> str:
    """Return the name of the curve that a row is of: `fixed_target`, `windowed`,
    `task_recall_windowed`. `row` has at least the columns that are read here.
    """
    parts = [row.protocol, row.task]
    if row.offset:
        parts.append(f"from_{row.offset}")
    parts.append(row.extension)
    if row.window:
        parts.append(WINDOWED)
    name = "_".join(filter(None, parts))
    if name == f"fixed_target_{WINDOWED}":
        return WINDOWED
    return name


def multiple(ratio: float) -> str:
    """Return a context as a multiple of the training length: `1/16x`, `0.75x`, `4x`."""
    if ratio < 1 and (1 / ratio).is_integer():
        return f"1/{1 / ratio:g}x"
    return f"{ratio:g}x"


def json_plain(value: Any) -> Any:
    """Return plain JSON types; tensors and numpy numbers become numbers, what is not
    finite becomes None.
    """
    if isinstance(value, float):
        return number(float(value))
    if isinstance(value, Mapping):
        return {str(key): json_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_plain(item) for item in value]
    if hasattr(value, "item"):
        return json_plain(value.item())
    return value


def number(value: Any) -> float | None:
    """Return a finite number from a file, None if it is anything else."""
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    return None


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder, of training, validation and evaluation; an
    incomplete last line is left out. Raises UserError for a line that is no row of this
    run.
    """
    rows, faults = rows_and_faults(folder)
    if faults:
        raise UserError(f"{faults[0]}; {cure(load_record(folder))}")
    return rows


def rows_and_faults(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of a run folder, and what is wrong with each line that is none of
    this run. Empty lines hold nothing.
    """
    path = folder / ROWS
    if not path.exists():
        return [], []
    record = load_record(folder)
    rows = []
    faults = []
    lines = path.read_bytes().split(b"\n")[:-1]
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = files.json_object(line)
            wrong = other_run(row.pop("run", None), record)
            if wrong:
                raise ValueError(wrong)
            refuse_wrong(row)
            rows.append(row)
        except ValueError as error:
            faults.append(f"{path}, line {line_number}: {error}")
    return rows, faults


def refuse_wrong(row: Mapping[str, Any]) -> None:
    """Raise ValueError for a line that is no row, or whose numbers contradict one
    another.
    """
    kinds = _KINDS if "protocol" in row else _KINDS_OF_TRAINING
    for name, allowed in kinds.items():
        value = row.get(name)
        if type(value) not in allowed:
            raise ValueError(f"{name} is {json.dumps(value)}: expected another value")
    if "protocol" not in row:
        return
    refuse_wrong_numbers(row, row.get("units") or {})


def refuse_wrong_numbers(row: Mapping[str, Any], units: Mapping[str, Any]) -> None:
    """Raise ValueError if an evaluation row has an unknown status, or means that are
    not those of its sums by unit of text.
    """
    if row["status"] not in ROW_STATUSES:
        expected = ", ".join(ROW_STATUSES)
        raise ValueError(f"status is {row['status']}: expected {expected}")
    names = ("nll", "ngram_nll", "n_tokens", "n_bytes", "perplexity", "bits_per_byte")
    found = {name: number(row.get(name)) for name in names}
    means = {}
    if units:
        try:
            (_,) = {len(values) for values in units.values()}  # one length
            n_tokens = sum(units["tokens"])
            means["nll"] = sum(units["nll"]) / n_tokens
            if "ngram" in units:
                means["ngram_nll"] = sum(units["ngram"]) / n_tokens
        except (ValueError, LookupError, TypeError, ArithmeticError):
            expected = "tokens, nll and others, lists of one length"
            raise ValueError(f"its units are not {expected}") from None
        if found["n_tokens"] not in (None, n_tokens):
            raise ValueError(f"n_tokens is not {n_tokens:g}, which its units have")
    nll = found["nll"]
    if nll is not None and found["perplexity"] is not None:
        means["perplexity"] = math.exp(min(nll, LARGEST))
    if nll is not None and found["bits_per_byte"] is not None and found["n_bytes"]:
        n_tokens = found["n_tokens"] or 0
        means["bits_per_byte"] = nll * n_tokens / math.log(2) / found["n_bytes"]

    for name, expected in means.items():
        value = found[name]
        # sums are written with four digits
        is_close = value is not None and math.isclose(
            value, expected, rel_tol=1e-4, abs_tol=1e-4
        )
        if not is_close:
            raise ValueError(f"{name} is {value}: the row's sums give {expected:.5g}")


def step_of(row: Mapping[str, Any]) -> int:
    """Return the number of updates that were made before a row."""
    step: int = row["checkpoint_step"] if "protocol" in row else row["step"]
    return step


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's training and validation: `step`, `tokens`, and numbers
    by name.
    """
    return [row for row in read_rows(folder) if "protocol" not in row]


def every_row(folder: Path) -> list[EvaluationRow]:
    """Return the last evaluation row per key and targets. One without a number counts
    until its key has a later row.
    """
    last = {}
    newest = {}
    for line in read_rows(folder):
        if "protocol" in line:
            row = EvaluationRow.from_json(line)
            last[row.key] = row
            newest[row.key, row.targets_sha256] = row
    return [row for row in newest.values() if row.measured or row is last[row.key]]


def evaluation_rows(folder: Path) -> list[EvaluationRow]:
    """Return the evaluation rows of a run folder that count: one per key."""
    return counting_rows(every_row(folder))


def whole_curves(
    rows: Sequence[EvaluationRow],
) -> dict[tuple[str, int, str], list[str | None]]:
    """Return by curve, as `row.curve` names it, the targets that it is whole on, the
    newest last: that one counts.

    A curve is the rows of one digest of targets. One on newer targets is whole as soon
    as it has a number wherever the one before has. So a new curve replaces none until
    it is measured as far.
    """
    on_targets: dict[Any, dict[str | None, set[Any]]] = {}
    for row in rows:
        if row.pairs:
            keys_on = on_targets.setdefault(row.curve, {})
            keys_on.setdefault(row.targets_sha256, set()).add(row.key)

    whole: dict[tuple[str, int, str], list[str | None]] = {}
    for curve, keys_on in on_targets.items():
        whole[curve] = []
        needed: set[Any] = set()
        for targets, keys in keys_on.items():
            if needed <= keys:
                needed = keys
                whole[curve].append(targets)
    return whole


def counting_rows(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Return the rows that count: those of the newest whole curves, and of what never
    pairs, as problems, the last row of each key.

    A row without a number counts only if no other row of its key does.
    """
    newest = {curve: targets[-1] for curve, targets in whole_curves(rows).items()}
    chosen: dict[Any, EvaluationRow] = {}
    for row in rows:
        if row.pairs and row.targets_sha256 != newest[row.curve]:
            continue
        if row.measured or row.key not in chosen:
            chosen[row.key] = row
    return [row for row in rows if chosen.get(row.key) is row]


def headline_split(rows: Sequence[EvaluationRow], split: str) -> str:
    """Return the split of the headline: the requested one, else another that was
    evaluated; empty if none was.
    """
    splits = {row.split for row in rows}
    return split if split in splits else min(splits, default="")
