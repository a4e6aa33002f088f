"""Signals that would end a process: collected so that training can save first, or
turned into an error line.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from posbench.errors import Stopped

_GRACE_SECONDS = 60.0  # time to save after the parent has gone
# Signals that end a process by default; handlers and ignored signals (nohup, a
# launcher) stay in force.
_UNLESS_HANDLED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@contextlib.contextmanager
def stop_signals(second_interrupts: bool = False) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and others that would end the process; outside the main
    thread collect none.

    With `second_interrupts` a SIGINT after the first signal raises KeyboardInterrupt
    instead.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received and second_interrupts and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    with _handled((signal.SIGINT, signal.SIGTERM, *_ending_signals()), on_signal):
        yield received


class _Ended(BaseException):
    """A signal came. Like KeyboardInterrupt, not an Exception, so that error handlers
    do not swallow it.
    """


@contextlib.contextmanager
def signals_as_errors() -> Iterator[None]:
    """Raise Stopped at a signal that would end the process silently: for work that has
    nothing to save.
    """
    try:
        with _handled((signal.SIGTERM, *_ending_signals()), _raise):
            yield
    except _Ended as ended:
        name = signal.Signals(ended.args[0]).name
        message = (
            f"stopped by {name}; finished work is kept; repeat the command to continue"
        )
        raise Stopped(ended.args[0], message) from None


def _raise(number: int, frame: FrameType | None) -> None:
    raise _Ended(number)


def _ending_signals() -> list[signal.Signals]:
    ending = []
    for number in _UNLESS_HANDLED:
        if signal.getsignal(number) in (signal.SIG_DFL, _raise):
            ending.append(number)
    return ending


@contextlib.contextmanager
def _handled(
    numbers: tuple[signal.Signals, ...],
    handler: Callable[[int, FrameType | None], None],
) -> Iterator[None]:
    # Python sets handlers only there
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def exit_when_parent_exits(wait: Callable[[], object]) -> None:
    """Make this process save and end once `wait` returns, since its parent is gone
    then. Kill it if it does not end.
    """

    def end() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
