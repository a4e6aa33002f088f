"""The command line as a user meets it: help, one-line errors, exit codes, and real runs
into an empty folder.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import support
import yaml
from support import posbench

from posbench import encodings, listing, tasks
from posbench.config import compose
from posbench.config.schema import load_saved
from posbench.encodings.base import Shape
from posbench.evaluation import probes
from posbench.run.rows import evaluation_rows
from posbench.run.run import load_record
from posbench.terminal import exits

# Two updates of a very small model, from an empty folder.
TINY = [*support.TINY, "training.tokens=128", "runtime.cache=cache"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    support.write_text()


def train(*words: str) -> int:
    return posbench("train", *TINY, "data.path=text.txt", *words)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that a failed command leaves."""
    (line,) = filter(None, capsys.readouterr().err.splitlines())
    assert line.startswith("error: ")
    return line


def runs() -> list[str]:
    return sorted(path.name for path in Path("outputs/demo").iterdir() if path.is_dir())


def the_run() -> Path:
    """The folder of the only run."""
    (name,) = runs()
    return Path("outputs/demo") / name


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from posbench.cli import main; code = main(); print(*sys.modules,"
        " file=sys.stderr); exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "posbench" in done.stdout
    assert not {
        "torch",
        "hydra",
        "omegaconf",
        "numpy",
        "datasets",
        "tokenizers",
        "wandb",
    } & set(done.stderr.split())


def test_help_of_train_is_one_screen_with_what_people_change(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert posbench("train", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    settings = dict(
        line.split(maxsplit=1) for line in lines if re.match(r" +[a-z][\w.]*=", line)
    )
    assert (
        len(settings) == 20
        and {"seed=0", "training.learning_rate=0.006", "device=auto"} <= settings.keys()
    )
    defaults = [
        setting
        for setting in settings
        if "..." not in setting and not setting.endswith("=")
    ]
    assert compose.single(defaults) == compose.single([])


def test_cfg_prints_every_key_with_its_meaning_and_runs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "encoding=t5",
        "seed=3",
        "length=128",
        "extension=yarn:factor=4,ntk",
        "threads=2",
    ]
    assert posbench("train", "--cfg", *words) == 0
    out = capsys.readouterr().out
    shown = yaml.safe_load(out)
    assert (
        shown["encoding"]["max_distance"],
        shown["seed"],
        shown["evaluation"]["ratios"],
    ) == (64, 3, [2.0])
    assert shown["runtime"]["threads"] == 2 and shown["evaluation"]["extensions"] == [
        "yarn:factor=4",
        "ntk",
    ]
    silent = [
        line
        for line in out.splitlines()
        if " # " not in line and not line.endswith(":")
    ]
    assert silent == ["  name: t5"] and not Path("outputs").exists()
    # no text
    assert (
        train("training.train_length=99999", "training.tokens=9e6") == 2
        and not Path("outputs").exists()
    )


# A command | what its line says. Nothing is written.
MISTAKES = r"""
trian | No such command 'trian'. Did you mean 'train'?
evaluate | Missing argument
train --seed 3 | Settings are key=value, without dashes: seed=...
evaluate nix | nix does not exist: expected run folders or study folders
report text.tx | text.tx does not exist: did you mean 'text.txt'?
sample outputs/x/rope-s0 word | outputs/x/rope-s0 does not exist: expected run folders
evaluate gpt2 | a model is a folder, or OWNER/NAME on the hub, such as openai-community/gpt2
train encoding=rop | unknown encoding 'rop': did you mean 'rope'? ('posbench list' shows all)
train encoding=rotary | did you mean 'rope'?
train tracking=offline | did you mean 'tracking.mode=offline'?
train data=_base | unknown data '_base' (a text of your own is data.path=
train rope | cannot read 'rope': did you mean 'encoding=rope'?
sweep six | cannot read 'six': did you mean 'sweep=six'?
train training.learning_rat=3 | did you mean 'training.learning_rate'?
train precision=bf16 | unknown key 'precision': did you mean 'training.precision'?
bench rope encoding=alibi | encoding is not for bench: expected encodings, model, training.* or runtime.*
reproduce alibi_holds seed=3 | seed=3 has no effect: each of these claims sets its own value
export rope-s0 code=true | after RUN come 'code=true' and 'code=false': expected a folder
train protocl=fixed_target | unknown key 'protocl': did you mean 'protocol'?
train lr=3 | unknown key 'lr' (it is training.learning_rate)
train epochs=3 | (it is training.tokens: a step has 
sweep encoding=rope seeds=5 | (it is a list: posbench sweep seed=0,1,2,3,4)
train seed=0,1 | seed=0,1 gives several values: 'posbench sweep' runs each of them
train seed=abc | seed is 'abc': expected a whole number
train training.tokens=1M | training.tokens is '1M': expected a whole number, such as 1e6
train study=../x | study is '../x': expected letters, digits,
train model.d_model=99 | model.d_model is 99: it does not divide among 4 heads, nearest: 96 or 100
train training.tokens=10 | training.tokens is 10: expected at least 2048, one update
train training.betas=[0.9] | training.betas is [0.9]: expected two numbers, such as [0.9,0.95]
train device=gpu | runtime.device is 'gpu', which this machine does not have (here: auto, 
train processes=3 | does not divide among 3 processes, nearest: 30 or 33
train encoding.base=-1 | encoding.base is -1 for 'rope'
train encoding.bse=2 | 'rope' has no option 'bse'
train encoding=randomized encoding.inner_options.bse=2 | 'rope' has no option 'bse'
train encoding=alibi encoding.base=2 | no option 'base': it accepts slopes
train offsets=64 | evaluation.offsets is [64]: expected [] for data=builtin
train experiment=tasks data=task/copy at_tokens=5376 | evaluation.at_tokens is [5376]: expected [] for data=task
rope yarn factor=4 yarn factor=8 | or two to compare; a key= once
train data=wikitext-2 data.path=a.txt | data.path is 'a.txt': expected data=text: data=hub does not read it
"""


@pytest.mark.parametrize("line", [line for line in MISTAKES.splitlines() if line])
def test_a_mistake_is_one_line_exit_code_2_and_nothing_written(
    capsys: pytest.CaptureFixture[str], line: str
) -> None:
    command, says = line.split(" | ")
    assert (
        posbench(*command.split()) == 2
        and says in error_line(capsys)
        and os.listdir() == ["text.txt"]
    )


def test_debug_alone_shows_a_traceback_and_control_characters_are_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        posbench("train", "encoding=rop", "--debug") == 2
        and "Traceback" in capsys.readouterr().err
    )
    assert posbench("train", "study='\x1b[2J\u202ex'") == 2
    line = error_line(capsys)
    assert "\x1b" not in line and "\u202e" not in line
    for error, code in (
        (ValueError("two\nlines"), 1),
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "", "/x"), 2),
    ):
        assert exits.report(error) == code and error_line(capsys)


OWN = """
import posbench

class Slope(posbench.Encoding):
    def __init__(self, shape, slope: float = 0.5) -> None:
        super().__init__(shape)
        self.slope = slope

    def distance_bias(self, distance, layer):
        assert len(distance) < 400, "too far"
        return -self.slope * distance.float().expand(self.shape.n_heads, *distance.shape)
"""


def test_a_class_in_a_file_is_an_encoding_whose_digest_is_in_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(encodings, "_registered", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("mine.py").write_text(OWN)
    assert train("encoding=./mine.py:Slope", "encoding.slope=0.25") == 0
    folder = the_run()
    encoding = load_saved(folder / "config.yaml").encoding
    assert (encoding.name, encoding.options, encoding.file) == (
        "slope",
        {"slope": 0.25},
        "mine.py:Slope",
    )
    assert posbench("evaluate", str(folder), "length=48", "windowed=false") == 0
    assert posbench("evaluate", str(folder), "length=400") == 1
    assert (
        "error: at 400 tokens: 'slope', distance_bias: mine.py, line 10: Assert"
        in capsys.readouterr().err
    )
    # as on another machine, where the folder may be a stranger's
    shutil.rmtree("cache/posbench")
    assert posbench("evaluate", str(folder), "length=64") == 2
    assert "mine.py is code not approved here" in capsys.readouterr().err
    Path("mine.py").write_text(OWN + "# changed")
    assert posbench("evaluate", str(folder), "length=64") == 2
    assert "mine.py has changed since the run was made" in capsys.readouterr().err
    assert 64 not in {row.length for row in evaluation_rows(folder)}
    Path("broken.py").write_text("import nothing_of_this_name")
    for wrong, message in {
        "mine.py:Other": "one of Slope",
        "slop": "unknown encoding 'slop': did you mean 'slope'?",
        "broken.py:X": "broken.py, line 1: ModuleNotFoundError",
        "nix.py:X": "there is no file nix.py",
    }.items():
        assert posbench("train", f"encoding={wrong}") == 2 and message in error_line(
            capsys
        )


def test_list_describes_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("list", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["encodings"]] == encodings.names()
    assert all(
        row[fact]
        for row in shown["encodings"]
        for fact in ("title", "beyond", "source", "checked_against")
    )
    rows = {row["name"]: row for row in shown["encodings"]}
    card = ("acts", "kernels", "cache", "architectures", "models")
    where = {name: tuple(rows[name][key] for key in card) for name in rows}
    assert where["p_rope"] == (
        "queries and keys",
        "any",
        "yes",
        "Llama",
        "gemma4",
    )
    assert where["stick_breaking"][1:] == ("own", "yes", "posbench's class", "")
    assert (rows["learned"]["parameters"], rows["learned"]["max_length"]) == (8192, 64)
    assert (
        rows["rope"]["paper"] == "arXiv:2104.09864"
        and "yarn" in rows["rope"]["extensions"]
    )
    assert [row["name"] for row in shown["probes"]] == probes.names()
    assert [row["name"] for row in shown["tasks"]] == [
        f"task/{name}" for name in tasks.names()
    ]
    assert posbench("list", "encoding", "sweeps") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "encodings:" and "sweeps:" in lines and "data:" not in lines
    demo = compose.single(["experiment=demo"])
    sizes = {
        name: getattr(demo.model, name) for name in ("d_model", "n_heads", "n_layers")
    }
    assert Shape(**sizes, train_length=demo.training.train_length) == listing.DEMO


def test_show_text_prints_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("show", "layered/gemma3", "task/passkey", "--text") == 0
    encoding, task = capsys.readouterr().out.split("\n\n\n")
    for part in (
        "Source: ",
        "Beyond training length: ",
        "https://arxiv.org/abs/",
        "Options:\n",
        "posbench train enc",
    ):
        assert part in encoding, part
    assert "Deviates: " in task and "posbench train data=task/passkey" in task


def test_train_writes_the_run_folder_of_its_configuration_and_composes_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []
    composing = compose.compose
    compose._hydra_config.cache_clear()  # of what other tests have composed
    monkeypatch.setattr(
        compose,
        "compose",
        lambda *args, **kwargs: calls.append(args) or composing(*args, **kwargs),
    )
    assert train() == 0 and len(calls) == 1
    folder = the_run()
    config, record = load_saved(folder / "config.yaml"), load_record(folder)
    assert folder.name == config.id and record["status"] == "done"
    assert train() == 0 and the_run() == folder  # the same command is the same run
    assert train("--restart") == 0 and runs() == [folder.name, f"{folder.name}.old-1"]
    assert "--restart" not in load_record(folder)["command"]
    capsys.readouterr()
    assert train("training.learning_rate=1e35") == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[
        -1:
    ] and "step 2" in lines[-1]


def test_evaluate_takes_studies_and_a_run_that_fails_does_not_stop_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("seed=0") == train("seed=1") == 0
    broken, whole = (Path("outputs/demo") / name for name in runs())
    capsys.readouterr()
    before = support.snapshot(whole)
    for word, message in {
        "lenght=32": "unknown key 'lenght': did you mean 'length'?",
        "training.tokens=5": "unknown key 'training.tokens'",
        "extension=yarn:fctor=2": "'yarn' has no option 'fctor'",
        "task=repeet": "unknown probe 'repeet': did you mean 'repeat'?",
    }.items():
        assert posbench("evaluate", str(whole), word) == 2
        assert message in error_line(capsys) and support.snapshot(whole) == before
    shutil.rmtree(broken / "checkpoint")
    assert posbench("evaluate", "outputs/demo", "length=24,96", "windowed=false") == 1
    assert {24, 96} <= {row.length for row in evaluation_rows(whole)}
    # what was asked at training stays
    assert load_saved(whole / "config.yaml").evaluation.ratios == (1, 2)
    why, last = [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("error: ")
    ]
    assert (
        "has no checkpoint" in why
        and last == f"error: 1 of 2 runs not evaluated: {broken}"
    )


@pytest.mark.slow
def test_a_finished_run_is_completed_without_its_optimizer() -> None:
    assert train() == 0
    for state in the_run().glob("checkpoint/*/optimizer.pt"):
        state.unlink()
    assert train("ratio=1,2,4") == 0
    assert 64 in {row.length for row in evaluation_rows(the_run())}


def test_runs_are_listed_and_found_by_their_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("seed=0") == train("seed=1", "training.tokens=256") == 0
    small, large = (Path("outputs/demo") / name for name in runs())
    (small / "run.json").write_text(
        json.dumps(load_record(small) | {"status": "stopped"})
    )
    capsys.readouterr()
    assert posbench("runs") == 0
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "study",
        "settings",
        "status",
        "loss",
        "at",
        "1x",
        "MB",
    ]
    for folder, apart in (
        (small, ["tokens=128", "stopped"]),
        (large, ["tokens=256", "done"]),
    ):
        (cells,) = [line.split() for line in lines if folder.name in line]
        (loss,) = [
            row.nll
            for row in evaluation_rows(folder)
            if row.curve_name == "fixed_target" and row.length == 16
        ]
        size = sum(map(len, support.snapshot(folder).values()))
        assert cells == [
            folder.name,
            folder.parent.name,
            *apart,
            f"{loss:.3f}",
            f"{size / 1e6:.1f}",
        ]
    assert posbench("sample", large.name, "word", "--tokens", "1") == 0
    shutil.copytree(large, Path("outputs/other") / large.name)
    capsys.readouterr()
    assert posbench("sample", large.name, "word") == 2
    assert (
        f"several studies have a run {large.name}: name its folder, {large} or"
        " outputs/other/" in error_line(capsys)
    )


def test_version_has_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert posbench("--version") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("posbench ") and "torch " in second and "threads" in third
