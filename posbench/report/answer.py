"""The answer in words: how far each scheme holds, its cost at the training length, and open questions."""

from collections.abc import Iterable, Sequence

from posbench.evaluation.levels import REACH_LIMIT, USES_LIMIT
from posbench.report.comparison.load import Group
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.comparison.summary import ENDPOINT_RATIO, MARGIN, Summary


def answer(group: Group, summaries: list[Summary]) -> list[str]:
    """Two to four sentences from the verdicts of a group; schemes that have not learned are only named."""
    unlearned = [one for one in summaries if not one.ranked]
    ranked = [one for one in summaries if one.ranked and one.reach]
    sentences = [
        _held(ranked, group.train_length),
        _used(ranked, group.train_length),
        *_against(group, ranked),
        few_seeds(one.n_done for one in ranked),
    ]
    for gate, why in (
        ("no", "an n-gram model has no more nats at 1x"),
        ("not resolved", "at 1x they are not resolved from an n-gram model"),
    ):
        sentences.append(_unlearned([one for one in unlearned if one.learned == gate], why))
    return [sentence for sentence in sentences if sentence]


def _held(ranked: list[Summary], train_length: int) -> str:
    """A sentence on how far each scheme holds, the farthest first."""
    by_reach: dict[tuple[bool, int], list[str]] = {}
    for one in ranked:
        assert one.reach is not None
        undefined = one.reach.length == train_length and one.plain.undefined_at is not None
        by_reach.setdefault((undefined, one.reach.length), []).append(one.scheme.label)
    longest = max((p.length for one in ranked for p in one.plain.points if p.nll is not None), default=train_length)
    parts = []
    for (undefined, length), names in sorted(by_reach.items(), key=lambda item: (item[0][0], -item[0][1])):
        alone = len(names) == 1
        if undefined:
            parts.append(f"{_listed(names)} {'is' if alone else 'are'} undefined beyond {length:,}")
        elif length == train_length < longest:
            parts.append(f"{_listed(names)} {'does' if alone else 'do'} not hold beyond the {length:,} of training")
        elif length > train_length:
            tokens = f"{length:,} tokens, {length / train_length:g} times the training length"
            so_far = ", the longest measured" if length == longest else ""
            parts.append(f"{_listed(names)} {'holds' if alone else 'hold'} to {tokens}{so_far}")
    means = f" (a rise of at most {REACH_LIMIT:g} nats per token, by its upper bound)" if longest > train_length else ""
    return f"{'; '.join(parts)}{means}." if parts and longest > train_length else ""


def _used(ranked: list[Summary], train_length: int) -> str:
    """A sentence on how much of its training length each scheme uses, the most first."""
    by_use: dict[int, list[str]] = {}
    for one in ranked:
        if one.uses is not None:
            by_use.setdefault(one.uses, []).append(one.scheme.label)
    parts = [
        f"{_listed(names)} {'uses' if len(names) == 1 else 'use'} {f'{n:,}' if n < train_length else 'all'}"
        for n, names in sorted(by_use.items(), reverse=True)
    ]
    means = f"less context costs more than {USES_LIMIT:g} nats per token, by the upper bound"
    return f"Of the {train_length:,} tokens of training, {'; '.join(parts)} ({means})." if parts else ""


def _against(group: Group, ranked: list[Summary]) -> list[str]:
    """Sentences on the training length, and on what is not resolved."""
    found = {one.scheme.label: one.endpoints for one in ranked if one.endpoints and one.endpoints.verdict.at_one}
    if group.reference is None or not found:
        return []
    costs: dict[str, list[str]] = {"better": [], "worse": [], "equivalent": [], "small": []}
    unresolved: dict[str, list[str]] = {"1x": [], f"{ENDPOINT_RATIO}x": []}
    for label, one in found.items():
        at_one, beyond = one.verdict.at_one, one.verdict.beyond
        if one.nll and at_one in costs:
            by = "" if at_one == "equivalent" else f" by {abs(one.nll.mean):.3f}"
            costs[at_one].append(f"{label}{by}")
        for where, settled, interval in zip(unresolved, (at_one, beyond), (one.nll, one.rise), strict=True):
            if settled == "open" and interval:
                unresolved[where].append(f"{label} ({interval.mean:+.3f} ± {interval.half:.3f})")
    words = {"equivalent": f"equivalent within {MARGIN:g}", "small": "different by too little to matter"}
    said = [f"{words.get(kind, kind)}: {_listed(labels)}" for kind, labels in costs.items() if labels]
    open_at = [f"at {where} {_listed(labels)}" for where, labels in unresolved.items() if labels]
    against = f"Against {group.reference.label} at {group.train_length:,} tokens, in nats per token, "
    return [
        f"{against}{'; '.join(said)}." if said else "",
        f"Not resolved, which is not equal: {'; '.join(open_at)}." if open_at else "",
    ]


def few_seeds(of_each: Iterable[int]) -> str:
    """What the seeds of each scheme are too few for; empty if they are enough."""
    seeds = min(of_each, default=SEEDS_FOR_A_CLAIM)
    if seeds >= SEEDS_FOR_A_CLAIM:
        return ""
    if seeds == 1:
        return f"With one seed this speaks for these checkpoints only; a verdict takes {SEEDS_FOR_A_CLAIM} seeds."
    return f"With {seeds} seeds there is no verdict on schemes: that takes {SEEDS_FOR_A_CLAIM}."


def _unlearned(unlearned: list[Summary], why: str) -> str:
    if not unlearned:
        return ""
    each = [f"{one.scheme.label} ({one.nll.mean:.3f})" for one in unlearned if one.nll]
    ceilings = sorted({f"{one.gate.ceiling:.3f}" for one in unlearned if one.gate})
    return f"Not ranked, since {why} ({', '.join(ceilings)}): {_listed(each)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
