"""The answer in words: how far each scheme holds, its cost at the training length, and open questions."""

from collections.abc import Mapping, Sequence

from posbench.evaluation.intervals import Documents
from posbench.evaluation.levels import REACH_LIMIT, USES_LIMIT
from posbench.report.comparison.load import Group
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.comparison.summary import ENDPOINT_RATIO, Summary, documents


def answer(group: Group, summaries: list[Summary]) -> list[str]:
    """A few sentences from the words of a group; schemes that have not learned are only named.

    They speak of the primary figures alone: how far schemes hold, nll at the training length, the rise at 4x.
    """
    unlearned = [one for one in summaries if not one.ranked]
    ranked = [one for one in summaries if one.ranked and one.reach]
    behind = documents(group)
    sentences = [
        _one_has_half(behind) if behind else "",
        _held(ranked, group.train_length),
        _used(ranked, group.train_length),
        *_against(group, ranked),
        few_seeds({one.scheme.label: one.n_done for one in ranked}),
        _two_groups(ranked),
    ]
    for gate, why in (
        ("no", "an n-gram model has no more nats at 1x"),
        ("not resolved", "at 1x they are not resolved from an n-gram model"),
    ):
        sentences.append(_unlearned([one for one in unlearned if one.learned == gate], why))
    return [sentence for sentence in sentences if sentence]


def _one_has_half(behind: Documents) -> str:
    """Why nothing is judged, where one document has half of the targets or more."""
    why = behind.no_verdict
    return f"{why[:1].upper()}{why[1:]}, since figures would speak for that document only." if why else ""


def _held(ranked: list[Summary], train_length: int) -> str:
    """A sentence on how far each scheme holds, the farthest first; then what breaks, then what is not resolved."""
    longest = max((p.length for one in ranked for p in one.plain.points if p.nll is not None), default=train_length)
    said: dict[tuple[int, int, str], list[str]] = {}  # order of the part, and what it adds -> labels
    for one in ranked:
        assert one.reach is not None
        reach, undefined = one.reach, one.plain.undefined_at
        if reach.length > train_length:
            own = max(p.length for p in one.plain.points if p.nll is not None)
            so_far = ", the longest measured" if reach.length == longest else ""
            if reach.length == own < longest and undefined is None:
                so_far = ", not measured beyond"
            said.setdefault((0, -reach.length, so_far), []).append(one.scheme.label)
        if reach.breaks:
            said.setdefault((1, reach.breaks, ""), []).append(one.scheme.label)
        if reach.length == train_length and undefined is not None and reach.resolved and reach.breaks is None:
            said.setdefault((2, train_length, ""), []).append(one.scheme.label)
        elif not reach.resolved:
            said.setdefault((3, reach.length, ""), []).append(one.scheme.label)
    parts = []
    for (kind, number, so_far), names in sorted(said.items()):
        length, alone = abs(number), len(names) == 1
        times = f"{length:,} tokens, {length / train_length:g} times the training length"
        open_after = f"{'is' if alone else 'are'} not resolved beyond {length:,}"
        words = (
            f"{'holds' if alone else 'hold'} to {times}{so_far}",
            f"{'breaks' if alone else 'break'} at {times}",
            f"{'is' if alone else 'are'} undefined beyond {length:,}",
            open_after,
        )
        parts.append(f"{_listed(names)} {words[kind]}")
    means = f" (a rise of at most, or above, {REACH_LIMIT:g} nats per token, by joint bounds)"
    return f"{'; '.join(parts)}{means}." if parts and longest > train_length else ""


def _used(ranked: list[Summary], train_length: int) -> str:
    """A sentence on the schemes that need less than the training length, the most first."""
    by_use: dict[int, list[str]] = {}
    for one in ranked:
        if one.uses is not None and one.uses < train_length:
            by_use.setdefault(one.uses, []).append(one.scheme.label)
    parts = [
        f"{_listed(names)} {'needs' if len(names) == 1 else 'need'} at most {n:,}"
        for n, names in sorted(by_use.items(), reverse=True)
    ]
    means = f"with so many, nll is higher by at most {USES_LIMIT:g} nats per token, by joint bounds"
    return f"Of the {train_length:,} tokens of training, {'; '.join(parts)} ({means})." if parts else ""


def _against(group: Group, ranked: list[Summary]) -> list[str]:
    """Sentences on the two endpoints, and on what is not resolved."""
    found = {one.scheme.label: one.endpoints for one in ranked if one.endpoints and one.endpoints.verdict.at_one}
    if group.reference is None or not found:
        return []
    costs: dict[str, list[str]] = {"better": [], "worse": []}
    rises: dict[str, list[str]] = {"less": [], "worse": []}
    unresolved: dict[str, list[str]] = {"1x": [], f"{ENDPOINT_RATIO}x": []}
    for label, one in found.items():
        at_one, beyond = one.verdict.at_one, one.verdict.beyond
        for words, word, interval in ((costs, at_one, one.nll), (rises, beyond, one.rise)):
            if interval and word in words:
                words[word].append(f"{label} by {abs(interval.mean):.3f}")
        for where, settled, bounds in zip(unresolved, (at_one, beyond), (one.nll_bounds, one.rise_bounds), strict=True):
            if settled == "open" and bounds:
                unresolved[where].append(f"{label} ({bounds.low:+.3f} to {bounds.high:+.3f})")
    open_at = [f"at {where} {_listed(labels)}" for where, labels in unresolved.items() if labels]
    against = f"Against {group.reference.label}"
    return [
        _words(f"{against} at {group.train_length:,} tokens, in nats per token", costs, {}),
        _words(
            f"{against}, in the rise at {ENDPOINT_RATIO}x", rises, {"less": "rises less", "worse": "extrapolates worse"}
        ),
        f"Not resolved, which is not equal: {'; '.join(open_at)}." if open_at else "",
    ]


def _words(about: str, said: dict[str, list[str]], words: dict[str, str]) -> str:
    parts = [f"{words.get(kind, kind)}: {_listed(labels)}" for kind, labels in said.items() if labels]
    return f"{about}, {'; '.join(parts)}." if parts else ""


def _two_groups(ranked: list[Summary]) -> str:
    names = [one.scheme.label for one in ranked if one.bimodal]
    return f"Seeds in two groups, so that a mean says little (see the points): {_listed(names)}." if names else ""


def few_seeds(of_each: Mapping[str, int]) -> str:
    """What the seeds of each scheme are too few for; empty if they are enough."""
    few = [label for label, seeds in of_each.items() if seeds < SEEDS_FOR_A_CLAIM]
    if not few:
        return ""
    if len(few) < len(of_each):
        return f"Fewer than {SEEDS_FOR_A_CLAIM} seeds, which speak for these checkpoints only: {_listed(few)}."
    seeds = min(of_each.values())
    if seeds == 1:
        return f"With one seed this speaks for these checkpoints only; a verdict takes {SEEDS_FOR_A_CLAIM} seeds."
    return f"With {seeds} seeds there is no verdict on schemes: that takes {SEEDS_FOR_A_CLAIM}. For rises take ten."


def _unlearned(unlearned: list[Summary], why: str) -> str:
    if not unlearned:
        return ""
    each = [f"{one.scheme.label} ({one.nll.mean:.3f})" for one in unlearned if one.nll]
    ceilings = sorted({f"{one.gate.ceiling:.3f}" for one in unlearned if one.gate})
    return f"Not ranked, since {why} ({', '.join(ceilings)}): {_listed(each)}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)
