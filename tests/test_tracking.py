"""What trackers show of a run: every row once, after any kill. W&B's real client, a
server on this machine.
"""

import collections
import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
import wandb_server
from support import changed, in_child, posbench
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from wandb.cli import cli as wandb_cli
from wandb_server import ServedRun, Server

from posbench.config.schema import Config
from posbench.run.folder import Run
from posbench.run.rows import EvaluationRow, read_rows
from posbench.run.saved import load_record
from posbench.tracking import mirror, row_values
from posbench.tracking.sessions.wandb import SHOWN, is_online

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
    settings = [name for name in os.environ if name.startswith("WANDB_")]
    for name in settings:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb/config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb/data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb/cache"))
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


def tracked(config: Config, **tracking: Any) -> Config:
    return changed(config, tracking=tracking)


@pytest.fixture
def config(tiny_config):
    return tracked(tiny_config, backend="wandb", mode="online")


@pytest.fixture
def offline(config):
    return tracked(config, mode="offline")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def evaluation_row(**changes: Any) -> dict[str, Any]:
    return dataclasses.replace(ROW, **changes).to_json()


UNDEFINED = {
    "status": "undefined",
    "nll": None,
    "ci_low": None,
    "ci_high": None,
    "units": None,
}
EVALUATIONS = [
    evaluation_row(),
    evaluation_row(length=32, length_ratio=2),
    evaluation_row(length=48, length_ratio=3, **UNDEFINED),
]


def log_updates(run: Run, after: int, until: int) -> None:
    for step in range(after + 1, until + 1):
        row = {"step": step, "tokens": 128 * step}
        run.log({**row, "train/loss": 1 / step, "seconds": step / 2})
        if step % 4 == 0:
            run.log({**row, "val/loss": 2 / step})


@contextlib.contextmanager
def attempt(folder: Path, config: Config, after: int = 0) -> Iterator[Run]:
    """Begin a run, or go on from the checkpoint of a step."""
    with Run.open(folder, config, ["posbench", "train"]) as run:
        mirror(config, run)
        run.begin_attempt()
        run.cut(after)
        if run.tracker:
            run.tracker.send()
        yield run


def finish(folder: Path, config: Config, after: int = 0, evaluated: int = 3) -> None:
    """Do the part of a process in which a run ends."""
    with attempt(folder, config, after) as run:
        log_updates(run, after, LAST)
        for row in EVALUATIONS[:evaluated]:
            run.log(row)
        run.finish("done")


def die(folder: Path, config: Config) -> None:
    """Do the part of a process that is killed after update 7."""

    def work() -> None:
        with attempt(folder, config) as run:
            log_updates(run, 0, 7)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(work) == -signal.SIGKILL


def rows_to_send(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Return what W&B should have received of a run: every row once."""
    targets: dict[Any, Any] = {}
    rows = [row_values(row, config, targets) for row in read_rows(folder)]
    assert len(rows) > LAST
    return rows


def only(server: Server) -> ServedRun:
    (run,) = server.runs.values()
    return run


@pytest.fixture
def sent_later(server, offline, folder):
    """Return a run that was killed and went on offline, sent by `wandb sync`."""
    die(folder, offline)
    finish(folder, offline, after=5)
    assert server.runs == {}
    (part,) = folder.glob("wandb/offline-run-*")
    wandb_cli.cli(["sync", "--yes", str(part)], standalone_mode=False)
    return only(server)


@pytest.mark.slow
def test_offline_a_resumed_run_is_one_part_that_wandb_sync_sends_once(
    sent_later, offline, folder
):
    assert sent_later.history == rows_to_send(folder, offline)


@pytest.mark.slow
def test_metrics_have_their_axes_and_panels(sent_later):
    # Of metrics the client sends numbered fields: "1" the name, "5" the place of its
    # axis, "6" the options, of which 2 hides it.
    sent = json.loads(sent_later.last("config"))
    metrics = sent["_wandb"]["value"]["m"]
    axes = {}
    hidden = set()
    for metric in metrics:
        name = metric["1"]
        if "5" in metric:
            axis = metrics[metric["5"] - 1]
            axes[name] = axis["1"]
        if 2 in metric.get("6", []):
            hidden.add(name)

    assert axes["train/loss"] == "tokens"
    assert axes["val/loss"] == "tokens"
    assert axes["eval/loss"] == "eval/context"
    assert axes["eval/ci_low"] == "eval/context"
    assert {"eval/ci_low", "eval/context", "tokens"} <= hidden
    assert "eval/loss" not in hidden


@pytest.mark.slow
def test_online_every_row_arrives_once_also_after_a_kill(server, config, folder):
    die(folder, config)
    finish(folder, config, after=5)

    run = only(server)
    assert run.history == rows_to_send(folder, config)
    assert run.exit_code == 0


def test_a_run_has_its_configuration_and_its_results(server, config, folder):
    finish(folder, config)

    run = only(server)
    assert run.name.startswith(config.id)
    assert run.last("project") == "posbench"
    assert run.config["encoding"]["name"] == "rope"
    assert run.summary["status"] == "done"
    assert run.summary["nll_1x"] == 1.0
    assert run.summary["rise_2x"] == 0.0
    assert run.summary["data/name"] == "text"
    for name in run.summary:
        assert "." not in name
        assert not name.startswith("eval/")


def test_nothing_about_the_machine_is_sent(server, config, folder):
    finish(folder, config)

    run = only(server)
    assert run.last("host") is None
    assert run.last("program") is None
    assert run.last("commit") is None
    assert run.last("repo") is None


def test_posbench_sync_sends_what_is_missing(server, offline, folder, capsys):
    finish(folder, offline, evaluated=2)

    assert posbench("sync", str(folder)) == 0
    assert f"run: 17 rows: {server.url}" in capsys.readouterr().out
    assert posbench("sync", str(folder)) == 0
    assert f"run: 0 rows: {server.url}" in capsys.readouterr().out
    assert only(server).history == rows_to_send(folder, offline)


def test_a_later_evaluation_goes_to_the_same_run(server, config, folder):
    finish(folder, config)

    with Run.open(folder, config, None) as run:
        mirror(config, run)
        units = ROW.units | {"nll": [56.0, 56.0]}
        row = evaluation_row(length=64, length_ratio=4, nll=7.0, units=units)
        run.log(row)

    sent = only(server)
    assert sent.history == rows_to_send(folder, config)
    assert sent.history[-1]["eval/loss"] == 7.0
    assert sent.summary["status"] == "done"


def test_a_run_that_is_begun_anew_is_another_one(server, config, folder):
    finish(folder, config, evaluated=2)
    with Run.open(folder, config, [], restart=True):
        pass

    with attempt(folder, config) as run:
        log_updates(run, 0, 3)
        run.finish("stopped")

    lengths = [len(run.history) for run in server.runs.values()]
    assert lengths == [17, 3]


def test_posbench_sync_needs_a_key(offline, folder, capsys):
    finish(folder, offline)
    assert posbench("sync", str(folder)) == 2
    assert "no W&B API key found: 'wandb login' stores one" in capsys.readouterr().err


def test_under_the_agent_of_a_sweep_the_run_is_the_agents(
    server, config, folder, monkeypatch
):
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")

    finish(folder, config)

    run = only(server)
    assert run.name == "r1"
    assert run.last("sweep") == "sw33p"
    assert run.last("project") == "theirs"
    assert run.exit_code == 0
    assert run.summary["nll_1x"] == 1.0
    assert load_record(folder).wandb["id"] == "r1"


def test_a_failing_wandb_costs_one_warning_and_no_row(
    offline, folder, monkeypatch, caplog
):
    fails = Mock(side_effect=OSError("no network\nand more"))
    monkeypatch.setattr(wandb, "init", fails)
    caplog.set_level("WARNING")

    finish(folder, offline, evaluated=1)

    assert len(read_rows(folder)) == LAST + 4
    (warning,) = caplog.messages
    assert warning.startswith("tracking: ")
    assert "'posbench sync' sends them later" in warning
    assert "\n" not in warning


def test_what_posbench_sync_does_not_send_is_not_sent_later(
    config, folder, monkeypatch, caplog
):
    fails = Mock(side_effect=OSError("no space"))
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", fails)
    caplog.set_level("WARNING")

    finish(folder, tracked(config, backend="tensorboard"))

    assert caplog.messages == ["tracking: no space: the run folder has all rows"]


def test_in_posbench_sync_a_failure_is_no_reason_to_run_it_later(
    server, offline, folder, monkeypatch, caplog
):
    caplog.set_level("WARNING")
    finish(folder, offline)
    fails = Mock(side_effect=OSError("no network"))
    monkeypatch.setattr(wandb, "init", fails)

    assert posbench("sync", str(folder)) == 1

    assert caplog.messages == ["tracking: no network: the run folder has all rows"]


NAMES = [
    ({"extension": "yarn:factor=4"}, "eval/fixed_target_yarn:factor=4"),
    ({"split": "validation"}, "eval/validation text"),
    ({"checkpoint_step": 5, "tokens": 640}, "eval/640 tokens"),
    ({"targets_sha256": "cd12cd"}, "eval/targets cd12cd"),
]


@pytest.mark.parametrize(("change", "curve"), NAMES)
def test_names_tell_checkpoints_texts_and_targets_apart(config, change, curve):
    targets: dict[Any, Any] = {}
    plain = evaluation_row()
    altered = evaluation_row(**change)

    row_values(plain, config, targets)
    values = row_values(altered, config, targets)

    assert values == {
        "eval/context": 16,
        f"{curve}/loss": 1.0,
        f"{curve}/ci_low": 0.5,
        f"{curve}/ci_high": 1.5,
    }


@pytest.mark.parametrize(
    "name",
    ["eval/loss", "eval/accuracy", "eval/targets cd12cd/loss"],
)
def test_a_curve_has_a_panel_also_on_other_targets(name):
    assert SHOWN.fullmatch(name)


@pytest.mark.parametrize("name", ["eval/windowed/loss", "eval/ci_low"])
def test_what_stands_beside_a_curve_has_no_panel(name):
    assert not SHOWN.fullmatch(name)


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_without_a_key_a_run_is_offline_and_nobody_is_asked_for_one(mode):
    assert not is_online(mode)


def test_a_run_that_should_be_online_and_has_no_key_says_so(config, folder, caplog):
    caplog.set_level("WARNING")

    finish(folder, config, evaluated=1)

    (warning,) = caplog.messages
    assert "tracking.mode=online: no W&B API key" in warning


def test_with_a_key_a_run_is_online_unless_told_otherwise(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert is_online("auto")
    assert not is_online("offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not is_online("auto")


def test_tensorboard_shows_every_row_once_after_a_kill(config, folder):
    config = tracked(config, backend="tensorboard")
    die(folder, config)
    finish(folder, config, after=5, evaluated=2)

    (path,) = (folder / "tensorboard").iterdir()
    events = EventFileLoader(str(path))
    steps = collections.defaultdict(list)
    for event in events.Load():
        for value in event.summary.value:
            steps[value.tag].append(event.step)

    tokens = [128 * step for step in range(1, LAST + 1)]
    assert steps["train/loss"] == tokens
    assert steps["eval/loss"] == [16, 32]
