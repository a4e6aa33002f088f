"""Run a plan, or evaluate finished runs, in one process or in several. Every rank does
the same; rank 0 writes.
"""

import contextlib
import functools
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

from posbench import machine
from posbench.config.schema import Config
from posbench.errors import PosbenchError, RowsFailed, RunFailed, Stopped
from posbench.evaluation.job import evaluate_run
from posbench.launch import pool
from posbench.launch.plans import Plan
from posbench.processes import PeerLost, Place, World, joined, place, size_of
from posbench.run.folder import Run
from posbench.terminal import console, exits
from posbench.terminal.signals import stop_signals
from posbench.training import train as training

_Name = TypeVar("_Name", Path, str)
_PEER_LOST = 76  # exit code of a rank that ended because another one had
_GRACE_SECONDS = 20.0  # how long the others may go on, once a rank has failed


class RankFailed(RunFailed):
    """A rank that this process had started has failed."""


def run(
    plan: Plan, restart: bool = False, show: Callable[[], object] | None = None
) -> None:
    """Train and evaluate, with the log on the terminal, in a process that does nothing
    else.
    """
    set_up_process()
    train(plan, restart, show)


def set_up_process() -> None:
    """Log to the terminal, and keep freed memory."""
    console.log_to_terminal()
    machine.keep_freed_memory()


def train(
    plan: Plan, restart: bool = False, show: Callable[[], object] | None = None
) -> None:
    """Train and evaluate a plan in as many processes as it asks for, then show its
    results in one.
    """
    config = plan.config
    command = list(plan.command)
    work = functools.partial(training.train, config, plan.folder, command, restart)
    try:
        in_processes(config, work, show)
    except RankFailed as error:  # rank 0 knows at most that another rank has ended
        with (
            contextlib.suppress(PosbenchError, OSError),
            Run.open(plan.folder, config, command) as run,
        ):
            run.ended_by(error)
        raise


@contextlib.contextmanager
def shown(show: Callable[[], object] | None) -> Iterator[None]:
    """Show results after the work inside, also if some of its rows failed."""
    show = show or (lambda: None)
    try:
        yield
    except RowsFailed:
        show()
        raise
    show()


def in_processes(
    config: Config,
    work: Callable[[World], object],
    show: Callable[[], object] | None = None,
) -> None:
    """Do work: here, in `runtime.processes` new ones while this one waits, or as one
    that torchrun or srun started. Then show its results, in one process.
    """
    asked = config.runtime.processes
    size = size_of(asked)
    rank_place = place(asked)  # among those that a launcher started, if any
    if rank_place and rank_place.rank > 0:
        show = None
    with shown(show):
        if rank_place or size == 1:
            with joined(rank_place) as world:
                work(world)
        else:
            start_processes(size, config.runtime.threads, work)


def evaluate_runs(
    configs: Mapping[Path, Config],
    show: Callable[[Path, str], object] | None,
    show_all: Callable[[], object] | None = None,
) -> None:
    """Evaluate finished runs, by folder, one after the other, as `in_processes` does
    work, and show the curve of each, then all. `show` gets a run's folder and the split
    of its text.
    """
    set_up_process()
    config = next(iter(configs.values()))  # all have the same number of processes
    work = functools.partial(_evaluate_all, configs, show)
    in_processes(config, work, show_all)


def _evaluate_all(
    configs: Mapping[Path, Config],
    show: Callable[[Path, str], object] | None,
    world: World,
) -> None:
    """Evaluate runs and show their curves, in the first process."""

    def evaluate(folder: Path) -> None:
        config = configs[folder]
        show_one = None
        if show and world.rank == 0:
            show_one = functools.partial(show, folder, config.evaluation.split)
        with shown(show_one):
            evaluate_run(folder, config, world)

    each([*configs], evaluate, world.size)


def each(
    names: Sequence[_Name], work: Callable[[_Name], object], size: int = 1
) -> None:
    """Evaluate runs or models one after the other. One that fails does not stop the
    others, unless other processes, of `size` in all, wait for it.
    """
    failed = []
    for name in names:
        try:
            work(name)
        except PosbenchError as error:
            is_alone = len(names) == 1 or size > 1
            if is_alone or isinstance(error, Stopped):
                raise
            exits.report(error)
            failed.append(str(name))
    if failed:
        listed = ", ".join(failed)
        raise RowsFailed(f"{len(failed)} of {len(names)} not evaluated: {listed}")


def start_processes(
    size: int, threads: int | None, work: Callable[[World], object]
) -> None:
    """Do work in `size` processes. Raises RankFailed, which says which one failed;
    SystemExit if rank 0 has said so.
    """
    # they meet on this machine
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": f"={loopback}",
        **os.environ,
        "OMP_NUM_THREADS": str(threads or machine.threads_each(size)),
    }
    ranks: list[BaseProcess] = []
    with (
        tempfile.TemporaryDirectory(prefix="posbench-") as shared,
        stop_signals() as received,
    ):
        try:
            for rank in range(size):
                rank_place = Place(rank, size, rank, f"file://{shared}/store")
                job = functools.partial(_rank, rank_place, work)
                output = Path(shared, f"{rank}.log") if rank else None
                process = pool.start_process(pool.SPAWNED, job, environment, output)
                ranks.append(process)
            _wait(ranks, received)
            # None: it still waits for a failed one, as NCCL does
            codes = [process.exitcode for process in ranks]
        finally:
            pool.send_signal(ranks, signal.SIGKILL)
            for process in ranks:
                process.join()
        # a rank that ended because of another one counts only if there is no other, and
        # rank 0 last, whose log is the terminal
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        by_themselves = [each for each in failed if each[1] != _PEER_LOST]
        rank, code = [*by_themselves, *reversed(failed), (0, 0)][0]
        message = pool.last_error(Path(shared, f"{rank}.log"))
    if code == 0:
        return
    if code == _PEER_LOST:
        code = 1
        message = message or "the others do not answer"
    elif rank == 0 and code > 0:  # it has printed its error
        raise SystemExit(code)

    if code > 0:
        error = RankFailed(f"rank {rank} of {size} failed: {message}")
        error.exit_code = code
    else:
        name = signal.Signals(-code).name
        if -code in received:  # it came as the processes were starting
            raise Stopped(-code, f"stopped by {name}; the same command continues")
        error = RankFailed(f"rank {rank} of {size} was killed by {name}")
        error.exit_code = 128 - code  # as a shell has it
    raise error


def _wait(ranks: list[BaseProcess], received: Sequence[int]) -> None:
    """Wait until all ranks have ended, or one has failed and the others had their time.
    Pass signals on to them.
    """
    deadline = math.inf
    n_passed_on = 0
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in ranks]
        if None not in codes:
            return
        for number in received[n_passed_on:]:
            pool.send_signal(ranks, number)
            n_passed_on += 1
        if any(codes):
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.05)


def _rank(place: Place, work: Callable[[World], object]) -> None:
    """Do work as one of several processes. If another has ended, rank 0 prints nothing,
    since `start_processes` says which.
    """
    set_up_process()
    try:
        with joined(place) as world:
            work(world)
    except PeerLost as error:
        if place.rank > 0:
            exits.report(error)  # into its log
        raise SystemExit(_PEER_LOST) from None
