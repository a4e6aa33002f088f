"""The columns of a report's tables, and the lines that explain them."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from posbench.report.render import Column, Row, Table
from posbench.results import compare
from posbench.results.compare import ENDPOINT_RATIO, NOT_RESOLVED, RISE_LIMIT, USES_LIMIT
from posbench.results.frame import GATE
from posbench.results.tasks import accuracies
from posbench.run.rows import PLAIN

LONGEST_LABEL = 40  # characters in a terminal
GROUPED = "*"  # after a number whose seeds fall into two groups
UNRESOLVED = "?"


# -- cells -------------------------------------------------------------------------------------------------------------


def cut(text: str, longest: int = LONGEST_LABEL) -> str:
    """Return a label, without its middle where it is very long: options often differ at the end."""
    half = longest // 2
    return text if len(text) <= longest else f"{text[: longest - half - 3]}...{text[-half:]}"


def label(row: Row) -> str:
    """Return the label of a scheme."""
    return cut(str(row["label"]))


def number(row: Row, name: str, form: str = ".3f") -> str:
    """Return a number as text; empty where there is none."""
    value = row.get(name)
    return "" if value is None or pd.isna(value) else format(value, form)


def whole(row: Row, name: str) -> str:
    """Return a large number in few characters: 1.05M."""
    value = row.get(name)
    if value is None or pd.isna(value):
        return ""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if value >= size), (1, ""))
    return f"{value / size:.3g}{unit}"


def with_half(row: Row, name: str) -> str:
    """Return a number with half of its 95 % interval, and a mark where its seeds fall into two groups."""
    if not (text := number(row, name, "+.3f")):
        return ""
    half = (row[f"{name}_high"] - row[f"{name}_low"]) / 2
    interval = "" if math.isnan(half) else f" ±{half:.3f}"
    return f"{text}{interval}{GROUPED if row[f'{name}_groups'] is True else ''}"


def between(row: Row, low: str, high: str, form: str = "+.3f") -> str:
    """Return an interval: [-0.35, +0.14]."""
    ends = number(row, low, form), number(row, high, form)
    return f"[{ends[0]}, {ends[1]}]" if all(ends) else ""


def word(row: Row, name: str) -> str:
    """Return the word for a difference: `UNRESOLVED`, or empty where nothing may be said."""
    text = row.get(name)
    return "" if not isinstance(text, str) else UNRESOLVED if text == NOT_RESOLVED else text


def rise(row: Row, name: str) -> str:
    """Return what a longer context adds, or why that is not known."""
    status = row.get(f"{name}_status")
    if status in (None, "ok") or pd.isna(status):
        return with_half(row, name)
    return "" if status == "missing" else str(status).replace("_", " ")


def runs(row: Row) -> str:
    """Return how many seeds a scheme has, and what became of others: `3, 2 diverged`."""
    left_out = f"{row['left_out']} not comparable" if row["left_out"] else ""
    return ", ".join(part for part in (str(row["seeds"]), row["not_done"], left_out) if part)


def holds(row: Row, train_length: int) -> str:
    """Return the longest context to which a scheme holds, in training lengths."""
    text = number(row, "holds_to", "g")
    return f"{'≥ ' if row['holds_further'] is True else ''}{row['holds_to'] / train_length:g}x" if text else ""


def of(cell: Callable[[Row, str], str], name: str) -> Callable[[Row], str]:
    """Return the cell of a column of the frame."""
    return lambda row: cell(row, name)


def plain(name: str, form: str = ".3f") -> Callable[[Row], str]:
    """Return the cell of a number."""
    return lambda row: number(row, name, form)


# -- text --------------------------------------------------------------------------------------------------------------


def main_table(table: pd.DataFrame) -> Table:
    """Return the table of schemes on text: at the training length and beyond it.

    Args:
        table: of `results.compare.compare`.
    """
    base, length = table.attrs["reference"], table.attrs["train_length"]
    ratios, count = [f"{ratio:g}x" for ratio in table.attrs["ratios"]], table.attrs["schemes"]
    main_ratio = f"{ENDPOINT_RATIO}x" if f"{ENDPOINT_RATIO}x" in ratios else ratios[-1] if ratios else ""
    against = "nll_difference" in table
    gates = set(table.get("learned", pd.Series(dtype=object)).dropna())
    odd = (table["not_done"] != "").any() or (table["left_out"] > 0).any()
    columns = [Column("encoding", "encoding", label, text=True)]
    columns += [Column("runs", "runs", runs, spare=8, text=True)] if odd else []
    columns += [Column("loss", "loss", plain("nll"), best="nll")] if count else []
    if gates - {"yes"}:
        columns.append(Column("learned", "learned", of(word, "learned"), text=True))
    if against:
        columns += [
            Column("above", f"above {base}", lambda row: _or_reference(row, base), spare=3),
            Column("adjusted", "adjusted", of(adjusted, "nll_difference"), spare=7),
            Column("word", "", of(word, "nll_word"), spare=5, text=True),
        ]
    for ratio in ratios:
        spare = 2 if ratio == main_ratio else 9 + ratios.index(ratio)
        columns.append(Column(f"rise_{ratio}", f"at {ratio}", of(rise, f"rise_{ratio}"), spare))
        if ratio == f"{ENDPOINT_RATIO}x" and against:
            columns.append(
                Column("rise_word", "", lambda row: word(row, "rise_word").replace("rises ", ""), spare=4, text=True)
            )
    if "holds_to" in table:
        columns.append(Column("holds_to", "holds to", lambda row: holds(row, length)))
        columns.append(Column("uses", "uses", plain("uses", ".0f"), spare=6))
    shown = Table("", table, columns).filled()
    return Table("", table, shown.columns, lambda part: _legend(part, table, count))


def seeds(row: Row, name: str) -> str:
    """Return the lowest and the highest seed; empty where there is one."""
    return between(row, f"{name}_min", f"{name}_max") if row["seeds"] > 1 else ""


def word_or_why(row: Row, name: str) -> str:
    """Return the word for a difference, or why there is none."""
    return str(row[f"{name}_word"] or row[f"{name}_why"])


def _or_reference(row: Row, base: str | None) -> str:
    return "reference" if row["label"] == base else number(row, "nll_difference", "+.3f")


def adjusted(row: Row, name: str) -> str:
    return between(row, f"{name}_adjusted_low", f"{name}_adjusted_high")


def _legend(shown: Table, table: pd.DataFrame, count: int) -> list[str]:
    """Return at most four lines on what occurs in the table."""
    heads, cells = {column.name for column in shown.columns}, [text for row in shown.cells for text in row]
    base, length = table.attrs["reference"], table.attrs["train_length"]
    if not count:
        return []
    first = f"loss: nats per token at {length} tokens"
    rises = [column.head for column in shown.columns if column.name.startswith("rise_") and column.head]
    if rises:
        main = f"at {ENDPOINT_RATIO}x"
        first += f"; {main if main in rises else rises[0]}: what that context adds"
    first += "; ±: 95 %" if any("±" in text for text in cells) else ""
    first += f"; {GROUPED}: seeds in two groups" if any(text.endswith(GROUPED) for text in cells) else ""
    lines = [f"{first}."]
    judging = ["[ ]"] if "adjusted" in heads else []
    judging += ["words"] if heads & {"word", "rise_word"} else []
    if judging:
        second = f"{', '.join(judging)}: against {base}, adjusted for {2 * (count - 1)} comparisons"
        lines.append(second + (f"; {UNRESOLVED}: not resolved, not equal." if UNRESOLVED in cells else "."))
    parts = [f"holds to: adds at most {RISE_LIMIT:g}"] if "holds_to" in heads else []
    parts += [f"uses: tokens that come within {USES_LIMIT:g} of all"] if "uses" in heads else []
    lines += [f"{'; '.join(parts)}; adjusted for {count} encodings."] if parts else []
    readers = []
    for name, gate in zip(compare.READERS, ("learned", "uses"), strict=True):
        if table[name].notna().any():
            note = f" ({gate}: below that)" if gate in heads else ""
            readers.append(f"{compare.READER_NAMES[name]} {table[name].median():.3f}{note}")
    lines += [f"{', '.join(readers)}."] if readers else []
    return lines


def differences_table(table: pd.DataFrame) -> Table:
    """Return the differences from the reference with all of their intervals and words."""
    columns = [Column("encoding", "encoding", label, text=True)]
    for name, head, said in (
        ("nll_difference", "loss", "nll"),
        ("rise_difference", f"at {ENDPOINT_RATIO}x", "rise"),
    ):
        columns += [
            Column(name, head, of(with_half, name)),
            Column(f"{name}_adjusted", "adjusted", of(adjusted, name)),
            Column(f"{name}_seeds", "seeds", of(seeds, name)),
            Column(f"{said}_word", "", of(word_or_why, said), text=True),
        ]
    others = table[table["nll_word"].notna()] if "nll_word" in table else table.iloc[:0]
    note = (
        "Paired by seed and document; below 0 is better. ±: half of a 95 % interval over seeds and documents; "
        "adjusted: the same for all comparisons at once (Bonferroni), which words go by; seeds: lowest and highest."
    )
    return Table(f"Differences from {table.attrs['reference']}", others, columns, [note]).filled()


def facts_table(table: pd.DataFrame) -> Table:
    """Return what else is known of each scheme: spread, size and speed."""
    columns = [
        Column("encoding", "encoding", label, text=True),
        Column("runs", "runs", runs, text=True),
        Column("loss", "loss", plain("nll")),
        Column("sd", "SD of seeds", plain("nll_sd")),
        Column("se", "SE of text", plain("nll_text_error")),
        Column("perplexity", "perplexity", plain("perplexity", ".2f")),
        Column("bits_per_byte", "bits/byte", plain("bits_per_byte")),
        Column("ngram", "n-gram", plain("ngram")),
        Column("learned", "learned", lambda row: str(row.get("learned") or ""), text=True),
        Column("above_windowed", "above windowed", of(with_half, "above_windowed")),
        Column("parameters", "parameters", of(whole, "parameters")),
        Column("encoding_parameters", "of the encoding", of(whole, "encoding_parameters")),
        Column("tokens", "tokens", of(whole, "trained_tokens")),
        Column("rate", "learning rate", plain("learning_rate", "g")),
        Column("speed", "tokens/s", of(whole, "tokens_per_second")),
    ]
    apart = "not comparable: on other targets or in other precision; " if (table["left_out"] > 0).any() else ""
    note = (
        f"{apart}n-gram: loss of the best n-gram model of the training text on the same targets; "
        "learned: loss below that; "
        "above windowed: loss at the longest context less that with attention narrowed to the training length."
    )
    return Table("Each encoding", table, columns, [note]).filled()


def training_table(frame: pd.DataFrame) -> Table | None:
    """Return the main numbers by tokens trained; None where only one checkpoint was evaluated."""
    budgets = sorted(frame.loc[frame["main"] & frame["tokens"].notna(), "tokens"].unique())
    if len(budgets) < 2:
        return None
    stages = []
    for tokens in budgets:
        table = compare.compare(frame.assign(newest=frame["main"] & (frame["tokens"] == tokens).fillna(False)))
        if table.attrs["schemes"]:
            stages.append(table[table["nll"].notna()].assign(after=int(tokens)))
    rows = pd.concat(stages, ignore_index=True).sort_values(["label", "after"], ignore_index=True)
    ratios = [name[:-7] for name in rows if name.endswith("_status")]
    columns = [
        Column("encoding", "encoding", label, text=True),
        Column("tokens", "tokens", of(whole, "after")),
        Column("seeds", "seeds", lambda row: str(row["seeds"])),
        Column("loss", "loss", plain("nll")),
        Column("learned", "learned", lambda row: str(row.get("learned") or ""), text=True),
        *(Column(name, f"at {name[5:]}", of(rise, name)) for name in ratios),
        Column("uses", "uses", plain("uses", ".0f")),
    ]
    return Table("Over training", rows, columns).filled()


def other_tables(frame: pd.DataFrame) -> list[Table]:
    """Return the means over seeds of whatever else was evaluated, by length.

    That is models with narrowed attention or an extension, other protocols, and probes.
    """
    rows = frame[~frame["repeated"] & (frame["run_status"] == "done") & frame["newest"]]
    main = (rows["protocol"] == "fixed_target") & (rows["variant"] == PLAIN) & rows["task"].isna()
    rows = rows[~main & (rows["protocol"] != "problems")]
    curves = [f"{p}{'' if pd.isna(s) else f' {s}'}" for p, s in zip(rows["protocol"], rows["stride"], strict=True)]
    rows = rows.assign(curve=curves, what=rows["task"].fillna("").str.cat(rows["variant"], sep=" ").str.strip())
    probes = rows["protocol"] == "task"
    tables = []
    for title, part, value in (
        ("Changed models and other protocols: loss", rows[~probes], "nll"),
        ("Probes: share of right answers", rows[probes], "accuracy"),
    ):
        if len(part):
            names = ["label", "curve", "what"] if value == "nll" else ["label", "what"]
            tables.append(_by_length(title, part, names, value))
    return tables


def _by_length(title: str, rows: pd.DataFrame, names: list[str], value: str) -> Table:
    """Return a table with a column for each length; what has no number in a seed has its status."""
    lengths = sorted(int(length) for length in rows["length"].unique())
    lines = []
    for key, same in rows.groupby(names):
        cells: dict[Any, Any] = dict(zip(names, key, strict=True))
        for length, at in same.groupby("length"):
            bad = next((status for status in at["status"] if status != "ok"), None)
            cells[f"at {length}"] = bad or f"{at[value].astype('float64').mean():.3f}"
        lines.append(cells)
    columns = [Column(name, "encoding" if name == "label" else name, plain(name, ""), text=True) for name in names]
    columns += [Column(f"at {n}", f"{n:,}", plain(f"at {n}", "")) for n in lengths]
    return Table(title, pd.DataFrame(lines), columns)


# -- tasks -------------------------------------------------------------------------------------------------------------


def task_table(table: pd.DataFrame) -> Table:
    """Return the table of schemes on a task.

    Args:
        table: of `results.tasks.compare_tasks`.
    """
    ratios = [name[9:-7] for name in table if name.startswith("accuracy_") and name.endswith("_status")]
    columns = [
        Column("encoding", "encoding", label, text=True),
        Column("learned", "learned", lambda row: f"{row['learned']} of {row['seeds']}"),
        Column("interval", "95 %", lambda row: between(row, "learned_low", "learned_high", ".2f"), spare=5),
        Column(
            "learned_word", "", lambda row: word(row, "learned_word").replace("learned by ", ""), spare=4, text=True
        ),
        Column("steps", "steps", lambda row: number(row, "steps_to_gate", ".0f").replace("inf", "never"), spare=6),
    ]
    for ratio in sorted(ratios, key=lambda ratio: float(ratio[:-1])):
        name = f"accuracy_{ratio}"
        spare = {"1x": 3, "2x": 0, "4x": 1}.get(ratio, 9)
        columns.append(Column(name, f"at {ratio}", of(_share, name), spare))
        if f"{name}_word" in table:
            columns.append(Column(f"{name}_word", "", of(word, f"{name}_word"), spare + 1, text=True))
    shown = Table("", table, columns).filled()
    return Table("", table, shown.columns, lambda part: _task_legend(part, table))


def _task_legend(shown: Table, table: pd.DataFrame) -> list[str]:
    """Return at most four lines on what occurs in the table of a task."""
    heads, cells = {column.name for column in shown.columns}, [text for row in shown.cells for text in row]
    until = "; steps: until then" if "steps" in heads else ""
    legend = [f"learned: seeds with {GATE:.0%} of the answers' tokens right at every trained length{until}."]
    ratios = [column.head[3:] for column in shown.columns if column.head.startswith("at ")]
    if ratios:
        at = "2x" if "2x" in ratios else ratios[0]
        span = ", median [lowest, highest]" if any(text.endswith("]") for text in cells) else ""
        legend.append(f"at {at}: share of right tokens at {at[:-1]} times the longest trained length{span}.")
    if table.attrs["tests"] and any(name.endswith("_word") for name in heads):
        note = f"words: against {table.attrs['reference']}, exact tests adjusted for {table.attrs['tests']}"
        legend.append(note + (f"; {UNRESOLVED}: not resolved, not equal." if UNRESOLVED in cells else "."))
    trivial = [f"{ratio} {table[f'accuracy_{ratio}_trivial'].median():.2f}" for ratio in ratios]
    legend += [f"A trivial reader gets {', '.join(trivial)}."] if trivial and "nan" not in " ".join(trivial) else []
    return legend


def _share(row: Row, name: str) -> str:
    status = row.get(f"{name}_status")
    if status not in (None, "ok") and not pd.isna(status):
        return str(status).replace("_", " ")
    span = row["seeds"] > 1 and row[f"{name}_min"] != row[f"{name}_max"]
    return number(row, name, ".2f") + (f" {between(row, f'{name}_min', f'{name}_max', '.2f')}" if span else "")


def places_table(frame: pd.DataFrame) -> Table:
    """Return the accuracies of every place where a task was tested."""
    rows = accuracies(frame)
    columns = [
        Column("encoding", "encoding", label, text=True),
        Column("of_task", "test", lambda row: row["of_task"], text=True),
        Column("variant", "model", lambda row: "" if row["variant"] == PLAIN else row["variant"], text=True),
        Column("offset", "first position", lambda row: f"{row['offset']:g}" if row["offset"] else ""),
        Column("length", "length", plain("problem_length", ".0f")),
        Column("ratio", "", lambda row: f"{row['length_ratio']:.3g}x"),
        Column("accuracy", "tokens right", plain("accuracy")),
        Column("range", "seeds", lambda row: between(row, "accuracy_min", "accuracy_max", ".3f")),
        Column("of_learned", "of those that learned", plain("accuracy_of_learned")),
        Column("exact", "answers right", plain("exact_match")),
        Column("chance", "chance", plain("chance")),
        Column("trivial", "trivial", plain("trivial")),
        Column("status", "", lambda row: "" if row["status"] == "ok" else row["status"], text=True),
    ]
    return Table("Every test", rows, columns, ["Medians over all seeds."]).filled()
