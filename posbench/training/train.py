"""Train one model and evaluate how far it holds: the main job, read in order.

A run is its configuration. Started again, it continues from its newest checkpoint; finished, it only evaluates what
is missing. Batches, initial weights and random positions are pure functions of (seed, step), so a continued run is
bit-identical to an uninterrupted one on a CPU with the same number of threads.
"""

import contextlib
import logging
import math
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import machine
from posbench.config import problems, size
from posbench.config.schema import Config, TrainingConfig
from posbench.data.batches import Batch, TrainingBatches
from posbench.data.prepared import prepare
from posbench.data.problems import ProblemBatches, TaskData
from posbench.data.tokens import Tokens
from posbench.errors import RunFailed, Stopped, UserError
from posbench.evaluation.check import check
from posbench.evaluation.headline import check_objective
from posbench.evaluation.job import evaluate_into
from posbench.evaluation.sync import send
from posbench.kernels import native
from posbench.kernels.cross_entropy import IGNORED
from posbench.model import GPT, build, parameter_counts
from posbench.processes import World
from posbench.runs import checkpoint, tracking
from posbench.runs.folder import Run, held_config
from posbench.runs.jsonl import number
from posbench.runs.log import kept
from posbench.runs.names import TOKENIZER
from posbench.runs.tracking import Tracker
from posbench.runs.trained import give_weights
from posbench.runs.wandb_session import Target, in_sweep
from posbench.terminal import console
from posbench.terminal.signals import ended_in_words, stop_signals
from posbench.training.compilation import is_compiled
from posbench.training.step import Learner, LossScale, Outcome, begin_update, learner_for, learning_rate, tell_progress

logger = logging.getLogger(__name__)

_SPENT = ("train_seconds", "cpu_seconds", "peak_memory_bytes")  # what a checkpoint knows of the attempts before it


def train(config: Config, folder: Path, command: list[str], restart: bool = False, world: World | None = None) -> None:
    """Run a configuration in its folder to the end: train, and evaluate.

    Args:
        folder: the run folder; an unfinished run in it is continued.
        command: the command line, for the record.
        restart: move an existing run aside and begin anew.
        world: the processes that train it together, of which this is the first; in the others `follow.follow` runs.

    Raises:
        UserError: the data or the configuration cannot be used, the run in the folder was trained on another text, or
            another process owns it.
        RunFailed: the run diverged or ran out of memory or disk; what was computed is kept.
        Stopped: a signal asked for an end; the run was saved and can be continued.
    """
    world = world or World()
    chosen = machine.resolve(config.runtime.device)
    device = world.device(chosen)
    size.refuse_too_large(config, str(device), "train")
    check(config)
    check_objective(config)
    if not restart:
        held_config(folder, config)  # refuses another run's folder
    dtype = machine.resolve_precision(config.training.precision, device)
    threads = machine.set_threads(config.runtime.threads or world.threads)
    with kept() as logged, ended_in_words():  # the text comes first: a mistake in it leaves no folder behind
        tokens = prepare(config.data, config.runtime.cache)
        world.from_first()  # from now on the others find it in the cache
    batches = tokens.batches(config.training, config.seed)
    with (
        Run.open(folder, config, command, restart=restart) as run,
        tracking.mirror(config, run) as tracker,
        _failures_recorded(run, world),
        ended_in_words(),
    ):
        run.log_to_file(logged)
        run.refuse_other_text(tokens.record["sha256"], tokens.tokenizer.sha256)
        where = _Where(
            device=str(chosen),
            dtype=machine.dtype_name(dtype),
            threads=threads,
            processes=world.size,
            compiled=is_compiled(config, device, world),
            native=native.serves(device),
        )
        if where["compiled"]:
            logger.info("torch.compile fuses what lies between attention layers: the first updates take seconds longer")
        run.begin_attempt(**where, bit_exact=_goes_on_exactly(run, config, where))
        with machine.out_of_memory_as_failure("a smaller model"):
            model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(device)
        tokens.tokenizer.save(run.folder / TOKENIZER)
        run.update(
            data=tokens.record,
            tokenizer_sha256=tokens.tokenizer.sha256,
            parameters=parameter_counts(model),
        )
        for remark in [*model.encoding.remarks(), *problems.remarks(config)]:
            logger.warning("%s", remark)
        with machine.out_of_memory_as_failure("a smaller training.batch_size, with more training.accumulation,"):
            step = _fit(learner_for(model, config, device, dtype, world), batches, tokens, config, run, tracker, where)
        n_rows = evaluate_into(run, tracker, model, tokens, config, step, device, world)
        run.finish("done")
        if config.runtime.clean:
            checkpoint.keep_weights(run.folder)
        if not n_rows and not run.record["attempts"][-1]["steps"]:
            logger.info("finished; nothing to do: %s", run.folder)
            if config.tracking.backend == "wandb" and in_sweep():
                _tell_the_agent(config, run)


def _tell_the_agent(config: Config, run: Run) -> None:
    """A sweep of W&B's chose a run that was finished before: what it came to belongs to the run of the sweep, too."""
    try:
        send(config, run, Target.of(config, run.folder, run.id, run.record))
    except Exception as error:
        logger.warning("W&B's sweep does not learn of it: %s", error)


def _goes_on_exactly(run: Run, config: Config, here: "_Where") -> bool:
    """Whether what is left of the training is computed as what was done of it; where it is not, a warning says so.

    Raises:
        UserError: it would go on in another precision.
    """
    found = checkpoint.newest_state(run.folder)
    if found is None or found[0] >= config.training.steps:
        return True
    step, state = found
    trained = (attempt for attempt in reversed(run.record["attempts"]) if attempt.get("steps"))
    before = {"processes": 1, "native": False, **next(trained, {}), **state}  # earlier versions did not say it
    was, now = before.get("dtype", here["dtype"]), here["dtype"]
    if was != now:
        raise UserError(
            f"{run.folder} was trained in {was} up to step {step}, here it would go on in {now}: continue it on a "
            f"machine where training.precision={config.training.precision} is {was}, or begin anew with --restart"
        )
    names: list[Literal["device", "processes", "compiled", "native", "threads"]]
    names = ["device", "processes", "compiled", "native"]
    names += ["threads"] if here["device"] == "cpu" else []
    changed = [f"{name} {before[name]} -> {here[name]}" for name in names if before.get(name, here[name]) != here[name]]
    if changed:
        logger.warning("continuing with %s: the weights will not be those of an uninterrupted run", ", ".join(changed))
    return not changed


class _Where(TypedDict):
    """What an attempt computes on and in."""

    device: str
    dtype: str
    threads: int  # of each process
    processes: int
    compiled: bool  # what lies between attention layers
    native: bool  # by the kernels in C++ what they take


def _fit(
    learner: Learner,
    batches: TrainingBatches | ProblemBatches,
    tokens: Tokens | TaskData,
    config: Config,
    run: Run,
    tracker: Tracker,
    where: _Where,
) -> int:
    """Train to the token budget from wherever the run stands; returns the number of updates made in all."""
    training, runtime = config.training, config.runtime
    per_step = training.tokens_per_step
    total, world = training.steps, learner.world
    trained = checkpoint.weights_at(run.folder, total)
    if trained is not None:
        give_weights(learner.model, trained, run.folder)
        _complete_record(run, checkpoint.state_at(run.folder, total))
        world.from_first(Standing(total, trained))
        return total
    step, spent = _resume(run, learner)
    if step:
        logger.info("continuing from step %d", step)
    elif training.warmup_tokens > training.tokens:
        logger.info(
            "training.tokens=%d is less than training.warmup_tokens=%d: the learning rate rises over the first %d of "
            "%d updates instead",
            *(training.tokens, training.warmup_tokens, training.warmup_steps, total),
        )
    tracker.begin()
    first = step
    speed, diverging = _Speed(step * per_step), _Diverging(total)
    every = (runtime.log_every_steps, runtime.validate_every_steps, runtime.checkpoint_every_steps)
    begun: list[Outcome] = []  # and not looked at: on a CUDA device the newest update, while the host prepares the next
    ahead = int(learner.device.type == "cuda")

    def look(left: int) -> tuple[float, float]:
        """Loss and gradient norm of the newest update that is looked at, when but so many are left for later."""
        seen = (math.nan, math.nan)
        while len(begun) > left:
            outcome = begun.pop(0)
            seen = outcome.read()
            diverging.look(outcome.step + 1, seen[0])
            progress.advance(seen[0], (outcome.step + 1) * per_step)
        return seen

    def log(row: dict[str, Any]) -> None:
        row = {"step": step, "tokens": step * per_step, **row}
        run.log_metrics(row)
        tracker.metrics(row)

    def save() -> None:
        state: dict[str, Any] = {"tokens": step * per_step, "metrics_offset": run.metrics_offset(), **spent.so_far()}
        state |= where
        if learner.scale is not None:
            state |= learner.scale.so_far()
        state["peak_memory_bytes"] = spent.most_memory(learner.device)
        checkpoint.save(run.folder, step, learner.model.state_dict(), learner.optimizer.state_dict(), state)
        run.update_attempt(steps=step - first)

    with stop_signals(second_interrupts=True) as world.received, console.progress(total, start=step) as progress:
        while step < total:
            learner.model.train()
            rate = learning_rate(step, total, training)
            begun.append(begin_update(learner, batches.batch(step), step, rate))
            step += 1
            stopped = world.stopped_by()
            wanted = stopped or any(due(number, step, total) for number in every)
            loss, norm = look(0 if wanted else ahead)
            if due(runtime.log_every_steps, step, total):
                log(
                    {
                        "train/loss": loss,
                        "train/grad_norm": norm,
                        "train/learning_rate": rate,
                        "train/tokens_per_second": speed.at(step * per_step),
                        "seconds": spent.so_far()["train_seconds"],
                    }
                )
            if due(runtime.validate_every_steps, step, total):
                log({f"validation/{name}": value for name, value in validate(learner, tokens, training).items()})
            if due(runtime.checkpoint_every_steps, step, total) or stopped:
                save()
            if stopped and step < total:
                raise Stopped(stopped, f"stopped by {signal.Signals(stopped).name} after step {step}; saved")
    tell_progress(learner.model, 1.0)
    run.update(tokens=total * per_step, peak_memory_bytes=spent.most_memory(learner.device), **spent.so_far())
    return total


def due(every: int | None, step: int, total: int) -> bool:
    """Whether something is to be done after an update that is done every so many updates, and after the last."""
    return every is not None and (step % every == 0 or step == total)


def _complete_record(run: Run, state: Mapping[str, Any]) -> None:
    """Give `run.json` what training took, where a kill after the last checkpoint kept it from being written."""
    missing = {
        name: state[name]
        for name in ("tokens", *_SPENT)
        if run.record[name] is None and number(state.get(name)) is not None
    }
    if missing:
        run.update(**missing)


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
    return {"nll": float((torch.stack(learner.world.mapped(loss, batches)) * weights).sum() / weights.sum())}


def _answers(learner: Learner, batches: list[Batch]) -> dict[str, float]:
    model = cast(GPT, learner.model)

    def counted(batch: Batch) -> Tensor:
        """Sum of nll, and numbers of right tokens and of problems that are all right."""
        batch = batch.to(learner.device)
        with machine.autocast(learner.device, learner.dtype):
            hidden = model.hidden(batch.ids)
        logits, scored = model.logits(hidden.float()), batch.labels != IGNORED
        nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")
        right = (logits.argmax(-1) == batch.labels) & scored
        return torch.stack((nll, right.sum(), (right == scored).all(1).sum())).cpu()

    nll, right, whole = torch.stack(learner.world.mapped(counted, batches)).sum(0).tolist()
    tokens, rows = sum(batch.n_scored for batch in batches), sum(len(batch.ids) for batch in batches)
    return {"nll": nll / tokens, "accuracy": right / tokens, "exact_match": whole / rows}


class Standing(NamedTuple):
    """Where training goes on from: what the first process read, for the others."""

    step: int = 0
    weights: dict[str, Tensor] | None = None  # None: those it begins with
    optimizer: dict[str, Any] | None = None
    scale: dict[str, float] | None = None  # of losses, in fp16


def _resume(run: Run, learner: Learner) -> "tuple[int, _Spent]":
    loaded = checkpoint.newest(run.folder)
    if loaded is None:
        run.cut_metrics(0)
        learner.world.from_first(Standing())
        return 0, _Spent({}, learner.world)
    give_weights(learner.model, loaded.model, run.folder)
    numbers = {name: number(loaded.state.get(name)) for name in ("metrics_offset", *_SPENT, *LossScale.NAMES)}
    known = {name: value for name, value in numbers.items() if value is not None and value >= 0}
    if learner.scale is not None:
        learner.scale.resume(known)
    if not {"metrics_offset", "train_seconds", "cpu_seconds"} <= known.keys() or not _took(
        learner.optimizer, loaded.optimizer
    ):
        raise UserError(f"{loaded.path} does not hold the state of this run: --restart trains it anew")
    run.cut_metrics(int(known["metrics_offset"]))
    learner.world.from_first(Standing(loaded.step, loaded.model, loaded.optimizer, known))
    return loaded.step, _Spent(known, learner.world)


def _took(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> bool:
    """Whether a saved state is of this optimizer, which then has it: averages as its parameters, and its settings."""
    before = [{**group} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(saved)
        averages = [
            (parameter, value)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if name != "step"
        ]
        fit = all(value.shape == parameter.shape and value.dtype == parameter.dtype for parameter, value in averages)
        return fit and all(
            group[name] == known[name]
            for group, known in zip(optimizer.param_groups, before, strict=True)
            for name in ("betas", "eps", "weight_decay")
        )
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False


class _Speed:
    """Tokens per second since it was last asked."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.since = tokens, time.monotonic()

    def at(self, tokens: int) -> float:
        before, began = self.tokens, self.since
        self.tokens, self.since = tokens, time.monotonic()
        return (tokens - before) / (self.since - began)


class _Diverging:
    """Warns once of a loss that stays above twice its best: it is finite, and the run is lost all the same."""

    def __init__(self, total: int) -> None:
        self.patience = max(20, total // 100)  # updates
        self.best, self.above, self.told = math.inf, 0, False

    def look(self, step: int, loss: float) -> None:
        """After an update: its loss in nats per token."""
        self.best = min(self.best, loss)
        self.above = self.above + 1 if loss > 2 * self.best else 0
        if self.above == self.patience and not self.told:
            self.told = True
            told = (
                "the loss is %.3f at step %d, above twice its best (%.3f) for %d updates: it diverges slowly; a lower "
            )
            logger.warning(told + "training.learning_rate usually helps", loss, step, self.best, self.patience)


class _Spent:
    """Wall and CPU seconds of training over all attempts, and the most memory that one of them had.

    The CPU seconds are of all processes of an attempt, the memory is that of the first.
    """

    def __init__(self, before: Mapping[str, Any], world: World) -> None:
        self.world = world
        self.wall_from = time.monotonic() - before.get("train_seconds", 0.0)
        self.cpu_from = world.cpu_seconds() - before.get("cpu_seconds", 0.0)
        self.memory_before = int(before.get("peak_memory_bytes", 0))

    def most_memory(self, device: torch.device) -> int:
        return max(self.memory_before, machine.peak_memory(device))

    def so_far(self) -> dict[str, float]:
        return {
            "train_seconds": round(time.monotonic() - self.wall_from, 3),
            "cpu_seconds": round(self.world.cpu_seconds() - self.cpu_from, 3),
        }


@contextlib.contextmanager
def _failures_recorded(run: Run, world: World) -> Iterator[None]:
    """Write into run.json how the run ended, whatever it was and in whichever process."""
    try:
        with world.last_resort(lambda error: _record_error(run, error)):
            yield
    except Exception as error:
        cause = world.cause(error)
        _record_error(run, cause)
        if cause is error:
            raise
        raise cause from error
    except KeyboardInterrupt as error:
        _record_error(run, world.cause(error))
        raise


def _record_error(run: Run, error: BaseException) -> None:
    if isinstance(error, Stopped):
        _record_end(run, "stopped", "signal", str(error))
    elif isinstance(error, KeyboardInterrupt):
        _record_end(run, "stopped", "signal", "interrupted")
    else:
        _record_end(run, "failed", error.reason if isinstance(error, RunFailed) else "error", str(error))


def _record_end(run: Run, status: str, reason: str, message: str) -> None:
    """Write down how the run ended. Where even that cannot be written, the error that ended it is what is told."""
    try:
        run.finish(status, reason, message)
    except (RunFailed, OSError) as error:
        logger.warning("run.json still says 'running': %s", error)
