"""Training as a whole: what a run leaves, what stops it, and that it goes on to the
same numbers.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fake_study import headline_of
from support import changed, snapshot, until, write_words

from posbench import machine
from posbench.config.schema import Config, EncodingConfig
from posbench.data.batches import validation_batches
from posbench.data.tokenizer import raw_bytes
from posbench.data.tokens import VALIDATION_SIZE, prepare
from posbench.errors import RunFailed, Stopped, UserError
from posbench.model.gpt import GPT, build
from posbench.processes import World
from posbench.results.frame import read
from posbench.run import checkpoint
from posbench.run.model import sample
from posbench.run.rows import evaluation_rows, read_rows, training_rows
from posbench.run.run import Run, load_config, load_record
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training.schedule import Schedule, schedule_of
from posbench.training.step import Outcome, begin_update, learning_rate
from posbench.training.train import train

STEPS = 12


@pytest.fixture
def config(tiny_config, tmp_path):
    write_words(tmp_path)
    config = changed(tiny_config, data={"path": str(tmp_path / "text.txt")})
    return changed(config, runtime={"cache": str(tmp_path / "cache")})


def weights_sha256(folder: pathlib.Path) -> str:
    newest = max((folder / "checkpoint").glob("step-*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def losses(folder: pathlib.Path) -> list[tuple[int, float, float]]:
    return [
        (row["step"], row["train/loss"], row["train/learning_rate"])
        for row in training_rows(folder)
    ]


def evaluation_numbers(folder: pathlib.Path) -> list[tuple[Any, ...]]:
    return [(row.key, row.tokens, row.nll) for row in evaluation_rows(folder)]


def status(folder: pathlib.Path) -> tuple[str, str | None]:
    record = load_record(folder)
    return record["status"], record["reason"]


def seen_updates(patch: pytest.MonkeyPatch, see: Callable[[int], object]) -> None:
    """Call `see` before each update, with the number of steps made so far."""

    def seen(trainer: Any, batch: Any, step: int, rate: float) -> Outcome:
        see(step)
        return begin_update(trainer, batch, step, rate)

    patch.setattr("posbench.training.train.begin_update", seen)


def raised_at(step: int, number: signal.Signals) -> Callable[[int], object]:
    return lambda at: at == step and signal.raise_signal(number)


def stop_after(
    step: int,
    config: Config,
    folder: pathlib.Path,
    error: type[BaseException] = RuntimeError,
) -> None:
    """Train until a step fails, which leaves the run at its newest checkpoint."""

    def see(at: int) -> None:
        if at == step:
            raise error("the lights went out")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(error, match="the lights"),
    ):
        seen_updates(patch, see)
        train(config, folder, [])


# -- what a run leaves
# --------------------------------------------------------------------------------------


def test_a_run_leaves_a_complete_folder_and_a_finished_one_computes_only_missing_rows(
    config, tmp_path, caplog
):
    folder = tmp_path / "run"
    train(config, folder, ["posbench", "train"])
    record = load_record(folder)
    assert status(folder) == ("done", None)
    assert record["tokens"] == config.training.tokens
    assert record["parameters"]["encoding"] == 0 < record["parameters"]["total"]
    assert record["data"]["tokens"]["train"] > 1000
    assert record["evaluate_seconds"] > 0
    assert record["train_seconds"] > 0
    assert record["cpu_seconds"] > 0
    rows = evaluation_rows(folder)
    assert len(rows) == 3 + 2 + 3
    assert {(row.status, row.checkpoint_step) for row in rows} == {("ok", STEPS)}
    assert all(row.units and sum(row.units["tokens"]) == row.n_tokens for row in rows)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == [
        "step-00000010",
        "step-00000012",
    ]
    assert (folder / "tokenizer.json").exists()

    before = weights_sha256(folder)
    written = (folder / "rows.jsonl").read_text(encoding="utf-8")
    with caplog.at_level("INFO", "posbench"):
        train(config, folder, [])
    assert (folder / "rows.jsonl").read_text(encoding="utf-8") == written
    assert f"finished; nothing to do: {folder}" in caplog.text
    train(changed(config, evaluation={"ratios": (1, 2, 3)}), folder, [])
    assert weights_sha256(folder) == before
    assert len(losses(folder)) == STEPS
    assert {row.length_ratio for row in evaluation_rows(folder)} == {1, 2, 3, 4}


def test_what_is_due_falls_on_its_cadence_and_on_the_last_update(config):
    schedule = Schedule(
        total=10,
        log_every=4,
        validate_every=0,
        save_every=5,
        evaluations={0: config.evaluation, 7: config.evaluation},
    )
    due = {step: schedule.due(step) for step in range(1, 11)}
    assert {step: names for step, names in due.items() if names} == {
        4: {"log"},
        5: {"save"},
        7: {"evaluate"},
        8: {"log"},
        10: {"log", "save"},
    }


def test_a_run_validates_four_times_unless_it_says_how_often_or_has_no_data(config):
    for typed, can_validate, expected in (
        (None, True, 3),  # of twelve updates
        (None, False, 0),
        (0, True, 0),
        (5, True, 5),
    ):
        asked = changed(config, runtime={"validate_every_steps": typed})
        assert schedule_of(asked, can_validate).validate_every == expected


def test_the_validation_loss_is_a_mean_over_tokens_whatever_the_batch(config, tmp_path):
    folder = tmp_path / "run"
    train(changed(config, runtime={"validate_every_steps": 1}), folder, [])
    losses = [row["val/loss"] for row in training_rows(folder) if "val/loss" in row]
    tokens = prepare(config.data, pathlib.Path(str(config.runtime.cache)))
    model = build(config, tokens.tokenizer.vocab_size)
    model.load_state_dict(checkpoint.trained(folder).weights())
    (batch,) = validation_batches(tokens.validation.ids, 16, 256, VALIDATION_SIZE)
    # the last batch is a smaller one
    assert len(losses) == STEPS
    assert len(batch.ids) % config.training.batch_size
    assert losses[-1] == pytest.approx(
        float(model(batch.ids, batch.labels).detach()), abs=1e-6
    )


def test_the_learning_rate_warms_up_and_falls_to_its_final_share(config):
    schedule = dataclasses.replace(
        config.training,
        learning_rate=1.0,
        warmup_tokens=4 * 128,
        final_learning_rate=0.1,
    )
    cosine = [learning_rate(step, 100, schedule) for step in range(100)]
    assert cosine[:4] == [0.25, 0.5, 0.75, 1.0]
    assert cosine[4] == 1.0
    assert cosine[99] == pytest.approx(0.1)
    assert cosine[4:] == sorted(cosine[4:], reverse=True)
    constant = dataclasses.replace(schedule, schedule="constant", decay_fraction=0.2)
    values = [learning_rate(step, 101, constant) for step in range(101)]
    assert set(values[4:80]) == {1.0}
    assert values[100] == pytest.approx(0.1)
    assert values[80] < 1
    assert values[90] == pytest.approx(0.1 + 0.9 * 10 / 20.2)
    # it stays to the end, or falls from the end of the warm-up on
    for share, step in ((0.0, 100), (1.0, 4)):
        assert (
            learning_rate(
                step, 101, dataclasses.replace(constant, decay_fraction=share)
            )
            == 1.0
        )
    # the warm-up is cut to a tenth
    short = dataclasses.replace(schedule, warmup_tokens=61440, tokens=20 * 128)
    assert [learning_rate(step, short.steps, short) for step in range(3)] == [
        0.5,
        1.0,
        1.0,
    ]


def test_a_run_goes_on_from_a_prompt(config, tmp_path):
    train(config, tmp_path / "run", [])
    text = sample(tmp_path / "run", "to be", tokens=30)
    assert text == sample(tmp_path / "run", "to be", tokens=30)
    assert text.startswith("to be")
    assert len(text) > 20
    assert text != sample(tmp_path / "run", "to be", tokens=30, seed=1)


# -- what it refuses to mix
# --------------------------------------------------------------------------------------


def test_a_trained_run_whose_text_or_tokenizer_is_another_now_is_refused_in_one_line_and_left_as_it_is(
    config, tmp_path
):
    folder = tmp_path / "run"
    train(config, folder, [])
    before = snapshot(folder)
    with open(str(config.data.path), "a", encoding="utf-8") as file:
        file.write(" more")
    with pytest.raises(
        UserError, match=r"trained on another text than .* now: .*study=NAME.*--restart"
    ) as caught:
        train(config, folder, [])
    assert "\n" not in str(caught.value)
    assert snapshot(folder) == before
    train(config, folder, [], restart=True)
    record = load_record(folder) | {"tokenizer_sha256": "beef" * 16}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match="another tokenizer than its configuration"):
        train(config, folder, [])
    assert load_record(folder) == record
    assert record["status"] == "done"
    (folder / "checkpoint").rename(tmp_path / "weights")
    # a finished run without weights keeps its rows, beside the new run
    train(config, folder, [])
    assert load_record(tmp_path / "run.old-2") == record
    assert load_record(folder)["status"] == "done"
    (folder / "run.json").write_text("{", encoding="utf-8")
    train(config, folder, [], restart=True)  # also where the record cannot be read


def test_a_gpu_without_bf16_trains_in_fp32_and_a_line_says_so(monkeypatch, caplog):
    caplog.set_level("INFO")
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert machine.resolve_precision("auto", gpu) == torch.float32
    assert caplog.messages == ["precision=auto is fp32 here: Tesla T4 has no bf16"]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert machine.resolve_precision("auto", gpu) == torch.bfloat16
    assert machine.resolve_precision("fp32", gpu) == torch.float32
    assert len(caplog.messages) == 1


def test_a_run_does_not_go_on_in_another_precision(config, tmp_path):
    config = changed(config, training={"precision": "auto"})
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "bf16_is_fast", lambda device: False)
        stop_after(7, config, folder)
        kept = snapshot(folder / "checkpoint")
        patch.setattr(machine, "bf16_is_fast", lambda device: True)
        with pytest.raises(
            UserError, match="trained in fp32 up to step 5 and would go on"
        ):
            train(config, folder, [])
        assert snapshot(folder / "checkpoint") == kept
        patch.setattr(machine, "bf16_is_fast", lambda device: False)
        train(config, folder, [])
        patch.setattr(machine, "bf16_is_fast", lambda device: True)
        # evaluated as it was trained
        train(changed(config, evaluation={"ratios": (0.5, 1, 2)}), folder, [])
        assert {row.dtype for row in evaluation_rows(folder) if row.status == "ok"} == {
            "fp32"
        }


# -- continued, it has the same numbers
# --------------------------------------------------------------------------------


def test_a_run_killed_with_sigkill_ends_with_the_weights_of_an_uninterrupted_one(
    config, tmp_path
):
    # 200 of them: slow/test_kills.py
    whole = tmp_path / "whole"
    killed = tmp_path / "killed"
    train(config, whole, [])
    process = multiprocessing.get_context("fork").Process(
        target=train, args=(config, killed, [])
    )
    process.start()
    until(
        lambda: (
            (killed / "rows.jsonl").exists()
            and (killed / "rows.jsonl").read_bytes().count(b"\n") >= 7
        )
    )
    process.kill()
    process.join()
    assert load_record(killed)["status"] == "running"
    assert read([killed])["run_status"].tolist()[0] == "died"
    with Run.open(killed, config, None):
        assert read([killed])["run_status"].tolist()[0] == "running"
    train(config, killed, [])
    assert weights_sha256(killed) == weights_sha256(whole)
    assert losses(killed) == losses(whole)
    timed = dict.fromkeys(("seconds", "peak_memory_bytes"))
    rows = [
        [dataclasses.replace(row, **timed) for row in evaluation_rows(folder)]
        for folder in (killed, whole)
    ]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_rows_on_the_way_change_no_weights_and_a_continued_run_has_them_once(
    config, tmp_path
):
    per_step = config.training.tokens_per_step
    asked = changed(config, evaluation={"at_tokens": (4 * per_step, 9 * per_step + 1)})
    plain, whole, cut = (tmp_path / name for name in ("plain", "whole", "cut"))
    train(config, plain, [])
    train(asked, whole, [])
    stop_after(6, asked, cut)
    train(asked, cut, [])

    def numbers(folder: pathlib.Path) -> list[tuple[Any, ...]]:
        rows = [row for row in read_rows(folder) if "protocol" in row]
        return [
            (row["protocol"], row["window"], row["length"], row["tokens"], row["nll"])
            for row in rows
        ]

    assert weights_sha256(plain) == weights_sha256(whole) == weights_sha256(cut)
    assert numbers(whole) == numbers(cut)
    early = [row for row in numbers(whole) if row[3] < STEPS * per_step]
    assert {row[:2] for row in early} == {("fixed_target", None)}
    assert headline_of(whole) == headline_of(plain)
    assert {row[3] for row in early} == {4 * per_step, 9 * per_step}


def test_an_encoding_that_changes_on_the_way_changes_at_the_same_update_in_a_continued_run(
    config, tmp_path
):
    config = changed(
        config, evaluation={"ratios": (1,), "windowed": False, "at_tokens": (4 * 128,)}
    )
    drope = dataclasses.replace(
        config, encoding=EncodingConfig("drope", {"drop_at": 0.5})
    )
    train(drope, tmp_path / "whole", [])
    stop_after(8, drope, tmp_path / "cut", KeyboardInterrupt)
    assert status(tmp_path / "cut") == ("stopped", "signal")
    train(changed(drope, evaluation={"ratios": (1, 2)}), tmp_path / "cut", [])
    # what it was evaluated at in the end
    assert load_config(tmp_path / "cut").evaluation.ratios == (1, 2)
    assert weights_sha256(tmp_path / "cut") == weights_sha256(tmp_path / "whole")
    train(config, tmp_path / "rope", [])
    first, second = (losses(tmp_path / name) for name in ("whole", "rope"))
    assert first[: STEPS // 2] == second[: STEPS // 2]
    assert first[STEPS // 2][1] != second[STEPS // 2][1]
    (early, *_), (with_rope, *_) = (
        evaluation_numbers(tmp_path / name) for name in ("whole", "rope")
    )
    # of equal weights: rows on the way are without positions
    assert early[:2] == with_rope[:2]
    assert early != with_rope


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
    config, tmp_path, monkeypatch
):
    never = {"log_every_steps": 100, "validate_every_steps": 0}
    config = changed(config, runtime=never | {"checkpoint_every_steps": 100})
    # as on GPUs, an update is read one later
    monkeypatch.setattr("posbench.training.train._AHEAD", {"cpu": 1})

    with pytest.raises(Stopped, match="SIGTERM after step 5; saved"):
        train(config, tmp_path / "run", [], world=WorldWithOneSignal())

    assert [saved.step for saved in checkpoint.every(tmp_path / "run")] == [5]


def test_a_disk_that_is_full_as_a_checkpoint_is_written_ends_the_run_in_words(
    config, tmp_path, monkeypatch
):
    write_bytes = pathlib.Path.write_bytes

    def full(path: pathlib.Path, data: bytes) -> int:
        if "step-00000003" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write_bytes(path, data)

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    # because of which it is saved
    seen_updates(monkeypatch, raised_at(2, signal.SIGTERM))
    with pytest.raises(
        RunFailed,
        match=r"no room to write .*step-00000003 .* bytes needed, .* free; free",
    ):
        train(config, tmp_path / "run", [])
    assert status(tmp_path / "run") == ("failed", "disk")
    assert not evaluation_rows(tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 3


def test_a_signal_ends_training_saved_and_an_evaluation_in_words(config, tmp_path):
    number = signal.SIGUSR1
    before = signal.getsignal(number)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Stopped, match=f"{number.name} after step 7; saved") as e,
    ):
        seen_updates(patch, raised_at(6, number))
        train(config, tmp_path / "run", [])
    assert e.value.exit_code == 128 + number

    def raised(*given, save=checkpoint.save):
        return save(*given) and given[1] == STEPS and signal.raise_signal(number)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Stopped, match=f"after step {STEPS}; saved"),
    ):
        patch.setattr(checkpoint, "save", raised)  # as the last checkpoint is written
        train(config, tmp_path / "run", [])
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(Stopped, match=f"stopped by {number.name}"),
    ):
        patch.setattr(
            "posbench.training.train.evaluate_into",
            lambda *_: signal.raise_signal(number),
        )
        train(config, tmp_path / "run", [])
    assert status(tmp_path / "run") == ("stopped", "signal")
    assert signal.getsignal(number) is before


def test_signals_are_collected_or_end_what_has_nothing_to_save():
    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        stop_signals(second_interrupts=True) as received,
    ):
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert received == [signal.SIGTERM, signal.SIGTERM]
    assert signal.getsignal(signal.SIGINT) is before
    # It is no error that a library may outlive: a tracker costs a warning where it
    # fails.
    with (
        pytest.raises(Stopped, match="stopped by SIGTERM"),
        signals_as_errors(),
        contextlib.suppress(Exception),
    ):
        signal.raise_signal(signal.SIGTERM)
    tokenizer = raw_bytes()
    tokenizer._inner = Mock(
        encode_batch_fast=lambda *_, **given: signal.raise_signal(signal.SIGTERM)
    )
    # and no fault of the tokenizer
    with pytest.raises(Stopped, match="stopped by SIGTERM"), signals_as_errors():
        tokenizer.encode(["a text"])


def test_a_loss_that_is_not_finite_stops_before_the_update_and_says_where(
    config, tmp_path, monkeypatch
):
    plain = GPT.forward
    calls = []

    def poisoned(
        model: GPT, ids: torch.Tensor, labels: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        calls.append(0)
        return plain(model, ids, labels, **given) * (
            float("nan") if len(calls) == 8 else 1.0
        )

    monkeypatch.setattr(GPT, "forward", poisoned)
    with pytest.raises(RunFailed, match="loss is nan at step 8"):
        train(config, tmp_path / "run", [])
    assert status(tmp_path / "run") == ("failed", "diverged")
    saved = checkpoint.trained(tmp_path / "run")
    assert saved.step == 5
    assert all(torch.isfinite(weight).all() for weight in saved.weights().values())
