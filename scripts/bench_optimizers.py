"""What an update costs with each optimizer, as a ratio to AdamW's in the same round.

    python scripts/bench_optimizers.py [words of `posbench train`]

On a CPU its own seconds count, so that the ratio holds on a busy machine, too.
"""

import sys
import time

import pandas as pd
import torch

from posbench import registry
from posbench.bench import device_and_dtype, update_of
from posbench.launch import compose
from posbench.model.gpt import build

EXPERIMENTS = ["demo", "reader", "reader_wide"]
ROUNDS = 15
WARM_UP = 3  # rounds that are not counted


def seconds(update, device: torch.device) -> float:
    wait = torch.get_device_module(device).synchronize
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait()
    began = clock()
    update()
    wait()
    return clock() - began


def measure(experiment: str, words: list[str]) -> pd.DataFrame:
    """Return seconds of an update, a row per round and a column per optimizer."""
    updates = {}
    for name in registry.names(registry.OPTIMIZERS):
        typed = [f"experiment={experiment}", f"training.optimizer={name}", *words]
        config = compose.single(typed)
        device, _ = device_and_dtype(config)
        model = build(config, config.data.vocab_size).to(device)
        updates[name] = update_of(model, config, config.data.vocab_size)
    rounds = []
    for _ in range(WARM_UP + ROUNDS):
        rounds.append({name: seconds(updates[name], device) for name in updates})
    return pd.DataFrame(rounds[WARM_UP:])


def main() -> None:
    for experiment in EXPERIMENTS:
        frame = measure(experiment, sys.argv[1:])
        ratios = frame.div(frame["adamw"], axis=0)
        for name in frame:
            low, middle, high = ratios[name].quantile([0.25, 0.5, 0.75])
            milliseconds = 1000 * frame[name].median()
            print(
                f"{experiment:12} {name:8} {milliseconds:7.1f} ms"
                f"  {middle:.2f} of adamw ({low:.2f}-{high:.2f})"
            )


if __name__ == "__main__":
    main()
