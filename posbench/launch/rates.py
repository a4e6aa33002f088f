"""Records of learning rates: tuned once, reused by `rates=NAME`, kept where the report finds them.

A study's `tuning.json` says what was tried of each encoding. `rates.yaml` says the same in a form to be copied: as
`configs/rates/NAME.yaml`, or `rates/NAME.yaml` in a --config-dir folder, it is a choice of every sweep. Such a file may
come from a stranger: it is plain data, and of a learning rate only a number above 0 is taken.
"""

import json
import logging
from pathlib import Path
from typing import Any

import yaml

from posbench import files
from posbench.config import plain_yaml
from posbench.config.overrides import parted
from posbench.config.shipped import chosen
from posbench.errors import UserError
from posbench.launch import plans
from posbench.launch.plans import Plan
from posbench.report.comparison.load import listed
from posbench.report.comparison.rates import RECORD, at_rate, trials, tried
from posbench.run_folder.jsonl import number
from posbench.run_folder.redaction import redact
from posbench.terminal.exits import one_line

logger = logging.getLogger(__name__)

REUSABLE = "rates.yaml"
_KEY = "training.learning_rate"
_CHOSEN_BY = "nll per token on validation text at the training length (nonoverlap), seed 0"


def reused(todo: list[Plan], name: str, config_dir: Path | None = None) -> list[Plan]:
    """The jobs of a sweep at the learning rates recorded for their encodings; `record` writes where they are from.

    Raises:
        UserError: no such record, a file of another form, an encoding that it lacks, or a learning rate given as well.
    """
    if any(parted(override)[0] == _KEY for job in todo for override in job.overrides):
        raise UserError(f"rates={name} gives learning rates, and so does {_KEY}: leave one of them out")
    used = _used(todo, name, config_dir)
    if others := dict.fromkeys(job.config.encoding.name for job in todo if not tried(job.config, [used[job.id]])):
        logger.warning("rates=%s was tuned at other settings than these, for %s", name, ", ".join(others))
    return applied([(job, used[job.id]["chosen"]) for job in todo])


def record(todo: list[Plan], name: str, config_dir: Path | None = None) -> None:
    """Write the rates tuned at the jobs' own settings into each study's `tuning.json`, as if it had tuned them.

    Raises:
        UserError: as `reused`.
    """
    used = _used(todo, name, config_dir)
    for study, own in plans.by_study(job for job in todo if tried(job.config, [used[job.id]])).items():
        write(study, list({id(used[job.id]): used[job.id] for job in own}.values()))


def applied(rates: list[tuple[Plan, float]]) -> list[Plan]:
    """Each job at its learning rate, as the single run `posbench train ... training.learning_rate=...` would be."""
    return [
        job.at(
            at_rate(job.config, rate),
            [*(override for override in job.overrides if parted(override)[0] != _KEY), f"{_KEY}={rate!r}"],
            job.folder.parent,
        )
        for job, rate in rates
    ]


def _used(todo: list[Plan], name: str, config_dir: Path | None) -> dict[str, dict[str, Any]]:
    """The record's row that each job takes, by the job's id."""
    rows = _read(chosen("rates", name, config_dir))
    return {job.id: _row(job, rows, name) for job in todo}


def _row(job: Plan, rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Of an encoding's rows the one tuned at the job's settings, else one with its options, else any."""
    encoding = job.config.encoding
    own = [row for row in rows if row["encoding"] == encoding.name]
    if not own:
        known = ", ".join(sorted({row["encoding"] for row in rows}))
        raise UserError(
            f"rates={name} has no learning rate of '{encoding.name}' (it has {known}): tune=true finds those of a sweep"
        )
    return min(own, key=lambda row: (not tried(job.config, [row]), row.get("options") != encoding.options))


def _read(path: Path) -> list[dict[str, Any]]:
    content = plain_yaml.load(path)
    rows = content.get("schemes") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path} has no learning rates: expected 'schemes', as a sweep with tune=true writes them")
    for place, row in enumerate(rows, start=1):
        rate = number(row.get("chosen")) if isinstance(row, dict) and isinstance(row.get("encoding"), str) else None
        if rate is None or rate <= 0:
            raise UserError(f"{path}: expected of scheme {place} its 'encoding' and a 'chosen' learning rate above 0")
    return [{**row, "chosen": float(row["chosen"])} for row in rows]


# -- the record --------------------------------------------------------------------------------------------------------


def write(study: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into a study's `tuning.json`, in the place of those that share a trial with them."""
    path, own = study / RECORD, _ids(rows)
    earlier = [row for row in listed(path, "schemes") if not own & _ids([row])]
    study.mkdir(parents=True, exist_ok=True)
    content = {"schema": 1, "chosen_by": _CHOSEN_BY, "schemes": [*earlier, *rows]}
    files.write(path, json.dumps(content, indent=2).encode() + b"\n")


def _ids(rows: list[dict[str, Any]]) -> set[str]:
    return {str(trial.get("id")) for row in rows for trial in trials(row)}


def write_reusable(study: Path, command: str) -> None:
    """Write a study's learning rates as a YAML that a user can copy, and log where."""
    path = study / REUSABLE
    head = (
        f"# Learning rates, of each encoding the best of those tried: {_CHOSEN_BY}.\n"
        f"# Written by: {one_line(redact(command))}\n"
        "# As rates/NAME.yaml in configs/ or in a --config-dir folder, 'posbench sweep ... rates=NAME' uses it.\n"
    )
    content = {"schemes": listed(study / RECORD, "schemes")}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
    files.write(path, (head + text).encode("utf-8", "backslashreplace"))
    logger.info("%s: as rates/NAME.yaml in configs/ or in a --config-dir folder, rates=NAME uses it again", path)
