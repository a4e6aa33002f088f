"""`posbench bench`: how fast each encoding trains, and on a GPU the memory that takes.

Encodings take turns in one process. In each round, each repeats the update of `posbench
train` on random tokens, and its speed is divided by that of `none` in the same round,
so that the median is usable even on a busy machine.
"""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import torch

from posbench import encodings, machine
from posbench.config import compose
from posbench.config.overrides import by_key
from posbench.config.schema import Config
from posbench.data.batches import TrainingBatches
from posbench.errors import UserError, unknown
from posbench.model.gpt import build
from posbench.reports.render import Column, Table
from posbench.terminal.exits import plural
from posbench.training.step import Outcome, Trainer, begin_update

logger = logging.getLogger(__name__)

BASE = "none"  # what the other encodings are compared with
# a turn of the quickest contender lasts at least so long, far above the clock's
# resolution
TURN_SECONDS = 0.25


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model and its batch."""

    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int
    train_length: int
    batch_size: int


SHAPES = {
    "demo": Sizes(
        n_layers=4,
        d_model=128,
        n_heads=4,
        vocab_size=2048,
        train_length=64,
        batch_size=32,
    ),
    "3m": Sizes(
        n_layers=4,
        d_model=256,
        n_heads=4,
        vocab_size=2048,
        train_length=256,
        batch_size=8,
    ),
    "12m": Sizes(
        n_layers=6,
        d_model=384,
        n_heads=6,
        vocab_size=4096,
        train_length=256,
        batch_size=16,
    ),
    "124m": Sizes(
        n_layers=12,
        d_model=768,
        n_heads=12,
        vocab_size=50304,
        train_length=512,
        batch_size=16,
    ),
}


def bench(
    words: list[str], sizes: Sizes, rounds: int = 5, threads: int | None = None
) -> pd.DataFrame:
    """Measure encodings side by side.

    `words`: names of encodings (without any: all that need no option), and overrides
    such as `training.precision=fp32`.

    Returns:
        A row per encoding: `tokens_per_second` of training, the median over rounds by
        the wall clock; `of_none`, its ratio to `none` within a round, with the
        quartiles `of_none_low` and `of_none_high`; `peak_bytes`, the most that training
        holds, on CUDA alone. `attrs`: how it was measured.

    Raises UserError for an unknown name or override.
    """
    names, overrides = (
        [word for word in words if "=" not in word],
        [word for word in words if "=" in word],
    )
    configs = configurations(names, sizes, threads, overrides)
    training, (device, dtype) = configs[BASE].training, device_and_dtype(configs[BASE])
    updates, peaks = {}, {}
    for name, config in configs.items():
        machine.reset_peak_memory(device)
        held_bytes = (
            torch.cuda.memory_allocated(device) if device.type == "cuda" else math.nan
        )
        updates[name] = update_of(
            build(config, sizes.vocab_size).to(device), config, sizes.vocab_size
        )
        updates[name]()
        peaks[name] = machine.peak_memory(device) - held_bytes
    seconds = take_turns(updates, rounds, device)
    ratios = seconds.rdiv(seconds[BASE], axis=0)
    quartiles = {
        f"of_none_{end}": ratios.quantile(share)
        for end, share in (("low", 0.25), ("high", 0.75))
    }
    speeds = {
        "tokens_per_second": training.tokens_per_step / seconds.median(),
        "of_none": ratios.median(),
    }
    frame = pd.DataFrame(speeds | quartiles | {"peak_bytes": pd.Series(peaks)}).loc[
        names or list(configs)
    ]
    setup = (
        f"{training.batch_size} x {training.train_length} tokens,"
        f" {machine.dtype_name(dtype)}, {device}"
    )
    frame.attrs["how"] = (
        f"{setup}, {plural(torch.get_num_threads(), 'thread')}, medians of"
        f" {plural(rounds, 'round')}"
    )
    return frame.rename_axis("encoding").reset_index()


def sizes_of(shape: str, length: int | None = None) -> Sizes:
    """Return the sizes of a shape; another length keeps the tokens per batch. Raises
    UserError for an unknown shape.
    """
    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    sizes = SHAPES[shape]
    length, tokens = length or sizes.train_length, sizes.train_length * sizes.batch_size
    return dataclasses.replace(
        sizes, train_length=length, batch_size=max(1, tokens // length)
    )


def configurations(
    names: list[str], sizes: Sizes, threads: int | None, overrides: list[str]
) -> dict[str, Config]:
    """Return the configurations that `posbench train` would have at these sizes: for
    `none`, and for every name.
    """
    settings = {
        f"model.{key}": getattr(sizes, key)
        for key in ("n_layers", "d_model", "n_heads")
    }
    settings |= {
        f"training.{key}": getattr(sizes, key) for key in ("train_length", "batch_size")
    }
    # more tokens than any batch
    settings |= {"training.tokens": 10**12, "runtime.threads": threads or "null"}
    # so many tokens would switch it on
    settings |= {"evaluation.targets": 1, "runtime.compile": "false"}
    typed_keys = by_key(overrides)
    sections = ("model", "training", "runtime")
    if unread := [key for key in typed_keys if key.partition(".")[0] not in sections]:
        raise UserError(
            f"{unread[0]} is not for bench: expected encodings, model, training.* or"
            " runtime.*"
        )
    defaults = [
        f"{key}={value}" for key, value in settings.items() if key not in typed_keys
    ]
    configs = {}
    for name in [BASE, *(names or encodings.names())]:
        try:
            configs[name] = compose.single([f"encoding={name}", *defaults, *overrides])
        except UserError as error:
            if names or name == BASE:
                raise
            logger.info("left out: %s", error)
    return configs


def device_and_dtype(config: Config) -> tuple[torch.device, torch.dtype]:
    """Set threads and allocator; return the device and the dtype of matrix products."""
    machine.set_threads(config.runtime.threads)
    machine.keep_freed_memory()
    device = machine.current(machine.resolve(config.runtime.device))
    return device, machine.resolve_precision(config.training.precision, device)


def update_of(
    model: torch.nn.Module, config: Config, vocab_size: int
) -> Callable[[], None]:
    """Return a function that makes an update of `posbench train`, on the same random
    tokens in each call.
    """
    training, trainer = (
        config.training,
        Trainer(model, config, *device_and_dtype(config)),
    )
    ids = np.random.default_rng(0).integers(
        vocab_size, size=training.tokens_per_step + 1, dtype=np.uint16
    )
    batch = TrainingBatches(
        ids, training.train_length, training.batch_size * training.accumulation, seed=0
    ).batch(0)
    outcomes: list[Outcome] = []

    def update() -> None:
        # low: random tokens teach nothing
        outcomes.append(begin_update(trainer, batch, 0, rate=1e-4))
        if len(outcomes) > 1:
            outcomes.pop(0).read()  # one update late, as `posbench train` does on CUDA

    return update


def take_turns(
    contenders: Mapping[str, Callable[[], None]], rounds: int, device: torch.device
) -> pd.DataFrame:
    """Return seconds per call, a row per round. Each round calls all equally often and
    reverses the order before it.
    """
    if (load := os.getloadavg()[0]) + torch.get_num_threads() > (
        os.cpu_count() or 1
    ) + 0.5:
        logger.warning(
            "this machine is busy (load average %.1f): figures taken now are worth"
            " nothing",
            load,
        )
    # warms up, too
    quickest = min(
        min(_seconds(call, 1, device) for _ in range(3)) for call in contenders.values()
    )
    calls = math.ceil(TURN_SECONDS / quickest)
    orders = [list(contenders)[:: 1 if turn % 2 == 0 else -1] for turn in range(rounds)]
    return pd.DataFrame(
        [
            {name: _seconds(contenders[name], calls, device) for name in order}
            for order in orders
        ]
    )


def _seconds(call: Callable[[], None], calls: int, device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - started) / calls


def table(frame: pd.DataFrame) -> Table:
    """Return what `bench` measured as a table."""
    columns = [
        Column("encoding", "encoding", text=True),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("of_none", f"of {BASE}", ".2f"),
        Column(
            "quartiles",
            "quartiles",
            lambda row, _: f"{row['of_none_low']:.2f}-{row['of_none_high']:.2f}",
        ),
        Column("mib", "MiB", ",.0f"),
    ]
    return Table(
        "",
        frame.assign(mib=frame["peak_bytes"] / 2**20),
        columns,
        f"Training, {frame.attrs['how']}",
    )
