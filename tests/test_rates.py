"""Learning rates in a report: what a record says of the schemes it is about, and nothing else."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fake_study import SCHEMES, configured, write_run

from posbench import report
from posbench.config.identity import run_id
from posbench.config.schema import Config
from posbench.report import figures, tables
from posbench.report.comparison import load, rates, summary
from posbench.run_folder import finding
from posbench.show import properties

HEADINGS = ["scheme", "learning rate", "best of its grid", "tried", "spread", "best at the edge"]


@pytest.fixture(scope="module")
def template(template: Config) -> Config:
    """At a rate in the middle of the grids below."""
    return at(template, 0.003)


def at(config: Config, rate: float, **changes: Any) -> Config:
    return dataclasses.replace(config, training=dataclasses.replace(config.training, learning_rate=rate), **changes)


def trials(config: Config, nlls: dict[float, Any]) -> list[dict[str, Any]]:
    """What tuning records of a scheme's trials."""
    return [{"id": run_id(at(config, rate, seed=0)), "learning_rate": rate, "nll": nll} for rate, nll in nlls.items()]


def shown(study: Path, record: object) -> dict[str, list[str]]:
    """The table's rows by their first cell, for a study with such a record."""
    (study / "tuning.json").write_text(record if isinstance(record, str) else json.dumps(record), encoding="utf-8")
    (group,) = load.groups([load.read(folder) for folder in finding.run_folders([study])])
    found = [table for table in tables.more_tables(group, summary.summarise(group)) if table.title == "Learning rates"]
    (table,) = found
    assert table.columns == [heading for heading in HEADINGS if heading in table.columns]  # none is empty
    rows = [dict(zip(table.columns, (value.text for value in row), strict=True)) for row in table.rows]
    return {row["scheme"]: [row.get(heading, "") for heading in HEADINGS[1:]] for row in rows}


def test_each_scheme_is_told_its_rate_and_whether_it_was_the_best_of_its_grid(template: Config, tmp_path: Path) -> None:
    ran = {"rope": 0.003, "alibi": 0.003, "t5": 0.006, "none": 0.002, "sinusoidal": 0.003, "learned": 0.003}
    configs = {name: at(configured(template, name, 1), rate) for name, rate in ran.items()}
    for name, config in configs.items():
        write_run(tmp_path, config, SCHEMES[name])
    nlls = {
        "rope": {0.0015: 4.2, 0.003: 4.0, 0.006: 4.05},
        "alibi": {0.0015: 4.2, 0.003: 4.125, 0.006: 4.0},
        "t5": {0.003: None, 0.006: 4.5, 0.012: 4.75},
        "none": {0.003: 4.1, 0.006: 4.0},
        "sinusoidal": {0.003: None, 0.006: None},
    }
    record = {"schemes": [{"encoding": name, "tried": trials(configs[name], found)} for name, found in nlls.items()]}
    assert shown(tmp_path, record) == {
        "rope": ["0.003", "yes", "3, from 0.0015 to 0.006", "0.200", ""],
        "alibi": ["0.003", "no; 0.006 is better by 0.125", "3, from 0.0015 to 0.006", "0.200", "yes"],
        "t5": ["0.006", "yes", "3, from 0.003 to 0.012 (1 failed)", "0.250", ""],
        "none": ["0.002", "not known; best is 0.006", "2, from 0.003 to 0.006", "0.100", "yes"],
        "sinusoidal": ["0.003", "none could be trained", "2, from 0.003 to 0.006 (2 failed)", "", ""],
        "learned": ["0.003", "not tuned", "", "", ""],
    }


def test_trials_at_other_settings_say_nothing_of_a_scheme(template: Config, tmp_path: Path) -> None:
    config = configured(template, "rope", 0)
    write_run(tmp_path, config, SCHEMES["rope"])
    longer = dataclasses.replace(config, training=dataclasses.replace(config.training, tokens=2_000_000))
    other = configured(template, "rope", 0, base=64)
    rows = [{"encoding": "rope", "tried": trials(one, {0.003: 4.0, 0.006: 3.9})} for one in (longer, other)]
    mislabelled = [{"encoding": "rope", "tried": [{**trials(config, {0.003: 4.0})[0], "learning_rate": 0.006}]}]
    assert shown(tmp_path, {"schemes": [*rows, *mislabelled]})["rope"][1] == "not tuned"


def test_schemes_at_their_own_rates_are_one_comparison_and_the_terminal_says_so(
    template: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "save", lambda group, summaries, folder: [])
    monkeypatch.setattr(properties, "measure", lambda names: [])
    rope, alibi = configured(template, "rope", 0), at(configured(template, "alibi", 0), 0.006)
    for config in (rope, alibi):
        write_run(tmp_path, config, SCHEMES[config.encoding.name])
    record = {"schemes": [{"tried": trials(rope, {0.003: 4.0, 0.006: 4.1})}]}
    (tmp_path / "tuning.json").write_text(json.dumps(record))
    report.main([tmp_path])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Learning rates differ: 0.006 for alibi; 0.003 for rope." in printed
    assert "at the training length: the best of those tried for rope; not tuned for alibi." in printed
    assert "### Learning rates" in (tmp_path / "report/report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "trial",
    [
        None,
        "rope",
        {},
        {"learning_rate": 0.003, "nll": 4.0},
        {"id": ["rope"], "learning_rate": 0.003},
        {"id": "rope-s0-</script>\x1b[2J", "learning_rate": 0.003, "nll": 4.0},
        *({"id": "rope-s0-00000000", "learning_rate": rate} for rate in ("x", -1, 0, True, 10**400, 1e308, [], None)),
    ],
)
def test_a_trial_of_any_content_stops_no_report(template: Config, tmp_path: Path, trial: Any) -> None:
    write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    assert shown(tmp_path, {"schemes": [{"tried": [trial]}]}) == {"rope": ["0.003", "not tuned", "", "", ""]}


@pytest.mark.parametrize("nll", ["4", None, [4], True, float("nan"), 1e301])
def test_an_nll_that_is_no_number_is_a_failed_trial(template: Config, tmp_path: Path, nll: Any) -> None:
    config = configured(template, "rope", 0)
    write_run(tmp_path, config, SCHEMES["rope"])
    record = {"schemes": [{"tried": trials(config, {0.003: nll, 0.006: 4.0})}]}
    assert shown(tmp_path, record)["rope"][1:] == [
        "not known; best is 0.006", "2, from 0.003 to 0.006 (1 failed)", "0.000", "yes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "\ud800".encode("utf-8", "surrogatepass").decode("latin1"), "[" * 9999]
)
def test_a_record_that_is_none_stops_no_report(template: Config, tmp_path: Path, text: str) -> None:
    write_run(tmp_path, configured(template, "rope", 0), SCHEMES["rope"])
    assert shown(tmp_path, text)["rope"][1] == "not tuned"
    for content in ({}, {"schemes": "rope"}, {"schemes": [[], None, {"tried": {"id": 1}}]}):
        assert shown(tmp_path, content)["rope"][1] == "not tuned"
    assert rates.trials({"tried": None}) == []
