"""One update of the weights: learning rate, optimizer, gradients, what is compiled, and
its time and memory.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posbench import machine, registry
from posbench.config.schema import Config, TrainingConfig
from posbench.data.batches import Batch
from posbench.encodings.base import Encoding
from posbench.errors import RunFailed
from posbench.model.gpt import GPT, train_flops_per_token
from posbench.processes import World
from posbench.randomness import generator
from posbench.terminal.console import Updates


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Return the learning rate of update `step` (from 0) of `total`: a pure function,
    so resuming cannot lose it.

    Linear warm-up, then a cosine to `final_learning_rate` x peak; or a constant rate
    that falls over `decay_fraction`.
    """
    warmup = training.warmup_steps
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    share = 1.0  # of the way from the final rate to the peak
    if training.schedule == "cosine":
        progress = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
        share = 0.5 * (1 + math.cos(math.pi * progress))
    elif training.decay_fraction:
        # updates of the fall: at least 1, and none of the warm-up
        fall = max(1.0, min(training.decay_fraction * total, total - 1 - warmup))
        share = min(1.0, (total - 1 - step) / fall)
    final = training.final_learning_rate  # as a share of the peak
    return training.learning_rate * (final + (1 - final) * share)


def optimizer_for(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimizer with weight decay on the model's matrices only: never on
    norms, nor on an encoding's parameters.

    Parameters with a learning rate of their own (`Encoding.rates`) have their own
    groups, whose `times` is the factor.
    """
    factors: dict[Tensor, float] = {}
    for module in model.modules():
        if isinstance(module, Encoding):
            for name, factor in module.rates.items():
                factors[module.get_parameter(name)] = factor
    rows_of_parts: dict[Tensor, list[int]] = {}  # of the blocks' matrices
    if isinstance(model, GPT):
        rows_of_parts = model.rows_of_parts()
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter in rows_of_parts:
            continue
        if parameter.dim() >= 2 and not name.startswith("encoding."):
            matrices.append(parameter)
        elif parameter not in factors:
            others.append(parameter)
    decay = training.weight_decay
    groups: list[dict[str, Any]] = [
        {
            "params": list(rows_of_parts),
            "parts": list(rows_of_parts.values()),
            "weight_decay": decay,
        },
        {"params": matrices, "weight_decay": decay},
        {"params": others, "weight_decay": 0.0},
    ]
    for factor in sorted(set(factors.values())):
        parameters = [p for p in factors if factors[p] == factor]
        groups.append({"params": parameters, "weight_decay": 0.0, "times": factor})
    groups = [group for group in groups if group["params"]]
    cls = registry.load(registry.OPTIMIZERS, training.optimizer or "adamw")
    optimizer: torch.optim.Optimizer = cls(groups, training)
    return optimizer


class Trainer:
    """A model that is on its device already, and all that its updates share."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        device: torch.device,
        dtype: torch.dtype,
        world: World | None = None,
    ) -> None:
        self.model = model  # called like `GPT.forward`
        self.training = config.training
        self.seed = config.seed  # of random positions
        self.device = device
        self.dtype = dtype  # of matrix products
        self.world = world or World()  # the processes that share each batch
        if isinstance(model, GPT):
            model.compiles = config.runtime.compile
        self.optimizer = optimizer_for(model, config.training)
        # 1 after an update that was not finite; later ones are left out
        self.failed = torch.zeros((), device=device)


class Outcome(NamedTuple):
    """The result of an update, which CUDA may still be computing: `read` waits for it,
    nothing else does.
    """

    step: int
    numbers: Tensor  # loss, gradient norm; then the processes' signals
    # when the numbers are on the host; None = nothing to wait for
    arrived: torch.cuda.Event | None

    def read(self) -> tuple[float, float]:
        """Return the mean loss in nats per scored token and the gradient norm before
        clipping.

        Raises RunFailed if one is not finite. The weights are then as before the
        update, whatever was begun later; except on MPS, where they are lost.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm = self.numbers[:2].tolist()
        hint = "check the encoding's hooks"
        if self.step:
            hint = "a lower training.learning_rate usually helps"
        for quantity, number in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(number):
                raise RunFailed(
                    f"{quantity} is {number} at step {self.step + 1}: {hint}",
                    reason="diverged",
                )
        return loss, norm


class Unread:
    """Updates that were launched and are not read yet: with them the host runs ahead of
    the device.
    """

    def __init__(self, trainer: Trainer, progress: Updates | None) -> None:
        self._trainer = trainer
        self._outcomes: list[Outcome] = []
        self._progress = progress

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)

    def read(self, remaining: int = 0) -> tuple[float, float]:
        """Read updates until so many remain, and note in `world` the signals that came
        with them; return the loss and gradient norm of the last one read.
        """
        loss = norm = math.nan
        while len(self._outcomes) > remaining:
            outcome = self._outcomes.pop(0)
            loss, norm = outcome.read()
            self._trainer.world.note_signals(outcome.numbers[2:].tolist())
            if self._progress:
                per_step = self._trainer.training.tokens_per_step
                self._progress.advance(loss, (outcome.step + 1) * per_step)
        return loss, norm


def begin_update(trainer: Trainer, batch: Batch, step: int, rate: float) -> Outcome:
    """Launch one optimizer step; the host does not wait for its result.

    Each part of the batch counts by its share of the scored tokens, so that
    accumulation only changes the memory. Each of several processes has its own rows
    (`Batch.share`). `step`, which begins at 0, seeds random positions.
    """
    set_progress(trainer.model, step / trainer.training.steps)
    optimizer = trainer.optimizer
    optimizer.zero_grad(set_to_none=True)
    loss = torch.zeros((), device=trainer.device)
    parts = batch.parts(trainer.training.accumulation)
    for part in [part.to(trainer.device) for part in parts]:
        # The model returns a part's mean loss, which counts by its share of the scored
        # tokens. Divided by the inverse, equal parts count exactly alike.
        inverse_share = math.inf
        if part.n_scored:
            inverse_share = batch.n_scored / part.n_scored
        # the same for all parts
        draw = generator(trainer.seed, "positions", step, device=trainer.device)
        with machine.autocast(trainer.device, trainer.dtype):
            mean: Tensor = trainer.model(
                part.ids,
                part.labels,
                n_scored=part.n_scored,
                positions=part.positions,
                generator=draw,
            )
            summand = mean / inverse_share
        summand.backward()  # type: ignore[no-untyped-call]
        loss += summand.detach()

    parameters = list(trainer.model.parameters())
    loss, signals = trainer.world.sum_gradients(parameters, loss)
    norm = torch.nn.utils.clip_grad_norm_(parameters, trainer.training.clip)
    numbers = torch.stack((loss, norm))
    # the weights stay as they are once a number was not finite
    fails = ~numbers.isfinite().all()
    trainer.failed.copy_(trainer.failed.maximum(fails.float()))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("times", 1.0)
    # torch's fused optimizers leave the weights alone where `found_inf` is 1, but on
    # MPS they may not look at it
    if loss.device.type != "mps":
        optimizer.found_inf = trainer.failed  # type: ignore[attr-defined]
    optimizer.step()

    numbers = torch.cat((numbers, signals))
    arrived = None
    if numbers.device.type == "cuda":
        numbers = numbers.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
    return Outcome(step, numbers, arrived)


def set_progress(model: nn.Module, progress: float) -> None:
    """Pass training progress in [0, 1] to the model's encoding and to encodings inside
    it.
    """
    for module in model.modules():
        if isinstance(module, Encoding):
            module.set_progress(progress)


class Clock:
    """The wall seconds, CPU seconds and peak memory of training over all attempts, and
    its speed since the last row.

    CPU seconds are those of this process times the number of processes.
    """

    def __init__(self, trainer: Trainer, tokens: int, saved: Mapping[str, Any]) -> None:
        self._trainer = trainer
        machine.reset_peak_memory(trainer.device)
        self._start()
        # of earlier attempts
        self._wall = saved.get("train_seconds", 0)
        self._cpu = saved.get("cpu_seconds", 0)
        self._memory: int | None = saved.get("peak_memory_bytes")
        self._last_row = tokens, self._wall
        # tokens per second at the devices' peak; None if it is not known
        self.full_speed: float | None = None
        peak = machine.peak_flops(trainer.device, trainer.dtype)
        if peak and isinstance(trainer.model, GPT):
            length = trainer.training.train_length
            flops = train_flops_per_token(trainer.model, length)
            self.full_speed = peak * trainer.world.size / flops

    def _start(self) -> None:
        """Begin a span of time, which `_add_span` ends."""
        self._began = time.monotonic()
        self._cpu_began = time.process_time()

    def _add_span(self) -> None:
        """Add the span since `_start` to the totals, and begin the next one."""
        began, cpu_began = self._began, self._cpu_began
        self._start()
        self._wall += self._began - began
        self._cpu += (self._cpu_began - cpu_began) * self._trainer.world.size
        peak = machine.peak_memory(self._trainer.device)
        if peak is not None:
            self._memory = max(self._memory or 0, peak)

    def totals(self) -> dict[str, float | None]:
        """Return wall seconds, CPU seconds and peak bytes so far; None: not known."""
        self._add_span()
        return {
            "train_seconds": round(self._wall, 3),
            "cpu_seconds": round(self._cpu, 3),
            "peak_memory_bytes": self._memory,
        }

    def speed(self, step: int) -> dict[str, float]:
        """Return tokens per second since the last call, the share of the device's peak
        if known, and seconds so far.
        """
        self._add_span()
        last_tokens, last_seconds = self._last_row
        tokens = step * self._trainer.training.tokens_per_step
        self._last_row = tokens, self._wall
        speed = (tokens - last_tokens) / (self._wall - last_seconds)
        values = {"train/tokens_per_second": speed}
        if self.full_speed:
            values["train/mfu"] = speed / self.full_speed
        values["seconds"] = round(self._wall, 3)
        return values

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count no time as training while this lasts."""
        self._add_span()
        yield
        self._start()  # leaves out what has passed since
        machine.reset_peak_memory(self._trainer.device)
