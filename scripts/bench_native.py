"""The gain of the C++ kernels: training steps of encodings with and without them, in turns in one process.

    python scripts/bench_native.py none rope alibi --shape 3m --threads 2
    python scripts/bench_native.py none fox cope --shape 3m --length 1024 runtime.compile=true

Milliseconds per step are medians over rounds of two steps each; *gain* is the median of the ratios within rounds, with
quartiles, *of none* the speed relative to the model without an encoding in the same round, if `none` is named.
"""

import statistics
import time
from collections.abc import Callable

import arguments
import torch

from posbench import machine
from posbench.bench import speed
from posbench.kernels import native

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
    return speed.markdown(header[: len(rows[0])], rows)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("given", nargs="+", help="encodings, and overrides such as model=llama")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_intermixed_args()
    if native.binary() is None:
        parser.error(f"attention in bf16 on this machine: {native.described()}")
    machine.keep_freed_memory()
    overrides = ["runtime.device=cpu", *(word for word in given.given if "=" in word)]
    with arguments.errors_in_one_line():
        sizes = speed.find_shape(given.shape, given.length)
        configs = {w: speed.configuration(w, sizes, given.threads, overrides) for w in given.given if "=" not in w}
        steps: dict[str, Step] = {
            name: speed.training_step(config, sizes.vocab_size) for name, config in configs.items()
        }
    print(table(measure(steps, given.rounds)))
    print(
        f"\n{sizes.n_layers} layers, {sizes.n_heads} heads, width {sizes.d_model}, "
        f"{sizes.batch_size} x {sizes.train_length} tokens per step, {torch.get_num_threads()} threads, "
        f"{given.rounds} rounds, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
