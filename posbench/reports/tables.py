"""The columns of a report's tables, and the lines that explain them."""

import math
from collections.abc import Callable

import pandas as pd

from posbench.reports.render import Column, Row, Table, number
from posbench.results import compare
from posbench.results.compare import (
    ENDPOINT_RATIO,
    NOT_RESOLVED,
    RISE_LIMIT,
    USES_LIMIT,
)
from posbench.results.frame import GATE

LONGEST_LABEL = 40  # characters in a terminal
GROUPED, UNRESOLVED = "*", "?"
MARKS = {
    "±": "95 %",
    GROUPED: "seeds in two groups",
    UNRESOLVED: "not resolved, not equal",
}


def cut(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a label, without its middle if it is very long: options often differ at
    the end.
    """
    half = longest // 2
    return (
        text
        if len(text) <= longest
        else f"{text[: longest - half - 3]}...{text[-half:]}"
    )


def compact(row: Row, name: str) -> str:
    """Return a large number in few characters: 1.05M."""
    value = float(number(row, name, "") or math.nan)
    units = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (0, ""))
    return next(
        (f"{value / (size or 1):.3g}{unit}" for size, unit in units if value >= size),
        "",
    )


def or_status(cell: Callable[[Row, str], str]) -> Callable[[Row, str], str]:
    """Return a function for a column's cells that gives the status where the number is
    unknown, else `cell`.
    """

    def shown(row: Row, name: str) -> str:
        status = number(row, f"{name}_status", "") or "ok"
        return (
            cell(row, name)
            if status == "ok"
            else ""
            if status == "missing"
            else status.replace("_", " ")
        )

    return shown


def plus_minus(row: Row, name: str) -> str:
    """Return a number with half of its 95 % interval, and a mark where its seeds fall
    into two groups.
    """
    if not (text := number(row, name, "+.3f")):
        return ""
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    interval = "" if math.isnan(half) else f" ±{half:.3f}"
    return f"{text}{interval}{GROUPED if row[f'{name}_groups'] is True else ''}"


def interval_cell(
    low: str = "min", high: str = "max", form: str = "+.3f"
) -> Callable[[Row, str], str]:
    """Return a function for cells like [-0.35, +0.14], whose ends are columns; a range
    over one seed is empty.
    """

    def cell(row: Row, name: str) -> str:
        ends = number(row, f"{name}_{low}", form), number(row, f"{name}_{high}", form)
        return (
            f"[{ends[0]}, {ends[1]}]"
            if all(ends) and (low != "min" or row["seeds"] > 1)
            else ""
        )

    return cell


def word(row: Row, name: str) -> str:
    """Return the word for a difference, as `UNRESOLVED` if it is not resolved, or empty
    where nothing may be said.
    """
    text = number(row, name, "").removeprefix("rises ").removeprefix("learned by ")
    return UNRESOLVED if text == NOT_RESOLVED else text


def share(row: Row, name: str) -> str:
    """Return the median over seeds of a share, with the lowest and highest where they
    differ.
    """
    spread = (
        interval_cell(form=".2f")(row, name)
        if row[f"{name}_min"] != row[f"{name}_max"]
        else ""
    )
    return f"{number(row, name, '.2f')} {spread}".rstrip()


def runs(row: Row, name: str) -> str:
    """Return how many seeds a scheme has, and what became of others: `3, 2 diverged`."""
    left_out = f"{row['left_out']} not comparable" if row["left_out"] else ""
    return ", ".join(
        part for part in (str(row[name]), row["not_done"], left_out) if part
    )


ENCODING = Column(
    "encoding", "encoding", lambda row, name: cut(row[name]), text=True, of="label"
)
RUNS = Column("runs", "runs", runs, spare=8, text=True, of="seeds")
LEARNED = Column(
    "learned", "learned", word, text=True, note="learned: below the n-gram model"
)
ADJUSTED = interval_cell("adjusted_low", "adjusted_high")


def main_table(table: pd.DataFrame) -> Table:
    """Return the main table on text, from what `results.compare.compare` returns: at
    the training length and beyond.
    """
    length, count, ratios = (
        table.attrs[name] for name in ("train_length", "schemes", "ratios")
    )
    base = table.attrs["reference"] if "nll_difference" in table else None
    main_ratio = ENDPOINT_RATIO if ENDPOINT_RATIO in ratios else max(ratios, default=0)
    has_gaps = (table["not_done"] != "").any() or (table["left_out"] > 0).any()
    all_learned = set(table.get("learned", [])) <= {"yes", None}

    def above(row: Row, name: str) -> str:
        return "reference" if row["label"] == base else number(row, name, "+.3f")

    def holds(row: Row, name: str) -> str:
        text = number(row, name) and f"{row[name] / length:g}x"
        return f"≥ {text}" if row.get("holds_further") is True else text

    adjusted = (
        f"intervals and words against {base}: adjusted for {2 * (count - 1)}"
        " comparisons"
    )
    holds_note = (
        f"holds to: adds at most {RISE_LIMIT:g}, adjusted for {count}"
        f" encoding{'s' * (count > 1)}"
    )
    rises = []
    for index, ratio in enumerate(ratios):
        note, spare = (
            ("", 9 + index)
            if ratio != main_ratio
            else (f"at {ratio:g}x: what that context adds", 2)
        )
        rises.append(
            Column(
                f"rise_{ratio:g}x",
                f"at {ratio:g}x",
                or_status(plus_minus),
                spare,
                note=note,
            )
        )
        rises += (
            [Column("rise_word", "", word, 4, text=True)]
            if ratio == ENDPOINT_RATIO
            else []
        )
    columns = [
        ENCODING,
        *([RUNS] if has_gaps else []),
        Column(
            "loss",
            "loss",
            ".3f",
            of="nll",
            best=count > 0,
            note=f"loss: nats per token at {length} tokens",
        ),
        *([] if all_learned else [LEARNED]),
        Column("above", f"above {base}", above, 3, of="nll_difference", note=adjusted),
        Column("adjusted", "adjusted", ADJUSTED, 7, of="nll_difference"),
        Column("word", "", word, 5, text=True, of="nll_word"),
        *rises,
        Column("holds_to", "holds to", holds, note=holds_note),
        Column(
            "uses", "uses", ".0f", 6, note=f"uses: tokens within {USES_LIMIT:g} of all"
        ),
    ]
    readers = [
        f"{name} {table[reader].median():.3f}"
        for reader, name in compare.READERS.items()
        if reader in table
    ]
    return Table(
        "",
        table,
        columns,
        ", ".join(text for text in readers if not text.endswith("nan")),
        MARKS,
    )


def facts_table(table: pd.DataFrame) -> Table:
    """Return what else is known of each scheme: intervals, spread, size and speed."""
    columns = [ENCODING, RUNS, Column("nll", "loss", ".3f")]
    for measure, head in (("nll", "above"), ("rise", f"at {ENDPOINT_RATIO}x above")):
        name = f"{measure}_difference"
        columns += [
            Column(name, f"{head} {table.attrs['reference']}", plus_minus),
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
        Column("above_windowed", "above windowed", plus_minus),
        Column("parameters", "parameters", compact),
        Column("encoding_parameters", "of the encoding", compact),
        Column("trained_tokens", "tokens", compact),
        Column("learning_rate", "learning rate", "g"),
        Column("tokens_per_second", "tokens/s", compact),
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
    budgets, stages = (
        sorted(frame.loc[frame["main"] & frame["tokens"].notna(), "tokens"].unique()),
        [],
    )
    for tokens in budgets if len(budgets) > 1 else ():
        table = compare.compare(
            frame.assign(
                newest=frame["main"] & (frame["tokens"] == tokens).fillna(False)
            )
        )
        if table.attrs["schemes"]:
            stages.append(table[table["nll"].notna()].assign(after=int(tokens)))
    if not stages:
        return []
    rows = pd.concat(stages, ignore_index=True).sort_values(
        ["label", "after"], ignore_index=True
    )
    rises = [name.removesuffix("_status") for name in rows if name.endswith("_status")]
    columns = [
        ENCODING,
        Column("after", "tokens", compact),
        Column("seeds", "seeds"),
        Column("nll", "loss", ".3f"),
    ]
    columns += [
        LEARNED,
        *(Column(name, f"at {name[5:]}", or_status(plus_minus)) for name in rises),
    ]
    return [Table("Over training", rows, [*columns, Column("uses", "uses", ".0f")])]


def by_length(frame: pd.DataFrame) -> list[Table]:
    """Return a table of means over seeds, or a status, for all curves but
    `fixed_target`; no table without any.
    """
    rows = frame[~frame["repeated"] & (frame["run_status"] == "done") & frame["newest"]]
    rows = rows.assign(
        length=rows["problem_length"].fillna(rows["length"]),
        of=rows["targets_sha256"] + rows["dtype"],
    )
    rows["curve"] = (
        rows["curve"].str.removeprefix("task_").str.replace("_from_", " from position ")
    )
    most_common = rows.groupby(["curve", "length"])["of"].transform(
        lambda targets: targets.mode().max()
    )
    rows = rows[rows["of"].isna() | (rows["of"] == most_common)]
    means: dict[tuple[str, str], dict[str, str]] = {}
    for (label, curve, length), group in rows[rows["curve"] != "fixed_target"].groupby(
        ["label", "curve", "length"]
    ):
        mean = f"{group['accuracy'].fillna(group['nll']).astype('float64').mean():.3f}"
        means.setdefault((label, curve), {})[str(length)] = next(
            (s for s in group["status"] if s != "ok"), mean
        )
    lines = pd.DataFrame(
        [
            {"label": label, "curve": curve, **cells}
            for (label, curve), cells in means.items()
        ]
    )
    lengths = [
        Column(str(length), f"{length:,}") for length in sorted(rows["length"].unique())
    ]
    note = "Loss; of probes and problems the share of right answers"
    return [
        Table(
            "By length",
            lines,
            [ENCODING, Column("curve", "curve", text=True), *lengths],
            note,
        )
    ] * bool(means)


def task_table(table: pd.DataFrame) -> Table:
    """Return the main table on a task, from what `results.tasks.compare_tasks` returns."""
    ratios = sorted(
        float(name[9:-8])
        for name in table
        if name.startswith("accuracy_") and name.endswith("x_status")
    )
    against = (
        f"words: against {table.attrs['reference']}, exact tests adjusted for"
        f" {table.attrs['tests']}"
    )
    learned = (
        f"learned: seeds with {GATE:.0%} of the answers' tokens right at every trained"
        " length"
    )
    columns = [
        ENCODING,
        Column(
            "learned",
            "learned",
            lambda row, name: f"{row[name]} of {row['seeds']}",
            note=learned,
        ),
        Column(
            "interval", "95 %", interval_cell("low", "high", ".2f"), 5, of="learned"
        ),
        Column("learned_word", "", word, 4, text=True),
        Column(
            "steps",
            "steps",
            lambda row, name: number(row, name, ".0f").replace("inf", "never"),
            6,
            of="steps_to_gate",
            note="steps: until then",
        ),
    ]
    for ratio in ratios:
        name, spare = f"accuracy_{ratio:g}x", {1.0: 3, 2.0: 0, 4.0: 1}.get(ratio, 9)
        is_main = ratio == (2 if 2 in ratios else ratios[0])
        shares = (
            f"at {ratio:g}x: right tokens at {ratio:g} times the longest trained"
            " length, median [lowest, highest]"
        )
        columns.append(
            Column(
                name,
                f"at {ratio:g}x",
                or_status(share),
                spare,
                note=shares if is_main else "",
            )
        )
        columns.append(
            Column(
                f"{name}_word",
                "",
                word,
                spare + 1,
                text=True,
                note=against if is_main else "",
            )
        )
    trivial = [
        (ratio, table[f"accuracy_{ratio:g}x_trivial"].median())
        for ratio in ratios
        if ratio in (1, 2, 4)
    ]
    readers = ", ".join(
        f"{ratio:g}x {accuracy:.2f}"
        for ratio, accuracy in trivial
        if not pd.isna(accuracy)
    )
    return Table("", table, columns, readers and f"trivial reader: {readers}", MARKS)
