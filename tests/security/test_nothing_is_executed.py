"""Nothing in a file is executed: pickles, code beside a model, tokenizer or data set,
modules of the current folder.
"""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import TINY, posbench, write_text
from test_data import config, load, numbered, write

from posbench.data import hub, tokenizer, tokens
from posbench.errors import UserError
from posbench.run import checkpoint


class Payload:
    """An object that makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


@pytest.fixture
def canary(tmp_path):
    """Return the path of a file that exists if something was executed."""
    return tmp_path / "executed"


@pytest.mark.parametrize("flag", ["", "1"])
def test_pickles_are_refused(tmp_path, canary, flag, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", flag)
    weights = {"a": torch.zeros(1)}
    optimizer = {"state": Payload(canary)}
    record = {"schema": 3, "id": "rope-s0-12345678", "status": "running"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    checkpoint.save(tmp_path, 1, weights, optimizer, {})
    saved = checkpoint.newest(tmp_path)

    with pytest.raises(pickle.UnpicklingError):
        saved.optimizer()

    assert not canary.exists()


OF_CODE = {
    "model_type": "evil",
    "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"},
}
OF_PICKLE = {"model_type": "llama", "vocab_size": 8}


@pytest.mark.parametrize("content", [OF_CODE, OF_PICKLE])
def test_a_huggingface_folder_runs_no_code_and_opens_no_pickle(
    tmp_path, canary, content, capfd
):
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    torch.save({"a": Payload(canary)}, folder / "pytorch_model.bin")

    code = posbench("evaluate", str(folder), f"runtime.outputs={tmp_path / 'out'}")

    printed = capfd.readouterr().err
    lines = printed.strip().splitlines()
    assert code == 2
    assert lines[-1].startswith("error: ")
    assert not canary.exists()


@pytest.fixture
def tokenizer_of_code(tmp_path, canary):
    """Return a folder of a tokenizer whose class is in a file beside it."""
    settings = {"auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    folder = tmp_path / "c0ffee"
    folder.mkdir()
    (folder / "mine.py").write_text(f"open({str(canary)!r}, 'w')")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.raw_bytes().save(folder / "tokenizer.json")
    return folder


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts", numbered(25))


def test_a_tokenizer_of_the_hub_is_data_and_its_revision_is_recorded(
    tmp_path, canary, tokenizer_of_code, texts, monkeypatch
):
    download = Mock(return_value=str(tokenizer_of_code))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)

    settings = config(path=str(texts), tokenizer="org/mine")
    made = tokens.prepare(settings, tmp_path / "cache")

    assert download.call_args.kwargs["allow_patterns"] == ["tokenizer.json"]
    assert made.meta["tokenizer_revision"] == "c0ffee"
    assert made.tokenizer.vocab_size == 257
    assert not canary.exists()


def test_a_tokenizer_of_a_folder_is_data(tmp_path, canary, tokenizer_of_code, texts):
    settings = config(path=str(texts), tokenizer=str(tokenizer_of_code))
    made = tokens.prepare(settings, tmp_path / "cache")

    assert "tokenizer_revision" not in made.meta
    assert made.tokenizer.vocab_size == 257
    assert not canary.exists()


@pytest.fixture
def set_of_code(tmp_path, canary):
    folder = write(tmp_path / "set", {"set.py": f"open({str(canary)!r}, 'w')"})
    torch.save({"a": Payload(canary)}, folder / "train.pkl")
    return folder


def test_a_data_set_of_code_is_refused_on_the_hub(set_of_code, canary, monkeypatch):
    monkeypatch.setattr(hub, "commit_of", lambda name, revision: "c0ffee")
    settings = config("hub", dataset=str(set_of_code))

    with pytest.raises(UserError, match="Dataset scripts are no longer supported"):
        tokens.prepare(settings, set_of_code.parent / "cache")

    assert not canary.exists()


def test_code_in_a_folder_of_text_is_text(set_of_code, canary):
    splits, _ = load(set_of_code)
    text = "".join(splits["train"])
    assert "executed" in text
    assert not canary.exists()


MODULES = (
    "yaml.py",
    "torch.py",
    "json.py",
    "hydra_plugins/evil.py",
    "posbench/__init__.py",
    "wandb/__init__.py",
)
RUN = [
    "encoding=rope",
    *TINY,
    "data.path=text.txt",
    "training.tokens=128",
    "runtime.cache=cache",
]


COMMANDS = [["--help"], pytest.param(["sweep", *RUN], marks=pytest.mark.slow)]


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_imported_from_the_current_folder(
    command, tmp_path, canary, monkeypatch
):
    """Beside a text there are modules that make the file."""
    write_text(tmp_path)
    code = f"open({str(canary)!r}, 'a')\nraise SystemExit(9)\n"
    for name in MODULES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    checkout = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", str(checkout))

    def status(*options: str) -> int:
        python = [sys.executable, *options, "-m", "posbench", *command]
        done = subprocess.run(python, capture_output=True, timeout=200)
        return done.returncode

    # as the console script, whose path is its own
    assert status("-P") == 0
    assert not canary.exists()
    # the payload is real
    assert status() != 0
    assert canary.exists()
