"""The schemes of one setting: losses, what longer contexts add, differences from a
reference, and verdicts in words.

Every difference is paired by seed and unit of text. Words follow from the same
intervals as the numbers, adjusted for all that the report says (`results.words`). A
scheme has learned if it beats the n-gram model; rises, "holds" and "uses" are said of
these alone. Whether it also beats a reader of its window is a yardstick.
"""

import dataclasses
import math
from typing import Self

import numpy as np
import pandas as pd

from posbench.errors import UserError
from posbench.estimate import Estimate, Floats, estimate
from posbench.results import words
from posbench.results.comparison import (
    Comparison,
    Difference,
    Interval,
    Numbers,
    Scheme,
)
from posbench.results.words import LEAST, NOT_RESOLVED
from posbench.run.rows import PLAIN, WINDOWED

REFERENCE = "rope"
ENDPOINT_RATIO = 4  # training lengths at which the rise is compared
ENOUGH_SEEDS = 5  # for a word; with fewer, words about one scheme go by documents alone
# With such a share of the tokens in one document nothing is said of other text.
LARGE_DOCUMENT = 1 / 2
ALPHA = 0.05  # for tests that are not of a report on text
NOT_BEATEN = ("no", NOT_RESOLVED)  # words that close a gate; not known (None) is open

# Simple readers, scored on a scheme's own targets.
READERS = {
    "ngram": "n-gram model",
    "mixture": "reader of the window",
    "cached_ngram": "n-gram with window",  # of kept rows, a weaker reader
}


_FACTS = [
    "encoding",
    "parameters",
    "encoding_parameters",
    "trained_tokens",
    "learning_rate",
]


class Losses:
    """The losses of schemes by label, variant and length, from rows on one set of
    targets.

    `sums` are nats, (seeds, units), with the simple readers as further variants.
    `statuses` are ok, or why there are no sums: undefined, failed, too_short; or
    missing: there are sums of some seeds only. `seeds` counts the seeds of each label.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.train_length = int(rows["train_length"].iloc[0]) if len(rows) else 0
        rows = _on_equal_units(rows)
        if rows.duplicated(["label", "seed", "variant", "length"]).any():
            raise ValueError("one seed of a scheme counts once")
        self.seeds: dict[str, int] = rows.groupby("label")["seed"].nunique().to_dict()
        self.statuses: dict[tuple[str, str, int], str] = {}
        self.sums: dict[tuple[str, str, int], pd.DataFrame] = {}
        names = ["seed", "status", "unit_nll", *(f"unit_{name}" for name in READERS)]
        groups = rows.sort_values("seed").groupby(["label", "variant", "length"])
        for (label, variant, length), group in groups[names]:
            key = (label, variant, int(length))
            failures = group.loc[group["status"] != "ok", "status"]
            if len(failures):
                self.statuses[key] = failures.iloc[0]
                continue
            in_all_seeds = len(group) == self.seeds[label]
            self.statuses[key] = "ok" if in_all_seeds else "missing"
            self.sums[key] = _stacked(group, "unit_nll")
            if variant == PLAIN:
                for reader in READERS:
                    nats = _stacked(group, f"unit_{reader}")
                    self.sums[label, reader, int(length)] = nats

        measured = rows[rows["status"] == "ok"]
        tokens = measured["unit_tokens"].dropna()  # the same for all rows
        self.tokens: Floats = tokens.iloc[0] if len(tokens) else np.ones(1)
        n_bytes = measured["n_bytes"].astype("float64").median()
        self.bits_per_byte = self.tokens.sum() / n_bytes / math.log(2)  # of one nat

        self.silence = ""  # why nothing may be said of other text
        documents = measured["unit_documents"].dropna()
        if len(self.tokens) == 1:
            self.silence = "losses by document are missing"
        elif len(documents):
            by_document = pd.Series(self.tokens).groupby(documents.iloc[0]).sum()
            largest = by_document.max() / self.tokens.sum()
            if largest >= LARGE_DOCUMENT:
                self.silence = f"one document has {largest:.0%} of the targets"

    @classmethod
    def of(cls, frame: pd.DataFrame) -> Self:
        """Return the losses of one setting's runs, from their main rows."""
        return cls(main_rows(frame))

    def lengths(self, label: str | None = None) -> list[int]:
        """Return the lengths in tokens that any seed, of one scheme or of all, asked
        for and that the text allows.
        """
        lengths = set()
        for (name, variant, length), status in self.statuses.items():
            if variant == PLAIN and status != "too_short" and label in (None, name):
                lengths.add(length)
        return sorted(lengths)

    def longer(self, label: str | None = None) -> list[int]:
        """Return those of the lengths that are beyond the training length."""
        return [length for length in self.lengths(label) if length > self.train_length]

    def level(self, label: str, length: int, variant: str = PLAIN) -> pd.DataFrame:
        """Return the sums at a length, (seeds, units); empty where there are none."""
        return self.sums.get((label, variant, length), pd.DataFrame())

    def rise(self, label: str, length: int, variant: str = PLAIN) -> pd.DataFrame:
        """Return what a context adds to the sums at the training length; below 0 it
        helps.
        """
        at_one = self.level(label, self.train_length)
        return difference(self.level(label, length, variant), at_one)

    def estimate(self, sums: pd.DataFrame) -> Estimate:
        """Estimate the mean, nats per token, for other seeds on other text."""
        tokens = self.tokens
        if sums.shape[1] == 1:
            tokens = tokens.sum(keepdims=True)
        return estimate(sums.to_numpy(), tokens)

    def for_words(self, sums: pd.DataFrame) -> Estimate:
        """Return the estimate for words about one scheme: with few seeds over
        documents, for these checkpoints.
        """
        if len(sums) < ENOUGH_SEEDS:
            sums = sums.mean().to_frame().T
        return self.estimate(sums)


def _on_equal_units(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows whose sums are over the same units of text. Some kept rows have one
    unit, all of the targets; beside these the others have one, too.
    """
    n_units = rows["unit_tokens"].dropna().map(len)
    if n_units.nunique() < 2:
        return rows
    rows = rows.copy()
    for name in ("tokens", "nll", *READERS):
        sums = rows[f"unit_{name}"]
        rows[f"unit_{name}"] = sums.map(
            lambda of_units: np.sum(of_units, keepdims=True), na_action="ignore"
        )
    documents = rows["unit_documents"]
    rows["unit_documents"] = documents.map(lambda _: np.zeros(1), na_action="ignore")
    return rows


def _stacked(group: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return lists by unit of text as (seeds, units); empty if a seed has none."""
    if group[name].isna().any():
        return pd.DataFrame()
    return pd.DataFrame(np.stack(group[name].to_list()), index=group["seed"])


def difference(sums: pd.DataFrame, base: pd.DataFrame) -> pd.DataFrame:
    """Return the difference paired by seed and unit; empty if no seed is in both."""
    sums, base = sums.align(base, join="inner", axis=0)
    return sums - base


def beats(losses: Losses, label: str, reader: str, alpha: float = ALPHA) -> str | None:
    """Tell whether a scheme beats a simple reader at the training length: yes, no, not
    resolved; None: not known.
    """
    length = losses.train_length
    above = difference(losses.level(label, length), losses.level(label, length, reader))
    if above.empty or len(losses.tokens) == 1:
        return None
    return words.beats_word(losses.for_words(above), alpha)


def learned(losses: Losses, label: str, schemes: int) -> str | None:
    """Tell whether a scheme of so many beats the n-gram model."""
    return beats(losses, label, "ngram", words.adjusted(words.GATES, 2 * schemes))


def beats_reader(losses: Losses, label: str, schemes: int) -> str | None:
    """Tell whether a scheme of so many beats the best reader of its window that its
    rows know.
    """
    alpha = words.adjusted(words.GATES, 2 * schemes)
    strong = beats(losses, label, "mixture", alpha)
    return strong or beats(losses, label, "cached_ngram", alpha)


def holds_to(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the longest context to which a scheme holds, as it does to all before and
    all its seeds have; None if no longer one was asked for.
    """
    longer = losses.longer(label)
    if not longer:
        return None
    reach = losses.train_length
    for length in longer:
        if losses.statuses[label, PLAIN, length] != "ok":
            break
        rise = losses.rise(label, length)
        if rise.empty:
            break
        seeds = losses.estimate(rise).seeds
        if not words.holds(losses.for_words(rise), seeds, alpha):
            break
        reach = length
    return reach


def uses(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the longest context that a scheme is shown to use more than, as it is of
    all shorter ones that its seeds have; None if of none.
    """
    used = None
    for length in losses.lengths(label):
        cost = losses.rise(label, length)
        is_known = losses.statuses[label, PLAIN, length] == "ok" and not cost.empty
        if length >= losses.train_length or not is_known:
            break
        if not words.uses_more(losses.for_words(cost), alpha):
            break
        used = length
    return used


def main_rows(frame: pd.DataFrame, protocol: str = "fixed_target") -> pd.DataFrame:
    """Return the main rows on text of the newest checkpoints of runs that are done,
    each seed once, on the targets and in the precision that most share at 1x.

    Of as many, those that reach the longest context. A run whose newest curve is on
    other targets takes part with an older one on these, or is left out. So is a run
    without a row at 1x, if others of its scheme have one.
    """
    runs = frame[(frame["run_status"] == "done") & ~frame["repeated"]]
    is_current = runs["newest"] | runs["superseded"]
    is_text = (runs["protocol"] == protocol) & runs["task"].isna()
    rows = runs[is_current & is_text]

    measured_on = rows["targets_sha256"].fillna("") + rows["dtype"].fillna("")
    is_plain = (rows["variant"] == PLAIN) & (rows["status"] == "ok")
    is_at_one = is_plain & (rows["length_ratio"] == 1)
    n_runs = measured_on[is_at_one & rows["newest"]].value_counts()
    if n_runs.empty:
        return rows[rows["newest"]]
    longest = rows["length"][is_plain].groupby(measured_on[is_plain]).max()
    ranks = [(count, longest[each], each) for each, count in n_runs.items()]
    shared = max(ranks)[2]

    is_shared = is_at_one & (measured_on == shared)
    with_them = rows["folder"][is_shared]
    others = set(rows["folder"][is_at_one]) - set(with_them)
    targets = rows["targets_sha256"]
    is_on_them = targets.isna() | (targets == targets[is_shared].iloc[0])
    rows = rows[is_on_them & ~rows["folder"].isin(others)]

    at_one = rows[(rows["variant"] == PLAIN) & (rows["length_ratio"] == 1)]
    has_one = rows["folder"].isin(at_one["folder"])
    return rows[has_one | ~rows["label"].isin(at_one["label"])]


def reference_label(frame: pd.DataFrame, reference: str | None = None) -> str | None:
    """Return the label of the scheme that others are compared with; UserError if no
    scheme is called `reference`.

    It is a label or an encoding, by default `REFERENCE`. Of several schemes of an
    encoding, the one with the most finished runs is taken.
    """
    runs = frame.drop_duplicates("folder")
    name = reference or REFERENCE
    matching = runs[runs["label"] == name]
    if matching.empty:
        matching = runs[runs["encoding"] == name]
    if reference and matching.empty:
        choices = ", ".join(sorted({*runs["label"], *runs["encoding"].dropna()}))
        raise UserError(f"no scheme is called '{name}': expected one of {choices}")
    if matching.empty:
        return None
    finished = (matching["run_status"] == "done").groupby(matching["label"]).sum()
    return str(finished.idxmax())


def compare(
    frame: pd.DataFrame,
    reference: str | None = None,
    least: float = LEAST,
    losses: Losses | None = None,
) -> Comparison:
    """Compare the schemes of one setting on text; `frame` has the rows of
    `results.frame.read`; `losses`: those of the frame, if they are known.
    """
    if frame["setting"].nunique() > 1:
        raise ValueError("schemes are compared in one setting")
    losses = losses or Losses.of(frame)
    length = losses.train_length
    labels = [label for label in losses.seeds if len(losses.level(label, length))]
    base = reference_label(frame, reference)
    if base not in labels:
        base = None

    schemes = []
    runs = frame[~frame["repeated"]].drop_duplicates("folder")
    for label, of_label in runs.groupby("label"):
        is_done = of_label["run_status"] == "done"
        done = of_label[is_done]
        first = done.iloc[0] if len(done) else of_label.iloc[0]
        not_done = of_label.loc[~is_done, "run_status"].value_counts()
        speed = done["trained_tokens"].astype("float64") / done["train_seconds"]
        n_measured = len(losses.level(label, length))
        # without a loss at 1x, the status says why
        n_comparable = n_measured or losses.seeds.get(label, 0)
        scheme = Scheme(
            label=label,
            facts=first[_FACTS].to_dict(),
            seeds=n_measured,
            not_done=", ".join(f"{n} {status}" for status, n in not_done.items()),
            tokens_per_second=speed.median(),
            left_out=len(done) - n_comparable,
            nll_status=losses.statuses.get((label, PLAIN, length), "missing"),
        )
        if n_measured:
            of_scheme = numbers(losses, label, len(labels))
            scheme = dataclasses.replace(scheme, numbers=of_scheme)
        if n_measured and base not in (None, label):
            nll, rise = against(losses, label, str(base), len(labels), least)
            scheme = dataclasses.replace(
                scheme, nll_difference=nll, rise_difference=rise
            )
        schemes.append(scheme)

    def lowest_loss_first(scheme: Scheme) -> tuple[float, str]:
        loss = scheme.numbers.nll.mean if scheme.numbers else math.inf
        return loss, scheme.label

    return Comparison(
        reference=base,
        train_length=length,
        ratios=[longer / length for longer in losses.longer()],
        silence=losses.silence,
        schemes=sorted(schemes, key=lowest_loss_first),
    )


def numbers(losses: Losses, label: str, schemes: int) -> Numbers | None:
    """Return what a scheme has without a reference, if `schemes` are compared; None
    without a loss at 1x.
    """
    length = losses.train_length
    level = losses.level(label, length)
    if level.empty:
        return None
    nll = Interval.of(losses.estimate(level))

    readers = {}
    for reader in READERS:
        sums = losses.level(label, length, reader)
        readers[reader] = math.nan if sums.empty else losses.estimate(sums).mean

    rises = {}
    statuses = {}
    longer = losses.longer()
    for context in longer:
        ratio = context / length
        statuses[ratio] = losses.statuses.get((label, PLAIN, context), "missing")
        rises[ratio] = interval(losses, losses.rise(label, context))
    above_windowed = None
    if longer:
        longest = losses.level(label, longer[-1])
        narrowed = losses.level(label, longer[-1], WINDOWED)
        above_windowed = interval(losses, difference(longest, narrowed))

    has_learned = learned(losses, label, schemes)
    is_judged = has_learned not in NOT_BEATEN and not losses.silence
    reach = None
    is_last = None
    span = None
    if is_judged:
        reach = holds_to(losses, label, words.adjusted(words.HOLDS, schemes))
        is_last = reach == max(losses.lengths(label))
        span = uses(losses, label, words.adjusted(words.USES, schemes))
    return Numbers(
        nll=nll,
        nll_sd=level.sum(axis=1).std() / losses.tokens.sum(),
        nll_text_error=losses.estimate(level.mean().to_frame().T).error,
        perplexity=math.exp(nll.mean),
        bits_per_byte=nll.mean * losses.bits_per_byte,
        learned=has_learned,
        beats_reader=beats_reader(losses, label, schemes),
        readers=readers,
        rises=rises,
        rise_statuses=statuses,
        above_windowed=above_windowed,
        is_judged=is_judged,
        holds_to=reach,
        holds_at_longest=is_last,
        uses=span,
    )


def against(
    losses: Losses, label: str, reference: str, schemes: int, least: float = LEAST
) -> tuple[Difference, Difference]:
    """Return a scheme's differences from the reference: of the loss at 1x, and of the
    rise at 4x.
    """
    alpha = words.adjusted(words.DIFFERENCES, 2 * (schemes - 1))
    length = losses.train_length
    gap = difference(losses.level(label, length), losses.level(reference, length))
    why = ""
    if gap.empty:
        why = _missing(losses, label, reference, 1)
    nll = _judged(losses, gap, alpha, least, ("better", "worse"), why)

    length = ENDPOINT_RATIO * length
    gap = difference(losses.rise(label, length), losses.rise(reference, length))
    why = ""
    for name in (label, reference):
        has_learned = learned(losses, name, schemes)
        if has_learned == "no":
            why = why or f"{name} has not learned"
        if has_learned == NOT_RESOLVED:
            why = why or f"whether {name} has learned is not resolved"
    if gap.empty:
        why = why or _missing(losses, label, reference, ENDPOINT_RATIO)
    pair = ("rises less", "rises more")
    return nll, _judged(losses, gap, alpha, least, pair, why)


def _missing(losses: Losses, label: str, reference: str, ratio: int) -> str:
    """Return why two schemes have no difference at a length."""
    for name in (label, reference):
        key = (name, PLAIN, ratio * losses.train_length)
        status = losses.statuses.get(key, "missing")
        if status != "ok":
            return f"{name} is {status.replace('_', ' ')} at {ratio}x"
    return "no seed in common"


def _judged(
    losses: Losses,
    paired: pd.DataFrame,
    alpha: float,
    least: float,
    pair: tuple[str, str],
    why: str,
) -> Difference:
    """Return a difference from its paired sums, with a word of two unless `why`."""
    if paired.empty:
        return Difference(why=why)
    gap = losses.estimate(paired)
    why = why or losses.silence
    if len(gap.seeds) < ENOUGH_SEEDS:
        why = why or f"{len(gap.seeds)} of {ENOUGH_SEEDS} seeds"
    word = ""
    if not why:
        word = words.difference_word(gap, alpha, least, pair)
    return Difference(Interval.of(gap), gap.low(alpha), gap.high(alpha), word, why)


def interval(losses: Losses, sums: pd.DataFrame) -> Interval | None:
    """Return the mean of sums with its interval; None without sums."""
    if sums.empty:
        return None
    return Interval.of(losses.estimate(sums))


def curves(losses: Losses) -> pd.DataFrame:
    """Return the curves of one setting's schemes: a row per label, variant and length
    that has a loss in all seeds.

    `nll` has the 95 % interval over seeds on this text (one seed: over documents);
    `rise` is over the plain loss at 1x.
    """
    points = []
    for (label, variant, length), status in losses.statuses.items():
        if status != "ok":
            continue
        row = {"label": label, "variant": variant, "length": length}
        row["ratio"] = length / losses.train_length
        sums = losses.level(label, length, variant)
        if len(sums) > 1:
            sums = sums.sum(axis=1).to_frame()
        row |= Interval.of(losses.estimate(sums)).columns("nll")
        rise = interval(losses, losses.rise(label, length, variant))
        if rise:
            row |= rise.columns("rise")
        points.append(row)
    return pd.DataFrame(points)
