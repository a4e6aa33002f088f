"""`posbench reproduce`: make the runs that claims need, judge them, and write down what
was found.

Claims share runs, and all runs lie in one study. Seeds 5 to 14 were never used to make
a prediction.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from posbench import files
from posbench.claims import claim
from posbench.claims.claim import Entry
from posbench.claims.judge import judge
from posbench.config.overrides import split
from posbench.errors import PosbenchError, UserError
from posbench.launch import plans, sweep
from posbench.launch.plans import Plan
from posbench.reports.render import Column, Table
from posbench.results import frame as frames
from posbench.terminal import console
from posbench.terminal.exits import plural

SEEDS = range(5, 15)
STUDY, EXPERIMENT = "ledger", "reader"
FILE = "claims.csv"  # in the study's folder
# the plans of all seeds, by the name of a claim and of a run in it
Needed = dict[str, dict[str, list[Plan]]]


def reproduce(
    words: list[str],
    n_jobs: int | None = None,
    config_dir: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Test claims on fresh seeds.

    Args:
        words: names of claims, or `all`; overrides for all runs, such as
            `experiment=demo study=ledger_demo`; and files of kept studies
            (`*.parquet`), whose runs are neither trained nor evaluated again.
        n_jobs: processes at a time; None = one per CPU core or GPU.
        config_dir: a folder of further YAML files.
        dry_run: run and write nothing; print what it would take.

    Raises:
        UserError: no such claim, or a mistake in a claim or an override; nothing was
            run.
        PosbenchError: some runs failed; the others are done and the claims are judged
            by them.
    """
    overrides = [*{split(word)[0]: word for word in words if "=" in word}.values()]
    studies = [
        Path(word) for word in words if word.endswith(frames.SUFFIX) and "=" not in word
    ]
    names = [word for word in words if "=" not in word and Path(word) not in studies]
    if not names:
        raise UserError(
            "which claims? posbench reproduce all, or names from 'posbench list claims'"
        )
    entries = claim.read(names, config_dir)
    plans_of = plans_of_claims(entries, overrides, config_dir)
    study_rows = frames.read(studies) if studies else None
    # each run once
    by_id = {
        plan.id: plan
        for runs in plans_of.values()
        for jobs in runs.values()
        for plan in jobs
    }
    todo = [
        plan
        for name, plan in by_id.items()
        if study_rows is None or name not in set(study_rows["run"])
    ]
    console.log_to_terminal()
    if dry_run:
        print(sweep.cost(todo))
        return
    status = sweep.execute(todo, n_jobs) if todo else {}
    findings = judge_claims(entries, plans_of, study_rows)
    table(findings).print(console.stdout())
    path = next(iter(by_id.values())).folder.parent / FILE
    files.write(path, findings.to_csv(index=False).encode())
    print(f"Sources and numbers: {path}")
    if failed := [name for name, state in status.items() if state.name != "done"]:
        raise PosbenchError(
            f"{len(failed)} of {len(status)} runs not done: {', '.join(failed)}"
        )


def plans_of_claims(
    entries: Sequence[Entry], overrides: list[str], config_dir: Path | None = None
) -> Needed:
    """Return the plans of the claims' runs, with the seeds that each claim needs. A
    claim's own overrides win.
    """
    by_text: dict[str, list[Plan]] = {}
    for text in {text: None for entry in entries for text in entry.runs.values()}:
        words = shlex.split(text)
        for override in (*overrides, f"experiment={EXPERIMENT}", f"study={STUDY}"):
            words += (
                [override]
                if split(override)[0]
                not in {"seed", *(split(word)[0] for word in words)}
                else []
            )
        resolved = plans.resolve([[*words, f"seed={SEEDS[0]}"]], config_dir)
        if len(resolved) != 1:
            raise UserError(
                f"{shlex.join(words)}: expected one value each: a claim's runs differ"
                " in the seed only"
            )
        by_text[text] = [resolved[0].changed("seed", seed) for seed in SEEDS]
    typed = {"=".join(split(word)) for word in overrides}
    if unread := typed.difference(*(seeds[0].command for seeds in by_text.values())):
        raise UserError(
            f"{min(unread)} has no effect: each of these claims sets its own value"
        )
    return {
        entry.id: {
            name: by_text[text][: entry.seeds] for name, text in entry.runs.items()
        }
        for entry in entries
    }


def judge_claims(
    entries: Sequence[Entry], plans_of: Needed, study_rows: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Judge claims by the rows of kept studies, and by the folders of runs that are not
    among them.
    """
    folders = {
        plan.folder
        for runs in plans_of.values()
        for jobs in runs.values()
        for plan in jobs
    }
    of_studies = set() if study_rows is None else {*study_rows["run"]}
    trained = [
        folder
        for folder in folders
        if folder.name not in of_studies and (folder / "run.json").is_file()
    ]
    # None is left out
    rows = pd.concat(
        [study_rows, frames.read(trained) if trained else None], ignore_index=True
    )
    # two studies may share a run
    rows = rows[rows["folder"].isin(rows.drop_duplicates("run")["folder"])]
    return judge(
        [
            (
                entry,
                {
                    name: rows[rows["run"].isin([plan.id for plan in jobs])]
                    for name, jobs in plans_of[entry.id].items()
                },
            )
            for entry in entries
        ]
    )


def table(findings: pd.DataFrame) -> Table:
    """Return findings as a table: published numbers, then claims, the contradicted ones
    first.
    """
    outcomes = [
        "not reproduced",
        "reproduced",
        "contradicted",
        "supported",
        "open",
        "not learned",
        "not run",
    ]
    ordered = findings.sort_values(
        "outcome", key=lambda column: column.map(outcomes.index), kind="stable"
    )
    names = ("claim", "outcome", "ours", "published", "predicted")
    columns = [
        Column(
            name, name, spare={"published": 1, "predicted": 2}.get(name, 0), text=True
        )
        for name in names
    ]
    counts = ", ".join(
        f"{count} {outcome}"
        for outcome, count in findings["outcome"].value_counts().items()
    )
    return Table("", ordered, columns, f"{plural(len(findings), 'claim')}: {counts}")
