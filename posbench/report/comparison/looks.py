"""Looks: which seeds earlier reports drew verdicts from. Adding seeds until a verdict pleases would find one by luck.

A report writes `looks.json` beside its files. A later report on the same scheme with other seeds is another look, and
its words go by the smaller level that earlier looks left (`claims.level`). A report on the same seeds is no new look.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from posbench import files
from posbench.report.comparison import race
from posbench.report.comparison.load import Group, Scheme, listed
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.terminal.exits import spelt_out

NAME = "looks.json"


@dataclasses.dataclass(frozen=True)
class Look:
    """The runs that a report drew the words on one scheme from."""

    scheme: str
    against: str  # the reference; empty without one
    runs: tuple[str, ...]  # names of folders


def of(scheme: Scheme, reference: Scheme | None) -> Look:
    runs = tuple(sorted(run.folder.name for run in scheme.by_seed.values()))
    return Look(scheme.label, reference.label if reference else "", runs)


def at(group: Group) -> list[Look]:
    """The looks of a report on a group: schemes with seeds enough for a verdict that are in no race."""
    raced = {label for one in race.of(group) for label in one.runs}
    found = [of(scheme, group.reference) for scheme in group.schemes if scheme.label not in raced]
    return [look for look in found if len(look.runs) >= SEEDS_FOR_A_CLAIM]


def number(look: Look, earlier: Sequence[Look]) -> int:
    """1 for the first look at these runs, 2 for the first with other seeds, and so on.

    The reference goes by its name: its label gets options as soon as the folder has a variant of it.
    """
    same = [one for one in earlier if _name(one) == _name(look) and set(one.runs) & set(look.runs)]
    distinct = list(dict.fromkeys(one.runs for one in same))
    return 1 + (distinct.index(look.runs) if look.runs in distinct else len(distinct))


def _name(look: Look) -> str:
    """The name of the encoding in the reference's label."""
    return look.against.partition(" ")[0]


def read(path: Path) -> list[Look]:
    """The looks of earlier reports; none if the file is missing or is not ours."""
    found = []
    for row in listed(path, "looks"):
        runs = row.get("runs")
        if isinstance(runs, list) and all(isinstance(run, str) for run in runs):
            found.append(Look(str(row.get("scheme")), str(row.get("against")), tuple(runs)))
    return found


def write(path: Path, looks: Sequence[Look]) -> None:
    rows = [dataclasses.asdict(one) | {"scheme": spelt_out(one.scheme)} for one in dict.fromkeys(looks)]
    files.write(path, json.dumps({"schema": 1, "looks": rows}, indent=2).encode() + b"\n")
