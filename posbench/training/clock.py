"""What training takes: seconds, memory and speed over all attempts; and whether its loss runs away."""

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from posbench import machine
from posbench.model.gpt import GPT, train_flops_per_token
from posbench.training.step import Learner

logger = logging.getLogger(__name__)


class Clock:
    """Wall and CPU seconds and the most memory of training over all attempts, and its speed since the last row.

    CPU seconds are of all processes of an attempt, memory is that of this one.

    Args:
        tokens: trained on so far.
        before: what earlier attempts took, as a checkpoint has it.
    """

    NAMES = ("train_seconds", "cpu_seconds", "peak_memory_bytes")

    def __init__(self, learner: Learner, tokens: int, before: Mapping[str, Any]) -> None:
        self._learner, self._tokens, self._since = learner, tokens, time.monotonic()
        self._wall = time.monotonic() - before.get("train_seconds", 0.0)
        self._cpu = learner.world.cpu_seconds() - before.get("cpu_seconds", 0.0)
        self._memory = int(before.get("peak_memory_bytes", 0))
        peak, model = machine.peak_flops(learner.device, learner.dtype), learner.model
        flops = train_flops_per_token(model, learner.training.train_length) if isinstance(model, GPT) else None
        self.full_speed = peak * learner.world.size / flops if peak and flops else None  # tokens per second

    def spent(self) -> dict[str, float]:
        """Wall and CPU seconds and bytes so far."""
        self._memory = max(self._memory, machine.peak_memory(self._learner.device))
        seconds = time.monotonic() - self._wall, self._learner.world.cpu_seconds() - self._cpu
        return dict(zip(self.NAMES, (*(round(each, 3) for each in seconds), self._memory), strict=True))

    def speed(self, step: int) -> dict[str, float]:
        """Tokens per second since the last call, the share of the device's peak if that is known, and all seconds."""
        tokens, now = step * self._learner.training.tokens_per_step, time.monotonic()
        speed = (tokens - self._tokens) / (now - self._since)
        self._tokens, self._since = tokens, now
        share = {"train/mfu": speed / self.full_speed} if self.full_speed else {}
        return {"train/tokens_per_second": speed, **share, "seconds": round(now - self._wall, 3)}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing as training while this lasts."""
        self.spent()
        wall, cpu = time.monotonic(), self._learner.world.cpu_seconds()
        yield
        seconds = time.monotonic() - wall
        self._wall, self._since = self._wall + seconds, self._since + seconds
        self._cpu += self._learner.world.cpu_seconds() - cpu
        machine.reset_peak_memory(self._learner.device)


class Divergence:
    """Warn if the loss stays above twice its best: it is finite, and the run is lost all the same."""

    def __init__(self, total: int) -> None:
        self.patience, self.best, self.above = max(20, total // 100), math.inf, 0  # updates, nats per token, updates

    def look(self, step: int, loss: float) -> None:
        """After an update: its loss in nats per token."""
        self.best = min(self.best, loss)
        self.above = self.above + 1 if loss > 2 * self.best else 0
        if self.above == self.patience:
            where = f"{loss:.3f} at step {step}, above twice its best ({self.best:.3f}) for {self.above} updates"
            logger.warning("the loss is %s: it diverges slowly; a lower training.learning_rate usually helps", where)
