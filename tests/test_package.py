"""What a user installs: the wheel carries the configurations and works far from the
checkout.
"""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest
import support

ROOT = pathlib.Path(__file__).parent.parent

COMMANDS = """
import sys
from posbench.cli import main

TINY = "data=text data.path=text.txt data.tokenizer=bytes model.n_layers=1 model.d_model=16 model.n_heads=2"
TINY += " training.train_length=16 training.batch_size=4 training.tokens=128 training.warmup_tokens=64 cache=c"
TINY += " evaluation.ratios=[1,2] evaluation.targets=8 evaluation.blocks=8 tracking=none runtime.threads=1"
for line in ("list --json", "show rope --text", f"train encoding=alibi {TINY}", "report outputs/text",
             "sweep sweep=compare --dry-run", "reproduce alibi_copies_longer --dry-run"):
    sys.argv = ["posbench", *line.split()]
    if code := main():
        sys.exit(f"{line}: {code}")
for name, module in sys.modules.items():
    if str(getattr(module, "__file__", "")).startswith(CHECKOUT):
        sys.exit(f"from the checkout: {name}")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command = [*build, "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


CARRIED = [("configs", "posbench/_configs"), ("posbench", "posbench")]


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "inside"), CARRIED)
def test_the_wheel_carries_every_configuration_and_module(wheel, folder, inside):
    names = set(wheel.namelist())
    source = ROOT / folder
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(source).as_posix()
            assert f"{inside}/{name}" in names


@pytest.mark.slow
def test_the_wheel_carries_no_tests(wheel):
    for name in wheel.namelist():
        assert not name.startswith("tests/")


@pytest.mark.slow
def test_the_wheel_is_enough_for_the_commands(wheel, tmp_path, monkeypatch):
    """The wheel is unpacked, and commands run in an empty folder with this
    environment's other packages.
    """
    site = tmp_path / "site"
    wheel.extractall(site)
    text = "some words to learn from, again and again. " * 400
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)

    checkout = str(ROOT / "posbench")
    code = COMMANDS.replace("CHECKOUT", repr(checkout))
    python = [sys.executable, "-P", "-c", code]
    done = subprocess.run(python, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    report = tmp_path / "outputs" / "text" / "report" / "index.html"
    assert report.stat().st_size > 10_000


def test_links_of_the_packages_page_lead_into_the_repository():
    page = "[![drawn](docs/a.png)](docs/b.md) [c](https://example.org) [d](#e)"
    home = "https://github.com/somebody/posbench"

    metadata = support.script("metadata")
    absolute = metadata.absolute(page, home, "v1.2.3")

    drawn = f"[![drawn]({home}/raw/v1.2.3/docs/a.png)]({home}/blob/v1.2.3/docs/b.md)"
    assert absolute == f"{drawn} [c](https://example.org) [d](#e)"
