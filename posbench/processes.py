"""The processes that train one run together, and their communication.

Each computes its share of every batch and every evaluation. Rank 0 has the run folder, the tracker and the terminal. An
update sends one message: gradients, loss, and signals received; on GPUs gradients also go ahead of it, while others are
computed. A failure of one process ends all, and the first failure is the one that is reported.
"""

import contextlib
import datetime
import json
import logging
import os
import signal
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from posbench import machine
from posbench.errors import PosbenchError, RunFailed, Stopped, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed has it, where torch was built with that

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_FAILURE = "failure"  # key of the store: the first failure
_WITHOUT_A_WORD = "another process of this run has ended without a word"
_WAIT = datetime.timedelta(days=1)  # for rank 0, while it downloads a text; the end of a process is seen at once
_JOIN_SECONDS = 600.0  # within which all processes have to join
_TELL_SECONDS = 3.0  # within which a process reports its failure, once its connection is gone
_POLL_SECONDS = 0.02  # between looks at the store, by a process that waits
_WATCH_SECONDS = 1.0  # between looks at the store, by a thread
_END_SECONDS = 20.0  # within which a process ends once another has failed; a little more than W&B gets
# Bytes of gradients that are sent at once while others are computed, by device. A link between GPUs carries so many in
# about a millisecond. On CPUs all go in the update's message, since a core that sends does not compute.
_BUCKET_BYTES = {"cuda": 25 * 2**20}


class World:
    """A single process: it has the whole batch and sees its own signals only."""

    rank = 0
    size = 1
    threads: int | None = None  # of the CPU for each process, where the configuration leaves them open

    def __init__(self) -> None:
        self.received: Sequence[int] = ()  # signals that asked this process to stop, as they come

    def device(self, chosen: torch.device) -> torch.device:
        """The device of this process in a run on `chosen`; a GPU is the current one from now on."""
        return machine.current(chosen)

    def stopped_by(self) -> int | None:
        """The signal after which all processes stop, now that the update is made; None to go on."""
        return self.received[0] if self.received else None

    def overlapping(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
        """Run the last backward pass of an update within it: gradients may be sent while it computes others."""
        return contextlib.nullcontext()

    def add_up(self, parameters: list[nn.Parameter], loss: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add the gradients of all processes, in place, and their losses.

        Returns:
            The loss of all; and what the processes said beside it, for `hear`, on the device of the loss.
        """
        return loss, None

    def hear(self, said: list[float]) -> None:
        """Take note of what the processes said in an update, once the host has read it."""

    def mapped(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """Apply `work` to the items. Each process computes a share; all return all results, in order."""
        return [work(item) for item in items]

    def from_first(self, value: Any = None) -> Any:
        """Broadcast the value of rank 0; the others wait for it."""
        return value

    def cpu_seconds(self) -> float:
        """Processor time of all processes, from an arbitrary origin."""
        return time.process_time()

    def cause(self, error: BaseException) -> BaseException:
        """The root cause: this error, or the failure of another process that triggered it."""
        return error

    @contextlib.contextmanager
    def last_resort(self, record: Callable[[BaseException], object]) -> Iterator[None]:
        """If another process fails while this one hangs, call `record` with its error and end this one."""
        yield


class Joined(World):
    """One of several processes, made by `joined`. All must make the same calls in the same order."""

    def __init__(self, store: "Store", rank: int, size: int, local_rank: int, threads: int | None) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self.threads = threads
        self.last_words: Callable[[], str | None] = lambda: None  # of a process that is gone, where they are known
        self._local_rank = local_rank
        self._store = store
        self._stopped_by: int | None = None
        self._early: _Early | None = None
        self._cpu_from: float | None = None  # the first update
        self._cpu_of_others = 0.0
        self._failed = False  # here, or that is known here
        self._lost: RunFailed | None = None  # another process ended without a word
        self._cut_off = False  # the store is gone, with the process that had it
        self._over = threading.Event()
        self._record: Callable[[BaseException], object] = lambda error: None

    def device(self, chosen: torch.device) -> torch.device:
        if chosen.type == "cpu":
            return chosen
        # Slurm may show each process its own GPU alone, which is then number 0.
        return machine.current(torch.device("cuda", self._local_rank % torch.cuda.device_count()))

    def stopped_by(self) -> int | None:
        return self._stopped_by

    def overlapping(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
        size = _BUCKET_BYTES.get(parameters[0].device.type)
        if size is None:
            return contextlib.nullcontext()
        if self._early is None:
            self._early = _Early(parameters, size, self._together)
        return self._early.sending()

    def add_up(self, parameters: list[nn.Parameter], loss: Tensor) -> tuple[Tensor, Tensor | None]:
        if self._cpu_from is None:
            self._cpu_from = time.process_time()
        said = torch.zeros(2, self.size)
        said[0, self.rank] = self.received[0] if self.received else 0
        said[1, self.rank] = time.process_time() - self._cpu_from
        sent = self._early.sent if self._early else set()
        gradients = [p.grad for p in parameters if p.grad is not None and p not in sent]
        beside = [loss.view(1), machine.sent(said.flatten(), loss.device)]
        message = torch.cat([*(g.flatten() for g in gradients), *beside])
        self._together(lambda: dist.all_reduce(message))
        total, heard = torch.split(_laid_back(message, gradients), [1, said.numel()])
        if self._early:
            self._early.finish()
        return total.squeeze(), heard

    def hear(self, said: list[float]) -> None:
        signals, seconds = said[: self.size], said[self.size :]
        self._stopped_by = next((int(number) for number in signals if number), None)
        self._cpu_of_others = sum(seconds) - seconds[self.rank]

    def mapped(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        own = [work(item) for item in items[self.rank :: self.size]]
        everyone: list[list[_Result]] = [[] for _ in range(self.size)]
        self._together(lambda: dist.all_gather_object(everyone, own))
        return [everyone[number % self.size][number // self.size] for number in range(len(items))]

    def from_first(self, value: Any = None) -> Any:
        held = [value]
        self._together(lambda: dist.broadcast_object_list(held, src=0))
        return held[0]

    def cpu_seconds(self) -> float:
        return time.process_time() + self._cpu_of_others

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def cause(self, error: BaseException) -> BaseException:
        self._failed = True
        if isinstance(error, Stopped) and self._stopped_by:  # all of them know
            return error
        if isinstance(error, _GoneError):
            found = self._told(_TELL_SECONDS)
            return RunFailed(self.last_words() or str(error)) if found is None else found
        with contextlib.suppress(RuntimeError):  # no store: the process that had it is gone
            self._store.compare_set(_FAILURE, "", json.dumps({"rank": self.rank, **_plain(error)}))
        asked_to_end = isinstance(error, (Stopped, KeyboardInterrupt))
        return (self._told() or self._lost if asked_to_end else None) or error

    @contextlib.contextmanager
    def last_resort(self, record: Callable[[BaseException], object]) -> Iterator[None]:
        self._record = record
        try:
            yield
        finally:
            self._record = lambda error: None

    def _together(self, exchange: Callable[[], object]) -> None:
        try:
            exchange()
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # of this process
            raise
        except RuntimeError as error:  # of torch, whatever it is that broke
            said = str(error).partition("\n")[0]
            raise _GoneError(f"{_WITHOUT_A_WORD} ({said})") from error

    def _told(self, seconds: float = 0.0) -> PosbenchError | None:
        """The failure that another process has reported, waiting so long for it; None if there is none."""
        until = time.monotonic() + seconds
        while not self._cut_off:
            try:
                if self._store.check([_FAILURE]):
                    told = json.loads(self._store.get(_FAILURE))
                    return None if told["rank"] == self.rank else _error(told, self.size)
            except RuntimeError:
                self._cut_off = True
            if time.monotonic() >= until:
                break
            time.sleep(_POLL_SECONDS)
        return None

    def watch(self) -> None:
        """In a thread: end this process if another has failed, whatever it is waiting for.

        A connection of gloo breaks where a process is killed; NCCL waits on. So this also asks whether one is gone.
        """
        said: str | None = None
        while (error := self._told()) is None:
            before, said = said, self.last_words() or (_WITHOUT_A_WORD if self._cut_off else None)
            if before and said:  # at two looks: it had time to tell its reason by the store
                error = self._lost = RunFailed(said)
                break
            if self._over.wait(_WATCH_SECONDS):
                return
        if not self._failed:
            interrupt_main(signal.SIGTERM)
        self._end_unless_over(error)

    def _end_unless_over(self, error: BaseException) -> None:
        """In a thread: end this process if it does not end by itself."""
        if not self._over.wait(_END_SECONDS):
            self._record(error)
            told = _plain(error)
            logger.error("%s", told["message"])
            os._exit(told["exit_code"])

    def close(self, error: BaseException | None) -> None:
        """Leave the others.

        Args:
            error: what ended this process, if it failed. Then it does not wait for what the others have begun, as NCCL
                would, for ever.
        """
        if error is not None:
            threading.Thread(target=self._end_unless_over, args=(error,), daemon=True).start()
            if (group := dist.group.WORLD) is not None:
                group.abort()
        dist.destroy_process_group()
        self._over.set()


class _Early:
    """Sums over processes of the gradients that a backward pass has made, begun while it makes the others.

    Buckets of parameters, the last of the model first, are sent in one order by all processes. What the pass leaves out
    stays for the update's message.

    It is not torch's `DistributedDataParallel`, which arranges its buckets anew after the first update, so that of more
    than two processes a resumed run would add up in another order; which has the compiler split what is compiled within
    it; and which raises a lost connection as an error of the backward pass.

    Args:
        size: bytes of a bucket, at least.
        together: runs an exchange, and says if another process has ended.
    """

    def __init__(
        self, parameters: list[nn.Parameter], size: int, together: Callable[[Callable[[], object]], None]
    ) -> None:
        self.sent: set[nn.Parameter] = set()  # parameters whose gradients are on their way
        self._buckets: list[list[nn.Parameter]] = [[]]
        self._missing: list[set[nn.Parameter]] = []  # by bucket, while a pass is on
        self._underway: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        self._on = False
        self._together = together
        for parameter in reversed(parameters):
            if sum(one.nbytes for one in self._buckets[-1]) >= size:
                self._buckets.append([])
            self._buckets[-1].append(parameter)
        self._bucket_of = {one: number for number, bucket in enumerate(self._buckets) for one in bucket}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """The pass within it is the last of an update."""
        self._missing = [set(bucket) for bucket in self._buckets]
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def finish(self) -> None:
        """Wait for the sums, on a GPU without its host, and give them to the parameters."""
        for work, message, gradients in self._underway:
            self._together(work.wait)
            _laid_back(message, gradients)
        self._underway.clear()
        self.sent.clear()

    def _made(self, parameter: nn.Parameter) -> None:
        """After a gradient was added to a parameter's."""
        if not self._on:
            return
        assert parameter not in self.sent, "a gradient that was sent has changed in the same backward pass"
        self._missing[self._bucket_of[parameter]].discard(parameter)
        while (number := len(self._underway)) < len(self._buckets) and not self._missing[number]:
            self._send(self._buckets[number])

    def _send(self, bucket: list[nn.Parameter]) -> None:
        gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
        message = torch.cat([gradient.flatten() for gradient in gradients])

        def begin() -> None:
            work = dist.all_reduce(message, async_op=True)
            self._underway.append((work, message, gradients))

        self._together(begin)
        self.sent.update(bucket)


def _laid_back(message: Tensor, gradients: list[Tensor]) -> Tensor:
    """Copy a message's beginning to the gradients that it was made of; returns the rest of it."""
    sizes = [gradient.numel() for gradient in gradients]
    *sums, rest = torch.split(message, [*sizes, len(message) - sum(sizes)])
    if gradients:
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(sums, gradients, strict=True)])
    return rest


@contextlib.contextmanager
def joined(
    store: "Store",
    rank: int,
    size: int,
    local_rank: int,
    threads: int | None = None,
    last_words: Callable[[], str | None] = lambda: None,
) -> Iterator[Joined]:
    """Join the other processes of a run, once all of them are there.

    Args:
        store: that all of them see.
        local_rank: number of the process on its machine.
        threads: of the CPU for each process, where the configuration leaves them open.
        last_words: why another process ended, if it ended and should not have.

    Raises:
        RunFailed: one of the others has ended, or some do not come.
        Whatever ended the first process that failed, in place of a lost connection or a signal.
    """
    _wait_for_all(store, rank, size, last_words)
    backend = "cpu:gloo,cuda:nccl" if "nccl" in backends() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_WAIT)
    world = Joined(store, rank, size, local_rank, threads)
    world.last_words = last_words
    threading.Thread(target=world.watch, name="failures-elsewhere", daemon=True).start()
    cause: BaseException | None = None
    try:
        yield world
    except BaseException as error:
        cause = world.cause(error)
        if cause is error:
            raise
        raise cause from error
    finally:
        world.close(cause)


def backends() -> list[str]:
    """The communication backends available here: gloo on CPUs, nccl on GPUs."""
    if not dist.is_available():
        return []
    here = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    return [name for name, there in here.items() if there]


def _wait_for_all(store: "Store", rank: int, size: int, last_words: Callable[[], str | None]) -> None:
    store.set(f"here/{rank}", "")
    until = time.monotonic() + _JOIN_SECONDS
    while missing := [other for other in range(size) if not store.check([f"here/{other}"])]:
        if said := last_words():
            raise RunFailed(said)
        if time.monotonic() > until:
            named = ", ".join(map(str, missing))
            raise RunFailed(
                f"{size} processes must train together: rank {named} did not join within {_JOIN_SECONDS:g} s"
            )
        time.sleep(_POLL_SECONDS)


class _GoneError(Exception):
    """A connection to another process broke."""


def _plain(error: BaseException) -> dict[str, Any]:
    """An error as plain data, for the other processes."""
    if isinstance(error, KeyboardInterrupt):
        error = Stopped(signal.SIGINT, "interrupted")
    known = isinstance(error, PosbenchError)
    return {
        "message": str(error) if known else f"{type(error).__name__}: {error}",
        "exit_code": error.exit_code if isinstance(error, PosbenchError) else 1,
        "reason": error.reason if isinstance(error, RunFailed) else "error",
    }


def _error(told: dict[str, Any], size: int) -> PosbenchError:
    code, message = told["exit_code"], f"rank {told['rank']} of {size}: {told['message']}"
    if code > 128:
        return Stopped(code - 128, told["message"])
    return UserError(message) if code == UserError.exit_code else RunFailed(message, told["reason"])
