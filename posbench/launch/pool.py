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
from typing import NamedTuple, NoReturn

import torch

from posbench.config.schema import to_container
from posbench.errors import InUse, PosbenchError, Stopped, UserError
from posbench.evaluation.evaluate import keys_of
from posbench.launch.plans import Plan
from posbench.run import RECORD
from posbench.run.folder import ADDING, Run, load_config, other_code
from posbench.run.rows import PLAIN, evaluation_rows, every_row, training_rows
from posbench.run.saved import RunRecord, load_record
from posbench.terminal import console, exits
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


WAITING = Status("waiting")
IN_USE = Status("in use")
RUNNING = Status("running")
DONE = Status("done")


class _Begun(NamedTuple):
    """A plan that is worked on."""

    plan: Plan
    process: BaseProcess
    slot: dict[str, str]
    old_record: RunRecord | None  # `run.json` before the process started


def record_of(plan: Plan) -> RunRecord | None:
    """Return the run's `run.json`; None if it is missing or cannot be read."""
    try:
        return load_record(plan.folder)
    except UserError:
        return None


def warn_of_other_code(todo: list[Plan]) -> None:
    """Warn of each encoding, if not ours, whose file has changed since a run began."""
    lines = []
    for plan in todo:
        recorded = record_of(plan)
        if recorded:
            lines += other_code(plan.config, recorded)
    for line in dict.fromkeys(lines):
        logger.warning("%s", line)


def begun(todo: list[Plan]) -> list[Path]:
    """Return the folders of the runs that have begun."""
    return [plan.folder for plan in todo if (plan.folder / RECORD).is_file()]


def is_trained(plan: Plan) -> bool:
    """Return whether a run of these weights is done, perhaps with other evaluation
    settings.
    """
    recorded = record_of(plan)
    if recorded is None:
        return False
    return (recorded.status, recorded.id) == ("done", plan.config.id)


def is_finished(plan: Plan) -> bool:
    """Return whether nothing is left to do. If evaluation settings changed, or the
    folder is not whole, the run decides what is missing.
    """
    if not is_trained(plan):
        return False
    wanted = to_container(plan.config)["evaluation"]
    try:
        trained_with = load_config(plan.folder)
        evaluated = load_record(plan.folder).evaluated
        rows = every_row(plan.folder)
    except UserError:
        return False
    # A command that is repeated takes back nothing that another one has added since.
    settings = (evaluated, to_container(trained_with)["evaluation"])
    existing = {row.key for row in rows}
    existing -= {row.key for row in rows if row.is_to_repeat}
    return wanted in settings and keys_of(plan.config) <= existing


def unfinished(todo: Iterable[Plan]) -> list[Plan]:
    """Return the plans that something is left to do for."""
    return [plan for plan in todo if not is_finished(plan)]


def loss_at_train_length(plan: Plan) -> float | None:
    """Return a trained run's nats per token at the training length (of a task, at its
    longest trained problems).
    """
    settings = plan.config.evaluation
    wanted = (settings.protocols[0], settings.split, plan.config.training.steps, 1)
    for row in evaluation_rows(plan.folder):
        found = (row.protocol, row.split, row.checkpoint_step, row.length_ratio)
        is_plain = (
            row.variant == PLAIN and not row.offset and ":" not in (row.task or "")
        )
        if found == wanted and is_plain and row.measured:
            return row.nll
    return None


def status_line(plan: Plan, state: Status, todo: list[Plan]) -> str:
    """Return a line on a run: its loss if it is done, else the words that tell it from
    the others, and the reason.
    """
    if state == DONE:
        loss = loss_at_train_length(plan)
        if loss is None:
            return f"{plan.id} done"
        return f"{plan.id} done: {loss:.4f} nats/token at 1x"
    shared = set(plan.command)
    for other in todo:
        shared &= set(other.command)
    differing = " ".join(word for word in plan.command if word not in shared)
    line = plan.id
    if differing:
        line += f" [{differing}]"
    line += f" {state.name}"
    if state.reason:
        line += f" ({state.reason}): {state.message or ''}"
    return line


def raise_unfinished(todo: list[Plan], status: Mapping[str, Status]) -> None:
    """Log what became of each run that is not done, and raise PosbenchError if there
    are any.
    """
    failed = []
    for plan in todo:
        state = status[plan.id]
        if state != DONE:
            failed.append(plan.id)
            logger.error("not done: %s", status_line(plan, state, todo))
    if failed:
        names = ", ".join(failed)
        total = console.plural(len(status), "run")
        raise PosbenchError(f"{len(failed)} of {total} not done: {names}")


def run(
    todo: list[Plan], slots: list[dict[str, str]], work: Callable[[Plan], object]
) -> dict[str, Status]:
    """Do the work of plans, one at a time per slot, a slot being environment variables.
    Return each status by run id.

    Raises Stopped after SIGINT or SIGTERM: the runs were asked to save and have ended;
    the same sweep continues.
    """
    pool = _Pool(todo, slots, work)
    with stop_signals() as received:
        while pool.running or (pool.waiting and not received):
            while pool.free and pool.waiting and not received:
                pool.begin_next()
            pool.collect(received)
            pool.pass_on(received)
            pool.log_progress()
    if received:
        name = signal.Signals(received[0]).name
        raise Stopped(
            received[0],
            f"stopped by {name}; the same sweep continues from what has been saved",
        )
    return pool.status


class _Pool:
    """The plans that wait, those that are worked on, and the status of all."""

    def __init__(
        self,
        todo: list[Plan],
        slots: list[dict[str, str]],
        work: Callable[[Plan], object],
    ) -> None:
        self.todo = todo
        self.work = work
        self.free = list(slots)
        self.waiting = unfinished(todo)
        self.running: list[_Begun] = []
        self.status = {plan.id: DONE for plan in todo}
        self.status |= {plan.id: WAITING for plan in self.waiting}
        self._n_passed_on = 0
        self._next_line = time.monotonic() + _LINE_EVERY_SECONDS

    def begin_next(self) -> None:
        """Start a process for the first plan that waits, in the first free slot."""
        plan = self.waiting.pop(0)
        slot = self.free.pop(0)
        old_record = record_of(plan)
        plan.output.parent.mkdir(parents=True, exist_ok=True)
        job = functools.partial(self.work, plan)
        process = start_process(FORKED, job, slot, plan.output)
        self.running.append(_Begun(plan, process, slot, old_record))
        self._note(plan, RUNNING)

    def collect(self, received: Sequence[int]) -> None:
        """Wait for half a second or until a process ends, and note what became of each
        that has ended.
        """
        sentinels = [begun.process.sentinel for begun in self.running]
        ended = multiprocessing.connection.wait(sentinels, timeout=0.5)
        for begun in list(self.running):
            if begun.process.sentinel in ended:
                begun.process.join()
                self.running.remove(begun)
                self.free.append(begun.slot)
                code = begun.process.exitcode or 0
                state = outcome(begun.plan, code, begun.old_record, received)
                self._note(begun.plan, state)

    def pass_on(self, received: Sequence[int]) -> None:
        """Pass new signals on: the first lets the runs save, a second one does not."""
        for number in received[self._n_passed_on :]:
            self._n_passed_on += 1
            sent = number if self._n_passed_on == 1 else signal.SIGKILL
            send_signal([begun.process for begun in self.running], sent)

    def log_progress(self) -> None:
        """Log now and then how many runs are done, failed and so on, and the step of
        each that is running.
        """
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + _LINE_EVERY_SECONDS
        counts = Counter(state.name for state in self.status.values())
        line = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        logger.info("%s", line)
        for begun in self.running:
            step = 0
            with contextlib.suppress(UserError):  # the run mends what is spoilt
                for row in training_rows(begun.plan.folder):
                    step = row["step"]
            total = begun.plan.config.training.steps
            logger.info("  %s: step %s of %s", begun.plan.id, step, total)

    def _note(self, plan: Plan, state: Status) -> None:
        self.status[plan.id] = state
        logger.info("%s", status_line(plan, state, self.todo))


def outcome(
    plan: Plan, code: int, old_record: RunRecord | None, received: Sequence[int] = ()
) -> Status:
    """Return the outcome of a run whose process ended with a code, and write it into
    `run.json` if the process did not.

    `old_record`: `run.json` before the process started; `received`: the signals that
    made this process stop it.
    """
    # code of the user may end the process with 0
    if code == 0 and is_trained(plan):
        return DONE
    if code == InUse.exit_code:
        return IN_USE

    recorded = record_of(plan)
    # a record whose attempt has not ended has the reason None, or ADDING if rows are
    # added to a finished run
    has_end = recorded is not None and recorded.reason not in (None, ADDING)
    if recorded and has_end and recorded != old_record:
        # a run that is done stays so in its record: only the reason tells
        name = "stopped" if recorded.status == "stopped" else "failed"
        return Status(name, recorded.reason, recorded.message)

    if received:
        status = Status("stopped", "signal", "stopped before it could save")
    elif code < 0:
        message = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            message += ", perhaps since memory ran out"
        status = Status("failed", "signal", message)
    else:
        message = last_error(plan.output) or f"ended with exit code {code}"
        status = Status("failed", "error", message)
    with (
        contextlib.suppress(PosbenchError, OSError),
        Run.open(plan.folder, plan.config, list(plan.command)) as run,
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
        os.environ.pop(exits.QUIET, None)  # a log is not read as it grows
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    exits.tolerant_output()
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
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
    """Return the error line that a process printed, or else its last line, named so."""
    if not output.is_file():
        return ""
    text = output.read_text(encoding="utf-8", errors="replace")
    last = ""
    for line in text.splitlines():
        is_error = line.startswith("error: ")
        if line.strip() and (is_error or not last.startswith("error: ")):
            last = line
    if last and not last.startswith("error: "):
        return f"it said last: {last}"
    return last.removeprefix("error: ")
