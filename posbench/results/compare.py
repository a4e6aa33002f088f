"""Each scheme of one setting: its loss, what longer contexts add, how it differs from a reference, and in words.

Every difference is paired by seed and unit of text. Words go by the same interval as numbers, adjusted by Bonferroni
for the k schemes shown: .05/(2(k-1)) for the two differences of each from the reference, one-sided .05/k for `holds_to`
and for `uses`. So each of these three families has a wrong word in at most 5 % of reports with ordinary seeds. "Not
resolved" is not "equal".
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import pandas as pd

from posbench.errors import UserError
from posbench.results.estimate import Estimate, Floats, estimate, in_two_groups
from posbench.run.rows import PLAIN, WINDOWED

REFERENCE = "rope"
RISE_LIMIT = 0.05  # nats per token above the loss at the training length: a scheme holds up to there
USES_LIMIT = 0.02  # nats per token that less context may cost where it is as good as all
LEAST = 0.02  # nats per token: a smaller difference has no word
ENDPOINT_RATIO = 4  # training lengths at which the rise is compared
ENOUGH_SEEDS = 5  # for a word; intervals of fewer are over documents alone, for these very checkpoints
ENOUGH_SEEDS_IN_GROUPS = 8  # the same where seeds fall into two groups
HALF = 1 / 2  # of the tokens in one document: nothing is said of other text
ALPHA = 0.05
NOT_RESOLVED: Final = "not resolved"
READERS = NGRAM, CACHED_NGRAM = "ngram", "cached_ngram"  # the simple readers, with losses on a scheme's own targets
READER_NAMES = {NGRAM: "n-gram model", CACHED_NGRAM: "n-gram with cache"}
Outcome = Literal["yes", "no", "not resolved"]


# -- losses ------------------------------------------------------------------------------------------------------------


class Losses:
    """The losses of schemes by label, variant and length, all on the same targets in the same precision.

    Args:
        rows: of one protocol, a run for each label and seed. Runs on other targets than most are left out.

    Attributes:
        train_length: in tokens.
        seeds: number of seeds by label that are on these targets.
        statuses: by label, variant and length that any seed was asked for: ok, or why there is no loss (undefined,
            failed, too_short; missing: not asked of all seeds).
        sums: (seeds, units) nats where the status is ok; those of the simple readers have their names as variants. One
            unit where a row lacks its sums by document.
        tokens: (units,).
        bits_per_byte: of a nat per token.
        documents, largest_document: their number, and the share of the tokens in one; 0 where they are not known.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.train_length = int(rows["train_length"].iloc[0]) if len(rows) else 0
        targets, measured = rows["targets_sha256"].fillna("") + rows["dtype"].fillna(""), rows["status"] == "ok"
        at_one = measured & (rows["variant"] == PLAIN) & (rows["length"] == self.train_length)
        others = measured & (targets != targets[at_one if at_one.any() else measured].mode().max())
        rows = rows[~others & ~rows["folder"].isin(rows["folder"][others & at_one])]
        if rows.duplicated(["label", "seed", "variant", "length"]).any():
            raise ValueError("one seed of a scheme counts once")
        ok = rows[rows["status"] == "ok"]
        self.seeds: dict[str, int] = rows.groupby("label")["seed"].nunique().to_dict()
        by_unit = ok[ok["unit_tokens"].notna()].iloc[:1]
        tokens = by_unit["unit_tokens"].iloc[0] if len(by_unit) else ok["n_tokens"].iloc[:1].fillna(1)
        self.tokens: Floats = np.asarray(tokens, dtype=np.float64)
        self.bits_per_byte = self.tokens.sum() / ok["n_bytes"].astype("float64").median() / math.log(2)
        in_documents = [self.tokens[each == at] for each in by_unit["unit_documents"] for at in np.unique(each)]
        self.documents = len(in_documents)
        self.largest_document = max((float(part.sum() / self.tokens.sum()) for part in in_documents), default=0.0)
        self.statuses: dict[tuple[str, str, int], str] = {}
        self.sums: dict[tuple[str, str, int], pd.DataFrame] = {}
        for (label, variant, length), same in rows.sort_values("seed").groupby(["label", "variant", "length"]):
            bad = same.loc[same["status"] != "ok", "status"]
            status = bad.iloc[0] if len(bad) else "ok" if len(same) == self.seeds[label] else "missing"
            self.statuses[label, variant, int(length)] = status
            names = {variant: "nll"} | (dict(zip(READERS, READERS, strict=True)) if variant == PLAIN else {})
            sums = {kind: self._sums(same, name) for kind, name in names.items()} if not len(bad) else {}
            self.sums |= {(label, kind, int(length)): of_kind for kind, of_kind in sums.items() if of_kind is not None}

    def _sums(self, rows: pd.DataFrame, name: str) -> pd.DataFrame | None:
        """Return the sums by unit of a scheme or a reader; of rows that lack them the sums of all; None without any."""
        by_unit, means = rows[f"unit_{name}"], rows.get("nll" if name == "nll" else f"{name}_nll")
        if by_unit.notna().all():
            return pd.DataFrame(np.stack(list(by_unit)).astype(np.float64), index=rows["seed"])
        if means is None or means.isna().any():
            return None
        return pd.DataFrame((means * self.tokens.sum()).to_numpy()[:, None], index=rows["seed"])

    def lengths(self, label: str | None = None) -> list[int]:
        """Return the lengths, in tokens, that any scheme was asked for, or all seeds of one; no text was too short."""
        lacking = ("too_short",) if label is None else ("too_short", "missing")
        keys = [key for key, status in self.statuses.items() if status not in lacking and label in (None, key[0])]
        return sorted({length for _, variant, length in keys if variant == PLAIN})

    def level(self, label: str, length: int, variant: str = PLAIN) -> pd.DataFrame | None:
        """Return the sums at a length, (seeds, units); None where there are none."""
        return self.sums.get((label, variant, length))

    def rise(self, label: str, length: int, variant: str = PLAIN) -> pd.DataFrame | None:
        """Return what a context adds to the sums at the training length; below 0 it helps."""
        return difference(self.level(label, length, variant), self.level(label, self.train_length))

    def estimate(self, sums: pd.DataFrame) -> Estimate:
        """Estimate the mean, nats per token, for other seeds on other text."""
        by_unit = sums.shape[1] == len(self.tokens)
        return estimate(sums.to_numpy(), self.tokens if by_unit else self.tokens.sum(keepdims=True))

    def of_checkpoints(self, sums: pd.DataFrame) -> Estimate:
        """Estimate the mean over documents alone, for these very checkpoints."""
        return self.estimate(sums.mean().to_frame().T)

    def for_words(self, sums: pd.DataFrame) -> Estimate:
        """Estimate what words about one scheme go by: as `estimate`, of few seeds as `of_checkpoints`."""
        return self.estimate(sums) if len(sums) >= ENOUGH_SEEDS else self.of_checkpoints(sums)


def difference(sums: pd.DataFrame | None, base: pd.DataFrame | None) -> pd.DataFrame | None:
    """Return the difference paired by seed and unit; None where one is missing or no seed is in both."""
    if sums is None or base is None:
        return None
    if sums.shape[1] != base.shape[1]:  # one lacks its sums by document
        sums, base = sums.sum(axis=1).to_frame(), base.sum(axis=1).to_frame()
    paired = (sums - base).dropna()
    return paired if len(paired) else None


# -- one scheme --------------------------------------------------------------------------------------------------------


def beats(losses: Losses, label: str, reader: str) -> Outcome | None:
    """Tell whether a scheme beats a simple reader at the training length, by its 95 % interval; None: not known.

    It has learned if it beats `NGRAM`, and uses its context if it beats `CACHED_NGRAM`.
    """
    length = losses.train_length
    above = difference(losses.level(label, length), losses.level(label, length, reader))
    if above is None:
        return None
    gap = losses.for_words(above)
    if math.isnan(gap.error):  # rows of earlier versions: the difference decides
        return "yes" if gap.mean < 0 else "no"
    return "yes" if gap.high() < 0 else "no" if gap.low() > 0 else NOT_RESOLVED


def may_claim(gate: str | None) -> bool:
    """Tell whether a scheme may be judged that has to beat a simple reader first: it does, or that is not known."""
    return gate in (None, "yes")


def holds_to(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the longest context, in tokens, that adds at most `RISE_LIMIT` by its one-sided bound, as shorter ones.

    None if nothing beyond the training length was measured.
    """
    longer = [length for length in losses.lengths(label) if length > losses.train_length]
    return max(_within(losses, label, longer, RISE_LIMIT, alpha), default=losses.train_length) if longer else None


def uses(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the shortest context, in tokens, that costs at most `USES_LIMIT` by its one-sided bound, as longer ones.

    None if nothing shorter than that context was measured: less could be as good.
    """
    shorter = [length for length in reversed(losses.lengths(label)) if length < losses.train_length]
    enough = _within(losses, label, shorter, USES_LIMIT, alpha)
    return min(enough, default=losses.train_length) if len(enough) < len(shorter) else None


def _within(losses: Losses, label: str, lengths: Sequence[int], limit: float, alpha: float) -> list[int]:
    """Return the first lengths whose rise is known and within a limit by its one-sided upper bound."""
    rises = {length: losses.rise(label, length) for length in lengths}
    bounds = {n: math.inf if rise is None else losses.for_words(rise).high(2 * alpha) for n, rise in rises.items()}
    return list(
        itertools.takewhile(lambda length: bounds[length] <= limit, lengths)
    )  # of one unit there is no bound: nan


def word(gap: Estimate, alpha: float, more: str, less: str, least: float = LEAST) -> str:
    """Return the word for a difference that its interval at this level tells from 0, else `NOT_RESOLVED`."""
    low, high = gap.low(alpha), gap.high(alpha)
    if abs(gap.mean) < least or not (low > 0 or high < 0):
        return NOT_RESOLVED
    return more if low > 0 else less


# -- tables ------------------------------------------------------------------------------------------------------------


def main_rows(frame: pd.DataFrame, protocol: str = "fixed_target") -> pd.DataFrame:
    """Return the main rows on text of the newest checkpoints of runs that are done, each seed once."""
    done = (frame["run_status"] == "done") & ~frame["repeated"]
    return frame[done & frame["newest"] & (frame["protocol"] == protocol) & frame["task"].isna()]


def reference_label(frame: pd.DataFrame, wanted: str | None = None) -> str | None:
    """Return the label of the scheme that others are compared with: of that label, else of that encoding, else None.

    Of several the one with most finished seeds.

    Args:
        frame: of one setting.
        wanted: a label or an encoding; None: `REFERENCE`.
    """
    runs = frame.drop_duplicates("folder")
    matching = runs[runs["label"] == (wanted or REFERENCE)]
    matching = matching if len(matching) else runs[runs["encoding"] == (wanted or REFERENCE)]
    finished = (matching["run_status"] == "done").groupby(matching["label"]).sum()
    return str(finished.idxmax()) if len(finished) else None


def compare(frame: pd.DataFrame, reference: str | None = None, least: float = LEAST) -> pd.DataFrame:
    """Compare the schemes of one setting on text.

    Args:
        frame: rows of `results.frame.read`, of one setting.
        reference: a label or an encoding; None: `REFERENCE`.
        least: nats per token; a smaller difference has no word.

    Returns:
        A row per scheme, the lowest loss first, those without a finished run last. All in nats per token unless said.
        `label`, `encoding`, `seeds` (that have a loss at 1x), `runs`, `not_done` ("2 diverged"), `left_out` (seeds on
        other targets), `parameters`, `encoding_parameters`, `trained_tokens`, `learning_rate`, `tokens_per_second`.
        `nll`: at the training length, with `nll_sd` over seeds and `nll_text_error`, the standard error over documents
        for these checkpoints; `perplexity`, `bits_per_byte`; `ngram`, `cached_ngram` and whether it beats
        them: `learned`, `uses_context`.
        `rise_2x`, ...: what so many training lengths add, and `rise_2x_status` (ok, undefined ...).
        `above_windowed`: the loss at the longest length less that with attention narrowed to the training length.
        `nll_difference`: from the reference; `rise_difference`: of the rise at 4x; each with `_adjusted_low` and
        `_adjusted_high` (Bonferroni); `nll_word`, `rise_word` (empty where there is none) and `nll_why`, `rise_why`.
        Each of these has `_low` and `_high` (95 %), `_min` and `_max` over seeds, `_groups` (seeds fall in two).
        `holds_to` in tokens, `holds_further` (nothing longer was measured), `uses` in tokens (not of a scheme that does
        not beat `cached_ngram`).
        `attrs`: `reference`, `train_length`, `ratios` (longer ones), `schemes` (k), `documents`, `tokens`,
        `largest_document` (the share of the tokens in one).

    Raises:
        UserError: there is no such reference.
    """
    if frame["setting"].nunique() > 1:
        raise ValueError("schemes are compared in one setting")
    base = reference_label(frame, reference)
    if reference is not None and base is None:
        known = ", ".join(sorted({*frame["label"], *frame["encoding"].dropna()}))
        raise UserError(f"no scheme is called '{reference}': expected one of {known}")
    losses = Losses(main_rows(frame))
    shown = [label for label in losses.seeds if losses.level(label, losses.train_length) is not None]
    base = base if base in shown else None
    schemes = []
    for label, runs in frame[~frame["repeated"]].drop_duplicates("folder").groupby("label"):
        row = _facts(runs) | {"left_out": (runs["run_status"] == "done").sum() - losses.seeds.get(label, 0), "seeds": 0}
        row |= numbers(losses, label, len(shown)) if label in shown else {}
        if losses.largest_document >= HALF:
            row = {name: value for name, value in row.items() if name not in ("holds_to", "holds_further", "uses")}
        row |= against(losses, label, base, len(shown), least) if base not in (None, label) and label in shown else {}
        schemes.append(row)
    table = pd.DataFrame(schemes)
    if shown:
        table = table.sort_values(["nll", "label"], na_position="last", ignore_index=True)
    table.attrs = {
        "reference": base,
        "train_length": losses.train_length,
        "ratios": [length / losses.train_length for length in losses.lengths() if length > losses.train_length],
        "schemes": len(shown),
        "documents": losses.documents,
        "largest_document": losses.largest_document,
        "tokens": int(losses.tokens.sum()),
    }
    return table


def _facts(runs: pd.DataFrame) -> dict[str, Any]:
    """Return a scheme's facts beside its losses."""
    done, not_done = runs[runs["run_status"] == "done"], runs.loc[runs["run_status"] != "done", "run_status"]
    names = ("label", "encoding", "parameters", "encoding_parameters", "trained_tokens", "learning_rate")
    return {
        **(done if len(done) else runs).iloc[0][list(names)],
        "runs": len(runs),
        "not_done": ", ".join(f"{count} {status}" for status, count in not_done.value_counts().items()),
        "tokens_per_second": (done["trained_tokens"].astype("float64") / done["train_seconds"]).median(),
    }


def numbers(losses: Losses, label: str, schemes: int) -> dict[str, Any]:
    """Return the columns of a scheme on its own, of so many that are compared; none if it has no loss at 1x."""
    length, longer = losses.train_length, [n for n in losses.lengths() if n > losses.train_length]
    if (level := losses.level(label, length)) is None:
        return {}
    mean = losses.estimate(level)
    row = _interval("nll", losses, level) | {
        "seeds": len(level),
        "nll_sd": float(np.std(mean.seeds, ddof=1)) if len(level) > 1 else math.nan,
        "nll_text_error": losses.of_checkpoints(level).error,
        "perplexity": math.exp(mean.mean),
        "bits_per_byte": mean.mean * losses.bits_per_byte,
    }
    for reader, gate in zip(READERS, ("learned", "uses_context"), strict=True):
        of_reader = losses.level(label, length, reader)
        row |= {gate: beats(losses, label, reader)}
        row |= {reader: math.nan if of_reader is None else losses.estimate(of_reader).mean}
    for further in longer:
        name = f"rise_{further / length:g}x"
        row |= {f"{name}_status": losses.statuses.get((label, PLAIN, further), "missing")}
        row |= _interval(name, losses, losses.rise(label, further))
    if longer:
        narrowed = losses.level(label, longer[-1], WINDOWED)
        row |= _interval("above_windowed", losses, difference(losses.level(label, longer[-1]), narrowed))
    if may_claim(row["learned"]):
        reach = holds_to(losses, label, ALPHA / schemes)
        row |= {"holds_to": reach, "holds_further": reach == max(losses.lengths(label))}
        row["uses"] = uses(losses, label, ALPHA / schemes) if may_claim(row["uses_context"]) else None
    return row


def against(losses: Losses, label: str, reference: str, schemes: int, least: float = LEAST) -> dict[str, Any]:
    """Return the columns of a scheme's differences from the reference: of the loss at 1x, and of the rise at 4x."""
    row: dict[str, Any] = {}
    pair, alpha = (label, reference), ALPHA / max(1, 2 * (schemes - 1))
    gates = {name: beats(losses, name, NGRAM) for name in pair}
    gate = next((f"{name} has not learned" if known == "no" else f"whether {name} has learned is not resolved"
                 for name, known in gates.items() if not may_claim(known)), "")  # fmt: skip
    one = f"one document has {losses.largest_document:.0%} of the targets" if losses.largest_document >= HALF else ""
    for name, ratio, measure, words, why in (
        ("nll", 1, losses.level, ("worse", "better"), one),
        ("rise", ENDPOINT_RATIO, losses.rise, ("rises more", "rises less"), gate or one),
    ):
        length, verdict = ratio * losses.train_length, NOT_RESOLVED
        paired = difference(measure(label, length), measure(reference, length))
        if paired is None:
            statuses = {who: losses.statuses.get((who, PLAIN, length), "missing") for who in pair}
            bad = [
                f"{who} is {status.replace('_', ' ')} at {ratio}x" for who, status in statuses.items() if status != "ok"
            ]
            why = gate if name == "rise" and gate else next(iter(bad), "no seed in common")
        else:
            gap = losses.estimate(paired)
            row |= _interval(f"{name}_difference", losses, paired)
            row |= {f"{name}_difference_adjusted_{end}": getattr(gap, end)(alpha) for end in ("low", "high")}
            verdict, groups = word(gap, alpha, *words, least), in_two_groups(gap.seeds)
            enough = ENOUGH_SEEDS_IN_GROUPS if groups else ENOUGH_SEEDS
            if len(paired) < (ENOUGH_SEEDS if verdict == NOT_RESOLVED else enough):
                why = why or f"{len(paired)} of {enough} seeds{', which fall in two groups' if groups else ''}"
        row |= {f"{name}_word": "" if why else verdict, f"{name}_why": why}
    return row


def _interval(name: str, losses: Losses, sums: pd.DataFrame | None) -> dict[str, Any]:
    """Return the mean of sums with its 95 % interval and its seeds, as columns of this name; none without sums."""
    if sums is None:
        return {}
    mean = losses.estimate(sums)
    ends = {"low": mean.low(), "high": mean.high(), "min": min(mean.seeds), "max": max(mean.seeds)}
    ends["groups"] = in_two_groups(mean.seeds)
    return {name: mean.mean, **{f"{name}_{end}": value for end, value in ends.items()}}


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the curves of one setting's schemes: a row per label, variant and length that was asked for.

    `ratio` (length / training length), `status`; in nats per token `nll` with `nll_low` and `nll_high`, the 95 %
    interval over seeds on this text (of one seed: over documents), and `rise`, what the context adds to the plain loss
    at 1x, as columns of `compare`.
    """
    losses, points = Losses(main_rows(frame)), []
    for (label, variant, length), status in losses.statuses.items():
        row = {"label": label, "variant": variant, "length": length, "ratio": length / losses.train_length}
        if (sums := losses.level(label, length, variant)) is not None:
            band = losses.estimate(sums if len(sums) == 1 else sums.sum(axis=1).to_frame())
            row |= {"nll": band.mean, "nll_low": band.low(), "nll_high": band.high()}
        points.append(row | {"status": status} | _interval("rise", losses, losses.rise(label, length, variant)))
    return pd.DataFrame(points)
