"""The command line as a user meets it: output, one-line errors, exit codes, and real runs into an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
import yaml
from support import posbench

from posbench import encodings, installed, tasks
from posbench.cli import listing
from posbench.cli.app import main
from posbench.config import compose
from posbench.config.external import load_saved
from posbench.config.identity import run_id
from posbench.encodings import families
from posbench.encodings.base import Encoding
from posbench.evaluation import probes
from posbench.launch import plans
from posbench.run_folder.folder import load_record
from posbench.run_folder.rows import evaluation_rows
from posbench.terminal import exits

# Two updates of a very small model, from an empty folder.
TINY = [*support.TINY, "training.tokens=128", "runtime.cache=cache"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty current folder with a text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "")  # so that what a command sets is undone
    monkeypatch.delenv("HYDRA_FULL_ERROR")
    support.write_text()


def train(*overrides: str) -> int:
    return posbench("train", *TINY, "data.path=text.txt", *overrides)


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr that a failed command leaves."""
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    return lines[0]


def runs(study: str = "demo") -> list[str]:
    return sorted(path.name for path in (Path("outputs") / study).iterdir() if path.is_dir())


def the_run(study: str = "demo") -> Path:
    """The folder of the only run in a study."""
    (name,) = runs(study)
    return Path("outputs") / study / name


def unread(*arguments: str) -> tuple[int, str]:
    """A command whose output nobody reads: its exit code and its stderr."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "posbench", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
    os.close(write)
    return done.returncode, done.stderr


# -- help, version -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from posbench.cli.app import main; code = main(); "
        "print(*(name for name in sys.modules if '.' not in name), file=sys.stderr); sys.exit(code)"
    )
    done = process("-c", code, *arguments)
    assert done.returncode == 0 and "posbench" in done.stdout
    heavy = {"torch", "hydra", "omegaconf", "numpy", "datasets", "tokenizers", "wandb"}
    if arguments != ["train", "--help"]:  # newer Typer itself uses pydantic for a command's arguments
        heavy.add("pydantic")
    assert not heavy & set(done.stderr.split())


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_help_lists_the_encodings(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert posbench(command, "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in encodings.names())


def test_help_of_evaluate_lists_its_settings_and_the_extensions(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("evaluate", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert {"protocol", "length", "device", "yarn", "interpolate"} <= set(re.findall(r"\w+", shown))


def test_help_of_list_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("list", "nothing") == 2
    sections = error_line(capsys).partition("(there are ")[2].rstrip(")").split(", ")
    assert posbench("list", "--help") == 0
    assert set(sections) <= set(re.findall(r"\w+", capsys.readouterr().out)) and len(sections) == 10


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench() == 0
    assert "Commands:" in capsys.readouterr().out


# -- errors ------------------------------------------------------------------------------------------------------------


HINTS = {
    "trian": "No such command 'trian'. Did you mean 'train'?",
    "report": "Missing argument",
    "sweep encoding=rope seeds=5": "unknown key 'seeds' (several seeds are a list: posbench sweep seed=0,1,2,3,4 or ",
    "train --nix": "No such option: --nix",
    "train encoding=rop": "unknown encoding 'rop': did you mean 'rope'?",
    "train encoding=alibi encoding.base=2": "'alibi' has no option 'base'",
    "train -m encoding=rope,alibi": "one configuration is one run: 'posbench sweep encoding=rope,alibi' takes ",
    "train --config-dir nix": "no folder",
    "evaluate": "Missing argument",
    "evaluate nix": "nix does not exist: expected run folders or study folders",
    "evaluate .": "no run folder in .",
    "evaluate length=128": "which run? posbench evaluate outputs/STUDY/RUN length=128",
    "train --seed 3": "Settings are key=value, without dashes: seed=3",
    "--seed=3": "Settings are key=value, without dashes: seed=3",
    "evaluate --length 128 RUN": "Settings are key=value, without dashes: length=128",
    "train --restrat": "(Possible options: --restart)",
    "train steps=100": "unknown key 'steps' (a budget is in tokens: training.tokens; a step has training.batch_size ",
    "train encoding=None": "unknown encoding 'None': did you mean 'none'?",
    "train device=gpu": "runtime.device is 'gpu': a GPU is runtime.device=cuda (here: auto, ",
    "bench rope --shape 124": "unknown shape '124': did you mean '124m'?",
    "evaluate gpt2": "a model is a folder, or OWNER/NAME on the hub, such as openai-community/gpt2",
    "report gpt2": "gpt2 does not exist: expected run folders or study folders, such as outputs/demo\n",
    "list rope": "list has no section 'rope': 'posbench show rope --text' describes one encoding",
    "list sections": "list has no section 'sections' (there are encodings, patterns, extensions, probes, tasks, ",
    "train rope": "cannot read 'rope': did you mean 'encoding=rope'?",
    "train wikitext_2": "cannot read 'wikitext_2': did you mean 'data=wikitext-2'?",
    "sweep six": "cannot read 'six': did you mean 'sweep=six'?",
    f"train {'x' * 300}": "expected key=value, such as encoding=alibi or seed=1",
}


@pytest.mark.parametrize(("line", "hint"), HINTS.items())
def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], line: str, hint: str) -> None:
    assert posbench(*line.split()) == 2
    assert hint in error_line(capsys) + "\n"
    assert not Path("outputs").exists()


def test_help_at_80_columns_cuts_no_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert posbench("--help") == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert len(commands.splitlines()) > 12 and "..." not in commands


def test_a_traceback_is_shown_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("train", "encoding=rop", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err
    assert posbench("train", "encoding=rop") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_control_characters_in_an_error_are_spelt_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("train", "study='\x1b[2J\u202ex'") == 2
    line = error_line(capsys)
    assert "\x1b" not in line and "\u202e" not in line


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("two\nlines"), 1, "error: ValueError: two lines (posbench --debug shows where)"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_what_is_no_error_of_posbench_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, code: int, said: str
) -> None:
    def broken() -> None:
        raise error

    assert exits.run(broken) == code
    assert error_line(capsys) == said


@pytest.mark.full
def test_a_closed_pipe_is_silent() -> None:
    command = f"'{sys.executable}' -m posbench list --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("{", "")


@pytest.mark.full
def test_a_terminal_without_unicode_is_no_error() -> None:
    done = process("-m", "posbench", "list", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


# -- cfg, list ---------------------------------------------------------------------------------------------------------


def test_cfg_prints_the_configuration_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("train", "--cfg", "encoding=t5", "seed=3") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["encoding"]["name"], shown["encoding"]["max_distance"], shown["seed"]) == ("t5", 64, 3)
    assert not Path("outputs").exists()


def test_cfg_understands_the_words_of_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("train", "--cfg", "length=128", "extension=yarn:factor=4,ntk", "threads=2") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["evaluation"]["ratios"] == [2.0] and shown["runtime"]["threads"] == 2
    assert shown["evaluation"]["extensions"] == ["yarn:factor=4", "ntk"]


WRAPPER = """
from typing import Any
from posbench import encodings
from posbench.encodings.base import Encoding, Shape

class Wrapper(Encoding):
    def __init__(
        self,
        shape: Shape,
        inner: str = "alibi",
        inner_options: dict[str, Any] | None = None,
        layers: list[dict[str, Any]] | None = None,
        unlisted: int = 1,
    ) -> None:
        super().__init__(shape)
        self.inner = encodings.build(inner, shape, inner_options)
"""


@pytest.fixture
def wrapper(tmp_path: Path) -> Iterator[str]:
    """An installed encoding with nested options, and the folder of its YAML."""
    (tmp_path / "own/encoding").mkdir(parents=True)
    yaml_text = "name: wrapper\ninner: alibi\ninner_options: null\nlayers: null\n"
    (tmp_path / "own/encoding/wrapper.yaml").write_text(yaml_text)
    with support.encoding_installed(tmp_path / "site", "wrapper", WRAPPER):
        yield str(tmp_path / "own")


@pytest.mark.full
def test_options_of_a_wrapped_encoding_need_no_sign(wrapper: str, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["encoding=wrapper", "encoding.inner=rope", "encoding.inner_options.base=500"]
    layers = "encoding.layers=[{name:rope,window:8},{name:none}]"
    config = compose.single([*chosen, layers], Path(wrapper))
    assert config.encoding.options == {
        "inner": "rope",
        "inner_options": {"base": 500},
        "layers": [{"name": "rope", "window": 8}, {"name": "none"}],
    }
    assert posbench("train", "--config-dir", wrapper, "--cfg", *chosen) == 0
    assert yaml.safe_load(capsys.readouterr().out)["encoding"]["inner_options"] == {"base": 500}
    at_once = ["encoding=wrapper", "encoding.inner=rope", "encoding.inner_options={base: 500}"]
    assert posbench("train", "--config-dir", wrapper, "--cfg", *at_once) == 0
    assert yaml.safe_load(capsys.readouterr().out)["encoding"]["inner_options"] == {"base": 500}
    ((_, of_sweep), *_) = compose.configs([*chosen[:2], "encoding.inner_options.base=500,600"], Path(wrapper))
    assert of_sweep.encoding.options == {**config.encoding.options, "layers": None}
    assert compose.single([*chosen, "encoding.unlisted=2"], Path(wrapper)).encoding.options["unlisted"] == 2
    for wrong, message in {
        "encoding.inner_options.bse=500": "'rope' has no option 'bse'",
        "encoding.iner_options.base=500": "'wrapper' has no option 'iner_options'",
        "encoding.inner.base=500": "encoding.inner is {'base': 500} for 'wrapper'",
    }.items():
        assert posbench("train", "--config-dir", wrapper, *chosen, wrong) == 2
        assert message in error_line(capsys)


def test_an_installed_encoding_without_its_yaml_is_told_where_it_is_looked_for(
    wrapper: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert posbench("train", "encoding=wrapper") == 2
    assert "'wrapper' is installed, but there is no encoding/wrapper.yaml beside ours" in error_line(capsys)


@pytest.fixture
def brought(tmp_path: Path) -> Iterator[Path]:
    """The YAML that an installed encoding's package brings; nothing may import the package to find it."""
    path = tmp_path / "site/brought/posbench_configs/encoding/brought.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: brought\nslopes: [1, 1, 1, 1]\n")
    code = "from posbench.encodings.alibi import ALiBi\n\n\nclass Brought(ALiBi):\n    pass\n"
    with support.encoding_installed(tmp_path / "site", "brought", code, module="brought.inside"):
        yield path


@pytest.mark.full
def test_an_installed_encodings_yaml_is_found_in_its_package(
    brought: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert installed.config_folders() == [brought.parent.parent] and "brought" not in sys.modules
    config = compose.single(["encoding=brought"])
    assert (config.encoding.name, config.encoding.options) == ("brought", {"slopes": [1, 1, 1, 1]})
    (tmp_path / "own/encoding").mkdir(parents=True)
    (tmp_path / "own/encoding/brought.yaml").write_text("name: brought\nslopes: [2, 2, 2, 2]\n")
    for slope, arguments in (
        (1, ["encoding=brought"]),
        (2, ["encoding=brought", "--config-dir", str(tmp_path / "own")]),  # what is named stands above what was found
    ):
        assert posbench("train", "--cfg", *arguments) == 0
        assert yaml.safe_load(capsys.readouterr().out)["encoding"]["slopes"] == [slope] * 4
    assert [job.config.encoding.name for job in plans.resolve([["encoding=brought,rope"]])] == ["brought", "rope"]


def test_an_installed_packages_yaml_is_data_only(brought: Path, capsys: pytest.CaptureFixture[str]) -> None:
    brought.write_text("name: brought\nslopes: !!python/name:os.system\n")
    assert posbench("train", "encoding=brought") == 2
    assert "could not determine a constructor for the tag" in error_line(capsys)


def test_list_describes_every_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("list", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["encodings"]] == encodings.names()
    for row in shown["encodings"]:
        assert row["title"] and row["beyond"] and row["source"] and row["checked_against"], row["name"]
    rows = {row["name"]: row for row in shown["encodings"]}
    numbers = {name: tuple(rows[name][key] for key in ("acts", "parameters", "max_length")) for name in rows}
    assert numbers["none"] == ("nowhere", 0, None) and numbers["learned"] == ("input", 8192, 64)
    assert (rows["rope"]["acts"], rows["alibi"]["acts"]) == ("queries and keys", "scores")
    where = {name: tuple(rows[name][key] for key in ("kernels", "cache", "architectures")) for name in rows}
    assert where["rope"] == ("any", "yes", "Llama, GPT-NeoX") and where["alibi"][:2] == ("with a bias", "yes")
    assert where["fox"][1] == "with x" and where["randomized"][1] == where["canon"][1] == "no"
    assert where["stick_breaking"] == ("own", "yes", "posbench's class")
    assert [rows[name]["length_dependent"] for name in ("minmax", "longrope", "rope")] == [True, True, False]
    assert (rows["rope"]["paper"], rows["index"]["paper"]) == ("arXiv:2104.09864", None)
    assert "<R(m) q, R(n) k>" in rows["rope"]["document"] and "Source:" not in rows["rope"]["document"]
    assert rows["rope"]["options"] == {"base": 10000.0, "layout": "interleaved"}
    assert "yarn" in rows["rope"]["extensions"]
    assert [row["name"] for row in shown["probes"]] == probes.names()
    assert next(row["options"] for row in shown["probes"] if row["name"] == "shuffle") == {"keep": None}
    assert [row["name"] for row in shown["tasks"]] == [f"task/{name}" for name in tasks.names()]
    assert all(row["title"] and row["source"] and row["deviates"] and row["options"] for row in shown["tasks"])
    (row,) = (row for row in shown["tasks"] if row["name"] == "task/passkey")
    assert "Mohtashami" in row["source"] and "f3  f0  key" in row["document"] and row["options"]["depth"] is None
    assert {"builtin", "text"} <= {row["name"] for row in shown["data"]}
    assert {"demo", "small", "gpt124m"} <= {row["name"] for row in shown["experiments"]}


def test_list_is_aligned_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("list") == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "encodings:" and "data:" in lines and "experiments:" in lines
    rope, cope = (next(line for line in lines if line.split()[:1] == [name]) for name in ("rope", "cope"))
    assert rope.index("Rotary") == cope.index("Contextual") and "arXiv:2104.09864" in rope
    listed_tasks = out.partition("\ntasks:\n")[2].partition("\ndata:\n")[0].splitlines()
    assert [line.split()[0] for line in listed_tasks] == [f"task/{name}" for name in tasks.names()]


def test_list_has_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("list", "Task", "sweeps", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["tasks", "sweeps"] and "six" in {row["name"] for row in told["sweeps"]}


@pytest.mark.parametrize("name", ["rope", "bipe", "longrope", "layered/gemma3", "task/passkey"])
def test_show_text_prints_all_that_is_known_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert posbench("show", name, "--text") == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    parts = ["Source: ", "Deviates: "] if name.startswith("task/") else [
        "Beyond the training length: ", "Paper: ", "Link: https://arxiv.org/abs/", "Checked against: ", "Options",
        "Learned parameters: ", f"posbench train encoding={name}",
    ]  # fmt: skip
    assert [part for part in parts if part not in said] == []


def test_show_text_of_what_is_no_encoding_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("show", "rop", "--text") == 2
    assert "unknown encoding 'rop': did you mean 'rope'?" in error_line(capsys)
    assert posbench("show", "rope", "--text", "--png", "a.png") == 2
    assert "--text draws no picture" in error_line(capsys)
    Path("run").mkdir()
    Path("run", "run.json").touch()
    assert posbench("show", "run", "--text") == 2
    assert "run is a run: --text describes an encoding" in error_line(capsys)


def test_every_hook_that_does_something_has_its_place_in_the_list() -> None:
    silent = {"prepare", "additions"}  # state for other hooks, and what those add once more as data
    assert {hook for hook in Encoding.HOOKS if families.acts(frozenset({hook})) == "nowhere"} == silent


def test_every_encoding_is_of_a_family_and_one_that_is_not_installed_is_of_the_rest() -> None:
    by_name = {name: families.family(name) for name in encodings.names()}
    assert set(by_name.values()) <= set(families.FAMILIES)
    assert (by_name["none"], by_name["learned"], by_name["rope"]) == ("nowhere", "input", "queries and keys")
    assert by_name["shaw"] == "scores"  # the first of its places
    assert by_name["randomized"] == by_name["layered"] == families.family("not_installed") == "other encodings"


def test_parameters_are_listed_at_the_size_of_the_demo() -> None:
    demo = compose.single(["experiment=demo"])
    sizes = {name: getattr(demo.model, name) for name in ("d_model", "n_heads", "n_layers")}
    assert {**sizes, "train_length": demo.training.train_length} == listing.DEMO


def test_version_has_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert posbench("--version") == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("posbench ") and "torch " in second and "threads" in third


# -- runs --------------------------------------------------------------------------------------------------------------


def test_train_writes_the_run_folder_of_its_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("encoding=alibi") == 0
    folder = the_run()
    config = load_saved(folder / "config.yaml")
    assert folder.name == run_id(config) and folder.name.startswith("alibi-s0-")
    record = load_record(folder)
    assert record["status"] == "done" and record["command"].startswith("posbench train tracking=none")
    assert not list(Path("outputs").rglob(".hydra")) and not list(Path("outputs").rglob("*.log"))
    assert train("encoding=alibi") == 0  # the same command is the same run
    assert the_run() == folder


@pytest.mark.full
def test_restart_moves_the_old_run_aside() -> None:
    assert train() == 0
    (name,) = runs()
    assert train("--restart") == 0
    assert runs() == [name, f"{name}.old-1"]


def test_a_single_run_is_composed_once_and_told_by_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    composing = compose.compose
    compose._composed.cache_clear()  # of what other tests have composed
    monkeypatch.setattr(compose, "compose", lambda *args, **kwargs: calls.append(args) or composing(*args, **kwargs))
    monkeypatch.setenv("POSBENCH_DEBUG", "1")  # as --debug sets it
    before = dict(os.environ)
    monkeypatch.setattr(sys, "argv", ["posbench", "train", *TINY, "data.path=text.txt", "--restart", "--debug"])
    assert main() == 0
    assert len(calls) == 1
    set_since = {key for key in os.environ if os.environ[key] != before.get(key)}
    assert not {key for key in set_since if key.startswith(("POSBENCH", "HYDRA"))}
    assert load_record(the_run())["command"] == " ".join(["posbench train", *TINY, "data.path=text.txt"]).replace(
        "evaluation.ratios=[1,2]", "'evaluation.ratios=[1,2]'"
    )


@pytest.mark.full
def test_a_path_alone_trains_on_that_text_and_is_the_run_of_data_text(capsys: pytest.CaptureFixture[str]) -> None:
    alone = [setting for setting in TINY if setting != "data=text"]
    command = ["-m", "posbench", "train", *alone]
    done = process(*command, "data.path=text.txt")
    assert done.returncode == 0, done.stderr
    (name,) = runs()
    record = load_record(the_run())
    assert (record["data"]["name"], record["data"]["documents"]["test"]) == ("text", 8)
    assert train() == 0 and train(f"data.path={Path('text.txt').absolute()}") == 0 and runs() == [name]
    assert posbench("sweep", *alone, "data.path=./text.txt") == 0
    assert [name for name in runs() if name not in ("report", ".jobs")] == [name]
    capsys.readouterr()
    for arguments in (["train"], ["sweep"]):
        assert posbench(*arguments, *alone, "data=builtin", "data.path=text.txt") == 2
        told = "error: data.path is 'text.txt', which data=builtin does not read: data=text does"
        assert error_line(capsys) == told


@pytest.mark.full
def test_a_saved_configuration_is_held_to_its_source() -> None:
    assert train("study=mine") == 0
    saved = (the_run("mine") / "config.yaml").read_text().replace("subset: null", "subset: other")
    Path("new.yaml").write_text(saved)
    refused = process("-m", "posbench.launch.run", "new.yaml")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "error: data.subset is 'other', which data=text does not read: data=hub does\n"


def test_a_diverged_run_is_exit_code_1_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("training.learning_rate=1e35") == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "step 2" in lines[-1] and not any("Traceback" in line or "HYDRA" in line for line in lines)


WRONG_TEXT = {
    "data.path=nix.txt": "data.path: no file matches 'nix.txt': did you mean 'text.txt'?",
    "data.path=paper.pdf": "data.path: 'paper.pdf' ends in '.pdf': expected ",
    "data.path=latin.txt": "'latin.txt' is not UTF-8 text: byte 3 is 0xe9",
    "data.path=short.txt": "the training text has ",
    "data.path=rows.jsonl": "'rows.jsonl' line 1 has no column 'text': it has body",
    "data.tokenizer=nix.json": "data.tokenizer is 'nix.json': expected bpe, bytes",
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("override", WRONG_TEXT)
def test_a_mistake_in_the_text_leaves_nothing_behind(override: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("paper.pdf").write_bytes(b"%PDF")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("short.txt").write_text("short")
    Path("rows.jsonl").write_text('{"body": "x"}\n')
    for command in (["train"], ["sweep", "encoding=rope,none"]):
        given = [*TINY, "data.path=text.txt", override]
        if "short" in override and command != ["train"]:
            continue  # long enough for other runs of a sweep, for all that is known
        assert posbench(*command, *given) == 2
        err = capsys.readouterr().err
        assert WRONG_TEXT[override] in err.splitlines()[-1], command
        assert "Error executing job" not in err and "HYDRA_FULL_ERROR" not in err
        assert not [path for path in Path("outputs").rglob("*") if path.is_file() or path.name[:4] in ("rope", "none")]


def test_evaluate_adds_lengths_given_as_a_comma_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    folder = str(the_run())
    assert posbench("evaluate", folder, "length=24,64", "protocol=fixed_target", "windowed=false") == 0
    rows = [json.loads(line) for line in (Path(folder) / "evaluation.jsonl").read_text().splitlines()]
    assert {16, 24, 32, 64} == {row["length"] for row in rows if row["protocol"] == "fixed_target"}
    assert {16, 32} == {row["length"] for row in rows if row["protocol"] == "nonoverlap"}
    assert load_saved(Path(folder) / "config.yaml").evaluation.ratios == (1, 2)  # what was asked at training stays
    capsys.readouterr()
    for override, message in {
        "length=0": "length is 0: expected lengths in tokens, such as 8,32",
        "lenght=32": "unknown key 'lenght': did you mean 'length'?",
        "protocol=fixed": "evaluation.protocols is 'fixed'",
        "split=tset": "did you mean 'test'?",
        "targets=17": "evaluation.targets is 17: expected at most training.train_length, 16",
        "threads=0": "runtime.threads is 0: expected at least 1",
        "runtime.compile=true": "unknown key 'runtime.compile' (evaluate takes ",
        "training.tokens=5": "unknown key 'training.tokens' (evaluate takes ",
        "at_tokens=5": "unknown key 'evaluation.at_tokens'",
        "offsets=5": "evaluation.offsets is [5]: expected []: they are for tasks",
        "length": "cannot read 'length'",
    }.items():
        assert posbench("evaluate", folder, override) == 2
        assert message in error_line(capsys)


@pytest.mark.full
def test_evaluate_takes_several_runs_and_one_that_fails_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("seed=0") == train("seed=1") == 0
    broken, whole = (Path("outputs/demo") / name for name in runs())
    lengths = iter([48, 64, 80])
    for named in (["outputs/demo"], ["outputs/demo/rope-s*"], [str(broken), str(whole)]):
        length = next(lengths)
        assert posbench("evaluate", *named, f"length={length}", "protocol=fixed_target", "windowed=false") == 0
        for folder in (broken, whole):
            assert length in {row.length for row in evaluation_rows(folder)}
    capsys.readouterr()
    assert posbench("evaluate", "outputs/demo", "length=0") == 2
    assert "length is 0: expected lengths in tokens" in error_line(capsys)
    shutil.rmtree(broken / "checkpoint")
    assert posbench("evaluate", "outputs/demo", "length=96", "windowed=false") == 1
    assert 96 in {row.length for row in evaluation_rows(whole)}
    why, last = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "has no checkpoint" in why and last == f"error: 1 of 2 runs not evaluated: {broken}"


@pytest.mark.full
def test_a_run_is_evaluated_with_its_own_copy_of_a_tokenizer_that_is_gone() -> None:
    assert train() == 0
    shutil.copy(the_run() / "tokenizer.json", "own.json")
    assert train("data.tokenizer=own.json", "study=own") == 0
    folder = the_run("own")
    Path("own.json").unlink()
    assert posbench("evaluate", str(folder), "length=48", "windowed=false") == 0
    assert 48 in {row.length for row in evaluation_rows(folder)}


@pytest.mark.full
def test_a_cleaned_run_is_small_and_is_still_evaluated(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(train(f"seed={seed}", "runtime.checkpoint_every_steps=1") == 0 for seed in (0, 1))
    cleaned, unfinished = (Path("outputs/demo") / name for name in runs())
    (unfinished / "run.json").write_text(json.dumps(load_record(unfinished) | {"status": "stopped"}))
    kept, weights = support.snapshot(unfinished / "checkpoint"), support.snapshot(cleaned / "checkpoint")
    capsys.readouterr()
    assert posbench("clean", "outputs/demo") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("MB in 1 of 2 runs") and second.endswith(f"unfinished or in use: {unfinished}")
    assert support.snapshot(unfinished / "checkpoint") == kept
    rest = support.snapshot(cleaned / "checkpoint")
    assert sorted(rest) == [f"step-00000002/{name}" for name in ("manifest.json", "model.safetensors", "state.json")]
    assert all(weights[name] == content for name, content in rest.items())
    assert posbench("evaluate", str(cleaned), "length=48", "windowed=false") == 0
    assert 48 in {row.length for row in evaluation_rows(cleaned)}


def test_a_run_cleans_itself_and_the_same_command_again_completes_it() -> None:
    assert train("runtime.clean=true") == 0
    folder = the_run()
    assert not list(folder.rglob("optimizer.pt"))
    assert train("ratio=1,2,4") == 0
    assert 64 in {row.length for row in evaluation_rows(folder)}


def test_an_evaluation_has_a_precision_of_its_own() -> None:
    def dtypes(folder: Path) -> set[str | None]:
        return {row.dtype for row in evaluation_rows(folder)}

    given = ["training.precision=fp32", "protocol=fixed_target", "windowed=false"]
    assert train(*given, "precision=bf16") == 0
    folder = the_run()
    assert dtypes(folder) == {"bf16"}
    assert load_record(folder)["attempt"]["dtype"] == "fp32"
    assert posbench("evaluate", str(folder), "precision=fp32") == 0
    assert dtypes(folder) == {"fp32"}
    assert train(*given, "precision=bf16") == 0 and runs() == [folder.name]  # it makes no other run
    assert dtypes(folder) == {"bf16"}


MISTYPED = {
    "extension=yarn:fctor=2": "'yarn' has no option 'fctor'",
    "extension=pi,yarn:factor=abc": "factor is 'abc' for 'yarn'",
    "extension=yarn:factor=0.5": "factor is 0.5: expected at least 1",
    "extension=yarn:factor=2:factor=4": "gives factor twice",
    "extension=yran": "unknown extension 'yran': did you mean 'yarn'?",
    "protocol=nonoverlop": "did you mean 'nonoverlap'?",
    "task=repeet": "unknown task 'repeet': did you mean 'repeat'?",
}


@pytest.mark.full
def test_a_mistyped_evaluation_ends_with_exit_code_2_and_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    for override, message in MISTYPED.items():
        key, _, value = override.partition("=")
        values = ",".join(f"'{item}'" for item in value.split(","))
        assert train(f"evaluation.{key}s=[{values}]") == 2
        assert message in error_line(capsys)
        assert not list(Path().glob("outputs/*/*/run.json"))  # nothing was begun
    assert train() == 0
    folder = the_run()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    for override, message in MISTYPED.items():
        assert posbench("evaluate", str(folder), override) == 2
        assert message in error_line(capsys)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    done = process("-m", "posbench", "evaluate", str(folder), "extension=yarn:fctor=2")  # as a user's shell sees it
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and "'yarn' has no option 'fctor'" in line


@pytest.mark.full
def test_a_saved_configuration_runs_without_hydra_and_without_torchs_compiler() -> None:
    assert train() == 0
    shutil.copy(the_run() / "config.yaml", "saved.yaml")
    done = process("-X", "importtime", "-m", "posbench.launch.run", "saved.yaml", "--run-dir", "again")
    assert done.returncode == 0, done.stderr
    assert "torch.optim" in done.stderr and not {"hydra.main", "torch._dynamo"} & set(done.stderr.split())
    again = Path("again/checkpoint/step-00000002/model.safetensors").read_bytes()
    assert again == (the_run() / "checkpoint/step-00000002/model.safetensors").read_bytes()
    Path("saved.yaml").write_text("hydra: {callbacks: {x: {_target_: os.system}}}\n")
    refused = process("-m", "posbench.launch.run", "saved.yaml")
    assert refused.returncode == 2
    assert refused.stderr == "error: saved.yaml: missing key 'study'\n"


# -- output that nobody reads ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_output_that_nobody_reads_stops_no_work() -> None:
    code, said = unread("train", *TINY, "data.path=text.txt")
    assert (code, len(runs())) == (0, 1), said
    assert {load_record(Path("outputs/demo") / run)["status"] for run in runs()} == {"done"}
    code, said = unread("report", "outputs/demo")
    assert code == 0 and Path("outputs/demo/report/index.html").is_file(), said
    shutil.rmtree("outputs/demo/report")
    code, said = unread("sweep", *TINY, "data.path=text.txt", "seed=0,1")
    assert code == 0 and Path("outputs/demo/report/index.html").is_file(), said
    assert unread("list") == (0, "")


@pytest.mark.full
def test_a_log_that_nobody_reads_stops_no_work() -> None:
    command = f"'{sys.executable}' -m posbench train {' '.join(TINY)} data.path=text.txt 2>&1 >/dev/null | true"
    subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], check=True, timeout=120)
    assert load_record(the_run())["status"] == "done"


# -- what may not be written -------------------------------------------------------------------------------------------


def test_outputs_that_cannot_be_written_are_one_line_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("runtime.outputs=text.txt") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: text.txt/demo/rope-s0-")
    told = "posbench needs to read or write it; change its rights, or choose another folder"
    assert f"Not a directory: {told}" in line
    refused = PermissionError(13, "Permission denied", "/data/outputs")
    assert exits.report(refused) == 2
    assert f"/data/outputs: Permission denied: {told}" in error_line(capsys)
