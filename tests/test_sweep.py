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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import support
import torch
from fake_study import Truth, configured, write_run
from support import each_once, snapshot, until, write_text

from posbench import machine
from posbench.config.shipped import configs_dir
from posbench.errors import PosbenchError, RunFailed, UserError
from posbench.launch import plans, pool, slots, sweep, tuning
from posbench.launch.plans import Plan
from posbench.launch.pool import DONE, IN_USE
from posbench.run.folder import Run
from posbench.run.rows import evaluation_rows, training_rows
from posbench.terminal import exits
from posbench.training.train import train
from posbench.typed import Typed

COMMAND = ["posbench", "train"]


def result(folder: Path) -> tuple[bytes, list[dict[str, Any]], list[float]]:
    """Return the weights, evaluation rows and losses of a run."""
    rows = []
    for row in evaluation_rows(folder):
        line = row.to_json()
        # how long it took, not what came out
        del line["seconds"]
        del line["peak_memory_bytes"]
        rows.append(line)
    logged = training_rows(folder)
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    newest = max((folder / "checkpoint").glob("step-*"))
    weights = (newest / "model.safetensors").read_bytes()
    return weights, rows, losses


def assert_as_single_runs(todo: list[Plan], outputs: Path) -> None:
    """Assert that each job has the results of a single run below another folder, in
    this process.
    """
    for job in todo:
        single = outputs / job.id
        train(job.config, single, COMMAND)
        assert result(job.folder) == result(single)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the folder of tokens, which are prepared once for all tests here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Enter a folder with only a text."""
    monkeypatch.chdir(tmp_path)
    write_text()


@pytest.fixture
def overrides(cache, tmp_path):
    return [
        *support.TINY,
        "data.path=text.txt",
        "training.tokens=512",
        "training.precision=fp32",
        "log_every_steps=1",
        f"runtime.cache={cache}",
        f"runtime.outputs={tmp_path / 'outputs'}",
    ]


@pytest.fixture
def tiny_config(tiny_config, cache):
    data = {"path": "text.txt"}
    return support.changed(tiny_config, data=data, runtime={"cache": str(cache)})


@pytest.fixture
def several(tiny_config):
    todo = []
    for seed, name in enumerate(["rope", "rope", "alibi", "alibi"]):
        config = support.changed(tiny_config, seed=seed)
        words = [f"encoding={name}", "study=test"]
        todo.append(plans.from_config(config, words))
    return todo


def processes_of(folder: Path) -> list[str]:
    """Return the living processes whose output goes into the folder."""
    processes = []
    for path in glob.glob("/proc/[0-9]*/fd/1"):
        with contextlib.suppress(OSError):  # another user's, or it has just ended
            if os.readlink(path).startswith(str(folder)):
                processes.append(path)
    return processes


def write_choice(folder: Path, choice: str, text: str) -> None:
    path = folder / f"{choice}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_sweep_is_every_combination(overrides):
    todo = plans.resolve([["encoding=rope,alibi", "seed=0,1", *overrides]])

    names = [(plan.config.encoding.name, plan.config.seed) for plan in todo]
    assert names == [("rope", 0), ("rope", 1), ("alibi", 0), ("alibi", 1)]
    first, second, *_ = todo
    assert second.command[2:4] == ("encoding=rope", "seed=1")
    outputs = Path(first.config.runtime.outputs)
    assert first.folder == outputs / "text" / first.id


def test_a_run_that_two_sets_name_is_one(overrides):
    twice = ["encoding=rope", "seed=0,1", *overrides]
    once = ["encoding=rope", "seed=1", *overrides]
    todo = plans.resolve([twice, once])
    assert len(todo) == 2


def test_a_run_is_in_one_folder(overrides):
    same = r"outputs/a/rope-.* and .*outputs/b/rope-.* are the same run"
    with pytest.raises(UserError, match=same):
        plans.resolve([["encoding=rope", "study=a,b", *overrides]])


FILES = sorted(path.stem for path in configs_dir().glob("sweep/*.yaml"))
FILES.remove("extend")  # composed by test_start, which has runs
FILES.remove("extend_patterns")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_every_sweep_file_composes(name):
    sets = plans.read_sets(name, ["tracking=none", "seed=0"])
    todo = plans.resolve(sets)
    assert len(todo) >= 3
    assert {plan.config.study for plan in todo} == {name}


def test_a_sweep_file_on_an_own_text_has_a_study_of_that_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("novels").mkdir()
    write_text("novels")
    sets = plans.read_sets("six", ["data.path=novels/", "seed=0"])
    todo = plans.resolve(sets)
    assert {plan.config.study for plan in todo} == {"novels"}


@pytest.mark.slow
def test_the_catalogue_has_every_encoding():
    sets = plans.read_sets("catalogue", ["tracking=none", "seed=0"])
    found = {plan.config.encoding.name for plan in plans.resolve(sets)}
    expected = {path.stem for path in configs_dir().glob("encoding/*.yaml")}
    assert found >= expected


MINE = """
sets: ['encoding=rope encoding.base=64', 'encoding=none']
shared: ['evaluation.protocols=[nonoverlap]', seed=3]
"""


def test_what_is_typed_takes_the_place_of_a_files_own_value(tmp_path):
    write_choice(tmp_path, "sweep/mine", MINE)

    # a word and its key are one
    sets = plans.read_sets("mine", ["protocol=fixed_target,nonoverlap"], tmp_path)

    shared = ["protocol=fixed_target,nonoverlap", "seed=3"]
    assert sets == [
        [*shared, "encoding=rope", "encoding.base=64"],
        [*shared, "encoding=none"],
    ]
    for plan in plans.resolve(sets, tmp_path):
        assert plan.config.evaluation.protocols == ("fixed_target", "nonoverlap")


# What is typed beside a line of a file, and what a run of both gets.
REPLACED = [
    ("ratio=1,2 seed=0", "length=64", "length=64 seed=0"),
    ("length=64 seed=0", "ratio=1,2", "ratio=1,2 seed=0"),
    ("encoding=rope start=A", "extension=yarn", "extension=yarn start=A"),
    ("extension=pi seed=0", "start=A encoding=none", "encoding=none seed=0 start=A"),
    ("encoding=rope seed=0", "extension=pi", "encoding=rope seed=0 extension=pi"),
]


@pytest.mark.parametrize(("line", "typed", "words"), REPLACED)
def test_what_is_typed_takes_the_place_of_another_word_for_the_same(
    line, typed, words, tmp_path
):
    write_choice(tmp_path, "sweep/mine", f"sets: ['{line}']")
    assert plans.read_sets("mine", typed.split(), tmp_path) == [words.split()]


def test_two_typed_words_for_the_same_are_refused_beside_a_file(tmp_path):
    write_choice(tmp_path, "sweep/mine", MINE)
    with pytest.raises(UserError, match="length=64 and ratio=2 both say which lengths"):
        plans.read_sets("mine", ["length=64", "ratio=2"], tmp_path)


def test_a_plan_of_an_own_file_names_its_folder_in_the_command(tmp_path):
    write_choice(tmp_path, "sweep/mine", MINE)
    sets = plans.read_sets("mine", [], tmp_path)
    for plan in plans.resolve(sets, tmp_path):
        assert plan.command[-1] == f"--config-dir={tmp_path}"


# The text of a file of a sweep, and what the line says.
WRONG_FILES = [
    ("- encoding=rope", "expected keys with values"),
    ("{sets: [encoding=rope], shard: [seed=1]}", "mine.yaml: unknown key 'shard': did"),
    (
        "sets: [{encoding: rope}]",
        "mine.yaml: sets is {'encoding': 'rope'}: expected text",
    ),
    ("shared: [seed=1]", "mine.yaml: missing key 'sets'"),
    ("sets: []", "mine.yaml: sets is empty"),
    ('sets: ["encoding=\'rope"]', "mine.yaml: cannot read encoding='rope: No closing"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_FILES)
def test_a_file_that_is_no_sweep_is_one_line(text, message, tmp_path):
    write_choice(tmp_path, "sweep/mine", text)
    with pytest.raises(UserError) as caught:
        plans.read_sets("mine", [], tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_sweep_shows_the_loss_after_training_and_not_one_on_the_way(tmp_path):
    config = configured("rope", 0)
    # as its rows say
    tokens = 12 * config.training.tokens_per_step
    config = support.changed(config, training={"tokens": tokens})
    on_the_way = (Truth(5.0, 0.1), Truth(4.0, 0.1))
    truth = Truth(3.0, 0.1, earlier=on_the_way)
    folder = write_run(tmp_path, config, truth)
    plan = Plan(config, folder, ())
    nll = pool.loss_at_train_length(plan)
    assert nll is not None
    assert 2.5 < nll < 3.5


@pytest.fixture
def dry_run(overrides, tmp_path, capsys):
    """Return a function that makes a dry run, and returns its lines but the last."""

    def shown(*words: str) -> list[str]:
        before = snapshot(tmp_path)
        asked = each_once([*overrides, *words])
        sweep.sweep(asked, dry_run=True)
        *lines, hours, last = capsys.readouterr().out.splitlines()
        assert last == "Nothing was run or written."
        shown.hours = hours
        assert snapshot(tmp_path) == before
        return lines

    return shown


@pytest.mark.slow
def test_a_dry_run_lists_the_commands_that_are_missing(overrides, dry_run):
    (done,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    train(done.config, done.folder, COMMAND)

    *commands, counts = dry_run("encoding=rope,alibi", "seed=0,1,2")

    assert len(commands) == 5
    for line in commands:
        assert line.startswith("posbench train ")
    assert "encoding=alibi" in commands[-1]
    assert "seed=2" in commands[-1]
    assert counts == "6 runs: 1 finished, 5 to do, 2,560 tokens to train on."
    assert dry_run.hours.startswith("About 1 min of training")


@pytest.mark.slow
def test_a_dry_run_counts_the_trials_of_learning_rates(dry_run):
    decided_by, counts = dry_run("encoding=rope,alibi", "seed=0,1,2", "tune=true")
    assert decided_by.startswith("The trials decide the learning rates")
    assert counts == "16 runs: 0 finished, 16 to do, 8,192 tokens to train on."
    assert dry_run.hours.startswith("How long is not known")


@pytest.mark.slow
def test_a_tuned_sweep_that_is_done_has_nothing_to_do(overrides, dry_run):
    words = ["encoding=rope", "tune=true", "tune_grid=[1,2]"]
    sweep.sweep([*overrides, *words], n_jobs=2)
    assert dry_run(*words) == []
    counts = dry_run.hours  # where nothing is to do there are none
    assert counts.startswith("3 runs: 3 finished, 0 to do")


@pytest.mark.slow
def test_a_run_that_is_only_evaluated_further_costs_no_tokens(overrides, dry_run):
    (done,) = plans.resolve([["encoding=rope", "seed=0", *overrides]])
    train(done.config, done.folder, COMMAND)
    words = ("encoding=rope,alibi", "evaluation.ratios=[1,3]")

    assert "2 runs: 0 finished, 2 to do, 512 tokens" in dry_run(*words)[-1]
    # if it had been stopped after 6 of 8 updates
    checkpoint = done.folder / "checkpoint"
    (checkpoint / "step-00000008").rename(checkpoint / "step-00000006")
    assert "2 runs: 0 finished, 2 to do, 640 tokens" in dry_run(*words)[-1]
    # without weights it trains again
    checkpoint.rename("weights")
    assert "2 runs: 0 finished, 2 to do, 1,024 tokens" in dry_run(*words)[-1]


def test_a_sweep_equals_single_runs(overrides, tmp_path, usual_mixture):
    arguments = ["encoding=rope,alibi", *overrides]
    reports = list[list[Path]]()

    sweep.sweep(arguments, n_jobs=2, report=reports.append)

    todo = plans.resolve([arguments])
    assert_as_single_runs(todo, tmp_path / "single")
    record = pool.record_of(todo[0])
    assert record.command.startswith("posbench train encoding=rope ")
    folders = [plan.folder for plan in todo]
    assert reports == [folders]


def trained(arguments: list[str]) -> list[Plan]:
    """Train the runs of a sweep in this process; return their plans."""
    todo = plans.resolve([arguments])
    for plan in todo:
        train(plan.config, plan.folder, COMMAND)
    return todo


def test_a_second_sweep_only_reports(overrides):
    arguments = ["encoding=rope,alibi", *overrides]
    reports = list[list[Path]]()
    todo = trained(arguments)

    # this machine need not have what trained them
    sweep.sweep(each_once([*arguments, "device=cuda"]), report=reports.append)

    assert len(reports) == 1
    for plan in todo:
        assert not plan.output.exists()  # of a process


@pytest.mark.slow
def test_a_sweep_of_further_rows_leaves_the_former_one_finished(overrides):
    arguments = ["encoding=rope,alibi", *overrides]
    todo = trained(arguments)
    sweep.sweep([*arguments, "evaluation.blocks=9"], n_jobs=2)
    for plan in todo:
        plan.output.unlink()

    sweep.sweep(arguments)
    sweep.sweep([*arguments, "evaluation.blocks=9"])

    for plan in todo:
        assert not plan.output.exists()  # of a process


def test_what_is_done_is_reported_though_runs_are_missing(overrides, monkeypatch):
    arguments = ["encoding=rope,alibi", *overrides]
    reports = list[list[Path]]()
    todo = trained(arguments)
    waiting = {plan.id: pool.WAITING for plan in todo}
    monkeypatch.setattr(slots, "execute", lambda todo, n_jobs: waiting)

    with pytest.raises(PosbenchError, match="2 of 2 runs not done"):
        sweep.sweep(arguments, report=reports.append)

    assert len(reports) == 1


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
FAULTS = """
sets:
- encoding=rope
- encoding=alibi training.learning_rate=1e30
"""


@pytest.mark.slow
def test_failing_runs_are_recorded_with_their_reason_and_the_others_are_done(
    overrides, tmp_path, capsys
):
    reports = list[list[Path]]()
    Path("crash.py").write_text(CRASH)
    write_choice(tmp_path, "sweep/faults", FAULTS)

    crash = [Typed("encoding=./crash.py:Crash"), "encoding.number=11,9", *overrides]

    with pytest.raises(PosbenchError, match="1 of 2 runs not done: "):
        sweep.sweep(
            ["sweep=faults", *overrides],
            n_jobs=2,
            config_dir=tmp_path,
            report=reports.append,
        )
    with pytest.raises(PosbenchError, match="2 of 2 runs not done: ") as caught:
        sweep.sweep(crash, n_jobs=2, report=reports.append)

    sets = plans.read_sets("faults", overrides, tmp_path)
    todo = [*plans.resolve(sets, tmp_path), *plans.resolve([crash])]
    records = [pool.record_of(plan) for plan in todo]
    reasons = [record.reason for record in records]
    assert reasons == [None, "diverged", "signal", "signal"]
    killed = "killed by SIGKILL, perhaps since memory ran out"
    assert records[-1].message == killed
    message = str(caught.value)
    for plan in todo[2:]:
        assert plan.id in message
    assert caught.value.exit_code == 1
    lines = capsys.readouterr().err
    assert lines.count("not done: ") == 3
    assert "training.learning_rate=1e30] failed (diverged): loss is" in lines
    assert len(reports) == 1  # of those that are done


def start_sweep(*arguments: Any) -> Any:
    """Start a sweep in a fork, since torch is loaded here already, and with a new
    server to fork its jobs.
    """
    multiprocessing.forkserver._forkserver._stop()

    def work() -> None:
        code = exits.run(lambda: sweep.sweep(*arguments))
        sys.exit(code)

    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=work)
    process.start()
    return process


def steps(folder: Path) -> int:
    """Return the number of updates logged by the runs below a folder."""
    n_steps = 0
    for path in folder.glob("*/rows.jsonl"):
        n_steps += path.read_bytes().count(b"\n")
    return n_steps


@pytest.mark.slow
def test_a_sweep_killed_three_times_equals_an_uninterrupted_one(
    overrides, tmp_path, usual_mixture
):
    # 192 updates
    longer = ["training.tokens=12288", "runtime.checkpoint_every_steps=10"]
    arguments = ["encoding=rope", "seed=0,1", *each_once([*overrides, *longer])]
    rng = random.Random(time.time_ns())
    first, second = sorted(rng.sample(range(1, 340), 2))
    outputs = tmp_path / "outputs/text"

    # the last: also before anything is trained
    for updates in (first, second, 0):
        process = start_sweep(arguments, 1)
        until(lambda updates=updates: steps(outputs) >= updates)
        time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        process.join()
        until(lambda: not processes_of(tmp_path))

    sweep.sweep(arguments, n_jobs=1)
    todo = plans.resolve([arguments])
    assert_as_single_runs(todo, tmp_path / "single")


@pytest.mark.slow
def test_ctrl_c_lets_what_runs_save_itself(overrides, tmp_path):
    # 15,625 updates
    long = each_once([*overrides, "training.tokens=1000000"])
    arguments = ["encoding=rope,alibi", *long]
    process = start_sweep(arguments, 1)
    until(lambda: steps(tmp_path / "outputs/text") > 5)

    os.kill(process.pid, signal.SIGINT)
    process.join()

    assert process.exitcode == 130
    assert not processes_of(tmp_path)
    first, second = plans.resolve([arguments])
    assert pool.record_of(first).status == "stopped"
    checkpoints = first.folder / "checkpoint"
    saved = max(checkpoints.glob("step-*"))
    last_step = training_rows(first.folder)[-1]["step"]
    assert last_step > 5
    assert saved.name == f"step-{last_step:08d}"
    assert not second.folder.exists()


@pytest.fixture
def job(several):
    job, *_ = several
    job.output.parent.mkdir(parents=True)
    job.output.touch()
    return job


def attempt(job: Plan, end: str | PosbenchError | None = None) -> None:
    """Make an attempt at a run that ends so; None: it seems to be killed."""
    with Run.open(job.folder, job.config, []) as run:
        run.begin_attempt()
        if isinstance(end, str):
            run.finish(end)
        elif end:
            run.ended_by(end)


def test_a_failed_run_is_shown_with_the_words_that_no_other_has(several):
    failed = pool.Status("failed", "error", "no room")
    _, _, plan, _ = several
    alone = pool.status_line(plan, failed, [plan])
    among_others = pool.status_line(plan, failed, several)
    assert alone == f"{plan.id} failed (error): no room"
    assert among_others == f"{plan.id} [encoding=alibi] failed (error): no room"


def test_what_became_of_a_run_without_record_are_its_last_words(job):
    job.output.write_text("12:00:00 preparing\nerror: there is no text.txt\n\nmore\n")
    outcome = pool.outcome(job, 2, None)
    assert outcome == ("failed", "error", "there is no text.txt")
    assert pool.record_of(job).message == "there is no text.txt"


def test_a_run_without_last_words_has_an_exit_code(job):
    outcome = pool.outcome(job, 2, None)
    assert outcome.message == "ended with exit code 2"


def test_a_run_that_ended_without_its_work_is_not_done(job):
    job.output.write_text("12:00:00 preparing\n")
    outcome = pool.outcome(job, 0, None)
    assert outcome == ("failed", "error", "it said last: 12:00:00 preparing")
    assert pool.record_of(job).status == "failed"


def test_a_run_that_another_process_has_is_in_use(job):
    assert pool.outcome(job, 75, None) == IN_USE


def test_a_run_that_the_sweep_stopped_is_stopped(job):
    outcome = pool.outcome(job, -signal.SIGTERM, None, [signal.SIGTERM])
    assert outcome.name == "stopped"
    assert pool.record_of(job).status == "stopped"


def test_what_became_of_a_run_is_what_its_record_says(job):
    attempt(job, "done")
    before = pool.record_of(job)
    attempt(job, RunFailed("no space left", "disk"))
    outcome = pool.outcome(job, 1, before)
    assert outcome == ("failed", "disk", "no space left")


def test_a_run_that_was_killed_stays_done_in_its_record(job):
    attempt(job, "done")
    before = pool.record_of(job)
    attempt(job)
    killed = pool.outcome(job, -signal.SIGKILL, before)
    assert killed.name == "failed"
    attempt(job, "done")
    again = pool.outcome(job, 0, before)
    assert again == DONE
    assert pool.record_of(job).status == "done"


@pytest.fixture
def slots_of(several, monkeypatch):
    """Return a function that gives the environments of four runs on a machine."""

    def found(device, cores, n_jobs, processes, threads):
        on = torch.device(device)
        monkeypatch.setattr(machine, "cores", lambda: cores)
        monkeypatch.setattr(machine, "resolve", lambda name: on)
        monkeypatch.setattr(machine, "device_memory", lambda of: 80 * 2**30)
        runtime = {"device": "auto", "threads": threads, "processes": processes}
        todo = []
        for plan in several:
            config = support.changed(plan.config, runtime=runtime)
            todo.append(dataclasses.replace(plan, config=config))
        return slots.slots_for(todo, n_jobs)

    return found


# Cores, --n-jobs, processes and threads of each run, OMP_NUM_THREADS; threads of each
# process, and how many runs are trained at once.
ON_CPUS = [
    (8, None, None, None, "", "2", 4),
    (2, 4, None, None, "", "1", 4),
    (8, None, None, 4, "1", "4", 2),
    (8, 2, None, None, "1", "1", 2),
    (6, None, 2, None, "", "1", 3),
    (8, 16, None, None, "", "2", 4),
]


@pytest.mark.parametrize(
    ("cores", "n_jobs", "processes", "threads", "exported", "threads_each", "at_once"),
    ON_CPUS,
)
def test_threads_are_divided_among_the_processes(
    slots_of,
    monkeypatch,
    cores,
    n_jobs,
    processes,
    threads,
    exported,
    threads_each,
    at_once,
):
    monkeypatch.setenv("OMP_NUM_THREADS", exported)

    found = slots_of("cpu", cores, n_jobs, processes, threads)

    assert len(found) == at_once
    for slot in found:
        assert slot["OMP_NUM_THREADS"] == threads_each
        assert "CUDA_VISIBLE_DEVICES" not in slot


# Cores, CUDA_VISIBLE_DEVICES, --n-jobs, processes and threads of each run; threads of
# each process, and the GPUs of each run that is trained at once.
ON_GPUS = [
    (6, "2,5", 3, None, None, "2", ["2", "5", "2"]),
    (6, "2,5,6,7,8", None, 2, None, "1", ["2,5", "6,7"]),
    (8, "2", None, None, None, "2", ["2", "2", "2", "2"]),
    (8, "2,5", None, None, None, "2", ["2", "5", "2", "5"]),
    (3, "2", None, None, None, "1", ["2", "2", "2"]),
    (8, "2", None, None, 3, "3", ["2", "2"]),
    (1, "2", None, None, None, "1", ["2"]),
    (8, "2", 1, None, None, "8", ["2"]),
]


@pytest.mark.parametrize(
    ("cores", "visible", "n_jobs", "processes", "threads", "threads_each", "gpus"),
    ON_GPUS,
)
def test_gpus_and_threads_are_divided_among_the_processes(
    slots_of,
    monkeypatch,
    cores,
    visible,
    n_jobs,
    processes,
    threads,
    threads_each,
    gpus,
):
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    found = slots_of("cuda", cores, n_jobs, processes, threads)

    assert {slot["OMP_NUM_THREADS"] for slot in found} == {threads_each}
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in found] == gpus
    most = max(gpus.count(gpu) for gpu in gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 800))
    for slot in found:  # the runs on a GPU do not plan with the same memory
        for name, value in slot.items():
            monkeypatch.setenv(name, value)
        assert machine.free_memory(torch.device("cuda")) == 600 // most


# GiB of the GPU, layers, channels, processes, and the runs that share it.
SHARES = [
    (80, 2, 32, 1, 4),
    (80, 8, 512, 1, 4),
    (80, 12, 768, 1, 1),
    (80, 2, 32, 2, 1),
    (16, 2, 32, 1, 3),
    (8, 2, 32, 1, 1),
    (2, 2, 32, 1, 1),
]


@pytest.mark.parametrize(("gib", "layers", "channels", "processes", "runs"), SHARES)
def test_small_models_share_a_gpu_as_far_as_its_memory_goes(
    tiny_config, gib, layers, channels, processes, runs
):
    model = {"n_layers": layers, "d_model": channels}
    runtime = {"processes": processes}
    config = support.changed(tiny_config, model=model, runtime=runtime)

    assert slots.runs_on_a_gpu(config, gib * 2**30) == runs


def test_a_model_is_small_by_the_weights_that_it_has(tiny_config):
    model = {"n_layers": 8, "d_model": 512}
    of_bytes = support.changed(tiny_config, model=model, data={"vocab_size": 60_000})
    wide = support.changed(tiny_config, model=model | {"d_ff": 16_384})
    assert slots.runs_on_a_gpu(of_bytes, 80 * 2**30) == 4
    assert slots.runs_on_a_gpu(wide, 80 * 2**30) == 1


def test_long_sequences_leave_room_for_fewer_runs_on_a_gpu(tiny_config):
    training = {"train_length": 4096, "batch_size": 32, "tokens": 2**17}
    config = support.changed(tiny_config, training=training)
    assert slots.runs_on_a_gpu(config, 80 * 2**30) == 3


@pytest.fixture
def rates(overrides, monkeypatch):
    """Return a function that chooses rates by the losses of trials."""
    typed = ["encoding=rope,alibi", "seed=1", "training.learning_rate=0.002"]
    todo = plans.resolve([[*typed, *overrides]])

    def best_rates(loss: Any, grid: Sequence[float] = (0.5, 1.0, 2.0)) -> list[float]:
        monkeypatch.setattr(pool, "loss_at_train_length", loss)
        chosen = tuning.at_best_rates(todo, list(grid))
        return [plan.config.training.learning_rate for plan in chosen]

    return best_rates


def loss_of_trial(plan: Plan) -> float:
    best = {"rope": 0.002, "alibi": 0.004}
    config = plan.config
    return abs(config.training.learning_rate - best[config.encoding.name])


def test_each_scheme_has_its_best_rate_and_one_at_the_edge_is_warned_about(
    rates, caplog
):
    caplog.set_level("INFO")
    assert rates(loss_of_trial) == [0.002, 0.004]
    (warning,) = [message for message in caplog.messages if "edge" in message]
    assert warning.startswith("alibi: learning rate 0.004 ")
    assert "a wider tune_grid" in warning


def test_two_rates_that_were_typed_become_one_run_at_the_best(overrides, monkeypatch):
    rates = "training.learning_rate=0.001,0.002"
    todo = plans.resolve([["encoding=rope", rates, *overrides]])
    monkeypatch.setattr(pool, "loss_at_train_length", loss_of_trial)

    tuned = tuning.at_best_rates(todo, [0.5, 1.0, 2.0])

    assert [plan.config.training.learning_rate for plan in tuned] == [0.002]


def test_two_studies_share_the_trials_that_both_need(overrides, monkeypatch):
    rate = "training.learning_rate=0.002"
    first = ["encoding=alibi", "study=a", "seed=0", rate, *overrides]
    second = ["encoding=alibi", "study=b", "seed=1", rate, *overrides]
    todo = plans.resolve([first, second])
    ran = tuning.trials(todo, [1.0, 2.0])

    def loss(trial: Plan) -> float | None:
        return loss_of_trial(trial) if trial in ran else None

    monkeypatch.setattr(pool, "loss_at_train_length", loss)
    tuned = tuning.at_best_rates(todo, [1.0, 2.0])

    assert len(ran) == 2
    assert [plan.config.training.learning_rate for plan in tuned] == [0.004, 0.004]


def test_a_scheme_whose_trials_failed_keeps_its_rate_without_advice(rates, caplog):
    caplog.set_level("INFO")
    assert rates(lambda plan: None, grid=[1.0, 2.0]) == [0.002, 0.002]
    assert "0.004: failed" in caplog.text
    assert "wider tune_grid" not in caplog.text


def test_rates_are_chosen_on_validation_text_at_the_training_length(overrides):
    todo = plans.resolve([["encoding=rope,alibi", "seed=1", *overrides]])
    tried = tuning.trials(todo, [0.5, 1.0, 2.0])
    ids = {trial.id for trial in tried}
    assert len(ids) == 6
    for trial in tried:
        asked = trial.config.evaluation
        assert asked.split == "validation"
        assert asked.ratios == (1.0,)
        assert asked.at_tokens == ()
        assert trial.config.seed == 0
        assert trial.folder.parent.parts[-2:] == ("text", "tuning")
