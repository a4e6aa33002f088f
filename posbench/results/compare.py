"""The schemes of one setting: losses, what longer contexts add, differences from a
reference, and verdicts in words.

Every difference is paired by seed and unit of text. Words follow from the same
intervals as the numbers, adjusted by
Bonferroni for the k schemes shown: alpha is .05/(2(k-1)) for a scheme's two differences
from the reference, one-sided .05/k for `holds_to` and for `uses`. So each of these
three families has a wrong word in at most 5 % of reports with ordinary seeds. A scheme
has learned if it beats the n-gram model. It uses its context if it beats the one with a
cache.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd

from posbench.errors import UserError
from posbench.results.estimate import Estimate, Floats, estimate, in_two_groups
from posbench.run.rows import PLAIN, WINDOWED

REFERENCE = "rope"
# nats per token that a longer context may add to the loss where a scheme still holds
RISE_LIMIT = 0.05
# nats per token that a shorter context may cost and still count as all
USES_LIMIT = 0.02
LEAST = 0.02  # nats per token: a smaller difference has no word
ENDPOINT_RATIO = 4  # training lengths at which the rise is compared
ENOUGH_SEEDS = 5  # for a word; with fewer, words about one scheme go by documents alone
ENOUGH_SEEDS_IN_GROUPS = 8  # the same where seeds fall into two groups
HALF = 1 / 2  # with so many of the tokens in one document nothing is said of other text
ALPHA = 0.05
NOT_RESOLVED: Final = "not resolved"
# words that close a gate; one that is not known (None) is open
NOT_BEATEN = ("no", NOT_RESOLVED)
# scored on a scheme's own targets
READERS = {"ngram": "n-gram model", "cached_ngram": "n-gram with cache"}


class Losses:
    """The losses of schemes by label, variant and length, on the targets and in the
    precision of most runs.

    `sums` are nats, (seeds, units), with the simple readers as further variants.
    `statuses` are ok, or why there are no
    sums: undefined, failed, too_short, or missing (in some seeds). `seeds` counts the
    seeds of each label.
    """

    def __init__(self, rows: pd.DataFrame) -> None:
        self.train_length = int(rows["train_length"].iloc[0]) if len(rows) else 0
        targets, measured = (
            rows["targets_sha256"].fillna("") + rows["dtype"].fillna(""),
            rows["status"] == "ok",
        )
        at_one = (
            measured
            & (rows["variant"] == PLAIN)
            & (rows["length"] == self.train_length)
        )
        excluded = measured & (
            targets != targets[at_one if at_one.any() else measured].mode().max()
        )
        rows = rows[~excluded & ~rows["folder"].isin(rows["folder"][excluded & at_one])]
        if rows.duplicated(["label", "seed", "variant", "length"]).any():
            raise ValueError("one seed of a scheme counts once")
        self.seeds: dict[str, int] = rows.groupby("label")["seed"].nunique().to_dict()
        rows = rows.sort_values("seed", ignore_index=True)
        ok = rows[rows["status"] == "ok"]
        self.tokens: Floats = np.array(
            [*ok["unit_tokens"][:1], [1]][0], dtype=np.float64
        )
        # of one nat
        self.bits_per_byte = (
            self.tokens.sum() / ok["n_bytes"].astype("float64").median() / math.log(2)
        )
        documents = [
            self.tokens[units == n]
            for units in ok["unit_documents"][:1].dropna()
            for n in np.unique(units)
        ]
        self.largest_document = max(
            (float(part.sum() / self.tokens.sum()) for part in documents), default=0.0
        )
        self.statuses: dict[tuple[str, str, int], str] = {}
        self.sums: dict[tuple[str, str, int], pd.DataFrame] = {}
        # to take all columns is slow
        sums = ok[["seed", "unit_nll", *(f"unit_{reader}" for reader in READERS)]]
        for (label, variant, length), group in rows.groupby(
            ["label", "variant", "length"]
        )["status"]:
            failures = [status for status in group if status != "ok"]
            status = (
                failures[0]
                if failures
                else "ok"
                if len(group) == self.seeds[label]
                else "missing"
            )
            self.statuses[label, variant, int(length)] = status
            by_unit = sums.loc[group.index if not failures else []]
            for kind in (variant, *READERS) if variant == PLAIN else (variant,):
                nats = by_unit[f"unit_{kind if kind in READERS else 'nll'}"]
                if len(by_unit) and nats.notna().all():
                    self.sums[label, kind, int(length)] = pd.DataFrame(
                        np.stack([*nats]), by_unit["seed"], dtype=float
                    )

    def lengths(self, label: str | None = None) -> list[int]:
        """Return the lengths in tokens that any seed, of one scheme or of all, asked
        for and that the text allows.
        """
        keys = [
            key
            for key, status in self.statuses.items()
            if status != "too_short" and label in (None, key[0])
        ]
        return sorted({length for _, variant, length in keys if variant == PLAIN})

    def level(
        self, label: str, length: int, variant: str = PLAIN
    ) -> pd.DataFrame | None:
        """Return the sums at a length, (seeds, units); None where there are none."""
        return self.sums.get((label, variant, length))

    def rise(
        self, label: str, length: int, variant: str = PLAIN
    ) -> pd.DataFrame | None:
        """Return what a context adds to the sums at the training length; below 0 it
        helps.
        """
        return difference(
            self.level(label, length, variant), self.level(label, self.train_length)
        )

    def estimate(self, sums: pd.DataFrame) -> Estimate:
        """Estimate the mean, nats per token, for other seeds on other text."""
        return estimate(
            sums.to_numpy(),
            self.tokens if sums.shape[1] > 1 else self.tokens.sum(keepdims=True),
        )

    def for_words(self, sums: pd.DataFrame) -> Estimate:
        """Return the estimate for words about one scheme: with few seeds over
        documents, for these checkpoints.
        """
        return self.estimate(
            sums if len(sums) >= ENOUGH_SEEDS else sums.mean().to_frame().T
        )


def difference(
    sums: pd.DataFrame | None, base: pd.DataFrame | None
) -> pd.DataFrame | None:
    """Return the difference paired by seed and unit; None where one is missing or no
    seed is in both.
    """
    paired = None if sums is None or base is None else (sums - base).dropna()
    return None if paired is None or paired.empty else paired


def beats(losses: Losses, label: str, reader: str) -> str | None:
    """Tell whether a scheme beats a simple reader at the training length: yes, no, not
    resolved; None: not known.
    """
    length = losses.train_length
    above = difference(losses.level(label, length), losses.level(label, length, reader))
    if above is None:
        return None
    gap = losses.for_words(above)
    if math.isnan(gap.error):  # one unit has no interval: the difference decides
        return "yes" if gap.mean < 0 else "no"
    return "yes" if gap.high() < 0 else "no" if gap.low() > 0 else NOT_RESOLVED


def holds_to(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the longest context up to which all add at most `RISE_LIMIT`; None if no
    longer one was asked for.
    """
    longer = [
        length for length in losses.lengths(label) if length > losses.train_length
    ]
    return (
        max(
            _within_limit(losses, label, longer, RISE_LIMIT, alpha),
            default=losses.train_length,
        )
        if longer
        else None
    )


def uses(losses: Losses, label: str, alpha: float = ALPHA) -> int | None:
    """Return the shortest context down to which all cost at most `USES_LIMIT`; None if
    no shorter one costs more.
    """
    shorter = [
        length
        for length in reversed(losses.lengths(label))
        if length < losses.train_length
    ]
    contexts = _within_limit(losses, label, shorter, USES_LIMIT, alpha)
    return (
        min(contexts, default=losses.train_length)
        if len(contexts) < len(shorter)
        else None
    )


def _within_limit(
    losses: Losses, label: str, lengths: Sequence[int], limit: float, alpha: float
) -> Sequence[int]:
    """Return the lengths before the first whose rise is unknown or has a one-sided
    upper bound above the limit.
    """
    for i, length in enumerate(lengths):
        rise = losses.rise(label, length)
        # one unit has the bound nan
        if rise is None or not losses.for_words(rise).high(2 * alpha) <= limit:
            return lengths[:i]
    return lengths


def main_rows(frame: pd.DataFrame, protocol: str = "fixed_target") -> pd.DataFrame:
    """Return the main rows on text of the newest checkpoints of runs that are done,
    each seed once.
    """
    mask = (frame["run_status"] == "done") & ~frame["repeated"]
    return frame[
        mask & frame["newest"] & (frame["protocol"] == protocol) & frame["task"].isna()
    ]


def reference_label(frame: pd.DataFrame, reference: str | None = None) -> str | None:
    """Return the label of the scheme that others are compared with; UserError if no
    scheme is called `reference`.

    It is a label or an encoding, by default `REFERENCE`. Of several schemes of an
    encoding, the one with the most seeds is taken.
    """
    runs, name = frame.drop_duplicates("folder"), reference or REFERENCE
    matching = runs[runs["label" if name in set(runs["label"]) else "encoding"] == name]
    finished = (matching["run_status"] == "done").groupby(matching["label"]).sum()
    if reference and finished.empty:
        choices = ", ".join(sorted({*frame["label"], *frame["encoding"].dropna()}))
        raise UserError(f"no scheme is called '{reference}': expected one of {choices}")
    return None if finished.empty else str(finished.idxmax())


def compare(
    frame: pd.DataFrame, reference: str | None = None, least: float = LEAST
) -> pd.DataFrame:
    """Compare the schemes of one setting on text; `frame` has the rows of
    `results.frame.read`.

    Returns:
        A row per scheme, in nats per token: the lowest loss first, schemes without a
        finished run last. `left_out` counts seeds on other targets. `rise_2x`, ... is
        what so many training lengths add; `above_windowed` is what the longest adds to
        the loss with narrowed attention. `nll_difference` (1x) and `rise_difference`
        (4x) are from the reference. They have `_adjusted_low` and `_high`, and a
        `_word` or `_why` there is none. Means have `_low` and `_high` (95 %), `_min`
        and `_max` of seeds, `_groups` (seeds form two). `holds_further`: none longer is
        known.
    """
    if frame["setting"].nunique() > 1:
        raise ValueError("schemes are compared in one setting")
    losses = Losses(main_rows(frame))
    labels = [
        label
        for label in losses.seeds
        if losses.level(label, losses.train_length) is not None
    ]
    base = default if (default := reference_label(frame, reference)) in labels else None
    facts = [
        "label",
        "encoding",
        "parameters",
        "encoding_parameters",
        "trained_tokens",
        "learning_rate",
    ]
    schemes = []
    for label, runs in (
        frame[~frame["repeated"]].drop_duplicates("folder").groupby("label")
    ):
        done, not_done = (
            runs[runs["run_status"] == "done"],
            runs.loc[runs["run_status"] != "done", "run_status"],
        )
        row = {**(done if len(done) else runs).iloc[0][facts], "seeds": 0}
        row["not_done"] = ", ".join(
            f"{count} {status}" for status, count in not_done.value_counts().items()
        )
        row["left_out"] = len(done) - losses.seeds.get(label, 0)
        row["tokens_per_second"] = (
            done["trained_tokens"].astype("float64") / done["train_seconds"]
        ).median()
        row |= numbers(losses, label, len(labels))
        row |= (
            against(losses, label, base, len(labels), least)
            if base and label in labels and label != base
            else {}
        )
        schemes.append(row)
    table = pd.DataFrame(schemes).sort_values(
        ["nll", "label"] if labels else ["label"], ignore_index=True
    )
    ratios = [
        length / losses.train_length
        for length in losses.lengths()
        if length > losses.train_length
    ]
    table.attrs = {
        "reference": base,
        "train_length": losses.train_length,
        "ratios": ratios,
        "schemes": len(labels),
    }
    table.attrs["largest_document"] = losses.largest_document
    return table


def numbers(losses: Losses, label: str, schemes: int) -> dict[str, Any]:
    """Return a scheme's columns that need no reference, if `schemes` are compared; none
    without a loss at 1x.
    """
    length, longer = (
        losses.train_length,
        [n for n in losses.lengths() if n > losses.train_length],
    )
    if (level := losses.level(label, length)) is None:
        return {}
    mean = losses.estimate(level)
    row = _interval("nll", losses, level) | {
        "seeds": len(level),
        "nll_sd": float(np.std(mean.seeds, ddof=1)) if len(level) > 1 else math.nan,
        "nll_text_error": losses.estimate(level.mean().to_frame().T).error,
        "perplexity": math.exp(mean.mean),
        "bits_per_byte": mean.mean * losses.bits_per_byte,
    }
    for reader, gate in zip(READERS, ("learned", "uses_context"), strict=True):
        sums = losses.level(label, length, reader)
        row |= {
            gate: beats(losses, label, reader),
            reader: math.nan if sums is None else losses.estimate(sums).mean,
        }
    for context in longer:
        name = f"rise_{context / length:g}x"
        row |= {
            f"{name}_status": losses.statuses.get((label, PLAIN, context), "missing")
        }
        row |= _interval(name, losses, losses.rise(label, context))
    if longer:
        narrowed = losses.level(label, longer[-1], WINDOWED)
        row |= _interval(
            "above_windowed",
            losses,
            difference(losses.level(label, longer[-1]), narrowed),
        )
    if row["learned"] not in NOT_BEATEN and losses.largest_document < HALF:
        reach = holds_to(losses, label, ALPHA / schemes)
        row |= {"holds_to": reach, "holds_further": reach == max(losses.lengths(label))}
        row["uses"] = (
            uses(losses, label, ALPHA / schemes)
            if row["uses_context"] not in NOT_BEATEN
            else None
        )
    return row


def against(
    losses: Losses, label: str, reference: str, schemes: int, least: float = LEAST
) -> dict[str, Any]:
    """Return the columns of a scheme's differences from the reference: of the loss at
    1x, and of the rise at 4x.
    """
    row: dict[str, Any] = {}
    pair, alpha = (label, reference), ALPHA / max(1, 2 * (schemes - 1))
    texts = {
        "no": "{} has not learned",
        NOT_RESOLVED: "whether {} has learned is not resolved",
    }
    gates = [(name, beats(losses, name, "ngram")) for name in pair]
    gate = next((texts[gate].format(name) for name, gate in gates if gate in texts), "")
    long = (
        f"one document has {losses.largest_document:.0%} of the targets"
        if losses.largest_document >= HALF
        else ""
    )
    for name, ratio, measure, (higher, lower), reason in (
        ("nll", 1, losses.level, ("worse", "better"), long),
        (
            "rise",
            ENDPOINT_RATIO,
            losses.rise,
            ("rises more", "rises less"),
            gate or long,
        ),
    ):
        length, verdict = ratio * losses.train_length, NOT_RESOLVED
        paired = difference(measure(label, length), measure(reference, length))
        if paired is None:
            statuses = [
                (side, losses.statuses.get((side, PLAIN, length), "missing"))
                for side in pair
            ]
            flaws = [
                f"{side} is {status.replace('_', ' ')} at {ratio}x"
                for side, status in statuses
                if status != "ok"
            ]
            reason = (
                gate
                if name == "rise" and gate
                else next(iter(flaws), "no seed in common")
            )
        else:
            gap = losses.estimate(paired)
            low, high, groups = (
                gap.low(alpha),
                gap.high(alpha),
                in_two_groups(gap.seeds),
            )
            row |= _interval(f"{name}_difference", losses, paired)
            row |= {
                f"{name}_difference_adjusted_low": low,
                f"{name}_difference_adjusted_high": high,
            }
            if abs(gap.mean) >= least and (low > 0 or high < 0):
                verdict = higher if low > 0 else lower
            needed = ENOUGH_SEEDS_IN_GROUPS if groups else ENOUGH_SEEDS
            if len(paired) < (ENOUGH_SEEDS if verdict == NOT_RESOLVED else needed):
                reason = (
                    reason
                    or f"{len(paired)} of {needed} seeds{', which fall in two groups' if groups else ''}"
                )
        row |= {f"{name}_word": "" if reason else verdict, f"{name}_why": reason}
    return row


def _interval(name: str, losses: Losses, sums: pd.DataFrame | None) -> dict[str, Any]:
    """Return the mean of sums, its 95 % interval and the range of seeds as columns of
    this name; none without sums.
    """
    if sums is None:
        return {}
    mean = losses.estimate(sums)
    ends = {
        "low": mean.low(),
        "high": mean.high(),
        "min": min(mean.seeds),
        "max": max(mean.seeds),
    }
    ends["groups"] = in_two_groups(mean.seeds)
    return {name: mean.mean, **{f"{name}_{end}": value for end, value in ends.items()}}


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the curves of one setting's schemes: a row per label, variant and length
    that was asked for.

    `nll` has the 95 % interval over seeds on this text (one seed: over documents);
    `rise` is over the plain loss at 1x.
    """
    losses, points = Losses(main_rows(frame)), []
    for (label, variant, length), status in losses.statuses.items():
        row = {
            "label": label,
            "variant": variant,
            "length": length,
            "ratio": length / losses.train_length,
        }
        if (sums := losses.level(label, length, variant)) is not None:
            band = losses.estimate(
                sums if len(sums) == 1 else sums.sum(axis=1).to_frame()
            )
            row |= {"nll": band.mean, "nll_low": band.low(), "nll_high": band.high()}
        points.append(
            row
            | {"status": status}
            | _interval("rise", losses, losses.rise(label, length, variant))
        )
    return pd.DataFrame(points)
