"""Sweeps: the same runs as one by one, whatever fails or is killed on the way."""

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_study import Truth, configured, write_run
from support import each_once, encoding_installed, snapshot, write_text
from tiny_sweep import TINY, one_by_one, result, until

import posbench.report
from posbench import machine
from posbench.config import compose
from posbench.config.schema import Config
from posbench.config.shipped import configs_dir
from posbench.errors import PosbenchError, RunFailed, Stopped, UserError
from posbench.launch import plans, pool, sweep
from posbench.launch.plans import Plan
from posbench.launch.pool import DONE, Status
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.run import Run
from posbench.terminal import exits
from posbench.training.train import train


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens prepared once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """An empty current folder with a text; the reports that would have been written are listed instead."""
    monkeypatch.chdir(tmp_path)
    write_text()
    asked: list[list[Path]] = []
    monkeypatch.setattr(posbench.report, "main", asked.append, raising=False)
    return asked


@pytest.fixture
def overrides(cache: Path, tmp_path: Path) -> list[str]:
    # An absolute path, by which the processes of this test are recognised.
    return [*TINY, f"runtime.cache={cache}", f"runtime.outputs={tmp_path / 'outputs'}"]


@pytest.fixture
def several(tiny_config: Config) -> list[Plan]:
    names = ("rope", "rope", "alibi", "alibi")
    configs = [dataclasses.replace(tiny_config, seed=seed) for seed in range(4)]
    return [plans.plan(c, [f"encoding={name}", "study=test"]) for c, name in zip(configs, names, strict=True)]


def processes_of(folder: Path) -> list[int]:
    """Living processes that name the folder in their command line, or whose output goes there."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            names = [(path / "cmdline").read_bytes(), os.fsencode((path / "fd/1").readlink())]
            if any(str(folder).encode() in name for name in names) and int(path.name) != os.getpid():
                found.append(int(path.name))
        except OSError:  # it has just ended
            continue
    return found


def write_choice(folder: Path, choice: str, text: str) -> None:
    path = folder / f"{choice}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# -- what a sweep consists of ------------------------------------------------------------------------------------------


def test_a_sweep_is_every_combination_and_each_run_once(overrides: list[str]) -> None:
    found = plans.resolve([["encoding=rope,alibi", "seed=range(0,2)", *overrides], ["encoding=rope", *overrides]])
    names = [(job.config.encoding.name, job.config.seed) for job in found]
    assert names == [("rope", 0), ("rope", 1), ("alibi", 0), ("alibi", 1)]
    assert found[1].overrides[:2] == ("encoding=rope", "seed=1")
    assert found[0].folder == Path(found[0].config.runtime.outputs) / "demo" / found[0].id
    with pytest.raises(UserError, match=r"outputs/a/rope-.* and .*outputs/b/rope-.* are one run"):
        plans.resolve([["encoding=rope", "study=a,b", *overrides]])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({path.stem for path in (configs_dir() / "sweep").glob("*.yaml")} - {"extend"}))
def test_every_sweep_file_composes(name: str) -> None:
    sets = plans.read_sets(name, ["tracking=none"])
    found = plans.resolve(sets)
    assert len(found) >= 6 and {job.config.study for job in found} == {name}
    if name == "catalogue":  # every encoding and every pattern of layers, of which two are one run
        every = [pair for words in sets for pair in compose.configs(words)]  # as above, so composed already
        chosen = [word.removeprefix("encoding=") for overrides, _ in every for word in overrides if "encoding=" in word]
        files = [path.relative_to(configs_dir() / "encoding") for path in (configs_dir() / "encoding").rglob("*.yaml")]
        assert sorted(chosen) == sorted(str(path.with_suffix("")) for path in files)
        assert {config.seed for _, config in every} == {0}


def test_what_is_typed_takes_the_place_of_a_files_own_value(tmp_path: Path) -> None:
    sets = ["encoding=rope encoding.base=64", "encoding=none"]
    write_choice(tmp_path, "sweep/mine", f"sets: {sets}\nshared: ['evaluation.protocols=[nonoverlap]', seed=3]")
    words = plans.read_sets("mine", ["protocol=fixed_target,nonoverlap"], tmp_path)  # a word and its key are one
    shared = ["protocol=fixed_target,nonoverlap", "seed=3"]
    assert words == [[*shared, "encoding=rope", "encoding.base=64"], [*shared, "encoding=none"]]
    assert all("encoding=fire" in each for each in plans.read_sets("mine", ["encoding=fire"], tmp_path))
    for job in plans.resolve(words, tmp_path):
        assert job.config.evaluation.protocols == ("fixed_target", "nonoverlap")
        assert job.command[-1] == f"--config-dir={tmp_path}" not in job.overrides


# The words of a sweep | what the line says.
MISTAKES = """
 | nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME
sweep=compar | unknown sweep 'compar': did you mean 'compare'? (choices: catalogue, compare, 
encoding=rope,alib | unknown encoding 'alib': did you mean 'alibi'?
encoding=rope,alibi encoding.base=64 | encoding.base is no option of alibi: 'posbench sweep encoding=rope enc
encoding=rope tune=maybe | expected tune=true, with or without tune_grid
encoding=rope tune=true tune_grid=0,1 | tune_grid is [0, 1]: expected multiples
encoding=rope,alibi evaluation.extensions=['yarn:fctor=2'] | 'yarn' has no option 'fctor'
"""
# A file of a sweep | what the line says.
FILES = """
- encoding=rope | expected keys with values
{sets: [encoding=rope], shard: [seed=1]} | is not a sweep: expected 'sets'
sets: [{encoding: rope}] | is not a sweep: expected 'sets'
"""


@pytest.mark.parametrize("line", [*MISTAKES.split("\n")[1:-1], *FILES.split("\n")[1:-1]])
def test_a_mistake_is_one_line_and_nothing_is_run(line: str, tmp_path: Path) -> None:
    typed, message = line.split(" | ")
    write_choice(tmp_path, "sweep/mine", typed)
    with pytest.raises(UserError) as caught:
        plans.read_sets("mine", [], tmp_path) if line in FILES else sweep.sweep(typed.split())
    assert message in str(caught.value) and "\n" not in str(caught.value) and not Path("outputs").exists()


def test_a_sweep_shows_the_loss_after_training_and_not_one_on_the_way(template: Config, tmp_path: Path) -> None:
    config = configured(template, "rope", 0)
    training = dataclasses.replace(config.training, tokens=12 * config.training.tokens_per_step)  # as its rows say
    config = dataclasses.replace(config, training=training)
    folder = write_run(tmp_path, config, Truth(3.0, 0.1, earlier=(Truth(5.0, 0.1), Truth(4.0, 0.1))))
    nll = pool.loss_at_train_length(Plan(config, folder, ()))
    assert nll is not None and 2.5 < nll < 3.5


@pytest.mark.full
def test_a_dry_run_lists_commands_counts_and_writes_nothing(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (done,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    train(done.config, done.folder, ["posbench", "train"])
    tokens, before = done.config.training.steps * done.config.training.tokens_per_step, snapshot(tmp_path)

    def shown(*words: str) -> list[str]:
        sweep.sweep(each_once([*overrides, *words]), dry_run=True)
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == "Nothing was run or written." and snapshot(tmp_path) == before
        return lines

    *commands, counts = shown("encoding=rope,alibi", "seed=0,1,2")
    assert len(commands) == 5 and all(line.startswith("posbench train ") for line in commands)
    assert "encoding=alibi" in commands[-1] and "seed=2" in commands[-1]
    assert counts == f"6 runs: 1 finished, 5 to do, {5 * tokens:,} tokens to train on."
    tuned = shown("encoding=rope,alibi", "seed=0,1,2", "tune=true")[-1]
    assert tuned == f"16 runs: 1 finished, 15 to do, {15 * tokens:,} tokens to train on."
    other = shown("encoding=rope,alibi", "evaluation.ratios=[1,3]")[-1]
    assert f"2 runs: 0 finished, 2 to do, {tokens:,} tokens" in other


def test_a_sweep_without_verdicts_says_so_before_it_trains_with_what_to_type(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, *expected in (
        ("seed=0,1 experiment=demo", "Verdicts need 5 seeds, here 2: type seed=range(0,5).", "After 1,000,000 tokens"),
        ("encoding=none,alibi experiment=reader seed=range(0,5)", "Schemes are compared with rope, which is not among"),
        ("experiment=reader seed=range(0,5)",),
    ):
        sweep.sweep(each_once(["encoding=rope,alibi", *words.split(), "tracking=none"]), dry_run=True)
        warnings = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
        assert len(warnings) == len(expected)
        assert all(line.startswith(start) for line, start in zip(warnings, expected, strict=True))


# -- running -----------------------------------------------------------------------------------------------------------

ONE = {"OMP_NUM_THREADS": "1"}


def test_a_sweep_equals_single_runs_and_a_second_one_has_nothing_to_do(
    overrides: list[str], reports: list[list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["encoding=rope,alibi", *overrides]
    sweep.sweep(arguments, n_jobs=2)
    todo = plans.resolve([arguments])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert result(job.folder) == result(tmp_path / "single" / job.id)
    assert pool.record(todo[0])["command"].startswith("posbench train encoding=rope ")
    assert [{folder.parent for folder in asked} for asked in reports] == [{tmp_path / "outputs/demo"}]
    monkeypatch.setattr(pool, "start", None)  # a second sweep starts no process
    sweep.sweep(arguments)


CRASH = """
import os, signal
from posbench.encodings.base import Encoding, Shape

class Crash(Encoding):
    def __init__(self, shape: Shape, signal_number: int = 0) -> None:
        super().__init__(shape)
        self.signal_number = signal_number

    def rotate(self, q, k, layer):
        os.kill(os.getpid(), self.signal_number)
        return q, k
"""


@pytest.mark.full
def test_failing_runs_are_recorded_with_their_reason_and_the_others_are_done(
    overrides: list[str],
    tmp_path: Path,
    reports: list[list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sets = ["encoding=rope", "encoding=alibi training.learning_rate=1e30"]
    sets += [f"encoding=crash encoding.signal_number={int(signal.SIGSEGV)},{int(signal.SIGKILL)}"]
    write_choice(tmp_path / "configs", "sweep/faults", "sets:\n" + "".join(f"  - {line}\n" for line in sets))
    write_choice(tmp_path / "configs", "encoding/crash", "name: crash\nsignal_number: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    with encoding_installed(tmp_path / "packages", "crash", CRASH):
        with pytest.raises(PosbenchError, match="3 runs of 4 not done: ") as caught:
            sweep.sweep(["sweep=faults", *overrides], n_jobs=2, config_dir=tmp_path / "configs")
        sets_of_words = plans.read_sets("faults", overrides, tmp_path / "configs")
        rope, diverging, segfault, killed = plans.resolve(sets_of_words, tmp_path / "configs")
    assert all(job.id in str(caught.value) for job in (diverging, segfault, killed)) and caught.value.exit_code == 1
    outcomes = [
        tuple(pool.record(job)[key] for key in ("status", "reason")) for job in (rope, diverging, segfault, killed)
    ]
    assert outcomes == [("done", None), ("failed", "diverged"), ("failed", "signal"), ("failed", "signal")]
    assert pool.record(killed)["message"] == "killed by SIGKILL, perhaps since memory ran out"
    shown = capsys.readouterr().err
    assert shown.count("not done: ") == 3
    assert "training.learning_rate=1e30] failed (diverged): loss is" in shown
    assert len(reports) == 1  # of those that are done


def start_sweep(*arguments: Any) -> Any:
    """A sweep in a process of its own, forked since torch is here already; the server that forks its jobs is not."""
    multiprocessing.forkserver._forkserver._stop()
    work = lambda: sys.exit(exits.run(lambda: sweep.sweep(*arguments)))  # noqa: E731
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def steps(folder: Path) -> int:
    """Updates logged by the runs below a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/rows.jsonl"))


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_the_uninterrupted_one_and_leaves_no_process(
    overrides: list[str], tmp_path: Path
) -> None:
    longer = ["training.tokens=12288", "runtime.checkpoint_every_steps=10"]  # 192 updates
    arguments = ["encoding=rope", "seed=0,1", *each_once([*overrides, *longer])]
    rng = random.Random(time.time_ns())
    moments = [*sorted(rng.sample(range(1, 340), 2)), 0]  # the last: also before anything is trained
    for updates in moments:
        process = start_sweep(arguments, 1)
        until(lambda updates=updates: steps(tmp_path / "outputs/demo") >= updates)
        time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        process.join()
        until(lambda: not processes_of(tmp_path))
    sweep.sweep(arguments, n_jobs=1)
    todo = plans.resolve([arguments])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert result(job.folder) == result(tmp_path / "single" / job.id), moments


@pytest.mark.full
def test_ctrl_c_lets_what_runs_save_itself(overrides: list[str], tmp_path: Path) -> None:
    arguments = ["encoding=rope,alibi", *each_once([*overrides, "training.tokens=1000000"])]  # 15,625 updates
    process = start_sweep(arguments, 1)
    until(lambda: steps(tmp_path / "outputs/demo") > 5)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    first, second = plans.resolve([arguments])
    assert process.exitcode == 130 and pool.record(first)["status"] == "stopped"
    assert not processes_of(tmp_path) and not second.folder.exists()
    saved = max((first.folder / "checkpoint").glob("step-*"))
    assert int(saved.name.removeprefix("step-")) == training_rows(first.folder)[-1]["step"] > 5


def test_what_became_of_a_run_is_what_its_record_says_or_its_processs_last_words(several: list[Plan]) -> None:
    job = several[0]
    job.output.parent.mkdir(parents=True)
    job.output.write_text("12:00:00 preparing\nerror: there is no text.txt\n")
    assert pool.outcome(job, 2, {}) == ("failed", "error", "there is no text.txt")
    assert pool.record(job)["message"] == "there is no text.txt"
    job.output.write_text("")
    assert pool.outcome(job, 2, pool.record(job)).message == "ended with exit code 2"
    assert pool.outcome(job, 75, pool.record(job)) == pool.IN_USE
    stopped = pool.outcome(job, -signal.SIGTERM, pool.record(job), [signal.SIGTERM])
    assert stopped.name == pool.record(job)["status"] == "stopped"

    def attempt(error: PosbenchError | None, finish: bool = False) -> None:
        """Make an attempt, which a finished run survives."""
        with Run.open(job.folder, job.config, []) as run:
            run.begin_attempt()
            if finish:
                run.finish("done")
            if error:
                run.ended_by(error)

    attempt(None, finish=True)
    before = pool.record(job)
    attempt(RunFailed("no space left", "disk"))
    assert pool.outcome(job, 1, before) == ("failed", "disk", "no space left")
    attempt(None)  # killed, as it seems
    assert pool.outcome(job, -signal.SIGKILL, before).name == "failed"
    attempt(None, finish=True)
    assert pool.outcome(job, 0, before) == DONE and pool.record(job)["status"] == "done"


# Cores, GPUs, --n-jobs, processes and threads of each run, OMP_NUM_THREADS | threads of each process, GPUs by run.
SLOTS = """
8 - null null null null | 2 * 4
2 - 1 null null 1 | 1 * 1
2 - 4 null null null | 1 * 4
8 - null null 4 1 | 4 * 2
6 - null 2 null null | 1 * 3
6 2,5 null null null null | 3 2 5
6 2,5 3 null null null | 2 2 5 2
6 2,5,6,7,8 null 2 null null | 1 2,5 6,7
"""


def test_threads_and_gpus_are_divided_among_the_processes(several: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run", lambda todo, slots, _: slots)
    for line in SLOTS.split("\n")[1:-1]:
        left, _, right = line.partition(" | ")
        cores, gpus, *words, threads_given = left.split()
        n_jobs, processes, threads = (None if word == "null" else int(word) for word in words)
        each, *of_runs = right.split()
        monkeypatch.setenv("OMP_NUM_THREADS", threads_given.replace("null", ""))
        monkeypatch.setattr(machine, "cores", lambda cores=cores: int(cores))
        device = torch.device("cpu" if gpus == "-" else "cuda")
        monkeypatch.setattr(machine, "resolve", lambda name, device=device: device)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        runtime = dataclasses.replace(several[0].config.runtime, device="auto", threads=threads, processes=processes)
        todo = [dataclasses.replace(c, config=dataclasses.replace(c.config, runtime=runtime)) for c in several]
        slots: Any = sweep.execute(todo, n_jobs)
        assert {slot["OMP_NUM_THREADS"] for slot in slots} == {each}, line
        expected = [None] * int(of_runs[1]) if of_runs[0] == "*" else of_runs
        assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in slots] == expected, line


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def test_a_second_signal_ends_at_once_what_the_first_asked_to_save(
    several: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, codes = multiprocessing.get_context("fork").Process(target=deaf), []
    monkeypatch.setattr(pool, "start", lambda *_: process.start() or process)
    monkeypatch.setattr(pool, "outcome", lambda plan, code, *_: codes.append(code) or Status("stopped"))
    send = pool.send
    monkeypatch.setattr(pool, "send", lambda *given: (send(*given), signal.raise_signal(signal.SIGTERM)))
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        pool.run(several[:1], [{}], print)
    assert codes == [-signal.SIGKILL]


# -- tuning ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_tuning_measures_validation_text_only_in_runs_of_its_own(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_this_process(todo: list[Plan], *_: object) -> dict[str, Status]:
        for job in todo:
            with contextlib.suppress(PosbenchError):
                train(job.config, job.folder, ["posbench", "train"])
        return dict.fromkeys((job.id for job in todo), DONE)

    monkeypatch.setattr(sweep, "execute", in_this_process)
    words = ["encoding=rope", "seed=0,1", "training.learning_rate=0.003", "evaluation.at_tokens=[512]", *overrides]
    todo, study = plans.resolve([words]), tmp_path / "outputs/demo"
    chosen = sweep.tuned(todo, [0.01, 1.0, 1e32], None)
    assert [job.id for job in chosen] == [job.id for job in todo] and not list(study.glob("rope-*"))
    low, middle, high = sweep.trials(todo[:1], [0.01, 1.0, 1e32])
    assert pool.loss_at_train_length(middle) < pool.loss_at_train_length(low)
    assert pool.record(high)["reason"] == "diverged"
    for trial in (low, middle):
        evaluated = evaluation_rows(study / "tuning" / trial.id)
        assert {(row.split, row.length_ratio) for row in evaluated} == {("validation", 1.0)}
        assert all(row.n_blocks > 200 for row in evaluated)  # all validation text, though evaluation.blocks is 8


def test_the_best_rate_of_each_scheme_is_chosen_and_one_at_the_edge_of_the_grid_is_warned_about(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    todo = plans.resolve([["encoding=rope,alibi", "training.learning_rate=0.002", *overrides]])
    best = {"rope": 0.002, "alibi": 0.004}
    losses = [lambda plan: abs(plan.config.training.learning_rate - best[plan.config.encoding.name]), lambda plan: None]
    monkeypatch.setattr(sweep, "execute", lambda *_: None)
    for loss, rates in zip(losses, ([0.002, 0.004], [0.002, 0.002]), strict=True):  # without any it keeps its own
        monkeypatch.setattr(pool, "loss_at_train_length", loss)
        chosen = sweep.tuned(todo, [0.5, 1.0, 2.0], None)
        assert [job.config.training.learning_rate for job in chosen] == rates
    (warning,) = [message for message in caplog.messages if "edge" in message]
    assert warning.startswith("alibi: learning rate 0.004 ") and "a wider tune_grid" in warning
