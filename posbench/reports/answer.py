"""The short answer above a report's table: what is best, what holds, how sure that is,
and what to type next.
"""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from posbench.config.overrides import split
from posbench.reports.sweeps import words_by_run
from posbench.reports.tables import LONGEST_LABEL, short_label
from posbench.results.compare import (
    ENDPOINT_RATIO,
    ENOUGH_SEEDS,
    HALF,
    NOT_BEATEN,
    NOT_RESOLVED,
)
from posbench.terminal.exits import plural

MOST_NAMED = 5
ENOUGH_SEEDS_OF_TASKS = 10
# factor on the training tokens, as a suggestion for models that have not learned
LONGER = 4


def facts_line(frame: pd.DataFrame) -> str:
    """Return what was run: `6 encodings, 5 seeds, 1.05M parameters, 4M tokens of
    builtin, training length 128`.
    """
    runs = frame[~frame["repeated"]].drop_duplicates("folder")
    done = runs[runs["run_status"] == "done"]
    first = done.iloc[0] if len(done) else runs.iloc[0]

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
    parts.append(data)
    parts.append(f"training length {first['train_length']}")
    return ", ".join(parts)


def text_sentences(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on the schemes of one setting; `table`: what
    `results.compare.compare` returns.
    """
    if not table.attrs["schemes"]:
        command = command_text(frame, {}, "To continue, type")
        return [f"No run has a loss at its training length yet.{command}"]
    measured = table[table["nll"].notna()]
    is_unlearned = measured["learned"].isin(NOT_BEATEN)
    judged = measured[~is_unlearned]

    sentences = [_best_sentence(measured)]
    sentences += _reach_sentences(judged)
    unused = judged.loc[judged["uses_context"].isin(NOT_BEATEN), "label"]
    if len(unused):
        sentences.append(
            "Not shown to use more context than a cached n-gram model:"
            f" {list_names(unused)}."
        )

    changes: dict[str, str] = {}
    n_seeds = int(measured["seeds"].min())
    largest = table.attrs["largest_document"]
    if largest >= HALF:
        sentences.append(
            f"One document has {largest:.0%} of the targets: nothing is said of other"
            " text."
        )
    elif n_seeds < ENOUGH_SEEDS and len(measured) > 1:
        changes["seed"] = _seed_list(ENOUGH_SEEDS)
        sentences.append(
            f"How sure: {plural(n_seeds, 'seed')}; verdicts need {ENOUGH_SEEDS}."
        )

    if is_unlearned.any():
        unlearned = measured.loc[is_unlearned, "label"]
        sentences.append(_unlearned_sentence(measured, unlearned))
        tokens = frame["trained_tokens"].max()
        if not pd.isna(tokens):
            changes["training.tokens"] = str(int(tokens) * LONGER)
    if changes:
        sentences[-1] += command_text(frame, changes)
    return sentences


def _best_sentence(measured: pd.DataFrame) -> str:
    """Return the lowest loss, and how others compare with the reference."""
    best = measured.iloc[0]
    has_others = len(measured) > 1
    result = "the lowest loss" if has_others else "a loss of"
    text = (
        f"At {measured.attrs['train_length']} tokens {short_label(best['label'])} has"
        f" {result} {best['nll']:.3f}"
    )
    if has_others and measured.attrs["reference"] is None:
        return (
            f"{text}; without a reference (--reference NAME) no difference is judged."
        )
    words = _words_sentence(measured, "nll", ("better", "worse", NOT_RESOLVED))
    return f"{text}. {words}".rstrip()


def _reach_sentences(judged: pd.DataFrame) -> list[str]:
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

    parts = []
    for reach, labels in by_reach.items():
        parts.append(f"{list_names(labels)} {reach}")
    place = f"at {ENDPOINT_RATIO}x "
    words = _words_sentence(judged, "rise", ("rises less", "rises more"), place)
    return [f"Holds: {'; '.join(parts)}. {words}".rstrip()]


def _unlearned_sentence(measured: pd.DataFrame, labels: pd.Series) -> str:
    text = "Not shown to have learned more than an n-gram model"
    ngram = measured["ngram"].median()
    if not pd.isna(ngram):
        text += f" ({ngram:.3f})"
    return f"{text}: {list_names(labels)}."


def task_sentences(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on the schemes of one setting; `table`: what
    `results.tasks.compare_tasks` returns.
    """
    if table.empty:
        command = command_text(frame, {}, "To continue, type")
        return [f"No run was tested on its problems yet.{command}"]

    ranked = table[table["ranked"]]
    learned = list_names(ranked["label"]) or "none"
    best = _most_accurate_sentence(ranked)
    sentences = [f"Learned by most seeds: {learned}. {best}".rstrip()]

    for ratio in ("2x", "4x"):
        name = f"accuracy_{ratio}"
        words = _words_sentence(table, name, ("better", "worse"), f"at {ratio} ")
        if words:
            sentences.append(words)

    if table["seeds"].min() < ENOUGH_SEEDS:
        seeds = _seed_list(ENOUGH_SEEDS_OF_TASKS)
        command = command_text(frame, {"seed": seeds})
        sentences.append(f"Words need {ENOUGH_SEEDS} seeds, better ten.{command}")
    return sentences


def _most_accurate_sentence(ranked: pd.DataFrame) -> str:
    """Return which schemes answer best on the longest problems that were measured;
    empty without a longer one.
    """
    for ratio in ("4x", "2x"):
        name = f"accuracy_{ratio}"
        if name not in ranked or ranked[name].isna().all():
            continue
        highest = ranked[name].max()
        best = ranked.loc[ranked[name] == highest, "label"]
        return (
            f"Best at {ratio} the longest trained problem: {list_names(best)},"
            f" {highest:.0%} right."
        )
    return ""


def _words_sentence(
    table: pd.DataFrame, name: str, words: Iterable[str], place: str = ""
) -> str:
    """Return a sentence on the schemes that have these words; empty if none has.

    `name`: the column of which the words are. `place`: what the sentence begins with.
    """
    if f"{name}_word" not in table:
        return ""
    parts = []
    for word in words:
        with_word = table[table[f"{name}_word"] == word]
        if with_word.empty:
            continue
        comparison = word
        if word != NOT_RESOLVED:
            comparison += f" than {table.attrs['reference']}"
        names = []
        for row in with_word.to_dict("records"):
            names.append(_name_and_difference(row, name, word))
        parts.append(f"{comparison}: {list_names(names, 2 * LONGEST_LABEL)}")
    if not parts:
        return ""
    text = place + "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _name_and_difference(row: dict[str, Any], name: str, word: str) -> str:
    """Return a scheme's label, and where its loss is judged the difference in nats."""
    label = short_label(row["label"])
    if name not in ("nll", "rise") or word == NOT_RESOLVED:
        return label
    return f"{label} {row[f'{name}_difference']:+.3f}"


def command_text(
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
    sweeps: list[list[str]] = []
    for folder in frame["folder"].unique():
        run = Path(folder)
        words = words_by_run(run.parent).get(run.name)
        if words and words not in sweeps:
            sweeps.append(words)
    return sweeps


def _seed_list(count: int) -> str:
    """Return the first seeds as they are typed: `0,1,2`."""
    return ",".join(map(str, range(count)))


def list_names(names: Sequence[str] | pd.Series, longest: int = LONGEST_LABEL) -> str:
    """Return names in one phrase, with a number in place of the last of many: `fox,
    alibi and 17 more`.
    """
    labels = [short_label(name, longest) for name in names]
    if labels == ["none"]:
        return "'none'"  # alone, none reads as nothing
    n_more = len(labels) - MOST_NAMED
    if n_more > 1:
        return f"{', '.join(labels[:MOST_NAMED])} and {n_more} more"
    return ", ".join(labels)
