"""Helpers that test files share: a run of milliseconds, a text for it, the command
line, a folder's contents.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from posbench.cli import main
from posbench.config.overrides import LENGTH, RATIOS, WORDS
from posbench.config.schema import Config, EncodingConfig
from posbench.evaluation.subjects import Subject, numbers_of, on_host
from posbench.processes import World

# test each kill and each compiled scheme; otherwise `slow` tests some of them
EVERY = "POSBENCH_EVERY" in os.environ
SCRIPTS = Path(__file__).parents[1] / "scripts"
# A very small model, by its overrides; the files say how many tokens it trains on.
TINY = [
    "tracking=none",
    "data=text",
    "data.tokenizer=bytes",
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "training.train_length=16",
    "training.batch_size=4",
    "training.warmup_tokens=0",
    "evaluation.ratios=[1,2]",
    "evaluation.targets=8",
    "evaluation.blocks=8",
    "runtime.device=cpu",
    "runtime.threads=1",
    "runtime.validate_every_steps=0",
]


def changed(config: Config, **changes: Any) -> Config:
    """Return a configuration with `seed=1`, or `model={"n_layers": 1}`."""
    for name, value in changes.items():
        if isinstance(value, dict):
            changes[name] = dataclasses.replace(getattr(config, name), **value)
    return dataclasses.replace(config, **changes)


def change_record(folder: Path, **fields: Any) -> None:
    """Change fields in the `run.json` of a run folder."""
    path = folder / "run.json"
    record = json.loads(path.read_text("utf-8")) | fields
    path.write_text(json.dumps(record), "utf-8")


def encoded(config: Config, name: str, **options: Any) -> Config:
    """Return a configuration with another encoding."""
    return changed(config, encoding=EncodingConfig(name, options))


class Largest(TorchDispatchMode):
    """Record how many numbers the largest tensor has that is made meanwhile; a view
    counts as its whole storage.
    """

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        parts = made if isinstance(made, tuple | list) else (made,)
        for part in parts:
            if isinstance(part, Tensor):
                size = part.untyped_storage().nbytes() // part.element_size()
                self.numbers = max(self.numbers, size)
        return made


class ActingWorld(World):
    """A process that acts in the update that follows so many: before the optimizer's
    step, with the update's parameters and loss.
    """

    def __init__(self, step: int, act: Callable[..., Any]) -> None:
        super().__init__()
        self._updates_before = step
        self._act = act

    def sum_gradients(
        self, parameters: Sequence[nn.Parameter], loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self._updates_before == 0:
            self._act(parameters, loss)
        self._updates_before -= 1
        return super().sum_gradients(parameters, loss)


def spoil_update(parameters: Sequence[nn.Parameter], loss: Tensor) -> None:
    """Let an update's loss and gradients be no numbers."""
    loss.fill_(math.nan)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.fill_(math.nan)


@functools.cache
def script(name: str) -> Any:
    """Return a file of scripts/ as a module."""
    path = SCRIPTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write_text(folder: Path | str = ".") -> None:
    """Write `text.txt`, on which the small model trains."""
    sentences = [f"word{i * i % 97} follows number {i}." for i in range(3000)]
    text = " ".join(sentences)
    Path(folder, "text.txt").write_text(text, encoding="utf-8")


def write_words(folder: Path) -> None:
    """Write a `text.txt` of thirty words of random letters, in random order."""
    rng = random.Random(0)
    words = []
    for _ in range(30):
        length = rng.randint(2, 5)
        letters = rng.choices("abcdefgh", k=length)
        words.append("".join(letters))
    text = " ".join(rng.choices(words, k=8000))
    (folder / "text.txt").write_text(text, encoding="utf-8")


def each_once(words: Sequence[str]) -> list[str]:
    """Return the last word of each key. Tests put their own words after those of TINY,
    which would else be reported.
    """
    last = {}
    for word in words:
        key = word.partition("=")[0]
        key = key.removeprefix("evaluation.").removeprefix("runtime.")
        full = WORDS.get(key, key)
        if full == LENGTH:  # it sets the ratios
            full = RATIOS
        last[full] = word
    return list(last.values())


def posbench(*arguments: str) -> int:
    """Run the command line in this process; returns the exit code."""
    given = list(arguments)
    if arguments and arguments[0] in ("train", "sweep", "evaluate"):
        given = [arguments[0], *each_once(arguments[1:])]
    before = sys.argv
    sys.argv = ["posbench", *given]
    try:
        return main()
    finally:
        sys.argv = before
        os.environ.pop("POSBENCH_DEBUG", None)
        os.environ.pop("POSBENCH_QUIET", None)
        os.environ.pop("PYTHONSAFEPATH", None)


def start_child(work: Callable[[], None]) -> int:
    """Start `work` in a forked child, whose exit status is 0 if it does not raise;
    return its process id.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child to its end; return its exit status, negative for a
    signal.
    """
    _, status = os.waitpid(start_child(work), 0)
    return os.waitstatus_to_exitcode(status)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path there."""
    contents = {}
    for path in folder.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(folder))
            contents[name] = path.read_bytes()
    return contents


def without_room_beyond(length: int, subject: Any) -> Any:
    """Return the `logits` of a class of subjects, without memory for longer windows."""
    measured = subject.logits

    def logits(self: Any, ids: np.ndarray, scored: np.ndarray, first: int) -> Any:
        if ids.shape[1] > length + 1:
            raise MemoryError("no room")
        return measured(self, ids, scored, first)

    return logits


def nll_of(subject: Subject, ids: np.ndarray, scored: int, first: int) -> np.ndarray:
    """Return the nats (B, scored) of the last `scored` tokens of windows (B, C + 1);
    `first` as in `Subject.logits`.
    """
    (numbers,) = on_host([numbers_of(subject, ids, scored, first)])
    return numbers[0]


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition; fail if it never comes true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
