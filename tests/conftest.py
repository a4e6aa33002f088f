"""Fixed seeds and one thread: every test gives the same numbers alone, together, and in
any order.
"""

import collections
import gc
import importlib
import logging
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import yaml

# off until all is imported: collection would slow the imports by a fifth
gc.set_threshold(0)
_OFFLINE = Path(__file__).with_name("offline")


def pytest_configure() -> None:
    """Keep this process, and all processes that it starts, off the network."""
    paths = [str(_OFFLINE)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(_OFFLINE))
    # the system's own, if there is one, has done its work
    sys.modules.pop("sitecustomize", None)
    importlib.import_module("sitecustomize")
    sys.path.remove(str(_OFFLINE))


def pytest_collection_finish() -> None:
    gc.freeze()
    # at the usual 700, collection takes a twentieth of the tests' time
    gc.set_threshold(20_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep one of n cases of a test marked `sample(n)` in `make test`; mark the others
    `slow`.

    The kept case is the last of the first n, the last but one of the next n, and so on.
    If it were always the last, some values of a product of two lists would never be
    chosen.
    """
    cases = collections.defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.split("[")[0]].append(item)
    for group in cases.values():
        (n,) = group[0].get_closest_marker("sample").args
        kept = set[int]()
        for number in range(len(group) // n):
            kept.add(n * number + (n - 1 - number) % n)
        if not kept:
            kept.add(len(group) - 1)
        for place, item in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def fixed_seed():
    import torch

    # torch.manual_seed also records a stack trace for devices yet to come
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def log_of_its_own(monkeypatch):
    """Start without handlers: a command binds one to the current stderr, which pytest
    closes after the test.
    """
    monkeypatch.setattr(logging.getLogger("posbench"), "handlers", [])


@pytest.fixture(autouse=True)
def collector():
    """Collect garbage again after a command that leaves it out, as its process ends."""
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def no_encodings_of_others():
    """Forget the classes that a test registers."""
    from posbench import encodings

    with mock.patch.dict(encodings.REGISTERED, clear=True):
        yield


@pytest.fixture(autouse=True, scope="session")
def one_quick_process():
    """Leave out what commands do only for the sake of long runs. Give how many tokens
    the mixture of readers has elsewhere.
    """
    import torch

    from posbench import machine
    from posbench.evaluation import mixture

    torch.set_num_threads(1)  # at these sizes more threads only wait for each other
    torch.set_flush_denormal(True)  # as in every command
    usual = mixture.VALIDATION
    with pytest.MonkeyPatch.context() as patch:
        # this process would keep the memory of all tests
        patch.setattr(machine, "keep_freed_memory", lambda: None)
        # it costs milliseconds, and no test loses power
        patch.setattr(os, "fsync", lambda _: None)
        # The mixture of readers takes a second to choose its weights for such tokens as
        # a text has, however few are trained on: a third of the tests' time.
        patch.setattr(mixture, "VALIDATION", 64)
        # Composing configurations is a sixth of the tests' time. PyYAML's two parsers
        # give the same result.
        patch.setattr(yaml, "SafeLoader", getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        yield usual


@pytest.fixture
def usual_mixture(one_quick_process, monkeypatch):
    """Let the mixture choose its weights as in processes that a test starts."""
    from posbench.evaluation import mixture

    monkeypatch.setattr(mixture, "VALIDATION", one_quick_process)


# A model that runs in milliseconds, and 12 updates of 8 sequences of 16 bytes.
SMALL = """
    study=test tracking=none tracking.mode=offline
    data=text data.tokenizer=bytes data.vocab_size=257 data.test_pieces=null
    model.n_layers=2 model.n_heads=2 model.d_model=32
    training.train_length=16 training.batch_size=8 training.tokens=1536
    training.warmup_tokens=256 training.learning_rate=0.003 training.precision=fp32
    evaluation.targets=8 evaluation.blocks=16 evaluation.batch_tokens=4096
    evaluation.protocols=[fixed_target,nonoverlap] evaluation.ratios=[1,2,4]
    runtime.device=cpu runtime.threads=1 runtime.compile=false
    runtime.log_every_steps=1 runtime.validate_every_steps=0
    runtime.checkpoint_every_steps=5
"""


@pytest.fixture(scope="session")
def tiny_config():
    """Return a small run's configuration; each test replaces what it is about."""
    from posbench.launch import compose

    return compose.single(SMALL.split())
