"""A user's own encodings: what is wrong with one is said before anything is written."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from support import TINY, each_once, posbench, write_words

import posbench as api
from posbench.config.schema import load_saved
from posbench.encodings.base import Layer, Shape
from posbench.run.rows import EvaluationRow, evaluation_rows
from posbench.show import flips

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
    """Fails at 64 tokens once a run has its folder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        zero = torch.zeros(1)
        self.unused = torch.nn.Parameter(zero)

    def distance_bias(self, distance: torch.Tensor, layer: Layer) -> torch.Tensor:
        if Path("outputs").exists() and distance.shape[-1] > 32:
            raise IndexError("too far")
        bias = -0.5 * distance.float()
        return bias.expand(self.shape.n_heads, *distance.shape) + self.unused


def test_a_failed_length_costs_no_other_row(capsys):
    api.register(Ending)
    assert train("encoding=ending", "ratio=1") == 0
    (folder,) = Path("outputs/text").glob("[!.]*")

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


def test_a_run_is_done_though_a_length_failed():
    api.register(Ending)

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


BROKEN = """import random
import numpy as np
import torch
import posbench


class Batch(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x + 0.1 * x.mean(0)


class Normed(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.norm = torch.nn.BatchNorm1d(shape.d_model)

    def embed(self, x, positions, ids=None):
        return self.norm(x.mT).mT


class Keys(posbench.Encoding):
    def bias(self, q, k, layer):
        return -q.square().sum((0, 3), keepdim=True).mT.expand(*q.shape[:3], k.shape[2])


class Cut(posbench.Encoding):
    def rotate(self, q, k, layer):
        return torch.from_numpy(q.detach().cpu().numpy()), k


class CutKeys(posbench.Encoding):
    def rotate(self, q, k, layer):
        with torch.no_grad():
            k = k * 2
        return q, k


class CutValues(posbench.Encoding):
    def map_values(self, v, layer):
        return v.data * 2


class CutInput(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x.detach() + positions[..., None].sin()


class CutSlope(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.slope = torch.nn.Parameter(torch.ones(()))

    def distance_bias(self, distance, layer):
        slope = self.slope.item()
        return -slope * distance.float().expand(self.shape.n_heads, *distance.shape)


class Half(posbench.Encoding):
    def rotate(self, q, k, layer):
        return q.half(), k.half()


class HalfBias(posbench.Encoding):
    def distance_bias(self, distance, layer):
        distance = distance.to(torch.bfloat16)
        return -distance.expand(self.shape.n_heads, *distance.shape)


class InPlace(posbench.Encoding):
    def rotate(self, q, k, layer):
        q *= 2
        k.mul_(2)
        return q, k


class InPlaceX(posbench.Encoding):
    def prepare(self, q, k, layer):
        layer.x[:] = 0

    def rotate(self, q, k, layer):
        return q, k


class Noise(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x + torch.randn_like(x)


class Dice(posbench.Encoding):
    def distance_bias(self, distance, layer):
        bias = -random.random() * distance.float()
        return bias.expand(self.shape.n_heads, *distance.shape)


class Short(posbench.Encoding):
    def distance_bias(self, distance, layer):
        if layer.positions.shape[-1] < 12:
            raise ValueError("too short")
        return -distance.float().expand(self.shape.n_heads, *distance.shape)


class Unused(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.forgotten = torch.nn.Parameter(torch.ones(3))

    def embed(self, x, positions, ids=None):
        return x + positions[..., None].sin()
"""

BREAKS = [
    ("Batch", "'batch', embed: mine.py, line 8: another row of the batch changes"),
    ("Normed", "'normed', embed: mine.py, line 17: another row of the batch changes"),
    ("Keys", "'keys', bias: mine.py, line 22: another row of the batch changes"),
    ("Cut", "'cut', rotate: mine.py, line 27: gives q and its weights no gradient"),
    ("CutKeys", "'cutkeys', rotate: mine.py, line 32: gives k and its weights no"),
    ("CutValues", "'cutvalues', map_values: mine.py, line 39: gives v and its weights"),
    ("CutInput", "'cutinput', embed: mine.py, line 44: gives the token embeddings no"),
    ("CutSlope", "'cutslope', distance_bias: mine.py, line 53: gives self.slope no"),
    ("Half", "'half', rotate: mine.py, line 59: gave torch.float16, expected"),
    ("HalfBias", "'halfbias', distance_bias: mine.py, line 64: gave torch.bfloat16"),
    ("InPlace", "'inplace', rotate: mine.py, line 70: changes q or k in place"),
    ("InPlaceX", "'inplacex', prepare: mine.py, line 77: changes layer.x in place"),
    ("Noise", "'noise', embed: mine.py, line 85: gives another result for the same"),
    ("Dice", "'dice', distance_bias: mine.py, line 90: gives another result for"),
    ("Short", "at 8 tokens: 'short', distance_bias: mine.py, line 98: ValueError"),
]


@pytest.mark.parametrize(("name", "message"), BREAKS)
def test_a_class_that_would_train_wrongly_is_refused_at_its_hook(capsys, name, message):
    Path("mine.py").write_text(BROKEN, encoding="utf-8")

    assert train(f"encoding=mine.py:{name}", "ratio=0.5,1") == 2

    *_, error = capsys.readouterr().err.splitlines()
    assert message in error
    assert not os.path.lexists("outputs")


def test_a_parameter_that_nothing_uses_is_a_warning(caplog):
    Path("mine.py").write_text(BROKEN, encoding="utf-8")

    assert train("encoding=mine.py:Unused", "ratio=1") == 0

    expected = "'unused', __init__: mine.py, line 103: nothing uses self.forgotten"
    assert expected in caplog.text


RIGHT = """import torch
import posbench


class Dropped(posbench.Encoding):
    '''Noise in training alone.'''

    def embed(self, x, positions, ids=None):
        return torch.nn.functional.dropout(x, 0.1, self.training)


class Gated(posbench.Encoding):
    '''A code whose gate begins at 0: the code has no gradient yet.'''

    def __init__(self, shape):
        super().__init__(shape)
        self.gate = torch.nn.Parameter(torch.zeros(()))
        self.code = torch.nn.Parameter(torch.randn(shape.d_model))

    def embed(self, x, positions, ids=None):
        return x + self.gate * self.code * positions[..., None]


class Blind(posbench.Encoding):
    '''Logits from positions alone: queries and keys are unread.'''

    def scores(self, logits, q, k, layer):
        return -layer.distance[:, None].expand_as(logits).float()


class Overwriting(posbench.Encoding):
    '''What these hooks get first is theirs.'''

    def embed(self, x, positions, ids=None):
        x += positions[..., None].sin()
        return x

    def scores(self, logits, q, k, layer):
        logits -= layer.distance[:, None]
        return logits


class Detached(posbench.Encoding):
    '''A bias whose gradient is stopped on purpose: q has its own.'''

    def bias(self, q, k, layer):
        return (q.detach() @ k.detach().mT).tanh()
"""


@pytest.mark.parametrize(
    "name", ["Dropped", "Gated", "Blind", "Overwriting", "Detached"]
)
def test_a_class_that_is_merely_unusual_is_trained(name, caplog):
    Path("mine.py").write_text(RIGHT, encoding="utf-8")

    assert train(f"encoding=mine.py:{name}", "ratio=1") == 0

    assert "nothing uses" not in caplog.text


MEASURED = """import torch
import posbench


class Ends(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.max_length = 64
        self.table = torch.nn.Embedding(64, shape.d_model)

    def embed(self, x, positions, ids=None):
        return x + self.table(positions)


class Stated(posbench.Encoding):
    def prepare(self, q, k, layer):
        return {"norm": k.norm(dim=-1, keepdim=True)}

    def rotate(self, q, k, layer):
        angle = 0.1 * layer.positions[:, None, :, None].float()
        return q * angle.cos(), k * angle.cos() / layer.state["norm"]


class Short(posbench.Encoding):
    def __init__(self, shape, ends_at: int = 100):
        super().__init__(shape)
        self.max_length = ends_at

    def token_dim(self):
        return self.shape.d_model - 4

    def embed(self, x, positions, ids=None):
        code = positions[..., None].float().expand(*x.shape[:2], 4)
        return torch.cat([x, code.sin()], -1)

    def attend(self, logits, v, layer):
        return logits.sigmoid().nan_to_num() @ v.float()
"""


@pytest.mark.parametrize("name", ["Ends", "Stated", "Short"])
def test_a_class_that_trains_is_measured_and_drawn(capsys, monkeypatch, name):
    monkeypatch.setattr(flips, "QUERIES", 1)
    Path("mine.py").write_text(MEASURED, encoding="utf-8")

    assert posbench("properties", f"encoding=mine.py:{name}", "--json") == 0
    (numbers,) = json.loads(capsys.readouterr().out)
    assert posbench("show", f"mine.py:{name}") == 0

    assert numbers["order"] > 0.99
    assert numbers["unique"] > 1e-6
    assert Path("show.png").stat().st_size > 10_000
