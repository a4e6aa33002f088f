"""Evaluation of any model far beyond its training length. Its results are rows, on text
or on a task.

`Evaluation` measures perplexity on text by context length. `problems.TaskEvaluation`
measures answers on a task.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from posbench import machine, tasks
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.tokenizer import Tokenizer
from posbench.data.tokens import TokenSplit
from posbench.errors import RowsFailed, RunFailed, Undefined, UserError
from posbench.estimate import FEW_DOCUMENTS, estimate, units_of_text
from posbench.evaluation import problems, protocols, requests
from posbench.evaluation.mixture import window_nats
from posbench.evaluation.ngrams import Readers
from posbench.evaluation.protocols import Integers, Targets
from posbench.evaluation.requests import AnyEvaluation, Measurement, Requested
from posbench.evaluation.subjects import (
    METRICS,
    Facts,
    Floats,
    NotFinite,
    Subject,
    check_finite,
    score,
)
from posbench.run.rows import (
    EVALUATION_KEY,
    LARGEST,
    PLAIN,
    EvaluationRow,
    counting_rows,
    json_plain,
    multiple,
)

_MORE_ROOM = "a smaller evaluation.batch_tokens, or shorter lengths,"


def evaluate(
    evaluation: AnyEvaluation, existing: Sequence[EvaluationRow] = ()
) -> Iterator[EvaluationRow]:
    """Yield the requested rows that are missing from `existing`, each as soon as it is
    computed. If the targets have changed, all rows of the curve are computed again.

    A row that fails says why, and the others are measured. Then RowsFailed is raised,
    but not for a loss that is not finite.
    """
    failure: RunFailed | None = None
    for row, measure in evaluation.requested(existing):
        if any(same_row(row, other, evaluation.settings) for other in existing):
            continue
        if measure is not None:
            try:
                row = _computed(row, measure, evaluation)
            except RunFailed as error:
                # the other processes wait for this one's part of the row
                if evaluation.world.size > 1:
                    raise
                row = dataclasses.replace(row, status="failed", reason=str(error))
                failure = failure or RowsFailed(
                    f"at {row.length} tokens: {error}", error.reason
                )
        yield row
    if failure is not None:
        raise failure


def keys_of(config: Config) -> set[tuple[Any, ...]]:
    """Return the keys of the rows that a run has once it is evaluated."""
    settings = config.evaluation
    train_length = config.training.train_length
    columns = []
    if config.data.task is None:
        for measurement in requests.measurements(settings, train_length):
            columns.append(measurement.columns(train_length))
    else:
        task = tasks.build(config.data.task["name"], config.data.task)
        for point in problems.measurements(settings, task, train_length):
            columns.append(point.columns(task))

    keys = set()
    for of_row in columns:
        row = EvaluationRow(
            split=settings.split,
            checkpoint_step=config.training.steps,
            status="ok",
            **of_row,
        )
        keys.add(row.key)
    return keys


def same_row(
    row: EvaluationRow, other: EvaluationRow, settings: EvaluationConfig
) -> bool:
    """Return whether `other`, from a file, is the same row, by what is known before the
    forward passes.

    The precision is compared unless the settings leave it to `auto`, which may choose
    another on another machine.
    """
    if other.is_to_repeat:
        return False
    columns = [*EVALUATION_KEY, "extension_options", "targets_sha256"]
    # that a row fails, and why, is known only after its passes
    if other.status != "failed":
        columns += ["status", "reason"]
    if settings.precision != "auto":
        columns.append("dtype")
    return all(getattr(row, column) == getattr(other, column) for column in columns)


def _computed(
    row: EvaluationRow,
    measure: Callable[[], EvaluationRow],
    evaluation: AnyEvaluation,
) -> EvaluationRow:
    """Return the row with its numbers, or why it failed, and what it took. Raises
    RunFailed for an error of a user's encoding, and if memory runs out.
    """
    started = time.monotonic()
    machine.reset_peak_memory(evaluation.device)
    try:
        with machine.out_of_memory_as_failure(_MORE_ROOM):
            row = measure()
    except NotFinite as error:
        row = dataclasses.replace(row, status="failed", reason=str(error))
    except UserError as error:  # from a user's own encoding
        raise RunFailed(str(error)) from error

    # almost 0 if another row computed the nll
    seconds = round(time.monotonic() - started, 3)
    peak = machine.peak_memory(evaluation.device)
    return dataclasses.replace(row, seconds=seconds, peak_memory_bytes=peak)


def describe(row: EvaluationRow) -> str:
    """Return a row as one line of text: its curve and length, and its numbers with
    their units.
    """
    label = f"{row.curve_name} at {row.length} tokens ({multiple(row.length_ratio)})"
    if row.problem_length is not None:
        label = (
            f"{row.curve_name} of length {row.problem_length} ({row.length_ratio:.3g}x,"
            f" {row.length} tokens)"
        )
    if row.status != "ok":
        return f"{label}: {row.status}, {row.reason}"
    parts = []
    if row.accuracy is not None:
        parts.append(f"{row.accuracy:.1%} right")
    if row.chance is not None:
        parts.append(f"{row.chance:.1%} by chance")
    if row.nll is not None:
        parts.append(f"{row.nll:.4f} nats/token")
    return f"{label}: {', '.join(parts)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(AnyEvaluation):
    """An evaluation on text."""

    subject: Subject
    split: TokenSplit  # the text that `settings.split` names
    tokenizer: Tokenizer  # the subject's
    # know the training tokens; None: these are unknown
    readers: Readers | None = None

    def requested(self, existing: Sequence[EvaluationRow] = ()) -> list[Requested]:
        # Rows with equal forward passes share them: measurements that differ in nothing
        # else are equal.
        @functools.cache
        def numbers_of(measurement: Measurement) -> Floats:
            """Return the nll and the metrics of all tokens that the windows score, in
            the order of `targets_of`: (1 + metrics, tokens).
            """
            assert measurement.windows is not None
            subject, _ = _subject_of(self, measurement)
            numbers = score(
                subject,
                self.split,
                measurement.windows,
                self.settings.batch_tokens,
                measurement.rewrite,
                self.world,
            )
            return numbers.reshape(len(numbers), -1)

        train_length = self.subject.train_length
        curve = counting_rows(existing)
        present = {row.key for row in curve}
        their_settings = requests.settings_for(curve, self.settings, train_length)

        # A new curve has all that the present one has. What is new comes first, so that
        # the curve that replaces the present one has all that is asked for, too.
        new: dict[Any, Measurement] = {}
        asked: dict[Any, Measurement] = {}
        for measurement in requests.measurements(self.settings, train_length):
            key = _row_of(self, measurement).key
            asked[key] = measurement
            if key not in present:
                new[key] = measurement
        again: dict[Any, Measurement] = {}
        for measurement in requests.measurements(their_settings, train_length):
            key = _row_of(self, measurement).key
            if key in present:  # their settings may ask for more than these
                again[key] = measurement
        wanted = new | again | asked

        placed = requests.with_windows(
            [*wanted.values()], self.settings, self.split, train_length
        )
        return [_requested(self, measurement, numbers_of) for measurement in placed]


def _row_of(evaluation: Evaluation, measurement: Measurement) -> EvaluationRow:
    """Return the row of a measurement, as far as it is known without its windows."""
    return evaluation.row(**measurement.columns(evaluation.subject.train_length))


def _requested(
    evaluation: Evaluation,
    measurement: Measurement,
    numbers_of: Callable[[Measurement], Floats],
) -> Requested:
    """Return the row of a measurement before its forward passes, and the function that
    makes them.

    `numbers_of` makes the forward passes on the text; equal ones are made once.
    """
    split = evaluation.split
    windows = measurement.windows
    row = _row_of(evaluation, measurement)
    if windows is None:
        reason = (
            f"the {evaluation.settings.split} text has too few windows of"
            f" {measurement.length} tokens"
        )
        return dataclasses.replace(row, status="too_short", reason=reason), None
    row = dataclasses.replace(row, documents=windows.documents)

    encode = evaluation.tokenizer.encode
    make_choices = functools.partial(problems.choices_of, measurement, split, encode)
    try:
        subject, facts = _subject_of(evaluation, measurement)
        if measurement.pose_from is None:  # the text, or a probe that rewrites it
            digest = protocols.targets_of(windows).sha256(split)
        else:  # a probe that poses problems
            digest = problems.choices_sha256(make_choices())
    except Undefined as error:
        return dataclasses.replace(row, status="undefined", reason=str(error)), None
    row = dataclasses.replace(
        row, extension_options=json_plain(facts), targets_sha256=digest
    )

    # Problems are made twice, above for their digest: kept for all rows they would take
    # much memory.
    if measurement.pose_from is None:
        return row, lambda: _measured(
            row, evaluation, measurement, numbers_of(measurement)
        )
    return row, lambda: problems.ranked(row, subject, make_choices(), evaluation)


def _subject_of(
    evaluation: Evaluation, measurement: Measurement
) -> tuple[Subject, Facts]:
    """Return the subject in the variant and at the offset of a row. Raises as
    `Subject.in_variant` and `shifted` do.
    """
    furthest = measurement.length + measurement.offset
    subject, facts = evaluation.subject.in_variant(measurement.variant, furthest)
    if measurement.offset:
        subject = subject.shifted(measurement.offset)
    return subject, facts


def _measured(
    row: EvaluationRow,
    evaluation: Evaluation,
    measurement: Measurement,
    numbers: Floats,
) -> EvaluationRow:
    """Return the row with its mean nll, the interval of this mean over units of text,
    its sums by unit, and the means of the metrics.
    """
    nll, *metric_values = numbers  # (tokens,) each
    check_finite(nll)
    assert measurement.windows is not None
    targets = protocols.targets_of(measurement.windows)
    document_of_unit, unit = _units(targets, evaluation.split)
    n_documents = len(np.unique(document_of_unit))

    means = [float(values.mean()) for values in metric_values]
    metrics: dict[str, Any] = dict(zip(METRICS, means, strict=True))

    tokens_of_unit = np.bincount(unit)
    nll_of_unit = np.bincount(unit, nll)
    mean = float(nll.mean())
    interval = estimate(nll_of_unit[None], tokens_of_unit)  # of one model, (1, units)
    units = {
        "document": document_of_unit.tolist(),
        "tokens": tokens_of_unit.tolist(),
        "nll": _sums(nll, unit),
    }
    perplexity = None
    if mean < LARGEST:  # math.exp overflows above 709
        perplexity = math.exp(mean)
    ci_over = "segments"
    if n_documents >= FEW_DOCUMENTS:
        ci_over = "documents"
    row = dataclasses.replace(
        row,
        mean_context=float(measurement.variant.visible(targets.context).mean()),
        n_tokens=nll.size,
        n_blocks=int(targets.blocks.max()) + 1,
        n_documents=n_documents,
        nll=mean,
        perplexity=perplexity,
        ci_low=interval.low(),
        ci_high=interval.high(),
        ci_over=ci_over,
        units=units,
        **metrics,
    )
    token_bytes = evaluation.tokenizer.token_bytes
    if token_bytes is not None:
        ids = evaluation.split.ids[targets.indices]
        n_bytes = int(token_bytes[ids].sum())
        bits = float(nll.sum()) / math.log(2)
        row = dataclasses.replace(row, n_bytes=n_bytes, bits_per_byte=bits / n_bytes)
    # a probe rewrites the text that the readers would score
    if evaluation.readers is not None and row.task is None:
        row = _with_readers(row, evaluation.readers, targets, unit)
    return row


def _with_readers(
    row: EvaluationRow, readers: Readers, targets: Targets, unit: Integers
) -> EvaluationRow:
    """Return the row with the nll of the simple readers on its targets; that of the
    mixture only in the plain row at the training length.
    """
    order, ngram_nll = readers.ngram(targets.indices)
    units = {**(row.units or {}), "ngram": _sums(ngram_nll, unit)}
    is_main = row.protocol == "fixed_target" and row.variant == PLAIN
    if is_main and row.length_ratio == 1 and readers.breaks is not None:
        window_nll = window_nats(readers, targets.indices, targets.context)
        units["mixture"] = _sums(window_nll, unit)
    return dataclasses.replace(
        row, ngram_order=order, ngram_nll=float(ngram_nll.mean()), units=units
    )


def _sums(nats: NDArray[np.floating], unit: Integers) -> list[float]:
    return [round(total, 4) for total in np.bincount(unit, nats).tolist()]


def _units(targets: Targets, split: TokenSplit) -> tuple[Integers, Integers]:
    """Return the document that contains each unit of text, and the unit of each target.

    A block belongs to the document of its first target and, where stretches are held
    out, to the stretch of that token. Equal documents count as one.
    """
    order = np.argsort(targets.indices, kind="stable")
    _, first_of_block = np.unique(targets.blocks[order], return_index=True)
    first_targets = targets.indices[order][first_of_block]  # (blocks,)

    # A split's pieces are whole documents, or stretches of some (`split.sources`).
    pieces = np.searchsorted(split.starts, first_targets, side="right") - 1
    pieces = split.firsts[pieces]  # copies of a document are the first one; (blocks,)
    documents = pieces
    if split.sources is not None:
        documents = np.asarray(split.sources)[pieces]
    unit_of_block = units_of_text(documents, pieces)
    _, block_of_unit = np.unique(unit_of_block, return_index=True)  # the first one
    return documents[block_of_unit], unit_of_block[targets.blocks]
