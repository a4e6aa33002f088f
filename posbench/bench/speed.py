"""`posbench bench`: how fast each encoding trains and evaluates, and the memory that a step takes.

In each round every encoding repeats the very step of `posbench train` on random tokens, and its speed is divided by
that of `none` in the same round: of such ratios even a restless machine gives a usable median.
"""

import dataclasses
import functools
import json
import logging
import math
import re

import numpy as np
import torch
from torch import nn

from posbench import encodings, machine
from posbench.bench.timing import Call, Timings, load_average, step_memory, take_turns
from posbench.config import compose
from posbench.config.overrides import LENGTH, parted, refuse_twice
from posbench.config.schema import Config
from posbench.data.batches import TrainingBatches
from posbench.data.tokens import TokenSplit
from posbench.errors import UserError, unknown
from posbench.evaluation.protocols import Windows
from posbench.evaluation.score import score
from posbench.evaluation.trained import TrainedGPT
from posbench.model.gpt import GPT, build
from posbench.terminal import console, exits, tables
from posbench.training.step import Outcome, begin_update, learner_for

logger = logging.getLogger(__name__)

BASE = "none"  # what the other encodings are compared with
LENGTH_RATIOS = (1, 4, 16)  # evaluated lengths, as multiples of the training length
LEARNING_RATE = 1e-4  # low: random tokens teach nothing, and the loss must stay finite


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model and its batch."""

    n_layers: int
    d_model: int
    n_heads: int
    vocab_size: int
    train_length: int
    batch_size: int

    def at(self, length: int) -> "Sizes":
        """Another length with as many tokens per batch, or one sequence."""
        batch_size = max(1, self.train_length * self.batch_size // length)
        return dataclasses.replace(self, train_length=length, batch_size=batch_size)


SHAPES = {
    "demo": Sizes(n_layers=4, d_model=128, n_heads=4, vocab_size=2048, train_length=64, batch_size=32),
    "3m": Sizes(n_layers=4, d_model=256, n_heads=4, vocab_size=2048, train_length=256, batch_size=8),
    "12m": Sizes(n_layers=6, d_model=384, n_heads=6, vocab_size=4096, train_length=256, batch_size=16),
    "124m": Sizes(n_layers=12, d_model=768, n_heads=12, vocab_size=50304, train_length=512, batch_size=16),
}


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """Speed of evaluation at one length; None beyond the end of an encoding's table."""

    length: int
    tokens_per_second: float | None = None
    ratio_to_none: float | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """One encoding. Speeds and ratios are medians over the rounds; low and high are quartiles of the same ratios."""

    encoding: str
    shape: str
    train_length: int
    batch_size: int
    device: str
    dtype: str
    threads: int
    rounds: int
    load_average: float  # of the machine before the start
    parameters: int
    ratio_to_none: float  # of train_tokens_per_second
    ratio_to_none_low: float
    ratio_to_none_high: float
    train_tokens_per_second: float  # by the wall clock
    peak_memory_bytes: int  # weights, optimizer state, and all that one step holds at its fullest
    evaluation: tuple[Evaluated, ...]


def main(
    words: list[str],
    shape: str = "demo",
    length: int | None = None,
    rounds: int = 5,
    threads: int | None = None,
    as_json: bool = False,
) -> None:
    """Measure and print.

    Args:
        words: names of encodings, and overrides such as `training.precision=fp32`.
        as_json: print JSON. The others: see `measure`.

    Raises:
        UserError: an unknown name, shape or override.
    """
    console.log_to_terminal()
    names, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    keys = [parted(override)[0] for override in overrides]
    refuse_twice(keys)
    if LENGTH in keys:
        raise UserError("bench scores 1, 4 and 16 training lengths: --length sets the training length")
    if "evaluation.precision" in keys:
        raise UserError("bench trains and evaluates in one precision: training.precision sets it")
    results = measure(names, shape, length, rounds, threads, overrides)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=2, allow_nan=False))
    else:
        _print_table(results)


def measure(
    names: list[str],
    shape: str = "demo",
    length: int | None = None,
    rounds: int = 5,
    threads: int | None = None,
    overrides: list[str] | None = None,
) -> list[Result]:
    """Measure encodings side by side; `none` runs beside them whether it is asked for or not.

    Args:
        names: of encodings; none named: all that need no option.
        length: training length in tokens instead of the shape's own, with as many tokens per batch.
        threads: CPU threads; None = as torch chooses.
        overrides: of the configuration that the shape gives.

    Raises:
        UserError: an unknown name, shape or override.
    """
    sizes = find_shape(shape, length)
    configs = configurations(names, sizes, threads, overrides or [])
    base = configs[BASE]
    device, dtype = setup(base)
    machine.keep_freed_memory()
    load = load_average(torch.get_num_threads())
    text = random_text(sizes.vocab_size, base)
    models = {name: build(config, sizes.vocab_size).to(device) for name, config in configs.items()}
    steps = {name: TrainingStep(model, configs[name], text, device, dtype) for name, model in models.items()}
    memory = {name: step_memory(models[name], step.learner.optimizer, step, device) for name, step in steps.items()}
    logger.info("training: %d rounds of %s", rounds, ", ".join(models))
    trained = take_turns(steps, rounds, device)
    lengths = [ratio * base.training.train_length for ratio in LENGTH_RATIOS]
    evaluated = {window: _evaluate(models, text, window, rounds, device, dtype) for window in lengths}
    tokens = base.training.tokens_per_step
    return [
        Result(
            encoding=name,
            shape=shape,
            train_length=base.training.train_length,
            batch_size=base.training.batch_size,
            device=str(device),
            dtype=machine.dtype_name(dtype),
            threads=torch.get_num_threads(),
            rounds=rounds,
            load_average=load,
            parameters=sum(p.numel() for p in models[name].parameters()),
            ratio_to_none=trained.ratio(name, BASE),
            ratio_to_none_low=trained.ratio(name, BASE, quantile=0.25),
            ratio_to_none_high=trained.ratio(name, BASE, quantile=0.75),
            train_tokens_per_second=float(np.median(tokens / trained.seconds[name])),
            peak_memory_bytes=memory[name],
            evaluation=tuple(_evaluated(name, window, len(text.ids), t) for window, t in evaluated.items()),
        )
        for name in (dict.fromkeys(names) or configs)
    ]


# -- what is measured --------------------------------------------------------------------------------------------------


def find_shape(name: str, length: int | None = None) -> Sizes:
    """The sizes that go by a name; UserError if there are none."""
    if name not in SHAPES:
        if millions := re.fullmatch(r"0*([1-9]\d*)m", name.lower()):  # 125m is nearer to 124m than to 12m
            name_of = {1: "demo"} | {int(known[:-1]): known for known in SHAPES if known != "demo"}
            near = f": did you mean '{name_of[min(name_of, key=lambda each: abs(math.log(each / int(millions[1]))))]}'?"
            raise unknown("shape", name, SHAPES, near=near)
        raise unknown("shape", name, SHAPES)
    return SHAPES[name] if length is None else SHAPES[name].at(length)


def configurations(names: list[str], sizes: Sizes, threads: int | None, overrides: list[str]) -> dict[str, Config]:
    """A configuration for `none` and every name, as `posbench train` would compose it; all names if there are none.

    Raises:
        UserError: an unknown name or override, or an encoding asked for by name that needs an option.
    """
    compose = functools.partial(configuration, sizes=sizes, threads=threads, overrides=overrides)
    configs = {BASE: compose(BASE)}
    for name in names or encodings.names():
        try:
            configs[name] = compose(name)
        except UserError as error:
            if names:
                raise
            logger.info("left out: %s", error)
    return configs


def configuration(name: str, sizes: Sizes, threads: int | None, overrides: list[str]) -> Config:
    given = {
        "encoding": name,
        "model.n_layers": sizes.n_layers,
        "model.d_model": sizes.d_model,
        "model.n_heads": sizes.n_heads,
        "training.train_length": sizes.train_length,
        "training.batch_size": sizes.batch_size,
        "training.tokens": 10**12,  # no fewer than any batch has
        "evaluation.targets": 1,
        "runtime.threads": threads or "null",
        "runtime.compile": "false",  # unless it is asked for: by so many tokens it would pay
    }
    typed = {parted(override)[0] for override in overrides}
    return compose.single([*(f"{key}={value}" for key, value in given.items() if key not in typed), *overrides])


def setup(config: Config) -> tuple[torch.device, torch.dtype]:
    """Set the number of threads; returns the device and the dtype of matrix products."""
    device = machine.current(machine.resolve(config.runtime.device))
    machine.set_threads(config.runtime.threads)
    return device, machine.resolve_precision(config.training.precision, device)


def random_text(vocab_size: int, config: Config) -> TokenSplit:
    """Random tokens, enough for a batch and for a window of every evaluated length."""
    longest = max(LENGTH_RATIOS) * config.training.train_length
    size = max(config.training.tokens_per_step, longest) + 1
    return TokenSplit(np.random.default_rng(0).integers(vocab_size, size=size, dtype=np.uint16), np.array([0, size]))


class TrainingStep:
    """The optimizer step of `posbench train`, on the same batch whenever it is called."""

    def __init__(
        self, model: nn.Module, config: Config, text: TokenSplit, device: torch.device, dtype: torch.dtype
    ) -> None:
        training = config.training
        self.learner = learner_for(model, config, device, dtype)
        self._batches = TrainingBatches(
            text.ids, training.train_length, training.batch_size * training.accumulation, seed=0
        )
        self._newest: Outcome | None = None

    def __call__(self) -> None:
        before, self._newest = self._newest, begin_update(self.learner, self._batches.batch(0), 0, LEARNING_RATE)
        if before is not None:
            before.read()  # one update late, as `posbench train` on CUDA


def _evaluate(
    models: dict[str, GPT], text: TokenSplit, length: int, rounds: int, device: torch.device, dtype: torch.dtype
) -> Timings:
    """Timings of scoring the text in windows of this length, of all encodings that are defined so far."""
    starts = np.arange(0, len(text.ids) - length, length)
    windows = Windows(length, length, starts, np.zeros_like(starts), "concat")

    def scoring(name: str, model: GPT) -> Call:
        subject = TrainedGPT(model, name, length, device, dtype)
        return lambda: score(subject, text, windows, batch_tokens=len(text.ids))

    defined = {
        name: m for name, m in models.items() if m.encoding.max_length is None or m.encoding.max_length >= length
    }
    logger.info("evaluation at %d tokens: %d rounds of %s", length, rounds, ", ".join(defined))
    return take_turns({name: scoring(name, model) for name, model in defined.items()}, rounds, device)


def _evaluated(name: str, length: int, size: int, timings: Timings) -> Evaluated:
    if name not in timings.seconds:
        return Evaluated(length)
    tokens = (size - 1) // length * length
    return Evaluated(
        length,
        tokens_per_second=float(np.median(tokens / timings.seconds[name])),
        ratio_to_none=timings.ratio(name, BASE),
    )


# -- how it is printed -------------------------------------------------------------------------------------------------


# Columns that a narrow terminal leaves out, the least important first: quartiles, memory.
_SPARE = (3, 4)


def _headers(result: Result) -> list[str]:
    lengths = [f"eval {one.length:,}" for one in result.evaluation]
    return ["encoding", "train", "of none", "quartiles", "MiB", *lengths]


def _cells(result: Result) -> list[str]:
    return [
        result.encoding,
        f"{result.train_tokens_per_second:,.0f}",
        f"{result.ratio_to_none:.2f}",
        f"{result.ratio_to_none_low:.2f}-{result.ratio_to_none_high:.2f}",
        f"{result.peak_memory_bytes / 2**20:,.0f}",
        *("-" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}" for one in result.evaluation),
    ]


def _caption(result: Result) -> str:
    return (
        f"Tokens per second in training and in evaluation by length; {result.shape}, "
        f"{result.batch_size} x {result.train_length} tokens per step, "
        f"{result.dtype}, {result.device}, {exits.counted(result.threads, 'thread')}, "
        f"medians of {result.rounds} rounds. torch {torch.__version__}."
    )


def _print_table(results: list[Result]) -> None:
    out = console.stdout()
    table = tables.table(out, caption=_caption(results[0]), tight=True)
    headers, rows = _headers(results[0]), [_cells(result) for result in results]
    longest = [
        max(len(word) for cell in column for word in cell.split()) for column in zip(headers, *rows, strict=True)
    ]
    shown = tables.fitting(longest, _SPARE, out.width, tables.TIGHT)
    for header in (headers[at] for at in shown):
        table.add_column(header, justify="left" if header == "encoding" else "right", no_wrap=header == "encoding")
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    out.print(table)
