"""Several processes that train one run: they give what one gives, and what ends one of them ends all."""

import dataclasses
import functools
import gc
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import write_words

import posbench.processes
import posbench.training.train
from posbench import machine
from posbench.config.overrides import apply
from posbench.config.schema import Config
from posbench.data.batches import own_rows
from posbench.errors import RunFailed, Stopped, UserError
from posbench.evaluation.job import evaluate_beside, evaluate_run
from posbench.launch import ranks
from posbench.launch.ranks import evaluate_together
from posbench.processes import Joined, World, joined
from posbench.run_folder import checkpoint
from posbench.run_folder.folder import load_config, load_record
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import evaluation_rows
from posbench.terminal import exits
from posbench.terminal.signals import ended_in_words
from posbench.training.step import Learner
from posbench.training.train import train, train_beside

STEPS = 12


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", ranks._loopback())


@pytest.fixture
def config(tiny_config: Config, tmp_path: Path) -> Config:
    write_words(tmp_path)
    return dataclasses.replace(
        tiny_config,
        data=dataclasses.replace(tiny_config.data, path=str(tmp_path / "text.txt")),
        evaluation=dataclasses.replace(tiny_config.evaluation, batch_tokens=128),
        runtime=dataclasses.replace(
            tiny_config.runtime, cache=str(tmp_path / "cache"), validate_every_steps=6, checkpoint_every_steps=5
        ),
    )


def in_process(rank: int, size: int, store: Path, work: Callable[[Joined], object]) -> None:
    def run() -> None:
        with joined(dist.FileStore(str(store), size), rank, size, rank, 1) as world:
            work(world)

    sys.exit(exits.run(run))


def together(
    size: int, folder: Path, first: Callable[[Joined], object], other: Callable[[Joined], object]
) -> list[int]:
    """`first` in this process and `other` in forks of it; returns the exit codes of those."""
    gc.collect()  # a fork would wait for the threads of a process group that an earlier test's traceback still holds
    store = folder.with_name(f"{folder.name}.store-{time.monotonic_ns()}")
    fork = multiprocessing.get_context("fork")
    others = [fork.Process(target=in_process, args=(rank, size, store, other)) for rank in range(1, size)]
    for process in others:
        process.start()
    try:
        with joined(dist.FileStore(str(store), size), 0, size, 0, 1) as world:
            first(world)
    finally:
        for process in others:
            process.join(20)
            assert process.exitcode is not None, "a process does not end"
    return [process.exitcode for process in others]


def trained(config: Config, folder: Path, size: int) -> list[int]:
    return together(
        size, folder, lambda world: train(config, folder, [], world=world), lambda world: train_beside(config, world)
    )


def rows(folder: Path, *names: str) -> list[list[float]]:
    return [[row[name] for name in names] for row in read_jsonl(folder / "metrics.jsonl") if names[0] in row]


def assert_alike(one: Path, other: Path) -> None:
    """Losses and norms to rounding, and the same rows of an evaluation of the same windows."""
    # AdamW begins with the signs of gradients: what rounds to another sign shows in later norms, not in losses.
    for name, relative in (("train/loss", 1e-6), ("validation/nll", 1e-6), ("train/grad_norm", 1e-5)):
        assert rows(other, name) == [pytest.approx(row, rel=relative, abs=1e-6) for row in rows(one, name)]
    assert len(rows(one, "train/loss")) == STEPS
    for row, expected in zip(evaluation_rows(other), evaluation_rows(one), strict=True):
        assert row.nll == pytest.approx(expected.nll, abs=1e-6) and row.status == "ok"
        assert (row.targets_sha256, row.n_tokens) == (expected.targets_sha256, expected.n_tokens)


# -- the same as one ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(("size", "accumulation", "encoding"), [(2, 1, "rope"), (2, 2, "randomized"), (4, 1, "t5")])
def test_several_processes_give_what_one_gives(
    config: Config, tmp_path: Path, size: int, accumulation: int, encoding: str
) -> None:
    config = dataclasses.replace(
        config,
        encoding=dataclasses.replace(config.encoding, name=encoding),
        training=dataclasses.replace(config.training, accumulation=accumulation, tokens=16 * 8 * STEPS * accumulation),
    )
    train(config, tmp_path / "one", [])
    assert trained(config, tmp_path / "several", size) == [0] * (size - 1)
    assert_alike(tmp_path / "one", tmp_path / "several")
    record = load_record(tmp_path / "several")
    assert (record["status"], record["attempt"]["processes"]) == ("done", size)
    assert record["cpu_seconds"] > 0


def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are sent in many messages while others are computed, and updates are read one later."""
    monkeypatch.setattr(posbench.processes, "_BUCKET_BYTES", {"cpu": 4096})
    monkeypatch.setattr(posbench.training.train, "_AHEAD", {"cpu": 1})


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_gradients_that_are_sent_while_others_are_computed_are_the_same(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    training = dataclasses.replace(config.training, accumulation=2, tokens=2 * config.training.tokens)
    config = dataclasses.replace(config, training=training)
    trained(config, tmp_path / "one-message", size)
    as_on_gpus(monkeypatch)
    buckets: list[int] = []
    finish = posbench.processes._Early.finish
    monkeypatch.setattr(
        posbench.processes._Early, "finish", lambda self: (buckets.append(len(self._underway)), finish(self))
    )
    trained(config, tmp_path / "many", size)
    assert len(buckets) == STEPS and set(buckets) == {buckets[0]} and buckets[0] > 3
    one, many = (checkpoint.newest(tmp_path / name).weights() for name in ("one-message", "many"))
    for name, weight in one.items():
        if size == 2:  # of more, a sum's order depends on its place in a message
            assert torch.equal(many[name], weight), name
        torch.testing.assert_close(many[name], weight, atol=1e-4, rtol=0)
    assert rows(tmp_path / "many", "train/loss") == rows(tmp_path / "one-message", "train/loss") or size > 2


@pytest.mark.full
@pytest.mark.parametrize("early", [False, True])
def test_a_process_reads_the_rows_that_it_computes_and_no_others(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    if early:
        as_on_gpus(monkeypatch)
    plain, read = posbench.training.train.begin_update, []

    def update(learner: Learner, batch: Any, step: int, rate: float) -> Any:
        read.append((len(batch.ids), batch.n_scored, batch.n_scored_by_all))
        return plain(learner, batch, step, rate)

    monkeypatch.setattr(posbench.training.train, "begin_update", update)
    trained(config, tmp_path / "run", 4)
    assert read == [(2, 2 * 16, 8 * 16)] * STEPS


def test_own_rows_are_an_equal_share_of_each_part_of_a_batch() -> None:
    assert [own_rows(12, 3, rank, 2) for rank in (0, 1)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert sorted(row for rank in range(4) for row in own_rows(12, 1, rank, 4)) == list(range(12))


@pytest.mark.full
def test_several_processes_train_on_a_task_and_answer_as_one(tiny_config: Config, tmp_path: Path) -> None:
    task = {"name": "copy", "shortest": 2, "longest": 8, "vocabulary": 4}
    config = dataclasses.replace(
        tiny_config,
        data=dataclasses.replace(tiny_config.data, name="problems", source="task", path=None, task=task),
        training=dataclasses.replace(tiny_config.training, train_length=18, tokens=18 * 8 * STEPS),
        evaluation=dataclasses.replace(tiny_config.evaluation, protocols=("problems",), ratios=(1.0, 2.0), blocks=9),
        runtime=dataclasses.replace(tiny_config.runtime, cache=str(tmp_path / "cache"), validate_every_steps=6),
    )
    train(config, tmp_path / "one", [])
    assert trained(config, tmp_path / "several", 2) == [0]
    assert_alike(tmp_path / "one", tmp_path / "several")
    answers = [
        [(row.problem_length, row.offset, row.accuracy, row.exact_match, row.n_blocks) for row in evaluation_rows(run)]
        for run in (tmp_path / "one", tmp_path / "several")
    ]
    assert answers[0] == answers[1] and {row[4] for row in answers[0]} == {9}
    assert rows(tmp_path / "one", "validation/accuracy") == rows(tmp_path / "several", "validation/accuracy") != []


@pytest.mark.full
def test_each_process_computes_its_share_of_the_evaluation_and_has_all_of_it(tmp_path: Path) -> None:
    def work(world: Joined) -> None:
        done: list[int] = []
        assert world.mapped(lambda item: done.append(item) or item * item, range(7)) == [0, 1, 4, 9, 16, 25, 36]
        assert done == list(range(world.rank, 7, 3))
        assert world.mapped(lambda item: item, []) == []
        assert world.from_first("mine" if world.rank == 0 else "theirs") == "mine"

    assert together(3, tmp_path / "run", work, work) == [0, 0]


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_in_another_number_of_processes_and_says_so(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    before: int,
    after: int,
) -> None:
    train(config, tmp_path / "one", [])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="the lights"):
        at(7, patch, 0, RuntimeError("the lights went out"))
        trained(config, tmp_path / "run", before)
    assert trained(config, tmp_path / "run", after) == [0] * (after - 1)
    assert f"continuing with processes {before} -> {after}: the weights will not be those" in caplog.text
    assert load_record(tmp_path / "run")["attempt"]["bit_exact"] is False
    assert_alike(tmp_path / "one", tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_evaluate_weights_to_the_bit_as_one_does(config: Config, tmp_path: Path, size: int) -> None:
    training = dataclasses.replace(config.training, precision="fp32", batch_size=6, tokens=16 * 6 * STEPS)
    config = dataclasses.replace(config, training=training)
    train(config, tmp_path / "run", [])
    expected = [row.nll for row in evaluation_rows(tmp_path / "run")]
    (tmp_path / "run/evaluation.jsonl").unlink()
    trained(config, tmp_path / "run", size)
    assert [row.nll for row in evaluation_rows(tmp_path / "run")] == expected != []


@pytest.fixture
def evaluated_by_one(config: Config, tmp_path: Path) -> tuple[Path, list[str], list[dict[str, Any]]]:
    """A finished run, settings for `posbench evaluate`, and the rows that one process adds."""
    config = with_processes(config, None, threads=1)
    train(config, tmp_path / "run", [])
    asked = ["protocol=sliding,fixed_target", "length=24,40", "extension=ntk"]
    shutil.copytree(tmp_path / "run", tmp_path / "one" / "run")
    evaluate_together(tmp_path / "one" / "run", apply(config, asked))
    expected = numbers(tmp_path / "one" / "run")
    assert len(expected) > len(evaluation_rows(tmp_path / "run"))
    return tmp_path / "run", asked, expected


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Rows of an evaluation and of its blocks, without what they took."""
    rows = [*read_jsonl(folder / "evaluation.jsonl"), *read_jsonl(folder / "evaluation_blocks.jsonl")]
    return [{name: row[name] for name in row if name not in ("seconds", "peak_memory_bytes")} for row in rows]


def evaluating(folder: Path, *settings: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "posbench", "evaluate", str(folder), *settings]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.full
def test_two_processes_evaluate_a_finished_run_to_the_bit_as_one_does(
    evaluated_by_one: tuple[Path, list[str], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, asked, expected = evaluated_by_one
    shares, mapped = list[int](), Joined.mapped

    def seen(world: Joined, work: Callable[[Any], Any], items: Any) -> list[Any]:
        shares.append(world.size)
        return mapped(world, work, items)

    monkeypatch.setattr(Joined, "mapped", seen)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    evaluate_together(folder, apply(load_config(folder), [*asked, "processes=2"]))
    assert shares and set(shares) == {2}
    assert numbers(folder) == expected
    assert load_record(folder)["status"] == "done"


@pytest.mark.full
def test_a_killed_process_of_an_evaluation_ends_it_in_one_line_and_its_rows_are_kept(
    evaluated_by_one: tuple[Path, list[str], list[dict[str, Any]]],
) -> None:
    folder, asked, expected = evaluated_by_one
    before = numbers(folder)
    process = evaluating(folder, *asked, "processes=2")
    until = time.monotonic() + 60
    while not (others := ranks_of(process.pid)):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.01)
    os.kill(others[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 1 and "Traceback" not in errors
    assert [line for line in errors.splitlines() if line.startswith("error: ")] == [
        "error: rank 1 of 2 was killed by SIGKILL"
    ]
    assert numbers(folder) == before, "it had not joined yet"

    def killed(world: Joined) -> None:
        mapped, calls = world.mapped, itertools.count()

        def dying(work: Callable[[Any], Any], items: Any) -> list[Any]:
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return mapped(work, items)

        world.mapped = dying  # type: ignore[method-assign]
        evaluate_beside(folder, dataclasses.replace(saved, evaluation=settings.settings), world)

    saved = load_config(folder)
    settings = apply(saved, asked)
    with pytest.raises(RunFailed, match="another process of this run has ended without a word"):
        together(2, folder, lambda world: evaluate_run(folder, settings, world), killed)
    assert len(before) < len(numbers(folder)) < len(expected)
    evaluate_together(folder, settings)
    assert sorted(map(str, numbers(folder))) == sorted(map(str, expected))


def ranks_of(pid: int) -> list[int]:
    """The processes beyond the first that a process has started; not what it asks the machine by."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return [int(child) for child in children if b"posbench.launch.ranks" in command_of(child)]


def command_of(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_an_evaluation_in_more_processes_than_cores_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(with_processes(config, None, threads=1), tmp_path / "run", [])
    before = numbers(tmp_path / "run")
    monkeypatch.setattr(machine, "cores", lambda: 2)
    saved = load_config(tmp_path / "run")
    for given, expected in (("3", "runtime.processes is 3, .* as many in all as cores here, 2"), ("0", "at least 1")):
        with pytest.raises(UserError, match=expected):
            evaluate_together(tmp_path / "run", apply(saved, ["length=40", f"processes={given}"]))
    assert numbers(tmp_path / "run") == before


# -- how it ends -------------------------------------------------------------------------------------------------------


def at(step: int, patch: pytest.MonkeyPatch, rank: int, event: BaseException | signal.Signals) -> None:
    """Let an update of one process fail, or send it a signal there."""
    plain = posbench.training.train.begin_update

    def update(learner: Learner, batch: Any, number: int, rate: float) -> Any:
        if (number, learner.world.rank) == (step, rank):
            if isinstance(event, BaseException):
                raise event
            os.kill(os.getpid(), event)
        return plain(learner, batch, number, rate)

    patch.setattr(posbench.training.train, "begin_update", update)


@pytest.mark.sample(3)
@pytest.mark.parametrize("reason", ["oom", "error"])
def test_what_fails_in_one_process_ends_all_and_is_the_reason(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(posbench.processes, "_END_SECONDS", 300.0)  # nothing waits for that
    at(7, monkeypatch, 1, RunFailed("no room", reason="oom") if reason == "oom" else KeyError("no key"))
    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"^rank 1 of 2: (no room|KeyError: 'no key')$"):
        trained(config, tmp_path / "run", 2)
    assert time.monotonic() - began < 60
    record = load_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("failed", reason)
    assert record["message"].startswith("rank 1 of 2: no ") or "KeyError" in record["message"]


@pytest.mark.full
def test_a_failure_of_the_first_ends_the_others(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    at(7, monkeypatch, 0, RunFailed("disk full", reason="disk"))
    with pytest.raises(RunFailed, match=r"^disk full$"):
        codes += trained(config, tmp_path / "run", 4)
    assert load_record(tmp_path / "run")["reason"] == "disk"
    assert not multiprocessing.active_children()


@pytest.mark.full
@pytest.mark.parametrize("early", [False, True])
def test_a_process_that_is_killed_ends_the_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    monkeypatch.setattr(posbench.processes, "_TELL_SECONDS", 0.1)
    if early:
        as_on_gpus(monkeypatch)
    at(7, monkeypatch, 1, signal.SIGKILL)
    with pytest.raises(RunFailed, match="another process of this run has ended without a word"):
        trained(config, tmp_path / "run", 2)
    assert load_record(tmp_path / "run")["reason"] == "error"


@pytest.mark.full
def test_a_loss_that_is_not_finite_is_everyones(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=1e30))
    with pytest.raises(RunFailed, match=r"^loss is (nan|inf) at step"):
        trained(config, tmp_path / "run", 2)
    assert load_record(tmp_path / "run")["reason"] == "diverged"


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_update(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    train(config, tmp_path / "one", [])
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="SIGTERM after step 8; saved") as stopped:
        at(7, patch, rank, signal.SIGTERM)
        trained(config, tmp_path / "run", 2)
    assert stopped.value.exit_code == 143
    assert (load_record(tmp_path / "run")["status"], load_record(tmp_path / "run")["reason"]) == ("stopped", "signal")
    newest = checkpoint.newest(tmp_path / "run")
    assert newest is not None and newest.step == 8
    assert trained(config, tmp_path / "run", 2) == [0]
    assert load_record(tmp_path / "run")["attempt"]["bit_exact"] is True
    assert_alike(tmp_path / "one", tmp_path / "run")


@pytest.mark.full
def test_a_signal_is_heard_one_update_later_where_updates_are_read_later(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, log_every_steps=4))
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="SIGTERM after step 8; saved"):
        as_on_gpus(patch)
        at(6, patch, 1, signal.SIGTERM)
        trained(config, tmp_path / "run", 2)
    trained(config, tmp_path / "run", 2)
    trained(config, tmp_path / "whole", 2)
    found, expected = (checkpoint.newest(tmp_path / name) for name in ("run", "whole"))
    assert found is not None and expected is not None and found.step == expected.step == STEPS
    weights = expected.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in found.weights().items())


@pytest.mark.full
def test_a_signal_to_one_process_in_the_evaluation_stops_all(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posbench.training.train, "compute_share", lambda *_: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Stopped, match="stopped by SIGTERM; finished work is kept") as stopped:
        trained(config, tmp_path / "run", 2)
    assert stopped.value.exit_code == 143
    assert (load_record(tmp_path / "run")["status"], load_record(tmp_path / "run")["reason"]) == ("stopped", "signal")


@pytest.mark.full
def test_who_hangs_while_another_has_failed_is_ended_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posbench.processes, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(posbench.processes, "_END_SECONDS", 0.1)

    def hang(world: Joined) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with world.last_resort(lambda error: (tmp_path / "said").write_text(str(error))):
            time.sleep(300)

    def fail(world: Joined) -> None:
        raise RunFailed("no room", reason="oom")

    began = time.monotonic()
    with pytest.raises(RunFailed, match=r"^no room$"):
        together(2, tmp_path / "run", fail, hang)
    assert (tmp_path / "said").read_text() == "rank 0 of 2: no room" and time.monotonic() - began < 60


def codes_of(*processes: Callable[[], object]) -> list[int | None]:
    """Exit codes of forks that are to end by themselves; None of those that do not."""
    gc.collect()
    fork = multiprocessing.get_context("fork")
    forks = [fork.Process(target=process) for process in processes]
    for process in forks:
        process.start()
    for process in forks:
        process.join(20)
    codes = [process.exitcode for process in forks]
    for process in forks:
        process.kill()
        process.join()
    return codes


@pytest.mark.parametrize("aborts", [True, False])
def test_who_failed_ends_though_its_group_waits_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], aborts: bool
) -> None:
    """As NCCL's may, for what the others have begun, unless it is aborted."""
    plain, aborted = dist.destroy_process_group, []
    monkeypatch.setattr(posbench.processes, "_END_SECONDS", 5.0 if aborts else 0.1)
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(group))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: plain() if aborts and aborted else time.sleep(300))

    def fail(world: Joined) -> None:
        if world.rank == 1:
            raise RunFailed("no room", reason="oom")
        dist.all_reduce(torch.zeros(1))

    assert codes_of(*(functools.partial(in_process, rank, 2, tmp_path / "store", fail) for rank in (0, 1))) == [1, 1]
    if aborts:
        assert capfd.readouterr().err.count("error: no room\n") == 1


def test_who_waits_ends_when_the_process_that_had_the_store_is_killed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a cluster, where nobody ends the others, with NCCL, which waits on: nothing tells or breaks."""
    monkeypatch.setattr(posbench.processes, "_WATCH_SECONDS", 0.1)
    monkeypatch.setattr(posbench.processes, "_END_SECONDS", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def be(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        with joined(store, rank, 2, rank):
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)

    assert codes_of(functools.partial(be, 0), functools.partial(be, 1)) == [-signal.SIGKILL, 1]
    assert capfd.readouterr().err.count("Exception raised from") <= 2  # torch's, once for each look at the store


def test_processes_that_do_not_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posbench.processes, "_JOIN_SECONDS", 0.1)
    store = dist.FileStore(str(tmp_path / "store"), 3)
    missing = r"3 processes must train together: rank 1, 2 did not join within 0\.1 s"
    with pytest.raises(RunFailed, match=missing), joined(store, 0, 3, 0):
        pass
    killed = "rank 1 of 3 was killed by SIGKILL"
    with pytest.raises(RunFailed, match=killed), joined(store, 0, 3, 0, last_words=lambda: killed):
        pass


def test_a_wait_that_no_broken_connection_ends_is_ended_when_a_process_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with NCCL, which waits on for a process that was killed."""
    monkeypatch.setattr(posbench.processes, "_WATCH_SECONDS", 0.01)
    store, killed = dist.FileStore(str(tmp_path / "store"), 1), "rank 1 of 2 was killed by SIGKILL"
    left = iter([None, None])
    with (
        pytest.raises(RunFailed, match=killed),
        joined(store, 0, 1, 0, last_words=lambda: next(left, killed)),
        ended_in_words(),
    ):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            time.sleep(0.01)


@pytest.mark.parametrize(("device", "made"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_a_gpu_that_is_named_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, made: list[torch.device]
) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert World().device(torch.device(device)) == torch.device(device) and current == made


# -- who starts them ---------------------------------------------------------------------------------------------------


def with_processes(config: Config, processes: int | None, **runtime: Any) -> Config:
    return dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, processes=processes, **runtime))


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers_that_do(config: Config) -> None:
    with pytest.raises(UserError) as error:
        with_processes(config, 3)
    assert str(error.value) == "training.batch_size is 8: it does not divide among 3 processes, nearest: 2 or 4"
    assert with_processes(config, 4).runtime.processes == 4


def test_one_process_is_started_by_nobody(config: Config) -> None:
    for processes in (None, 1):
        with ranks._joining(with_processes(config, processes)) as world:
            assert type(world) is World and (world.rank, world.size) == (0, 1)


@pytest.mark.parametrize(
    ("env", "by"), [("RANK WORLD_SIZE", "torchrun"), ("SLURM_PROCID SLURM_STEP_NUM_TASKS", "srun")]
)
def test_another_number_of_processes_than_were_started_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, env: str, by: str
) -> None:
    rank, size = env.split()
    for name, value in {rank: "0", size: "4", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"runtime.processes is 2, but {by} started 4 processes"):
        ranks._joining(with_processes(config, 2))


def test_more_processes_and_threads_than_cores_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks._threads(with_processes(config, 2, threads=None), 2) == 2
    assert ranks._threads(with_processes(config, 4, threads=None), 4) == 1
    for processes, threads in ((2, 3), (8, None)):
        with pytest.raises(UserError, match=f"runtime.processes is {processes}, .* as many in all as cores here, 4"):
            ranks._threads(with_processes(config, processes, threads=threads), processes)


@pytest.mark.parametrize("device", ["mps", "cuda:1"])
def test_a_device_that_is_not_for_several_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(machine, "resolve", torch.device)
    with pytest.raises(UserError, match=f"runtime.device is {device}: 2 processes run on cpu, or on cuda with a GPU"):
        ranks._check(with_processes(config, 2, device=device), 2, 2, "posbench")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes on this machine need a GPU each, it has 1"):
        ranks._check(with_processes(config, 2, device="cuda"), 2, 2, "posbench")
