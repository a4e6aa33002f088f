"""A run at W&B, through its client."""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from typing import Any

from posbench.config.schema import Config, to_container
from posbench.run.folder import Run
from posbench.tracking.session import CONTEXT, in_sweep

logger = logging.getLogger(__name__)
_AXES = ("tokens", "step", "seconds", CONTEXT)
# of the curves of evaluation, with a panel; longer lengths may need other targets
SHOWN = re.compile(r"eval/(targets \w+/)?(loss|accuracy)")
_EXIT_CODES = {"done": 0, "stopped": 255}


class Wandb:
    """A session of a run at W&B."""

    def __init__(self, config: Config, run: Run) -> None:
        """Open the session in the place that the environment names, else where it was
        before.
        """
        import wandb

        online = is_online(config.tracking.mode)
        if not online:
            if config.tracking.mode == "online":
                logger.warning(
                    "tracking.mode=online: no W&B API key, or WANDB_MODE=offline: the"
                    " run stays on this machine until 'posbench sync'"
                )
            # Each offline session has the whole run: an older one would send it twice.
            for earlier in run.folder.glob("wandb/offline-run-*"):
                shutil.rmtree(earlier)
        recorded = run.record.wandb or {"id": f"{run.id}-{secrets.token_hex(4)}"}
        place: dict[str, Any] = {"id": recorded["id"]}
        if in_sweep():
            place["id"] = os.environ["WANDB_RUN_ID"]
        for key in ("project", "entity"):
            asked = os.environ.get(f"WANDB_{key.upper()}")
            place[key] = asked or recorded.get(key) or getattr(config.tracking, key)
        run.update(wandb=place)
        if in_sweep():
            place = {}  # the agent has chosen it

        # its diary goes to its own debug.log
        logging.getLogger("wandb").propagate = False
        # Nothing is printed, and the command line, the environment and the code are not
        # uploaded.
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
        self._run = wandb.init(
            **place,
            name=run.id,
            group=config.study,
            job_type="train",
            resume="allow",
            mode="online" if online else "offline",
            tags=[config.encoding.name, *config.tracking.tags],
            config=to_container(config),
            settings=settings,
            dir=run.folder,
        )
        self._defined = set[str]()
        self.starting_step = self._run.starting_step
        self.url = self._run.url or self._run.settings.sync_dir
        logger.info("W&B: %s", self.url)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name in (*_AXES, *values):
            if name not in self._defined:
                self._define(name)
                self._defined.add(name)
        if step >= self.starting_step:
            self._run.log(dict(values), step=step)

    def _define(self, name: str) -> None:
        """Tell W&B the axis of a metric, whether it has a panel, and a summary."""
        if name in _AXES:
            self._run.define_metric(name, summary="none", hidden=True)
        elif name.startswith("eval/"):
            hidden = SHOWN.fullmatch(name) is None
            self._run.define_metric(
                name, step_metric=CONTEXT, summary="none", hidden=hidden
            )
        else:
            self._run.define_metric(name, step_metric="tokens")

    def finish(self, status: str, facts: Mapping[str, Any]) -> None:
        # In W&B a point in a name means a part of a value.
        summary = {name.replace(".", "_"): fact for name, fact in facts.items()}
        self._run.summary.update(summary)
        self._run.finish(exit_code=_EXIT_CODES.get(status, 1))


def is_online(mode: str) -> bool:
    """Return whether there is an API key, and neither setting nor WANDB_MODE says
    `offline`; never asks for a key.
    """
    import wandb

    # init's own settings come too late to silence the login
    wandb.setup(wandb.Settings(silent=True, quiet=True))
    offline = {mode, os.environ.get("WANDB_MODE")} & {"offline", "dryrun"}
    return not offline and wandb.login(prompt=False, verify=False)
