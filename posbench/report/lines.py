"""The numbers behind the panels of a picture: one line per scheme, and the visible range of values."""

import dataclasses
from collections.abc import Mapping, Sequence

from posbench.evaluation.intervals import Interval
from posbench.report.comparison.load import Group
from posbench.report.comparison.summary import Curve, Point, Summary
from posbench.report.styles import Style
from posbench.run_folder.rows import PLAIN

FAR = 2.0  # times as high as the next line
HUGE = 2.0  # nats per token above the lowest; a line beyond both leaves the picture


@dataclasses.dataclass(frozen=True)
class Line:
    """One scheme in one panel; points are (multiple of the training length, nats per token or a share)."""

    label: str
    style: Style
    points: list[tuple[float, float]]  # means over seeds
    band: list[tuple[float, Interval]]
    seeds: list[list[tuple[float, float]]]  # per seed, if they form two groups, which a mean would hide
    undefined_at: float | None  # the first multiple at which the scheme is undefined
    hollow: bool = False  # drawn without a line: has not learned its task

    @property
    def top(self) -> float:
        return max(value for points in (self.points, *self.seeds) for _, value in points)

    @property
    def bottom(self) -> float:
        return min(value for points in (self.points, *self.seeds) for _, value in points)

    @property
    def ends_at_once(self) -> bool:
        """Whether nothing longer than the training length is defined."""
        return self.undefined_at is not None and len(self.points) < 2


def level(one: Summary, curve: Curve, style: Style) -> Line:
    """nll by context length."""
    band = [(point.ratio, point.band) for point in curve.points if point.band]
    means = [(point.ratio, point.nll) for point in curve.points if point.nll is not None]
    return _line(one, curve, style, means, band, [point.levels for point in curve.points])


def rise(one: Summary, curve: Curve, style: Style) -> Line:
    """Its rise above the training length, on the same target tokens."""
    band = [(point.ratio, point.rise) for point in curve.points if point.rise]
    means = [(ratio, found.mean) for ratio, found in band]
    return _line(one, curve, style, means, band, [point.rises for point in curve.points])


def _line(
    one: Summary,
    curve: Curve,
    style: Style,
    means: list[tuple[float, float]],
    band: list[tuple[float, Interval]],
    by_seed: list[dict[int, float]],
) -> Line:
    label = one.scheme.label if curve.kind == PLAIN else f"{one.scheme.label}, {curve.kind}"
    if one.bimodal and curve.kind == PLAIN:
        return Line(label, style, means, [], _seeds(curve.points, by_seed), curve.undefined_at)
    return Line(label, style, means, band, [], curve.undefined_at)


def _seeds(points: list[Point], values: list[dict[int, float]]) -> list[list[tuple[float, float]]]:
    seeds = sorted({seed for found in values for seed in found})
    measured = list(zip(points, values, strict=True))
    return [[(point.ratio, found[seed]) for point, found in measured if seed in found] for seed in seeds]


def outside(group: Group, summaries: list[Summary]) -> set[str]:
    """Labels of schemes whose level or rise would flatten all others; a picture prints their maximum instead."""
    reference = group.reference.label if group.reference else None
    found = set()
    for build in (level, rise):
        drawn = [build(one, one.plain, Style("", "", "")) for one in summaries]
        drawn = [line for line in drawn if line.points]
        floor = min((line.bottom for line in drawn), default=0.0)
        found |= huge({line.label: line.top for line in drawn}, floor, reference)
    return found


def huge(tops: Mapping[str, float], floor: float, kept: str | None) -> set[str]:
    """Labels of the lines that would flatten all others: at most a quarter of them, and never `kept`.

    Each is more than `HUGE` above the floor, and `FAR` times as high above it as the highest of the rest.
    """
    ordered = sorted(tops, key=lambda label: tops[label])
    for count in range(len(ordered) // 4, 0, -1):
        rest, highest = ordered[:-count], set(ordered[-count:])
        least = max(HUGE, FAR * (tops[rest[-1]] - floor))
        if kept not in highest and all(tops[label] - floor > least for label in highest):
            return highest
    return set()


def limits(lines: Sequence[Line], outside: set[str]) -> tuple[float, float]:
    """The range of an axis: all lines except those outside, and bands up to a quarter beyond on either side."""
    inside = [line for line in lines if line.label not in outside] or lines
    low, high = min(line.bottom for line in inside), max(line.top for line in inside)
    reach = max(high - low, 0.02)
    bands = [band for line in inside for _, band in line.band]
    least = max(min([low, *(band.low for band in bands)]), low - reach / 4)
    most = min(max([high, *(band.high for band in bands)]), high + reach / 4)
    return least - 0.05 * reach, most + 0.05 * reach
