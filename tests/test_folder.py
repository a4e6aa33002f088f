"""The files of a run folder, and of the token cache, belong together, or one line says
what is wrong.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from support import TINY, posbench, write_text

from posbench.results.frame import read
from posbench.run.rows import evaluation_rows

WORDS = [
    *TINY,
    "training.tokens=512",
    "runtime.checkpoint_every_steps=4",
    "data.path=text.txt",
    "runtime.cache=cache",
    "study=s",
]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Train two runs of a study, and return the folder above."""
    top = tmp_path_factory.mktemp("whole")
    here = Path.cwd()
    os.chdir(top)
    write_text()
    for seed in (0, 1):
        assert posbench("train", *WORDS, "encoding=rope", f"seed={seed}") == 0
    os.chdir(here)
    return top


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """Copy the study; return the folders of its two runs."""
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return sorted(Path("outputs/s").glob("rope-s*"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def edited_config(run, other):
    replace(run / "config.yaml", "base: 10000", "base: 500000")


def a_key_twice(run, other):
    replace(run / "config.yaml", "seed: 0", "seed: 1\nseed: 0")


def another_runs_record(run, other):
    shutil.copy(other / "run.json", run)


def an_empty_record(run, other):
    (run / "run.json").write_text("{}")


def a_record_of_another_schema(run, other):
    replace(run / "run.json", '"schema": 3', '"schema": 99')


def another_runs_rows(run, other):
    shutil.copy(other / "rows.jsonl", run)


def a_loss_that_is_not_that_of_its_units(run, other):
    nll = evaluation_rows(run)[0].nll
    replace(run / "rows.jsonl", f'"nll": {nll}', f'"nll": {nll - 0.1}')


def no_number(run, other):
    nll = evaluation_rows(run)[0].nll
    replace(run / "rows.jsonl", f'"nll": {nll}', '"nll": NaN')


def a_null(run, other):
    replace(run / "rows.jsonl", '"length": 16', '"length": null')


def no_tokens_of_units(run, other):
    replace(run / "rows.jsonl", '"tokens": [', '"token": [')


MENDED_BY_TRAINING = [
    (edited_config, "config.yaml is that of rope-s0-"),
    (a_key_twice, "the key 'seed' stands there twice"),
    (another_runs_rows, "rows.jsonl, line 1: is that of rope-s1-"),
    (a_loss_that_is_not_that_of_its_units, "the row's sums give"),
    (no_number, "NaN is not JSON"),
    (a_null, "length is null"),
    (no_tokens_of_units, "its units are not tokens, nll and others"),
]
REFUSED = [
    (another_runs_record, "expected rope-s1-"),
    (an_empty_record, "schema is null"),
    (a_record_of_another_schema, "schema is 99"),
]


@pytest.mark.parametrize(("spoil", "words"), MENDED_BY_TRAINING + REFUSED)
def test_a_folder_with_a_file_that_does_not_fit_is_not_evaluated(
    runs, spoil, words, capsys
):
    spoil(*runs)
    assert posbench("evaluate", str(runs[0]), "ratio=4") == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("spoil", "words"), MENDED_BY_TRAINING + REFUSED)
def test_a_report_leaves_out_such_a_folder_and_says_why(runs, spoil, words):
    spoil(*runs)
    frame = read([Path("outputs/s")]).drop_duplicates("folder").set_index("folder")
    assert frame.loc[str(runs[0]), "run_status"] == "unreadable"
    assert words in frame.loc[str(runs[0]), "run_reason"]
    assert frame.loc[str(runs[1]), "run_status"] == "done"


def assert_mended(run, trained):
    mended = {row.key: row.nll for row in evaluation_rows(run)}
    whole = {row.key: row.nll for row in evaluation_rows(trained / run)}
    assert mended == whole


@pytest.mark.parametrize(("spoil", "words"), MENDED_BY_TRAINING)
def test_the_command_of_a_run_mends_it(runs, spoil, words, trained):
    spoil(*runs)
    assert posbench("train", *WORDS, "encoding=rope", "seed=0") == 0
    assert_mended(runs[0], trained)


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "words"), MENDED_BY_TRAINING)
def test_the_sweep_of_a_run_mends_it(runs, spoil, words, trained):
    spoil(*runs)
    assert posbench("sweep", *WORDS, "encoding=rope", "seed=0,1") == 0
    assert_mended(runs[0], trained)


def test_a_sweep_makes_rows_that_are_gone(runs, trained):
    (runs[0] / "rows.jsonl").unlink()
    assert posbench("sweep", *WORDS, "encoding=rope", "seed=0,1") == 0
    made = [row.nll for row in evaluation_rows(runs[0])]
    assert made == [row.nll for row in evaluation_rows(trained / runs[0])]


def test_an_empty_line_holds_nothing(runs):
    before = evaluation_rows(runs[0])
    replace(runs[0] / "rows.jsonl", '\n{"run"', '\n\n{"run"')
    assert evaluation_rows(runs[0]) == before


def test_another_runs_checkpoint_is_not_used(runs, capsys):
    shutil.rmtree(runs[0] / "checkpoint")
    shutil.copytree(runs[1] / "checkpoint", runs[0] / "checkpoint")
    for words in (["evaluate", str(runs[0])], ["sample", str(runs[0]), "a"]):
        assert posbench(*words) == 2
        assert "is that of rope-s1-" in capsys.readouterr().err


# -- a study in one file --


def no_lists(frame):
    frame["unit_nll"] = 1.0


def another_loss(frame):
    frame["nll"] += 0.1


def no_status(frame):
    frame["run_status"] = None


@pytest.mark.parametrize("spoil", [no_lists, another_loss, no_status])
def test_a_study_in_one_file_is_checked(runs, spoil, capsys):
    frame = read(runs)
    frame.to_parquet("good.parquet")
    assert len(read([Path("good.parquet")])) == len(frame)

    spoil(frame)
    pd.DataFrame(frame).to_parquet("bad.parquet")

    assert posbench("report", "bad.parquet") == 2
    assert "cannot read bad.parquet: row 0: " in capsys.readouterr().err


# -- the token cache --


def half(folder):
    content = (folder / "train.ids").read_bytes()
    (folder / "train.ids").write_bytes(content[: len(content) // 4 * 2])


def zeros(folder):
    size = (folder / "train.ids").stat().st_size
    (folder / "train.ids").write_bytes(bytes(size))


def moved_start(folder):
    starts = np.load(folder / "test.starts.npy")
    starts[1:-1] += 1
    np.save(folder / "test.starts.npy", starts)


def edited_record(folder):
    replace(folder / "meta.json", '"name": "text"', '"name": "other"')


@pytest.mark.parametrize("spoil", [half, zeros, moved_start, edited_record])
def test_tokens_that_are_not_as_written_are_made_again(runs, spoil, capsys):
    (folder,) = Path("cache/tokens").glob("*[!k]/")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    spoil(folder)

    assert posbench("prepare", "data.path=text.txt", *TINY, "runtime.cache=cache") == 0

    assert "as it was written: the tokens are made again" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_was_killed_before_its_record_begins_as_it_is(runs):
    shutil.rmtree(runs[0] / "checkpoint")
    for name in ("run.json", "rows.jsonl", "tokenizer.json"):
        (runs[0] / name).unlink()

    assert posbench("train", *WORDS, "encoding=rope", "seed=0") == 0

    assert not list(runs[0].glob("*.old-*"))
