"""The frame, the intervals, the comparison and its words, tasks, and a run in a few numbers."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_study import SCHEMES, write_study
from test_frozen import cells, frozen_cells

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.results import compare, tasks
from posbench.results.compare import NOT_RESOLVED, Losses, main_rows
from posbench.results.estimate import in_two_groups
from posbench.results.frame import differing_settings, read, save
from posbench.results.headline import headline

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
    rows = main_rows(studies["six"])  # said only where less was measured
    uses = [compare.uses(Losses(rows[rows["length"] >= least]), "none") for least in (1, 64, 128)]
    assert uses == [64, None, None]
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


def test_a_broken_run_stops_no_other(template: Config, tmp_path: Path) -> None:
    write_study(tmp_path, template, {"rope": SCHEMES["rope"]})
    runs = sorted(tmp_path.glob("rope-*"))
    (runs[0] / "config.yaml").write_text("study: [", encoding="utf-8")
    (runs[1] / "rows.jsonl").write_text("not JSON\n", encoding="utf-8")
    config = yaml.safe_load((runs[2] / "config.yaml").read_text(encoding="utf-8"))
    config["encoding"] = {"name": "of_a_package_that_is_gone", "sharpness": 2}
    (runs[2] / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (runs[3] / "run.json").write_text(json.dumps({"status": "failed", "reason": "oom", "message": "no memory"}))
    frame = read([tmp_path])
    runs_ = frame.drop_duplicates("folder").set_index("folder")
    assert list(runs_.loc[[str(run) for run in runs], "run_status"]) == ["unreadable"] * 2 + ["done", "oom", "done"]
    assert "not JSON" in runs_.loc[str(runs[1]), "run_reason"]
    table = compare.compare(frame[frame["setting"] == runs_.loc[str(runs[4]), "setting"]]).set_index("label")
    assert list(table.index) == ["rope", "of_a_package_that_is_gone"] or set(table.index) > {"rope"}
    assert (table.loc["rope", "seeds"], table.loc["rope", "not_done"]) == (1, "1 unreadable, 1 oom")


def test_what_was_scored_on_other_tokens_is_left_out(studies: dict[str, pd.DataFrame]) -> None:
    six = studies["six"]
    other = six["targets_sha256"].where(~((six["label"] == "fox") & (six["seed"] == 0)), "other")
    table = compare.compare(six.assign(targets_sha256=other)).set_index("label")
    assert table.loc["fox", ["seeds", "left_out", "nll_why"]].tolist() == [4, 1, "4 of 5 seeds"]
    rows = main_rows(six)
    with pytest.raises(ValueError, match="counts once"):
        Losses(pd.concat([rows, rows]))
    with pytest.raises(ValueError, match="one setting"):
        compare.compare(studies["ledger"])
    with pytest.raises(UserError, match="no scheme is called 'rop'"):
        compare.compare(six, "rop")


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


def simulated(six: pd.DataFrame, reports: int) -> Iterator[Losses]:
    """Reports of six schemes that are equal but for luck, five seeds and 49 documents, each at the limits of words.

    What a document does to a scheme and what a run adds on a document are drawn from those of the six, a seed's effect
    from a normal distribution with that scheme's spread. In truth 512 tokens add `RISE_LIMIT`, 64 cost `USES_LIMIT`.
    """
    rng = np.random.default_rng(0)
    rows = main_rows(six)
    rows = rows[(rows["variant"] == "plain") & rows["length"].isin([32, 64, 128, 512])]
    losses = Losses(rows)
    levels = [[losses.sums[label, "plain", n] for n in (64, 128, 512)] for label in losses.seeds]
    shorter, level, longer = np.moveaxis(np.array(levels) / losses.tokens, 1, 0)  # each (schemes, seeds, documents)
    parts = np.stack([level, longer - level, shorter - level], 1)
    parts -= parts.mean((2, 3), keepdims=True)
    of_seed, of_document = parts.mean(3, keepdims=True), parts.mean(2, keepdims=True)
    rest = (parts - of_seed - of_document) * math.sqrt(5 / 4)  # those of five seeds sum to 0
    spread = of_seed.std(2, ddof=1, keepdims=True)
    losses.tokens, losses.sums = np.ones(49), {}  # those of the simple readers too: there is no gate
    for _ in range(reports):
        documents, runs = rng.integers(49, size=49), rng.integers(5, size=(6, 1, 5, 1))
        made = of_document[..., documents] + spread * rng.normal(size=of_seed.shape)
        made = made + np.take_along_axis(rest, runs, 2)[..., documents]
        level, rise, cost = 3 + made[:, 0], compare.RISE_LIMIT + made[:, 1], compare.USES_LIMIT + made[:, 2]
        for length, sums in {32: level + cost + 1, 64: level + cost, 128: level, 512: level + rise}.items():
            losses.sums |= {
                (label, "plain", length): pd.DataFrame(each) for label, each in zip(losses.seeds, sums, strict=True)
            }
        yield losses


def test_intervals_cover_and_wrong_words_are_rare(studies: dict[str, pd.DataFrame]) -> None:
    """At most about 6 % of reports have a wrong word of a family, within two standard errors of so few reports.

    The level is 5 %. Of 4,000 reports 6.2 % have a wrong "uses" and 3.4 % a wrong "holds": documents are skewed.
    """
    reports, covered, wrong = 250, [], {"nll or rise": 0, "holds_to": 0, "uses": 0}
    for losses in simulated(studies["six"], reports):
        schemes = [compare.numbers(losses, label, 6) for label in losses.seeds]
        pairs = [compare.against(losses, label, "rope", 6, compare.LEAST) for label in losses.seeds if label != "rope"]
        for name in ("nll_difference", "rise_difference"):
            covered += [pair[f"{name}_low"] <= 0 <= pair[f"{name}_high"] for pair in pairs]
        words = {pair[name] for pair in pairs for name in ("nll_word", "rise_word")}
        wrong["nll or rise"] += bool(words - {NOT_RESOLVED, ""})
        wrong["holds_to"] += any(row["holds_to"] == 512 for row in schemes)
        wrong["uses"] += any(row["uses"] == 64 for row in schemes)
    shares = {name: number / reports for name, number in wrong.items()}
    print(f"{np.mean(covered):.1%} of 95 % intervals cover; reports with a wrong word: {shares}")
    assert 0.93 < np.mean(covered) < 0.97
    assert all(share <= 0.06 + 2 * math.sqrt(0.05 * 0.95 / reports) for share in shares.values()), shares


def test_seeds_in_two_groups() -> None:
    assert in_two_groups([0, 0.01, 0.02, 1, 1.01])
    assert in_two_groups([0, 0.01, 0.02, 0.03, 1])
    assert not in_two_groups([0, 0.25, 0.5, 0.75, 1])
    assert not in_two_groups([0, 0.01, 0.02, 0.09])


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
    copy = frame[frame["trained_task"] == "copy"]
    lost = (copy["label"] == "alibi") & (copy["seed"] == copy["seed"].min())  # a seed that diverged has nothing right
    diverged = tasks.compare_tasks(copy.assign(run_status=copy["run_status"].where(~lost, "diverged"))).set_index(
        "label"
    )
    assert diverged.loc["alibi", ["learned", "seeds", "accuracy_1x_min"]].tolist() == [4, 5, 0]


def test_one_run_in_a_few_numbers(studies: dict[str, pd.DataFrame]) -> None:
    six = studies["six"]
    run = headline(six[(six["label"] == "none") & (six["seed"] == 0)])
    assert (run["learned"], run["uses_context"], run["cached_ngram"]) == ("yes", "no", pytest.approx(3.295, abs=1e-3))
    assert (run["reach"], run["uses"], run["rise_16x"]) == (128, None, None)
    assert run["rise_4x"] == pytest.approx(float(run["nll_4x"]) - float(run["nll_1x"]))  # type: ignore[arg-type]
    ledger = studies["ledger"]
    answers = headline(ledger[ledger["run"] == ledger.loc[ledger["trained_task"] == "copy", "run"].iloc[0]])
    assert (answers["learned"], answers["accuracy_1x"]) == ("yes", pytest.approx(0.999628))
    assert all(type(value) in (int, float, str, type(None)) for value in [*run.values(), *answers.values()])
    nothing = six[six["run"] == six["run"].iloc[0]].iloc[:0]
    assert headline(nothing)["nll_1x"] is None
