"""What trackers show of a run: every row once, after any kill. W&B's real client, a
server on this machine.
"""

import contextlib
import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_server
from support import changed, in_child, posbench
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb.cli import cli as wandb_cli
from wandb_server import ServedRun, Server

from posbench.config.schema import Config
from posbench.run.rows import EvaluationRow, read_rows
from posbench.run.run import Run, load_record
from posbench.tracking import mirror, row_values
from posbench.tracking.wandb import SHOWN, is_online

LAST = 12  # updates of the tiny configuration
ROW = EvaluationRow(
    protocol="fixed_target",
    length=16,
    length_ratio=1,
    split="test",
    checkpoint_step=LAST,
    tokens=1536,
    status="ok",
    nll=1.0,
    ci_low=0.5,
    ci_high=1.5,
    targets_sha256="ab" * 32,
    units={"document": [0, 1], "tokens": [8, 8], "nll": [8.0, 8.0]},
)


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """Run a test without a key, without this machine's settings, and without a client
    left over from another test.
    """
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
def server(clean, monkeypatch):
    with wandb_server.serve() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        yield server
        assert server.unknown == []


@pytest.fixture
def config(tiny_config):
    return tracked(tiny_config, backend="wandb", mode="online")


def tracked(config: Config, **tracking: Any) -> Config:
    return changed(config, tracking=tracking)


def attempt(
    folder: Path,
    config: Config,
    after: int,
    until: int,
    evaluated: int = 0,
    kill: bool = False,
) -> None:
    """Do the part of one process in a run that continues from the checkpoint of a step;
    it ends, or is killed.
    """
    with Run.open(folder, config, ["posbench", "train"]) as run:
        mirror(config, run)
        run.begin_attempt()
        run.cut(after)
        if run.tracker:
            run.tracker.send()
        for step in range(after + 1, until + 1):
            run.log(
                {
                    "step": step,
                    "tokens": 128 * step,
                    "train/loss": 1 / step,
                    "seconds": step / 2,
                }
            )
            if step % 4 == 0:
                run.log({"step": step, "tokens": 128 * step, "val/loss": 2 / step})
        for ratio in range(1, evaluated + 1):
            status = (
                {"status": "undefined", "nll": None, "ci_low": None, "ci_high": None}
                if ratio == 3
                else {}
            )
            run.log(
                dataclasses.replace(
                    ROW, length=16 * ratio, length_ratio=ratio, **status
                ).to_json()
            )
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        run.finish("done" if evaluated else "stopped")


def killed(*given: Any) -> None:
    assert in_child(lambda: attempt(*given, kill=True)) == -signal.SIGKILL


def sent_of(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Return what W&B should have received of a run: every row once."""
    targets: dict[Any, Any] = {}
    rows = [row_values(row, config, targets) for row in read_rows(folder)]
    assert len(rows) > LAST
    return rows


def only(server: Server) -> ServedRun:
    (run,) = server.runs.values()
    return run


@pytest.mark.slow
def test_offline_a_resumed_run_is_one_part_that_wandb_sync_sends_once(
    server, config, tmp_path
):
    offline = tracked(config, mode="offline")
    killed(tmp_path / "run", offline, 0, 7)
    attempt(tmp_path / "run", offline, 5, LAST, 3)
    assert server.runs == {}
    (part,) = (tmp_path / "run").glob("wandb/offline-run-*")
    wandb_cli.cli(["sync", "--yes", str(part)], standalone_mode=False)
    assert only(server).history == sent_of(tmp_path / "run", offline)
    # Of metrics the client sends numbered fields: "1" the name, "5" the place of its
    # axis, "6" the options.
    metrics = json.loads(only(server).last("config"))["_wandb"]["value"]["m"]
    axes = {
        "train/loss": "tokens",
        "val/loss": "tokens",
        "eval/loss": "eval/context",
        "eval/ci_low": "eval/context",
    }
    assert (
        axes.items()
        <= {
            each["1"]: metrics[each["5"] - 1]["1"] for each in metrics if "5" in each
        }.items()
    )
    hidden = {each["1"] for each in metrics if 2 in each.get("6", [])}
    assert {
        "eval/ci_low",
        "eval/context",
        "tokens",
    } <= hidden
    assert "eval/loss" not in hidden


def test_online_every_row_arrives_once_also_after_a_kill(server, config, tmp_path):
    killed(tmp_path / "run", config, 0, 7)
    attempt(tmp_path / "run", config, 5, LAST, 3)
    served = only(server)
    assert served.history == sent_of(tmp_path / "run", config)
    assert served.name.startswith(config.id)
    assert served.last("project") == "posbench"
    assert served.exit_code == 0
    assert {
        name: served.summary[name]
        for name in ("nll_1x", "status", "rise_2x", "data/name")
    } == {
        "nll_1x": 1.0,
        "status": "done",
        "rise_2x": 0.0,
        "data/name": "text",
    }
    assert served.summary["curve"]["_type"] == "image-file"
    assert not [
        name for name in served.summary if "." in name or name.startswith("eval/")
    ]
    assert served.config["encoding"]["name"] == "rope"
    assert all(
        served.last(name) is None for name in ("host", "program", "commit", "repo")
    )


def test_posbench_sync_sends_what_is_missing_and_a_later_evaluation_goes_to_the_same_run(
    server, config, tmp_path, capsys, monkeypatch
):
    attempt(tmp_path / "run", tracked(config, mode="offline"), 0, LAST, 2)
    for sent in (17, 0):
        assert posbench("sync", str(tmp_path / "run")) == 0
        assert f"run: {sent} rows: {server.url}" in capsys.readouterr().out
    with Run.open(tmp_path / "run", config, None) as run:
        mirror(config, run)
        run.log(dataclasses.replace(ROW, length=64, length_ratio=4, nll=7.0).to_json())
    assert only(server).history == sent_of(tmp_path / "run", config)
    assert only(server).summary["status"] == "done"
    assert only(server).history[-1]["eval/loss"] == 7.0
    with Run.open(tmp_path / "run", config, [], restart=True):
        pass
    attempt(tmp_path / "run", config, 0, 3)
    # begun anew, it is another one there
    assert [len(run.history) for run in server.runs.values()] == [18, 3]
    monkeypatch.delenv("WANDB_API_KEY")
    wandb.teardown()
    assert posbench("sync", str(tmp_path / "run")) == 2
    assert "no W&B API key found: 'wandb login' stores one" in capsys.readouterr().err


def test_under_the_agent_of_a_sweep_the_run_is_the_agents(
    server, config, tmp_path, monkeypatch
):
    for name, value in {
        "SWEEP_ID": "sw33p",
        "RUN_ID": "r1",
        "PROJECT": "theirs",
    }.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    attempt(tmp_path / "run", config, 0, LAST, 1)
    run = only(server)
    assert run.name == "r1"
    assert run.last("sweep") == "sw33p"
    assert run.last("project") == "theirs"
    assert run.exit_code == 0
    assert run.summary["nll_1x"] == 1.0
    assert load_record(tmp_path / "run")["wandb"]["id"] == "r1"


def test_a_failing_wandb_costs_one_warning_and_no_row(
    config, tmp_path, monkeypatch, caplog
):
    def fails(*_: Any, **given: Any) -> Any:
        raise OSError("no network\nand more")

    monkeypatch.setattr(wandb, "init", fails)
    attempt(tmp_path / "run", tracked(config, mode="offline"), 0, LAST, 1)
    assert len(read_rows(tmp_path / "run")) == LAST + 4
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "WARNING"
    ]
    assert warning.startswith("tracking: ")
    assert "'posbench sync' sends it later" in warning
    assert "\n" not in warning


@pytest.mark.parametrize(
    ("change", "curve"),
    [
        ({"extension": "yarn:factor=4"}, "eval/fixed_target_yarn:factor=4"),
        ({"split": "validation"}, "eval/validation text"),
        ({"checkpoint_step": 5, "tokens": 640}, "eval/640 tokens"),
        ({"targets_sha256": "cd12cd"}, "eval/targets cd12cd"),
    ],
)
def test_names_tell_checkpoints_texts_and_targets_apart(config, change, curve):
    targets: dict[Any, Any] = {}
    row_values(ROW.to_json(), config, targets)
    values = row_values(dataclasses.replace(ROW, **change).to_json(), config, targets)
    assert values == {
        "eval/context": 16,
        f"{curve}/loss": 1.0,
        f"{curve}/ci_low": 0.5,
        f"{curve}/ci_high": 1.5,
    }


@pytest.mark.parametrize(
    ("name", "is_shown"),
    [
        ("eval/loss", True),
        ("eval/targets cd12cd/loss", True),
        ("eval/windowed/loss", False),
        ("eval/ci_low", False),
    ],
)
def test_a_grown_curve_has_a_panel_beside_the_first_one(name, is_shown):
    assert bool(SHOWN.fullmatch(name)) == is_shown


def test_online_needs_a_key_and_nobody_is_asked_for_one(monkeypatch):
    assert not is_online("auto")
    assert not is_online("online")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert is_online("auto")
    assert not is_online("offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not is_online("auto")


def test_tensorboard_shows_every_row_once_after_a_kill(config, tmp_path):
    config = tracked(config, backend="tensorboard")
    killed(tmp_path / "run", config, 0, 7)
    attempt(tmp_path / "run", config, 5, LAST, 2)
    (path,) = (tmp_path / "run/tensorboard").iterdir()
    curves = [
        (value.tag, event.step)
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    ]
    assert [step for tag, step in curves if tag == "train/loss"] == [
        128 * step for step in range(1, LAST + 1)
    ]
    assert [step for tag, step in curves if tag == "eval/loss"] == [16, 32]
