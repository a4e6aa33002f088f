"""The numbers behind the panels of a picture: one line per scheme, and the visible range of values."""

import dataclasses
from collections.abc import Sequence

from posbench.evaluation.intervals import Interval
from posbench.report.comparison.summary import Curve, Point, Summary
from posbench.report.styles import Style
from posbench.run_folder.rows import PLAIN


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


def limits(lines: Sequence[Line]) -> tuple[float, float]:
    """The range of an axis: all lines, and bands up to a quarter beyond on either side."""
    low, high = min(line.bottom for line in lines), max(line.top for line in lines)
    reach = max(high - low, 0.02)
    bands = [band for line in lines for _, band in line.band]
    least = max(min([low, *(band.low for band in bands)]), low - reach / 4)
    most = min(max([high, *(band.high for band in bands)]), high + reach / 4)
    return least - 0.05 * reach, most + 0.05 * reach
