"""What arrives at W&B: the real client against a server on this machine."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import wandb_server
import yaml
from fake_study import Truth, configured, demo_config, headline_of, write_run
from support import TINY, posbench, write_text
from wandb_server import Server

from posbench.config import compose
from posbench.config.schema import Config
from posbench.evaluation.job import results_of
from posbench.run_folder import sync, tracking
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import EvaluationRow

ROW = EvaluationRow(
    protocol="fixed_target", length=16, length_ratio=1, split="test", checkpoint_step=7, status="ok", nll=1.0
)  # fmt: skip


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, no settings of this machine, and no client left over from another test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb" / name))
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ConnectionError):  # that test may have ended W&B's process
        wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def server(clean: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with wandb_server.serve() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server
        assert server.unknown == []
        wandb.teardown()


@pytest.fixture
def config(tiny_config: Config) -> Config:
    settings = dataclasses.replace(tiny_config.tracking, backend="wandb", mode="online")
    return dataclasses.replace(tiny_config, tracking=settings)


def offline(config: Config) -> Config:
    return dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, mode="offline"))


def attempt(folder: Path, config: Config, steps: range, rows: int = 0, status: str = "stopped") -> Run:
    """One attempt at a run: these steps are logged, and so many rows of its evaluation."""
    with Run.open(folder, config, []) as run, tracking.mirror(config, run) as tracker:
        run.begin_attempt(Where("cpu", "fp32", 1))
        for step in steps:
            row = {"step": step, "tokens": 128 * step, "train/loss": 1.0 / step, "seconds": 0.5}
            if all(other["step"] < step for other in read_jsonl(folder / "metrics.jsonl")):
                run.log_metrics(row)
            tracker.metrics(row)
        for ratio in range(1, rows + 1):
            row_at = dataclasses.replace(ROW, length=16 * ratio, length_ratio=ratio)
            run.log_evaluation(row_at)
            tracker.curve(row_at)
        if rows:
            tracker.summary(headline_of(folder))
        run.finish(status)
    wandb.teardown()
    return run


def only(server: Server) -> wandb_server.ServedRun:
    (run,) = server.runs.values()
    return run


def steps(run: wandb_server.ServedRun) -> list[Any]:
    return [row["step"] for row in run.history if "step" in row]


def sync_parts(folder: Path) -> None:
    """As a user would, with W&B's own command."""
    parts = sorted(map(str, folder.glob("wandb/offline-run-*")))
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--yes", *parts], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_run_table_can_answer_the_question(server: Server, config: Config, tmp_path: Path) -> None:
    run = attempt(tmp_path / "run", config, range(1, 4), rows=3, status="done")
    served = only(server)
    assert (served.name, served.last("project"), served.exit_code) == (f"test-{run.id}", "posbench", 0)
    assert {name: served.summary[name] for name in ("nll_1x", "status", "rise_2x", "rise_3x", "data/name")} == {
        "nll_1x": 1.0, "status": "done", "rise_2x": 0.0, "rise_3x": 0.0, "data/name": "text",
    }  # fmt: skip
    assert not [name for name in served.summary if name.startswith("eval/") and name != "eval/line"]
    assert served.axes["eval/fixed_target/nll"] == "eval/length_ratio" and served.axes["train/loss"] == "tokens"
    assert served.config["encoding"] == {"name": "rope"}
    assert all(served.last(name) is None for name in ("host", "program", "commit", "repo"))


@pytest.mark.full
def test_what_is_off_by_default_can_be_switched_on(server: Server, config: Config, tmp_path: Path) -> None:
    who = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for words in (["init", "-q"], ["remote", "add", "origin", "https://example.org/r"], ["commit", "-qm", "one"]):
        extra = ["--allow-empty"] if words[0] == "commit" else []
        subprocess.run(["git", *who, *words, *extra], check=True)
    chosen = dataclasses.replace(config.tracking, git=True, system_metrics=True, command=True)
    config = dataclasses.replace(config, tracking=chosen)
    with Run.open(tmp_path / "run", config, ["posbench", "train", "data.path=a b"]) as run:
        run.begin_attempt(Where("cpu", "fp32", 1))
        with tracking.mirror(config, run) as tracker:
            tracker.begin()
    wandb.teardown()
    served = only(server)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert (served.last("commit"), served.last("repo")) == (head, "https://example.org/r")
    assert served.last("host") and served.summary["command"] == "posbench train 'data.path=a b'"
    assert not [name for name in served.files if "metadata" in name or "requirements" in name or "patch" in name]


@pytest.mark.full
def test_an_evaluation_later_leaves_the_summary_the_runs(server: Server, config: Config, tmp_path: Path) -> None:
    attempt(tmp_path / "run", config, range(1, 4), rows=2, status="done")
    before = only(server).summary
    with Run.open(tmp_path / "run", config, None) as run, tracking.mirror(config, run) as tracker:
        late = dataclasses.replace(ROW, length=80, length_ratio=5, nll=7.0)
        run.log_evaluation(late)
        tracker.curve(late)
    wandb.teardown()
    after = only(server)
    changed = {name for name in before if after.summary.get(name) != before[name] and not name.startswith("_")}
    assert changed == {"eval/line", "rows"}
    assert after.history[-1]["eval/fixed_target/nll"] == 7.0 and steps(after) == [1, 2, 3]
    assert after.axes["train/loss"] == "tokens"  # although nothing of the training was logged now


def test_online_every_step_arrives_once_though_a_run_was_stopped_and_continued(
    server: Server, config: Config, tmp_path: Path
) -> None:
    attempt(tmp_path / "run", config, range(1, 8))
    assert (only(server).summary["status"], only(server).exit_code) == ("stopped", 255)
    attempt(tmp_path / "run", config, range(5, 11), rows=2, status="done")  # from the checkpoint of step 4
    served = only(server)
    assert steps(served) == list(range(1, 11))
    assert [row["eval/line"] for row in served.history if "eval/line" in row] == [1, 2]
    assert (served.summary["status"], served.summary["nll_1x"], served.exit_code) == ("done", 1.0, 0)


@pytest.mark.full
def test_offline_parts_of_a_run_all_arrive_by_wandb_sync(server: Server, config: Config, tmp_path: Path) -> None:
    """In order; steps that were taken twice, since the last checkpoint, are there twice, with equal values."""
    attempt(tmp_path / "run", offline(config), range(1, 8))
    attempt(tmp_path / "run", offline(config), range(5, 11), rows=2, status="done")
    assert server.runs == {}
    sync_parts(tmp_path / "run")
    served = only(server)
    assert steps(served) == [*range(1, 8), *range(5, 11)]
    assert (served.summary["status"], served.summary["nll_1x"], served.summary["data/name"]) == ("done", 1.0, "text")
    assert served.axes["train/loss"] == "tokens" and served.axes["eval/fixed_target/nll"] == "eval/length_ratio"


def test_posbench_sync_sends_each_step_once_and_a_second_time_nothing(
    server: Server, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path / "s" / "run", offline(config), range(1, 8))
    attempt(tmp_path / "s" / "run", offline(config), range(5, 11), rows=2, status="done")
    assert posbench("sync", str(tmp_path / "s")) == 0
    served = only(server)
    assert steps(served) == list(range(1, 11))
    assert (served.summary["nll_1x"], served.summary["status"]) == (1.0, "done")
    assert ": 10 rows of metrics and 2 of evaluation: http" in capsys.readouterr().out
    assert set(server.artifacts.values()) == {"run_table", "evaluation"}
    lines = len(served.history)
    assert posbench("sync", str(tmp_path / "s" / "*")) == 0
    assert ": nothing new: http" in capsys.readouterr().out
    assert len(only(server).history) == lines


def rows_logged(folder: Path, config: Config, logged: list[tuple[str, int]], sent: int, again: bool = False) -> None:
    """An attempt that logs such rows, of which W&B hears of the first `sent` before the kill."""
    with Run.open(folder, config, []) as run, tracking.mirror(config, run) as tracker:
        run.begin_attempt(Where("cpu", "fp32", 1))
        for place, (name, step) in enumerate(logged):
            row = {"step": step, "tokens": 128 * step, name: 1.0 / step}
            if not again or place:
                run.log_metrics(row)
            if place < sent:
                tracker.metrics(row)
        run.finish("stopped")
    wandb.teardown()


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", ["continued", "synced"])
def test_no_row_is_lost_or_doubled_by_a_kill_between_two_rows_of_a_step(
    how: str, server: Server, config: Config, tmp_path: Path
) -> None:
    train, validation = "train/loss", "validation/nll"
    first = [(train, 1), (validation, 1), (train, 2), (validation, 2), (train, 3)]
    if how == "continued":  # the checkpoint is that of step 2
        rows_logged(tmp_path / "run", config, first, sent=5)
        rows_logged(tmp_path / "run", config, [(train, 3), (validation, 3), (train, 4)], sent=3, again=True)
    else:
        rows_logged(tmp_path / "run", config, [*first, (validation, 3), (train, 4)], sent=5)
        sync.sync([tmp_path / "run"], [], results_of)
    served = only(server)
    assert [(name, row["step"]) for row in served.history for name in (train, validation) if name in row] == [
        *first,
        (validation, 3),
        (train, 4),
    ]


@pytest.mark.full
def test_sync_anew_makes_another_run_there(server: Server, config: Config, tmp_path: Path) -> None:
    attempt(tmp_path / "run", config, range(1, 11), rows=1, status="done")
    sync.sync([tmp_path / "run"], [], results_of, anew=True)
    first, second = server.runs.values()
    assert second.name.startswith(f"{first.name}-") and steps(second) == list(range(1, 11))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["wandb"]["id"] == second.name


@pytest.mark.full
def test_sync_says_what_w_and_b_lacks_in_between(
    server: Server, config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt(tmp_path / "run", config, range(1, 4))
    off = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, backend="none"))
    attempt(tmp_path / "run", off, range(4, 7))
    attempt(tmp_path / "run", config, range(7, 9), status="done")
    sync.sync([tmp_path / "run"], [], results_of)
    said = capsys.readouterr().out
    assert ": nothing new; 3 earlier rows are missing there, --anew uploads them again as another run: " in said
    assert steps(only(server)) == [1, 2, 3, 7, 8]


@pytest.mark.full
def test_sync_sends_what_was_evaluated_since(server: Server, config: Config, tmp_path: Path) -> None:
    attempt(tmp_path / "run", config, range(1, 4), rows=1, status="done")
    with Run.open(tmp_path / "run", config, None) as run:
        run.log_evaluation(dataclasses.replace(ROW, length=32, length_ratio=2, nll=1.5))
    sync.sync([tmp_path / "run"], [], results_of)
    served = only(server)
    assert steps(served) == [1, 2, 3] and served.summary["rise_2x"] == 0.5
    assert [row["eval/line"] for row in served.history if "eval/line" in row] == [1, 2]


# -- without a server --------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path: Path) -> Path:
    template = demo_config()
    for scheme in ("rope", "alibi"):
        write_run(tmp_path / "fake", configured(template, scheme, 0), Truth(3.6, 0.1))
    return tmp_path / "fake"


def test_sync_without_a_key_says_so_in_one_line(clean: None, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("sync", str(study)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no W&B API key found: 'wandb login' stores one") and said.count("\n") == 1
    assert not list(study.glob("*/wandb"))


@pytest.mark.full
def test_sync_can_write_offline_runs(clean: None, study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("sync", f"{study}/*", "tracking.mode=offline", "tracking.project=mine") == 0
    assert capsys.readouterr().out.count(": 0 rows of metrics and 9 of evaluation: ") == 2
    for folder in study.iterdir():
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        assert json.loads((folder / "run.json").read_text())["wandb"]["project"] == "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tracking.mod=offline"], "unknown key 'tracking.mod': did you mean 'mode'?"),
        (["tracking.mode=never"], "tracking.mode is 'never'"),
        (["seed=1"], "unknown key 'seed' (sync takes tracking.mode, "),
    ],
)
def test_mistakes_of_sync_are_one_line(
    clean: None, study: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert posbench("sync", str(study), *words) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


# -- sweeps of W&B's ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_the_agent_of_a_sweep_chooses_the_run(
    server: Server, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = {"WANDB_SWEEP_ID": "sw33p", "WANDB_RUN_ID": "chosen", "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "me"}
    for name, value in agent.items():
        monkeypatch.setenv(name, value)
    run = attempt(tmp_path / "run", config, range(1, 4), rows=1, status="done")
    served = only(server)
    assert (served.name, served.last("sweep"), served.last("project")) == ("chosen", "sw33p", "theirs")
    assert served.summary["nll_1x"] == 1.0
    assert run.record["wandb"] == {"id": "chosen", "project": "theirs", "entity": "me"}
    for name in agent:
        monkeypatch.delenv(name)
    attempt(tmp_path / "run", config, range(0), rows=2, status="done")  # later, by hand: the same run there
    assert only(server).last("project") == "theirs"


@pytest.mark.full
def test_a_sweep_that_chooses_a_finished_run_learns_of_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text()
    command = ["train", *TINY, "data.path=text.txt", "training.tokens=640", "cache=c", "runtime.log_every_steps=5"]
    assert posbench(*command) == 0
    assert server.runs == {}  # tracking=none
    monkeypatch.setenv("WANDB_SWEEP_ID", "sw33p")
    monkeypatch.setenv("WANDB_RUN_ID", "chosen")
    assert posbench(*command, "tracking=wandb") == 0
    served = only(server)
    assert (served.name, served.last("sweep"), steps(served)) == ("chosen", "sw33p", [5, 10])
    assert served.summary["nll_1x"] == headline_of(next(Path("outputs").glob("*/*")))["nll_1x"]
    assert "finished; nothing to do: " in capsys.readouterr().err


@pytest.mark.full
def test_the_sample_sweep_is_one_that_the_agent_can_run(clean: None) -> None:
    """The command line as W&B's own agent makes it of the file."""
    from wandb.sdk.launch.sweeps import utils

    sample = yaml.safe_load((Path(__file__).parent.parent / "docs" / "wandb_sweep.yaml").read_text())
    chosen = {"encoding": {"value": "alibi"}, "training.learning_rate": {"value": 0.0012345}}
    assert chosen.keys() == sample["parameters"].keys()
    made = utils.create_sweep_command_args({"args": chosen})["args_no_hyphens"]
    *words, last = sample["command"]
    assert (words[:2], last) == (["posbench", "train"], "${args_no_hyphens}")
    config = compose.single([*words[2:], *made])
    assert (config.encoding.name, config.training.learning_rate) == ("alibi", 0.0012345)
