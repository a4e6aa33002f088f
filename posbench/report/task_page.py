"""The curves of a task as data for the page: medians of learned seeds, and every seed a dot."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from posbench.report import families, page, styles
from posbench.report.comparison.load import Group
from posbench.report.comparison.problems import Standing, learned
from posbench.report.styles import Style
from posbench.report.task_figure import lengths, seeds
from posbench.terminal.exits import one_line

VIEWS = {"level": "accuracy", "exact": "exact_match"}  # name of a view -> column of a row


def curves(group: Group, found: Sequence[Standing]) -> Markup:
    """The curves of a group as JSON that can stand inside a script element."""
    looks = styles.assign((scheme.name, scheme.label) for scheme in group.schemes)
    known = lengths(found)
    series = [
        _series(one, looks[one.scheme.label], known) | {"family": family}
        for family, members in families.rows(found)
        for one in members
    ]
    return page.as_script_data(
        {
            "lengths": [{"ratio": ratio, "length": length} for ratio, length in known.items()],
            "series": [one for one in series if one["points"]],
        }
    )


def _series(one: Standing, look: Style, known: dict[float, int | None]) -> dict[str, Any]:
    label = one.scheme.label if one.ranked else f"{one.scheme.label}, not learned"
    points = [{"ratio": ratio, "length": length, **_point(one, ratio)} for ratio, length in known.items()]
    return {
        "label": one_line(label),
        "colour": look.colour,
        "ink": f"var(--ink-{styles.COLOURS.index(look.colour)})",
        "mark": look.mark,
        "dash": "",
        "on": True,
        "hollow": not one.ranked,
        "undefined_at": one.undefined_at,
        "points": [point for point in points if point["seeds"]["level"]],
    }


def _point(one: Standing, ratio: float) -> dict[str, Any]:
    """The medians of each view, and for every seed its share and whether it learned."""
    found: dict[str, Any] = {"seeds": {}}
    for view, column in VIEWS.items():
        values = [(shares[ratio], bool(learned(run))) for run, shares in seeds(one, column) if ratio in shares]
        counted = [share for share, taught in values if taught or not one.ranked]
        found[view] = [float(np.median(counted))] if counted else None
        found["seeds"][view] = [[share, taught] for share, taught in values]
    return found
