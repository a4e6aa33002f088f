"""TensorBoard shows the rows of the run folder, each once after any kill."""

import dataclasses
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import in_child
from fake_study import headline_of
from support import posbench, write_text
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from posbench.config.asked import Asked
from posbench.config.schema import Config
from posbench.evaluation.job import evaluate_run
from posbench.run_folder import tensorboard, tracking
from posbench.run_folder.jsonl import read_jsonl
from posbench.run_folder.rows import evaluation_rows
from posbench.training.journal import RunJournal
from posbench.training.train import train

OF_TIME = ("seconds", "train/tokens_per_second", "tokens_per_second")
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


def boarded(config: Config) -> Config:
    return dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, backend="tensorboard"))


def events(folder: Path) -> Iterator[Any]:
    """Every event in every file, read by TensorBoard's loader, which drops nothing."""
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        yield from EventFileLoader(str(path)).Load()


def shown(folder: Path) -> Shown:
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


def assert_shows_the_records(config: Config, folder: Path) -> None:
    expected = [row for row in recorded(config, folder) if is_a_curve(row[0])]
    assert len(expected) > 80
    in_tags = sorted((tag.replace(" ", "_"), step, value) for tag, step, value in expected)
    found = shown(folder)
    assert [row[:2] for row in found] == [row[:2] for row in in_tags]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in in_tags], rel=1e-6)  # float32


def without_times(rows: Shown) -> Shown:
    return [row for row in rows if row[0] not in OF_TIME]


def killed_at(moment: str, config: Config, folder: Path) -> int:
    """Train in a process that sends itself SIGKILL at a moment; returns its exit status."""

    def work() -> None:
        end = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        with pytest.MonkeyPatch.context() as patch:
            if moment in ("recorded", "told"):
                log = RunJournal.log

                def logged(journal: RunJournal, step: int, row: Any) -> None:
                    if moment == "told" and step == 9:  # and rows 6 to 8 too, of which no checkpoint knows
                        end()
                    if moment == "recorded" and step == 9:
                        patch.setattr(type(journal.tracker), "metrics", lambda *_: end())
                    log(journal, step, row)

                patch.setattr(RunJournal, "log", logged)
            elif moment == "evaluating":
                patch.setattr(
                    tracking._AtTensorBoard, "curve", lambda tracker, row: end() if row.length == 32 else None
                )
            elif moment == "ended":
                patch.setattr(tracking._AtTensorBoard, "finish", lambda *_: end())
            else:  # opening: the tracker has nothing yet
                patch.setattr(tracking._AtTensorBoard, "_write_all", lambda _: end())
            train(config, folder, [])

    return in_child(work)


@pytest.mark.full
def test_a_kill_neither_loses_nor_doubles_a_row(config: Config, tmp_path: Path) -> None:
    config = boarded(config)
    train(config, tmp_path / "whole", [])
    assert_shows_the_records(config, tmp_path / "whole")
    for moment in ("told", "evaluating", "opening", "recorded"):
        folder = tmp_path / moment
        assert killed_at(moment, config, folder) == -signal.SIGKILL, moment
        train(config, folder, [])
        assert_shows_the_records(config, folder)
        whole, again = (without_times(shown(each)) for each in (tmp_path / "whole", folder))
        assert again == whole, moment


@pytest.mark.full
def test_an_open_tensorboard_sees_a_rewritten_run_once(config: Config, tmp_path: Path) -> None:
    """Its reader keeps what it read of files that are gone; a session begins by taking that back."""
    config = boarded(config)
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


def test_rows_scored_again_take_the_place_of_the_earlier_ones(config: Config, tmp_path: Path) -> None:
    config = boarded(config)
    train(config, tmp_path / "run", [])
    longer = dataclasses.replace(config.evaluation, ratios=(1, 2, 4))  # other targets, also at the lengths before
    for asked in (config.evaluation, longer):
        train(dataclasses.replace(config, evaluation=asked), tmp_path / "run", [])
        assert_shows_the_records(config, tmp_path / "run")
    assert len(read_jsonl(tmp_path / "run" / "evaluation.jsonl")) > len(evaluation_rows(tmp_path / "run"))


@pytest.mark.full
def test_sync_writes_the_files_of_a_run(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config, tmp_path / "run", [])
    assert posbench("sync", str(tmp_path / "run"), "tracking=tensorboard") == 0
    told = rf"15 rows of metrics and \d+ of evaluation: {tmp_path}/run/tensorboard\n"
    assert re.search(told, capsys.readouterr().out)
    assert_shows_the_records(config, tmp_path / "run")
    for words, said in {
        "tracking=none": "tracking is none: expected wandb or tensorboard",
        "tracking=tensorboard --anew": "--anew is for W&B",
    }.items():
        assert posbench("sync", str(tmp_path / "run"), *words.split()) == 2
        assert said in capsys.readouterr().err


def test_a_failing_tensorboard_costs_one_warning(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(tensorboard, "TensorBoard", broken)
    train(boarded(config), tmp_path / "run", [])
    (told,) = [record.getMessage() for record in caplog.records if "TensorBoard" in record.getMessage()]
    assert told == "TensorBoard failed (no room): continuing without it"
