"""`posbench report --transfer`: what small rungs of a ladder say of its largest, in tables, a picture and one sentence.

Writes `transfer.md`, `transfer.csv`, the picture, and `predictions.csv` where there is none: what the largest rung
expects of the next one. A file that is there is never replaced. Once a larger rung has run, the report scores it.
"""

import csv
import dataclasses
import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posbench import files
from posbench.errors import UserError
from posbench.report import figures, styles, text
from posbench.report.comparison import transfer
from posbench.report.comparison.claims import ALPHA
from posbench.report.comparison.load import Group
from posbench.report.comparison.transfer import ENDPOINTS, FEWEST, Against, Ceiling, Endpoint, Estimate, Rung
from posbench.report.tables import Table, Value, decimal
from posbench.run_folder import jsonl
from posbench.terminal.exits import counted
from posbench.terminal.spreadsheets import csv_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

PREDICTIONS = "predictions.csv"
_RUN = "posbench sweep sweep=ladder"
_ASIDE = 0.2  # of the distance of two rungs
_PREDICTED = ["from", "endpoint", "better", "worse", "difference", "resolved"]


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Rungs, the target last, and what each of the others says of it by endpoint; None: it ranks nothing."""

    rungs: list[Rung]
    said: dict[tuple[str, str], Against | None]  # endpoint, rung
    ceilings: dict[str, Ceiling | None]

    @property
    def target(self) -> Rung:
        return self.rungs[-1]

    @property
    def endpoints(self) -> list[Endpoint]:
        """Those that the target has."""
        return [one for one in ENDPOINTS if self.target.cells[one.name]]


def read(groups: Sequence[Group], least: float) -> Ladder:
    """Compare every rung with the largest.

    Raises:
        UserError: fewer than two rungs, or none with `FEWEST` schemes of the largest.
    """
    rungs = transfer.rungs(groups)
    if len(rungs) < 2:
        found = "one set" if rungs else "no set"
        raise UserError(f"--transfer compares sets of runs of several sizes, and here is {found} of text: {_RUN}")
    target = rungs[-1]
    if not any(len(set(rung.schemes) & set(target.schemes)) >= FEWEST for rung in rungs[:-1]):
        raise UserError(f"no set has {FEWEST} schemes in common with the largest, {target.name}: {_RUN}")
    if not any(target.cells.values()):
        raise UserError(f"no scheme of the largest set, {target.name}, is shown to have learned: it ranks nothing")
    names = {label: name for rung in rungs for label, name in rung.names.items()}
    said = {
        (one.name, rung.name): transfer.against(
            rung.cells[one.name], target.cells[one.name], names, None if one.name == "nll" else rung.cells["nll"], least
        )
        for one in ENDPOINTS
        for rung in rungs[:-1]
    }
    return Ladder(rungs, said, {one.name: transfer.ceiling(target.cells[one.name], least) for one in ENDPOINTS})


def write(ladder: Ladder, folder: Path, warnings: list[str], console: "Console", least: float) -> None:
    """Write all files; print the sentences and the tables."""
    shown, turned = [_rungs(ladder), *(_against(ladder, one) for one in ladder.endpoints)], _reversals(ladder)
    established = [row for row in turned.rows if (row[-1].number or 0) < ALPHA]
    told = f"Resolved in opposite directions at a rung and at the target: {counted(len(turned.rows), 'pair')}; "
    told += f"if one asks all pairs at once (Holm): {len(established)}. transfer.md names them."
    lines = [*warnings, *_sentences(ladder), *_predictions(ladder, folder / PREDICTIONS, least)]
    lines += [told] if turned.rows else []
    text.print_lines(console, lines)
    for table in [*shown, *([dataclasses.replace(turned, rows=established)] if established else [])]:
        text.print_table(console, table)
    meaning = _meaning(ladder)
    text.print_lines(console, [shown[0].note, meaning])
    figures.write(_figure(ladder), folder, "transfer")
    pieces = ["# From small to large\n", *(f"{text.markdown(line)}\n" for line in lines), "![Ranks](transfer.png)\n"]
    tables = [*shown, *([turned] if turned.rows else [])]
    pieces += [*map(text.markdown_table, tables), text.markdown(meaning) + "\n"]
    text.write(folder / "transfer.md", "\n".join(pieces))
    rows = [_row(ladder, one, rung) for one in ladder.endpoints for rung in ladder.rungs[:-1]]
    text.write(folder / "transfer.csv", csv_text(list(rows[0]) if rows else [], rows))


# -- words -------------------------------------------------------------------------------------------------------------


def _meaning(ladder: Ladder) -> str:
    """What the columns are."""
    alone = ladder.target.seeds[1] == 1
    resolved = "documents alone, since it has one seed" if alone else "seeds and documents"
    told = (
        f"pairs: resolved at the target, by {resolved}. right: share of these that the rung orders as the target does. "
        "regret: nats per token that its best scheme costs at the target. [95 % bootstrap interval over schemes, seeds "
        "and documents]. family, 1x: right by the mean of a scheme's family, and by nll at the training length."
    )
    noise = " The target's seeds are asked about its other seeds: noise of seeds leaves no more than this."
    return told + (noise if any(ladder.ceilings.values()) else "")


def _sentences(ladder: Ladder) -> list[str]:
    """What the smallest rung that ranks would have picked, and what that costs at the target."""
    target = ladder.target.name
    lines = [f"The target is the rung with the most training compute: {target}."]
    for endpoint in ladder.endpoints:
        found = ((rung, ladder.said[endpoint.name, rung.name]) for rung in ladder.rungs[:-1])
        rung, one = next(((rung, one) for rung, one in found if one), (None, None))
        if rung is None or one is None:
            lines.append(f"By {endpoint.meaning}, no rung ranks anything.")
            continue
        cost, half = one.costs, f" ± {one.costs.half:.3f}" if math.isfinite(one.costs.half) else ""
        costs = f"it costs {cost.mean:.3f}{half} nats against {one.best}"
        costs = "that is the best one, too" if one.picked == one.best else costs
        drawn = f"with other schemes, seeds and documents drawn, {one.regret.low:.3f} to {one.regret.high:.3f}"
        lines.append(
            f"By {endpoint.meaning}, {rung.name} would have picked {one.picked}; at {target} {costs} ({drawn})."
        )
    return lines


def _predictions(ladder: Ladder, path: Path, least: float) -> list[str]:
    """Score the predictions of a smaller rung; write those of the largest if there are none."""
    target = ladder.target
    if not path.is_file():
        text.write(path, csv_text(_PREDICTED, (row for one in ENDPOINTS for row in _predicted(target, one, least))))
        return [f"{path.name} has what {target.name} expects of the next rung: commit it before that rung runs."]
    try:
        rows = list(csv.DictReader(files.read(path, jsonl.LARGEST).decode().splitlines()))
        origin = rows[0]["from"]
    except (csv.Error, ValueError, LookupError):
        raise UserError(f"{path} is no table of predictions: expected columns {', '.join(_PREDICTED)}") from None
    if origin == target.name:
        return [f"{path.name} was written before from {origin}, and stays as it is."]
    lines = []
    for endpoint in ladder.endpoints:
        pairs = transfer.pairs(target.cells[endpoint.name])
        own = (row for row in rows if row.get("endpoint") == endpoint.name and row.get("resolved") == "yes")
        asked = [pairs[named] for row in own if (named := (row["better"], row["worse"])) in pairs]
        shown = [one.mean < 0 for one in asked if one.resolved(least)]
        lines.append(
            f"{path.name}: of {len(asked)} pairs that {origin} resolved by {endpoint.meaning}, {sum(shown)} hold; "
            f"reversed: {len(shown) - sum(shown)}; not resolved: {len(asked) - len(shown)}."
        )
    return lines


def _predicted(rung: Rung, endpoint: Endpoint, least: float) -> list[dict[str, Any]]:
    cells, rows = rung.cells[endpoint.name], []
    pairs = transfer.pairs(cells)
    for first, second in itertools.combinations(sorted(cells), 2):
        found = pairs[first, second]
        better, worse = (first, second) if found.mean < 0 else (second, first)
        resolved = "yes" if found.resolved(least) else "no"
        rows.append(
            dict(zip(_PREDICTED, (rung.name, endpoint.name, better, worse, -abs(found.mean), resolved), strict=True))
        )
    return rows


# -- tables ------------------------------------------------------------------------------------------------------------


def _rungs(ladder: Ladder) -> Table:
    rows = []
    for rung in ladder.rungs:
        least, most = rung.seeds
        learned = len(rung.schemes) - len(rung.unlearned)
        few = "" if learned >= FEWEST else " (ranks nothing)"
        missing = sorted(set(ladder.target.schemes) ^ set(rung.schemes))
        name = rung.name + (" (target)" if rung is ladder.target else "")
        rows.append([
            Value(name), Value(f"{rung.compute:.2g}", rung.compute),
            Value(str(least) if least == most else f"{least} to {most}", least),
            Value(f"{learned} of {len(rung.schemes)}{few}"),
            Value(", ".join(rung.unlearned)), Value(", ".join(missing)),
        ])  # fmt: skip
    columns = ["rung", "compute", "seeds", "learned", "not learned: left out", "not in both"]
    note = "Compute: floating-point operations to train one run. Learned: shown to be better than an n-gram model."
    return Table("Rungs", columns, rows, note).filled()


def _against(ladder: Ladder, endpoint: Endpoint) -> Table:
    columns = ["rung", "pairs", "right", "regret", "picked", "tau-b", "family", "1x", "reversed"]
    rows = []
    for rung in ladder.rungs[:-1]:
        one = ladder.said[endpoint.name, rung.name]
        if one is None:
            rows.append([Value(rung.name), Value(_silent(ladder, rung, endpoint)), *[Value("")] * 7])
            continue
        rows.append([
            Value(rung.name), Value(str(one.resolved), one.resolved), _estimate(one.accuracy, 2),
            _estimate(one.regret, 3), Value(one.picked), _estimate(one.tau, 2), decimal(one.by_family, 2),
            decimal(one.by_nll, 2), Value(str(len(one.reversals)), len(one.reversals)),
        ])  # fmt: skip
    if (noise := ladder.ceilings[endpoint.name]) is not None:
        rows.append([
            Value(f"the target's seeds, {noise.few} against {noise.many}"), Value(""), decimal(noise.accuracy, 2),
            decimal(noise.regret), Value(""), decimal(noise.tau, 2), *[Value("")] * 3,
        ])  # fmt: skip
    best = next((one.best for rung in ladder.rungs[:-1] if (one := ladder.said[endpoint.name, rung.name])), None)
    title = f"By {endpoint.meaning}" + (f"; the best at the target is {best}" if best else "")
    return Table(title, columns, rows).filled()


def _silent(ladder: Ladder, rung: Rung, endpoint: Endpoint) -> str:
    left = set(rung.schemes) & set(ladder.target.schemes) - {*rung.unlearned, *ladder.target.unlearned}
    few = f"ranks nothing: schemes that have learned here and at the target: {len(left)}"
    return few if len(left) < FEWEST else f"{endpoint.name} is not measured here, or not at the target"


def _reversals(ladder: Ladder) -> Table:
    columns = ["endpoint", "rung", "better there", "than", "by", "at the target", "p"]
    rows = [
        [Value(endpoint.name), Value(rung.name), Value(turned.better), Value(turned.worse),
         decimal(-turned.small), Value(f"worse by {turned.target:.3f}", turned.target), decimal(turned.p)]
        for endpoint in ladder.endpoints for rung in ladder.rungs[:-1]
        if (one := ladder.said[endpoint.name, rung.name]) for turned in one.reversals
    ]  # fmt: skip
    note = "p: that not both directions are true, adjusted over all pairs of the rung (Holm). Nats per token."
    return Table("Pairs resolved in opposite directions", columns, rows, note)


def _estimate(found: Estimate | None, digits: int) -> Value:
    if found is None:
        return Value("")
    return Value(f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]", found.value)


def _row(ladder: Ladder, endpoint: Endpoint, rung: Rung) -> dict[str, Any]:
    row: dict[str, Any] = {"endpoint": endpoint.name, "rung": rung.name, "target": ladder.target.name}
    one, noise = ladder.said[endpoint.name, rung.name], ladder.ceilings[endpoint.name]
    row |= {"schemes": len(one.schemes) if one else 0, "pairs": one.resolved if one else None}
    for name in ("accuracy", "regret", "tau"):
        found: Estimate | None = getattr(one, name) if one else None
        row |= {name: found.value if found else None, f"{name}_low": found.low if found else None}
        row |= {f"{name}_high": found.high if found else None, f"{name}_ceiling": getattr(noise, name, None)}
    row |= {name: getattr(one, name, None) for name in ("by_family", "by_nll", "picked", "best")}
    return row | {"costs": one.costs.mean if one else None, "reversed": len(one.reversals) if one else None}


# -- the picture -------------------------------------------------------------------------------------------------------


def _figure(ladder: Ladder) -> "Figure":
    """Ranks by rung, a panel for each endpoint, above two matrices of rungs by endpoints."""
    import matplotlib
    from matplotlib.figure import Figure

    names = [one.name for one in ladder.endpoints]
    rows = max(len(rung.schemes) for rung in ladder.rungs)
    with matplotlib.rc_context(figures.SETTINGS):
        width, high, low = max(2.8, 0.85 * len(ladder.rungs) + 1.2) * max(len(names), 2), 0.26 * rows + 1.4, 2.2
        figure = Figure(figsize=(width, high + low), dpi=figures.DPI, layout="constrained")
        mosaic: Any = [[name for name in names for _ in "ab"], ["right"] * len(names) + ["regret"] * len(names)]
        axes = figure.subplot_mosaic(mosaic, height_ratios=[high, low])
        for endpoint in ladder.endpoints:
            _bump(axes[endpoint.name], ladder, endpoint)
        _matrix(axes["right"], ladder, "accuracy", "Right, of pairs resolved at the target", (0.5, 1.0), 2)
        _matrix(axes["regret"], ladder, "regret", "Regret at the target, nats per token", (0.1, 0.0), 3)
    return figure


def _bump(axis: "Axes", ladder: Ladder, endpoint: Endpoint) -> None:
    looks = styles.assign({(name, label) for rung in ladder.rungs for label, name in rung.names.items()})
    ranks = [transfer.ranks(rung.cells[endpoint.name]) for rung in ladder.rungs]
    shown = [label for label in looks if any(label in found for found in ranks)]
    beside = np.linspace(-_ASIDE, _ASIDE, len(shown))  # so that bars do not cover each other
    for label, aside in zip(shown, beside, strict=True):
        look = looks[label]
        known = [(at + aside, found[label]) for at, found in enumerate(ranks) if label in found]
        at, own = [at for at, _ in known], [one.value for _, one in known]
        axis.plot(at, own, color=look.colour, marker=look.mark, markeredgecolor="white", linewidth=1.5)
        axis.vlines(at, [one.low for _, one in known], [one.high for _, one in known], color=look.colour,
                    alpha=0.4, linewidth=2.5)  # fmt: skip
        axis.annotate(label[: text.LONGEST_NAME], (round(at[-1]) + _ASIDE, own[-1]), xytext=(7, 0),
                      textcoords="offset points", va="center", fontsize=8.5, color=look.colour)  # fmt: skip
    for silent in (at for at, found in enumerate(ranks) if not found):
        axis.text(silent, 0.5, "ranks nothing", transform=axis.get_xaxis_transform(), rotation=90, ha="center",
                  va="center", fontsize=8.5)  # fmt: skip
    axis.set_xticks(range(len(ranks)), [_below(rung.name) for rung in ladder.rungs], fontsize=8.5)
    axis.set_xlim(-0.4, len(ranks) - 0.2)
    axis.invert_yaxis()
    axis.set_ylabel("rank, 1 is best")
    axis.set_title(textwrap.fill(f"{endpoint.name}: {endpoint.meaning}", 45), loc="left", fontsize=10)


def _matrix(axis: "Axes", ladder: Ladder, name: str, title: str, limits: tuple[float, float], digits: int) -> None:
    small = ladder.rungs[:-1]
    shown = [[getattr(ladder.said[one.name, rung.name], name, None) for rung in small] for one in ladder.endpoints]
    low, high = limits
    values = [[math.nan if one is None else (one.value - low) / (high - low) for one in row] for row in shown]
    axis.imshow(values, cmap="RdYlBu", vmin=0, vmax=1, aspect="auto", alpha=0.5)
    for (y, row), x in itertools.product(enumerate(shown), range(len(small))):
        one = row[x]
        told = "-" if one is None else f"{one.value:.{digits}f}\n{one.low:.{digits}f} to {one.high:.{digits}f}"
        axis.text(x, y, told, ha="center", va="center", fontsize=8)
    axis.set_xticks(range(len(small)), [_below(rung.name) for rung in small], fontsize=8.5)
    axis.set_yticks(range(len(shown)), [one.name for one in ladder.endpoints])
    axis.grid(visible=False)
    axis.set_title(title, loc="left")


def _below(name: str) -> str:
    return name.replace(", ", "\n")
