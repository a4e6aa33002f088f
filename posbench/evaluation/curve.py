"""The extrapolation curve of one run, drawn in the terminal with its numbers."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from posbench.config.external import AnyConfig, TrainedElsewhere, TrainedOn
from posbench.evaluation import answer_curve, choices, intervals
from posbench.evaluation.levels import USES_LIMIT, Levels
from posbench.run_folder.folder import load_any_config
from posbench.run_folder.rows import (
    BlockRow,
    BlocksKey,
    EvaluationRow,
    evaluation_blocks,
    evaluation_rows,
    every_row,
    headline_split,
    multiple,
    newest_of_split,
    on_shared_targets,
)
from posbench.terminal import chart, console, tables

FLAT = 0.1  # nats per token: a curve that spans less looks flat
# Columns of the table, and what its caption says of them.
_MEANINGS = {
    "context": "",
    "nll": "nll: nats per token of the same target tokens at every context (fixed_target)",
    "95 %": "",
    "perplexity": "",
    "bits/byte": "",
    "windowed": "windowed: those with attention narrowed to the training length",
    "nonoverlap": "nonoverlap: whole windows",
}
_SPARE = ("bits/byte", "perplexity", "nonoverlap", "95 %", "windowed")  # the least important first
# name -> (mark, mark without Unicode, style); the colours are told apart by the colour-blind, too
SERIES = {
    "fixed_target": ("●", "o", "bright_blue"),
    "windowed": ("○", "w", "yellow"),
    "nonoverlap": ("◇", "x", "bright_black"),
}


def print_curves(folder: Path, split: str | None = None) -> None:
    """Print a run's table and curve on one text, its other results, and where the files are.

    Args:
        split: which text; None = that of the run's headline.
    """
    out, config, known = console.stdout(), load_any_config(folder), evaluation_rows(folder)
    split = split or headline_split(known, config.evaluation.split)
    rows = newest_of_split(known, split)
    if config.data.task is None:
        title = title_of(config) if split == "test" else f"{title_of(config)}, on {split} text"
        pieces = [_table(rows, title, out), *_not_finished(rows, config), *_pieces(folder, config, rows, out)]
    else:
        pieces = [*answer_curve.pieces(folder, config, rows, out), *_not_finished(rows, config)]
    passed = _on_the_way(known, config)
    others = [row for row in known if row not in rows and row not in passed]
    for piece in [*pieces, *_told_on_the_way(passed), *_left_out(others)]:
        out.print(piece)
    out.print(f"Run folder: {folder}", soft_wrap=True)


def _pieces(folder: Path, config: AnyConfig, rows: list[EvaluationRow], out: Console) -> Iterator[RenderableType]:
    """What is printed of a run on text below its table."""
    blocks = evaluation_blocks(folder)
    levels = Levels.with_blocks(blocks, config, rows)
    joined, plain = on_shared_targets(rows), not console.carries_unicode(out)
    yield from [*_not_learned(levels), *_used(levels)]
    yield from _not_joined(folder, rows[0].split if rows else "", joined)
    series = [
        chart.Series(name, _points(joined, name), signs[plain], style) for name, (*signs, style) in SERIES.items()
    ]
    if any(len(one.points) > 1 for one in series):
        drawn = [one for one in series if one.points]
        yield chart.draw(drawn, ("tokens of context", "nats per token"), out.width, FLAT, plain)
    answering = {row.curve_name for row in rows if row.chance is not None}
    if others := _others([row for row in rows if row.curve_name not in answering]):
        yield _others_table(others, out)
    if answered := _others([row for row in rows if row.curve_name in answering]):
        yield _answers_table(answered, out)
    if any(row.documents == "concat" for row in rows):
        yield "Documents were too short to be scored whole: windows run across them."
    yield from _about_intervals(rows, blocks)


def title_of(config: AnyConfig) -> str:
    """A title: the encoding and its training length."""
    of = f"{config.encoding.name}, seed {config.seed}"
    if isinstance(config, TrainedElsewhere):
        of = f"{config.model.name}, {config.encoding.name}"
    if isinstance(config, TrainedOn):
        return f"{config.model.name}, {of}: trained on at {config.training.train_length} tokens"
    return f"{of}: trained at {config.training.train_length} tokens"


def _not_finished(rows: list[EvaluationRow], config: AnyConfig) -> list[str]:
    if isinstance(config, TrainedElsewhere):
        return []
    steps = config.training.steps
    done = max((row.checkpoint_step for row in rows), default=steps)
    return [] if done >= steps else [f"Not finished: evaluated as it stood after step {done} of {steps}."]


def _not_learned(levels: Levels) -> list[str]:
    """A warning for a run that does not beat the best n-gram model at its training length: its curve shows nothing."""
    said = {"no": "Not learned", "not resolved": "Learned: not resolved"}.get(levels.learned or "")
    if said is None or levels.at_one is None:
        return []
    row = levels.at_one.row
    reader = f"an n-gram model of order {row.ngram_order}"
    return [
        f"{said}: {row.nll:.3f} nats at 1x, {reader} has {row.ngram_nll:.3f} on the same targets. "
        "Such a curve shows whether more context does harm, not whether it is used."
    ]


def _used(levels: Levels) -> list[str]:
    length, used = levels.train_length, levels.headline["uses"]
    if used is None:
        return []
    of_all = f"{used:g} of its {length}" if used != length else f"all of its {length}"
    return [f"Uses {of_all} tokens: less context costs more than {USES_LIMIT:g} nats per token, by the upper bound."]


def _on_the_way(rows: list[EvaluationRow], config: AnyConfig) -> list[EvaluationRow]:
    """The rows that `evaluation.at_tokens` asks for, of updates before the last."""
    if isinstance(config, TrainedElsewhere):
        return []
    asked = {tokens // config.training.tokens_per_step for tokens in config.evaluation.at_tokens}
    return [row for row in rows if row.checkpoint_step in asked and row.checkpoint_step < config.training.steps]


def _told_on_the_way(rows: list[EvaluationRow]) -> list[str]:
    levels = {row.tokens: row.nll for row in rows if row.length_ratio == 1 and row.measured}
    each = [f"{nll:.3f} after {tokens or 0:,} tokens" for tokens, nll in sorted(levels.items())]
    return [f"On the way, nll at 1x: {', '.join(each)}."] if each else []


def _left_out(rows: list[EvaluationRow]) -> list[str]:
    """A line on rows of another text or an earlier checkpoint, which form other curves."""
    counted = Counter((row.split, row.checkpoint_step) for row in rows)
    each = [f"{split} text at step {step} ({number} rows)" for (split, step), number in sorted(counted.items())]
    return [f"Not in this curve: {', '.join(each)}."] if each else []


def _not_joined(folder: Path, split: str, joined: list[EvaluationRow]) -> list[str]:
    """A line on numbers that the curve lacks, since they have other targets, with what to ask for to have all."""
    every = [row for row in newest_of_split(every_row(folder), split) if row.measured and row.task is None]
    there = {row.key for row in joined}
    others = [row for row in every if row.key not in there and (row.is_headline or row.curve_name in SERIES)]
    if not others:
        return []
    each = [f"{row.curve_name} at {row.length} {row.nll:.3f}" for row in sorted(others, key=lambda row: row.length)]
    lengths = ",".join(map(str, sorted({row.length for row in every})))
    together = f"Lengths that are asked for together share their targets: length={lengths}"
    if all(row.protocol == "nonoverlap" for row in others):
        together = "nonoverlap has the same targets at lengths that divide the longest one"
    return [f"On other targets than the curve, so not comparable with it: {', '.join(each)}. {together}"]


def _about_intervals(rows: list[EvaluationRow], known: dict[BlocksKey, list[BlockRow]]) -> list[str]:
    """A line on what the intervals cover, with a warning if there are few units."""
    row = next((row for row in rows if row.measured and row.curve_name == "fixed_target"), None)
    if row is None:
        return []
    blocks = [block for block in known.get(row.blocks_key, []) if block.n_tokens]
    if not blocks or any(block.document is None for block in blocks):
        return ["95 %: over unknown documents; 'posbench evaluate' makes it anew."]
    behind = intervals.documents_of(intervals.blocks_of(blocks))
    usual = f"95 %: over {behind.told}, for this checkpoint on other text like this; not for other seeds."
    return [behind.warning or usual]


def _points(rows: list[EvaluationRow], name: str) -> dict[int, float]:
    own = [row for row in rows if row.status == "ok" and row.curve_name == name]
    return {row.length: row.nll for row in own if row.nll is not None}


def _table(rows: list[EvaluationRow], title: str, out: Console) -> Table:
    """One line per length, with as many columns as there is room for."""
    by_place = {(row.curve_name, row.length): row for row in rows if row.curve_name in SERIES}
    ratios = {row.length: row.length_ratio for row in by_place.values()}
    lines = []
    for length, ratio in sorted(ratios.items()):
        target, windowed, nonoverlap = (by_place.get((name, length)) for name in SERIES)
        lines.append(
            {
                "context": f"{length} ({multiple(ratio)})",
                "nll": _number(target),
                "95 %": _interval(target),
                "perplexity": _number(target, "perplexity", 2),
                "bits/byte": _number(target, "bits_per_byte"),
                "windowed": _number(windowed),
                "nonoverlap": _number(nonoverlap),
            }
        )
    names = [name for name in _MEANINGS if name in ("context", "nll") or any(line[name] for line in lines)]
    cells = [[line[name] for name in names] for line in lines]
    spare = [names.index(name) for name in _SPARE if name in names]

    def caption(shown: list[int]) -> str:
        return "; ".join(meaning for column in shown if (meaning := _MEANINGS[names[column]]))

    return tables.fitted(out, names, cells, spare, title, caption)


def _others(rows: list[EvaluationRow]) -> dict[str, dict[int, EvaluationRow]]:
    """Rows beside the headline (extensions, probes, other protocols), by name and length."""
    by_name: dict[str, dict[int, EvaluationRow]] = {}
    for row in rows:
        if row.curve_name not in SERIES:
            by_name.setdefault(row.curve_name.removeprefix("fixed_target_"), {})[row.length] = row
    return by_name


def _others_table(others: dict[str, dict[int, EvaluationRow]], out: Console) -> Table:
    """One line per name, with as many lengths as there is room for: the shortest and the longest go last."""
    lengths = sorted({length for by_length in others.values() for length in by_length})
    lines = [[name, *(_number(found.get(length)) for length in lengths)] for name, found in others.items()]
    heads = ["nll by context", *map(str, lengths)]
    return tables.fitted(out, heads, lines, [*range(2, len(lengths)), *([1] if len(lengths) > 1 else [])])


def _answers_table(answered: dict[str, dict[int, EvaluationRow]], out: Console) -> Table:
    """Right answers to probes: among candidates and by greedy decoding, with as many lengths as there is room for."""
    lengths = sorted({length for by_length in answered.values() for length in by_length})
    lines = []
    for name, found in answered.items():
        floors = [_range([getattr(row, column) for row in found.values()]) for column in ("chance", "trivial")]
        lines.append([name, *floors, *(_share(found.get(length)) for length in lengths)])
        if any(row.exact_match is not None for row in found.values()):
            said = (_share(found.get(length), "exact_match") for length in lengths)
            lines.append([f"{name}, greedy", "", "", *said])
    heads = ["right answers by context", "by chance", "trivial", *map(str, lengths)]
    spare = [2, 1, *range(4, len(heads) - 1), *([3] if len(lengths) > 1 else [])]
    caption = (
        "among candidates, by chance and by a trivial reader; greedy: whole answers by greedy decoding; 95 % in "
        "brackets, over problems (Clopper & Pearson), for this checkpoint"
    )
    return tables.fitted(out, heads, lines, spare, caption=caption)


def _range(shares: list[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if not known or min(known) == max(known):
        return f"{known[0]:.1%}" if known else ""
    return f"{100 * min(known):.0f}..{max(known):.0%}"


def _share(row: EvaluationRow | None, column: str = "accuracy") -> str:
    share = None if row is None else getattr(row, column)
    if row is None or share is None:
        return _number(row)
    interval = choices.interval_of(row, column)
    return f"{share:.1%}" + (" ({:.0f}..{:.0f})".format(*(100 * end for end in interval)) if interval else "")


def _number(row: EvaluationRow | None, column: str = "nll", digits: int = 3) -> str:
    if row is None:
        return ""
    if row.status != "ok":
        return row.status if column == "nll" else ""
    value = getattr(row, column)
    return "" if value is None else f"{value:.{digits}f}"


def _interval(row: EvaluationRow | None) -> str:
    if row is None or row.ci_low is None or row.ci_high is None:
        return ""
    return f"{row.ci_low:.2f}..{row.ci_high:.2f}"
