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
def canary(tmp_path: Path) -> Path:
    """Return the path of a file that exists if something was executed."""
    return tmp_path / "executed"


@pytest.mark.parametrize("flag", ["", "1"])
def test_pickles_are_refused(
    tmp_path: Path, canary: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", flag)
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(1)}, {"state": Payload(canary)}, {})
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    with pytest.raises(pickle.UnpicklingError):
        newest.optimizer()
    assert not canary.exists()


@pytest.mark.parametrize("kind", ["code", "pickle"])
def test_a_huggingface_folder_runs_no_code_and_opens_no_pickle(
    tmp_path: Path, canary: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    folder.mkdir()
    content: dict[str, Any] = {"model_type": "llama", "vocab_size": 8}
    if kind == "code":
        content = {
            "model_type": "evil",
            "auto_map": {
                "AutoConfig": "evil.Evil",
                "AutoModelForCausalLM": "evil.Evil",
            },
        }
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    torch.save({"a": Payload(canary)}, folder / "pytorch_model.bin")
    assert posbench("evaluate", str(folder), f"runtime.outputs={tmp_path / 'out'}") == 2
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("error: ")
    assert not canary.exists()


def test_a_tokenizer_with_code_is_data_and_its_revision_is_recorded(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "c0ffee", {"mine.py": f"open({str(canary)!r}, 'w')"})
    write(
        folder,
        {
            "tokenizer_config.json": (
                '{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
            )
        },
    )
    tokenizer.raw_bytes().save(folder / "tokenizer.json")

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        assert allow_patterns == ["tokenizer.json"]
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    texts = write(tmp_path / "texts", numbered(25))
    for name, revision in (("org/mine", "c0ffee"), (str(folder), None)):
        made = tokens.prepare(config(path=texts, tokenizer=name), tmp_path / "cache")
        assert (
            made.record.get("tokenizer_revision") == revision
            and made.tokenizer.vocab_size == 257
        )
    assert not canary.exists()


def test_a_data_set_of_code_is_refused_on_the_hub_and_text_in_a_folder(
    tmp_path: Path, canary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "set", {"set.py": f"open({str(canary)!r}, 'w')"})
    torch.save({"a": Payload(canary)}, folder / "train.pkl")
    monkeypatch.setattr(hub, "commit_of", lambda name, revision: "c0ffee")
    with pytest.raises(UserError, match="Dataset scripts are no longer supported"):
        load(config("hub", dataset=str(folder)), tmp_path)
    splits, _ = load(config(path=folder), tmp_path)
    assert "executed" in "".join(splits["train"]) and not canary.exists()


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


@pytest.mark.parametrize(
    "command", [["--help"], pytest.param(["sweep", *RUN], marks=pytest.mark.slow)]
)
def test_nothing_is_imported_from_the_current_folder(
    command: list[str], tmp_path: Path, canary: Path
) -> None:
    """Beside a text there are modules that make the file."""
    write_text(tmp_path)
    for path in map(tmp_path.joinpath, MODULES):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(canary)!r}, 'a')\nraise SystemExit(9)\n")
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
    }
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])

    def status(*options: str) -> int:
        python = [sys.executable, *options, "-m", "posbench", *command]
        return subprocess.run(
            python, cwd=tmp_path, env=environment, capture_output=True, timeout=200
        ).returncode

    # as the console script, whose path is its own
    assert status("-P") == 0 and not canary.exists()
    assert status() != 0 and canary.exists()  # the payload is real
