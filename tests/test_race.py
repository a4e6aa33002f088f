"""Races: how often their words are wrong, what stops them, and that what decides is settled before the first run."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from fake_study import SCHEMES, Truth, configured, write_run
from scipy import stats

from posbench import report
from posbench.config.identity import run_id
from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.evaluation.intervals import Interval, over_seeds
from posbench.launch import plans, states, sweep
from posbench.launch.race import Racing
from posbench.launch.states import Status
from posbench.report import captions, figures, tables
from posbench.report.comparison import claims, load, race, summary
from posbench.report.comparison.claims import Bounds
from posbench.report.comparison.judgement import Judged
from posbench.report.comparison.race import Race, Stop
from posbench.run_folder import finding
from posbench.show import properties

LOSSES = Path(__file__).parent / "data" / "losses.npz"
RACES = 40
MOST = stats.binom.ppf(0.999, RACES, claims.ALPHA) / RACES  # of a procedure that is wrong in one of twenty


words = support.script("words")


@pytest.mark.full
@pytest.mark.parametrize("truth", ["all equal", "each at another limit"])
@pytest.mark.parametrize(("kind", "equal"), [("normal", False), ("t3", True)])
def test_one_race_in_twenty_has_a_wrong_word_at_most(truth: str, kind: str, equal: bool) -> None:
    setting = words.Setting(5, 20, 12, equal, kind)
    assert words.races(words.Population(LOSSES), words.TRUTHS[truth], setting, RACES).wrong <= MOST


@pytest.mark.full
def test_looks_that_each_spend_all_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "level", lambda *_: claims.ALPHA)
    assert words.races(words.Population(LOSSES), words.TRUTHS["all equal"], words.Setting(5, 60), RACES).wrong > MOST


def test_large_effects_stop_early_and_none_is_missed() -> None:
    kinds = [words.Truth(0.4, (1.3, 2.0)), words.Truth(0.0)]
    found = words.races(words.Population(LOSSES), kinds, words.Setting(4, 60), 10)
    large, equal = found.ends
    assert large["settled"] == 1 and large["worse 1x"] == 1 and large["worse 4x"] == 1 and large["seeds"] < 6
    assert equal.get("settled", 0) < 0.2 and found.runs < 5 * 12


# -- the course --------------------------------------------------------------------------------------------------------


def difference(mean: float, sd: float, seeds: int) -> Interval:
    """An interval over seeds of this mean and SD."""
    values = np.random.default_rng(0).normal(0, 1, seeds)
    values = (values - values.mean()) / values.std(ddof=1)
    return over_seeds((mean + sd * values).tolist())


def judged(words: dict[str, tuple[Any, Any]], differences: dict[str, tuple[Interval, Interval]]) -> Judged:
    unknown = dict.fromkeys(words, Bounds(0, 0))
    return Judged(unknown, unknown, words, differences, {}, {}, dict.fromkeys(words, 0.001))


def test_a_scheme_stops_when_it_is_settled_hopeless_or_cannot_have_a_verdict() -> None:
    seen: list[dict[str, int]] = []
    clear, equal, close = difference(1.0, 0.01, 3), difference(0.0, 1.0, 3), difference(0.4, 0.2, 3)
    known = {"clear": (clear, clear), "hopeless": (equal, clear), "close": (clear, close)}

    def look_at(seeds: Mapping[str, int]) -> tuple[Judged, dict[str, bool]]:
        seen.append(dict(seeds))
        words: dict[str, tuple[Any, Any]] = {"clear": ("worse", "less"), "hopeless": ("open", "less")}
        words["close"] = ("worse", "open")
        return judged(words, known), {"unlearned": True, "unsure": False}

    ended = dict.fromkeys(["rope", "clear", "hopeless", "close", "unlearned", "unsure"], 8)
    found = race.course((3, 5, 8, 12), "rope", ended, look_at)
    assert found.stops == {
        "clear": Stop(1, 3, "settled"),
        "hopeless": Stop(1, 3, "futile"),
        "unlearned": Stop(1, 3, "no verdict"),
    }
    assert found.looks == 3 and found.seeds == {**dict.fromkeys(ended, 8), "clear": 3, "hopeless": 3, "unlearned": 3}
    assert [one["rope"] for one in seen] == [3, 5, 8] and seen[2]["clear"] == 3
    done = race.course((3, 8), "rope", ended, lambda seeds: (judged({"close": ("worse", "open")}, known), {}))
    assert done.stops["close"] == Stop(2, 8, "last look") == done.stops["unsure"]
    assert race.course((3, 5), "rope", {"rope": 2, "clear": 9}, look_at).looks == 0


def test_what_documents_leave_open_is_not_left_to_seeds() -> None:
    of_text = dataclasses.replace(difference(0.05, 0.01, 3), units=20, text=(0.1**2, 0.0))
    found = judged({"fox": ("open", "open")}, {"fox": (of_text, of_text)})
    course = race.course((3, 12), "rope", {"rope": 12, "fox": 12}, lambda seeds: (found, {}))
    assert course.stops == {"fox": Stop(1, 3, "documents")}


def test_a_scheme_goes_on_while_its_chance_of_a_word_at_the_last_look_is_one_in_ten() -> None:
    seen = []
    for mean in np.linspace(0.05, 0.5, 40):
        one = difference(mean, 0.3, 3)
        found = judged({"fox": ("open", "less")}, {"fox": (one, one)})
        course = race.course((3, 12), "rope", {"rope": 3, "fox": 3}, lambda seeds, found=found: (found, {}))
        chance = race.chance(one, 12, 0.001, claims.MARGIN)
        assert ("fox" in course.stops) == (chance < 0.1), (mean, chance)
        seen.append(chance)
    assert any(0.07 < chance < 0.1 for chance in seen) and any(0.1 < chance < 0.13 for chance in seen)


@pytest.mark.parametrize(("mean", "sd"), [(0.05, 0.03), (0.0, 0.004), (0.3, 0.2)])
def test_the_chance_of_a_word_is_that_of_seeds_drawn_anew(mean: float, sd: float) -> None:
    rng = np.random.default_rng(1)
    found, level, margin, draws = difference(mean, sd, 5), 0.01, 0.03, 20_000
    truth = rng.normal(mean, sd / 5**0.5, draws)  # the mean of all seeds, given the five
    later = (5 * mean + rng.normal(truth, sd, (7, draws)).sum(0)) / 12
    half = stats.t.ppf(1 - level / 2, 11) * sd / 12**0.5
    said = (np.abs(later) > max(half, claims.LEAST)) | (np.abs(later) < margin - half)
    assert race.chance(found, 12, level, margin) == pytest.approx(said.mean(), abs=0.015)


# -- reports -----------------------------------------------------------------------------------------------------------


def write_race(study: Path, template: Config, looks: tuple[int, ...], truths: dict[str, Truth], seeds: int) -> Race:
    """A study with so many seeds of each scheme, and its record."""
    for scheme, truth in truths.items():
        for seed in range(seeds):
            write_run(study, configured(template, scheme, seed), truth)
    named = [[run_id(configured(template, scheme, seed)) for seed in range(looks[-1])] for scheme in truths]
    made = Race(looks, "rope", tuple(map(tuple, named)))
    race.write(study / race.RECORD, made)
    return made


def read(study: Path) -> tuple[load.Group, dict[str, summary.Summary]]:
    (group,) = load.groups([load.read(run) for run in finding.run_folders([study])])
    return group, {one.scheme.label: one for one in summary.summarise(group)}


def test_a_report_counts_the_seeds_of_complete_looks_only(template: Config, tmp_path: Path) -> None:
    """A seed more would be another look; its loss is absurd here."""
    study = tmp_path / "fake"
    truths = {name: SCHEMES[name] for name in ("rope", "alibi", "none")}
    write_race(study, template, (5, 6, 9), truths, 5)
    before = read(study)[1]
    write_run(study, configured(template, "alibi", 5), Truth(9.0, 3.0))
    write_run(study, configured(template, "rope", 5), Truth(1.0, 0.0))
    group, after = read(study)
    for label, one in after.items():
        assert one.n_done == 5 and one.reach == before[label].reach and one.nll == before[label].nll
    assert after["none"].stop == Stop(1, 5, "settled")
    ends = after["none"].endpoints
    assert ends and ends.nll and ends.verdict.at_one == "worse" and ends.level
    assert ends.level == pytest.approx(claims.level(2 * 2 + 3, claims.ALPHA / 3))
    assert ends.nll.half == ends.nll.half_at(claims.ALPHA / 3) > ends.nll.half_at(0.05)
    said = " ".join(captions.notes_on_text(group, list(after.values())))
    assert "A race with looks at 5, 6, 9 seeds" in said and "At 5 seeds: " in said and "none (settled)" in said
    (table,) = (one for one in tables.main_tables(group, list(after.values())) if "Against" in one.title)
    assert any("(at 5 seeds: settled)" in row[-1].text for row in table.rows)


def test_before_its_first_look_a_race_says_nothing(template: Config, tmp_path: Path) -> None:
    study = tmp_path / "fake"
    write_race(study, template, (4, 6), {name: SCHEMES[name] for name in ("rope", "alibi")}, 3)
    ends = read(study)[1]["alibi"].endpoints
    assert ends and ends.nll and ends.nll_bounds is None and "no verdict" in ends.verdict.text


def test_the_table_of_a_race_and_its_verdicts_ask_one_gate(template: Config, tmp_path: Path) -> None:
    """Three seeds vary so little over documents, and so much among them, that the two gates differ."""
    study = tmp_path / "fake"
    write_race(study, template, (3, 5), {"rope": Truth(3.66, 0.16), "alibi": Truth(3.66, 0.01)}, seeds=0)
    for seed, nll in enumerate((3.5, 3.7, 3.9)):
        write_run(study, configured(template, "rope", seed), Truth(3.66, 0.16, ngram=9.0, paired=True))
        write_run(study, configured(template, "alibi", seed), Truth(nll, 0.01, ngram=3.9, paired=True))
    found = read(study)[1]["alibi"]
    by_documents = summary.gate(found.scheme)
    assert found.learned == "not resolved" and by_documents and by_documents.learned == "yes"
    assert found.endpoints and found.endpoints.verdict.text == "learned: not resolved, not ranked"
    assert found.reach is None


@pytest.mark.full
def test_a_race_is_no_look_of_a_report_and_takes_no_other_rules(
    template: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(properties, "measure", lambda names: [])
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])
    study = tmp_path / "fake"
    made = write_race(study, template, (5, 6), {name: SCHEMES[name] for name in ("rope", "alibi")}, 5)
    report.main([study])
    assert not (study / "report" / "looks.json").exists()
    with pytest.raises(UserError, match="compares with rope, which was settled before the first run"):
        report.main([study], reference="alibi")
    with pytest.raises(UserError, match=r"settled the least difference, 0\.02, before the first run"):
        report.main([study], least=0.1)
    race.write(study / race.RECORD, made)  # the same
    assert "recorded in race.json when 10 of its runs had begun." in (study / "report" / "report.md").read_text()
    race.write(tmp_path / "new" / race.RECORD, made)
    assert [
        one and one.runs_before for one in map(race.read, (study / race.RECORD, tmp_path / "new" / race.RECORD))
    ] == [10, 0]
    with pytest.raises(UserError, match=r"another race, of other looks: .* another folder \(study=NAME\)"):
        race.write(study / race.RECORD, dataclasses.replace(made, looks=(5, 6, 7)))
    for content in (
        "{",
        "[]",
        json.dumps(made.content | {"looks": [1, 6]}),
        json.dumps(made.content | {"alpha": 1}),
        json.dumps(made.content | {"runs_before": -1}),
    ):
        (study / race.RECORD).write_text(content)
        with pytest.raises(UserError, match=r"race\.json is not a race as this version"):
            report.main([study])


@pytest.mark.full
def test_a_part_of_a_race_is_reported_without_its_reference(template: Config, tmp_path: Path) -> None:
    study = tmp_path / "fake"
    write_race(study, template, (5, 6), {name: SCHEMES[name] for name in ("rope", "alibi", "none")}, 5)
    (group,) = load.groups([load.read(run) for run in finding.run_folders([study]) if "rope" not in run.name])
    found = {one.scheme.label: one for one in summary.summarise(group)}
    assert found["alibi"].endpoints is None and found["alibi"].reach == read(study)[1]["alibi"].reach
    assert "Still in the race" not in " ".join(captions.notes_on_text(group, list(found.values())))


# -- sweeps ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    support.write_text(tmp_path)
    return support.each_once([*support.TINY, "data.path=text.txt", "training.tokens=128", "evaluation.ratios=[1,4]"])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["race=3"], "race is '3': expected true or false"),
        (["race.looks=3,5"], "race.looks goes with race=true"),
        (["race=true", "race.looks=5,3"], "race.looks is '5,3': expected growing numbers of seeds from 2 to 1000"),
        (["race=true", "race.looks=1,3"], "expected growing numbers of seeds"),
        (["race=true", "encoding=alibi,none"], "expected encoding=rope,alibi"),
        (["race=true", "encoding=rope"], "expected encoding=rope,alibi"),
        (["race=true", "training.batch_size=4,8"], "these differ in training.batch_size"),
        (["race=true", "experiment=tasks", "data=task/copy"], "race=true is for text"),
    ],
)
def test_a_race_that_cannot_be_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep.sweep(support.each_once(["encoding=rope,alibi", *arguments]), dry_run=True)
    assert message in str(caught.value)


def test_cores_are_kept_busy_and_looks_come_in_turn(overrides: list[str]) -> None:
    """While the last runs of a look are made, the next seed of the reference is begun."""
    racing = Racing(plans.resolve([["encoding=rope,alibi", "seed=3,7", *overrides]]), (2, 4))
    assert [plan.config.seed for plan in racing.first] == [3, 3, 4, 4] and len(racing.all) == 8
    status = {plan.id: states.RUNNING for plan in racing.first}
    ahead = racing.more(status)
    assert [(one.config.encoding.name, one.config.seed) for one in ahead] == [("rope", 5)]
    status |= {one.id: states.RUNNING for one in ahead}
    assert [one.config.seed for one in racing.more(status)] == [6]
    assert all("seed=" + str(one.config.seed) in one.overrides for one in racing.all)


def test_a_race_makes_the_runs_that_its_looks_ask_for(
    template: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    truths = {"rope": Truth(3.66, 0.16), "none": Truth(4.5, 0.9), "t5": Truth(3.6, 0.1)}
    todo = plans.resolve([[f"encoding={','.join(truths)}", "experiment=demo", "study=fake"]])

    def run_to_the_end() -> dict[str, int]:
        """The number of runs by scheme, each made when it is asked for, the first time a seed that was begun ahead."""
        racing = Racing(todo, (3, 5))
        racing.record()
        status, due = {}, racing.first
        while due:
            for plan in due:
                if not plan.folder.exists():
                    write_run(plan.folder.parent, plan.config, truths[plan.config.encoding.name])
                status[plan.id] = Status("done")
            due = racing.more(status)
        return dict(Counter(name.partition("-")[0] for name in status))

    made = run_to_the_end()
    assert made["none"] == 3 < made["rope"] == max(made.values())
    found = read(Path("outputs/fake"))[1]
    assert {label: one.stop.seeds for label, one in found.items() if one.stop} == {
        label: made[label] for label in made if label != "rope"
    }
    assert run_to_the_end() == made


@pytest.mark.full
def test_a_sweep_races_to_the_end_and_again_has_nothing_to_do(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["encoding=rope,alibi", "seed=0,1,2,3,4", "race=true", "race.looks=2,3", *overrides]
    sweep.sweep(arguments, n_jobs=2)
    study = tmp_path / "outputs/demo"
    rows = {row["id"] for row in json.loads((study / "sweep.json").read_text())["cells"]}
    runs = {run.name: (run / "run.json").stat().st_mtime_ns for run in finding.run_folders([study])}
    assert rows == set(runs) and {len(rows)} <= {4, 5, 6}
    assert "A race with looks at 2, 3 seeds" in " ".join(capsys.readouterr().out.split())
    sweep.sweep(arguments, n_jobs=2)
    assert {run.name: (run / "run.json").stat().st_mtime_ns for run in finding.run_folders([study])} == runs
    with pytest.raises(UserError, match="another race, of other looks"):
        sweep.sweep([*arguments[:3], "race.looks=2,4", *overrides])
    sweep.sweep(arguments, dry_run=True)
    assert "A race: these are the most that it may take. Its first look takes 4 runs." in capsys.readouterr().out


def test_a_race_whose_every_run_fails_ends(overrides: list[str]) -> None:
    racing = Racing(plans.resolve([["encoding=rope,alibi", *overrides]]), (2, 3))
    status = {plan.id: Status("failed", "diverged") for plan in racing.first}
    assert racing.more(status) == [] and racing.more(status) == []
