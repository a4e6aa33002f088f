"""Level, rise and use of context over the tokens trained on, of runs with `evaluation.at_tokens`."""

from collections.abc import Callable, Sequence

import numpy as np

from posbench.evaluation.levels import USES_LIMIT
from posbench.evaluation.measure import Headline
from posbench.report import tables
from posbench.report.comparison.load import Group, Scheme
from posbench.report.comparison.summary import ENDPOINT_RATIO, Summary
from posbench.report.tables import Table, Value

Measured = dict[int, dict[int, Headline]]  # tokens trained on -> seed -> values


def _views(group: Group) -> dict[str, str]:
    """The values shown over the tokens, each with its title.

    Runs that began from others have the level at the earlier length and at the new one, and the rise at twice that.
    """
    before, length = group.original_length, group.train_length
    if before is None:
        level, rise, old = "level at 1x", ENDPOINT_RATIO, {}
    else:
        level, rise, old = f"level at {length}", 2, {f"nll_{before / length:g}x": f"level at {before}"}
    return {**old, "nll_1x": level, f"rise_{rise}x": f"rise at {rise}x", "uses": "context used, tokens"}


def measured(scheme: Scheme) -> Measured:
    """What was measured of a scheme, by tokens; empty if nothing was measured before the end of training."""
    found: Measured = {}
    for seed, run in scheme.by_seed.items():
        for tokens, levels in run.levels.on_the_way.items():
            found.setdefault(tokens, {})[seed] = levels.headline
    return dict(sorted(found.items())) if len(found) > 1 else {}


def over_training(group: Group, summaries: Sequence[Summary]) -> list[Table]:
    """The values by tokens."""
    known = {one.scheme.label: found for one in summaries if (found := measured(one.scheme))}
    if not known:
        return []
    rows, views = [], _views(group)
    for label, found in known.items():
        for tokens, by_seed in found.items():
            *levels, used = (_over_seeds(by_seed, name) for name in views)
            gates = [gate for one in by_seed.values() if (gate := one["learned"])]
            cells = [*map(tables.decimal, levels), tables.whole(used)]
            of_all = Value(f"{gates.count('yes')}/{len(gates)}" if gates else "")
            rows.append([Value(label), tables.short(tokens), Value(str(len(by_seed)), len(by_seed)), of_all, *cells])
    note = (
        f"Means over seeds; uses: the median over seeds of the shortest context within {USES_LIMIT:g} nats of the "
        "training length, by its one-sided 95 % bound over documents, of runs that have learned by then."
    )
    shown = [name.replace("level", "nll") for name in list(views.values())[:-1]]
    return [Table("Over training", ["scheme", "tokens", "runs", "learned", *shown, "uses"], rows, note)]


def _over_seeds(by_seed: dict[int, Headline], name: str) -> float | None:
    numbers = [value for one in by_seed.values() if isinstance(value := one.get(name), int | float)]
    middle: Callable[[list[float]], float] = np.median if name == "uses" else np.mean
    return float(middle(numbers)) if numbers else None
