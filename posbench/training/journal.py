"""What a run writes down while it trains: metrics, checkpoints, times, and what the terminal and W&B show.

All processes of a run make the same calls of a `Journal`. That of the first writes into the run folder; those of the
others write nothing, and learn from the first where training stands.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posbench import machine
from posbench.config.external import Trains
from posbench.config.schema import Config, StartConfig
from posbench.errors import UserError
from posbench.model.gpt import GPT, train_flops_per_token
from posbench.processes import World
from posbench.run_folder import checkpoint
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import number
from posbench.run_folder.tracking import Mirror
from posbench.run_folder.trained import begin_from, give_weights
from posbench.terminal import console
from posbench.training.step import Learner

logger = logging.getLogger(__name__)

_SPENT = ("train_seconds", "cpu_seconds", "peak_memory_bytes")  # in a checkpoint: of this attempt and those before it


class Journal:
    """The journal of a process beyond the first: it writes nothing."""

    def resume(self, learner: Learner) -> int:
        """Give the learner the state that training continues from; returns the updates made so far."""
        step, weights, optimizer, state = learner.world.from_first()
        if weights is not None:
            learner.model.load_state_dict(weights)
        if optimizer is not None:
            learner.optimizer.load_state_dict(optimizer)
        _resume_scale(learner, state or {})
        return int(step)

    def progress(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Show progress from that step on while this lasts."""
        return contextlib.nullcontext()

    def made(self, step: int, loss: float) -> None:
        """Take note of an update whose loss, in nats per token, is known."""

    def log_update(self, step: int, loss: float, norm: float, rate: float) -> None:
        """Log an update: loss in nats per token, gradient norm before clipping, learning rate."""

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        """Append a row to the metrics."""

    def save(self, step: int, learner: Learner) -> None:
        """Write a checkpoint. Raises RunFailed if there is no room."""

    def pause(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Count nothing as training while this lasts."""
        return contextlib.nullcontext()

    def finish(self, learner: Learner) -> None:
        """Record what training took."""


class RunJournal(Journal):
    """The journal of the first process, in its run folder."""

    def __init__(self, run: Run, tracker: Mirror, config: Trains, where: Where) -> None:
        self.run, self.tracker, self.where = run, tracker, where
        self.start = config.start if isinstance(config, Config) else None  # else the model has its weights already
        self.training = config.training
        self.total = self.training.steps

    def resume(self, learner: Learner) -> int:
        folder, world = self.run.folder, learner.world
        if trained := checkpoint.at(folder, self.total, checkpoint.WEIGHTS):
            weights = trained.weights()
            give_weights(learner.model, weights, folder)
            saved = checkpoint.at(folder, self.total, checkpoint.STATE)
            _complete_record(self.run, saved.state() if saved else {})
            world.from_first(_Standing(self.total, weights))
            return self.total
        standing = _resumed(self.run, learner, self.start)
        world.from_first(standing)
        self.first = standing.step
        if self.first:
            logger.info("continuing from step %d", self.first)
        elif self.training.warmup_tokens > self.training.tokens:
            logger.info(
                "training.tokens=%d is less than training.warmup_tokens=%d: the learning rate rises over the first %d "
                "of %d updates instead",
                *(self.training.tokens, self.training.warmup_tokens, self.training.warmup_steps, self.total),
            )
        self.spent = _Spent(standing.state or {}, world)
        self.speed = _Speed(self._tokens(self.first))
        peak, model = machine.peak_flops(learner.device, learner.dtype), learner.model
        flops = train_flops_per_token(model, self.training.train_length) if isinstance(model, GPT) else None
        self.full_speed = peak * world.size / flops if peak and flops else None  # tokens per second
        self.divergence = _Divergence(self.total)
        self.tracker.begin()
        return self.first

    @contextlib.contextmanager
    def progress(self, step: int) -> Iterator[None]:
        with console.progress(self.total, step, self.full_speed) as self._bar:
            yield

    def made(self, step: int, loss: float) -> None:
        self.divergence.look(step, loss)
        self._bar.advance(loss, self._tokens(step))

    def log_update(self, step: int, loss: float, norm: float, rate: float) -> None:
        row = {"train/loss": loss, "train/grad_norm": norm, "train/learning_rate": rate}
        row["train/tokens_per_second"] = speed = self.speed.at(self._tokens(step))
        if self.full_speed:
            row["train/mfu"] = speed / self.full_speed
        self.log(step, {**row, "seconds": self.spent.so_far()["train_seconds"]})

    def log(self, step: int, row: Mapping[str, Any]) -> None:
        row = {"step": step, "tokens": self._tokens(step), **row}
        self.run.log_metrics(row)
        self.tracker.metrics(row)

    def save(self, step: int, learner: Learner) -> None:
        state = {
            "tokens": self._tokens(step),
            "metrics_offset": self.run.metrics_offset(),
            **self.spent.so_far(),
            **self.where._asdict(),
            **({} if learner.scale is None else {"loss_scale": learner.scale.state_dict()}),
            "peak_memory_bytes": self.spent.most_memory(learner.device),
        }
        checkpoint.save(self.run.folder, step, learner.model.state_dict(), learner.optimizer.state_dict(), state)
        self.run.update_attempt(steps=step - self.first)

    @contextlib.contextmanager
    def pause(self, device: torch.device) -> Iterator[None]:
        self.spent.memory_before = self.spent.most_memory(device)
        wall, cpu = time.monotonic(), self.spent.world.cpu_seconds()
        yield
        seconds = time.monotonic() - wall
        self.spent.wall_from += seconds
        self.spent.cpu_from += self.spent.world.cpu_seconds() - cpu
        self.speed.since += seconds
        machine.reset_peak_memory(device)

    def finish(self, learner: Learner) -> None:
        memory = self.spent.most_memory(learner.device)
        self.run.update(tokens=self._tokens(self.total), peak_memory_bytes=memory, **self.spent.so_far())

    def _tokens(self, step: int) -> int:
        return step * self.training.tokens_per_step


class _Standing(NamedTuple):
    """Where training continues from: what the first process read, for the others."""

    step: int = 0
    weights: dict[str, Tensor] | None = None  # None: the initial ones
    optimizer: dict[str, Any] | None = None
    state: Mapping[str, Any] | None = None  # of a checkpoint: times, and the scale of losses


def _resumed(run: Run, learner: Learner, start: StartConfig | None) -> _Standing:
    """Give the learner the state of the newest checkpoint, if there is one, and cut the metrics back to it.

    A run that begins from another has that one's weights where it has no checkpoint.
    """
    loaded = checkpoint.newest(run.folder)
    if loaded is None:
        run.cut_metrics(0)
        return _Standing(weights=None if start is None else begin_from(learner.model, start))
    weights, optimizer, state = loaded.weights(), loaded.optimizer(), loaded.state()
    give_weights(learner.model, weights, run.folder)
    try:
        learner.optimizer.load_state_dict(optimizer)
        offset = int(state["metrics_offset"])
    except (LookupError, TypeError, ValueError):
        raise UserError(f"{loaded.path} does not hold the state of this run: --restart trains it anew") from None
    _resume_scale(learner, state)
    run.cut_metrics(offset)
    return _Standing(loaded.step, weights, optimizer, state)


def _resume_scale(learner: Learner, state: Mapping[str, Any]) -> None:
    if learner.scale is not None and "loss_scale" in state:
        learner.scale.load_state_dict(state["loss_scale"])


def _complete_record(run: Run, state: Mapping[str, Any]) -> None:
    """Write into `run.json` what training took, if a kill after the last checkpoint kept that from being written."""
    missing = {
        name: state[name]
        for name in ("tokens", *_SPENT)
        if run.record[name] is None and number(state.get(name)) is not None
    }
    if missing:
        run.update(**missing)


class _Speed:
    """Tokens per second since the last call."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.since = tokens, time.monotonic()

    def at(self, tokens: int) -> float:
        before, began = self.tokens, self.since
        self.tokens, self.since = tokens, time.monotonic()
        return (tokens - before) / (self.since - began)


class _Divergence:
    """Warn if the loss stays above twice its best: it is finite, and the run is lost all the same."""

    def __init__(self, total: int) -> None:
        self.patience = max(20, total // 100)  # updates
        self.best, self.above = math.inf, 0

    def look(self, step: int, loss: float) -> None:
        """After an update: its loss in nats per token."""
        self.best = min(self.best, loss)
        self.above = self.above + 1 if loss > 2 * self.best else 0
        if self.above == self.patience:
            told = "the loss is %.3f at step %d, above twice its best (%.3f) for %d updates: it diverges slowly"
            logger.warning(f"{told}; a lower training.learning_rate usually helps", loss, step, self.best, self.above)


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
