"""The processes of a run: those that torchrun or Slurm started, those that are started here, or one.

A finished run is evaluated in those that are started here, or in one.

`python -m posbench.launch.ranks` is one of those that are started here.
"""

import contextlib
import dataclasses
import datetime
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import yaml

from posbench import machine
from posbench.config.overrides import Asked
from posbench.config.schema import Config, load_saved, to_container
from posbench.errors import PosbenchError, UserError
from posbench.evaluation.job import evaluate_beside, evaluate_run
from posbench.launch.plans import Plan
from posbench.processes import World, backends, joined
from posbench.run_folder.folder import load_config
from posbench.terminal import exits
from posbench.terminal.signals import end_after, wait_for_parent
from posbench.training.train import train, train_beside

_CONFIG, _STORE, _RUN = "config.yaml", "store", "run"  # in the folder that processes started here share
_END_SECONDS = 5.0  # that they have to end in once the first has; nothing is theirs
_STORE_SECONDS = datetime.timedelta(minutes=10)  # for a Slurm job's first process to be there
_PORTS = range(20_000, 30_000)  # of which a Slurm job step takes one, below those that systems give out themselves

_stores: Any = torch.distributed  # whose names of them its stubs leave out
Joining = contextlib.AbstractContextManager[World]


def train_together(plan: Plan, restart: bool = False) -> bool:
    """Train and evaluate a plan in all processes that its run has; arguments and errors are those of `train.train`.

    Returns:
        Whether this is the first of them, whose run it is.

    Raises:
        SystemExit: in the others, if it failed; the first process reports why.
    """
    try:
        with _joining(plan.config) as world:
            first = world.rank == 0
            if first:
                train(plan.config, plan.folder, list(plan.command), restart, world)
            else:
                train_beside(plan.config, world)
    except PosbenchError as error:
        if own_rank() == 0:
            raise
        raise SystemExit(error.exit_code) from None
    return first


def evaluate_together(folder: Path, asked: Asked) -> None:
    """Evaluate a finished run in as many processes as were asked for, of this machine; errors are `evaluate_run`'s."""
    size = asked.processes or 1
    if size == 1:
        evaluate_run(folder, asked)
        return
    config = load_config(folder)
    runtime = dataclasses.replace(
        config.runtime,
        device=asked.device or config.runtime.device,
        threads=asked.threads or config.runtime.threads,
        processes=None,  # those that trained it
    )
    config = dataclasses.replace(config, evaluation=asked.settings, runtime=runtime)
    with _started_here(config, size, folder) as world:
        evaluate_run(folder, asked, world)


def _joining(config: Config) -> Joining:
    """To be entered: the processes of the run, as this one sees them."""
    asked, env = config.runtime.processes, os.environ
    if "RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        return _started_by_torchrun(config)
    if asked and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return _started_by_slurm(config)
    if asked and asked > 1:
        return _started_here(config, asked)
    return contextlib.nullcontext(World())


def _check(config: Config, size: int, here: int, by: str) -> None:
    """Refuse what cannot be divided among processes.

    Args:
        here: the number of processes on this machine; they see all of its GPUs.
        by: the program that started them.
    """
    if config.runtime.processes not in (None, size):
        raise UserError(f"runtime.processes is {config.runtime.processes}, but {by} started {size} processes")
    if "gloo" not in backends():
        raise UserError(f"{size} processes were requested: expected 1, this torch cannot have several together")
    device = machine.resolve(config.runtime.device)
    if device.type not in ("cpu", "cuda") or device.index is not None:
        raise UserError(f"runtime.device is {device}: {size} processes run on cpu, or on cuda with a GPU each")
    if device.type == "cuda" and here > (gpus := torch.cuda.device_count()):
        raise UserError(f"{here} processes on this machine need a GPU each, it has {gpus}: expected at most {gpus}")


# -- started elsewhere -------------------------------------------------------------------------------------------------


def _started_by_torchrun(config: Config) -> Joining:
    env = os.environ
    rank, size, local = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    config.training.refuse_uneven(size)  # `runtime.processes` is checked with the configuration
    _check(config, size, int(env.get("LOCAL_WORLD_SIZE", "1")), "torchrun")
    agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process has the store
    store = _tcp_store(env["MASTER_ADDR"], int(env["MASTER_PORT"]), rank == 0 and not agents)
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives it
    return joined(_stores.PrefixStore(f"posbench/{attempt}", store), rank, size, local)


def _started_by_slurm(config: Config) -> Joining:
    env = os.environ
    rank, size, local = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
    _check(config, size, 1, "srun")
    port = _PORTS[(31 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % len(_PORTS)]
    return joined(_tcp_store(_first_host(), port, rank == 0), rank, size, local)


def _first_host() -> str:
    """The machine of a Slurm job step's first process."""
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def _tcp_store(host: str, port: int, is_master: bool) -> Any:
    return _stores.TCPStore(host, port, is_master=is_master, timeout=_STORE_SECONDS, wait_for_workers=False)


def own_rank() -> int:
    """The rank of this process as torchrun or srun named it; 0 where neither did."""
    slurm = os.environ.get("SLURM_PROCID", "0") if "SLURM_STEP_NUM_TASKS" in os.environ else "0"
    return int(os.environ.get("RANK", slurm))


# -- started here ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started_here(config: Config, size: int, run: Path | None = None) -> Iterator[World]:
    """This process becomes the first; the others end with it, and talk to it over the loopback only.

    Args:
        run: the folder of a finished run that they evaluate; None: they train.
    """
    _check(config, size, size, "posbench")
    threads = _threads(config, size)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={_loopback()}")  # exactly this one; it would take any other first
    with tempfile.TemporaryDirectory(prefix="posbench-") as folder:
        place = Path(folder)
        (place / _CONFIG).write_text(yaml.safe_dump(to_container(config)), encoding="utf-8")
        if run is not None:
            (place / _RUN).symlink_to(run.absolute())
        store = _stores.FileStore(str(place / _STORE), size)
        others = {rank: _start(place, rank, size, threads) for rank in range(1, size)}
        try:
            with joined(store, 0, size, 0, threads, lambda: _last_words(others, place)) as world:
                yield world
        finally:
            _end(others)


def _threads(config: Config, size: int) -> int:
    """CPU threads of each process: as many as there are cores for, unless the configuration says it."""
    cores = machine.cores()
    threads = config.runtime.threads or machine.threads_each(size)
    if machine.resolve(config.runtime.device).type == "cpu" and size * threads > cores:
        raise UserError(
            f"runtime.processes is {size}, with runtime.threads={threads} for each: "
            f"expected at most as many in all as cores here, {cores}"
        )
    return threads


def _loopback() -> str:
    """The network interface that leads to this machine alone."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _start(place: Path, rank: int, size: int, threads: int) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-P", "-m", "posbench.launch.ranks", str(place), str(rank), str(size), str(threads)]
    with _output(place, rank).open("wb") as output:
        return subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,  # Ctrl-C reaches them through the first
        )


def _output(place: Path, rank: int) -> Path:
    return place / f"rank-{rank}.log"


def _last_words(others: "dict[int, subprocess.Popen[bytes]]", place: Path) -> str | None:
    """Why the first process failed, of those that did; None if none did."""
    for rank, process in others.items():
        who = f"rank {rank} of {len(others) + 1}"
        if process.poll() is not None and process.returncode < 0:
            return f"{who} was killed by {signal.Signals(-process.returncode).name}"
        if process.returncode:
            lines = _output(place, rank).read_text(encoding="utf-8", errors="replace").splitlines()
            said = next((line.removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
            return f"{who} ended with exit code {process.returncode}: {said}"
    return None


def _end(others: "dict[int, subprocess.Popen[bytes]]") -> None:
    until = time.monotonic() + _END_SECONDS
    for process in others.values():
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _be_one() -> None:
    """Be one of the processes that `_start` starts, which gives it these arguments."""
    place = Path(sys.argv[1])
    rank, size, threads, parent = map(int, sys.argv[2:])
    end_after(lambda: wait_for_parent(parent))
    machine.keep_freed_memory()
    config = load_saved(place / _CONFIG)
    with joined(_stores.FileStore(str(place / _STORE), size), rank, size, rank, threads) as world:
        if (place / _RUN).exists():
            evaluate_beside((place / _RUN).resolve(), config, world)
        else:
            train_beside(config, world)


if __name__ == "__main__":
    exits.tolerant_output()
    sys.exit(exits.run(_be_one))
