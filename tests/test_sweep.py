"""Sweeps: the same runs as one by one, whatever fails or is killed on the way."""

import contextlib
import dataclasses
import glob
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from fake_study import Truth, configured, write_run
from support import each_once, snapshot, until, write_text

import posbench.reports
from posbench import machine
from posbench.config.shipped import configs_dir
from posbench.errors import PosbenchError, RunFailed, UserError
from posbench.launch import plans, pool, sweep
from posbench.launch.plans import Plan
from posbench.launch.pool import DONE
from posbench.run.rows import evaluation_rows, training_rows
from posbench.run.run import Run
from posbench.terminal import exits
from posbench.training.train import train

# of an evaluation row: how long it took, not what came out
_NO_SECONDS = {"seconds", "peak_memory_bytes"}


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]], list[float]]:
    """Return the weights, evaluation rows and losses of a run."""
    newest = max((folder / "checkpoint").glob("step-*"))
    rows = [
        {k: v for k, v in row.to_json().items() if k not in _NO_SECONDS}
        for row in evaluation_rows(folder)
    ]
    losses = [row["train/loss"] for row in training_rows(folder) if "train/loss" in row]
    return (newest / "model.safetensors").read_bytes(), rows, losses


def assert_as_single_runs(todo: list[Plan], outputs: Path) -> None:
    """Assert that each job has the results of a single run below another folder, in
    this process.
    """
    for job in todo:
        train(job.config, outputs / job.id, ["posbench", "train"])
        assert result(job.folder) == result(outputs / job.id)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder of tokens, which are prepared once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def reports(tmp_path, monkeypatch):
    """Enter a folder with only a text; return a list to which each report adds its
    paths instead of being written.
    """
    monkeypatch.chdir(tmp_path)
    write_text()
    asked: list[list[Path]] = []
    monkeypatch.setattr(posbench.reports, "main", asked.append, raising=False)
    return asked


@pytest.fixture
def overrides(cache, tmp_path):
    words = [
        *support.TINY,
        "data.path=text.txt",
        "training.tokens=512",
        "training.precision=fp32",
        "log_every_steps=1",
    ]
    return [*words, f"runtime.cache={cache}", f"runtime.outputs={tmp_path / 'outputs'}"]


@pytest.fixture
def several(tiny_config):
    names = ("rope", "rope", "alibi", "alibi")
    configs = [support.changed(tiny_config, seed=seed) for seed in range(4)]
    return [
        plans.plan(c, [f"encoding={name}", "study=test"])
        for c, name in zip(configs, names, strict=True)
    ]


def processes_of(folder: Path) -> list[str]:
    """Return the living processes whose output goes into the folder."""
    processes = []
    for path in glob.glob("/proc/[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            processes += [path] if os.readlink(path).startswith(str(folder)) else []
    return processes


def write_choice(folder: Path, choice: str, text: str) -> None:
    path = folder / f"{choice}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_sweep_is_every_combination_and_each_run_once(overrides):
    found = plans.resolve(
        [
            ["encoding=rope,alibi", "seed=0,1", *overrides],
            ["encoding=rope", *overrides],
        ]
    )
    names = [(job.config.encoding.name, job.config.seed) for job in found]
    assert names == [("rope", 0), ("rope", 1), ("alibi", 0), ("alibi", 1)]
    assert found[1].command[2:4] == ("encoding=rope", "seed=1")
    assert (
        found[0].folder == Path(found[0].config.runtime.outputs) / "demo" / found[0].id
    )
    with pytest.raises(
        UserError, match=r"outputs/a/rope-.* and .*outputs/b/rope-.* are the same run"
    ):
        plans.resolve([["encoding=rope", "study=a,b", *overrides]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    sorted(
        {path.stem for path in (configs_dir() / "sweep").glob("*.yaml")} - {"extend"}
    ),
)
def test_every_sweep_file_composes(name):
    todo = plans.resolve(plans.read_sets(name, ["tracking=none", "seed=0"]))
    assert len(todo) >= 3
    assert {job.config.study for job in todo} == {name}
    names = {job.config.encoding.name for job in todo}
    assert name != "catalogue" or names >= {
        path.stem for path in configs_dir().glob("encoding/*.yaml")
    }


def test_what_is_typed_takes_the_place_of_a_files_own_value(tmp_path):
    sets = ["encoding=rope encoding.base=64", "encoding=none"]
    write_choice(
        tmp_path,
        "sweep/mine",
        f"sets: {sets}\nshared: ['evaluation.protocols=[nonoverlap]', seed=3]",
    )
    # a word and its key are one
    words = plans.read_sets("mine", ["protocol=fixed_target,nonoverlap"], tmp_path)
    shared = ["protocol=fixed_target,nonoverlap", "seed=3"]
    assert words == [
        [*shared, "encoding=rope", "encoding.base=64"],
        [*shared, "encoding=none"],
    ]
    assert all(
        "encoding=fire" in each
        for each in plans.read_sets("mine", ["encoding=fire"], tmp_path)
    )
    for job in plans.resolve(words, tmp_path):
        assert job.config.evaluation.protocols == ("fixed_target", "nonoverlap")
        assert job.command[-1] == f"--config-dir={tmp_path}"


# The words of a sweep | what the line says.
MISTAKES = """
 | nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME
sweep=compar | unknown sweep 'compar': did you mean 'compare'? (choices: catalogue, compare, 
encoding=rope,alib | unknown encoding 'alib': did you mean 'alibi'?
encoding=rope,alibi encoding.base=64 | 'alibi' has no option 'base': it accepts slopes
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


@pytest.mark.parametrize(
    "line", [*MISTAKES.split("\n")[1:-1], *FILES.split("\n")[1:-1]]
)
def test_a_mistake_is_one_line_and_nothing_is_run(line, tmp_path):
    typed, message = line.split(" | ")
    write_choice(tmp_path, "sweep/mine", typed)
    with pytest.raises(UserError) as caught:
        (
            plans.read_sets("mine", [], tmp_path)
            if line in FILES
            else sweep.sweep(typed.split())
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("outputs").exists()


def test_a_sweep_shows_the_loss_after_training_and_not_one_on_the_way(
    template, tmp_path
):
    config = configured(template, "rope", 0)
    # as its rows say
    tokens = 12 * config.training.tokens_per_step
    config = support.changed(config, training={"tokens": tokens})
    folder = write_run(
        tmp_path, config, Truth(3.0, 0.1, earlier=(Truth(5.0, 0.1), Truth(4.0, 0.1)))
    )
    nll = pool.loss_at_train_length(Plan(config, folder, ()))
    assert nll is not None
    assert 2.5 < nll < 3.5


@pytest.mark.slow
def test_a_dry_run_lists_commands_counts_and_writes_nothing(
    overrides, tmp_path, capsys
):
    (done,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    train(done.config, done.folder, ["posbench", "train"])
    tokens = done.config.training.steps * done.config.training.tokens_per_step
    before = snapshot(tmp_path)

    def shown(*words: str) -> list[str]:
        sweep.sweep(each_once([*overrides, *words]), dry_run=True)
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == "Nothing was run or written."
        assert snapshot(tmp_path) == before
        return lines

    *commands, counts = shown("encoding=rope,alibi", "seed=0,1,2")
    assert len(commands) == 5
    assert all(line.startswith("posbench train ") for line in commands)
    assert "encoding=alibi" in commands[-1]
    assert "seed=2" in commands[-1]
    assert counts == f"6 runs: 1 finished, 5 to do, {5 * tokens:,} tokens to train on."
    tuned = shown("encoding=rope,alibi", "seed=0,1,2", "tune=true")[-1]
    assert (
        tuned == f"16 runs: 1 finished, 15 to do, {15 * tokens:,} tokens to train on."
    )
    other = shown("encoding=rope,alibi", "evaluation.ratios=[1,3]")[-1]
    assert f"2 runs: 0 finished, 2 to do, {tokens:,} tokens" in other
    # without them it trains again
    (done.folder / "checkpoint").rename(tmp_path / "weights")
    before = snapshot(tmp_path)
    assert (
        f"to do, {2 * tokens:,} tokens"
        in shown("encoding=rope,alibi", "evaluation.ratios=[1,3]")[-1]
    )


@pytest.mark.slow
def test_a_sweep_without_verdicts_says_so_before_training_with_what_to_type(capsys):
    for words, *expected in (
        (
            "seed=0,1 experiment=demo",
            "Verdicts need 5 seeds, here 2: type seed=0,1,2,3,4.",
            "After 1,000,000 tokens",
        ),
        (
            "encoding=none,alibi experiment=reader seed=0,1,2,3,4",
            "Schemes are compared with rope, which is not among",
        ),
        ("experiment=reader seed=0,1,2,3,4",),
    ):
        sweep.sweep(
            each_once(["encoding=rope,alibi", *words.split(), "tracking=none"]),
            dry_run=True,
        )
        warnings = [
            line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()
        ]
        assert len(warnings) == len(expected)
        assert all(
            line.startswith(start)
            for line, start in zip(warnings, expected, strict=True)
        )


def test_a_sweep_equals_single_runs_and_a_second_one_has_nothing_to_do(
    overrides, reports, tmp_path, monkeypatch
):
    arguments = ["encoding=rope,alibi", *overrides]
    sweep.sweep(arguments, n_jobs=2)
    todo = plans.resolve([arguments])
    assert_as_single_runs(todo, tmp_path / "single")
    assert pool.record(todo[0])["command"].startswith("posbench train encoding=rope ")
    assert [{folder.parent for folder in asked} for asked in reports] == [
        {tmp_path / "outputs/demo"}
    ]
    sweep.sweep(further := [*arguments, "evaluation.blocks=9"], n_jobs=2)
    monkeypatch.setattr(pool, "start_process", None)  # a second sweep starts no process
    for words in (arguments, further):
        sweep.sweep(words)
    monkeypatch.setattr(
        sweep,
        "execute",
        lambda todo, n_jobs: dict.fromkeys((plan.id for plan in todo), pool.WAITING),
    )
    with pytest.raises(PosbenchError, match="2 runs of 2 not done"):
        sweep.sweep(arguments)
    assert len(reports) == 5  # of what is done, whatever more was asked for


CRASH = """
import os
from posbench import Encoding

class Crash(Encoding):
    def __init__(self, shape, number: int = 0) -> None:
        super().__init__(shape)
        self.number = number

    def rotate(self, q, k, layer):
        os.kill(os.getpid(), self.number)
        return q, k
"""


@pytest.mark.slow
def test_failing_runs_are_recorded_with_their_reason_and_the_others_are_done(
    overrides, tmp_path, reports, capsys
):
    Path("crash.py").write_text(CRASH)
    sets = [
        "encoding=rope",
        "encoding=alibi training.learning_rate=1e30",
        "encoding=./crash.py:Crash encoding.number=11,9",
    ]
    write_choice(tmp_path, "sweep/faults", f"sets: {sets}")
    with pytest.raises(PosbenchError, match="3 runs of 4 not done: ") as caught:
        sweep.sweep(["sweep=faults", *overrides], n_jobs=2, config_dir=tmp_path)
    rope, *failed = plans.resolve(
        plans.read_sets("faults", overrides, tmp_path), tmp_path
    )
    assert all(job.id in str(caught.value) for job in failed)
    assert caught.value.exit_code == 1
    assert [pool.record(job)["reason"] for job in (rope, *failed)] == [
        None,
        "diverged",
        "signal",
        "signal",
    ]
    assert (
        pool.record(failed[-1])["message"]
        == "killed by SIGKILL, perhaps since memory ran out"
    )
    lines = capsys.readouterr().err
    assert lines.count("not done: ") == 3
    assert "training.learning_rate=1e30] failed (diverged): loss is" in lines
    assert len(reports) == 1  # of those that are done


def start_sweep(*arguments: Any) -> Any:
    """Start a sweep in a fork, since torch is loaded here already, and with a new
    server to fork its jobs.
    """
    multiprocessing.forkserver._forkserver._stop()
    work = lambda: sys.exit(exits.run(lambda: sweep.sweep(*arguments)))  # noqa: E731
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def steps(folder: Path) -> int:
    """Return the number of updates logged by the runs below a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/rows.jsonl"))


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_an_uninterrupted_one(overrides, tmp_path):
    # 192 updates
    longer = ["training.tokens=12288", "runtime.checkpoint_every_steps=10"]
    arguments = ["encoding=rope", "seed=0,1", *each_once([*overrides, *longer])]
    rng = random.Random(time.time_ns())
    # the last: also before anything is trained
    moments = [*sorted(rng.sample(range(1, 340), 2)), 0]
    for updates in moments:
        process = start_sweep(arguments, 1)
        until(lambda updates=updates: steps(tmp_path / "outputs/demo") >= updates)
        time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        process.join()
        until(lambda: not processes_of(tmp_path))
    sweep.sweep(arguments, n_jobs=1)
    assert_as_single_runs(plans.resolve([arguments]), tmp_path / "single")


@pytest.mark.slow
def test_ctrl_c_lets_what_runs_save_itself(overrides, tmp_path):
    # 15,625 updates
    arguments = [
        "encoding=rope,alibi",
        *each_once([*overrides, "training.tokens=1000000"]),
    ]
    process = start_sweep(arguments, 1)
    until(lambda: steps(tmp_path / "outputs/demo") > 5)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    first, second = plans.resolve([arguments])
    assert process.exitcode == 130
    assert pool.record(first)["status"] == "stopped"
    assert not processes_of(tmp_path)
    assert not second.folder.exists()
    saved = max((first.folder / "checkpoint").glob("step-*"))
    assert (
        int(saved.name.removeprefix("step-"))
        == training_rows(first.folder)[-1]["step"]
        > 5
    )


def test_what_became_of_a_run_is_what_its_record_says_or_its_processs_last_words(
    several,
):
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

    def attempt(*outcomes: str | PosbenchError) -> None:
        with Run.open(job.folder, job.config, []) as run:
            run.begin_attempt()
            for outcome in outcomes:
                (
                    run.finish(outcome)
                    if isinstance(outcome, str)
                    else run.ended_by(outcome)
                )

    attempt("done")
    before = pool.record(job)
    attempt(RunFailed("no space left", "disk"))
    assert pool.outcome(job, 1, before) == ("failed", "disk", "no space left")
    attempt()  # killed, as it seems
    assert pool.outcome(job, -signal.SIGKILL, before).name == "failed"
    attempt("done")
    # all the while
    assert pool.outcome(job, 0, before) == DONE
    assert pool.record(job)["status"] == "done"


# Cores, GPUs, --n-jobs, processes and threads of each run, OMP_NUM_THREADS | threads of
# each process, GPUs by run.
SLOTS = """
8 - null null null null | 2 * 4
2 - 4 null null null | 1 * 4
8 - null null 4 1 | 4 * 2
8 - 2 null null 1 | 1 * 2
6 - null 2 null null | 1 * 3
6 2,5 3 null null null | 2 2 5 2
6 2,5,6,7,8 null 2 null null | 1 2,5 6,7
"""


def test_threads_and_gpus_are_divided_among_the_processes(several, monkeypatch):
    monkeypatch.setattr(pool, "run", lambda todo, slots, _: slots)
    for line in SLOTS.split("\n")[1:-1]:
        left, _, right = line.partition(" | ")
        cores, gpus, *words, threads_given = left.split()
        n_jobs, processes, threads = (
            None if word == "null" else int(word) for word in words
        )
        each, *of_runs = right.split()
        monkeypatch.setenv("OMP_NUM_THREADS", threads_given.replace("null", ""))
        monkeypatch.setattr(machine, "cores", lambda cores=cores: int(cores))
        device = torch.device("cpu" if gpus == "-" else "cuda")
        monkeypatch.setattr(machine, "resolve", lambda name, device=device: device)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        runtime = {"device": "auto", "threads": threads, "processes": processes}
        todo = [
            dataclasses.replace(
                plan, config=support.changed(plan.config, runtime=runtime)
            )
            for plan in several
        ]
        slots: Any = sweep.execute(todo, n_jobs)
        assert {slot["OMP_NUM_THREADS"] for slot in slots} == {each}, line
        expected = [None] * int(of_runs[1]) if of_runs[0] == "*" else of_runs
        assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in slots] == expected, line


def test_the_best_rate_of_each_scheme_on_validation_text_is_chosen_and_one_at_the_edge_is_warned_about(
    overrides, monkeypatch, caplog
):
    caplog.set_level("INFO")
    todo = plans.resolve(
        [["encoding=rope,alibi", "seed=1", "training.learning_rate=0.002", *overrides]]
    )
    tried: list[Plan] = []
    best = {"rope": 0.002, "alibi": 0.004}
    losses = [
        lambda plan: abs(
            plan.config.training.learning_rate - best[plan.config.encoding.name]
        ),
        lambda plan: None,
    ]
    monkeypatch.setattr(sweep, "execute", lambda trials, _: tried.extend(trials))
    # without any it keeps its own
    for loss, rates in zip(losses, ([0.002, 0.004], [0.002, 0.002]), strict=True):
        monkeypatch.setattr(pool, "loss_at_train_length", loss)
        chosen = sweep.with_tuned_rates(todo, [0.5, 1.0, 2.0], None)
        assert [job.config.training.learning_rate for job in chosen] == rates
    (warning,) = [message for message in caplog.messages if "edge" in message]
    assert warning.startswith("alibi: learning rate 0.004 ")
    assert "a wider tune_grid" in warning
    assert len({trial.id for trial in tried}) == 6
    for trial in tried:
        asked = trial.config.evaluation
        assert asked.split == "validation"
        assert asked.ratios == (1.0,)
        assert asked.at_tokens == ()
        assert trial.config.seed == 0
        assert trial.folder.parent == todo[0].folder.parent / "tuning"
