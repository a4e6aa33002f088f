"""One run as a table in the terminal: its loss by context, or its right answers by length of the problems."""

import json
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posbench.errors import UserError
from posbench.report.render import Column, Table
from posbench.results import frame as frames
from posbench.results.compare import USES_LIMIT
from posbench.results.estimate import FEW_DOCUMENTS
from posbench.results.frame import GATE
from posbench.results.headline import Headline, headline
from posbench.run_folder.rows import PLAIN, multiple
from posbench.terminal import console

FLAT = 0.1  # nats per token: a curve that spans less has short bars
BAR = 16  # characters
SERIES = ("fixed_target", "windowed", "nonoverlap")
_LEGEND = {
    "loss": "loss: nats per token of the same target tokens at every context (fixed_target)",
    "windowed": "windowed: with attention narrowed to the training length",
    "nonoverlap": "nonoverlap: whole windows",
}
# Columns that a narrow terminal leaves out, the least important last.
_SPARE = ("windowed", "95 %", "", "nonoverlap", "whole answers", "chance", "perplexity", "bits/byte", "loss of answers")
Row = dict[str, Any]


def print_results(folder: Path, split: str | None = None) -> None:
    """Print a run's curve on one text, what else was measured there, and where the files are.

    Args:
        split: which text; None: the one that the run asks for.

    Raises:
        UserError: the run cannot be read.
    """
    out, frame = console.stdout(), frames.read([folder], split)
    run = frame.iloc[0]
    if run["run_status"] == "unreadable":
        raise UserError(f"{folder}: {run['run_reason']}")
    frame = frame.assign(curve=frames.curve_names(frame))
    main = frame[frame["main"]]
    rows = main[main["checkpoint_step"] == main["checkpoint_step"].max()]
    of_task = run["trained_task"] is not None
    in_curve = _as_trained(rows) if of_task else rows["curve"].isin(SERIES)
    bar = "▇" if console.carries_unicode(out) else "#"
    table = _task_table(rows[in_curve], run, bar) if of_task else _text_table(rows[in_curve], run, bar)
    table.filled().print(out)
    numbers = headline(frame)
    remarks = _about_task(numbers) if of_task else _about_text(rows[in_curve], numbers, run)
    for line in [*remarks, *_about_run(frame, main, rows, run)]:
        out.print(line, soft_wrap=True)
    if len(others := rows[~in_curve]):
        _others_table(others, "problem_length" if of_task else "length").print(out)
    out.print(f"Run folder: {folder}", soft_wrap=True)


# -- curves ------------------------------------------------------------------------------------------------------------


def _text_table(rows: pd.DataFrame, run: pd.Series, bar: str) -> Table:
    """Return the loss by context, a row per length."""
    at = {(row["curve"], row["length"]): row for row in rows.to_dict("records")}
    losses = rows.loc[(rows["curve"] == "fixed_target") & (rows["status"] == "ok"), "nll"]
    span, lines = max(FLAT, losses.max() - losses.min()), []
    for length, same in rows.groupby("length"):
        target, windowed, nonoverlap = (at.get((name, length), {}) for name in SERIES)
        ratio = float(same["length_ratio"].iloc[0])
        lines.append({
            "context": f"{length} ({multiple(ratio)})",
            "loss": _number(target),
            "": bar * (1 + round(BAR * (target["nll"] - losses.min()) / span)) if target.get("status") == "ok" else "",
            "95 %": f"{target['ci_low']:.2f}..{target['ci_high']:.2f}" if _known(target, "ci_low") else "",
            "perplexity": f"{target['perplexity']:.2f}" if _known(target, "perplexity") else "",
            "bits/byte": f"{target['bits_per_byte']:.3f}" if _known(target, "bits_per_byte") else "",
            "windowed": _number(windowed),
            "nonoverlap": _number(nonoverlap),
        })  # fmt: skip
    legend = [meaning for name, meaning in _LEGEND.items() if any(line[name] for line in lines)]
    title = f"trained at {run['train_length']} tokens"
    return _table(_title(run, title), lines, ["context", "loss", "", "95 %", "perplexity", "bits/byte", *SERIES[1:]],
                  ["; ".join(legend)] if legend else [])  # fmt: skip


def _task_table(rows: pd.DataFrame, run: pd.Series, bar: str) -> Table:
    """Return the share of right answers by length of the problems."""
    lines = [
        {
            "length": f"{row['problem_length']} ({row['length_ratio']:.3g}x)",
            "tokens right": _share(row),
            "": bar * round(BAR * row["accuracy"]) if row["status"] == "ok" else "",
            "trivial reader": _share(row, "trivial"),
            "chance": _share(row, "chance"),
            "whole answers": _share(row, "exact_match"),
            "loss of answers": f"{row['nll']:.3f}" if _known(row, "nll") else "",
        }
        for row in rows.sort_values("length_ratio").to_dict("records")
    ]
    names = ["length", "tokens right", "", "trivial reader", "chance", "whole answers", "loss of answers"]
    return _table(_title(run, f"task {run['trained_task']}"), lines, names, ["each token after the right ones before"])


def _others_table(rows: pd.DataFrame, length: str) -> Table:
    """Return extensions, probes, shifted positions and other protocols: a line each, by length."""
    by_curve: dict[str, Row] = {}
    for row in rows.sort_values(length).to_dict("records"):
        name, share = row["curve"].removeprefix("fixed_target_").removeprefix("problems_"), _known(row, "accuracy")
        line = by_curve.setdefault(name, {"measured": name})
        line[str(row[length])] = _share(row) + _interval(row) if share else _number(row)
        if share:
            line |= {"chance": _share(row, "chance"), "trivial": _share(row, "trivial")}
        if share and _known(row, "exact_match") and _known(row, "chance"):
            greedy = by_curve.setdefault(f"{name}, greedy", {"measured": f"{name}, greedy"})
            greedy[str(row[length])] = _share(row, "exact_match")
    lengths = [str(each) for each in sorted(rows[length].dropna().unique())]
    floors = [name for name in ("chance", "trivial") if any(name in line for line in by_curve.values())]
    note = "loss by length; of problems the share of right answers, with its 95 % interval over problems"
    return _table("", list(by_curve.values()), ["measured", *floors, *lengths], [note if floors else "loss by length"])


def _table(title: str, lines: Sequence[Row], names: Sequence[str], legend: Sequence[str]) -> Table:
    ranks = {name: _SPARE.index(name) + 1 for name in names if name in _SPARE}
    columns = [
        Column(
            name,
            name,
            operator.methodcaller("get", name, ""),
            ranks.get(name, at if at > 1 else 0),
            at == 0 or not name,
        )
        for at, name in enumerate(names)
    ]
    texts = pd.DataFrame(lines, columns=list(names)).fillna("")
    return Table(title, texts, columns, legend)


def _as_trained(rows: pd.DataFrame) -> pd.Series:
    """Tell which rows are of a task, its positions and the model as they were in training, at any length."""
    variation = rows["task"].astype(str).str.contains(":")
    return (rows["protocol"] == "problems") & ~variation & (rows["offset"].fillna(0) == 0) & (rows["variant"] == PLAIN)


def _title(run: pd.Series, trained: str) -> str:
    settings = json.loads(run["settings"])
    names = [settings.get("model.name"), settings.get("encoding.name")]
    seed = f"seed {settings['seed']}" if "seed" in settings else None
    return f"{', '.join(name for name in (*names, seed) if name)}: {trained}"


# -- remarks -----------------------------------------------------------------------------------------------------------


def _about_text(rows: pd.DataFrame, numbers: Headline, run: pd.Series) -> Iterator[str]:
    target = rows[(rows["curve"] == "fixed_target") & (rows["status"] == "ok")]
    at_one = target[target["length"] == run["train_length"]]
    if (
        gate := {"no": "Not learned", "not resolved": "Learned: not resolved"}.get(str(numbers["learned"]))
    ) is not None:
        row = at_one.iloc[0]
        yield (
            f"{gate}: loss {row['nll']:.3f} at 1x, an n-gram model of order {row['ngram_order']} has "
            f"{row['ngram_nll']:.3f} on the same targets. Whether more context is used does not show; whether it does "
            "harm does."
        )
    if (used := numbers["uses"]) is not None:
        of_all = "all" if used == run["train_length"] else f"{used:g}"
        yield f"Uses {of_all} of its {run['train_length']} tokens: fewer cost more than {USES_LIMIT:g} nats per token."
    if (rows["documents"] == "concat").any():
        yield "Documents were too short to be scored whole: windows run across them."
    for number in target["n_documents"].dropna()[:1]:
        if number < FEW_DOCUMENTS:
            yield f"95 %: over segments of {number} documents: it speaks for no other text."
        else:
            yield f"95 %: over {number} documents, for this checkpoint on other text like this; not for other seeds."


def _about_task(numbers: Headline) -> Iterator[str]:
    if numbers["learned"] is None:
        yield "Not tested at the longest trained length."
    elif numbers["learned"] == "no":
        yield f"Not learned: that is {GATE:.0%} of the tokens at every trained length."
    else:
        step = numbers["steps_to_gate"]
        when = "" if step is None else f", in validation first after step {step:,}"
        yield f"Learned: {GATE:.0%} of the tokens or more at every trained length{when}."


def _about_run(frame: pd.DataFrame, main: pd.DataFrame, rows: pd.DataFrame, run: pd.Series) -> Iterator[str]:
    if run["run_status"] != "done" and len(rows):
        step = rows["checkpoint_step"].iloc[0]
        yield f"Not finished ({run['run_status']}): evaluated as it stands after step {step}."
    earlier = main.drop(index=rows.index)
    earlier = earlier[
        (earlier["curve"] == "fixed_target") & (earlier["length_ratio"] == 1) & (earlier["status"] == "ok")
    ]
    if len(earlier := earlier.dropna(subset=["tokens"]).sort_values("tokens")):
        each = [
            f"{nll:.3f} after {tokens:,} tokens" for tokens, nll in zip(earlier["tokens"], earlier["nll"], strict=True)
        ]
        yield f"On the way, loss at 1x: {', '.join(each)}."
    apart = frame[~frame["main"] & frame["protocol"].notna()]
    if len(apart):
        each = [
            f"{len(same)} on {split} text at step {step}"
            for (split, step), same in apart.groupby(["split", "checkpoint_step"])
        ]
        yield (
            f"Rows that are not shown, on another text or on other targets than the curve: {', '.join(each)}. Lengths "
            "that are asked for together share their targets."
        )


# -- cells -------------------------------------------------------------------------------------------------------------


def _known(row: Row, column: str) -> bool:
    return row.get("status") == "ok" and not pd.isna(row[column])


def _number(row: Row) -> str:
    """Return the loss, or why there is none."""
    return f"{row['nll']:.3f}" if _known(row, "nll") else str(row.get("status", ""))


def _share(row: Row, column: str = "accuracy") -> str:
    if _known(row, column):
        return f"{row[column]:.1%}"
    return str(row["status"]) if column == "accuracy" else ""


def _interval(row: Row) -> str:
    """Return the interval of a probe's share over its problems (Clopper & Pearson, 1934), for this checkpoint."""
    from scipy import stats

    if pd.isna(row["n_blocks"]) or row["protocol"] == "problems":
        return ""
    share = stats.binomtest(round(row["accuracy"] * row["n_blocks"]), int(row["n_blocks"])).proportion_ci()
    return f" ({100 * share.low:.0f}..{100 * share.high:.0f})"
