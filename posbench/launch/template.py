"""A process that has imported what every job imports, and forks the jobs.

The imports take four to five CPU seconds, a tenth of a run of half a minute. Forked processes have them at once and
share their memory. Linux only: elsewhere loaded libraries may not survive a fork.

The template receives jobs and signals over a socket: a job has a number and the file for its output. It sends back exit
codes. It ends when the socket closes; its jobs then save and end.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any, Protocol

_IMPORTED = (
    "scipy.special",
    "torch._dynamo",  # as arithmetic on shapes does, by which some encodings are sized
    "posbench.launch.ranks",
    "posbench.evaluation.curve",
    "posbench.terminal.console",
)
_LONGEST = 2**18  # bytes of a message: more than such a socket sends at once, so none is ever cut


class Process(Protocol):
    """A job's process, however it was started."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, if it has not ended."""


class Template:
    """The template, as seen by the process that starts jobs."""

    def __init__(self) -> None:
        self._forked: list[Forked] = []
        self._process: subprocess.Popen[bytes] | None = None  # none is there before there is a job for it
        self._is_gone = True

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._is_gone = False

    def start(self, arguments: list[str], environment: Mapping[str, str], output: IO[bytes]) -> "Forked":
        """Start `python -m posbench.launch.job` with these arguments, and with variables beside this process's own.

        Its parent is the template, of which it is told. It is a session of its own.
        """
        if self._is_gone:
            self.close()
            self._begin()
        forked = Forked(self, len(self._forked))
        self._forked.append(forked)
        self._send({"number": forked.number, "arguments": arguments, "environment": dict(environment)}, output)
        return forked

    def close(self) -> None:
        """End the template. Jobs that still run save and end."""
        if self._process:
            self._socket.close()
            self._process.wait()

    def _send(self, order: dict[str, Any], *files: IO[bytes]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # which `_look` finds
            socket.send_fds(self._socket, [json.dumps(order).encode()], [file.fileno() for file in files])

    def _look(self) -> None:
        """Read its messages."""
        while not self._is_gone and select.select([self._socket], [], [], 0)[0]:
            try:
                told = self._socket.recv(_LONGEST)
            except ConnectionResetError:
                told = b""
            if told:
                ended = json.loads(told)
                self._forked[ended["number"]].returncode = ended["code"]
            else:
                self._is_gone = True
                for forked in self._forked:  # as it fared, for all that is known
                    forked.returncode = -signal.SIGKILL if forked.returncode is None else forked.returncode


class Forked:
    """A job's process, a `Process`."""

    def __init__(self, template: Template, number: int) -> None:
        self.returncode: int | None = None
        self.number = number
        self._template = template

    def poll(self) -> int | None:
        self._template._look()
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        self._template._send({"number": self.number, "signal": number})


@contextlib.contextmanager
def opened() -> Iterator[Template | None]:
    """A template, or None if jobs cannot be forked here."""
    if not _is_possible():
        yield None
        return
    template = Template()
    try:
        yield template
    finally:
        template.close()


def _is_possible() -> bool:
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # a kernel before 5.3, or a sandbox
        return False
    return True


# -- the process itself ------------------------------------------------------------------------------------------------


def _serve(channel: socket.socket) -> None:
    """Start jobs, forward signals and report exits until the socket closes. Does not return in a job's process."""
    own = os.getpid()
    jobs: dict[int, tuple[int, int]] = {}  # by number: the process, and a descriptor that is ready at its end
    while True:
        ready, _, _ = select.select([channel.fileno(), *(ended for _, ended in jobs.values())], [], [])
        for number, (process, ended) in list(jobs.items()):
            if ended in ready:
                _, status = os.waitpid(process, 0)
                os.close(ended)
                del jobs[number]
                told = json.dumps({"number": number, "code": os.waitstatus_to_exitcode(status)}).encode()
                with contextlib.suppress(BrokenPipeError):  # the sweep is gone
                    channel.send(told)
        if channel.fileno() not in ready:
            continue
        message, files, _, _ = socket.recv_fds(channel, _LONGEST, 1)
        if not message:
            return
        order = json.loads(message)
        if "signal" not in order:
            process = os.fork()
            if not process:
                for _, ended in jobs.values():
                    os.close(ended)
                channel.close()
                _run(order["arguments"], order["environment"], files[0], own)
            os.close(files[0])
            jobs[order["number"]] = process, os.pidfd_open(process)
        elif order["number"] in jobs:
            signal.pidfd_send_signal(jobs[order["number"]][1], order["signal"])


def _run(arguments: list[str], environment: dict[str, str], output: int, parent: int) -> None:
    """Run a job in this forked process.

    Args:
        output: a descriptor.
        parent: process id of the template, taken before the fork: afterwards the template may be gone.
    """
    from posbench.launch import job

    os.setsid()
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.update(environment)
    sys.argv = ["posbench.launch.job", *arguments, "--parent", str(parent)]
    job.as_process()


def main() -> None:
    """Import, then serve the socket whose descriptor is the argument."""
    for name in _IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _serve(channel)
