"""The processes of a run: one, those that torchrun or srun started, or those that are started here."""

import contextlib
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import yaml

from posbench import machine
from posbench.config.overrides import Asked
from posbench.config.schema import Config, load_saved, to_container
from posbench.errors import InUse, PosbenchError, RunFailed, Stopped, UserError
from posbench.evaluation.job import evaluate_run
from posbench.launch.plans import Plan
from posbench.processes import PeerLost, joined
from posbench.run_folder.folder import Run, load_config
from posbench.terminal import console, exits
from posbench.terminal.signals import end_after, stop_signals, wait_for_parent
from posbench.training.train import train

_GRACE_SECONDS = 20.0  # for the others, once a rank has failed; a little more than W&B gets


def train_together(plan: Plan, restart: bool = False) -> bool:
    """Train and evaluate a plan in all processes that its run has; arguments and errors are those of `train.train`.

    Returns:
        Whether this process is to show the results.
    """
    config, command, asked = plan.config, list(plan.command), plan.config.runtime.processes or 1
    if place := _given_place(asked):
        rank, size, *_ = place
        if config.runtime.processes not in (None, size):
            raise UserError(f"runtime.processes is {asked}, but {size} processes were started")
        config.training.refuse_uneven(size)
        if rank > 0:
            logging.getLogger("posbench").handlers = [logging.NullHandler()]
        with joined(*place) as world:
            train(config, plan.folder, command, restart, world)
        return rank == 0
    if asked == 1:
        train(config, plan.folder, command, restart)
    else:
        start(config, asked, plan.folder, ["restart" if restart else "train", *command])
    return True


def evaluate_together(folder: Path, asked: Asked) -> None:
    """Evaluate a finished run in as many processes of this machine as were asked for; errors are `evaluate_run`'s."""
    size = asked.processes or 1
    if size == 1:
        evaluate_run(folder, asked)
        return
    config = load_config(folder)
    device, threads = asked.device or config.runtime.device, asked.threads or config.runtime.threads
    runtime = dataclasses.replace(config.runtime, device=device, threads=threads)
    start(dataclasses.replace(config, evaluation=asked.settings, runtime=runtime), size, folder, ["evaluate"])


def _given_place(asked: int) -> tuple[int, int, int, str] | None:
    """Return what `joined` takes, where torchrun or srun started this process as one of several; else None."""
    env = os.environ
    if "RANK" in env and int(env.get("WORLD_SIZE", "1")) > 1:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")), "env://"
    if asked == 1 or int(env.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return None
    host = "127.0.0.1"
    if env.get("SLURM_STEP_NUM_NODES") != "1":
        command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
        host = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    port = 20_000 + (31 * int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 10_000
    rank, size, local_rank = (int(env[name]) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"))
    return rank, size, local_rank, f"tcp://{host}:{port}"


def start(config: Config, size: int, folder: Path, task: list[str]) -> None:
    """Train or evaluate in so many ranks of this machine, and wait for them. Signals are passed on.

    Args:
        task: `train` or `restart`, with the command for the record; or `evaluate`.

    Raises:
        PosbenchError: what the rank raised that failed first, or that it was killed. The others were ended.
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    environment = {**interfaces, **os.environ, "OMP_NUM_THREADS": str(_threads(config, size))}
    quiet = None if os.environ.get(exits.DEBUG) == "1" else subprocess.DEVNULL  # the ranks beyond the first
    # A session of its own for each: Ctrl-C reaches them from here.
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": environment, "start_new_session": True}
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="posbench-") as shared, stop_signals() as received:
        Path(shared, "config.yaml").write_text(yaml.safe_dump(to_container(config)), encoding="utf-8")
        try:
            for rank in range(size):
                words = [shared, str(rank), str(size), str(os.getpid()), str(folder), *task]
                command = [sys.executable, "-P", "-m", "posbench.launch.ranks", *words]
                output = quiet if rank else None
                ranks.append(subprocess.Popen(command, stdout=output, stderr=output, **options))
            passed_on, until = 0, math.inf
            while any([one.poll() is None for one in ranks]) and time.monotonic() < until:
                for number in received[passed_on:]:
                    passed_on += 1
                    for one in ranks:
                        one.send_signal(number)
                if any(one.returncode for one in ranks):
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
                time.sleep(0.05)
            codes = [one.returncode for one in ranks]  # None: it waits for one that has failed, as NCCL does
        finally:
            for one in ranks:
                one.kill()
                one.wait()
        errors = [
            _error(Path(shared, f"{rank}.json"), rank, codes, received) for rank, code in enumerate(codes) if code
        ]
    if errors:
        by_rank_0, error = min(errors, key=lambda known: isinstance(known[1], PeerLost))
        if task != ["evaluate"] and not by_rank_0:  # which has recorded its own
            with contextlib.suppress(UserError, OSError), Run.open(folder, config, command=None) as run:
                run.ended_by(error)
        raise error


def _error(path: Path, rank: int, codes: list[int], received: list[int]) -> tuple[bool, PosbenchError]:
    """Return the error that ended a rank, from what `main` wrote; and whether rank 0 itself has raised it."""
    who, code = f"rank {rank} of {len(codes)}", codes[rank]
    if not path.exists():
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        error = Stopped(received[0], "stopped before it could save") if received else RunFailed(f"{who} {how}")
        error.exit_code = 128 - code if code < 0 else code
        return False, error
    kind, text, reason = json.loads(path.read_bytes())
    if code > 128:
        return rank == 0, Stopped(code - 128, text)
    text = f"{who}: {text}" if rank else text
    kinds: dict[str, type[PosbenchError]] = {"InUse": InUse, "PeerLost": PeerLost}
    if code == UserError.exit_code or kind in kinds:
        return rank == 0, kinds.get(kind, UserError)(text)
    return rank == 0, RunFailed(text, reason)


def _threads(config: Config, size: int) -> int:
    """Return the CPU threads of each rank: the cores are shared, unless the configuration says it.

    Raises:
        UserError: this machine has not so many cores or GPUs.
    """
    cores, threads = machine.cores(), config.runtime.threads or machine.threads_each(size)
    device = machine.resolve(config.runtime.device)
    if device.type == "cpu" and size * threads > cores:
        raise UserError(
            f"runtime.processes is {size}, with runtime.threads={threads} for each: "
            f"expected at most as many in all as cores here, {cores}"
        )
    if device.type == "cuda" and size > (gpus := torch.cuda.device_count()):
        raise UserError(f"{size} processes on this machine need a GPU each, it has {gpus}: expected at most {gpus}")
    return threads


def main() -> int:
    """Be a rank that `start` started, which reports what ends it; returns the exit code."""
    shared, (rank, size, parent), folder = Path(sys.argv[1]), map(int, sys.argv[2:5]), Path(sys.argv[5])
    task, *command = sys.argv[6:]
    end_after(lambda: wait_for_parent(parent))
    machine.keep_freed_memory()
    if rank == 0:
        console.log_to_terminal()
    try:
        config = load_saved(shared / "config.yaml")
        with joined(rank, size, rank, f"file://{shared}/store") as world:
            if task == "evaluate":
                asked = Asked(config.evaluation, config.runtime.device, config.runtime.threads)
                evaluate_run(folder, asked, world)
            else:
                train(config, folder, command, task == "restart", world)
        return 0
    except BaseException as error:
        if os.environ.get(exits.DEBUG) == "1":
            traceback.print_exception(error)
        text, code = exits.described(error)
        known = [type(error).__name__, text, getattr(error, "reason", "error")]
        (shared / f"{rank}.json").write_text(json.dumps(known), encoding="utf-8")
        return code


if __name__ == "__main__":
    exits.tolerant_output()
    sys.exit(main())
