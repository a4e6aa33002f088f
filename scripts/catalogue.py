"""Write docs/catalogue.md, the tables of all encodings, from their runs and from the comparison with their oracles:

    posbench sweep sweep=catalogue
    python -m pytest tests/test_oracles.py --junitxml=build/oracles.xml
    python scripts/catalogue.py outputs/catalogue build/oracles.xml --speeds docs/rows/catalogue_speeds.json

The tables name the runs that are missing. With `--speeds FILE`, which `posbench bench ... --json` printed, they
have a column of speeds. Runs with seed 1, as `posbench sweep sweep=catalogue seed=1 training.precision=bf16` makes
them, are set beside those with seed 0 in a table of their own.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from posbench.cli import listing
from posbench.config import compose
from posbench.config.identity import run_folder
from posbench.errors import UserError
from posbench.evaluation.levels import Level
from posbench.launch import plans
from posbench.report.comparison import load
from posbench.run_folder.rows import PLAIN
from posbench.show import places

PAGE = Path(__file__).parents[1] / "docs" / "catalogue.md"
SWEEP = "catalogue"
SECOND = ("seed=1", "training.precision=bf16")  # what the runs with a second seed have beside
RATIOS = (2, 8)  # training lengths whose rise is shown
SAYS_NOTHING = 0.25  # nats per token; seeds of one scheme differ by as much


class Errors(NamedTuple):
    """The largest differences from an oracle over all comparisons."""

    values: float
    gradients: float


def errors(path: Path) -> dict[str, Errors]:
    """By encoding, from the report that pytest wrote about tests/test_oracles.py."""
    found: dict[str, Errors] = {}
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314 - our own file
        told = {one.get("name"): str(one.get("value")) for one in case.iter("property")}
        if "scheme" in told:
            before = found.get(told["scheme"], Errors(0.0, 0.0))
            found[told["scheme"]] = Errors(*(max(getattr(before, key), float(told[key])) for key in Errors._fields))
    return found


def runs(folder: Path, *overriding: str) -> dict[str, load.RunData | None]:
    """The runs of the sweep by what `encoding=` chose; None where there is none yet, or one that has not ended."""
    found: dict[str, load.RunData | None] = {}
    for overrides, config in compose.combinations(plans.read_sets(SWEEP, list(overriding))):
        (name,) = (given.partition("=")[2] for given in overrides if given.startswith("encoding="))
        try:
            run = load.read(run_folder(config, folder))
        except UserError:
            run = None
        found[name] = run if run and run.done else None
    return found


def not_finite(all_runs: dict[str, load.RunData | None]) -> list[str]:
    """Names of runs with a result that is not finite; there should be none."""
    return [name for name, run in all_runs.items() if run and any(x.status == "failed" for x in run.levels.at.values())]


def page(
    all_runs: dict[str, load.RunData | None],
    again: dict[str, load.RunData | None],
    worst: dict[str, Errors],
    speeds: dict[str, float],
) -> str:
    done = [run for run in all_runs.values() if run]
    if not done:
        raise SystemExit(f"no run of sweep={SWEEP} is there")
    families: dict[str, list[str]] = defaultdict(list)
    for name in all_runs:
        families[places.family(name.partition("/")[0])].append(name)
    parts = [_introduction(all_runs, done) + (_SPEED if speeds else "")]
    for family in places.FAMILIES:
        if members := families.get(family):
            ordered = sorted(members, key=lambda name: _nll(all_runs[name]) or math.inf)
            rows = [_row(name, all_runs[name], worst, speeds) for name in ordered]
            parts.append(f"## Acts on: {family}\n\n" + _table(rows, bool(speeds)))
    if second := {name: run for name, run in again.items() if _nll(run) is not None}:
        parts.append(_again(all_runs, second))
    parts.append(_LEFT_OUT)
    return "\n".join(parts)


def _introduction(all_runs: dict[str, load.RunData | None], done: list[load.RunData]) -> str:
    first = done[0]
    at_1x = next(level.row for (kind, _), level in sorted(first.levels.at.items()) if kind == PLAIN)
    missing = [f"`{name}`" for name, run in all_runs.items() if run is None]
    versions = first.record.get("versions", {})
    return _TEXT.format(
        tokens=f"{first.config.training.tokens:,}",
        length=first.config.training.train_length,
        ngram=f"{at_1x.ngram_nll:.3f}",
        seed=first.config.seed,
        nothing=SAYS_NOTHING,
        python=versions.get("python"),
        torch=str(versions.get("torch")).partition("+")[0],
        dtype=" or ".join(sorted({str(level.row.dtype) for run in done for level in run.levels.at.values()})),
        day=max(str(run.record["attempts"][-1]["ended"])[:10] for run in done),
        runs=len(done),
        all=len(all_runs),
        missing=f" Not run yet: {', '.join(missing)}." if missing else "",
    )


def _again(all_runs: dict[str, load.RunData | None], second: dict[str, load.RunData | None]) -> str:
    """The figures of the runs with another seed, beside those of the first seed."""
    ordered = sorted(second, key=lambda name: _nll(all_runs[name]) or math.inf)
    both = {name: zip(_figures(all_runs[name]), _figures(second[name]), strict=True) for name in ordered}
    rows = [[f"`{name}`", *(figure for pair in pairs for figure in pair)] for name, pairs in both.items()]
    columns = [f"{what}, seed {n}" for what in ("nll at 1x", *(f"rise at {r}x" for r in RATIOS)) for n in (0, 1)]
    lines = [["encoding", *columns], ["---", *["---:"] * len(columns)], *rows]
    number = "Every row has" if len(second) == len(all_runs) else f"{len(second)} of {len(all_runs)} rows have"
    told = _AGAIN.format(number=number)
    return f"## Once more\n\n{told}\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, run: load.RunData | None, worst: dict[str, Errors], speeds: dict[str, float]) -> list[str]:
    own = name.partition("/")[0]
    parameters = None if run is None else run.parameters("encoding")
    checked = "as `layered`" if own != name else str(listing.describe(own)["checked_against"]).rstrip(".")
    return [
        f"[`{name}`](../posbench/encodings/{own}.py)",
        "" if parameters is None else f"{parameters:,}",
        *_figures(run),
        *([f"{speeds[name]:.2f}" if name in speeds else ""] if speeds else []),
        checked,
        *(f"{error:.0e}" if error else "0" for error in worst.get(own, ())),
        *([""] * (2 - len(worst.get(own, ())))),
    ]


def _figures(run: load.RunData | None) -> Iterator[str]:
    """nll at the training length, and its rise beyond."""
    base = _nll(run)
    yield "" if base is None else f"{base:.3f}"
    for ratio in RATIOS:
        level = _level(run, ratio)
        if level is None:
            yield ""
        elif level.nll is None or base is None:
            yield level.status
        else:
            yield f"{level.nll - base:+.3f}"


def _level(run: load.RunData | None, ratio: int) -> Level | None:
    return run.levels.at.get((PLAIN, ratio * run.config.training.train_length)) if run else None


def _nll(run: load.RunData | None) -> float | None:
    level = _level(run, 1)
    return level.nll if level else None


def _table(rows: list[list[str]], with_speeds: bool) -> str:
    speed = ["speed"] if with_speeds else []
    rises = [f"rise at {ratio}x" for ratio in RATIOS]
    columns = ["encoding", "parameters", "nll at 1x", *rises, *speed, "checked against", "values", "gradients"]
    left = ("encoding", "checked against")
    lines = [columns, ["---" if column in left else "---:" for column in columns], *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def measured_speeds(path: Path) -> dict[str, float]:
    """Tokens per second of training, in those of `none`, from what `posbench bench` printed as JSON."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return {row["encoding"]: row["ratio_to_none"] for row in rows}


_TEXT = """# Catalogue

Every encoding and every pattern of layers, trained once with `experiment=reader`. Families follow the forward pass;
rows are sorted by loss. These commands make this page:

```console
posbench sweep sweep=catalogue
mkdir -p outputs && tar xf docs/rows/catalogue.tar.xz -C outputs   # or take our rows
python -m pytest tests/test_oracles.py --junitxml=build/oracles.xml
python scripts/catalogue.py outputs/catalogue build/oracles.xml --speeds docs/rows/catalogue_speeds.json
```

{tokens} tokens of the built-in corpus at {length} tokens of context, seed {seed}, on two CPU cores without a GPU, one
per run: Python {python}, torch {torch}, {dtype}, {day}. {runs} of {all} rows have their run.{missing}

**One seed: differences under {nothing} nats mean nothing**, nor does the order of such rows. The best n-gram model of
the training tokens has {ngram} nats per token on the same targets. A row above it at 1x has not learned: ignore its
rise. All share one learning rate, which suits some better than others ([the protocol](protocol.md) tells how each gets
its own). A verdict needs five seeds ([results](results.md)).
[Results](results.md#the-catalogue-at-that-size) has the same runs with intervals, and what they say.

- parameters: those of the encoding.
- nll at 1x: nats per token at the training length, `fixed_target`; rise: the increase on the same target tokens with 2
  and 8 times the context. `undefined`: the encoding ends before.
- checked against: an implementation that none of us wrote, or plain loops from the paper. Values and gradients: the
  largest difference from it over all settings of tests/test_oracles.py, with random parameters, in fp32. The unit is a
  setting's largest value or gradient, or 1 if that is less.
"""

_AGAIN = """A second seed draws other weights and another order of the text. {number} one, in bf16 on two cores of an
AMD EPYC with AVX-512 BF16:

```console
posbench sweep sweep=catalogue seed=1 training.precision=bf16
mkdir -p outputs && tar xf docs/rows/catalogue_again.tar.xz -C outputs   # or take our rows
```
"""

_SPEED = """\
- speed: tokens per second of training at the demo's shape relative to `none`, in turns in one process on both cores.
  Eight run at a time, `none` among them, because a machine drifts over minutes. Differences under 0.05 mean nothing.
  Made by `posbench bench none rope ... --shape demo --rounds 3 --json` on 2026-11-21; `fire`, `shaw`, `cope`, `path`,
  `path_fox`, `stick_breaking` and `deberta` later ([Speed](performance.md#two-threads) tells how).
"""

_LEFT_OUT = """## Left out, and why

- TAPE (Zhu et al. 2025, arXiv:2501.00712): in the authors' code every layer attends over states of position as well as
  over values, and passes both to the next layer. That is another block, not an encoding for the shared one.
- SeqPE (Li et al. 2025, arXiv:2506.13277): its own sequence encoder reads the digits of a position and is trained with
  two further losses, a contrastive one and a distillation. Here an encoding has no loss of its own.
- Wavelet-based positions (Oka et al. 2025, arXiv:2502.02004): we could not find the scales, the shifts and the
  normalisation of the wavelets.
- MrRoPE (mixed radix): we have only a summary without a formula.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the study's folder, outputs/catalogue")
    parser.add_argument("oracles", type=Path, help="what pytest wrote about tests/test_oracles.py")
    parser.add_argument("--speeds", type=Path, help="what posbench bench printed as JSON")
    arguments = parser.parse_args()
    all_runs = runs(arguments.runs)
    speeds = measured_speeds(arguments.speeds) if arguments.speeds else {}
    again = runs(arguments.runs, *SECOND)
    PAGE.write_text(page(all_runs, again, errors(arguments.oracles), speeds), encoding="utf-8")
    if broken := not_finite(all_runs):
        sys.exit(f"not a number: {', '.join(broken)}")


if __name__ == "__main__":
    main()
