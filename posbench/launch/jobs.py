"""The jobs of a sweep: each has a set of overrides, a saved configuration and a run folder."""

import dataclasses
import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from posbench import files
from posbench.config import compose, plain_yaml
from posbench.config.data_only import refuse_elsewhere_typed
from posbench.config.identity import run_folder
from posbench.config.overrides import full_key, refuse_twice
from posbench.config.schema import Config, to_container
from posbench.config.shipped import chosen
from posbench.config.users_files import refuse_all_but_settings
from posbench.errors import UserError, did_you_mean
from posbench.evaluation.answers import PROTOCOL, TRAINED, place_of
from posbench.evaluation.check import check
from posbench.run_folder.folder import load_config, load_record, refuse_secrets
from posbench.run_folder.jsonl import number
from posbench.run_folder.rows import PLAIN, EvaluationRow, evaluation_rows

FINAL = ("done", "failed", "stopped")
_TAIL_BYTES = 4096  # of metrics.jsonl; holds several rows


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    overrides: tuple[str, ...]  # on top of the defaults, as `posbench train` takes them
    config: Config
    saved: Path  # .../.jobs/<run id>.yaml

    @property
    def id(self) -> str:
        return self.saved.stem

    @property
    def folder(self) -> Path:
        """The run folder: beside `.jobs`."""
        return self.saved.parent.parent / self.id

    @property
    def output(self) -> Path:
        """What the job's process prints."""
        return self.saved.with_suffix(".log")

    def with_threads(self, threads: int) -> "Job":
        """This job with so many CPU threads, unless its configuration sets them."""
        if self.config.runtime.threads is not None:
            return self
        runtime = dataclasses.replace(self.config.runtime, threads=threads)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, runtime=runtime))


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a job."""

    name: str  # waiting, in use, running, done, failed, stopped
    reason: str | None = None  # as in run.json
    message: str | None = None


WAITING, IN_USE, RUNNING = Status("waiting"), Status("in use"), Status("running")


def job_of(overrides: Iterable[str], config: Config, folder: Path | None = None) -> Job:
    """The job of a configuration, with its run in the study's folder unless another is given."""
    found = run_folder(config, folder)
    return Job(tuple(overrides), config, found.parent / ".jobs" / f"{found.name}.yaml")


def expand(sets: list[list[str]], config_dir: Path | None = None) -> list[Job]:
    """The jobs of all combinations of all sets, each run once however often it is named.

    Raises:
        UserError: the first mistake found, in one line.
    """
    found: dict[str, Job] = {}
    for overrides, config in compose.combinations(sets, config_dir):
        refuse_secrets(config)  # before it is saved
        check(config)
        new = job_of(overrides, config)
        known = found.setdefault(new.id, new)
        if known.folder != new.folder:
            raise UserError(f"{known.folder} and {new.folder} are one run: a sweep keeps each in one folder")
    return list(found.values())


def by_study(todo: Iterable[Job]) -> dict[Path, list[Job]]:
    """Jobs by the folder that their study's runs share."""
    found: dict[Path, list[Job]] = {}
    for job in todo:
        found.setdefault(job.folder.parent, []).append(job)
    return found


# -- sweep files -------------------------------------------------------------------------------------------------------


def read_sets(name: str | None, overrides: list[str], config_dir: Path | None = None) -> list[list[str]]:
    """The sets of overrides that `sweep=name` and the command line ask for together.

    A sweep file holds `sets`, a list of override sets, and `shared`, a list of overrides for all of them. The command
    line takes the place of what is shared under the same key, and adds to the rest.

    Raises:
        UserError: no such sweep, a file of another form, or an override of what the sets themselves choose.
    """
    if name is None:
        return [overrides]
    if config_dir:
        refuse_all_but_settings(config_dir)
    path = chosen("sweep", name, config_dir)
    sets, shared = _parts(path)
    for one in sets:
        refuse_twice((_key(override) for override in [*shared, *one]), f"{path}: ")
    given = {_key(override) for override in overrides}
    for one in sets:
        for clash in (override for override in one if _key(override) in given):
            raise UserError(
                f"sweep={name} has its own '{clash}': leave {_key(clash)} out, or copy {path} and change it"
            )
    for override in (override for one in [*sets, shared] for override in one if _key(override).startswith("hydra")):
        raise UserError(f"{path} has '{override}': Hydra's own part is set on the command line only")
    for override in (override for one in [*sets, shared] for override in one):
        refuse_elsewhere_typed(override, _key(override), path)
    kept = [override for override in shared if _key(override) not in given]
    return [[*kept, *overrides, *one] for one in sets]


def _parts(path: Path) -> tuple[list[list[str]], list[str]]:
    content = plain_yaml.load(path)
    if not isinstance(content, dict) or not content.get("sets"):
        raise UserError(f"{path} is not a sweep: expected 'sets', a list such as '- encoding=rope,alibi'")
    for key in content.keys() - {"sets", "shared"}:
        raise UserError(f"{path}: unknown key '{key}'{did_you_mean(key, ('sets', 'shared'))} (sets, shared)")
    lines = {key: content.get(key) or [] for key in ("sets", "shared")}
    for key, value in lines.items():
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            raise UserError(f"{path}: {key} is {value!r}: expected a list such as '- encoding=rope,alibi'")
    try:
        sets = [shlex.split(line) for line in lines["sets"]]
        return sets, [override for line in lines["shared"] for override in shlex.split(line)]
    except ValueError as error:  # a quotation mark without its partner
        raise UserError(f"{path}: {str(error).lower()}") from None


def _key(override: str) -> str:
    return full_key(override.partition("=")[0].lstrip("+~"))


# -- what the run folders say ------------------------------------------------------------------------------------------


def save(job: Job) -> None:
    """Write the job's configuration where its process reads it."""
    files.refuse_unusual(job.saved.parent)
    job.saved.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(to_container(job.config), sort_keys=False, allow_unicode=True)
    files.write(job.saved, text.encode())


def record(job: Job) -> dict[str, Any]:
    """The job's `run.json`; empty if it is missing or cannot be read."""
    try:
        return load_record(job.folder)
    except UserError:
        return {}


def status(job: Job) -> Status:
    """The status in `run.json`, whether or not the process that wrote it is alive."""
    found = record(job)
    why = (None if value is None else str(value) for value in map(found.get, ("reason", "message")))
    return Status(str(found.get("status", "waiting")), *why)


def is_finished(job: Job) -> bool:
    """Whether nothing is left to do. If evaluation settings changed, the run decides what is missing."""
    try:
        held = load_config(job.folder)
    except UserError:
        return False
    return record(job).get("status") == "done" and held.evaluation == job.config.evaluation


def progress(job: Job) -> tuple[int, float | None]:
    """Updates made and the newest training loss in nats per token, from the end of `metrics.jsonl`."""
    try:
        with files.open_itself(job.folder / "metrics.jsonl") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0, None
    for line in reversed(lines):
        try:
            row = json.loads(line)
            return int(row["step"]), number(row["train/loss"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # a validation row, or one cut short by where the tail begins
    return 0, None


def total_steps(job: Job) -> int:
    return job.config.training.steps


def nll_in_distribution(job: Job) -> float | None:
    """Nll in nats per token at the training length, by the first protocol asked for; None if there is none."""
    row = in_distribution(job)
    return None if row is None else row.nll


def in_distribution(job: Job) -> EvaluationRow | None:
    """The row at the training length, or at the longest trained problems of a task; None if there is none."""
    settings = job.config.evaluation
    try:
        rows = evaluation_rows(job.folder)
    except UserError:
        return None
    own = [row for row in rows if row.measured and row.kind == PLAIN and row.split == settings.split]
    if job.config.data.task is not None:
        return next((row for row in own if row.protocol == PROTOCOL and place_of(row) == TRAINED), None)
    wanted = (settings.protocols[0], job.config.training.train_length, None)
    return next((row for row in own if (row.protocol, row.length, row.task) == wanted), None)
