"""Runs from Python: what is read is what the files say, and nothing but the run is left
behind.
"""

import concurrent.futures
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fake_study
import numpy as np
import pandas as pd
import pytest
import scipy.special  # noqa: F401  # which adds to the filters of warnings when it is first imported
import support
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
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
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, template = (
        tmp_path_factory.mktemp("outputs") / "fake",
        fake_study.demo_config(),
    )
    schemes = {name: fake_study.SCHEMES[name] for name in ("rope", "alibi", "learned")}
    fake_study.write_study(folder, template, schemes, 2)
    other = fake_study.configured(template, "rope", 0, base=64)
    fake_study.write_run(folder, other, fake_study.SCHEMES["rope"], tokens=38_912)
    fake_study.write_run(
        folder,
        fake_study.configured(template, "t5", 0),
        None,
        "failed",
        reason="diverged",
    )
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that `posbench.train` made in a thread other than the main one."""
    folder = tmp_path_factory.mktemp("trained")
    with (
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor() as thread,
    ):
        patch.chdir(folder)
        support.write_text()
        run = thread.submit(posbench.train, ["encoding=alibi", *TINY]).result()
    return folder / run.folder


def test_a_curve_is_the_rows_of_the_file_the_headline_first_and_what_is_undefined_is_nan(
    study: Path,
) -> None:
    run = posbench.load(next(study.glob("alibi-s0-*")))
    frame, rows = run.curve(), evaluation_rows(run.folder)
    assert frame.curve.tolist() == ["fixed_target"] * 5 + ["windowed"] * 4
    assert frame.length.tolist()[:5] == [64, 128, 256, 512, 1024]
    assert frame.nll.tolist() == [
        row.nll for row in sorted(rows, key=lambda r: (r.window or 0, r.length))
    ]
    frame = posbench.load(next(study.glob("learned-s0-*"))).curve()
    beyond = frame[(frame.length > 64) & (frame.curve == "fixed_target")]
    assert (
        len(beyond) == 4
        and beyond.nll.isna().all()
        and set(beyond.status) == {"undefined"}
    )


def test_a_table_has_a_row_per_run_with_its_headline(study: Path) -> None:
    table = posbench.runs(study.parent / "*")
    assert len(table) == 8
    row = table[table.label == "rope base=64"].iloc[0]
    values = headline(read([Path(row.folder)]))
    expected = {
        name: np.nan if value is None else value
        for name, value in values.items()
        if name != "learned"
    }
    pd.testing.assert_series_equal(
        row[list(expected)].astype(float), pd.Series(expected), check_names=False
    )
    assert row.tokens == 38_912  # what it was trained on
    (failed,) = table[table.encoding == "t5"].itertuples()
    assert (
        failed.status == "diverged"
        and pd.isna(failed.tokens)
        and table.nll_1x.isna().sum() == 1
    )


def test_metrics_have_a_row_per_step_and_units_add_up_to_the_curve(
    trained: Path,
) -> None:
    run = posbench.load(trained)
    sums = (
        run.units()
        .groupby(["protocol", "length", "window"], dropna=False)[["nll", "tokens"]]
        .sum()
    )
    expected = run.curve().set_index(["protocol", "length", "window"]).nll
    np.testing.assert_allclose(
        sorted((sums.nll / sums.tokens).astype(float)), sorted(expected), rtol=1e-5
    )
    with open(trained / "rows.jsonl", "a", encoding="utf-8") as file:
        file.write(
            json.dumps({"step": 8, "tokens": 512, "val/loss": 4.5, "odd": "text"})
            + "\n"
        )
    frame = posbench.load(trained).metrics()
    assert frame.step.tolist() == [2, 4, 6, 8] and frame.tokens.tolist() == [
        128,
        256,
        384,
        512,
    ]
    last = frame.iloc[-1]
    assert last["val/loss"] == 4.5 and last["train/loss"] > 0 and frame.odd.isna().all()


def test_the_model_is_the_newest_checkpoint_in_eval_mode(trained: Path) -> None:
    run = posbench.load(trained)
    model, weights = run.model(), checkpoint.trained(trained).weights()
    assert not model.training and all(
        torch.equal(value, weights[name]) for name, value in model.state_dict().items()
    )
    ids = run.ids("word1 follows")
    assert (
        ids[0, 0] == run.tokenizer.separator
        and run.tokenizer.decode(ids[0, 1:].tolist()) == "word1 follows"
    )
    assert model(ids).shape == (1, ids.shape[1], run.tokenizer.vocab_size)


def test_what_is_no_run_or_of_another_one_is_refused(
    trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="nowhere does not exist: expected run folders"):
        posbench.load(tmp_path / "inner/nowhere")
    shutil.copytree(trained, tmp_path / "run")
    record = tmp_path / "run/run.json"
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"tokenizer_sha256": "0" * 64})
    )
    with pytest.raises(
        UserError, match="is not the tokenizer that the run was trained with"
    ):
        posbench.load(tmp_path / "run").model()


def _state() -> dict[str, Any]:
    """Return the state that a call could leave behind in its process."""
    log = logging.getLogger("posbench")
    return {
        "log": (list(log.handlers), log.level),
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "signals": signal.getsignal(signal.SIGINT),
        "hydra": GlobalHydra.instance().hydra,
        "folder": os.getcwd(),
        "filters": list(warnings.filters),
    }


def test_training_returns_the_run_and_leaves_nothing_else_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    support.write_text()
    torch.manual_seed(5)
    drawn = torch.rand(1)
    torch.set_num_threads(2)
    before = _state()
    torch.manual_seed(5)
    run = posbench.train(["encoding=rope", *TINY])
    assert torch.equal(torch.rand(1), drawn)  # the caller's random numbers are its own
    assert run.status == "done" and run.folder == next(
        Path("outputs/demo").glob("rope-s0-*")
    )
    more = posbench.evaluate(run, ["ratio=1,2,4"])
    assert _state() == before
    torch.set_num_threads(1)
    assert set(more.curve().length) == {16, 32, 64} and set(run.curve().length) == {
        16,
        32,
    }
    assert capsys.readouterr().out == ""  # what it has to say is in what it returns


class Slope(posbench.Encoding):
    """An encoding as a reader types it into a cell."""

    def __init__(self, shape: Shape, slope: float = 0.5) -> None:
        super().__init__(shape)
        self.slope = slope

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return -self.slope * distance.float().expand(
            self.shape.n_heads, *distance.shape
        )


def test_a_class_typed_into_a_notebook_trains_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(posbench.encodings, "_registered", {})
    support.write_text()
    with pytest.raises(UserError, match="unknown encoding 'slope'"):
        posbench.train(["encoding=slope", *TINY])
    assert posbench.register(Slope) is Slope and "slope" in posbench.encodings.names()
    run = posbench.train(TINY, encoding={"name": Slope, "slope": 0.25})
    assert run.config.encoding.options == {"slope": 0.25}
    assert run.record["installed_encodings"] == {
        "slope": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    }
    again = type("Slope", (Slope,), {})  # the cell was changed and run again
    assert posbench.encodings.load(posbench.register(again).name) is again
    with pytest.raises(UserError, match="another encoding has that name"):
        posbench.register(type("ALiBi", (Slope,), {}))


class Leak(Slope):
    def __init__(self, shape: Shape, share: float = 0.0) -> None:
        super().__init__(shape)
        self.share = torch.nn.Parameter(torch.tensor(share))

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return v + self.share * v.roll(-1, -2)


def test_a_class_that_sees_later_tokens_gets_no_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(posbench.encodings, "_registered", {})
    support.write_text()
    # seen before the training, and learned in it
    for share, n_checkpoints in ((0.5, 0), (0.0, 1)):
        with pytest.raises(
            UserError,
            match="encoding 'leak' is no causal model: later tokens change its earlier",
        ):
            posbench.train(
                TINY,
                encoding={"name": Leak, "share": share},
                study=f"leak{n_checkpoints}",
            )
        (folder,) = Path(f"outputs/leak{n_checkpoints}").glob("leak-*")
        assert len(
            list(folder.glob("checkpoint/step-*"))
        ) == n_checkpoints and not evaluation_rows(folder)


def test_keywords_and_dictionaries_are_the_words_of_the_command_line() -> None:
    settings = {
        "encoding": {"name": "rope", "base": 100},
        "training": {"tokens": 512, "betas": [0.9, 0.95]},
        "start": None,
    }
    expected = [
        "encoding=rope",
        "encoding.base=100",
        "training.tokens=512",
        "training.betas=[0.9,0.95]",
        "start=null",
    ]
    assert api._words(["seed=1"], settings) == ["seed=1", *expected]
    axes = {
        "encoding": ["rope", "alibi"],
        "seed": range(2),
        "evaluation": {"windowed": False},
    }
    assert api._words([], axes, several=True) == [
        "encoding=rope,alibi",
        "seed=0,1",
        "evaluation.windowed=false",
    ]
    entries = [
        {"name": "fox"},
        {"name": "rope", "base": 5.5},
        {"name": "bipe", "separators": [".", "\n", "1", ","]},
    ]
    assert yaml.safe_load(api._typed_value(entries)) == entries
    with pytest.raises(
        UserError,
        match=r"overrides are a list, a string each: \['encoding=rope', 'seed=1'\]",
    ):
        posbench.train("encoding=rope seed=1")


SWEEP = """
import posbench
tiny = {TINY!r}
print(posbench.sweep(tiny, encoding=["none", "rope"], seed=[0], n_jobs=2)[["encoding", "status"]].to_csv(index=False))
class Mine(posbench.Encoding):
    def rotate(self, q, k, layer):
        return q, k
print(posbench.sweep(tiny, encoding=["none", Mine])[["encoding", "status"]].to_csv(index=False))
print(len(posbench.report("outputs/demo", out="again", reference="none")))
"""


@pytest.mark.slow
def test_a_sweep_from_a_plain_script_returns_its_runs(tmp_path: Path) -> None:
    support.write_text(tmp_path)
    (tmp_path / "script.py").write_text(SWEEP.replace("{TINY!r}", repr(TINY)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    }
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert all(f"{name},done" in done.stdout for name in ("none", "rope", "mine"))
    assert done.stdout.splitlines()[-1] == "3"
    assert (
        len(list((tmp_path / "outputs/demo").glob("[!.]*-s0-*"))) == 3
        and (tmp_path / "again/index.html").is_file()
    )


@pytest.mark.slow
def test_the_example_runs_from_training_to_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient, nbformat = (
        pytest.importorskip("nbclient"),
        pytest.importorskip("nbformat"),
    )
    for name, value in {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path / "i"),
    }.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(ROOT / "examples" / "compare.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none are committed
    # seconds of a reader's time, here less of it
    assert "training.tokens=400000" in notebook.cells[1].source
    notebook.cells[1].source = notebook.cells[1].source.replace(
        "training.tokens=400000", "training.tokens=40960"
    )
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources=where
    ).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    log = "".join(
        output.text for output in cells[0].outputs if output.output_type == "stream"
    )
    assert log.count("step 40/40") == log.count("<run ") == 2
    assert "learned" in "".join(cells[2].outputs[0].data["text/plain"])
    assert [
        output
        for cell in cells
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
