"""What goes to the terminal: names are data, and whoever cannot see Unicode is shown none."""

import dataclasses
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from posbench.cli import listing
from posbench.evaluation import curve
from posbench.report import text
from posbench.show import characters, properties
from posbench.terminal import console, exits, tables

HOSTILE = "[red]rope[/blue] :smile: [link=file:///]x"


def on(encoding: str) -> Console:
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding))


def test_a_name_in_a_table_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    out = console.stdout()
    table = tables.table(out, title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE, no_wrap=True)
    table.add_row(HOSTILE)
    out.print(table)
    assert capsys.readouterr().out.count(HOSTILE) == 4


def test_the_properties_of_a_name_like_markup_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (measured,) = properties.measure(["none"])
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(properties, "measure", lambda names: [dataclasses.replace(measured, name=HOSTILE)])
    properties.main([HOSTILE])
    assert capsys.readouterr().out.count(HOSTILE) == 2  # a row of the overview, and the title of the details


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [("utf-8", True), ("utf-16", True), ("ascii", False), ("latin-1", False), ("cp437", False)],
)
def test_unicode_is_drawn_only_where_every_sign_of_it_can_be_written(encoding: str, expected: bool) -> None:
    assert console.carries_unicode(on(encoding)) == expected


def test_the_rule_knows_every_sign_that_is_drawn() -> None:
    signs = characters.Signs(on("utf-8"))
    drawn = {sign for sign, _, _ in curve.SERIES.values()} | set(map(chr, text._ASCII))
    drawn |= {*signs.shades, signs.band, signs.bar, signs.line, signs.dot, signs.undefined, signs.times}
    assert {sign for sign in drawn if not sign.isascii()} <= set(console.SIGNS)


def test_tables_on_an_ascii_terminal_are_ruled_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")  # as the command line sets it
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", out)
    listing.show([], as_json=False)
    out.flush()
    printed = out.buffer.getvalue()  # type: ignore[attr-defined]
    assert b"|rope" in printed and b"\\u25" not in printed


@pytest.mark.sample(4)
@pytest.mark.parametrize("width", [40, 60, 80, 100])
def test_no_verdict_and_no_heading_is_cut_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    measured = properties.measure(["rope"])
    monkeypatch.setattr(properties, "measure", lambda names: measured)
    properties.main(["rope"])
    shown = capsys.readouterr().out.partition("the tutorials")[0]
    assert max(map(len, shown.splitlines())) <= width
    known = {word for header in ["encoding", *properties._HEADERS.values()] for word in header.split()}
    headings = set(shown.partition("───")[0].split()) - {"Properties,", "measured"}
    assert {"encoding", "order", "logit"} <= headings <= known
    assert width < 80 or headings == known


# -- plain lines of a training -----------------------------------------------------------------------------------------


def test_the_bar_says_starting_until_the_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    monkeypatch.setattr(console, "stderr", out)
    with console.progress(total=10, start=0) as progress:
        begun = out.file.getvalue()  # type: ignore[attr-defined]
        progress.advance(3.0, 1000)
    shown = out.file.getvalue()  # type: ignore[attr-defined]
    assert "0/10 starting" in begun and "nan" not in shown and " 0 tokens/s" not in shown
    assert "1/10 loss 3.000" in shown


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
    assert first == "step 41/100  loss 3.000"  # no speed, no time left: both are counted from here
    assert second == "step 46/100  loss 3.000  500 tokens/s  0:01:48 left"
    assert last == "step 100/100  loss 3.000  500 tokens/s"


@pytest.mark.parametrize("place", ["/proc/nothing", "/dev/null/nothing", "x" * 300], ids=["proc", "file", "name"])
def test_a_folder_that_cannot_be_made_there_is_one_line_that_says_what_to_do(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exits.run(lambda: Path(place, "demo").mkdir(parents=True)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {place}") and "posbench needs to read or write it; " in line
