"""Train one model and evaluate how far it holds: the main job, from top to bottom.

A run is its configuration. Started again, it continues from its newest checkpoint;
finished, it only evaluates what is missing. Batches, initial weights and random
positions are pure functions of (seed, step), so a continued run is bit-identical to an
uninterrupted one on a CPU with the same number of threads.
"""

import contextlib
import dataclasses
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posbench import machine, tracking
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.batches import ProblemBatches, TrainingBatches
from posbench.data.tokens import TaskData, Tokens, data_of, note_use
from posbench.errors import RowsFailed, Stopped, UserError
from posbench.evaluation.contract import refuse_broken
from posbench.evaluation.job import evaluate_into
from posbench.model.gpt import build, parameter_counts
from posbench.processes import World
from posbench.run import TOKENIZER, checkpoint
from posbench.run.folder import Run
from posbench.terminal import console
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training.duties import Duties
from posbench.training.record import record_begin, record_end
from posbench.training.resume import resume
from posbench.training.step import (
    Clock,
    Trainer,
    Unread,
    begin_update,
    learning_rate,
    set_progress,
)

logger = logging.getLogger(__name__)
_MORE_ROOM = (
    "a smaller training.batch_size, with more training.accumulation, or"
    " runtime.checkpointing=true"
)
# How many updates may be unread when another is launched, by device: the host prepares
# one while CUDA computes one.
AHEAD = {"cuda": 1}
Batches = TrainingBatches | ProblemBatches


def train(
    config: Config,
    folder: Path,
    command: list[str],
    restart: bool = False,
    world: World | None = None,
) -> None:
    """Train and evaluate a configuration in its folder, from wherever it stands.

    All processes of a world call this; rank 0 has the run folder and the tracker. What
    is computed is kept, whatever ends it; a finished run without its weights is moved
    aside. `command` is the command line, for the record.
    """
    world = world or World()
    device, dtype, resources = _set_up_machine(config, world)
    tokens, batches = _data(config, world)
    if restart or checkpoint.at(folder, config.training.steps) is None:
        # a user's class that cannot be trained and evaluated leaves no folder behind
        with signals_as_errors(), machine.out_of_memory_as_failure(_MORE_ROOM):
            refuse_broken(config, tokens, device)

    opened: contextlib.AbstractContextManager[Run | None] = contextlib.nullcontext()
    if world.rank == 0:
        opened = Run.open(folder, config, command, restart=restart)
    with opened as run, signals_as_errors():
        if run:
            tracking.mirror(config, run)
            record_begin(run, config, tokens, resources)
        tokenizer = tokens.tokenizer
        with machine.out_of_memory_as_failure("a smaller model"):
            model = build(config, tokenizer.vocab_size, tokenizer.texts).to(device)
        if run:
            run.update(data=tokens.meta, parameters=parameter_counts(model))
            note_use(tokens, folder)

        def evaluate(step: int, settings: EvaluationConfig) -> int:
            # encodings act as after training; the next update takes this back
            set_progress(model, 1.0)
            with_settings = dataclasses.replace(config, evaluation=settings)
            return evaluate_into(run, model, tokens, with_settings, step, device, world)

        with machine.out_of_memory_as_failure(_MORE_ROOM):
            trainer = Trainer(model, config, device, dtype, world)
            n_updates = fit(trainer, batches, tokens, config, run, evaluate)
        try:
            n_rows = evaluate(config.training.steps, config.evaluation)
        except RowsFailed:
            record_end(run, config)  # the others have their numbers
            raise
        record_end(run, config)
        if run and run.tracker and tracking.in_sweep():
            run.tracker.send()  # the sweep's agent waits for it
        if run and n_updates + n_rows == 0:
            logger.info("finished; nothing to do: %s", folder)


def _set_up_machine(
    config: Config, world: World
) -> tuple[torch.device, torch.dtype, dict[str, Any]]:
    """Return device, dtype of matrix products, and what the record says of them."""
    requested = machine.resolve(config.runtime.device)
    device = world.device(requested)  # with several processes each has its own GPU
    dtype = machine.resolve_precision(config.training.precision, device)
    threads = machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    resources = {
        "dtype": machine.dtype_name(dtype),
        "device": str(requested),
        "threads": threads,
        "processes": world.size,
    }
    return device, dtype, resources


def _data(config: Config, world: World) -> tuple[Tokens | TaskData, Batches]:
    """Return the data of a run, and its batches. A mistake in it is refused here, where
    it leaves no folder behind.
    """
    with signals_as_errors():
        tokens = world.after_first(lambda: data_of(config.data, config.runtime.cache))
        batches = tokens.batches(config.training, config.seed)
        batches.batch(0)  # refuses a text shorter than a block
    if config.start and tokens.tokenizer.sha256 != config.start.tokenizer_sha256:
        raise UserError(
            "expected the tokenizer that start has:"
            f" data.tokenizer={config.start.run}/{TOKENIZER}"
        )
    return tokens, batches


def fit(
    trainer: Trainer,
    batches: Batches,
    tokens: Tokens | TaskData,
    config: Config,
    run: Run | None,
    evaluate: Callable[[int, EvaluationConfig], object],
) -> int:
    """Train to the token budget from where the run stands; return the updates made."""
    training = config.training
    world = trainer.world
    n_steps = training.steps
    first_step, state = resume(trainer, config, run)
    if first_step == n_steps:
        return 0
    if trainer.device.type == "cpu" and world.size == 1:
        n_rows = training.batch_size * training.train_length
        machine.tell_slow_threads(n_rows, config.model.d_model)
    if run and run.tracker:
        run.tracker.send()  # it opens the session, which is no training time
    clock = Clock(trainer, first_step * training.tokens_per_step, state)
    duties = Duties.of(config, trainer, run, clock, tokens, evaluate)
    shown: contextlib.AbstractContextManager[console.Updates | None]
    shown = contextlib.nullcontext()
    if run:
        shown = console.progress(n_steps, first_step, clock.full_speed)
    if first_step == 0 and 0 in duties.schedule.evaluations:
        duties.evaluate_on_the_way(0)

    ahead = AHEAD.get(trainer.device.type, 0)
    step = first_step
    stopped = None
    with stop_signals(second_interrupts=True) as received, shown as updates:
        world.received = received  # `world` tells them to the other processes
        unread = Unread(trainer, updates)
        while step < n_steps and not stopped:
            trainer.model.train()
            rate = learning_rate(step, n_steps, training)
            batch = batches.batch(step)
            batch = batch.share(training.accumulation, world.rank, world.size)
            unread.add(begin_update(trainer, batch, step, rate))
            step += 1

            # Where something is due, this update is read: its loss may be logged. Else
            # the last `ahead` updates stay unread, and nobody looks at the loss.
            due = duties.schedule.due(step)
            n_unread = 0 if due else ahead
            loss, norm = unread.read(n_unread)
            # the same signal in all processes: they have read the same updates
            stopped = world.stopped_by()
            if stopped:
                # A checkpoint follows: read all. Reading replaces the signal that
                # `world` has, hence the copy in `stopped`.
                unread.read()

            duties.after(step, due, loss, norm, rate)
            # in an evaluation, too; several processes learn of it by the next update
            stopped = stopped or world.stopped_by()
            if "save" in due or stopped:
                duties.save(step)
        # No process ends before rank 0 has saved: its launcher might then end rank 0. A
        # signal may come meanwhile.
        stopped = world.from_first(stopped or next(iter(received), None))
    if stopped:
        name = signal.Signals(stopped).name
        raise Stopped(
            stopped,
            f"stopped by {name} after step {step}; saved: the same command continues",
        )
    return step - first_step
