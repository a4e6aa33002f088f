"""The ledger: claims of the literature, read from files, tested on runs, judged together."""

import dataclasses
import json
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

from posbench.cli.listing import listing
from posbench.config.schema import Config
from posbench.config.shipped import choices
from posbench.errors import UserError
from posbench.launch import plans, sweep
from posbench.launch.states import Status
from posbench.ledger import claim, outcome, page, reproduce
from posbench.ledger.claim import Term
from posbench.ledger.outcome import Finding
from posbench.results.frame import read

ROOT = Path(__file__).parents[1]
CLAIM: dict[str, Any] = {
    "sentence": "ALiBi holds.",
    "source": {"paper": "A paper", "where": "abstract", "says": "it holds"},
    "runs": [{"alibi": "encoding=alibi"}],
    "figure": "alibi 4x - alibi 1x",
    "is_below": 0.05,
    "prediction": {"outcome": "supported", "made": "2026-11-23", "why": "a guess"},
}


def write(folder: Path, name: str = "mine", **changed: Any) -> Path:
    """A claim of a stranger in a folder for --config-dir; a key of None is left out."""
    content = {key: value for key, value in (CLAIM | changed).items() if value is not None}
    (folder / "claim").mkdir(exist_ok=True)
    (folder / "claim" / f"{name}.yaml").write_text("# A claim.\n" + yaml.safe_dump(content))
    return folder


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_every_claim_that_comes_with_posbench_composes_and_says_what_it_has_read() -> None:
    entries = claim.read(["all"])
    assert [entry.id for entry in entries] == list(choices("claim")) and len(entries) >= 24
    needed = {text for entry in entries for text in entry.runs.values()}
    assert len(plans.resolve([[*shlex.split(text), "seed=5"] for text in needed])) == len(needed)
    assert all(entry.claim.source.arxiv and entry.claim.source.says for entry in entries)
    assert {row["name"] for row in listing(["claims"])["claims"]} == set(choices("claim"))


def test_a_figure_is_a_sum_of_levels(tmp_path: Path) -> None:
    figure = "0.5*a/nonoverlap 1/4x + b:yarn:factor=4 16x - a 1x"
    runs = [{"a": "encoding=rope", "b": "encoding=alibi"}]
    (entry,) = claim.read(["mine"], write(tmp_path, runs=runs, figure=figure, is_below=None, is_above=-0.02))
    assert entry.terms == (
        Term(0.5, "a", 0.25, "nonoverlap", "plain"),
        Term(1.0, "b", 16.0, "fixed_target", "yarn:factor=4"),
        Term(-1.0, "a", 1.0, "fixed_target", "plain"),
    )
    assert (entry.direction, entry.margin) == (1, -0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"figure": "alibi 4x alibi 1x"}, "figure: cannot read 'alibi 1x': expected a sum such as"),
        ({"figure": "alibi"}, "figure: cannot read 'alibi'"),
        ({"figure": "rope 4x - alibi 1x"}, "run 'rope' is not among runs (alibi)"),
        ({"runs": ["alibi", "rope"]}, "run 'rope' is not used: leave it out"),
        ({"runs": ["alibbi"]}, "unknown run 'alibbi': did you mean 'alibi'?"),
        ({"is_above": 0.1}, "expected figure with is_above or is_below, or else learned"),
        ({"figure": None}, "expected figure with is_above or is_below, or else learned"),
        ({"sentense": "x"}, "sentense"),
        ({"prediction": {"outcome": "true", "made": "now", "why": ""}}, "prediction.outcome"),
    ],
)
def test_a_claim_that_cannot_be_tested_is_one_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        claim.read(["mine"], write(tmp_path, **changed))
    assert message in str(caught.value) and "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_claim_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown claim 'alibi_hold': did you mean 'alibi_holds'\?"):
        claim.read(["alibi_hold"])
    with pytest.raises(UserError, match="which claims"):
        reproduce.reproduce(["experiment=demo"])


@pytest.mark.full
def test_the_claim_of_the_page_can_be_tested(tmp_path: Path) -> None:
    written = (Path(__file__).parents[1] / "docs" / "claims.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", written, flags=re.S)
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "mine.yaml").write_text(text, encoding="utf-8")
    (entry,) = claim.read(["mine"], tmp_path)
    runs = reproduce.needed([entry], [], tmp_path)[entry.id]
    assert {name: len(each) for name, each in runs.items()} == {"rope": 10, "steep": 10}


# -- outcomes ----------------------------------------------------------------------------------------------------------

TRUTHS = {
    "alibi": Truth(3.66, 0.001, ngram=4.0, paired=True),
    "rope": Truth(3.66, 0.2, ngram=4.0, paired=True),
    "none": Truth(4.2, 0.0, ngram=4.0, paired=True),
}


@pytest.fixture(scope="module")
def runs(template: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    study = tmp_path_factory.mktemp("study")
    return {
        name: read([write_run(study, configured(template, name, seed), truth) for seed in range(5, 15)])
        for name, truth in TRUTHS.items()
    }


def entry(figure: str, **bound: float) -> claim.Entry:
    """A claim on these runs."""
    terms = claim._terms(figure)
    made = dataclasses.replace(claim.validate(claim.Claim, CLAIM), figure=figure, is_below=None)
    return claim.Entry("mine", dataclasses.replace(made, **bound), terms, {term.run: "" for term in terms})


def test_a_claim_is_supported_contradicted_open_or_not_learned(runs: dict[str, pd.DataFrame]) -> None:
    asked = [
        entry("alibi 4x - alibi 1x", is_below=0.05),
        entry("rope 4x - rope 1x", is_below=0.05),
        entry("rope 4x - rope 1x - alibi 4x + alibi 1x", is_above=0.1),
        entry("alibi 1x - rope 1x", is_above=0.0),
        entry("none 4x - none 1x", is_below=0.05),
        entry("alibi 32x - alibi 1x", is_below=0.05),
    ]
    found = outcome.judge([(one, runs) for one in asked])
    assert [one.outcome for one in found] == [
        "supported", "contradicted", "supported", "open", "not learned", "not testable here",
    ]  # fmt: skip
    assert "none is not shown to have learned" in found[4].why and "alibi is not measured at 2048" in found[5].why
    said = page.page(found)
    assert said.index("contradicted") < said.index("| supported") and "6 claims: 1 contradicted, 2 supported" in said


def test_an_outcome_is_that_of_raw_rows(runs: dict[str, pd.DataFrame]) -> None:
    """Seed by seed from the files, without posbench's statistics: a t-test over seeds on this very text."""
    values = []
    for folder in runs["rope"].drop_duplicates("folder").sort_values("seed")["folder"]:
        rows = [json.loads(line) for line in (Path(folder) / "evaluation.jsonl").read_text().splitlines()]
        nll = {row["length_ratio"]: row["nll"] for row in rows if row["window"] is None}
        values.append(nll[4.0] - nll[1.0])
    (found,) = outcome.judge([(entry("rope 4x - rope 1x", is_above=0.3), runs)])
    assert found.interval and found.interval.seeds == pytest.approx(values) and len(values) == 10
    assert found.interval.mean == pytest.approx(np.mean(values))
    over_seeds = stats.ttest_1samp(values, 0.3).pvalue
    assert found.outcome == ("supported" if np.mean(values) > 0.3 else "contradicted") and over_seeds < 0.05


def test_claims_that_are_asked_for_together_share_the_chance_of_error(runs: dict[str, pd.DataFrame]) -> None:
    (alone,) = outcome.judge([(entry("rope 4x - rope 1x", is_above=0.3), runs)])
    together = outcome.judge([(entry("rope 4x - rope 1x", is_above=0.3), runs)] * 4)
    assert alone.p and together[0].p == pytest.approx(4 * alone.p)


def test_seven_seeds_are_judged_as_five(runs: dict[str, pd.DataFrame]) -> None:
    """A claim is judged twice at most, since every further look would add a chance of error."""
    of_first = {number: runs["rope"][runs["rope"]["seed"] < 5 + number] for number in (5, 7)}
    seven = {"rope": of_first[7].iloc[::-1]}
    (found,) = outcome.judge([(entry("rope 4x - rope 1x", is_above=0.1), seven)])
    (five,) = outcome.judge([(entry("rope 4x - rope 1x", is_above=0.1), {"rope": of_first[5]})])
    assert found.interval == five.interval and found.interval is not None and len(found.interval.seeds) == 5


def test_a_failed_run_costs_one_seed(runs: dict[str, pd.DataFrame]) -> None:
    claimed = entry("rope 4x - rope 1x - alibi 4x + alibi 1x", is_above=0.1)
    (found,) = outcome.judge([(claimed, {**runs, "rope": runs["rope"][runs["rope"]["seed"] > 5]})])
    assert found.outcome == "supported" and found.interval is not None and len(found.interval.seeds) == 5


def test_few_seeds_and_models_that_read_little_have_no_outcome(template: Config, tmp_path: Path) -> None:
    reads_little = dataclasses.replace(TRUTHS["alibi"], used=8)
    folders = [write_run(tmp_path / "s", configured(template, "alibi", seed), reads_little) for seed in range(5)]
    found = outcome.judge([
        (entry("alibi 4x - alibi 1x", is_below=0.05), {"alibi": read(folders)}),
        (entry("alibi 4x - alibi 1x", is_below=0.05), {"alibi": read(folders[:4])}),
    ])  # fmt: skip
    assert [one.outcome for one in found] == ["not learned", "not run"]
    assert "alibi needs only" in found[0].why and "fewer than 5 seeds of alibi" in found[1].why


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[plans.Plan]:
    """The plans that were run: each wrote what its encoding's truth says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reproduce, "SEEDS", range(5, 10))
    made: list[plans.Plan] = []

    def execute(todo: list[plans.Plan], _n_jobs: Any, _command: str) -> dict[str, Status]:
        for plan in todo:
            if not plan.folder.exists():
                made.append(plan)
                write_run(plan.folder.parent, plan.config, TRUTHS[plan.config.encoding.name], cpu_seconds=90.0)
        return {plan.id: Status("done") for plan in todo}

    monkeypatch.setattr(sweep, "execute", execute)
    return made


def test_a_strangers_claim_is_trained_judged_and_written(
    tmp_path: Path, trained: list[plans.Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its runs are shared with another claim; what is trained is faked."""
    write(tmp_path)
    write(tmp_path, "other", figure="alibi 1x - rope 1x", runs=["alibi", "rope"], is_below=None, is_above=0.5)
    reproduce.reproduce(["mine", "other", "experiment=demo"], config_dir=tmp_path)
    assert {(plan.config.encoding.name, plan.config.seed) for plan in trained} == {
        (name, seed) for name in ("alibi", "rope") for seed in range(5, 10)
    }
    assert len(trained) == 10 and {plan.config.study for plan in trained} == {"ledger"}
    assert "2 claims: 1 contradicted, 1 supported. 1 of 2 as predicted." in capsys.readouterr().out
    content = json.loads((tmp_path / "outputs/ledger/claims/mine.json").read_text())
    assert content["outcome"] == "supported" and len(content["figure"]["by_seed"]) == 5
    assert content["cpu_minutes"] == 7.5  # of five runs, each of which took 90 seconds
    assert content["runs"]["alibi"] == [plan.id for plan in trained if plan.config.encoding.name == "alibi"]
    assert "ALiBi holds. **supported**" in (tmp_path / "outputs/ledger/claims/claims.md").read_text()
    assert (tmp_path / "outputs/ledger/claims/claims.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_what_five_seeds_settle_gets_no_more(
    tmp_path: Path, trained: list[plans.Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ALiBi holds, so it keeps five seeds; whether RoPE's rise is above its own size stays open, so it gets ten."""
    monkeypatch.setattr(reproduce, "SEEDS", range(5, 15))
    write(tmp_path)
    write(tmp_path, "other", figure="rope 4x - rope 1x", runs=["rope"], is_below=None, is_above=0.4)
    reproduce.reproduce(["mine", "other", "experiment=demo"], config_dir=tmp_path)
    seeds = {name: [p.config.seed for p in trained if p.config.encoding.name == name] for name in ("alibi", "rope")}
    assert seeds == {"alibi": list(range(5, 10)), "rope": list(range(5, 15))}
    assert "2 claims: 1 supported, 1 open" in capsys.readouterr().out


def test_a_section_says_what_a_claim_cost() -> None:
    (holds,) = claim.read(["alibi_holds"])
    text = page.page([Finding(holds, "open", shares=((4, 5), (0, 5)), p=0.3, minutes=61.2)])
    assert "- Cost: training its runs took 61 CPU minutes.\n" in text


@pytest.mark.full
def test_the_page_says_what_the_kept_rows_say() -> None:
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    assert page.written(text, support.script("claims").kept()) == text


@pytest.mark.full
def test_kept_rows_take_the_place_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = str(ROOT / "docs" / "rows" / "ledger.parquet")
    assert support.posbench("reproduce", "alibi_holds", rows) == 0
    assert "1 claim: 1 supported" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "outputs").glob("*/*")] == ["claims"]  # nothing was trained


def test_one_run_is_not_evaluated_in_two_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "SEEDS", [5])
    write(tmp_path)
    write(tmp_path, "other", runs=[{"alibi": "encoding=alibi evaluation.ratios=[1,4]"}])
    assert claim.read(["other"], tmp_path)
    with pytest.raises(UserError, match=r"are one run, evaluated differently: give it one name in .*_runs\.yaml"):
        reproduce.reproduce(["mine", "other"], config_dir=tmp_path, dry_run=True)


def test_a_dry_run_says_what_it_takes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep, "cost", lambda todo: f"{len(todo)} runs")
    assert support.posbench("reproduce", "rope_breaks", "fox_extrapolates", "rope_breaks", "--dry-run") == 0
    assert capsys.readouterr().out == "2 claims. At most, if no claim is settled by 5 seeds:\n20 runs\n"
    assert support.posbench("reproduce", "rope_breaks", "model.n_layers=1,2", "--dry-run") == 2
    assert "model.n_layers=1,2: expected one value each" in capsys.readouterr().err
