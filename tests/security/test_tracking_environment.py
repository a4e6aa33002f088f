"""What a stranger's configuration or run folder says of W&B never stands above the user's environment."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.evaluation import sync
from posbench.run_folder.folder import Run
from posbench.run_folder.logged import Curves
from posbench.run_folder.wandb_session import Session, Target, choose_mode


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)


@pytest.fixture
def strangers(tiny_config: Config) -> Config:
    tracking = dataclasses.replace(
        tiny_config.tracking, backend="wandb", mode="online", entity="thief", project="loot"
    )  # fmt: skip
    return dataclasses.replace(tiny_config, tracking=tracking)


@pytest.mark.parametrize(
    ("asked", "environment", "mode"),
    [
        ("online", "offline", "offline"),
        ("online", "dryrun", "offline"),
        ("auto", "offline", "offline"),
        ("offline", "online", "offline"),  # what stays here harms nobody
        ("auto", "online", "online"),
        ("online", None, "online"),
    ],
)
def test_what_the_environment_keeps_here_is_not_sent(
    asked: str, environment: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if environment:
        monkeypatch.setenv("WANDB_MODE", environment)
    assert choose_mode(asked) == mode


@pytest.mark.parametrize("record", [{}, {"wandb": {"id": "known", "project": "loot", "entity": "thief"}}])
def test_the_environment_says_where_a_run_goes(
    record: dict[str, object], strangers: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Target.of(strangers, tmp_path, "rope-s0", record)
    assert (found.project, found.entity) == ("loot", "thief")  # nobody says otherwise
    monkeypatch.setenv("WANDB_ENTITY", "mine")
    monkeypatch.setenv("WANDB_PROJECT", "safe")
    found = Target.of(strangers, tmp_path, "rope-s0", record)
    assert (found.project, found.entity) == ("safe", "mine")
    assert found.id == ("known" if record else "test-rope-s0")


@pytest.mark.parametrize(("typed", "mode"), [([], "online"), (["tracking.mode=offline"], "offline")])
def test_what_is_typed_after_sync_stands_above_all(
    typed: list[str], mode: str, strangers: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Run.open(tmp_path / "run", strangers, []) as run:
        run.log_metrics({"step": 1, "tokens": 1})
    asked = []

    def opened(self: Session, config: Config, target: Target, curves: Curves, asked_mode: str) -> None:
        asked.append((target.project, target.entity, asked_mode))
        raise RuntimeError("enough")

    monkeypatch.setattr(Session, "__init__", opened)
    for name, value in {"WANDB_MODE": "offline", "WANDB_ENTITY": "mine", "WANDB_PROJECT": "safe"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception, match="enough"):
        sync.sync([tmp_path / "run"], [*typed, "tracking.project=paper"])
    assert asked == [("paper", "mine", mode)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_settings_of_the_current_folder_are_not_read(
    folder: str, strangers: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir()
    Path(folder, "settings").write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    told = "import wandb; print(wandb.setup(wandb.Settings(silent=True)).settings.base_url)"
    assert (
        subprocess.check_output([sys.executable, "-c", told], text=True).strip() == "http://127.0.0.1:1"
    )  # it is real
    with pytest.raises(UserError, match="settings would choose the server: move it away"):
        Session(strangers, Target.of(strangers, tmp_path, "rope-s0", {}), Curves(strangers, []), "offline")
