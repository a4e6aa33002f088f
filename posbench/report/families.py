"""The rows of a picture with many schemes, by the place in the forward pass where they act."""

import math
from collections.abc import Sequence
from typing import TypeVar

from posbench.report.comparison.standing import Standing
from posbench.report.comparison.summary import Summary
from posbench.show import places

Found = TypeVar("Found", bound=Summary | Standing)
MOST_TOGETHER = 8  # most schemes that a reader can tell apart in one panel


def rows(summaries: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    """Titles and schemes of the rows: one row without a title for few schemes, else one row per family.

    A large family is split evenly.
    """
    if len(summaries) <= MOST_TOGETHER:
        return [("", list(summaries))]
    return [row for title, members in _by_family(summaries) for row in _split(title, members)]


def _by_family(summaries: Sequence[Found]) -> list[tuple[str, list[Found]]]:
    found: dict[str, list[Found]] = {family: [] for family in places.FAMILIES}
    for one in summaries:
        found[places.family(one.scheme.name)].append(one)
    return [(family, members) for family, members in found.items() if members]


def _split(title: str, members: list[Found]) -> list[tuple[str, list[Found]]]:
    pieces = math.ceil(len(members) / MOST_TOGETHER)
    if pieces == 1:
        return [(title, members)]
    size = math.ceil(len(members) / pieces)
    starts = range(0, len(members), size)
    return [(f"{title} ({n} of {len(starts)})", members[at : at + size]) for n, at in enumerate(starts, start=1)]
