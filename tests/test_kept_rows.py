"""Kept rows: archives of strangers are only data, and rows stand beside a user's own where they may be compared."""

import dataclasses
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import support
from fake_study import SCHEMES, Truth, configured, write_run, write_study

from posbench import report
from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.ledger import claim, outcome
from posbench.report import figures
from posbench.report.comparison import load
from posbench.run_folder import archive, finding
from posbench.show import properties

ROOT = Path(__file__).parents[1]


def pack(folders: Sequence[Path], path: Path, final: bool = False) -> Path:
    path.write_bytes(support.script("keep_rows").pack(list(folders), final))
    return path


# -- archives ----------------------------------------------------------------------------------------------------------


def test_the_same_runs_make_the_same_archive_and_come_out_as_they_went_in(template: Config, tmp_path: Path) -> None:
    study = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]}, seeds=2)
    (study / "rope-s0-00000000").mkdir()  # no run
    folders = finding.run_folders([study])
    first, again = pack(folders, tmp_path / "a.tar.xz"), pack(folders[::-1], tmp_path / "b.tar.xz")
    assert first.read_bytes() == again.read_bytes()
    (tmp_path / "out").mkdir()
    assert [run.name for run in archive.unpack(first, tmp_path / "out")] == [run.name for run in folders]
    for folder in folders:
        for name in archive.FILES:
            assert (tmp_path / "out" / "fake" / folder.name / name).read_bytes() == (folder / name).read_bytes()


def test_blocks_that_no_verdict_needs_may_be_left_out(template: Config, tmp_path: Path) -> None:
    study = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]}, seeds=1)
    (run,) = finding.run_folders([study])
    blocks = (run / "evaluation_blocks.jsonl").read_bytes()
    (run / "evaluation_blocks.jsonl").write_bytes(
        re.sub(rb'"checkpoint_step": \d+', b'"checkpoint_step": 1', blocks) + blocks
    )
    problems = blocks.replace(b'"task": null', b'"task": "copy"')
    with (run / "evaluation_blocks.jsonl").open("ab") as file:
        file.write(problems)
    (tmp_path / "out").mkdir()
    (kept,) = archive.unpack(pack([run], tmp_path / "a.tar.xz", final=True), tmp_path / "out")
    assert (kept / "evaluation_blocks.jsonl").read_bytes() == blocks != (run / "evaluation_blocks.jsonl").read_bytes()
    assert (kept / "evaluation.jsonl").read_bytes() == (run / "evaluation.jsonl").read_bytes()


def entry(name: str, kind: bytes = tarfile.REGTYPE, size: int = 3, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, target
    return info


RUN = "study/rope-s0-12345678"


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (entry(f"../{RUN}/run.json"), "expected files such as"),
        (entry(f"/{RUN}/run.json"), "expected files such as"),
        (entry(f"{RUN}/../../../run.json"), "expected files such as"),
        (entry(f"{RUN}/checkpoint/run.json"), "expected files such as"),
        (entry(f"{RUN}/model.pt"), "expected files such as"),
        (entry(f"{RUN}/run.json\n"), "expected files such as"),
        (entry(".hidden/run/run.json"), "expected files such as"),
        (entry(f"{RUN}/run.json", tarfile.SYMTYPE, 0, "/etc/passwd"), "expected files such as"),
        (entry(f"{RUN}/run.json", tarfile.LNKTYPE, 0, f"{RUN}/config.yaml"), "expected files such as"),
        (entry(f"{RUN}/run.json", tarfile.FIFOTYPE, 0), "expected files such as"),
        (entry(f"{RUN}/evaluation.jsonl", size=2000), "unpacks to more than 1,500 bytes"),
    ],
)
def test_a_strangers_archive_writes_nothing_elsewhere(
    info: tarfile.TarInfo, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bytes" in message:
        monkeypatch.setattr(archive, "LARGEST", 1500)
    path, out = tmp_path / "rows.tar.xz", tmp_path / "inside" / "out"
    out.mkdir(parents=True)
    with tarfile.open(path, "w:xz") as packed:
        packed.addfile(info, io.BytesIO(b"x" * info.size))
    with pytest.raises(UserError) as caught:
        archive.unpack(path, out)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not [*out.rglob("*")] and {one.name for one in tmp_path.iterdir()} == {"rows.tar.xz", "inside"}


@pytest.mark.parametrize("content", [b"", b"no archive", b"\xfd7zXZ\x00\x00\x04 cut short"])
def test_what_is_no_archive_is_one_line(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.tar.xz").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot be read as a \.tar\.xz of rows") as caught:
        archive.unpack(tmp_path / "rows.tar.xz", tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "link.tar.xz").symlink_to(tmp_path / "rows.tar.xz")
    with pytest.raises(UserError, match="cannot be read"):
        archive.unpack(tmp_path / "link.tar.xz", tmp_path)


def test_an_installed_posbench_says_where_kept_rows_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "configs_dir", lambda: tmp_path / "posbench" / "_configs")
    with pytest.raises(UserError, match="docs/rows of a checkout of posbench's repository, not in a wheel"):
        archive.kept()


# -- beside a user's runs ----------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "measure", lambda names: [])
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])


@pytest.mark.full
@pytest.mark.usefixtures("quick")
def test_kept_schemes_stand_beside_a_new_one_and_what_differs_is_said(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = write_study(tmp_path / "kept", template, {name: SCHEMES[name] for name in ("rope", "alibi")}, seeds=5)
    write_run(kept, configured(template, "t5", 7), Truth(3.7, 0.1))  # another seed of a scheme that the user has
    longer = dataclasses.replace(template, training=dataclasses.replace(template.training, tokens=2_000_000))
    write_study(kept, longer, {"none": SCHEMES["none"]}, seeds=3)
    write_run(kept, configured(template, "fire", 0), Truth(3.7, 0.1))
    other = next(kept.glob("fire-*/evaluation.jsonl"))
    other.write_text(other.read_text().replace('"targets_sha256": "', '"targets_sha256": "other'))
    rows = pack(finding.run_folders([kept]), tmp_path / "rows.tar.xz")

    mine = write_study(tmp_path / "mine", template, {"t5": SCHEMES["t5"]}, seeds=5)
    assert support.posbench("report", str(mine), "--with", str(rows)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Kept rows rows.tar.xz: 10 of 15 runs are beside these; 1 left out, since their schemes are here;" in said
    assert "3 left out, since training.tokens is 2000000 there and 1000000 here" in said
    assert "1 left out, since other tokens are scored here" in said
    written = (mine / "report" / "report.md").read_text()
    table = [line.split("|")[1:3] for line in written.splitlines() if line.startswith(("| t5 ", "| rope ", "| alibi "))]
    assert {(name.strip(), runs.strip()) for name, runs in table} >= {("t5", "5"), ("rope", "5"), ("alibi", "5")}
    assert "Against rope" in written and not (tmp_path / "report").exists()


@pytest.mark.full
@pytest.mark.usefixtures("quick")
def test_without_anything_to_compare_the_report_is_as_before(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of docs/rows are of another text than this one."""
    mine = write_study(tmp_path / "mine", template, {"rope": SCHEMES["rope"]}, seeds=1)
    rows = ROOT / "docs" / "rows" / "six_race.tar.xz"
    report.main([mine], kept=str(rows))
    said = " ".join(capsys.readouterr().out.split())
    assert "six_race.tar.xz: 9 left out, since" in said and "fake: 1 run: 1 done" in said


# -- continuing and recomputing ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_rows_without_weights_count_as_done_and_their_claims_are_recomputed_without_posbench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`posbench sweep` continues from docs/rows/six.tar.xz, and a script of NumPy alone has the ledger's figures."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    archive.unpack(ROOT / "docs" / "rows" / "six.tar.xz", tmp_path / "outputs")
    words = ["experiment=reader", "study=six", "encoding=rope,alibi", "seed=0,1", "tracking=none"]
    assert support.posbench("sweep", *words, "--dry-run") == 0
    assert "4 runs: 4 finished, 0 to do" in capsys.readouterr().out
    script = [sys.executable, str(ROOT / "scripts" / "recompute_claims.py"), "outputs/six"]
    lines = subprocess.run(script, check=True, capture_output=True, text=True).stdout.splitlines()
    recomputed = {line.split()[0]: [float(value) for value in line.split("by seed ")[1].split()] for line in lines}
    names = ("rope", "alibi", "fox")
    runs = {name: [load.read(run) for run in Path("outputs/six").glob(f"{name}-*")] for name in names}
    for one in claim.read(list(recomputed)):
        (found,) = outcome.judge([(one, runs)])
        assert found.interval and found.interval.each == pytest.approx(recomputed[one.id], abs=6e-5)
    source = (ROOT / "scripts" / "recompute_claims.py").read_text(encoding="utf-8")
    assert "posbench" not in "".join(line for line in source.splitlines() if "import" in line)


def test_every_archive_of_the_documentation_is_one_of_rows(tmp_path: Path) -> None:
    paths: list[Any] = archive.kept()
    assert len(paths) >= 4
    smallest = min(paths, key=lambda path: path.stat().st_size)
    runs = archive.unpack(smallest, tmp_path)
    assert all(json.loads((run / "run.json").read_text())["status"] == "done" for run in runs) and runs
