"""Figures of claims from raw rows, with NumPy alone: nothing of posbench is used.

    python scripts/recompute_claims.py outputs/six

Prints each seed's figure, their mean, and the 95 % interval over seeds (Student's t), in nats per token.
"""

import json
import sys
from pathlib import Path

import numpy as np

FIGURES = {  # as in configs/claim: +1 or -1 times a level, of a run at a multiple of its training length
    "rope_breaks": [(1, "rope", 4), (-1, "rope", 1)],
    "alibi_holds": [(1, "alibi", 8), (-1, "alibi", 1)],
    "fox_extrapolates": [(1, "fox", 4), (-1, "fox", 1), (-1, "rope", 4), (1, "rope", 1)],
}
T_975 = {3: 4.303, 5: 2.776, 8: 2.365, 10: 2.262, 12: 2.201}  # of Student's t, by the number of seeds


def levels(study: Path) -> dict[tuple[str, int, float], float]:
    """Nats per token on the same target tokens, by encoding, seed and multiple of the training length."""
    found = {}
    for run in study.glob("*/evaluation.jsonl"):
        record = json.loads((run.parent / "run.json").read_text())
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        last = max(row["checkpoint_step"] for row in rows)  # rows of earlier steps show the way there
        for row in rows:
            changed = row["window"] or row["extension"] or row["task"]
            if row["protocol"] == "fixed_target" and row["checkpoint_step"] == last and not changed:
                found[record["encoding"], record["seed"], row["length_ratio"]] = row["nll"]
    return found


def main() -> None:
    known = levels(Path(sys.argv[1]))
    for claim, terms in FIGURES.items():
        seeds = sorted(set.intersection(*({seed for name, seed, _ in known if name == run} for _, run, _ in terms)))
        each = np.array([sum(sign * known[run, seed, at] for sign, run, at in terms) for seed in seeds])
        half = T_975[len(each)] * each.std(ddof=1) / np.sqrt(len(each))
        print(f"{claim} {each.mean():+.4f} ±{half:.4f}  by seed {' '.join(f'{value:+.4f}' for value in each)}")


if __name__ == "__main__":
    main()
