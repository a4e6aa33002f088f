"""The mirror of a run at Weights & Biases or in TensorBoard: row n of `rows.jsonl` is step n of the W&B run.

So a session first sends the rows that W&B has not got, whatever a kill kept an earlier one from sending. Curves of
different encodings overlay, because training rows have `tokens` as their axis and evaluation rows `eval/context`.
"""

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from posbench.config.external import TrainedElsewhere, Trains
from posbench.config.schema import to_container
from posbench.errors import PosbenchError, UserError
from posbench.run.rows import PAIRED, EvaluationRow, number
from posbench.run.run import Run, load_any_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
Mode = Literal["online", "offline"]
CONTEXT = "eval/context"  # tokens: the axis of evaluation rows
_SECONDS = 60.0  # for the server to answer, at the start and at the end
_VALUES = {"nll": "loss"} | {name: name for name in ("accuracy", "exact_match", "ci_low", "ci_high")}
_SHOWN = ("eval/loss", "eval/accuracy")  # curves with a panel; the others can be added to one


class Results(NamedTuple):
    """What the rows of a run come to."""

    summary: Mapping[str, Any]
    draw: Callable[[], "Figure"]


ResultsOf = Callable[[Path], Results]


class Tracker:
    """The mirror of a run; its session opens with the first row that is logged, or by `begin`.

    What W&B does not take is a warning: the numbers are in `rows.jsonl`, another session sends them.

    Args:
        open_session: returns W&B's run, or what has its methods.
    """

    def __init__(self, config: Trains, run: Run, results_of: ResultsOf, open_session: Callable[[Trains, Run], Any]):
        self._config, self._run, self._results_of, self._open_session = config, run, results_of, open_session
        self._names, self._axes = Names(config), {CONTEXT}
        self._began = False
        self.session: Any = None  # None also after it has failed

    def begin(self) -> None:
        """Open the session, and send the rows that it has not got."""
        if self._began:
            return
        self._began = True
        with self._failure_as_warning():
            self.session = self._open_session(self._config, self._run)
            for name in ("tokens", "step", "seconds", CONTEXT):
                self.session.define_metric(name, hidden=True, summary="none")
        for row_number, row in enumerate(self._run.rows):
            self._send(row_number, row)

    def log(self, row_number: int, row: Mapping[str, Any]) -> None:
        """Send a row of `rows.jsonl`, unless the session has it."""
        if self._began:
            self._send(row_number, row)
        else:
            self.begin()

    def _send(self, row_number: int, row: Mapping[str, Any]) -> None:
        values = self._names.of(row)
        if self.session is None:
            return
        with self._failure_as_warning():
            for name in values.keys() - self._axes:
                self._axes.add(name)
                if name.startswith("eval/"):
                    hidden = name not in _SHOWN
                    self.session.define_metric(name, step_metric=CONTEXT, summary="none", hidden=hidden)
                elif "/" in name:
                    self.session.define_metric(name, step_metric="tokens")
            if row_number >= self.session.starting_step:
                self.session.log(values, step=row_number)

    def finish(self) -> None:
        """Send what the run came to, with a picture of its curve, and wait a bounded time."""
        if self.session is None:
            return
        with self._failure_as_warning():
            results, record = self._results_of(self._run.folder), self._run.record
            counts = {f"parameters/{part}": count for part, count in record["parameters"].items()}
            facts = {
                "status": record["status"],
                "reason": record["reason"] or "",  # W&B would keep an earlier one
                "data/name": self._config.data.name,
                "data/sha256": (record["data"] or {}).get("sha256"),
                "tokenizer/sha256": record["tokenizer_sha256"],
                "tokens_per_second": (record["tokens"] or 0) / (record["train_seconds"] or 1) or None,
                "command": record["command"] if self._config.tracking.details else None,
                **counts,
                **results.summary,
            }
            known = {name.replace(".", "_"): fact for name, fact in facts.items() if fact is not None}
            self.session.summary.update(known)
            if not isinstance(self.session, EventFiles) and any("protocol" in row for row in self._run.rows):
                import wandb

                picture = Path(self.session.settings.sync_dir) / "curve.png"
                results.draw().savefig(picture)
                self.session.log({"curve": wandb.Image(str(picture))}, step=len(self._run.rows) - 1)
            self.session.finish(exit_code={"done": 0, "stopped": 255}.get(record["status"], 1))

    @contextlib.contextmanager
    def _failure_as_warning(self) -> Any:
        try:
            yield
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            logger.warning("tracking: %s: the run goes on without it, 'posbench sync' sends it later", reason)
            self.session = None


def mirror(config: Trains, run: Run, results_of: ResultsOf) -> None:
    """Give a run its tracker, if its configuration and the environment ask for one."""
    if is_at_wandb(config):
        run.tracker = Tracker(config, run, results_of, wandb_session)
    elif config.tracking.backend == "tensorboard":
        run.tracker = Tracker(config, run, results_of, EventFiles)


class Names:
    """The names of a run's rows at a tracker. Rows of one name are of one checkpoint and text, on the same targets."""

    def __init__(self, config: Trains) -> None:
        self._config = config
        self._targets: dict[tuple[Any, ...], str | None] = {}

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of a row by name. Call it for all rows in order: the first has the plain name of its curve."""
        if "protocol" not in row:
            return {name: value for name, value in row.items() if number(value) is not None}
        evaluated = EvaluationRow.from_json(row)
        curve = self._curve(evaluated)
        values = {f"{curve}/{name}": number(getattr(evaluated, column)) for column, name in _VALUES.items()}
        ok = evaluated.status == "ok"
        return {CONTEXT: evaluated.length} | {name: value for name, value in values.items() if ok and value is not None}

    def _curve(self, row: EvaluationRow) -> str:
        parts = ["eval"]
        if row.split != self._config.evaluation.split:
            parts.append(f"{row.split} text")
        if row.tokens is not None and row.checkpoint_step < self._config.training.steps:
            parts.append(f"{row.tokens} tokens")
        if row.curve_name not in ("fixed_target", f"problems_{self._config.data.name}"):
            parts.append(row.curve_name)
        if row.measured and row.protocol in PAIRED:
            place = row.split, row.checkpoint_step, row.protocol
            if row.targets_sha256 != self._targets.setdefault(place, row.targets_sha256):
                parts.append(f"targets {str(row.targets_sha256)[:6]}")
        return "/".join(parts)


# -- TensorBoard -------------------------------------------------------------------------------------------------------


class EventFiles:
    """Event files for TensorBoard in the run folder, with W&B's methods: all rows, written anew by each session."""

    starting_step = 0

    def __init__(self, config: Trains, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run.folder / "tensorboard", ignore_errors=True)
        self._writer, self.summary = SummaryWriter(str(run.folder / "tensorboard")), dict[str, Any]()

    def define_metric(self, *_: Any, **axis: Any) -> None: ...

    def log(self, values: Mapping[str, Any], step: int) -> None:
        at = values.get(CONTEXT, values.get("tokens"))
        for name, scalar in values.items():
            if "/" in name and name != CONTEXT:
                self._writer.add_scalar(re.sub(r"[^-/\w.]", "_", name), scalar, at)  # the letters that a tag has
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        for name, fact in self.summary.items():
            if number(fact) is not None:
                self._writer.add_scalar(name, fact)
        self._writer.close()


# -- W&B ---------------------------------------------------------------------------------------------------------------


def wandb_session(config: Trains, run: Run, mode: Mode | None = None) -> Any:
    """Open a run's session at W&B.

    Args:
        mode: None: the configuration and the environment decide.
    """
    import wandb

    tracking, mode = config.tracking, mode or choose_mode(config.tracking.mode)
    if mode == "offline":  # each offline session has the whole run: an older one would send it twice
        for earlier in run.folder.glob("wandb/offline-run-*"):
            shutil.rmtree(earlier)
    place: Any = place_of(config, run)
    run.update(wandb=place)
    logging.getLogger("wandb").propagate = False  # its diary goes to its own debug.log
    # What the command line, the environment or the code hold stays here unless it is asked for.
    details: Any = dict.fromkeys(("disable_git", "x_disable_stats", "x_disable_machine_info"), not tracking.details)
    session = wandb.init(
        **place if not in_sweep() else {},
        name=run.id, group=config.study, tags=[config.encoding.name, *tracking.tags], job_type="train",
        config=to_container(config), dir=str(run.folder), resume="allow", mode=mode,
        settings=wandb.Settings(
            silent=True, quiet=True, console="off", init_timeout=_SECONDS, finish_timeout=_SECONDS,
            reinit="create_new",  # several runs in one process do not end each other
            program="", x_disable_meta=True, save_code=False, disable_code=True, x_save_requirements=False, **details,
        ),
    )  # fmt: skip
    logger.info("W&B: %s", session.url or session.settings.sync_dir)
    return session


def is_at_wandb(config: Trains) -> bool:
    """Whether a run of this configuration is mirrored to W&B."""
    return config.tracking.backend == "wandb" and os.environ.get("WANDB_MODE") != "disabled"


def in_sweep() -> bool:
    """Whether an agent of a W&B sweep started this process and chose the run."""
    return bool(os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID"))


def place_of(config: Trains, run: Run) -> dict[str, str | None]:
    """The run at W&B that the folder had before, or a new one; in a W&B sweep the run that the agent names.

    The user's environment stands above the record and the configuration.
    """
    before, tracking, env = run.record["wandb"] or {}, config.tracking, os.environ
    aside = len(list(run.folder.parent.glob(f"{run.folder.name}.old-*")))  # begun anew: another run there, too
    run_id = before.get("id") or f"{config.study}-{run.id}" + (f"-{aside + 1}" if aside else "")
    return {
        "id": env["WANDB_RUN_ID"] if in_sweep() else run_id,
        "project": env.get("WANDB_PROJECT") or before.get("project") or tracking.project,
        "entity": env.get("WANDB_ENTITY") or before.get("entity") or tracking.entity,
    }


def refuse_names(config: Trains) -> None:
    """Refuse names that W&B would refuse, once the run is on its way."""
    tracking = config.tracking
    limits = [("study", config.study, 64), ("tracking.project", tracking.project, 128)]
    limits += [("tracking.tags", tag, 64) for tag in (*tracking.tags, config.encoding.name)]
    for key, text, limit in limits if is_at_wandb(config) else ():
        if not 0 < len(text) <= limit:
            size = f"{len(text)} characters: W&B takes 1 to {limit}"
            raise UserError(f"{key} is '{text}', {size} (tracking=none is without)")
        if key == "tracking.project" and (refused := sorted(set("/\\#?%:") & set(text))):
            raise UserError(f"{key} is '{text}': W&B takes no {' '.join(refused)} in a project's name")


def choose_mode(asked: str) -> Mode:
    """`online` if there is an API key and nothing says `offline`, else `offline`; never asks for a key.

    WANDB_MODE keeps a run on this machine whatever is asked for.
    """
    modes = {asked, os.environ.get("WANDB_MODE", "auto")}
    if modes & {"offline", "dryrun"}:
        return "offline"
    if has_key():
        return "online"
    if "online" in modes:
        logger.warning("no W&B API key found: logging offline; 'wandb login' stores one, 'wandb sync' sends the run")
    return "offline"


def has_key() -> bool:
    """Whether W&B's client finds an API key for its server on this machine; the server is not asked."""
    import wandb

    wandb.setup(wandb.Settings(silent=True, quiet=True))  # init's settings come too late for the login's line
    try:
        return wandb.login(prompt=False, verify=False)
    except wandb.Error as error:
        raise UserError(f"W&B's API key cannot be used: {str(error).splitlines()[0]}") from None


def sync(folders: list[Path], results_of: ResultsOf) -> None:
    """Send the rows of run folders that W&B has not got.

    Raises:
        UserError: no API key, or a folder that is no run or in use.
        PosbenchError: W&B cannot be reached or refuses.
    """
    if not has_key():
        raise UserError("no W&B API key found: 'wandb login' stores one, WANDB_API_KEY gives one")
    for folder in folders:
        config = load_any_config(folder)
        if isinstance(config, TrainedElsewhere):
            print(f"{folder}: nothing to send, results of a model that was not trained here")
            continue
        with Run.open(folder, config, command=None) as run:
            tracker = Tracker(config, run, results_of, functools.partial(wandb_session, mode="online"))
            tracker.begin()
            session = tracker.session
            tracker.finish()
        if tracker.session is None:
            raise PosbenchError(f"W&B did not take {folder}")
        print(f"{folder}: {max(0, len(run.rows) - session.starting_step)} rows: {session.url}")
