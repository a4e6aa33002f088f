"""transformers, imported where it is installed. What it raises becomes one line."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

from posbench import machine
from posbench.errors import PosbenchError, UserError, is_own_mistake


def transformers() -> Any:
    """Import transformers; UserError if it is not installed."""
    # what it logs as an error of a configuration, it also raises
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")
    # kernels are programs: the library would fetch them from the hub
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    try:
        module: Any = importlib.import_module("transformers")
    except ImportError:
        raise UserError(
            "this needs transformers: pip install 'posbench-runner[hf]'"
        ) from None
    module.utils.logging.disable_progress_bar()
    return module


@contextlib.contextmanager
def library_errors(
    problem: str, error_class: type[PosbenchError] = UserError
) -> Iterator[None]:
    """Turn whatever a library raises into one line; our own errors, our mistakes and a
    lack of memory stay what they are. What is deprecated in it concerns its own
    authors.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except Exception as error:  # transformers has no common class
        if isinstance(error, PosbenchError) or is_own_mistake(error):
            raise
        if machine.is_out_of_memory(error):
            raise
        raise error_class(
            f"{problem}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from None
