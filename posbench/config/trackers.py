"""The trackers that runs can be mirrored to."""

import importlib.util

from posbench.config.schema import TrackingConfig
from posbench.errors import UserError, unknown

NAMES = ("none", "tensorboard", "wandb")


def refuse_missing(tracking: TrackingConfig) -> None:
    """Refuse an unknown tracker, and TensorBoard where its package is not installed."""
    if tracking.backend not in NAMES:
        raise unknown("tracker", tracking.backend, NAMES)
    # A folder that happens to have its name has no origin.
    if tracking.backend == "tensorboard" and getattr(importlib.util.find_spec("tensorboard"), "origin", None) is None:
        raise UserError("tracking.backend is tensorboard, whose package is not installed: pip install tensorboard")
