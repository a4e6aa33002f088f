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

from posbench import machine
from posbench.config.schema import EvaluationConfig
from posbench.data.tokenizer import Tokenizer
from posbench.data.tokens import TokenSplit
from posbench.errors import RunFailed, Undefined, UserError
from posbench.evaluation import problems, protocols
from posbench.evaluation.models import (
    Floats,
    NotFinite,
    Subject,
    Variant,
    Varied,
    check_finite,
    score,
)
from posbench.evaluation.ngrams import CachedNGrams
from posbench.evaluation.plan import AnyEvaluation, Measurement, Planned, measurements
from posbench.evaluation.protocols import Integers, Targets
from posbench.results.estimate import FEW_DOCUMENTS, estimate, units_of_text
from posbench.run.rows import EVALUATION_KEY, PLAIN, EvaluationRow, multiple, plain


def evaluate(
    evaluation: AnyEvaluation, existing: Sequence[EvaluationRow] = ()
) -> Iterator[EvaluationRow]:
    """Yield the requested rows that are missing from `existing`, each as soon as it is
    computed.
    """
    with machine.out_of_memory_as_failure(
        "a smaller evaluation.batch_tokens, or shorter lengths,"
    ):
        for row, measure in evaluation.planned():
            if any(same_row(row, other, evaluation.settings) for other in existing):
                continue
            if row.status == "ok":
                started = time.monotonic()
                machine.reset_peak_memory(evaluation.device)
                try:
                    row = measure(row)
                except NotFinite as error:
                    row = dataclasses.replace(row, status="failed", reason=str(error))
                except UserError as error:  # from a user's own encoding
                    raise RunFailed(f"at {row.length} tokens: {error}") from error
                # almost 0 if another row computed the nll
                seconds = round(time.monotonic() - started, 3)
                peak = machine.peak_memory(evaluation.device)
                row = dataclasses.replace(row, seconds=seconds, peak_memory_bytes=peak)
            yield row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation(AnyEvaluation):
    """An evaluation on text."""

    subject: Subject
    split: TokenSplit  # the text that `settings.split` names
    # UTF-8 bytes of each token id; None: tokens are no exact pieces of text
    token_bytes: NDArray[np.integer] | None
    # counts the training tokens; None: these are unknown
    reader: CachedNGrams | None = None
    tokenizer: Tokenizer | None = None  # the subject's tokenizer; None: unknown

    def planned(self) -> list[Planned]:
        # rows with equal forward passes share them
        nll_of = functools.cache(functools.partial(_nll, self))
        wanted = measurements(self.settings, self.split, self.subject.train_length)
        return [_planned(self, measurement, nll_of) for measurement in wanted]


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


def _planned(
    evaluation: Evaluation,
    measurement: Measurement,
    nll_of: Callable[[Measurement], Floats],
) -> Planned:
    """Return a row with all that is known before its forward passes, and the function
    that fills in its numbers.
    """
    windows, variant, split = measurement.windows, measurement.variant, evaluation.split
    row = evaluation.row(
        protocol=measurement.protocol,
        length=measurement.length,
        length_ratio=measurement.length / evaluation.subject.train_length,
        window=variant.window,
        extension=variant.name,
        task=measurement.task,
        offset=measurement.offset or None,
        documents=windows.documents if windows else None,
    )
    if not windows:
        reason = (
            f"the {evaluation.settings.split} text has too few windows of"
            f" {measurement.length} tokens"
        )
        return (
            dataclasses.replace(row, status="too_short", reason=reason),
            lambda row: row,
        )
    encode = None if evaluation.tokenizer is None else evaluation.tokenizer.encode
    make_choices = functools.partial(problems.choices_of, measurement, split, encode)
    try:
        subject, facts = _varied(evaluation, measurement)
        digest = "" if not measurement.poses else problems.sha256(make_choices())
    except Undefined as error:
        return (
            dataclasses.replace(row, status="undefined", reason=str(error)),
            lambda row: row,
        )
    targets = protocols.targets_of(windows)
    row = dataclasses.replace(
        row,
        extension_options=plain(facts),
        targets_sha256=digest or targets.sha256(split),
    )
    # not kept from above: the problems of all rows would take much memory
    if measurement.poses:
        return row, lambda row: problems.ranked(
            row, subject, make_choices(), evaluation
        )
    return row, lambda row: _measured(
        row, evaluation, variant, targets, nll_of(measurement)
    )


def same_row(
    row: EvaluationRow, other: EvaluationRow, settings: EvaluationConfig
) -> bool:
    """Return whether `other`, from a file, is the same row, by what is known before the
    forward passes.

    The precision is compared unless the settings leave it to `auto`, which may choose
    another on another machine.
    """
    columns = [*EVALUATION_KEY, "extension_options"]
    # the reason of a failed row is known only after its passes
    if other.status != "failed" or row.reason:
        columns.append("reason")
    if settings.precision != "auto":
        columns.append("dtype")
    if row.targets_sha256:
        columns += (
            ["targets_sha256"]
            if other.status == "failed"
            else ["status", "targets_sha256"]
        )
    return all(getattr(row, column) == getattr(other, column) for column in columns)


def _nll(evaluation: Evaluation, measurement: Measurement) -> Floats:
    """Return the nll of all tokens that the windows score, in the order of
    `targets_of`.
    """
    assert measurement.windows is not None
    subject, _ = _varied(evaluation, measurement)
    batch_tokens, world = evaluation.settings.batch_tokens, evaluation.world
    return score(
        subject,
        evaluation.split,
        measurement.windows,
        batch_tokens,
        measurement.rewrite,
        world,
    ).ravel()


def _varied(evaluation: Evaluation, measurement: Measurement) -> Varied:
    """Return the subject in the variant and at the offset of a row. Raises as
    `Subject.varied` and `shifted` do.
    """
    varied = evaluation.subject.varied(
        measurement.variant, measurement.length + measurement.offset
    )
    return (
        varied._replace(subject=varied.subject.shifted(measurement.offset))
        if measurement.offset
        else varied
    )


def _measured(
    row: EvaluationRow,
    evaluation: Evaluation,
    variant: Variant,
    targets: Targets,
    nll: Floats,
) -> EvaluationRow:
    """Return the row with its mean nll, the interval of this mean over units of text,
    and its sums by unit.
    """
    check_finite(nll)
    documents, unit = _units(targets, evaluation.split)

    def sums_of(nats: Floats) -> list[float]:
        return [round(total, 4) for total in np.bincount(unit, nats).tolist()]

    tokens, text, reader = np.bincount(unit), evaluation.split.ids, evaluation.reader
    mean, n_documents = float(nll.mean()), len(np.unique(documents))
    interval = estimate(np.bincount(unit, nll)[None], tokens)
    units = {
        "document": documents.tolist(),
        "tokens": tokens.tolist(),
        "nll": sums_of(nll),
    }
    columns: dict[str, Any] = {}
    if evaluation.token_bytes is not None:
        columns["n_bytes"] = n_bytes = int(
            evaluation.token_bytes[text[targets.indices]].sum()
        )
        columns["bits_per_byte"] = (
            float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None
        )
    # a probe rewrites the text that the reader would score
    if reader is not None and row.task is None:
        columns["ngram_order"], of_ngrams = reader.ngrams.best(text, targets.indices)
        columns["ngram_nll"], units["ngram"] = (
            float(of_ngrams.mean()),
            sums_of(of_ngrams),
        )
        if row.protocol == "fixed_target" and row.kind == PLAIN:
            units["cached_ngram"] = sums_of(
                reader.nll(targets.indices, targets.context)
            )
    return dataclasses.replace(
        row,
        mean_context=float(variant.visible(targets.context).mean()),
        n_tokens=nll.size,
        n_blocks=targets.n_blocks,
        n_documents=n_documents,
        nll=mean,
        perplexity=math.exp(mean) if mean < 700 else None,
        ci_low=interval.low(),
        ci_high=interval.high(),
        ci_over="documents" if n_documents >= FEW_DOCUMENTS else "segments",
        units=units,
        **columns,
    )


def _units(targets: Targets, split: TokenSplit) -> tuple[Integers, Integers]:
    """Return the document that contains each unit of text, and the unit of each target.

    A block belongs to the document of its first target and, where stretches are held
    out, to the stretch of that token.
    """
    order = np.argsort(targets.indices, kind="stable")
    firsts = targets.indices[order][
        np.unique(targets.blocks[order], return_index=True)[1]
    ]
    stretches = np.searchsorted(split.starts, firsts, side="right") - 1
    documents = (
        stretches if split.sources is None else np.asarray(split.sources)[stretches]
    )
    unit = units_of_text(documents, None if split.sources is None else stretches)
    return documents[np.unique(unit, return_index=True)[1]], unit[targets.blocks]
