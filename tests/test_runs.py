"""The run folder: one owner, whole records, nothing lost."""

import dataclasses
import fcntl
import json
import logging
import os
import signal
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import in_child, small_disk, start_child
from support import snapshot

from posbench.config.schema import Config
from posbench.errors import InUse, RunFailed, UserError
from posbench.run.facts import Where
from posbench.run.jsonl import read_jsonl
from posbench.run.rows import EvaluationRow, evaluation_rows, read_rows
from posbench.run.run import Run, in_use, load_config, load_record

COMMAND = ["posbench", "train"]


def with_seed(config: Config, seed: int) -> Config:
    return dataclasses.replace(config, seed=seed)


# -- run.json ----------------------------------------------------------------------------------------------------------


def test_run_json_has_every_promised_key_from_the_start(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert list(record) == [
        "schema", "id", "study", "encoding", "seed", "command", "installed_encodings", "status", "reason", "message",
        "attempt", "parameters", "tokens", "train_seconds", "cpu_seconds", "evaluate_seconds",
        "peak_memory_bytes", "data", "tokenizer_sha256", "support", "wandb", "versions", "git",
    ]  # fmt: skip
    assert record["id"] == tiny_config.id and record["status"] == "running" and record["command"] == "posbench train"
    assert record["parameters"] == {"total": None, "encoding": None, "non_embedding": None}
    assert record["git"].keys() == {"commit", "dirty"}
    assert record["tokens"] is None and record["data"] is None


def test_the_last_attempt_is_recorded_and_times_are_utc(tmp_path: Path, tiny_config: Config) -> None:
    for status in ("stopped", "done"):
        with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
            run.begin_attempt(Where("cpu", "fp32", 1))
            assert load_record(run.folder)["status"] == "running"
            run.update_attempt(steps=7)
            run.finish(status, "signal" if status == "stopped" else None, "stopped by SIGTERM")
    record = load_record(tmp_path / "run")
    assert record["status"] == "done" and record["reason"] is None
    attempt = record["attempt"]
    keys = ["started", "ended", "host", "pid", "device", "dtype", "threads", "processes", "compiled"]
    assert list(attempt) == [*keys, "bit_exact", "steps"]
    assert attempt["steps"] == 7 and attempt["pid"] == os.getpid()
    for time_ in (attempt["started"], attempt["ended"]):
        assert datetime.fromisoformat(time_).utcoffset().total_seconds() == 0  # type: ignore[union-attr]


def test_a_field_outside_the_schema_is_refused(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        with pytest.raises(ValueError, match="tokns"):
            run.update(tokns=1)
        run.update(tokens=1)
    assert load_record(tmp_path / "run")["tokens"] == 1


def test_opening_a_finished_run_without_an_attempt_leaves_its_record(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.begin_attempt(Where("cpu", "fp32", 1))
        run.finish("done")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with Run.open(tmp_path / "run", tiny_config, None):
        pass
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_git_never_fails_without_git(tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.begin_attempt(Where("cpu", "fp32", 1))
        assert run.record["git"] == {"commit": None, "dirty": None}
        assert {"posbench", "python", "torch"} <= run.record["versions"].keys()


@pytest.mark.parametrize("mask", [0o077, 0o022])
def test_files_follow_the_umask(tmp_path: Path, tiny_config: Config, mask: int) -> None:
    before = os.umask(mask)
    try:
        with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
            run.log({"step": 1})
            run.log_to_file()
            run.update(tokens=1)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "run").iterdir()}
    assert {"run.json", "config.yaml", "rows.jsonl", "log.txt"} == modes.keys()
    assert set(modes.values()) == {0o666 & ~mask}


# -- configuration and identity ----------------------------------------------------------------------------------------


def test_another_run_in_the_folder_is_refused_with_what_differs(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        pass
    before = snapshot(tmp_path / "run")
    with pytest.raises(UserError, match=r"holds another run .*: seed 0 -> 5; .*--restart"):
        Run.open(tmp_path / "run", with_seed(tiny_config, 5), COMMAND)
    after = snapshot(tmp_path / "run")
    assert {name: after[name] for name in before} == before


def test_what_is_not_identity_may_change(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        pass
    other = dataclasses.replace(tiny_config, runtime=dataclasses.replace(tiny_config.runtime, log_every_steps=99))
    with Run.open(tmp_path / "run", other, COMMAND) as run:
        assert load_config(run.folder) == tiny_config


def test_a_runs_name_is_that_of_its_configuration(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "elsewhere", tiny_config, COMMAND) as run:
        assert run.id == run.record["id"] == tiny_config.id
        run.update(id="../../of a stranger")
    with Run.open(tmp_path / "elsewhere", tiny_config, COMMAND) as run:
        assert run.id == tiny_config.id


def test_restart_moves_the_old_folder_aside(tmp_path: Path, tiny_config: Config) -> None:
    folder = tmp_path / "run"
    for number in range(3):
        with Run.open(folder, tiny_config, COMMAND, restart=True) as run:
            assert run.rows == []
            run.log({"step": number})
            with pytest.raises(UserError, match="in use"):
                Run.open(folder, tiny_config, COMMAND, restart=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.lock", "run", "run.old-1", "run.old-2"]
    assert [read_rows(tmp_path / name) for name in ("run.old-1", "run.old-2", "run")] == [
        [{"step": 0}], [{"step": 1}], [{"step": 2}]
    ]  # fmt: skip


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yaml"):
        load_config(tmp_path)


# -- one owner ---------------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_and_changes_nothing(tmp_path: Path, tiny_config: Config) -> None:
    assert not in_use(tmp_path / "run")
    with Run.open(tmp_path / "run", tiny_config, COMMAND):
        before = snapshot(tmp_path)

        def second() -> None:
            with pytest.raises(InUse, match="in use by another process: wait for it or stop it"):
                Run.open(tmp_path / "run", tiny_config, COMMAND)
            assert in_use(tmp_path / "run")

        assert in_child(second) == 0
        assert snapshot(tmp_path) == before
    assert not in_use(tmp_path / "run")


@pytest.mark.full
def test_of_two_processes_started_at_once_exactly_one_wins(tmp_path: Path, tiny_config: Config) -> None:
    for trial in range(20):
        gate, answers, release = os.pipe(), os.pipe(), os.pipe()

        def contend(
            folder: Path = tmp_path / str(trial), gate: Any = gate, answers: Any = answers, release: Any = release
        ) -> None:
            os.close(gate[1])
            os.close(release[1])
            os.read(gate[0], 1)  # both go on when the parent closes its end
            try:
                run = Run.open(folder, tiny_config, COMMAND)
                os.write(answers[1], b"W")
                os.read(release[0], 1)  # owner until both have answered
                run.close()
            except UserError:
                os.write(answers[1], b"L")

        children = [start_child(contend), start_child(contend)]
        os.close(gate[1])
        told = os.read(answers[0], 1) + os.read(answers[0], 1)
        os.close(release[1])
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
        for descriptor in (gate[0], *answers, release[0]):
            os.close(descriptor)
        assert sorted(told) == sorted(b"WL"), trial


def test_who_asks_whether_a_folder_is_owned_keeps_no_owner_from_it(tmp_path: Path, tiny_config: Config) -> None:
    asking = (tmp_path / ".run.lock").open("wb")
    fcntl.flock(asking, fcntl.LOCK_EX)  # as in_use has it, for a moment
    threading.Timer(0.05, asking.close).start()
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        assert in_use(run.folder)


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path, tiny_config: Config) -> None:
    def die() -> None:
        Run.open(tmp_path / "run", tiny_config, COMMAND).log({"step": 1})
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL and not in_use(tmp_path / "run")
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        assert run.rows == [{"step": 1}]


def test_a_temporary_left_by_a_kill_goes_at_the_next_start(
    tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.update(tokens=1)

        def die() -> None:
            monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            run.update(tokens=2)

        assert in_child(die) == -signal.SIGKILL
        assert list(run.folder.glob(".tmp-*"))
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        assert run.record["tokens"] == 1
        assert not list(run.folder.glob(".tmp-*"))


# -- line-by-line records ----------------------------------------------------------------------------------------------


def test_rows_after_a_step_are_cut_and_half_a_line_never_spoils_the_next(tmp_path: Path, tiny_config: Config) -> None:
    evaluated = row(16, 1.0).to_json() | {"checkpoint_step": 1}
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        for logged in (
            {"step": 1, "train/loss": 2.0},
            evaluated,
            {"step": 2, "train/loss": 1.0},
            row(32, 1.0).to_json(),
        ):
            run.log(logged)
    with open(run.folder / "rows.jsonl", "a") as file:
        file.write('{"step": 3, "x": "' + "y" * 70_000)  # what a kill leaves
    assert len(read_rows(run.folder)) == 4
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.log({"step": 3})
        assert [each.get("step") for each in read_rows(run.folder)] == [1, None, 2, None, 3]
        run.cut(1)
        run.log({"step": 2})
        assert run.rows == read_rows(run.folder) == [{"step": 1, "train/loss": 2.0}, evaluated, {"step": 2}]


def test_the_two_files_of_an_older_run_are_read_and_written_as_one_when_it_is_opened(
    tmp_path: Path, tiny_config: Config
) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        pass
    (run.folder / "rows.jsonl").unlink()
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n{"step": 1, "validation/nll": 2.5}\n')
    (run.folder / "evaluation.jsonl").write_text(json.dumps(row(16, 1.0).to_json()) + "\n")
    expected = [{"step": 1, "train/loss": 2.0}, {"step": 1, "val/loss": 2.5}, row(16, 1.0).to_json()]
    assert read_rows(run.folder) == expected and evaluation_rows(run.folder) == [row(16, 1.0)]
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        assert run.rows == read_rows(run.folder) == expected
        assert (run.folder / "rows.jsonl").exists()


def test_what_is_not_finite_is_null_and_tensors_are_numbers(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.log({"a": float("nan"), "b": float("inf"), "c": torch.tensor(0.5), "e": 10**12 + 1})
        assert (run.folder / "rows.jsonl").read_text() == '{"a": null, "b": null, "c": 0.5, "e": 1000000000001}\n'


def row(length: int, nll: float, **more: Any) -> EvaluationRow:
    return EvaluationRow(
        protocol="fixed_target", length=length, length_ratio=length / 16, split="test", checkpoint_step=12,
        status="ok", nll=nll, targets_sha256="ab", **more,
    )  # fmt: skip


def test_the_last_row_of_a_key_wins(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        for logged in (row(16, 1.0), row(32, 2.0), row(16, 3.0), row(16, 4.0, window=16)):
            run.log(logged.to_json())
        assert evaluation_rows(run.folder) == [row(16, 3.0), row(32, 2.0), row(16, 4.0, window=16)]


def test_the_file_of_an_evaluation_has_the_columns_that_are_promised(tmp_path: Path, tiny_config: Config) -> None:
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        units = {"document": [0, 3], "tokens": [8, 16], "nll": [9.5, 20.25]}
        run.log(row(16, float("nan"), extension_options={"factor": 4.0}, units=units).to_json())
        run.log(row(32, 1.0).to_json())
        line, without = read_rows(run.folder)
    assert " ".join(line) == (
        "protocol length length_ratio stride window extension extension_options task problem_length offset split "
        "documents checkpoint_step tokens status reason dtype n_tokens n_bytes n_blocks n_distinct n_documents "
        "mean_context nll perplexity bits_per_byte accuracy chance trivial exact_match ci_low ci_high ci_over "
        "ngram_nll ngram_order targets_sha256 seconds peak_memory_bytes units"
    )
    assert line["nll"] is None and line["extension_options"] == {"factor": 4.0}
    assert line["units"] == units and "units" not in without


def test_columns_that_an_older_file_lacks_are_none(tmp_path: Path) -> None:
    line = {key: value for key, value in row(16, 1.0).to_json().items() if value is not None}
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(line) + "\n")
    assert evaluation_rows(tmp_path) == [row(16, 1.0)]


@pytest.mark.parametrize(
    ("more", "name", "kind"),
    [
        ({}, "fixed_target", "plain"),
        ({"window": 16}, "windowed", "windowed"),
        ({"window": 16, "extension": "sinks"}, "fixed_target_sinks_windowed", "sinks"),
        ({"extension": "yarn:factor=4"}, "fixed_target_yarn:factor=4", "yarn:factor=4"),
        ({"protocol": "nonoverlap"}, "nonoverlap", "plain"),
        ({"protocol": "task", "task": "repeat", "window": 16}, "task_repeat_windowed", "windowed"),
    ],
)
def test_a_rows_name_says_what_was_measured_and_how_the_model_was_changed(
    more: dict[str, Any], name: str, kind: str
) -> None:
    changed = dataclasses.replace(row(16, 1.0), **more)
    assert (changed.curve_name, changed.kind) == (name, kind)


@pytest.mark.parametrize("schema", [1, 2, None])
def test_a_record_of_this_schema_or_of_none_is_read(tmp_path: Path, schema: Any) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": schema, "id": "x"}))
    assert load_record(tmp_path)["id"] == "x"


def test_a_record_of_a_newer_schema_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": 3}))
    with pytest.raises(UserError, match=r"run\.json has schema 3, this posbench reads up to 2: upgrade posbench$"):
        load_record(tmp_path)


def test_a_damaged_line_is_reported_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl"):
        read_jsonl(tmp_path / "metrics.jsonl")
    assert read_jsonl(tmp_path / "missing.jsonl") == []


def test_a_full_disk_is_reported_at_the_first_lost_row_and_leaves_whole_lines(
    tmp_path: Path, tiny_config: Config
) -> None:
    with small_disk(tmp_path / "disk", "200k") as disk, Run.open(disk / "run", tiny_config, COMMAND) as run:
        run.log({"step": 0})  # has its page, which the next rows fill to the last byte
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 1024)
        logged = 1
        with pytest.raises(RunFailed, match=r"no room to write .*rows\.jsonl.*free") as failure:
            for _ in range(100_000):
                run.log({"step": logged})
                logged += 1
        assert failure.value.reason == "disk"
        assert (run.folder / "rows.jsonl").read_bytes().endswith(b"\n")
        assert len(read_rows(run.folder)) == logged
        assert logged > 1
        record = (run.folder / "run.json").read_bytes()
        with pytest.raises(RunFailed):
            run.finish("failed", "disk")
        assert (run.folder / "run.json").read_bytes() == record
        filler.unlink()
        run.finish("failed", "disk")
        assert load_record(run.folder)["reason"] == "disk"


# -- logs ------------------------------------------------------------------------------------------------------------


def test_the_log_has_one_line_per_record_and_ends_with_the_run(tmp_path: Path, tiny_config: Config) -> None:
    logger = logging.getLogger("posbench.train")
    with Run.open(tmp_path / "run", tiny_config, COMMAND) as run:
        run.log_to_file()
        logger.info("name é %s", "x\n2026-01-01 ERROR forged\x1b[2J")
    logger.warning("after the run")
    (line,) = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert line.endswith(r"INFO posbench.train: name é x\n2026-01-01 ERROR forged\x1b[2J")
    assert "+00:00" in line
