"""SIGINT and SIGTERM, collected so that what is running can save itself first."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM so that the current step ends and is saved; a second SIGINT stops at once."""
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
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
