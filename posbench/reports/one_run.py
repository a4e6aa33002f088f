"""One run as a table in the terminal: its loss by context, or its right answers by
length of the problems.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posbench.errors import UserError
from posbench.reports.render import Column, Table
from posbench.results import frame as frames
from posbench.results.compare import USES_LIMIT
from posbench.results.estimate import FEW_DOCUMENTS
from posbench.results.headline import Headline, headline
from posbench.results.tasks import as_trained
from posbench.run.rows import PLAIN, every_row, multiple
from posbench.terminal import console

OFFSET = "offset"  # the probe whose rows differ by position
FLAT = 0.1  # nats per token: a curve that spans less has short bars
BAR = 16  # characters
SERIES = ("fixed_target", "windowed", "nonoverlap")
# A narrow terminal leaves out columns from the end.
_OF_TEXT = (
    "context",
    "loss",
    "bar",
    "windowed",
    "95 %",
    "nonoverlap",
    "perplexity",
    "bits/byte",
)
_OF_TASK = (
    "length",
    "tokens right",
    "bar",
    "trivial reader",
    "chance",
    "whole answers",
    "loss of answers",
)
_LEGEND = (
    "loss: nats per token of the same target tokens at every context; windowed:"
    " attention narrowed to the training length; nonoverlap: whole windows"
)
Row = dict[str, Any]


def read(folder: Path, split: str | None, lengths: Sequence[int]) -> pd.DataFrame:
    """Return a run's rows. Its curve is on the targets that most of the requested
    lengths share; of ties the newest.
    """
    rows = [
        row
        for row in every_row(folder)
        if row.measured and row.task is None and row.length in lengths
    ]
    plain = Counter(
        digest
        for _, digest in {
            (row.length, row.targets_sha256) for row in rows if row.kind == PLAIN
        }
    )
    counts = {
        row.targets_sha256: plain[row.targets_sha256] + place / len(rows)
        for place, row in enumerate(rows)
    }
    return frames.read([folder], split, counts)


def print_results(
    folder: Path, split: str | None = None, lengths: Sequence[int] = ()
) -> None:
    """Print a run's curve on one text, what else was measured there, and where the
    files are.

    `split`: which text; None: the one that the run asks for. `lengths`: the curve is on
    the targets that most share.

    Raises UserError if the run cannot be read.
    """
    out, frame = console.stdout(), read(folder, split, lengths)
    run, of_task = frame.iloc[0], bool(frame["trained_task"].notna().any())
    if run["run_status"] == "unreadable":
        raise UserError(f"{folder}: {run['run_reason']}")
    main = frame[frame["main"]]
    rows = main[main["checkpoint_step"] == main["checkpoint_step"].max()]
    in_curve = as_trained(rows) if of_task else rows["curve"].isin(SERIES)
    settings = json.loads(run["settings"])
    # None: the model was only evaluated here
    seed = f"seed {settings['seed']}" if "seed" in settings else None
    names = [settings.get("model.name"), settings.get("encoding.name"), seed]
    trained = (
        f"task {run['trained_task']}"
        if of_task
        else f"trained at {run['train_length']} tokens"
    )
    title = f"{', '.join(filter(None, names))}: {trained}"
    if of_task:
        lines = _lines_of_task(rows[in_curve])
    else:
        lines = _lines_of_text(rows[in_curve])
    _table(
        title,
        lines,
        _OF_TASK if of_task else _OF_TEXT,
        "" if of_task or not lines else _LEGEND,
    ).print(out)
    numbers = headline(frame)
    remarks = _about_task(numbers) if of_task else _about_curve(rows[in_curve], numbers)
    of_run = [*_about_guessing(settings, numbers), *_about_run(frame, rows)]
    for remark in [*remarks, *of_run]:
        out.print(remark, soft_wrap=True)
    if not in_curve.all():
        _other_table(rows[~in_curve], "problem_length" if of_task else "length").print(
            out
        )
    for remark in _about_offset(rows[rows["task"] == OFFSET]):
        out.print(remark, soft_wrap=True)
    out.print(f"Run folder: {folder}", soft_wrap=True)


def _table(
    title: str,
    lines: Sequence[Row],
    names: Sequence[str],
    legend: str,
    spare: Sequence[int] = (),
) -> Table:
    """Return lines as a table without empty columns. A narrow terminal first drops
    those of the highest `spare`.
    """
    spare = spare or [0, 0, *range(2, len(names))]
    columns = [
        Column(
            name,
            "" if name == "bar" else name,
            "",
            rank,
            text=name in (names[0], "bar"),
        )
        for name, rank in zip(names, spare, strict=False)
    ]
    frame = pd.DataFrame(
        [{name: line.get(name, "") for name in names} for line in lines],
        columns=list(names),
    )
    return Table(title, frame, columns, legend)


def _lines_of_text(rows: pd.DataFrame) -> list[Row]:
    """Return the loss by context, a line per length."""
    by_point = {(row["curve"], row["length"]): row for row in rows.to_dict("records")}
    losses = rows.loc[
        (rows["curve"] == "fixed_target") & (rows["status"] == "ok"), "nll"
    ]
    span, lines = max(FLAT, losses.max() - losses.min()), []
    for length, ratio in sorted(
        set(zip(rows["length"], rows["length_ratio"], strict=True))
    ):
        target, *others = (by_point.get((name, length), {}) for name in SERIES)
        line = {"context": f"{length} ({multiple(ratio)})", "loss": _loss(target)}
        line |= {name: _loss(row) for name, row in zip(SERIES[1:], others, strict=True)}
        if target.get("status") == "ok":
            share = (target["nll"] - losses.min()) / span
            line["bar"] = "▇" * (1 + round(BAR * share))
            line["95 %"], line["perplexity"] = (
                "{ci_low:.2f}..{ci_high:.2f} {perplexity:.2f}".format(**target).split()
            )
            line["bits/byte"] = (
                ""
                if pd.isna(target["bits_per_byte"])
                else f"{target['bits_per_byte']:.3f}"
            )
        lines.append(line)
    return lines


def _lines_of_task(rows: pd.DataFrame) -> list[Row]:
    """Return the share of right answers, a line per length of the problems."""
    names = ("tokens right", "trivial reader", "chance", "whole answers")
    columns = ("accuracy", "trivial", "chance", "exact_match")
    return [
        {
            "length": f"{row['problem_length']} ({row['length_ratio']:.3g}x)",
            "loss of answers": _loss(row),
        }
        | {
            name: _share(row, column)
            for name, column in zip(names, columns, strict=True)
        }
        | {"bar": "▇" * round(BAR * row["accuracy"]) if row["status"] == "ok" else ""}
        for row in rows.sort_values("length_ratio").to_dict("records")
    ]


def _other_table(rows: pd.DataFrame, length: str) -> Table:
    """Return a table of extensions, probes, shifted positions and other protocols: a
    line each, a column per length.
    """
    from scipy import stats

    by_curve: dict[str, Row] = {}
    shifted = rows["task"] == OFFSET  # a curve over the position where the passage ends
    curves = (
        rows["curve"]
        .str.replace(r"_from_\d+", "", regex=True)
        .where(shifted, rows["curve"])
    )
    ends = rows[length] + rows["offset"].fillna(0).where(shifted, 0)
    rows = rows.assign(curve=curves, **{length: ends})
    for row in rows.to_dict("records"):
        name, column = (
            re.sub("^(fixed_target|problems|task)_", "", row["curve"]),
            str(row[length]),
        )
        line = by_curve.setdefault(name, {"measured": name})
        if pd.isna(row["accuracy"]):
            line[column] = _loss(row)
            continue
        line |= {
            column: _share(row, "accuracy"),
            "chance": _share(row, "chance"),
            "trivial": _share(row, "trivial"),
        }
        if row["protocol"] == "task":  # a probe: its problems are independent trials
            interval = stats.binomtest(
                round(row["accuracy"] * row["n_blocks"]), int(row["n_blocks"])
            ).proportion_ci()
            line[column] += f" ({100 * interval.low:.0f}..{100 * interval.high:.0f})"
            greedy = by_curve.setdefault(
                f"{name}, greedy", {"measured": f"{name}, greedy"}
            )
            greedy[column] = _share(row, "exact_match")
    lengths = [str(value) for value in sorted(rows[length].dropna().unique())]
    note = (
        "loss by length; for problems the share of right answers, for probes with 95 %"
        " interval (Clopper & Pearson)"
    )
    # the first and the longest stay
    spare = [0, 1, *range(len(lengths), 1, -1), len(lengths) + 1, len(lengths) + 2]
    return _table(
        "",
        list(by_curve.values()),
        ["measured", *lengths, "chance", "trivial"],
        note,
        spare,
    )


def _about_task(numbers: Headline) -> Iterator[str]:
    step = numbers["steps_to_gate"]
    when = "" if step is None else f", in validation first after step {step:,}"
    words = {"yes": f"Learned{when}", "no": "Not learned"}
    learned = words.get(str(numbers["learned"]), "Not known to have learned")
    yield (
        f"{learned}: this takes {frames.GATE:.0%} of the tokens right at every trained"
        " length."
    )


def _about_curve(rows: pd.DataFrame, numbers: Headline) -> Iterator[str]:
    target = rows[(rows["curve"] == "fixed_target") & (rows["status"] == "ok")]
    trained = target[target["length_ratio"] == 1].to_dict("records")
    gate = {"no": "Not learned", "not resolved": "Learned: not resolved"}.get(
        str(numbers["learned"])
    )
    if gate is not None:
        yield (
            f"{gate}: loss {trained[0]['nll']:.3f} at 1x, an n-gram model of order"
            f" {trained[0]['ngram_order']} has {trained[0]['ngram_nll']:.3f} on the"
            " same targets. So the curve shows only whether more context harms, not"
            " whether it helps."
        )
    if (used := numbers["uses"]) is not None:
        yield (
            f"Uses {used:g} of its {trained[0]['length']} tokens: fewer cost more than"
            f" {USES_LIMIT:g} nats per token."
        )
    if (rows["documents"] == "concat").any():
        yield (
            "Windows run across documents: these are too short to be scored whole, or"
            " documents=concat was asked for."
        )
    for number in target["n_documents"].dropna()[:1]:
        if number < FEW_DOCUMENTS:
            yield (
                f"95 %: over segments of the text, which has few documents ({number}),"
                " and for this text alone."
            )
        else:
            yield (
                f"95 %: over {number} documents, for this checkpoint on other text like"
                " this."
            )


def _about_guessing(settings: dict[str, Any], numbers: Headline) -> Iterator[str]:
    """Yield a line on a model whose training text is unknown, if it is no better than a
    guess.
    """
    vocabulary = settings.get("data.vocab_size")
    loss = numbers["nll_1x"]
    if numbers["learned"] is None and vocabulary and loss is not None:
        guess = math.log(vocabulary)
        if loss >= guess:
            yield (
                f"Not learned: loss {loss:.3f} at 1x, a guess among {vocabulary:,}"
                f" tokens has {guess:.3f}. Are these its trained weights?"
            )


def _about_run(frame: pd.DataFrame, rows: pd.DataFrame) -> Iterator[str]:
    if frame["run_status"].iloc[0] != "done" and len(rows):
        yield (
            "The run is not finished: these rows are of step"
            f" {rows['checkpoint_step'].iloc[0]}."
        )
    if len(precisions := rows["dtype"].dropna().unique()) > 1:
        yield (
            f"Rows in {' and '.join(precisions)}: only those in one precision are"
            " comparable."
        )
    counts = (
        frame[~frame["main"] & frame["protocol"].notna()]
        .groupby(["split", "checkpoint_step"])
        .size()
    )
    if len(counts):
        parts = [
            f"{number} on {split} text at step {step}"
            for (split, step), number in counts.items()
        ]
        yield (
            "Rows that are not shown, on another text or on other targets than the"
            f" curve: {', '.join(parts)}."
        )
        yield (
            "Lengths of one evaluation share their targets, but for nonoverlap only"
            " those that divide the longest."
        )


def _about_offset(rows: pd.DataFrame) -> Iterator[str]:
    """Yield how the loss of a passage changes with the position that it ends at."""
    rows = (
        rows[rows["nll"].notna()]
        .fillna({"offset": 0, "extension_options": ""})
        .sort_values("offset")
    )
    for (variant, _), group in rows.groupby(["variant", "targets_sha256"]):
        changes, ends = (
            (group["nll"] - group["nll"].iloc[0]).abs(),
            group["length"] + group["offset"],
        )
        finding = (
            f"the same passage's loss changes by {changes.max():.4f} nats at most up to"
            f" position {ends.max():,}"
        )
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
        yield f"Offset{'' if variant == PLAIN else f' with {variant}'}: {finding}."


def _loss(row: Row) -> str:
    """Return the loss, or why there is none."""
    return (
        f"{row['nll']:.3f}" if row.get("status") == "ok" else str(row.get("status", ""))
    )


def _share(row: Row, column: str) -> str:
    if row["status"] != "ok":
        return str(row["status"]) if column == "accuracy" else ""
    return "" if pd.isna(row[column]) else f"{row[column]:.1%}"
