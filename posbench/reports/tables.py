"""The columns of a report's tables, and the lines that explain them."""

from collections.abc import Callable, Sequence

import pandas as pd

from posbench.reports.render import Column, Row, Table, number_text
from posbench.results import compare
from posbench.results.compare import (
    ENDPOINT_RATIO,
    NOT_RESOLVED,
    RISE_LIMIT,
    USES_LIMIT,
)
from posbench.results.frame import GATE
from posbench.run.rows import PLAIN
from posbench.terminal.exits import plural

LONGEST_LABEL = 40  # characters in a terminal
GROUPED, UNRESOLVED = "*", "?"
MARKS = {
    "±": "95 %",
    GROUPED: "seeds in two groups",
    UNRESOLVED: "not resolved, not equal",
}

# docs/protocol.md has the simulations: five seeds, six encodings exactly at the limit
WRONG_HOLDS = (
    "3.6 to 5.9 % of simulated reports have a wrong 'holds', 5.5 to 47 % if rises vary"
    " like RoPE's"
)


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


def cell_or_status(cell: Callable[[Row, str], str]) -> Callable[[Row, str], str]:
    """Return a function for a column's cells that gives the status where the number is
    unknown, else `cell`.
    """

    def shown(row: Row, name: str) -> str:
        status = number_text(row, f"{name}_status", "")
        if status == "missing":
            return ""
        if status in ("", "ok"):
            return cell(row, name)
        return status.replace("_", " ")

    return shown


def plus_minus_cell(row: Row, name: str) -> str:
    """Return a number with half of its 95 % interval, and a mark where its seeds fall
    into two groups.
    """
    text = number_text(row, name, "+.3f")
    if not text:
        return ""
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    if half >= 0.0005:
        text += f" ±{half:.3f}"
    elif half >= 0:
        text += " ±<0.001"
    if row[f"{name}_groups"] is True:
        text += GROUPED
    return text


def interval_cell(
    low: str = "min", high: str = "max", form: str = "+.3f"
) -> Callable[[Row, str], str]:
    """Return a function for cells like [-0.35, +0.14], whose ends are columns."""

    def cell(row: Row, name: str) -> str:
        start = number_text(row, f"{name}_{low}", form)
        end = number_text(row, f"{name}_{high}", form)
        if not start or not end:
            return ""
        return f"[{start}, {end}]"

    return cell


def word_cell(row: Row, name: str) -> str:
    """Return the word for a difference, as `UNRESOLVED` if it is not resolved, or empty
    where nothing may be said.
    """
    text = number_text(row, name, "").removeprefix("rises ").removeprefix("learned by ")
    if text == NOT_RESOLVED:
        return UNRESOLVED
    return text


def share_cell(row: Row, name: str) -> str:
    """Return the median over seeds of a share, with the lowest and highest where they
    differ.
    """
    text = number_text(row, name, ".2f")
    if row[f"{name}_min"] != row[f"{name}_max"]:
        text += f" {interval_cell(form='.2f')(row, name)}"
    return text.rstrip()


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
LEARNED = Column(
    "learned", "learned", word_cell, text=True, note="learned: below the n-gram model"
)
ADJUSTED = interval_cell("adjusted_low", "adjusted_high")


def main_table(table: pd.DataFrame) -> Table:
    """Return the main table on text, from what `results.compare.compare` returns: at
    the training length and beyond.
    """
    length = table.attrs["train_length"]
    columns = [ENCODING]
    if (table["not_done"] != "").any() or (table["left_out"] > 0).any():
        columns.append(RUNS)
    note = f"loss: nats per token at {length} tokens"
    has_losses = table.attrs["schemes"] > 0
    loss = cell_or_status(number_text)
    columns.append(Column("loss", "loss", loss, of="nll", best=has_losses, note=note))
    if not set(table.get("learned", [])) <= {"yes", None}:
        columns.append(LEARNED)
    columns += _above_columns(table)
    columns += _rise_columns(table.attrs["ratios"])
    columns.append(_holds_column(length, table.attrs["schemes"]))
    note = f"uses: tokens within {USES_LIMIT:g} of all"
    columns.append(Column("uses", "uses", ".0f", 6, note=note))
    return Table("", table, columns, _readers_text(table), MARKS)


def _above_columns(table: pd.DataFrame) -> list[Column]:
    """Return the columns of the differences from the reference."""
    reference = None
    if "nll_difference" in table:
        reference = table.attrs["reference"]
    n_comparisons = 2 * (table.attrs["schemes"] - 1)

    def above(row: Row, name: str) -> str:
        if row["label"] == reference:
            return "reference"
        return number_text(row, name, "+.3f")

    head = f"above {reference}"
    note = (
        f"intervals and words against {reference}: adjusted for {n_comparisons}"
        " comparisons"
    )
    return [
        Column("above", head, above, 3, of="nll_difference", note=note),
        Column("adjusted", "adjusted", ADJUSTED, 7, of="nll_difference"),
        Column("word", "", word_cell, 5, text=True, of="nll_word"),
    ]


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
        head = f"at {ratio:g}x"
        cell = cell_or_status(plus_minus_cell)
        columns.append(Column(f"rise_{ratio:g}x", head, cell, spare, note=note))
        if ratio == ENDPOINT_RATIO:
            columns.append(Column("rise_word", "", word_cell, 4, text=True))
    return columns


def _holds_column(train_length: int, n_schemes: int) -> Column:
    def holds(row: Row, name: str) -> str:
        if not number_text(row, name):
            return ""
        text = f"{row[name] / train_length:g}x"
        if row.get("holds_further") is True:
            return f"≥ {text}"
        return text

    note = (
        f"holds to: adds at most {RISE_LIMIT:g}, adjusted for"
        f" {plural(n_schemes, 'encoding')}; {WRONG_HOLDS}"
    )
    return Column("holds_to", "holds to", holds, note=note)


def _readers_text(table: pd.DataFrame) -> str:
    """Return the losses of simple readers, for the legend."""
    texts = []
    for reader, name in compare.READERS.items():
        if reader in table and table[reader].notna().any():
            texts.append(f"{name} {table[reader].median():.3f}")
    return ", ".join(texts)


def facts_table(table: pd.DataFrame) -> Table:
    """Return what else is known of each scheme: intervals, spread, size and speed."""
    columns = [ENCODING, RUNS, Column("nll", "loss", ".3f")]
    for measure, head in (("nll", "above"), ("rise", f"at {ENDPOINT_RATIO}x above")):
        name = f"{measure}_difference"
        columns += [
            Column(name, f"{head} {table.attrs['reference']}", plus_minus_cell),
            Column(f"{name}_adjusted", "adjusted", ADJUSTED, of=name),
            Column(f"{name}_seeds", "seeds", interval_cell(), of=name),
            Column(f"{measure}_word", "", text=True),
            Column(f"{measure}_why", "", text=True),
        ]
    columns += [
        Column("nll_sd", "SD of seeds", ".3f"),
        Column("nll_text_error", "SE of text", ".3f"),
        Column("perplexity", "perplexity", ".2f"),
        Column("bits_per_byte", "bits/byte", ".3f"),
        Column("ngram", "n-gram", ".3f"),
        LEARNED,
        Column("above_windowed", "above windowed", plus_minus_cell),
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
    return Table("Each encoding", table, columns, note)


def training_tables(frame: pd.DataFrame) -> list[Table]:
    """Return a table of the main numbers by tokens trained; none where only one
    checkpoint was evaluated.
    """
    main = frame[frame["main"]]
    budgets = sorted(main["tokens"].dropna().unique())
    if len(budgets) < 2:
        return []
    stages = []
    for tokens in budgets:
        is_then = frame["main"] & (frame["tokens"] == tokens).fillna(False)
        table = compare.compare(frame.assign(newest=is_then, superseded=False))
        if table.attrs["schemes"]:
            stages.append(table[table["nll"].notna()].assign(after=int(tokens)))
    if not stages:
        return []
    rows = pd.concat(stages, ignore_index=True)
    rows = rows.sort_values(["label", "after"], ignore_index=True)

    columns = [
        ENCODING,
        Column("after", "tokens", compact_cell),
        Column("seeds", "seeds"),
        Column("nll", "loss", ".3f"),
        LEARNED,
    ]
    cell = cell_or_status(plus_minus_cell)
    for status in rows.filter(like="_status"):
        name = status.removesuffix("_status")
        columns.append(Column(name, f"at {name.removeprefix('rise_')}", cell))
    columns.append(Column("uses", "uses", ".0f"))
    return [Table("Over training", rows, columns)]


def loss_table(frame: pd.DataFrame, table: pd.DataFrame) -> Table:
    """Return a table of the loss by length on the same targets; `table`: what
    `results.compare.compare` returns for rows `frame`.
    """
    losses = compare.Losses(compare.main_rows(frame))
    lines = []
    for label in table.loc[table["nll"].notna(), "label"]:
        line: dict[str, str | float] = {"label": label}
        for length in losses.lengths(label):
            status = losses.statuses[label, PLAIN, length]
            line[f"{length}_status"] = status
            if status == "ok":
                sums = losses.level(label, length)
                line[str(length)] = losses.estimate(sums).mean
        lines.append(line)

    columns = [ENCODING]
    cell = cell_or_status(number_text)
    for length in losses.lengths():
        columns.append(Column(str(length), f"{length:,}", cell))
    note = (
        "nats per token by tokens of context, on the same target tokens, mean of seeds;"
        f" trained at {losses.train_length} tokens; perplexity is exp(loss)"
    )
    return Table("Loss by length", pd.DataFrame(lines), columns, note)


def length_tables(frame: pd.DataFrame) -> list[Table]:
    """Return a table of means over seeds, or a status, for all curves but
    `fixed_target`; no table without any.
    """
    rows = _rows_by_length(frame)
    lengths = sorted(rows["length"].unique())
    rows = rows[rows["curve"] != "fixed_target"]
    if rows.empty:
        return []

    lines: dict[tuple[str, str], dict[str, str]] = {}
    for (label, curve, length), group in rows.groupby(["label", "curve", "length"]):
        line = lines.setdefault((label, curve), {"label": label, "curve": curve})
        line[str(length)] = _mean_or_status(group)

    columns = [ENCODING, Column("curve", "curve", text=True)]
    for length in lengths:
        columns.append(Column(str(length), f"{length:,}"))
    note = "Loss; of probes and problems the share of right answers"
    return [
        Table(
            "Other curves by length", pd.DataFrame(list(lines.values())), columns, note
        )
    ]


def _rows_by_length(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the newest rows of runs that are done, with `curve` in words and the
    `length` of text or problems.

    At each length of a curve they are on the targets and in the precision of most.
    """
    is_done = (frame["run_status"] == "done") & ~frame["repeated"]
    rows = frame[is_done & frame["newest"]]
    curves = rows["curve"].str.removeprefix("task_")
    rows = rows.assign(
        curve=curves.str.replace("_from_", " from position "),
        length=rows["problem_length"].fillna(rows["length"]),
        measured_on=rows["targets_sha256"] + rows["dtype"],
    )
    places = rows.groupby(["curve", "length"])
    most_common = places["measured_on"].transform(lambda each: each.mode().max())
    is_alike = rows["measured_on"] == most_common
    return rows[is_alike | rows["measured_on"].isna()]


def _mean_or_status(group: pd.DataFrame) -> str:
    """Return the mean of the accuracy, else of the loss; or why a seed has none."""
    failures = group.loc[group["status"] != "ok", "status"]
    if len(failures):
        return str(failures.iloc[0])
    values = group["accuracy"].fillna(group["nll"])
    return f"{values.astype('float64').mean():.3f}"


def task_table(table: pd.DataFrame) -> Table:
    """Return the main table on a task, from what `results.tasks.compare_tasks`
    returns.
    """
    names = [name for name in table if name.endswith("x_status")]
    ratios = sorted(
        float(name.removeprefix("accuracy_").removesuffix("x_status")) for name in names
    )
    main_ratio = 2 if 2 in ratios else ratios[0]

    columns = [ENCODING, *_learned_columns()]
    for ratio in ratios:
        name = f"accuracy_{ratio:g}x"
        spare = {1.0: 3, 2.0: 0, 4.0: 1}.get(ratio, 9)
        shares = ""
        against = ""
        if ratio == main_ratio:
            shares = (
                f"at {ratio:g}x: right tokens at {ratio:g} times the longest trained"
                " length, median [lowest, highest]"
            )
            against = (
                f"words: against {table.attrs['reference']}, exact tests adjusted for"
                f" {table.attrs['tests']}"
            )
        head = f"at {ratio:g}x"
        columns.append(
            Column(name, head, cell_or_status(share_cell), spare, note=shares)
        )
        columns.append(
            Column(f"{name}_word", "", word_cell, spare + 1, text=True, note=against)
        )

    readers = []
    for ratio in ratios:
        accuracy = table[f"accuracy_{ratio:g}x_trivial"].median()
        if ratio in (1, 2, 4) and not pd.isna(accuracy):
            readers.append(f"{ratio:g}x {accuracy:.2f}")
    legend = f"trivial reader: {', '.join(readers)}" if readers else ""
    return Table("", table, columns, legend, MARKS)


def _learned_columns() -> list[Column]:
    """Return the columns of which seeds learned a task, and when."""

    def learned(row: Row, name: str) -> str:
        return f"{row[name]} of {row['seeds']}"

    def steps(row: Row, name: str) -> str:
        return number_text(row, name, ".0f").replace("inf", "never")

    note = (
        f"learned: seeds with {GATE:.0%} of the answers' tokens right at every trained"
        " length"
    )
    until = "steps: until then"
    interval = interval_cell("low", "high", ".2f")
    return [
        Column("learned", "learned", learned, note=note),
        Column("interval", "95 %", interval, 5, of="learned"),
        Column("learned_word", "", word_cell, 4, text=True),
        Column("steps", "steps", steps, 6, of="steps_to_gate", note=until),
    ]
