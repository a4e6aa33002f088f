"""The run folder: one owner, whole records, nothing lost."""

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support import change_record, changed, encoded, in_child, snapshot

from posbench import encodings
from posbench.config.schema import Config
from posbench.encodings.rope import RoPE
from posbench.errors import InUse, RunFailed, UserError
from posbench.run import checkpoint
from posbench.run.folder import ADDING, Run, in_use, load_config, other_code
from posbench.run.rows import (
    EvaluationRow,
    counting_rows,
    evaluation_rows,
    read_rows,
)
from posbench.run.saved import RunRecord, load_record

COMMAND = ["posbench", "train"]


def row(length: int, nll: float, **more: Any) -> EvaluationRow:
    columns = {
        "protocol": "fixed_target",
        "length": length,
        "length_ratio": length / 16,
        "split": "test",
        "checkpoint_step": 12,
        "status": "ok",
        "nll": nll,
        "targets_sha256": "ab",
    }
    return EvaluationRow(**columns | more)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def stands(folder: Path) -> tuple[Any, ...]:
    record = load_record(folder)
    return record.status, record.reason, record.message


def has_weights(folder: Path, step: int) -> Path:
    weights = {"w": torch.zeros(1)}
    return checkpoint.save(folder, step, weights, {}, {}) / checkpoint.WEIGHTS


def test_run_json_says_from_the_start_how_a_run_stands_and_why_it_ended(
    folder, tiny_config
):
    failure = RunFailed("the loss is not finite", "diverged")
    with pytest.raises(RunFailed), Run.open(folder, tiny_config, COMMAND) as run:
        run.begin_attempt(device="cpu")
        assert stands(folder) == ("running", None, None)
        raise failure
    assert stands(folder) == ("failed", "diverged", "the loss is not finite")


def test_run_json_says_what_a_run_is_and_who_makes_it(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.begin_attempt(device="cpu")
    record = load_record(folder)
    assert record.id == tiny_config.id
    assert record.command == "posbench train"
    assert "torch" in record.versions
    assert record.attempt["device"] == "cpu"
    assert record.attempt["pid"] == os.getpid()


def test_a_finished_run_without_weights_is_not_finished(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.finish("done")
        run.begin_attempt(device="cpu")
        assert stands(folder) == ("running", None, None)


def test_a_finished_run_whose_last_weights_are_damaged_is_not_finished(
    folder, tiny_config
):
    steps = tiny_config.training.steps
    with Run.open(folder, tiny_config, COMMAND) as run:
        has_weights(folder, steps - 1)
        has_weights(folder, steps).write_bytes(b"half")
        run.finish("done")
        run.begin_attempt(device="cpu")
        assert stands(folder) == ("running", None, None)


def test_a_record_keeps_the_fields_of_a_newer_version(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND):
        pass
    change_record(folder, of_tomorrow={"a": 1})

    with Run.open(folder, tiny_config, COMMAND) as run:
        run.finish("done")

    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "done"
    assert record["of_tomorrow"] == {"a": 1}


def test_what_cannot_begin_is_no_attempt(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        has_weights(folder, tiny_config.training.steps)
        run.finish("done")
    with pytest.raises(UserError), Run.open(folder, tiny_config, COMMAND):
        raise UserError("another text")
    assert stands(folder) == ("done", None, None)


def test_a_finished_run_to_which_rows_are_added_stays_done(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        has_weights(folder, tiny_config.training.steps)
        run.finish("done")
    with (
        pytest.raises(KeyboardInterrupt),
        Run.open(folder, tiny_config, COMMAND) as run,
    ):
        run.begin_attempt(device="cpu")
        assert stands(folder) == ("done", ADDING, None)
        raise KeyboardInterrupt
    status, reason, _ = stands(folder)
    assert status == "done"
    assert reason == "signal"


def test_another_run_in_the_folder_is_refused(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND):
        before = snapshot(folder)
    other = changed(tiny_config, seed=5)
    opening = Run.open(folder, other, COMMAND)
    with pytest.raises(UserError, match=r"holds another run .*--restart"):
        opening.__enter__()
    assert snapshot(folder) == before


def test_what_is_no_identity_may_change(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND):
        before = snapshot(folder)
    other = changed(tiny_config, runtime={"log_every_steps": 99})
    with Run.open(folder, other, COMMAND) as run:
        assert run.id == tiny_config.id
    assert load_config(folder) == tiny_config
    assert snapshot(folder) == before


def test_restart_moves_the_old_folder_aside(folder, tiny_config):
    for number in range(3):
        with Run.open(folder, tiny_config, COMMAND, restart=True) as run:
            assert run.rows == []
            run.log({"step": number})
    oldest = read_rows(folder.with_name("run.old-1"))
    older = read_rows(folder.with_name("run.old-2"))
    assert oldest == [{"step": 0}]
    assert older == [{"step": 1}]
    assert read_rows(folder) == [{"step": 2}]


def test_a_restart_needs_no_record_that_can_be_read(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND):
        pass
    (folder / "run.json").write_text("{")
    with Run.open(folder, tiny_config, COMMAND, restart=True):
        assert stands(folder)[0] == "running"


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_record_that_cannot_be_read_is_one_line(folder, tiny_config, text):
    with Run.open(folder, tiny_config, COMMAND):
        pass
    (folder / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"cannot read .*run\.json: "):
        load_record(folder)


def test_a_second_process_is_refused_and_changes_nothing(folder, tmp_path, tiny_config):
    in_use_line = "in use by another process: wait for it or stop it"

    def second() -> None:
        for restart in (False, True):
            opening = Run.open(folder, tiny_config, COMMAND, restart)
            with pytest.raises(InUse, match=in_use_line):
                opening.__enter__()
        assert in_use(folder)

    assert not in_use(folder)
    with Run.open(folder, tiny_config, COMMAND):
        before = snapshot(tmp_path)
        assert in_child(second) == 0
        assert snapshot(tmp_path) == before
    assert not in_use(folder)


def test_what_a_killed_process_leaves_is_taken_over_and_its_temporary_files_go(
    folder, tiny_config, monkeypatch
):
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die() -> None:
        with Run.open(folder, tiny_config, COMMAND) as run:
            run.log({"step": 1})
            run.update(tokens=1)
            monkeypatch.setattr(os, "replace", kill)
            run.update(tokens=2)

    assert in_child(die) == -signal.SIGKILL
    assert not in_use(folder)
    assert list(folder.glob(".tmp-*"))
    (folder / ".tmp-notes").touch()  # not ours
    with Run.open(folder, tiny_config, COMMAND) as run:
        assert run.rows == [{"step": 1}]
        assert run.record.tokens == 1
    left = list(folder.glob(".tmp-*"))
    assert left == [folder / ".tmp-notes"]


FIRST = {"step": 1, "train/loss": 2.0}
SECOND = {"step": 2, "train/loss": 2.0}


def test_half_a_line_never_spoils_the_next(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.log(FIRST)
    half_a_line = '{"step": 3, "x": "' + "y" * 70_000  # what a kill leaves
    with open(folder / "rows.jsonl", "a") as file:
        file.write(half_a_line)
    assert read_rows(folder) == [FIRST]
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.log(SECOND)
    assert read_rows(folder) == [FIRST, SECOND]


def test_rows_after_a_step_are_cut(folder, tiny_config):
    evaluated = row(16, 1.0, checkpoint_step=1).to_json()
    evaluated_later = row(32, 1.0).to_json()
    last = {"step": 10**12}
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.log(FIRST)
        run.log(evaluated)
        run.log(SECOND)
        run.log(evaluated_later)
        run.cut(1)
        run.log(last)
        assert run.rows == [FIRST, evaluated, last]
    assert read_rows(folder) == run.rows


def test_what_is_not_finite_is_null_in_a_row(folder, tiny_config):
    bad = {"a": float("nan"), "b": float("inf")}
    numbers = {"step": 1, **bad, "c": torch.tensor(0.5)}
    with Run.open(folder, tiny_config, COMMAND) as run:
        run.log(numbers)
        assert run.rows == [{"step": 1, "a": None, "b": None, "c": 0.5}]
    assert read_rows(folder) == run.rows


UNITS = {"document": [0, 3], "tokens": [8, 16], "nll": [9.5, 20.25]}


def logged(folder: Path, config: Config, *rows: EvaluationRow) -> None:
    with Run.open(folder, config, COMMAND) as run:
        for each in rows:
            run.log(each.to_json())


def test_the_last_row_of_a_key_wins(folder, tiny_config):
    first = row(16, 1.0)
    longer = row(32, 2.0)
    last = row(16, 29.75 / 24, units=UNITS)
    narrowed = row(16, 4.0, window=16)
    logged(folder, tiny_config, first, longer, last, narrowed)
    assert evaluation_rows(folder) == [last, longer, narrowed]


def test_a_row_without_a_number_replaces_none(folder, tiny_config):
    measured = row(32, 2.0)
    too_short = row(32, float("nan"), status="too_short", targets_sha256=None)
    logged(folder, tiny_config, measured, too_short)
    assert evaluation_rows(folder) == [measured]


COLUMNS = """
    protocol length length_ratio window extension extension_options task problem_length
    offset split documents checkpoint_step tokens status reason dtype n_tokens n_bytes
    n_blocks n_distinct n_documents mean_context nll perplexity bits_per_byte accuracy
    chance trivial exact_match ci_low ci_high ci_over ngram_nll ngram_order
    targets_sha256 seconds peak_memory_bytes units
"""


def test_a_row_has_the_columns_that_are_promised(folder, tiny_config):
    plain = row(16, 1.0)
    with_units = row(16, 29.75 / 24, units=UNITS, ci_low=float("nan"))
    logged(folder, tiny_config, plain, with_units)
    first, second = read_rows(folder)
    assert list(second) == COLUMNS.split()
    assert "units" not in first
    assert second["units"] == UNITS
    assert second["ci_low"] is None


def test_a_curve_is_replaced_only_by_one_that_is_measured_as_far():
    of_ab = [row(n, 1.0, targets_sha256="ab") for n in (16, 32, 64)]
    of_cd = [row(n, 1.0, targets_sha256="cd") for n in (32, 64, 128, 256)]
    of_ef = [row(n, 1.0, targets_sha256="ef") for n in (2, 4, 8, 16)]
    assert counting_rows([*of_ab, *of_cd, *of_ef]) == of_ab

    whole = [row(16, 1.1, targets_sha256="cd"), *of_cd]
    assert counting_rows([*of_ab, *whole, *of_ef]) == whole


class Own(RoPE):
    """An encoding of one's own."""


def test_another_version_of_an_own_encodings_file_is_told(tiny_config):
    encodings.register(Own)
    config = encoded(tiny_config, "own")
    now = encodings.installed_files("own", {})
    record = RunRecord(id=config.id, status="done", installed_encodings=now)
    before = dataclasses.replace(record, installed_encodings={"own": "before"})

    (line,) = other_code(config, before)

    assert line.startswith("'own' was trained with another version of its file")
    assert now.keys() == {"own"}
    assert other_code(config, record) == []


def test_adding_rows_makes_no_run(folder, tiny_config):
    opened = Run.open(folder, tiny_config, command=None)
    with pytest.raises(UserError, match="holds no run"), opened:
        pass

    assert list(folder.parent.iterdir()) == []


def test_cutting_rows_leaves_one_file_open(folder, tiny_config):
    with Run.open(folder, tiny_config, COMMAND) as run:
        before = len(os.listdir("/proc/self/fd"))
        for step in range(5):
            run.log({"step": step, "tokens": step})
            run.cut(step - 1)
        after = len(os.listdir("/proc/self/fd"))

    assert after == before
