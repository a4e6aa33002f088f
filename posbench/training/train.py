"""Train one model and evaluate how far it holds: the main job, read in order.

A run is its configuration. Started again, it continues from its newest checkpoint; finished, it only evaluates what
is missing. Batches, initial weights and random positions are pure functions of (seed, step), so a continued run is
bit-identical to an uninterrupted one on a CPU with the same number of threads.
"""

import contextlib
import dataclasses
import logging
import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posbench import machine
from posbench.config.external import Trains
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.batches import Batch, TrainingBatches
from posbench.data.problems import ProblemBatches, TaskData, prepare
from posbench.data.tokens import Tokens
from posbench.errors import Stopped, UserError
from posbench.evaluation.job import evaluate_into, on_the_way, results_of
from posbench.model.gpt import build, parameter_counts
from posbench.model.loss import IGNORED
from posbench.processes import World
from posbench.run import TOKENIZER, checkpoint, tracking
from posbench.run.model import give_weights, weights_of
from posbench.run.rows import every_row
from posbench.run.run import Run, Where, held_config
from posbench.terminal import console
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training.clock import Clock
from posbench.training.step import Learner, Outcome, begin_update, is_compiled, learning_rate, tell_progress

logger = logging.getLogger(__name__)
_MORE_ROOM = "a smaller training.batch_size, with more training.accumulation, or runtime.checkpointing=true"
# Updates that may be unread when another is launched, by device: the host prepares the next while one is computed.
_AHEAD = {"cuda": 1}
_VALIDATIONS = 4  # in a run, unless it says how many


def train(config: Config, folder: Path, command: list[str], restart: bool = False, world: World | None = None) -> None:
    """Run a configuration in its folder to the end, from wherever it stands: train, and evaluate.

    Args:
        command: the command line, for the record.
        restart: move an existing run aside and begin anew.
        world: the processes that train it together. All of them do this; rank 0 has the run folder and the tracker.

    Raises:
        RunFailed, Stopped: what was computed is kept.
    """
    world = world or World()
    first, chosen = world.rank == 0, machine.resolve(config.runtime.device)
    device = world.device(chosen)
    if first and not restart:
        held_config(folder, config)  # refuses another run's folder
    dtype = machine.resolve_precision(config.training.precision, device)
    threads = machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    with signals_as_errors():  # the text comes first: a mistake in it leaves no folder behind
        tokens = world.after_first(lambda: prepare(config.data, config.runtime.cache))
    if config.start and tokens.tokenizer.sha256 != config.start.tokenizer_sha256:
        raise UserError(f"expected data.tokenizer={config.start.run}/{TOKENIZER}, that of the run that it begins from")
    where = Where(str(chosen), machine.dtype_name(dtype), threads, world.size, is_compiled(config, device, world))
    with (
        Run.open(folder, config, command, restart=restart) if first else contextlib.nullcontext() as run,
        signals_as_errors(),
    ):
        if run:
            tracking.mirror(config, run, results_of)
            begin(run, config, tokens, where)
        with machine.out_of_memory_as_failure("a smaller model"):
            model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(device)
        if run:
            run.update(data=tokens.record, parameters=parameter_counts(model))
        for remark in model.encoding.remarks():
            logger.warning("%s", remark)

        def evaluate(step: int, asked: EvaluationConfig) -> int:
            tell_progress(model, 1.0)  # as when a finished run is evaluated, until the next update
            now = dataclasses.replace(config, evaluation=asked)
            return evaluate_into(run, model, tokens, now, step, device, world)

        with machine.out_of_memory_as_failure(_MORE_ROOM):
            learner = Learner(model, config, device, dtype, world)
            batches = tokens.batches(config.training, config.seed)
            made = fit(learner, batches, tokens, config, run, where, evaluate)
        n_rows = evaluate(config.training.steps, config.evaluation)
        if run:
            end(run, config)
            if run.tracker and tracking.in_sweep():
                run.tracker.send()  # the agent waits for this run, also where it was finished before
            if not made and not n_rows:
                logger.info("finished; nothing to do: %s", run.folder)


def begin(run: Run, config: Trains, tokens: Tokens | TaskData, where: Where) -> None:
    """Begin an attempt of a run. Raises UserError if it may not be continued on this text or in this precision."""
    run.log_to_file()
    run.refuse_changes(tokens.record["sha256"], tokens.tokenizer.sha256)
    run.begin_attempt(where, bit_exact=_goes_on_exactly(run, config, where))
    tokens.tokenizer.save(run.folder / TOKENIZER)
    run.update(tokenizer_sha256=tokens.tokenizer.sha256)


def _goes_on_exactly(run: Run, config: Trains, where: Where) -> bool:
    """Whether resuming reproduces an uninterrupted run exactly; warns if it does not, refuses another precision."""
    saved = checkpoint.newest(run.folder, (checkpoint.STATE,))
    if saved is None or saved.step >= config.training.steps:
        return True
    now, before = where._asdict(), where._asdict() | saved.state()
    if before["dtype"] != now["dtype"]:
        raise UserError(
            f"{run.folder} was trained in {before['dtype']} up to step {saved.step}, here it would go on in "
            f"{now['dtype']}: continue it where training.precision is that, or begin anew with --restart"
        )
    names = ["device", "processes", "compiled", *(["threads"] if where.device == "cpu" else [])]
    if changed := [f"{name} {before[name]} -> {now[name]}" for name in names if before[name] != now[name]]:
        logger.warning("continuing with %s: the weights will not be those of an uninterrupted run", ", ".join(changed))
    return not changed and where.device == "cpu"  # on others sums come in another order each time


def end(run: Run, config: Trains) -> None:
    """Record that a run is done, and free what it no longer needs if it asks for that."""
    if passed := on_the_way(config).keys() - {row.checkpoint_step for row in every_row(run.folder)}:
        steps = ", ".join(map(str, sorted(passed)))
        logger.warning("no rows on the way for steps %s of evaluation.at_tokens: training had passed them", steps)
    run.write_evaluation(config.evaluation)
    run.finish("done")
    if config.runtime.clean:
        checkpoint.keep_weights(run.folder, config.training.steps)


def fit(
    learner: Learner,
    batches: TrainingBatches | ProblemBatches,
    tokens: Tokens | TaskData,
    config: Trains,
    run: Run | None,
    where: Where,
    evaluate: Callable[[int, EvaluationConfig], object],
) -> int:
    """Train to the token budget from wherever the run stands; returns the number of updates made now.

    Args:
        run: None in a process beyond the first.
        evaluate: called on the way with the updates made so far, and with what to evaluate then.
    """
    training, world = config.training, learner.world
    total, parts, per_step = training.steps, training.accumulation, training.tokens_per_step
    began, state = _resume(learner, config, run)
    if began == total:
        return 0
    step, clock = began, Clock(learner, began * per_step, state)
    config = world.from_first(run.as_begun(config) if run else None)
    evaluations, (validate_every, validation) = on_the_way(config), _validation(tokens, config)
    cadences = (config.runtime.log_every_steps, validate_every, config.runtime.checkpoint_every_steps)
    launched: list[Outcome] = []  # and not yet read
    if run and run.tracker:
        run.tracker.send()

    def read(left: int) -> tuple[float, float]:
        """Read updates until `left` remain unread; return the loss and gradient norm of the last one read."""
        newest = (math.nan, math.nan)
        while len(launched) > left:
            outcome = launched.pop(0)
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
    bars = console.progress(total, step, clock.full_speed) if run else contextlib.nullcontext()
    with stop_signals(second_interrupts=True) as world.received, bars as bar:
        while step < total:
            learner.model.train()
            rate = learning_rate(step, total, training)
            launched.append(begin_update(learner, batches.batch(step).share(parts, world.rank, world.size), step, rate))
            step += 1
            to_log, to_validate, to_save = (every and (step % every == 0 or step == total) for every in cadences)
            wanted = to_log or to_validate or to_save or step in evaluations
            loss, norm = read(0 if wanted else _AHEAD.get(learner.device.type, 0))
            if stopped := world.stopped_by():  # all processes have read the same updates: it is the same one in all
                read(0)
            if to_log:
                numbers = {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": rate}
                log({name: float(f"{value:.7g}") for name, value in (numbers | clock.speed(step)).items()})
            if to_validate:
                log(validate(learner, validation, isinstance(tokens, TaskData)))
            evaluate_on_the_way()  # before a checkpoint, from which a resumed run would not come back here
            stopped = stopped or world.stopped_by()
            if run and (to_save or stopped):
                _save(run, learner, step, where, clock)
            if stopped:
                break
        # No other ends before rank 0 has saved, whatever started them may then end it; a signal may come as it saves.
        stopped = world.from_first(stopped or next(iter(world.received), None))
    if stopped:
        raise Stopped(stopped, f"stopped by {signal.Signals(stopped).name} after step {step}; saved")
    tell_progress(learner.model, 1.0)
    if run:
        run.update(tokens=total * per_step, **clock.spent())
    return step - began


# -- where it stands ---------------------------------------------------------------------------------------------------


def _save(run: Run, learner: Learner, step: int, where: Where, clock: Clock) -> None:
    """Write a checkpoint, after the rows up to it. Raises RunFailed if there is no room."""
    run.sync()
    state = {"tokens": step * learner.training.tokens_per_step, **where._asdict(), **clock.spent()}
    if learner.scale is not None:
        state["loss_scale"] = learner.scale.state_dict()
    checkpoint.save(run.folder, step, learner.model.state_dict(), learner.optimizer.state_dict(), state)


def _resume(learner: Learner, config: Trains, run: Run | None) -> tuple[int, dict[str, Any]]:
    """Give the learner the state that training goes on from; returns the updates made so far, and what was saved then.

    Rank 0 reads it, the others have it from there.
    """
    step, weights, optimizer, state = learner.world.from_first(_saved(config, run) if run else None)
    if weights is not None:
        give_weights(learner.model, weights, run.folder if run else "the run")
    if optimizer is not None:
        learner.optimizer.load_state_dict(optimizer)
    if learner.scale is not None and "loss_scale" in state:
        learner.scale.load_state_dict(state["loss_scale"])
    return step, state


def _saved(config: Trains, run: Run) -> tuple[int, Any, Any, dict[str, Any]]:
    """Updates made, weights, optimizer and state of the newest checkpoint, to which the rows are cut back.

    A run that begins from another has that one's weights where it has no checkpoint.
    """
    total = config.training.steps
    if trained := checkpoint.at(run.folder, total, checkpoint.WEIGHTS):
        saved = checkpoint.at(run.folder, total, checkpoint.STATE)
        state = saved.state() if saved else {}
        spent = {name: state[name] for name in ("tokens", *Clock.NAMES) if run.record[name] is None and name in state}
        run.update(**spent)  # which a kill after the last checkpoint kept from being written
        return total, trained.weights(), None, state
    newest = checkpoint.newest(run.folder)
    run.cut(newest.step if newest else 0)
    if newest:
        checkpoint.prune(run.folder, newest.step)
        logger.info("continuing from step %d", newest.step)
        return newest.step, newest.weights(), newest.optimizer(), newest.state()
    return 0, weights_of(config.start) if isinstance(config, Config) and config.start else None, None, {}


# -- validation --------------------------------------------------------------------------------------------------------


def _validation(tokens: Tokens | TaskData, config: Trains) -> tuple[int | None, list[Batch]]:
    """Updates between validations, None for never, and what is read then: the same each time."""
    asked = config.runtime.validate_every_steps
    try:
        batches = tokens.validation_batches(config.training) if asked != 0 else []
    except UserError:  # the text is too short for it
        if asked is not None:
            raise
        batches = []
    return (asked or math.ceil(config.training.steps / _VALIDATIONS)) if batches else None, batches


@torch.inference_mode()
def validate(learner: Learner, batches: list[Batch], answers: bool) -> dict[str, float]:
    """`val/loss`, the mean in nats per token over a fixed part of the validation data, at the training length.

    Args:
        answers: of problems, also `val/accuracy`, the share of the scored tokens that are the likeliest, and
            `val/exact_match`, the share of problems of which all are.
    """
    model: Any = learner.model.eval()

    def sums(batch: Batch) -> Tensor:
        """The sum of nll, and of problems the numbers of correct tokens and of wholly correct problems."""
        batch = batch.to(learner.device)
        with machine.autocast(learner.device, learner.dtype):
            nll: Tensor = model(batch.ids, batch.labels, n_scored=batch.n_scored).cpu().double()
            hidden = model.hidden(batch.ids) if answers else None
        if hidden is None:
            return nll.view(1) * batch.n_scored
        scored = batch.labels != IGNORED
        right = (model.logits(hidden.float()).argmax(-1) == batch.labels) & scored
        return torch.stack((nll * batch.n_scored, right.sum().cpu(), (right == scored).all(1).sum().cpu()))

    total = torch.stack(learner.world.map(sums, batches)).sum(0).tolist()
    n_tokens, n_problems = sum(batch.n_scored for batch in batches), sum(len(batch.ids) for batch in batches)
    names = ("val/loss", "val/accuracy", "val/exact_match")
    return {name: value / n for name, value, n in zip(names, total, (n_tokens, n_tokens, n_problems), strict=False)}
