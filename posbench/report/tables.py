"""The tables of a report, independent of output: terminal, Markdown, LaTeX and HTML render them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

from posbench.evaluation import choices, probes
from posbench.evaluation.intervals import Interval, over_seeds
from posbench.evaluation.levels import REACH_LIMIT, USES_LIMIT
from posbench.report.comparison import judgement, summary
from posbench.report.comparison.claims import LEAST, Bounds
from posbench.report.comparison.judgement import SeedRange
from posbench.report.comparison.load import Failure, Group, RunData, Scheme
from posbench.report.comparison.statistics import SEEDS_FOR_A_CLAIM
from posbench.report.comparison.summary import ENDPOINT_RATIO, Point, Summary
from posbench.run_folder.jsonl import number
from posbench.run_folder.rows import PLAIN, WINDOWED, EvaluationRow
from posbench.terminal.exits import counted

MOST_RATIOS = 5
FEW, ONE = "†", "‡"
# The meaning of each sign in a cell.
SIGNS = {
    "±": "± is half of a paired 95 % interval over seeds and documents: other seeds, other text",
    "[": "[lowest, highest]: range of seeds, where they are fewer than "
    f"{SEEDS_FOR_A_CLAIM} or in two groups, which an interval would hide",
    FEW: f"{FEW} fewer than {SEEDS_FOR_A_CLAIM} seeds",
    ONE: f"{ONE} one checkpoint, over documents: it speaks for that checkpoint only",
}
# If an interval is over anything else, the cell says so.
USUAL = ("seeds and documents", "documents")


@dataclasses.dataclass(frozen=True)
class Value:
    """A cell: its text, and the number for sorting."""

    text: str
    number: float | None = None


@dataclasses.dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[list[Value]]
    note: str = ""
    spare: tuple[int, ...] = ()  # columns that a narrow terminal leaves out, the least important first

    def filled(self) -> "Table":
        """The same table without empty columns."""
        kept = [at for at in range(len(self.columns)) if at == 0 or any(row[at].text for row in self.rows)]
        return dataclasses.replace(
            self,
            columns=[self.columns[at] for at in kept],
            rows=[[row[at] for at in kept] for row in self.rows],
            spare=tuple(kept.index(at) for at in self.spare if at in kept),
        )

    @property
    def numeric(self) -> list[bool]:
        """Which columns hold numbers, and are aligned to the right."""
        return [any(row[column].number is not None for row in self.rows) for column in range(len(self.columns))]


def main_tables(group: Group, summaries: list[Summary], least: float = LEAST) -> list[Table]:
    """The tables of the terminal: in distribution, beyond, and against the reference; `least` as of `summarise`."""
    tables = [_in_distribution(group, summaries), _beyond(group, summaries)]
    tables += [_against(group, summaries, least)] if any(one.endpoints for one in summaries) else []
    return [table.filled() for table in tables]


def more_tables(group: Group, summaries: list[Summary]) -> list[Table]:
    """The tables of the written report only."""
    tables = [
        _windowed(summaries),
        _extensions(group, summaries),
        _others(summaries),
        _choices(summaries),
    ]
    return [table.filled() for table in tables if table.rows]


def _in_distribution(group: Group, summaries: list[Summary]) -> Table:
    columns = ["scheme", "runs", "nll", "learned", "SD seeds", "SE text", "ppl", "bits/byte"]
    columns += ["params", "PE params", "tokens", "tokens/s"]
    rows = [
        [
            Value(one.scheme.label),
            runs_ended(one),
            decimal(one.nll.mean if one.nll else None),
            learned(one),
            decimal(sd_of_seeds(one.nll_on_text)),
            decimal(one.nll_of_checkpoints.error if one.nll_of_checkpoints else None),
            perplexity(one),
            decimal(one.bits_per_byte),
            short(parameters(one, "total")),
            short(parameters(one, "encoding")),
            short(_first(one, lambda run: number(run.record.get("tokens")))),
            whole(one.tokens_per_second),
        ]
        for one in summaries
    ]
    note = (
        "PE params: those of the encoding; nll in nats per token; ppl: exp(nll); bits per byte of the original text; "
        "SD seeds: of one seed, on this text; SE text: standard error over documents, common to all schemes and so "
        "largely absent from paired differences; tokens/s by wall clock of training, as busy as the machine was, the "
        "median over seeds." + _ceiling(summaries)
    )
    order = ("SE text", "tokens", "params", "bits/byte", "SD seeds", "tokens/s", "PE params", "ppl", "runs")
    spare = tuple(columns.index(name) for name in order)
    return Table(f"In distribution, at {group.train_length} tokens of context", columns, rows, note, spare)


def _beyond(group: Group, summaries: list[Summary]) -> Table:
    ratios = _ratios(summaries)
    columns = ["scheme", "nll at 1x", *(f"{ratio:g}x" for ratio in ratios), "learned", "reach", "uses"]
    rows = []
    for one in summaries:
        by_ratio = {point.ratio: point for point in one.plain.points}
        rises = [rise(by_ratio.get(ratio)) for ratio in ratios]
        level = decimal(one.nll.mean if one.nll else None)
        rows.append(
            [
                Value(one.scheme.label),
                level,
                *rises,
                learned(one),
                reach(one),
                Value("" if one.uses is None else str(one.uses), one.uses),
            ]
        )
    gated = "; empty for a scheme that has not learned" if any(one.learned for one in summaries) else ""
    least = "; ≥ where nothing longer was measured" if any("≥" in row[-2].text for row in rows) else ""
    used = f" uses: shortest context within {USES_LIMIT:g} of the training length, by the same bound."
    least += "; ? where it is not resolved whether it holds further" if any("?" in row[-2].text for row in rows) else ""
    signs = _signs(rows)
    note = (
        f"Rise of nll against the training length of {group.train_length} tokens, on the same target tokens. {signs}"
        f"reach: longest context, in tokens, whose rise is at most {REACH_LIMIT:g} by its upper joint "
        f"bound, as are all shorter ones; from fewer than {SEEDS_FOR_A_CLAIM} seeds of these very checkpoints"
        f"{least}{gated}.{used if any(one.uses for one in summaries) else ''}"
    )
    kept = ENDPOINT_RATIO if ENDPOINT_RATIO in ratios else ratios[-1] if ratios else None
    spare = tuple(at for at, ratio in enumerate(ratios, start=2) if ratio != kept)
    return Table("Beyond the training length", columns, rows, note, spare)


def _against(group: Group, summaries: list[Summary], least: float) -> Table:
    reference = group.reference
    assert reference is not None
    columns = ["scheme", "nll at 1x", "jointly", f"rise at {ENDPOINT_RATIO}x", "jointly", "verdict"]
    rows = [
        [
            Value(one.scheme.label),
            signed(found.nll),
            bounds(found.nll_bounds),
            signed(found.rise),
            bounds(found.rise_bounds),
            Value(found.verdict.text + _runs_missing(one)),
        ]
        for one in summaries
        if (found := one.endpoints)
    ]
    signs = _signs(rows)
    note = (
        f"Differences from {reference.label}, paired by seed and target; below 0 is better. {signs}Jointly: "
        "intervals that all hold at once in 95 of 100 reports on the schemes that a sweep names, with those of how far "
        "schemes hold; verdicts go by them. Better and worse take a whole interval on one side of 0 and an estimate of "
        f"at least {least:g} nats; not resolved is not equal. These endpoints are primary, all else is exploratory. "
        f"Verdicts need {SEEDS_FOR_A_CLAIM} seeds.{_luck(summaries, reference)}"
    )
    spare = (2, 4, 1)  # the bounds behind the verdict, and the level
    return Table(f"Against {reference.label}: the two primary endpoints", columns, rows, note, spare)


def _luck(summaries: list[Summary], reference: Scheme) -> str:
    """How much the reference varies over seeds, which moves every row of a comparison."""
    one = next(one for one in summaries if one.scheme.label == reference.label)
    found = [one.nll_on_text, one.rise_on_text]
    each = [(sd, known.seeds) for known in found if known and (sd := sd_of_seeds(known)) is not None]
    if len(each) < len(found):
        return ""
    spread = " and ".join(f"{sd:.3f}" for sd, _ in each)
    return (
        f" The luck of {reference.label}'s own {each[0][1]} seeds is in every row: SD of a seed {spread}, of nll at 1x "
        f"and of the rise at {ENDPOINT_RATIO}x."
    )


def _windowed(summaries: list[Summary]) -> Table:
    rows = [[Value(one.scheme.label), signed(one.above_windowed)] for one in summaries if one.above_windowed]
    note = (
        "nll at the longest context less that of the same model with attention narrowed to the training length. "
        f"Exploratory. {_signs(rows)}"
    )
    return Table("Above the windowed model", ["scheme", "above windowed"], rows, note.rstrip())


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
    said = "Change of nll by the extension, on the same target tokens; below 0 it helps. Exploratory."
    note = f"{said} {_signs(rows)}".rstrip()
    return Table(f"Context extensions, trained at {group.train_length} tokens", columns, rows, note)


def _others(summaries: list[Summary]) -> Table:
    """Protocols besides fixed_target, and tasks: means over seeds."""
    ratios = [1.0, *_ratios(summaries)]
    rows = []
    for one in summaries:
        values = _other_values(one, choice=False)
        for name in sorted({name for name, _ in values}):
            shown = [_mean(values.get((name, ratio), [])) for ratio in ratios]
            rows.append([Value(one.scheme.label), Value(name), *shown])
    note = (
        "Mean over seeds ± SD of a seed; nll in nats per token. nonoverlap is what papers print: early tokens have "
        "little context, so it falls with length for any scheme that does not break."
    )
    return Table("Other protocols and tasks", ["scheme", "protocol", *(f"{ratio:g}x" for ratio in ratios)], rows, note)


def _choices(summaries: list[Summary]) -> Table:
    """Probes that pose problems: shares of right answers, among candidates and by greedy decoding."""
    ratios = [1.0, *_ratios(summaries)]
    rows = []
    for one in summaries:
        values = _other_values(one, choice=True)
        for name in sorted({name for name, _ in values}):
            found = [values.get((name, ratio), []) for ratio in ratios]
            floors = [_mean_percent(column, found) for column in ("chance", "trivial")]
            rows.append([Value(one.scheme.label), Value(name), *floors, *(_right(each, "accuracy") for each in found)])
            if any(row.exact_match is not None for of_length in found for row in of_length):
                said = (_right(each, "exact_match") for each in found)
                rows.append([Value(one.scheme.label), Value(f"{name}, greedy"), Value(""), Value(""), *said])
    note = (
        "Percent of answers that are likelier than each other candidate; by chance: of guessing; trivial: of a reader "
        "that does not solve the problem, over all lengths. greedy: percent of problems whose whole answer greedy "
        "decoding says. Mean over seeds ± SD of a seed; of one seed with its 95 % interval over problems (Clopper & "
        "Pearson), for that checkpoint. Exploratory."
    )
    columns = ["scheme", "probe", "by chance", "trivial", *(f"{ratio:g}x" for ratio in ratios)]
    return Table("Right answers to probes, %", columns, rows, note)


def _mean_percent(column: str, found: list[list[EvaluationRow]]) -> Value:
    shares = [getattr(row, column) for of_length in found for row in of_length]
    known = [share for share in shares if share is not None]
    return percent(sum(known) / len(known) if known else None)


def _right(rows: list[EvaluationRow], column: str) -> Value:
    """The mean over seeds, if all had the same problems."""
    shares = [share for row in rows if (share := getattr(row, column)) is not None]
    if len({row.targets_sha256 for row in rows}) > 1:
        return Value("other problems per seed")
    if len(shares) > 1:
        shown, spread = over_seeds(shares), sd_of_seeds(over_seeds(shares))
        return Value(f"{100 * shown.mean:.1f} ±{100 * (spread or 0.0):.1f}", 100 * shown.mean)
    value = percent(shares[0] if shares else None)
    if shares and (between := choices.interval_of(rows[0], column)):
        return Value(f"{value.text} ({100 * between[0]:.0f}..{100 * between[1]:.0f})", value.number)
    return value


def _other_values(one: Summary, choice: bool) -> dict[tuple[str, float], list[EvaluationRow]]:
    """Rows by protocol or task and length ratio: one row per seed, of its newest checkpoint."""
    found: dict[tuple[str, float], list[EvaluationRow]] = {}
    for run in one.scheme.by_seed.values():
        newest = max((row.checkpoint_step for row in run.rows), default=0)
        for row in run.rows:
            other = row.kind == PLAIN and (row.task or row.protocol) != "fixed_target"
            if other and row.measured and row.checkpoint_step == newest and choice is (row.chance is not None):
                found.setdefault((_other_name(row, run.split), row.length_ratio), []).append(row)
    return found


def _other_name(row: EvaluationRow, split: str) -> str:
    """The label of such rows of one run; it names the text unless it is that of the headline."""
    parts = [probes.plain_name(row.task) if row.task else row.protocol]
    parts += [f"stride {row.stride}"] if row.stride else []
    parts += [row.split] if row.split != split else []
    return ", ".join(parts)


def _mean(rows: list[EvaluationRow]) -> Value:
    """The mean over seeds, if all have the same targets."""
    values = [row.nll for row in rows if row.nll is not None]
    if not values:
        return Value("")
    if len({row.targets_sha256 for row in rows}) > 1:
        return Value("other targets per seed")
    spread = f" ±{sd_of_seeds(over_seeds(values)):.3f}" if len(values) > 1 else ""
    mean = sum(values) / len(values)
    return Value(f"{mean:.3f}{spread}", mean)


def not_done(failures: list[Failure]) -> Table:
    """The failed runs of a whole report, equal ones in one row."""
    rows = [
        [
            Value(counted(len(one.runs), "run"), len(one.runs)),
            Value(one.outcome),
            Value(one.message),
            Value(", ".join(one.runs)),
        ]
        for one in failures
    ]
    return Table(
        "Runs that are not done: counted, and in no average", ["how many", "outcome", "message", "which"], rows
    )


def _signs(rows: list[list[Value]]) -> str:
    """What the signs in these cells mean; empty if there are none."""
    texts = [value.text for row in rows for value in row]
    said = "; ".join(meaning for sign, meaning in SIGNS.items() if any(sign in text for text in texts))
    return f"{said}. " if said else ""


# -- cells -------------------------------------------------------------------------------------------------------------


def decimal(value: float | None, digits: int = 3) -> Value:
    return Value("") if value is None or math.isnan(value) else Value(f"{value:.{digits}f}", value)


def percent(share: float | None) -> Value:
    return Value("") if share is None else Value(f"{100 * share:.1f}", 100 * share)


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
    """A difference with its half width."""
    return _with_width(found, "+")


def level(found: Interval | None) -> Value:
    return _with_width(found, "")


def _with_width(found: Interval | None, sign: str) -> Value:
    """A mean with half of its interval, or with the range of seeds."""
    if found is None:
        return Value("")
    spread = f"±{found.half:.3f}"
    if isinstance(found, SeedRange):
        spread = f"[{_decimals(found.low, '')}, {_decimals(found.high, '')}]"
    return Value(f"{_decimals(found.mean, sign)} {spread}{_mark(found)}", found.mean)


def _decimals(value: float, sign: str) -> str:
    return f"{round(value, 3) + 0.0:{sign}.3f}"


def bounds(found: Bounds | None) -> Value:
    return Value("") if found is None else Value(f"{_decimals(found.low, '+')} to {_decimals(found.high, '+')}")


def runs_ended(one: Summary) -> Value:
    done, all_runs = one.n_done, len(one.scheme.runs)
    return Value(str(done) if done == all_runs else f"{done} of {all_runs}", done)


def outcomes(runs: list[RunData]) -> str:
    """`45 runs: 44 done, 1 diverged`."""
    counts = Counter(run.outcome for run in runs)
    each = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    return f"{counted(len(runs), 'run')}: {each}"


def _mark(found: Interval) -> str:
    mark = ONE if found.seeds == 1 else FEW if found.seeds < SEEDS_FOR_A_CLAIM else ""
    return mark + ("" if found.over in USUAL or isinstance(found, SeedRange) else f" (over {found.over})")


def sd_of_seeds(found: Interval | None) -> float | None:
    """The SD of one seed, from an interval over seeds."""
    return None if found is None else found.error * math.sqrt(found.seeds)


def _ceiling(summaries: list[Summary]) -> str:
    gates = [one.gate for one in summaries if one.gate]
    if not gates:
        return ""
    low, high = min(gate.ceiling for gate in gates), max(gate.ceiling for gate in gates)
    said = f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"
    learned = "learned: nll is below that, by a 95 % interval paired by seed and document where those are known"
    if any(0 < one.n_done < SEEDS_FOR_A_CLAIM for one in summaries):
        learned += f", of fewer than {SEEDS_FOR_A_CLAIM} seeds by document"
    return (
        f" The best n-gram model of the training tokens has {said} on the same targets; {learned}; "
        "what has not is not ranked."
    )


def parameters(one: Summary, kind: str) -> float | None:
    return _first(one, lambda run: run.parameters(kind))


def perplexity(one: Summary) -> Value:
    """exp(nll) at the training length."""
    return decimal(math.exp(one.nll.mean) if one.nll and one.nll.mean < 700 else None, 2)


def rise(point: Point | None) -> Value:
    """The verdict on nll against the training length, or why there is none."""
    if point is None:
        return Value("")
    return Value(point.status.replace("_", " ")) if point.status != "ok" else signed(point.rise)


def _change(one: Summary, kind: str, point: Point | None) -> Value:
    if point is None or point.status != "ok":
        return Value("" if point is None else point.status.replace("_", " "))
    change = judgement.interval(summary.per_seed(one.scheme, summary.against_plain(kind, point.length)))
    return signed(change)


def learned(one: Summary) -> Value:
    """The verdict of the gate; empty if unknown."""
    return Value(one.learned or "")


def reach(one: Summary) -> Value:
    """Tokens of context."""
    if one.reach is None:
        return Value("")
    at_least = "≥ " if one.reach.longest_measured else ""
    further = "" if one.reach.resolved else "?"
    mark = ONE if one.n_done == 1 else FEW if one.n_done < SEEDS_FOR_A_CLAIM else ""
    return Value(f"{at_least}{one.reach.length}{further}{mark}", one.reach.length)


def _runs_missing(one: Summary) -> str:
    missing = len(one.scheme.runs) - one.n_done
    return f" ({missing} of {len(one.scheme.runs)} runs not done)" if missing else ""


def _ratios(summaries: list[Summary]) -> list[float]:
    """The measured lengths beyond training, as multiples of it; if many, only powers up to 16 and the longest."""
    ratios = sorted({point.ratio for one in summaries for point in one.plain.points if point.ratio > 1})
    if len(ratios) <= MOST_RATIOS:
        return ratios
    return [ratio for ratio in ratios if ratio in (2, 4, 8, 16) or ratio == ratios[-1]]


def _first(one: Summary, fact: Callable[[RunData], float | None]) -> float | None:
    return next((value for run in one.scheme.runs if (value := fact(run)) is not None), None)
