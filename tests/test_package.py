"""What a user installs: the wheel carries the configurations and works far from the checkout."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_every_pin_but_torchs_has_its_digests() -> None:
    pinned, locked = (
        [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
        for name in ("constraints.txt", "locked.txt")
    )
    assert [line.partition(" ")[0] for line in locked] == [pin for pin in pinned if not pin.startswith("torch==")]
    assert all(re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64}){1,3}", line) for line in locked)
    assert sum(line.count("sha256") for line in locked) > len(locked)  # compiled ones have one for each Python


def test_the_distribution_has_one_name_everywhere_which_is_not_the_other_projects() -> None:
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    example = tomllib.loads((ROOT / "examples/posbench-log-bias/pyproject.toml").read_text())["project"]
    assert example["dependencies"] == [name] != ["posbench"]
    wheels = set(re.findall(r"\S*?(\w+)-\S*-py3-none-any\.whl", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert wheels == {name.replace("-", "_")}


@pytest.mark.full
def test_the_wheel_carries_every_configuration_and_nothing_of_the_tests(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    carried = {name.removeprefix("posbench/_configs/") for name in names if name.startswith("posbench/_configs/")}
    assert expected <= carried and len(expected) > 20
    package = [path for path in (ROOT / "posbench").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT).as_posix() for path in package} <= set(names)  # also what is no Python
    (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    assert "posbench = posbench.cli:main" in zipfile.ZipFile(wheel).read(points).decode()
    assert not [name for name in names if name.startswith("tests/")]


COMMANDS = """
import sys
from posbench.cli import main
from posbench.launch import plans
from posbench.claims import claim

TINY = "data=text data.path=text.txt data.tokenizer=bytes model.n_layers=1 model.d_model=16 model.n_heads=2"
TINY += " training.train_length=16 training.batch_size=4 training.tokens=128 training.warmup_tokens=64 cache=c"
TINY += " evaluation.ratios=[1,2] evaluation.targets=8 evaluation.blocks=8 tracking=none runtime.threads=1"
for line in (
    "list --json",
    "show rope --text",
    f"train encoding=alibi {TINY}",
    "report outputs/demo",
):
    sys.argv = ["posbench", *line.split()]
    if code := main():
        sys.exit(f"{line}: {code}")
assert len(plans.resolve(plans.read_sets("compare", []))) == 6  # a dry run would measure for longer
assert claim.read(["alibi_copies_longer"])
checkout = [name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(ROOT)]
sys.exit(f"from the checkout: {checkout}" if checkout else 0)
"""


@pytest.mark.full
def test_the_wheels_files_are_enough_for_the_commands(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Unpacked before an empty folder's process, whose other packages are this environment's."""
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    (empty / "text.txt").write_text("some words to learn from, again and again. " * 400, encoding="utf-8")
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-c", f"ROOT = {str(ROOT / 'posbench')!r}\n{COMMANDS}"]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert (empty / "outputs/demo/report/index.html").stat().st_size > 10_000


@pytest.mark.full
def test_the_source_archive_carries_what_its_tests_read(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        carried = {name.partition("/")[2] for name in archive.getnames()}
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r'(?:ROOT|parents\[[12]\]) ?/ ?"([^"]+)"', text)) | {"constraints.txt", "locked.txt"}
    named |= {"CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "outputs/README.md", ".ci/installed"}
    folders = ("configs", "docs", "examples", "scripts", "tests")
    there = {
        path.relative_to(ROOT).as_posix()
        for name in named
        for path in ((ROOT / name).rglob("*") if name in folders else [ROOT / name])
        if path.is_file()
        and path.suffix in (".py", ".md", ".yaml", ".png", ".txt", ".sh", ".ipynb", ".toml", "")
        and not {"__pycache__", "build"} & set(path.parts)
    }
    assert len(there) > 300 and there - carried == set()
    assert {name.partition("/")[0] for name in carried} - {path.name for path in ROOT.iterdir()} <= {"", "PKG-INFO"}
    assert not [name for name in carried if name.startswith(("outputs/", "dist/")) and name != "outputs/README.md"]
