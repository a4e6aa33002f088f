"""Studies travel: a text may move, and a study becomes one file that another machine
takes in. Nothing in it is executed.
"""

import shutil
import zipfile
from pathlib import Path

import pytest
from support import TINY, posbench, snapshot, write_text

from posbench import runs
from posbench.run.rows import evaluation_rows

OWN = """
import pathlib
pathlib.Path("executed").touch()
import posbench

class Mine(posbench.Encoding):
    def embed(self, x, positions, ids):
        return x + positions[..., None] / 100
"""
WORDS = [*TINY, "training.tokens=512", "study=s"]


def train(*words: str) -> int:
    return posbench("train", *WORDS, *words)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Go to a folder with a text and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write_text()
    return tmp_path


@pytest.fixture
def moved(here):
    """Train a run; move its text, and delete its tokens. Return the run's folder."""
    assert train("data.path=text.txt") == 0
    Path("elsewhere").mkdir()
    Path("text.txt").rename("elsewhere/renamed.txt")
    shutil.rmtree(here / "cache")
    (run,) = Path("outputs/s").glob("rope-*")
    return run


def test_the_same_text_at_another_path_is_the_same_run(moved):
    before = snapshot(moved)["rows.jsonl"]
    assert train("data.path=elsewhere/renamed.txt") == 0
    assert [*Path("outputs/s").glob("rope-*")] == [moved]
    assert snapshot(moved)["rows.jsonl"] == before


def test_another_text_at_the_same_path_is_another_run(moved):
    Path("text.txt").write_text("Another text. " * 3000)
    assert train("data.path=text.txt") == 0
    assert len([*Path("outputs/s").glob("rope-*")]) == 2


@pytest.mark.slow
def test_the_same_tokenizer_at_another_path_is_the_same_run(here):
    path = "data.path=text.txt"
    bpe = ("data.tokenizer=bpe", "data.vocab_size=300")
    assert train(path) == 0
    assert train(path, *bpe, "study=bpe") == 0
    (of_bytes,) = Path("outputs/s").glob("rope-*/tokenizer.json")
    (of_bpe,) = Path("outputs/bpe").glob("rope-*/tokenizer.json")
    shutil.copy(of_bytes, "one.json")
    Path("there").mkdir()
    shutil.copy(of_bytes, "there/tokenizer.json")

    assert train(path, "study=t", "data.tokenizer=one.json") == 0
    assert train(path, "study=t", "data.tokenizer=there") == 0
    assert len([*Path("outputs/t").glob("rope-*")]) == 1

    shutil.copy(of_bpe, "one.json")
    assert train(path, "study=t", "data.tokenizer=one.json") == 0
    assert len([*Path("outputs/t").glob("rope-*")]) == 2


def test_an_evaluation_takes_the_new_path_and_remembers_it(moved, capsys):
    assert posbench("evaluate", str(moved), "ratio=4") == 2
    assert "data.path=PATH" in capsys.readouterr().err

    typed = "data.path=elsewhere/renamed.txt"
    assert posbench("evaluate", str(moved), "ratio=4", typed) == 0
    assert posbench("evaluate", str(moved), "ratio=8") == 0
    lengths = {row.length for row in evaluation_rows(moved)}
    assert {64, 128} <= lengths


@pytest.mark.parametrize("command", ["evaluate", "show"])
def test_another_text_is_refused(moved, command, capsys):
    Path("other.txt").write_text("Another text. " * 3000)
    before = snapshot(moved)
    assert posbench(command, str(moved), "data.path=other.txt") == 2
    assert "other.txt is another text than the run's" in capsys.readouterr().err
    assert snapshot(moved) == before


def test_a_run_is_drawn_with_its_text_at_another_path(moved):
    assert posbench("show", str(moved), "data.path=elsewhere/renamed.txt") == 0
    assert Path("show.png").is_file()


def test_a_packed_study_is_reported_evaluated_and_extended_elsewhere(
    here, monkeypatch, capsys
):
    assert train("data.path=text.txt") == 0
    assert train("data.path=text.txt", "encoding=alibi") == 0
    (run,) = Path("outputs/s").glob("rope-*")
    packed = here / "s.zip"
    assert posbench("runs", "outputs/s", "--pack", str(packed)) == 0
    there = here / "there"
    (there / "texts").mkdir(parents=True)
    Path("text.txt").rename(there / "texts/mine.txt")
    monkeypatch.chdir(there)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "their_cache"))

    assert posbench("runs", str(packed), "--unpack") == 0
    assert run.name in capsys.readouterr().out
    kept = snapshot(here / "here" / run)
    for name, content in snapshot(run).items():
        assert name == "config.yaml" or content == kept[name]
    assert not [*run.rglob("optimizer.pt")]
    path = "data.path=texts/mine.txt"
    assert posbench("evaluate", str(run), "ratio=32", path) == 0
    assert max(row.length for row in evaluation_rows(run)) == 32 * 16
    assert train(path) == 0  # it is finished
    assert train(path, "seed=1") == 0
    assert posbench("report", "outputs/s") == 0
    assert runs("outputs/s")["encoding"].tolist().count("rope") == 2


@pytest.mark.slow
def test_a_pack_with_text_and_optimizer_needs_nothing_else(here):
    assert train("data.path=text.txt", "encoding=alibi") == 0
    (own,) = Path("outputs/s").glob("alibi-*/tokenizer.json")
    own.rename("mine.json")
    shutil.rmtree("outputs")
    words = ["data.path=text.txt", "data.tokenizer=mine.json", "encoding=alibi"]
    assert train(*words) == 0
    (run,) = Path("outputs/s").glob("alibi-*")
    words = ["--pack", "../s.zip", "--with-text", "--with-optimizer"]
    assert posbench("runs", "outputs/s", *words) == 0
    shutil.rmtree("outputs")
    Path("text.txt").unlink()
    Path("mine.json").unlink()
    shutil.rmtree(here / "cache")

    assert posbench("runs", "../s.zip", "--unpack") == 0
    assert [*run.rglob("optimizer.pt")]
    assert posbench("evaluate", str(run), "ratio=4") == 0
    (text,) = Path("outputs/s/text").glob("*/*")
    (tokenizer,) = Path("outputs/s/tokenizer").iterdir()
    words = [f"data.path={text}", f"data.tokenizer={tokenizer}", "encoding=alibi"]
    assert train(*words) == 0
    assert [*Path("outputs/s").glob("alibi-*")] == [run]  # it is finished


def test_own_code_in_a_pack_waits_to_be_approved(here, monkeypatch, capsys):
    Path("mine.py").write_text(OWN)
    assert train("data.path=text.txt", "encoding=mine.py:Mine") == 0
    assert posbench("runs", "outputs/s", "--pack", "../s.zip") == 0
    there = here / "there"
    there.mkdir()
    shutil.copy("text.txt", there)
    monkeypatch.chdir(there)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "their_cache"))

    assert posbench("runs", "../s.zip", "--unpack") == 0
    (run,) = Path("outputs/s").glob("mine-*")
    assert posbench("report", "outputs/s") == 0
    assert posbench("evaluate", str(run), "ratio=4") == 2
    assert "code not approved here" in capsys.readouterr().err
    assert not Path("executed").exists()

    (code,) = Path("outputs/s/code").glob("Mine-*.py")
    assert train("data.path=text.txt", f"encoding={code}:Mine") == 0
    assert [*Path("outputs/s").glob("mine-*")] == [run]  # a moved file is the same
    assert posbench("evaluate", str(run), "ratio=4") == 0


def weights_of_another(files):
    for name in files:
        if name.endswith("model.safetensors"):
            files[name] = files[name][:-1] + b"x"


def settings_of_another(files):
    for name in files:
        if name.endswith("config.yaml"):
            files[name] = files[name].replace(b"seed: 0", b"seed: 7")


def tokenizer_of_another(files):
    for name in files:
        if name.endswith("tokenizer.json"):
            files[name] = files[name].replace(b"<|endoftext|>", b"<|end|>")


def a_name_outside(files):
    files["../../outside"] = b"x"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (weights_of_another, "step-00000008 is incomplete"),
        (settings_of_another, "config.yaml is that of rope-s7-"),
        (tokenizer_of_another, "is not the tokenizer that the run was trained with"),
    ],
)
def test_a_spoilt_pack_is_refused_whole(here, spoil, expected, capsys):
    assert train("data.path=text.txt") == 0
    assert posbench("runs", "outputs/s", "--pack", "s.zip") == 0
    shutil.rmtree("outputs")
    rewrite(Path("s.zip"), spoil)

    assert posbench("runs", "s.zip", "--unpack") == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.endswith("; pack it anew\n")
    assert ".tmp-" not in error
    assert snapshot(Path("outputs")) == {}


def test_nothing_of_a_pack_leaves_the_folder_of_outputs(here):
    assert train("data.path=text.txt") == 0
    assert posbench("runs", "outputs/s", "--pack", "s.zip") == 0
    rewrite(Path("s.zip"), a_name_outside)
    before = {*here.rglob("*")}
    assert posbench("runs", "s.zip", "--unpack") == 0
    assert not [path for path in {*here.rglob("*")} - before if path.name == "outside"]


def test_a_pack_changes_no_file_that_is_there(here):
    assert train("data.path=text.txt") == 0
    assert posbench("runs", "outputs/s", "--pack", "s.zip", "--with-text") == 0
    assert posbench("runs", "s.zip", "--unpack") == 0
    (text,) = Path("outputs/s/text").rglob("*.txt")
    before = text.read_bytes()

    def another_text(files):
        files[text.relative_to("outputs").as_posix()] = b"x"

    rewrite(Path("s.zip"), another_text)
    assert posbench("runs", "s.zip", "--unpack") == 0
    assert text.read_bytes() == before


def test_a_text_is_no_pack(here, capsys):
    assert posbench("runs", "text.txt", "--unpack") == 2
    assert "text.txt: File is not a zip file: expected" in capsys.readouterr().err
    assert posbench("runs", "--unpack") == 2
    assert "--unpack: expected the files" in capsys.readouterr().err


def rewrite(path: Path, spoil) -> None:
    """Change the contents of a zip."""
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    spoil(files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
