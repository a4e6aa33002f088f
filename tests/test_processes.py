"""Several processes that train one run: they give what one gives, and what ends one of
them ends all.
"""

import functools
import gc
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support import changed, encoded, start_child, write_words

import posbench.training.train
from posbench.config.schema import Config
from posbench.errors import RunFailed, Stopped, UserError
from posbench.launch import run as launch
from posbench.launch.plans import Plan
from posbench.processes import Place, World, joined, place
from posbench.run import checkpoint
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.run import load_record
from posbench.terminal import exits
from posbench.training.step import Trainer, begin_update
from posbench.training.train import train

STEPS = 12


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    name = "lo" if sys.platform == "linux" else "lo0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)


@pytest.fixture
def config(tiny_config, tmp_path):
    write_words(tmp_path)
    data = {"path": str(tmp_path / "text.txt")}
    evaluation = {"batch_tokens": 128}
    runtime = {"validate_every_steps": 6, "checkpoint_every_steps": 5}
    runtime["cache"] = str(tmp_path / "cache")
    return changed(tiny_config, data=data, evaluation=evaluation, runtime=runtime)


def together(size: int, folder: Path, work: Callable[[World], object]) -> None:
    """Do the same work in this process and in forks of it."""
    # a fork would wait for the threads of a process group that an earlier test's
    # traceback still holds
    gc.collect()
    store = f"file://{folder}.store-{time.monotonic_ns()}"

    def process(rank: int) -> None:
        with joined(Place(rank, size, rank, store)) as world:
            work(world)

    others = [start_child(functools.partial(process, rank)) for rank in range(1, size)]
    try:
        process(0)
    finally:
        codes = [os.waitpid(other, 0)[1] for other in others]
    assert not any(codes)


def train_together(config: Config, folder: Path, size: int) -> None:
    together(size, folder, lambda world: train(config, folder, [], world=world))


def logged(folder: Path, name: str) -> list[float]:
    return [row[name] for row in training_rows(folder) if name in row]


def check_alike(folder: Path, other: Path) -> None:
    """Compare losses and norms up to rounding, and the rows of evaluations of the same
    windows.
    """
    # AdamW begins with the signs of gradients: what rounds to another sign shows in
    # later norms, not in losses.
    tolerances = {"train/loss": 1e-6, "val/loss": 1e-6, "train/grad_norm": 1e-5}
    for name, relative in tolerances.items():
        expected = pytest.approx(logged(folder, name), rel=relative, abs=1e-6)
        assert logged(other, name) == expected
    assert len(logged(folder, "train/loss")) == STEPS
    assert logged(other, "val/accuracy") == logged(folder, "val/accuracy")

    rows = evaluation_rows(other)
    for row, expected in zip(rows, evaluation_rows(folder), strict=True):
        assert row.status == "ok"
        assert row.nll == pytest.approx(expected.nll, abs=1e-6)
        assert row.targets_sha256 == expected.targets_sha256
        assert row.n_tokens == expected.n_tokens
        assert row.accuracy == expected.accuracy
        assert row.exact_match == expected.exact_match


def test_two_processes_give_what_one_gives(config, tmp_path):
    updates = {"accumulation": 2, "tokens": 16 * 8 * STEPS * 2}
    config = changed(encoded(config, "randomized"), training=updates)

    train(config, tmp_path / "one", [])
    train_together(config, tmp_path / "two", 2)

    check_alike(tmp_path / "one", tmp_path / "two")
    record = load_record(tmp_path / "two")
    assert record["status"] == "done"
    assert record["attempt"]["processes"] == 2
    assert record["cpu_seconds"] > 0


@pytest.mark.slow
def test_four_processes_give_what_one_gives_on_a_task(config, tmp_path):
    task = {"name": "copy", "shortest": 2, "longest": 7, "vocabulary": 4}
    data = {"name": "problems", "source": "task", "path": None, "task": task}
    asked = {"protocols": ("problems",), "ratios": (1.0, 2.0), "blocks": 9}
    config = changed(config, data=data, evaluation=asked)

    train(config, tmp_path / "one", [])
    train_together(config, tmp_path / "four", 4)

    check_alike(tmp_path / "one", tmp_path / "four")


def send_signal_at(step: int, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to one process at an update."""

    def update(trainer: Trainer, batch: Any, number: int, rate: float) -> Any:
        # it reads the rows that it computes
        assert len(batch.ids) * trainer.world.size == trainer.training.batch_size
        if number == step and trainer.world.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin_update(trainer, batch, number, rate)

    patch.setattr(posbench.training.train, "begin_update", update)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ahead"), [(3, 0), (2, 1)])
def test_a_signal_to_one_stops_all_after_the_same_update_and_the_run_goes_on_to_the_bit(
    config, tmp_path, monkeypatch, size, ahead
):
    training = {"batch_size": 6, "tokens": 16 * 6 * STEPS}
    config = changed(config, training=training, runtime={"log_every_steps": 4})
    # as on GPUs, an update is read one later
    monkeypatch.setattr(posbench.training.train, "_AHEAD", {"cpu": ahead})
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    train_together(config, whole, size)

    with monkeypatch.context() as patch:
        send_signal_at(7 - ahead, 1, patch)
        with pytest.raises(Stopped, match="SIGTERM after step 8; saved") as stopped:
            train_together(config, cut, size)
    record = load_record(cut)
    train_together(config, cut, size)

    assert stopped.value.exit_code == 143
    assert record["status"] == "stopped"
    assert record["reason"] == "signal"
    assert checkpoint.trained(cut).step == STEPS
    weights = checkpoint.trained(cut).weights()
    expected = checkpoint.trained(whole).weights()
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def be_killed(*given: Any) -> None:
    """Stand in for training: the first rank waits for a message of the second."""
    world = given[-1]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world.from_first()


def fail(*given: Any) -> None:
    """Stand in for training: the first rank is busy as the second fails."""
    world = given[-1]
    if world.rank == 1:
        raise RunFailed("no room", reason="oom")
    time.sleep(200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "text", "code"),
    [
        (be_killed, "rank 1 of 2 was killed by SIGKILL", 137),
        (fail, "rank 1 of 2 failed: no room", 1),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_is_named_in_one_line_with_its_exit_code(
    config, tmp_path, monkeypatch, capfd, work, text, code
):
    monkeypatch.setattr(launch.training, "train", work)
    # a busy machine ends processes slowly
    monkeypatch.setattr(launch, "_GRACE_SECONDS", 2.0)
    plan = Plan(changed(config, runtime={"processes": 2}), tmp_path / "run", ())
    began = time.monotonic()

    assert exits.run(lambda: launch.run(plan)) == code

    assert time.monotonic() - began < 150
    assert not multiprocessing.active_children()
    errors = re.findall(r"^error: .*", capfd.readouterr().err, flags=re.M)
    assert errors == [f"error: {text}"]
    record = load_record(tmp_path / "run")
    assert record["status"] == "failed"
    assert record["message"] == text


def test_a_process_that_nobody_placed_is_alone():
    assert place(4) is None


def test_srun_gives_a_process_its_place(monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")

    assert place(4) == (3, 4, 1, "tcp://127.0.0.1:20217")
    assert place(1) is None  # each task is a run of its own


@pytest.fixture
def under_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")


def test_torchrun_gives_a_process_its_place_also_under_slurm(
    under_torchrun, monkeypatch
):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert place(1) == (2, 4, 0, "env://")


def test_as_many_processes_are_started_as_are_asked_for(under_torchrun, config):
    plan = Plan(changed(config, runtime={"processes": 2}), Path("run"), ())
    with pytest.raises(UserError, match=r"runtime.processes is 2, but 4 were started"):
        launch.train(plan)


@pytest.mark.parametrize(
    ("world", "asked"),
    [
        (World(), "cuda:1"),
        (World(5, 8, local_rank=1), "cuda"),
    ],
)
def test_each_process_has_a_gpu_of_its_own(monkeypatch, world, asked):
    current = Mock()
    monkeypatch.setattr(torch.cuda, "set_device", current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)

    world.device(torch.device(asked))

    current.assert_called_once_with(torch.device("cuda:1"))


def test_one_process_on_the_current_gpu_leaves_it_current(monkeypatch):
    current = Mock()
    monkeypatch.setattr(torch.cuda, "set_device", current)
    World().device(torch.device("cuda"))
    current.assert_not_called()


@pytest.mark.parametrize(
    ("given", "begun", "expected"),
    [
        ({}, False, "expandable_segments:True"),
        ({}, True, None),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, False, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False, None),
    ],
)
def test_segments_grow_unless_cuda_has_begun_or_the_user_has_set_its_memory(
    monkeypatch, given, begun, expected
):
    # so that it is restored
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)

    World().device(torch.device("cuda"))

    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


def test_several_processes_run_on_cpus_or_gpus():
    two = World(0, 2)
    assert two.device(torch.device("cpu")).type == "cpu"
    message = "device is mps: 2 processes run on cpu, or on cuda with a GPU each"
    with pytest.raises(UserError, match=message):
        two.device(torch.device("mps"))
