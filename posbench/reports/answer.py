"""The short answer above a report's table: what is best, what holds, how sure that is,
and what to type next.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from posbench.config.overrides import split
from posbench.reports.sweeps import words_by_run
from posbench.reports.tables import LONGEST_LABEL, cut
from posbench.results.compare import (
    ENDPOINT_RATIO,
    ENOUGH_SEEDS,
    HALF,
    NOT_BEATEN,
    NOT_RESOLVED,
)
from posbench.terminal.exits import plural

MOST_NAMED = 5
# factor on the training tokens, as a suggestion for models that have not learned
LONGER = 4


def facts(frame: pd.DataFrame) -> str:
    """Return what was run: `6 encodings, 5 seeds, 1.05M parameters, 4M tokens of
    builtin, training length 128`.
    """
    runs = frame[~frame["repeated"]].drop_duplicates("folder")
    first = runs.sort_values(
        "run_status", key=lambda status: status != "done", kind="stable"
    ).iloc[0]
    parts = [
        plural(runs["label"].nunique(), "encoding"),
        plural(runs["seed"].nunique(), "seed"),
    ]
    if not pd.isna(first["parameters"]):
        parts.append(f"{runs['parameters'].median() / 1e6:.3g}M parameters")

    data = first["text"] or "text"
    if first["trained_task"]:
        data = f"task {first['trained_task']}"
    tokens = runs["trained_tokens"].max()
    if not pd.isna(tokens):
        data = f"{tokens / 1e6:.3g}M tokens of {data}"
    return f"{', '.join(parts)}, {data}, training length {first['train_length']}"


def of_text(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on the schemes of one setting; `table`: what
    `results.compare.compare` returns.
    """
    if not table.attrs["schemes"]:
        return [
            "No run has a loss at its training length yet."
            + command(frame, {}, "To continue, type")
        ]
    measured = table[table["nll"].notna()]
    is_unlearned = measured["learned"].isin(NOT_BEATEN)
    judged = measured[~is_unlearned]

    lines = [_best(measured), *_reaches(judged)]
    unused = judged.loc[judged["uses_context"].isin(NOT_BEATEN), "label"]
    if len(unused):
        lines.append(
            "Not shown to use more context than a cached n-gram model:"
            f" {list_names(unused)}."
        )

    changes: dict[str, str] = {}
    n_seeds = int(measured["seeds"].min())
    if table.attrs["largest_document"] >= HALF:
        part = f"{table.attrs['largest_document']:.0%}"
        lines.append(
            f"One document has {part} of the targets: nothing is said of other text."
        )
    elif n_seeds < ENOUGH_SEEDS and len(measured) > 1:
        changes["seed"] = ",".join(map(str, range(ENOUGH_SEEDS)))
        lines.append(
            f"How sure: {plural(n_seeds, 'seed')}; verdicts need {ENOUGH_SEEDS}."
        )

    if is_unlearned.any():
        lines.append(_unlearned(measured, measured.loc[is_unlearned, "label"]))
        tokens = frame["trained_tokens"].max()
        if not pd.isna(tokens):
            changes["training.tokens"] = str(int(tokens) * LONGER)
    if changes:
        lines[-1] += command(frame, changes)
    return lines


def _best(measured: pd.DataFrame) -> str:
    """Return the lowest loss, and how others compare with the reference."""
    best = measured.iloc[0]
    result = "the lowest loss" if len(measured) > 1 else "a loss of"
    text = (
        f"At {measured.attrs['train_length']} tokens {cut(best['label'])} has {result}"
        f" {best['nll']:.3f}"
    )
    if measured.attrs["reference"] is None and len(measured) > 1:
        return (
            f"{text}; without a reference (--reference NAME) no difference is judged."
        )
    return f"{text}.{_words(measured, 'nll', ('better', 'worse', NOT_RESOLVED))}"


def _reaches(judged: pd.DataFrame) -> list[str]:
    """Return a line on how far schemes hold, the farthest first; none where no scheme
    is known to.
    """
    if "holds_to" not in judged:
        return []
    held = judged[judged["holds_to"].notna()]
    held = held.sort_values("holds_to", ascending=False, kind="stable")

    by_reach: dict[str, list[str]] = {}
    for row in held.to_dict("records"):
        ratio = row["holds_to"] / judged.attrs["train_length"]
        reach = f"to {ratio:g}x"
        if row["holds_further"] is True and ratio > 1:
            reach = f"to at least {ratio:g}x"
        by_reach.setdefault(reach, []).append(row["label"])
    if not by_reach:
        return []

    parts = [f"{list_names(labels)} {reach}" for reach, labels in by_reach.items()]
    at = f"at {ENDPOINT_RATIO}x "
    words = _words(judged, "rise", ("rises less", "rises more"), at)
    return [f"Holds: {'; '.join(parts)}.{words}"]


def _unlearned(measured: pd.DataFrame, labels: pd.Series) -> str:
    text = "Not shown to have learned more than an n-gram model"
    ngram = measured["ngram"].median()
    if not pd.isna(ngram):
        text += f" ({ngram:.3f})"
    return f"{text}: {list_names(labels)}."


def of_task(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on the schemes of one setting; `table`: what
    `results.tasks.compare_tasks` returns.
    """
    if not len(table):
        return [
            "No run was tested on its problems yet."
            + command(frame, {}, "To continue, type")
        ]
    ranked = table[table["ranked"]]
    lines = [f"Learned by most seeds: {list_names(ranked['label']) or 'none'}."]
    measured = [
        name
        for name in ("accuracy_4x", "accuracy_2x")
        if name in ranked and ranked[name].notna().any()
    ]
    for name in measured[:1]:
        best, names = (
            ranked[name].max(),
            list_names(ranked.loc[ranked[name] == ranked[name].max(), "label"]),
        )
        lines[0] += (
            f" Best at {name[9:]} the longest trained problem: {names}, {best:.0%}"
            " right."
        )
    words = [
        _words(table, f"accuracy_{ratio}", ("better", "worse"), f"at {ratio} ")
        for ratio in ("2x", "4x")
    ]
    lines += [text.lstrip() for text in words if text]
    if table["seeds"].min() < ENOUGH_SEEDS:
        lines.append(
            f"Words need {ENOUGH_SEEDS} seeds, better"
            f" ten.{command(frame, {'seed': '0,1,2,3,4,5,6,7,8,9'})}"
        )
    return lines


def _words(table: pd.DataFrame, name: str, words: Iterable[str], at: str = "") -> str:
    """Return a sentence on the schemes that have these words, with their differences in
    nats; empty if none has.
    """
    if f"{name}_word" not in table:
        return ""
    parts = []
    for word in words:
        names = []
        for row in table[table[f"{name}_word"] == word].to_dict("records"):
            text = cut(row["label"])
            if name in ("nll", "rise") and word != NOT_RESOLVED:
                text += f" {row[f'{name}_difference']:+.3f}"
            names.append(text)
        comparison = f" than {table.attrs['reference']}"
        if word == NOT_RESOLVED:
            comparison = ""
        if names:
            parts.append(f"{word}{comparison}: {list_names(names, 2 * LONGEST_LABEL)}")
    if not parts:
        return ""
    text = at + "; ".join(parts)
    return f" {text[0].upper()}{text[1:]}."


def command(
    frame: pd.DataFrame, changes: dict[str, str], invitation: str = "Type"
) -> str:
    """Return the sweeps that made a frame's runs, as they were typed but with these
    values; empty if no sweep made them.
    """
    commands = []
    for words in _sweeps(frame):
        kept = [word for word in words if split(word)[0] not in changes]
        changed = [f"{key}={value}" for key, value in changes.items()]
        commands.append(f"posbench sweep {shlex.join(kept + changed)}")
    if not commands:
        return ""
    return "\n  ".join([f" {invitation}:", *dict.fromkeys(commands)])


def _sweeps(frame: pd.DataFrame) -> list[list[str]]:
    """Return the words of the sweeps that a frame's runs are of, each sweep once."""
    sweeps = []
    for run in map(Path, frame["folder"].unique()):
        words = words_by_run(run.parent).get(run.name)
        if words and words not in sweeps:
            sweeps.append(words)
    return sweeps


def list_names(names: Iterable[str], longest: int = LONGEST_LABEL) -> str:
    """Return names in one phrase, with a number in place of the last of many: `fox,
    alibi and 17 more`.
    """
    labels = [cut(name, longest) for name in names]
    if labels == ["none"]:
        return "'none'"  # alone, none reads as nothing
    n_more = len(labels) - MOST_NAMED
    if n_more > 1:
        return f"{', '.join(labels[:MOST_NAMED])} and {n_more} more"
    return ", ".join(labels)
