"""What a user installs: the wheel carries the configurations and works far from the checkout."""

import json
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tarfile
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


def test_the_wheel_carries_every_configuration_and_nothing_of_the_tests(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    carried = {name.removeprefix("posbench/_configs/") for name in names if name.startswith("posbench/_configs/")}
    assert expected <= carried and len(expected) > 20
    assert "posbench/py.typed" in names
    assert not [name for name in names if name.startswith("tests/")]


@pytest.mark.full
def test_the_source_archive_carries_what_its_tests_read(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        carried = {name.partition("/")[2] for name in archive.getnames()}
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    named = set(re.findall(r'(?:ROOT|parents\[[12]\]) ?/ ?"([^"]+)"', text)) | {"constraints.txt", "locked.txt"}
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


@pytest.mark.full
def test_the_wheel_trains_two_steps_from_an_empty_folder(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Installed alone into a fresh environment; its dependencies are lent from this one, so no network is needed."""
    environment, work = tmp_path / "env", tmp_path / "empty"
    work.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    clean["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    where = subprocess.run(
        [python, "-c", "import posbench; print(posbench.__file__)"], cwd=work, env=clean, capture_output=True, text=True
    )
    assert str(environment) in where.stdout, where.stderr
    text = work / "text.txt"
    text.write_text("some words to learn from, again and again. " * 400, encoding="utf-8")
    overrides = [
        "data=text", f"data.path={text}", "data.tokenizer=bytes", "training.train_length=16", "training.batch_size=4",
        "training.tokens=128", "training.warmup_tokens=64", "model.n_layers=1", "model.d_model=16", "model.n_heads=2",
        "evaluation.ratios=[1,2]", "evaluation.targets=8", "evaluation.blocks=8", "tracking=none",
    ]  # fmt: skip
    command = [environment / "bin" / "posbench", "train", "encoding=alibi", *overrides]
    done = subprocess.run(command, cwd=work, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (record,) = work.glob("outputs/demo/alibi-s0-*/run.json")
    assert json.loads(record.read_text(encoding="utf-8"))["status"] == "done"
    assert json.loads(record.read_text(encoding="utf-8"))["tokens"] == 128
