"""What a user installs: the wheel carries the configurations and works far from the
checkout.
"""

import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent

COMMANDS = """
import sys
from posbench.cli import main

TINY = "data=text data.path=text.txt data.tokenizer=bytes model.n_layers=1 model.d_model=16 model.n_heads=2"
TINY += " training.train_length=16 training.batch_size=4 training.tokens=128 training.warmup_tokens=64 cache=c"
TINY += " evaluation.ratios=[1,2] evaluation.targets=8 evaluation.blocks=8 tracking=none runtime.threads=1"
for line in ("list --json", "show rope --text", f"train encoding=alibi {TINY}", "report outputs/demo",
             "sweep sweep=compare --dry-run", "reproduce alibi_copies_longer --dry-run"):
    sys.argv = ["posbench", *line.split()]
    if code := main():
        sys.exit(f"{line}: {code}")
checkout = [name for name, module in sys.modules.items() if (getattr(module, "__file__", "") or "").startswith(ROOT)]
sys.exit(f"from the checkout: {checkout}" if checkout else 0)
"""


@pytest.mark.slow
def test_the_wheel_carries_every_configuration_and_is_enough_for_the_commands(tmp_path):
    """The wheel is unpacked, and commands run in an empty folder with this
    environment's other packages.
    """
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    names = set(wheel.namelist())
    site = tmp_path / "site"
    empty = tmp_path / "empty"
    for folder, inside in (("configs", "posbench/_configs"), ("posbench", "posbench")):
        files = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
        assert {
            f"{inside}/{path.relative_to(ROOT / folder).as_posix()}" for path in files
        } <= names
    assert not [name for name in names if name.startswith("tests/")]
    wheel.extractall(site)
    empty.mkdir()
    (empty / "text.txt").write_text(
        "some words to learn from, again and again. " * 400, encoding="utf-8"
    )
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-P",
        "-c",
        f"ROOT = {str(ROOT / 'posbench')!r}\n{COMMANDS}",
    ]
    done = subprocess.run(
        command, cwd=empty, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr
    assert (empty / "outputs/demo/report/index.html").stat().st_size > 10_000
