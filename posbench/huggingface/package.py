"""transformers itself: its import, its silence, and its table of causal language models."""

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from posbench.errors import UserError


def transformers() -> Any:
    """Import the library; UserError if it is not installed."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # kernels are programs: the library would fetch them from the hub
    try:
        import transformers
    except ImportError:
        raise UserError("a HuggingFace model needs transformers: pip install 'transformers>=5.23,<5.24'") from None
    return transformers


def causal_models() -> dict[str, str]:
    """The library's own table: the class of a causal language model for each `model_type`."""
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's reports and bars; posbench's own error line has the content."""
    logger, shown = logging.getLogger("transformers"), transformers().utils.logging
    level, bars = logger.level, shown.is_progress_bar_enabled()
    logger.setLevel(logging.CRITICAL)
    shown.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            shown.enable_progress_bar()


def line(error: object) -> str:
    """What an error of the library says, in one line."""
    said = f"it has no {error}".splitlines() if isinstance(error, KeyError) else str(error).splitlines()
    return " ".join(part.strip() for part in said[:2])[:300] if said else type(error).__name__
