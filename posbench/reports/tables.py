"""The columns of a report's tables, and the lines that explain them."""

from collections.abc import Sequence

import pandas as pd

from posbench.reports.render import Column, Row, Table, number_text, value_text
from posbench.results import compare
from posbench.results.compare import ENDPOINT_RATIO
from posbench.results.comparison import (
    Comparison,
    Difference,
    ExactTest,
    Interval,
    Share,
    TaskComparison,
)
from posbench.results.frame import GATE
from posbench.results.words import NOT_RESOLVED, RISE_LIMIT, USES_LIMIT
from posbench.run.rows import PLAIN, WINDOWED
from posbench.terminal.console import plural

LONGEST_LABEL = 40  # characters in a terminal
GROUPED, UNRESOLVED = "*", "?"
MOVED = "offset"  # the probe that moves a passage: its rows differ by position
MARKS = {
    "±": "95 %",
    GROUPED: "seeds in two groups",
    UNRESOLVED: "not resolved, not equal",
}

# docs/protocol.md has the simulations: five seeds, six encodings exactly at the limits
WRONG_WORDS = "with ordinary seeds 2.5 % of simulated reports have any wrong word"


def short_label(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a label, without its middle if it is very long: options often differ at
    the end.
    """
    if len(text) <= longest:
        return text
    n_end = longest // 2
    return f"{text[: longest - n_end - 3]}...{text[-n_end:]}"


def compact_text(value: float) -> str:
    """Return a large number in few characters: 1.05M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def compact_cell(row: Row, name: str) -> str:
    """Return a large number in few characters; empty where there is none."""
    text = number_text(row, name, "")
    return compact_text(float(text)) if text else ""


def or_status(text: str, status: str) -> str:
    """Return a number's text; where it is unknown, its status."""
    if status == "missing":
        return ""
    if status == "ok":
        return text
    return status.replace("_", " ")


def plus_minus_text(interval: Interval | None) -> str:
    """Return a number with half of its 95 % interval, and a mark where its seeds fall
    into two groups; empty if there is none.
    """
    if interval is None:
        return ""
    text = value_text(interval, "+.3f")
    if interval.half >= 0.0005:
        text += f" ±{interval.half:.3f}"
    elif interval.half >= 0:
        text += " ±<0.001"
    if interval.in_groups:
        text += GROUPED
    return text


def range_text(low: float, high: float, form: str = "+.3f") -> str:
    """Return `[-0.35, +0.14]`; empty without both ends."""
    start = value_text(low, form)
    end = value_text(high, form)
    if not start or not end:
        return ""
    return f"[{start}, {end}]"


def word_text(word: str) -> str:
    """Return the word for a difference, as `UNRESOLVED` if it is not resolved."""
    if word == NOT_RESOLVED:
        return UNRESOLVED
    return word.removeprefix("rises ").removeprefix("learned by ")


def uses_cell(row: Row, name: str) -> str:
    """Return that more than so many tokens are used."""
    text = number_text(row, name, ".0f")
    return f"> {text}" if text else ""


def curve_cell(row: Row, name: str) -> str:
    """Return the name of a curve."""
    return short_label(row[name])


def runs_cell(row: Row, name: str) -> str:
    """Return how many seeds a scheme has, and what became of others: `3 done, 2
    diverged`.
    """
    parts = [f"{row[name]} done"]
    if row["not_done"]:
        parts.append(row["not_done"])
    if row["left_out"]:
        parts.append(f"{row['left_out']} not comparable")
    return ", ".join(parts)


ENCODING = Column(
    "encoding",
    "encoding",
    lambda row, name: short_label(row[name]),
    text=True,
    of="label",
)
RUNS = Column("runs", "runs", runs_cell, spare=8, text=True, of="seeds")


def gate_cell(row: Row, name: str) -> str:
    """Return whether a scheme has passed a gate."""
    return word_text(number_text(row, name, ""))


LEARNED = Column(
    "learned",
    "learned",
    gate_cell,
    text=True,
    note="learned: below the n-gram model",
)


def main_table(comparison: Comparison) -> Table:
    """Return the main table on text: at the training length and beyond."""
    length = comparison.train_length

    def holds(row: Row, name: str) -> str:
        if not number_text(row, name):
            return ""
        text = f"{row[name] / length:g}x"
        return f"≥ {text}" if row.get("holds_at_longest") is True else text

    columns = [ENCODING]
    schemes = comparison.schemes
    if any(scheme.not_done or scheme.left_out > 0 for scheme in schemes):
        columns.append(RUNS)
    note = f"loss: nats per token at {length} tokens"
    n_measured = len(comparison.measured)
    best = n_measured > 0
    columns.append(Column("loss", "loss", loss_cell, of="nll", best=best, note=note))
    if best:
        learned = {numbers.learned for _, numbers in comparison.measured}
        if n_measured < len(schemes) or not learned <= {"yes", None}:
            columns.append(LEARNED)
    columns += _above_columns(comparison)
    columns += _rise_columns(comparison.ratios)
    note = (
        f"holds to: adds at most {RISE_LIMIT:g}, adjusted for"
        f" {plural(n_measured, 'encoding')}; {WRONG_WORDS}"
    )
    columns.append(Column("holds_to", "holds to", holds, note=note))
    note = f"uses: fewer tokens cost over {USES_LIMIT:g}"
    columns.append(Column("uses", "uses", uses_cell, 6, note=note))
    readers = []
    for reader, name in compare.READERS.items():
        if reader in comparison.readers:
            readers.append(f"{name} {comparison.readers[reader]:.3f}")
    return Table("", comparison.records, columns, ", ".join(readers), MARKS)


def loss_cell(row: Row, name: str) -> str:
    """Return the loss at the training length, or why there is none."""
    return or_status(number_text(row, name), row["nll_status"])


def adjusted_cell(row: Row, name: str) -> str:
    """Return the adjusted interval of a difference."""
    difference: Difference | None = row[name]
    if difference is None:
        return ""
    return range_text(difference.adjusted_low, difference.adjusted_high)


def word_of_cell(row: Row, name: str) -> str:
    """Return the word of a difference or a test."""
    judged: Difference | ExactTest | None = row[name]
    return word_text(judged.word) if judged else ""


def _above_columns(comparison: Comparison) -> list[Column]:
    """Return the columns of the differences from the reference."""
    reference = comparison.reference if comparison.has_differences else None
    n_comparisons = 2 * (len(comparison.measured) - 1)

    def above(row: Row, name: str) -> str:
        if row["label"] == reference:
            return "reference"
        difference: Difference | None = row[name]
        if difference is None:
            return ""
        return value_text(difference.interval, "+.3f")

    head = f"above {reference}"
    note = (
        f"intervals and words against {reference}: adjusted for {n_comparisons}"
        " comparisons"
    )
    of = "nll_difference"
    return [
        Column("above", head, above, 3, of=of, note=note),
        Column("adjusted", "adjusted", adjusted_cell, 7, of=of),
        Column("word", "", word_of_cell, 5, text=True, of=of),
    ]


def rise_column(ratio: float, spare: int = 0, note: str = "") -> Column:
    """Return the column for what a longer context adds to the loss."""

    def cell(row: Row, name: str) -> str:
        # a scheme without a loss at the training length has none
        status = (
            row["rise_statuses"].get(ratio, "missing") if row["numbers"] else "missing"
        )
        if status == "missing":
            return ""
        return or_status(plus_minus_text(row["rises"][ratio]), status)

    name = f"rise_{ratio:g}x"
    return Column(name, f"at {ratio:g}x", cell, spare, note=note)


def _rise_columns(ratios: Sequence[float]) -> list[Column]:
    """Return a column for what each longer context adds to the loss."""
    main_ratio = max(ratios, default=0)
    if ENDPOINT_RATIO in ratios:
        main_ratio = ENDPOINT_RATIO

    columns = []
    for index, ratio in enumerate(ratios):
        note = ""
        spare = 9 + index
        if ratio == main_ratio:
            note = f"at {ratio:g}x: what that context adds"
            spare = 2
        columns.append(rise_column(ratio, spare, note))
        if ratio == ENDPOINT_RATIO:
            of = "rise_difference"
            columns.append(Column("rise_word", "", word_of_cell, 4, text=True, of=of))
    return columns


def facts_table(comparison: Comparison) -> Table:
    """Return what else is known of each scheme: intervals, spread, size and speed."""

    def plus_minus(row: Row, name: str) -> str:
        difference: Difference | None = row[name]
        return plus_minus_text(difference.interval) if difference else ""

    def seeds(row: Row, name: str) -> str:
        difference: Difference | None = row[name]
        if difference is None or difference.interval is None:
            return ""
        of_seeds = difference.interval.seeds
        return range_text(min(of_seeds), max(of_seeds))

    def word(row: Row, name: str) -> str:
        return row[name].word if row[name] else ""

    def why(row: Row, name: str) -> str:
        return row[name].why if row[name] else ""

    def ngram(row: Row, name: str) -> str:
        return number_text(row[name], "ngram") if row["numbers"] else ""

    def above_windowed(row: Row, name: str) -> str:
        return plus_minus_text(row[name]) if row["numbers"] else ""

    columns = [ENCODING, RUNS, Column("nll", "loss", ".3f")]
    for measure, head in (("nll", "above"), ("rise", f"at {ENDPOINT_RATIO}x above")):
        name = f"{measure}_difference"
        columns += [
            Column(name, f"{head} {comparison.reference}", plus_minus),
            Column(f"{name}_adjusted", "adjusted", adjusted_cell, of=name),
            Column(f"{name}_seeds", "seeds", seeds, of=name),
            Column(f"{measure}_word", "", word, text=True, of=name),
            Column(f"{measure}_why", "", why, text=True, of=name),
        ]
    columns += [
        Column("nll_sd", "SD of seeds", ".3f"),
        Column("nll_text_error", "SE of text", ".3f"),
        Column("perplexity", "perplexity", ".2f"),
        Column("bits_per_byte", "bits/byte", ".3f"),
        Column("ngram", "n-gram", ngram, of="readers"),
        LEARNED,
        Column("beats_reader", "beats reader", gate_cell, text=True),
        Column("above_windowed", "above windowed", above_windowed),
        Column("parameters", "parameters", compact_cell),
        Column("encoding_parameters", "of the encoding", compact_cell),
        Column("trained_tokens", "tokens", compact_cell),
        Column("learning_rate", "learning rate", "g"),
        Column("tokens_per_second", "tokens/s", compact_cell),
    ]
    note = (
        "Differences are paired by seed and document; below 0 is better. ±: half of a"
        " 95 % interval over seeds and documents; adjusted: the same for all"
        " comparisons at once (Bonferroni), which words go by; seeds: lowest and"
        " highest; n-gram: loss of the best n-gram model of the training text on the"
        " same targets; above windowed: loss at the longest context less that with"
        " attention narrowed to the training length"
    )
    return Table("Each encoding", comparison.records, columns, note)


def training_tables(frame: pd.DataFrame) -> list[Table]:
    """Return a table of the main numbers by tokens trained; none where only one
    checkpoint was evaluated.
    """
    main = frame[frame["main"]]
    budgets = sorted(main["tokens"].dropna().unique())
    if len(budgets) < 2:
        return []
    lines = []
    ratios = set[float]()
    for tokens in budgets:
        is_then = frame["main"] & (frame["tokens"] == tokens).fillna(False)
        stage = compare.compare(frame.assign(newest=is_then, superseded=False))
        ratios.update(stage.ratios)
        for scheme, _ in stage.measured:
            lines.append(scheme.record() | {"after": int(tokens)})
    if not lines:
        return []
    rows = pd.DataFrame(lines).sort_values(["label", "after"], ignore_index=True)

    columns = [
        ENCODING,
        Column("after", "tokens", compact_cell),
        Column("seeds", "seeds"),
        Column("nll", "loss", ".3f"),
        LEARNED,
    ]
    columns += [rise_column(ratio) for ratio in sorted(ratios)]
    columns.append(Column("uses", "uses", uses_cell))
    return [Table("Over training", rows, columns)]


def loss_table(losses: compare.Losses, comparison: Comparison) -> Table:
    """Return a table of the loss by length on the same targets; `comparison`: what
    `results.compare.compare` makes of these losses.
    """
    lines = []
    for scheme, _ in comparison.measured:
        label = scheme.label
        line = {"label": label}
        for length in losses.lengths(label):
            sums = losses.level(label, length)
            text = "" if sums.empty else f"{losses.estimate(sums).mean:.3f}"
            line[str(length)] = or_status(text, losses.statuses[label, PLAIN, length])
        lines.append(line)

    columns = [ENCODING]
    for length in losses.lengths():
        columns.append(Column(str(length), f"{length:,}"))
    note = (
        "nats per token by tokens of context, on the same target tokens, mean of seeds;"
        f" trained at {losses.train_length} tokens; perplexity is exp(loss)"
    )
    return Table("Loss by length", pd.DataFrame(lines), columns, note)


def variant_table(
    losses: compare.Losses, comparison: Comparison, base: str = PLAIN
) -> Table | None:
    """Return a table of what each extension adds to the loss of a variant, as trained
    or another extension; None without any. `misread` makes it one of faults' costs.
    """
    variants = {variant for _, variant, _ in losses.sums}
    variants -= {base, WINDOWED, *compare.READERS}
    lines = []
    for scheme, _ in comparison.measured:
        label = scheme.label
        for variant in sorted(variants):
            line = {"label": label, "variant": variant}
            for length in losses.lengths(label):
                level = losses.level(label, length, variant)
                above = compare.difference(level, losses.level(label, length, base))
                if len(above):
                    interval = Interval.of(losses.estimate(above))
                    line[str(length)] = plus_minus_text(interval)
            if len(line) > 2:
                lines.append(line)
    if not lines:
        return None

    cells = pd.DataFrame(lines)
    columns = [
        ENCODING,
        Column("variant", "read as", lambda row, name: short_label(row[name])),
    ]
    for length in losses.lengths():
        if str(length) in cells:
            columns.append(Column(str(length), f"at {length:,}"))
    legend = f"nats per token above {base} by tokens of context, ±: 95 %, not adjusted"
    return Table("What each reading adds", cells, columns, legend)


def length_tables(frame: pd.DataFrame) -> list[Table]:
    """Return a table of means over seeds, or a status, for all curves but
    `fixed_target`, by length of text or of problems; no table without any.
    """
    is_done = (frame["run_status"] == "done") & ~frame["repeated"]
    rows = frame[is_done & frame["newest"]]
    rows = rows.assign(measured_on=rows["targets_sha256"] + rows["dtype"])
    # at each length of a curve, those on the targets and in the precision of most
    places = rows.groupby(["curve", "length"])
    most_common = places["measured_on"].transform(lambda each: each.mode().max())
    is_alike = rows["measured_on"] == most_common
    rows = rows[is_alike | rows["measured_on"].isna()]

    is_other = rows["curve"] != "fixed_target"
    return other_curves("Other curves by length", rows, is_other)


def other_curves(title: str, rows: pd.DataFrame, is_other: pd.Series) -> list[Table]:
    """Return a table of those of the rows that are in no main table: a line per scheme
    and curve, a column per length of text or of problems. No table without any.
    """
    n_seeds = rows.groupby("label")["seed"].nunique()
    rows = rows[is_other]
    if rows.empty:
        return []
    # the rows of a moved passage are one curve, over the position where it ends
    is_moved = rows["task"] == MOVED
    lengths = rows["problem_length"].fillna(rows["length"])
    ends = rows["length"] + rows["offset"].fillna(0)
    names = rows["curve"].str.replace("^(fixed_target|problems|task)_", "", regex=True)
    joined = names.str.replace(r"_from_\d+", "", regex=True)
    names = names.str.replace("_from_", " from position ").mask(is_moved, joined)
    rows = rows.assign(curve=names, length=lengths.mask(is_moved, ends))

    of_curve = ["label", "curve"]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for (label, curve, length), group in rows.groupby(
        [*of_curve, "length"], sort=False
    ):
        line = lines.setdefault((label, curve), {"label": label, "curve": curve})
        line[str(length)] = point_text(group)
        if len(group) < n_seeds[label]:
            line[str(length)] += f" ({len(group)})"
    readers = rows.groupby(of_curve)[["chance", "trivial"]].last()
    table = pd.DataFrame(list(lines.values())).join(readers, on=of_curve)

    places = [str(length) for length in sorted(rows["length"].unique())]
    n_places = len(places)
    columns = [ENCODING, Column("curve", "measured", curve_cell, text=True)]
    # the first and the longest stay
    for place, spare in zip(places, [1, *range(n_places, 1, -1)], strict=True):
        columns.append(Column(place, place, spare=spare))
    columns.append(Column("chance", "chance", ".1%", n_places + 1))
    columns.append(Column("trivial", "trivial", ".1%", n_places + 2))

    notes = []
    has_answers = rows["accuracy"].notna()
    if (rows["nll"].notna() & ~has_answers).any():
        notes.append("a number: loss, nats per token")
    if has_answers.any():
        notes.append("%: share of right answers")
    if n_seeds.max() == 1 and (rows["protocol"] == "task")[has_answers].any():
        notes.append("in brackets its 95 % interval (Clopper & Pearson)")
    if n_seeds.max() > 1:
        notes.append("(n): of n seeds alone, so not to be compared with its neighbours")
    shown = columns if len(n_seeds) > 1 else columns[1:]
    return [Table(title, table, shown, "; ".join(notes))]


def point_text(rows: pd.DataFrame) -> str:
    """Return the mean over seeds of a curve at a length: the loss or the share of right
    answers, of one run with its interval; why there is none.
    """
    failures = rows.loc[rows["status"] != "ok", "status"]
    if len(failures):
        return str(failures.iloc[0])
    if rows["accuracy"].isna().any():
        return f"{rows['nll'].mean():.3f}"
    text = f"{rows['accuracy'].mean():.1%}"
    if len(rows) == 1 and rows["protocol"].iloc[0] == "task":
        from scipy import stats  # slow to import, rarely needed

        n_problems = int(rows["n_blocks"].iloc[0])  # independent trials
        n_right = round(rows["accuracy"].iloc[0] * n_problems)
        share = stats.binomtest(n_right, n_problems).proportion_ci()
        text += f" ({100 * share.low:.0f}..{100 * share.high:.0f})"
    return text


def task_table(comparison: TaskComparison) -> Table:
    """Return the main table on a task."""
    ratios = sorted({ratio for scheme in comparison.schemes for ratio in scheme.shares})
    main_ratio = 2 if 2 in ratios else ratios[0]

    def learned(row: Row, name: str) -> str:
        return f"{row[name]} of {row['seeds']}"

    def interval(row: Row, name: str) -> str:
        return range_text(row[f"{name}_low"], row[f"{name}_high"], ".2f")

    def steps(row: Row, name: str) -> str:
        return number_text(row, name, ".0f").replace("inf", "never")

    note = (
        f"learned: seeds with {GATE:.0%} of the answers' tokens right at every trained"
        " length"
    )
    until = "steps: until then"
    columns = [
        ENCODING,
        Column("learned", "learned", learned, note=note),
        Column("interval", "95 %", interval, 5, of="learned"),
        Column("learned_word", "", word_of_cell, 4, text=True, of="learned_test"),
        Column("steps", "steps", steps, 6, of="steps_to_gate", note=until),
    ]
    for ratio in ratios:
        spare = {1.0: 3, 2.0: 0, 4.0: 1}.get(ratio, 9)
        shares = ""
        against = ""
        if ratio == main_ratio:
            shares = (
                f"at {ratio:g}x: right tokens at {ratio:g} times the longest trained"
                " length, median [lowest, highest]"
            )
            against = (
                f"words: against {comparison.reference}, exact tests adjusted for"
                f" {comparison.n_tests}"
            )
        columns += _share_columns(ratio, spare, shares, against)

    readers = []
    for ratio in (1, 2, 4):
        trivial = [
            scheme.shares[ratio].trivial
            for scheme in comparison.schemes
            if ratio in scheme.shares
        ]
        accuracy = pd.Series(trivial, dtype="float64").median()
        if not pd.isna(accuracy):
            readers.append(f"{ratio:g}x {accuracy:.2f}")
    legend = f"trivial reader: {', '.join(readers)}" if readers else ""
    return Table("", comparison.records, columns, legend, MARKS)


def _share_columns(ratio: float, spare: int, shares: str, against: str) -> list[Column]:
    """Return the columns of the accuracy at a length and of its test, with notes."""

    def share_cell(row: Row, name: str) -> str:
        share: Share | None = row[name].get(ratio)
        if share is None:
            return ""
        text = value_text(share.median, ".2f")
        if share.lowest != share.highest:
            text += f" {range_text(share.lowest, share.highest, '.2f')}"
        return or_status(text.rstrip(), share.status)

    def test_cell(row: Row, name: str) -> str:
        test: ExactTest | None = row[name].get(ratio)
        return word_text(test.word) if test else ""

    name = f"accuracy_{ratio:.3g}x"
    return [
        Column(name, f"at {ratio:.3g}x", share_cell, spare, of="shares", note=shares),
        Column(
            f"{name}_word",
            "",
            test_cell,
            spare + 1,
            text=True,
            of="tests",
            note=against,
        ),
    ]
