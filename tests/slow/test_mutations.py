"""Files of a run, changed at random: whatever stands in them, a command ends well or in one line."""

import json
from pathlib import Path

import mutations
import pytest
from fake_study import SCHEMES, configured, demo_config, write_run

from posbench.data.tokenizer import raw_bytes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", mutations.FILES)
@pytest.mark.parametrize("first", range(0, 360, 90))
def test_a_changed_run_is_used_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: int
) -> None:
    run = write_run(tmp_path / "fake", configured(demo_config(), "rope", 0), SCHEMES["rope"])
    logged = [json.dumps({"step": step, "tokens": 16 * step, "train/loss": 3.5}) + "\n" for step in range(9)]
    (run / "metrics.jsonl").write_text("".join(logged))
    raw_bytes().save(run / "tokenizer.json")
    assert mutations.failures(run, name, range(first, first + 90), monkeypatch) == []
