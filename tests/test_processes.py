"""Several processes that train one run: they give what one gives, and what ends one of
them ends all.
"""

import functools
import gc
import multiprocessing
import os
import re
import shutil
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
from posbench import machine
from posbench.config.overrides import apply
from posbench.config.schema import Config
from posbench.errors import RunFailed, Stopped, UserError
from posbench.evaluation.job import evaluate_run
from posbench.huggingface import search
from posbench.launch import execute as launch
from posbench.launch.plans import Plan
from posbench.processes import Place, World, joined, place, refuse_several
from posbench.reports.one_run import print_results
from posbench.run import checkpoint
from posbench.run.folder import evaluated_config
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.saved import load_record
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
    runtime = {
        "validate_every_steps": 6,
        "checkpoint_every_steps": 5,
        "cache": str(tmp_path / "cache"),
    }
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

    others = []
    for rank in range(1, size):
        other = start_child(functools.partial(process, rank))
        others.append(other)
    statuses = []
    try:
        process(0)
    finally:
        for other in others:
            _, status = os.waitpid(other, 0)
            statuses.append(status)
    assert set(statuses) <= {0}


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
        ours = logged(folder, name)
        theirs = logged(other, name)
        assert theirs == pytest.approx(ours, rel=relative, abs=1e-6)
    assert len(logged(folder, "train/loss")) == STEPS
    assert logged(other, "val/accuracy") == logged(folder, "val/accuracy")

    expected_rows = evaluation_rows(folder)
    rows = evaluation_rows(other)
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row.status == "ok"
        assert row.nll == pytest.approx(expected.nll, rel=1e-6)
        assert row.targets_sha256 == expected.targets_sha256
        assert row.n_tokens == expected.n_tokens
        assert row.accuracy == expected.accuracy
        assert row.exact_match == expected.exact_match


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_give_what_one_gives(config, tmp_path, optimizer):
    updates = {"accumulation": 2, "tokens": 16 * 8 * STEPS * 2, "optimizer": optimizer}
    config = changed(encoded(config, "randomized"), training=updates)
    one = tmp_path / "one"
    two = tmp_path / "two"

    train(config, one, [])
    train_together(config, two, 2)

    check_alike(one, two)
    record = load_record(two)
    assert record.status == "done"
    assert record.attempt["processes"] == 2
    assert record.cpu_seconds > 0


@pytest.mark.slow
def test_four_processes_give_what_one_gives_on_a_task(config, tmp_path):
    task = {"name": "copy", "shortest": 2, "longest": 7, "vocabulary": 4}
    data = {"name": "problems", "source": "task", "path": None, "task": task}
    asked = {"protocols": ("problems",), "ratios": (1.0, 2.0), "blocks": 9}
    config = changed(config, data=data, evaluation=asked)
    one = tmp_path / "one"
    four = tmp_path / "four"

    train(config, one, [])
    train_together(config, four, 4)

    check_alike(one, four)


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluation rows of a run, without what they took."""
    rows = []
    for row in evaluation_rows(folder):
        numbers = row.to_json()
        del numbers["seconds"], numbers["peak_memory_bytes"]
        rows.append(numbers)
    return rows


def test_two_processes_evaluate_to_the_bit_as_one_does(config, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    train(config, one, [])
    shutil.copytree(one, two)
    asked = apply(config, ["ratio=4", "probe=repeat,passkey", "extension=ntk"])

    evaluate_run(one, asked)
    together(2, two, lambda world: evaluate_run(two, asked, world))

    assert {row["length"] for row in numbers_of(one)} >= {16, 64}
    assert {row["task"] for row in numbers_of(one)} >= {"passkey", "repeat"}
    assert numbers_of(two) == numbers_of(one)


@pytest.mark.slow
def test_posbench_evaluate_starts_processes(config, tmp_path, capfd, usual_mixture):
    one, two = tmp_path / "one", tmp_path / "two"
    train(config, one, [])
    shutil.copytree(one, two)

    launch.evaluate_runs(
        {one: evaluated_config(one, ["ratio=4", "threads=1"])}, print_results
    )
    printed = capfd.readouterr().out
    launch.evaluate_runs(
        {two: evaluated_config(two, ["ratio=4", "threads=1", "processes=3"])},
        print_results,
    )

    assert numbers_of(two) == numbers_of(one)
    assert capfd.readouterr().out.replace(str(two), str(one)) == printed


def test_a_run_that_names_no_threads_does_not_have_those_of_an_earlier_one():
    first = machine.set_threads(None)
    assert machine.set_threads(first + 1) == first + 1
    assert machine.set_threads(None) == first


def test_the_processes_of_a_training_are_not_those_of_its_evaluation(config):
    config = changed(config, runtime={"processes": 2})
    assert apply(config, []).runtime.processes is None
    assert apply(config, ["processes=3"]).runtime.processes == 3


def send_signal_at(step: int, rank: int, patch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to one process at an update."""

    def update(trainer: Trainer, batch: Any, number: int, rate: float) -> Any:
        world = trainer.world
        # it reads the rows that it computes
        assert len(batch.ids) * world.size == trainer.training.batch_size
        if number == step and world.rank == rank:
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
    monkeypatch.setitem(posbench.training.train.AHEAD, "cpu", ahead)
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
    assert record.status == "stopped"
    assert record.reason == "signal"
    saved = checkpoint.trained(cut)
    expected = checkpoint.trained(whole)
    assert saved.step == STEPS
    weights = saved.weights()
    torch.testing.assert_close(weights, expected.weights(), rtol=0, atol=0)


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


FAILURES = [
    (be_killed, "rank 1 of 2 was killed by SIGKILL", 137),
    (fail, "rank 1 of 2 failed: no room", 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("work", "text", "code"), FAILURES)
def test_a_rank_that_fails_ends_the_others_and_is_named_in_one_line_with_its_exit_code(
    config, tmp_path, monkeypatch, capfd, work, text, code
):
    monkeypatch.setattr(launch.training, "train", work)
    in_two = changed(config, runtime={"processes": 2})
    plan = Plan(in_two, tmp_path / "run", ())
    began = time.monotonic()

    exit_code = exits.run(lambda: launch.run(plan))

    seconds = time.monotonic() - began
    assert exit_code == code
    assert seconds < 150
    assert not multiprocessing.active_children()
    printed = capfd.readouterr().err
    errors = re.findall(r"^error: .*", printed, flags=re.M)
    assert errors == [f"error: {text}"]
    record = load_record(tmp_path / "run")
    assert record.status == "failed"
    assert record.message == text


def stop_all(*given: Any) -> None:
    """Stand in for training: its command is stopped before it can save."""
    world = given[-1]
    if world.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(200)


@pytest.mark.slow
def test_processes_that_their_command_stopped_have_not_failed(
    config, tmp_path, monkeypatch
):
    monkeypatch.setattr(launch.training, "train", stop_all)
    in_two = changed(config, runtime={"processes": 2})
    with pytest.raises(Stopped, match="stopped by SIGTERM; the same command") as caught:
        launch.train(Plan(in_two, tmp_path / "run", ()))
    assert caught.value.exit_code == 143


@pytest.mark.slow
def test_processes_that_cannot_meet_say_so_in_one_line(
    config, tmp_path, monkeypatch, capfd
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")  # this machine has none
    in_two = changed(config, runtime={"processes": 2})
    plan = Plan(in_two, tmp_path / "run", ())

    exit_code = exits.run(lambda: launch.run(plan))

    assert exit_code == 1
    printed = capfd.readouterr().err
    (error,) = re.findall(r"^error: .*", printed, flags=re.M)
    assert "cannot reach the other processes of this run: " in error
    assert error.endswith("Unable to find address for: ib0")


def test_a_process_that_nobody_placed_is_alone():
    assert place(4) is None


def test_an_empty_rank_is_none(monkeypatch):
    monkeypatch.setenv("RANK", "")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    assert place(1) is None


BY_SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
}
BY_TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def set_variables(patch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        patch.setenv(name, value)


def test_srun_gives_a_process_its_place(monkeypatch):
    set_variables(monkeypatch, BY_SRUN)

    assert place(4) == (3, 4, 1, "tcp://127.0.0.1:20217")
    assert place(1) is None  # each task is a run of its own


@pytest.fixture
def under_torchrun(monkeypatch):
    set_variables(monkeypatch, BY_TORCHRUN)


def test_torchrun_gives_a_process_its_place_also_under_slurm(
    under_torchrun, monkeypatch
):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert place(1) == (2, 4, 0, "env://")


def test_what_needs_one_process_refuses_several(under_torchrun):
    message = "expected one process: .* not choose an extension or evaluate a Hugging"
    with pytest.raises(UserError, match=message):
        refuse_several()


def test_two_processes_choose_no_extension(config, tmp_path):
    folder = tmp_path / "run"
    train(config, folder, [])
    words = ["extension=search", "length=64", "processes=2"]
    with pytest.raises(UserError, match="expected one process"):
        search.search(folder, words)


def test_as_many_processes_are_started_as_are_asked_for(under_torchrun, config):
    in_two = changed(config, runtime={"processes": 2})
    plan = Plan(in_two, Path("run"), ())
    with pytest.raises(UserError, match=r"runtime.processes is 2, but 4 were started"):
        launch.train(plan)


WITH_GPU_1 = [
    (World(), "cuda:1"),
    (World(5, 8, local_rank=1), "cuda"),
]


@pytest.mark.parametrize(("world", "asked"), WITH_GPU_1)
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
    cpu = torch.device("cpu")
    mps = torch.device("mps")
    assert two.device(cpu) == cpu
    message = "device is mps: 2 processes run on cpu, or on cuda with a GPU each"
    with pytest.raises(UserError, match=message):
        two.device(mps)
