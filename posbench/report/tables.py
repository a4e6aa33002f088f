"""The tables of a report, said once; the terminal, Markdown, LaTeX and HTML each show them in their own way."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

from posbench.comparison import summary
from posbench.comparison.load import Group, RunData
from posbench.comparison.summary import ENDPOINT_RATIO, MARGIN, WISHED, Point, Summary
from posbench.evaluation import statistics
from posbench.evaluation.statistics import REACH_LIMIT, SEEDS_FOR_A_CLAIM, Interval
from posbench.portrait.properties import PROPERTIES, Measured, Properties
from posbench.runs.jsonl import number
from posbench.runs.rows import PLAIN, WINDOWED

MOST_RATIOS = 5
FEW, ONE = "†", "‡"
MARKS = (
    f"± is half of a paired 95 % interval, over seeds (t); {FEW} fewer than {SEEDS_FOR_A_CLAIM} seeds; "
    f"{ONE} one checkpoint, over blocks of text (bootstrap): it speaks for that checkpoint only. "
    "n.s.: the interval holds zero."
)


@dataclasses.dataclass(frozen=True)
class Value:
    """A cell: what is shown, and the number it is sorted by."""

    text: str
    number: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Value]]
    note: str = ""

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers; they are set to the right."""
        return [any(row[column].number is not None for row in self.rows) for column in range(len(self.columns))]


def main_tables(group: Group, summaries: list[Summary]) -> list[Table]:
    """What the terminal shows: in distribution, beyond, and against the reference."""
    tables = [_in_distribution(group, summaries), _beyond(group, summaries)]
    return [*tables, _against(group, summaries)] if any(one.endpoints for one in summaries) else tables


def more_tables(group: Group, summaries: list[Summary]) -> list[Table]:
    """What only the written report shows."""
    tables = [_exploratory(summaries), _precision(summaries), _extensions(group, summaries), _others(summaries)]
    return [table for table in [*tables, _not_done(group)] if table.rows]


def properties(measured: list[Properties]) -> Table:
    """The measured properties of the encodings, for the page."""
    columns = ["scheme", *(name.replace("_", " ") for name in PROPERTIES)]
    rows = [[Value(one.name), *(_property(getattr(one, name)) for name in PROPERTIES)] for one in measured]
    note = "Measured on the scheme alone, untrained, learned tables drawn from N(0,1); 'posbench properties' says more."
    return Table("Measured properties", columns, rows, note)


def _property(measured: Measured) -> Value:
    if measured.verdict == "figure":
        figure = next(value for value in measured.figures.values() if value is not None)
        return Value(f"{figure:.3g}", figure)
    return Value(measured.verdict)


def _in_distribution(group: Group, summaries: list[Summary]) -> Table:
    columns = ["scheme", "runs", "params", "PE params", "tokens", "nll", "SD seeds", "SE blocks"]
    columns += ["ppl", "bits/byte", "tokens/s", "vs none"]
    rows = [
        [
            Value(one.scheme.label),
            runs_ended(one),
            short(_first(one, lambda run: run.parameters("total"))),
            short(_first(one, lambda run: run.parameters("encoding"))),
            short(_first(one, lambda run: number(run.record.get("tokens")))),
            decimal(one.nll.mean if one.nll else None),
            decimal(one.nll.sd if one.nll and one.nll.over == "seeds" else None),
            decimal(one.nll_se_block),
            decimal(math.exp(one.nll.mean) if one.nll and one.nll.mean < 700 else None, 2),
            decimal(one.bits_per_byte),
            whole(one.tokens_per_second),
            decimal(one.relative_speed, 2, suffix="x"),
        ]
        for one in summaries
    ]
    note = (
        "PE params: those of the encoding; nll in nats per token; ppl: exp(nll); bits per byte of the original text; "
        "SE blocks: the text's own error, common to all schemes and so absent from paired differences; tokens/s by "
        "wall clock of training, as busy as the machine was."
    )
    return Table(f"In distribution, at {group.train_length} tokens of context", columns, rows, note)


def _beyond(group: Group, summaries: list[Summary]) -> Table:
    ratios = _ratios(summaries)
    columns = ["scheme", "nll at 1x", *(f"{ratio:g}x" for ratio in ratios), "reach"]
    rows = []
    for one in summaries:
        by_ratio = {point.ratio: point for point in one.plain.points}
        rises = [_rise(by_ratio.get(ratio)) for ratio in ratios]
        level = decimal(one.nll.mean if one.nll else None)
        rows.append([Value(one.scheme.label), level, *rises, _reach(one)])
    note = (
        f"Rise of nll against the training length of {group.train_length} tokens, on the same target tokens. {MARKS} "
        f"reach: longest context, in tokens, whose rise is at most {REACH_LIMIT:g} by its one-sided 95 % bound, "
        "as are all shorter ones; ≥ where nothing longer was measured."
    )
    return Table("Beyond the training length", columns, rows, note)


def _against(group: Group, summaries: list[Summary]) -> Table:
    reference = group.reference
    assert reference is not None
    columns = ["scheme", "nll at 1x", "p equal", f"rise at {ENDPOINT_RATIO}x", "p rise", "verdict"]
    rows = [
        [
            Value(one.scheme.label),
            signed(found.nll),
            p_value(found.equivalence_p),
            signed(found.rise),
            p_value(found.rise_p),
            Value(found.verdict + _runs_missing(one)),
        ]
        for one in summaries
        if (found := one.endpoints)
    ]
    note = (
        f"Differences from {reference.label}, paired by seed; below 0 is better. p equal: equivalence at 1x within "
        f"{MARGIN:g} (TOST); p rise: t-test; both adjusted over the schemes (Holm). 'Extrapolates better' also asks "
        f"that nll at 1x is not worse by {summary.NOT_WORSE:g}. These two endpoints are primary, all else is "
        f"exploratory. Verdicts need {SEEDS_FOR_A_CLAIM} seeds."
    )
    return Table(f"Against {reference.label}: the two primary endpoints", columns, rows, note)


def _exploratory(summaries: list[Summary]) -> Table:
    columns = ["scheme", "slope per doubling", "nll, unseen lengths", "context gain", "above windowed", "outcomes"]
    rows = [
        [
            Value(one.scheme.label),
            signed(one.slope),
            level(one.unseen),
            signed(one.gain),
            signed(one.above_windowed),
            Value("two groups: see the points" if one.bimodal else ""),
        ]
        for one in summaries
    ]
    note = (
        "slope: least squares of nll on log2 of the context; unseen lengths: mean nll over contexts longer than in "
        "training; context gain: nll at the training length less that at the longest; above windowed: nll at the "
        "longest less that of the same model with attention narrowed to the training length. Two groups: the widest "
        f"gap between seeds' rises at {ENDPOINT_RATIO}x is at least 0.1 and half of their range, with two or more on "
        "either side. Exploratory: no p-values, no adjustment."
    )
    return Table("Exploratory", columns, rows, note)


def _precision(summaries: list[Summary]) -> Table:
    columns = ["scheme", "SD seeds", "SE blocks", "SD of a block", "seeds needed", "blocks needed"]
    rows = []
    for one in summaries:
        seeds = statistics.seeds_needed(one.rise_sd_seed, WISHED) if one.rise_sd_seed is not None else None
        blocks = statistics.blocks_needed(one.rise_sd_block, WISHED) if one.rise_sd_block is not None else None
        spread = [decimal(value, 4) for value in (one.rise_sd_seed, one.rise_se_block, one.rise_sd_block)]
        rows.append([Value(one.scheme.label), *spread, whole(seeds), whole(blocks)])
    note = (
        f"Of the rise at {ENDPOINT_RATIO}x. SD seeds: between trained models; SE blocks: of one model's figure, over "
        f"the text. Needed: to find a difference of {WISHED:g} nats with 80 % power at the 5 % level, "
        "n = (2.8 SD / difference)², with t-quantiles for seeds."
    )
    return Table("Precision, and what more of it takes", columns, rows, note)


def _extensions(group: Group, summaries: list[Summary]) -> Table:
    ratios = [1.0, *_ratios(summaries)]
    rows = []
    for one in summaries:
        for curve in one.curves:
            if curve.kind in (PLAIN, WINDOWED):
                continue
            by_ratio = {point.ratio: point for point in curve.points}
            changes = [_change(one, curve.kind, by_ratio.get(ratio)) for ratio in ratios]
            rows.append([Value(one.scheme.label), Value(curve.kind), *changes])
    columns = ["scheme", "extension", *(f"{ratio:g}x" for ratio in ratios)]
    note = f"Change of nll by the extension, on the same target tokens; below 0 it helps. Exploratory. {MARKS}"
    return Table(f"Context extensions, trained at {group.train_length} tokens", columns, rows, note)


def _others(summaries: list[Summary]) -> Table:
    """Protocols besides fixed_target, and tasks: means over seeds."""
    ratios = [1.0, *_ratios(summaries)]
    rows = []
    for one in summaries:
        values = _other_values(one)
        for name in sorted({name for name, _ in values}):
            shown = [_mean(values.get((name, ratio), [])) for ratio in ratios]
            rows.append([Value(one.scheme.label), Value(name), *shown])
    note = (
        "Mean over seeds ± SD of a seed; accuracy where a task has one, else nll in nats per token. nonoverlap is what "
        "papers print: early tokens have little context, so it falls with length for any scheme that does not break."
    )
    return Table("Other protocols and tasks", ["scheme", "protocol", *(f"{ratio:g}x" for ratio in ratios)], rows, note)


def _other_values(one: Summary) -> dict[tuple[str, float], list[float]]:
    """By protocol or task and length ratio, one value per seed."""
    found: dict[tuple[str, float], list[float]] = {}
    for run in one.scheme.by_seed.values():
        for row in run.rows:
            name = row.task or row.protocol
            value = row.nll if row.accuracy is None else row.accuracy
            if row.kind == PLAIN and name not in ("fixed_target", "per_position") and value is not None:
                found.setdefault((name, row.length_ratio), []).append(value)
    return found


def _mean(values: list[float]) -> Value:
    if not values:
        return Value("")
    spread = f" ±{statistics.t_interval(values).sd:.3f}" if len(values) > 1 else ""
    mean = sum(values) / len(values)
    return Value(f"{mean:.3f}{spread}", mean)


def _not_done(group: Group) -> Table:
    rows = [
        [Value(run.folder.name), Value(run.outcome), Value(str(run.record.get("message") or ""))]
        for run in group.runs
        if not run.done
    ]
    return Table("Runs that are not done: counted, and in no average", ["run", "outcome", "message"], rows)


# -- cells -------------------------------------------------------------------------------------------------------------


def decimal(value: float | None, digits: int = 3, suffix: str = "") -> Value:
    return Value("") if value is None or math.isnan(value) else Value(f"{value:.{digits}f}{suffix}", value)


def whole(value: float | None) -> Value:
    return Value("") if value is None else Value(f"{value:,.0f}", value)


def short(value: float | None) -> Value:
    """A count in three digits: 1.05M."""
    if value is None:
        return Value("")
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return Value(f"{value / size:.3g}{unit}", value)
    return Value(f"{value:.0f}", value)


def p_value(p: float | None) -> Value:
    return Value("") if p is None else Value("<0.001" if p < 0.001 else f"{p:.3f}", p)


def signed(found: Interval | None) -> Value:
    """A difference with its half width, and n.s. where its interval holds zero."""
    if found is None:
        return Value("")
    not_significant = "" if found.excludes_zero else " n.s."
    return Value(f"{round(found.mean, 3) + 0.0:+.3f} ±{_half(found)}{_mark(found)}{not_significant}", found.mean)


def level(found: Interval | None) -> Value:
    return Value("") if found is None else Value(f"{found.mean:.3f} ±{_half(found)}{_mark(found)}", found.mean)


def runs_ended(one: Summary) -> Value:
    done, all_runs = one.n_done, len(one.scheme.runs)
    return Value(str(done) if done == all_runs else f"{done} of {all_runs}", done)


def outcomes(runs: list[RunData]) -> str:
    """`45 runs: 44 done, 1 diverged`."""
    counts = Counter(run.outcome for run in runs)
    each = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {each}"


def _half(found: Interval) -> str:
    return f"{(found.high - found.low) / 2:.3f}"


def _mark(found: Interval) -> str:
    if found.over == "blocks":
        return ONE
    return FEW if found.n < SEEDS_FOR_A_CLAIM else ""


def _rise(point: Point | None) -> Value:
    if point is None:
        return Value("")
    return Value(point.status.replace("_", " ")) if point.status != "ok" else signed(point.rise)


def _change(one: Summary, kind: str, point: Point | None) -> Value:
    if point is None or point.status != "ok":
        return Value("" if point is None else point.status.replace("_", " "))
    return signed(summary.interval(summary.per_seed(one.scheme, summary.against_plain(kind, point.length))))


def _reach(one: Summary) -> Value:
    if one.reach is None:
        return Value("")
    at_least = "≥ " if one.reach.longest_measured else ""
    mark = ONE if one.reach_over == "blocks" else FEW if one.n_done < SEEDS_FOR_A_CLAIM else ""
    return Value(f"{at_least}{one.reach.length}{mark}", one.reach.length)


def _runs_missing(one: Summary) -> str:
    missing = len(one.scheme.runs) - one.n_done
    return f" ({missing} of {len(one.scheme.runs)} runs not done)" if missing else ""


def _ratios(summaries: list[Summary]) -> list[float]:
    """The measured lengths beyond training, as multiples of it; the powers up to 16 and the longest if many."""
    ratios = sorted({point.ratio for one in summaries for point in one.plain.points if point.ratio > 1})
    if len(ratios) <= MOST_RATIOS:
        return ratios
    return [ratio for ratio in ratios if ratio in (2, 4, 8, 16) or ratio == ratios[-1]]


def _first(one: Summary, fact: Callable[[RunData], float | None]) -> float | None:
    return next((value for run in one.scheme.runs if (value := fact(run)) is not None), None)
