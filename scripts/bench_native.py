"""What the kernels in C++ gain: training steps of encodings with them and without, by turns in one process.

    python scripts/bench_native.py none rope alibi --shape 3m --threads 2
    python scripts/bench_native.py none fox cope --shape 3m --length 1024 runtime.compile=true

Milliseconds per step are medians over rounds of two steps each; *gain* is the median of the ratios within rounds, with
quartiles, *of none* the speed relative to the model without an encoding in the same round, if `none` is named.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from posbench import machine
from posbench.errors import PosbenchError
from posbench.kernels import native
from posbench.model import build
from posbench.speed import bench
from posbench.speed.bench import Sizes, TrainingStep

WARM_UP, STEPS = 4, 2
USED = (True, False)

Step = Callable[[], object]
Times = dict[tuple[str, bool], list[float]]


def use(kernels: bool) -> None:
    vars(native)["binary"] = _binary if kernels else lambda: None


_binary = native.binary


def seconds(step: Step, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measure(steps: dict[str, Step], rounds: int) -> Times:
    times: Times = {(name, used): [] for name in steps for used in USED}
    for round_ in range(-1, rounds):
        for name, step in steps.items():
            for used in USED:
                use(used)
                if round_ < 0:
                    seconds(step, WARM_UP)
                else:
                    times[name, used].append(seconds(step, STEPS))
    return times


def table(times: Times) -> str:
    def ratios(over: tuple[str, bool], under: tuple[str, bool]) -> list[float]:
        return [a / b for a, b in zip(times[over], times[under], strict=True)]

    rows = []
    for name in dict.fromkeys(name for name, _ in times):
        low, middle, high = statistics.quantiles(ratios((name, False), (name, True)), n=4)
        row = [f"{statistics.median(times[name, used]) * 1e3:.1f} ms" for used in (False, True)]
        row += [f"{middle:.2f} ({low:.2f}-{high:.2f})"]
        if ("none", True) in times:
            row += [f"{statistics.median(ratios(('none', used), (name, used))):.2f}" for used in (False, True)]
        rows.append([name, *row])
    header = ["encoding", "without", "with", "gain", "of none, without", "of none, with"]
    return bench.markdown(header[: len(rows[0])], rows)


def step_of(name: str, sizes: Sizes, threads: int | None, overrides: list[str]) -> Step:
    config = bench.configuration(name, sizes, threads, overrides)
    device, dtype = bench.setup(config)
    text = bench.random_text(sizes.vocab_size, config)
    return TrainingStep(build(config, sizes.vocab_size), config, text, device, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", help="encodings, and overrides such as model=llama")
    parser.add_argument("--shape", default="3m", help=", ".join(bench.SHAPES))
    parser.add_argument("--length", type=int, help="training length, with as many tokens per batch")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    if native.binary() is None:
        parser.error(f"attention in bf16 on this machine: {native.described()}")
    machine.keep_freed_memory()
    overrides = ["runtime.device=cpu", *(word for word in given.given if "=" in word)]
    try:
        sizes = bench.find_shape(given.shape, given.length)
        names = [word for word in given.given if "=" not in word]
        steps = {name: step_of(name, sizes, given.threads, overrides) for name in names}
    except PosbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    print(table(measure(steps, given.rounds)))
    print(
        f"\n{sizes.n_layers} layers, {sizes.n_heads} heads, width {sizes.d_model}, "
        f"{sizes.batch_size} x {sizes.train_length} tokens per step, {torch.get_num_threads()} threads, "
        f"{given.rounds} rounds, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
