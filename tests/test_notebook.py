"""Runs from Python: what is read is what the files say, and nothing but the run is left
behind.
"""

import concurrent.futures
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import fake_study
import numpy as np
import pandas as pd
import pytest
import support
import torch
import yaml
from torch import Tensor

import posbench
from posbench import api
from posbench.encodings.base import Layer, Shape
from posbench.errors import UserError
from posbench.results.frame import read
from posbench.results.headline import headline
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows

ROOT = Path(__file__).parent.parent
TINY = [
    *support.TINY,
    "data.path=text.txt",
    "training.tokens=512",
    "runtime.cache=cache",
    "runtime.log_every_steps=2",
]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs") / "fake"
    truths = fake_study.SCHEMES
    schemes = {name: truths[name] for name in ("rope", "alibi", "learned")}
    fake_study.write_study(folder, schemes, 2)
    other = fake_study.configured("rope", 0, base=64)
    fake_study.write_run(folder, other, truths["rope"], tokens=38_912)
    failed = fake_study.configured("t5", 0)
    fake_study.write_run(folder, failed, None, "failed", reason="diverged")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Enter a folder with a text."""
    monkeypatch.chdir(tmp_path)
    support.write_text()
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run that `posbench.train` made in a thread other than the main one."""
    folder = tmp_path_factory.mktemp("trained")
    with (
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor() as thread,
    ):
        patch.chdir(folder)
        support.write_text()
        future = thread.submit(posbench.train, ["encoding=alibi", *TINY])
        run = future.result()
    return folder / run.folder


def test_a_curve_is_the_rows_of_the_file_the_headline_first(study):
    (folder,) = study.glob("alibi-s0-*")
    run = posbench.load(folder)

    frame = run.curve()

    assert frame.curve.tolist() == ["fixed_target"] * 5 + ["windowed"] * 4
    assert frame.length.tolist()[:5] == [64, 128, 256, 512, 1024]
    rows = evaluation_rows(run.folder)
    rows.sort(key=lambda row: (row.window or 0, row.length))
    assert frame.nll.tolist() == [row.nll for row in rows]


def test_what_is_undefined_is_nan_in_a_curve(study):
    (folder,) = study.glob("learned-s0-*")
    run = posbench.load(folder)
    frame = run.curve()
    plain = frame[frame.curve == "fixed_target"]
    beyond = plain[plain.length > 64]
    assert beyond.status.tolist() == ["undefined"] * 4
    assert beyond.nll.isna().all()


def test_a_table_has_a_row_per_run_with_its_headline(study):
    table = posbench.runs(study.parent / "*")

    assert len(table) == 8
    row = table[table.label == "rope base=64"].iloc[0]
    assert row.tokens == 38_912  # what it was trained on
    rows = read([Path(row.folder)])
    for name, expected in headline(rows).items():
        if expected is None:
            assert pd.isna(row[name])
        elif name != "learned":
            assert row[name] == pytest.approx(expected)


def test_a_run_that_failed_has_a_row_without_numbers(study):
    table = posbench.runs(study.parent / "*")
    failed = table[table.encoding == "t5"].iloc[0]
    assert failed.status == "diverged"
    assert pd.isna(failed.tokens)
    assert pd.isna(failed.nll_1x)
    assert table.nll_1x.isna().sum() == 1


def test_units_add_up_to_the_curve(trained):
    run = posbench.load(trained)
    units = run.units()
    by_row = units.groupby(["protocol", "length", "window"], dropna=False)
    sums = by_row[["nll", "tokens"]].sum()
    means = (sums.nll / sums.tokens).astype(float)
    expected = run.curve().nll
    np.testing.assert_allclose(sorted(means), sorted(expected), rtol=1e-5)


def test_metrics_have_a_row_per_step(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    name = posbench.load(trained).id
    validated = {"step": 8, "tokens": 512, "val/loss": 4.5, "odd": "text", "run": name}
    with open(run / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(validated) + "\n")

    frame = posbench.load(run).metrics()

    assert frame.step.tolist() == [2, 4, 6, 8]
    assert frame.tokens.tolist() == [128, 256, 384, 512]
    assert frame["val/loss"].iloc[-1] == 4.5
    assert frame["train/loss"].iloc[-1] > 0
    assert frame.odd.isna().all()


def test_the_model_is_the_newest_checkpoint_in_eval_mode(trained):
    run = posbench.load(trained)
    model = run.model()
    weights = model.state_dict()
    saved = checkpoint.trained(trained).weights()
    assert not model.training
    for name, weight in saved.items():
        assert torch.equal(weights[name], weight), name


def test_ids_are_those_of_a_document(trained):
    run = posbench.load(trained)
    (ids,) = run.ids("word1 follows").tolist()
    first, *rest = ids
    assert first == run.tokenizer.separator
    assert run.tokenizer.decode(rest) == "word1 follows"


def test_the_tokenizer_of_another_run_is_refused(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    support.change_record(folder, tokenizer_sha256="0" * 64)
    run = posbench.load(folder)
    with pytest.raises(UserError, match="is not the tokenizer that the run was"):
        run.model()


def test_training_and_evaluating_return_the_run_and_print_nothing(here, capsys):
    run = posbench.train(["encoding=rope", *TINY])
    more = posbench.evaluate(run, ["ratio=1,2,4"])

    assert capsys.readouterr().out == ""
    assert run.status == "done"
    (folder,) = Path("outputs/text").glob("rope-s0-*")
    assert run.folder == folder.absolute()
    curve = run.curve()
    longer_curve = more.curve()
    assert set(curve.length) == {16, 32}
    assert set(longer_curve.length) == {16, 32, 64}


class Slope(posbench.Encoding):
    """An encoding as a reader types it into a cell."""

    def __init__(self, shape: Shape, slope: float = 0.5) -> None:
        super().__init__(shape)
        self.slope = slope

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        bias = -self.slope * distance.float()
        return bias.expand(self.shape.n_heads, *distance.shape)


def test_a_class_typed_into_a_notebook_trains_under_its_name(here):
    run = posbench.train(TINY, encoding={"name": Slope, "slope": 0.25})

    assert run.config.encoding.options == {"slope": 0.25}
    source = Path(__file__).read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    assert run.record.installed_encodings == {"slope": digest}


def test_registering_a_class_may_be_a_decorator(here):
    assert posbench.register(Slope) is Slope


def test_a_class_takes_the_place_of_an_earlier_one_but_not_of_ours(here):
    posbench.register(Slope)
    again = type("Slope", (Slope,), {})  # the cell was changed and run again
    posbench.register(again)

    assert posbench.encodings.load("slope") is again
    of_our_name = type("ALiBi", (Slope,), {})
    with pytest.raises(UserError, match="another encoding has that name"):
        posbench.register(of_our_name)


class Leak(Slope):
    def __init__(self, shape: Shape, share: float = 0.0) -> None:
        super().__init__(shape)
        self.share = torch.nn.Parameter(torch.tensor(share))

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return v + self.share * v.roll(-1, -2)


def test_a_class_that_sees_later_tokens_is_refused_before_anything_is_written(here):
    encoding = {"name": Leak, "share": 0.5}

    with pytest.raises(UserError, match=r"'leak', map_values: .* later tokens"):
        posbench.train(TINY, encoding=encoding)

    assert not Path("outputs").exists()


def test_a_class_that_learns_to_see_later_tokens_gets_no_numbers(here):
    encoding = {"name": Leak, "share": 0.0}

    with pytest.raises(UserError, match=r"'leak', map_values: .* later tokens"):
        posbench.train(TINY, encoding=encoding)

    (folder,) = Path("outputs/text").glob("leak-*")
    saved = list(folder.glob("checkpoint/step-*"))
    assert len(saved) == 1
    assert evaluation_rows(folder) == []


def test_keywords_are_the_words_of_the_command_line():
    encoding = {"name": "rope", "base": 100}
    training = {"betas": [0.9, 0.95], "tokens": 512}
    settings = {"encoding": encoding, "training": training, "start": None}

    words = api._words(["model=llama"], settings)

    assert words == [
        "model=llama",
        "encoding=rope",
        "encoding.base=100",
        "training.betas=[0.9,0.95]",
        "training.tokens=512",
        "start=null",
    ]


def test_a_list_is_the_values_of_a_sweep():
    settings = {"encoding": ["rope", "alibi"], "seed": range(2)}
    words = api._words([], settings, several=True)
    assert words == ["encoding=rope,alibi", "seed=0,1"]


@pytest.mark.parametrize(
    "settings",
    [
        {"encoding": ["rope", "alibi"]},
        {"seed": range(2)},
        {"training": {"learning_rate": (1e-3, 1e-2)}},
        {"model": {"n_layers": np.arange(2)}},
    ],
)
def test_several_values_for_one_run_name_the_sweep(settings):
    with pytest.raises(UserError, match=r"is a list: .* posbench\.sweep runs each"):
        posbench.train(**settings)


def test_numbers_of_other_libraries_are_numbers():
    settings = {"seed": np.int64(1), "length": np.array([16, 24])}
    words = api._words([], settings)
    assert words == ["seed=1", "length=[16,24]"]
    assert api._words([], {"seed": np.arange(2)}, several=True) == ["seed=0,1"]


def test_any_text_in_a_value_comes_back():
    entries = [{"name": "bipe", "separators": [".", "\n", "1", ","]}, {"base": 5.5}]
    typed = api._typed_value(entries)
    assert yaml.safe_load(typed) == entries


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda run: posbench.load(run.parent), "has several runs: name one"),
        (lambda run: posbench.evaluate(run.parent), "has several runs: name one"),
        (lambda run: posbench.report(run, least=-1), "least is -1: expected 0 or more"),
        (lambda run: posbench.report(run, least=np.nan), "least is nan: expected 0"),
        (lambda run: posbench.report(run, figure="bars"), "figure is 'bars': expected"),
        (lambda run: posbench.sweep(seed=[0, 1], n_jobs=0), "n_jobs is 0: expected 1"),
        (lambda run: posbench.sweep(seed=[0, 1], n_jobs=-1), "n_jobs is -1: expected"),
        (
            lambda run: posbench.train(config_dir="not/there"),
            "not/there: expected a fo",
        ),
    ],
)
def test_values_that_the_command_line_refuses_are_refused(study, work, message):
    (folder,) = study.glob("alibi-s0-*")
    with pytest.raises(UserError, match=message):
        work(folder)


def test_a_run_that_was_read_is_an_argument_as_its_folder_is(study, tmp_path):
    (folder,) = study.glob("alibi-s0-*")
    run = posbench.load(folder)

    assert posbench.load(run).folder == run.folder
    table = posbench.runs(folder)
    pd.testing.assert_frame_equal(posbench.runs(run), table)
    reported = posbench.report(run, out=tmp_path / "report")
    pd.testing.assert_frame_equal(reported, table)


def test_a_run_is_read_after_a_change_of_directory(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained.parent)
    run = posbench.load(trained.name)
    lines = len(run.metrics())

    monkeypatch.chdir(tmp_path)

    assert len(run.metrics()) == lines > 0
    assert run.model()(run.ids("a")).shape[:2] == (1, 2)
    assert posbench.load(run).id == run.id


@pytest.mark.parametrize("work", [posbench.runs, posbench.report, posbench.plot])
def test_runs_in_a_list_are_refused_in_one_line(study, work):
    with pytest.raises(UserError, match="is no run: expected a path, an id"):
        work([study])


def test_overrides_in_one_string_are_refused():
    with pytest.raises(UserError, match=r"overrides are a list, a string each: \["):
        posbench.train("encoding=rope seed=1")


SWEEP = """
import posbench
tiny = {TINY!r}
print(posbench.sweep(tiny, encoding=["none", "rope"], seed=[0], n_jobs=2)[["encoding", "status"]].to_csv(index=False))
class Mine(posbench.Encoding):
    def rotate(self, q, k, layer):
        return q, k
print(posbench.sweep(tiny, encoding=["none", Mine])[["encoding", "status"]].to_csv(index=False))
print(len(posbench.report("outputs/text", out="again", reference="none")))
"""


@pytest.mark.slow
def test_a_sweep_from_a_plain_script_returns_its_runs(tmp_path):
    support.write_text(tmp_path)
    code = SWEEP.replace("{TINY!r}", repr(TINY))
    (tmp_path / "script.py").write_text(code)

    python = [sys.executable, "script.py"]
    done = subprocess.run(python, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "none,done" in done.stdout
    assert "rope,done" in done.stdout
    assert "mine,done" in done.stdout
    assert done.stdout.splitlines()[-1] == "3"
    runs = list(tmp_path.glob("outputs/text/[!.]*-s0-*"))
    assert len(runs) == 3
    assert (tmp_path / "again/index.html").is_file()


@pytest.mark.slow
def test_the_example_runs_from_training_to_figure(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "i"))
    notebook = nbformat.read(ROOT / "examples" / "compare.ipynb", as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs")  # none are committed
    first = notebook.cells[1]
    assert "training.tokens=400000" in first.source  # here fewer
    first.source = first.source.replace("tokens=400000", "tokens=40960")

    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources=where
    )
    client.execute()

    log = ""
    texts = ""
    kinds = set()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            log += output.get("text", "")
            texts += data.get("text/plain", "")
            kinds.update(data)
    assert log.count("step 40/40") == 2
    assert log.count("<run ") == 3
    assert "learned" in texts
    assert "image/png" in kinds
