"""Evaluate a run from its folder and write the rows into it."""

import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posbench import machine
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.batches import merge_spans
from posbench.data.tokens import TaskData, Tokens, data_of
from posbench.encodings.base import Encoding
from posbench.errors import UserError
from posbench.evaluation.evaluate import Evaluation, describe, evaluate
from posbench.evaluation.models import TrainedGPT, refuse_not_causal
from posbench.evaluation.ngrams import CachedNGrams, NGrams
from posbench.evaluation.plan import AnyEvaluation, check
from posbench.evaluation.problems import TaskEvaluation
from posbench.model.gpt import GPT
from posbench.processes import World
from posbench.run import TOKENIZER, checkpoint
from posbench.run.model import model_of
from posbench.run.rows import EvaluationRow, every_row
from posbench.run.run import Run, load_record
from posbench.terminal.signals import signals_as_errors
from posbench.tracking.tracker import mirror

logger = logging.getLogger(__name__)


def evaluate_run(folder: Path, config: Config) -> None:
    """Evaluate a finished run's newest checkpoint. Only missing rows are computed.

    An evaluation does not count as an attempt at the run: `run.json` keeps the outcome
    of the training.

    Args:
        config: the run's configuration, with the evaluation that is wanted.

    Raises:
        UserError: the folder holds no run or no complete checkpoint, the run was
            trained on another text than its configuration gives now, or the settings
            cannot be met.
        Stopped: a signal asked this process to end. The rows computed so far are kept.
    """
    device = machine.current(machine.resolve(config.runtime.device))
    check(config)
    trained = checkpoint.trained(folder)
    # its rows would come between those of the training
    if trained.step < config.training.steps:
        progress = f"{trained.step} of {config.training.steps} updates are made"
        raise UserError(
            f"{folder} is not finished, {progress}: go on with"
            f" '{load_record(folder)['command']}' first"
        )
    machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    with Run.open(folder, config, command=None) as run, signals_as_errors():
        mirror(config, run)
        tokens = data_of(config.data, config.runtime.cache, folder / TOKENIZER)
        run.refuse_changes(tokens.record["sha256"], tokens.tokenizer.sha256)
        model = model_of(folder, config, tokens.tokenizer).to(device)
        if not evaluate_into(run, model, tokens, config, trained.step, device):
            logger.info("all requested rows exist; nothing to do: %s", folder)


def evaluate_into(
    run: Run | None,
    model: GPT,
    tokens: Tokens | TaskData,
    config: Config,
    step: int,
    device: torch.device,
    world: World | None = None,
) -> int:
    """Evaluate the model after `step` updates, write the rows into the run folder, and
    return how many were missing.

    `run`: None in every process but the first. Such a process computes its share and
    writes nothing.
    """
    world, settings = world or World(), config.evaluation
    precision = settings.precision
    if precision == "auto":  # that of the training, perhaps on another machine
        precision = world.from_first(run.record["attempt"]["dtype"] if run else None)
    dtype = machine.resolve_precision(precision, device)
    arguments: dict[str, Any] = {
        "settings": settings,
        "checkpoint_step": step,
        "device": device,
        "world": world,
    }
    arguments |= {
        "tokens": step * config.training.tokens_per_step,
        "dtype": precision,
    }
    arguments["subject"] = subject_of(model, config, device, dtype)
    evaluation: AnyEvaluation
    if isinstance(tokens, TaskData):
        evaluation = TaskEvaluation(**arguments, task=tokens.task)
    else:
        arguments |= {
            "token_bytes": tokens.tokenizer.token_bytes,
            "tokenizer": tokens.tokenizer,
        }
        split = getattr(tokens, settings.split)
        evaluation = Evaluation(
            **arguments, split=split, reader=_reader(tokens, config, step, split.ids)
        )
    return rows_into(
        run, evaluation, world.from_first(every_row(run.folder) if run else None)
    )


def subject_of(
    model: GPT, config: Config, device: torch.device, dtype: torch.dtype
) -> TrainedGPT:
    """Return the model as it is evaluated; UserError if a user's class lets it see
    later tokens. Ours are tested.
    """
    subject = TrainedGPT(
        model.eval(), config.training.train_length, device, dtype, config.seed
    )
    parts = [part for part in model.encoding.modules() if isinstance(part, Encoding)]
    if not all(type(part).__module__.startswith("posbench.") for part in parts):
        exact = dataclasses.replace(subject, dtype=torch.float32)
        refuse_not_causal(
            exact,
            model.tokens.num_embeddings,
            "fp32",
            f"encoding '{model.encoding.name}'",
        )
    return subject


def rows_into(
    run: Run | None, evaluation: AnyEvaluation, existing: Sequence[EvaluationRow]
) -> int:
    """Write each missing row as soon as it is computed, so that none is lost. Return
    how many rows were missing.
    """
    started, n_rows = time.monotonic(), 0
    try:
        for row in evaluate(evaluation, existing):
            if run:
                run.log(row.to_json())
                run.sync()
            logger.info("%s", describe(row))
            n_rows += 1
    finally:
        if run:
            seconds = (
                (run.record["evaluate_seconds"] or 0.0) + time.monotonic() - started
            )
            run.update(evaluate_seconds=round(seconds, 3))
    return n_rows


def evaluations_on_the_way(config: Config) -> dict[int, EvaluationConfig]:
    """Return the settings of evaluations during training, by update: plain
    `fixed_target` rows at all lengths.
    """
    final, training = config.evaluation, config.training
    settings = dataclasses.replace(
        final,
        protocols=("fixed_target",),
        windowed=False,
        sinks=0,
        extensions=(),
        tasks=(),
    )
    steps = {tokens // training.tokens_per_step for tokens in final.at_tokens}
    first_step = 0 if config.start else 1  # untrained weights have nothing to show
    return {step: settings for step in steps if first_step <= step < training.steps}


def _reader(
    tokens: Tokens, config: Config, step: int, text: Any
) -> CachedNGrams | None:
    """Return the n-gram reader of the tokens that a run, and the run it began from,
    trained on; None if unknown.
    """
    start, training = config.start, config.training
    spans = [tokens.batches(training, config.seed).spans(step)] if step else []
    if start is not None:
        if start.text_sha256 != tokens.record["sha256"]:
            return None
        sizes: dict[str, Any] = {
            "train_length": start.train_length,
            "batch_size": start.batch_size,
        }
        earlier = dataclasses.replace(training, accumulation=1, **sizes)
        spans.append(tokens.batches(earlier, start.seed).spans(start.steps))
    if not spans:
        return None
    ngrams = NGrams(tokens.train.ids, merge_spans(spans), tokens.tokenizer.vocab_size)
    return CachedNGrams(ngrams, text, tokens.validation.ids)
