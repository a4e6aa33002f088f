"""Sweeps: the same runs as one by one, whatever fails or is killed on the way."""

import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
from posbench.data.tokens import TokenSplit
from posbench.errors import PosbenchError, RunFailed, Stopped, UserError
from posbench.evaluation.plan import measurements
from posbench.launch import plans, pool, states, sweep, tuning
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.run.rows import evaluation_rows
from posbench.run.run import Run, Where, in_use
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


@pytest.mark.full
def test_a_sweep_says_once_that_wandb_mirrors_its_runs(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "execute", lambda todo, *_: {job.id: Status("done") for job in todo})
    monkeypatch.setattr(sweep, "_report", lambda *_: None)
    for tracked, times in (("wandb", 1), ("none", 0)):
        sweep.sweep(each_once(["encoding=rope,alibi", *overrides, f"tracking={tracked}"]))
        assert capfd.readouterr().err.count("W&B: ") == times


# -- what a sweep consists of ------------------------------------------------------------------------------------------


def test_a_sweep_is_every_combination_and_each_run_once(overrides: list[str]) -> None:
    found = plans.resolve([["encoding=rope,alibi", "seed=range(0,2)", *overrides], ["encoding=rope", *overrides]])
    assert [(job.config.encoding.name, job.config.seed) for job in found] == [
        ("rope", 0),
        ("rope", 1),
        ("alibi", 0),
        ("alibi", 1),
    ]
    assert found[1].overrides[:2] == ("encoding=rope", "seed=1")
    assert found[0].folder == Path(found[0].config.runtime.outputs) / "demo" / found[0].id


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.stem for path in (configs_dir() / "sweep").glob("*.yaml")))
def test_every_sweep_file_composes(name: str) -> None:
    if name == "extend":  # needs a run to begin from: test_start.py has one
        with pytest.raises(UserError, match=r"start=\?\?\?: expected a run folder"):
            plans.resolve(plans.read_sets(name, ["tracking=none"]))
        return
    found = plans.resolve(plans.read_sets(name, ["tracking=none"]))
    assert len(found) >= 6
    assert {job.config.study for job in found} == {name}
    if name == "catalogue":  # every encoding and every pattern of layers, of which two are one run
        sets = plans.read_sets(name, ["tracking=none"])
        every = [pair for words in sets for pair in compose.configs(words)]  # as above, so composed already
        chosen = [word.removeprefix("encoding=") for overrides, _ in every for word in overrides if "encoding=" in word]
        files = [path.relative_to(configs_dir() / "encoding") for path in (configs_dir() / "encoding").rglob("*.yaml")]
        assert sorted(chosen) == sorted(str(path.with_suffix("")) for path in files)
        assert {config.seed for _, config in every} == {0}


def test_options_of_one_scheme_stay_with_it_and_shared_axes_multiply() -> None:
    sets = plans.read_sets("rope_base", ["seed=7,8", "training.clip=2"])
    found = plans.resolve(sets)
    assert len(found) == 2 * (2 + 4)
    assert {job.config.seed for job in found} == {7, 8}  # in place of the file's own
    assert all(job.config.training.clip == 2 for job in found)
    bases = [job.config.encoding.options.get("base") for job in found]
    assert sorted({base for base in bases if base}) == [64, 1000, 10000, 500000]


def test_a_sweep_file_of_the_users_own_folder_gives_way_to_what_is_typed(tmp_path: Path) -> None:
    """A word and the key that it stands for are one override."""
    text = (
        "sets: [encoding=rope encoding.base=64, encoding=none]\nshared: ['evaluation.protocols=[nonoverlap]', seed=3]\n"
    )
    write_choice(tmp_path, "sweep/mine", text)
    sets = plans.read_sets("mine", ["protocol=fixed_target,nonoverlap"], tmp_path)
    shared = ["protocol=fixed_target,nonoverlap", "seed=3"]
    assert sets == [[*shared, "encoding=rope", "encoding.base=64"], [*shared, "encoding=none"]]
    assert all("encoding=fire" in words for words in plans.read_sets("mine", ["encoding=fire"], tmp_path))
    for job in plans.resolve(sets, tmp_path):
        assert job.config.evaluation.protocols == ("fixed_target", "nonoverlap")


def test_one_run_in_two_folders_is_refused(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"outputs/a/rope-.* and .*outputs/b/rope-.* are one run"):
        plans.resolve([["encoding=rope", "study=a,b", *overrides]])


def write_choice(folder: Path, choice: str, text: str) -> None:
    path = folder / f"{choice}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME"),
        (["sweep=compar"], "unknown sweep 'compar': did you mean 'compare'? (choices: catalogue, compare, "),
        (["encoding=rope,alib"], "unknown encoding 'alib': did you mean 'alibi'?"),
        (
            ["encoding=rope,alibi", "encoding.base=64"],
            "encoding.base is an option of rope, not of alibi",
        ),
        (["encoding=rope", "encoding"], "cannot read 'encoding': expected key=value"),
        (["encoding=rope", "tune=maybe"], "tune is 'maybe': expected true or false"),
        (["encoding=rope", "tune_grid=1,2"], "tune_grid goes with tune=true"),
        (["encoding=rope", "tune=true", "tune_grid=0,1"], "tune_grid is '0,1': expected multiples"),
        (["encoding=rope", "runtime.device=gpu"], "runtime.device is 'gpu'"),
        (["encoding=rope,alibi", "evaluation.extensions=['yarn:fctor=2']"], "'yarn' has no option 'fctor'"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_run(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep.sweep(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("outputs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- encoding=rope\n", "expected 'sets' and 'shared', lists of overrides"),
        ("sets: []\n", "is not a sweep: expected 'sets'"),
        ("sets: [encoding=rope]\nshard: [seed=1]\n", "is not a sweep: expected 'sets'"),
        ("sets: [{encoding: rope}]\n", "lists of overrides"),
        ('sets: ["encoding=\'rope"]\n', "No closing quotation"),
    ],
)
def test_a_sweep_file_of_another_form_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    write_choice(tmp_path, "sweep/mine", text)
    with pytest.raises(UserError) as caught:
        plans.read_sets("mine", [], tmp_path)
    assert message in str(caught.value)


def test_a_sweep_shows_the_loss_after_training_and_not_one_on_the_way(template: Config, tmp_path: Path) -> None:
    config = configured(template, "rope", 0)
    folder = write_run(tmp_path, config, Truth(3.0, 0.1, earlier=(Truth(5.0, 0.1), Truth(4.0, 0.1))))
    nll = states.loss_at_train_length(Plan(config, folder, ()))
    assert nll is not None and 2.5 < nll < 3.5


@pytest.mark.full
def test_a_dry_run_lists_commands_counts_and_writes_nothing(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (done,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    train(done.config, done.folder, ["posbench", "train"])
    before = snapshot(tmp_path)
    sweep.sweep(["encoding=rope,alibi", "seed=0,1,2", *overrides], dry_run=True)
    sweep.sweep(["encoding=rope,alibi", "seed=0,1,2", "tune=true", *overrides], dry_run=True)
    farther = [word for word in overrides if not word.startswith("evaluation.ratios")]
    sweep.sweep(["encoding=rope,alibi", "evaluation.ratios=[1,3]", *farther], dry_run=True)
    once, tuned, other = capsys.readouterr().out.split("Nothing was run or written.\n")[:3]
    (done.folder / "checkpoint").rename(tmp_path / "aside")  # as of rows that were kept: such a run trains again
    sweep.sweep(["encoding=rope", "seed=0", "evaluation.ratios=[1,3]", *farther], dry_run=True)
    again = capsys.readouterr().out
    (tmp_path / "aside").rename(done.folder / "checkpoint")
    tokens = done.config.training.steps * done.config.training.tokens_per_step
    *commands, counts = once.splitlines()
    assert len(commands) == 5 and all(line.startswith("posbench train ") for line in commands)
    assert "encoding=alibi" in commands[-1] and "seed=2" in commands[-1]
    assert counts == f"6 runs: 1 finished, 5 to do, {5 * tokens:,} tokens to train on."
    assert f"16 runs: 1 finished, 15 to do, {15 * tokens:,} tokens to train on.\n" in tuned
    assert f"1 run: 0 finished, 1 to do, {tokens:,} tokens" in again
    assert "2 runs: 0 finished, 2 to do (1 of them trained, " in other and f" {tokens:,} tokens" in other
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["encoding=rope,alibi", "seed=0,1,2"], ["Verdicts need 5 seeds, here 3: type seed=range(0,5).", "After 1,"]),
        (["encoding=rope,alibi", "seed=range(0,5)", "experiment=demo"], ["After 1,000,000 tokens most schemes do not"]),
        (["encoding=rope,alibi", "experiment=reader", "training.learning_rate=.01,.02,.03"], ["Verdicts need 5"]),
        (
            ["encoding=rope,alibi", "experiment=reader", "data.vocab_size=512,1024", "seed=range(0,5)"],
            ["Runs on 2 texts or tokenizers are compared within each alone."],
        ),
        (["encoding=rope,alibi", "experiment=reader", "seed=range(0,5)"], []),
        (["encoding=rope", "seed=0,1,2"], []),  # nothing to compare
        (["encoding=rope,alibi", "experiment=tasks", "data=task/copy", "seed=range(0,5)"], []),
    ],
)
def test_a_sweep_without_verdicts_says_so_before_it_trains_with_what_to_type(
    words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(todo: list[Plan], *_: object) -> dict[str, Status]:
        assert [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()] == dry
        return {plan.id: Status("done") for plan in todo}

    monkeypatch.setattr(sweep, "execute", execute)
    monkeypatch.setattr(sweep, "prepare_all", lambda _: None)
    monkeypatch.setattr(sweep, "_report", lambda *_: None)
    sweep.sweep([*words, "tracking=none"], dry_run=True)
    dry = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert len(dry) == len(expected) <= 2
    assert all(line.startswith(start) for line, start in zip(dry, expected, strict=True))
    sweep.sweep([*words, "tracking=none"])


def test_a_dry_run_refuses_a_text_that_a_run_would_refuse(tmp_path: Path) -> None:
    for name in ("some/test/a.txt", "some/valid/b.txt", "more/train/a.txt", "more/test/b.txt", "more/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("words")
    for path, told in {
        "nowhere.txt": "no file matches '.*nowhere",
        "some": "has test and validation files but no train file",
        "more": "c.txt' is of no split, while 2 of 3 files have names of splits",
    }.items():
        arguments = ["experiment=demo", "encoding=rope", "data=text", f"data.path={tmp_path / path}"]
        with pytest.raises(UserError, match=told):
            sweep.sweep(arguments, dry_run=True)


# -- running -----------------------------------------------------------------------------------------------------------


def test_a_sweep_equals_single_runs_and_a_second_one_has_nothing_to_do(
    overrides: list[str], reports: list[list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["encoding=rope,alibi", *overrides]
    sweep.sweep(arguments, n_jobs=2)
    todo = plans.resolve([arguments])
    one_by_one(todo, tmp_path / "single")
    for job in todo:
        assert result(job.folder) == result(tmp_path / "single" / job.id)
    assert states.record(todo[0])["command"].startswith("posbench train encoding=rope ")
    assert [{folder.parent for folder in asked} for asked in reports] == [{tmp_path / "outputs/demo"}]

    monkeypatch.setattr(pool, "_start", None)  # a second sweep starts no process
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


@pytest.fixture
def crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed scheme that dies by a signal, with its YAML; returns the folder for --config-dir."""
    (tmp_path / "configs/encoding").mkdir(parents=True)
    (tmp_path / "configs/encoding/crash.yaml").write_text("name: crash\nsignal_number: 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=os.pathsep)
    with encoding_installed(tmp_path / "packages", "crash", CRASH):
        yield tmp_path / "configs"


@pytest.mark.full
def test_failing_runs_are_recorded_with_their_reason_and_the_others_are_done(
    overrides: list[str], crash: Path, reports: list[list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["encoding=rope", "encoding=alibi training.learning_rate=1e30"]
    sets += [f"encoding=crash encoding.signal_number={int(signal.SIGSEGV)},{int(signal.SIGKILL)}"]
    write_choice(crash, "sweep/faults", "sets:\n" + "".join(f"  - {line}\n" for line in sets))
    with pytest.raises(PosbenchError) as caught:
        sweep.sweep(["sweep=faults", *overrides], n_jobs=2, config_dir=crash)
    rope, diverging, segfault, killed = plans.resolve(plans.read_sets("faults", overrides, crash), crash)
    assert caught.value.exit_code == 1
    assert str(caught.value).startswith("3 runs of 4 not done: ")
    assert all(job.id in str(caught.value) for job in (diverging, segfault, killed))
    assert states.status(rope) == Status("done")
    assert (states.status(diverging).name, states.status(diverging).reason) == ("failed", "diverged")
    assert states.status(segfault) == Status("failed", "signal", "killed by SIGSEGV")
    assert states.status(killed).reason == "signal"  # the kernel does not say that it was for memory
    assert "killed by SIGKILL" in str(states.status(killed).message)
    assert states.record(segfault)["attempt"]["ended"]
    shown = capsys.readouterr().err
    assert shown.count("not done: ") == 3 and "all 2 runs with encoding=crash failed" in shown
    assert "training.learning_rate=1e30] failed (diverged): loss is" in shown
    assert len(reports) == 1  # of those that are done


def start_sweep(*arguments: Any) -> Any:
    """A sweep in a process of its own, forked since torch is here already; the server that forks its jobs is not."""
    multiprocessing.forkserver._forkserver._stop()
    process = multiprocessing.get_context("fork").Process(target=run_sweep, args=arguments)
    process.start()
    return process


def run_sweep(*arguments: Any) -> None:
    try:
        sweep.sweep(*arguments)
    except PosbenchError as error:
        raise SystemExit(error.exit_code) from None


def steps(folder: Path) -> int:
    """Updates logged by the runs below a folder."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("*/rows.jsonl"))


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_the_uninterrupted_one_and_leaves_no_process(
    overrides: list[str], tmp_path: Path
) -> None:
    longer = ["training.tokens=12288", "runtime.checkpoint_every_steps=10"]  # 192 updates
    arguments = ["encoding=rope", "seed=0,1", *(o for o in overrides if "tokens=" not in o or "warm" in o), *longer]
    study = tmp_path / "outputs/demo"
    rng = random.Random(time.time_ns())
    moments = sorted(rng.sample(range(1, 340), 2))
    for wanted in [*moments, None]:
        process = start_sweep(arguments, 1)
        if wanted is None:
            time.sleep(rng.uniform(0.0, 2.0))  # also before anything is trained
        else:
            until(lambda wanted=wanted: steps(study) >= wanted)
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
    arguments = ["encoding=rope,alibi", *(o for o in overrides if "training.tokens" not in o)]  # 15,625 updates
    process = start_sweep(arguments, 1)
    until(lambda: steps(tmp_path / "outputs/demo") > 5)
    os.kill(process.pid, signal.SIGINT)
    process.join()
    first, second = plans.resolve([arguments])
    assert process.exitcode == 130
    assert (states.status(first).name, states.status(first).reason) == ("stopped", "signal")
    assert not processes_of(tmp_path)
    saved = max((first.folder / "checkpoint").glob("step-*"))
    assert int(saved.name.removeprefix("step-")) == states.progress(first)[0] > 5
    assert not second.folder.exists()


@pytest.mark.full
def test_where_nothing_can_be_forked_each_job_is_a_python_of_its_own(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_PROCESSES", multiprocessing.get_context("spawn"))
    sweep.sweep(["encoding=rope", "seed=0", *overrides], n_jobs=1)
    (job,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    assert states.status(job) == Status("done")


@pytest.mark.full
def test_a_job_has_its_variables_its_output_and_its_exit_code(several: list[Plan], tmp_path: Path) -> None:
    data = dataclasses.replace(several[0].config.data, path=str(tmp_path / "missing.txt"))
    job = dataclasses.replace(several[0], config=dataclasses.replace(several[0].config, data=data))
    refused = pool._start(job, {"POSBENCH_DEBUG": "1"})
    refused.join()
    assert refused.exitcode == 2
    told = job.output.read_text()
    assert "Traceback" in told  # by its variable
    assert f"error: data.path: no file matches '{tmp_path / 'missing.txt'}'" in told
    killed = pool._start(job, {})
    killed.kill()  # before it has begun, or after
    killed.join()
    assert killed.exitcode in (-signal.SIGKILL, 2)


OWN = "import fcntl, sys, time; fcntl.flock(file := open(sys.argv[1], 'w'), fcntl.LOCK_EX); time.sleep(100)"


@pytest.mark.full
def test_a_run_that_another_process_owns_is_not_done_by_this_sweep(overrides: list[str]) -> None:
    (job,) = plans.resolve([["encoding=rope", *overrides]])
    job.folder.parent.mkdir(parents=True)
    owner = subprocess.Popen([sys.executable, "-c", OWN, job.folder.with_name(f".{job.id}.lock")])
    until(lambda: in_use(job.folder))
    assert pool.run([job], [{}], lambda status: None) == {job.id: states.IN_USE}
    owner.kill()
    owner.wait()
    assert pool.run([job], [{}], lambda status: None) == {job.id: Status("done")}


def test_a_process_that_died_before_it_could_write_is_recorded_by_its_last_words(several: list[Plan]) -> None:
    job = several[0]
    job.output.parent.mkdir(parents=True)
    job.output.write_text("12:00:00 preparing\nerror: there is no text.txt\n")
    expected = Status("failed", "error", "there is no text.txt")
    assert pool.outcome(job, 2, before={}) == states.status(job) == expected
    job.output.write_text("")
    assert pool.outcome(job, 2, states.record(job)).message == "ended with exit code 2"
    assert pool.outcome(job, 75, states.record(job)) == states.IN_USE
    stopped = pool.outcome(job, -signal.SIGTERM, states.record(job), [signal.SIGTERM])
    assert (stopped.name, states.status(job).name) == ("stopped", "stopped")


def test_a_finished_run_stays_done_if_a_later_attempt_fails_and_the_sweep_says_so(several: list[Plan]) -> None:
    job, where = several[0], Where("cpu", "fp32", 1)
    with Run.open(job.folder, job.config, []) as run:
        run.begin_attempt(where)
        run.finish("done")
    before = states.record(job)
    with Run.open(job.folder, job.config, []) as run:
        run.begin_attempt(where)
        run.ended_by(RunFailed("no space left", "disk"))
    assert states.record(job)["status"] == "done"
    assert pool.outcome(job, 1, before) == states.status(job) == Status("failed", "disk", "no space left")
    with Run.open(job.folder, job.config, []) as run:
        run.begin_attempt(where)
    assert (states.record(job)["status"], states.status(job).name) == ("done", "running")
    assert pool.outcome(job, -signal.SIGKILL, before).name == states.status(job).name == "failed"
    killed = states.record(job)
    with Run.open(job.folder, job.config, []) as run:
        run.ended_by(RunFailed("no such text", "error"))  # before this attempt began
    assert states.record(job) == killed
    assert states.record(job)["status"] == "done"
    with Run.open(job.folder, job.config, []) as run:
        run.begin_attempt(where)
        run.finish("done")
    assert pool.outcome(job, 0, before) == states.status(job) == Status("done")


def with_runtime(todo: list[Plan], **runtime: Any) -> list[Plan]:
    changed = dataclasses.replace(todo[0].config.runtime, **runtime)
    return [dataclasses.replace(c, config=dataclasses.replace(c.config, runtime=changed)) for c in todo]


@pytest.mark.parametrize(
    ("cores", "n_jobs", "configured", "asked_for", "processes", "threads"),
    [
        (8, None, None, "", 4, 2),
        (2, None, None, "", 2, 1),
        (2, 1, None, "", 1, 2),
        (2, 1, None, "1", 1, 1),
        (2, 1, None, "4", 1, 2),
        (2, 4, None, "", 4, 1),
        (8, None, 4, "1", 2, 4),
    ],
)
def test_threads_are_divided_among_the_processes(
    several: list[Plan],
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    n_jobs: int | None,
    configured: int | None,
    asked_for: str,
    processes: int,
    threads: int,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked_for)
    asked: list[tuple[list[Plan], list[dict[str, str]]]] = []
    monkeypatch.setattr(machine, "cores", lambda: cores)
    monkeypatch.setattr(pool, "run", lambda todo, slots, *_: asked.append((todo, slots)) or {})
    sweep.execute(with_runtime(several, threads=configured), n_jobs)
    ((jobs_run, slots),) = asked
    assert len(slots) == processes
    assert {job.config.runtime.threads for job in jobs_run} == {threads}


def test_each_gpu_gets_a_process_of_its_own(several: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "resolve", lambda name: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    todo = with_runtime(several, device="auto")
    assert sweep._slots(todo, None) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert len(sweep._slots(todo, 4)) == 4


def test_a_run_of_several_processes_has_a_gpu_or_a_core_for_each(
    several: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    todo = with_runtime(several, processes=2, threads=None)
    assert len(sweep._slots(todo, None)) == 3
    asked: list[list[Plan]] = []
    monkeypatch.setattr(pool, "run", lambda todo, slots, *_: asked.append(todo) or {})
    sweep.execute(todo, 1)
    assert {job.config.runtime.threads for job in asked[0]} == {3}
    monkeypatch.setattr(machine, "resolve", lambda name: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,6,7,8")
    groups = sweep._slots(with_runtime(several, processes=2, device="auto"), None)
    assert groups == [{"CUDA_VISIBLE_DEVICES": "2,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]


def deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def test_a_second_signal_ends_at_once_what_the_first_asked_to_save(
    several: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, codes = multiprocessing.get_context("fork").Process(target=deaf), []
    monkeypatch.setattr(pool, "_start", lambda plan, slot: process.start() or process)
    monkeypatch.setattr(pool, "outcome", lambda plan, code, *_: codes.append(code) or Status("stopped"))
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        pool.run(several[:1], [{}], lambda status: signal.raise_signal(signal.SIGTERM))
    assert codes == [-signal.SIGKILL]


# -- tuning ------------------------------------------------------------------------------------------------------------


def in_this_process(todo: list[Plan]) -> dict[str, Status]:
    for job in todo:
        try:
            train(job.config, job.folder, ["posbench", "train"])
        except PosbenchError:
            continue
    return {job.id: states.status(job) for job in todo}


@pytest.mark.full
def test_tuning_chooses_the_best_rate_of_each_scheme_on_validation_text_only(
    overrides: list[str], tmp_path: Path
) -> None:
    asked = ["seed=0,1", "training.learning_rate=0.003", "evaluation.at_tokens=[512]", *overrides]
    todo = plans.resolve([["encoding=rope,alibi", *asked]])
    assert {job.config.evaluation.at_tokens for job in todo} == {(512,)}
    assert {trial.config.evaluation.at_tokens for trial in tuning.trials(todo, [1.0])} == {()}
    chosen = tuning.tuned(todo, [0.01, 1.0, 1e32], in_this_process)
    assert [job.config.training.learning_rate for job in chosen] == [0.003] * 4
    assert [(job.config.encoding.name, job.config.seed) for job in chosen] == [
        (job.config.encoding.name, job.config.seed) for job in todo
    ]
    assert all(job.overrides[-1] == "training.learning_rate=0.003" for job in chosen)
    assert all(sum(o.startswith("training.learning_rate=") for o in job.overrides) == 1 for job in chosen)

    study = tmp_path / "outputs/demo"
    low, middle, high = tuning.trials(todo[:1], [0.01, 1.0, 1e32])
    assert states.loss_at_train_length(middle) < states.loss_at_train_length(low)
    assert states.status(high).reason == "diverged"
    for trial in (low, middle):
        evaluated = evaluation_rows(study / "tuning" / trial.id)
        assert {(row.split, row.length_ratio) for row in evaluated} == {("validation", 1.0)}
        assert all(row.n_blocks > 200 for row in evaluated)  # all validation text, though evaluation.blocks is 8
    assert not list(study.glob("rope-*"))  # the sweep's own runs are apart


def test_a_scheme_whose_rates_all_fail_keeps_its_own(overrides: list[str]) -> None:
    todo = plans.resolve([["encoding=rope", "training.learning_rate=0.003", *overrides]])
    chosen = tuning.tuned(todo, [1.0, 2.0], all_fail)
    assert [job.config.training.learning_rate for job in chosen] == [0.003]


def test_a_rate_at_the_edge_of_the_grid_is_warned_about(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    best = {"rope": 0.002, "alibi": 0.004}
    monkeypatch.setattr(
        states,
        "loss_at_train_length",
        lambda plan: abs(plan.config.training.learning_rate - best[plan.config.encoding.name]),
    )
    todo = plans.resolve([["encoding=rope,alibi", "training.learning_rate=0.002", *overrides]])
    chosen = tuning.tuned(todo, [0.5, 1.0, 2.0], lambda trials: {job.id: Status("done") for job in trials})
    assert [job.config.training.learning_rate for job in chosen] == [0.002, 0.004]
    (warned,) = [record.getMessage() for record in caplog.records if "edge" in record.getMessage()]
    assert warned.startswith("alibi: learning rate 0.004 ") and "a wider tune_grid" in warned


def test_rates_are_tried_on_1024_windows_of_validation_text(overrides: list[str]) -> None:
    (trial,) = tuning.trials(plans.resolve([["encoding=rope", *overrides]]), [1.0])
    asked, ids = trial.config.evaluation, np.zeros(10**6, np.uint16)
    text = TokenSplit(ids, np.array([0, len(ids)]))
    (row,) = measurements(asked, text, trial.config.training.train_length)
    assert row.windows is not None and len(row.windows.starts) == 1024 and asked.split == "validation"


def all_fail(todo: list[Plan]) -> dict[str, Status]:
    return {job.id: Status("failed", "error") for job in todo}


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps train one run after the other in this process."""
    monkeypatch.setattr(sweep, "execute", lambda todo, *others: in_this_process(todo))


@pytest.mark.full
@pytest.mark.usefixtures("no_processes")
def test_a_run_at_a_tuned_rate_is_that_of_the_single_command(overrides: list[str], tmp_path: Path) -> None:
    sweep.sweep(["encoding=rope,alibi", "seed=1", "tune=true", "tune_grid=0.01,1", *overrides])
    single = compose.single(["encoding=rope", "seed=1", "training.learning_rate=0.006", *overrides])
    assert single.id in {path.name for path in (tmp_path / "outputs/demo").glob("*-s*")}


# -- what is shown -----------------------------------------------------------------------------------------------------


@pytest.fixture
def several(tiny_config: Config) -> list[Plan]:
    configs = [dataclasses.replace(tiny_config, seed=seed) for seed in range(4)]
    schemes = ("rope", "rope", "alibi", "alibi")
    typed = [["posbench", "train", f"encoding={name}", "study=test"] for name in schemes]
    return [plans.plan(c, c.folder, command) for c, command in zip(configs, typed, strict=True)]


def test_a_value_that_always_fails_is_named_only_where_others_did_not(
    several: list[Plan], caplog: pytest.LogCaptureFixture
) -> None:
    done, failed = Status("done"), Status("failed", "error", "x")
    for outcomes, named in (
        ((done, *[failed] * 3), ["encoding=alibi"]),
        ([failed] * 4, ["rope", "alibi"]),
        ([done] * 4, []),
    ):
        caplog.clear()
        states.show_failures(several, dict(zip((plan.id for plan in several), outcomes, strict=True)))
        assert [value in line for line, value in zip(caplog.messages[-len(named) :], named, strict=False)] == [
            True
        ] * len(named)
        assert sum(" runs with " in line for line in caplog.messages) == len(named)
