"""Code runs only when it was typed. Each command reads each file that may come from a
stranger and names code; the code would make a file, `executed`.
"""

import contextlib
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from support import TINY, posbench

import posbench as api
from posbench import encodings
from posbench.config.schema import load_saved
from posbench.encodings.own import Recorded, class_of
from posbench.errors import UserError
from posbench.launch import compose

EVIL = """from pathlib import Path
import posbench

Path("executed").touch()


class Evil(posbench.Encoding):
    def distance_bias(self, distance, layer):
        return -0.5 * distance.float().expand(self.shape.n_heads, *distance.shape)
"""
DIGEST = hashlib.sha256(EVIL.encode()).hexdigest()
PLACE = "evil.py:Evil"
TYPED = [*TINY, "data.path=text.txt", "training.tokens=128"]

# What `encoding` of a run's config.yaml says. Pydantic refuses some, the others must
# not reach the code.
ENCODINGS: dict[str, Any] = {
    "no digest": {"name": "rope", "file": PLACE},
    "digest null": {"name": "rope", "file": PLACE, "file_sha256": None},
    "digest empty": {"name": "rope", "file": PLACE, "file_sha256": ""},
    "digest a number": {"name": "rope", "file": PLACE, "file_sha256": 0},
    "digest a list": {"name": "rope", "file": PLACE, "file_sha256": [DIGEST]},
    "digest in upper case": {
        "name": "rope",
        "file": PLACE,
        "file_sha256": DIGEST.upper(),
    },
    "digest of other code": {"name": "rope", "file": PLACE, "file_sha256": "0" * 64},
    "digest right": {"name": "evil", "file": PLACE, "file_sha256": DIGEST},
    "no class": {"name": "evil", "file": "evil.py"},
    "a path as the class": {"name": "evil", "file": "evil.py:../evil.py:Evil"},
    "a path with dots": {"name": "evil", "file": "./nowhere/../evil.py:Evil"},
    "a file as the name": {"name": "evil.py"},
    "a place as the name": {"name": PLACE},
    "inside layered": {"name": "layered", "layers": [{"name": PLACE}]},
    "a file inside layered": {
        "name": "layered",
        "layers": [{"name": "rope", "file": PLACE, "file_sha256": DIGEST}],
    },
    "inside heads": {"name": "heads", "heads": [{"name": PLACE}, {"name": "rope"}]},
    "inside randomized": {"name": "randomized", "inner": PLACE},
    "inside temperature": {"name": "temperature", "inner": PLACE},
}
COMMANDS = {
    "evaluate": ["evaluate", "run", "ratio=4"],
    "train from it": ["train", "start=run", "tracking=none"],
    "sample": ["sample", "run", "hello", "--tokens=1"],
    "export": ["export", "run", "exported", "code=true"],
    "show": ["show", "run"],
    "check": ["check", "run"],
    "rope": ["rope", "run"],
    "report": ["report", "run"],
    "runs": ["runs", "run"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a folder with a text and a trained run in `run`."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text("one two three four five " * 800, encoding="utf-8")
        assert posbench("train", *TYPED) == 0
        (run,) = Path("outputs/text").glob("rope-*")
        run.rename("run")
        shutil.rmtree("outputs")
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """Stand in a folder with a run, a text and a stranger's code, which nobody has
    approved.
    """
    folder = tmp_path / "here"
    shutil.copytree(trained, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, f"posbench_own_{DIGEST}", raising=False)
    Path("evil.py").write_text(EVIL, encoding="utf-8")


def has_run() -> bool:
    return Path("executed").exists()


def give_encoding(encoding: Any) -> None:
    """Let the run say that it has this encoding, its record in agreement."""
    path = Path("run/config.yaml")
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["encoding"] = encoding
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    with contextlib.suppress(UserError):  # what cannot be read has no id
        rename_run(load_saved(path).id)


def rename_run(name: str) -> None:
    """Write another id into all files of the run that have it."""
    folder = Path("run")
    record = folder / "run.json"
    former = json.loads(record.read_text(encoding="utf-8"))["id"]
    manifests = folder.glob("checkpoint/*/manifest.json")
    for path in (record, folder / "rows.jsonl", *manifests):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(former, name), encoding="utf-8")


@pytest.mark.sample(5)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", ENCODINGS)
def test_a_run_folder_runs_no_code(here, case, command):
    give_encoding(ENCODINGS[case])

    posbench(*COMMANDS[command])

    assert not has_run()


def test_an_anchor_in_a_run_folder_runs_no_code(here):
    path = Path("run/config.yaml")
    text = path.read_text(encoding="utf-8")
    name = "encoding:\n  name: rope\n"
    anchored = f"encoding:\n  name: rope\n  note: &code {PLACE}\n  file: *code\n"
    path.write_text(text.replace(name, anchored), encoding="utf-8")

    assert anchored in path.read_text(encoding="utf-8")
    assert posbench("evaluate", "run", "ratio=4") == 2
    assert not has_run()


# A file of --config-dir, its content, and the words that choose it.
NAMED = f"name: rope\nfile: {PLACE}\n"
YAML_FILES = {
    "encoding/x.yaml": (NAMED, ["train", "encoding=x"]),
    "encoding/digest.yaml": (
        f"{NAMED}file_sha256: {DIGEST}\n",
        ["train", "encoding=digest"],
    ),
    "encoding/inner.yaml": (
        f"name: randomized\ninner: {PLACE}\ninner_options: {{}}\n",
        ["train", "encoding=inner"],
    ),
    "encoding/layers.yaml": (
        f"name: layered\nlayers: [{{name: {PLACE}}}]\n",
        ["train", "encoding=layers"],
    ),
    "encoding/target.yaml": (
        f"name: rope\n_target_: {PLACE}\n",
        ["train", "encoding=target"],
    ),
    "experiment/x.yaml": (
        f"# @package _global_\nencoding:\n  file: {PLACE}\n",
        ["train", "experiment=x"],
    ),
    "experiment/default.yaml": (
        f"# @package _global_\ndefaults:\n  - override /encoding: {PLACE}\n",
        ["train", "experiment=default"],
    ),
    "experiment/tuned.yaml": (
        f"# @package _global_\ntuned:\n  encoding=rope:\n    encoding:\n"
        f"      file: {PLACE}\n",
        ["train", "experiment=tuned"],
    ),
    "sweep/x.yaml": (f"sets:\n  - encoding={PLACE}\n", ["sweep", "sweep=x"]),
    "sweep/inner.yaml": (
        f"sets:\n  - encoding=randomized encoding.inner={PLACE}\n",
        ["sweep", "sweep=inner"],
    ),
    "sweep/shared.yaml": (
        f"sets: [seed=0]\nshared: [encoding={PLACE}]\n",
        ["sweep", "sweep=shared"],
    ),
    "claim/x.yaml": (
        f"x:\n  claim: It runs.\n  source: Nobody (2026)\n"
        f"  runs: {{a: encoding={PLACE}, b: encoding=rope}}\n"
        "  predictions: [a.nll_1x < b.nll_1x]\n",
        ["reproduce", "x"],
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", YAML_FILES)
@pytest.mark.parametrize("last", ["prepare", "--dry-run", ""])
def test_a_yaml_file_runs_no_code(here, name, last):
    content, (command, *words) = YAML_FILES[name]
    path = Path("configs", name)
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    if last == "prepare" and command == "train":
        command = last
    settings = [*TYPED, "--config-dir=configs"]
    if last == "--dry-run" and command in ("sweep", "reproduce"):
        settings.append(last)

    assert posbench(command, *words, *settings) != 0

    assert not has_run()


@pytest.mark.slow
def test_a_study_of_a_stranger_runs_no_code(here):
    """Its rows as a file, what its sweep was typed with, and a job's script."""
    study = Path("study")
    study.mkdir()
    shutil.copytree("run", study / "run")
    words = {"run": [f"encoding={PLACE}", "seed=0"]}
    (study / "sweep.json").write_text(json.dumps(words), encoding="utf-8")
    jobs = study / ".jobs/slurm-x"
    jobs.mkdir(parents=True)
    (jobs / "commands.txt").write_text("touch executed\n", encoding="utf-8")
    assert posbench("report", "study") == 0
    rows = pd.read_csv("study/report/rows.csv")
    rows["encoding.file"] = PLACE
    rows["encoding.file_sha256"] = DIGEST
    rows.to_parquet("kept.parquet")

    posbench("report", "kept.parquet")
    posbench("reproduce", "all", "kept.parquet", "--dry-run")
    posbench("sweep", *TYPED, "study=study", "encoding=rope")

    assert not has_run()


def test_a_python_call_runs_no_code_of_a_folder(here):
    give_encoding(ENCODINGS["digest right"])

    run = api.load("run")

    with pytest.raises(UserError, match="code not approved here"):
        run.model()
    assert not has_run()


TYPED_WORDS = [
    ["train", "--cfg", f"encoding={PLACE}"],
    ["train", "--cfg", "encoding=randomized", f"encoding.inner={PLACE}"],
    ["show", PLACE, "--text"],
    ["show", "randomized", f"inner={PLACE}"],
    ["properties", PLACE],
    ["bench", PLACE, "--rounds=1"],
    ["sweep", "--dry-run", *TYPED, f"encoding=rope,{PLACE}"],
]


@pytest.mark.parametrize("words", TYPED_WORDS)
def test_typed_code_runs(here, words):
    """So that the payload of the tests above is real."""
    posbench(*words)

    assert has_run()


def test_code_of_a_python_call_runs(here):
    api.train(TYPED, encoding=PLACE, study="mine")

    assert has_run()


def test_approved_code_runs_for_a_folder_that_names_its_digest(here):
    assert posbench("show", PLACE, "--text") == 0
    give_encoding(ENCODINGS["digest right"])
    Path("executed").unlink()
    encodings.REGISTERED.clear()
    sys.modules.pop(f"posbench_own_{DIGEST}")

    assert load_saved(Path("run/config.yaml")).build_encoding().name == "evil"

    assert has_run()


@pytest.mark.parametrize("digest", [None, "", "0" * 64, DIGEST.upper()])
def test_approved_code_runs_for_no_other_digest(here, digest):
    assert posbench("show", PLACE, "--text") == 0

    with pytest.raises(UserError):
        class_of(Recorded(PLACE, digest))


def test_a_plain_text_is_not_typed(here):
    with pytest.raises(UserError, match="nothing in a file is executed"):
        compose.single([*TYPED, f"encoding={PLACE}"])
    assert not has_run()
