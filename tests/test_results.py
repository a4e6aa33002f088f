"""The frame, the intervals, the comparison and its words, tasks, and a run in a few
numbers.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_study import (
    SCHEMES,
    Truth,
    configured,
    headline_of,
    rows_of_study,
    write_run,
    write_study,
)
from support import change_record

from posbench.config.digest import run_id
from posbench.errors import UserError
from posbench.estimate import in_two_groups
from posbench.reports import answer
from posbench.reports.tables import main_table
from posbench.results import compare, tasks, words
from posbench.results.compare import Losses, main_rows
from posbench.results.frame import read
from posbench.results.headline import headline
from posbench.results.words import NOT_RESOLVED
from posbench.run.rows import read_rows


@pytest.fixture(scope="module")
def six():
    """Return rows of six schemes, trained with five seeds each."""
    return rows_of_study("six_reader")


def by_label(frame: pd.DataFrame) -> pd.DataFrame:
    return compare.compare(frame).frame.set_index("label")


@pytest.fixture(scope="module")
def table(six):
    return by_label(six)


def test_schemes_are_compared_with_the_best_simple_readers(table):
    readers = table[["ngram", "cached_ngram"]].round(3)
    assert set(readers["ngram"]) == {3.408}
    assert set(readers["cached_ngram"]) == {2.936}


def test_whether_a_reader_of_the_window_is_beaten_is_no_gate(table):
    assert table["beats_reader"].to_dict() == {
        "fox": NOT_RESOLVED,
        "rope": NOT_RESOLVED,
        "t5": NOT_RESOLVED,
        "alibi": NOT_RESOLVED,
        "sinusoidal": "no",
        "none": "no",
    }
    uses = table["uses"].dropna()
    assert uses.to_dict() == {"fox": 64, "rope": 32, "alibi": 32, "t5": 16}


USES = [(1, 16), (64, None), (128, None)]


@pytest.mark.parametrize(("least", "uses"), USES)
def test_a_scheme_uses_more_than_the_longest_context_that_costs_it(six, least, uses):
    rows = main_rows(six)
    measured = rows[rows["length"] >= least]
    assert compare.uses(Losses(measured), "none") == uses


def test_a_scheme_holds_to_the_last_length_that_all_its_seeds_have(six):
    rows = main_rows(six)
    to_512 = rows[rows["length"] <= 512]
    to_1024 = rows[rows["length"] <= 1024]
    is_gap = (rows["length"] >= 1024) & (rows["seed"] == 0)
    with_gap = rows[~is_gap]

    holds_to = compare.holds_to(Losses(to_1024), "alibi")
    assert holds_to > compare.holds_to(Losses(to_512), "alibi")
    assert compare.holds_to(Losses(with_gap), "alibi") == 512


def test_a_study_is_kept_in_one_file(tmp_path):
    path = tmp_path / "demo.parquet"
    demo = rows_of_study("six_demo").drop(columns="folder")
    demo.to_parquet(path)
    twice = read([path, path]).drop(columns="folder")
    pd.testing.assert_frame_equal(twice, demo)


@pytest.fixture
def broken(tmp_path):
    """Read a study of four runs, of which three are broken."""
    write_study(tmp_path, {"rope": SCHEMES["rope"]}, seeds=4)
    unreadable, gone, failed, _ = sorted(tmp_path.glob("rope-*"))
    (unreadable / "rows.jsonl").write_text("not JSON\n", encoding="utf-8")
    path = gone / "config.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    config["encoding"] = {"name": "of_a_package_that_is_gone", "sharpness": 2}
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    change_record(gone, id=run_id(config))
    rows = gone / "rows.jsonl"
    rows.write_text(rows.read_text().replace(gone.name, run_id(config)))
    change_record(failed, status="failed", reason="oom", message="no memory")
    return read([tmp_path])


def test_a_run_from_a_pattern_is_labelled_by_what_changed_in_it():
    rows = rows_of_study("extend_patterns")
    labels = set(rows["label"])
    pattern = "layered 3 rope window=64 + rope"
    assert {pattern, f"{pattern}: yarn factor=4 in 1 of 4"} <= labels
    assert len(labels) == 23


def test_options_of_one_name_set_two_schemes_apart(tmp_path):
    truth = Truth(3.6, 0.1)
    inner = {"inner": "temperature", "inner_options": {}}
    cold = {"inner": "temperature", "inner_options": {"alpha": 2.0}}
    of_schemes = (
        {"alpha": 1.5, **inner},
        {"alpha": 2.0, **inner},
        {"alpha": 1.5, **cold},
    )
    for options in of_schemes:
        write_run(tmp_path, configured("entmax", 0, **options), truth)

    labels = set(read([tmp_path])["label"])

    assert labels == {"entmax", "entmax alpha=2", "entmax inner_options.alpha=2"}


def test_a_broken_run_stops_no_other(broken):
    runs = broken.sort_values("folder").drop_duplicates("folder")
    statuses = runs["run_status"].tolist()
    assert statuses == ["unreadable", "done", "oom", "done"]

    (commonest,) = broken["setting"].mode()
    of_rope = broken[broken["setting"] == commonest]
    rope = by_label(of_rope).loc["rope"]
    assert rope["seeds"] == 1
    assert rope["not_done"] == "1 unreadable, 1 oom"


def test_the_columns_of_broken_runs_have_the_usual_types(broken, six, tmp_path):
    both = pd.concat([broken, six])
    both.to_parquet(tmp_path / "both.parquet")


def test_what_was_scored_on_other_tokens_is_left_out(six):
    altered = six.copy()
    is_one = (six["label"] == "fox") & (six["seed"] == 0)
    altered.loc[is_one, "targets_sha256"] = "other"

    fox = by_label(altered).loc["fox"]

    assert fox["seeds"] == 4
    assert fox["left_out"] == 1
    assert fox["nll_why"] == "4 of 5 seeds"


def test_a_seed_without_a_row_at_the_training_length_is_left_out(six):
    is_one = (six["label"] == "fox") & (six["seed"] == 0)
    without = six[~is_one | (six["length_ratio"] == 8)]

    fox = by_label(without).loc["fox"]
    of_four = by_label(six[~is_one]).loc["fox"]

    assert fox["seeds"] == 4
    assert fox["left_out"] == 1
    assert fox["nll_status"] == "ok"
    measured = ["nll", "nll_low", "holds_to", "holds_at_longest", "rise_8x"]
    assert fox[measured].to_dict() == of_four[measured].to_dict()


def test_a_loss_that_failed_at_the_training_length_is_said(six):
    altered = six.copy()
    is_one = (six["label"] == "fox") & (six["seed"] == 0)
    altered.loc[is_one & (six["length_ratio"] == 1), "status"] = "failed"

    table = compare.compare(altered)

    shown = main_table(table).cells
    assert ("fox", "failed") in [row[:2] for row in shown]


def test_of_several_references_that_with_most_seeds_is_taken(six):
    altered = six.copy()
    of_rope = six["label"] == "rope"
    of_one_seed = of_rope & (six["seed"] == 0)
    altered.loc[of_rope, "label"] = "rope b"
    altered.loc[of_one_seed, "label"] = "rope a"
    assert compare.reference_label(altered) == "rope b"


def test_a_scheme_may_hold_further_than_a_text_that_is_too_short_for_all(six):
    altered = six.copy()
    altered.loc[six["length_ratio"] == 8, "status"] = "too_short"

    fox = by_label(altered).loc["fox"]

    assert fox["holds_to"] == 512
    assert fox["holds_at_longest"]


def test_rows_that_cannot_be_compared_are_refused(six):
    rows = main_rows(six)
    twice = pd.concat([rows, rows])
    with pytest.raises(ValueError, match="counts once"):
        Losses(twice)
    of_several_settings = rows_of_study("ledger")
    with pytest.raises(ValueError, match="one setting"):
        compare.compare(of_several_settings)
    with pytest.raises(UserError, match="no scheme is called 'rop'"):
        compare.compare(six, "rop")


def test_words_about_differences_need_five_seeds(six):
    four = by_label(six[six["seed"] < 4])
    why = set(four["nll_why"].dropna())
    assert why == {"4 of 5 seeds"}


def test_words_about_one_scheme_need_no_seeds(six):
    two = by_label(six[six["seed"] < 2])
    assert two.loc["t5", "beats_reader"] == NOT_RESOLVED
    assert two.loc["t5", "holds_to"] == 1024


def test_words_need_several_documents(six):
    of_two = six.copy()
    documents = six["unit_documents"].dropna()
    of_two["unit_documents"] = documents.map(lambda each: np.minimum(each, 1))

    table = by_label(of_two)

    assert table.loc["none", "nll_why"].startswith("one document has 9")
    assert "holds_to" not in table


def test_nothing_is_said_beside_rows_without_documents(six, table):
    mixed = six.copy()
    for name in ("tokens", "nll", "ngram", "cached_ngram", "documents"):
        column = mixed[f"unit_{name}"]
        is_sum = (mixed["seed"] == 0) & column.notna()
        sums = column[is_sum].map(lambda of_units: np.array([np.sum(of_units)]))
        mixed[f"unit_{name}"] = sums.combine_first(column)

    together = by_label(mixed)

    assert together["nll"].to_dict() == pytest.approx(table["nll"].to_dict())
    assert set(together["nll_word"].dropna()) == {""}
    assert together.loc["none", "nll_why"] == "losses by document are missing"
    assert set(together["learned"]) == {None}
    assert "holds_to" not in together


def effects(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split (schemes, parts, seeds, documents) into what a seed adds (its spread), what
    a document adds, and what is left; the means are dropped.
    """
    parts = parts - parts.mean((2, 3), keepdims=True)
    of_seed = parts.mean(3, keepdims=True)
    of_document = parts.mean(2, keepdims=True)
    left = parts - of_seed - of_document
    left = left * math.sqrt(5 / 4)  # of five they sum to 0
    spread = of_seed.std(2, ddof=1, keepdims=True)
    return spread, of_document, left


def simulated(six: pd.DataFrame, reports: int) -> Iterator[Losses]:
    """Reports of six schemes that are equal but for luck, five seeds and 49 documents,
    each at the limits of words.

    What a document does to a scheme and what a run adds on a document are drawn from
    those of the six, a seed's effect from a normal distribution with that scheme's
    spread. In truth 512 tokens add `RISE_LIMIT`, 64 cost `USES_LIMIT`.
    """
    rng = np.random.default_rng(0)
    rows = main_rows(six)
    is_plain = rows["variant"] == "plain"
    is_needed = is_plain & rows["length"].isin([32, 64, 128, 512])
    losses = Losses(rows[is_needed])

    def measured(length: int) -> np.ndarray:  # (schemes, seeds, documents)
        sums = [losses.sums[label, "plain", length] for label in losses.seeds]
        return np.array(sums) / losses.tokens

    level = measured(128)
    rise = measured(512) - level
    cost = measured(64) - level
    parts = np.stack([level, rise, cost], 1)
    spread, of_document, left = effects(parts)

    # those of the simple readers go too: there is no gate
    losses.tokens = np.ones(49)
    losses.sums = {}
    for _ in range(reports):
        documents = rng.integers(49, size=49)
        runs = rng.integers(5, size=(6, 1, 5, 1))
        seeds = spread * rng.normal(size=(6, 3, 5, 1))
        drawn = np.take_along_axis(left, runs, 2)[..., documents]
        made = of_document[..., documents] + seeds + drawn
        level = 3 + made[:, 0]
        rise = words.RISE_LIMIT + made[:, 1]
        cost = words.USES_LIMIT + made[:, 2]
        sums = {
            32: level + cost + 1,
            64: level + cost,
            128: level,
            512: level + rise,
        }
        for number, label in enumerate(losses.seeds):
            for length, of_length in sums.items():
                of_label = pd.DataFrame(of_length[number])
                losses.sums[label, "plain", length] = of_label
        yield losses


@pytest.mark.slow
def test_intervals_cover_and_wrong_words_are_rare(six):
    """At most 2 % of reports have a wrong word of a family, within two standard errors
    of so few reports.
    """
    reports = 250
    covered = []
    wrong = Counter()
    for losses in simulated(six, reports):
        labels = list(losses.seeds)
        schemes = [compare.numbers(losses, label, 6) for label in labels]
        lengths = {scheme.holds_to for scheme in schemes}
        contexts = {scheme.uses for scheme in schemes}
        wrong["holds_to"] += 512 in lengths
        wrong["uses"] += not contexts <= {32}

        labels.remove("rope")
        said = set()
        for label in labels:
            for pair in compare.against(losses, label, "rope", 6, words.LEAST):
                said.add(pair.word)
                covered.append(pair.interval.low <= 0 <= pair.interval.high)
        is_right = said <= {NOT_RESOLVED, ""}
        wrong["nll or rise"] += not is_right

    standard_error = math.sqrt(0.02 * 0.98 / reports)
    most = 0.02 + 2 * standard_error
    assert 0.93 < np.mean(covered) < 0.97
    assert max(wrong.values()) <= most * reports, wrong


def test_ten_seeds_may_be_in_two_groups():
    alike = np.linspace(0, 0.05, 5)
    assert in_two_groups([*alike, *(1 + alike)])
    assert in_two_groups([*np.linspace(0, 0.05, 9), 1])
    assert not in_two_groups(np.linspace(0, 1, 10))
    assert not in_two_groups([*alike, *(0.09 + alike)])
    assert not in_two_groups([0, 0.01, 0.02, 0.03, 1])


def test_few_ordinary_seeds_are_said_to_be_in_two_groups():
    drawn = np.random.default_rng(0).normal(size=(1000, 10))
    assert np.mean([in_two_groups(seeds) for seeds in drawn]) <= 0.05


@pytest.fixture(scope="module")
def copy():
    """Return rows of four schemes that learned to copy, with five seeds each."""
    ledger = rows_of_study("ledger")
    of_task = ledger[ledger["trained_task"] == "copy"]
    return of_task[of_task["seed"] < 10]


@pytest.fixture(scope="module")
def of_copy(copy):
    return tasks.compare_tasks(copy)


def test_schemes_are_compared_on_a_task(of_copy):
    assert of_copy.reference == "rope"
    assert of_copy.n_tests == 5
    table = of_copy.frame
    assert list(table["label"]) == ["alibi", "rope", "randomized", "none"]
    alibi = table.set_index("label").loc["alibi"]
    assert alibi["learned"] == 5
    assert alibi["seeds"] == 5
    assert alibi["learned_low"] == pytest.approx(0.478176, abs=1e-6)
    assert alibi["learned_high"] == 1
    assert alibi["accuracy_2x_word"] == "better"
    assert alibi["accuracy_4x_word"] == "better"
    assert alibi["accuracy_2x_p"] == pytest.approx(5 * 2 / 252)


def test_a_scheme_that_has_not_learned_a_task_is_not_compared(of_copy):
    none = of_copy.frame.set_index("label").loc["none"]
    assert none["learned_word"] == "learned by fewer seeds"
    assert pd.isna(none["accuracy_2x_word"])


def test_a_reference_without_tested_runs_is_replaced_and_that_is_said(copy):
    altered = copy.copy()
    altered.loc[copy["label"] == "alibi", "run_status"] = "stopped"

    comparison = tasks.compare_tasks(altered, "alibi")

    assert comparison.reference == "none"
    _, sentence, *_ = answer.task_answer(altered, comparison).sentences
    assert sentence == "alibi has no tested run: the others are compared with none."


def test_equal_best_schemes_of_a_task_are_named_together(copy, of_copy):
    schemes = []
    for scheme in of_copy.schemes:
        all_right = dataclasses.replace(scheme.shares[4], median=1.0)
        ranked = scheme.label in ("alibi", "rope")
        shares = scheme.shares | {4: all_right}
        schemes.append(dataclasses.replace(scheme, shares=shares, ranked=ranked))
    equal = dataclasses.replace(of_copy, schemes=schemes)
    sentence, *_ = answer.task_answer(copy, equal).sentences
    assert "trained problem: alibi, rope, 100% right" in sentence


def test_problems_that_differ_from_the_trained_ones_have_accuracies_of_their_own():
    ledger = rows_of_study("ledger")
    of_task = ledger[ledger["trained_task"] == "flip_flop"]
    table = tasks.accuracies(of_task)
    assert set(table["of_task"]) == {"", "ignore=0.1", "ignore=0.98"}


def test_a_seed_that_diverged_has_nothing_right(copy):
    altered = copy.copy()
    is_lost = (copy["label"] == "alibi") & (copy["seed"] == 5)
    altered.loc[is_lost, "run_status"] = "diverged"

    rows = tasks.task_rows(altered)

    of_alibi = rows[rows["label"] == "alibi"]
    lost = of_alibi[of_alibi["seed"] == 5]
    assert set(lost["accuracy"]) == {0}


def are_plain(values: Iterable[object]) -> bool:
    types = {type(value) for value in values}
    return types <= {int, float, str, type(None)}


def test_one_run_on_text_in_a_few_numbers(six):
    of_alibi = six[six["label"] == "alibi"]
    of_one_run = of_alibi[of_alibi["seed"] == 0]

    run = headline(of_one_run)

    assert run["learned"] == "yes"
    assert run["beats_reader"] == NOT_RESOLVED
    assert run["cached_ngram"] == pytest.approx(2.936, abs=1e-3)
    assert run["reach"] == 1024
    assert run["uses"] == 32
    assert run["rise_16x"] is None
    assert are_plain(run.values())


def test_one_run_on_a_task_in_a_few_numbers(copy):
    name = copy["run"].iloc[0]
    of_one_run = copy[copy["run"] == name]

    run = headline(of_one_run)

    assert run["learned"] == "yes"
    assert run["accuracy_1x"] == pytest.approx(0.999628)
    assert are_plain(run.values())


@pytest.fixture
def folder(tmp_path):
    config = configured("rope", 0)
    return write_run(tmp_path, config, Truth(3.6, 0.1))


def append(folder: Path, **changes: Any) -> None:
    """Repeat a run's first row, changed."""
    row = read_rows(folder)[0] | changes
    for name in ("units", "perplexity", "bits_per_byte"):
        row.pop(name, None)
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"run": folder.name, **row}) + "\n")


OTHER_ROWS = [
    {"checkpoint_step": 3},
    {"extension": "yarn"},
    {"protocol": "nonoverlap"},
    {"split": "validation"},
    {"split": "validation", "checkpoint_step": 13},  # a later evaluation
]


@pytest.mark.parametrize("changes", OTHER_ROWS)
def test_other_rows_do_not_count_in_a_headline(folder, changes):
    before = headline_of(folder)
    append(folder, nll=9.0, **changes)
    assert headline_of(folder) == before


def test_a_headline_has_the_loss_at_the_training_length(folder):
    rows = read_rows(folder)
    (nll,) = [row["nll"] for row in rows if row["length_ratio"] == 1]
    assert headline_of(folder)["nll_1x"] == nll


def test_a_headline_has_no_loss_of_an_earlier_checkpoint(folder):
    append(folder, checkpoint_step=10**6, protocol="nonoverlap")
    assert headline_of(folder)["nll_1x"] is None


GATES = [
    (4.2, "yes", True),
    (3.2, "no", False),
    (3.6, NOT_RESOLVED, False),
    (None, None, True),
]


@pytest.mark.parametrize(("ngram", "learned", "has_reach"), GATES)
def test_a_run_has_learned_if_it_beats_a_ngram_model_and_only_then_has_a_reach(
    tmp_path, ngram, learned, has_reach
):
    config = configured("rope", 0)
    truth = Truth(3.6, 0.0, ngram=ngram)
    folder = write_run(tmp_path, config, truth)

    run = headline_of(folder)

    assert run["learned"] == learned
    assert run["rise_4x"] is not None
    assert (run["reach"] is not None) == has_reach
