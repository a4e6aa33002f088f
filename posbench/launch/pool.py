"""Run plans in processes, several at a time: a crash or a kill of one takes no other
with it.

Each process has a session of its own; it saves its run and ends if its parent ends. The
outcome of a run is in its `run.json`. If a process died before it could write that, it
is written here.
"""

import atexit
import contextlib
import functools
import logging
import multiprocessing.connection
import os
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from posbench import machine
from posbench.config.schema import to_container
from posbench.errors import InUse, PosbenchError, Stopped, UserError
from posbench.launch.plans import Plan
from posbench.run.rows import PLAIN, evaluation_rows, training_rows
from posbench.run.run import ADDING, Run, load_config, load_record
from posbench.terminal import exits
from posbench.terminal.signals import exit_when_parent_exits, stop_signals

logger = logging.getLogger(__name__)
SPAWNED = multiprocessing.get_context("spawn")
# Forks of a server that has imported `preload`. Only on Linux do loaded libraries
# survive a fork.
FORKED: BaseContext = multiprocessing.get_context(
    "forkserver" if sys.platform == "linux" else "spawn"
)
FORKED.set_forkserver_preload(["posbench.launch.preload"])
_LINE_EVERY_SECONDS = 30.0


class Status(NamedTuple):
    """The state of a run."""

    name: str  # waiting, in use, running, done, failed, stopped
    reason: str | None = None  # as in run.json
    message: str | None = None


WAITING, IN_USE, RUNNING, DONE = (
    Status("waiting"),
    Status("in use"),
    Status("running"),
    Status("done"),
)


def record(plan: Plan) -> dict[str, Any]:
    """Return the run's `run.json`; empty if it is missing or cannot be read."""
    try:
        return load_record(plan.folder)
    except UserError:
        return {}


def is_trained(plan: Plan) -> bool:
    """Return whether a run of these weights is done, perhaps with other evaluation
    settings.
    """
    return record(plan).get("status") == "done"


def is_finished(plan: Plan) -> bool:
    """Return whether nothing is left to do. If evaluation settings changed, the run
    decides what is missing.
    """
    wanted = to_container(plan.config)["evaluation"]
    latest = record(plan).get("evaluated")
    try:
        return is_trained(plan) and wanted in (
            latest,
            to_container(load_config(plan.folder))["evaluation"],
        )
    except UserError:
        return False


def loss_at_train_length(plan: Plan) -> float | None:
    """Return a trained run's nats per token at the training length (of a task, at its
    longest trained problems).
    """
    settings = plan.config.evaluation
    wanted = (settings.protocols[0], settings.split, plan.config.training.steps, 1)
    for row in evaluation_rows(plan.folder):
        found = (row.protocol, row.split, row.checkpoint_step, row.length_ratio)
        is_plain = row.kind == PLAIN and not row.offset and ":" not in (row.task or "")
        if found == wanted and is_plain and row.measured:
            return row.nll
    return None


def log_progress(todo: list[Plan], status: Mapping[str, Status]) -> None:
    """Log how many runs are done, failed and so on, and the step of each that is
    running.
    """
    counts = Counter(state.name for state in status.values())
    logger.info("%s", ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    for plan in todo:
        if status[plan.id] == RUNNING:
            row = (training_rows(plan.folder) or [{"step": 0}])[-1]
            total = plan.config.training.steps
            logger.info("  %s: step %s of %s", plan.id, row["step"], total)


def status_line(plan: Plan, state: Status, todo: list[Plan]) -> str:
    """Return a line on a run: its loss if it is done, else the words that tell it from
    the others, and the reason.
    """
    if state == DONE:
        loss = loss_at_train_length(plan)
        if loss is None:
            return f"{plan.id} done"
        return f"{plan.id} done: {loss:.4f} nats/token at the training length"
    shared = set[str].intersection(*(set(other.command) for other in todo))
    differing = " ".join(word for word in plan.command if word not in shared)
    line = f"{plan.id} [{differing}] {state.name}"
    if state.reason:
        line += f" ({state.reason}): {state.message or ''}"
    return line


def run(
    todo: list[Plan], slots: list[dict[str, str]], work: Callable[[Plan], object]
) -> dict[str, Status]:
    """Do the work of plans, one at a time per slot, a slot being environment variables.
    Return each status by run id.

    Raises Stopped after SIGINT or SIGTERM: the runs were asked to save and have ended;
    the same sweep continues.
    """
    status = {plan.id: DONE if is_finished(plan) else WAITING for plan in todo}
    waiting, free = [plan for plan in todo if status[plan.id] == WAITING], list(slots)
    # by the process's sentinel
    running: dict[int, tuple[BaseProcess, Plan, dict[str, str], dict[str, Any]]] = {}
    forwarded, next_line = 0, time.monotonic() + _LINE_EVERY_SECONDS

    with stop_signals() as received:
        while running or (waiting and not received):
            while free and waiting and not received:
                plan, slot = waiting.pop(0), free.pop(0)
                old_record = record(plan)
                plan.output.parent.mkdir(parents=True, exist_ok=True)
                process = start_process(
                    FORKED, functools.partial(work, plan), slot, plan.output
                )
                running[process.sentinel] = process, plan, slot, old_record
                status[plan.id] = RUNNING
                logger.info("%s", status_line(plan, RUNNING, todo))
            # then look for signals
            for ended in multiprocessing.connection.wait(list(running), timeout=0.5):
                process, plan, slot, old_record = running.pop(ended)  # type: ignore[arg-type]
                process.join()
                free.append(slot)
                status[plan.id] = outcome(
                    plan, process.exitcode or 0, old_record, received
                )
                logger.info("%s", status_line(plan, status[plan.id], todo))
            for number in received[forwarded:]:
                forwarded += 1  # the first signal lets them save, the second does not
                send_signal(
                    (process for process, *_ in running.values()),
                    number if forwarded == 1 else signal.SIGKILL,
                )
            if time.monotonic() > next_line:
                next_line = time.monotonic() + _LINE_EVERY_SECONDS
                log_progress(todo, status)
    if received:
        name = signal.Signals(received[0]).name
        raise Stopped(
            received[0],
            f"stopped by {name}; what was running has saved itself, the same sweep"
            " continues",
        )
    return status


def outcome(
    plan: Plan, code: int, old_record: dict[str, Any], received: Sequence[int] = ()
) -> Status:
    """Return the outcome of a run whose process ended with a code, and write it into
    `run.json` if the process did not.

    `old_record`: `run.json` before the process started; `received`: the signals that
    made this process stop it.
    """
    if code in (0, InUse.exit_code):
        return IN_USE if code else DONE
    recorded = record(plan)
    # it was the process that wrote it
    if recorded != old_record and recorded.get("reason") not in (None, ADDING):
        # a run that is done stays so in its record
        name = "stopped" if recorded["status"] == "stopped" else "failed"
        return Status(name, recorded["reason"], recorded["message"])
    if received:
        status = Status("stopped", "signal", "stopped before it could save")
    elif code < 0:
        memory = ", perhaps since memory ran out" if code == -signal.SIGKILL else ""
        status = Status(
            "failed", "signal", f"killed by {signal.Signals(-code).name}{memory}"
        )
    else:
        status = Status(
            "failed", "error", last_error(plan.output) or f"ended with exit code {code}"
        )
    with (
        contextlib.suppress(PosbenchError, OSError),
        Run.open(plan.folder, plan.config, command=None) as run,
    ):
        run.finish(*status)
    return status


def start_process(
    context: BaseContext,
    work: Callable[[], object],
    environment: Mapping[str, str],
    output: Path | None,
) -> BaseProcess:
    """Start a process that does `work`, which is pickled, and ends with its exit code;
    its prints go to `output`.
    """
    # or Python would import from the current folder, which may be a stranger's
    os.environ["PYTHONSAFEPATH"] = "1"
    arguments = (work, os.environ | environment, output)
    process: BaseProcess = context.Process(target=_run, args=arguments)  # type: ignore[attr-defined]
    main = sys.modules["__main__"]
    # or the caller's script would run again
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
    return process


def _run(
    work: Callable[[], object], environment: Mapping[str, str], output: Path | None
) -> NoReturn:
    os.setsid()  # Ctrl-C reaches it once, through its parent
    os.environ.clear()  # the fork server may be older than a variable
    os.environ.update(environment)
    parent = multiprocessing.parent_process()
    assert parent
    exit_when_parent_exits(parent.join)
    if output:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    exits.tolerant_output()
    machine.set_threads(int(environment["OMP_NUM_THREADS"]))
    code = exits.run(work)
    atexit._run_exitfuncs()  # multiprocessing does not call them
    sys.exit(code)


def send_signal(processes: Iterable[BaseProcess], number: int) -> None:
    """Send a signal to those of the processes that have not ended."""
    for process in processes:
        if process.exitcode is None and process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)


def last_error(output: Path) -> str:
    """Return the error line that a process printed, or else its last line."""
    if not output.is_file():
        return ""
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error: ")]
    last = (errors or lines or [""])[-1]
    return last.removeprefix("error: ")
