"""Fair timing in one process: contenders take turns, so that whatever else the machine does meets them alike."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench import machine
from posbench.terminal.console import stderr

Floats = NDArray[np.float64]
Call = Callable[[], object]

TURN_SECONDS = 0.25  # the quickest contender's turn lasts at least so long, far above the clock's grain
WARM_UP = 2  # calls before anything is timed: caches, tables, the optimizer's state


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds that one call took, by contender, one figure per round."""

    seconds: dict[str, Floats]

    def ratio(self, name: str, base: str, quantile: float = 0.5) -> float:
        """The speed relative to `base` in the same round: the median over rounds."""
        return float(np.quantile(self.seconds[base] / self.seconds[name], quantile))


def take_turns(contenders: Mapping[str, Call], rounds: int, device: torch.device) -> Timings:
    """Time the contenders in rounds; in each, every one is called equally often, in an order that reverses."""
    for call in contenders.values():
        for _ in range(WARM_UP):
            call()
    calls = math.ceil(TURN_SECONDS / min(_timed(call, 1, device) for call in contenders.values()))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(_timed(contenders[name], calls, device))
    return Timings({name: np.array(each) for name, each in seconds.items()})


def _timed(call: Call, calls: int, device: torch.device) -> float:
    """Seconds per call."""
    _wait_for(device)
    started = time.perf_counter()
    for _ in range(calls):
        call()
    _wait_for(device)
    return (time.perf_counter() - started) / calls


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def step_memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: Call, device: torch.device) -> int:
    """Bytes of weights, buffers, optimizer state, and all that one step holds at its fullest beside them.

    On a CPU the allocator's records of one step are added up, so that nothing else in the process counts.
    """
    step()  # the optimizer's state exists from here on
    optimizer.zero_grad(set_to_none=True)
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    lasting = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), *state])
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        machine.reset_peak_memory(device)
        step()
        return lasting + machine.peak_memory(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would announce itself on stderr
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    assert profile.kineto_results is not None
    records = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    records.sort(key=lambda event: event.start_ns())
    return lasting + int(np.cumsum([0, *(event.nbytes() for event in records)]).max())


def load_average(threads: int) -> float:
    """The machine's load before we add to it, with a warning if it leaves fewer than so many cores free."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load + threads > cores + 0.5:
        stderr.print(
            f"warning: this machine is busy (load average {load:.1f}, {cores} cores, {threads} wanted here): "
            "figures taken now are worth nothing",
            soft_wrap=True,
        )
    return load
