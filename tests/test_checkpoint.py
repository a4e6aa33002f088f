"""Checkpoints survive kills, damage and full disks."""

import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from disks import call, calls_to_the_disk, in_child, small_disk
from faults import Boundaries
from support import snapshot

import posbench
from posbench import files
from posbench.errors import RunFailed, UserError
from posbench.run import checkpoint


def save(folder: Path, step: int, size: int = 64) -> Path:
    model = {"a": torch.full((size,), float(step)), "b": torch.arange(6).reshape(2, 3)}
    optimizer = {"state": {0: {"exp_avg": torch.full((4,), step / 2), "step": step}}, "param_groups": [{"lr": 0.1}]}
    return checkpoint.save(folder, step, model, optimizer, {"tokens": step * 10, "rng": [1, [2, 3], None]})


def newest_step(folder: Path) -> int | None:
    loaded = checkpoint.newest(folder)
    return None if loaded is None else loaded.step


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    loaded = checkpoint.newest(tmp_path)
    assert loaded is not None and (loaded.step, loaded.path) == (3, path)
    weights = loaded.weights()
    assert torch.equal(weights["a"], torch.full((64,), 3.0)) and weights["b"].dtype == torch.int64
    assert torch.equal(loaded.optimizer()["state"][0]["exp_avg"], torch.full((4,), 1.5))
    assert loaded.state() == {"tokens": 30, "rng": [1, [2, 3], None]}
    trained = checkpoint.trained(tmp_path)
    assert trained.step == 3 and torch.equal(trained.weights()["a"], weights["a"])
    assert path.name == "step-00000003"
    assert {file.name for file in path.iterdir()} == {
        "model.safetensors",
        "optimizer.pt",
        "state.json",
        "manifest.json",
    }


def test_the_manifest_holds_size_and_digest_of_every_file(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    entries = json.loads((path / "manifest.json").read_text())["files"]
    assert entries.keys() == {"model.safetensors", "optimizer.pt", "state.json"}
    for name, entry in entries.items():
        data = (path / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_what_takes_its_place_is_whole_on_the_disk_before_and_its_name_after(tmp_path: Path) -> None:
    """After a loss of power there is what was there before, or all of the new."""
    with calls_to_the_disk() as calls:
        path = save(tmp_path, 3)
    forced = [call("forced", file.stat()) for file in path.iterdir()]
    after = [("renamed", path), ("forced", path.parent)]
    assert sorted(calls[:4]) == sorted(forced)
    assert calls[4:] == [call("forced", path.stat()), *(call(what, of.stat()) for what, of in after)]
    file = tmp_path / "run.json"
    file.touch()
    with calls_to_the_disk() as calls:
        files.write(file, b"{}")
    assert calls == [call(what, of.stat()) for what, of in (("forced", file), ("renamed", file), ("forced", tmp_path))]


def test_equal_content_gives_bit_identical_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, 5)
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    with pytest.raises(UserError, match="has no checkpoint"):
        checkpoint.trained(tmp_path)


def test_the_two_newest_by_step_are_kept_and_nothing_foreign_is_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    foreign = tmp_path / "checkpoint" / "step-final"
    foreign.mkdir()
    for step in (9, 10, 100):
        save(tmp_path, step)
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {
        "step-00000010", "step-00000100", "step-final"
    }  # fmt: skip


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    rename = os.rename

    def refusing(source: Path, target: Path) -> None:
        if Path(source).name == "step-00000001":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    save(tmp_path, 3)
    assert "could not remove the old checkpoint" in caplog.text
    assert newest_step(tmp_path) == 3


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
def test_files_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~mask}
    assert path.stat().st_mode & 0o777 == 0o777 & ~mask


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_a_truncated_file_makes_the_older_checkpoint_win(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    whole = file.read_bytes()
    for size in {0, 1, 7, 8, len(whole) // 2, len(whole) - 1}:
        caplog.clear()
        file.write_bytes(whole[:size])
        assert newest_step(tmp_path) == 1, size
        assert "step-00000002 is incomplete" in caplog.text and name in caplog.text
    file.unlink()
    assert newest_step(tmp_path) == 1
    file.write_bytes(whole)
    assert newest_step(tmp_path) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"])
def test_one_flipped_bit_is_always_detected(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    whole = file.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        bit = draw.randrange(8 * len(whole))
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        assert newest_step(tmp_path) == 1, f"bit {bit} of {name}"


def test_what_a_damaged_checkpoint_can_be_made_again_from_is_not_cleaned_away(tmp_path: Path) -> None:
    save(tmp_path, 1)
    weights = save(tmp_path, 2) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert checkpoint.keep_weights(tmp_path, steps=2) == 0 and newest_step(tmp_path) == 1
    weights.write_bytes(whole)
    assert checkpoint.keep_weights(tmp_path, steps=3) == 0  # a training that was begun again is not over
    assert checkpoint.keep_weights(tmp_path, steps=2) > 0 and len(list((tmp_path / "checkpoint").iterdir())) == 1


def test_where_all_are_damaged_nothing_starts_over_and_nothing_is_written(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "optimizer.pt").write_bytes(b"")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"step-00000002.*step-00000001.*--restart starts over"):
        checkpoint.newest(tmp_path)
    assert snapshot(tmp_path) == before


def test_evaluation_needs_the_weights_only(tmp_path: Path) -> None:
    shutil.rmtree(save(tmp_path, 1))
    (save(tmp_path, 2) / "optimizer.pt").unlink()
    assert checkpoint.trained(tmp_path).step == 2


def test_a_run_that_continued_from_before_a_damaged_checkpoint_keeps_its_own(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step)
    (tmp_path / "checkpoint" / "step-00000020" / "state.json").write_bytes(b"")
    assert newest_step(tmp_path) == 10
    save(tmp_path, 15)
    assert newest_step(tmp_path) == 15
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {"step-00000010", "step-00000015"}


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    (path / "state.json").write_bytes(b"")
    save(tmp_path, 10)
    assert newest_step(tmp_path) == 10


# -- kills and full disks ----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before", "half", "after"])
def test_a_kill_at_any_boundary_of_a_save_loses_no_earlier_checkpoint(tmp_path: Path, moment: str) -> None:
    killed = 0
    while True:
        folder = tmp_path / str(killed)
        folder.mkdir()
        for step in (1, 2):
            save(folder, step)

        def work(folder: Path = folder, boundary: int = killed) -> None:
            Boundaries(boundary, moment).install()
            save(folder, 3)

        status = in_child(work)
        files.remove_stale(folder / "checkpoint")
        assert newest_step(folder) == 3 if status == 0 else newest_step(folder) in (2, 3)
        names = {path.name for path in (folder / "checkpoint").iterdir()}
        assert names <= {"step-00000001", "step-00000002", "step-00000003"}, "no temporary is left"
        save(folder, 3)  # and the run goes on
        assert newest_step(folder) == 3
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed >= 12  # four files opened and forced, two folders, the rename, the pruning


def test_a_full_disk_keeps_the_previous_checkpoint_and_says_what_is_needed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "300k") as disk:
        save(disk, 1)
        before = snapshot(disk)
        with pytest.raises(RunFailed, match=r"no room to write .*step-00000002.*bytes needed, .* free") as failure:
            save(disk, 2, size=200_000)
        assert failure.value.reason == "disk"
        assert snapshot(disk) == before
        assert not list(disk.rglob(".tmp-*"))
        save(disk, 2)  # space is there again
        assert newest_step(disk) == 2


def test_a_limit_on_the_size_of_files_keeps_the_previous_checkpoint_and_is_said(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = snapshot(tmp_path)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        with pytest.raises(RunFailed, match="step-00000002"):
            save(tmp_path, 2, size=200_000)

    assert in_child(limited) == 0
    assert snapshot(tmp_path) == before
    assert newest_step(tmp_path) == 1


def test_the_newest_is_so_by_its_step_and_not_by_the_clock(tmp_path: Path) -> None:
    for step, seconds in ((1, 2_000_000_000), (2, 1_000_000)):  # the clock went back by sixty years
        folder = save(tmp_path, step)
        for path in (folder, *folder.iterdir()):
            os.utime(path, (seconds, seconds))
    assert newest_step(tmp_path) == 2
    save(tmp_path, 3)
    assert {path.name for path in (tmp_path / "checkpoint").iterdir()} == {"step-00000002", "step-00000003"}


def test_stale_temporaries_go_and_foreign_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ours = files.temporary(folder / "step-00000001")
    ours.mkdir()
    (ours / "model.safetensors").touch()
    files.temporary(folder / "run.json").touch()
    for foreign in (".tmp-notes", ".tmp-0123", "notes.txt"):
        (folder / foreign).touch()
    files.remove_stale(folder)
    assert {path.name for path in folder.iterdir()} == {".tmp-notes", ".tmp-0123", "notes.txt"}


def test_no_other_module_loads_pickles() -> None:
    for path in Path(posbench.__file__).parent.rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            pickled = "torch.load(" in line and "safetensors.torch.load(" not in line
            assert not pickled or "weights_only=True" in line, f"{path.name}: {line}"
            assert not any(call in line for call in ("pickle.load", "allow_pickle=True", "weights_only=False")), line
