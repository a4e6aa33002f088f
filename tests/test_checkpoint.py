"""Checkpoints survive kills and damage."""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import snapshot

import posbench
from posbench.errors import UserError
from posbench.run import checkpoint

B = torch.arange(6).reshape(2, 3)
RNG = [1, [2, 3], None]
NAMES = ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"]


def save(folder: Path, step: int) -> Path:
    weights = {"a": torch.full((64,), float(step)), "b": B}
    moments = {"exp_avg": torch.full((4,), step / 2), "step": step}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1}]}
    state = {"tokens": step * 10, "rng": RNG}
    record = {"schema": 3, "id": "rope-s0-12345678", "status": "running"}
    (folder / "run.json").write_text(json.dumps(record))
    return checkpoint.save(folder, step, weights, optimizer, state)


def steps(folder: Path) -> list[int]:
    return [saved.step for saved in checkpoint.every(folder)]


def test_a_new_run_has_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(UserError, match="has no checkpoint"):
        checkpoint.trained(tmp_path)


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path, 3)

    saved = checkpoint.newest(tmp_path)

    assert saved == (3, path)
    assert checkpoint.trained(tmp_path) == saved
    assert path.name == "step-00000003"
    weights = saved.weights()
    assert torch.equal(weights["a"], torch.full((64,), 3.0))
    assert torch.equal(weights["b"], B)
    moments = saved.optimizer()["state"][0]
    assert torch.equal(moments["exp_avg"], torch.full((4,), 1.5))
    state = saved.state()
    assert state == {"tokens": 30, "rng": RNG}


def test_the_two_newest_by_step_are_kept(tmp_path):
    late = 2_000_000_000
    early = 1_000_000
    save(tmp_path, 1)
    # a clock that goes back says nothing
    for step, time in ((9, late), (10, early), (100, early)):
        path = save(tmp_path, step)
        os.utime(path, (time, time))

    assert steps(tmp_path) == [100, 10]


def test_what_is_no_checkpoint_is_not_deleted(tmp_path):
    foreign = tmp_path / "checkpoint" / "step-final"
    foreign.mkdir(parents=True)
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert foreign.exists()


def test_a_damaged_checkpoint_goes_once_the_run_is_beyond_its_predecessor(tmp_path):
    save(tmp_path, 10)
    damaged = save(tmp_path, 100)
    (damaged / "state.json").write_bytes(b"")

    save(tmp_path, 15)  # the run went on from 10

    assert steps(tmp_path) == [15, 10]
    assert checkpoint.newest(tmp_path).step == 15


def damaged(whole: bytes) -> Iterator[bytes]:
    """Yield a file that is cut short, or has one other bit."""
    n = len(whole)
    for size in {0, 1, 7, 8, n // 2, n - 1}:
        yield whole[:size]
    draw = random.Random(0)
    for _ in range(20):
        place = draw.randrange(n)
        bit = draw.randrange(8)
        other = bytearray(whole)
        other[place] ^= 1 << bit
        yield bytes(other)


@pytest.mark.parametrize("name", NAMES)
def test_damage_is_detected_and_the_older_wins(tmp_path, name, caplog):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    for content in damaged(file.read_bytes()):
        caplog.clear()
        file.write_bytes(content)
        assert checkpoint.newest(tmp_path).step == 1
        assert re.search("step-00000002 is .*: it is not used", caplog.text)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_starts_over_where_no_checkpoint_is_complete(tmp_path, name):
    first = save(tmp_path, 1)
    second = save(tmp_path, 2)
    (first / name).write_bytes(b"")
    (second / name).unlink()
    before = snapshot(tmp_path)

    with pytest.raises(UserError, match=r"is complete: .*--restart' starts over"):
        checkpoint.newest(tmp_path)

    assert snapshot(tmp_path) == before


def test_of_a_finished_run_the_weights_alone_are_needed(tmp_path):
    path = save(tmp_path, 2)
    (path / "optimizer.pt").unlink()

    trained = checkpoint.trained(tmp_path)

    assert trained.step == 2
    assert checkpoint.at(tmp_path, 2) == (2, path)


def test_no_module_loads_pickles():
    for path in Path(posbench.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        assert "pickle.load" not in source
        assert "allow_pickle=True" not in source
        assert "weights_only=False" not in source
        others = source.replace("safetensors.torch.load(", "")
        for line in others.splitlines():
            if "torch.load(" in line:
                assert "weights_only=True" in line, path
