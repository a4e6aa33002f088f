"""SIGKILL at random moments, and at every call that changes a disk: nothing is unreadable, and no number is another."""

import itertools
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from faults import Case, Kill, at_boundaries, at_random

from posbench.config.schema import Config
from posbench.run import checkpoint
from posbench.run.rows import read_rows
from posbench.run.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # some hundred runs, on a busy machine too

KILLS = 200
SAVE = checkpoint.save


def case(config: Config, place: Path, tokens: int, runtime: dict[str, Any], **evaluation: Any) -> Case:
    evaluation = {"ratios": (1, 2), "blocks": 8, **evaluation}
    return Case.make(config, place, training={"tokens": 16 * 8 * tokens}, runtime=runtime, evaluation=evaluation)


@pytest.fixture
def short(tiny_config: Config, tmp_path: Path) -> Case:
    """Three updates, each of them saved, so that the third save drops the first."""
    runtime = {"checkpoint_every_steps": 1}
    return case(tiny_config, tmp_path, 3, runtime, protocols=("fixed_target",), windowed=False)


def tallied(kills: Iterable[Kill]) -> tuple[int, int, list[str], list[str]]:
    """Numbers of kills and of runs completed after them, what was unreadable, and what differed."""
    every = list(kills)
    completed = [kill.differing for kill in every if kill.differing is not None]
    unreadable = [line for kill in every for line in kill.unreadable]
    differing = [line for lines in completed for line in lines]
    print(f"{len(every)} kills, {len(completed)} completed, {len(unreadable)} unreadable, {len(differing)} differing")
    return len(every), len(completed), unreadable, differing


def test_random_kills_leave_nothing_unreadable_and_change_no_number(tiny_config: Config, tmp_path: Path) -> None:
    """40 updates, saved after every fifth."""
    long = case(tiny_config, tmp_path, 40, {"validate_every_steps": 3})
    kills, completed, unreadable, differing = tallied(itertools.islice(at_random(long, tmp_path, seed=0), KILLS))
    assert (kills, unreadable, differing) == (KILLS, [], []) and completed >= 20


@pytest.mark.parametrize("moment", ["before", "half", "after", "fails"])
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_kill_or_a_failure_at_any_call_that_changes_the_disk_changes_no_number(
    short: Case, tmp_path: Path, command: str, moment: str
) -> None:
    kills, completed, unreadable, differing = tallied(at_boundaries(short, tmp_path, command, moment))
    assert (completed, unreadable, differing) == (kills, [], [])
    assert kills >= {"train": 100, "evaluate": 20}[command] // (5 if moment == "half" else 1)


# -- and where posbench did it worse, this would be seen ---------------------------------------------------------------


def saved_in_place(
    folder: Path, step: int, model: dict[str, Any], optimizer: dict[str, Any], state: dict[str, Any]
) -> Path:
    """A checkpoint written where it belongs, instead of beside it and renamed."""
    path = folder / "checkpoint" / f"step-{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as elsewhere:
        for file in SAVE(Path(elsewhere), step, model, optimizer, state).iterdir():
            (path / file.name).write_bytes(file.read_bytes())
    return path


def half_lines_kept(run: Run) -> None:
    """Rows appended to whatever a kill left."""
    run._file = run._held.enter_context(open(run.folder / "rows.jsonl", "ab", buffering=0))  # noqa: SIM115
    run.rows = read_rows(run.folder)


WORSE: dict[str, tuple[str, Any]] = {
    "a checkpoint is written in place": ("posbench.run.checkpoint.save", saved_in_place),
    "the optimizer begins anew": ("posbench.training.step._AdamW.load_state_dict", lambda *_: None),
    "rows are not cut on resuming": ("posbench.run.run.Run.cut", lambda *_: None),
    "half lines stay": ("posbench.run.run.Run._open_rows", half_lines_kept),
}


@pytest.mark.parametrize("worse", WORSE)
def test_what_saves_or_resumes_worse_is_found(
    short: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worse: str
) -> None:
    monkeypatch.setattr(*WORSE[worse])
    kills = at_boundaries(short, tmp_path, "train", "half")
    assert any(kill.unreadable or kill.differing for kill in kills)
