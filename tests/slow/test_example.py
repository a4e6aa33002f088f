"""The example package as its README shows it: its own tests, its commands."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import support
from test_docs import PACKAGE, ROOT

from posbench.config import shipped

pytestmark = pytest.mark.slow


def run(*words: str, folder: Path, path: Path) -> str:
    """Return what Python prints in `folder`, with `path` on its path; fail the test if
    Python fails.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{path}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where the example is installed; this needs neither network nor
    pip.
    """
    folder = tmp_path_factory.mktemp("example")
    run(
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(PACKAGE),
        folder=folder,
        path=folder,
    )
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    assert "3 passed" in run(
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"{PACKAGE}/tests",
        folder=tmp_path,
        path=site,
    )


def test_it_is_measured_drawn_and_swept(site: Path, tmp_path: Path) -> None:
    (one,) = json.loads(
        run(
            "-m",
            "posbench",
            "properties",
            "log_bias",
            "--json",
            folder=tmp_path,
            path=site,
        )
    )
    assert one["relative_logit"] < 1e-6 and one["purpose"] == "scores"
    run(
        "-m",
        "posbench",
        "show",
        "log_bias",
        "--png",
        "log_bias.png",
        folder=tmp_path,
        path=site,
    )
    assert (tmp_path / "log_bias.png").stat().st_size > 10_000
    support.write_text(tmp_path)
    command = [
        "encoding=log_bias,none",
        *support.TINY,
        "data.path=text.txt",
        "training.tokens=128",
    ]
    run(
        "-m",
        "posbench",
        "sweep",
        *command,
        "runtime.cache=cache",
        "--n-jobs",
        "1",
        folder=tmp_path,
        path=site,
    )
    (saved,) = tmp_path.glob("outputs/demo/log_bias-s0-*/config.yaml")
    assert shipped.load(saved)["encoding"]["strength"] == 1.0
