"""What trackers show of a run: every row once, after any kill. W&B's real client, a server on this machine."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_server
from disks import in_child
from support import posbench
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb_server import ServedRun, Server

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.evaluation.job import results_of
from posbench.run.rows import EvaluationRow, read_rows
from posbench.run.run import Run, Where
from posbench.run.tracking import choose_mode, mirror, refuse_names, shown

LAST = 12  # updates of the tiny configuration
ROW = EvaluationRow(
    protocol="fixed_target", length=16, length_ratio=1, split="test", checkpoint_step=LAST, tokens=1536, status="ok",
    nll=1.0, ci_low=0.5, ci_high=1.5, targets_sha256="ab" * 32,
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, no settings of this machine, and no client left over from another test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb" / name))
    monkeypatch.chdir(tmp_path)
    yield
    with contextlib.suppress(ConnectionError):
        wandb.teardown()


@pytest.fixture
def server(clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with wandb_server.serve() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.unknown == []


@pytest.fixture
def config(tiny_config: Config) -> Config:
    return tracked(tiny_config, backend="wandb", mode="online")


def tracked(config: Config, **tracking: Any) -> Config:
    return dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, **tracking))


def attempt(folder: Path, config: Config, after: int, until: int, evaluated: int = 0, kill: bool = False) -> None:
    """One process of a run that goes on from the checkpoint of a step; it ends, or is killed."""
    with Run.open(folder, config, ["posbench", "train"]) as run:
        mirror(config, run, results_of)
        run.begin_attempt(Where("cpu", "fp32", 1))
        run.cut(after)
        if run.tracker:
            run.tracker.send()
        for step in range(after + 1, until + 1):
            run.log({"step": step, "tokens": 128 * step, "train/loss": 1 / step, "seconds": step / 2})
            if step % 4 == 0:
                run.log({"step": step, "tokens": 128 * step, "val/loss": 2 / step})
        for ratio in range(1, evaluated + 1):
            status = {"status": "undefined", "nll": None, "ci_low": None, "ci_high": None} if ratio == 3 else {}
            run.log(dataclasses.replace(ROW, length=16 * ratio, length_ratio=ratio, **status).to_json())
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        run.finish("done" if evaluated else "stopped")


def killed(*given: Any) -> None:
    assert in_child(lambda: attempt(*given, kill=True)) == -signal.SIGKILL


def only(server: Server) -> ServedRun:
    (run,) = server.runs.values()
    return run


def assert_has_every_row_once(served: ServedRun, config: Config, folder: Path) -> None:
    targets: dict[Any, Any] = {}
    rows = [shown(row, config, targets) for row in read_rows(folder)]
    sent = [{name: value for name, value in row.items() if name != "curve"} for row in served.history]
    assert sent == rows and len(rows) > LAST
    steps = served.streams["wandb-history.jsonl"]
    assert [json.loads(steps[at])["_step"] for at in sorted(steps)] == list(range(len(rows)))


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_online_every_row_arrives_once_whatever_ended_the_first_session(
    server: Server, config: Config, tmp_path: Path, end: str
) -> None:
    (attempt if end == "stopped" else killed)(tmp_path / "run", config, 0, 7)
    assert end == "killed" or (only(server).summary["status"], only(server).exit_code) == ("stopped", 255)
    attempt(tmp_path / "run", config, 5, LAST, 3)
    served = only(server)
    assert_has_every_row_once(served, config, tmp_path / "run")
    assert (served.name, served.last("project"), served.exit_code) == (f"test-{config.id}", "posbench", 0)
    assert {name: served.summary[name] for name in ("nll_1x", "status", "rise_2x", "data/name")} == {
        "nll_1x": 1.0, "status": "done", "rise_2x": 0.0, "data/name": "text",
    }  # fmt: skip
    assert not [name for name in served.summary if "." in name or name.startswith("eval/")]
    axes = {"train/loss": "tokens", "val/loss": "tokens", "eval/loss": "eval/context", "eval/ci_low": "eval/context"}
    assert axes.items() <= served.axes.items()
    assert {"eval/ci_low", "eval/context", "tokens"} <= served.hidden and "eval/loss" not in served.hidden
    assert served.config["encoding"]["name"] == "rope" and "curve" in served.history[-1]
    assert all(served.last(name) is None for name in ("host", "program", "commit", "repo"))


@pytest.mark.full
def test_offline_a_resumed_run_is_one_part_that_wandb_sync_sends_once(
    server: Server, config: Config, tmp_path: Path
) -> None:
    offline = tracked(config, mode="offline")
    killed(tmp_path / "run", offline, 0, 7)
    attempt(tmp_path / "run", offline, 5, LAST, 2)
    assert server.runs == {}
    parts = [str(path) for path in (tmp_path / "run").glob("wandb/offline-run-*")]
    assert len(parts) == 1
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "wandb", "sync", "--yes", *parts], check=True, capture_output=True)
    assert_has_every_row_once(only(server), config, tmp_path / "run")


def test_posbench_sync_sends_what_is_missing_and_a_later_evaluation_goes_to_the_same_run(
    server: Server, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(tmp_path / "run", tracked(config, mode="offline"), 0, LAST, 2)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for sent in (17, 0):
        assert posbench("sync", str(tmp_path / "run")) == 0
        assert f"run: {sent} rows: {server.url}" in capsys.readouterr().out
    assert_has_every_row_once(only(server), config, tmp_path / "run")
    with Run.open(tmp_path / "run", config, None) as run:
        mirror(config, run, results_of)
        run.log(dataclasses.replace(ROW, length=64, length_ratio=4, nll=7.0).to_json())
    assert_has_every_row_once(only(server), config, tmp_path / "run")
    assert only(server).summary["status"] == "done" and only(server).history[-1]["eval/loss"] == 7.0
    monkeypatch.setenv("WANDB_PROJECT", "other")
    assert posbench("sync", str(tmp_path / "run")) == 0
    assert only(server).last("project") == "other"
    monkeypatch.delenv("WANDB_API_KEY")
    wandb.teardown()
    assert posbench("sync", str(tmp_path / "run")) == 2
    assert "no W&B API key found: 'wandb login' stores one" in capsys.readouterr().err


def test_a_run_begun_anew_is_another_one_at_wandb(server: Server, config: Config, tmp_path: Path) -> None:
    attempt(tmp_path / "run", config, 0, 2)
    with Run.open(tmp_path / "run", config, [], restart=True):
        pass
    attempt(tmp_path / "run", config, 0, 3)
    first, second = server.runs
    assert second == f"{first}-2" and [len(run.history) for run in server.runs.values()] == [2, 3]


@pytest.mark.parametrize("broken", ["import", "init", "log", "finish"])
def test_a_failing_wandb_costs_one_warning_and_no_row(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fails(*_: Any, **given: Any) -> Any:
        if broken == "init":  # the start waits a minute at most, once; so does the end
            assert (given["settings"].init_timeout, given["settings"].finish_timeout) == (60, 60)
        raise OSError("no network\nand more")

    if broken == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        monkeypatch.setattr(wandb if broken == "init" else wandb.Run, broken, fails)
    attempt(tmp_path / "run", tracked(config, mode="offline"), 0, LAST, 1)
    assert len(read_rows(tmp_path / "run")) == LAST + 4
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("tracking: ") and "'posbench sync' sends it later" in warning and "\n" not in warning


def test_what_wandb_would_refuse_is_refused_before_anything_is_written(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, names in {"tags": [("x" * 65,)], "project": ["a/b", "x" * 129]}.items():
        for name in names:
            with pytest.raises(UserError, match=rf"tracking\.{key} is '.*characters: W&B takes 1 to"):
                refuse_names(tracked(config, **{key: name}))
            refuse_names(tracked(config, backend="none", **{key: name}))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    refuse_names(tracked(config, project="a/b"))


@pytest.mark.parametrize(
    ("change", "curve"),
    [
        ({}, "eval"),
        ({"window": 16}, "eval/windowed"),
        ({"window": 16, "extension": "sinks"}, "eval/fixed_target_sinks_windowed"),
        ({"protocol": "nonoverlap"}, "eval/nonoverlap"),
        ({"protocol": "task", "task": "repeat", "window": 16}, "eval/task_repeat_windowed"),
        ({"extension": "yarn:factor=4"}, "eval/fixed_target_yarn:factor=4"),
        ({"split": "validation"}, "eval/validation text"),
        ({"checkpoint_step": 5, "tokens": 640}, "eval/640 tokens"),
        ({"targets_sha256": "cd12cd"}, "eval/targets cd12cd"),
    ],
)
def test_names_tell_checkpoints_texts_and_targets_apart(config: Config, change: dict[str, Any], curve: str) -> None:
    targets: dict[Any, Any] = {}
    shown(ROW.to_json(), config, targets)
    values = shown(dataclasses.replace(ROW, **change).to_json(), config, targets)
    assert values == {"eval/context": 16, f"{curve}/loss": 1.0, f"{curve}/ci_low": 0.5, f"{curve}/ci_high": 1.5}


@pytest.mark.parametrize(
    ("asked", "environment", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x" * 40}, "online"),
        ("auto", {"WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("offline", {"WANDB_API_KEY": "x" * 40}, "offline"),
        ("online", {}, "offline"),
    ],
)
def test_online_needs_a_key_and_nobody_is_asked_for_one(
    monkeypatch: pytest.MonkeyPatch, asked: str, environment: dict[str, str], mode: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert choose_mode(asked) == mode


def test_tensorboard_shows_every_row_once_after_a_kill(config: Config, tmp_path: Path) -> None:
    config = tracked(config, backend="tensorboard")
    killed(tmp_path / "run", config, 0, 7)
    attempt(tmp_path / "run", config, 5, LAST, 2)
    (path,) = (tmp_path / "run/tensorboard").iterdir()
    curves = [(value.tag, event.step) for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    assert [step for tag, step in curves if tag == "train/loss"] == [128 * step for step in range(1, LAST + 1)]
    assert [step for tag, step in curves if tag == "eval/loss"] == [16, 32]
