"""`posbench bench`: how fast each encoding trains, and on a GPU the memory that takes
and the share of the device's peak.

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
from posbench.config.overrides import by_key
from posbench.config.schema import Config
from posbench.data.batches import TrainingBatches
from posbench.errors import UserError, unknown
from posbench.launch import compose
from posbench.model.gpt import build, train_flops_per_token
from posbench.reports.render import Column, Table
from posbench.terminal.console import plural
from posbench.training.step import Outcome, Trainer, begin_update
from posbench.typed import rewritten

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


# layers, channels, heads, vocabulary, training length, sequences
SHAPES = {
    "demo": Sizes(4, 128, 4, 2048, 64, 32),
    "3m": Sizes(4, 256, 4, 2048, 256, 8),
    "12m": Sizes(6, 384, 6, 4096, 256, 16),
    "124m": Sizes(12, 768, 12, 50304, 512, 16),
}


def bench(words: list[str], sizes: Sizes, rounds: int = 5) -> pd.DataFrame:
    """Measure encodings side by side.

    `words`: names of encodings (without any: all that need no option), and overrides
    such as `training.precision=fp32` or `runtime.threads=1`.

    Returns:
        A row per encoding: `tokens_per_second` of training, the median over rounds by
        the wall clock; `of_none`, its ratio to `none` within a round, with the
        quartiles `of_none_low` and `of_none_high`; `peak_bytes`, the most that training
        holds, on CUDA alone; `of_peak`, the share of the device's peak of FLOP per
        second where that is known. `attrs`: how it was measured.

    Raises UserError for an unknown name or override.
    """
    names = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    configs = configurations(names, sizes, overrides)
    device, dtype = device_and_dtype(configs[BASE])

    updates = {}
    peaks = {}
    flops = {}  # of a token
    for name, config in configs.items():
        machine.reset_peak_memory(device)
        held_before = machine.peak_memory(device)
        model = build(config, sizes.vocab_size).to(device)
        length = config.training.train_length
        flops[name] = train_flops_per_token(model, length)
        updates[name] = update_of(model, config, sizes.vocab_size)
        updates[name]()
        peak = machine.peak_memory(device)
        if peak is not None and held_before is not None:
            peaks[name] = peak - held_before

    training = configs[BASE].training
    frame = compared(take_turns(updates, rounds, device), training.tokens_per_step)
    frame["peak_bytes"] = pd.Series(peaks, dtype=float)  # without a GPU there is none
    full_speed = machine.peak_flops(device, dtype) or math.nan
    flops_per_second = frame["tokens_per_second"] * pd.Series(flops)
    frame["of_peak"] = flops_per_second / full_speed
    frame = frame.loc[names or list(configs)]
    frame.attrs["how"] = (
        f"{training.batch_size} x {training.train_length} tokens,"
        f" {machine.dtype_name(dtype)}, {device},"
        f" {plural(torch.get_num_threads(), 'thread')}, medians of"
        f" {plural(rounds, 'round')}"
    )
    return frame.rename_axis("encoding").reset_index()


def compared(seconds: pd.DataFrame, tokens: int) -> pd.DataFrame:
    """Return the speed of each contender and its ratio to `none`.

    `seconds`: of an update of `tokens` tokens, a row per round and a column per
    contender.
    """
    of_none = seconds.rdiv(seconds[BASE], axis=0)
    frame = pd.DataFrame({"tokens_per_second": tokens / seconds.median()})
    frame["of_none"] = of_none.median()
    frame["of_none_low"] = of_none.quantile(0.25)
    frame["of_none_high"] = of_none.quantile(0.75)
    return frame


def sizes_of(shape: str) -> Sizes:
    """Return the sizes of a shape. Raises UserError if there is none of that name."""
    if shape not in SHAPES:
        raise unknown("shape", shape, SHAPES)
    return SHAPES[shape]


def configurations(
    names: list[str], sizes: Sizes, overrides: list[str]
) -> dict[str, Config]:
    """Return the configurations that `posbench train` would have at these sizes: for
    `none`, and for every name.
    """
    typed = by_key(overrides)
    for key in typed:
        if key.partition(".")[0] not in ("model", "training", "runtime"):
            raise UserError(
                f"{key} is not for bench: expected encodings, model, training.* or"
                " runtime.*"
            )

    words = [
        f"model.n_layers={sizes.n_layers}",
        f"model.d_model={sizes.d_model}",
        f"model.n_heads={sizes.n_heads}",
        f"training.train_length={sizes.train_length}",
        f"training.batch_size={sizes.batch_size}",
        "training.tokens=1e12",  # more than any batch
        "evaluation.targets=1",
    ]
    configs = {}
    for name in [BASE, *(names or encodings.names())]:
        try:
            # of a key that is given twice, the later value holds
            encoding = rewritten(name, f"encoding={name}")
            configs[name] = compose.single([encoding, *words, *overrides])
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
    training = config.training
    trainer = Trainer(model, config, *device_and_dtype(config))
    rng = np.random.default_rng(0)
    ids = rng.integers(vocab_size, size=training.tokens_per_step + 1, dtype=np.uint16)
    n_sequences = training.batch_size * training.accumulation
    batch = TrainingBatches(ids, training.train_length, n_sequences, seed=0).batch(0)
    outcomes: list[Outcome] = []

    def update() -> None:
        # low: random tokens teach nothing
        outcomes.append(begin_update(trainer, batch, 0, rate=1e-4))
        if len(outcomes) > 1:
            outcomes.pop(0).read()  # one update late, as `posbench train` does on CUDA

    return update


def take_turns(
    contenders: Mapping[str, Callable[[], None]],
    rounds: int,
    device: torch.device,
    turn_seconds: float | None = None,
) -> pd.DataFrame:
    """Return seconds per call, a row per round. Each round calls all equally often and
    reverses the order before it. `turn_seconds`: None = `TURN_SECONDS`.
    """
    load = os.getloadavg()[0]
    if load + torch.get_num_threads() > (os.cpu_count() or 1) + 0.5:
        logger.warning(
            "this machine is busy (load average %.1f): figures taken now are worth"
            " nothing",
            load,
        )

    quickest = math.inf
    for call in [*contenders.values()] * 3:  # warms up, too
        quickest = min(quickest, _seconds(call, 1, device))
    calls = math.ceil((turn_seconds or TURN_SECONDS) / quickest)

    order = list(contenders)
    turns = []
    for _ in range(rounds):
        turn = {}
        for name in order:
            turn[name] = _seconds(contenders[name], calls, device)
        turns.append(turn)
        order.reverse()
    return pd.DataFrame(turns)


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

    def quartiles(row: Mapping[str, float], _: object) -> str:
        return f"{row['of_none_low']:.2f}-{row['of_none_high']:.2f}"

    columns = [
        Column("encoding", "encoding", text=True),
        Column("tokens_per_second", "tokens/s", ",.0f"),
        Column("of_none", f"of {BASE}", ".2f"),
        Column("quartiles", "quartiles", quartiles),
        Column("mib", "MiB", ",.0f"),
        Column("of_peak", "of peak", ".0%"),
    ]
    in_mib = frame.assign(mib=frame["peak_bytes"] / 2**20)
    return Table("", in_mib, columns, f"Training, {frame.attrs['how']}")
