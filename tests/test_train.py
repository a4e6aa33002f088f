"""Training as a whole, in processes of its own where signals are concerned."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import yaml
from fake_study import headline_of
from support import encoding_installed, evaluation_lines, snapshot, write_words

from posbench import machine
from posbench.config.overrides import Asked
from posbench.config.schema import Config, EncodingConfig, to_container
from posbench.data.batches import validation_batches
from posbench.data.tokens import VALIDATION_BLOCKS, prepare
from posbench.errors import RunFailed, Stopped, UserError
from posbench.evaluation.job import evaluate_run
from posbench.evaluation.printed import print_results
from posbench.model import gpt
from posbench.model.gpt import GPT, build
from posbench.results.frame import read
from posbench.run import checkpoint, tracking
from posbench.run.model import sample
from posbench.run.rows import EvaluationRow, evaluation_rows, read_rows, training_rows
from posbench.run.run import Run, held_config, load_record, other_code
from posbench.terminal.signals import signals_as_errors, stop_signals
from posbench.training.step import Outcome, begin_update, learning_rate, optimizer_for
from posbench.training.train import train

STEPS = 12


@pytest.fixture
def config(tiny_config: Config, tmp_path: pathlib.Path) -> Config:
    write_words(tmp_path)
    data = dataclasses.replace(tiny_config.data, path=str(tmp_path / "text.txt"))
    runtime = dataclasses.replace(tiny_config.runtime, cache=str(tmp_path / "cache"))
    return dataclasses.replace(tiny_config, data=data, runtime=runtime)


def weights_sha256(folder: pathlib.Path) -> str:
    newest = max((folder / "checkpoint").glob("step-*"))
    return hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()


def losses(folder: pathlib.Path) -> list[tuple[int, float, float]]:
    rows = training_rows(folder)
    return [(row["step"], row["train/loss"], row["train/learning_rate"]) for row in rows]


def start(config: Config, folder: pathlib.Path) -> "subprocess.Popen[str]":
    saved = folder.parent / f"{folder.name}.yaml"
    saved.write_text(yaml.safe_dump(to_container(config)), encoding="utf-8")
    command = [sys.executable, "-m", "posbench.launch.run", str(saved), "--run-dir", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(folder: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 60
    metrics = folder / "rows.jsonl"
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached in {folder}")


def seen_updates(patch: pytest.MonkeyPatch, see: Callable[[int], object]) -> None:
    """`see` is called with the steps made before each update."""

    def seen(learner: Any, batch: Any, step: int, rate: float) -> Outcome:
        see(step)
        return begin_update(learner, batch, step, rate)

    patch.setattr("posbench.training.train.begin_update", seen)


def stop_after(
    step: int,
    config: Config,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException] = RuntimeError,
) -> None:
    """Train until a step fails; the run stands at its newest checkpoint then."""

    def see(at: int) -> None:
        if at == step:
            raise error("the lights went out")

    with monkeypatch.context() as patch, pytest.raises(error, match="the lights"):
        seen_updates(patch, see)
        train(config, folder, [])


def test_a_run_leaves_a_complete_folder(config: Config, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    train(config, folder, ["posbench", "train"])
    record = load_record(folder)
    assert (record["status"], record["reason"]) == ("done", None)
    assert record["tokens"] == config.training.tokens
    assert record["parameters"]["encoding"] == 0 < record["parameters"]["total"]
    assert record["data"]["tokens"]["train"] > 1000
    assert record["evaluate_seconds"] > 0 and record["train_seconds"] > 0 and record["cpu_seconds"] > 0
    assert len(losses(folder)) == STEPS
    rows = evaluation_rows(folder)
    assert len(rows) == 3 + 2 + 3 and {row.status for row in rows} == {"ok"}
    assert {row.checkpoint_step for row in rows} == {STEPS}
    assert all(row.units and sum(row.units["tokens"]) == row.n_tokens for row in rows)
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["step-00000010", "step-00000012"]
    assert (folder / "tokenizer.json").exists() and (folder / "log.txt").exists()


@pytest.mark.parametrize("known", [True, False])
def test_where_the_peak_of_a_device_is_known_its_share_is_logged_and_shown(
    config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    known: bool,
) -> None:
    if known:
        monkeypatch.setattr(machine, "peak_flops", lambda *_: 1e9)
    with caplog.at_level("INFO"):
        train(config, tmp_path / "run", [])
    weights = sum(
        p.numel() for name, p in build(config, 257).named_parameters() if p.dim() == 2 and "encoding" not in name
    )
    flops = 6 * weights + 6 * config.model.n_layers * config.model.d_model * (config.training.train_length + 1)
    for row in training_rows(tmp_path / "run"):
        expected = pytest.approx(row["train/tokens_per_second"] * flops / 1e9) if known else None
        assert row.get("train/mfu") == expected
    shown = [record.message for record in caplog.records if "tokens/s" in record.message]
    assert shown and all(("% MFU" in line) == known for line in shown)


def test_a_peak_is_that_of_the_devices_name_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype, expected in (
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.float16, 756e12),
        ("NVIDIA A100-SXM4-40GB", torch.float32, None),
        ("Some GPU of 2031", torch.bfloat16, None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert machine.peak_flops(torch.device("cuda"), dtype) == expected
    assert machine.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_a_run_says_once_what_its_encoding_remarks(config: Config, tmp_path: pathlib.Path) -> None:
    bias = dataclasses.replace(config.encoding, name="t5", options={})
    train(dataclasses.replace(config, encoding=bias), tmp_path / "run", [])
    assert (tmp_path / "run" / "log.txt").read_text().count("t5: max_distance 128 exceeds train_length 16") == 1


OWN = """
from posbench.encodings.base import Encoding

class Own(Encoding):
    def distance_bias(self, distance, layer):
        return -distance.float().expand(self.shape.n_heads, *distance.shape)
"""


def test_whoever_meets_a_run_of_another_version_of_an_own_encoding_is_warned(
    config: Config, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "run"
    config = dataclasses.replace(config, encoding=EncodingConfig("temperature", {"inner": "own"}))
    told = "'own' was trained with another version of its file"

    def times() -> int:
        return (folder / "log.txt").read_text().count(told)

    with encoding_installed(tmp_path / "site", "own", OWN):
        train(config, folder, [])
        first = hashlib.sha256(OWN.encode()).hexdigest()
        assert load_record(folder)["installed_encodings"] == {"own": first}
        train(config, folder, [])
        assert times() == 0 and other_code(config, load_record(folder)) == []
        (tmp_path / "site/own.py").write_text(OWN.replace("-distance", "-2 * distance"))
        train(config, folder, [])
        assert times() == 1
        evaluate_run(folder, Asked(config.evaluation))
        assert times() == 2
        (line,) = other_code(config, load_record(folder))
        assert line.startswith(f"{told} (sha256 {first[:12]}, now ")
        assert load_record(folder)["installed_encodings"] == {"own": first}
        train(config, folder, [], restart=True)
        assert times() == 0 and other_code(config, load_record(folder)) == []


def test_the_tracker_gets_every_row_by_its_number_and_then_the_headline(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    class Recorder:
        starting_step = 0

        def __init__(self, config: Config, run: Any) -> None:
            shown.append([])
            self.summary: dict[str, Any] = {}

        def define_metric(self, *_: Any, **given: Any) -> None: ...

        def log(self, values: Mapping[str, Any], step: int) -> None:
            shown[-1].append(step)

        def finish(self, exit_code: int) -> None:
            shown.append(self.summary)

    monkeypatch.setattr(tracking, "EventFiles", Recorder)
    config = dataclasses.replace(config, tracking=dataclasses.replace(config.tracking, backend="tensorboard"))
    train(config, tmp_path / "run", [])
    rows = read_rows(tmp_path / "run")
    summary = {name.replace(".", "_"): value for name, value in headline_of(tmp_path / "run").items()}
    assert shown[0] == [*range(len(rows))] and len(rows) > STEPS
    assert {name: value for name, value in summary.items() if value is not None}.items() <= shown[1].items()
    train(config, tmp_path / "run", [])
    assert len(shown) == 2  # nothing was missing, so no session opened
    evaluate_run(tmp_path / "run", Asked(dataclasses.replace(config.evaluation, protocols=("sliding",))))
    assert shown[2] == [*range(len(read_rows(tmp_path / "run")))] and len(shown[2]) > len(rows)


@pytest.mark.parametrize("clean", [False, True])
def test_a_kill_after_the_last_checkpoint_loses_no_number_of_the_run(
    config: Config, tmp_path: pathlib.Path, clean: bool
) -> None:
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, clean=clean))
    folder, numbers = tmp_path / "run", ("tokens", "train_seconds", "cpu_seconds", "peak_memory_bytes")
    train(config, folder, [])
    record = load_record(folder)
    killed = record | {"status": "running"} | dict.fromkeys(numbers)
    (folder / "run.json").write_text(json.dumps(killed), encoding="utf-8")
    train(config, folder, [])
    again = load_record(folder)
    assert again["status"] == "done" and again["tokens"] == record["tokens"] == config.training.tokens
    state = json.loads((folder / "checkpoint" / "step-00000012" / "state.json").read_bytes())
    assert [again[name] for name in numbers] == [state[name] for name in numbers]
    assert all(0 < again[name] <= record[name] for name in numbers)  # saving took its time, too


def test_a_finished_run_is_not_trained_again_and_only_missing_rows_are_computed(
    config: Config, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "run"
    train(config, folder, [])
    before, rows = weights_sha256(folder), (folder / "rows.jsonl").read_text(encoding="utf-8")
    train(config, folder, [])
    assert (folder / "rows.jsonl").read_text(encoding="utf-8") == rows
    said = (folder / "log.txt").read_text(encoding="utf-8")
    assert said.endswith(f"finished; nothing to do: {folder}\n") and said.count("nothing to do") == 1
    assert "continuing" not in said and "tokens/s" not in said.splitlines()[-1]
    wider = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=(1, 2)))
    train(wider, folder, [])
    assert weights_sha256(folder) == before and len(losses(folder)) == STEPS


def reword(config: Config, word: str) -> None:
    """Append a word to the text that a configuration names."""
    with open(str(config.data.path), "a", encoding="utf-8") as file:
        file.write(f" {word}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("finished", [True, False])
def test_a_trained_run_whose_text_is_another_now_is_refused_in_one_line_and_left_as_it_is(
    config: Config, tmp_path: pathlib.Path, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if not finished:  # it fails after its checkpoint at step 10
            patch.setattr("posbench.training.train.evaluate_into", lambda *_: 1 / 0)
        with contextlib.nullcontext() if finished else pytest.raises(ZeroDivisionError):
            train(config, folder, [])
    before = snapshot(folder)
    reword(config, "more")
    with pytest.raises(UserError) as caught:
        train(config, folder, [])
    message = str(caught.value)
    assert "\n" not in message
    assert re.search(
        r"trained on another text \(sha256 \w{12}\) than .* now \(\w{12}\): .*study=NAME.*--restart", message
    )
    after = snapshot(folder)
    changed = {name for name in after if after[name] != before.get(name)} - {"log.txt"}
    assert changed == (set() if finished else {"run.json"})
    was, now = (json.loads(files["run.json"]) for files in (before, after))
    assert {key for key in was if was[key] != now[key]} <= {"message"}
    train(config, folder, [], restart=True)
    assert load_record(folder)["data"]["sha256"] != was["data"]["sha256"] and load_record(folder)["status"] == "done"


def test_a_run_whose_tokenizer_is_another_or_whose_text_is_gone_is_refused_and_stays_done(
    config: Config, tmp_path: pathlib.Path
) -> None:
    text = pathlib.Path(str(config.data.path))
    content = text.read_text(encoding="utf-8")
    text.write_text("short", encoding="utf-8")
    with pytest.raises(UserError, match="a block of 16"):
        train(config, tmp_path / "run", [])
    text.write_text(content, encoding="utf-8")
    train(config, tmp_path / "run", [])  # it was not trained yet, so it takes the text as it is now
    record = load_record(tmp_path / "run") | {"tokenizer_sha256": "beef" * 16}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(UserError, match=r"another tokenizer \(sha256 beefbeefbeef\) than its configuration"):
        train(config, tmp_path / "run", [])
    text.unlink()
    with pytest.raises(UserError, match=r"text\.txt"):
        train(config, tmp_path / "run", [])
    assert load_record(tmp_path / "run") == record and record["status"] == "done"


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at_step", [7])  # 200 moments: slow/test_kills.py
def test_a_run_killed_with_sigkill_ends_with_the_weights_of_an_uninterrupted_one(
    config: Config, tmp_path: pathlib.Path, at_step: int, compiled: bool
) -> None:
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=compiled))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(config, whole, [])
    process = start(config, killed)
    wait_for_step(killed, at_step)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert load_record(killed)["status"] == "running"
    train(config, killed, [])
    assert weights_sha256(killed) == weights_sha256(whole)
    assert losses(killed) == losses(whole)
    for name in ("nll", "targets_sha256", "ci_low"):
        assert [getattr(row, name) for row in evaluation_rows(killed)] == [
            getattr(row, name) for row in evaluation_rows(whole)
        ]


@pytest.mark.full
def test_rows_on_the_way_change_no_weights_and_a_continued_run_has_them_once(
    config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    per_step = config.training.tokens_per_step
    evaluation = dataclasses.replace(config.evaluation, at_tokens=(4 * per_step, 9 * per_step + 1))
    asked = dataclasses.replace(config, evaluation=evaluation)
    train(config, tmp_path / "plain", [])
    train(asked, tmp_path / "whole", [])
    stop_after(6, asked, tmp_path / "cut", monkeypatch)
    train(asked, tmp_path / "cut", [])

    def numbers(folder: pathlib.Path) -> list[tuple[Any, ...]]:
        rows = [EvaluationRow.from_json(line) for line in evaluation_lines(folder)]
        return [(row.curve_name, row.length, row.checkpoint_step, row.tokens, row.nll) for row in rows if row]

    assert weights_sha256(tmp_path / "plain") == weights_sha256(tmp_path / "whole") == weights_sha256(tmp_path / "cut")
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "cut")
    by_step = {step: tokens for name, _, step, tokens, _ in numbers(tmp_path / "whole") if name == "fixed_target"}
    assert by_step == {step: step * per_step for step in (4, 9, STEPS)}
    assert {name for name, _, step, *_ in numbers(tmp_path / "whole") if step < STEPS} == {"fixed_target"}
    assert headline_of(tmp_path / "whole") == headline_of(tmp_path / "plain")
    print_results(tmp_path / "whole")
    shown = " ".join(capsys.readouterr().out.split())
    assert "not shown" not in shown
    train(dataclasses.replace(config, evaluation=evaluation), tmp_path / "plain", [])
    assert "no rows on the way for steps 4, 9" in caplog.text


def test_an_encoding_that_changes_on_the_way_changes_at_the_same_update_in_a_continued_run(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = dataclasses.replace(config.evaluation, ratios=(1,), windowed=False)

    def with_encoding(name: str, **options: Any) -> Config:
        encoding = dataclasses.replace(config.encoding, name=name, options=options)
        return dataclasses.replace(config, encoding=encoding, evaluation=evaluation)

    drope = with_encoding("drope", drop_at=0.5)
    train(drope, tmp_path / "whole", [])
    stop_after(8, drope, tmp_path / "cut", monkeypatch, KeyboardInterrupt)
    assert (load_record(tmp_path / "cut")["status"], load_record(tmp_path / "cut")["reason"]) == ("stopped", "signal")
    train(drope, tmp_path / "cut", [])
    assert weights_sha256(tmp_path / "cut") == weights_sha256(tmp_path / "whole")
    train(with_encoding("rope"), tmp_path / "rope", [])
    first, second = (losses(tmp_path / name) for name in ("whole", "rope"))
    assert first[: STEPS // 2] == second[: STEPS // 2] and first[STEPS // 2][1] != second[STEPS // 2][1]
    # What the run evaluated is what is read from its checkpoint, a model without positions.
    weights = checkpoint.trained(tmp_path / "whole").weights()
    tokens = prepare(config.data, pathlib.Path(config.runtime.cache))
    models = [build(made, tokens.tokenizer.vocab_size).eval() for made in (drope, with_encoding("none"))]
    for model in models:
        model.load_state_dict(weights)
    ids = torch.from_numpy(tokens.validation.ids[:16].astype("int64"))[None]
    assert torch.equal(*(model(ids) for model in models))


# -- checkpoints that are written while training goes on ---------------------------------------------------------------


def no_room_for(patch: pytest.MonkeyPatch, step: int) -> None:
    """The disk is full as the checkpoint after so many steps is written."""
    write_bytes = pathlib.Path.write_bytes

    def full(path: pathlib.Path, data: bytes) -> int:
        if f"step-{step:08d}" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write_bytes(path, data)

    patch.setattr(pathlib.Path, "write_bytes", full)


@pytest.mark.parametrize("step", [3, 5, STEPS])  # the third is saved because a signal comes
def test_a_disk_that_is_full_as_a_checkpoint_is_written_ends_the_run_in_the_same_words(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    no_room_for(monkeypatch, step)
    seen_updates(monkeypatch, lambda at: (at, step) == (2, 3) and signal.raise_signal(signal.SIGTERM))
    with pytest.raises(RunFailed, match=rf"no room to write .*step-{step:08d} .* bytes needed, .* free; free"):
        train(config, tmp_path / "run", [])
    record = load_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("failed", "disk")
    assert record["attempt"]["steps"] == (10 if step == STEPS else 0)
    assert not evaluation_rows(tmp_path / "run") and len(losses(tmp_path / "run")) == step


@pytest.mark.parametrize("when", ["the last update", "the last checkpoint"])
def test_a_signal_at_the_end_of_training_stops_it_before_the_evaluation(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "the last update":
        seen_updates(monkeypatch, lambda step: step == STEPS - 1 and signal.raise_signal(signal.SIGTERM))
    else:
        save = checkpoint.save

        def told_to_stop(folder: pathlib.Path, step: int, *given: Any) -> pathlib.Path:
            if step == STEPS:
                signal.raise_signal(signal.SIGTERM)
            return save(folder, step, *given)

        monkeypatch.setattr(checkpoint, "save", told_to_stop)
    with pytest.raises(Stopped, match=f"stopped by SIGTERM after step {STEPS}; saved"):
        train(config, tmp_path / "run", [])
    assert load_record(tmp_path / "run")["status"] == "stopped" and not evaluation_rows(tmp_path / "run")
    monkeypatch.undo()
    train(config, tmp_path / "run", [])
    record = load_record(tmp_path / "run")
    assert record["status"] == "done" and record["tokens"] == config.training.tokens and record["train_seconds"] > 0


def test_signals_are_collected_or_end_what_has_nothing_to_save_unless_someone_handles_them() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_signals() as received:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
    assert received == [signal.SIGINT, signal.SIGTERM, signal.SIGINT]
    with pytest.raises(KeyboardInterrupt), stop_signals(second_interrupts=True) as received:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGTERM] and signal.getsignal(signal.SIGINT) is before
    # It is no error that a library may outlive: a tracker costs a warning where it fails.
    with pytest.raises(Stopped, match="stopped by SIGTERM"), signals_as_errors(), contextlib.suppress(Exception):
        signal.raise_signal(signal.SIGTERM)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_signals() as received, signals_as_errors():
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, hangup)


def test_a_loss_that_is_not_finite_stops_before_the_update_and_says_where(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    plain = GPT.forward

    def poisoned(model: GPT, ids: torch.Tensor, labels: torch.Tensor, **given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return plain(model, ids, labels, **given) * (float("nan") if calls == 8 else 1.0)

    monkeypatch.setattr(GPT, "forward", poisoned)
    with pytest.raises(RunFailed, match="loss is nan at step 8"):
        train(config, tmp_path / "run", [])
    record = load_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("failed", "diverged")
    saved = checkpoint.trained(tmp_path / "run")
    assert saved.step == 5 and all(torch.isfinite(weight).all() for weight in saved.weights().values())


def test_the_validation_loss_is_a_mean_over_tokens_whatever_the_batch(config: Config, tmp_path: pathlib.Path) -> None:
    runtime = dataclasses.replace(config.runtime, validate_every_steps=1)
    folder = tmp_path / "run"
    train(dataclasses.replace(config, runtime=runtime), folder, [])
    found = [row["val/loss"] for row in training_rows(folder) if "val/loss" in row]
    tokens = prepare(config.data, pathlib.Path(str(config.runtime.cache)))
    model = build(config, tokens.tokenizer.vocab_size)
    model.load_state_dict(checkpoint.trained(folder).weights())
    (batch,) = validation_batches(tokens.validation.ids, 16, 256, VALIDATION_BLOCKS)
    assert len(found) == STEPS and len(batch.ids) % config.training.batch_size  # the last batch is a smaller one
    assert found[-1] == pytest.approx(float(model(batch.ids, batch.labels).detach()), abs=1e-6)


@pytest.mark.full
def test_bf16_autocast_trains_close_to_fp32(config: Config, tmp_path: pathlib.Path) -> None:
    half = dataclasses.replace(config, training=dataclasses.replace(config.training, precision="bf16"))
    train(config, tmp_path / "fp32", [])
    train(half, tmp_path / "bf16", [])
    pairs = list(zip(losses(tmp_path / "fp32"), losses(tmp_path / "bf16"), strict=True))
    assert max(abs(one - two) for (_, one, _), (_, two, _) in pairs) < 0.02  # bf16 has 8 bits: 0.4 % of a logit
    assert load_record(tmp_path / "bf16")["attempt"]["dtype"] == "bf16"


def test_the_learning_rate_warms_up_and_falls_to_its_final_share(config: Config) -> None:
    schedule = dataclasses.replace(config.training, learning_rate=1.0, warmup_tokens=4 * 128, final_learning_rate=0.1)
    cosine = [learning_rate(step, 100, schedule) for step in range(100)]
    assert cosine[:4] == [0.25, 0.5, 0.75, 1.0] and cosine[4] == 1.0
    assert cosine[99] == pytest.approx(0.1) and cosine[4:] == sorted(cosine[4:], reverse=True)
    constant = dataclasses.replace(schedule, schedule="constant", decay_fraction=0.2)
    values = [learning_rate(step, 101, constant) for step in range(101)]
    assert set(values[4:80]) == {1.0} and values[100] == pytest.approx(0.1) and values[80] < 1
    assert values[90] == pytest.approx(0.1 + 0.9 * 10 / 20.2)
    never = dataclasses.replace(constant, decay_fraction=0.0)
    assert {learning_rate(step, 101, never) for step in range(4, 101)} == {1.0}
    falling = dataclasses.replace(constant, decay_fraction=1.0)  # from the warm-up on
    values = [learning_rate(step, 100, falling) for step in range(100)]
    assert values[4:] == sorted(values[4:], reverse=True) and 0.98 < values[4] <= 1 and values[99] == pytest.approx(0.1)


def test_a_warm_up_longer_than_the_training_is_cut_to_a_tenth_and_said_once(
    config: Config, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    asked = dataclasses.replace(config.training, learning_rate=1.0, warmup_tokens=61440, tokens=20 * 128)
    assert [learning_rate(step, asked.steps, asked) for step in range(3)] == [0.5, 1.0, 1.0]
    whole = dataclasses.replace(asked, warmup_tokens=asked.tokens)  # was accepted before, so it keeps its numbers
    assert learning_rate(9, 20, whole) == 0.5
    short = dataclasses.replace(config, training=dataclasses.replace(config.training, warmup_tokens=61440))
    for _ in range(2):
        train(short, tmp_path / "run", [])
    said = (
        "training.tokens=1536 is less than training.warmup_tokens=61440: the learning rate rises over the first 1 of "
    )
    assert caplog.text.count(said) == 1
    held = held_config(tmp_path / "run", short)
    assert held and held.training.warmup_tokens == 61440  # the id is that of what was asked for


def test_weight_decay_spares_norms_and_the_encodings_parameters(config: Config) -> None:
    with_table = dataclasses.replace(config, encoding=dataclasses.replace(config.encoding, name="learned"))
    model = build(with_table, 257)
    groups = optimizer_for(model, config.training).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert names == {name for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith("encoding.")}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_a_run_does_not_go_on_in_another_precision(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, precision="auto"))
    folder = tmp_path / "run"
    monkeypatch.setattr(machine, "bf16_is_fast", lambda device: False)
    stop_after(7, config, folder, monkeypatch)
    kept = snapshot(folder / "checkpoint")
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="trained in fp32 up to step 5, here it would go on in bf16") as caught,
    ):
        patch.setattr(machine, "bf16_is_fast", lambda device: True)
        train(config, folder, [])
    assert "\n" not in str(caught.value) and snapshot(folder / "checkpoint") == kept
    train(config, folder, [])
    assert load_record(folder)["status"] == "done" and load_record(folder)["attempt"]["bit_exact"] is True
    monkeypatch.setattr(machine, "bf16_is_fast", lambda device: True)
    train(config, folder, [])  # nothing is left to train


@pytest.mark.sample(2)
@pytest.mark.parametrize("changed", ["threads 1 -> 3", "compiled False -> True"])
def test_a_run_that_goes_on_in_another_way_says_so_and_is_marked(
    config: Config,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    changed: str,
) -> None:
    stop_after(7, config, tmp_path / "run", monkeypatch)
    if changed.startswith("threads"):
        monkeypatch.setattr(machine, "set_threads", lambda threads: 3)
    else:
        for compiled, plain in (("_before_compiled", gpt._before), ("_after_compiled", gpt._after)):  # tested elsewhere
            monkeypatch.setattr(gpt, compiled, plain)
        config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=True))
    train(config, tmp_path / "run", [])
    assert f"continuing with {changed}: the weights will not be those of an uninterrupted run" in caplog.text
    assert load_record(tmp_path / "run")["attempt"]["bit_exact"] is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_ends_training_saved_and_an_evaluation_in_words(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    signal.signal(number, signal.SIG_DFL)  # under nohup SIGHUP is ignored, and would stay so
    before = signal.getsignal(number)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"{number.name} after step 7; saved") as caught:
        seen_updates(patch, lambda step: step == 6 and signal.raise_signal(number))
        train(config, tmp_path / "run", [])
    assert caught.value.exit_code == 128 + number
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=f"stopped by {number.name}"):
        patch.setattr("posbench.training.train.evaluate_into", lambda *_: signal.raise_signal(number))
        train(config, tmp_path / "run", [])
    record = load_record(tmp_path / "run")
    assert (record["status"], record["reason"]) == ("stopped", "signal")
    assert signal.getsignal(number) is before


def test_a_run_that_was_killed_has_died_and_one_that_is_owned_is_running(
    config: Config, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "outputs" / "study" / "run"
    train(config, folder, [])
    record = load_record(folder) | {"status": "running"}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert read([folder])["run_status"].tolist()[0] == "died"
    with Run.open(folder, config, None):
        assert read([folder])["run_status"].tolist()[0] == "running"


@pytest.mark.full
def test_a_loss_that_stays_above_twice_its_best_is_said_once(
    config: Config, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, tokens=16 * 8 * 60))
    plain = Outcome.read

    def worse(outcome: Outcome) -> tuple[float, float]:
        loss, norm = plain(outcome)
        return (12.0 if outcome.step > 10 and outcome.step != 12 else loss), norm

    monkeypatch.setattr(Outcome, "read", worse)
    train(config, tmp_path / "run", [])
    assert caplog.text.count("it diverges slowly") == 1 and "for 20 updates" in caplog.text
    caplog.clear()
    monkeypatch.setattr(Outcome, "read", plain)
    train(config, tmp_path / "well", [])
    assert "diverges" not in caplog.text


def test_a_run_goes_on_from_a_prompt(config: Config, tmp_path: pathlib.Path) -> None:
    train(config, tmp_path / "run", [])
    text = sample(tmp_path / "run", "to be", tokens=30)
    assert text == sample(tmp_path / "run", "to be", tokens=30) and text.startswith("to be") and len(text) > 20
    assert text != sample(tmp_path / "run", "to be", tokens=30, seed=1)
    with pytest.raises(UserError, match="the prompt has no token"):
        sample(tmp_path / "run", "")
