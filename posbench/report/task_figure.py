"""A task as a picture: accuracy by problem length, one dot per seed, a line through the median of all.

Two panels: answer tokens and whole answers. Dashes in the first are the trivial reader's. A scheme that has not learned
is hollow and has no line. There are no bands: seeds part in groups, which a band would hide. Schemes stand a little
beside each other, so that equal ones are seen.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from posbench.evaluation.answers import GATE
from posbench.report import ends, families, figures, styles
from posbench.report.comparison.load import Group, RunData
from posbench.report.comparison.standing import Standing, known_at, learned
from posbench.report.figures import DARK, NAME_LINE, SETTINGS, write
from posbench.report.lines import Line
from posbench.report.styles import Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

PANELS = {"accuracy": "Answer tokens right", "exact_match": "Whole answers right"}  # by column of a row
WIDTH, LOW, HIGH = 6.4, 2.6, 4.2  # inches, of a panel; of one row among many, and of the only one
ASIDE = 0.022  # doublings between two schemes beside each other
LABEL = 0.34  # inches that a length below the axis takes


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A scheme in a panel: its line, and the dots of its seeds, (multiple, share, whether that seed learned)."""

    line: Line
    dots: list[tuple[float, float, bool]]


def save(group: Group, found: Sequence[Standing], folder: Path) -> list[Path]:
    """Write `curves.png`, `.svg` and `.pdf` of a task into a folder; nothing if no run was tested."""
    return write(of_group(group, found), folder)


def of_group(group: Group, found: Sequence[Standing], kind: "type[Figure] | None" = None) -> "Figure | None":
    """The picture of a task, of a subclass of Figure if `kind` gives one; None if no run was tested."""
    import matplotlib

    shown = [one for one in found if any(seeds(one, "accuracy"))]
    with matplotlib.rc_context(SETTINGS):
        return _draw(group, shown, kind) if shown else None


def seeds(one: Standing, column: str) -> list[tuple[RunData, dict[float, float]]]:
    """Per run its shares by multiple of the longest trained problem: of the task itself, not shifted."""
    found = []
    for run in one.scheme.runs:
        if learned(run) is None:
            continue
        shares = {place.ratio: getattr(answer, column) for place, answer in run.answers.at.items() if place.as_trained}
        found.append((run, {ratio: share for ratio, share in shares.items() if share is not None}))
    return [(run, shares) for run, shares in found if shares]


def medians_of(one: Standing, column: str) -> dict[float, float]:
    """Medians over all seeds by multiple of the longest trained problem, ascending, as the tables have them."""
    spreads = {place.ratio: getattr(at, column) for place, at in sorted(one.at.items()) if place.as_trained}
    return {ratio: found.median for ratio, found in spreads.items() if found}


def lengths(found: Sequence[Standing]) -> dict[float, int | None]:
    """Problem lengths by their multiples of the longest trained one, ascending."""
    spots = [spot for one in found for run in one.scheme.runs for spot in run.answers.at.items()]
    return dict(sorted((place.ratio, one.row.problem_length) for place, one in spots if place.as_trained))


def _draw(group: Group, shown: list[Standing], kind: "type[Figure] | None") -> "Figure":
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    rows, named = families.rows(shown), []
    heights = [max(LOW if title else HIGH, NAME_LINE * 2.2 * (len(members) + 1)) for title, members in rows]
    figure, axes = figures.sheet([WIDTH] * len(PANELS), heights, kind)
    for column, (name, heading) in enumerate(PANELS.items()):
        for axis, (_, members) in zip(axes[column], rows, strict=True):
            drawn = [
                _drawn(one, name, looks[one.scheme.label], ASIDE * (at - (len(members) - 1) / 2))
                for at, one in enumerate(members)
            ]
            named.append(_panel(axis, [one for one in drawn if one.dots]))
            floor = {place.ratio: share for place, share in known_at(shown, "trivial").items() if place.as_trained}
            if floor and name == "accuracy":
                axis.plot(*zip(*sorted(floor.items()), strict=True), "--", color="#888888", linewidth=1)
            _length_axis(axis, lengths(shown))
        figures.headings(axes[column], ["" if column else title for title, _ in rows], heading, "%")
        axes[column][-1].set_xlabel("problem length (log scale)\ndotted: the longest trained")
    return figures.finished(figure, named)


def _drawn(one: Standing, column: str, look: Style, aside: float) -> Drawn:
    by_run = seeds(one, column)
    dots = [(ratio * 2**aside, share, bool(learned(run))) for run, shares in by_run for ratio, share in shares.items()]
    medians = [(ratio * 2**aside, median) for ratio, median in medians_of(one, column).items()]
    label = one.scheme.label if one.ranked else f"{one.scheme.label}, not learned"
    return Drawn(Line(label, look, medians, [], [], one.undefined_at, hollow=not one.ranked), dots)


def _panel(axis: "Axes", drawn: list[Drawn]) -> "tuple[Axes, list[Line], list[Text]]":
    """Dots and lines of schemes, and their names, which have no height yet."""
    axis.set_ylim(-0.04, 1.04)
    for one in drawn:
        look = one.line.style
        if not one.line.hollow:
            axis.plot(*zip(*one.line.points, strict=True), color=look.colour, linewidth=1.5, zorder=2)
        for taught in (True, False):
            if own := [(ratio, share) for ratio, share, passed in one.dots if passed is taught]:
                x, y = zip(*own, strict=True)
                axis.scatter(
                    x, y, marker=look.mark, s=20, linewidth=0.9, edgecolor=look.colour,
                    facecolor=look.colour if taught else "white", alpha=0.85, zorder=3, clip_on=False,
                )  # fmt: skip
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25", "50", "75", "100"])
    lines = [one.line for one in drawn]
    return axis, lines, [ends.name(axis, line) for line in lines]


def _length_axis(axis: "Axes", known: dict[float, int | None]) -> None:
    """Every tested length a tick; where two would touch, the whole multiple has the label."""
    ratios = list(known)
    axis.set_xscale("log", base=2)
    axis.set_xlim(ratios[0] / 1.25, ratios[-1] * 1.25)
    per_doubling = 0.6 * WIDTH / np.log2(ratios[-1] * 1.25**2 / ratios[0])  # inches, beside names and units
    labelled: list[float] = []
    for ratio in sorted(ratios, key=lambda ratio: (ratio != 1, ratio != int(ratio), -ratio)):
        if all(abs(np.log2(ratio / other)) * per_doubling >= LABEL for other in labelled):
            labelled.append(ratio)
    texts = [f"{known[ratio] or ''}\n{ratio:.3g}x" if ratio in labelled else "" for ratio in ratios]
    axis.set_xticks(ratios, texts)
    axis.minorticks_off()
    axis.axvline(1, color=DARK, linewidth=1.1, linestyle=":")
    axis.axhline(GATE, color="#BBBBBB", linewidth=0.8)
