"""The words of a report: what they rest on, and which schemes count together."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_study import SCHEMES, Truth, configured, group_of, write_run, write_study
from scipy import stats

from posbench.config.schema import Config
from posbench.evaluation.intervals import Interval, over_seeds
from posbench.evaluation.levels import Contrast
from posbench.report import figures, tables
from posbench.report.answer import answer
from posbench.report.comparison import claims, judgement, load, summary
from posbench.report.comparison.claims import Bounds
from posbench.report.comparison.judgement import SeedRange

PAIR = {name: SCHEMES[name] for name in ("rope", "alibi")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])


def endpoints(folder: Path, **options: Any) -> dict[str, summary.Endpoints]:
    found = summary.summarise(group_of(folder), **options)
    return {one.scheme.label: one.endpoints for one in found if one.endpoints}


# -- words -------------------------------------------------------------------------------------------------------------


def test_no_word_without_a_whole_interval_where_it_is_true() -> None:
    assert claims.at_one(Bounds(0.001, 0.035)) == "open"  # the estimate is below .02, the interval is not
    assert claims.at_one(Bounds(0.01, 0.06)) == "worse" and claims.at_one(Bounds(-0.06, -0.01)) == "better"
    assert claims.at_one(Bounds(0.01, 0.06), least=0.04) == "open"
    assert claims.beyond(Bounds(-0.4, -0.2)) == "less" and claims.beyond(Bounds(-0.019, -0.001)) == "open"
    assert claims.beyond(Bounds(0.01, 0.5)) == "worse" and claims.beyond(Bounds(-0.5, 0.01)) == "open"


def test_absence_of_evidence_is_no_breaking() -> None:
    up, down, open_ = Bounds(0.06, 0.2), Bounds(-0.1, 0.05), Bounds(0.0, 0.2)
    reach = claims.reach({128: down, 256: open_, 512: up, 1024: up}, 64, 0.05)
    assert reach == claims.Reach(128, longest_measured=False, breaks=512, resolved=False)
    assert claims.reach({128: down, 256: up}, 64, 0.05) == claims.Reach(128, False, 256, resolved=True)
    assert claims.reach({128: open_, 256: down}, 64, 0.05) == claims.Reach(64, False, None, resolved=False)
    assert claims.reach({128: down, 256: None}, 64, 0.05) == claims.Reach(128, False, None, resolved=True)
    assert claims.reach({128: down, 256: down}, 64, 0.05) == claims.Reach(256, longest_measured=True)


def test_what_is_not_resolved_is_not_said_to_break(template: Config, tmp_path: Path) -> None:
    """A scheme that truly holds but whose seeds vary: the opening said that it does not hold beyond 64 tokens."""
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]})
    for seed in range(5):
        write_run(folder, configured(template, "fire", seed), Truth(3.67, 0.01), seed_sd=0.05)
    group = group_of(folder)
    said = " ".join(answer(group, summary.summarise(group)))
    assert "fire is not resolved beyond 64" in said and "rope breaks at 128 tokens" in said
    assert "does not hold" not in said and "fire breaks" not in said


# -- one level for all -------------------------------------------------------------------------------------------------


def one_figure(values: np.ndarray) -> dict[str, Interval]:
    return {str(label): over_seeds(each.tolist()) for label, each in enumerate(values)}


def test_variances_that_are_alike_are_taken_together_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    own = one_figure(rng.normal(0, 0.02, (40, 5)))
    alike = claims.moderated(own)
    assert all(one.df > 6 for one in alike.values())
    each, together = ([one.error for one in found.values()] for found in (own, alike))
    assert max(together) / min(together) < 0.5 * max(each) / min(each)
    spread = np.geomspace(0.001, 1, 40)[:, None]
    apart = one_figure(spread * rng.normal(0, 1, (40, 5)))
    for label, one in claims.moderated(apart).items():
        assert one.df < 5 and 0.5 < one.error / apart[label].error < 2.5  # where all are within a factor of 1,000


def test_noise_of_a_shared_reference_does_not_count_once_for_each_scheme() -> None:
    """All differences have the reference's luck in common: their variances agree, and are one variance of four df."""
    rng = np.random.default_rng(1)
    values = rng.normal(0, 0.03, (1, 5)) + rng.normal(0, 1e-4, (40, 5))
    assert all(one.df < 4.5 for one in claims.moderated(one_figure(values)).values())


def test_few_schemes_go_by_their_own_variance() -> None:
    found = one_figure(np.random.default_rng(2).normal(0, 0.02, (3, 5)))
    assert claims.moderated(found) == found


def by_seed(values: np.ndarray) -> dict[int, Contrast]:
    return {seed: Contrast(float(value), None) for seed, value in enumerate(values)}


def test_a_scheme_with_seeds_in_two_groups_goes_by_its_own_variance_and_the_others_do_without_it() -> None:
    rng = np.random.default_rng(3)
    values = {name: by_seed(rng.normal(0, 0.02, 5)) for name in "abcdef"}
    parted = np.array([0.02, 0.03, 0.9, 0.95, 0.97])

    def found(seeds: np.ndarray) -> dict[str, Interval]:
        return judgement.moderated({**values, "g": by_seed(seeds)})

    one, other = found(parted), found(10 * parted)
    own = stats.t.interval(0.95, 4, parted.mean(), stats.sem(parted))
    assert (one["g"].low, one["g"].high) == pytest.approx(own)
    assert all(one[name] == other[name] and one[name].df > 4 for name in values)


def test_the_error_is_shared_by_two_differences_of_each_scheme_and_its_rises_at_longer_and_shorter_lengths() -> None:
    pairs = {name: (by_seed(np.arange(5.0)), by_seed(np.arange(5.0))) for name in "ab"}
    for lengths, intervals in (([], 4), ([128], 7), ([128, 256], 7), ([32], 7), ([32, 48, 128], 10)):
        rises = {name: {length: by_seed(np.arange(5.0)) for length in lengths} for name in ("rope", "a", "b")}
        half = over_seeds([0.0, 1.0, 2.0, 3.0, 4.0]).half_at(1 - (1 - claims.ALPHA) ** (1 / intervals))
        assert judgement.judge(pairs, rises, 64).at_one["a"].high == pytest.approx(2 + half), lengths


@pytest.mark.full
@pytest.mark.parametrize("schemes", [5, 63])
def test_moderated_bounds_hold_jointly(schemes: int) -> None:
    """With variances that differ by scheme, and a reference in all."""
    rng = np.random.default_rng(schemes)
    reports, wrong = 300, 0
    for _ in range(reports):
        sd = 0.02 * 2 ** rng.uniform(-1, 1, (schemes + 1, 1))
        seeds = sd * rng.normal(0, 1, (schemes + 1, 5))
        found = claims.moderated(one_figure(seeds[1:] - seeds[0]))
        level = claims.level(schemes)
        wrong += any(abs(one.mean) > one.half_at(level) for one in found.values())
    assert wrong <= stats.binom.ppf(0.999, reports, 0.05)


# -- families ----------------------------------------------------------------------------------------------------------


def swept(folder: Path, command: str, names: list[str], lost: tuple[str, ...] = ()) -> None:
    """Write `sweep.json` as a sweep of these encodings does; of `lost` ones no run was ever started."""
    path = folder / "sweep.json"
    cells = json.loads(path.read_text())["cells"] if path.exists() else []
    for run in sorted(folder.glob("*-*/run.json")):
        record = json.loads(run.read_text())
        if record["encoding"] in names:
            overrides = [f"encoding={record['encoding']}", f"seed={record['seed']}", "study=fake"]
            cells.append({"id": run.parent.name, "overrides": overrides, "status": "done", "command": command})
    for name in lost:
        overrides = [f"encoding={name}", "seed=0", "study=fake"]
        cells.append({"id": f"{name}-gone", "overrides": overrides, "status": "waiting", "command": command})
    path.write_text(json.dumps({"schema": 1, "command": command, "cells": cells}))


@pytest.mark.full
def test_a_verdict_does_not_depend_on_what_else_lies_in_the_folder(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, PAIR)
    swept(folder, "posbench sweep encoding=rope,alibi", ["rope", "alibi"])
    alone = endpoints(folder)["alibi"]
    others = {name: Truth(3.7 + number / 50, 0.1) for number, name in enumerate(("t5", "none", "fire", "kerple_log"))}
    write_study(folder, template, others)
    assert endpoints(folder)["alibi"] == alone
    assert sorted(number for _, number in load.families(group_of(folder))) == [2, 5]  # no sweep named these four
    swept(folder, "posbench sweep encoding=glob(*)", ["t5", "none", "fire"], lost=("cope", "fox"))
    numbers = sorted(number for _, number in load.families(group_of(folder)))
    assert numbers == [2, 2, 6]  # all that it named, with rope and what is lost; and kerple_log alone
    assert endpoints(folder)["alibi"] == alone


def test_a_scheme_that_several_sweeps_named_belongs_to_the_one_that_named_most(
    template: Config, tmp_path: Path
) -> None:
    names = ["rope", "alibi", "t5", "none"]
    folder = write_study(tmp_path / "fake", template, {name: SCHEMES[name] for name in names}, seeds=1)
    swept(folder, "a: the first by name", ["rope", "alibi"])
    swept(folder, "b: the largest", ["alibi", "t5"], lost=("cope", "fox"))
    found = load.families(group_of(folder))
    assert found == [({"alibi", "t5"}, 5), ({"rope"}, 2), ({"none"}, 2)]  # with the reference, which all have


def test_a_damaged_sweep_record_leaves_one_family(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, PAIR)
    wanted = endpoints(folder)
    for text in ("{", '{"cells": [{"id": [1], "command": 3}, {"id": "..", "command": "x", "overrides": 7}]}'):
        (folder / "sweep.json").write_text(text)
        assert endpoints(folder) == wanted


# -- seeds -------------------------------------------------------------------------------------------------------------


def test_one_seed_against_the_rest_shows_seeds_and_no_interval(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]})
    for seed in range(5):
        write_run(folder, configured(template, "sinusoidal", seed), Truth(3.9, 0.42 if seed < 4 else 0.7))
    group = group_of(folder)
    found = summary.summarise(group)
    (one,) = (one for one in found if one.scheme.label == "sinusoidal")
    assert one.bimodal
    assert "Seeds in two groups, so that a mean says little (see the points): sinusoidal." in answer(group, found)
    cell = tables.rise(one.plain.points[2]).text
    assert "±" not in cell and "[0.797, 1.417]" in cell
    assert one.endpoints is not None and one.endpoints.rise is not None
    assert isinstance(one.endpoints.rise, SeedRange)
    assert one.endpoints.rise.low < one.endpoints.rise.mean < one.endpoints.rise.high


def test_fewer_seeds_than_a_verdict_takes_show_their_range(template: Config, tmp_path: Path) -> None:
    group = group_of(write_study(tmp_path / "fake", template, PAIR, seeds=3))
    found = summary.summarise(group)
    (verdict,) = (one.endpoints.verdict.text for one in found if one.endpoints)
    assert verdict == "3 seeds: no verdict"
    for table in tables.main_tables(group, found)[1:]:
        texts = [value.text for row in table.rows for value in row]
        assert not any("±" in text for text in texts) and any("[" in text and tables.FEW in text for text in texts)
        assert "range of seeds" in table.note and "±" not in table.note


def test_the_references_own_spread_is_said(template: Config, tmp_path: Path) -> None:
    group = group_of(write_study(tmp_path / "fake", template, PAIR))
    found = summary.summarise(group)
    against = tables.main_tables(group, found)[-1]
    (rope,) = (one for one in found if one.scheme.label == "rope")
    sd = np.std([value for value in rope.plain.points[2].rises.values()], ddof=1)
    assert f"SD of a seed {tables.sd_of_seeds(rope.nll_on_text):.3f} and {sd:.3f}" in against.note


def test_without_blocks_nothing_is_known_of_how_far_a_checkpoint_holds(template: Config, tmp_path: Path) -> None:
    folder = write_study(tmp_path / "fake", template, {"rope": SCHEMES["rope"]}, seeds=1)
    next(folder.glob("rope-*/evaluation_blocks.jsonl")).unlink()
    (rope,) = summary.summarise(group_of(folder))
    assert rope.reach == claims.Reach(64, longest_measured=False, breaks=None, resolved=False)
    assert tables.reach(rope).text == "64?‡"
