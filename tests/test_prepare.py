"""Preparing text: for a later training, and in little memory."""

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_data
from support import TINY, posbench, write_text

from posbench.config.schema import DataConfig
from posbench.data import corpus, tokens


def config(path: Path | None, **changes: Any) -> DataConfig:
    return test_data.config(path=path, **{"vocab_size": 300, "test_pieces": 30, **changes})


def many(folder: Path, count: int = 60, words: int = 400) -> Path:
    """Documents of words in random order, so that none shares a passage with another."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(" ".join(f"naïve{rng.randrange(999)}" for _ in range(words)))
    return folder


def entry(cache: Path) -> Path:
    (found,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    return found


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
    assert posbench("prepare", *same) == 0
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
tokens.prepare(DataConfig(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))
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
        alone = {**os.environ, "RAYON_NUM_THREADS": "1"}
        peaks.append(int(subprocess.run(run, capture_output=True, text=True, check=True, env=alone).stdout))
    assert peaks[1] < peaks[0] + 16 * 2**20  # of 11 MB more text, and 23 MB more tokens
