"""`posbench reproduce`: make the runs that claims need, judge them, and write down what was found.

Claims share runs, and all runs lie in one study. Seeds 5 to 14 were never used to make a prediction. A claim is judged
with the first five of them, and with all ten if five leave it open.
"""

import dataclasses
import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posbench import files
from posbench.config.overrides import split
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, sweep
from posbench.launch.plans import Plan
from posbench.launch.states import Status
from posbench.ledger import claim, outcome, page
from posbench.ledger.claim import Entry
from posbench.ledger.outcome import LOOKS, Finding
from posbench.report import charts
from posbench.results import frame as frames
from posbench.terminal import console

logger = logging.getLogger(__name__)

SEEDS = range(5, 15)
STUDY, EXPERIMENT = "ledger", "reader"
FOLDER = "claims"  # in the study's folder
PAGE = "claims.md"  # there, and in docs/
Needed = dict[str, dict[str, list[Plan]]]  # by the name of a claim, and of a run in it: plans, seed by seed


def reproduce(
    words: list[str], n_jobs: int | None = None, config_dir: Path | None = None, dry_run: bool = False
) -> None:
    """Test claims on fresh seeds.

    Args:
        words: names of claims, or `all`; overrides for all runs, such as `experiment=demo study=ledger_demo`; and files
            of kept studies (`*.parquet`), whose runs are neither trained nor evaluated again.
        n_jobs: processes at a time; None = one per CPU core or GPU.
        config_dir: a folder of further YAML files.
        dry_run: run and write nothing; print what it would take.

    Raises:
        UserError: no such claim, or a mistake in a claim or an override; nothing was run.
        PosbenchError: some runs failed; the others are done and the claims are judged by them.
    """
    files_of_rows = [Path(word) for word in words if word.endswith(frames.SUFFIX) and "=" not in word]
    names = [word for word in words if "=" not in word and Path(word) not in files_of_rows]
    overrides = [word for word in words if "=" in word]
    if not names:
        raise UserError("which claims? posbench reproduce all, or names from 'posbench list claims'")
    entries = claim.read(names, config_dir)
    usual = needed(entries, overrides, config_dir)
    kept = frames.read(files_of_rows) if files_of_rows else None
    known = set() if kept is None else set(kept["run"])
    every = [plan for plan in _merged(_plans(usual)) if plan.id not in known]
    console.log_to_terminal()
    if dry_run:
        print(f"{page.number_of(entries)}. At most, if no claim is settled by {LOOKS[0]} seeds:")
        print(sweep.cost(every))
        return
    command = shlex.join(["posbench", "reproduce", *words])
    status: dict[str, Status] = {}
    left = [entry.id for entry in entries]
    for seeds in LOOKS:
        if left:
            logger.info("with %d seeds: %s", seeds, ", ".join(left))
            due = _merged(_plans(_up_to(seeds, {name: usual[name] for name in left})))
            due = [plan for plan in due if plan.id not in known]
            status |= sweep.execute(due, n_jobs) if due else {}
        left = [one.entry.id for one in judged(entries, usual, kept) if one.outcome in ("open", "not run")]
    findings = judged(entries, usual, kept)
    folder = _plans(usual)[0].folder.parent / FOLDER
    write(findings, usual, folder, command)
    print(page.summary(findings))
    print(f"Claims: {folder / PAGE}, and a JSON file of each")
    if failed := [name for name, one in status.items() if one.name != "done"]:
        raise PosbenchError(f"{len(failed)} of {len(status)} runs not done: {', '.join(failed)}")


# -- runs --------------------------------------------------------------------------------------------------------------


def needed(
    entries: Sequence[Entry], overrides: list[str], config_dir: Path | None = None, seeds: Sequence[int] | None = None
) -> Needed:
    """The runs of claims.

    Args:
        overrides: for all runs; a run's own ones come first.
        seeds: None: `SEEDS`.
    """
    first, *others = seeds or SEEDS
    made: dict[str, list[Plan]] = {}
    for text in (text for entry in entries for text in entry.runs.values()):
        if text not in made:
            own = shlex.split(text)
            asked = [*own, *(one for one in overrides if split(one)[0] not in _keys(own))]  # a task has its experiment
            said = _keys(asked)
            usual = [one for one in (f"experiment={EXPERIMENT}", f"study={STUDY}") if split(one)[0] not in said]
            resolved = plans.resolve([[*usual, *asked, f"seed={first}"]], config_dir)
            if len(resolved) != 1:
                raise UserError(f"{shlex.join(asked)}: expected one value each: a claim's runs differ in the seed only")
            made[text] = [*resolved, *(plan.with_seed(seed) for seed in others for plan in resolved)]
    return {entry.id: {name: made[text] for name, text in entry.runs.items()} for entry in entries}


def _keys(overrides: list[str]) -> set[str]:
    return {key for key, _ in map(split, overrides)}


def _up_to(seeds: int, part: Needed) -> Needed:
    """The runs of the first so many seeds."""
    return {id_: {name: each[:seeds] for name, each in by_name.items()} for id_, by_name in part.items()}


def _plans(part: Needed) -> list[Plan]:
    return [plan for by_name in part.values() for each in by_name.values() for plan in each]


def _merged(todo: list[Plan]) -> list[Plan]:
    """Each run once. Raises UserError if two claims want one run evaluated differently, which a shared run settles."""
    found: dict[str, Plan] = {}
    for plan in todo:
        known = found.setdefault(plan.id, plan)
        if known.config.evaluation != plan.config.evaluation:
            raise UserError(
                f"{' '.join(known.overrides)} and {' '.join(plan.overrides)} are one run, evaluated differently: "
                f"give it one name in configs/claim/{claim.SHARED}.yaml"
            )
    return sorted(found.values(), key=lambda plan: plan.config.seed)  # all claims have five seeds before one has six


# -- outcomes ----------------------------------------------------------------------------------------------------------


def judged(entries: Sequence[Entry], part: Needed, kept: pd.DataFrame | None = None) -> list[Finding]:
    """The findings, by the runs that there are.

    Args:
        kept: rows of kept studies, whose runs stand for those of the same name; others are looked for in their folders.
    """
    kept = pd.DataFrame(columns=["run", "run_status", "seed", "cpu_seconds"]) if kept is None else kept
    known, folders = set(kept["run"]), {plan.folder for plan in _plans(part)}
    made = [folder for folder in folders if folder.name not in known and (folder / "run.json").is_file()]
    rows = pd.concat([kept, frames.read(made)], ignore_index=True) if made else kept

    def rows_of(each: Sequence[Plan]) -> pd.DataFrame:
        return rows[rows["run"].isin([plan.id for plan in each])]

    return outcome.judge([
        (entry, {name: rows_of(each) for name, each in part[entry.id].items()}) for entry in entries
    ])  # fmt: skip


# -- what is written ---------------------------------------------------------------------------------------------------


def write(findings: Sequence[Finding], usual: Needed, folder: Path, command: str) -> None:
    """Write a JSON file of every claim, and all of them as one page with a picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in findings:
        runs = {name: [plan.id for plan in each] for name, each in usual[one.entry.id].items()}
        content = _content(one) | {"runs": runs, "command": command}
        files.write(folder / f"{one.entry.id}.json", json.dumps(content, indent=2).encode() + b"\n")
    if (picture := page.picture(findings)) is not None:
        charts.save(picture, folder, page.PICTURE)
    files.write(folder / PAGE, f"# Claims\n\nCommand: `{command}`\n\n{page.page(findings)}".encode())


def _content(one: Finding) -> dict[str, Any]:
    claim_ = one.entry.claim
    return {
        "schema": 1,
        "id": one.entry.id,
        **_outcome(one),
        "margin": one.entry.margin,
        "claim": dataclasses.asdict(claim_),
        "cpu_minutes": round(one.minutes, 1),  # of training its runs, shared ones included
        "as_predicted": claim_.prediction.outcome == one.outcome if one.p is not None else None,
    }


def _outcome(one: Finding) -> dict[str, Any]:
    found = one.interval
    figure = None if found is None else {
        "mean": found.mean, "low": found.low(), "high": found.high(), "seeds": len(found.seeds),
        "over": "seeds and documents" if found.units else "seeds", "by_seed": list(found.seeds),
    }  # fmt: skip
    return {"outcome": one.outcome, "why": one.why, "p_adjusted": one.p, "figure": figure, "seeds_right": one.shares}
