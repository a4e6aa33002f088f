"""Does a comparison of small models hold for larger ones? Rungs of a ladder against its largest, the target.

A rung is a set of comparable runs on text. The question is what a user asks: how often is the small rung right about
two schemes that differ at the target, and what does its winner cost there (Magnusson et al., 2025, "DataDecide",
section 3.3)? Three comparisons say how good that is: seeds of the target against other seeds of it, a scheme's family
in place of its own runs, and nll at the training length in place of the endpoint.

Intervals are by a bootstrap over schemes, seeds and documents at once, as pairs share schemes, seeds and documents.
Rungs are drawn independently. With n seeds or documents n - 1 are drawn, so that the variance of a mean is not too
small (Rao & Wu, 1988, "Resampling Inference With Complex Survey Data"). Drawing crossed factors together is slightly
conservative (Owen, 2007, "The Pigeonhole Bootstrap").
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from posbench.config.schema import Config
from posbench.evaluation import intervals, levels
from posbench.evaluation.intervals import Floats
from posbench.evaluation.levels import Contrast
from posbench.report.comparison import judgement, load, statistics, summary
from posbench.report.comparison.claims import LEAST
from posbench.report.comparison.judgement import PerSeed
from posbench.report.comparison.load import Group, RunData, Scheme
from posbench.report.comparison.summary import ENDPOINT_RATIO, PerRun
from posbench.run_folder.rows import PLAIN
from posbench.show import places

TIMES = 1000  # draws of the bootstrap
FEWEST = 3  # schemes that a rung must share with the target
SHARE = 4  # `uses` is the gain from context beyond the training length over this

Cells = Mapping[str, PerSeed]  # of one endpoint at one rung: label -> seed -> value; lower is better


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A measure in nats per token of which less is better."""

    name: str
    meaning: str
    of: Callable[[int], PerRun]  # training length -> the measure


def _uses(length: int) -> PerRun:
    return lambda run: run.levels.contrast((1, PLAIN, length), (-1, PLAIN, length // SHARE))


ENDPOINTS = (
    Endpoint("nll", "nll at the training length", lambda length: summary.nll(PLAIN, length)),
    Endpoint(
        "rise", f"the rise of nll at {ENDPOINT_RATIO}x", lambda length: summary.rise(PLAIN, ENDPOINT_RATIO * length)
    ),
    Endpoint("uses", f"the gain from context beyond 1/{SHARE} of the training length", _uses),
)


# -- rungs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rung:
    """Comparable runs, one size."""

    name: str
    compute: float  # floating-point operations to train one run
    seeds: tuple[int, int]  # fewest and most of a scheme
    schemes: list[str]  # labels of those with a finished run
    unlearned: list[str]  # of those, the ones that are not shown to have learned: they are not ranked
    names: dict[str, str]  # label -> the encoding's name
    cells: dict[str, Cells]  # by endpoint, of the schemes that have learned


def rungs(groups: Sequence[Group]) -> list[Rung]:
    """The sets of text that were trained here, the smallest by compute first; the last one is the target."""
    own = [_rung(group) for group in groups if group.task is None and any(one.by_seed for one in group.schemes)]
    found = sorted((rung for rung in own if rung is not None), key=lambda rung: (rung.compute, rung.name))
    often = Counter(rung.name for rung in found)
    numbered = [f"{rung.name} ({n})" if often[rung.name] > 1 else rung.name for n, rung in enumerate(found, start=1)]
    return [dataclasses.replace(rung, name=name) for rung, name in zip(found, numbered, strict=True)]


def _rung(group: Group) -> Rung | None:
    """None for models trained elsewhere, whose size and budget are not known."""
    config, length = group.runs[0].config, group.train_length
    if not isinstance(config, Config):
        return None
    done = [scheme for scheme in group.schemes if scheme.by_seed]
    gates = {one.label: gate.learned for one in done if (gate := summary.gate(one))}
    learned = [one for one in done if levels.may_claim(gates.get(one.label))]
    targets = Counter(summary.targets(run) for one in done for run in one.by_seed.values())
    (usual, _), *_ = targets.most_common(1)
    tokens: int = load.asked(config)["training.tokens"]  # of begun runs, with those of the run they began from
    numbers = [len(one.by_seed) for one in done]
    short = f"{tokens / 1e9:g}B" if tokens >= 1e9 else f"{tokens / 1e6:g}M"
    sizes = [size for run in group.runs if (size := run.parameters("total")) is not None]
    # Per token 6 a parameter and 12 a layer, channel and token of context: Chowdhery et al. (2022), appendix B.
    per_token = 6 * float(np.median(sizes or [0])) + 12 * config.model.n_layers * config.model.d_model * length
    return Rung(
        name=f"{config.model.n_layers}x{config.model.d_model}, L {length}, {short}",
        compute=tokens * per_token,
        seeds=(min(numbers), max(numbers)),
        schemes=[one.label for one in done],
        unlearned=[one.label for one in done if one not in learned],
        names={one.label: one.name for one in done},
        cells={each.name: _cells(learned, each.of(length), usual) for each in ENDPOINTS},
    )


def _cells(schemes: list[Scheme], measure: PerRun, targets: object) -> Cells:
    def of_these(run: RunData) -> Contrast | None:
        return measure(run) if summary.targets(run) == targets else None

    found = {one.label: summary.per_seed(one, of_these) for one in schemes}
    return {label: values for label, values in found.items() if values}


# -- pairs -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """The difference of two schemes at one rung, paired by seed and document."""

    mean: float
    half: float  # of the 95 % t-interval; infinite if it is not known
    p: float  # two-sided

    def resolved(self, least: float) -> bool:
        return abs(self.mean) > max(least, self.half)


def pairs(cells: Cells) -> dict[tuple[str, str], Pair]:
    """By two labels, in either order: the first less the second.

    Seeds are few, so the variance over seeds of each pair is moderated by that of all (`claims.moderated`). Simulated
    intervals of pairs that do not differ lie beside 0 in 5 to 6 % of cases (scripts/words.py pairs).
    """
    values = {
        (a, b): {seed: cells[a][seed] - cells[b][seed] for seed in sorted(cells[a].keys() & cells[b].keys())}
        for a, b in itertools.combinations(sorted(cells), 2)
    }
    # Of k (k - 1) / 2 differences that vary alike, 2 (k - 2) others share a scheme with one: a correlation of 1/2.
    found = judgement.moderated(values, shared=1 / (len(cells) + 1))
    made = {}
    for (a, b), each in values.items():
        if (one := found.get((a, b))) is not None:
            first = Pair(one.mean, one.half_at(0.05), statistics.p_of(one))
        else:
            first = Pair(float(np.mean([x.value for x in each.values()])) if each else 0.0, math.inf, 1.0)
        made[a, b], made[b, a] = first, dataclasses.replace(first, mean=-first.mean)
    return made


# -- a rung against the target -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Reversal:
    """Two schemes that are resolved in opposite directions: `better` is better at the small rung."""

    better: str
    worse: str
    small: float  # nats per token, better less worse
    target: float
    p: float  # that not both directions are true; adjusted over all pairs (Holm)


@dataclasses.dataclass(frozen=True)
class Against:
    """What a small rung says of the target at one endpoint."""

    schemes: list[str]
    resolved: int  # pairs that are resolved at the target
    accuracy: Estimate | None  # share of those that the small rung orders as the target does; None: there are none
    regret: Estimate  # nats per token at the target, of the small rung's best scheme against `best`
    tau: Estimate  # Kendall's tau-b
    by_family: float | None  # accuracy of ordering schemes by their family's mean at the small rung; a tie is half
    by_nll: float | None  # accuracy of nll at the training length of the small rung
    picked: str
    best: str  # of all schemes at the target, also those that the small rung does not rank
    costs: Pair  # picked less best, at the target
    reversals: list[Reversal]


def against(
    small: Cells,
    target: Cells,
    names: Mapping[str, str],
    nll: Cells | None = None,
    least: float = LEAST,
    times: int = TIMES,
) -> Against | None:
    """Compare a rung with the target.

    Args:
        names: label -> name of the encoding, which tells its family.
        nll: of the small rung at the training length, for the baseline.
        least: nats per token; a smaller difference at the target is not resolved.
        times: draws of the bootstrap.

    Returns:
        None if they have fewer than `FEWEST` schemes in common.
    """
    labels = sorted(small.keys() & target.keys())
    if len(labels) < FEWEST:
        return None
    at = list(itertools.combinations(labels, 2))
    at_target, at_small = pairs(target), pairs(small)
    far, near = [at_target[each] for each in at], [at_small[each] for each in at]
    resolved = np.array([one.resolved(least) for one in far])
    unranked = sorted(target.keys() - small.keys())
    every, ranked = labels + unranked, slice(len(labels))
    rng = np.random.default_rng(0)
    x, of_all = _means(small, labels), _means(target, every)
    xs, drawn = _draws(small, labels, times, rng), _draws(target, every, times, rng)
    parts = [len(part) for part in (labels, unranked) if part]
    weights = np.hstack([rng.multinomial(n, np.full(n, 1 / n), times) for n in parts]).astype(np.float64)
    y, ys, often = of_all[ranked], drawn[:, ranked], weights[:, ranked]
    picked, best = labels[int(x.argmin())], every[int(of_all.argmin())]
    one = np.ones((1, len(every)))
    families = [places.family(names[label]) for label in labels]
    in_family = np.array([np.mean([v for v, f in zip(x, families, strict=True) if f == own]) for own in families])
    one_x = _means(nll, labels) if nll is not None and set(labels) <= nll.keys() else None
    return Against(
        schemes=labels,
        resolved=int(resolved.sum()),
        accuracy=_accuracy(x, y, xs, ys, often, resolved) if resolved.any() else None,
        regret=_estimate(_regret(x[None], of_all[None], one)[0], _regret(xs, drawn, weights)),
        tau=_estimate(_tau(x, y), 2 * _right(xs, ys, often, np.ones_like(resolved)) - 1),
        by_family=_share(in_family, y, resolved),
        by_nll=None if one_x is None else _share(one_x, y, resolved),
        picked=picked,
        best=best,
        costs=at_target.get((picked, best), Pair(0.0, 0.0, 1.0)),
        reversals=_reversals(at, near, far, least),
    )


def _accuracy(x: Floats, y: Floats, xs: Floats, ys: Floats, weights: Floats, resolved: np.ndarray) -> Estimate:
    """With an exact bound where all pairs agree, or none: then no draw differs, and the bootstrap knows no error.

    Of n schemes n / 2 pairs share none, which is as many independent answers as there are at least.
    """
    share = _share(x, y, resolved)
    assert share is not None
    found = _estimate(share, _right(xs, ys, weights, resolved))
    number = len(x) // 2
    low, high = intervals.clopper_pearson(number if share > 0.5 else 0, number)
    return dataclasses.replace(found, **({"low": low} if share == 1 else {"high": high} if share == 0 else {}))


def _reversals(at: list[tuple[str, str]], near: list[Pair], far: list[Pair], least: float) -> list[Reversal]:
    """Both directions must be shown, so the p of a pair is the larger of the two; that of pairs that agree is 1."""
    p = statistics.holm([max(a.p, b.p) if a.mean * b.mean < 0 else 1.0 for a, b in zip(near, far, strict=True)])
    found = []
    for (first, second), a, b, adjusted in zip(at, near, far, p, strict=True):
        if a.resolved(least) and b.resolved(least) and a.mean * b.mean < 0:
            sign = -1 if a.mean > 0 else 1
            better, worse = (first, second) if a.mean < 0 else (second, first)
            found.append(Reversal(better, worse, sign * a.mean, sign * b.mean, adjusted))
    return sorted(found, key=lambda one: one.p)


@dataclasses.dataclass(frozen=True)
class Ceiling:
    """Seeds of the target in the place of a small rung, against its other seeds: means over all ways to part them."""

    few: int  # seeds of the smaller part
    many: int
    accuracy: float | None
    regret: float
    tau: float


def ceiling(target: Cells, least: float = LEAST) -> Ceiling | None:
    """What noise of seeds alone leaves: the smaller half of the target's seeds is asked about the other half.

    Of three seeds it is each one against the other two. The documents are the same, and pairs are resolved by all
    seeds together.

    Returns:
        None if fewer than `FEWEST` schemes have two seeds in common.
    """
    labels = sorted(target)
    seeds = sorted(statistics.in_all(set(target[label]) for label in labels))
    if len(labels) < FEWEST or len(seeds) < 2:
        return None
    found = pairs(target)
    resolved = np.array([found[each].resolved(least) for each in itertools.combinations(labels, 2)])
    values = np.array([[target[label][seed].value for seed in seeds] for label in labels])
    one, shares, regrets, taus = np.ones((1, len(labels))), [], [], []
    for part in itertools.combinations(range(len(seeds)), len(seeds) // 2):
        rest = [at for at in range(len(seeds)) if at not in part]
        x, y = values[:, list(part)].mean(1), values[:, rest].mean(1)
        shares.append(_share(x, y, resolved))
        regrets.append(_regret(x[None], y[None], one)[0])
        taus.append(_tau(x, y))
    known = [share for share in shares if share is not None]
    return Ceiling(
        len(seeds) // 2, len(seeds) - len(seeds) // 2, float(np.mean(known)) if known else None,
        float(np.mean(regrets)), float(np.mean(taus)),
    )  # fmt: skip


def ranks(cells: Cells, times: int = TIMES) -> dict[str, Estimate]:
    """Label -> its rank among the schemes of a rung, 1 the best, with other seeds and documents drawn.

    Empty for fewer than `FEWEST` schemes: such a rung ranks nothing.
    """
    labels = sorted(cells)
    if len(labels) < FEWEST:
        return {}
    drawn = _draws(cells, labels, times, np.random.default_rng(0)).argsort(1).argsort(1) + 1
    own = _means(cells, labels).argsort().argsort() + 1
    return {label: _estimate(float(own[at]), drawn[:, at]) for at, label in enumerate(labels)}


# -- arrays ------------------------------------------------------------------------------------------------------------


def _pairs(number: int) -> tuple[np.ndarray, np.ndarray]:
    first, second = np.triu_indices(number, 1)
    return first, second


def _means(cells: Cells, labels: Sequence[str]) -> Floats:
    return np.array([np.mean([one.value for one in cells[label].values()]) for label in labels])


def _right(x: Floats, y: Floats, weights: Floats, asked: np.ndarray) -> Floats:
    """By draw, the share of pairs asked for that x and y, (draws, schemes), order alike; NaN without such a pair."""
    i, j = _pairs(x.shape[1])
    alike = 0.5 + 0.5 * np.sign(x[:, i] - x[:, j]) * np.sign(y[:, i] - y[:, j])
    often = weights[:, i] * weights[:, j] * asked
    with np.errstate(invalid="ignore"):
        return np.asarray((often * alike).sum(1) / often.sum(1))


def _share(x: Floats, y: Floats, asked: np.ndarray) -> float | None:
    share = float(_right(x[None], y[None], np.ones((1, len(x))), asked)[0])
    return None if math.isnan(share) else share


def _regret(x: Floats, y: Floats, weights: Floats) -> Floats:
    """By draw: y of the scheme with the least x, less the least y, among schemes that were drawn.

    y and the weights may have further schemes than x, after its own.
    """
    x, y = np.where(weights[:, : x.shape[1]] > 0, x, np.inf), np.where(weights > 0, y, np.inf)
    return np.asarray(np.take_along_axis(y, x.argmin(1)[:, None], 1)[:, 0] - y.min(1))


def _tau(x: Floats, y: Floats) -> float:
    from scipy import stats

    return float(stats.kendalltau(x, y).statistic)  # tau-b


def _estimate(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Estimate(float(value), float(low), float(high))


def _draws(cells: Cells, labels: Sequence[str], times: int, rng: np.random.Generator) -> Floats:
    """Means of the schemes, (times, schemes), of seeds and documents drawn with replacement, the same for all."""
    sums, counts = _by_seed_and_unit(cells, labels)
    seeds, units = sums.shape[1:]
    of_unit, of_seed = _weights(units, times, rng), _weights(seeds, times, rng)
    level = np.moveaxis(np.nan_to_num(sums) @ of_unit.T, -1, 0) / (of_unit @ counts)[:, None, None]
    there = ~np.isnan(sums[:, :, 0]) * of_seed[:, None, :]
    there = np.where(there.sum(2, keepdims=True) > 0, there, ~np.isnan(sums[:, :, 0]))  # else a scheme had no seed
    return np.asarray((level * there).sum(2) / there.sum(2))


def _weights(number: int, times: int, rng: np.random.Generator) -> Floats:
    """How often each of so many is drawn in n - 1 draws; the only one always."""
    return rng.multinomial(max(1, number - 1), np.full(number, 1 / number), times).astype(np.float64)


def _by_seed_and_unit(cells: Cells, labels: Sequence[str]) -> tuple[Floats, Floats]:
    """(schemes, seeds, units) sums, NaN where a scheme lacks the seed, and (units,) tokens.

    One unit if the blocks are not known or of different texts: then documents are not drawn.
    """
    seeds = sorted({seed for label in labels for seed in cells[label]})
    own = [(at, seeds.index(seed), one) for at, label in enumerate(labels) for seed, one in cells[label].items()]
    blocks = [one.blocks for *_, one in own if one.blocks is not None]
    if len(blocks) == len(own) and all(one.same_text(blocks[0]) for one in blocks):
        values, counts, _ = intervals.by_unit(blocks)
    else:
        values, counts = np.array([[one.value] for *_, one in own]), np.ones(1)
    sums = np.full((len(labels), len(seeds), len(counts)), np.nan)
    for (scheme, seed, _), value in zip(own, values, strict=True):
        sums[scheme, seed] = value
    return sums, counts
