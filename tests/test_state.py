"""A run from Python has torch's state of a fresh process, and leaves the caller's as it
was.
"""

import contextlib
import logging
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.special  # noqa: F401  # which adds to the filters of warnings when it is first imported
import torch
from hydra.core.global_hydra import GlobalHydra
from support import TINY, write_words

import posbench
from posbench.run.rows import read_rows

WORDS = [*TINY, "data.path=text.txt", "training.tokens=256", "runtime.cache=cache"]
Caller = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def coarse_products() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextlib.contextmanager
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


CALLERS: dict[str, Caller] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "coarse products": coarse_products,
    "two threads": two_threads,
}


def state() -> dict[str, Any]:
    """What a caller's process has: its own settings, torch's, and the random
    streams.
    """
    log = logging.getLogger("posbench")
    smallest = torch.full((1,), 2.0**-149, dtype=torch.float32, device="cpu")
    return {
        "autocast": torch.is_autocast_enabled("cpu"),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "subnormals": bool((smallest * 1.0).item() > 0),
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "log": (list(log.handlers), log.level),
        "environment": dict(os.environ),
        "signals": signal.getsignal(signal.SIGINT),
        "hydra": GlobalHydra.instance().hydra,
        "folder": os.getcwd(),
        "filters": list(warnings.filters),
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    write_words(folder)
    return folder


@pytest.fixture(scope="module")
def losses(text):
    """The losses of a run that nothing surrounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(text)
        return losses_of("alone")


def losses_of(study: str) -> list[Any]:
    run = posbench.train([*WORDS, f"study={study}"])
    posbench.evaluate(run, ["ratio=1,2,4"])
    found = []
    for row in read_rows(run.folder):
        found += [row.get("train/loss"), row.get("nll"), row.get("dtype")]
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("surrounding", CALLERS)
def test_a_run_is_the_same_whatever_surrounds_it(
    text, losses, monkeypatch, surrounding
):
    monkeypatch.chdir(text)

    with CALLERS[surrounding]():
        before = state()
        inside = losses_of(surrounding.replace(" ", "_"))
        after = state()

    assert inside == losses
    assert after == before


def test_a_run_leaves_flush_to_zero_as_the_caller_has_it(text, monkeypatch):
    monkeypatch.chdir(text)
    was = torch.set_flush_denormal(False)
    assert was
    assert state()["subnormals"]

    losses_of("flush")

    assert state()["subnormals"]
