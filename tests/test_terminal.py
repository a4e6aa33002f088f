"""What goes to the terminal: whoever cannot see Unicode is shown none."""

import io

import pytest
from rich.console import Console

from posbench.terminal import console


def on(encoding: str) -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))


def test_unicode_is_drawn_only_where_every_sign_of_it_can_be_written() -> None:
    assert [
        console.carries_unicode(on(encoding))
        for encoding in ("utf-8", "ascii", "cp437")
    ] == [True, False, False]


def test_plain_lines_say_how_long_training_will_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console, "stderr", on("utf-8"))
    caplog.set_level("INFO")
    with console.progress(total=100, start=40) as progress:
        for step in range(41, 101):
            now += 2.0
            progress.advance(3.0, step * 1000)
    first, second, *_, last = caplog.messages
    # no speed, no time left: both are counted from here
    assert first == "step 41/100  loss 3.000"
    assert second == "step 46/100  loss 3.000  500 tokens/s  0:01:48 left"
    assert last == "step 100/100  loss 3.000  500 tokens/s"
