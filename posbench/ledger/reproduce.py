"""`posbench reproduce`: make the runs that claims need, judge them, and write down what was found.

Claims share runs, and all runs lie in one study. Seeds 5 to 14 were never used to make a prediction.
"""

import dataclasses
import json
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.overrides import parted
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, sweep
from posbench.launch.plans import Plan
from posbench.ledger import claim, outcome
from posbench.ledger.claim import Entry
from posbench.ledger.outcome import Finding
from posbench.report.comparison import load
from posbench.terminal import console

SEEDS = range(5, 15)
STUDY, EXPERIMENT = "ledger", "reader"
FOLDER = "claims"  # in the study's folder
_ORDER: tuple[claim.Outcome, ...] = ("contradicted", "supported", "open", "not learned", "not testable here")


def reproduce(
    words: list[str], n_jobs: int | None = None, config_dir: Path | None = None, dry_run: bool = False
) -> None:
    """Test claims on fresh seeds.

    Args:
        words: names of claims, or `all`; then overrides for all runs, such as `experiment=demo study=ledger_demo`.
        n_jobs: processes at a time; None = one per CPU core or GPU.
        config_dir: a folder of further YAML files.
        dry_run: run and write nothing; print what it would take.

    Raises:
        UserError: no such claim, or a mistake in a claim or an override; nothing was run.
        PosbenchError: some runs failed; the others are done and the claims are judged by them.
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not names:
        raise UserError("which claims? posbench reproduce all, or names from 'posbench list claims'")
    entries = claim.read(names, config_dir)
    needed = {entry.id: runs_of(entry, overrides, config_dir) for entry in entries}
    todo = _merged([plan for by_name in needed.values() for plans_ in by_name.values() for plan in plans_])
    console.log_to_terminal()
    if dry_run:
        print(f"{_claims(entries)}.\n{sweep.cost(todo, n_jobs)}")
        return
    command = shlex.join(["posbench", "reproduce", *words])
    status = sweep.execute(todo, n_jobs, [], command)
    findings = judged(entries, needed)
    folder = todo[0].folder.parent / FOLDER
    write(findings, needed, folder, command)
    print(summary(findings))
    print(f"Claims: {folder / 'claims.md'}, and a JSON file of each")
    if failed := [name for name, one in status.items() if one.name != "done"]:
        raise PosbenchError(f"{len(failed)} of {len(todo)} runs not done: {', '.join(failed)}")


def runs_of(entry: Entry, overrides: list[str], config_dir: Path | None = None) -> dict[str, list[Plan]]:
    """By the name of a run in a claim, its plans, seed by seed.

    Args:
        overrides: for all runs; a run's own ones come first.
    """
    seeds = f"seed={','.join(map(str, SEEDS))}"
    found = {}
    for name, text in entry.runs.items():
        own = shlex.split(text)
        chosen = {key for key, _ in map(parted, own)}
        asked = [override for override in overrides if parted(override)[0] not in chosen]  # a task has its experiment
        given = {key for key, _ in map(parted, [*own, *asked])}
        usual = [word for word in (f"experiment={EXPERIMENT}", f"study={STUDY}") if parted(word)[0] not in given]
        found[name] = plans.resolve([[*usual, *own, *asked, seeds]], config_dir)
    return found


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


def judged(entries: Sequence[Entry], needed: dict[str, dict[str, list[Plan]]]) -> list[Finding]:
    """The findings, by the run folders that there are."""
    folders = {plan.folder for by_name in needed.values() for each in by_name.values() for plan in each}
    runs = {folder: load.read(folder) for folder in folders if (folder / "run.json").is_file()}
    return outcome.judge([
        (entry, {name: [runs[p.folder] for p in each if p.folder in runs] for name, each in needed[entry.id].items()})
        for entry in entries
    ])  # fmt: skip


# -- what is written ---------------------------------------------------------------------------------------------------


def write(findings: Sequence[Finding], needed: dict[str, dict[str, list[Plan]]], folder: Path, command: str) -> None:
    """Write a JSON file of every claim, and all of them as one page."""
    files.refuse_unusual(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for one in findings:
        runs = {name: [plan.id for plan in each] for name, each in needed[one.entry.id].items()}
        content = _content(one) | {"runs": runs, "command": command}
        files.write(folder / f"{one.entry.id}.json", json.dumps(content, indent=2).encode() + b"\n")
    files.write(folder / "claims.md", page(findings, command).encode())


def _content(one: Finding) -> dict[str, Any]:
    found, claim_ = one.interval, one.entry.claim
    figure = None if found is None else {
        "mean": found.mean, "low": found.low, "high": found.high, "over": found.over, "seeds": found.seeds,
        "by_seed": list(found.each),
    }  # fmt: skip
    return {
        "schema": 1,
        "id": one.entry.id,
        "outcome": one.outcome,
        "why": one.why,
        "p_adjusted": one.p,
        "figure": figure,
        "seeds_right": one.shares,
        "margin": one.entry.margin,
        "claim": dataclasses.asdict(claim_),
        "as_predicted": claim_.prediction.outcome == one.outcome if one.p is not None else None,
    }


def page(findings: Sequence[Finding], command: str) -> str:
    """The findings as Markdown, the contradicted ones first."""
    rows = sorted(findings, key=lambda one: _ORDER.index(one.outcome))
    lines = ["# Claims", "", summary(findings), "", f"Command: `{command}`", ""]
    lines += ["| claim | outcome | ours | margin | published | predicted |", "|---|---|---|---|---|---|"]
    for one in rows:
        source, side = one.entry.claim.source, "above" if one.entry.direction > 0 else "below"
        margin = f"{side} {one.entry.margin:g}" if one.entry.claim.figure else "more seeds"
        cells = [one.entry.claim.sentence, one.outcome, told(one), margin, source.published or ""]
        lines.append("| " + " | ".join([*cells, one.entry.claim.prediction.outcome]) + " |")
    lines.append("")
    for one in rows:
        source = one.entry.claim.source
        lines += [f"## {one.entry.id}", "", f"{one.entry.claim.sentence} **{one.outcome}**: {told(one)}.", ""]
        lines += [f"Source ({source.read}): {source.paper}, {source.where}: {source.says}", ""]
        lines += [f"Predicted {one.entry.claim.prediction.outcome}: {one.entry.claim.prediction.why}", ""]
        lines += [f"Test: `{one.entry.claim.figure or _asked(one)}`; `posbench reproduce {one.entry.id}`", ""]
    return "\n".join(lines)


def _asked(one: Finding) -> str:
    asked = one.entry.claim.learned
    assert asked is not None
    return f"{asked.more} answers {asked.right:.0%} right at {asked.at:g}x in more seeds than {asked.than}"


def told(one: Finding) -> str:
    """The figure behind an outcome, or why there is none."""
    if one.interval is not None:
        seeds = f"{one.interval.seeds} seeds"
        return f"{one.interval.mean:+.3f} ({one.interval.low:+.3f} to {one.interval.high:+.3f}, {seeds})"
    if one.shares is not None:
        (more, of), (than, of_than) = one.shares
        return f"{more} of {of} against {than} of {of_than} seeds"
    return one.why


def summary(findings: Sequence[Finding]) -> str:
    """How many claims have each outcome, and how many were predicted."""
    counted = Counter(one.outcome for one in findings)
    said = ", ".join(f"{counted[name]} {name}" for name in _ORDER if counted[name])
    tested = [one for one in findings if one.p is not None]
    right = sum(one.entry.claim.prediction.outcome == one.outcome for one in tested)
    return f"{_claims(findings)}: {said}." + (f" {right} of {len(tested)} as predicted." if tested else "")


def _claims(found: Sequence[object]) -> str:
    return "1 claim" if len(found) == 1 else f"{len(found)} claims"
