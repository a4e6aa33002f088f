"""What a sweep would take: runs, tokens, time on this machine, and disk. It writes nothing and reads no text.

Time comes from a short measurement of the steps themselves: updates of training on random tokens, and forward passes at
the training length and at the longest context. Between the two the cost of a token is linear in the context.
"""

import dataclasses
import itertools
import json
import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from posbench import machine
from posbench.bench.speed import setup, training_step
from posbench.config.schema import Config
from posbench.config.size import vocabulary
from posbench.data.tokens import TokenSplit
from posbench.evaluation.plan import measurements
from posbench.evaluation.protocols import Windows
from posbench.evaluation.score import score
from posbench.evaluation.trained import TrainedGPT
from posbench.evaluation.variants import AS_TRAINED
from posbench.launch import states, tuning
from posbench.launch.plans import Plan
from posbench.model.gpt import GPT, build
from posbench.report.comparison import load
from posbench.run_folder.folder import has_weights
from posbench.terminal.exits import counted

logger = logging.getLogger(__name__)
MEASURED = 8  # kinds of runs at most, of each size some; the others cost the median of their size
_ENOUGH = 1.0  # seconds of measuring one step
_TEXT = 2**21  # tokens of the random text on which windows are planned
_BYTES_TRAINED = 12  # of a parameter in a checkpoint: its value and Adam's two averages, in fp32
_BYTES_CLEANED = 4


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one run."""

    training: float  # seconds with the machine to itself
    evaluation: float  # likewise, of all rows
    bytes: int  # of its checkpoints when it is done

    def seconds(self, trained: bool) -> float:
        return self.evaluation + (0.0 if trained else self.training)


def forecast(todo: list[Plan], threads: int) -> list[Cost]:
    """The cost of every plan. Plans that differ in their seed only are one kind, measured once.

    Kinds that differ only in what is compared, such as the encoding, have one size.

    Args:
        threads: CPU threads of each run, unless its configuration sets them.
    """
    kinds: dict[tuple[Path, str], Config] = {}
    for plan in todo:
        kinds.setdefault(_kind(plan), plan.with_threads(threads).config)
    by_size: dict[str, list[tuple[Path, str]]] = {}
    for kind, config in kinds.items():
        by_size.setdefault(json.dumps(load.asked(config), sort_keys=True), []).append(kind)
    in_turn = (kind for each in itertools.zip_longest(*by_size.values()) for kind in each if kind is not None)
    chosen = [*itertools.islice(in_turn, MEASURED)]
    logger.info("measuring the steps of %s of runs", counted(len(chosen), "kind"))
    measured = {kind: _cost(kinds[kind]) for kind in chosen}
    usual = {
        kind: _median([measured[one] for one in alike if one in measured] or list(measured.values()))
        for alike in by_size.values()
        for kind in alike
    }
    return [measured.get(_kind(plan), usual[_kind(plan)]) for plan in todo]


def _median(costs: list[Cost]) -> Cost:
    middle = (statistics.median(each) for each in zip(*map(dataclasses.astuple, costs), strict=True))
    return Cost(next(middle), next(middle), round(next(middle)))


def _kind(plan: Plan) -> tuple[Path, str]:
    """The key of runs that differ in their seed only; trials of learning rates are a study of their own."""
    return plan.folder.parent, tuning.group(plan)


def told(todo: list[Plan], left: list[Plan], at_a_time: int, threads: int) -> str:
    """What `posbench sweep --dry-run` prints.

    Args:
        left: those that are not finished.
        at_a_time: runs that this machine would do at a time, with so many CPU threads each.
    """
    trained = [states.is_trained(plan) and has_weights(plan.folder) for plan in left]
    to_train = [plan.config.training for plan, known in zip(left, trained, strict=True) if not known]
    tokens = sum(training.steps * training.tokens_per_step for training in to_train)
    only = f" ({sum(trained)} of them trained, their evaluation is left)" if any(trained) else ""
    done = f"{counted(len(todo), 'run')}: {len(todo) - len(left)} finished"
    lines = [f"{done}, {len(left)} to do{only}, {tokens:,} tokens to train on."]
    if left:
        found = forecast(left, threads)
        seconds = [cost.seconds(known) for cost, known in zip(found, trained, strict=True)]
        kept = sum(cost.bytes for cost in found)
        whole = max(sum(seconds) / min(at_a_time, len(left), _room(left[0], threads)), max(seconds))
        each = {_time(min(seconds)): None, _time(max(seconds)): None}
        lines += [
            f"About {_time(whole)} on this machine, {counted(at_a_time, 'run')} at a time, if nothing else runs on it; "
            f"a run by itself takes {' to '.join(each)}. Measured just now: {_measured(left)}.",
            f"Checkpoints: {kept / 1e9:,.2f} GB when all is done.",
        ]
        if any(plan.config.data.task is not None for plan in left):
            lines.append("The evaluation of tasks is not counted.")
    return "\n".join([*lines, "Nothing was run or written."])


def _room(plan: Plan, threads: int) -> float:
    """How many runs the machine's cores have threads for. Runs beyond that wait for each other."""
    runtime = plan.with_threads(threads).config.runtime
    if machine.resolve(runtime.device).type != "cpu":
        return math.inf
    return max(1.0, machine.cores() / (runtime.threads or threads) / (runtime.processes or 1))


def _measured(left: list[Plan]) -> str:
    count = len({_kind(plan) for plan in left})
    kinds = f"{counted(count, 'kind')} of runs"
    return kinds if count <= MEASURED else f"{MEASURED} of {kinds}, the others at the median of their size"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _cost(config: Config) -> Cost:
    model = build(config, vocabulary(config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    each = _BYTES_CLEANED if config.runtime.clean else _BYTES_TRAINED
    kept = 1 if config.runtime.clean or config.training.steps <= config.runtime.checkpoint_every_steps else 2
    update = _seconds(training_step(config, vocabulary(config), model))
    return Cost(config.training.steps * update, _evaluation(config, model), parameters * each * kept)


def _evaluation(config: Config, model: GPT) -> float:
    """Seconds of all forward passes of the evaluation after training, and of those on the way."""
    train_length = config.training.train_length
    if config.data.task is not None:
        return 0.0
    ids = np.random.default_rng(0).integers(vocabulary(config), size=_TEXT, dtype=np.uint32)
    text = TokenSplit(ids, np.array([0, _TEXT]))
    rows = [row for row in measurements(config.evaluation, text, train_length) if row.possible]
    passes: Counter[int] = Counter()  # tokens read, by length
    for forward in {row.forward for row in rows}:
        passes[forward.length] += sum(len(windows.starts) * windows.length for windows in forward.windows)
    for row in rows:
        if row.protocol == "fixed_target" and row.forward.variant == AS_TRAINED:
            read = sum(len(windows.starts) * windows.length for windows in row.forward.windows)
            passes[row.length] += len(config.evaluation.at_tokens) * read
    device, dtype = setup(config)
    subject = TrainedGPT(model.to(device).eval(), config.encoding.name, train_length, device, dtype)

    def of_token(length: int) -> float:
        starts = np.zeros(max(1, config.evaluation.batch_tokens // length), np.int64)
        windows = Windows(length, length, starts, starts, "concat")
        return _seconds(lambda: score(subject, text, windows, config.evaluation.batch_tokens)) / len(starts) / length

    if not passes:  # the text is too short for any length
        return 0.0
    ends = sorted({train_length, max(passes)})
    if model.encoding.max_length is not None:
        ends = [min(end, model.encoding.max_length) for end in ends]
    costs = [of_token(length) for length in ends]
    return sum(tokens * float(np.interp(length, ends, costs)) for length, tokens in passes.items())


def _seconds(step: Callable[[], object]) -> float:
    """The shortest time of a call: what a busy machine disturbs least. A first call compiles and is not counted."""
    # With one CPU thread the processor's time is measured: other processes hardly change it.
    clock = time.process_time if torch.get_num_threads() == 1 and not torch.cuda.is_available() else time.perf_counter
    times: list[float] = []
    step()
    while sum(times) < _ENOUGH:
        started = clock()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(clock() - started)
    return min(times)
