"""The mirror of a run at Weights & Biases or in TensorBoard: row n of `rows.jsonl` is
step n of the W&B run.

A session therefore first sends the rows that W&B lacks. Curves of different encodings
overlay, because training rows have `tokens` as their axis and evaluation rows
`eval/context`.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from posbench.config.schema import Config, load_saved, to_container
from posbench.errors import PosbenchError, UserError
from posbench.run import CONFIG
from posbench.run.rows import PAIRED, EvaluationRow, number
from posbench.run.run import Run

logger = logging.getLogger(__name__)
CONTEXT = "eval/context"  # tokens: the axis of evaluation rows
_VALUES = {"nll": "loss"} | {
    name: name for name in ("accuracy", "exact_match", "ci_low", "ci_high")
}
_AXES = ("tokens", "step", "seconds", CONTEXT)
# curves with a panel; the others can be added to one
_SHOWN = ("eval/loss", "eval/accuracy")
# a run's headline, and a function to draw it
ResultsOf = Callable[[Path], tuple[Mapping[str, Any], Callable[[], Any]]]


class Tracker:
    """The mirror of a run. A failure is a warning: `rows.jsonl` has the numbers, and a
    later session sends them.
    """

    def __init__(self, config: Config, run: Run, results_of: ResultsOf) -> None:
        self._config, self._run, self._results_of = config, run, results_of
        self._targets: dict[Any, str | None] = {}
        self._defined, self._seen = set[str](), 0
        self.session: Any = None  # W&B's run, or an object with its methods

    def send(self) -> None:
        """Send the rows that the session lacks. The first call opens the session."""
        with self._failure_as_warning():
            if self.session is None:
                open_session = (
                    EventFiles
                    if self._config.tracking.backend == "tensorboard"
                    else wandb_session
                )
                self.session = open_session(self._config, self._run)
            for row in self._run.rows[self._seen :]:
                values = row_values(row, self._config, self._targets)
                for name in [
                    name for name in (*_AXES, *values) if name not in self._defined
                ]:
                    axis = (
                        None
                        if name in _AXES
                        else CONTEXT
                        if name.startswith("eval/")
                        else "tokens"
                    )
                    summary, hidden = (
                        None if axis == "tokens" else "none",
                        axis != "tokens" and name not in _SHOWN,
                    )
                    self.session.define_metric(
                        name, step_metric=axis, summary=summary, hidden=hidden
                    )
                    self._defined.add(name)
                if self._seen >= self.session.starting_step:
                    self.session.log(values, step=self._seen)
                self._seen += 1

    def finish(self) -> None:
        """Send the run's results, and wait for that a limited time."""
        if self.session is None:
            return
        with self._failure_as_warning():
            record, (results, draw) = (
                self._run.record,
                self._results_of(self._run.folder),
            )
            facts = {
                "status": record["status"],
                "reason": record["reason"] or "",  # W&B would keep an earlier one
                "data/name": self._config.data.name,
                "data/sha256": (record["data"] or {}).get("sha256"),
                **{
                    f"parameters/{part}": count
                    for part, count in record["parameters"].items()
                },
                **results,
            }
            self.session.summary.update(
                {
                    name.replace(".", "_"): f
                    for name, f in facts.items()
                    if f is not None
                }
            )
            if not isinstance(self.session, EventFiles) and any(
                "protocol" in row for row in self._run.rows
            ):
                import wandb

                draw().savefig(
                    picture := Path(self.session.settings.sync_dir, "curve.png")
                )
                self.session.log(
                    {"curve": wandb.Image(str(picture))}, step=len(self._run.rows) - 1
                )
            self.session.finish(
                exit_code={"done": 0, "stopped": 255}.get(record["status"], 1)
            )

    @contextlib.contextmanager
    def _failure_as_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning(
                "tracking: %s: the run goes on without it, 'posbench sync' sends it"
                " later",
                reason,
            )
            self.session = self._run.tracker = None


def mirror(config: Config, run: Run, results_of: ResultsOf) -> None:
    """Give a run its tracker, if its configuration and the environment ask for one."""
    at_wandb = (
        config.tracking.backend == "wandb"
        and os.environ.get("WANDB_MODE") != "disabled"
    )
    if at_wandb or config.tracking.backend == "tensorboard":
        run.tracker = Tracker(config, run, results_of)


def row_values(
    line: Mapping[str, Any], config: Config, targets: dict[Any, str | None]
) -> dict[str, Any]:
    """Return a row's numbers by name. Rows on a curve's first targets, which `targets`
    keeps, have its plain name.
    """
    if "protocol" not in line:
        return {
            name: value for name, value in line.items() if number(value) is not None
        }
    row = EvaluationRow.from_json(line)
    curve_key, digest = (
        (row.split, row.checkpoint_step, row.protocol),
        row.targets_sha256,
    )
    if row.measured and row.protocol in PAIRED:
        digest = targets.setdefault(curve_key, digest)
    names = [
        f"{row.split} text" if row.split != config.evaluation.split else None,
        (
            f"{row.tokens} tokens"
            if row.tokens is not None and row.checkpoint_step < config.training.steps
            else None
        ),
        (
            row.curve_name
            if row.curve_name
            not in (
                "fixed_target",
                f"problems_{str(row.task).split(':')[0]}",
            )
            else None
        ),
        (
            f"targets {str(row.targets_sha256)[:6]}"
            if row.targets_sha256 != digest
            else None
        ),
    ]
    curve = "/".join(["eval", *filter(None, names)])
    values = {
        f"{curve}/{name}": number(line.get(column))
        for column, name in _VALUES.items()
        if row.status == "ok"
    }
    return {CONTEXT: row.length} | {
        name: value for name, value in values.items() if value is not None
    }


class EventFiles:
    """Event files for TensorBoard in the run folder, with W&B's methods: all rows,
    written anew by each session.
    """

    starting_step = 0

    def __init__(self, config: Config, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run.folder / "tensorboard", ignore_errors=True)
        self._writer, self.summary = (
            SummaryWriter(str(run.folder / "tensorboard")),
            dict[str, Any](),
        )

    def define_metric(self, *_: Any, **axis: Any) -> None: ...

    def log(self, values: Mapping[str, Any], step: int) -> None:
        for name, scalar in values.items():
            if "/" in name and name != CONTEXT:
                self._writer.add_scalar(
                    name, scalar, values.get(CONTEXT, values.get("tokens"))
                )
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


def wandb_session(config: Config, run: Run) -> Any:
    """Open a run's session at W&B, in the place that the environment names, else where
    it was before.
    """
    import wandb

    tracking, online = config.tracking, is_online(config.tracking.mode)
    # each offline session has the whole run: an older one would send it twice
    if not online:
        for earlier in run.folder.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier)
    recorded = run.record["wandb"] or {"id": f"{run.id}-{secrets.token_hex(4)}"}
    place: Any = {"id": os.environ["WANDB_RUN_ID"] if in_sweep() else recorded["id"]}
    for key in ("project", "entity"):
        place[key] = (
            os.environ.get(f"WANDB_{key.upper()}")
            or recorded.get(key)
            or getattr(tracking, key)
        )
    run.update(wandb=place)
    logging.getLogger("wandb").propagate = False  # its diary goes to its own debug.log
    # The command line, the environment and the code are not uploaded.
    settings = wandb.Settings(
        silent=True,
        quiet=True,
        console="off",
        init_timeout=60,
        finish_timeout=60,
        reinit="create_new",  # several runs in one process do not end each other
        program="",
        x_disable_meta=True,
        save_code=False,
        disable_code=True,
        x_save_requirements=False,
        disable_git=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
    )
    session = wandb.init(
        **{} if in_sweep() else place,
        name=run.id,
        group=config.study,
        job_type="train",
        resume="allow",
        mode="online" if online else "offline",
        tags=[config.encoding.name, *tracking.tags],
        config=to_container(config),
        settings=settings,
        dir=run.folder,
    )
    logger.info("W&B: %s", session.url or session.settings.sync_dir)
    return session


def in_sweep() -> bool:
    """Return whether an agent of a W&B sweep started this process and chose the run."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))


def is_online(mode: str) -> bool:
    """Return whether there is an API key, and neither setting nor WANDB_MODE says
    `offline`; never asks for a key.
    """
    import wandb

    # init's own come too late to silence the login
    wandb.setup(wandb.Settings(silent=True, quiet=True))
    offline = {mode, os.environ.get("WANDB_MODE")} & {"offline", "dryrun"}
    return not offline and wandb.login(prompt=False, verify=False)


def sync(folders: list[Path], results_of: ResultsOf) -> None:
    """Send the rows of run folders that W&B lacks. Raises PosbenchError if W&B cannot
    be reached or refuses.
    """
    os.environ["WANDB_MODE"] = "online"  # the command asks for it
    if not is_online("auto"):
        raise UserError(
            "no W&B API key found: 'wandb login' stores one, WANDB_API_KEY gives one"
        )
    for folder in folders:
        config = load_saved(folder / CONFIG)
        if not config.is_trained_here:
            continue  # it has no rows to overlay
        tracking = dataclasses.replace(config.tracking, backend="wandb", mode="auto")
        with Run.open(folder, config, command=None) as run:
            run.tracker = tracker = Tracker(
                dataclasses.replace(config, tracking=tracking), run, results_of
            )
            tracker.send()
        if tracker.session is None:
            raise PosbenchError(f"W&B did not take {folder}")
        print(
            f"{folder}: {max(0, len(run.rows) - tracker.session.starting_step)} rows:"
            f" {tracker.session.url}"
        )
