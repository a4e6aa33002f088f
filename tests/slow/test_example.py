"""The example package as its README shows it: its own tests, its commands."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import support
from test_docs import PACKAGE, run

from posbench.config import shipped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where it is installed; needs neither network nor pip."""
    folder = tmp_path_factory.mktemp("example")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(PACKAGE)]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    done = run("-m", "pytest", "-p", "no:cacheprovider", str(PACKAGE / "tests"), folder=tmp_path, path=site)
    assert "3 passed" in done.stdout


def test_it_is_measured_drawn_and_swept(site: Path, tmp_path: Path) -> None:
    (one,) = json.loads(run("-m", "posbench", "properties", "log_bias", "--json", folder=tmp_path, path=site).stdout)
    assert one["relative_logit"] < 1e-6 and one["purpose"] == "scores"
    run("-m", "posbench", "show", "log_bias", "--png", "log_bias.png", folder=tmp_path, path=site)
    assert (tmp_path / "log_bias.png").stat().st_size > 10_000
    support.write_text(tmp_path)
    command = ["encoding=log_bias,none", *support.TINY, "data.path=text.txt", "training.tokens=128"]
    run("-m", "posbench", "sweep", *command, "runtime.cache=cache", "--n-jobs", "1", folder=tmp_path, path=site)
    (saved,) = tmp_path.glob("outputs/demo/log_bias-s0-*/config.yaml")
    assert json.loads(saved.with_name("run.json").read_text(encoding="utf-8"))["status"] == "done"
    assert shipped.load(saved)["encoding"]["strength"] == 1.0
