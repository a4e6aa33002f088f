"""CSV files, TensorBoard and trackers of installed packages show what W&B shows, and each row once after any kill."""

import csv
import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
import yaml
from disks import in_child
from support import TINY, posbench, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from test_tracking import PLAIN, fake_session, fake_wandb

from posbench import installed
from posbench.config import compose
from posbench.config.identity import run_folder
from posbench.config.overrides import Asked
from posbench.config.schema import Config
from posbench.evaluation.headline import headline_of
from posbench.evaluation.job import evaluate_run
from posbench.run_folder import trackers, tracking
from posbench.run_folder.folder import Run
from posbench.run_folder.jsonl import append, read_jsonl
from posbench.run_folder.rows import evaluation_rows
from posbench.run_folder.trackers.base import TrackedRun, Tracker
from posbench.training.journal import RunJournal
from posbench.training.train import train

ROOT = Path(__file__).parent.parent
OF_TIME = ("seconds", "train/tokens_per_second", "tokens_per_second")
COUNTERS = ("rows", "train_step", "validation_step")  # W&B's own, by which it skips what it has
FILES = ("csv", "tensorboard")
Shown = list[tuple[Any, ...]]  # (name, step, value), sorted


@pytest.fixture
def config(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Twelve updates, a checkpoint after every fifth, a validation after every fourth, rows on the way."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_text(tmp_path)
    data = dataclasses.replace(tiny_config.data, path=str(tmp_path / "text.txt"))
    runtime = dataclasses.replace(tiny_config.runtime, cache=str(tmp_path / "cache"), validate_every_steps=4)
    asked = dataclasses.replace(tiny_config.evaluation, ratios=(1, 2), blocks=8, at_tokens=(16 * 8 * 7,))
    return dataclasses.replace(tiny_config, data=data, runtime=runtime, evaluation=asked)


def by(config: Config, name: str) -> Config:
    return dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, backend=name))


def shown_by_csv(folder: Path) -> Shown:
    found: Shown = []
    for name, step in (("metrics", "tokens"), ("evaluation", "eval/length")):
        with open(folder / "csv" / f"{name}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(None not in row and None not in row.values() for row in rows), "a row of another width"
        found += [(key, float(row[step]), float(cell)) for row in rows for key, cell in row.items() if cell]
    return sorted(found)


def events(folder: Path) -> Iterator[Any]:
    """Every event in every file, read by TensorBoard's loader, which drops nothing."""
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        yield from EventFileLoader(str(path)).Load()


def shown_by_tensorboard(folder: Path) -> Shown:
    found = [(value.tag, event.step, value) for event in events(folder) for value in event.summary.value]
    return sorted(
        (tag, float(step), value.tensor.float_val[0] if value.tensor.float_val else value.simple_value)
        for tag, step, value in found
        if "/" in tag and not tag.startswith(("parameters/", "config/", "summary/", "_hparams_/"))
    )


def recorded(config: Config, folder: Path) -> Shown:
    """What the run folder's own files say, in W&B's names."""
    found: Shown = []
    for row in read_jsonl(folder / "metrics.jsonl"):
        found += [(name, float(row["tokens"]), value) for name, value in row.items() if value is not None]
    for row in evaluation_rows(folder):
        at = "eval" if row.checkpoint_step == config.training.steps else f"eval/{row.tokens} tokens"
        values = ("nll", "perplexity", "bits_per_byte", "ci_low", "ci_high")
        found += [(f"{at}/{row.curve_name}/{name}", float(row.length), getattr(row, name)) for name in values]
    return sorted(found)


def is_a_curve(name: str) -> bool:
    return "/" in name and name not in ("eval/length", "eval/length_ratio", "eval/line")


def assert_shows_the_records(name: str, config: Config, folder: Path) -> None:
    expected = [row for row in recorded(config, folder) if is_a_curve(row[0])]
    assert len(expected) > 80
    if name == "csv":
        assert [row for row in shown_by_csv(folder) if is_a_curve(row[0])] == expected
        return
    in_tags = sorted((tag.replace(" ", "_"), step, value) for tag, step, value in expected)
    shown = shown_by_tensorboard(folder)
    assert [row[:2] for row in shown] == [row[:2] for row in in_tags]
    assert [row[2] for row in shown] == pytest.approx([row[2] for row in in_tags], rel=1e-6)  # float32


def without_times(shown: Shown) -> Shown:
    return [row for row in shown if row[0] not in OF_TIME]


SHOWN: dict[str, Callable[[Path], Shown]] = {"csv": shown_by_csv, "tensorboard": shown_by_tensorboard}


@pytest.mark.full
def test_files_have_the_rows_that_wandb_gets_under_the_same_names(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    session = fake_session(logged.append)
    session.summary, session.settings = summary, None
    fake_wandb(monkeypatch, init=lambda **_: session)
    train(by(config, "wandb"), tmp_path / "wandb", [])
    train(by(config, "csv"), tmp_path / "csv", [])
    of_wandb: Shown = []
    for row in logged:
        step = row.get("eval/length", row.get("tokens"))
        of_wandb += [(key, float(step), value) for key, value in row.items() if key not in COUNTERS]
    found = without_times(shown_by_csv(tmp_path / "csv"))
    assert [row[:2] for row in found] == [row[:2] for row in without_times(sorted(of_wandb))]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in without_times(sorted(of_wandb))], rel=1e-6)
    assert {"train/loss", "validation/nll", "eval/fixed_target/nll"} <= {name for name, *_ in found}
    with open(tmp_path / "csv" / "csv" / "summary.csv", newline="") as file:
        of_csv = {row["name"]: row["value"] for row in csv.DictReader(file)}
    summary = {name: value for name, value in summary.items() if name not in OF_TIME}
    assert {name: of_csv[name] for name in summary} == {name: str(value) for name, value in summary.items()}
    assert of_csv["status"] == "done" and float(of_csv["nll_1x"]) == headline_of(tmp_path / "csv")["nll_1x"]


def killed_at(moment: str, config: Config, folder: Path) -> int:
    """Train in a process that sends itself SIGKILL at a moment; returns its exit status."""

    def work() -> None:
        end = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            if moment in ("recorded", "told"):
                log = RunJournal.log

                def logged(journal: RunJournal, step: int, row: Any) -> None:
                    if moment == "told" and step == 9:  # and rows 6 to 8 too, of which no checkpoint knows
                        while not journal.tracker._queue.empty():  # type: ignore[attr-defined]
                            time.sleep(0.01)
                        time.sleep(0.1)
                        end()
                    if moment == "recorded" and step == 9:
                        patch.setattr(type(journal.tracker), "metrics", lambda *_: end())
                    log(journal, step, row)

                patch.setattr(RunJournal, "log", logged)
            elif moment == "evaluating":
                patch.setattr(tracking._AtTracker, "curve", lambda tracker, row: end() if row.length == 32 else None)
            elif moment == "ended":
                patch.setattr(tracking._AtTracker, "finish", lambda *_: end())
            else:  # opening: the tracker has nothing yet
                patch.setattr(tracking.trackers, "load", lambda _: end())
            train(config, folder, [])

    return in_child(work)


@pytest.mark.full
@pytest.mark.parametrize(
    "moments",
    [("told", "evaluating"), ("opening", "recorded", "ended")],
    ids=lambda moments: "-".join(moments),
)
@pytest.mark.parametrize("name", FILES)
def test_a_kill_neither_loses_nor_doubles_a_row(
    config: Config, tmp_path: Path, name: str, moments: tuple[str, ...]
) -> None:
    config = by(config, name)
    train(config, tmp_path / "whole", [])
    assert_shows_the_records(name, config, tmp_path / "whole")
    for moment in moments:
        folder = tmp_path / moment
        assert killed_at(moment, config, folder) == -signal.SIGKILL, moment
        if moment == "told" and name == "csv":
            steps = [step for key, step, _ in shown_by_csv(folder) if key == "train/loss"]
            assert steps == [16 * 8 * n for n in range(1, 9)], "what will be repeated was shown"
        train(config, folder, [])
        assert_shows_the_records(name, config, folder)
        whole, again = (without_times(SHOWN[name](each)) for each in (tmp_path / "whole", folder))
        assert again == whole, moment
        assert json.loads((folder / "run.json").read_text())["trackers"] == [name]
        heads = [(each / "csv" / "metrics.csv") for each in (tmp_path / "whole", folder)] if name == "csv" else []
        assert len({path.read_text().partition("\n")[0] for path in heads}) == len(heads[:1])


@pytest.mark.full
def test_an_open_tensorboard_sees_a_rewritten_run_once(config: Config, tmp_path: Path) -> None:
    """Its reader keeps what it read of files that are gone; a session begins by taking that back."""
    config = by(config, "tensorboard")
    train(config, tmp_path / "run", [])
    reader = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    before = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert len(before) == 12
    for longest in (4, 6):
        evaluate_run(tmp_path / "run", Asked(dataclasses.replace(config.evaluation, ratios=(1, 2, longest))))
        reader.Reload()
        assert [(event.step, event.value) for event in reader.Scalars("train/loss")] == before
        steps = [event.step for event in reader.Scalars("eval/fixed_target/nll")]
        assert sorted(steps) == [16, 32, 16 * longest]  # the third length of before is on other targets
    assert reader.Scalars("nll_1x")[-1].value == pytest.approx(headline_of(tmp_path / "run")["nll_1x"], rel=1e-6)
    assert "_hparams_/session_start_info" in reader.PluginTagToContent("hparams")


@pytest.mark.parametrize("name", ["csv", pytest.param("tensorboard", marks=pytest.mark.full)])
def test_rows_scored_again_take_the_place_of_the_earlier_ones(config: Config, tmp_path: Path, name: str) -> None:
    config = by(config, name)
    train(config, tmp_path / "run", [])
    blocks = tmp_path / "run" / "evaluation_blocks.jsonl"
    blocks.write_bytes(b"".join(blocks.read_bytes().splitlines(keepends=True)[:-5]))
    longer = dataclasses.replace(config.evaluation, ratios=(1, 2, 4))  # other targets, also at the lengths before
    for asked in (config.evaluation, longer):
        train(dataclasses.replace(config, evaluation=asked), tmp_path / "run", [])
        assert_shows_the_records(name, config, tmp_path / "run")
    assert len(read_jsonl(tmp_path / "run" / "evaluation.jsonl")) > len(evaluation_rows(tmp_path / "run"))


def test_rows_that_do_not_belong_to_the_curve_have_names_of_their_own(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, Any]] = []
    fake_wandb(monkeypatch, init=lambda **_: fake_session(logged.append))
    for name in ("wandb", "csv"):
        for targets, places in {"a" * 64: [(1, 1), (2, 1), (4, 1)], "b" * 64: [(2, 3), (8, 5)]}.items():
            with Run.open(tmp_path / name, config, None) as run, tracking.mirror(by(config, name), run) as mirror:
                for ratio, nll in places:
                    at = {"length": 16 * ratio, "length_ratio": ratio, "nll": nll, "targets_sha256": targets}
                    row = dataclasses.replace(PLAIN, checkpoint_step=12, perplexity=None, **at)
                    for one in (row, dataclasses.replace(row, split="validation", nll=nll + 1)):
                        run.log_evaluation(one, [])
                        mirror.curve(one)
    usual, other, on = "eval/fixed_target", "eval/validation text/fixed_target", " on targets bbbbbb"
    here = [(f"{usual}/nll", at, 1) for at in (16, 32, 64)] + [(f"{usual}{on}/nll", 128, 5)]
    there = [(f"{other}/nll", at, 2) for at in (16, 32, 64)] + [(f"{other}{on}/nll", 128, 6)]
    assert [row for row in shown_by_csv(tmp_path / "csv") if is_a_curve(row[0])] == sorted(here + there)
    sent = [(name, row["eval/length"], row[name]) for row in logged for name in row if is_a_curve(name)]
    again = [(f"{usual}{on}/nll", 32, 3), (f"{other}{on}/nll", 32, 4)]  # W&B takes nothing back
    assert sorted(sent) == sorted(here + there + again)


@pytest.mark.full
def test_a_run_that_is_done_is_not_told_again(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(by(config, "csv"), tmp_path / "run", [])
    monkeypatch.setattr(tracking.trackers, "load", lambda name: pytest.fail(f"{name} was opened"))
    train(by(config, "csv"), tmp_path / "run", [])
    monkeypatch.undo()
    train(by(config, "tensorboard"), tmp_path / "run", [])  # another tracker gets all of a run that was done before
    assert_shows_the_records("tensorboard", config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["trackers"] == ["csv", "tensorboard"]


@pytest.mark.full
def test_sync_brings_a_run_to_a_tracker(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config, tmp_path / "run", [])
    for name in FILES:
        assert posbench("sync", str(tmp_path / "run"), f"tracking={name}") == 0
        assert re.search(rf"15 rows of metrics and \d+ of evaluation: tracking={name}\n", capsys.readouterr().out)
        assert_shows_the_records(name, config, tmp_path / "run")
    for words, told in {
        "tracking=cvs": "unknown tracker 'cvs': did you mean 'csv'? (there are csv, none, tensorboard, wandb)",
        "tracking=none": "tracking is none: expected csv, tensorboard or another tracker",
        "tracking=csv --anew": "--anew is for W&B",
    }.items():
        assert posbench("sync", str(tmp_path / "run"), *words.split()) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setattr(trackers, "load", lambda _: Broken)
    assert posbench("sync", str(tmp_path / "run"), "tracking=csv") == 1
    assert "tracking=csv did not take" in (told := capsys.readouterr().err) and "no room" in told


# -- names and packages ------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path,
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    train(by(config, "tensorboard"), tmp_path / "run", [])
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else there(name))
    monkeypatch.chdir(tmp_path)
    assert posbench("train", "tracking=tensorboard") == 2
    told = capsys.readouterr().err
    assert "whose package is not installed: pip install tensorboard" in told
    assert told.count("\n") == 1 and not Path("outputs").exists()
    settings = dataclasses.replace(config.evaluation, ratios=(1, 3))
    evaluate_run(tmp_path / "run", Asked(settings))  # what a run folder asks for stops nothing
    assert "pip install tensorboard: continuing without it" in caplog.text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "backend", ["os.path", "subprocess", "posbench.run_folder.trackers.csv_files:CsvFiles", "../x"]
)
def test_a_name_imports_nothing_but_an_installed_tracker(
    config: Config, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert posbench("train", f"tracking.backend='{backend}'") == 2
    assert re.search("unknown tracker|expected letters, digits", capsys.readouterr().err)
    if "/" in backend or ":" in backend:
        return
    train(config, tmp_path / "run", [])
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    saved["tracking"]["backend"] = backend
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(saved))
    evaluate_run(tmp_path / "run", Asked(dataclasses.replace(config.evaluation, ratios=(1, 3))))
    assert f"unknown tracker '{backend}'" in caplog.text and "continuing without it" in caplog.text


def test_what_a_stranger_recorded_stays_data(config: Config, tmp_path: Path) -> None:
    config = by(config, "csv")
    train(config, tmp_path / "run", [])
    append(tmp_path / "run" / "metrics.jsonl", [{"step": 13, "tokens": 1664, "=cmd()": 1, "train/loss": "=cmd()"}])
    outside = tmp_path / "kept"
    outside.write_text("kept")
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.9").symlink_to(outside)
    train(by(config, "tensorboard"), tmp_path / "run", [])
    with Run.open(tmp_path / "run", config, None) as run:
        run.record["data"]["sha256"] = '=HYPERLINK("http://x")'
        (run.folder / "csv" / "metrics.csv").unlink()
        (run.folder / "csv" / "metrics.csv").symlink_to(outside)
        with tracking.mirror(config, run) as mirror:
            mirror.begin()
    assert outside.read_text() == "kept"
    text = "".join(path.read_text() for path in (tmp_path / "run" / "csv").iterdir())
    assert "=cmd" not in text and "'=HYPERLINK" in text


# -- of an installed package -------------------------------------------------------------------------------------------


class Broken:
    def __init__(self, run: TrackedRun, rows: Any) -> None:
        raise OSError("no room")

    def log(self, row: Any) -> None: ...
    def summary(self, values: Any) -> None: ...
    def finish(self, status: str) -> None: ...


class Refusing(Broken):
    def __init__(self, run: TrackedRun, rows: Any) -> None: ...
    def log(self, row: Any) -> None:
        sys.exit(3)


class Hanging(Refusing):
    def log(self, row: Any) -> None:
        threading.Event().wait()


@pytest.mark.sample(3)
@pytest.mark.parametrize("broken", [Broken, Refusing, Hanging])
def test_a_failing_tracker_costs_one_warning_and_the_next_command_brings_all(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: type[Tracker],
) -> None:
    config, whole = by(config, "csv"), trackers.load
    monkeypatch.setattr(trackers, "load", lambda _: broken)
    monkeypatch.setattr(tracking, "_FINISH_SECONDS", 0.5)
    train(config, tmp_path / "run", [])
    (told,) = [record.getMessage() for record in caplog.records if "tracking=csv" in record.getMessage()]
    assert told.startswith("tracking=csv failed (") and "continuing without it; metrics are in " in told
    assert told.endswith(f"'posbench sync {tmp_path / 'run'} tracking=csv' brings all of it there")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["trackers"]) == ("done", [])
    monkeypatch.setattr(trackers, "load", whole)
    monkeypatch.undo()
    train(config, tmp_path / "run", [])
    assert_shows_the_records("csv", config, tmp_path / "run")


def the_pages_example(site: Path) -> None:
    """The package of docs/tracking.md, as files."""
    page = (ROOT / "docs" / "tracking.md").read_text(encoding="utf-8")
    section = page.split("## A tracker of your own")[1].split("\n## ")[0]
    (code,), (toml,), (settings,) = (
        re.findall(rf"```{language}\n(.*?)```", section, flags=re.S) for language in ("python", "toml", "yaml")
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    package = site / "posbench_lines"
    (package / "posbench_configs" / "tracking").mkdir(parents=True)
    (package / "__init__.py").write_text(code, encoding="utf-8")
    (package / "posbench_configs" / "tracking" / "lines.yaml").write_text(settings, encoding="utf-8")
    (site / "pyproject.toml").write_text(toml, encoding="utf-8")


LITTLE = [word for word in TINY if word != "tracking=none"]
LITTLE += ["data.path=text.txt", "training.tokens=640", "cache=c", "tracking=lines"]


@pytest.mark.full
def test_the_pages_tracker_shows_each_row_once_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    the_pages_example(tmp_path)
    (tmp_path / "lines-1.0.dist-info").mkdir()
    (tmp_path / "lines-1.0.dist-info" / "METADATA").write_text("Name: lines\nVersion: 1.0\n")
    points = "[posbench.trackers]\nlines = posbench_lines:Lines\n"
    (tmp_path / "lines-1.0.dist-info" / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    installed.points.cache_clear()
    try:
        write_text()
        config = compose.single([*LITTLE, "log_every_steps=1", "checkpoint_every_steps=4"])
        folder = run_folder(config)
        assert config.tracking.backend == "lines" and "posbench_lines" not in sys.modules
        assert killed_at("told", config, folder) == -signal.SIGKILL
        assert posbench("train", *LITTLE, "log_every_steps=1", "checkpoint_every_steps=4") == 0
        rows = read_jsonl(folder / "lines.jsonl")
        assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 11))
        assert len([row for row in rows if "eval/length" in row]) == len(evaluation_rows(folder))
        assert rows[-1]["status"] == "done" and rows[-1]["nll_1x"] == headline_of(folder)["nll_1x"]
    finally:
        installed.points.cache_clear()
        sys.modules.pop("posbench_lines", None)


@pytest.mark.full
def test_the_pages_tracker_is_installed_and_run(tmp_path: Path) -> None:
    """Built and installed as a wheel, and found by a new process."""
    the_pages_example(tmp_path / "package")
    support.installed(tmp_path / "package", tmp_path / "site")
    write_text(tmp_path)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "posbench", "train", *LITTLE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    (lines,) = tmp_path.glob("outputs/demo/rope-s0-*/lines.jsonl")
    assert read_jsonl(lines)[-1]["status"] == "done"


@pytest.mark.full
def test_an_installed_class_that_is_no_tracker_is_told(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    point = importlib.metadata.EntryPoint("other", "collections:OrderedDict", installed.TRACKERS)
    monkeypatch.setattr(installed, "points", lambda group: {"other": point} if group == installed.TRACKERS else {})
    train(by(config, "other"), tmp_path / "run", [])
    assert "which has no log: expected a Tracker" in caplog.text
