"""Train one model and evaluate how far it holds: the main job, from top to bottom.

A run is its configuration. Started again, it continues from its newest checkpoint;
finished, it only evaluates what is missing. Batches, initial weights and random
positions are pure functions of (seed, step), so a continued run is bit-identical to an
uninterrupted one on a CPU with the same number of threads.
"""

import contextlib
import dataclasses
import logging
import math
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.schema import Config, EvaluationConfig, Trains, to_container
from posbench.data.batches import Batch, ProblemBatches, TrainingBatches
from posbench.data.tokens import TaskData, Tokens, data_of
from posbench.encodings.base import Encoding
from posbench.errors import Stopped, UserError
from posbench.evaluation.job import (
    evaluate_into,
    evaluations_on_the_way,
    results_of,
    subject_of,
)
from posbench.model.gpt import build, parameter_counts
from posbench.model.loss import IGNORED
from posbench.processes import World
from posbench.run import STABLE, TOKENIZER, checkpoint, tracking
from posbench.run.model import weights_of
from posbench.run.rows import read_rows
from posbench.run.run import Run, load_config, load_record
from posbench.terminal import console
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training import step as updates
from posbench.training.step import (
    Clock,
    Outcome,
    Trainer,
    begin_update,
    learning_rate,
    tell_progress,
)

logger = logging.getLogger(__name__)
_MORE_ROOM = (
    "a smaller training.batch_size, with more training.accumulation, or"
    " runtime.checkpointing=true"
)
# How many updates may be unread when another is launched, by device: the host prepares
# one while CUDA computes one.
_AHEAD = {"cuda": 1}
_VALIDATIONS = 4  # per run, unless the configuration says how often


def train(
    config: Config,
    folder: Path,
    command: list[str],
    restart: bool = False,
    world: World | None = None,
) -> None:
    """Run a configuration in its folder to the end, from wherever it stands: train, and
    evaluate.

    All processes of a world call this; rank 0 has the run folder and the tracker. What
    is computed is kept, whatever ends it; a finished run without its weights is moved
    aside. `command` is the command line, for the record.
    """
    world = world or World()
    device = world.device(resolved := machine.resolve(config.runtime.device))
    dtype = machine.resolve_precision(config.training.precision, device)
    threads = machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    # the text comes first: a mistake in it leaves no folder behind
    with signals_as_errors():
        tokens = world.after_first(lambda: data_of(config.data, config.runtime.cache))
        # refuses a text shorter than a block
        (batches := tokens.batches(config.training, config.seed)).batch(0)
    if config.start and tokens.tokenizer.sha256 != config.start.tokenizer_sha256:
        raise UserError(
            "expected the tokenizer that start has:"
            f" data.tokenizer={config.start.run}/{TOKENIZER}"
        )
    with (
        (
            Run.open(folder, config, command, restart=restart)
            if world.rank == 0
            else contextlib.nullcontext()
        ) as run,
        signals_as_errors(),
    ):
        if run:
            tracking.mirror(config, run, results_of)
            resources = {
                "device": str(resolved),
                "threads": threads,
                "processes": world.size,
            }
            begin(run, config, tokens, machine.dtype_name(dtype), **resources)
        with machine.out_of_memory_as_failure("a smaller model"):
            model = build(
                config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts
            ).to(device)
        if run:
            run.update(data=tokens.record, parameters=parameter_counts(model))

        def evaluate(step: int, settings: EvaluationConfig) -> int:
            # as when a finished run is evaluated, until the next update
            tell_progress(model, 1.0)
            with_settings = dataclasses.replace(config, evaluation=settings)
            return evaluate_into(run, model, tokens, with_settings, step, device, world)

        with machine.out_of_memory_as_failure(_MORE_ROOM):
            # else refused before time is spent
            causal_model = subject_of(model, config, device, dtype).model
            n_updates = fit(
                Trainer(causal_model, config, device, dtype, world),
                batches,
                tokens,
                config,
                run,
                evaluate,
            )
        n_rows = evaluate(config.training.steps, config.evaluation)
        if run:
            end(run, config)
            if run.tracker and tracking.in_sweep():
                # the agent waits for this run, even if it was finished before
                run.tracker.send()
            if not n_updates and not n_rows:
                logger.info("finished; nothing to do: %s", run.folder)


def begin(
    run: Run, config: Trains, tokens: Tokens | TaskData, dtype: str, **resources: Any
) -> None:
    """Begin an attempt of a run. Raises UserError if it may not be continued on this
    text or in this precision.
    """
    run.refuse_changes(tokens.record["sha256"], tokens.tokenizer.sha256)
    newest = checkpoint.newest(run.folder, (checkpoint.STATE,))
    if (
        newest
        and newest.step < config.training.steps
        and (saved_dtype := newest.state()["dtype"]) != dtype
    ):
        raise UserError(
            f"{run.folder} was trained in {saved_dtype} up to step {newest.step} and"
            f" would go on in {dtype} here: continue it where training.precision is"
            " that, or begin anew with --restart"
        )
    run.begin_attempt(dtype=dtype, **resources)
    tokens.tokenizer.save(run.folder / TOKENIZER)
    run.update(tokenizer_sha256=tokens.tokenizer.sha256)


def end(run: Run, config: Trains) -> None:
    """Record that a run is done."""
    if run.record["status"] != "done":
        run.write_config(dataclasses.replace(run.config, evaluation=config.evaluation))
    run.record["evaluated"] = to_container(config)["evaluation"]
    run.finish("done")


def fit(
    trainer: Trainer,
    batches: TrainingBatches | ProblemBatches,
    tokens: Tokens | TaskData,
    config: Trains,
    run: Run | None,
    evaluate: Callable[[int, EvaluationConfig], object],
) -> int:
    """Train to the token budget from wherever the run stands, and return the number of
    updates made now.
    """
    training, world = config.training, trainer.world
    total, parts, per_step = (
        training.steps,
        training.accumulation,
        training.tokens_per_step,
    )
    first_step, state = _resume(trainer, config, run)
    if first_step == total:
        return 0
    step, clock = first_step, Clock(trainer, first_step * per_step, state)
    config = world.from_first(run.as_begun(config) if run else None)
    evaluations, validate_every = (
        evaluations_on_the_way(config),
        config.runtime.validate_every_steps,
    )
    validation = _validation(tokens, config)
    if validate_every is None and validation:
        validate_every = math.ceil(total / _VALIDATIONS)
    cadences = (
        config.runtime.log_every_steps,
        validate_every,
        config.runtime.checkpoint_every_steps,
    )
    stable = updates.stable_steps(training) if isinstance(config, Config) else 0
    outcomes: list[Outcome] = []  # launched and not yet read
    if run and run.tracker:
        run.tracker.send()

    def read(count: int) -> tuple[float, float]:
        """Read updates until `count` remain unread; return the loss and gradient norm
        of the last one read.
        """
        newest = (math.nan, math.nan)
        while len(outcomes) > count:
            outcome = outcomes.pop(0)
            newest = outcome.read()
            if bar:
                bar.advance(newest[0], (outcome.step + 1) * per_step)
        return newest

    def log(values: dict[str, float]) -> None:
        if run:
            run.log({"step": step, "tokens": step * per_step, **values})

    def evaluate_on_the_way() -> None:
        if step in evaluations:
            logger.info("after %s tokens of training:", f"{step * per_step:,}")
            with clock.paused():
                evaluate(step, evaluations[step])

    if step == 0:
        evaluate_on_the_way()
    bars = (
        console.progress(total, step, clock.full_speed)
        if run
        else contextlib.nullcontext()
    )
    with stop_signals(second_interrupts=True) as world.received, bars as bar:
        while step < total:
            trainer.model.train()
            rate = learning_rate(step, total, training)
            batch = (
                batches.batch(step)
                .cut(updates.stage_at(step, training)[0])
                .share(parts, world.rank, world.size)
            )
            outcomes.append(begin_update(trainer, batch, step, rate))
            step += 1
            to_log, to_validate, to_save = (
                cadence and (step % cadence == 0 or step == total)
                for cadence in cadences
            )
            must_read = (
                to_log
                or to_validate
                or to_save
                or step == stable
                or step in evaluations
            )
            loss, norm = read(0 if must_read else _AHEAD.get(trainer.device.type, 0))
            # the same signal in all processes: they have read the same updates
            if stopped := world.stopped_by():
                read(0)
            if to_log:
                numbers = {
                    "train/loss": loss,
                    "train/grad_norm": norm,
                    "train/learning_rate": rate,
                }
                log(
                    {
                        name: float(f"{value:.7g}")
                        for name, value in (numbers | clock.speed(step)).items()
                    }
                )
            if to_validate:
                log(validate(trainer, validation, isinstance(tokens, TaskData)))
            # before a checkpoint, from which a resumed run would not come back here
            evaluate_on_the_way()
            stopped = stopped or world.stopped_by()
            if run and step == stable:
                _save(run, trainer, step, clock, run.folder / STABLE)
            if run and (to_save or stopped):
                _save(run, trainer, step, clock, run.folder)
            if stopped:
                break
        # No process ends before rank 0 has saved: its launcher might then end rank 0. A
        # signal may come meanwhile.
        stopped = world.from_first(stopped or next(iter(world.received), None))
    if stopped:
        raise Stopped(
            stopped,
            f"stopped by {signal.Signals(stopped).name} after step {step}; saved",
        )
    tell_progress(trainer.model, 1.0)
    return step - first_step


def _save(run: Run, trainer: Trainer, step: int, clock: Clock, folder: Path) -> None:
    """Write a checkpoint into a folder, after the rows up to it. Raises RunFailed if
    there is no room.
    """
    run.sync()
    totals = {"tokens": step * trainer.training.tokens_per_step, **clock.totals()}
    # before the checkpoint: after the last one nothing is recorded
    run.update(**totals)
    state: dict[str, Any] = totals | {"dtype": machine.dtype_name(trainer.dtype)}
    if trainer.scale is not None:
        state["loss_scale"] = trainer.scale.state_dict()
    checkpoint.save(
        folder, step, trainer.model.state_dict(), trainer.optimizer.state_dict(), state
    )


def _resume(
    trainer: Trainer, config: Trains, run: Run | None
) -> tuple[int, dict[str, Any]]:
    """Load the state that training goes on from; return the number of updates so far
    and the saved state.
    """
    step, weights, optimizer, state = trainer.world.from_first(
        _newest_state(trainer, config, run) if run else None
    )
    if weights is not None:
        trainer.model.load_state_dict(weights)
    if optimizer is not None:
        trainer.optimizer.load_state_dict(optimizer)
    if trainer.scale is not None and "loss_scale" in state:
        trainer.scale.load_state_dict(state["loss_scale"])
    return step, state


def _newest_state(
    trainer: Trainer, config: Trains, run: Run
) -> tuple[int, Any, Any, dict[str, Any]]:
    """Return the step, weights, optimizer and state of the newest checkpoint, and cut
    the rows back to its step.
    """
    if trained := checkpoint.at(run.folder, config.training.steps):
        return trained.step, trained.weights(), None, {}
    if isinstance(config, Config) and not checkpoint.every(run.folder):
        _take_stable(run, config, trainer)
    newest = checkpoint.newest(run.folder)
    run.cut(newest.step if newest else 0)
    if newest:
        logger.info("continuing from step %d", newest.step)
        return newest.step, newest.weights(), newest.optimizer(), newest.state()
    return (
        0,
        (
            weights_of(config.start)
            if isinstance(config, Config) and config.start
            else None
        ),
        None,
        {},
    )


def _take_stable(run: Run, config: Config, trainer: Trainer) -> None:
    """Copy rows and checkpoint of a run of a smaller budget, from before its rate fell:
    this run would do the same.
    """
    encodings = [
        module for module in trainer.model.modules() if isinstance(module, Encoding)
    ]
    if any(
        type(encoding).set_progress is not Encoding.set_progress
        for encoding in encodings
    ):
        return  # progress is a share of the budget, and these follow it
    candidates: list[checkpoint.Checkpoint] = []
    for folder in {path.parent for path in run.folder.parent.glob(f"*/{STABLE}")}:
        with contextlib.suppress(UserError):  # of a run that cannot be read
            smaller, record = load_config(folder), load_record(folder)
            step = updates.stable_steps(smaller.training)
            matches = record["status"] == "done" and updates.begins_from(
                config, smaller
            )
            matches = matches and _basis(step, smaller, record, trainer) == _basis(
                step, config, run.record, trainer
            )
            if matches and (stable := checkpoint.newest(folder / STABLE)):
                candidates.append(stable)
    if newest := max(candidates, default=None):
        name = newest.path.parents[2].name
        run.cut(newest.step, read_rows(run.folder.with_name(name)))
        checkpoint.save(
            run.folder,
            newest.step,
            newest.weights(),
            newest.optimizer(),
            newest.state(),
        )
        run.update(began_from={"run": name, "step": newest.step})
        logger.info(
            "beginning from %s, whose rate fell after step %d", name, newest.step
        )


def _basis(
    step: int, config: Config, record: Mapping[str, Any], trainer: Trainer
) -> list[Any]:
    """Return what decides the weights and rows up to a step, beside the configuration."""
    evaluations = {
        update: settings
        for update, settings in evaluations_on_the_way(config).items()
        if update <= step
    }
    of_run = [
        record.get(key)
        for key in ("data", "tokenizer_sha256", "installed_encodings", "versions")
    ]
    of_attempt = [
        record["attempt"][key] for key in ("device", "dtype", "threads", "processes")
    ]
    return [
        evaluations,
        updates.is_compiled(config, trainer.device, trainer.world),
        *of_run,
        *of_attempt,
    ]


def _validation(tokens: Tokens | TaskData, config: Trains) -> list[Batch]:
    """Return the batches of validation; none if it is off, or if the text is too short
    and no cadence is set.
    """
    cadence = config.runtime.validate_every_steps
    try:
        return tokens.validation_batches(config.training) if cadence != 0 else []
    except UserError:
        if cadence is not None:
            raise
        return []


@torch.inference_mode()
def validate(trainer: Trainer, batches: list[Batch], answers: bool) -> dict[str, float]:
    """Return `val/loss`, the mean in nats per token over a fixed part of the validation
    data, at the training length.

    With `answers`, for problems, also `val/accuracy`, the share of scored tokens that
    the model finds likeliest, and `val/exact_match`, the share of problems whose scored
    tokens all are.
    """
    model: Any = trainer.model.eval()

    def sums(batch: Batch) -> Tensor:
        """Return the sum of nll; for problems also the numbers of correct tokens and of
        wholly correct problems.
        """
        batch = batch.to(trainer.device)
        with machine.autocast(trainer.device, trainer.dtype):
            nll: Tensor = (
                model(batch.ids, batch.labels, n_scored=batch.n_scored).cpu().double()
            )
            hidden = model.hidden(batch.ids) if answers else None
        if hidden is None:
            return nll.view(1) * batch.n_scored
        scored = batch.labels != IGNORED
        correct = (model.logits(hidden.float()).argmax(-1) == batch.labels) & scored
        return torch.stack(
            (
                nll * batch.n_scored,
                correct.sum().cpu(),
                (correct == scored).all(1).sum().cpu(),
            )
        )

    total = torch.stack(trainer.world.map(sums, batches)).sum(0).tolist()
    n_tokens, n_problems = (
        sum(batch.n_scored for batch in batches),
        sum(len(batch.ids) for batch in batches),
    )
    names = ("val/loss", "val/accuracy", "val/exact_match")
    return {
        name: value / n
        for name, value, n in zip(
            names, total, (n_tokens, n_tokens, n_problems), strict=False
        )
    }
