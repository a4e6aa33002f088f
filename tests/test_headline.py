"""The headline of a run: nll at the training length, its rise, and how far the scheme holds."""

from pathlib import Path

import pytest
from fake_study import Truth, configured, headline_of, read_rows, write_rows, write_run

from posbench.config.schema import Config
from posbench.evaluation import printed
from posbench.results.compare import compare
from posbench.results.frame import read


def run_of(folder: Path, template: Config, truth: Truth) -> Path:
    return write_run(folder, configured(template, "rope", 0), truth, seed_sd=0.0)


def test_it_is_nll_at_1x_the_rise_beyond_and_the_reach(template: Config, tmp_path: Path) -> None:
    found = headline_of(run_of(tmp_path, template, Truth(3.6, 0.1)))
    rows = read_rows(next(tmp_path.glob("*/rows.jsonl")))
    nll = {row["length_ratio"]: row["nll"] for row in rows if row["window"] is None}
    assert found["nll_1x"] == nll[1] and found["nll_8x"] == nll[8]
    assert found["rise_4x"] == pytest.approx(nll[4] - nll[1]) == pytest.approx(0.2, abs=0.05)
    assert found["rise_16x"] == pytest.approx(nll[16] - nll[1])
    assert found["reach"] == template.training.train_length


def test_what_is_undefined_or_was_not_measured_is_none(template: Config, tmp_path: Path) -> None:
    found = headline_of(run_of(tmp_path / "a", template, Truth(3.6, 0.0, last_ratio=2)))
    assert found["rise_4x"] is None and found["nll_4x"] is None and found["rise_16x"] is None
    assert found["rise_2x"] is not None and found["reach"] in (64, 128)
    nothing = headline_of(write_run(tmp_path / "b", configured(template, "rope", 0), None, status="failed"))
    names = ("learned", "uses_context", "nll_1x", "rise_4x", "rise_16x", "reach", "uses")
    assert nothing == dict.fromkeys(names)


def test_only_the_plain_newest_headline_rows_count(template: Config, tmp_path: Path) -> None:
    folder = run_of(tmp_path, template, Truth(3.6, 0.1))
    before = headline_of(folder)
    row = read_rows(folder / "rows.jsonl")[0] | {"nll": 9.0}
    changes = [{"checkpoint_step": 3}, {"extension": "yarn"}, {"protocol": "nonoverlap"}, {"split": "validation"}]
    changes.append({"split": "validation", "checkpoint_step": row["checkpoint_step"] + 1})  # a later evaluation
    write_rows(folder / "rows.jsonl", [row | change for change in changes], "a")
    assert headline_of(folder) == before and before["nll_1x"] is not None


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "learned"),
    [
        (Truth(3.6, 0.0, ngram=4.2), "yes"),
        (Truth(4.4, 0.0, ngram=4.2), "no"),
        (Truth(4.2, 0.0, ngram=4.2), "not resolved"),
        (Truth(3.6, 0.0), None),
    ],
)
def test_a_run_has_learned_if_it_beats_a_ngram_model_and_only_then_has_a_reach(
    template: Config, tmp_path: Path, truth: Truth, learned: str | None
) -> None:
    folder = run_of(tmp_path, template, truth)
    found = headline_of(folder)
    assert found["learned"] == learned and found["rise_4x"] is not None
    claims = learned in (None, "yes")
    assert (found["reach"] is not None) == claims


# -- uses --------------------------------------------------------------------------------------------------------------


def test_a_run_and_its_report_say_how_much_context_is_used(
    template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Less than 24 tokens cost something; a run that has not learned uses nothing that counts."""
    for seed in range(5):
        folder = write_run(tmp_path, configured(template, "rope", seed), Truth(3.6, 0.1, used=24), seed_sd=0.0)
    used = headline_of(folder)["uses"]
    assert used == 32
    assert compare(read([tmp_path]))["uses"].tolist() == [32]
    printed.print_results(folder)
    assert f"Uses {used} of its 64 tokens" in " ".join(capsys.readouterr().out.split())
    gated = write_run(tmp_path / "no", configured(template, "rope", 0), Truth(3.6, 0.1, used=24, ngram=3.5))
    assert headline_of(gated)["uses"] is None
