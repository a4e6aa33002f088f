"""A stranger's configuration folder: each payload works on Hydra alone, and posbench refuses it in one line."""

import dataclasses
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from support import posbench

from posbench.config import compose
from posbench.launch import job

WHOLE = "# @package _global_\n"
CALL = "{_target_: pandas.read_pickle, filepath_or_buffer: EVIL}"
LOGGING = "{version: 1, formatters: {f: {(): pandas.read_pickle, filepath_or_buffer: EVIL}}, root: {level: INFO}}"
PARAMETER = "{params: {x: " + CALL + "}}"


@dataclasses.dataclass(frozen=True)
class Payload:
    """Files of a folder DIR, or beside it; EVIL in them is a pickle whose reading makes the file `canary`."""

    name: str
    files: dict[str, str]
    refused: str
    arguments: tuple[str, ...] = ("experiment=x",)
    links: dict[str, str] = dataclasses.field(default_factory=dict)


def in_experiment(name: str, text: str, refused: str, *arguments: str, **settings: Any) -> Payload:
    files = {"DIR/experiment/x.yaml": f"{WHOLE}study: x\n{text}\n", **settings.pop("files", {})}
    return Payload(name, files, refused, arguments=("experiment=x", *arguments), **settings)


KEY, DEFAULT = "x.yaml, line 3: a key is Hydra's own", "a default is Hydra's own"
SWEEP = ("-m", "seed=0")  # sweepers are made in a multirun only

# Where Hydra runs code, sets the environment, writes anywhere, or starts something else than was asked for.
PAYLOADS = [
    in_experiment("logging factory", "hydra: {job_logging: " + LOGGING + "}", KEY),
    in_experiment("logging factory, many", "hydra: {job_logging: " + LOGGING + "}", KEY, *SWEEP),
    in_experiment(
        "truncates a file",
        "hydra: {job_logging: {version: 1, handlers: {h: {class: logging.FileHandler, filename: VICTIM, mode: w}}, "
        "root: {handlers: [h]}}}",
        KEY,
    ),
    in_experiment("environment", "hydra: {job: {env_set: {WANDB_BASE_URL: 'http://127.0.0.1:1'}}}", KEY),
    in_experiment("path of programs", "hydra: {job: {env_set: {PATH: DIR/bin}}}", KEY),
    in_experiment("copied environment", "hydra: {job: {env_copy: [HOME]}}", KEY),
    in_experiment("run folder", "hydra: {run: {dir: ELSEWHERE}}", KEY),
    in_experiment("launcher", "defaults: [{override /hydra/launcher: joblib}]", DEFAULT),
    in_experiment("callback", "hydra: {callbacks: {x: " + CALL + "}}", KEY),
    in_experiment("merged key", "<<: {hydra: {job: {env_set: {A: B}}}}", "line 3: '<<' is not allowed"),
    in_experiment("escaped key", '"\\x68ydra": {job: {env_set: {A: B}}}', KEY),
    in_experiment(
        "default in a package of Hydra's",
        "defaults: [/pay@hydra.job_logging: lg]",
        DEFAULT,
        files={"DIR/pay/lg.yaml": LOGGING},
    ),
    Payload(
        "innocent model",
        {"DIR/model/big.yaml": "defaults: [gpt, /pay@_global_.hydra.job_logging: lg]\n", "DIR/pay/lg.yaml": LOGGING},
        DEFAULT,
        arguments=("model=big",),
    ),
    in_experiment(
        "package line",
        "defaults: [/pay/lg]",
        "lg.yaml, line 1: a package is Hydra's own",
        files={"DIR/pay/lg.yaml": f"# @package hydra.job_logging\n{LOGGING}"},
    ),
    in_experiment(
        "package line that Hydra reads 512 characters of",
        "defaults: [/pay/lg]",
        "a package is Hydra's own",
        files={"DIR/pay/lg.yaml": f"{'# @package hydra':\n>512}x\njob_logging: {LOGGING}"},
    ),
    in_experiment(
        "package by folder",
        "defaults: [/hydra/pay]",
        "pay.yaml: the name is Hydra's own",
        files={"DIR/hydra/pay.yaml": f"job_logging: {LOGGING}"},
    ),
    in_experiment(
        "included from outside",
        "defaults: [../../assets/payload]",
        "line 3: the default '../../assets/payload' is not one of a group",
        *SWEEP,
        files={"assets/payload.yaml": f"# @package _global_\nhydra: {{sweeper: {PARAMETER}}}"},
    ),
    Payload(
        "linked folder",
        {"hidden/experiment/x.yaml": f"{WHOLE}study: x\nhydra: {{sweeper: {PARAMETER}}}", "DIR/model/x.yaml": "a: 1"},
        "DIR/experiment is a link: expected a file",
        arguments=("experiment=x", *SWEEP),
        links={"DIR/experiment": "hidden/experiment"},
    ),
    Payload(
        "linked file",
        {"hidden/x.txt": f"{WHOLE}study: x\nhydra: {{sweeper: {PARAMETER}}}", "DIR/experiment/y.yaml": WHOLE},
        "DIR/experiment/x.yaml is a link: expected a file",
        arguments=("experiment=x", *SWEEP),
        links={"DIR/experiment/x.yaml": "hidden/x.txt"},
    ),
    in_experiment(
        "hidden folder",
        "defaults: [/.pay/lg]",
        "line 3: the default '/.pay/lg' is not one of a group",
        *SWEEP,
        files={"DIR/.pay/lg.yaml": f"# @package _global_\nhydra: {{sweeper: {PARAMETER}}}"},
    ),
    in_experiment("created by a resolver", "hydra: {sweeper: {params: '${oc.create:{x: " + CALL + "}}'}}", KEY, *SWEEP),
    in_experiment("called by a sweeper", "hydra: {sweeper: " + PARAMETER + "}", KEY, *SWEEP),
]


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A folder to work in, and runs that do nothing but look at what Hydra made of their surroundings."""
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text("precious")
    Path("evil.pkl").write_bytes(pickle.dumps(_Touch()))
    found: dict[str, Any] = {}

    def main(cfg: DictConfig) -> None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        found.update(environment=dict(os.environ), folder=hydra.runtime.output_dir, launcher=hydra.launcher._target_)
        found["copied"] = list(hydra.job.env_copy)

    monkeypatch.setattr(job, "main", main)
    monkeypatch.setenv("POSBENCH_FAILURES", "")
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield found
    root.handlers[:], root.level = before


class _Touch:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("canary"),)


def written(payload: Payload) -> list[str]:
    """The payload's files, and the command line that reads them."""
    here = Path.cwd()
    names = {"EVIL": here / "evil.pkl", "VICTIM": here / "victim", "ELSEWHERE": here / "elsewhere", "DIR/bin": "bin"}
    for name, text in payload.files.items():
        for word, path in names.items():
            text = text.replace(word, str(path))
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    for name, target in payload.links.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(here / target)
    return ["--config-dir", "DIR", *payload.arguments]


def harmed(effects: dict[str, Any], before: dict[str, str]) -> bool:
    changed = {name for name in effects.get("environment", {}) if effects["environment"][name] != before.get(name)}
    return bool(
        Path("canary").exists()
        or Path("victim").read_text() != "precious"
        or changed & {"WANDB_BASE_URL", "PATH", "A"}
        or "elsewhere" in effects.get("folder", "")
        or effects.get("copied")
        or "joblib" in effects.get("launcher", "")
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of what a payload returns in the place of a formatter or callback
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
def test_the_payload_is_real(payload: Payload, effects: dict[str, Any]) -> None:
    before = dict(os.environ)
    arguments = written(payload)
    try:
        many = ["--multirun"] if "-m" in arguments else []
        job.run_with_hydra([*many, *(argument for argument in arguments if argument != "-m")])
    except (Exception, SystemExit):  # what it does is done by then
        pass
    finally:
        from hydra.core.global_hydra import GlobalHydra

        GlobalHydra.instance().clear()
    assert harmed(effects, before)


@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
def test_a_strangers_folder_sets_nothing_of_hydras(
    payload: Payload, effects: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(os.environ)
    assert posbench("train", *written(payload)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {Path.cwd()}/DIR/") and payload.refused in error and error.count("\n") == 1
    assert not harmed(effects, before) and not effects


@pytest.mark.sample(8)
@pytest.mark.parametrize("payload", PAYLOADS, ids=lambda payload: payload.name)
def test_the_second_line_holds_alone(
    payload: Payload, effects: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the check of the files, the comparison of Hydra's part refuses each payload."""
    monkeypatch.setattr(compose, "refuse_all_but_settings", lambda folder: None)
    before = dict(os.environ)
    assert posbench("train", *written(payload)) == 2
    assert "error: " in capsys.readouterr().err
    assert not harmed(effects, before) and not effects


def test_the_search_path_is_a_strangers_too(effects: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    written(PAYLOADS[0])
    for source in (f"file://{Path('DIR').absolute()}", "DIR"):
        assert posbench("train", f"hydra.searchpath=['{source}']", "experiment=x") == 2
        assert KEY in capsys.readouterr().err
    assert not effects


# -- what is refused before it costs time or is understood in two ways ------------------------------------------------

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(6)
)
FORMS = {
    "billion laughs": (LAUGHS, "line 2: aliases are not allowed"),
    "tag": ("x: !!python/object/apply:os.system [ls]\n", "line 1: the tag 'tag:yaml.org,2002:python/object/apply:os"),
    "tag that says nothing": ("x: ! y\n", "line 1: the tag '!' is not allowed"),
    "tag of text": ("x: !!binary aGk=\n", "the tag 'tag:yaml.org,2002:binary' is not allowed"),
    "target": ("a: [{_target_: os.system}]\n", "line 1: _target_ is not allowed"),
    "target at the top": ("name: rope\n_target_: os.system\n", "line 2: _target_ is not allowed"),
    "target that is escaped": ('inner: [{a: {"_tar\\x67et_": os.system}}]\n', "line 1: _target_ is not allowed"),
    "partial with an anchor": ("x: &a {_partial_: true}\n", "line 1: _partial_ is not allowed"),
    "target within text": ("a: '{_target_: os.system}'\n", "line 1: {_target_: os.system} is not allowed"),
    "resolver": ("project: ${oc.env:HOME}\n", "line 1: '${oc.env:HOME}' is not allowed, only other keys"),
    "resolver within text": ("project: a${b}c${ oc.env : HOME }\n", "is not allowed, only other keys"),
    "resolver named by a key": ("project: '${${b}:HOME}'\n", "is not allowed, only other keys"),
    "resolver in a key": ("'${oc.env:HOME}': 1\n", "is not allowed, only other keys"),
    "key that is a list": ("? [a]\n: 1\n", "line 1: expected a key, found a list or a mapping"),
    "deep": ("x: " + "[" * 3000, "is nested deeper than 20 levels"),
    "large": ("x: " + "y" * 70_000 + "\n", "bytes: expected at most 64,000"),
    "package with more": ("# @package _global_ x\na: 1\n", "line 1: cannot read '# @package _global_ x'"),
    "hidden package": ("a: 1\x85# @package hydra.job\n", "line 2: a package is Hydra's own"),
    "default by a key": ("defaults: ['${a}/b']\n", "line 1: the default '${a}/b' is not one of a group"),
    "default of a scheme": ("defaults: ['file:///etc/x']\n", "line 1: the default 'file:///etc/x' is not one of"),
    "defaults within": ("x: {defaults: [{/hydra/launcher: joblib}]}\n", "line 1: a default is Hydra's own"),
    "not UTF-8": (b"name: \xff\n", "is not UTF-8 text"),
    "empty": ("", "model/mine.yaml is empty: expected keys and values"),
    "only a comment": ("# mine\n", "model/mine.yaml is empty: expected keys and values"),
    "list": ("- 1\n", "model/mine.yaml is not keys and values"),
    "text": ("just text\n", "model/mine.yaml is not keys and values"),
    "unclosed": ("name: [rope\n", "DIR/model/mine.yaml, line 2: "),
    "tab": ("name: rope\n\tx: 1\n", "DIR/model/mine.yaml, line 2: "),
    "two documents": ("a: 1\n---\nb: 1\n", "line 2: a second document is not allowed"),
    "byte order mark": (b"\xef\xbb\xbf# @package _global_\n", "model/mine.yaml begins with a byte order mark"),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_another_form_is_named_at_once(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    content, refused = FORMS[form]
    Path("DIR/model").mkdir(parents=True)
    Path("DIR/model/mine.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    before = time.monotonic()
    assert posbench("train", "--config-dir", "DIR", "--cfg", "job") == 2
    assert time.monotonic() - before < 5  # some tenths on a machine that has nothing else to do
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "DIR/model/mine.yaml" in error and refused in error
    assert error.count("\n") == 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("text", ["study: x\n", "\n# mine\n# @package _global_\nstudy: x\n"])
def test_an_experiment_without_its_first_line_is_told_so(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DIR/experiment").mkdir(parents=True)
    Path("DIR/experiment/x.yaml").write_text(text)
    assert posbench("train", "--config-dir", "DIR", "experiment=x") == 2
    assert "DIR/experiment/x.yaml does not begin with '# @package _global_'" in capsys.readouterr().err
    Path("DIR/experiment/x.yaml").write_text(f"{WHOLE}{text}")
    assert posbench("train", "--config-dir", "DIR", "--cfg", "job", "experiment=x") == 0
    assert "study: x" in capsys.readouterr().out


def test_what_is_no_file_of_text_is_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model/x.yaml")
    assert posbench("train", "--config-dir", str(tmp_path), "model=x") == 2
    assert "model/x.yaml is not a regular file: expected YAML text" in capsys.readouterr().err
    os.remove(tmp_path / "model/x.yaml")
    with (tmp_path / "model/x.yaml").open("wb") as file:
        file.truncate(2**31)  # takes no room on the disk
    assert posbench("train", "--config-dir", str(tmp_path), "model=x") == 2
    assert "model/x.yaml has 2,147,483,648 bytes: expected at most 64,000" in capsys.readouterr().err


def test_a_folder_of_much_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    for number in range(9):
        (tmp_path / f"model/{number}.yaml").write_text(f"a: {'x' * 60_000}\n")
    assert posbench("train", "--config-dir", str(tmp_path)) == 2
    assert "has more than 500,000 bytes of YAML: expected configurations only" in capsys.readouterr().err
    monkeypatch.setattr("posbench.config.users_files._MOST_ENTRIES", 9)
    assert posbench("train", "--config-dir", str(tmp_path)) == 2
    assert "holds more than 9 files: expected configurations only" in capsys.readouterr().err


@pytest.mark.full
def test_plain_settings_go_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "DIR/experiment/mine.yaml": "# @package _global_\n# Mine.\ndefaults:\n  - demo\n  - override /model: big\n"
        "study: hydra-and-${experiment_name}\nmodel: {d_model: 64}\n".replace("${experiment_name}", "co"),
        "DIR/model/big.yaml": "defaults: [gpt, _self_]\nd_ff: ${model.d_model}\n",
        "DIR/.hidden/x.yaml": "hydra: {}\n",
        "DIR/notes.txt": "hydra: {}\n",
    }
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    Path("DIR/link.txt").symlink_to("notes.txt")
    chosen = ["experiment=mine", "hydra.run.dir=elsewhere", "+hydra.job.env_set.MINE=1"]
    assert posbench("train", "--config-dir", "DIR", "--cfg", "job", "--resolve", *chosen) == 0
    shown = capsys.readouterr().out
    assert "study: hydra-and-co" in shown and "d_ff: 64" in shown


SWEEPS = {  # the lines of a stranger's sweep file, or all of it, and what is said of it
    "sets: ['encoding=rope hydra.searchpath=[file:///tmp]']": "has 'hydra.searchpath=[file:///tmp]'",
    "sets: [encoding=rope]\nshared: [hydra/launcher=joblib]": "has 'hydra/launcher=joblib'",
    "sets: ['+encoding.x={_target_:os.system}']": "_target_:os.system} is not allowed",
    LAUGHS: "line 2: aliases are not allowed",
    "encoding=rope +hydra.run.dir=out": "Hydra's own part is set on the command line only",
    "encoding=rope study=${oc.env:HOME}": "only other keys may be interpolated",
    "encoding=rope +encoding._target_=os.system": "is not allowed, a configuration is data only",
    "encoding=rope runtime.outputs=/elsewhere": "runtime.outputs",
    "encoding=rope seed=range(0,1000000000)": "gives more than 1000 values",
    "encoding=rope seed=range(0,900) training.learning_rate=range(1,900)": "has 809,100 runs: expected at most 10,000",
    "encoding=rope seed=1 seed=2": "seed is given twice",
    f"encoding=rope seed={'9' * 5000}": "has a number of 5,000 digits",
}


@pytest.mark.parametrize("text", SWEEPS, ids=lambda text: text[:40])
def test_a_strangers_sweep_chooses_nothing_of_hydras(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    content = f"# A sweep.\nsets: {json.dumps([text])}\n" if text.startswith("encoding=") else text
    (tmp_path / "sweep/x.yaml").write_text(content, encoding="utf-8")
    assert posbench("sweep", "sweep=x", "--config-dir", str(tmp_path)) == 2
    error = capsys.readouterr().err
    assert SWEEPS[text] in error and error.count("\n") == 1


ELSEWHERE = ["/tmp/elsewhere", "~/x", "../x", "a/../../x", "'${study}/x'", "'a${oc.env:HOME}'", "['x']", "''"]


@pytest.mark.sample(10)
@pytest.mark.parametrize("key", ["outputs", "cache"])
@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_strangers_file_does_not_say_where_is_written(
    key: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DIR/experiment").mkdir(parents=True)
    Path("DIR/experiment/x.yaml").write_text(f"{WHOLE}study: x\nruntime: {{{key}: {place}}}\n")
    for command in ("train", "sweep"):
        assert posbench(command, "--config-dir", "DIR", "experiment=x", "encoding=rope") == 2
        error = capsys.readouterr().err
        assert f"runtime.{key}" in error or "is not allowed" in error
        assert error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["DIR"]


@pytest.mark.full
def test_a_strangers_file_may_name_a_folder_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("DIR/experiment").mkdir(parents=True)
    Path("DIR/experiment/x.yaml").write_text(f"{WHOLE}study: x\nruntime: {{outputs: my runs/new, cache: .cache}}\n")
    command = ("train", "--config-dir", "DIR", "experiment=x", "--cfg", "job")
    assert posbench(*command) == 0
    assert "outputs: my runs/new" in capsys.readouterr().out
    assert posbench(*command, f"runtime.outputs={tmp_path}/there", "cache=/tmp/c") == 0  # what is typed may
    assert f"outputs: {tmp_path}/there" in capsys.readouterr().out


@pytest.mark.parametrize(
    "override", ["runtime.outputs=/tmp/x", "outputs=../x", "++runtime.cache='/x'", "'runtime={outputs:/x}'"]
)
def test_a_strangers_sweep_does_not_say_where_is_written(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    for text in (f'sets: [encoding=rope]\nshared: ["{override}"]', f'sets: ["encoding=rope {override}"]'):
        (tmp_path / "sweep/x.yaml").write_text(text)
        assert posbench("sweep", "sweep=x", "--config-dir", str(tmp_path)) == 2
        assert "is chosen on the command line only" in capsys.readouterr().err


def test_a_strangers_sweep_is_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "DIR/sweep").mkdir(parents=True)
    (tmp_path / "private").write_text("password: hunter2\n")
    (tmp_path / "DIR/sweep/x.yaml").symlink_to(tmp_path / "private")
    assert posbench("sweep", "sweep=x", "--config-dir", str(tmp_path / "DIR")) == 2
    error = capsys.readouterr().err
    assert "DIR/sweep/x.yaml is a link: expected a file" in error and "password" not in error
