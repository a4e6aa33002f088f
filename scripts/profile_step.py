"""The time of a training step by operator, for encodings of posbench and for peers.

    python scripts/profile_step.py none --shape 12m --threads 1
    python scripts/profile_step.py alibi mpt --threads 2      # mpt: with its fastest attention here, eager

Milliseconds per step in each operator itself, by torch's profiler on the main thread, and the number of calls. Peers
are those of `bench_peers.py`; they need the dependency group `peers`.
"""

import dataclasses
import os

import arguments
import bench_peers
import torch
from torch.profiler import ProfilerActivity, profile

from posbench import machine
from posbench.bench import speed
from posbench.bench.speed import Sizes, TrainingStep

WARM_UP, STEPS = 4, 8


def step_of(name: str, sizes: Sizes, threads: int | None) -> TrainingStep:
    peer = bench_peers.PEERS.get(name)
    given = ["runtime.device=cpu", *(peer.overrides if peer else ())]
    config = speed.configuration(peer.encoding if peer else name, sizes, threads, given)
    if peer is None:
        return speed.training_step(config, sizes.vocab_size)
    attention = "eager" if "eager" in peer.attentions else peer.attentions[0]  # on CPUs the fastest at most lengths
    return speed.training_step(config, sizes.vocab_size, bench_peers.LikePosbench(peer.build(sizes, attention)))


@dataclasses.dataclass(frozen=True)
class Spent:
    """Time and calls of one operator, per step."""

    milliseconds: float = 0.0
    calls: float = 0.0


def operators(step: TrainingStep) -> dict[str, Spent]:
    for _ in range(WARM_UP):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(STEPS):
            step()
    return {e.key: Spent(e.self_cpu_time_total / 1e3 / STEPS, e.count / STEPS) for e in seen.key_averages()}


def table(found: dict[str, dict[str, Spent]], rows: int) -> str:
    totals = {name: sum(spent.milliseconds for spent in by.values()) for name, by in found.items()}
    keys = {key for by in found.values() for key in by}
    longest = {key: max(by.get(key, Spent()).milliseconds for by in found.values()) for key in keys}

    def cell(name: str, key: str) -> str:
        spent = found[name].get(key, Spent())
        return f"{spent.milliseconds:.1f} ms, {spent.milliseconds / totals[name]:.1%}, {spent.calls:.0f} x"

    lines = [["all", *(f"{total:.1f} ms" for total in totals.values())]]
    for key in sorted(keys, key=longest.__getitem__, reverse=True)[:rows]:
        lines.append([f"`{key}`", *(cell(name, key) for name in found)])
    return speed.markdown(["operator", *found], lines)


def main() -> None:
    parser = arguments.parser(__doc__)
    parser.add_argument("names", nargs="+", help="encodings and peers")
    parser.add_argument("--rows", type=int, default=16)
    given = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would announce itself on stderr
    with arguments.errors_in_one_line():
        sizes = speed.find_shape(given.shape, given.length)
        machine.keep_freed_memory()
        found = {name: operators(step_of(name, sizes, given.threads)) for name in given.names}
    print(table(found, given.rows))
    threads = torch.get_num_threads()
    print(f"\n{given.shape}, {sizes.batch_size} x {sizes.train_length} tokens, {threads} thread{'s' * (threads > 1)}")


if __name__ == "__main__":
    main()
