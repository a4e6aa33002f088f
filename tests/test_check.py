"""`posbench check`: each way in which an encoding may break the contract is said with
its hook, its line, and what to do.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support import posbench, write_words

from posbench import check

BROKEN = """import numpy as np
import random
import torch
import posbench

SLOPES = torch.tensor([1.0, 0.5, 0.25, 0.125])


class AtImport(posbench.Encoding):
    def distance_bias(self, distance, layer):
        slopes = SLOPES.view(-1, *[1] * distance.dim())
        return -slopes * distance


class Attribute(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self._mixing = torch.eye(shape.head_dim)

    def map_values(self, v, layer):
        return v @ self._mixing


class OnCpu(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return 0.5 * torch.ones(self.shape.n_heads, *distance.shape)


class Softmax(posbench.Encoding):
    def attend(self, logits, v, layer):
        return torch.softmax(logits - 1, -1) @ v


class Shared(posbench.Encoding):
    def map_values(self, v, layer):
        return v / v.shape[0]


class Relative(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x + (positions / positions.shape[1])[..., None].pow(x.abs())


class FromZero(posbench.Encoding):
    def bias(self, q, k, layer):
        rows, keys = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        gap = rows.to(q.device)[:, None] - keys.to(q.device)
        return -0.1 * gap.float().abs()


class Average(posbench.Encoding):
    def map_values(self, v, layer):
        return v - v.mean(2, keepdim=True)


class Doubling(posbench.Encoding):
    def make_tables(self, positions):
        return positions.float()

    def rotate(self, q, k, layer):
        angle = layer.tables.mul_(2)[:, None, :, None]
        return q * angle.cos(), k * angle.cos()


class Numpy(posbench.Encoding):
    def distance_bias(self, distance, layer):
        slopes = torch.from_numpy(np.linspace(0.1, 1, self.shape.n_heads))
        slopes = slopes.to(distance.device).view(-1, *[1] * distance.dim())
        return -slopes * distance


class Counting(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.register_buffer("calls", torch.zeros(()))

    def embed(self, x, positions, ids=None):
        self.calls += 1
        return x + positions[..., None].sin()


class Headless(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return -distance.float()


class Detached(posbench.Encoding):
    def rotate(self, q, k, layer):
        return q.detach() * 2, k


class Read(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.slope = torch.nn.Parameter(torch.ones(()))

    def scores(self, logits, q, k, layer):
        return logits - float(self.slope) * layer.distance[:, None]


class Forgotten(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.gain = torch.nn.Parameter(torch.ones(()))

    def rotate(self, q, k, layer):
        return q * 1.5, k


class Random(posbench.Encoding):
    def scores(self, logits, q, k, layer):
        return logits * random.random()


class Table(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.table = torch.nn.Embedding(64, shape.d_model)

    def embed(self, x, positions, ids=None):
        return x + self.table(positions)


class Infinite(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return distance.float().pow(-0.5).expand(self.shape.n_heads, *distance.shape)


class Normed(posbench.Encoding):
    def map_outputs(self, out, layer):
        return out / out.norm(dim=0, keepdim=True)


class Remembering(posbench.Encoding):
    longest = 0

    def embed(self, x, positions, ids=None):
        self.longest = max(self.longest, positions.shape[1])
        return x + (positions / self.longest)[..., None].pow(x.abs())


class Several(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x + torch.rand_like(x)

    def rotate(self, q, k, layer):
        return q.double(), k.detach()

    def map_values(self, v, layer):
        return v + v.roll(-1, 2)

    def map_outputs(self, out, layer):
        return out[..., :3]


class OfKeys(posbench.Encoding):
    def rotate(self, q, k, layer):
        k.mul_(2)
        return q, k


class Repeats(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        is_last = ids == ids[:, -1:]
        return x + is_last[..., None] * torch.arange(x.shape[2], device=x.device)


class FirstRow(posbench.Encoding):
    def prepare(self, q, k, layer):
        return layer.x[:1, :, 0]

    def bias(self, q, k, layer):
        return layer.state[:, None, None, layer.keys]


class Root(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.slope = torch.nn.Parameter(torch.ones(()))

    def distance_bias(self, distance, layer):
        root = (self.slope * distance).sqrt()
        return -root.expand(self.shape.n_heads, *distance.shape)


class Dead(posbench.Encoding):
    def __init__(self, shape):
        super().__init__(shape)
        self.slope = torch.nn.Parameter(-torch.ones(()))

    def scores(self, logits, q, k, layer):
        return logits - self.slope.relu() * layer.distance[:, None]


class Double(posbench.Encoding):
    def embed(self, x, positions, ids=None):
        return x + positions[..., None].double().sin()


class Flat(posbench.Encoding):
    def positions(self, ids, generator):
        return torch.arange(ids.shape[1], device=ids.device)


class Silent(posbench.Encoding):
    def rotate(self, q, k, layer):
        q = q * 2


class Uninitialised(posbench.Encoding):
    def __init__(self, shape):
        self.shape = shape

    def rotate(self, q, k, layer):
        return 2 * q, k
"""

# class, hook and line, what is wrong, what to do
FINDINGS = [
    ("AtImport", "distance_bias: mine.py, line 12: WrongDevice", "device=x.device"),
    ("Attribute", "map_values: mine.py, line 21: WrongDevice", "register_buffer"),
    ("OnCpu", "distance_bias: mine.py, line 25: gave a tensor on the CPU", "device="),
    ("Softmax", "attend: mine.py, line 31: RuntimeError", "expected .to(v.dtype)"),
    ("Shared", "map_values: mine.py, line 35: a row alone", "depends on axis 0"),
    ("Relative", "embed: mine.py, line 40: outputs at the", "length_dependent = True"),
    ("FromZero", "bias: mine.py, line 45: a block of rows", "layer.distance"),
    ("Average", "map_values: mine.py, line 52: later tokens", "over the tokens"),
    ("Doubling", "rotate: mine.py, line 60: changes layer.tables", "a new tensor"),
    ("OfKeys", "rotate: mine.py, line 157: changes q or k in place", "a new tensor"),
    ("Numpy", "distance_bias: mine.py, line 66: gave torch.float64", "float32"),
    ("Counting", "embed: mine.py, line 77: use changes", "stay as they are"),
    ("Headless", "distance_bias: mine.py, line 83: gave [(", "expected (4, "),
    ("Detached", "rotate: mine.py, line 88: gives q and its", "without detach"),
    ("Read", "scores: mine.py, line 97: gives self.slope no", "or numpy"),
    ("Forgotten", "__init__: mine.py, line 102: nothing uses self.gain", "trained"),
    ("Random", "scores: mine.py, line 111: gives another result", "the generator"),
    ("Table", "embed: mine.py, line 121: IndexError", "self.max_length = 64"),
    ("Infinite", "distance_bias: mine.py, line 125: its logits are not", "by 0"),
    ("Normed", "map_outputs: mine.py, line 130: another row", "axis 0, the batch"),
    ("Remembering", "embed: mine.py, line 137: use changes", "stay as they are"),
    ("Repeats", "embed: mine.py, line 163: later tokens", "over the tokens"),
    ("FirstRow", "bias: mine.py, line 172: a row alone", "depends on axis 0"),
    ("Root", "distance_bias: mine.py, line 181: its gradients are not", "root"),
    ("Dead", "__init__: mine.py, line 187: nothing uses self.slope", "not trained"),
    ("Double", "embed: mine.py, line 196: gave torch.float64", "leave out .double()"),
    ("Flat", "positions: mine.py, line 201: gave [(32,)]", "expected (3, 32)"),
    ("Silent", "rotate: mine.py, line 206: gave nothing", "expected two of (3, 4"),
    ("Uninitialised", "__init__: mine.py, line 211: expected super()", "first"),
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "ROUNDS", 1)
    monkeypatch.setattr(check, "TURN_SECONDS", 0.001)


def checked(capsys, *words: str) -> tuple[int, list[str]]:
    """Return the exit code of a check, and the lines that it prints."""
    code = posbench("check", *words)
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "fault", "cure"), FINDINGS)
def test_a_broken_encoding_is_caught_at_its_hook_and_line(capsys, name, fault, cure):
    Path("mine.py").write_text(BROKEN, encoding="utf-8")

    code, lines = checked(capsys, f"mine.py:{name}", "ratio=0.5,1,2")

    assert code == 1
    (line,) = [line for line in lines if "tried" not in line]
    assert f"'{name.lower()}', {fault}" in line
    assert cure in line


def test_a_class_that_cannot_be_built_is_a_fault(capsys):
    text = BROKEN.replace(
        "def embed(self, x, positions, ids=None)", "def embed(self, x)"
    )
    Path("mine.py").write_text(text, encoding="utf-8")

    code, lines = checked(capsys, "mine.py:Relative")

    assert code == 1
    assert lines == [
        "'relative', embed: mine.py, line 40: expected embed(self, x, positions, ids),"
        " not embed(self, x)"
    ]


def test_all_faults_are_shown(capsys):
    Path("mine.py").write_text(BROKEN, encoding="utf-8")

    code, lines = checked(capsys, "mine.py:Several", "ratio=1")

    assert code == 1
    hooks = [line.partition("', ")[2].partition(":")[0] for line in lines]
    assert sorted(hooks) == ["embed", "map_outputs", "map_values", "rotate", "rotate"]


def test_the_template_keeps_the_contract(capsys):
    assert posbench("check", "--new", "my_bias.py") == 0

    code, lines = checked(capsys, "my_bias.py:MyBias", "encoding.start=0.25", "ratio=1")

    assert code == 0
    assert "no fault" in lines[-2]
    assert "of the speed of RoPE" in lines[-1]


def test_a_file_that_is_there_is_not_written_anew(capsys):
    Path("mine.py").write_text("mine", encoding="utf-8")

    assert posbench("check", "--new", "mine.py") == 2

    assert "mine.py is there already" in capsys.readouterr().err
    assert Path("mine.py").read_text(encoding="utf-8") == "mine"


# one for each way to act, and a wrapper
SHIPPED = ["learned", "rope base=100", "fox", "path", "cape", "layered", "dape"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("words", SHIPPED)
def test_a_shipped_encoding_has_no_fault(capsys, words):
    code, lines = checked(capsys, *words.split(), "ratio=1,2")

    assert code == 0
    assert "no fault. Tried: shapes and dtypes, lengths 64 to 128" in lines[-2]


@pytest.mark.slow
def test_training_tries_an_own_class_first_and_says_so(tmp_path):
    write_words(tmp_path)
    Path("mine.py").write_text(BROKEN, encoding="utf-8")
    words = "encoding=mine.py:Average data.path=text.txt tracking=none ratio=1"

    trained = subprocess.run(
        [sys.executable, "-m", "posbench", "train", *words.split()],
        capture_output=True,
        text=True,
    )

    assert trained.returncode == 2
    *_, last = trained.stderr.splitlines()
    assert "mine.py:Average: tried before training: shapes" in trained.stderr
    assert "'average', map_values: mine.py, line 52: later tokens" in last
