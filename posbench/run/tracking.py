"""The mirror of a run at Weights & Biases or in TensorBoard: row n of `rows.jsonl` is step n of the W&B run.

So a session first sends the rows that W&B has not got, whatever a kill kept an earlier one from sending. Curves of
different encodings overlay, because training rows have `tokens` as their axis and evaluation rows `eval/context`.
"""

import contextlib
import dataclasses
import logging
import math
import netrc
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from posbench.config.external import TrainedElsewhere, Trains
from posbench.config.overrides import pairs, value
from posbench.config.schema import TrackingConfig, to_container, validate
from posbench.errors import PosbenchError, UserError
from posbench.run.jsonl import number
from posbench.run.rows import PAIRED, EvaluationRow
from posbench.run.run import Run, load_any_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
Mode = Literal["online", "offline"]
CONTEXT = "eval/context"  # tokens: the axis of evaluation rows
_SECONDS = 60.0  # for the server to answer, at the start and at the end
_VALUES = {
    "nll": "loss",
    "accuracy": "accuracy",
    "exact_match": "exact_match",
    "ci_low": "ci_low",
    "ci_high": "ci_high",
}
_SHOWN = ("eval/loss", "eval/accuracy")  # curves with a panel; the others can be added to one


@dataclasses.dataclass(frozen=True)
class Results:
    """What the rows of a run come to."""

    summary: Mapping[str, Any]
    draw: Callable[[], "Figure"]


ResultsOf = Callable[[Path], Results]


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


class WandB:
    """The run at W&B. What it does not take is a warning: the numbers are in `rows.jsonl`, another session sends them.

    Args:
        mode: None: the configuration and the environment decide.
    """

    def __init__(self, config: Trains, run: Run, mode: Mode | None = None) -> None:
        self._config, self._names = config, Names(config)
        self._axes: set[str] = set()
        self.run: Any = None  # W&B's own; None once it has failed
        try:
            self._open(config, run, mode or choose_mode(config.tracking.mode))
        except Exception as error:
            self._failed(error)
        for row_number, row in enumerate(run.rows):
            self.log(row_number, row)

    def _open(self, config: Trains, run: Run, mode: Mode) -> None:
        import wandb

        if mode == "offline":  # each offline session has the whole run: an older one would send it twice
            for earlier in run.folder.glob("wandb/offline-run-*"):
                shutil.rmtree(earlier)
        tracking = config.tracking
        place: Any = place_of(config, run)
        run.update(wandb=place)
        logging.getLogger("wandb").propagate = False  # its diary goes to its own debug.log
        wandb.setup(wandb.Settings(silent=True, quiet=True))  # init's settings come too late for the login's line
        self.run = wandb.init(
            **place if not in_sweep() else {},
            name=run.id,
            group=config.study,
            tags=[config.encoding.name, *tracking.tags],
            job_type="train",
            config=to_container(config),
            dir=str(run.folder),
            resume="allow",
            mode=mode,
            settings=wandb.Settings(
                silent=True,
                quiet=True,
                console="off",
                init_timeout=_SECONDS,
                finish_timeout=_SECONDS,
                reinit="create_new",  # several runs in one process do not end each other
                # What the command line, the environment or the code hold stays here unless it is asked for.
                program="",
                disable_git=not tracking.details,
                x_disable_stats=not tracking.details,
                x_disable_machine_info=not tracking.details,
                x_disable_meta=True,
                save_code=False,
                disable_code=True,
                x_save_requirements=False,
            ),
        )
        logger.info("W&B: %s", self.run.url or self.run.settings.sync_dir)
        for name in ("tokens", "step", "seconds", CONTEXT):
            self.run.define_metric(name, hidden=True, summary="none")

    def log(self, row_number: int, row: Mapping[str, Any]) -> None:
        """Send a row of `rows.jsonl`, unless W&B has it."""
        values = self._names.of(row)
        if self.run is None:
            return
        try:
            for name in values.keys() - self._axes:
                self._axes.add(name)
                if name.startswith("eval/") and name != CONTEXT:
                    hidden = name not in _SHOWN
                    self.run.define_metric(name, step_metric=CONTEXT, summary="none", hidden=hidden)
                elif "/" in name and name != CONTEXT:
                    self.run.define_metric(name, step_metric="tokens")
            if row_number >= self.run.starting_step:
                self.run.log(values, step=row_number)
        except Exception as error:
            self._failed(error)

    def finish(self, run: Run, results_of: ResultsOf) -> None:
        """Send what the run came to, with a picture of its curve, and wait a bounded time."""
        if self.run is None:
            return
        import wandb

        try:
            results = results_of(run.folder)
            summary = facts(self._config, run.record) | defined(results.summary)
            self.run.summary.update({name.replace(".", "_"): value for name, value in summary.items()})
            if any("protocol" in row for row in run.rows):
                picture = Path(self.run.settings.sync_dir) / "curve.png"
                results.draw().savefig(picture)
                self.run.log({"curve": wandb.Image(str(picture))}, step=len(run.rows) - 1)  # beside the last row
            self.run.finish(exit_code={"done": 0, "stopped": 255}.get(run.record["status"], 1))
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("W&B: %s: the run goes on without it, 'posbench sync' sends it later", reason)
        self.run = None


class TensorBoard:
    """Event files for TensorBoard in the run folder: all rows, written anew by each session."""

    def __init__(self, config: Trains, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        shutil.rmtree(run.folder / "tensorboard", ignore_errors=True)
        self._config, self._names = config, Names(config)
        self._writer = SummaryWriter(str(run.folder / "tensorboard"))
        for row_number, row in enumerate(run.rows):
            self.log(row_number, row)

    def log(self, row_number: int, row: Mapping[str, Any]) -> None:
        values = self._names.of(row)
        step = values.pop(CONTEXT, values.get("tokens"))
        for name, scalar in values.items():
            if "/" in name:
                self._writer.add_scalar(re.sub(r"[^-/\w.]", "_", name), scalar, step)  # the letters that a tag has
        self._writer.flush()

    def finish(self, run: Run, results_of: ResultsOf) -> None:
        for name, fact in (facts(self._config, run.record) | defined(results_of(run.folder).summary)).items():
            if number(fact) is not None:
                self._writer.add_scalar(name, fact)
        self._writer.close()


@contextlib.contextmanager
def mirrored(config: Trains, run: Run | None, results_of: ResultsOf) -> Iterator[None]:
    """Mirror what the run logs within it. The session opens with the first row that is logged, or by `run.mirror()`."""
    if run is None:
        yield
        return
    if is_at_wandb(config):
        run.open_tracker = lambda: WandB(config, run)
    elif config.tracking.backend == "tensorboard":
        run.open_tracker = lambda: TensorBoard(config, run)
    try:
        yield
    finally:
        if run.tracker is not None:
            run.tracker.finish(run, results_of)


def sync(folders: list[Path], overrides: list[str], results_of: ResultsOf) -> None:
    """Send the rows of run folders that W&B has not got, or write their event files for TensorBoard.

    Args:
        overrides: of the runs' own tracking.*, as they are typed.

    Raises:
        UserError: an override that cannot be read, no API key, or a folder that is no run or in use.
        PosbenchError: W&B cannot be reached or refuses.
    """
    typed = pairs(overrides, "tracking.project=NAME")
    given = {key.removeprefix("tracking.").replace("tracking", "backend"): value(key, typed[key]) for key in typed}
    for folder in folders:
        config = load_any_config(folder)
        if isinstance(config, TrainedElsewhere):
            print(f"{folder}: nothing to send, results of a model that was not trained here")
            continue
        asked = dataclasses.asdict(config.tracking) | {"backend": "wandb"} | given
        config = dataclasses.replace(config, tracking=validate(TrackingConfig, asked, "tracking"))
        refuse_names(config)
        with Run.open(folder, config, command=None) as run:
            if config.tracking.backend == "tensorboard":
                TensorBoard(config, run).finish(run, results_of)
                print(f"{folder}: {len(run.rows)} rows in {folder / 'tensorboard'}")
                continue
            if not has_key():
                raise UserError("no W&B API key found: 'wandb login' stores one, WANDB_API_KEY gives one")
            if given.keys() & {"project", "entity"}:
                run.update(wandb=None)
            tracker = WandB(config, run, "online")
            where = tracker.run and f"{max(0, len(run.rows) - tracker.run.starting_step)} rows: {tracker.run.url}"
            tracker.finish(run, results_of)
        if tracker.run is None:
            raise PosbenchError(f"W&B did not take {folder}")
        print(f"{folder}: {where}")


# -- what is said of a run ---------------------------------------------------------------------------------------------


def facts(config: Trains, record: Mapping[str, Any]) -> dict[str, Any]:
    """The summary beside the headline: what the run is, and what became of it."""
    counts, data = record.get("parameters") or {}, record.get("data") or {}
    tokens, seconds = number(record.get("tokens")), number(record.get("train_seconds"))
    return defined(
        {
            "status": record.get("status"),
            "reason": record.get("reason") or "",  # W&B would keep an earlier one
            **{f"parameters/{part}": count for part, count in counts.items()},
            "data/name": config.data.name,
            "data/sha256": data.get("sha256"),
            "tokenizer/sha256": record.get("tokenizer_sha256"),
            "tokens_per_second": tokens / seconds if tokens and seconds else None,
            "command": record.get("command") if config.tracking.details else None,
        }
    )


def defined(values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls and numbers that are not finite."""
    return {k: v for k, v in values.items() if v is not None and (not isinstance(v, float) or math.isfinite(v))}


# -- where it is at W&B ------------------------------------------------------------------------------------------------


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
    before = run.record["wandb"] or {}
    aside = len(list(run.folder.parent.glob(f"{run.folder.name}.old-*")))  # begun anew: another run there, too
    run_id = before.get("id") or f"{config.study}-{run.id}" + (f"-{aside + 1}" if aside else "")
    place = {"id": os.environ["WANDB_RUN_ID"] if in_sweep() else run_id}
    for name in ("project", "entity"):
        place[name] = os.environ.get(f"WANDB_{name.upper()}") or before.get(name) or getattr(config.tracking, name)
    return place


def refuse_names(config: Trains) -> None:
    """Refuse names that W&B would refuse, once the run is on its way."""
    tracking = config.tracking
    limits = [("study", config.study, 64), ("tracking.project", tracking.project, 128)]
    limits += [("tracking.tags", tag, 64) for tag in (*tracking.tags, config.encoding.name)]
    for key, text, limit in limits if is_at_wandb(config) else ():
        if not 0 < len(text) <= limit:
            raise UserError(
                f"{key} is '{text}', {len(text)} characters: W&B takes 1 to {limit} (tracking=none is without)"
            )
    if is_at_wandb(config) and (refused := sorted(set("/\\#?%:") & set(tracking.project))):
        raise UserError(
            f"tracking.project is '{tracking.project}': W&B takes no {' '.join(refused)} in a project's name"
        )


def choose_mode(asked: str) -> Mode:
    """`online` if there is an API key and nothing says `offline`, else `offline`; never asks for a key.

    WANDB_MODE keeps a run on this machine whatever is asked for.
    """
    modes = (asked, os.environ.get("WANDB_MODE", "auto"))
    if "offline" in modes or "dryrun" in modes:
        return "offline"
    if has_key():
        return "online"
    if "online" in modes:
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
