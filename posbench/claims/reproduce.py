"""`posbench reproduce`: make the runs that claims need, judge them, and write down what
was found.

Claims share runs, and all runs lie in one study.
"""

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from posbench import files
from posbench.claims import claim
from posbench.claims.claim import Entry
from posbench.claims.judge import judge
from posbench.config.overrides import split
from posbench.errors import UserError
from posbench.launch import compose, plans
from posbench.launch.plans import Plan
from posbench.reports.render import Column, Table
from posbench.results import frame as frames
from posbench.terminal import console
from posbench.terminal.console import plural

STUDY = "ledger"
# The size and the optimizer of the kept runs.
RECIPE = ("experiment=reader", "training.optimizer=adamw")
FILE = "claims.csv"  # in the study's folder
OUTCOMES = [  # as a table shows them
    "not reproduced",
    "reproduced",
    "contradicted",
    "supported",
    "open",
    "not learned",
    "not run",
]
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
        n_jobs: runs at a time; None = one per CPU core, or one per GPU (four of a
            small model).
        config_dir: a folder of further YAML files.
        dry_run: run and write nothing; print what it would take.

    Raises:
        UserError: no such claim, or a mistake in a claim or an override; nothing was
            run.
        PosbenchError: some runs failed; the others are done and the claims are judged
            by them.
    """
    overrides = [word for word in words if "=" in word]
    others = [word for word in words if "=" not in word]
    studies = [Path(word) for word in others if word.endswith(frames.SUFFIX)]
    names = [word for word in others if not word.endswith(frames.SUFFIX)]
    if not names:
        raise UserError(
            "which claims? posbench reproduce all, or names from 'posbench list claims'"
        )
    entries = claim.read(names, config_dir)
    plans_of = plans_of_claims(entries, overrides, config_dir)

    # only now: they import torch, which a mistake in typing need not wait for
    from posbench.launch import cost, pool, slots

    plan_of: dict[str, Plan] = {}  # several claims may need one
    for runs in plans_of.values():
        for plan in itertools.chain(*runs.values()):
            plan_of[plan.id] = plan
    every_plan = list(plan_of.values())

    kept_ids: set[str] = set()
    if studies:
        kept_ids = set(frames.read(studies)["run"])
    todo = [plan for plan in every_plan if plan.id not in kept_ids]
    console.log_to_terminal()
    if dry_run:
        print(cost.cost(todo))
        return

    status = slots.execute(todo, n_jobs) if todo else {}
    rows = frames.read([*studies, *pool.begun(todo)])
    findings = judge_claims(entries, plans_of, rows, config_dir)
    table(findings).print(console.stdout())
    path = every_plan[0].folder.parent / FILE
    files.write(path, findings.to_csv(index=False).encode())
    print(f"Sources and numbers: {path}")
    pool.raise_unfinished(todo, status)


def plans_of_claims(
    entries: Sequence[Entry], overrides: list[str], config_dir: Path | None = None
) -> Needed:
    """Return the plans of the claims' runs, with the seeds that each claim needs. A
    claim's own overrides win.
    """
    by_text: dict[str, list[Plan]] = {}
    plans_of: Needed = {}
    read = set[str]()  # words that some run has
    for entry in entries:
        plans_of[entry.id] = {}
        for name, text in entry.runs.items():
            if text not in by_text:
                words = shlex.split(text)
                taken = {"seed", *(split(word)[0] for word in words)}
                for word in (*overrides, *RECIPE, f"study={STUDY}"):
                    key, _ = split(word)
                    if key not in taken:
                        words.append(word)
                        taken.add(key)
                read |= {"=".join(split(word)) for word in words}
                first = compose.single(words, config_dir)
                by_text[text] = []
                for seed in claim.FRESH_SEEDS:  # without Hydra, which is slow
                    config = dataclasses.replace(first, seed=seed)
                    with_seed = [*words, f"seed={seed}"]
                    plan = plans.from_config(config, with_seed, config_dir)
                    by_text[text].append(plan)
            plans_of[entry.id][name] = by_text[text][: entry.seeds]
            measured = plans_of[entry.id][name][0].config.evaluation.ratios
            for ratio in sorted(entry.ratios_of(name) - {*measured}):
                lengths = ", ".join(f"{each:g}x" for each in measured)
                raise UserError(
                    f"claim '{entry.id}' asks for {name} at {ratio:g}x: expected one of"
                    f" its evaluation.ratios, {lengths}"
                )

    for override in overrides:
        typed = "=".join(split(override))
        if typed not in read:
            raise UserError(
                f"{typed} has no effect: each of these claims sets its own value"
            )
    return plans_of


def judge_claims(
    entries: Sequence[Entry],
    plans_of: Needed,
    rows: pd.DataFrame,
    config_dir: Path | None = None,
) -> pd.DataFrame:
    """Judge claims by the rows of their runs, which `results.frame.read` returns."""
    # a run may be in two studies: the first counts
    rows = rows[rows["folder"].isin(rows.drop_duplicates("run")["folder"])]

    asked = []
    for entry in entries:
        runs = {}
        for name, seeds in plans_of[entry.id].items():
            ids = [plan.id for plan in seeds]
            runs[name] = rows[rows["run"].isin(ids)]
        asked.append((entry, runs))
    registered = claim.read(["all"], config_dir)
    tested = [entry for entry in registered if not entry.is_published]
    return judge(asked, len(tested))


def table(findings: pd.DataFrame) -> Table:
    """Return findings as a table, in the order of `OUTCOMES`."""
    places = findings["outcome"].map(OUTCOMES.index)
    ordered = findings.loc[places.sort_values(kind="stable").index]
    columns = [Column(name, name, text=True) for name in ("claim", "outcome", "ours")]
    columns.append(Column("published", "published", spare=1, text=True))
    columns.append(Column("predicted", "predicted", spare=2, text=True))
    n_each = findings["outcome"].value_counts()
    counts = ", ".join(f"{count} {outcome}" for outcome, count in n_each.items())
    return Table("", ordered, columns, f"{plural(len(findings), 'claim')}: {counts}")
