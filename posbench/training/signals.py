"""SIGINT and SIGTERM, collected so that what is running can save itself first."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals(second_interrupts: bool = False) -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM as they come; outside of the main thread none come.

    Args:
        second_interrupts: a SIGINT after the first signal raises KeyboardInterrupt instead.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received and second_interrupts and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    handled = (signal.SIGINT, signal.SIGTERM)
    try:
        before = {number: signal.signal(number, on_signal) for number in handled}
    except ValueError:  # not the main thread: whoever owns it owns the signals
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
