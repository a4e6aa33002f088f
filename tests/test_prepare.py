"""Preparing text: killed and gone on with, in several processes, in little memory, and found again without reading."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_data
from support import TINY, posbench, snapshot, write_text

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import apart, corpus, hub, kept, texts, tokenizer, tokens
from posbench.errors import UserError


def config(path: Path | None, **changes: Any) -> DataConfig:
    return test_data.config(path=path, **{"vocab_size": 300, "test_pieces": 30, **changes})


def many(folder: Path, count: int = 60, words: int = 400) -> Path:
    """Documents of words in random order, so that none shares a passage with another."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(" ".join(f"naïve{rng.randrange(999)}" for _ in range(words)))
    return folder


def entry(cache: Path, suffix: str = "") -> Path:
    (found,) = (path for path in (cache / "tokens").iterdir() if path.is_dir() and path.suffix == suffix)
    return found


def bytes_of(cache: Path) -> dict[str, bytes]:
    """The files of the only tokens in a cache."""
    return {name: content for name, content in snapshot(entry(cache)).items() if name != kept.SEEN}


# What runs in the process that is killed: it ends itself, as SIGKILL does, at a point of the preparation.
KILLED = """
import os, pathlib, signal, sys, json
from posbench.config.schema import DataConfig
from posbench.data import kept, texts, tokens

point, left = sys.argv[3], int(sys.argv[4])
module, name = {"read": (texts.bounds.Count, "add"), "seal": (kept, "seal"), "part": (tokens._Parts, "end")}[point]
done = getattr(module, name)

def killed(*arguments):
    global left
    result = done(*arguments)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(module, name, killed)
tokens.PART_TOKENS = 3000
tokens.prepare(DataConfig(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "times", "again"),
    [
        ("part", 4, []),
        ("read", 20, ["read", "learn"]),
        ("seal", 1, ["learn"]),  # the documents are there
        ("seal", 3, []),  # where each split's are, and the tokenizer
        ("part", 1, []),
        ("seal", 4, []),  # the tokens themselves
    ],
)
def test_a_killed_preparation_goes_on_where_it_was_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, times: int, again: list[str]
) -> None:
    settings, cache = config(many(tmp_path / "text")), tmp_path / "cache"
    whole = tokens.prepare(settings, tmp_path / "whole")
    arguments = [json.dumps(dataclasses.asdict(settings)), str(cache), point, str(times)]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    work = entry(cache, ".work")
    calls: list[str] = []
    encoded = 0
    encode, learn, write = tokenizer.Tokenizer.encode, tokens.train_bpe, texts.write

    def counted(self: tokenizer.Tokenizer, batch: list[str]) -> list[np.ndarray]:
        nonlocal encoded
        encoded += sum(map(len, batch))
        return encode(self, batch)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode", counted)
    monkeypatch.setattr(tokens, "train_bpe", lambda *given: (calls.append("learn"), learn(*given))[1])
    monkeypatch.setattr(texts, "write", lambda *given: (calls.append("read"), write(*given))[1])
    expected = sum(len(path.read_text()) for path in (tmp_path / "text").iterdir())
    if point == "part":
        parts = (work / "train.parts").read_text().splitlines()
        assert len(parts) == times
        expected -= np.load(work / "splits" / "train.npy")[: json.loads(parts[-1])[0], 2].sum()
    made = tokens.prepare(settings, cache)
    assert calls == again
    assert encoded == (0 if times == 4 and point == "seal" else expected)
    assert made.record == whole.record and whole.record["split"] == "document"
    assert bytes_of(cache) == bytes_of(tmp_path / "whole")
    assert not work.exists()


@pytest.mark.full
def test_a_part_that_is_not_what_was_written_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, cache = config(many(tmp_path / "text"), tokenizer="bytes"), tmp_path / "cache"
    monkeypatch.setattr(tokens, "PART_TOKENS", 3000)
    tokens.prepare(settings, tmp_path / "whole")

    class Killed(BaseException):
        pass

    for damage in ("middle", "torn", "lines", "starts", "documents"):
        end, left = tokens._Parts.end, 6

        def killed(parts: tokens._Parts, end: Callable[[tokens._Parts], None] = end) -> None:
            nonlocal left
            end(parts)
            left -= 1
            if not left:
                raise Killed

        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(tokens._Parts, "end", killed)
            tokens.prepare(settings, cache)
        work = entry(cache, ".work")
        ids = work / "made" / "train.ids"
        if damage == "middle":
            content = bytearray(ids.read_bytes())
            content[len(content) // 2] ^= 1
            ids.write_bytes(content)
        elif damage == "torn":
            ids.write_bytes(ids.read_bytes()[:-3])
        elif damage == "lines":
            (work / "train.parts").write_bytes((work / "train.parts").read_bytes()[:-30] + b"[1e99, null, {}]\n\xff")
        elif damage == "starts":
            (work / "train.starts").unlink()
        else:
            text = work / "documents" / "text"
            text.write_bytes(text.read_bytes().replace(b"na", b"ma", 1))
        tokens.prepare(settings, cache)
        assert bytes_of(cache) == bytes_of(tmp_path / "whole"), damage
        shutil.rmtree(entry(cache))


@pytest.mark.full
def test_tokens_do_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, pids = many(tmp_path / "text"), set()
    encode = apart._Process.encode
    tokens.prepare(config(text), tmp_path / "here")
    monkeypatch.setattr(apart._Process, "encode", lambda one, batch: (pids.add(one.process.pid), encode(one, batch))[1])
    monkeypatch.setattr(tokens, "ALONE_CHARACTERS", 0)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 2000)
    tokens.prepare(config(text), tmp_path / "apart", n_jobs=3)
    assert 3 <= len(pids) <= 9  # at most three for each split
    assert bytes_of(tmp_path / "apart") == bytes_of(tmp_path / "here")
    with pytest.raises(UserError, match="the tokenizer ended its process"):
        monkeypatch.setattr(apart._Process, "encode", lambda one, batch: (one.process.kill(), encode(one, batch))[1])
        tokens.prepare(config(text, vocab_size=301), tmp_path / "apart", n_jobs=3)


def test_a_text_that_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_SETTLED_NS", 0)
    settings, cache = config(many(tmp_path / "text"), tokenizer="bytes"), tmp_path / "cache"
    read: list[str] = []
    sha256 = files.sha256

    def counted(path: Path) -> bytes:
        read.append(path.name)
        return sha256(path)

    monkeypatch.setattr(files, "sha256", counted)
    first = tokens.prepare(settings, cache)
    assert {"000.txt", "train.ids"} <= set(read)
    read.clear()
    assert tokens.prepare(settings, cache).record == first.record
    assert read == []

    def changed_in_secret(path: Path) -> None:
        """Change a letter, and set the times back."""
        before, content = path.stat(), bytearray(path.read_bytes())
        content[7] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns

    ids = np.array(first.train.ids)
    changed_in_secret(entry(cache) / "train.ids")
    assert np.array_equal(tokens.prepare(settings, cache).train.ids, ids)
    changed_in_secret(tmp_path / "text" / "000.txt")
    assert tokens.prepare(settings, cache).record["sha256"] != first.record["sha256"]
    for nonsense in ("[]", '{"a": 3}', '{"%s": [1, 2]}' % (tmp_path / "text" / "000.txt"), "\xff"):
        for note in cache.glob("revisions/*.json"):
            note.write_text(nonsense, encoding="latin-1")
        read.clear()
        tokens.prepare(settings, cache)
        assert len(read) == 60


def test_documents_read_while_they_are_downloaded_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(of: hub.Rows, split: str, stream: bool) -> Iterator[str]:
        assert stream
        return (path.read_text() for path in sorted((tmp_path / "text").iterdir()))

    many(tmp_path / "text")
    monkeypatch.setattr(hub, "resolve", lambda *_: "c0ffee")
    monkeypatch.setattr(hub, "_rows", rows)
    settings = config(None, source="hub", dataset="a/b", splits={"train": "train"}, max_documents=50, tokenizer="bytes")
    first = tokens.prepare(settings, tmp_path / "cache")
    assert sum(first.record["documents"].values()) == 50
    monkeypatch.setattr(hub, "_rows", None)
    again = tokens.prepare(dataclasses.replace(settings, tokenizer="bpe"), tmp_path / "cache")
    assert again.record["sha256"] == first.record["sha256"]


def test_halves_of_many_held_out_documents_keep_their_order(tmp_path: Path) -> None:
    many(tmp_path / "text/train", 20)
    held_out = [path.read_text() for path in sorted(many(tmp_path / "text/valid", 40, 401).iterdir())]
    settings = config(tmp_path / "text")
    documents = corpus.load(settings, corpus.locate(settings, tmp_path), tmp_path / "work").documents
    order = [[held_out.index(text) for text in documents[split]] for split in ("validation", "test")]
    assert order == [*map(sorted, order)] and sorted(itertools.chain(*order)) == [*range(40)]


def test_prepare_fills_the_cache_that_train_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_text()
    same = [*TINY, "data.path=text.txt", "runtime.cache=cache", "training.tokens=256"]
    assert posbench("prepare", *same, "--n-jobs", "2") == 0
    told = capfd.readouterr().out
    assert re.fullmatch(rf"text: train [\d,]+, validation [\d,]+, test [\d,]+ tokens in {entry(Path('cache'))}\n", told)
    monkeypatch.setattr(tokens, "_write", None)
    assert posbench("train", *same) == 0
    assert not (tmp_path / "outputs" / "none").exists()
    capfd.readouterr()
    assert posbench("prepare", "experiment=tasks") == 2
    assert "has nothing to prepare: problems are made while they are trained on" in capfd.readouterr().err


MEASURED = """
import json, pathlib, sys
from posbench.config.schema import DataConfig
from posbench.data import tokens
tokens.PART_TOKENS, tokens.ALONE_CHARACTERS = 2**20, 0
tokens.prepare(DataConfig(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]), n_jobs=2)
# ru_maxrss would begin at what the process that started this one had.
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell the peak")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    words = [f"word{i}" for i in range(10**5)]
    for times in (1, 8):
        folder = tmp_path / f"{times}"
        folder.mkdir()
        rng = random.Random(0)
        with (folder / "rows.jsonl").open("w") as file:
            for _ in range(400 * times):  # of 4 kB
                file.write(json.dumps({"text": " ".join(rng.choices(words, k=400))}) + "\n")
        settings = json.dumps(dataclasses.asdict(config(folder / "rows.jsonl", tokenizer="bytes")))
        run = [sys.executable, "-c", MEASURED, settings, str(tmp_path / f"cache{times}")]
        peaks.append(int(subprocess.run(run, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < peaks[0] + 16 * 2**20  # of 11 MB more text, and 23 MB more tokens
