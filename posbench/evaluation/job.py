"""Evaluate a run from its folder and write the rows into it."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posbench import machine, tracking
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.sources import moved
from posbench.data.tokens import TaskData, Tokens, data_of, note_use
from posbench.errors import UserError
from posbench.evaluation.contract import refuse_later_tokens
from posbench.evaluation.evaluate import Evaluation, describe, evaluate
from posbench.evaluation.ngrams import Readers
from posbench.evaluation.problems import TaskEvaluation
from posbench.evaluation.requests import AnyEvaluation, check
from posbench.evaluation.subjects import TrainedGPT
from posbench.model.gpt import GPT
from posbench.processes import World
from posbench.run import TOKENIZER, checkpoint
from posbench.run.folder import Run, load_config
from posbench.run.model import model_of
from posbench.run.rows import EvaluationRow, every_row, whole_curves
from posbench.run.saved import load_record
from posbench.terminal.signals import signals_as_errors

logger = logging.getLogger(__name__)


def evaluate_run(folder: Path, config: Config, world: World | None = None) -> None:
    """Evaluate a finished run's newest checkpoint. Only missing rows are computed.

    All processes of a world call this; rank 0 has the run folder. An evaluation does
    not count as an attempt at the run: `run.json` keeps the outcome of the training.

    Args:
        config: the run's configuration, with the evaluation that is wanted.

    Raises:
        UserError: the folder holds no run or no complete checkpoint, the run was
            trained on another text than its configuration gives now, or the settings
            cannot be met.
        Stopped: a signal asked this process to end. The rows computed so far are kept.
    """
    world = world or World()
    device = world.device(machine.resolve(config.runtime.device))
    check(config)
    path = config.data.path
    recorded = load_config(folder).data
    if path and path != recorded.path:  # it is typed, since the text has moved
        config = dataclasses.replace(config, data=moved(recorded, path))
    trained = checkpoint.trained(folder)
    # its rows would come between those of the training
    if trained.step < config.training.steps:
        progress = f"{trained.step} of {config.training.steps} updates are made"
        raise UserError(
            f"{folder} is not finished, {progress}: go on with"
            f" '{load_record(folder).command}' first"
        )
    machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    opened: contextlib.AbstractContextManager[Run | None] = contextlib.nullcontext()
    if world.rank == 0:
        opened = Run.open(folder, config, command=None)

    def data() -> Tokens | TaskData:
        return data_of(config.data, config.runtime.cache, folder / TOKENIZER)

    with opened as run, signals_as_errors():
        if run:
            tracking.mirror(config, run)
        tokens = world.after_first(data)
        if run:
            run.refuse_changes(tokens.meta["sha256"], tokens.tokenizer.sha256)
            note_use(tokens, folder)
            if config.data != recorded:
                run.write_config(dataclasses.replace(run.config, data=config.data))
        model = model_of(folder, config, tokens.tokenizer).to(device)
        if not evaluate_into(run, model, tokens, config, trained.step, device, world):
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
    world = world or World()
    settings = config.evaluation
    precision = settings.precision
    if precision == "auto":  # that of the training, perhaps on another machine
        if run:
            recorded = run.record.attempt.get("dtype")
            precision = recorded or config.training.precision
        precision = world.from_first(precision)
    dtype = machine.resolve_precision(precision, device)
    subject = subject_of(model, config, device, dtype)
    common: dict[str, Any] = {
        "subject": subject,
        "settings": settings,
        "checkpoint_step": step,
        "trained_tokens": step * config.training.tokens_per_step,
        "dtype": machine.dtype_name(dtype),
        "device": device,
        "world": world,
    }

    evaluation: AnyEvaluation
    if isinstance(tokens, TaskData):
        evaluation = TaskEvaluation(task=tokens.task, **common)
    else:
        split = getattr(tokens, settings.split)
        evaluation = Evaluation(
            split=split,
            tokenizer=tokens.tokenizer,
            readers=Readers.of_run(tokens, config, step, split.ids),
            **common,
        )
    existing = None
    if run:
        existing = every_row(run.folder)
    existing = world.from_first(existing)
    return rows_into(run, evaluation, existing)


def subject_of(
    model: GPT, config: Config, device: torch.device, dtype: torch.dtype
) -> TrainedGPT:
    """Return the model as it is evaluated; UserError if a user's class lets it see
    later tokens.
    """
    train_length = config.training.train_length
    subject = TrainedGPT(model.eval(), train_length, device, dtype, config.seed)
    refuse_later_tokens(subject)
    return subject


def rows_into(
    run: Run | None, evaluation: AnyEvaluation, existing: Sequence[EvaluationRow]
) -> int:
    """Write each missing row as soon as it is computed, so that none is lost. Return
    how many rows were missing.
    """
    started = time.monotonic()
    rows: list[EvaluationRow] = []
    curves = whole_curves(existing)
    try:
        for row in evaluate(evaluation, existing):
            if run:
                run.log(row.to_json())
                run.sync()
            if row.pairs and row.protocol == "fixed_target" and row.curve in curves:
                targets = curves.pop(row.curve)
                if row.targets_sha256 not in targets:
                    logger.info("a new curve, on other targets than the one so far")
            logger.info("%s", describe(row))
            rows.append(row)
    finally:
        if run:
            earlier = run.record.evaluate_seconds or 0.0
            seconds = earlier + time.monotonic() - started
            run.update(evaluate_seconds=round(seconds, 3))
    return len(rows)


def planned_evaluations(config: Config) -> dict[int, EvaluationConfig]:
    """Return the settings of evaluations during training, by update: plain
    `fixed_target` rows at all lengths.
    """
    training = config.training
    settings = config.evaluation.as_trained(protocols=("fixed_target",))
    # at step 0 only weights of another run are measured
    first_step = 0 if config.start else 1
    evaluations = {}
    for tokens in settings.at_tokens:
        step = tokens // training.tokens_per_step
        if first_step <= step < training.steps:
            evaluations[step] = settings
    return evaluations
