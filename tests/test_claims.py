"""Claims of the literature, read from files, tested on runs, judged together."""

import re
import shlex
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from fake_study import Truth, configured, write_run
from scipy import stats
from support import posbench, script, write_text

from posbench.claims import claim, reproduce
from posbench.claims.claim import LossTerm
from posbench.claims.judge import judge
from posbench.errors import UserError
from posbench.launch import plans, slots
from posbench.launch.pool import Status
from posbench.listing import listing_rows
from posbench.results.frame import read

ROOT = Path(__file__).parents[1]
CLAIM = {
    "sentence": "ALiBi holds.",
    "source": {"paper": "A paper", "where": "abstract", "says": "it holds"},
    "runs": [{"alibi": "encoding=alibi"}],
    "test": "alibi 4x - alibi 1x < 0.05",
    "prediction": {"outcome": "supported", "made": "2026-11-23", "why": "a guess"},
}


def write(folder: Path, name: str = "mine", **changed: Any) -> None:
    """Add a stranger's claim to a file in a folder for --config-dir."""
    path = folder / "claim" / "several.yaml"
    path.parent.mkdir(exist_ok=True)
    text = yaml.safe_dump({name: CLAIM | changed})
    with path.open("a") as file:
        file.write("# A claim.\n")
        file.write(text)


@pytest.mark.slow
def test_every_claim_composes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tinyshakespeare").mkdir()  # the text of one of them
    write_text("tinyshakespeare")
    entries = claim.read(["all"])
    assert len(entries) >= 34

    runs = set()
    for entry in entries:
        runs.update(entry.runs.values())
    words = [[*shlex.split(text), "seed=5"] for text in runs]
    made = plans.resolve(words)
    assert len(made) == len(runs)


def test_every_claim_is_listed():
    ids = {entry.id for entry in claim.read(["all"])}
    rows = listing_rows(["claims"])["claims"]  # by the comment above each
    listed = {row["name"] for row in rows}
    assert listed == ids


def test_the_claim_of_the_page_can_be_tested(tmp_path):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.S)
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(text, encoding="utf-8")

    (entry,) = claim.read(["steep_slopes_hold"], tmp_path)

    words = [shlex.split(text) for text in entry.runs.values()]
    made = plans.resolve(words)
    assert len(made) == len(entry.runs)


def test_a_test_is_a_sum_of_losses_and_its_margin(tmp_path):
    runs = [{"a": "encoding=rope", "b": "encoding=alibi"}]
    first = "0.5*a/nonoverlap .25x + b:yarn:factor=4 16x - a 1x > -0.02"
    write(tmp_path, runs=runs, test=[first, "b 8x < .1"])

    (entry,) = claim.read(["mine"], tmp_path)

    first, second = entry.tests
    assert first.terms == (
        LossTerm(0.5, "a", 0.25, "nonoverlap", "plain"),
        LossTerm(1.0, "b", 16.0, "fixed_target", "yarn:factor=4"),
        LossTerm(-1.0, "a", 1.0, "fixed_target", "plain"),
    )
    assert first.direction == 1
    assert first.margin == -0.02
    assert second.terms == (LossTerm(1.0, "b", 8.0, "fixed_target", "plain"),)
    assert second.direction == -1
    assert second.margin == 0.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test": "alibi 4x alibi 1x < 1"}, "test: cannot read 'alibi 1x': expected"),
        ({"test": "alibi 1x = 1"}, "test: cannot read 'alibi 1x = 1': expected"),
        ({"test": "alibi/nonverlap 1x < 1"}, "test: cannot read 'alibi/nonverlap 1x'"),
        ({"runs": [{"a": ""}, {"a": "seed=1"}]}, "run 'a' stands in runs twice$"),
        ({"test": "alibi 1x = 1 ± 0"}, "test: .* accepts no difference"),
        ({"test": "rope 4x < 0"}, r"run 'rope' is not among runs \(alibi\)$"),
        ({"test": "alibi 4x - alibi 1x = 1 ± 1"}, "test is .*: expected one run and"),
        ({"test": "2*alibi 4x = 1 ± 1"}, "test is .*: expected one run and"),
        ({"test": ["alibi 4x = 1 ± 1"] * 2}, "test is .*: expected one run and"),
        ({"seeds": 2}, "seeds is 2: leave it out: only published"),
        ({"seeds": 11, "test": "alibi 1x = 1 ± 1"}, "seeds is 11: expected 1 to 10$"),
        ({"test": [], "runs": []}, "expected test or more_seeds$"),
        ({"runs": [{"alibi": "study='a"}]}, "run .alibi.: cannot read .*: No clos"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_one_line(tmp_path, changed, message):
    write(tmp_path, **changed)
    with pytest.raises(UserError, match=rf"^\S*several.yaml: mine: {message}"):
        claim.read(["mine"], tmp_path)


def test_a_claim_asks_for_lengths_at_which_its_runs_are_evaluated(tmp_path):
    write(tmp_path, runs=[{"alibi": "ratio=1,2"}], test="alibi 4x < 1")
    with pytest.raises(UserError, match=r"asks for alibi at 4x: .* 1x, 2x$"):
        reproduce.plans_of_claims(claim.read(["mine"], tmp_path), [], tmp_path)


def test_a_claim_whose_name_is_a_number_is_one_line(tmp_path):
    write(tmp_path, name=1)
    with pytest.raises(UserError, match=r"several\.yaml: the name 1 is no text"):
        claim.read(["mine"], tmp_path)


TRUTHS = {
    "alibi": Truth(3.66, 0.001, ngram=4.0),
    "rope": Truth(3.66, 0.2, ngram=4.0),
    "none": Truth(4.2, 0.0, ngram=4.0),
    "fox": Truth(3.66, 0.001, ngram=4.0, used=8),  # reads little
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the rows of five seeds of each scheme, in two protocols."""
    study = tmp_path_factory.mktemp("study")
    runs = {}
    for name, truth in TRUTHS.items():
        folders = []
        for seed in range(5, 10):
            config = configured(name, seed)
            folders.append(write_run(study, config, truth))
        rows = read(folders)
        of_other_protocol = rows.assign(protocol="nonoverlap")
        runs[name] = pd.concat([rows, of_other_protocol])
    return runs


def entry(*tests: str) -> claim.Entry:
    """Return a claim with these tests, read from a file."""
    names = set(re.findall(r"(?<![\w/:])[a-z]+(?=[ /])", " ".join(tests)))
    runs = [{name: ""} for name in sorted(names)]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), runs=runs, test=list(tests))
        (entry,) = claim.read(["mine"], Path(folder))
    return entry


def judge_one(entry: claim.Entry, runs: dict[str, pd.DataFrame]) -> dict[str, Any]:
    rows = {name: runs[name] for name in entry.runs}
    findings = judge([(entry, rows)], n_registered=1)
    (finding,) = findings.to_dict("records")
    return finding


HOLDS = "alibi 4x - alibi 1x < 0.05"
FAILS = "rope 4x - rope 1x < 0.05"
OUTCOMES = [
    (HOLDS, "supported", ""),
    ("alibi/nonoverlap 4x - alibi/nonoverlap 1x < 0.05", "supported", ""),
    ("alibi/nonoverlap 4x - alibi 1x < 0.05", "supported", ""),
    (FAILS, "contradicted", ""),
    ("none 4x - none 1x < 0.05", "not learned", "none is not shown to have learned"),
    (
        "fox 4x - fox 1x < 0.05",
        "not learned",
        "fox is not shown to use more than a quarter of its 64 tokens",
    ),
    ("alibi 32x - alibi 1x < 0.05", "not run", "alibi has no loss at 2048 tokens"),
    ("alibi 1x = 3.66 ± 0.05", "reproduced", ", 5 seeds)"),
    ("alibi 1x = 3.66 ± 0.001", "open", ", 5 seeds)"),
    ("none 4x = 3.66 ± 0.05", "not reproduced", "4."),
    ("alibi 32x = 3.66 ± 0.05", "not run", "alibi has no value at 32x"),
]


@pytest.mark.parametrize(("test", "outcome", "ours"), OUTCOMES)
def test_outcomes(test, outcome, ours, runs):
    finding = judge_one(entry(test), runs)
    assert finding["outcome"] == outcome
    assert ours in finding["ours"]


def test_of_several_tests_all_must_hold(runs):
    finding = judge_one(entry(HOLDS, FAILS), runs)
    assert finding["outcome"] == "contradicted"
    assert " and " in finding["ours"]


@pytest.fixture(scope="module")
def rises(runs):
    """Return what each seed of rope loses at four times the length, from the files."""
    rows = runs["rope"]
    is_plain = rows["variant"] == "plain"
    is_fixed_target = rows["protocol"] == "fixed_target"
    rows = rows[is_plain & is_fixed_target]
    losses = rows.pivot(index="seed", columns="length_ratio", values="nll")
    rises = losses[4.0] - losses[1.0]
    return rises.to_numpy()


def test_an_outcome_is_that_of_raw_rows_adjusted_for_registered_claims(runs, rises):
    """The expected outcome uses none of posbench's statistics: a t-test over seeds."""
    mean = rises.mean()
    margin = mean - 1.4 * stats.sem(rises) * 2.776
    asked = entry(f"rope 4x - rope 1x > {margin:.4f}")
    rows = {"rope": runs["rope"]}
    p_without_margin = stats.ttest_1samp(rises, 0).pvalue

    alone = judge_one(asked, runs)
    (of_eight,) = judge([(asked, rows)], n_registered=8).to_dict("records")

    assert alone["ours"].startswith(f"{mean:+.3f} (")
    assert p_without_margin < alone["p"] < 0.05
    assert alone["outcome"] == "supported"
    assert of_eight["p"] == alone["p"]
    assert of_eight["outcome"] == "open"


def test_a_contradiction_is_adjusted_for_the_tests_of_its_claim(runs):
    barely_fails = "rope 4x - rope 1x < 0.39"

    alone = judge_one(entry(barely_fails), runs)
    both = judge_one(entry(HOLDS, barely_fails), runs)

    assert alone["outcome"] == "contradicted"
    assert 0.025 < alone["p"] < 0.05
    assert both["p"] == pytest.approx(2 * alone["p"])
    assert both["outcome"] == "open"


@pytest.fixture(scope="module")
def copying_run():
    frame = read([ROOT / "docs" / "rows" / "ledger.parquet"])
    rows = frame[frame["newest"]]
    rows = rows[rows["trained_task"] == "copy"]
    rows = rows[rows["label"] == "alibi"]
    rows = rows[rows["seed"] == 5]
    return rows.assign(cpu_seconds=60.0)


def task_runs(run, learned, right, seeds=10):
    """Return rows on a task: `learned` seeds learned the trained problems, `right` are
    right at twice the length.
    """
    runs = []
    is_longer = run["length_ratio"] > 1
    for seed in range(seeds):
        is_right = np.where(is_longer, seed < right, seed < learned)
        accuracy = is_right.astype(float)
        runs.append(run.assign(folder=str(seed), seed=seed, accuracy=accuracy))
    return pd.concat(runs)


@pytest.fixture(scope="module")
def copies_longer():
    (asked,) = claim.read(["alibi_copies_longer"])
    return asked


@pytest.mark.parametrize(
    ("of", "than", "outcome"),
    [
        ((10, 9), (10, 0), "supported"),
        ((10, 5), (10, 4), "open"),
        # failed training is no failure to generalise
        ((4, 0), (10, 9), "not learned"),
        # with five seeds no outcome can be told from chance
        ((5, 5, 5), (5, 0, 5), "not run"),
    ],
)
def test_a_claim_about_longer_problems_needs_ten_seeds_that_learned(
    copying_run, copies_longer, of, than, outcome
):
    runs = {
        "copy_alibi": task_runs(copying_run, *of),
        "copy_rope": task_runs(copying_run, *than),
    }
    finding = judge_one(copies_longer, runs)
    assert finding["outcome"] == outcome


@pytest.fixture(scope="module")
def copying(copying_run):
    return {
        "copy_alibi": task_runs(copying_run, 10, 9),
        "copy_rope": task_runs(copying_run, 10, 0),
    }


def test_a_claim_costs_what_its_runs_cost(copying, copies_longer):
    finding = judge_one(copies_longer, copying)
    assert finding["cpu_minutes"] == 20


def test_a_seed_that_diverged_has_no_answer_right(copying, copies_longer):
    alibi = copying["copy_alibi"]
    # only four have learned the trained problems then
    status = alibi["run_status"].where(alibi["seed"] < 4, "diverged")
    runs = copying | {"copy_alibi": alibi.assign(run_status=status)}

    finding = judge_one(copies_longer, runs)

    assert finding["outcome"] == "not learned"


def test_a_claim_about_longer_problems_needs_the_trained_ones(copying, copies_longer):
    longer = {}
    for name, rows in copying.items():
        longer[name] = rows[rows["length_ratio"] > 1]

    finding = judge_one(copies_longer, longer)

    assert finding["outcome"] == "not run"


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("a/problems 2x = 0.75 ± 0.4", "reproduced"),
        # the mean is within, the interval is not
        ("a/problems 2x = 0.75 ± 0.2", "open"),
        ("a/problems 2x = 0.55 ± 0.1", "not reproduced"),
    ],
)
def test_a_published_share_is_reproduced_by_its_interval_over_seeds(
    copying_run, test, outcome
):
    shares = [1.0] * 9 + [0.0]
    low, high = stats.t.interval(0.95, 9, np.mean(shares), stats.sem(shares))
    rows = task_runs(copying_run, 10, 9)

    finding = judge_one(entry(test), {"a": rows})

    assert finding["outcome"] == outcome
    assert finding["published"] == f" (within {test[-3:]})"
    assert finding["ours"] == f"0.900 ({low:.3f} to {high:.3f}, 10 seeds)"


def test_a_published_share_needs_as_many_seeds_as_it_asks_for(copying_run):
    asked = entry("a/problems 2x = 0.75 ± 0.4")
    of_ten = replace(asked, claim=replace(asked.claim, seeds=10))
    rows = task_runs(copying_run, 9, 9, seeds=9)

    finding = judge_one(of_ten, {"a": rows})

    assert finding["outcome"] == "not run"
    assert finding["ours"] == "9 of 10 seeds of a"


@pytest.fixture(scope="module")
def one_seed(copying_run):
    """Return a claim of one seed, and its run with 45 of 100 problems right."""
    asked = entry("a/exact 2x = 0.36 ± 0.1")
    of_one_seed = replace(asked.claim, seeds=1)
    rows = task_runs(copying_run, 1, 1, seeds=1)
    rows = rows.assign(exact_match=0.45, n_blocks=100)
    return replace(asked, claim=of_one_seed), rows


def test_the_interval_of_one_seed_is_over_problems(one_seed):
    asked, rows = one_seed

    finding = judge_one(asked, {"a": rows})

    assert finding["outcome"] == "open"
    # by Wilson's formula
    assert finding["ours"] == "0.450 (0.356 to 0.548, 1 seed, 100 problems)"


def test_a_share_of_too_few_problems_for_its_margin_says_so(one_seed):
    """Half of 256 problems right is .439 to .561 by Wilson's formula."""
    asked, rows = one_seed
    close = entry("a/exact 2x = 0.5 ± 0.05")
    asked = replace(asked, tests=close.tests)
    rows = rows.assign(exact_match=0.5, n_blocks=256)

    finding = judge_one(asked, {"a": rows})

    assert finding["outcome"] == "open"
    expected = "0.500 (0.439 to 0.561, 1 seed, 256 problems: too few for the margin)"
    assert finding["ours"] == expected


def test_a_loss_of_one_seed_is_open(one_seed, runs):
    asked, _ = one_seed
    of_loss = entry("a 1x = 3.66 ± 0.5")
    asked = replace(asked, tests=of_loss.tests)
    rows = runs["alibi"]
    rows = rows[rows["seed"] == 5]

    finding = judge_one(asked, {"a": rows})

    assert finding["outcome"] == "open"


def test_a_margin_that_was_narrowed_says_so(one_seed):
    asked, rows = one_seed
    narrowed = replace(asked.claim, narrowed_from=0.2)
    asked = replace(asked, claim=narrowed)

    finding = judge_one(asked, {"a": rows})

    expected = " (within 0.1, narrowed after the run from 0.2)"
    assert finding["published"] == expected


def test_a_published_share_may_be_of_whole_problems(copying_run):
    rows = task_runs(copying_run, 10, 9)
    whole = rows.assign(exact_match=rows["accuracy"], accuracy=0.0)
    asked = entry("a/exact 2x = 0.75 ± 0.2")

    finding = judge_one(asked, {"a": whole})

    assert finding["ours"].startswith("0.900 (")


def test_a_strangers_claim_is_trained_judged_and_written(tmp_path, monkeypatch, capsys):
    """Another claim shares its runs. Training is faked."""
    made = []

    def execute(todo, _n_jobs):
        statuses = {}
        for plan in todo:
            config = plan.config
            name = config.encoding.name
            write_run(plan.folder.parent, config, TRUTHS[name])
            made.append((name, config.seed))
            statuses[plan.id] = Status("done")
        return statuses

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slots, "execute", execute)
    write(tmp_path)
    write(tmp_path, "other", test="alibi 1x - rope 1x > 0.5", runs=["alibi", "rope"])

    reproduce.reproduce(["mine", "other", "experiment=demo"], config_dir=tmp_path)

    runs_of_alibi = [("alibi", seed) for seed in range(5, 10)]
    runs_of_rope = [("rope", seed) for seed in range(5, 10)]
    assert sorted(made) == runs_of_alibi + runs_of_rope
    shown = capsys.readouterr().out
    assert "2 claims: " in shown
    assert shown.index("contradicted") < shown.index("supported")
    written = pd.read_csv(tmp_path / "outputs/ledger/claims.csv")
    assert list(written["outcome"]) == ["supported", "contradicted"]
    mine = written.set_index("claim").loc["mine"]
    assert mine["where"] == "abstract"


@pytest.mark.slow
def test_the_page_says_what_the_kept_rows_say():
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert script("claims").written(page) == page


@pytest.mark.slow
def test_a_claim_that_is_asked_for_alone_is_adjusted_for_all_registered():
    asked = claim.read(["alibi_gains_early_tokens"])
    rows = read([ROOT / "docs" / "rows" / "ledger.parquet"])
    plans_of = reproduce.plans_of_claims(asked, [])

    findings = reproduce.judge_claims(asked, plans_of, rows)

    (finding,) = findings.to_dict("records")
    assert finding["p"] < 0.05
    assert finding["outcome"] == "open"


@pytest.mark.slow
def test_kept_rows_take_the_place_of_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    kept = ROOT / "docs" / "rows" / "ledger.parquet"

    code = posbench("reproduce", "alibi_holds", str(kept))

    assert code == 0
    assert "1 claim: 1 supported" in capsys.readouterr().out
    written = Path("outputs").glob("*/*")
    names = [path.name for path in written]
    assert names == ["claims.csv"]  # nothing was trained
