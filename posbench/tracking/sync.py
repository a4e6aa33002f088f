"""`posbench sync`: what W&B lacks of runs is sent later."""

import dataclasses
import os
from pathlib import Path

from posbench.errors import PosbenchError, UserError
from posbench.run.folder import Run
from posbench.run.saved import load_any
from posbench.tracking import Tracker
from posbench.tracking.sessions.wandb import is_online


def sync(folders: list[Path]) -> None:
    """Send the rows of run folders that W&B lacks. Raises PosbenchError if W&B cannot
    be reached or refuses.
    """
    os.environ["WANDB_MODE"] = "online"  # the command asks for it
    if not is_online("auto"):
        raise UserError(
            "no W&B API key found: 'wandb login' stores one, WANDB_API_KEY gives one"
        )
    for folder in folders:
        config = load_any(folder)
        if not config.is_trained_here:
            print(f"{folder}: not sent: only runs that posbench trained have curves")
            continue
        tracking = dataclasses.replace(config.tracking, backend="wandb", mode="auto")
        with Run.open(folder, config, command=None) as run:
            tracker = Tracker(dataclasses.replace(config, tracking=tracking), run)
            run.tracker = tracker
            tracker.send()
        session = tracker.session
        if session is None:
            raise PosbenchError(f"W&B did not take {folder}")
        sent = max(0, len(run.rows) - session.starting_step)
        print(f"{folder}: {sent} rows: {session.url}")
