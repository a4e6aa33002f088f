"""A user's own encodings: what is wrong with one is said before anything is written."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import TINY, each_once, posbench, write_words

import posbench as api
from posbench import encodings
from posbench.config.schema import load_saved
from posbench.encodings.base import Layer, Shape
from posbench.run.rows import EvaluationRow, evaluation_rows
from posbench.training import train as training

OWN = """import torch
import posbench


class Table(posbench.Encoding):
    '''A table that ends.'''

    def __init__(self, shape, rows: int = 16, ends_at: int | None = None):
        super().__init__(shape)
        self.max_length = ends_at
        self.table = torch.nn.Embedding(rows, shape.d_model)

    def embed(self, x, positions, ids=None):
        return x + self.table(positions)


class Slope(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return -0.5 * distance.float().expand(self.shape.n_heads, *distance.shape)


class Narrow(posbench.Encoding):
    def embed(self, x):
        return x


class Plain(torch.nn.Module):
    pass
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(encodings, "_registered", {})
    write_words(tmp_path)
    Path("mine.py").write_text(OWN, encoding="utf-8")


def train(*words: str) -> int:
    shared = [*TINY, "data.path=text.txt", "training.tokens=256", "windowed=false"]
    return posbench("train", *each_once([*shared, *words]))


def rows() -> list[EvaluationRow]:
    (folder,) = Path("outputs/text").glob("[!.]*")
    return evaluation_rows(folder)


def test_a_class_that_fails_at_a_longer_length_is_refused_with_the_cure(capsys):
    assert train("encoding=mine.py:Table", "encoding.rows=32", "ratio=1,2,4") == 2

    *_, error = capsys.readouterr().err.splitlines()
    assert "at 64 tokens: 'table', embed: mine.py, line 14: IndexError" in error
    assert "with self.max_length = 32 in __init__" in error
    assert not os.path.lexists("outputs")


def test_a_class_that_fails_at_the_training_length_is_refused_without_a_cure(capsys):
    assert train("encoding=mine.py:Table", "encoding.rows=8") == 2

    *_, error = capsys.readouterr().err.splitlines()
    assert "error: 'table', embed: mine.py, line 14: IndexError" in error
    assert "max_length" not in error


def test_a_class_that_says_where_it_ends_is_undefined_beyond():
    words = ["encoding=mine.py:Table", "encoding.ends_at=16", "ratio=1,2"]

    assert train(*words, "protocol=fixed_target") == 0

    short, long = rows()
    assert short.length == 16
    assert short.status == "ok"
    assert long.length == 32
    assert long.status == "undefined"


class Ending(api.Encoding):
    """Fails at 64 tokens once training has begun."""

    fails = False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        zero = torch.zeros(1)
        self.unused = torch.nn.Parameter(zero)

    def distance_bias(self, distance: torch.Tensor, layer: Layer) -> torch.Tensor:
        if type(self).fails and distance.shape[-1] > 32:
            raise IndexError("too far")
        bias = -0.5 * distance.float()
        return bias.expand(self.shape.n_heads, *distance.shape) + self.unused


@pytest.fixture
def ending(monkeypatch):
    monkeypatch.setattr(Ending, "fails", False)
    api.register(Ending)


def test_a_failed_length_costs_no_other_row(ending, monkeypatch, capsys):
    assert train("encoding=ending", "ratio=1") == 0
    (folder,) = Path("outputs/text").glob("[!.]*")
    monkeypatch.setattr(Ending, "fails", True)

    assert posbench("evaluate", str(folder), "ratio=1,2,4") == 1

    statuses = {(row.protocol, row.length): row.status for row in rows()}
    assert statuses == {
        ("fixed_target", 16): "ok",
        ("fixed_target", 32): "ok",
        ("fixed_target", 64): "failed",
        ("nonoverlap", 16): "ok",
        ("nonoverlap", 32): "ok",
        ("nonoverlap", 64): "failed",
    }
    assert "at 64 tokens: 'ending', distance_bias" in capsys.readouterr().err


def test_a_run_is_done_though_a_length_failed(ending, monkeypatch):
    begin = training.record_begin

    def begin_and_fail(*given: Any, **named: Any) -> None:
        begin(*given, **named)
        monkeypatch.setattr(Ending, "fails", True)

    monkeypatch.setattr(training, "record_begin", begin_and_fail)

    assert train("encoding=ending", "ratio=1,4") == 1

    (folder,) = Path("outputs/text").glob("[!.]*")
    assert api.load(folder).status == "done"
    assert train("encoding=ending", "ratio=1,2,4") == 0
    statuses = {row.length: row.status for row in rows()}
    assert statuses == {16: "ok", 32: "ok", 64: "failed"}


NO_ENCODINGS = [
    (
        "Narrow",
        "'narrow', embed: mine.py, line 23: expected embed(self, x, positions,"
        " ids), not embed(self, x)",
    ),
    ("Plain", "Plain is no encoding: derive it from posbench.Encoding"),
    ("Other", "expected FILE.py:CLASS, one of Table, Slope, Narrow"),
]


@pytest.mark.parametrize(("name", "message"), NO_ENCODINGS)
def test_a_class_that_cannot_be_an_encoding_is_refused(capsys, name, message):
    assert train(f"encoding=mine.py:{name}") == 2

    assert message in capsys.readouterr().err
    assert not os.path.lexists("outputs")


def test_a_file_without_an_encoding_says_what_to_derive_from(capsys):
    Path("empty.py").write_text("import torch\n", encoding="utf-8")

    assert train("encoding=empty.py:Any") == 2

    message = "no class in the file derives from posbench.Encoding"
    assert message in capsys.readouterr().err


def test_a_class_in_a_file_is_described(capsys):
    assert posbench("show", "mine.py:Table", "--text") == 0

    shown = capsys.readouterr().out
    assert shown.startswith("mine.py:Table: A table that ends.")
    assert "encoding.rows=16" in shown
    assert "posbench train encoding=mine.py:Table" in shown


AROUND = [
    ("layered", "encoding.layers=[{name:mine.py:Slope},{name:rope}]"),
    ("heads", "encoding.heads=[{name:none},{name:mine.py:Slope}]"),
    ("randomized", "encoding.inner=mine.py:Slope"),
]


@pytest.mark.parametrize(("name", "option"), AROUND)
def test_an_encoding_is_around_a_class_in_a_file(name, option):
    assert train(f"encoding={name}", option, "ratio=1") == 0

    (folder,) = Path("outputs/text").glob("[!.]*")
    config = load_saved(folder / "config.yaml")
    encoding = config.encoding
    assert encoding.name == name
    assert encoding.file == "mine.py:Slope"
    assert "slope" in str(encoding.options)
    assert posbench("evaluate", str(folder), "ratio=2") == 0
    assert {row.status for row in rows()} == {"ok"}


def test_a_changed_file_inside_another_encoding_is_another_run():
    words = ["encoding=randomized", "encoding.inner=mine.py:Slope", "ratio=1"]
    assert train(*words) == 0
    steeper = OWN.replace("-0.5", "-0.7")
    Path("mine.py").write_text(steeper, encoding="utf-8")

    assert train(*words) == 0

    runs = list(Path("outputs/text").glob("[!.]*"))
    assert len(runs) == 2


def test_a_file_that_nobody_approved_here_is_not_executed(capsys):
    assert train("encoding=mine.py:Slope", "ratio=1") == 0
    (folder,) = Path("outputs/text").glob("[!.]*")
    # as on another machine, where the folder may be a stranger's
    shutil.rmtree("cache/posbench")

    assert posbench("evaluate", str(folder), "ratio=2") == 2

    assert "mine.py is code not approved here" in capsys.readouterr().err


def test_a_run_is_not_evaluated_with_a_file_that_has_changed(capsys):
    assert train("encoding=mine.py:Slope", "ratio=1") == 0
    (folder,) = Path("outputs/text").glob("[!.]*")
    Path("mine.py").write_text(OWN + "# changed", encoding="utf-8")

    assert posbench("evaluate", str(folder), "ratio=2") == 2

    message = "mine.py has changed since the run was made"
    assert message in capsys.readouterr().err
    assert {row.length for row in rows()} == {16}


def test_a_file_that_cannot_be_imported_is_one_line(capsys):
    Path("broken.py").write_text("import nothing_of_this_name", encoding="utf-8")

    assert train("encoding=broken.py:X") == 2

    message = "broken.py, line 1: ModuleNotFoundError"
    assert message in capsys.readouterr().err


def test_an_encoding_is_around_one_class_of_a_file(capsys):
    layers = "encoding.layers=[{name:mine.py:Slope},{name:mine.py:Table}]"

    assert train("encoding=layered", layers) == 2

    expected = "encoding has mine.py:Slope and mine.py:Table: expected one class"
    assert expected in capsys.readouterr().err
