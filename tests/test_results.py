"""The frame, the intervals, the comparison and its words, tasks, and a run in a few numbers."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_study import SCHEMES, Truth, configured, read_rows, write_rows, write_run, write_study
from numpy.typing import NDArray
from test_frozen import cells, frozen_cells

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.results import compare, tasks
from posbench.results.compare import NOT_RESOLVED, Losses, main_rows
from posbench.results.estimate import estimate, in_two_groups, units_of_text
from posbench.results.frame import differing_settings, read, save
from posbench.results.headline import headline
from posbench.run_folder.rows import EVALUATION_KEY

ROWS = Path(__file__).parents[1] / "docs" / "rows"


@pytest.fixture(scope="module")
def studies() -> dict[str, pd.DataFrame]:
    """The kept studies."""
    return {name: read([ROWS / f"{name}.parquet"]) for name in ("six", "six_demo", "ledger", "catalogue")}


# -- numbers and words of the kept rows --------------------------------------------------------------------------------


def test_labels_and_settings_of_a_large_study(studies: dict[str, pd.DataFrame]) -> None:
    frame = studies["ledger"]
    (text,) = frame.loc[frame["trained_task"].isna(), "setting"].unique()
    table = compare.compare(frame[frame["setting"] == text])
    assert table.attrs["reference"] == "rope base=10000"
    assert {"rope base=128", "drope", "xpos"} < set(table["label"])
    assert set(differing_settings(frame)) == set(frame["setting"])
    catalogue = studies["catalogue"]
    assert {"layered/gemma3", "layered/llama4"} < set(catalogue["label"])
    table = compare.compare(catalogue)
    assert set(table["nll_why"].dropna()) == {"1 of 5 seeds"}
    assert set(table.loc[table["rise_4x_status"] == "undefined", "rise_why"]) >= {"learned is undefined at 4x"}


def test_the_context_used_is_said_of_schemes_that_beat_the_cached_ngram_model(studies: dict[str, pd.DataFrame]) -> None:
    six = compare.compare(studies["six"]).set_index("label")
    assert set(six["ngram"].round(3)) == {3.748} and set(six["cached_ngram"].round(3)) == {3.295}
    assert set(six["learned"]) == {"yes"}
    beats = dict.fromkeys(["fox", "rope", "t5", "alibi"], "yes") | {"sinusoidal": NOT_RESOLVED, "none": "no"}
    assert six["uses_context"].to_dict() == beats
    assert six["uses"].dropna().to_dict() == dict.fromkeys(["fox", "rope", "t5", "alibi"], 128)
    older = compare.compare(studies["six"].assign(unit_cached_ngram=None)).set_index("label")
    assert older["uses_context"].isna().all() and older.loc["none", "uses"] == 64
    demo = compare.compare(studies["six_demo"])
    assert set(demo["uses_context"]) == {"no", NOT_RESOLVED} and demo["uses"].isna().all()


# -- the frame ---------------------------------------------------------------------------------------------------------


def test_a_study_is_kept_in_one_small_file(studies: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    path = tmp_path / "six.parquet"
    save(studies["six"], path)
    assert path.stat().st_size < 335_000
    again = read([path])
    pd.testing.assert_frame_equal(
        again.drop(columns=["folder", "unit_nll", "unit_ngram", "unit_cached_ngram"]),
        studies["six"].drop(columns=["folder", "unit_nll", "unit_ngram", "unit_cached_ngram"]),
        rtol=1e-6,
    )
    assert sorted(cells(compare.compare(again.assign(unit_cached_ngram=None)))) == sorted(frozen_cells("six"))
    assert len(read([path, path])) == len(again)


def write_as_before(folder: Path) -> None:
    """Rewrite a run as earlier versions wrote it: sums of two blocks of each document in a file of their own."""
    rows, lines = read_rows(folder / "evaluation.jsonl"), []
    for row in rows:
        units = row.pop("units")
        key = {name: row.get(name) for name in (*EVALUATION_KEY, "targets_sha256")}
        for number, (document, tokens, nll, ngram) in enumerate(zip(*units.values(), strict=True)):
            sums = {"n_tokens": tokens // 2, "nll_sum": nll / 2, "ngram_sum": ngram / 2}
            lines += [{**key, "block": 2 * number + half, "document": document, **sums} for half in (0, 1)]
    write_rows(folder / "evaluation.jsonl", rows)
    write_rows(folder / "evaluation_blocks.jsonl", [*lines, *lines])  # twice, as after a kill: the last set counts


def test_a_folder_of_an_earlier_version_reads_like_one_of_today(template: Config, tmp_path: Path) -> None:
    run = write_run(tmp_path / "fake", configured(template, "rope", 0), Truth(3.5, 0.1, ngram=3.8, paired=True))
    copy = shutil.copytree(run, tmp_path / run.name)
    write_as_before(copy)
    pd.testing.assert_frame_equal(read([copy]).drop(columns="folder"), read([run]).drop(columns="folder"))


def test_a_broken_run_stops_no_other(template: Config, tmp_path: Path) -> None:
    write_study(tmp_path, template, {"rope": SCHEMES["rope"]})
    runs = sorted(tmp_path.glob("rope-*"))
    (runs[0] / "config.yaml").write_text("study: [", encoding="utf-8")
    (runs[1] / "evaluation.jsonl").write_text("not JSON\n", encoding="utf-8")
    config = yaml.safe_load((runs[2] / "config.yaml").read_text(encoding="utf-8"))
    config["encoding"] = {"name": "of_a_package_that_is_gone", "sharpness": 2}
    (runs[2] / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (runs[3] / "run.json").write_text(json.dumps({"status": "failed", "reason": "oom", "message": "no memory"}))
    frame = read([tmp_path])
    runs_ = frame.drop_duplicates("folder").set_index("folder")
    assert list(runs_.loc[[str(run) for run in runs], "run_status"]) == ["unreadable"] * 2 + ["done", "oom", "done"]
    assert "line 1" in runs_.loc[str(runs[1]), "run_reason"]
    table = compare.compare(frame[frame["setting"] == runs_.loc[str(runs[4]), "setting"]]).set_index("label")
    assert list(table.index) == ["rope", "of_a_package_that_is_gone"] or set(table.index) > {"rope"}
    assert (table.loc["rope", "seeds"], table.loc["rope", "not_done"]) == (1, "1 unreadable, 1 oom")


def with_changed(frame: pd.DataFrame, label: str, length: int, **values: Any) -> pd.DataFrame:
    """The frame with other values in the fixed_target rows of a scheme at a length."""
    at = (frame["label"] == label) & (frame["length"] == length) & (frame["protocol"] == "fixed_target")
    changed = frame.copy()
    for name, value in values.items():
        changed[name] = changed[name].where(~at, value)
    return changed


def test_what_is_undefined_is_no_number(studies: dict[str, pd.DataFrame]) -> None:
    lost = dict.fromkeys(("nll", "targets_sha256", "unit_nll", "unit_tokens", "unit_ngram"))
    frame = with_changed(studies["six"], "alibi", 512, status="undefined", **lost)
    alibi = compare.compare(frame).set_index("label").loc["alibi"]
    assert (alibi["rise_4x_status"], alibi["rise_why"]) == ("undefined", "alibi is undefined at 4x")
    assert math.isnan(alibi["rise_4x"])
    assert (alibi["rise_word"], alibi["holds_to"], alibi["holds_further"]) == ("", 256, False)
    assert alibi["nll_word"] == NOT_RESOLVED
    points = compare.curves(frame).set_index(["label", "variant", "length"])
    assert points.loc[("alibi", "plain", 512), "status"] == "undefined"
    assert math.isnan(points.loc[("alibi", "plain", 512), "nll"])
    assert points["nll"].notna().sum() == len(points) - 2  # the plain curve and the windowed one


def test_what_was_scored_on_other_tokens_is_left_out(studies: dict[str, pd.DataFrame]) -> None:
    six = studies["six"]
    other = six["targets_sha256"].where(~((six["label"] == "fox") & (six["seed"] == 0)), "other")
    table = compare.compare(six.assign(targets_sha256=other)).set_index("label")
    assert (table.loc["fox", "seeds"], table.loc["fox", "left_out"], table.loc["fox", "nll_why"]) == (
        4,
        1,
        "4 of 5 seeds",
    )
    rows = main_rows(six)
    with pytest.raises(ValueError, match="counts once"):
        Losses(pd.concat([rows, rows]))
    with pytest.raises(ValueError, match="one setting"):
        compare.compare(studies["ledger"])
    with pytest.raises(UserError, match="no scheme is called 'rop'"):
        compare.compare(six, "rop")


def test_the_context_used_is_said_only_where_less_was_measured(studies: dict[str, pd.DataFrame]) -> None:
    rows = main_rows(studies["six"])
    assert compare.uses(Losses(rows), "none") == 64
    assert compare.uses(Losses(rows[rows["length"] >= 64]), "none") is None
    assert compare.uses(Losses(rows[rows["length"] >= 128]), "none") is None


def test_words_need_seeds_and_documents(studies: dict[str, pd.DataFrame]) -> None:
    six = studies["six"]
    few = compare.compare(six[six["seed"] < 4]).set_index("label")
    assert set(few["nll_why"].dropna()) == {"4 of 5 seeds", "4 of 8 seeds, which fall in two groups"}
    one = six.copy()
    one["unit_documents"] = [None if each is None else np.minimum(each, 1) for each in one["unit_documents"]]
    table = compare.compare(one).set_index("label")
    assert table.loc["none", "nll_why"].startswith("one document has 9")
    assert table["holds_to"].isna().all() if "holds_to" in table else True


# -- intervals and words, simulated ------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, schemes: int, seeds: int, documents: int) -> NDArray[np.float64]:
    """Losses per token around 0, (schemes, seeds, documents), all schemes equal; documents move all alike and each."""
    common, of_scheme = rng.normal(0, 0.3, documents), rng.normal(0, 0.1, (schemes, 1, documents))
    spread = np.resize([0.09, 0.03, 0.02, 0.1, 0.02, 0.02], schemes)[:, None, None]
    rest = rng.normal(0, 0.05, (schemes, seeds, documents))
    return np.asarray(common + of_scheme + rng.normal(size=(schemes, seeds, 1)) * spread + rest)


@pytest.mark.parametrize(("seeds", "documents"), [(5, 20), (5, 50), (10, 50)])
def test_intervals_cover_and_wrong_words_are_rare(seeds: int, documents: int) -> None:
    rng = np.random.default_rng(0)
    schemes, reports = 6, 400
    tokens = np.full(documents, 80.0)
    covered, wrong, wrong_reach = [], [], []
    for _ in range(reports):
        losses = drawn(rng, schemes, seeds, documents) * tokens
        gaps = [estimate(losses[k] - losses[0], tokens) for k in range(1, schemes)]
        covered += [gap.low() <= 0 <= gap.high() for gap in gaps]
        wrong.append(any(compare.word(gap, 0.05 / (schemes - 1), "worse", "better") != NOT_RESOLVED for gap in gaps))
        bounds = [estimate(each, tokens).high(2 * 0.05 / schemes) for each in losses]
        wrong_reach.append(any(bound <= 0 for bound in bounds))  # of a rise that is just too much
    error = math.sqrt(0.05 * 0.95 / reports)
    assert 0.93 < np.mean(covered) < 0.98
    assert np.mean(wrong) < 0.05 + 3 * error
    assert np.mean(wrong_reach) < 0.05 + 3 * error


def test_an_estimate_is_the_crossed_interval() -> None:
    sums, tokens = np.array([[2.0, 9.0, 4.0], [4.0, 6.0, 2.0]]), np.array([1.0, 3.0, 1.0])
    both = estimate(sums, tokens)
    assert both.mean == pytest.approx(27 / 10)
    assert both.seeds == pytest.approx((3.0, 2.4))
    residuals = (sums - 2.7 * tokens) / (5 / 3)
    by_seed, by_unit = residuals.mean(1).var(ddof=1) / 2, residuals.mean(0).var(ddof=1) / 3
    rest = residuals - residuals.mean(1, keepdims=True) - residuals.mean(0)
    variance = max(by_seed + by_unit - (rest**2).sum() / (1 * 2 * 2 * 3), by_seed, by_unit)
    assert both.error == pytest.approx(math.sqrt(variance))
    assert both.df == pytest.approx(variance**2 / (by_seed**2 / 1 + by_unit**2 / 2))
    assert estimate(sums[:1], tokens).df == 2
    assert math.isnan(estimate(sums[:1, :1], tokens[:1]).high())
    assert estimate(sums.sum(1, keepdims=True), tokens.sum(keepdims=True)).error == pytest.approx(0.3)


def test_seeds_in_two_groups_and_segments_of_few_documents() -> None:
    assert in_two_groups([0, 0.01, 0.02, 1, 1.01])
    assert in_two_groups([0, 0.01, 0.02, 0.03, 1])
    assert not in_two_groups([0, 0.25, 0.5, 0.75, 1])
    assert not in_two_groups([0, 0.01, 0.02, 0.09])
    assert list(units_of_text(np.arange(8).repeat(2), None)) == list(np.arange(8).repeat(2))
    assert list(units_of_text(np.zeros(32, int), None)) == list(np.arange(16).repeat(2))
    assert list(units_of_text(np.zeros(16, int), np.arange(16) // 2)) == list(np.arange(16) // 2)


# -- tasks, and one run ------------------------------------------------------------------------------------------------


def test_tasks_of_the_kept_rows(studies: dict[str, pd.DataFrame]) -> None:
    frame = studies["ledger"]
    table = tasks.compare_tasks(frame[frame["trained_task"] == "copy"])
    assert list(table["label"]) == ["alibi", "rope", "randomized", "none"]
    alibi, *_, none = table.to_dict("records")
    assert (alibi["learned"], alibi["seeds"], table.attrs) == (5, 5, {"reference": "rope", "tests": 5})
    assert (alibi["learned_low"], alibi["learned_high"]) == (pytest.approx(0.478176, abs=1e-6), 1)
    assert (alibi["accuracy_2x_word"], alibi["accuracy_4x_word"]) == ("better", "better")
    assert alibi["accuracy_2x_p"] == pytest.approx(5 * 2 / 252)
    assert (none["learned_word"], none["accuracy_2x_why"]) == ("learned by fewer seeds", "not learned")
    flip_flop = tasks.compare_tasks(frame[frame["trained_task"] == "flip_flop"])
    assert flip_flop.attrs["reference"] == "alibi"
    places = tasks.accuracies(frame[frame["trained_task"] == "flip_flop"])
    assert set(places["of_task"]) == {"", "ignore=0.1", "ignore=0.98"}


def test_a_seed_that_diverged_has_no_answer_right(studies: dict[str, pd.DataFrame]) -> None:
    frame = studies["ledger"]
    copy = frame[frame["trained_task"] == "copy"]
    lost = (copy["label"] == "alibi") & (copy["seed"] == copy["seed"].min())
    diverged = copy.assign(run_status=copy["run_status"].where(~lost, "diverged"))
    alibi = tasks.compare_tasks(diverged).set_index("label").loc["alibi"]
    assert (alibi["learned"], alibi["seeds"], alibi["accuracy_1x_min"]) == (4, 5, 0)


def test_one_run_in_a_few_numbers(studies: dict[str, pd.DataFrame]) -> None:
    six = studies["six"]
    run = headline(six[(six["label"] == "none") & (six["seed"] == 0)])
    assert (run["learned"], run["uses_context"], run["cached_ngram"]) == ("yes", "no", pytest.approx(3.295, abs=1e-3))
    assert (run["reach"], run["uses"], run["rise_16x"]) == (128, None, None)
    assert run["rise_4x"] == pytest.approx(float(run["nll_4x"]) - float(run["nll_1x"]))  # type: ignore[arg-type]
    ledger = studies["ledger"]
    answers = headline(ledger[ledger["run"] == ledger.loc[ledger["trained_task"] == "copy", "run"].iloc[0]])
    assert (answers["learned"], answers["accuracy_1x"]) == ("yes", pytest.approx(0.999628))
    nothing = six[six["run"] == six["run"].iloc[0]].iloc[:0]
    assert headline(nothing)["nll_1x"] is None
