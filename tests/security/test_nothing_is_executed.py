"""Nothing in a file is executed: pickles, code beside a model or a data set, and tags of YAML."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import posbench

from posbench.config.schema import DataConfig
from posbench.data import text
from posbench.run import checkpoint


class Payload:
    """What makes a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.canary}",)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that is there if something was executed."""
    return tmp_path / "executed"


@pytest.mark.parametrize("flag", ["", "1"])
def test_a_pickle_in_a_checkpoint_is_refused(
    tmp_path: Path, canary: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", flag)
    checkpoint.save(tmp_path, 1, {"a": torch.zeros(1)}, {"state": Payload(canary)}, {})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with pytest.raises(pickle.UnpicklingError):
        found.optimizer()
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
        content = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')")
    torch.save({"a": Payload(canary)}, folder / "pytorch_model.bin")
    assert posbench("evaluate", str(folder), f"runtime.outputs={tmp_path / 'out'}") == 2
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("error: ")
    assert not canary.exists()


def test_a_data_set_of_code_is_text(tmp_path: Path, canary: Path, tiny_config: Any) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "set.py").write_text(f"open({str(canary)!r}, 'w')")
    torch.save({"a": Payload(canary)}, folder / "train.pkl")
    values = {**vars(tiny_config.data), "path": str(folder)}
    config = DataConfig(**values)
    splits, _ = text.load(config, text.locate(config), tmp_path)
    assert "executed" in "".join(splits["train"])  # read as prose would be
    assert not canary.exists()
