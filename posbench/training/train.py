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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import machine
from posbench.config.external import Trains
from posbench.config.schema import Config, EvaluationConfig, TrainingConfig
from posbench.data.batches import Batch, TrainingBatches, own_rows
from posbench.data.problems import ProblemBatches, TaskData, prepare
from posbench.data.tokens import Tokens
from posbench.errors import Stopped, UserError
from posbench.evaluation.job import evaluate_into, on_the_way, results_of
from posbench.kernels.cross_entropy import IGNORED
from posbench.model.gpt import GPT, build, parameter_counts
from posbench.processes import World
from posbench.run_folder import checkpoint, tracking
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run, held_config
from posbench.run_folder.names import TOKENIZER
from posbench.run_folder.rows import every_row
from posbench.run_folder.sync import send
from posbench.run_folder.wandb_session import Target, in_sweep
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training.journal import Journal, RunJournal
from posbench.training.step import (
    Learner,
    Outcome,
    begin_update,
    is_compiled,
    learner_for,
    learning_rate,
    tell_progress,
)

logger = logging.getLogger(__name__)
_MORE_ROOM = "a smaller training.batch_size, with more training.accumulation, or runtime.checkpointing=true"
# Updates that may be unread when another is launched, by device: the host prepares the next while one is computed.
_AHEAD = {"cuda": 1}


def train(config: Config, folder: Path, command: list[str], restart: bool = False, world: World | None = None) -> None:
    """Run a configuration in its folder to the end: train, and evaluate.

    Args:
        folder: the run folder; an unfinished run in it is continued.
        command: the command line, for the record.
        restart: move an existing run aside and begin anew.
        world: the processes that train it together. All of them do this; rank 0 has the run folder and the tracker.

    Raises:
        UserError: the data or the configuration cannot be used, the run in the folder was trained on another text, or
            another process owns it.
        RunFailed: the run diverged or ran out of memory or disk; what was computed is kept.
        Stopped: a signal asked for an end; the run was saved and can be continued.
    """
    world = world or World()
    first = world.rank == 0
    chosen = machine.resolve(config.runtime.device)
    device = world.device(chosen)
    if first and not restart:
        held_config(folder, config)  # refuses another run's folder
    dtype = machine.resolve_precision(config.training.precision, device)
    threads = machine.set_threads(config.runtime.threads)
    machine.be_deterministic(device, config.runtime.deterministic)
    with signals_as_errors():  # the text comes first: a mistake in it leaves no folder behind
        tokens = world.after_first(lambda: prepare(config.data, config.runtime.cache))
        if config.start and tokens.tokenizer.sha256 != config.start.tokenizer_sha256:
            own = f"data.tokenizer={config.start.run}/{TOKENIZER}"
            raise UserError(f"the text has another tokenizer than the run that training begins from: expected {own}")
    batches = tokens.batches(config.training, config.seed)
    owned = Run.open(folder, config, command, restart=restart) if first else contextlib.nullcontext()
    with (
        owned as run,
        tracking.mirror(config, run) as tracker,
        failures_recorded(run),
        signals_as_errors(),
    ):
        where = Where(
            device=str(chosen),
            dtype=machine.dtype_name(dtype),
            threads=threads,
            processes=world.size,
            compiled=is_compiled(config, device, world),
        )
        if run:
            _begin(run, config, tokens, where)
        with machine.out_of_memory_as_failure("a smaller model"):
            model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(device)
        if run:
            tokens.tokenizer.save(run.folder / TOKENIZER)
            run.update(
                data=tokens.record,
                tokenizer_sha256=tokens.tokenizer.sha256,
                parameters=parameter_counts(model),
            )

        def evaluate(step: int, asked: EvaluationConfig) -> None:
            logger.info("after %s tokens of training:", f"{step * config.training.tokens_per_step:,}")
            now = dataclasses.replace(config, evaluation=asked)
            tell_progress(model, 1.0)  # as when a finished run is evaluated, until the next update
            evaluate_into(run, tracker, model, tokens, now, step, device, world)

        for remark in model.encoding.remarks():
            logger.warning("%s", remark)
        with machine.out_of_memory_as_failure(_MORE_ROOM):
            learner = learner_for(model, config, device, dtype, world)
            journal = RunJournal(run, tracker, config, where) if run else Journal()
            step = fit(learner, batches, tokens, config, journal, evaluate)
        if run:
            warn_of_rows_passed(run, config)
        n_rows = evaluate_into(run, tracker, model, tokens, config, step, device, world)
        if not run:
            return
        run.finish("done")
        if config.runtime.clean:
            checkpoint.keep_weights(run.folder, config.training.steps)
        if not n_rows and not run.record["attempt"]["steps"]:
            logger.info("finished; nothing to do: %s", run.folder)
            if config.tracking.backend == "wandb" and in_sweep():
                _tell_the_agent(config, run)


def _begin(run: Run, config: Config, tokens: Tokens | TaskData, where: Where) -> None:
    """Begin an attempt of a run, if it may be continued on this text and in this precision."""
    run.log_to_file()
    run.refuse_other_text(tokens.record["sha256"], tokens.tokenizer.sha256)
    run.warn_of_other_code()
    if where.compiled:
        logger.info("torch.compile fuses what lies between attention layers: the first updates take seconds longer")
    run.begin_attempt(where, bit_exact=goes_on_exactly(run, config, where))


def _tell_the_agent(config: Config, run: Run) -> None:
    """Report a run that was already finished to the W&B sweep that chose it."""
    try:
        send(config, run, Target.of(config, run.folder, run.id, run.record), results_of)
    except Exception as error:
        logger.warning("could not report this run to the W&B sweep: %s", error)


def goes_on_exactly(run: Run, config: Trains, here: Where) -> bool:
    """Whether resuming reproduces an uninterrupted run exactly; warns if it does not, refuses another precision."""
    found = checkpoint.newest(run.folder, (checkpoint.STATE,))
    if found is None or found.step >= config.training.steps:
        return True
    before = here._asdict() | found.state()
    if before["dtype"] != here.dtype:
        was = before["dtype"]
        raise UserError(
            f"{run.folder} was trained in {was} up to step {found.step}, here it would go on in {here.dtype}: continue "
            f"it on a machine where training.precision={config.training.precision} is {was}, or begin anew with "
            "--restart"
        )
    names = ["device", "processes", "compiled", *(["threads"] if here.device == "cpu" else [])]
    now = here._asdict()
    changed = [f"{name} {before[name]} -> {now[name]}" for name in names if before[name] != now[name]]
    if changed:
        logger.warning("continuing with %s: the weights will not be those of an uninterrupted run", ", ".join(changed))
    return not changed and here.device == "cpu"  # on others sums come in another order each time


def fit(
    learner: Learner,
    batches: TrainingBatches | ProblemBatches,
    tokens: Tokens | TaskData,
    config: Trains,
    journal: Journal,
    evaluate: Callable[[int, EvaluationConfig], object],
) -> int:
    """Train to the token budget from wherever the run stands; returns the number of updates made in all.

    All processes of a run make these calls in this order. The journal writes everything down.

    Args:
        evaluate: called on the way with the updates made so far, and with what to evaluate then.
    """
    training, runtime = config.training, config.runtime
    total, world = training.steps, learner.world
    step = journal.resume(learner)
    if step == total:
        return total
    evaluations = on_the_way(config)
    every = (runtime.log_every_steps, runtime.validate_every_steps, runtime.checkpoint_every_steps)
    launched: list[Outcome] = []  # and not yet read
    ahead = _AHEAD.get(learner.device.type, 0)
    parts = training.accumulation
    rows = own_rows(training.batch_size * parts, parts, world.rank, world.size) if world.size > 1 else None

    def read(left: int) -> tuple[float, float]:
        """Read updates until `left` remain unread; return the loss and gradient norm of the last one read."""
        newest = (math.nan, math.nan)
        while len(launched) > left:
            outcome = launched.pop(0)
            newest = outcome.read()
            journal.made(outcome.step + 1, newest[0])
        return newest

    if step == 0 and step in evaluations:
        evaluate(step, evaluations[step])
    with stop_signals(second_interrupts=True) as world.received, journal.progress(step):
        while step < total:
            learner.model.train()
            rate = learning_rate(step, total, training)
            launched.append(begin_update(learner, batches.batch(step, rows), step, rate))
            step += 1
            wanted = step in evaluations or any(due(number, step, total) for number in every)
            loss, norm = read(0 if wanted else ahead)
            if stopped := world.stopped_by():  # all processes have read the same updates: it is the same one in all
                read(0)
            if due(runtime.log_every_steps, step, total):
                journal.log_update(step, loss, norm, rate)
            if due(runtime.validate_every_steps, step, total):
                validation = validate(learner, tokens, training)
                journal.log(step, {f"validation/{name}": value for name, value in validation.items()})
            if step in evaluations:  # before a checkpoint, from which a resumed run would not come back here
                with journal.pause(learner.device):
                    evaluate(step, evaluations[step])
                stopped = world.stopped_by()
            if due(runtime.checkpoint_every_steps, step, total) or stopped:
                journal.save(step, learner)
            if stopped:
                world.from_first()  # no other ends before rank 0 has saved: whatever started them may then end it
                raise _stopped(stopped, step)
    if stopped := world.from_first(next(iter(world.received), None)):  # while rank 0 wrote the last checkpoint
        raise _stopped(stopped, step)
    tell_progress(learner.model, 1.0)
    journal.finish(learner)
    return total


def _stopped(number: int, step: int) -> Stopped:
    return Stopped(number, f"stopped by {signal.Signals(number).name} after step {step}; saved")


def warn_of_rows_passed(run: Run, config: Trains) -> None:
    """Warn of rows on the way that were asked for after training had passed them."""
    if passed := on_the_way(config).keys() - {row.checkpoint_step for row in every_row(run.folder)}:
        told = "no rows on the way for steps %s of evaluation.at_tokens: training had passed them"
        logger.warning(told, ", ".join(map(str, sorted(passed))))


def due(every: int | None, step: int, total: int) -> bool:
    """Whether an action is due that is repeated every so many updates and after the last."""
    return every is not None and (step % every == 0 or step == total)


@torch.inference_mode()
def validate(learner: Learner, tokens: Tokens | TaskData, training: TrainingConfig) -> dict[str, float]:
    """`nll`, the mean in nats per token over a fixed part of the validation data, at the training length.

    Of problems, those of the longest trained length, also `accuracy`, the share of the scored tokens that are the
    likeliest, and `exact_match`, the share of problems of which all are.
    """
    learner.model.eval()
    batches = tokens.validation_batches(training)
    if isinstance(tokens, TaskData):
        return _answers(learner, batches)

    def loss(batch: Batch) -> Tensor:
        batch = batch.to(learner.device)
        with machine.autocast(learner.device, learner.dtype):
            nll: Tensor = learner.model(batch.ids, batch.labels, n_scored=batch.n_scored)
        return nll.cpu()

    n_scored = [batch.n_scored for batch in batches]
    # In units of the largest: equal batches all have exactly 1.
    weights = torch.tensor(n_scored) / max(n_scored)
    return {"nll": float((torch.stack(learner.world.map(loss, batches)) * weights).sum() / weights.sum())}


def _answers(learner: Learner, batches: list[Batch]) -> dict[str, float]:
    model = cast(GPT, learner.model)

    def counted(batch: Batch) -> Tensor:
        """The sum of nll, and the numbers of correct tokens and of wholly correct problems."""
        batch = batch.to(learner.device)
        with machine.autocast(learner.device, learner.dtype):
            hidden = model.hidden(batch.ids)
        logits, scored = model.logits(hidden.float()), batch.labels != IGNORED
        nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        right = (logits.argmax(-1) == batch.labels) & scored
        return torch.stack((nll, right.sum(), (right == scored).all(1).sum())).cpu()

    nll, right, whole = torch.stack(learner.world.map(counted, batches)).sum(0).tolist()
    tokens, rows = sum(batch.n_scored for batch in batches), sum(len(batch.ids) for batch in batches)
    return {"nll": nll / tokens, "accuracy": right / tokens, "exact_match": whole / rows}


@contextlib.contextmanager
def failures_recorded(run: Run | None) -> Iterator[None]:
    """Write to run.json how the run ended, by any error."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if run:
            run.ended_by(error)
        raise
