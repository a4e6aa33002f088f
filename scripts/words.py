"""How often a report says a wrong word, and how often it says a true one, on losses of trained models.

    python scripts/words.py errors tests/data/losses.npz
    python scripts/words.py power tests/data/losses.npz
    python scripts/words.py seeds
    python scripts/words.py quantiles

Reports are simulated. Every scheme has the losses of trained models around means that are chosen, so that the truth is
known: `tests/data/losses.npz` (scripts/coverage.py measures it) gives the documents, how schemes differ by document and
what single runs add to that. Seeds add a level that is drawn, for every scheme with another spread.

`errors` prints the share of reports with any wrong word (its standard error is 1.3 % at 5 % of 300), `power` how often
each true word is said, `seeds` how often
plain 95 % intervals over seeds contain the truth.
`quantiles` compares the level of each interval with that of a joint distribution. tests/test_words.py asserts some of
these figures.
"""

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from posbench.evaluation.intervals import Blocks
from posbench.evaluation.levels import REACH_LIMIT, Contrast
from posbench.report.comparison import claims, judgement

Floats = NDArray[np.float64]
Seeds = Literal["normal", "t3", "one in ten", "one in five"]

FULL = 10  # blocks of a document that is taken
BLOCKS = 128  # of a figure
TARGETS = 32  # tokens of a block
LENGTHS = (64, 256, 1024)  # 1x, 4x, 16x
SEED_SD = np.array([0.015, 0.018, 0.045])  # of nll at 1x and of the rises at 4x and 16x: what rope has in that file
JUST = 1e-9  # more than a limit


@dataclasses.dataclass(frozen=True)
class Truth:
    """A scheme: nll at 1x against the reference, and rises at 4x and 16x."""

    nll: float = 0.0
    rises: tuple[float, float] = (0.3, 0.9)


@dataclasses.dataclass(frozen=True)
class Setting:
    schemes: int  # without the reference
    documents: int
    seeds: int = 5
    equal: bool = True  # documents of equal size
    kind: Seeds = "normal"
    spread: float = 2.0  # SDs of schemes over seeds lie between 1 / spread and spread times the usual, in logarithms


class Population:
    """Measured losses, centred: what documents of a scheme add, and what they add for one seed."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as held:
            nll, document = held["nll"].astype(np.float64), held["document"].astype(np.int64)
            names = held["scheme"]
        full = [blocks for d in np.unique(document) if len(blocks := np.flatnonzero(document == d)) == FULL]
        values = nll[:, :, np.stack(full)]  # (runs, quantities, documents, blocks)
        of_scheme = np.stack([values[names == name].mean(0) for name in np.unique(names)])
        left = np.concatenate([values[names == name] - values[names == name].mean(0) for name in np.unique(names)])
        self.difficulty = _centred(of_scheme.mean(0)[:1])  # nll of documents, which all schemes share
        apart = (of_scheme[:, :1] - of_scheme[:, :1].mean(0)) * math.sqrt(2)  # independent ones differ as these do
        self.schemes = _centred(np.concatenate([apart, of_scheme[:, 1:]], axis=1))
        self.runs = _centred(left)

    def draw(self, truths: list[Truth], setting: Setting, rng: np.random.Generator) -> list[list[list[Blocks]]]:
        """Blocks by scheme, seed and quantity: nll at 1x, rises at 4x and 16x."""
        documents, all_documents = setting.documents, self.runs.shape[2]
        share = max(1, min(FULL, BLOCKS // documents))
        sizes = np.full(documents, share) if setting.equal else rng.integers(1, FULL + 1, documents)
        taken = np.array([rng.permutation(FULL) for _ in range(documents)])
        kept = np.arange(FULL) < sizes[:, None]
        counts = sizes * float(TARGETS)
        document = np.arange(documents)

        def field(values: Floats) -> Floats:
            """Sums over the blocks taken (quantities, documents) of documents drawn anew from measured ones."""
            chosen = values[:, rng.integers(all_documents, size=documents)]
            return (np.take_along_axis(chosen, taken[None], 2) * kept).sum(2) * TARGETS

        shared, of_seed = field(self.difficulty), 0.025 * rng.standard_normal(setting.seeds)
        found = []
        for truth in truths:
            own = field(self.schemes[rng.integers(len(self.schemes))])
            own[0] += shared[0]
            sd = SEED_SD * setting.spread ** rng.uniform(-1, 1)
            luck = _luck((setting.seeds, 3), setting.kind, rng) * sd
            luck[:, 0] += of_seed
            level = np.array([4.0 + truth.nll, *truth.rises])
            runs = []
            for seed in range(setting.seeds):
                sums = own + field(self.runs[rng.integers(len(self.runs))]) + (level + luck[seed])[:, None] * counts
                runs.append([Blocks(each, counts, document) for each in sums])
            found.append(runs)
        return found


def _centred(values: Floats) -> Floats:
    return values - values.mean((-2, -1), keepdims=True)


def _luck(shape: tuple[int, int], kind: Seeds, rng: np.random.Generator) -> Floats:
    """What a seed adds, of mean 0, in SDs of the seeds that do not deviate."""
    if kind == "t3":
        return rng.standard_t(3, shape) / math.sqrt(3)
    share = {"normal": 0.0, "one in ten": 0.1, "one in five": 0.2}[kind]
    deviates = rng.random((shape[0], 1)) < share
    return rng.standard_normal(shape) + 10 * (deviates - share)


# -- what a report says ------------------------------------------------------------------------------------------------


def words(population: Population, truths: list[Truth], setting: Setting, rng: np.random.Generator) -> list[list[str]]:
    """The words of one simulated report by scheme, the reference first; wrong ones begin with `WRONG`."""
    contrasts = _contrasts(population, truths, setting, rng)
    judged = _judged(contrasts)
    return [_words(judged, str(n), truth, truths[0]) for n, truth in enumerate(truths)]


def _contrasts(
    population: Population, truths: list[Truth], setting: Setting, rng: np.random.Generator
) -> list[list[list[Contrast]]]:
    """By scheme, seed and quantity."""
    return [[[_contrast(blocks) for blocks in run] for run in runs] for runs in population.draw(truths, setting, rng)]


def _judged(contrasts: list[list[list[Contrast]]]) -> judgement.Judged:
    """What is judged of each scheme; the first is the reference, "0"."""
    first = [{s: run[q] for s, run in enumerate(contrasts[0])} for q in range(len(LENGTHS))]
    pairs, own = {}, {}
    for n, runs in enumerate(contrasts):
        of = [{s: run[q] for s, run in enumerate(runs)} for q in range(len(LENGTHS))]
        own[str(n)] = dict(zip(LENGTHS[1:], of[1:], strict=True))
        if n:
            paired = [{s: one - first[q][s] for s, one in of[q].items()} for q in (0, 1)]
            pairs[str(n)] = (paired[0], paired[1])
    return judgement.judge(pairs, own, LENGTHS[0])


def _words(judged: judgement.Judged, label: str, truth: Truth, reference: Truth) -> list[str]:
    nll, rise = truth.nll - reference.nll, truth.rises[0] - reference.rises[0]
    said = []
    if label in judged.words:
        at_one, beyond = judged.words[label]
        said = [_said(at_one, _true_at_one(at_one, nll), "1x"), _said(beyond, _true_beyond(beyond, rise), "4x")]
    reach = judged.reach[label]
    true = dict(zip(LENGTHS, (0.0, *truth.rises), strict=True))
    holds = all(risen <= REACH_LIMIT for length, risen in true.items() if length <= reach.length)
    said.append(_said(f"holds to {reach.length}", holds, "") if reach.length > LENGTHS[0] else "open")
    if reach.breaks:
        said.append(_said(f"breaks at {reach.breaks}", true[reach.breaks] > REACH_LIMIT, ""))
    return said


def _contrast(blocks: Blocks) -> Contrast:
    return Contrast(float(blocks.sums.sum() / blocks.counts.sum()), blocks)


def _said(word: str, true: bool, where: str) -> str:
    return f"{'' if true else WRONG}{word} {where}".rstrip()


WRONG = "wrong: "


def _true_at_one(word: str, nll: float) -> bool:
    return word == "open" or (nll > 0 if word == "worse" else nll < 0)


def _true_beyond(word: str, rise: float) -> bool:
    return word == "open" or (rise > 0 if word == "worse" else rise < 0)


@dataclasses.dataclass(frozen=True)
class Shares:
    """Of simulated reports: with any wrong word; and by truth, how often each word was said of a scheme."""

    wrong: float
    words: list[dict[str, float]]


def simulate(population: Population, kinds: Sequence[Truth], setting: Setting, reports: int, seed: int = 0) -> Shares:
    """The schemes have these truths in turn; the reference rises by .3 and .9."""
    rng = np.random.default_rng([seed, setting.schemes, setting.documents, setting.seeds])
    truths = [kinds[number % len(kinds)] for number in range(setting.schemes)]
    wrong, said = 0, [Counter[str]() for _ in kinds]
    for _ in range(reports):
        found = words(population, [Truth(), *truths], setting, rng)
        wrong += any(word.startswith(WRONG) for each in found for word in each)
        for number, each in enumerate(found[1:]):
            said[number % len(kinds)].update(each)
    times = [reports * sum(truth is kind for truth in truths) for kind in kinds]
    return Shares(
        wrong / reports,
        [{word: count / n for word, count in each.items()} for each, n in zip(said, times, strict=True)],
    )


TRUTHS: dict[str, list[Truth]] = {
    "all equal": [Truth()],
    "each at another limit": [
        Truth(JUST, (0.3 + JUST, 0.9)),  # better at 1x, rises less
        Truth(-JUST, (0.3 - JUST, 0.9)),  # worse at 1x, extrapolates worse
        Truth(-0.2, (0.05 + JUST, 0.05 + JUST)),  # holds
        Truth(-0.2, (0.05, 0.05)),  # breaks
    ],
    "all rise by just above .05": [Truth(-0.2, (0.05 + JUST, 0.05 + JUST))],
}
KINDS: tuple[Seeds, ...] = ("normal", "t3", "one in ten", "one in five")


def errors(population: Population, reports: int, tell: Callable[[str], None] = print) -> None:
    """The table of wrong words."""
    cells = [(8, True), (20, True), (60, True), (20, False)]
    heads = [f"{documents}{'' if equal else ' unequal'}" for documents, equal in cells]
    tell(f"| truth | schemes | seeds | {' | '.join(f'{head} documents' for head in heads)} |")
    tell("|---|---:|---|" + "---:|" * len(cells))
    rows = [(5, 5, kind, name) for kind in KINDS for name in TRUTHS]
    rows += [(5, 10, "one in ten", "all rise by just above .05"), (5, 10, "one in five", "all rise by just above .05")]
    rows += [(63, 5, "normal", "all equal"), (63, 5, "normal", "each at another limit")]
    for schemes, seeds, kind, name in rows:
        settings = [Setting(schemes, documents, seeds, equal, kind) for documents, equal in cells]
        times = reports if schemes < 10 else reports // 3
        found = [simulate(population, TRUTHS[name], setting, times).wrong for setting in settings]
        shown = " | ".join(f"{100 * share:.1f} %" for share in found)
        tell(f"| {name} | {schemes} | {seeds}, {_SEEDS[kind]} | {shown} |")


_SEEDS: dict[Seeds, str] = {
    "normal": "normal",
    "t3": "t with 3 degrees of freedom",
    "one in ten": "one in ten deviates by 10 SD",
    "one in five": "one in five deviates by 10 SD",
}


def power(population: Population, reports: int, tell: Callable[[str], None] = print) -> None:
    """The table of true words."""
    asked: dict[str, tuple[Truth, tuple[str, ...]]] = {
        "worse at 1x by .1: worse": (Truth(0.1), ("worse 1x",)),
        "rises less by .1: less": (Truth(0.0, (0.2, 0.8)), ("less 4x",)),
        "no rise: holds to 16x": (Truth(-0.1, (0.0, 0.0)), ("holds to 1024",)),
        "rises by .2 at 4x: breaks there": (Truth(0.1, (0.2, 0.4)), ("breaks at 256",)),
    }
    truths = [truth for truth, _ in asked.values()]
    columns = [(schemes, seeds, documents) for schemes in (5, 63) for seeds in (5, 10) for documents in (20, 60)]
    found = [
        simulate(population, truths, Setting(schemes, documents, seeds), max(10, 5 * reports // schemes))
        for schemes, seeds, documents in columns
    ]
    tell("| truth: word | " + " | ".join(f"{k} schemes, {n} seeds, {d} documents" for k, n, d in columns) + " |")
    tell("|---|" + "---:|" * len(columns))
    for number, (about, (_, said)) in enumerate(asked.items()):
        shares = [sum(one.words[number].get(word, 0.0) for word in said) for one in found]
        tell(f"| {about} | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")


def seed_intervals(tell: Callable[[str], None] = print, draws: int = 20_000) -> None:
    """How often a 95 % t-interval over seeds contains the mean of all seeds, by the kind of seeds."""
    rng = np.random.default_rng(0)
    tell("| seeds | " + " | ".join(_SEEDS[kind] for kind in KINDS) + " |")
    tell("|---:|" + "---:|" * len(KINDS))
    for seeds in (3, 5, 10):
        shown = []
        for kind in KINDS:
            luck = _luck((draws * seeds, 1), kind, rng).reshape(draws, seeds)
            error = luck.std(1, ddof=1) / math.sqrt(seeds)
            shown.append((np.abs(luck.mean(1)) <= stats.t.ppf(0.975, seeds - 1) * error).mean())
        tell(f"| {seeds} | " + " | ".join(f"{100 * share:.0f} %" for share in shown) + " |")


def quantiles(tell: Callable[[str], None] = print, draws: int = 40_000) -> None:
    """Critical values of t by Sidak's level and by the joint distribution, where the reference is half the noise."""
    from scipy import special

    rng = np.random.default_rng(0)
    tell("| schemes | degrees of freedom | each at its level | joint |\n|---:|---:|---:|---:|")
    for schemes in (5, 63):
        for df in (4, 9, 40):
            largest = np.zeros(draws)
            for shared, many in ((0.5, schemes), (0.5, schemes), (0.0, schemes + 1)):
                z = math.sqrt(shared) * rng.standard_normal((draws, 1))
                z = z + math.sqrt(1 - shared) * rng.standard_normal((draws, many))
                t = np.abs(z) / np.sqrt(rng.chisquare(df, (draws, many)) / df)
                largest = np.maximum(largest, t.max(1))
            level = claims.level(3 * schemes + 1)
            one = special.stdtrit(df, 1 - level / 2)
            tell(f"| {schemes} | {df} | {one:.2f} | {np.quantile(largest, 1 - claims.ALPHA):.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("errors", "power"):
        command = commands.add_parser(name)
        command.add_argument("losses", type=Path)
        command.add_argument("--reports", type=int, default=300)
    commands.add_parser("seeds")
    commands.add_parser("quantiles")
    asked = parser.parse_args()
    if asked.command == "quantiles":
        quantiles()
    elif asked.command == "seeds":
        seed_intervals()
    else:
        tables = {"errors": errors, "power": power}
        tables[asked.command](Population(asked.losses), asked.reports)
