"""What training takes: seconds, memory and speed over all attempts of a run."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from posbench import machine
from posbench.model.gpt import GPT, train_flops_per_token
from posbench.training.step import Learner


class Clock:
    """Wall and CPU seconds and the most memory of training over all attempts, and its speed since the last row.

    CPU seconds are those of this process times the number of processes.
    """

    NAMES = ("train_seconds", "cpu_seconds", "peak_memory_bytes")

    def __init__(self, learner: Learner, tokens: int, before: Mapping[str, Any]) -> None:
        self._learner, self._tokens = learner, tokens
        wall, cpu, memory = (before.get(name, 0) for name in self.NAMES)  # of earlier attempts
        self._since, self._memory = time.monotonic(), int(memory)
        self._wall, self._cpu = time.monotonic() - wall, self._cpu_seconds() - cpu
        peak, model = machine.peak_flops(learner.device, learner.dtype), learner.model
        flops = train_flops_per_token(model, learner.training.train_length) if isinstance(model, GPT) else None
        self.full_speed = peak * learner.world.size / flops if peak and flops else None  # tokens per second

    def _cpu_seconds(self) -> float:
        return time.process_time() * self._learner.world.size

    def spent(self) -> dict[str, float]:
        """Wall and CPU seconds and bytes so far."""
        self._memory = max(self._memory, machine.peak_memory(self._learner.device))
        wall, cpu = time.monotonic() - self._wall, self._cpu_seconds() - self._cpu
        return dict(zip(self.NAMES, (round(wall, 3), round(cpu, 3), self._memory), strict=True))

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
        wall, cpu = time.monotonic(), self._cpu_seconds()
        yield
        wall, cpu = time.monotonic() - wall, self._cpu_seconds() - cpu
        self._wall, self._since, self._cpu = self._wall + wall, self._since + wall, self._cpu + cpu
        machine.reset_peak_memory(self._learner.device)
