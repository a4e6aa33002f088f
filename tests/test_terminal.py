"""What goes to the terminal."""

import contextlib
import errno
import io
import sys

import pandas as pd
import pytest
from rich.console import Console
from support import posbench

from posbench import cli
from posbench.reports.render import Column, Table
from posbench.terminal import console, exits


def on(encoding: str) -> Console:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=file)


SHOWN = [("utf-8", "1.2 ±0.3 ▇▇"), ("latin-1", "1.2 ±0.3 ??"), ("ascii", "1.2 ?0.3 ??")]


@pytest.mark.parametrize(("encoding", "shown"), SHOWN)
def test_no_terminal_fails_for_a_sign_that_it_does_not_have(encoding, shown):
    stream = io.BytesIO()
    stdout = io.TextIOWrapper(stream, encoding=encoding)
    frame = pd.DataFrame({"loss": ["1.2 ±0.3 ▇▇"]})
    column = Column("loss", "loss")
    table = Table("título", frame, [column])

    with contextlib.redirect_stdout(stdout):
        exits.tolerant_output()
        table.print(console.stdout())
        print("─", flush=True)

    printed = stream.getvalue().decode(encoding)
    assert shown in printed


def test_a_full_disk_behind_the_output_is_one_line(capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with contextlib.redirect_stdout(Full()):
        code = posbench("list", "encodings")

    assert code == 1

    line = "error: cannot write all of the output: No space left on device\n"
    assert capsys.readouterr().err == line


def test_what_a_users_code_says_as_it_exits_is_the_error(capsys):
    code = exits.run(lambda: sys.exit("needs a table"))

    assert code == 1
    assert capsys.readouterr().err == "error: needs a table\n"


def test_a_python_without_docstrings_says_what_help_lacks(monkeypatch, capsys):
    monkeypatch.setattr(cli.main, "__doc__", None)

    assert posbench("--help") == 0

    printed = capsys.readouterr()
    assert printed.err.startswith("PYTHONOPTIMIZE=2 takes away what help says")
    assert "Usage: posbench" in printed.out


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose only entry is the time, and let the log have no terminal."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(console, "stderr", on("utf-8"))
    return now


def test_plain_lines_say_how_long_training_will_take(clock, caplog):
    caplog.set_level("INFO")
    with console.progress(total=100, start=40) as progress:
        for step in range(41, 101):
            clock[0] += 2.0
            progress.advance(3.0, step * 1000)
    first, second, *_, last = caplog.messages
    # no speed, no time left: both are counted from here
    assert first == "step 41/100  loss 3.000"
    assert second == "step 46/100  loss 3.000  500 tokens/s  0:01:48 left"
    assert last == "step 100/100  loss 3.000  500 tokens/s"


def test_a_known_peak_makes_the_speed_a_share_of_it(clock, caplog):
    caplog.set_level("INFO")
    with console.progress(total=2, start=0, full_speed=2000) as progress:
        progress.advance(3.0, 1000)
        clock[0] += 1.0
        progress.advance(3.0, 2000)
    assert caplog.messages[-1] == "step 2/2  loss 3.000  1,000 tokens/s  50% MFU"


def test_other_work_says_how_much_is_done_and_how_long_it_will_take(clock, caplog):
    caplog.set_level("INFO")
    work = console.Work(4000, "tokens %s of %s, %s left")
    work.add(500)  # too early for a line
    clock[0] += 11.0
    work.add(500)
    assert caplog.messages == ["tokens 1,000 of 4,000, 0:00:33 left"]


FITTING = [(11, [0, 1, 2]), (10, [0, 1]), (6, [0, 1]), (5, [1])]


@pytest.mark.parametrize(("room", "columns"), FITTING)
def test_columns_that_do_not_fit_are_dropped_in_order(room, columns):
    fitting = console.fitting_columns([2, 2, 3], [2, 0], room)
    assert fitting == columns


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_width_of_zero_is_no_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)

    assert console.stdout(file=io.StringIO()).width == 80
