"""W&B mirrors the run quietly; whatever happens to it, the run and its own records go on."""

import builtins
import dataclasses
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_offline

from posbench.config.schema import Config, to_container
from posbench.runs import tracking
from posbench.runs.folder import Run
from posbench.runs.jsonl import read_jsonl
from posbench.runs.rows import EvaluationRow

SECRETS = ("hf_" + "a1B2" * 8, "0123456789" * 4, "me:hunter2")


@pytest.fixture
def config(tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """The tiny configuration with W&B on and neither a key nor settings of this machine in sight."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    settings = dataclasses.replace(tiny_config.tracking, backend="wandb", mode="auto", tags=("mine",))
    return dataclasses.replace(tiny_config, tracking=settings)


def log_everything(run: Run, tracker: tracking.Tracker) -> None:
    for step in (1, 2, 3):
        row: dict[str, Any] = {"step": step, "tokens": 128 * step, "train/loss": 3.0 / step, "train/grad_norm": None}
        run.log_metrics(row)
        tracker.metrics(row)
    tracker.metrics({"step": 3, "tokens": 384, "validation/nll": 2.5})
    plain = EvaluationRow(
        protocol="fixed_target", length=16, length_ratio=1, split="test", checkpoint_step=3, status="ok",
        nll=1.0, perplexity=2.718,
    )  # fmt: skip
    for length in (16, 32):
        tracker.curve(dataclasses.replace(plain, length=length))
    tracker.curve(dataclasses.replace(plain, length=32, nll=0.5, perplexity=1.649, window=16))
    tracker.curve(dataclasses.replace(plain, length=64, nll=None, perplexity=None, status="undefined"))
    tracker.summary({"parameters/total": 7})


def mirrored_runs(run: Run) -> list[wandb_offline.OfflineRun]:
    wandb.teardown()  # as at the end of a process: whatever is still in memory is written
    return [wandb_offline.read(path) for path in (run.folder / "wandb").glob("offline-run-*/*.wandb")]


def fake_wandb(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A stand-in module; what it does not define raises as a broken W&B would."""
    module = types.ModuleType("wandb")
    settings = types.SimpleNamespace(base_url="http://localhost")
    vars(module).update({"Settings": lambda **_: settings, "setup": lambda _: None, **functions})
    monkeypatch.setitem(sys.modules, "wandb", module)


def test_an_offline_run_reads_back(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    monkeypatch.setenv("SOME_KEY", SECRETS[1])
    command = ["posbench", "train", SECRETS[0], f"url=https://{SECRETS[2]}@example.org"]
    monkeypatch.setattr(sys, "argv", command)
    with Run.open(tmp_path / "run", config, command) as run:
        tracker = tracking.start(config, run)
        log_everything(run, tracker)
        tracker.finish()
    (mirrored,) = mirrored_runs(run)
    assert mirrored.run_id == f"{config.study}-{run.id}"
    assert (mirrored.group, mirrored.project, mirrored.tags) == ("test", "posbench", ["rope", "mine"])
    assert mirrored.config == to_container(config)
    assert mirrored.history == [
        {"step": 1, "tokens": 128, "train/loss": 3.0},
        {"step": 2, "tokens": 256, "train/loss": 1.5},
        {"step": 3, "tokens": 384, "train/loss": 1.0},
        {"step": 3, "tokens": 384, "validation/nll": 2.5},
        {"eval/length": 16, "eval/fixed_target/nll": 1.0, "eval/fixed_target/perplexity": 2.718},
        {"eval/length": 32, "eval/fixed_target/nll": 1.0, "eval/fixed_target/perplexity": 2.718},
        {"eval/length": 32, "eval/windowed/nll": 0.5, "eval/windowed/perplexity": 1.649},
    ]
    assert mirrored.axes == {
        "train/loss": "tokens",
        "validation/nll": "tokens",
        "eval/fixed_target/nll": "eval/length",
        "eval/fixed_target/perplexity": "eval/length",
        "eval/windowed/nll": "eval/length",
        "eval/windowed/perplexity": "eval/length",
    }
    assert mirrored.summary["parameters/total"] == 7
    for path in (tmp_path / "run").rglob("*"):
        for secret in SECRETS:
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert capfd.readouterr() == ("", ""), "W&B is quiet"


def test_a_continued_run_keeps_its_id(tmp_path: Path, config: Config) -> None:
    for _ in range(2):
        with Run.open(tmp_path / "run", config, []) as run:
            tracker = tracking.start(config, run)
            log_everything(run, tracker)
            tracker.finish()
    assert [mirrored.run_id for mirrored in mirrored_runs(run)] == [f"{config.study}-{run.id}"] * 2


def test_without_tracking_wandb_is_not_imported(
    tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Run.open(tmp_path / "run", tiny_config, []) as run:
        tracker = tracking.start(tiny_config, run)
        log_everything(run, tracker)
        tracker.finish()
    assert threading.active_count() == 1 or all(thread.name != "wandb-mirror" for thread in threading.enumerate())
    assert not (tmp_path / "run" / "wandb").exists()


# -- a broken W&B ------------------------------------------------------------------------------------------------------


def broken_import(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refusing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "wandb":
            raise ImportError("broken installation")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refusing)


def broken_init(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise RuntimeError("server said no\nwith a second line")

    fake_wandb(monkeypatch, init=init)


def exiting_init(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, init=lambda **_: sys.exit(3))


def broken_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def log(_: Any) -> None:
        raise OSError("broken pipe")

    session = types.SimpleNamespace(log=log, define_metric=lambda *_, **__: None, finish=lambda **_: None)
    fake_wandb(monkeypatch, init=lambda **_: session)


def hanging_init(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, init=lambda **_: threading.Event().wait())


@pytest.mark.parametrize("break_it", [broken_import, broken_init, exiting_init, broken_log, hanging_init])
def test_a_broken_wandb_costs_one_warning_and_no_metrics(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, break_it: Any
) -> None:
    break_it(monkeypatch)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.5)
    with Run.open(tmp_path / "run", config, []) as run:
        tracker = tracking.start(config, run)
        log_everything(run, tracker)
        tracker.finish()
        tracker.metrics({"step": 4})  # and after the end nothing breaks
        assert [row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")] == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("W&B is unreachable (")
    assert warning.endswith(f"continuing without it; metrics are in {tmp_path / 'run' / 'metrics.jsonl'}")
    assert "\n" not in warning


def test_a_slow_wandb_drops_rows_and_says_so(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = threading.Event()
    logged: list[Any] = []
    session = types.SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None, finish=lambda **_: None)
    fake_wandb(monkeypatch, init=lambda **_: (gate.wait(), session)[1])
    monkeypatch.setattr(tracking, "_QUEUE_ROWS", 5)
    with Run.open(tmp_path / "run", config, []) as run:
        tracker = tracking.start(config, run)
        for step in range(12):
            tracker.metrics({"step": step, "tokens": step})
        threading.Timer(0.1, gate.set).start()
        tracker.finish()
    assert [row["step"] for row in logged] == [0, 1, 2, 3, 4]
    assert "7 rows are only in" in caplog.text


# -- online or offline -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "environment", "mode"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": "x" * 40}, "online"),
        ("auto", {"WANDB_API_KEY": "x" * 40, "WANDB_MODE": "offline"}, "offline"),
        ("offline", {"WANDB_API_KEY": "x" * 40}, "offline"),
        ("online", {"WANDB_API_KEY": "x" * 40}, "online"),
        ("online", {}, "offline"),
    ],
)
def test_online_needs_a_key_and_nobody_is_asked_for_one(
    config: Config, monkeypatch: pytest.MonkeyPatch, asked: str, environment: dict[str, str], mode: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tracking.choose_mode(asked, "https://wandb.example") == mode


def test_a_key_in_netrc_is_found(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine wandb.example login user password {'x' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert tracking.choose_mode("auto", "https://wandb.example") == "online"
    assert tracking.choose_mode("auto", "https://other.example") == "offline"


def test_a_disabled_wandb_is_no_wandb(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Run.open(tmp_path / "run", config, []) as run:
        assert type(tracking.start(config, run)) is tracking.Tracker
