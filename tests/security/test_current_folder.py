"""A command that is given in a stranger's folder imports nothing from there, nor does a process that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import TINY, write_text

PACKAGE = Path(__file__).parent.parent.parent
MODULES = ("yaml.py", "torch.py", "json.py", "hydra_plugins/evil.py", "posbench/__init__.py", "wandb/__init__.py")
RUN = [*TINY, "data.path=text.txt", "training.tokens=128", "runtime.cache=cache", "seed=0"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Texts and, beside them, modules that make the file `canary`."""
    write_text(tmp_path)
    for name in MODULES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'canary')!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    return tmp_path


def python(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = str(PACKAGE)
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def test_the_payload_is_real(folder: Path) -> None:
    """What `python -m` starts imports from the current folder."""
    assert python(folder, "-m", "posbench.launch.run", "--help").returncode != 0
    assert (folder / "canary").exists()


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        pytest.param(["train", "encoding=rope", *RUN], marks=pytest.mark.slow),
        pytest.param(["sweep", "encoding=rope", *RUN], marks=pytest.mark.full),
        pytest.param(["bench", "rope", "--rounds", "1"], marks=pytest.mark.slow),
    ],
    ids=lambda arguments: " ".join(argument for argument in arguments if argument not in RUN),
)
def test_nothing_is_imported_from_the_current_folder(arguments: list[str], folder: Path) -> None:
    done = python(folder, "-P", "-m", "posbench", *arguments)  # as the console script, whose path is its own
    assert not (folder / "canary").exists(), (folder / "canary").read_text()
    assert done.returncode == 0, done.stderr
