"""Extrapolation evaluation of a trained run: perplexity by context length, far beyond the training length."""

import dataclasses
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from posbench import machine
from posbench.config.schema import Config, EvaluationConfig
from posbench.data import tokens as data
from posbench.data.tokens import Tokens, TokenSplit
from posbench.encodings.base import Encoding, check_length
from posbench.errors import UserError
from posbench.evaluation import protocols
from posbench.evaluation.plan import Forward, Measurement, check, measurements
from posbench.evaluation.protocols import MIN_BLOCKS, Targets
from posbench.evaluation.score import changed, score
from posbench.evaluation.statistics import block_bootstrap
from posbench.model import GPT, build
from posbench.runs import checkpoint, tracking
from posbench.runs.folder import Run, load_config, load_record
from posbench.runs.jsonl import plain
from posbench.runs.rows import EVALUATION_KEY, BlockRow, EvaluationRow, evaluation_rows

logger = logging.getLogger(__name__)


def evaluate(
    model: GPT,
    tokens: Tokens,
    config: Config,
    step: int,
    known: list[EvaluationRow],
    device: torch.device,
    dtype: torch.dtype,
    report: Callable[[EvaluationRow, list[BlockRow]], None],
) -> None:
    """Compute the cells that are not among the `known` rows; each goes to `report(row, block rows)` when done.

    Raises:
        UserError: unknown task or extension, or a reference that is no run on these tokens.
    """
    settings = config.evaluation
    check(settings)
    split: TokenSplit = getattr(tokens, settings.split)
    train_length = config.training.train_length
    model.eval()

    @functools.cache
    def nll_of(forward: Forward, by: GPT) -> NDArray[np.float64]:
        """Of all tokens that the windows score, in `targets_of`'s order."""
        variant, batch = forward.variant, settings.batch_tokens
        encoding, _ = variant.apply(by.encoding, forward.length, train_length)
        with changed(by, encoding.to(device), variant.window, variant.sinks):
            scored = [score(by, split, w, device, dtype, batch, forward.rewrite, config.seed) for w in forward.windows]
        return np.concatenate([nll.ravel() for nll in scored])

    @functools.cache
    def reference() -> tuple[GPT, str]:
        if settings.reference is None:
            return model, "the model itself"
        return _reference(pathlib.Path(settings.reference), tokens, device)

    for planned in measurements(settings, split, train_length):
        row = dataclasses.replace(_row(planned, config, step, dtype), **_defined(planned, model.encoding, config))
        blocks: list[BlockRow] = []
        if row.status == "ok":
            targets = protocols.targets_of(planned.forward.windows)
            kept = np.full(len(targets.indices), True)
            if planned.above is not None:
                kept = (targets.context > planned.above) & (targets.context <= planned.length)
            if planned.select:  # which tokens these are is known after two forward passes only: described before
                digest = targets.where(kept).sha256(split)
                reason = f"key tokens of {reference()[1]}, among the targets {digest[:8]}"
                row = dataclasses.replace(row, reason=reason)
            else:
                row = dataclasses.replace(row, targets_sha256=targets.where(kept).sha256(split))
        if any(_same(row, other) for other in known):
            continue
        if row.status == "ok":
            started = time.monotonic()
            machine.reset_peak_memory(device)
            if planned.select:
                short, long = (
                    nll_of(forward, reference()[0]) for forward in (planned.select.short, planned.select.long)
                )
                kept = short - long > planned.select.nats
            nll = nll_of(planned.forward, model)[kept]
            numbers, blocks = _numbers(nll, targets.where(kept), planned, tokens, split, config)
            row = dataclasses.replace(
                row,
                **numbers,
                seconds=round(time.monotonic() - started, 3),  # nothing where another row paid for the passes
                peak_memory_bytes=machine.peak_memory(device),
            )
        report(row, blocks)


def evaluate_run(
    folder: pathlib.Path, settings: EvaluationConfig, device: str | None = None, threads: int | None = None
) -> None:
    """Evaluate a finished run's newest checkpoint; only what is missing is computed.

    Raises:
        UserError: the folder holds no run or no complete checkpoint, or the settings cannot be met.
    """
    check(settings)
    config = dataclasses.replace(load_config(folder), evaluation=settings)
    step, weights = checkpoint.load_model(folder)
    chosen = machine.resolve(device or config.runtime.device)
    machine.set_threads(threads or config.runtime.threads)
    machine.keep_freed_memory()
    with Run.open(folder, config, command=None) as run:
        tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache))
        if run.record["tokenizer_sha256"] not in (None, tokens.tokenizer.sha256):
            raise UserError(f"the data of {folder} gives another tokenizer than the run was trained with")
        model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(chosen)
        model.load_state_dict(weights)
        tracker = tracking.start(config, run)
        evaluate_into(run, tracker, model, tokens, config, step, chosen)
        tracker.finish()


def evaluate_into(
    run: Run,
    tracker: tracking.Tracker,
    model: GPT,
    tokens: Tokens,
    config: Config,
    step: int,
    device: torch.device,
) -> None:
    """Evaluate into a run folder and its W&B mirror, row by row, so that nothing computed is lost."""
    dtype = machine.resolve_precision(config.training.precision, device)
    started = time.monotonic()

    def report(row: EvaluationRow, blocks: list[BlockRow]) -> None:
        run.log_evaluation(row, blocks)
        tracker.curve(row)
        logger.info("%s", describe(row))

    evaluate(model, tokens, config, step, evaluation_rows(run.folder), device, dtype, report)
    seconds = (run.record["evaluate_seconds"] or 0.0) + time.monotonic() - started
    run.update(evaluate_seconds=round(seconds, 3))


def describe(row: EvaluationRow) -> str:
    """A row in one line, protocol and unit beside the number."""
    where = f"{row.curve_name} at {row.length} tokens ({row.length_ratio:g}x)"
    if row.status != "ok":
        return f"{where}: {row.status}, {row.reason}"
    perplexity = "too large for a number" if row.perplexity is None else f"{row.perplexity:.2f}"
    return f"{where}: {row.nll:.4f} nats/token ({row.ci_low:.3f}..{row.ci_high:.3f}), perplexity {perplexity}"


def _row(planned: Measurement, config: Config, step: int, dtype: torch.dtype) -> EvaluationRow:
    """A row with everything known before the measurement."""
    return EvaluationRow(
        protocol=planned.protocol,
        length=planned.length,
        length_ratio=planned.length / config.training.train_length,
        stride=planned.stride,
        window=planned.forward.variant.window,
        extension=planned.forward.variant.name,
        task=planned.task,
        split=config.evaluation.split,
        documents=planned.forward.windows[0].documents if planned.forward.windows else None,
        checkpoint_step=step,
        status="ok",
        dtype=machine.dtype_name(dtype),
    )


def _defined(planned: Measurement, encoding: Encoding, config: Config) -> dict[str, Any]:
    """The row's status and reason, and what an extension does."""
    if not planned.possible:
        reason = f"the {config.evaluation.split} text has too few windows of {planned.length} tokens"
        return {"status": "too_short", "reason": reason}
    train_length = config.training.train_length
    try:
        length = planned.forward.length
        used, options = planned.forward.variant.apply(encoding, length, train_length)
        check_length(used, length)
        if planned.select and config.evaluation.reference is None:
            check_length(encoding, planned.select.long.length)
    except UserError as error:
        return {"status": "undefined", "reason": str(error)}
    return {"extension_options": plain(options)}


def _numbers(
    nll: NDArray[np.float64], targets: Targets, planned: Measurement, tokens: Tokens, split: TokenSplit, config: Config
) -> tuple[dict[str, Any], list[BlockRow]]:
    """What a row says of its scored tokens, and its block rows."""
    blocks = targets.blocks
    sums = np.bincount(blocks, nll, targets.n_blocks).astype(np.float64)
    counts = np.bincount(blocks, minlength=targets.n_blocks).astype(np.float64)
    if np.count_nonzero(counts) < MIN_BLOCKS:
        return {"status": "too_short"}, []
    token_bytes = tokens.tokenizer.token_bytes  # None: this tokenizer's tokens are not pieces of the original text
    sizes: list[int | None] = [None] * targets.n_blocks
    if token_bytes is not None:
        in_blocks = np.bincount(blocks, token_bytes[split.ids[targets.indices]], targets.n_blocks)
        sizes = [int(size) for size in in_blocks]
    n_bytes = None if token_bytes is None else sum(size or 0 for size in sizes)
    mean = float(nll.mean())
    low, high = block_bootstrap(sums, counts, config.evaluation.bootstrap)
    variant = planned.forward.variant
    seen = targets.context if variant.window is None else targets.context.clip(max=variant.window + variant.sinks)
    row = {
        "targets_sha256": targets.sha256(split),
        "n_tokens": nll.size,
        "n_bytes": n_bytes,
        "n_blocks": targets.n_blocks,
        "mean_context": float(seen.mean()),
        "nll": mean,
        "perplexity": math.exp(mean) if mean < 700 else None,
        "bits_per_byte": float(nll.sum()) / math.log(2) / n_bytes if n_bytes else None,
        "ci_low": low,
        "ci_high": high,
    }
    return row, [
        BlockRow(block=block, nll_sum=float(total), n_tokens=int(count), n_bytes=size)
        for block, (total, count, size) in enumerate(zip(sums, counts, sizes, strict=True))
    ]


def _same(row: EvaluationRow, other: EvaluationRow) -> bool:
    """Whether `other`, as read from a file, is this row. What `row` does not know before its passes does not count."""
    columns = [*EVALUATION_KEY, "reason", "extension_options"]
    if row.targets_sha256:
        columns += ["status", "targets_sha256"]
    return all(getattr(row, column) == getattr(other, column) for column in columns)


def _reference(folder: pathlib.Path, tokens: Tokens, device: torch.device) -> tuple[GPT, str]:
    """The model of a run folder, and what it is called in rows.

    Raises:
        UserError: no complete run, or one of another tokenizer.
    """
    config = load_config(folder)
    record = load_record(folder)
    if record["tokenizer_sha256"] != tokens.tokenizer.sha256:
        raise UserError(f"evaluation.reference {folder} was trained with another tokenizer than this run")
    step, weights = checkpoint.load_model(folder)
    model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(device)
    model.load_state_dict(weights)
    return model.eval(), f"{record['id']} at step {step}"
