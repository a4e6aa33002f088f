"""The command line as a user meets it: help, one-line errors, exit codes, and real runs
into an empty folder.
"""

import dataclasses
import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fake_study
import pandas as pd
import pytest
import support
import torch
import yaml
from support import posbench

from posbench import encodings, listing, tasks
from posbench.config.overrides import refuse_variants
from posbench.config.schema import load_saved
from posbench.data import tokens
from posbench.encodings import extend
from posbench.encodings.base import Shape
from posbench.errors import OptionError
from posbench.evaluation import probes
from posbench.evaluation.subjects import TrainedGPT
from posbench.launch import compose, point
from posbench.run import start
from posbench.run.folder import Run, owned
from posbench.run.rows import evaluation_rows
from posbench.run.saved import load_record
from posbench.terminal import exits

# Two updates of a very small model, from an empty folder.
TINY = [*support.TINY, "training.tokens=128", "runtime.cache=cache"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """An empty current folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    support.write_text()


def train(*words: str) -> int:
    return posbench("train", *TINY, "data.path=text.txt", *words)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that a failed command leaves."""
    printed = capsys.readouterr().err.splitlines()
    (line,) = filter(None, printed)
    assert line.startswith("error: ")
    return line


def runs() -> list[str]:
    paths = Path("outputs/text").iterdir()
    return sorted(path.name for path in paths if path.is_dir())


def the_run() -> Path:
    """The folder of the only run."""
    (name,) = runs()
    return Path("outputs/text") / name


def test_the_defaults_that_help_of_train_shows_are_those_of_a_run(capsys):
    code = posbench("train", "--help")

    assert code == 0
    printed = capsys.readouterr().out
    shown = re.findall(r"^ +([a-z][\w.]*=\S+)", printed, re.MULTILINE)
    defaults = [setting for setting in shown if "..." not in setting]
    assert len(defaults) > 10
    assert compose.single(defaults) == compose.single([])


def test_cfg_prints_every_key_with_its_meaning(capsys):
    extensions = "extension=interpolate:factor=4,interpolate"
    words = ["encoding=t5", "length=128", extensions, "threads=2"]
    code = posbench("train", "--cfg", *words)

    assert code == 0
    out = capsys.readouterr().out
    shown = yaml.safe_load(out)
    assert shown["encoding"]["max_distance"] == 64
    assert shown["evaluation"]["ratios"] == [2.0]
    assert shown["evaluation"]["extensions"] == ["interpolate:factor=4", "interpolate"]
    assert shown["runtime"]["threads"] == 2
    lines = [line for line in out.splitlines() if not line.endswith(":")]
    without_meaning = [line for line in lines if " # " not in line]
    assert without_meaning == ["  name: t5"]
    assert not Path("outputs").exists()


def test_a_text_that_is_too_short_is_refused_before_anything_is_written():
    code = train("training.train_length=99999", "training.tokens=9e6")
    assert code == 2
    assert not Path("outputs").exists()


# A command, and what its line says.
MISTAKES = [
    ("trian", "No such command 'trian'. Did you mean 'train'?"),
    ("evaluate", "Missing argument"),
    ("train --seed 3", "Settings are key=value, without dashes: seed=..."),
    ("list task", "unknown section 'task': did you mean 'tasks'?"),
    ("show rope base=100 --text", "'base=100': --text describes all options"),
    ("evaluate length=32", "which runs? name their folders or ids, or their studies"),
    ("evaluate nix a/b", "nix is no model: expected runs or models, not both"),
    ("evaluate nix", "nix does not exist: expected run folders or study folders"),
    ("report none.parquet", "none.parquet does not exist: expected a study in one"),
    ("report text.tx", "text.tx does not exist: expected run folders"),
    (
        "sample outputs/x/rope-s0 word",
        "outputs/x/rope-s0 does not exist: expected run folders",
    ),
    (
        "evaluate gpt2",
        "a model is a folder, or OWNER/NAME on the hub, such as openai-community/gpt2",
    ),
    (
        "train encoding=rop",
        "unknown encoding 'rop': did you mean 'rope'? ('posbench list' shows all)",
    ),
    ("train encoding=nix.py:X", "there is no file nix.py"),
    ("train encoding=rotary", "did you mean 'rope'?"),
    ("train tracking=offline", "did you mean 'tracking.mode=offline'?"),
    ("train data=_base", "unknown data '_base' (a text of your own is data.path="),
    ("train rope", "cannot read 'rope': did you mean 'encoding=rope'?"),
    ("sweep six", "cannot read 'six': did you mean 'sweep=six'?"),
    ("train training.learning_rat=3", "did you mean 'training.learning_rate'?"),
    (
        "train precision=bf16",
        "unknown key 'precision': did you mean 'training.precision'?",
    ),
    (
        "bench rope encoding=alibi",
        "encoding is not for bench: expected encodings, model, training.* or runtime.*",
    ),
    (
        "reproduce alibi_holds seed=3",
        "seed=3 has no effect: each of these claims sets its own value",
    ),
    (
        "export rope-s0 code=true",
        "'code=true' stands where the new folder is expected",
    ),
    ("train protocl=fixed_target", "unknown key 'protocl': did you mean 'protocol'?"),
    ("train lr=3", "unknown key 'lr' (it is training.learning_rate)"),
    ("train epochs=3", "(it is training.tokens: a step has "),
    ("train task=copy", "(it is data=task/copy to train on a task, "),
    ("sweep encoding=rope seeds=5", "(it is a list: posbench sweep seed=0,1,2,3,4)"),
    (
        "train seed=0,1",
        "seed=0,1 gives several values: 'posbench sweep' runs each of them",
    ),
    (
        "train encoding=[rope,alibi]",
        "encoding=[rope,alibi] gives several values: 'posbench sweep' runs each of them",
    ),
    ("train tracking.backend=wand", "unknown tracker 'wand': did you mean 'wandb'?"),
    ("runs --delete --yes", "which runs?"),
    ("train encoding=abili", "unknown encoding 'abili': did you mean 'alibi'?"),
    ("train modle=llama", "unknown key 'modle': did you mean 'model'?"),
    (
        "train tracking.mode=disabled",
        "tracking.mode is 'disabled': expected tracking=none instead",
    ),
    (
        "train --config-name demo",
        "(experiment=NAME chooses a file, --config-dir=DIR has further ones)",
    ),
    ("train +seed=3", "cannot read '+seed=3': a key needs no '+', type seed=3"),
    (
        "train hydra/launcher=x",
        "(it is posbench sweep: --n-jobs=N runs at a time, --slurm=OPTIONS on a cluster)",
    ),
    ("train seed=abc", "seed is 'abc': expected a whole number"),
    ("train seed=0-4", "seed is '0-4': expected a number, or in a sweep several"),
    (
        "train training.tokens=1Q",
        "training.tokens is '1Q': expected a whole number, such as 1e6 or 1M",
    ),
    ("train study=../x", "study is '../x': expected letters, digits,"),
    (
        "train model.d_model=99",
        "model.d_model is 99: it does not divide among 4 heads, nearest: 96 or 100",
    ),
    (
        "train training.tokens=10",
        "training.tokens is 10: expected at least 2048, one update",
    ),
    (
        "train training.betas=[0.9]",
        "training.betas is [0.9]: expected two numbers, such as [0.9,0.95]",
    ),
    (
        "train device=mps",
        "runtime.device is 'mps', which this machine does not have (here: auto, ",
    ),
    ("train device=gpu", "expected auto or cpu; a GPU is cuda, one of Apple mps"),
    ("train ratio=2x", "evaluation.ratios is '2x': expected a number, such as 2 or"),
    (
        "train protocol=nonoverlap probe=repeat blocks=4",
        "evaluation.blocks is 4: expected at least 8, for an interval",
    ),
    ("train processes=3", "does not divide among 3 processes, nearest: 30 or 33"),
    ("train encoding.base=-1", "encoding.base is -1 for 'rope'"),
    ("train encoding.bse=2", "'rope' has no option 'bse'"),
    (
        "train encoding=randomized encoding.inner_options.bse=2",
        "'rope' has no option 'bse'",
    ),
    ("train encoding=alibi encoding.base=2", "no option 'base': it accepts slopes"),
    (
        "train encoding=alibi encoding.slopes=[1.0]",
        "encoding.slopes is [1.0] for 'alibi': expected 4 numbers, one per head",
    ),
    (
        f"train encoding.base=100 encoding.frequencies=[{'1,' * 15}1]",
        "encoding.base is 100 for 'rope': expected no base beside the numbers",
    ),
    (
        "train encoding=t5 encoding.max_distance=16",
        "encoding.max_distance is 16 for 't5': expected more than half of num_buckets",
    ),
    (
        "train encoding=dape encoding.inner=rope",
        "encoding.inner is 'rope': expected one that only adds a bias",
    ),
    (
        "train encoding=dape encoding.inner=layered encoding.inner_options={layers:[{name:t5}]}",
        "encoding.inner is 'layered'",
    ),
    (
        "train encoding=layered encoding.layers=[{name:sine,window:4},{name:sine}]",
        "encoding.layers: sine and sine ",
    ),
    (
        "train encoding=llama3 encoding.low_freq_factor=5.0",
        "encoding.low_freq_factor is 5.0: expected at most 4",
    ),
    (
        "train encoding=liere encoding.block=5",
        "encoding.block is 5 for 'liere': expected a divisor of the 32 channels",
    ),
    (
        "train encoding=randomized encoding.inner_options.base=-1",
        "encoding.inner_options.base is -1 for 'rope': ",
    ),
    (
        "train encoding=cape encoding.inner=learned",
        "encoding.inner is 'learned', which cannot take these positions",
    ),
    (
        "train encoding=layered encoding.layers=[{name:rope,window:0}]",
        "encoding.layers[0].window is 0 for 'layered': ",
    ),
    (
        "train encoding=heads encoding.heads=[{name:tupe}]",
        "encoding.heads[0]: 'tupe' acts on all heads",
    ),
    (
        "train encoding=alibi extension=pi",
        "'alibi' has no extension 'pi': it supports alibi_pi",
    ),
    (
        "train encoding=none extension=yarn",
        "'none' has no extension 'yarn': it supports none",
    ),
    (
        "train experiment=tasks data=task/addition encoding=coupling encoding.longer=0",
        "longer is 0 for 'coupling': expected 1, since answer=reversed reads none",
    ),
    ("train extension=yran", "unknown extension 'yran': did you mean 'yarn'"),
    ("train extension=yarn:bta=4", "'yarn' has no option 'bta': it accepts"),
    ("train extension=pi:factor=0.5", "factor is 0.5 for 'pi': "),
    (
        "train extension=self_extend:window=64",
        "window is 64: expected less than 64, or group given",
    ),
    (
        "train extension=dual_chunk:chunk=65",
        "chunk is 65: expected from 1 to the training length 64",
    ),
    (
        "train experiment=tasks data=task/copy data.task.vocabluary=3",
        "'copy' has no option 'vocabluary': it accepts shortest, longest, vocabulary",
    ),
    (
        "train experiment=tasks data=task/addition data.task.answer=revrsed",
        "data.task.answer is 'revrsed' for 'addition': input should be 'plain' or",
    ),
    (
        "train experiment=tasks data=task/recall data.task.keys=7",
        "data.task.longest is 8 for 'recall': expected at most 7",
    ),
    (
        "train experiment=tasks data=task/passkey data.task.depth=nan",
        "data.task.depth is nan",
    ),
    ("train data=task/passkeys", "did you mean 'task/passkey'"),
    ("train probe=passkey:depth=2", "less than or equal to 1"),
    ("train probe=passkey:keys=11", "less than or equal to 10"),
    ("train probe=induction:pairs=1", "greater than or equal to 2"),
    ("train offsets=64", "evaluation.offsets is [64]: expected [] for data=builtin"),
    (
        "train experiment=tasks data=task/copy at_tokens=5376",
        "evaluation.at_tokens is [5376]: expected [] for data=task",
    ),
    ("rope yarn factor=4 pi yarn", "or two to compare; length= once"),
    (
        "sweep",
        "nothing to compare: give a list, such as encoding=rope,alibi, or sweep=NAME",
    ),
    (
        "sweep sweep=compar",
        "unknown sweep 'compar': did you mean 'compare'? (choices: catalogue, compare, ",
    ),
    ("sweep encoding=rope,alib", "unknown encoding 'alib': did you mean 'alibi'?"),
    (
        "sweep encoding=rope,alibi encoding.base=64",
        "'alibi' has no option 'base': it accepts slopes",
    ),
    ("sweep encoding=rope tune=maybe", "expected tune=true, with or without tune_grid"),
    (
        "sweep encoding=rope tune_grid=1,2",
        "expected tune=true, with or without tune_grid",
    ),
    (
        "sweep encoding=rope tune=true tune_grid=0,1",
        "tune_grid is [0, 1]: expected multiples",
    ),
    (
        "sweep encoding=rope,alibi evaluation.extensions=['yarn:fctor=2']",
        "'yarn' has no option 'fctor'",
    ),
    (
        "train training.optimizer=adam",
        "unknown optimizer 'adam': did you mean 'adamw'?",
    ),
    (
        "train data.tokenizer=worng.json",
        "data.tokenizer: 'worng.json' cannot be read: No such file",
    ),
    (
        "reproduce alibi_hold --dry-run",
        "unknown claim 'alibi_hold': did you mean 'alibi_holds'?",
    ),
    (
        "train data=wikitext-2 data.path=a.txt",
        "data.path is 'a.txt': expected data=text: data=hub does not read it",
    ),
]


@pytest.mark.parametrize(("command", "says"), MISTAKES)
def test_a_mistake_is_one_line_exit_code_2_and_nothing_written(capsys, command, says):
    code = posbench(*command.split())

    assert code == 2
    assert says in error_line(capsys)
    assert os.listdir() == ["text.txt"]


def test_debug_shows_a_traceback(capsys):
    code = posbench("train", "encoding=rop", "--debug")
    assert code == 2
    assert "Traceback" in capsys.readouterr().err


def test_control_characters_are_escaped(capsys):
    code = posbench("train", "study='\x1b[2J\u202ex'")
    assert code == 2
    line = error_line(capsys)
    assert "\x1b" not in line
    assert "\u202e" not in line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 1),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "", "/x"), 2),
    ],
)
def test_an_exception_is_one_line_and_an_exit_code(capsys, error, code):
    assert exits.report(error) == code
    assert error_line(capsys)


def test_list_describes_every_choice(capsys):
    code = posbench("list", "--json")

    assert code == 0
    shown = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in shown["encodings"]}
    assert list(rows) == encodings.names()
    for row in rows.values():
        assert row["title"]
        assert row["beyond"]
        assert row["source"]
    learned = rows["learned"]
    rope = rows["rope"]
    assert learned["parameters"] == 8192
    assert learned["max_length"] == 64
    assert rope["paper"] == "arXiv:2104.09864"
    assert rope["acts"] == "queries and keys"
    assert "yarn" in rope["extensions"]
    of_probes = [row["name"] for row in shown["probes"]]
    assert of_probes == probes.names()
    of_tasks = [row["name"] for row in shown["tasks"]]
    assert of_tasks == [f"task/{name}" for name in tasks.names()]


@pytest.mark.parametrize(
    ("name", "fact", "expected"),
    [
        ("p_rope", "acts", "queries and keys"),
        ("p_rope", "kernels", "any"),
        ("p_rope", "cache", "yes"),
        ("p_rope", "architectures", "Llama"),
        ("p_rope", "models", "gemma4"),
        ("stick_breaking", "acts", "weights or values"),
        ("stick_breaking", "kernels", "own"),
        ("stick_breaking", "cache", "yes"),
        ("stick_breaking", "architectures", "posbench's class"),
        ("stick_breaking", "models", ""),
    ],
)
def test_list_says_what_works_with_a_scheme(name, fact, expected):
    (rows,) = listing.listing_rows(["encodings"]).values()
    (row,) = [row for row in rows if row["name"] == name]
    assert row[fact] == expected


def test_the_shape_that_list_describes_is_the_demos():
    demo = compose.single([])
    model = demo.model
    assert {
        "d_model": model.d_model,
        "n_heads": model.n_heads,
        "n_layers": model.n_layers,
        "train_length": demo.training.train_length,
    } == listing.DEMO


def test_train_composes_once(monkeypatch):
    calls = []
    composing = point.compose

    def counted(*given, **named):
        calls.append(given)
        return composing(*given, **named)

    point.hydra_config.cache_clear()  # of what other tests have composed
    monkeypatch.setattr(point, "compose", counted)

    assert train() == 0

    assert len(calls) == 1


def test_the_same_command_is_the_same_run_in_the_folder_of_its_configuration():
    assert train() == 0
    assert train() == 0

    folder = the_run()
    assert folder.name == load_saved(folder / "config.yaml").id
    assert load_record(folder).status == "done"


def test_a_run_that_diverges_is_exit_code_1_and_an_error_in_the_last_line(capsys):
    assert train("training.learning_rate=1e35") == 1

    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors == lines[-1:]
    assert "step 2" in lines[-1]


def test_a_restarted_run_is_beside_the_old_one(capsys):
    assert train() == 0
    folder = the_run()

    assert train("--restart") == 0

    assert runs() == [folder.name, f"{folder.name}.old-1"]
    assert "--restart" not in load_record(folder).command


def lengths_of(folder: Path) -> set[int]:
    return {row.length for row in evaluation_rows(folder)}


@pytest.fixture
def two_runs():
    assert train("seed=0") == 0
    assert train("seed=1") == 0
    return [Path("outputs/text") / name for name in runs()]


def test_quiet_commands_say_where_the_results_are_and_nothing_else(capsys):
    assert train("--quiet") == 0
    trained = capsys.readouterr()
    folder = the_run()
    assert posbench("evaluate", str(folder), "ratio=4", "--quiet") == 0
    evaluated = capsys.readouterr()
    assert posbench("report", "outputs/text", "--quiet") == 0
    reported = capsys.readouterr()

    assert trained.out == f"Run folder: {folder}\n"
    assert evaluated.out == trained.out
    assert "outputs/text/report/index.html" in reported.out.splitlines()[0]
    assert "rope" not in reported.out
    assert trained.err == evaluated.err == reported.err == ""


def json_of(command: str, *words: str) -> Any:
    """Return the JSON that a command prints to stdout, in a process of its own."""
    python = [sys.executable, "-m", "posbench", command, "--json", *words]
    done = subprocess.run(python, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_results_are_one_json_document():
    words = support.each_once([*TINY, "data.path=text.txt"])
    trained = json_of("train", *words)
    folder = the_run()
    evaluated = json_of("evaluate", str(folder), "ratio=4")

    rows = evaluation_rows(folder)
    assert trained["run"] == str(folder)
    assert trained["id"] == folder.name
    assert trained["status"] == "done"
    assert {row["length_ratio"] for row in trained["rows"]} == {1, 2}
    printed = [row["nll"] for row in evaluated["rows"]]
    saved = [row.nll for row in rows]
    assert printed == saved
    assert max(row["length"] for row in evaluated["rows"]) == 64


def test_a_length_without_room_costs_no_other_result_and_is_tried_again(
    monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        logits = support.without_room_beyond(16, TrainedGPT)
        patch.setattr(TrainedGPT, "logits", logits)
        for seed in (0, 1):
            assert train(f"seed={seed}") == 1
            assert "\n16 (1x)" in capsys.readouterr().out
        assert posbench("evaluate", "outputs/text", "ratio=1,2", "--json") == 1
    shown = json.loads(capsys.readouterr().out)
    for run in shown:
        statuses = {row["length"]: row["status"] for row in run["rows"]}
        assert statuses == {16: "ok", 32: "failed"}
    record = load_record(Path(shown[0]["run"]))
    assert (record.status, record.reason) == ("done", "oom")
    sweep = ["sweep", *TINY, "data.path=text.txt", "seed=0,1", "--dry-run"]

    assert posbench(*sweep) == 0
    assert "2 runs: 0 finished, 2 to do, 0 tokens" in capsys.readouterr().out
    assert train("seed=0") == 0
    assert posbench(*sweep) == 0
    assert "2 runs: 1 finished, 1 to do, 0 tokens" in capsys.readouterr().out


def test_evaluated_runs_are_a_list_in_json(two_runs, capsys):
    capsys.readouterr()
    assert posbench("evaluate", "outputs/text", "ratio=1,2", "--json") == 0

    runs = json.loads(capsys.readouterr().out)
    printed = [run["run"] for run in runs]
    assert printed == [str(folder) for folder in two_runs]


def test_a_report_in_json_has_the_answer_and_the_table():
    frame = fake_study.rows_of_study("six_demo")
    frame[frame["encoding"].isin(["alibi", "rope"])].to_parquet("two.parquet")

    report = json_of("report", "two.parquet", "--out=report")

    table = pd.read_csv("report/table.csv")
    schemes = pd.DataFrame(report["schemes"])
    assert report["report"] == "report"
    assert report["answer"][1].startswith("At 64 tokens")
    assert list(schemes) == ["set", *table]
    assert list(schemes["label"]) == list(table["label"])
    assert list(schemes["nll"]) == pytest.approx(table["nll"], rel=1e-5)
    assert report["schemes"][0]["mixture"] is None  # not a number in the rows


JSON_REFUSED = [
    "train --cfg",
    "sweep seed=0,1 --dry-run",
    "evaluate openai-community/gpt2 extension=search",
]


@pytest.mark.parametrize("line", JSON_REFUSED)
def test_what_is_no_json_is_refused_beside_it(line, capsys):
    assert posbench(*line.split(), "--json") == 2
    assert "leave out --" in error_line(capsys)


def test_prepare_says_which_files_are_read_and_left_out(capsys):
    Path("texts").mkdir()
    for name in ("a.txt", "b.txt", "notes.md"):
        shutil.copy("text.txt", Path("texts") / name)

    assert (
        posbench("prepare", "data=text", "data.path=texts", "data.tokenizer=bytes") == 0
    )

    printed = capsys.readouterr()
    assert "data.path: 2 files read, .txt; left out: 1 .md" in printed.err
    assert "pieces of documents" in printed.out
    assert "of held-out passages, training has " in printed.out
    assert "left out of training" not in printed.out


def test_a_task_needs_no_preparation(capsys):
    assert posbench("prepare", "experiment=tasks", "data=task/copy") == 0
    assert "Nothing to prepare" in capsys.readouterr().out


def test_a_mistake_in_what_to_evaluate_leaves_the_run_as_it_was(capsys):
    assert train() == 0
    folder = the_run()
    before = support.snapshot(folder)
    capsys.readouterr()
    messages = {
        "lenght=32": "unknown key 'lenght': did you mean 'length'?",
        "training.tokens=5": "leave out training.tokens=5, or train anew with it",
        "tracking=none": "a finished run keeps its own: leave out tracking=none",
        "extension=yarn:fctor=2": "'yarn' has no option 'fctor'",
        "extension=yarn:length=64": "'yarn' has no option 'length'",
        "extension=search,yarn": "extension=search' compares several",
        "task=repeat": "probe=passkey to evaluate with a probe)",
        "probe=repeet": "unknown probe 'repeet': did you mean 'repeat'?",
    }
    for word, message in messages.items():
        code = posbench("evaluate", str(folder), word)
        assert code == 2
        assert message in error_line(capsys)
        assert support.snapshot(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["encoding=rope", "encoding.base=x"], "encoding.base is 'x' for 'rope'"),
        # a named type, a base class in another file, a rule that scales RoPE
        (["encoding=path", "encoding.start=x"], "should be 'normal' or 'torch'"),
        (["encoding=rope_pp", "encoding.layout=x"], "'half' or 'interleaved'"),
        (["encoding=yarn", "encoding.factor=x"], "encoding.factor is 'x' for 'yarn'"),
        (["encoding=cca", "encoding.inner=rop"], "unknown encoding 'rop'"),
        (["encoding=heads", "encoding.heads=[{name: fx}]"], "unknown encoding 'fx'"),
        (["extension=yarnn"], "unknown extension 'yarnn': did you mean 'yarn'?"),
        (["probe=repeet"], "unknown probe 'repeet': did you mean 'repeat'?"),
        (["extension=yarn:facto=4"], "'yarn' has no option 'facto'"),
        (["probe=passkey:key=4"], "'passkey' has no option 'key'"),
        (["data=text", "data.path=none.txt"], "data.path: no file matches 'none.txt'"),
        (["device=gpu"], "runtime.device is 'gpu': expected auto or cpu"),
        (["encoding=nofile.py:Mine"], "there is no file nofile.py"),
    ],
)
def test_a_mistake_in_train_is_refused_without_torch(words, message):
    assert message in refusal_without_torch(["train", *words])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lenght=32", "unknown key 'lenght': did you mean 'length'?"),
        ("ratio=2x", "evaluation.ratios is '2x'"),
        ("extension=yarnn", "unknown extension 'yarnn': did you mean 'yarn'?"),
        ("probe=repeet", "unknown probe 'repeet': did you mean 'repeat'?"),
        ("extension=yarn:facto=4", "it accepts factor, ramp, alpha, beta,"),
    ],
)
def test_a_mistake_in_evaluate_is_refused_without_torch(tmp_path, word, message):
    schemes = {"rope": fake_study.SCHEMES["rope"]}
    fake_study.write_study(tmp_path, schemes, seeds=1)
    assert message in refusal_without_torch(["evaluate", str(tmp_path), word])


@pytest.mark.parametrize("words", [["show"], ["properties"], ["bench"], ["check"]])
def test_a_mistyped_encoding_is_refused_without_torch(words):
    says = "unknown encoding 'ropee': did you mean 'rope'?"
    assert says in refusal_without_torch([*words, "ropee"])


@pytest.mark.parametrize("words", [["yarrn"], ["none.json"], ["rope", "length=x"]])
def test_a_mistake_in_rope_is_refused_without_torch(words):
    assert "error: " in refusal_without_torch(["rope", *words])


def test_options_of_extensions_are_read_as_their_functions_declare_them():
    settings = compose.single([]).evaluation
    for name, method in extend.methods().items():
        every = ":".join(f"{option}=1" for option in [*method.options, "layers"])
        refuse_variants(dataclasses.replace(settings, extensions=(f"{name}:{every}",)))


def refusal_without_torch(words: list[str]) -> str:
    """Return what a command that is refused says. It must not import torch."""
    code = f"""
import sys, posbench.cli
sys.argv = ["posbench", *{words}]
try:
    code = posbench.cli.main()
except SystemExit as end:
    code = end.code
sys.exit(code + 10 * ("torch" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr


def test_wrong_values_are_refused_before_torch_is_there_as_with_it():
    shape = Shape(d_model=32, n_heads=4, n_layers=2, train_length=16)
    wrong = object()
    for name in encodings.MODULE_OF:
        for option in encodings.options_of(name):
            given = {option: wrong}

            with pytest.raises(OptionError) as early:
                encodings.refuse_values(name, given)
            with pytest.raises(OptionError) as late:
                encodings.build(name, shape, given)

            assert str(early.value) == str(late.value), (name, option)


def test_each_encoding_takes_its_own_defaults_before_torch_is_there():
    for name in encodings.MODULE_OF:
        given = {}
        for option, default in encodings.options_of(name).items():
            if default is not inspect.Parameter.empty:
                given[option] = default
        encodings.refuse_values(name, given)


def test_evaluate_takes_studies_and_a_run_that_fails_does_not_stop_others(
    two_runs, capsys
):
    broken, whole = two_runs
    shutil.rmtree(broken / "checkpoint")
    capsys.readouterr()

    code = posbench("evaluate", "outputs/text", "length=24,96", "windowed=false")

    assert code == 1
    assert {24, 96} <= lengths_of(whole)
    # what was asked at training stays
    config = load_saved(whole / "config.yaml")
    assert config.evaluation.ratios == (1, 2)
    printed = capsys.readouterr()
    (of_whole,) = printed.out.splitlines()
    assert of_whole.startswith(f"{whole}: ")
    assert of_whole.endswith("x")
    lines = printed.err.splitlines()
    why, last = [line for line in lines if line.startswith("error: ")]
    assert "has no checkpoint" in why
    assert last == f"error: 1 of 2 not evaluated: {broken}"


@pytest.mark.slow
def test_a_finished_run_is_completed_without_its_optimizer():
    assert train() == 0
    for state in the_run().glob("checkpoint/*/optimizer.pt"):
        state.unlink()

    assert train("ratio=1,2,4") == 0

    assert 64 in lengths_of(the_run())


def test_runs_are_listed_with_what_differs_their_loss_and_their_size(capsys):
    assert train("seed=0") == 0
    assert train("seed=1", "training.tokens=256") == 0
    first, second = (Path("outputs/text") / name for name in runs())
    support.change_record(first, status="stopped")
    capsys.readouterr()

    assert posbench("runs") == 0

    head, _, *lines = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "run study settings status loss at 1x MB"
    expected = [(first, "tokens=128", "stopped"), (second, "tokens=256", "done")]
    for folder, apart, status in expected:
        (line,) = [line for line in lines if folder.name in line]
        loss = fake_study.headline_of(folder)["nll_1x"]
        n_bytes = sum(map(len, support.snapshot(folder).values()))
        words = [folder.name, "text", apart, status]
        words += [f"{loss:.3f}", f"{n_bytes / 1e6:.1f}"]
        assert line.split() == words


def test_a_run_is_found_by_its_id_if_only_one_study_has_it(capsys):
    assert train() == 0
    folder = the_run()
    assert posbench("sample", folder.name, "word", "--tokens", "1") == 0
    shutil.copytree(folder, Path("outputs/two") / folder.name)
    capsys.readouterr()

    assert posbench("sample", folder.name, "word") == 2

    message = f"several studies have a run {folder.name}: name its folder, {folder} or"
    assert message in error_line(capsys)


def test_a_run_on_a_task_has_no_sample(capsys):
    config = compose.single(["experiment=tasks", "data=task/copy"])
    with Run.open(Path("a_run"), config, ["posbench", "train"]):
        pass

    assert posbench("sample", "a_run", "word") == 2

    assert "was trained on copy: expected a run on text" in error_line(capsys)


def test_a_run_of_another_study_is_not_taken_for_the_one_that_is_named(capsys):
    assert train() == 0
    folder = the_run()
    capsys.readouterr()

    assert posbench("sample", f"mistyped/{folder.name}", "word") == 2

    assert "does not exist" in error_line(capsys)
    assert runs() == [folder.name]


def test_a_study_is_found_by_its_name(capsys):
    assert train("study=five", "seed=0") == 0
    (folder,) = Path("outputs/five").glob("rope-*")
    capsys.readouterr()

    assert posbench("runs", "five") == 0
    assert folder.name in capsys.readouterr().out


def test_a_run_is_found_by_its_study_and_its_id():
    assert train("study=five", "seed=0") == 0
    (folder,) = Path("outputs/five").glob("rope-*")
    name = f"five/{folder.name}"

    assert posbench("sample", name, "word", "--tokens", "1") == 0
    assert posbench("evaluate", name, "length=24") == 0
    assert 24 in lengths_of(folder)


def test_a_study_is_found_beside_the_text_of_its_name():
    text = Path("novels/text.txt")
    text.parent.mkdir()
    Path("text.txt").rename(text)
    assert posbench("train", *TINY, "data.path=novels/") == 0
    assert posbench("runs", "novels") == 0


def test_a_start_is_found_below_outputs():
    assert train("study=five", "seed=0") == 0
    (folder,) = Path("outputs/five").glob("rope-*")
    assert start.folders_of(f"five/{folder.name}") == [str(folder)]
    assert start.folders_of(folder.name) == [str(folder)]


@pytest.mark.parametrize(("answer", "code", "kept"), [("y", 0, 1), ("n", 130, 2)])
def test_runs_are_deleted_after_a_question(two_runs, monkeypatch, answer, code, kept):
    first, second = two_runs
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{answer}\n"))

    assert posbench("runs", first.name, "--delete") == code

    assert len(runs()) == kept
    assert second.is_dir()


def test_without_a_terminal_a_question_says_how_to_answer_it(
    two_runs, monkeypatch, capsys
):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))

    assert posbench("runs", "text", "--delete") == 2

    assert "give --yes to delete 2 runs" in error_line(capsys)
    assert len(runs()) == 2


def test_a_study_is_deleted_without_a_question(two_runs, capsys):
    notes = Path("outputs/text/notes.txt")
    notes.touch()

    assert posbench("runs", "text", "--delete", "--yes") == 0

    assert capsys.readouterr().out.endswith("Deleted 2 runs.\n")
    assert runs() == []
    assert notes.exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--pack", "s.zip", "--delete", "--yes"], "--delete and --pack: expected one"),
        (["--delete", "--yes", "--with-text"], "need --pack FILE"),
    ],
)
def test_one_thing_is_done_with_runs_at_a_time(two_runs, words, expected, capsys):
    assert posbench("runs", "text", *words) == 2
    assert expected in error_line(capsys)
    assert len(runs()) == 2


def test_a_run_that_was_moved_aside_is_deleted_if_it_is_named_itself(two_runs):
    first, second = two_runs
    aside = first.rename(f"{first}.old-1")

    assert posbench("runs", "text", "--delete", "--yes") == 0
    assert aside.is_dir()
    assert not second.exists()

    assert posbench("runs", aside.name, "--delete", "--yes") == 0
    assert not aside.exists()


def test_the_nearest_folder_with_runs_is_suggested(capsys):
    Path("nothing.png").touch()
    Path("nothin").mkdir()
    Path("noth/run").mkdir(parents=True)
    Path("noth/run/run.json").touch()
    assert posbench("runs", "nothing") == 2
    assert "did you mean 'noth'?" in error_line(capsys)


def test_a_run_in_use_is_not_deleted_nor_any_beside_it(two_runs, capsys):
    with owned(two_runs[1]):
        assert posbench("runs", "text", "--delete", "--yes") == 75
    assert "in use by another process: nothing was deleted" in error_line(capsys)
    for folder in two_runs:
        assert folder.is_dir()


def test_tokens_that_no_run_has_are_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Path("other.txt").write_text(Path("text.txt").read_text().upper())
    assert train("runtime.cache=null") == 0
    assert posbench("prepare", "data.path=other.txt", "data.tokenizer=bytes") == 0
    assert len([*Path("posbench/tokens").glob("*/meta.json")]) == 2
    capsys.readouterr()

    assert posbench("runs", "--delete-tokens", "--yes") == 0

    line = capsys.readouterr().out
    assert re.fullmatch(r"Deleted 1 prepared text, [\d,]{5,} bytes\.\n", line)
    (kept,) = Path("posbench/tokens").glob("*/meta.json")
    text_of_run = load_record(the_run()).data["sha256"]
    assert json.loads(kept.read_text())["sha256"] == text_of_run


def test_tokens_of_runs_of_another_project_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert train("runtime.cache=null") == 0
    run = the_run().resolve()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")

    assert posbench("runs", "--delete-tokens", "--yes") == 0
    assert "Deleted 0 prepared texts" in capsys.readouterr().out
    shutil.rmtree(run)
    assert posbench("runs", "--delete-tokens", "--yes") == 0
    assert "Deleted 1 prepared text," in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ["{}", "no JSON"])
def test_damaged_tokens_are_deleted(tmp_path, monkeypatch, capsys, damaged):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path("posbench/tokens/0123")
    folder.mkdir(parents=True)
    (folder / "meta.json").write_text(damaged)

    assert posbench("runs", "--delete-tokens", "--yes") == 0
    assert "Deleted 1 prepared text," in capsys.readouterr().out
    assert not folder.exists()


def test_tokens_in_the_making_are_not_deleted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert posbench("prepare", "data.path=text.txt", "data.tokenizer=bytes") == 0
    (meta,) = Path("posbench/tokens").glob("*/meta.json")
    capsys.readouterr()

    with tokens.lock(meta.parent.resolve()):
        assert posbench("runs", "--delete-tokens", "--yes") == 75

    assert "in use by another process" in error_line(capsys)
    assert meta.exists()


def test_a_launcher_without_an_address_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert train() == 2
    assert "MASTER_ADDR and MASTER_PORT are not" in error_line(capsys)


def test_threads_that_are_slower_than_one_are_told_once(monkeypatch, capsys):
    gelu = torch.nn.functional.gelu

    def waiting(*args, **options):
        if torch.get_num_threads() > 1:
            time.sleep(0.01)
        return gelu(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "gelu", waiting)
    n_told = {}
    for threads in (1, 2):
        assert train(f"runtime.threads={threads}", f"seed={threads}") == 0
        n_told[threads] = capsys.readouterr().err.count("runtime.threads=1 is faster")

    assert n_told == {1: 0, 2: 1}
