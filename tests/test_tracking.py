"""W&B mirrors the run quietly; whatever happens to it, the run and its own records go on."""

import dataclasses
import json
import os
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_offline
from matplotlib.figure import Figure

from posbench.config.schema import Config, to_container
from posbench.run_folder import tracking
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import EvaluationRow
from posbench.run_folder.wandb_session import choose_mode

TRAINING = ("train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second", "train/mfu",
            "validation/nll", "validation/accuracy", "validation/exact_match")  # fmt: skip
SECRETS = ("hf_" + "a1B2" * 8, "0123456789" * 4)

PLAIN = EvaluationRow(
    protocol="fixed_target", length=16, length_ratio=1, split="test", checkpoint_step=3, status="ok",
    nll=1.0, perplexity=2.718,
)  # fmt: skip


@pytest.fixture
def config(tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Config:
    """The tiny configuration with W&B on and neither a key nor settings of this machine in sight."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    settings = dataclasses.replace(tiny_config.tracking, backend="wandb", mode="auto", tags=("mine",))
    return dataclasses.replace(tiny_config, tracking=settings)


def log_everything(run: Run, tracker: tracking.Mirror) -> None:
    for step in (1, 2, 3):
        row: dict[str, Any] = {"step": step, "tokens": 128 * step, "train/loss": 3.0 / step, "train/grad_norm": None}
        run.log_metrics(row)
        tracker.metrics(row)
    tracker.metrics({"step": 3, "tokens": 384, "validation/nll": 2.5})
    for length in (16, 32):
        tracker.curve(dataclasses.replace(PLAIN, length=length, length_ratio=length / 16))
    tracker.curve(dataclasses.replace(PLAIN, length=32, length_ratio=2, nll=0.5, perplexity=1.649, window=16))
    tracker.curve(dataclasses.replace(PLAIN, length=64, length_ratio=4, nll=None, perplexity=None, status="undefined"))
    tracker.summary({"nll_1x": 1.0})


def mirrored_runs(run: Run) -> list[wandb_offline.OfflineRun]:
    wandb.teardown()  # as at the end of a process: whatever is still in memory is written
    return [wandb_offline.read(path) for path in (run.folder / "wandb").glob("offline-run-*/*.wandb")]


def fake_wandb(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """A stand-in module; what it does not define raises as a broken W&B would."""
    module = types.ModuleType("wandb")
    settings = types.SimpleNamespace(base_url="http://localhost")
    vars(module).update({"Settings": lambda **_: settings, "setup": lambda _: None, **functions})
    monkeypatch.setitem(sys.modules, "wandb", module)


def fake_session(log: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        log=log, define_metric=lambda *_, **__: None, finish=lambda **_: None, resumed=False, summary={}, url="http://w"
    )


def failing(error: Exception) -> Any:
    raise error


def test_an_offline_run_reads_back(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS[0])
    monkeypatch.setenv("SOME_KEY", SECRETS[1])
    command = ["posbench", "train"]
    monkeypatch.setattr(sys, "argv", command)
    with Run.open(tmp_path / "run", config, command) as run, tracking.mirror(config, run) as tracker:
        run.update(parameters={"total": 7, "encoding": 0, "non_embedding": 3}, tokens=384, train_seconds=2.0)
        log_everything(run, tracker)
        run.finish("done")
    (mirrored,) = mirrored_runs(run)
    assert mirrored.run_id == run.record["wandb"]["id"] == f"{config.study}-{run.id}"
    assert (mirrored.group, mirrored.project, mirrored.tags) == ("test", "posbench", ["rope", "mine"])
    assert mirrored.config == to_container(config)
    at = {"eval/length_ratio": 1, "eval/length": 16}, {"eval/length_ratio": 2, "eval/length": 32}
    assert [row.pop("rows") for row in mirrored.history] == [1, 2, 3, 4, 5, 6, 7]
    assert mirrored.history == [
        {"step": 1, "tokens": 128, "train/loss": 3.0, "train_step": 1, "validation_step": 0},
        {"step": 2, "tokens": 256, "train/loss": 1.5, "train_step": 2, "validation_step": 0},
        {"step": 3, "tokens": 384, "train/loss": 1.0, "train_step": 3, "validation_step": 0},
        {"step": 3, "tokens": 384, "validation/nll": 2.5, "train_step": 3, "validation_step": 3},
        {**at[0], "eval/line": 1, "eval/fixed_target/nll": 1.0, "eval/fixed_target/perplexity": 2.718},
        {**at[1], "eval/line": 2, "eval/fixed_target/nll": 1.0, "eval/fixed_target/perplexity": 2.718},
        {**at[1], "eval/line": 3, "eval/windowed/nll": 0.5, "eval/windowed/perplexity": 1.649},
    ]
    curves = [f"eval/{name}/{value}" for name in ("fixed_target", "windowed") for value in ("nll", "perplexity")]
    assert mirrored.axes == dict.fromkeys(TRAINING, "tokens") | dict.fromkeys(curves, "eval/length_ratio")
    counters = ["eval/line", "rows", "seconds", "step", "train_step", "validation_step"]
    assert sorted(mirrored.hidden) == ["eval/length", "eval/length_ratio", *counters]
    assert sorted(mirrored.not_summarised) == sorted(["eval/length", "eval/length_ratio", *curves])
    assert mirrored.summary == {
        "status": "done", "reason": "", "nll_1x": 1.0, "tokens_per_second": 192.0, "data/name": "text",
        "parameters/total": 7, "parameters/encoding": 0, "parameters/non_embedding": 3,
        "step": 3, "tokens": 384, "train/loss": 1.0, "validation/nll": 2.5, "eval/line": 3, "rows": 7,
        "train_step": 3, "validation_step": 3,
    }  # fmt: skip
    for path in (tmp_path / "run").rglob("*"):
        for secret in SECRETS:
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path
    assert capfd.readouterr() == ("", ""), "W&B is quiet"


def a_figure() -> Figure:
    figure = Figure()
    figure.subplots().plot([1, 2], [3, 4])
    return figure


def test_results_are_a_table_a_picture_and_the_file(tmp_path: Path, config: Config) -> None:
    tracking_of = dataclasses.replace(config.tracking, command=True)
    config = dataclasses.replace(config, tracking=tracking_of)
    with Run.open(tmp_path / "run", config, ["posbench", "train"]) as run, tracking.mirror(config, run) as tracker:
        run.log_evaluation(PLAIN)
        tracker.curve(PLAIN)
        tracker.results([PLAIN], a_figure)
        run.finish("stopped", "signal", "SIGTERM")
    (mirrored,) = mirrored_runs(run)
    shown = next(row for row in mirrored.history if "curve/table.path" in row)
    paths = [shown["curve/table.path"], shown["curve/picture.path"]]
    table, drawn = (next(run.folder.glob(f"wandb/*/files/{path}")) for path in paths)
    (cells,) = json.loads(table.read_text())["data"]
    assert cells[:5] == ["fixed_target", 16, 1, "ok", 1.0]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    sent = {kind: sorted(names) for kind, names in mirrored.artifacts.items() if kind != "run_table"}
    assert sent == {"evaluation": ["evaluation.jsonl"]}
    assert (mirrored.summary["status"], mirrored.summary["reason"]) == ("stopped", "signal")
    assert mirrored.summary["command"] == "posbench train"


def test_what_cannot_be_sent_costs_a_warning_and_nothing_else(
    tmp_path: Path, config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    with Run.open(tmp_path / "run", config, []) as run, tracking.mirror(config, run) as tracker:
        run.log_evaluation(PLAIN)
        tracker.curve(PLAIN)
        tracker.results([PLAIN], lambda: failing(OSError("no fonts")))
    (mirrored,) = mirrored_runs(run)
    assert mirrored.artifacts["evaluation"] == ["evaluation.jsonl"]
    assert "W&B did not take the curve: no fonts" in caplog.text


def test_nothing_is_begun_where_there_is_nothing_to_log(tmp_path: Path, config: Config) -> None:
    with Run.open(tmp_path / "run", config, []) as run, tracking.mirror(config, run) as tracker:
        tracker.summary({"nll_1x": 1.0})
        tracker.results([PLAIN], a_figure)
        run.finish("done")
    assert not tracker.begun and not (tmp_path / "run" / "wandb").exists()


def test_a_run_begun_anew_is_another_one_there(tmp_path: Path, config: Config) -> None:
    ids = []
    for restart in (False, True, False):
        with Run.open(tmp_path / "run", config, [], restart) as run, tracking.mirror(config, run) as tracker:
            run.begin_attempt(Where("cpu", "fp32", 1))
            tracker.begin()
        ids.append(run.record["wandb"]["id"])
    assert ids == [f"test-{run.id}", f"test-{run.id}-2", f"test-{run.id}-2"]


def test_a_run_says_in_one_line_where_wandb_has_it(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for kind in ("offline", "online"):
        if kind == "online":
            fake_wandb(monkeypatch, init=lambda **_: fake_session(lambda _: None))
        with Run.open(tmp_path / kind, config, []) as run, tracking.mirror(config, run) as tracker:
            log_everything(run, tracker)
    offline, online = (message for message in caplog.messages if message.startswith("W&B: "))
    assert offline.startswith(f"W&B: {tmp_path / 'offline' / 'wandb'}") and online == "W&B: http://w"


def test_without_tracking_wandb_is_not_imported(
    tmp_path: Path, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = set(threading.enumerate())  # another test's mirror may still be giving up
    with Run.open(tmp_path / "run", tiny_config, []) as run, tracking.mirror(tiny_config, run) as tracker:
        log_everything(run, tracker)
    assert not set(threading.enumerate()) - before
    assert not (tmp_path / "run" / "wandb").exists()


# -- a broken W&B ------------------------------------------------------------------------------------------------------


BROKEN = {
    "init": lambda **_: failing(RuntimeError("server said no\nwith a second line")),
    "exit": lambda **_: sys.exit(3),
    "log": lambda **_: fake_session(lambda _: failing(OSError("broken pipe"))),
    "hang": lambda **_: threading.Event().wait(),
}


@pytest.mark.parametrize("broken", ["import", *BROKEN])
def test_a_broken_wandb_costs_one_warning_and_no_metrics(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    fake_wandb(monkeypatch, init=BROKEN.get(broken))
    if broken == "import":
        monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.5)
    with Run.open(tmp_path / "run", config, []) as run:
        with tracking.mirror(config, run) as tracker:
            log_everything(run, tracker)
        tracker.metrics({"step": 4})  # and after the end nothing breaks
        assert [row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")] == [1, 2, 3]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("W&B is unreachable (")
    assert f"continuing without it; metrics are in {tmp_path / 'run' / 'metrics.jsonl'}, " in warning
    assert "\n" not in warning


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
    assert choose_mode(asked) == mode


def test_a_key_in_netrc_is_found(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine wandb.example login user password {'x' * 40}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for server, mode in (("https://wandb.example", "online"), ("https://other.example", "offline")):
        monkeypatch.setenv("WANDB_BASE_URL", server)
        assert choose_mode("auto") == mode


def test_a_disabled_wandb_is_no_wandb(tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with Run.open(tmp_path / "run", config, []) as run:
        with tracking.mirror(config, run) as tracker:
            log_everything(run, tracker)
        assert not tracker.begun and run.record["wandb"] is None
