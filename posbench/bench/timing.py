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
MATMUL_SIZE = {"cpu": 2048}  # of the square matrices whose product is the machine's peak
MATMUL_SIZE_ACCELERATOR = 8192
MATMUL_TRIES = 5


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds that one call took, by contender, one figure per round."""

    wall: dict[str, Floats]
    cpu: dict[str, Floats]  # processor time, all threads together
    peaks: Floats  # (rounds,) FLOP per second of a plain matrix product in the same round

    def ratio(self, name: str, base: str, quantile: float = 0.5) -> float:
        """The speed relative to `base` in the same round, by wall clock: the median over rounds."""
        return float(np.quantile(self.wall[base] / self.wall[name], quantile))


def take_turns(contenders: Mapping[str, Call], rounds: int, device: torch.device, dtype: torch.dtype) -> Timings:
    """Time the contenders in rounds; in each, every one is called equally often, in an order that reverses."""
    for call in contenders.values():
        for _ in range(WARM_UP):
            call()
    calls = math.ceil(TURN_SECONDS / min(_timed(call, 1, device)[0] for call in contenders.values()))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    peaks = []
    for turn in range(rounds):
        peaks.append(matmul_peak(device, dtype))
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            seconds[name].append(_timed(contenders[name], calls, device))
    figures = {name: np.array(pairs).T for name, pairs in seconds.items()}
    wall, cpu = ({name: both[i] for name, both in figures.items()} for i in range(2))
    return Timings(wall, cpu, np.array(peaks))


def _timed(call: Call, calls: int, device: torch.device) -> tuple[float, float]:
    """Wall and processor seconds per call."""
    _wait_for(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        call()
    _wait_for(device)
    return (time.perf_counter() - wall) / calls, (time.process_time() - cpu) / calls


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP per second of a large square matrix product, the best of a few tries."""
    size = MATMUL_SIZE.get(device.type, MATMUL_SIZE_ACCELERATOR)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return 2 * size**3 / min(_timed(lambda: a @ b, 1, device)[0] for _ in range(MATMUL_TRIES))


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
