"""What goes to the terminal."""

import io
import sys

import pandas as pd
import pytest
from rich.console import Console

from posbench.reports.render import Column, Table
from posbench.terminal import console, exits


def on(encoding: str) -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "1.2 ±0.3 ▇▇"), ("latin-1", "1.2 ±0.3 ??"), ("ascii", "1.2 ?0.3 ??")],
)
def test_no_terminal_fails_for_a_sign_that_it_does_not_have(
    monkeypatch, encoding, shown
):
    stream = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, encoding=encoding))
    exits.tolerant_output()

    frame = pd.DataFrame({"loss": ["1.2 ±0.3 ▇▇"]})
    Table("título", frame, [Column("loss", "loss")]).print(console.stdout())
    print("─", flush=True)

    assert shown in stream.getvalue().decode(encoding)


def test_plain_lines_say_how_long_training_will_take(monkeypatch, caplog):
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
