"""Optimizers, trackers and probes by name: each stands in a file of its own, and is
found by the file's name.
"""

import importlib
from pathlib import Path
from typing import Any

OPTIMIZERS = "training.optimizers"
TRACKERS = "tracking.sessions"


def names(package: str) -> list[str]:
    """Return the names of a package's modules, sorted. Imports none of them."""
    folder = Path(__file__).parent.joinpath(*package.split("."))
    return sorted(path.stem for path in folder.glob("[!_]*.py"))


def load(package: str, name: str) -> Any:
    """Return the class of a module: it has the module's name without underscores, in
    any case.
    """
    module = importlib.import_module(f"posbench.{package}.{name}")
    spelling = name.replace("_", "")
    for attribute, cls in vars(module).items():
        if isinstance(cls, type) and attribute.lower() == spelling:
            return cls
    raise ImportError(f"{module.__file__} has no class {spelling}")
