"""Files of a run, changed at random: whatever stands in them, a command ends well or in one line."""

from pathlib import Path

import mutations
import pytest
from fake_study import SCHEMES, configured, demo_config, write_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["evaluation.jsonl", "evaluation_blocks.jsonl", "run.json", "config.yaml"])
@pytest.mark.parametrize("first", range(0, 360, 90))
def test_a_changed_run_is_used_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    run = write_run(tmp_path / "fake", configured(demo_config(), "rope", 0), SCHEMES["rope"])
    assert mutations.failures(run, name, range(first, first + 90), monkeypatch) == []
