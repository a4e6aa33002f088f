"""Run a plan, or evaluate finished runs, in one process or in several. Every rank does the same; rank 0 writes.

`python -m posbench.launch.run CONFIG` is what torchrun, srun and `processes=N` start.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

from posbench import machine
from posbench.config.external import load_saved
from posbench.config.overrides import Asked, apply
from posbench.config.schema import Config, refuse_uneven, to_container
from posbench.errors import PosbenchError, RunFailed, Stopped, UserError
from posbench.evaluation import printed
from posbench.evaluation.job import evaluate_run
from posbench.launch import states
from posbench.launch.plans import Plan, plan
from posbench.processes import SHARED, PeerLost, joined, place
from posbench.run.rows import evaluation_rows, newest_of_split, on_shared_targets
from posbench.run.run import Run, load_config
from posbench.terminal import console, exits
from posbench.terminal.signals import exit_when_parent_exits, stop_signals, wait_for_parent
from posbench.training import train as training

_PARENT = "POSBENCH_PARENT"  # environment variable of a rank: the process that started it
_PEER_LOST = 76  # exit code of a rank that ended since another one had
_GRACE_SECONDS = 20.0  # for the others, once a rank has failed


def run(plan: Plan, restart: bool = False) -> None:
    """Train and evaluate, with log and curve on the terminal, in a process that does nothing else."""
    console.log_to_terminal()
    machine.keep_freed_memory()
    processes = plan.config.runtime.processes
    if (processes or 1) > 1 and place(processes) is None:
        start(plan.config, plan.folder, ["--restart"] * restart, plan.command)
    elif train(plan, restart):
        printed.print_results(plan.folder, plan.config.evaluation.split)


def train(plan: Plan, restart: bool = False) -> bool:
    """Train and evaluate a plan in this process, as one of several where torchrun, srun or `start` began it.

    Returns:
        Whether this process is to show the results.
    """
    processes, here = plan.config.runtime.processes, place(plan.config.runtime.processes)
    size = here.size if here else 1
    if processes not in (None, size):
        raise UserError(f"runtime.processes is {processes}, started were {size}: 'posbench train' starts several")
    refuse_uneven("training.batch_size", plan.config.training.batch_size, size, "processes")
    with joined(here) as world:
        if world.rank > 0:
            logging.getLogger("posbench").handlers = [logging.NullHandler()]
        training.train(plan.config, plan.folder, list(plan.command), restart, world)
    return world.rank == 0


def evaluate_runs(folders: list[Path], overrides: list[str]) -> None:
    """Evaluate finished runs one after the other and print their curves. A run that fails does not stop the others.

    Args:
        overrides: settings as they are typed, the same for all.

    Raises:
        UserError: a setting that one of the runs cannot meet; nothing was evaluated.
        PosbenchError: some runs were not evaluated; with a single one, its own error.
    """
    asked = {folder: apply(_as_far_as_measured(folder), overrides) for folder in folders}
    console.log_to_terminal()
    machine.keep_freed_memory()
    failed = []
    for folder, settings in asked.items():
        try:
            evaluate(folder, settings)
            printed.print_results(folder, settings.settings.split)
        except PosbenchError as error:
            if len(asked) == 1 or isinstance(error, Stopped):
                raise
            exits.report(error)
            failed.append(str(folder))
    if failed:
        raise PosbenchError(f"{len(failed)} of {len(asked)} runs not evaluated: {', '.join(failed)}")


def evaluate(folder: Path, asked: Asked) -> None:
    """Evaluate a finished run, in one process or in several."""
    if (asked.processes or 1) == 1:
        evaluate_run(folder, asked)
        return
    config = load_config(folder)
    given = {name: value for name, value in asked._asdict().items() if name != "settings" and value is not None}
    runtime = dataclasses.replace(config.runtime, **given)
    start(dataclasses.replace(config, evaluation=asked.settings, runtime=runtime), folder, ["--evaluate"])


def _as_far_as_measured(folder: Path) -> Config:
    """A run's configuration, with the lengths of its curve if a later evaluation took that farther.

    Without lengths of its own, what is asked for next is then measured at those, and pairs with the curve.
    """
    config = load_config(folder)
    rows = newest_of_split(evaluation_rows(folder), config.evaluation.split)
    measured = on_shared_targets([row for row in rows if row.curve_name == "fixed_target" and row.measured])
    ratios = tuple(sorted({row.length_ratio for row in measured}))
    if not ratios or ratios[-1] <= config.evaluation.ratios[-1]:
        return config
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=ratios))


# -- ranks of this machine ---------------------------------------------------------------------------------------------


def start(config: Config, folder: Path, options: list[str], command: tuple[str, ...] = ()) -> None:
    """Start the ranks of a run and wait for them. Signals are passed on; when one fails, the others are ended.

    Args:
        options: of `python -m posbench.launch.run`.
        command: the command line, for the record.

    Raises:
        SystemExit: rank 0 failed, and has said why.
        RunFailed: another rank failed, or one was killed: which, and why.
    """
    size = config.runtime.processes or 1
    on_gpus = machine.resolve(config.runtime.device).type == "cuda"
    if size > (most := torch.cuda.device_count() if on_gpus else machine.cores()):
        raise UserError(f"runtime.processes is {size}: this machine has {most} {'GPUs' if on_gpus else 'CPU cores'}")
    threads = config.runtime.threads or machine.threads_each(size)
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, threads=threads))
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    environment = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}", **os.environ}
    environment |= {"OMP_NUM_THREADS": str(threads), "WORLD_SIZE": str(size), _PARENT: str(os.getpid())}
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="posbench-") as shared, stop_signals() as received:
        Path(shared, "config.yaml").write_text(yaml.safe_dump(to_container(config)), encoding="utf-8")
        words = [f"{shared}/config.yaml", f"--run-dir={folder}", *options, "--command", *command]
        python = [sys.executable, "-P", "-m", "posbench.launch.run", *words]
        try:
            for rank in range(size):
                place = {**environment, SHARED: shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with open(f"{shared}/{rank}.log", "wb") as log:
                    output = log if rank else None
                    # In a session of its own: Ctrl-C reaches it from here.
                    process = subprocess.Popen(python, env=place, stdout=output, stderr=output, start_new_session=True)
                    ranks.append(process)
            passed_on, until = 0, math.inf
            while any([process.poll() is None for process in ranks]) and time.monotonic() < until:
                for number in received[passed_on:]:
                    passed_on += 1
                    for process in ranks:
                        process.send_signal(number)
                if any(process.returncode for process in ranks):
                    until = min(until, time.monotonic() + _GRACE_SECONDS)
                time.sleep(0.05)
            codes = [process.returncode for process in ranks]  # None: it waits for one that has failed, as NCCL does
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if not (failed := sorted((code == _PEER_LOST, rank, code) for rank, code in enumerate(codes) if code)):
            return
        _, rank, code = failed[0]
        why = states.last_words(Path(shared, f"{rank}.log"))
    if rank == 0 and code > 0:
        raise SystemExit(code)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed: {why}"
    error = RunFailed(f"rank {rank} of {size} {how}")
    error.exit_code = 128 - code if code < 0 else code
    if "--evaluate" not in options:
        with contextlib.suppress(UserError, OSError), Run.open(folder, config, command=None) as run:
            run.ended_by(error)  # rank 0 knows at most that another has ended
    raise error


# -- from a saved configuration ----------------------------------------------------------------------------------------


def main() -> None:
    """Run a saved configuration, alone or as one of several ranks."""
    parser = argparse.ArgumentParser(prog="python -m posbench.launch.run", description=main.__doc__)
    parser.add_argument("saved", type=Path, help="config.yaml of a run folder")
    parser.add_argument("--run-dir", type=Path, help="run folder (default: where the configuration belongs)")
    parser.add_argument("--restart", action="store_true", help="move an existing run aside and begin anew")
    parser.add_argument("--evaluate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if parent := os.environ.get(_PARENT):
        exit_when_parent_exits(lambda: wait_for_parent(int(parent)))
    config = load_saved(given.saved)
    if not isinstance(config, Config):
        raise UserError(f"{given.saved} is of a model from elsewhere: expected a run's")
    try:
        if given.evaluate:
            console.log_to_terminal()
            asked = Asked(config.evaluation, config.runtime.device, config.runtime.threads)
            with joined(place(config.runtime.processes)) as world:
                evaluate_run(given.run_dir, asked, world)
            return
        command = given.command or [sys.executable, "-m", "posbench.launch.run", str(given.saved)]
        run(plan(config, given.run_dir or config.folder, command), given.restart)
    except PeerLost:
        if parent:  # `start` says which one was lost, and why
            raise SystemExit(_PEER_LOST) from None
        raise


if __name__ == "__main__":
    exits.tolerant_output()
    sys.exit(exits.run(main))
