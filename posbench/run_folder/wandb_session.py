"""A session of a run at Weights & Biases: its name there, what is sent, and how it is shown.

Curves of different encodings overlay in one panel, because training rows have `tokens` and evaluation rows
`eval/length_ratio` as their axis; `eval/length`, in tokens, stands beside it. A session says all that describes the
run, so that a later session of the same run takes nothing away.
"""

import contextlib
import dataclasses
import logging
import netrc
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from posbench.config.external import Trains
from posbench.config.schema import to_container
from posbench.run_folder.jsonl import number
from posbench.run_folder.logged import LENGTH, LENGTH_RATIO, LINE, Curves, defined
from posbench.run_folder.names import EVALUATION
from posbench.run_folder.rows import EvaluationRow, evaluation_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
Draw = Callable[[], "Figure"]
_INIT_SECONDS = 60.0  # for the server to answer; training goes on meanwhile
_TRAINING = (
    "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_per_second", "train/mfu",
    "validation/nll", "validation/accuracy", "validation/exact_match",
)  # fmt: skip
_TABLE = (
    "length", "length_ratio", "status", "nll", "ci_low", "ci_high", "perplexity", "bits_per_byte", "accuracy",
    "chance", "trivial", "exact_match", "ngram_nll", "ngram_order", "n_tokens", "n_distinct", "n_documents", "split",
    "checkpoint_step",
)  # fmt: skip
_ROWS = "rows"  # logged so far
_TRAINED, _VALIDATED = "train_step", "validation_step"  # of the last row of either kind; one step may have both


@dataclasses.dataclass(frozen=True)
class Target:
    """Which run at W&B a folder is mirrored to."""

    folder: Path
    name: str  # the run's
    id: str
    project: str | None  # None: in a sweep, whose agent knows
    entity: str | None
    resume: Literal["allow"] | None  # None: what is there under the id is overwritten

    @classmethod
    def of(cls, config: Trains, folder: Path, run_id: str, record: Mapping[str, Any], new: bool = False) -> "Target":
        """The run that the folder had before, or a new one; in a W&B sweep the run that the agent names.

        The user's environment stands above both records.

        Args:
            new: nothing of the run can be there yet.
        """
        project, entity = (os.environ.get(name) or None for name in ("WANDB_PROJECT", "WANDB_ENTITY"))
        if in_sweep():
            return cls(folder, run_id, os.environ["WANDB_RUN_ID"], project, entity, "allow")
        there, tracking = record.get("wandb"), config.tracking
        if there:
            own, project, entity = there["id"], project or there.get("project"), entity or there.get("entity")
        else:
            aside = len(list(folder.parent.glob(f"{folder.name}.old-*")))  # begun anew: another run there, too
            own = f"{config.study}-{run_id}" + (f"-{aside + 1}" if aside else "")
        project, entity = project or tracking.project, entity or tracking.entity
        return cls(folder, run_id, own, project, entity, None if new else "allow")

    @property
    def path(self) -> dict[str, str | None]:
        """As `run.json` keeps it."""
        return {"id": self.id, "project": self.project, "entity": self.entity}


def in_sweep() -> bool:
    """Whether an agent of a W&B sweep started this process and chose the run."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))


def exit_code_of(record: Mapping[str, Any]) -> int:
    """The exit code for W&B's client: 0 finished, 255 interrupted, else failed."""
    return {"done": 0, "stopped": 255}.get(str(record.get("status")), 1)


class Session:
    """Opens the W&B run at once; every method may raise whatever the client raises.

    Args:
        curves: the names of the run's curves.
        mode: what the user asked for just now; None: configuration and environment decide.
    """

    def __init__(
        self, config: Trains, target: Target, curves: Curves, mode: Literal["online", "offline"] | None = None
    ) -> None:
        import wandb

        logging.getLogger("wandb").propagate = False  # its diary goes to its own debug.log
        wandb.setup(wandb.Settings(silent=True, quiet=True))  # init's settings come too late for the login's line
        tracking = config.tracking
        self._config, self._target, self._curves = config, target, curves
        where: dict[str, Any] = {} if in_sweep() else target.path
        self._run = wandb.init(
            **where,
            name=target.name,
            group=tracking.group or config.study,
            tags=[config.encoding.name, *tracking.tags],
            job_type="train",
            config=to_container(config),
            dir=str(target.folder),
            resume=target.resume,
            mode=mode or choose_mode(tracking.mode),
            settings=wandb.Settings(
                silent=True,
                quiet=True,
                console="off",
                init_timeout=_INIT_SECONDS,
                reinit="create_new",  # several runs in one process do not end each other
                # What the command line, the environment or the code hold stays on this machine unless it is asked for.
                program="",
                disable_git=not tracking.git,
                x_disable_stats=not tracking.system_metrics,
                x_disable_machine_info=not tracking.system_metrics,
                x_disable_meta=True,
                save_code=False,
                disable_code=True,
                x_save_requirements=False,
            ),
        )
        there = dict(self._run.summary) if self._run.resumed else {}
        # What is there: the last line of evaluation.jsonl, how many rows of it and of steps, and the last steps.
        self.line, self.rows, *last = (
            int(number(there.get(name)) or 0) for name in (LINE, _ROWS, _TRAINED, _VALIDATED)
        )
        self._steps = dict(zip((_TRAINED, _VALIDATED), last, strict=True))
        self._rows = self.rows
        self._shown: set[str] = set()
        self._run.define_metric("tokens")
        for name in ("step", "seconds", _TRAINED, _VALIDATED, LINE, _ROWS):  # counters: no panels
            self._run.define_metric(name, hidden=True)
        for name in (LENGTH, LENGTH_RATIO):
            self._run.define_metric(name, hidden=True, summary="none")
        self._show(_TRAINING)
        for row in evaluation_rows(target.folder):
            self._show(curves.values(row))

    def metrics(self, row: Mapping[str, Any]) -> bool:
        """Send a row of `metrics.jsonl` unless W&B has it already; return whether it was sent."""
        kind = _VALIDATED if any(name.startswith("validation/") for name in row) else _TRAINED
        step = int(number(row.get("step")) or 0)
        if step <= self._steps[kind]:
            return False
        self._steps[kind] = step
        self._show(row)
        self._log({**row, **self._steps})
        return True

    def curve(self, row: EvaluationRow, line: int) -> None:
        """Send a row of `evaluation.jsonl` and its line number, from 1; leave out what is undefined."""
        if line <= self.line or not (values := self._curves.row(row, line)):
            return
        self._show(self._curves.values(row))
        self._log(values)

    def _log(self, row: Mapping[str, Any]) -> None:
        self._rows += 1
        self._run.log({**defined(row), _ROWS: self._rows})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(defined(values))

    def results(self, rows: list[EvaluationRow], draw: Draw) -> None:
        """Send the curve as a table and a picture, and the rows as an artifact; warn of what cannot be sent."""
        parts: dict[str, Callable[[], None]] = {
            "the curve": lambda: self._send_curve(rows, draw),
            "evaluation.jsonl": self._send_evaluation,
        }
        for what, send in parts.items():
            try:
                send()
            except Exception as error:
                logger.warning("W&B did not take %s: %s", what, str(error).partition("\n")[0])

    @property
    def where(self) -> str:
        """Its page, or the offline run's folder."""
        return str(self._run.url or Path(self._run.settings.sync_dir))

    def finish(self, exit_code: int, values: Mapping[str, Any]) -> None:
        """End the session with a last summary."""
        self.summary(values)
        self._run.finish(exit_code=exit_code)

    # -- how it is shown -------------------------------------------------------------------------------------------

    def _show(self, names: Any) -> None:
        """Define a metric's axis once. A curve sets no summary value: the summary has the headline."""
        for name in names:
            if "/" in name and name not in self._shown:
                self._shown.add(name)
                if name.startswith("eval/"):
                    self._run.define_metric(name, step_metric=LENGTH_RATIO, summary="none")
                else:
                    self._run.define_metric(name, step_metric="tokens")

    def _send_curve(self, rows: list[EvaluationRow], draw: Draw) -> None:
        import wandb

        columns = _TABLE if self._config.data.task is None else ("problem_length", "offset", *_TABLE)
        data = [[row.curve_name, *(getattr(row, name) for name in columns)] for row in rows]
        table = wandb.Table(columns=["curve", *columns], data=data)
        picture = Path(self._run.settings.sync_dir) / "curve.png"
        draw().savefig(picture)
        self._run.log({"curve/table": table, "curve/picture": wandb.Image(str(picture))})

    def _send_evaluation(self) -> None:
        """A copy: the file may grow before an offline run is synced."""
        import wandb

        copied = shutil.copy(self._target.folder / EVALUATION, Path(self._run.settings.sync_dir) / EVALUATION)
        artifact = wandb.Artifact(f"{self._target.name}-evaluation"[:128], "evaluation")
        artifact.add_file(str(copied), name=EVALUATION, policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)


# -- online or offline -------------------------------------------------------------------------------------------------


def choose_mode(asked: str) -> Literal["online", "offline"]:
    """`online` if there is an API key and nothing says `offline`, else `offline`; never asks for a key.

    WANDB_MODE keeps a run on this machine whatever is asked for.
    """
    said = (asked, os.environ.get("WANDB_MODE", "auto"))
    if "offline" in said or "dryrun" in said:
        return "offline"
    if has_key():
        return "online"
    if "online" in said:
        logger.warning("no W&B API key found: logging offline; 'wandb login' stores one, 'wandb sync' sends the run")
    return "offline"


def has_key() -> bool:
    """Whether an API key for W&B's server is set up on this machine; the key itself is not used."""
    import wandb

    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        server = os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(server).netloc) is not None
    return False
