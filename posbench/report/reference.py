"""`posbench report --with`: kept rows beside a user's runs, where the two may be compared.

What must be equal is what must be equal within one study: text, tokenizer, model, budget, and the tokens that are
scored. What differs is said in one line. Kept rows add schemes, and no seeds to a scheme of the user's own.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posbench import files
from posbench.report.comparison import load
from posbench.report.comparison.load import RunData
from posbench.run_folder import archive
from posbench.run_folder.rows import newest_of_split

REFERENCE = "reference"  # all archives of docs/rows
_MOST_REASONS = 3
Scored = set[tuple[str | None, str | None]]


def beside(runs: Sequence[RunData], wanted: str) -> tuple[list[RunData], list[str]]:
    """Runs of archives that may be compared with these, and a line on each archive.

    Args:
        wanted: `reference`, or the path of an archive.

    Raises:
        UserError: this posbench has no kept rows, or an archive cannot be read.
    """
    own, settings = [_scheme(run) for run in runs], [(_compared(run), _scored(run)) for run in runs if run.done]
    found: list[RunData] = []
    lines = []
    for path in archive.kept() if wanted == REFERENCE else [Path(wanted)]:
        kept = [run for run in map(load.described, archive.unpack(path, files.until_exit())) if run.done]
        reasons = {run.folder: _reason(run, settings) for run in kept}
        alike = [run for run in kept if not reasons[run.folder]]
        again = {run.folder for run in load.repeated([*found, *alike])}
        taken = [run for run in alike if run.folder not in again and _scheme(run) not in own]
        found += taken
        told = [f"{len(taken)} of {len(kept)} runs are beside these"] if taken else []
        told += [f"{left} left out, since their schemes are here"] if (left := len(alike) - len(taken)) else []
        told += [f"{n} left out, since {why}" for why, n in Counter(filter(None, reasons.values())).items()]
        lines.append(f"Kept rows {path.name}: {'; '.join(told)}")
    return found, lines


def _reason(kept: RunData, settings: Sequence[tuple[dict[str, Any], Scored]]) -> str:
    """Why a kept run stands beside none of the others, say in what it differs from them; empty if it may."""
    if not settings:
        return "none of these runs is done"
    there = _compared(kept)
    here = min((one for one, _ in settings), key=lambda one: len(load.differing([there, one])))
    keys = load.differing([there, here])
    told = [f"{key} is {load.spelt(there.get(key))} there and {load.spelt(here.get(key))} here" for key in keys]
    if len(told) > _MOST_REASONS:
        told[_MOST_REASONS:] = [f"{len(told) - _MOST_REASONS} more settings differ"]
    if not told and not any(_scored(kept) & scored for one, scored in settings if one == there):
        return "other tokens are scored here, or in another precision"
    return ", ".join(told)


def _scheme(run: RunData) -> tuple[str, dict[str, Any]]:
    return run.name, load.scheme_options(run)


def _compared(run: RunData) -> dict[str, Any]:
    return load.compared(run) | {"block": run.record.get("block") or 1}


def _scored(run: RunData) -> Scored:
    """The digests of what is scored at the training length, each with its precision."""
    rows = newest_of_split(run.rows, run.split)
    return {(row.targets_sha256, row.dtype) for row in rows if row.is_headline and row.length_ratio == 1}
