"""Training speed of one run by number of processes and threads, in turns, on a quiet machine.

    python scripts/bench_processes.py 1x2 2x1 --rounds 5 experiment=demo training.tokens=600000
    python scripts/bench_processes.py 1x2 2x1 --rounds 5 experiment=small training.tokens=600000 encoding=alibi

The others are compared with the first way in the same round. Tokens per second leave out the first fifth of a run, so
that starting does not count.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from posbench.run_folder.jsonl import read_jsonl

LITTLE = ["tracking=none", "device=cpu", "log_every_steps=5", "protocol=fixed_target", "ratio=1", "blocks=8"]


def tokens_per_second(way: str, overrides: list[str], outputs: Path) -> float:
    """Tokens per second of a run in processes x threads, such as 2x1."""
    processes, threads = way.split("x")
    command = [sys.executable, "-m", "posbench", "train", *LITTLE, *overrides, f"outputs={outputs}"]
    done = subprocess.run([*command, f"processes={processes}", f"threads={threads}"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    (metrics,) = outputs.rglob("metrics.jsonl")
    rows = [row for row in read_jsonl(metrics) if "seconds" in row]
    first, last = rows[len(rows) // 5], rows[-1]
    return float((last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="ways, such as 1x2 and 2x1, and key=value for all runs")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_intermixed_args()
    ways = [word for word in given.words if "=" not in word]
    overrides = [word for word in given.words if "=" in word]
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(given.rounds):
        for way in ways:
            with tempfile.TemporaryDirectory() as outputs:
                speeds[way].append(tokens_per_second(way, overrides, Path(outputs)))
            print(f"round {number + 1}: {way} {speeds[way][-1]:,.0f} tokens/s", file=sys.stderr)
    print("| processes x threads | tokens/s | ratio | of all rounds |\n|---|---:|---:|---|")
    for way in ways:
        ratios = [speed / first for speed, first in zip(speeds[way], speeds[ways[0]], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"| {way} | {statistics.median(speeds[way]):,.0f} | {statistics.median(ratios):.2f} | {spread} |")


if __name__ == "__main__":
    main()
