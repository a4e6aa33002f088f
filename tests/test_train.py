"""Training as a whole: what a run leaves, what stops it, and that it goes on to the
same numbers.
"""

import contextlib
import dataclasses
import errno
import multiprocessing
import os
import pathlib
import signal
import time
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from fake_study import headline_of
from support import (
    ActingWorld,
    change_record,
    changed,
    encoded,
    snapshot,
    spoil_update,
    until,
    write_words,
)

from posbench import machine
from posbench.config.schema import Config
from posbench.data.batches import validation_batches
from posbench.data.tokenizer import raw_bytes
from posbench.data.tokens import VALIDATION_SIZE, prepare
from posbench.errors import RunFailed, Stopped, UserError
from posbench.model.gpt import build
from posbench.processes import World
from posbench.results.frame import read
from posbench.run import checkpoint
from posbench.run.folder import Run, load_config
from posbench.run.model import sample
from posbench.run.rows import EvaluationRow, evaluation_rows, read_rows, training_rows
from posbench.run.saved import load_record
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.tracking import Tracker
from posbench.training.schedule import Schedule, schedule_of
from posbench.training.step import learning_rate
from posbench.training.train import AHEAD, train

STEPS = 12


@pytest.fixture
def config(tiny_config, tmp_path):
    write_words(tmp_path)
    return changed(
        tiny_config,
        data={"path": str(tmp_path / "text.txt")},
        runtime={"cache": str(tmp_path / "cache")},
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def weights(folder: pathlib.Path) -> bytes:
    newest = max((folder / "checkpoint").glob("step-*"))
    return (newest / "model.safetensors").read_bytes()


def losses(folder: pathlib.Path) -> list[float]:
    return [row["train/loss"] for row in training_rows(folder)]


def status(folder: pathlib.Path) -> tuple[str, str | None]:
    record = load_record(folder)
    return record.status, record.reason


def stop_after(step: int, config: Config, folder: pathlib.Path) -> None:
    """Train until a step fails, which leaves the run at its newest checkpoint."""
    fails = Mock(side_effect=RuntimeError("the lights went out"))
    with pytest.raises(RuntimeError, match="the lights"):
        train(config, folder, [], world=ActingWorld(step, fails))


# -- what a run leaves
# --------------------------------------------------------------------------------------


def test_a_run_leaves_its_record(config, folder):
    train(config, folder, ["posbench", "train"])

    record = load_record(folder)
    assert status(folder) == ("done", None)
    assert record.tokens == config.training.tokens
    assert record.parameters["encoding"] == 0
    assert record.parameters["total"] > 0
    assert record.data["tokens"]["train"] > 1000
    assert record.evaluate_seconds > 0
    assert record.train_seconds > 0
    assert record.cpu_seconds > 0


def test_opening_a_tracker_is_no_training_time(config, folder, monkeypatch):
    hours = 0.0
    monotonic = time.monotonic

    def opening(tracker: Tracker) -> None:
        nonlocal hours
        hours = 5.0

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 3600 * hours)
    monkeypatch.setattr(Tracker, "send", opening)

    train(changed(config, tracking={"backend": "wandb"}), folder, [])

    assert hours == 5
    assert 0 < load_record(folder).train_seconds < 3600


def test_a_finished_run_is_left_as_it_is(config, folder, caplog):
    caplog.set_level("INFO", "posbench")
    train(config, folder, [])
    written = (folder / "rows.jsonl").read_bytes()

    train(config, folder, [])

    assert (folder / "rows.jsonl").read_bytes() == written
    assert f"finished; nothing to do: {folder}" in caplog.text


def test_a_finished_run_computes_only_missing_rows(config, folder):
    train(config, folder, [])
    before = weights(folder)

    more_lengths = changed(config, evaluation={"ratios": (1, 2, 3)})
    train(more_lengths, folder, [])

    assert weights(folder) == before
    assert len(losses(folder)) == STEPS
    ratios = {row.length_ratio for row in evaluation_rows(folder)}
    assert ratios == {1, 2, 3, 4}


def test_what_is_due_falls_on_its_cadence_and_on_the_last_update(config):
    schedule = Schedule(
        total=10,
        log_every=4,
        validate_every=0,
        save_every=5,
        evaluations={0: config.evaluation, 7: config.evaluation},
    )
    due = {step: schedule.due(step) for step in range(1, 11)}
    assert due == {
        1: set(),
        2: set(),
        3: set(),
        4: {"log"},
        5: {"save"},
        6: set(),
        7: {"evaluate"},
        8: {"log"},
        9: set(),
        10: {"log", "save"},
    }


CADENCES = [
    (None, True, 3),  # of twelve updates
    (None, False, 0),
    (0, True, 0),
    (5, True, 5),
]


@pytest.mark.parametrize(("typed", "can_validate", "expected"), CADENCES)
def test_a_run_validates_four_times_unless_it_says_how_often_or_has_no_data(
    config, typed, can_validate, expected
):
    asked = changed(config, runtime={"validate_every_steps": typed})
    schedule = schedule_of(asked, can_validate)
    assert schedule.validate_every == expected


def test_the_validation_loss_is_a_mean_over_tokens_whatever_the_batch(config, folder):
    config = changed(config, runtime={"validate_every_steps": 1})
    train(config, folder, [])
    rows = training_rows(folder)
    losses = [row["val/loss"] for row in rows if "val/loss" in row]

    cache = pathlib.Path(str(config.runtime.cache))
    tokens = prepare(config.data, cache)
    (batch,) = validation_batches(tokens.validation.ids, 16, 256, VALIDATION_SIZE)
    model = build(config, tokens.tokenizer.vocab_size)
    trained = checkpoint.trained(folder)
    model.load_state_dict(trained.weights())
    loss = model(batch.ids, batch.labels)
    expected = float(loss.detach())

    assert len(losses) == STEPS
    assert losses[-1] == pytest.approx(expected, abs=1e-6)
    # the last batch is a smaller one
    assert len(batch.ids) % config.training.batch_size


@pytest.fixture
def schedule(config):
    """Return a warm-up of four updates and a fall to a tenth."""
    return dataclasses.replace(
        config.training,
        learning_rate=1.0,
        warmup_tokens=4 * 128,
        final_learning_rate=0.1,
    )


def test_the_learning_rate_warms_up_and_falls_to_its_final_share(schedule):
    rates = [learning_rate(step, 100, schedule) for step in range(100)]

    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[99] == pytest.approx(0.1)


def test_a_constant_learning_rate_falls_in_its_last_part(schedule):
    constant = dataclasses.replace(schedule, schedule="constant", decay_fraction=0.2)
    rates = [learning_rate(step, 101, constant) for step in range(101)]

    assert set(rates[4:80]) == {1.0}
    half_fallen = 0.1 + 0.9 * 10 / 20.2
    assert rates[80] < 1
    assert rates[90] == pytest.approx(half_fallen)
    assert rates[100] == pytest.approx(0.1)


LAST_HIGH = [(0.0, 100), (1.0, 4)]


@pytest.mark.parametrize(("share", "last_high"), LAST_HIGH)
def test_a_constant_learning_rate_may_never_fall_or_fall_from_the_warmup_on(
    schedule, share, last_high
):
    constant = dataclasses.replace(schedule, schedule="constant", decay_fraction=share)
    rates = [learning_rate(step, 101, constant) for step in range(4, 101)]
    assert rates.count(1.0) == last_high - 3


def test_a_warmup_is_cut_to_a_tenth(schedule):
    short = dataclasses.replace(schedule, warmup_tokens=61440, tokens=20 * 128)
    rates = [learning_rate(step, short.steps, short) for step in range(3)]
    assert rates == [0.5, 1.0, 1.0]


def test_a_run_goes_on_from_a_prompt(config, folder):
    train(config, folder, [])

    text = sample(folder, "to be", tokens=30)
    again = sample(folder, "to be", tokens=30)
    of_another_seed = sample(folder, "to be", tokens=30, seed=1)

    assert text.startswith("to be")
    assert len(text) > 20
    assert again == text
    assert of_another_seed != text


# -- what it refuses to mix
# --------------------------------------------------------------------------------------


def test_a_run_whose_text_is_another_now_is_refused_and_left_as_it_is(config, folder):
    train(config, folder, [])
    before = snapshot(folder)
    with open(str(config.data.path), "a", encoding="utf-8") as file:
        file.write(" more")

    message = r"trained on another text than .* now: .*study=NAME.*--restart"
    with pytest.raises(UserError, match=message) as caught:
        train(config, folder, [])

    assert "\n" not in str(caught.value)
    assert snapshot(folder) == before


def test_a_run_whose_tokenizer_is_another_now_is_refused_and_left_as_it_is(
    config, folder
):
    train(config, folder, [])
    change_record(folder, tokenizer_sha256="beef" * 16)
    before = snapshot(folder)

    with pytest.raises(UserError, match="another tokenizer than its configuration"):
        train(config, folder, [])

    assert snapshot(folder) == before


def test_a_finished_run_without_weights_is_kept_beside_the_new_one(config, folder):
    train(config, folder, [])
    change_record(folder, message="of the former run")
    (folder / "checkpoint").rename(folder.parent / "weights")

    train(config, folder, [])

    former = load_record(folder.with_name("run.old-1"))
    assert former.message == "of the former run"
    assert status(folder) == ("done", None)


def test_a_run_whose_record_cannot_be_read_can_be_restarted(config, folder):
    train(config, folder, [])
    (folder / "run.json").write_text("{", encoding="utf-8")

    train(config, folder, [], restart=True)

    assert status(folder) == ("done", None)


GPU = torch.device("cuda")


def test_a_gpu_without_bf16_trains_in_fp32_and_a_line_says_so(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))

    assert machine.resolve_precision("auto", GPU) == torch.float32
    assert caplog.messages == ["precision=auto is fp32 here: Tesla T4 has no bf16"]


def test_a_gpu_with_bf16_trains_in_it_unless_told_otherwise(monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    assert machine.resolve_precision("auto", GPU) == torch.bfloat16
    assert machine.resolve_precision("fp32", GPU) == torch.float32
    assert caplog.messages == []


def set_bf16(patch: pytest.MonkeyPatch, is_fast: bool) -> None:
    patch.setattr(machine, "bf16_is_fast", lambda device: is_fast)


def test_a_run_does_not_go_on_in_another_precision(config, folder, monkeypatch):
    config = changed(config, training={"precision": "auto"})
    set_bf16(monkeypatch, is_fast=False)
    stop_after(7, config, folder)
    kept = snapshot(folder / "checkpoint")

    set_bf16(monkeypatch, is_fast=True)
    message = "trained in fp32 up to step 5 and would go on"
    with pytest.raises(UserError, match=message):
        train(config, folder, [])

    assert snapshot(folder / "checkpoint") == kept


def test_a_run_is_evaluated_in_the_precision_it_was_trained_in(
    config, folder, monkeypatch
):
    config = changed(config, training={"precision": "auto"})
    set_bf16(monkeypatch, is_fast=False)
    train(config, folder, [])

    set_bf16(monkeypatch, is_fast=True)
    more_lengths = changed(config, evaluation={"ratios": (0.5, 1, 2)})
    train(more_lengths, folder, [])

    rows = [row for row in evaluation_rows(folder) if row.status == "ok"]
    assert {row.length_ratio for row in rows} == {0.5, 1, 2, 4}
    assert {row.dtype for row in rows} == {"fp32"}


# -- continued, it has the same numbers
# --------------------------------------------------------------------------------


def killed_after_some_rows(config: Config, folder: pathlib.Path) -> None:
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=train, args=(config, folder, []))
    process.start()
    rows = folder / "rows.jsonl"
    until(lambda: rows.exists() and rows.read_bytes().count(b"\n") >= 7)
    process.kill()
    process.join()


def untimed(row: EvaluationRow) -> EvaluationRow:
    """Return a row without how long it took and how much memory."""
    return dataclasses.replace(row, seconds=None, peak_memory_bytes=None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_killed_with_sigkill_has_the_numbers_of_an_uninterrupted_one(
    config, tmp_path, optimizer
):
    # 200 of them: slow/test_kills.py
    config = changed(config, training={"optimizer": optimizer})
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    train(config, whole, [])

    killed_after_some_rows(config, killed)
    train(config, killed, [])

    assert weights(killed) == weights(whole)
    assert losses(killed) == losses(whole)
    of_killed = evaluation_rows(killed)
    of_whole = evaluation_rows(whole)
    assert len(of_killed) == len(of_whole)
    for row, expected in zip(of_killed, of_whole, strict=True):
        assert untimed(row) == untimed(expected)


def status_in_frame(folder: pathlib.Path) -> str:
    rows = read([folder])
    (name,) = rows["run_status"].unique()
    return name


def test_a_killed_run_is_said_to_have_died_until_it_goes_on(config, folder):
    killed_after_some_rows(config, folder)

    assert load_record(folder).status == "running"
    assert status_in_frame(folder) == "died"
    with Run.open(folder, config, None):
        assert status_in_frame(folder) == "running"


def evaluated(folder: pathlib.Path) -> pd.DataFrame:
    """Return what was evaluated, with its losses, of a run's rows."""
    rows = [row for row in read_rows(folder) if "protocol" in row]
    columns = ["protocol", "window", "length", "tokens", "nll"]
    return pd.DataFrame(rows)[columns]


@pytest.mark.slow
def test_rows_on_the_way_change_no_number_and_a_continued_run_has_them_once(
    config, tmp_path
):
    per_step = config.training.tokens_per_step
    at_tokens = (4 * per_step, 9 * per_step + 1)
    asked = changed(config, evaluation={"at_tokens": at_tokens})
    plain = tmp_path / "plain"
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"

    train(config, plain, [])
    train(asked, whole, [])
    stop_after(6, asked, cut)
    train(asked, cut, [])

    assert weights(whole) == weights(plain)
    assert headline_of(whole) == headline_of(plain)
    assert weights(cut) == weights(whole)
    rows = evaluated(whole)
    pd.testing.assert_frame_equal(evaluated(cut), rows, check_exact=True)
    early = rows[rows["tokens"] < STEPS * per_step]
    assert set(early["protocol"]) == {"fixed_target"}
    assert early["window"].isna().all()
    assert set(early["tokens"]) == {4 * per_step, 9 * per_step}


@pytest.fixture
def drope(config):
    """Return a run that drops its positions after half of its updates."""
    at_training_length = {"ratios": (1,), "windowed": False}
    config = changed(config, evaluation=at_training_length)
    return encoded(config, "drope", drop_at=0.5)


def test_an_encoding_that_changes_on_the_way_does_so_at_its_update(drope, tmp_path):
    train(drope, tmp_path / "drope", [])
    rope = encoded(drope, "rope")
    train(rope, tmp_path / "rope", [])

    half = STEPS // 2
    dropped = losses(tmp_path / "drope")
    kept = losses(tmp_path / "rope")
    assert dropped[:half] == kept[:half]
    assert dropped[half] != kept[half]


def test_an_encoding_that_changes_on_the_way_does_so_in_a_continued_run(
    drope, tmp_path
):
    whole = tmp_path / "whole"
    cut = tmp_path / "cut"
    more_lengths = changed(drope, evaluation={"ratios": (1, 2)})

    train(drope, whole, [])
    stop_after(8, drope, cut)
    train(more_lengths, cut, [])

    assert weights(cut) == weights(whole)
    evaluated_at = load_config(cut).evaluation
    assert evaluated_at.ratios == (1, 2)


def test_rows_on_the_way_are_of_the_encoding_that_a_run_ends_with(drope, tmp_path):
    drope = changed(drope, evaluation={"at_tokens": (4 * 128,)})
    train(drope, tmp_path / "drope", [])
    rope = encoded(drope, "rope")
    train(rope, tmp_path / "rope", [])

    without_positions, *_ = evaluation_rows(tmp_path / "drope")
    with_rope, *_ = evaluation_rows(tmp_path / "rope")
    # of equal weights
    assert without_positions.tokens == 4 * 128
    assert with_rope.tokens == 4 * 128
    assert without_positions.nll != with_rope.nll


# -- what ends it
# --------------------------------------------------------------------------------------


class WorldWithOneSignal(World):
    """A process that learns of another one's signal with the fourth update alone."""

    n_updates = 0

    def sum_gradients(
        self, parameters: Any, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.n_updates += 1
        number = signal.SIGTERM if self.n_updates == 4 else 0
        return loss, torch.tensor([float(number)])

    def stopped_by(self) -> int | None:
        return self._stopped_by


def test_a_signal_holds_though_updates_that_are_read_after_it_bring_none(
    config, folder, monkeypatch
):
    never = {"log_every_steps": 100, "checkpoint_every_steps": 100}
    config = changed(config, runtime=never)
    # as on GPUs, an update is read one later
    monkeypatch.setitem(AHEAD, "cpu", 1)

    with pytest.raises(Stopped, match="SIGTERM after step 5; saved: the same"):
        train(config, folder, [], world=WorldWithOneSignal())

    assert [saved.step for saved in checkpoint.every(folder)] == [5]


def test_a_disk_that_is_full_as_a_checkpoint_is_written_ends_the_run_in_words(
    config, folder, monkeypatch
):
    write_bytes = pathlib.Path.write_bytes

    def full(path: pathlib.Path, data: bytes) -> int:
        if "step-00000003" in str(path):
            message = os.strerror(errno.ENOSPC)
            raise OSError(errno.ENOSPC, message, path)
        return write_bytes(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    # because of which it is saved
    world = ActingWorld(2, lambda *_: signal.raise_signal(signal.SIGTERM))

    message = r"no room to write .*step-00000003 \(No space left on device\): free"
    with pytest.raises(RunFailed, match=message):
        train(config, folder, [], world=world)

    assert status(folder) == ("failed", "disk")
    assert not evaluation_rows(folder)
    assert len(losses(folder)) == 3


def raise_usr1(*_: Any) -> None:
    signal.raise_signal(signal.SIGUSR1)


def test_a_signal_ends_training_saved(config, folder):
    before = signal.getsignal(signal.SIGUSR1)

    with pytest.raises(Stopped, match="SIGUSR1 after step 7; saved") as caught:
        train(config, folder, [], world=ActingWorld(6, raise_usr1))

    assert caught.value.exit_code == 128 + signal.SIGUSR1
    assert status(folder) == ("stopped", "signal")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_as_the_last_checkpoint_is_written_ends_training(
    config, folder, monkeypatch
):
    save = checkpoint.save

    def saved(folder: pathlib.Path, step: int, *given: Any) -> pathlib.Path:
        path = save(folder, step, *given)
        if step == STEPS:
            raise_usr1()
        return path

    monkeypatch.setattr(checkpoint, "save", saved)

    with pytest.raises(Stopped, match=f"after step {STEPS}; saved"):
        train(config, folder, [])

    assert evaluation_rows(folder) == []


class WorldStoppedInEvaluation(World):
    """A process that gets a signal as it evaluates."""

    def map(self, work: Any, items: Any) -> list[Any]:
        raise_usr1()
        return super().map(work, items)


def test_a_signal_ends_an_evaluation_in_words(config, folder):
    with pytest.raises(Stopped, match="stopped by SIGUSR1; finished work is kept"):
        train(config, folder, [], world=WorldStoppedInEvaluation())

    assert status(folder) == ("stopped", "signal")
    assert checkpoint.trained(folder).step == STEPS


def test_signals_are_collected_until_ctrl_c_after_the_first():
    before = signal.getsignal(signal.SIGINT)

    with (
        pytest.raises(KeyboardInterrupt),
        stop_signals(second_interrupts=True) as received,
    ):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)

    assert received == [signal.SIGTERM, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_is_no_error_that_a_library_may_outlive():
    # a tracker costs a warning where it fails
    with (
        pytest.raises(Stopped, match="stopped by SIGTERM"),
        signals_as_errors(),
        contextlib.suppress(Exception),
    ):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_is_no_fault_of_the_tokenizer():
    tokenizer = raw_bytes()
    tokenizer._inner = Mock()
    tokenizer._inner.encode_batch_fast = lambda *_, **given: raise_usr1()

    with pytest.raises(Stopped, match="stopped by SIGUSR1"), signals_as_errors():
        tokenizer.encode(["a text"])


def test_a_loss_that_is_not_finite_stops_before_the_update_and_says_where(
    config, folder
):
    with pytest.raises(RunFailed, match="loss is nan at step 8"):
        train(config, folder, [], world=ActingWorld(7, spoil_update))

    assert status(folder) == ("failed", "diverged")
    saved = checkpoint.trained(folder)
    assert saved.step == 5
    for weight in saved.weights().values():
        assert torch.isfinite(weight).all()
