"""One run as a table in the terminal: its loss by context, or its right answers by
length of the problems.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posbench.errors import UserError
from posbench.reports.render import Column, Table
from posbench.reports.tables import MOVED, other_curves
from posbench.results.compare import NOT_BEATEN
from posbench.results.frame import GATE, read
from posbench.results.headline import Headline, headline
from posbench.results.tasks import as_trained
from posbench.results.words import NOT_RESOLVED, USES_LIMIT
from posbench.run.rows import (
    PLAIN,
    WINDOWED,
    evaluation_rows,
    json_plain,
    multiple,
)
from posbench.run.saved import load_record
from posbench.terminal import console
from posbench.terminal.console import plural
from posbench.terminal.exits import is_quiet

FLAT = 0.1  # nats per token: a curve that spans less has short bars
BAR = 16  # characters
SERIES = ("fixed_target", "windowed", "nonoverlap")
# A narrow terminal leaves out columns from the end.
_TEXT_COLUMNS = (
    "context",
    "loss",
    "bar",
    "windowed",
    "95 %",
    "nonoverlap",
    "perplexity",
    "bits/byte",
)
_TASK_COLUMNS = (
    "length",
    "tokens right",
    "bar",
    "trivial reader",
    "chance",
    "whole answers",
    "loss of answers",
)
_SHARES = {
    "tokens right": "accuracy",
    "trivial reader": "trivial",
    "chance": "chance",
    "whole answers": "exact_match",
}
_LEGEND = (
    "loss: nats per token of the same target tokens at every context; windowed:"
    " attention narrowed to the training length; nonoverlap: whole windows"
)
Row = dict[str, Any]
Printer = Callable[[Path, str], None]  # of a run, on one split of its text


def printers(
    folders: Sequence[Path], as_json: bool
) -> tuple[Printer | None, Callable[[], None] | None]:
    """Return what prints each run as soon as it is evaluated, and what prints all of
    them in the end: a table of one run, lines for each of several, or JSON.
    """
    if as_json:
        return None, functools.partial(print_json, folders)
    if len(folders) > 1 and not is_quiet():
        return print_lines, None
    return print_results, None


def print_results(folder: Path, split: str | None = None) -> None:
    """Print a run's curve on one text, what else was measured there, and where the
    files are.

    `split`: which text; None: the one that the run asks for.

    Raises UserError if the run cannot be read.
    """
    frame = read([folder], split)
    run = frame.iloc[0]
    if run["run_status"] == "unreadable":
        raise UserError(f"{folder}: {run['run_reason']}")
    if is_quiet():
        print(f"Run folder: {folder}")
        return
    main = frame[frame["main"]]
    rows = main[main["checkpoint_step"] == main["checkpoint_step"].max()]
    numbers = headline(frame)

    if run["trained_task"]:
        in_curve = as_trained(rows)
        table, remark = _task_results(run, rows[in_curve], numbers)
        remarks = [remark]
    else:
        in_curve = rows["curve"].isin(SERIES)
        table = _text_table(run, rows[in_curve])
        remarks = [*_text_remarks(rows[in_curve], numbers)]
    remarks += _run_remarks(frame, rows, numbers)

    out = console.stdout()
    table.print(out)
    for remark in remarks:
        out.print(remark, soft_wrap=True)
    for others in other_curves("", rows, ~in_curve):
        others.print(out)
    for remark in _offset_remarks(rows[rows["task"] == MOVED]):
        out.print(remark, soft_wrap=True)
    out.print(f"Run folder: {folder}", soft_wrap=True)


def print_lines(folder: Path, split: str | None = None) -> None:
    """Print each curve of a run as one line: its losses by context, or its shares of
    right answers.
    """
    frame = read([folder], split)
    is_shown = frame["newest"] & (frame["variant"] != WINDOWED)
    is_shown &= frame["protocol"] != "nonoverlap"
    for curve, rows in frame[is_shown].groupby("curve"):
        cells = []
        for row in rows.sort_values("length").to_dict("records"):
            text = _loss_text(row)
            if not pd.isna(row["accuracy"]):
                text = f"{row['accuracy']:.1%}"
            cells.append(f"{text} at {multiple(row['length_ratio'])}")
        name = "" if curve == SERIES[0] else f", {curve}"
        print(f"{folder}{name}: {', '.join(cells)}")


def print_json(folders: Sequence[Path]) -> None:
    """Print the status and evaluation rows of a run as JSON; of several runs a list.

    The rows are without their sums by unit of text.
    """
    runs = []
    for folder in folders:
        record = load_record(folder)
        rows = []
        for row in evaluation_rows(folder):
            rows.append(dataclasses.replace(row, units=None).to_json())
        run = {"run": str(folder), "id": record.id, "status": record.status}
        runs.append({**run, "rows": rows})
    document = runs[0] if len(runs) == 1 else runs
    print(json.dumps(json_plain(document), indent=2, ensure_ascii=False))


def _title(run: pd.Series, trained: str) -> str:
    """Return what was trained: `rope, seed 0: trained at 128 tokens`."""
    settings = json.loads(run["settings"])
    names = [settings.get("model.name"), settings.get("encoding.name")]
    if "seed" in settings:  # else the model was only evaluated here
        names.append(f"seed {settings['seed']}")
    return f"{', '.join(filter(None, names))}: {trained}"


def _lines_table(
    title: str,
    lines: Sequence[Row],
    names: Sequence[str],
    legend: str,
    spare: Sequence[int] = (),
) -> Table:
    """Return lines as a table without empty columns. A narrow terminal first drops
    those of the highest `spare`.
    """
    if not spare:
        spare = [0, 0, *range(2, len(names))]
    columns = []
    for name, rank in zip(names, spare, strict=True):
        head = "" if name == "bar" else name
        is_text = name in (names[0], "bar")
        columns.append(Column(name, head, spare=rank, text=is_text))
    frame = pd.DataFrame(lines, columns=list(names))
    return Table(title, frame, columns, legend)


def _text_table(run: pd.Series, rows: pd.DataFrame) -> Table:
    """Return the loss by context, a line per length."""
    by_point = {}
    for row in rows.to_dict("records"):
        by_point[row["curve"], row["length"]] = row

    losses = rows.loc[_is_target(rows), "nll"]
    lowest = losses.min()
    span = max(FLAT, losses.max() - lowest)

    lines = []
    points = rows[["length", "length_ratio"]].drop_duplicates().sort_values("length")
    for length, ratio in points.itertuples(index=False):
        target = by_point.get(("fixed_target", length), {})
        line = {"context": f"{length} ({multiple(ratio)})", "loss": _loss_text(target)}
        for curve in ("windowed", "nonoverlap"):
            line[curve] = _loss_text(by_point.get((curve, length), {}))
        if target.get("status") == "ok":
            line["bar"] = "▇" * (1 + round(BAR * (target["nll"] - lowest) / span))
            line["95 %"] = f"{target['ci_low']:.2f}..{target['ci_high']:.2f}"
            line["perplexity"] = f"{target['perplexity']:.2f}"
            if not pd.isna(target["bits_per_byte"]):
                line["bits/byte"] = f"{target['bits_per_byte']:.3f}"
        lines.append(line)

    title = _title(run, f"trained at {run['train_length']} tokens")
    legend = _LEGEND if lines else ""
    return _lines_table(title, lines, _TEXT_COLUMNS, legend)


def _is_target(rows: pd.DataFrame) -> pd.Series:
    """Return which rows have a number of the main protocol."""
    return (rows["curve"] == "fixed_target") & (rows["status"] == "ok")


def _task_results(
    run: pd.Series, rows: pd.DataFrame, numbers: Headline
) -> tuple[Table, str]:
    """Return the share of right answers, a line per length of the problems, and whether
    the run has learned.
    """
    lines = []
    for row in rows.sort_values("length_ratio").to_dict("records"):
        line = {"length": f"{row['problem_length']} ({row['length_ratio']:.3g}x)"}
        if row["status"] == "ok":
            line["bar"] = "▇" * round(BAR * row["accuracy"])
            for name, column in _SHARES.items():
                line[name] = "" if pd.isna(row[column]) else f"{row[column]:.1%}"
        else:
            line["tokens right"] = str(row["status"])
        line["loss of answers"] = _loss_text(row)
        lines.append(line)
    title = _title(run, f"task {run['trained_task']}")
    table = _lines_table(title, lines, _TASK_COLUMNS, "")

    gate = f"{GATE:.0%} of the tokens right"
    if numbers["learned"] == "no":
        return table, f"Not learned: less than {gate} at some trained length."
    if numbers["learned"] is None:
        return table, (
            "Not known to have learned: no result at the longest trained length, and"
            f" {gate} are needed at each."
        )
    remark = f"Learned: at least {gate} at every trained length"
    step = numbers["steps_to_gate"]
    if step is not None:
        remark += f", in validation first after step {step:,}"
    return table, f"{remark}."


def _text_remarks(rows: pd.DataFrame, numbers: Headline) -> Iterator[str]:
    target = rows[_is_target(rows)]
    at_one = target[target["length_ratio"] == 1]
    if numbers["learned"] in NOT_BEATEN:
        trained = at_one.iloc[0]
        verdict = "Not learned"
        difference = ""
        if numbers["learned"] == NOT_RESOLVED:
            verdict = "Not shown to have learned"
            documents = plural(trained["n_documents"], "document")
            difference = f", a difference that may be chance over {documents}"
        yield (
            f"{verdict}: loss {trained['nll']:.3f} at 1x, an n-gram model of order"
            f" {trained['ngram_order']} has {trained['ngram_nll']:.3f} on the same"
            f" targets{difference}. So the curve shows only whether more context harms,"
            " not whether it helps."
        )
    if numbers["uses"] is not None:
        yield (
            f"Uses more than {numbers['uses']:g} of its {at_one['length'].iloc[0]}"
            f" tokens: these alone cost over {USES_LIMIT:g} nats per token."
        )
    if (rows["documents"] == "concat").any():
        yield (
            "Windows run across documents: these are too short to be scored whole, or"
            " documents=concat was asked for."
        )

    # over what the 95 % intervals are
    of_documents = target.dropna(subset="n_documents")
    for row in of_documents.head(1).itertuples():
        if row.ci_over == "segments":
            yield (
                "95 %: over segments of the text, which has few documents"
                f" ({row.n_documents}), and for this text alone."
            )
        else:
            yield (
                f"95 %: over {row.n_documents} documents, for this checkpoint on other"
                " text like this."
            )


def _run_remarks(
    frame: pd.DataFrame, rows: pd.DataFrame, numbers: Headline
) -> Iterator[str]:
    """Yield what a reader must know of a run before its numbers."""
    run = frame.iloc[0]
    # of a model that was only evaluated here the training text is unknown
    vocabulary = json.loads(run["settings"]).get("data.vocab_size")
    loss = numbers["nll_1x"]
    if numbers["learned"] is None and vocabulary and loss is not None:
        guess = math.log(vocabulary)
        if loss >= guess:
            yield (
                f"Not learned: loss {loss:.3f} at 1x, a guess among {vocabulary:,}"
                f" tokens has {guess:.3f}. Are these its trained weights?"
            )

    if run["run_status"] != "done" and len(rows):
        step = rows["checkpoint_step"].iloc[0]
        yield f"The run is not finished: these rows are of step {step}."
    precisions = rows["dtype"].dropna().unique()
    if len(precisions) > 1:
        yield (
            f"Rows in {' and '.join(precisions)}: only those in one precision are"
            " comparable."
        )


def _offset_remarks(rows: pd.DataFrame) -> Iterator[str]:
    """Yield how the loss of a passage changes with the position that it ends at."""
    measured = rows[rows["nll"].notna()]
    measured = measured.fillna({"offset": 0, "extension_options": ""})
    measured = measured.sort_values("offset")
    for (variant, _), group in measured.groupby(["variant", "targets_sha256"]):
        place = "Offset" if variant == PLAIN else f"Offset with {variant}"
        changes = (group["nll"] - group["nll"].iloc[0]).abs()
        ends = group["length"] + group["offset"]
        if group["extension_options"].nunique() > 1:
            finding = (
                "not compared: the factor differs between positions unless it is given"
            )
        elif changes.max() > USES_LIMIT:
            first = ends[changes > USES_LIMIT].min()
            finding = (
                f"the same passage's loss changes by more than {USES_LIMIT:g} nats from"
                f" position {first:,} on"
            )
        else:
            finding = (
                f"the same passage's loss changes by {changes.max():.4f} nats at most"
                f" up to position {ends.max():,}"
            )
        yield f"{place}: {finding}."


def _loss_text(row: Row) -> str:
    """Return the loss, or why there is none."""
    if row.get("status") == "ok":
        return f"{row['nll']:.3f}"
    return str(row.get("status", ""))
