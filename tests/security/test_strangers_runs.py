"""A run folder, a cache or a tokenizer that a stranger made: nothing is followed, nothing runs, one line says why."""

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import math
import os
import pty
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import pytest
import safetensors.torch
import torch
import yaml
from support import TINY, posbench, write_text

from posbench import files
from posbench.api.run import load
from posbench.config.schema import load_saved
from posbench.errors import UserError
from posbench.launch import pool, states
from posbench.launch.plans import Plan
from posbench.run_folder.lock import died, in_use
from posbench.terminal import exits
from posbench.training import train

VICTIM = "not yours"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with one finished run, which tests copy."""
    folder = tmp_path_factory.mktemp("trained")
    write_text(folder)
    asked = [*TINY, f"data.path={folder}/text.txt", f"runtime.cache={folder}/cache", f"runtime.outputs={folder}/out"]
    assert posbench("train", *asked, "training.tokens=1280", "training.learning_rate=0.01", "study=made") == 0
    return folder / "out" / "made"


@pytest.fixture
def run(study: Path, tmp_path: Path) -> Path:
    """A run folder of one's own to spoil."""
    (origin,) = study.glob("rope-*")
    return Path(shutil.copytree(origin, tmp_path / "study" / origin.name))


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text(VICTIM)
    return path


def line(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command ends with."""
    return next(text for text in capfd.readouterr().err.splitlines() if text.startswith("error: "))


# -- links -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["tokenizer.json", "evaluation.jsonl", "log.txt", ".lock", "wandb", "checkpoint"])
def test_a_link_in_a_run_folder_is_refused_by_what_writes_there(
    run: Path, victim: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    files.delete(run / name)
    (run / name).symlink_to(victim)
    argument = f"{run}/config.yaml"
    assert posbench("evaluate", str(run), "length=32,48") == 2 or name == "checkpoint"
    assert name in line(capfd)
    assert _job(argument, run) == 2
    assert f"{name} is a symbolic link: refused" in line(capfd)
    assert victim.read_text() == VICTIM


def _job(saved: str, folder: Path) -> int:
    return exits.run(lambda: train.train(load_saved(Path(saved)), folder, None))


def test_a_linked_checkpoint_folder_loses_nothing(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(run / "checkpoint", elsewhere)
    (elsewhere / f".tmp-{'0' * 16}-mine").write_text(VICTIM)
    (run / "checkpoint").symlink_to(elsewhere)
    assert posbench("evaluate", str(run), "length=48") == 2
    assert "checkpoint is a symbolic link: refused" in line(capfd)
    assert (elsewhere / f".tmp-{'0' * 16}-mine").read_text() == VICTIM


def test_a_pipe_in_a_run_folder_is_refused_at_once(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (run / "log.txt").unlink()
    os.mkfifo(run / "log.txt")
    assert posbench("evaluate", str(run), "length=48") == 2
    assert "log.txt is neither a file nor a folder: refused" in line(capfd)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_who_only_looks_follows_no_link_and_waits_at_no_pipe(run: Path, victim: Path, name: str) -> None:
    job = Plan(load_saved(run / "config.yaml"), run, ())
    victim.write_text('{"step": 7, "train/loss": 1.5}\n')
    with victim.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (run / name).unlink()
        (run / name).symlink_to(victim)
        assert (in_use(run), died(run)) == (False, name != ".lock")
        assert states.progress(job)[0] == (20 if name == ".lock" else 0)
    (run / name).unlink()
    os.mkfifo(run / name)
    in_use(run), died(run), states.progress(job)  # a plain open would wait for a writer


@pytest.mark.full
def test_a_report_replaces_links_and_does_not_follow_them(run: Path, victim: Path) -> None:
    report = run.parent / "report"
    report.mkdir()
    names = ["curves.png", "curves.svg", "curves.pdf", "index.html", "report.md", "runs.csv", "table.tex"]
    for name in names:
        (report / name).symlink_to(victim)
    assert posbench("report", str(run.parent)) == 0
    assert victim.read_text() == VICTIM
    assert not any((report / name).is_symlink() for name in names)


@pytest.mark.full
def test_a_report_does_not_go_into_a_linked_folder(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.parent / "report").symlink_to(elsewhere)
    assert posbench("report", str(run.parent)) == 2
    assert "report is a symbolic link: refused" in line(capfd)
    assert not list(elsewhere.iterdir())
    assert posbench("report", str(run.parent), "--out", str(run.parent / "report")) == 0  # the user's own word
    assert (elsewhere / "index.html").is_file()


@pytest.mark.full
def test_the_output_of_a_sweeps_job_replaces_a_link(run: Path, victim: Path) -> None:
    job = Plan(load_saved(run / "config.yaml"), run, ())
    job.output.parent.mkdir()
    job.output.symlink_to(victim)
    process = pool._start(job, {})
    process.join()
    assert process.exitcode == 0
    assert victim.read_text() == VICTIM
    assert not job.output.is_symlink()


def test_a_linked_folder_of_a_sweeps_jobs_is_refused(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.parent / ".jobs").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"\.jobs is a symbolic link: refused"):
        pool._start(Plan(load_saved(run / "config.yaml"), run, ()), {})
    assert not list(elsewhere.iterdir())


def test_what_the_hub_said_is_noted_in_place_of_a_link(
    tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from posbench.data import hub

    monkeypatch.setattr(hub, "_commit", lambda kind, dataset, revision: "1" * 40)
    hub.resolve("a/b", None, None, tmp_path)
    (note,) = tmp_path.glob("*.txt")
    note.unlink()
    note.symlink_to(victim)
    assert hub.resolve("a/b", None, None, tmp_path) == "1" * 40
    assert victim.read_text() == VICTIM
    assert note.read_text() == "1" * 40


# -- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "evaluation.jsonl", "evaluation_blocks.jsonl"])
@pytest.mark.parametrize("unending", [False, True])
def test_what_has_no_end_is_not_read(run: Path, capfd: pytest.CaptureFixture[str], name: str, unending: bool) -> None:
    (run / name).unlink()
    if unending:
        (run / name).symlink_to("/dev/zero")
        as_missing = {"run.json": "no run folder in", "config.yaml": "it has no config.yaml"}
        said = as_missing.get(name, "is not a regular file: refused")
    else:
        (run / name).touch()
        os.truncate(run / name, 3 * 2**30)  # takes no room on the disk, nor in a .tar
        said = "has 3,221,225,472 bytes: expected at most"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert posbench("report", str(run)) == 2
    assert said in line(capfd)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB


def test_metrics_without_end_are_not_read(run: Path) -> None:
    os.truncate(run / "metrics.jsonl", 3 * 2**30)
    with pytest.raises(UserError, match=r"metrics\.jsonl has 3,221,225,472 bytes: expected at most"):
        load(run).metrics()


def test_weights_larger_than_their_manifest_says_are_not_read(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for weights in run.glob("checkpoint/*/model.safetensors"):
        os.truncate(weights, 2**40)
    assert posbench("evaluate", str(run), "length=48") == 2
    assert "model.safetensors has 1,099,511,627,776 bytes: expected at most" in line(capfd)


# -- the terminal ------------------------------------------------------------------------------------------------------

EVIL = "x\x1b]0;owned\x07\x1b]52;c;ZXZpbDE\x07\x1b[2J\u202e\x9b2Jerror: forged"


def controls(text: str) -> list[str]:
    """What a terminal would act on."""
    return [c for c in text if not c.isprintable() and c != "\n"]


@pytest.fixture
def evil(run: Path) -> Path:
    """A run whose texts and whose folder's name are full of commands to a terminal."""
    rows = [json.loads(text) for text in (run / "evaluation.jsonl").read_text().splitlines()]
    rows += [rows[0] | {"extension": EVIL}, rows[0] | {"length": 99, "status": EVIL, "reason": EVIL}]
    (run / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"id": EVIL, "message": EVIL, "command": EVIL}))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["runtime"]["cache"] = f"/dev/null/{EVIL}"
    (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    return run.rename(run.parent / f"{EVIL}\nReport: forged".replace("/", "|"))


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "RUN", "length=16,48"),
        ("report", "RUN"),
        ("show", "RUN"),
        ("clean", "RUN"),
        ("sync", "RUN", "tracking.mode=offline"),
    ],
)
def test_a_strangers_texts_and_paths_do_not_act_on_the_terminal(
    evil: Path, capfd: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert posbench(*(str(evil) if word == "RUN" else word for word in command)) == 0
    out, err = capfd.readouterr()
    assert controls(out + err) == []
    assert out.strip()
    assert not any(text.startswith(("Report: forged", "error: ")) for text in (out + err).splitlines())


@pytest.mark.full
def test_on_a_terminal_the_log_is_spelt_out_too(evil: Path) -> None:
    code = "import sys; from posbench.cli.app import main; sys.exit(main())"
    parent, child = pty.openpty()
    command = [sys.executable, "-c", code, "evaluate", str(evil), "length=48"]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stdout=child, stderr=child, env=environment)
    os.close(child)
    shown = b""
    with contextlib.suppress(OSError):  # how a closed terminal ends
        while piece := os.read(parent, 65536):
            shown += piece
    os.close(parent)
    assert process.wait() == 0
    assert b"cannot be written" in shown  # the log that names the cache
    assert b"]52;c;" in shown  # as text
    assert b"\x1b]" not in shown
    assert b"\x07" not in shown


def test_in_a_notebook_a_run_is_shown_as_text(evil: Path) -> None:
    loaded = load(evil)
    assert controls(repr(loaded) + loaded._repr_html_()) == []
    assert controls(repr(loaded.curve()) + loaded.curve().to_csv()) == []
    assert "\\x1b]52" in repr(loaded)


def test_a_bomb_of_aliases_in_an_extension_is_text(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    levels = ",".join(f"&{chr(98 + n)} [{','.join(['*' + chr(97 + n)] * 9)}]" for n in range(9))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["evaluation"]["extensions"] = [f"yarn:factor=[&a [0,0,0,0,0,0,0,0,0],{levels}]"]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    began = time.monotonic()
    assert posbench("evaluate", str(run)) == 2
    assert "factor is ['&a [0,0,0,0,0,0,0,0,0]', " in line(capfd)
    assert time.monotonic() < began + 5


def test_an_error_is_a_line_that_can_be_read(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["encoding"]["base"] = "x" * 500_000
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert posbench("evaluate", str(run)) == 2
    assert len(line(capfd)) < 5_000


def test_a_cell_of_a_csv_file_begins_no_formula(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"message": "-1+1;=2+3", "command": '=cmd|" /C calc"!A0'}))
    assert posbench("report", str(run), "--out", str(run.parent / "out")) == 0
    written = (run.parent / "out" / "runs.csv").read_text()
    for separator in ",;":
        cells = [cell for row in csv.reader(written.splitlines(), delimiter=separator) for cell in row]
        assert not [cell for cell in cells if cell.startswith(("=", "@", "+"))]


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def spoilt(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((run / "tokenizer.json").read_text())
    change(content)
    (run / "tokenizer.json").write_text(json.dumps(content))


def bad_normalizer(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def huge_id(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["huge"] = 2**31


def huge_added_id(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["id"] = 50_000_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (huge_id, "it has the id 2,147,483,648 but only 258 tokens"),
        (huge_added_id, "it has the id 50,000,000 but only 257 tokens"),
        (bad_normalizer, "is not a tokenizer.json"),
        (lambda content: content.clear(), "is not a tokenizer.json"),
        (lambda content: content.update(model=None), "is not a tokenizer.json"),
    ],
)
def test_a_tokenizer_that_is_none_is_one_line_at_once(
    run: Path, capfd: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], said: str
) -> None:
    spoilt(run, change)
    began = time.monotonic()
    assert posbench("show", str(run)) == 2
    told = capfd.readouterr().err
    assert said in told and told.count("\n") == 1  # and nothing of Rust's own
    assert posbench("train", *TINY, "data.path=text.txt", f"data.tokenizer={run}/tokenizer.json") == 2
    assert said in line(capfd)
    assert time.monotonic() < began + 5


def test_a_panic_of_other_code_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    class PanicException(BaseException):
        pass

    def panics() -> None:
        raise PanicException("range end index 6 out of range")

    assert exits.run(panics) == 1
    assert line(capfd).startswith("error: PanicException: range end index 6 out of range")


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def repacked(run: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    """Change a file of the newest checkpoint, with a manifest that says so."""
    step = max((run / "checkpoint").iterdir())
    data = change((step / name).read_bytes())
    (step / name).write_bytes(data)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (step / "manifest.json").write_text(json.dumps(manifest))


def weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[bytes], bytes]:
    return lambda data: safetensors.torch.save(change(safetensors.torch.load(data)))


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


NO_WEIGHTS: list[tuple[Callable[[bytes], bytes], str]] = [
    (weights(lambda known: {n: one.to(torch.int8) for n, one in known.items()}), "is torch.int8, expected torch."),
    (weights(lambda known: {name: one + 0j for name, one in known.items()}), "is torch.complex64, expected"),
    (weights(lambda known: dict(list(known.items())[1:])), "do not match its configuration: Missing key"),
    (
        weights(lambda known: {name: one[..., :1].contiguous() for name, one in known.items()}),
        "do not match its configuration: size",
    ),
    (weights(lambda known: {str(n): torch.zeros(0) for n in range(60_000)}), "holds 60,000 tensors: expected at most"),
    (lambda data: b"", "is not a safetensors file"),
    (lambda data: b"\xff" * 64, "is not a safetensors file"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("change", "said"), NO_WEIGHTS, ids=[said for _, said in NO_WEIGHTS])
def test_weights_that_are_none_are_one_line(
    run: Path, capfd: pytest.CaptureFixture[str], change: Callable[[bytes], bytes], said: str
) -> None:
    repacked(run, "model.safetensors", change)
    assert posbench("evaluate", str(run), "length=48") == 2
    assert said in line(capfd)


NO_STATE: list[tuple[str, bytes, str]] = [
    ("optimizer.pt", b"", "is not an optimizer state of posbench"),
    ("optimizer.pt", pickled([1]), "is not an optimizer state of posbench"),
    ("optimizer.pt", pickled({}), "does not hold the state of this run"),
    ("optimizer.pt", pickled({"state": {0: {"exp_avg": "x"}}, "param_groups": [[]]}), "does not hold the state"),
    ("state.json", b"[" * 100_000, "is not the state of a run"),
    ("state.json", b"{", "is not the state of a run"),
    ("state.json", b"[]", "is not the state of a run"),
    ("state.json", b'{"metrics_offset": "x", "train_seconds": [], "cpu_seconds": null}', "does not hold the state"),
    ("state.json", b'{"metrics_offset": -1, "train_seconds": 0, "cpu_seconds": 1e999}', "does not hold the state"),
]


@pytest.mark.parametrize(("name", "data", "said"), NO_STATE)
def test_a_state_that_is_none_is_one_line(
    run: Path, capfd: pytest.CaptureFixture[str], name: str, data: bytes, said: str
) -> None:
    last = max((run / "checkpoint").iterdir())
    last.rename(last.with_name("step-00000010"))  # as if it had been stopped there
    manifest = last.with_name("step-00000010") / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"step": 10}))
    for other in (run / "checkpoint").iterdir():
        if other != manifest.parent:
            shutil.rmtree(other)
    repacked(run, name, lambda _: data)
    assert _job(f"{run}/config.yaml", run) == 2
    told = line(capfd)
    assert said in told and "weights_only" not in told


def test_weights_that_are_not_finite_give_rows_that_say_so(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    repacked(run, "model.safetensors", weights(lambda known: {name: one * math.nan for name, one in known.items()}))
    (run / "evaluation.jsonl").unlink()
    assert posbench("evaluate", str(run)) == 0
    rows = [json.loads(text) for text in (run / "evaluation.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["nll"] is None and row["reason"].startswith("nll is not finite at") for row in rows)
    assert "failed, nll is not finite" in capfd.readouterr().err
    assert posbench("evaluate", str(run)) == 0  # and what failed so is known
    assert "nothing to do" in capfd.readouterr().err
    assert posbench("report", str(run)) == 0
    assert "failed" in capfd.readouterr().out


# -- anything at all ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", mutations.FILES)
def test_a_run_changed_at_random_is_used_or_refused_in_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The short form of tests/slow/test_mutations.py."""
    assert mutations.failures(run, name, range(8), monkeypatch) == []
