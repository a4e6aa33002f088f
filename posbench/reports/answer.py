"""The short answer above a report's table: what is best, what holds, how sure that is,
and what to type next.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from posbench.reports.missing import (
    Missing,
    command_line,
    missing_on_task,
    missing_on_text,
)
from posbench.reports.tables import LONGEST_LABEL, compact_text, short_label
from posbench.results.compare import (
    ENDPOINT_RATIO,
    HALF,
    NOT_BEATEN,
    NOT_RESOLVED,
)
from posbench.terminal.exits import plural

MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Answer:
    """Sentences, and what to type next; empty: nothing, or nothing that is known."""

    sentences: Sequence[str]
    command: str


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
        parts.append(f"{compact_text(runs['parameters'].median())} parameters")

    data = first["text"] or "text"
    if first["trained_task"]:
        data = f"task {first['trained_task']}"
    tokens = runs["trained_tokens"].max()
    if not pd.isna(tokens):
        data = f"{compact_text(tokens)} tokens of {data}"
    parts.append(data)
    parts.append(f"training length {first['train_length']}")
    return ", ".join(parts)


def text_answer(frame: pd.DataFrame, table: pd.DataFrame) -> Answer:
    """Return the answer on the schemes of one setting; `table`: what
    `results.compare.compare` returns.
    """
    if not table.attrs["schemes"]:
        return Answer(["No run has a loss at its training length yet."], "")
    measured = table[table["nll"].notna()]
    is_unlearned = measured["learned"].isin(NOT_BEATEN)
    judged = measured[~is_unlearned]

    sentences = [_best_sentence(measured)]
    sentences += _reach_sentences(judged)
    if is_unlearned.any():
        unlearned = measured.loc[is_unlearned, "label"]
        sentences.append(_unlearned_sentence(measured, unlearned))
    unused = judged.loc[judged["uses_context"].isin(NOT_BEATEN), "label"]
    if len(unused):
        sentences.append(
            "Not shown to use more context than the n-gram model with the window:"
            f" {list_names(unused)}."
        )
    largest = table.attrs["largest_document"]
    if largest >= HALF:
        sentences.append(
            f"One document has {largest:.0%} of the targets: nothing is said of other"
            " text."
        )
    return _answer_with_missing(sentences, frame, missing_on_text(frame, table))


def _answer_with_missing(
    sentences: Sequence[str], frame: pd.DataFrame, missing: Missing
) -> Answer:
    """Return sentences, what verdicts lack, and the command that supplies it."""
    if not missing.parts:
        return Answer(sentences, "")
    sentence = f"Missing for verdicts: {', '.join(missing.parts)}."
    command = command_line(frame, missing)
    if command:
        sentence += " Type:"
    return Answer([*sentences, sentence], command)


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


def task_answer(frame: pd.DataFrame, table: pd.DataFrame) -> Answer:
    """Return the answer on the schemes of one setting; `table`: what
    `results.tasks.compare_tasks` returns.
    """
    if table.empty:
        return Answer(["No run was tested on its problems yet."], "")

    ranked = table[table["ranked"]]
    learned = list_names(ranked["label"]) or "none"
    best = _most_accurate_sentence(ranked)
    sentences = [f"Learned by most seeds: {learned}. {best}".rstrip()]

    for ratio in ("2x", "4x"):
        name = f"accuracy_{ratio}"
        words = _words_sentence(table, name, ("better", "worse"), f"at {ratio} ")
        if words:
            sentences.append(words)
    return _answer_with_missing(sentences, frame, missing_on_task(frame, table))


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
