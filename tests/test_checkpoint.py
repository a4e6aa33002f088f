"""Checkpoints survive kills and damage."""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest
import torch
from support import snapshot

import posbench
from posbench.errors import UserError
from posbench.run import checkpoint

NAMES = ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"]


def save(folder: Path, step: int, size: int = 64) -> Path:
    model = {"a": torch.full((size,), float(step)), "b": torch.arange(6).reshape(2, 3)}
    optimizer = {
        "state": {0: {"exp_avg": torch.full((4,), step / 2), "step": step}},
        "param_groups": [{"lr": 0.1}],
    }
    return checkpoint.save(
        folder, step, model, optimizer, {"tokens": step * 10, "rng": [1, [2, 3], None]}
    )


def newest_step(folder: Path) -> int | None:
    loaded = checkpoint.newest(folder)
    return None if loaded is None else loaded.step


def steps(folder: Path) -> list[int]:
    return [each.step for each in checkpoint.every(folder)]


def test_what_is_saved_is_loaded_and_has_its_digests(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(UserError, match="has no checkpoint"):
        checkpoint.trained(tmp_path)
    path = save(tmp_path, 3)
    loaded = checkpoint.newest(tmp_path)
    assert loaded == checkpoint.trained(tmp_path) == (3, path)
    assert path.name == "step-00000003"
    weights = loaded.weights()
    assert torch.equal(weights["a"], torch.full((64,), 3.0))
    assert weights["b"].dtype == torch.int64
    assert torch.equal(loaded.optimizer()["state"][0]["exp_avg"], torch.full((4,), 1.5))
    assert loaded.state() == {"tokens": 30, "rng": [1, [2, 3], None]}
    entries = json.loads((path / "manifest.json").read_text())["files"]
    digests = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in NAMES[:3]
    }
    assert {name: entry["sha256"] for name, entry in entries.items()} == digests
    assert {file.name for file in path.iterdir()} == set(NAMES)


def test_the_two_newest_by_step_are_kept_and_nothing_foreign_is_deleted(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoint" / "step-final").mkdir()
    for step, seconds in ((9, 2_000_000_000), (10, 1_000_000), (100, 1_000_000)):
        # a clock that goes back says nothing
        os.utime(save(tmp_path, step), (seconds, seconds))
    assert steps(tmp_path) == [100, 10]
    assert (tmp_path / "checkpoint" / "step-final").exists()
    (tmp_path / "checkpoint" / "step-00000100" / "state.json").write_bytes(b"")
    save(tmp_path, 15)  # the run went on from 10
    assert steps(tmp_path) == [15, 10]
    assert newest_step(tmp_path) == 15


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_detected_and_the_older_wins(tmp_path, name, caplog):
    older = save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    whole = file.read_bytes()
    draw = random.Random(0)
    truncated = [whole[:size] for size in {0, 1, 7, 8, len(whole) // 2, len(whole) - 1}]
    bits = [draw.randrange(8 * len(whole)) for _ in range(20)]
    flipped = [
        (int.from_bytes(whole, "big") ^ 1 << bit).to_bytes(len(whole), "big")
        for bit in bits
    ]
    for damaged in (*truncated, *flipped):
        caplog.clear()
        file.write_bytes(damaged)
        assert newest_step(tmp_path) == 1
        assert "step-00000002 is incomplete" in caplog.text
    file.unlink()
    assert newest_step(tmp_path) == 1
    (older / name).write_bytes(b"")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match="is complete: --restart starts over"):
        checkpoint.newest(tmp_path)
    assert snapshot(tmp_path) == before, "nothing starts over and nothing is written"


def test_of_a_finished_run_the_weights_alone_are_needed(tmp_path):
    path = save(tmp_path, 2)
    (path / "optimizer.pt").unlink()
    assert checkpoint.trained(tmp_path).step == 2
    assert checkpoint.at(tmp_path, 2) == (2, path)


def test_no_module_loads_pickles():
    for path in Path(posbench.__file__).parent.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            pickled = "torch.load(" in line and "safetensors.torch.load(" not in line
            assert not pickled or "weights_only=True" in line, f"{path.name}: {line}"
            assert not any(
                call in line
                for call in ("pickle.load", "allow_pickle=True", "weights_only=False")
            ), line
