"""Claims of the literature, read from files, tested on runs, judged together."""

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import support
import yaml
from fake_study import Truth, configured, write_run
from scipy import stats

from posbench.claims import claim, reproduce
from posbench.claims.claim import Term
from posbench.claims.judge import judge
from posbench.errors import UserError
from posbench.launch import plans, slots
from posbench.launch.pool import Status
from posbench.listing import listing_rows
from posbench.results.frame import read

ROOT = Path(__file__).parents[1]
CLAIM: dict[str, Any] = {
    "sentence": "ALiBi holds.",
    "source": {"paper": "A paper", "where": "abstract", "says": "it holds"},
    "runs": [{"alibi": "encoding=alibi"}],
    "test": "alibi 4x - alibi 1x < 0.05",
    "prediction": {"outcome": "supported", "made": "2026-11-23", "why": "a guess"},
}


def write(folder: Path, name: str = "mine", **changed: Any) -> Path:
    """Add a stranger's claim to a file in a folder for --config-dir; a key whose value
    is None is left out.
    """
    content = {
        key: value for key, value in (CLAIM | changed).items() if value is not None
    }
    (folder / "claim").mkdir(exist_ok=True)
    with (folder / "claim" / "several.yaml").open("a") as file:
        file.write(f"# A claim.\n{yaml.safe_dump({name: content})}")
    return folder


@pytest.mark.slow
def test_every_claim_composes_and_so_does_that_of_the_page(tmp_path):
    (text,) = re.findall(
        r"```yaml\n(.*?)```",
        (ROOT / "docs/results.md").read_text(encoding="utf-8"),
        flags=re.S,
    )
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(text, encoding="utf-8")
    entries = claim.read(["all"], tmp_path)
    # by the comment above each
    names = {row["name"] for row in listing_rows(["claims"])["claims"]}
    assert {entry.id for entry in entries} == {*names, "mine"}
    assert len(entries) == len(names) + 1 >= 35
    runs = {text for entry in entries for text in entry.runs.values()}
    assert len(plans.resolve([[*shlex.split(text), "seed=5"] for text in runs])) == len(
        runs
    )


def test_a_test_is_a_sum_of_losses_and_its_margin(tmp_path):
    tests = ["0.5*a/nonoverlap .25x + b:yarn:factor=4 16x - a 1x > -0.02", "b 8x < .1"]
    (entry,) = claim.read(
        ["mine"],
        write(
            tmp_path, runs=[{"a": "encoding=rope", "b": "encoding=alibi"}], test=tests
        ),
    )
    first, second = entry.tests
    stretched = Term(1.0, "b", 16.0, "fixed_target", "yarn:factor=4")
    plain = (
        Term(0.5, "a", 0.25, "nonoverlap", "plain"),
        Term(-1.0, "a", 1.0, "fixed_target", "plain"),
    )
    assert first.terms == (plain[0], stretched, plain[1])
    assert first.direction == 1
    assert first.margin == -0.02
    assert second.direction == -1
    assert second.margin == 0.1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"test": "alibi 4x alibi 1x < 1"}, "test: cannot read 'alibi 1x': expected"),
        ({"test": "alibi 1x = 1"}, "test: cannot read 'alibi 1x = 1': expected"),
        (
            {"test": "rope 4x - alibi 1x < 0"},
            r"run 'rope' is not among runs \(alibi\)$",
        ),
        ({"seeds": 2}, "seeds is 2: leave it out: only published"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_one_line(tmp_path, changed, message):
    with pytest.raises(UserError, match=rf"^\S*several.yaml: mine: {message}"):
        claim.read(["mine"], write(tmp_path, **changed))


TRUTHS = {
    "alibi": Truth(3.66, 0.001, ngram=4.0),
    "rope": Truth(3.66, 0.2, ngram=4.0),
    "none": Truth(4.2, 0.0, ngram=4.0),
    "fox": Truth(3.66, 0.001, ngram=4.0, used=8),  # reads little
}


@pytest.fixture(scope="module")
def runs(template, tmp_path_factory):
    study = tmp_path_factory.mktemp("study")
    return {
        name: read(
            [
                write_run(study, configured(template, name, seed), truth)
                for seed in range(5, 10)
            ]
        )
        for name, truth in TRUTHS.items()
    }


def entry(*tests: str) -> claim.Entry:
    parsed = tuple(map(claim._inequality, tests))
    names = {term.run: "" for test in parsed for term in test.terms}
    return claim.Entry("mine", claim.validate(claim.Claim, CLAIM), parsed, names, ROOT)


@pytest.mark.parametrize(
    ("tests", "outcome", "ours"),
    [
        (["alibi 4x - alibi 1x < 0.05"], "supported", ""),
        (["rope 4x - rope 1x < 0.05"], "contradicted", ""),
        (
            ["none 4x - none 1x < 0.05"],
            "not learned",
            "none is not shown to have learned more than an n-gram model",
        ),
        (
            ["fox 4x - fox 1x < 0.05"],
            "not learned",
            "fox needs only 8 of its 64 tokens",
        ),
        (
            ["alibi 32x - alibi 1x < 0.05"],
            "not run",
            "alibi has no loss at 2048 tokens",
        ),
        (
            ["alibi 4x - alibi 1x < 0.05", "rope 4x - rope 1x < 0.1"],
            "contradicted",
            " and ",
        ),
        (["alibi 1x = 3.66 ± 0.05"], "reproduced", ", 5 seeds)"),
        (["none 4x - alibi 4x = 0.4 ± 0.05"], "not reproduced", "0.5"),
        (["alibi/nonoverlap 4x - alibi/nonoverlap 1x < 0.05"], "supported", ""),
        (["alibi/nonoverlap 4x - alibi 1x < 0.05"], "supported", ""),
        (["alibi 32x = 3.66 ± 0.05"], "not run", "alibi has no value at 32x"),
    ],
)
def test_outcomes(tests, outcome, ours, runs):
    asked = entry(*tests)
    rows = {
        name: pd.concat([runs[name], runs[name].assign(protocol="nonoverlap")])
        for name in asked.runs
    }
    (finding,) = judge([(asked, rows)]).to_dict("records")
    assert finding["outcome"] == outcome
    assert ours in finding["ours"]


def test_an_outcome_is_that_of_raw_rows_and_shares_the_chance_of_error(runs):
    """The expected outcome uses none of posbench's statistics: a t-test over seeds, on
    losses from the files.
    """
    rope = runs["rope"][runs["rope"]["variant"] == "plain"].pivot(
        index="seed", columns="length_ratio", values="nll"
    )
    rises = (rope[4.0] - rope[1.0]).to_numpy()
    asked = entry(
        f"rope 4x - rope 1x > {rises.mean() - 1.4 * stats.sem(rises) * 2.776:.4f}"
    )
    many = judge([(asked, {"rope": runs["rope"]})] * 8)
    (alone,) = judge([(asked, {"rope": runs["rope"]})]).to_dict("records")
    assert alone["ours"].startswith(f"{rises.mean():+.3f} (")
    assert stats.ttest_1samp(rises, 0).pvalue < alone["p"] < 0.05
    assert alone["outcome"] == "supported"
    assert set(many["outcome"]) == {"open"}
    assert set(many["p"]) == {alone["p"]}


def test_a_contradiction_is_adjusted_for_the_tests_of_its_claim(runs):
    holds = "alibi 4x - alibi 1x < 0.05"
    barely_fails = "rope 4x - rope 1x < 0.39"
    rope = {"rope": runs["rope"]}
    rope_and_alibi = {"rope": runs["rope"], "alibi": runs["alibi"]}

    (alone,) = judge([(entry(barely_fails), rope)]).to_dict("records")
    (both,) = judge([(entry(holds, barely_fails), rope_and_alibi)]).to_dict("records")

    assert alone["outcome"] == "contradicted"
    assert 0.025 < alone["p"] < 0.05
    assert both["p"] == pytest.approx(2 * alone["p"])
    assert both["outcome"] == "open"


@functools.cache
def copying_run() -> pd.DataFrame:
    frame = read([ROOT / "docs/rows/ledger.parquet"])
    asked = (
        (frame["trained_task"] == "copy")
        & (frame["label"] == "alibi")
        & frame["newest"]
        & (frame["seed"] == 5)
    )
    return frame[asked].assign(cpu_seconds=60.0)


def task_runs(learned: int, right: int, seeds: int) -> pd.DataFrame:
    """Return rows on a task: `learned` seeds learned the trained problems, `right` are
    right at twice the length.
    """
    runs = [copying_run().assign(folder=str(seed), seed=seed) for seed in range(seeds)]
    for seed, rows in enumerate(runs):
        rows["accuracy"] = np.where(
            rows["length_ratio"] > 1, float(seed < right), float(seed < learned)
        )
    return pd.concat(runs)


@pytest.mark.parametrize(
    ("of", "than", "outcome"),
    [
        ((10, 9, 10), (10, 0, 10), "supported"),
        ((10, 5, 10), (10, 4, 10), "open"),
        # failed training is no failure to generalise
        ((4, 0, 10), (10, 9, 10), "not learned"),
        # with five seeds no outcome can be told from chance
        ((5, 5, 5), (5, 0, 5), "not run"),
    ],
)
def test_a_claim_about_longer_problems_needs_ten_seeds_that_learned(of, than, outcome):
    (asked,) = claim.read(["alibi_copies_longer"])
    runs = {"copy_alibi": task_runs(*of), "copy_rope": task_runs(*than)}
    (finding,) = judge([(asked, runs)]).to_dict("records")
    assert finding["outcome"] == outcome
    assert finding["cpu_minutes"] == of[2] + than[2]
    ended = {seed: "diverged" if seed == 9 else "done" for seed in range(10)}
    lost = {
        name: rows.assign(run_status=rows["seed"].map(ended))
        for name, rows in runs.items()
    }
    # a seed that diverged has no answer right
    assert list(judge([(asked, lost)])["outcome"]) == [outcome]
    longer = {name: rows[rows["length_ratio"] > 1] for name, rows in runs.items()}
    assert list(judge([(asked, longer)])["outcome"]) == ["not run"]


def test_a_published_share_of_right_answers_is_a_mean_over_seeds():
    tokens = task_runs(10, 9, 10)
    whole = tokens.assign(exact_match=tokens["accuracy"], accuracy=0.0)
    asked = [
        (entry("a/problems 2x = 0.75 ± 0.2"), {"a": tokens}),
        (entry("a/exact 2x = 0.75 ± 0.1"), {"a": whole}),
    ]
    judged = judge(asked)
    assert list(judged["outcome"] + judged["published"]) == [
        "reproduced (within 0.2)",
        "not reproduced (within 0.1)",
    ]
    assert list(judged["ours"]) == ["0.900 (0.000 to 1.000, 10 seeds)"] * 2


def test_a_strangers_claim_is_trained_judged_and_written(tmp_path, monkeypatch, capsys):
    """Another claim shares its runs. Training is faked."""
    made: list[plans.Plan] = []

    def execute(todo: list[plans.Plan], _n_jobs: Any) -> dict[str, Status]:
        made.extend(todo)
        for plan in todo:
            write_run(
                plan.folder.parent, plan.config, TRUTHS[plan.config.encoding.name]
            )
        return {plan.id: Status("done") for plan in todo}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slots, "execute", execute)
    write(
        write(tmp_path),
        "other",
        test="alibi 1x - rope 1x > 0.5",
        runs=["alibi", "rope"],
    )
    reproduce.reproduce(["mine", "other", "experiment=demo"], config_dir=tmp_path)
    wanted = [(name, seed) for name in ("alibi", "rope") for seed in range(5, 10)]
    assert (
        sorted((plan.config.encoding.name, plan.config.seed) for plan in made) == wanted
    )
    shown = capsys.readouterr().out
    assert "2 claims: " in shown
    assert shown.index("contradicted") < shown.index("supported")
    content = pd.read_csv(tmp_path / "outputs/ledger/claims.csv").set_index("claim")
    assert list(content["outcome"]) == ["supported", "contradicted"]
    assert content.loc["mine", "where"] == "abstract"


@pytest.mark.slow
def test_kept_rows_take_the_place_of_runs_and_the_page_says_what_they_say(
    tmp_path, monkeypatch, capsys
):
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert support.script("claims").written(page) == page
    monkeypatch.chdir(tmp_path)
    assert (
        support.posbench(
            "reproduce", "alibi_holds", str(ROOT / "docs" / "rows" / "ledger.parquet")
        )
        == 0
    )
    assert "1 claim: 1 supported" in capsys.readouterr().out
    assert support.posbench("reproduce", "alibi_hold", "--dry-run") == 2
    assert (
        "unknown claim 'alibi_hold': did you mean 'alibi_holds'?"
        in capsys.readouterr().err
    )
    # nothing was trained
    assert [path.name for path in (tmp_path / "outputs").glob("*/*")] == ["claims.csv"]
