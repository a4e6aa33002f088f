"""The run folder: one owner, whole records, nothing lost."""

import os
import signal
from typing import Any

import pytest
import torch
from support import changed, in_child, snapshot

from posbench import encodings
from posbench.errors import InUse, RunFailed, UserError
from posbench.run import checkpoint
from posbench.run.rows import (
    EvaluationRow,
    evaluation_rows,
    on_shared_targets,
    read_rows,
)
from posbench.run.run import ADDING, Run, in_use, load_config, load_record, other_code

COMMAND = ["posbench", "train"]


def row(length: int, nll: float, **more: Any) -> EvaluationRow:
    known = {
        "protocol": "fixed_target",
        "status": "ok",
        "targets_sha256": "ab",
        "length_ratio": length / 16,
    }
    return EvaluationRow(
        **(
            known
            | {"length": length, "split": "test", "checkpoint_step": 12, "nll": nll}
            | more
        )
    )


def test_run_json_says_from_the_start_how_a_run_stands_and_how_it_ended(
    tmp_path, tiny_config
):
    def stands() -> tuple[Any, ...]:
        record = load_record(tmp_path / "run")
        return record["status"], record["reason"], record["message"]

    with (
        pytest.raises(RunFailed),
        Run.open(tmp_path / "run", tiny_config, COMMAND) as run,
    ):
        run.begin_attempt(device="cpu")
        assert stands() == ("running", None, None)
        raise RunFailed("the loss is not finite", "diverged")
    assert stands() == ("failed", "diverged", "the loss is not finite")
    record = load_record(run.folder)
    assert record["id"] == tiny_config.id
    assert record["command"] == "posbench train"
    assert "torch" in record["versions"]
    assert {"device": "cpu", "pid": os.getpid()}.items() <= record["attempt"].items()
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.finish("done")
        run.begin_attempt(device="cpu")
        assert stands() == ("running", None, None)  # it has no weights
        checkpoint.save(run.folder, 1, {"w": torch.zeros(1)}, {}, {})
        run.finish("done")
    with pytest.raises(UserError), Run.open(run.folder, tiny_config, COMMAND):
        raise UserError("what cannot begin is no attempt")
    with (
        pytest.raises(KeyboardInterrupt),
        Run.open(run.folder, tiny_config, COMMAND) as run,
    ):
        run.begin_attempt(device="cpu")
        assert stands() == ("done", ADDING, None)
        raise KeyboardInterrupt
    assert stands()[:2] == ("done", "signal")


def test_another_run_in_the_folder_is_refused_and_what_is_no_identity_may_change(
    tmp_path, tiny_config
):
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        before = snapshot(tmp_path / "run")
    with pytest.raises(UserError, match=r"holds another run .*--restart"):
        Run.open(tmp_path / "run", changed(tiny_config, seed=5), COMMAND).__enter__()
    other = changed(tiny_config, runtime={"log_every_steps": 99})
    with Run.open(tmp_path / "run", other, COMMAND) as run:
        assert load_config(run.folder) == tiny_config
        assert run.id == tiny_config.id
    assert snapshot(tmp_path / "run") == before


def test_restart_moves_the_old_folder_aside(tmp_path, tiny_config):
    for number in range(3):
        with Run.open(tmp_path / "run", tiny_config, COMMAND, restart=True) as run:
            assert run.rows == []
            run.log({"step": number})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".run.lock",
        "run",
        "run.old-1",
        "run.old-2",
    ]
    steps = {"run.old-1": 0, "run.old-2": 1, "run": 2}
    assert {name: read_rows(tmp_path / name) for name in steps} == {
        name: [{"step": n}] for name, n in steps.items()
    }


def test_a_second_process_is_refused_and_changes_nothing(tmp_path, tiny_config):
    assert not in_use(tmp_path / "run")
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        before = snapshot(tmp_path)

        def second() -> None:
            for restart in (False, True):
                with pytest.raises(
                    InUse, match="in use by another process: wait for it or stop it"
                ):
                    Run.open(
                        tmp_path / "run", tiny_config, COMMAND, restart
                    ).__enter__()
            assert in_use(tmp_path / "run")

        assert in_child(second) == 0
        assert snapshot(tmp_path) == before
    assert not in_use(tmp_path / "run")


def test_what_a_killed_process_leaves_is_taken_over_and_its_temporary_files_go(
    tmp_path, tiny_config, monkeypatch
):
    def die() -> None:
        with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
            run.log({"step": 1})
            run.update(tokens=1)
            monkeypatch.setattr(
                os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
            run.update(tokens=2)

    assert in_child(die) == -signal.SIGKILL
    assert not in_use(tmp_path / "run")
    assert list((tmp_path / "run").glob(".tmp-*"))
    (tmp_path / "run/.tmp-notes").touch()  # not ours
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        assert run.rows == [{"step": 1}]
        assert run.record["tokens"] == 1
        assert [path.name for path in run.folder.glob(".tmp-*")] == [".tmp-notes"]


def test_rows_after_a_step_are_cut_and_half_a_line_never_spoils_the_next(
    tmp_path, tiny_config
):
    evaluated = row(16, 1.0, checkpoint_step=1).to_json()
    later = row(32, 1.0).to_json()
    first, second = ({"step": step, "train/loss": 2.0} for step in (1, 2))
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        for logged in (first, evaluated, second, later):
            run.log(logged)
    with open(run.folder / "rows.jsonl", "a") as file:
        file.write('{"step": 3, "x": "' + "y" * 70_000)  # what a kill leaves
    assert read_rows(run.folder) == [first, evaluated, second, later]
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.log({"step": 3})
        assert read_rows(run.folder) == [first, evaluated, second, later, {"step": 3}]
        run.cut(1)
        run.log(
            {
                "a": float("nan"),
                "b": float("inf"),
                "c": torch.tensor(0.5),
                "step": 10**12,
            }
        )
        made = {"a": None, "b": None, "c": 0.5, "step": 10**12}
        assert run.rows == read_rows(run.folder) == [first, evaluated, made]


def test_the_last_row_of_a_key_wins_and_a_row_has_the_columns_that_are_promised(
    tmp_path, tiny_config
):
    units = {"document": [0, 3], "tokens": [8, 16], "nll": [9.5, 20.25]}
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        for logged in (
            row(16, 1.0),
            row(32, 2.0),
            row(16, 3.0, units=units),
            row(16, 4.0, window=16),
        ):
            run.log(logged.to_json())
        run.log(row(64, float("nan")).to_json())
        # replaces no number
        run.log(
            row(32, float("nan"), status="too_short", targets_sha256=None).to_json()
        )
    assert evaluation_rows(run.folder)[:3] == [
        row(16, 3.0, units=units),
        row(32, 2.0),
        row(16, 4.0, window=16),
    ]
    lines = read_rows(run.folder)
    assert (
        " ".join(lines[2])
        == "protocol length length_ratio window extension extension_options task"
        " problem_length offset split documents checkpoint_step tokens status reason"
        " dtype n_tokens n_bytes n_blocks n_distinct n_documents mean_context nll"
        " perplexity bits_per_byte accuracy chance trivial exact_match ci_low"
        " ci_high ci_over ngram_nll ngram_order targets_sha256 seconds"
        " peak_memory_bytes units"
    )
    assert lines[2]["units"] == units
    assert "units" not in lines[0]
    assert lines[4]["nll"] is None


def test_a_curve_has_the_targets_of_the_training_length_and_of_most_longer_ones():
    lengths = {"ab": (16, 32, 64), "cd": (32, 64, 128, 256), "ef": (2, 4, 8, 16)}
    rows = [
        row(length, 1.0, targets_sha256=targets)
        for targets, each in lengths.items()
        for length in each
    ]
    assert on_shared_targets(rows) == rows[:3]


def test_another_version_of_an_own_encodings_file_is_told(tiny_config, monkeypatch):
    monkeypatch.setattr(
        encodings, "installed_files", lambda *_: {"own": "now", "other": "same"}
    )
    (line,) = other_code(
        tiny_config, {"installed_encodings": {"own": "before", "other": "same"}}
    )
    assert line.startswith("'own' was trained with another version of its file")
    assert other_code(tiny_config, {}) == []
