"""Reports of runs on tasks: who learned, over which seeds a number is, what may be said of a difference."""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_study import SCHEMES, groups_of, read_csv, read_rows, write_rows, write_study
from fake_tasks import OFFSET, Skill, task_config, write_task_run
from scipy import stats

import posbench
from posbench import report
from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.evaluation import answers
from posbench.evaluation.answers import TRAINED, Answers, Place
from posbench.evaluation.intervals import clopper_pearson
from posbench.report import figures, task_figure, task_tables
from posbench.report.comparison import load, standing, statistics
from posbench.report.comparison.standing import Spread, Standing

DOUBLE = Place("", 2.0, 0)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 30)
        yield


@pytest.fixture(scope="module")
def study(template: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, and of copy: five learn, four of five, two of five, none, one diverges; one ends where trained."""
    folder = tmp_path_factory.mktemp("outputs") / "fake"
    copy, passkey = task_config(template), task_config(template, "passkey")
    for seed in range(5):
        far = (1.0, 0.99, 0.9 - 0.01 * seed, 0.6, 0.3)
        write_task_run(folder, copy, "alibi", seed, Skill(1.0, far, 200 + 100 * seed))
        write_task_run(folder, copy, "rope", seed, Skill(0.995 if seed else 0.5, (0.5, 0.4, 0.2, 0.1, 0.1)))
        write_task_run(folder, copy, "t5", seed, Skill(1.0 if seed < 2 else 0.7, steps=None))
        write_task_run(folder, copy, "none", seed, Skill(0.829, steps=None))
        write_task_run(folder, copy, "learned", seed, Skill(1.0, ()))
    write_task_run(folder, copy, "path", 0, None, "failed", reason="diverged", message="loss is nan")
    for seed in range(2):
        variants = {"depth=1.0": 0.9, "depth=0.5": 0.8 + 0.1 * seed}
        extended = {"yarn": 0.7 + 0.1 * seed}
        write_task_run(folder, passkey, "rope", seed, Skill(variants=variants, extended=extended))
        write_task_run(folder, passkey, "none", seed, Skill(0.5, variants=variants, extended=extended))
    return folder


@pytest.fixture(scope="module")
def found(study: Path) -> dict[str, Standing]:
    return {one.scheme.label: one for one in standing.standings(groups_of(study)[0])}


@pytest.fixture(scope="module")
def written(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    report.main([study], out)
    return out


def rows_of(table: task_tables.Table) -> dict[str, dict[str, str]]:
    """The table's texts by scheme and column."""
    return {
        row[0].text: {column: cell.text for column, cell in zip(table.columns, row, strict=True)} for row in table.rows
    }


# -- statistics --------------------------------------------------------------------------------------------------------


def test_the_interval_of_a_share_is_that_of_scipys_binomial_test() -> None:
    for k, n in ((0, 5), (1, 5), (4, 5), (5, 5), (7, 10), (511, 512)):
        expected = stats.binomtest(k, n).proportion_ci(0.95, "exact")
        assert clopper_pearson(k, n) == pytest.approx((expected.low, expected.high), abs=1e-12)
    for wrong in ((1, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="is no share"):
            clopper_pearson(*wrong)


def test_fishers_test_and_the_least_p_of_so_many_seeds_by_hand() -> None:
    test = statistics.fisher((5, 5), (0, 5))
    assert test.p == test.least == pytest.approx(2 / math.comb(10, 5))  # both tables of five against none
    # 4 of 5 against 1 of 5, of C(10,5) = 252: as or less likely are 5,0 (1), 4,1 (25) and their mirrors.
    assert statistics.fisher((4, 5), (1, 5)).p == pytest.approx(52 / 252)
    assert statistics.fisher((1, 1), (0, 1)).least == 1.0
    assert statistics.fisher((3, 3), (0, 5)).least == pytest.approx(1 / 56)


def test_the_permutation_test_of_a_hand_counted_example() -> None:
    # Of the six ways to choose two of 1, 2, 3, 4 as the first: the sum 7 is the highest, one way, and one mirrors it.
    assert statistics.permutation([3.0, 4.0], [1.0, 2.0]).p == pytest.approx(2 / 6)
    # Sums of two are 3 4 5 5 6 7: of at least 6 there are two, and twice that is four of six.
    assert statistics.permutation([2.0, 4.0], [1.0, 3.0]).p == pytest.approx(4 / 6)
    assert statistics.permutation([1.0] * 5, [0.0] * 5).p == pytest.approx(2 / 252)
    assert statistics.permutation([1.0, 1.0], [1.0, 1.0]).p == 1.0
    assert statistics.permutation([1.0], [0.0, 0.1, 0.2]) == statistics.Exact(1.0, 0.5)


@pytest.mark.full
def test_the_permutation_test_keeps_its_level_where_nothing_differs() -> None:
    """Of all 252 ways to part ten values, at most one in twenty has a p of at most 0.05."""
    values = np.random.default_rng(1).random(10)
    ways = [list(chosen) for chosen in itertools.combinations(range(10), 5)]
    p = [statistics.permutation(values[way], np.delete(values, way)).p for way in ways]
    assert 0 < np.mean(np.array(p) <= 0.05) <= 0.05


def test_how_many_seeds_the_adjusted_tests_take_is_said_by_the_tests_themselves() -> None:
    one = Standing(None, {}, 0, 0, None, {})  # type: ignore[arg-type]
    for schemes in (2, 3, 8):
        tests, needed = 3 * (schemes - 1), standing.seeds_needed([one] * schemes)
        least = [statistics.permutation([0.0] * 1 + [1.0] * (n - 1), [0.5] * n).least for n in (needed - 1, needed)]
        assert statistics.holm([least[0]] * tests)[0] >= 0.05 > statistics.holm([least[1]] * tests)[0]


# -- the gate ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "learned"),
    [
        ({}, "yes"),
        ({"accuracy": 0.99}, "yes"),
        ({"accuracy": 0.9899999}, "no"),
        ({"accuracy": None}, "no"),
        ({"accuracy": 7.0}, "no"),  # no share: a stranger's
        ({"status": "failed"}, "no"),
    ],
)
@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_the_gate_is_99_percent_at_every_trained_length(
    found: dict[str, Standing], change: dict[str, Any], learned: str, ratio: float
) -> None:
    known = found["alibi"].scheme.runs[0].answers
    place = Place("", ratio, 0)
    row = dataclasses.replace(known.at[place].row, **change)
    changed = Answers(known.at | {place: dataclasses.replace(known.at[place], row=row)}, None)
    assert changed.learned == learned


def test_neither_longer_nor_shifted_problems_nor_variants_are_part_of_the_gate(
    template: Config, tmp_path: Path
) -> None:
    skill = Skill(1.0, (0.0,) * 5, variants={"depth=0.5": 0.0})
    folder = write_task_run(tmp_path, task_config(template), "rope", 0, skill)
    rows = read_rows(folder / "evaluation.jsonl")
    write_rows(folder / "evaluation.jsonl", [row | ({"accuracy": 0.0} if row["offset"] else {}) for row in rows])
    known = load.read(folder).answers
    assert known.learned == "yes"
    assert known.at[Place("", 1.0, OFFSET)].accuracy == 0.0 == known.at[DOUBLE].accuracy
    without = {place: one for place, one in known.at.items() if place.ratio != 1}
    assert Answers(without, None).learned is None  # the longest trained length was not tested


def test_steps_to_the_gate_are_those_of_the_first_validation_that_reached_it() -> None:
    def rows(*shares: Any) -> list[dict[str, Any]]:
        return [{"step": 100 * n, "validation/accuracy": share} for n, share in enumerate(shares, start=1)]

    assert answers.steps_to_gate(rows(0.5, 0.99, 0.98, 1.0)) == 200
    assert answers.steps_to_gate(rows(0.5, 0.9899)) is None
    assert answers.steps_to_gate([*rows(0.5, 1.0, 1.0), {"step": 200, "validation/accuracy": 0.5}]) == 300  # continued
    assert answers.steps_to_gate([{"step": "x", "validation/accuracy": 1.0}, *rows("y", math.inf, 3.0, None)]) is None


# -- what is said of a scheme ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_medians_and_ranges_are_over_all_seeds_and_those_that_learned_are_a_second_number(
    found: dict[str, Standing], study: Path
) -> None:
    rope, alibi = found["rope"], found["alibi"]
    assert (rope.learned, rope.seeds) == (4, 5) and rope.ranked
    assert rope.at[TRAINED].accuracy == Spread(0.995, 0.5, 0.995, 5)
    assert rope.at[TRAINED].of_learned == Spread(0.995, 0.995, 0.995, 4)  # the seed of 0.5 is not in it
    assert alibi.at[DOUBLE].accuracy == Spread(0.88, 0.86, 0.9, 5)
    assert alibi.at[TRAINED].exact_match == Spread(1.0, 1.0, 1.0, 5)
    assert (alibi.steps, rope.steps, found["none"].steps) == (400.0, 300.0, math.inf)


@pytest.mark.full
def test_fewer_than_half_is_not_learned_last_and_without_further_numbers(study: Path) -> None:
    group = groups_of(study)[0]
    found = standing.standings(group)
    assert [one.scheme.label for one in found] == ["alibi", "rope", "learned", "none", "t5", "path"]
    table = rows_of(task_tables.main_tables(group, found)[0])
    assert table["alibi"]["learned"] == "5 of 5 (48-100 %)" and table["rope"]["learned"] == "4 of 5 (28-99 %)"
    assert table["alibi"]["2x"] == "88.0 [86.0-90.0]" and table["learned"]["2x"] == "undefined"
    assert table["alibi"][f"1x shifted by {OFFSET}"] == "100.0" and table["alibi"]["steps to 99 %"] == "400"
    assert table["none"]["1x"] == "not learned (82 %)"  # 82.9: never rounded to the gate
    assert table["t5"]["learned"] == "2 of 5 (5-85 %)" and table["t5"]["1x"] == "not learned (70 %)"
    for label in ("none", "t5", "path"):
        assert all(not text for column, text in table[label].items() if column not in ("scheme", "learned", "1x"))
    assert table["path"]["learned"] == "0 of 1 (0-98 %)"  # one that diverged has not learned
    assert set(rows_of(task_tables.main_tables(group, found)[1])) == {"alibi", "rope", "learned"}
    said = " ".join(task_tables.answer(found))
    assert (
        "alibi 5 of 5" in said and "none (82 %)" in said and "alibi 88 %, rope 20 %; undefined there: learned" in said
    )


def test_exactly_half_of_the_seeds_is_learned_and_runs_that_are_not_done_are_not_known(
    template: Config, tmp_path: Path
) -> None:
    config = task_config(template)
    for seed in range(2):
        write_task_run(tmp_path, config, "rope", seed, Skill(1.0 if seed else 0.2))
    write_task_run(tmp_path, config, "rope", 2, Skill(), "stopped")
    (one,) = standing.standings(groups_of(tmp_path)[0])
    assert one.ranked and (one.learned, one.seeds) == (1, 2)
    assert task_tables.learned(one).text == "1 of 2 (1-99 %), 1 not known"


# -- against the reference ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_no_significance_is_claimed_where_so_few_seeds_cannot_reach_it(found: dict[str, Standing]) -> None:
    """Five others, three tests each: 2 / 252 of the best case is 0.087 after the adjustment."""
    against = {label: one.against for label, one in found.items()}
    assert against["rope"] is None
    alibi = against["alibi"]
    assert alibi is not None and alibi.learned is not None and alibi.learned.too_small
    assert alibi.accuracy[2.0].difference == pytest.approx(0.88 - 0.2) and alibi.accuracy[2.0].too_small
    assert alibi.verdict == "n too small"
    for label, verdict in {
        "none": "not learned: not ranked",
        "path": "not learned: not ranked; one seed: no verdict",
        "learned": "undefined at 2x; undefined at 4x",
    }.items():
        assert (one := against[label]) is not None and one.verdict == verdict


@pytest.mark.full
def test_two_schemes_of_five_seeds_are_told_apart_by_exact_tests(template: Config, tmp_path: Path) -> None:
    config = task_config(template)
    for seed in range(5):
        write_task_run(tmp_path, config, "rope", seed, Skill(1.0, (0.5, 0.5, 0.2 + 0.01 * seed, 0.1, 0.1)))
        write_task_run(tmp_path, config, "alibi", seed, Skill(1.0, (1.0, 1.0, 0.9, 0.105, 0.1)))
    group = groups_of(tmp_path)[0]
    found = standing.standings(group)
    (against,) = [one.against for one in found if one.against]
    assert against.learned is not None and against.learned.p == 1.0
    assert against.accuracy[2.0].p == pytest.approx(3 * 2 / 252)  # Holm over three tests; at 4x 1/126 has two left
    assert against.verdict == "better at 2x; differs by less than 1% at 4x"
    rows = rows_of(task_tables.main_tables(group, found)[2])
    assert (rows["alibi"]["at 2x"], rows["alibi"]["verdict"]) == ("+68.0", against.verdict)
    for path in tmp_path.glob("alibi-*/evaluation.jsonl"):
        path.write_text(re.sub(r'"targets_sha256": "\w+"', f'"targets_sha256": "{"0" * 64}"', path.read_text()))
    (against,) = [one.against for one in standing.standings(groups_of(tmp_path)[0]) if one.against]
    assert against.verdict == "other problems at 2x; other problems at 4x" and not against.accuracy
    path = next(tmp_path.glob("alibi-*/evaluation.jsonl"))
    kept = path.read_text()
    path.write_text("".join(line for line in kept.splitlines(True) if '"length_ratio": 4.0' not in line))
    (against,) = [one.against for one in standing.standings(groups_of(tmp_path)[0]) if one.against]
    assert against.verdict == "other problems at 2x; not tested in all seeds at 4x"
    path.write_text(kept)
    report.main([tmp_path])
    assert "Not all runs were tested on the same problems" in (tmp_path / "report" / "report.md").read_text()


def test_seeds_that_did_not_learn_and_seeds_that_diverged_take_part_in_the_comparison(
    template: Config, tmp_path: Path
) -> None:
    """By the four seeds that learned alibi is far better at 2x; by all six there is no such difference."""
    config = task_config(template)
    for seed in range(6):
        write_task_run(tmp_path, config, "rope", seed, Skill(1.0, (1.0, 1.0, 0.5, 0.5, 0.5)))
    for seed in range(4):
        write_task_run(tmp_path, config, "alibi", seed, Skill(1.0, (1.0, 1.0, 0.9, 0.5, 0.5)))
    write_task_run(tmp_path, config, "alibi", 4, Skill(0.1, (0.1,) * 5))
    write_task_run(tmp_path, config, "alibi", 5, None, "failed", reason="diverged", message="loss is nan")
    (one,) = [one for one in standing.standings(groups_of(tmp_path)[0]) if one.against]
    assert (one.learned, one.seeds) == (4, 6) and one.at[DOUBLE].accuracy == Spread(0.9, 0.0, 0.9, 6)
    assert one.against is not None and one.against.verdict == "not resolved at 2x; not resolved at 4x"
    assert one.against.accuracy[2.0].difference == pytest.approx((4 * 0.9 + 0.1 + 0) / 6 - 0.5)


@pytest.mark.full
def test_better_than_the_reference_is_qualified_if_a_trivial_reader_does_as_well(
    template: Config, tmp_path: Path
) -> None:
    for seed in range(5):
        write_task_run(tmp_path, task_config(template, "passkey"), "rope", seed, Skill(1.0, (0.5,) * 5))
        write_task_run(
            tmp_path, task_config(template, "passkey"), "alibi", seed, Skill(1.0, (0.9, 0.9, 0.66, 0.9, 0.9))
        )
    (one,) = [one for one in standing.standings(groups_of(tmp_path)[0]) if one.against]
    assert one.against is not None
    assert one.against.verdict == "better at 2x, but not than a trivial reader; better at 4x"


def test_tables_show_the_trivial_reader_and_guessing_and_whole_answers_beside_tokens(study: Path) -> None:
    copy, passkey = groups_of(study)
    found = standing.standings(passkey)
    learned, paper = task_tables.main_tables(passkey, found)[0], task_tables.for_paper(found)
    rows = rows_of(learned)
    assert (rows["trivial reader"]["2x"], rows["guessing"]["2x"], rows["trivial reader"]["learned"]) == (
        "66.0",
        "10.0",
        "",
    )
    assert "Trivial reader: one that knows which tokens of the answer are left" in learned.note
    assert "; a trivial reader 66 %." in " ".join(task_tables.answer(found))
    assert rows_of(paper)["trivial reader"] == rows_of(paper)["trivial reader"] | {"1x": "66.0", "1x whole": ""}
    assert rows_of(paper)["rope"]["2x whole"] == "100.0"
    drawn = task_figure.of_group(passkey, found)
    assert drawn is not None
    dashes = [[line for line in axis.lines if line.get_linestyle() == "--"] for axis in drawn.axes]
    assert [len(lines) for lines in dashes] == [1, 0] and set(dashes[0][0].get_ydata()) == {0.66}
    old = task_tables.main_tables(copy, standing.standings(copy))[0]  # rows of an earlier version
    assert "trivial reader" not in rows_of(old) and "rivial" not in old.note


def test_the_reference_is_rope_else_none_else_the_first(template: Config, tmp_path: Path) -> None:
    for scheme, expected in (("fox", "fox"), ("alibi", "alibi"), ("none", "none"), ("rope", "rope")):
        write_task_run(tmp_path, task_config(template), scheme, 0, Skill())
        assert standing.reference(groups_of(tmp_path)[0]).label == expected


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_task_is_a_section_and_a_report_of_tasks_has_no_empty_table_of_text(written: Path) -> None:
    markdown = (written / "report.md").read_text()
    assert re.findall("^## (.*)", markdown, re.MULTILINE) == ["Task copy", "Task passkey"]
    assert "nll at 1x" not in markdown and "In distribution" not in markdown and "may be compared" not in markdown
    assert "Variants of the task" in markdown.partition("## Task passkey")[2]
    for row in ("| rope | depth=0.5 | 85.0 \\[80.0-90.0\\] | 0.0 |", "| rope | depth=1.0 | 90.0 | 0.0 |"):
        assert row in markdown
    assert "| none | depth" not in markdown  # not learned: nothing said of its variants
    assert "Extensions and windows" in markdown.partition("## Task passkey")[2]
    for row in ("| rope | as trained | 100.0 |", "| rope | yarn | 75.0 \\[70.0-80.0\\] |"):
        assert row in markdown
    assert "| none | yarn" not in markdown
    page = (written / "index.html").read_text()
    assert page.count("<figure>") == 2
    for place in (written, written / "set-2"):
        assert {path.name for path in place.glob("curves.*")} == {"curves.png", "curves.svg", "curves.pdf"}
    table = (written / "table.tex").read_text()
    assert r"none & 0/5 & not learned (82 \%)" in table and r"$88.0$ [86.0--90.0]" in table


@pytest.mark.full
def test_csv_has_every_scheme_at_every_place(written: Path) -> None:
    tasks = read_csv(written / "tasks.csv")
    (alibi,) = [row for row in tasks if (row["label"], row["length_ratio"], row["task"]) == ("alibi", "2.0", "copy")]
    assert (alibi["accuracy_median"], alibi["accuracy_min"], alibi["learned"]) == ("0.88", "0.86", "5")
    (seed,) = [row for row in read_csv(written / "runs.csv") if row["run"].startswith("rope-s0") and row["set"] == "1"]
    assert (seed["task"], seed["learned"], seed["accuracy_2x"]) == ("copy", "no", "0.2")
    assert {row["problem_length"] for row in read_csv(written / "evaluation.csv")} >= {"16", "32"}


@pytest.mark.full
def test_text_beside_tasks_is_reported_as_it_is_alone(template: Config, study: Path, tmp_path: Path) -> None:
    text = write_study(tmp_path / "text", template, {name: SCHEMES[name] for name in ("rope", "alibi")}, seeds=2)
    report.main([text], tmp_path / "alone")
    report.main([text, study], tmp_path / "both")
    alone, both = ((tmp_path / name / "report.md").read_text() for name in ("alone", "both"))
    assert [line for line in re.findall("^## (.*)", both, re.MULTILINE)] == ["Text", "Task copy", "Task passkey"]
    section = both.partition("## Text\n\n")[2].partition("\n## Task")[0]
    assert alone.partition("\n\n**")[2] == section.partition("**")[2].rstrip("\n") + "\n"
    for name in ("table.tex", "curves.png"):
        own, beside = ((tmp_path / place / name).read_bytes() for place in ("alone", "both"))
        assert own.replace(b"fake}", b"") == beside.replace(b"fake-Text}", b"")
    header = (tmp_path / "alone" / "evaluation.csv").read_text().partition("\n")[0]
    assert "problem_length" not in header and not (tmp_path / "alone" / "tasks.csv").exists()


# -- pictures and data -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_dot_per_seed_a_line_through_learned_medians_and_hollow_what_did_not_learn(study: Path) -> None:
    group = groups_of(study)[0]
    found = standing.standings(group)
    figure = task_figure.of_group(group, found)
    assert figure is not None
    accuracy = figure.axes[0]
    assert accuracy.get_xscale() == "log" and len(figure.axes) == 2
    lines = [line for line in accuracy.lines if len(line.get_xdata()) == 8]
    assert len(lines) == 2  # alibi and rope; learned ends at 1x, the others have none
    assert sorted(round(float(line.get_ydata()[5]), 6) for line in lines) == [0.2, 0.88]
    dots = [collection for collection in accuracy.collections if len(collection.get_offsets())]
    hollow = sum(len(one.get_offsets()) for one in dots if one.get_facecolor()[0][:3].tolist() == [1, 1, 1])
    assert sum(len(one.get_offsets()) for one in dots) == 4 * 5 * 8 + 5 * 3
    assert hollow == 8 * (1 + 3 + 5)  # of rope, t5 and none
    names = " ".join(text.get_text().replace("\n", " ") for text in accuracy.texts)
    assert "none, not learned" in names and "learned undefined from 1.25x" in names


@pytest.mark.full
def test_notebooks_have_task_runs_too(study: Path, tmp_path: Path) -> None:
    frame = posbench.runs(study)
    rope = frame[(frame["encoding"] == "rope") & (frame["seed"] == 1) & (frame["task"] == "copy")].iloc[0]
    assert (rope["accuracy_2x"], rope["learned"], rope["steps_to_gate"]) == (0.2, "yes", 300.0)
    run = posbench.load(rope["folder"])
    assert "learned yes, accuracy_1x 0.995" in repr(run) and run.headline["exact_match_1x"] == 0.95
    curve = run.curve()
    assert list(curve["problem_length"][:8]) == [4, 10, 16, 20, 24, 32, 64, 128] and curve["offset"][8] == OFFSET
    assert curve["accuracy"][5] == 0.2
    labels = [axis.get_xlabel() for axis in run.plot().axes]
    assert len(labels) == 2 and all("problem length" in label for label in labels)
    with pytest.raises(UserError, match="they differ in task: copy or passkey"):
        posbench.plot(study)
