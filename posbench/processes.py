"""The processes that share one run, over torch.distributed.

Each computes its share of every batch and every evaluation. Rank 0 has the run folder,
the tracker and the terminal.
"""

import contextlib
import datetime
import logging
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posbench import machine
from posbench.errors import RunFailed, UserError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
# how long others wait for a process: rank 0 may download a text
_TIMEOUT = datetime.timedelta(hours=1)


class PeerLost(RunFailed):
    """This process cannot reach another one, whose own error says why if it ended."""


class World:
    """A run's processes, as one of them sees them. All make the same calls in order; a
    single one exchanges nothing.
    """

    def __init__(self, rank: int = 0, size: int = 1, local_rank: int = 0) -> None:
        self.rank = rank
        self.size = size
        self._local_rank = local_rank  # on its machine
        # signals that asked this process to stop, as they come
        self.received: Sequence[int] = ()
        self._stopped_by: int | None = None

    def device(self, device: torch.device) -> torch.device:
        """Return this process's device in a run on `device`; a GPU becomes the current
        device.
        """
        if self.size > 1:
            if str(device) not in ("cpu", "cuda"):
                raise UserError(
                    f"runtime.device is {device}: {self.size} processes run on cpu, or"
                    " on cuda with a GPU each"
                )
            if device.type == "cuda":
                # Slurm may show a process only its own GPU, as number 0
                number = self._local_rank % torch.cuda.device_count()
                device = torch.device("cuda", number)
        return machine.current(device)

    def sum_gradients(
        self, parameters: Sequence[nn.Parameter], loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sum all processes' gradients in place, and their losses, in one message, so
        that a resumed run adds up alike.

        Returns the summed loss, and for `note_signals` each process's signal or 0; both
        are on the device of the loss.
        """
        if self.size == 1:
            return loss, loss.new_empty(0)
        signals = torch.zeros(self.size)
        signals[self.rank] = next(iter(self.received), 0)
        gradients = [
            parameter.grad for parameter in parameters if parameter.grad is not None
        ]
        parts = [
            *(g.flatten() for g in gradients),
            loss.view(1),
            machine.to_device(signals, loss.device),
        ]
        message = torch.cat(parts)
        _exchange(dist.all_reduce, message)
        *sums, total, signals = torch.split(message, [part.numel() for part in parts])
        torch._foreach_copy_(
            gradients,
            [part.view_as(g) for part, g in zip(sums, gradients, strict=True)],
        )
        return total.squeeze(), signals

    def note_signals(self, signals: list[float]) -> None:
        """Note the signals that `sum_gradients` returned for an update, once the host
        has read them.
        """
        self._stopped_by = next((int(number) for number in signals if number), None)

    def stopped_by(self) -> int | None:
        """Return the signal for which all processes stop after this update; None if
        they go on.
        """
        if self.size > 1:
            return self._stopped_by
        return next(iter(self.received), None)

    def map(
        self,
        work: Callable[[Sequence[_Item]], list[_Result]],
        items: Sequence[_Item],
    ) -> list[_Result]:
        """Return a result for each item, in order. `work` returns those of this
        process, which are of every `size`-th item.
        """
        results = work(items[self.rank :: self.size])
        parts = [results] * self.size
        if self.size > 1:
            _exchange(dist.all_gather_object, parts, results)
        return [
            parts[number % self.size][number // self.size]
            for number in range(len(items))
        ]

    def from_first(self, value: Any = None) -> Any:
        """Return the value of rank 0; the others wait for it."""
        values = [value]
        if self.size > 1:
            _exchange(dist.broadcast_object_list, values, src=0)
        return values[0]

    def after_first(self, work: Callable[[], _Result]) -> _Result:
        """Do the same work in all processes: first in rank 0, so that the others find
        what it has written.
        """
        if self.rank > 0:
            self.from_first()
        result = work()
        if self.rank == 0:
            self.from_first()
        return result


class Place(NamedTuple):
    """This process's ranks among the processes of its run, and the URL at which torch
    lets them meet.
    """

    rank: int
    size: int
    local_rank: int
    url: str


def place(processes: int | None) -> Place | None:
    """Return the place that torchrun or srun gave this process; None if it is not one
    of several.

    `processes`: `runtime.processes`; with 1 or None, each task of srun is a run of its
    own.
    """
    env = os.environ
    if env.get("RANK") and int(env.get("WORLD_SIZE") or 1) > 1:
        if "MASTER_ADDR" not in env or "MASTER_PORT" not in env:
            raise UserError(
                "RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not:"
                " expected all four, as torchrun sets them, or none"
            )
        local_rank = int(env.get("LOCAL_RANK", "0"))
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, "env://")
    if processes in (None, 1) or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return None
    host = "127.0.0.1"
    if env.get("SLURM_STEP_NUM_NODES") != "1":
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        host = done.stdout.split()[0]
    step = 31 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])
    url = f"tcp://{host}:{20_000 + step % 10_000}"  # another port for each step
    size, local_rank = int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return Place(int(env["SLURM_PROCID"]), size, local_rank, url)


def size_of(asked: int | None) -> int:
    """Return how many processes a run has: as a launcher has started them, else as
    asked for by `runtime.processes`. Raises UserError if these differ.
    """
    size = asked or 1
    rank_place = place(asked)
    if rank_place:  # a launcher has started this process
        size = rank_place.size
    if asked not in (None, size):
        raise UserError(f"runtime.processes is {asked}, but {size} were started")
    return size


def refuse_several(processes: int | None = None) -> None:
    """Raise UserError if `processes` asks for several, or this process is one of
    several.
    """
    if (processes or 1) > 1 or place(processes) is not None:
        raise UserError(
            "expected one process: several can train runs and evaluate them, but not"
            " choose an extension or evaluate a HuggingFace model"
        )


@contextlib.contextmanager
def joined(place: Place | None) -> Iterator[World]:
    """Join the other processes of a run. Without a place, the process is alone. Raises
    PeerLost if another ends.
    """
    if place is None:
        yield World()
        return
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    settings = {"timeout": _TIMEOUT, "rank": place.rank, "world_size": place.size}
    _exchange(dist.init_process_group, backend, place.url, **settings)
    if place.rank > 0:
        logging.getLogger("posbench").handlers = [logging.NullHandler()]
    try:
        yield World(place.rank, place.size, place.local_rank)
    except BaseException:
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # or NCCL waits for what the others have begun
        raise
    finally:
        dist.destroy_process_group()


def _exchange(operation: Callable[..., object], *args: Any, **options: Any) -> None:
    """Exchange something with the other processes. Raises PeerLost if that fails."""
    try:
        operation(*args, **options)
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # this process's own
        raise
    except RuntimeError as error:  # torch raises it for any broken exchange
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise PeerLost(
            f"cannot reach the other processes of this run: {reason}"
        ) from error
