"""Does a ranking of small runs hold for larger ones? `posbench report --transfer`, and the statistics behind it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_study import Truth, configured, groups_of, read_csv, read_rows, write_rows, write_run, write_study
from scipy import stats
from support import posbench

from posbench.config.identity import run_id
from posbench.config.schema import Config
from posbench.evaluation.intervals import Blocks
from posbench.evaluation.levels import Contrast
from posbench.launch import plans
from posbench.report import figures
from posbench.report.comparison import transfer

UNITS, TOKENS = 30, 8


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "DPI", 20)
        patch.setattr(figures, "UNDATED", {kind: figures.UNDATED[kind] for kind in ("png", "pdf")})
        yield


def cells(means: Sequence[float], rng: np.random.Generator, seeds: int = 3, sd: float = 0.001) -> transfer.Cells:
    """Runs of schemes s00, s01 ... with these true means, on one text."""
    text, luck, counts = rng.normal(0, 1, UNITS), rng.normal(0, sd, seeds), np.full(UNITS, float(TOKENS))
    found: dict[str, dict[int, Contrast]] = {}
    for number, mean in enumerate(means):
        of_text = rng.normal(0, 3 * sd, UNITS)
        for seed in range(seeds):
            each = mean + luck[seed] + rng.normal(0, sd) + text + of_text + rng.normal(0, sd, UNITS)
            blocks = Blocks(each * counts, counts, np.arange(UNITS))
            found.setdefault(f"s{number:02}", {})[seed] = Contrast(float(each.mean()), blocks)
    return found


def against(small: transfer.Cells, target: transfer.Cells, **options: Any) -> transfer.Against:
    found = transfer.against(small, target, dict.fromkeys(small, "rope"), times=200, **options)
    assert found is not None
    return found


# -- statistics --------------------------------------------------------------------------------------------------------


def test_accuracy_and_regret_of_a_table_made_by_hand() -> None:
    rng = np.random.default_rng(0)
    # At the target s00 < s01 = s02 < s03. The small rung has s00 and s01, and s02 and s03 the other way round.
    one = against(cells([0.2, 0.1, 0.5, 0.3], rng), cells([1.0, 1.2, 1.205, 1.6], rng))
    assert one.resolved == 5  # s01 and s02 differ by less than .02
    assert one.accuracy is not None and one.accuracy.value == pytest.approx(3 / 5)
    assert (one.picked, one.best) == ("s01", "s00")
    assert one.regret.value == pytest.approx(0.2, abs=0.01) == one.costs.mean
    assert 0 < one.costs.half < 0.05 and one.regret.high >= one.regret.value
    turned = {(each.better, each.worse) for each in one.reversals}
    assert turned == {("s01", "s00"), ("s03", "s02")} and max(each.p for each in one.reversals) < 0.05
    assert one.by_family == pytest.approx(0.5)  # all are of one family: it knows nothing
    assert one.by_nll is None


def test_regret_is_against_the_best_at_the_target_also_where_the_small_rung_does_not_rank_it() -> None:
    rng = np.random.default_rng(0)
    small, target = cells([0.1, 0.2, 0.3, 0.4], rng), cells([1.0, 1.2, 1.1, 1.6], rng)
    one = against({label: small[label] for label in ("s01", "s02", "s03")}, target)
    assert (one.picked, one.best, one.schemes) == ("s01", "s00", ["s01", "s02", "s03"])
    assert one.regret.value == pytest.approx(0.2, abs=0.01) == one.costs.mean
    assert one.regret.low >= 0 and one.regret.high > 0.5  # s03 is picked where it is drawn alone


def test_nll_at_the_training_length_is_a_baseline_of_its_own() -> None:
    rng = np.random.default_rng(0)
    one = against(cells([1, 2, 3], rng), cells([1, 2, 3], rng), nll=cells([3, 2, 1], rng))
    assert one.by_nll == 0 and one.accuracy is not None and one.accuracy.value == 1
    assert one.accuracy.low == pytest.approx(0.025)  # all agree: an exact bound, of one pair that shares no scheme


def test_a_family_is_in_the_order_of_its_mean_at_the_small_rung() -> None:
    rng = np.random.default_rng(0)
    small, target = cells([1, 4, 2, 9], rng), cells([1, 2, 3, 4], rng)
    names = dict(zip(sorted(small), ("rope", "xpos", "alibi", "t5"), strict=True))
    one = transfer.against(small, target, names, times=10)
    assert one is not None and one.by_family == pytest.approx((4 + 0.5 + 0.5) / 6)  # 2.5 before 5.5, ties within


def test_tau_is_tau_b() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(0, 1, 9), rng.normal(0, 1, 9)
    small, target = cells(x, rng), cells(y, rng)
    means = [
        [np.mean([one.value for one in each[label].values()]) for label in sorted(each)] for each in (small, target)
    ]
    assert against(small, target).tau.value == pytest.approx(stats.kendalltau(*means).statistic)


def test_a_pair_has_the_interval_over_seeds_and_documents_and_its_p() -> None:
    rng = np.random.default_rng(2)
    both = cells([0.0, 0.05], rng, seeds=4, sd=0.02)
    # One document each of equal size and 4 seeds without documents: the classical paired t-test.
    alone = {label: {seed: Contrast(one.value, None) for seed, one in each.items()} for label, each in both.items()}
    found = transfer.pairs(alone)["s00", "s01"]
    values = [[one.value for one in alone[label].values()] for label in ("s00", "s01")]
    expected = stats.ttest_rel(*values)
    assert found.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval()
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((low, high))
    wider = transfer.pairs(both)["s00", "s01"]
    assert wider.mean == pytest.approx(found.mean) and wider.half > 0
    only = transfer.pairs({"a": {0: Contrast(1.0, None)}, "b": {0: Contrast(2.0, None)}})["a", "b"]
    assert only.mean == -1 and not only.resolved(0.02)


def test_draws_of_one_factor_have_the_variance_of_a_mean() -> None:
    """Seeds alone vary in one set of runs, documents alone in the other; n - 1 draws give s^2 / n."""
    rng = np.random.default_rng(3)
    seeds, text = rng.normal(0, 1, 4), rng.normal(0, 1, UNITS)
    counts = np.full(UNITS, float(TOKENS))
    of_seeds = {
        n: Contrast(x, Blocks(np.full(UNITS, x) * counts, counts, np.arange(UNITS))) for n, x in enumerate(seeds)
    }
    of_text = {0: Contrast(text.mean(), Blocks(text * counts, counts, np.arange(UNITS)))}
    for values, each in ((of_seeds, seeds), (of_text, text)):
        drawn = transfer._draws({"a": values}, ["a"], 20_000, np.random.default_rng(0))
        assert drawn.mean() == pytest.approx(np.mean(each), abs=0.02)
        assert drawn.var() == pytest.approx(np.var(each, ddof=1) / len(each), rel=0.05)


@pytest.mark.full
def test_intervals_of_accuracy_and_tau_hold_the_truth_of_a_population_of_schemes() -> None:
    """90 of 100 at least, with 12 schemes whose true values at two sizes have a correlation of .7."""

    def world(rng: np.random.Generator, number: int) -> np.ndarray:
        return rng.multivariate_normal([0, 0], 0.15**2 * np.array([[1, 0.7], [0.7, 1]]), number)

    many = world(np.random.default_rng(0), 200_000)
    x, y = (many[:100_000] - many[100_000:]).T
    accuracy, tau = float((x * y > 0)[abs(y) > 0.02].mean()), float(np.sign(x * y).mean())
    held = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        x, y = world(rng, 12).T
        one = against(cells(x, rng, sd=0.01), cells(y, rng, sd=0.01))
        assert one.accuracy is not None
        held.append((one.accuracy.low <= accuracy <= one.accuracy.high, one.tau.low <= tau <= one.tau.high))
    assert np.mean(held, axis=0) == pytest.approx([0.95, 0.95], abs=0.051)


def test_the_ceiling_asks_each_seed_about_the_others() -> None:
    rng = np.random.default_rng(4)
    calm = transfer.ceiling(cells([1, 2, 3, 4], rng))
    assert calm == transfer.Ceiling(1, 2, 1.0, 0.0, 1.0)
    # By hand: seed 0 has the schemes in the order a c b, the seeds 1 and 2 each a b c.
    table = {"a": (1, 1, 1), "b": (2.9, 2, 2), "c": (2.2, 3, 3)}
    told = {label: {n: Contrast(x, None) for n, x in enumerate(each)} for label, each in table.items()}
    found = transfer.ceiling(told)
    assert found is not None and found.tau == pytest.approx((1 / 3 + 1 + 1) / 3) and found.regret == 0
    assert transfer.ceiling({label: {0: each[0]} for label, each in told.items()}) is None


def test_ranks_have_intervals_and_need_three_schemes() -> None:
    rng = np.random.default_rng(5)
    found = transfer.ranks(cells([3, 1.0, 1.001], rng, sd=0.05), times=300)
    assert (found["s00"].low, found["s00"].high) == (3, 3)
    assert (found["s01"].low, found["s01"].high) == (1, 2)
    assert transfer.ranks(cells([3, 1.0], rng, sd=0.05), times=300) == {}


# -- the command -------------------------------------------------------------------------------------------------------

NAMES = ("rope", "alibi", "t5", "fox", "none")


def sized(template: Config, tokens: int, length: int = 64, width: int = 128) -> Config:
    training = dataclasses.replace(template.training, tokens=tokens, train_length=length)
    return dataclasses.replace(template, training=training, model=dataclasses.replace(template.model, d_model=width))


def write_rung(folder: Path, config: Config, order: Sequence[str], seeds: int = 3, **truth: Any) -> None:
    schemes = {name: Truth(3 + 0.1 * n, 0.1, ngram=5.0, paired=True, **truth) for n, name in enumerate(order)}
    write_study(folder, config, schemes, seeds)


def test_the_target_is_the_rung_that_took_most_compute_and_runs_on_other_targets_rank_nothing(
    template: Config, tmp_path: Path
) -> None:
    """Fewer tokens, and fewer runs, at a context so long that attention takes the most."""
    write_rung(tmp_path, sized(template, 4_000_000), NAMES)
    write_rung(tmp_path, sized(template, 2_000_000, 4096), NAMES[:3])
    odd = next(tmp_path.glob(f"{run_id(configured(sized(template, 2_000_000, 4096), 'alibi', 1))}/evaluation.jsonl"))
    write_rows(odd, [row | {"targets_sha256": "0f" * 32} for row in read_rows(odd)])
    small, target = transfer.rungs(groups_of(tmp_path))
    assert (small.name, target.name) == ("4x128, L 64, 4M", "4x128, L 4096, 2M")
    a_token = 6 * 1_049_728 + 12 * 4 * 128 * 4096  # parameters; layers, width, context
    assert target.compute == pytest.approx(2e6 * a_token) and target.seeds == (3, 3)
    for cells in target.cells.values():
        assert {label: set(seeds) for label, seeds in cells.items()} in (
            {"rope": {0, 1, 2}, "alibi": {0, 2}, "t5": {0, 1, 2}}, {}
        )  # fmt: skip
    assert target.cells["nll"]


@pytest.fixture
def ladder(template: Config, tmp_path: Path) -> Path:
    """Two rungs; the smaller one has the best two schemes the other way round."""
    folder = tmp_path / "ladder"
    write_rung(folder, sized(template, 1_000_000), ("alibi", "rope", *NAMES[2:]))
    write_rung(folder, sized(template, 4_000_000, 128), NAMES)
    return folder


@pytest.mark.full
def test_a_ladder_is_reported_and_predictions_are_scored(
    ladder: Path, template: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posbench("report", "--transfer", str(ladder)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The target is the rung with the most training compute: 4x128, L 128, 4M." in shown
    picked = "By nll at the training length, 4x128, L 64, 1M would have picked alibi; at 4x128, L 128, 4M it costs 0."
    assert picked in shown and "nats against rope" in shown
    report = ladder / "report"
    (one,) = (row for row in read_csv(report / "transfer.csv") if row["endpoint"] == "nll")
    assert (one["pairs"], one["picked"], one["best"], one["reversed"]) == ("10", "alibi", "rope", "1")
    assert float(one["accuracy"]) == pytest.approx(0.9) and float(one["regret"]) == pytest.approx(0.1, abs=0.03)
    assert {path.name for path in report.iterdir()} >= {"transfer.md", "transfer.png", "transfer.pdf"}
    assert "alibi" in (report / "transfer.md").read_text()
    before = (report / "predictions.csv").read_bytes()
    monkeypatch.setattr(figures, "write", lambda *_: [])
    assert posbench("report", "--transfer", str(ladder)) == 0  # the same runs once more: it stays
    assert "stays as it is" in capsys.readouterr().out
    write_rung(ladder, sized(template, 8_000_000, 256, 256), NAMES[::-1])
    assert posbench("report", "--transfer", str(ladder)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4x128, L 128, 4M resolved by nll at the training length, 0 hold; reversed: 10; not resolved: 0." in shown
    assert (report / "predictions.csv").read_bytes() == before
    (report / "predictions.csv").write_text("what,is,this\n1,2,3\n")
    assert posbench("report", "--transfer", str(ladder)) != 0
    assert "is no table of predictions" in capsys.readouterr().err


@pytest.mark.full
def test_what_has_not_learned_is_left_out_and_a_rung_of_it_ranks_nothing(
    ladder: Path, template: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "write", lambda *_: [])
    smaller = sized(template, 500_000)
    for number, name in enumerate(NAMES):
        bad = Truth(3 + 0.1 * number, 0.1, ngram=1.0 if name not in ("t5", "fox") else 5.0, paired=True)
        for seed in range(3):
            write_run(ladder, configured(smaller, name, seed), bad)
    for seed in range(3):
        bad = Truth(2.5, 0.1, ngram=1.0, paired=True)  # it would be the best of the middle rung
        write_run(ladder, configured(sized(template, 1_000_000), "fire", seed), bad)
        write_run(ladder, configured(sized(template, 4_000_000, 128), "fire", seed), Truth(9, 0.1, ngram=10))
    assert posbench("report", "--transfer", str(ladder)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 of 5 (ranks nothing)" in shown and "have learned here and at the target: 2" in shown
    found = {row["rung"]: row for row in read_csv(ladder / "report" / "transfer.csv") if row["endpoint"] == "nll"}
    assert found["4x128, L 64, 0.5M"]["accuracy"] == "" and found["4x128, L 64, 1M"]["picked"] == "alibi"
    said = (ladder / "report" / "transfer.md").read_text()
    assert "alibi, none, rope" in said and "4x128, L 64, 1M would have picked alibi" in said


def test_mistakes_say_what_to_run(template: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one"
    write_rung(one, sized(template, 1_000_000), NAMES, seeds=1)
    assert posbench("report", "--transfer", str(one)) != 0
    told = capsys.readouterr().err
    assert "here is one set of text: posbench sweep sweep=ladder" in told and told.count("\n") == 1
    write_rung(one, sized(template, 4_000_000), NAMES[:2], seeds=1)
    assert posbench("report", "--transfer", str(one)) != 0
    assert "no set has 3 schemes in common with the largest, 4x128, L 64, 4M" in capsys.readouterr().err
    assert not (one / "report").exists()
    assert posbench("report", "--transfer", "--reference", "rope", str(one)) != 0
    assert "leave out --columns and --reference" in capsys.readouterr().err


@pytest.mark.full
def test_the_shipped_ladder_differs_in_one_factor_at_a_time() -> None:
    """Twelve schemes at each rung, five seeds below the target and three there."""
    sets = plans.read_sets("ladder", [])
    (schemes,) = {next(part for part in one if part.startswith("encoding=")) for one in sets}
    assert len(set(schemes.partition("=")[2].split(","))) == 12
    seeds = {"seed=range(0,5)": 5, "seed=0,1,2": 3}
    own = [[*(part for part in one if part[:5] not in ("seed=", "encod")), "encoding=t5"] for one in sets]
    runs = [one.config for one in plans.resolve(own)]
    sizes = [(run.model.d_model, run.training.train_length, run.training.tokens) for run in runs]
    demo, target = (128, 64, 1_000_000), (256, 256, 8_000_000)
    assert sum(sum(a != b for a, b in zip(size, demo, strict=True)) == 1 for size in sizes) == 3
    assert len(set(sizes)) == 6 and (128, 128, 4_000_000) in sizes and max(sizes) == target
    for one, size, run in zip(sets, sizes, runs, strict=True):
        assert sum(seeds.get(part, 0) for part in one) == (3 if size == target else 5)
        assert run.encoding.options["max_distance"] == run.training.train_length
