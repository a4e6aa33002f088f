"""The example package as its README shows it: its own tests, its commands, and a folder that stands above its YAML."""

import json
from pathlib import Path

import pytest
import support
from test_docs import PACKAGE, run

from posbench.config import shipped

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example") / "site"
    support.installed(PACKAGE, folder)
    return folder


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    done = run("-m", "pytest", "-p", "no:cacheprovider", str(PACKAGE / "tests"), folder=tmp_path, path=site)
    assert "3 passed" in done.stdout


def test_it_is_measured_drawn_and_swept(site: Path, tmp_path: Path) -> None:
    (one,) = json.loads(run("-m", "posbench", "properties", "log_bias", "--json", folder=tmp_path, path=site).stdout)
    assert one["relative_logit"] < 1e-6 and one["purpose"] == "scores"
    run("-m", "posbench", "show", "log_bias", "--png", "log_bias.png", folder=tmp_path, path=site)
    assert (tmp_path / "log_bias.png").stat().st_size > 10_000
    support.write_text(tmp_path)
    own = tmp_path / "my_configs/encoding/log_bias.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: log_bias\nstrength: 2.0\n", encoding="utf-8")
    command = ["encoding=log_bias,none", *support.TINY, "data.path=text.txt", "training.tokens=128"]
    command += ["runtime.cache=cache", "--n-jobs", "1"]
    run("-m", "posbench", "sweep", *command, "study=brought", folder=tmp_path, path=site)
    run("-m", "posbench", "sweep", *command, "study=own", "--config-dir", "my_configs", folder=tmp_path, path=site)
    strengths = {}
    for study in ("brought", "own"):
        (saved,) = tmp_path.glob(f"outputs/{study}/log_bias-s0-*/config.yaml")
        assert json.loads(saved.with_name("run.json").read_text(encoding="utf-8"))["status"] == "done"
        strengths[study] = shipped.load(saved)["encoding"]["strength"]
    assert strengths == {"brought": 1.0, "own": 2.0}
