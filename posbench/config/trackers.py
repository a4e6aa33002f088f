"""The trackers that runs can be mirrored to: ours, and those of installed packages."""

import importlib.util

from posbench import installed
from posbench.config.schema import TrackingConfig
from posbench.errors import UserError, unknown

_OURS = ("csv", "none", "tensorboard", "wandb")


def names() -> list[str]:
    """Names of all trackers, sorted. A package cannot replace one of ours."""
    return sorted({*_OURS, *installed.points(installed.TRACKERS)})


def refuse_missing(tracking: TrackingConfig) -> None:
    """Refuse an unknown tracker, and one whose package is not installed. Imports no tracker."""
    if tracking.backend not in names():
        raise unknown("tracker", tracking.backend, names())
    if tracking.backend == "tensorboard" and not _has_files(importlib.util.find_spec("tensorboard")):
        raise UserError("tracking.backend is tensorboard, whose package is not installed: pip install tensorboard")


def _has_files(spec: object) -> bool:
    """Whether it is a package and not a folder that happens to have its name."""
    return getattr(spec, "origin", None) is not None
