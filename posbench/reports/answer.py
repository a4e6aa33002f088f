"""The short answer above a report's table: what is best, what holds, how sure that is,
and what to type next.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from posbench.reports.missing import (
    Missing,
    command_line,
    missing_on_task,
    missing_on_text,
    time_needed,
)
from posbench.reports.tables import LONGEST_LABEL, compact_text, short_label
from posbench.results.compare import ENDPOINT_RATIO, ENOUGH_SEEDS, NOT_BEATEN
from posbench.results.comparison import (
    Comparison,
    Difference,
    Numbers,
    Scheme,
    TaskComparison,
)
from posbench.results.words import NOT_RESOLVED
from posbench.terminal.console import plural

Found = dict[str, list[str]]  # names of schemes by the word that they have
MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Answer:
    """Sentences, what to type next, and how long that takes; empty: nothing, or nothing
    that is known.
    """

    sentences: Sequence[str]
    command: str
    time: str = ""

    @property
    def lines(self) -> list[str]:
        """All of it, in the order in which it is read."""
        return [*self.sentences, *filter(None, [self.command, self.time])]


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


def text_answer(frame: pd.DataFrame, comparison: Comparison) -> Answer:
    """Return the answer on the schemes of one setting; `comparison`: what
    `results.compare.compare` returns for rows `frame`.
    """
    measured = comparison.measured
    missing = missing_on_text(frame, comparison)
    if not measured:
        sentence = "No run has a loss at its training length yet."
        return _answer_with_missing([sentence], frame, missing)
    unlearned = []
    judged = []
    unbeaten = []
    for scheme, numbers in measured:
        if numbers.learned in NOT_BEATEN:
            unlearned.append(scheme.label)
            continue
        judged.append((scheme, numbers))
        if numbers.beats_reader in NOT_BEATEN:
            unbeaten.append(scheme.label)

    best, lowest = measured[0]
    has_others = len(measured) > 1
    result = "the lowest loss" if has_others else "a loss of"
    sentence = (
        f"At {comparison.train_length} tokens {short_label(best.label)} has"
        f" {result} {lowest.nll:.3f}"
    )
    if has_others and comparison.reference is None:
        sentence += "; without a reference (--reference NAME) no difference is judged."
    else:
        gaps = {scheme.label: scheme.nll_difference for scheme, _ in measured}
        found = _amounts_by_word(gaps)
        words = ("better", "worse", NOT_RESOLVED)
        compared = _words_sentence(found, words, comparison.reference)
        sentence = f"{sentence}. {compared}".rstrip()

    sentences = [sentence]
    sentences += _reach_sentences(comparison, judged)
    if unlearned:
        text = "Not shown to have learned more than an n-gram model"
        if "ngram" in comparison.readers:
            text += f" ({comparison.readers['ngram']:.3f})"
        sentences.append(f"{text}: {list_names(unlearned)}.")
    if unbeaten:
        sentences.append(
            "Not shown to beat a simple reader of the same window:"
            f" {list_names(unbeaten)}."
        )
    if comparison.silence:
        why = comparison.silence[0].upper() + comparison.silence[1:]
        sentences.append(f"{why}: nothing is said of other text.")
    return _answer_with_missing(sentences, frame, missing)


def _answer_with_missing(
    sentences: Sequence[str], frame: pd.DataFrame, missing: Missing
) -> Answer:
    """Return sentences, what verdicts lack, and the command that supplies it."""
    if not missing.parts:
        return Answer(sentences, "")
    sentence = f"Missing for verdicts: {', '.join(missing.parts)}."
    command = command_line(frame, missing)
    if not command:
        return Answer([*sentences, sentence], "")
    time = time_needed(frame, missing)
    return Answer([*sentences, f"{sentence} Type:"], command, time)


def _reach_sentences(
    comparison: Comparison, judged: Sequence[tuple[Scheme, Numbers]]
) -> list[str]:
    """Return a line on how far schemes hold, the farthest first; none where no scheme
    is known to.
    """
    by_reach: dict[tuple[float, bool], list[str]] = {}
    for scheme, numbers in judged:
        if numbers.holds_to is not None:
            ratio = numbers.holds_to / comparison.train_length
            is_open = bool(numbers.holds_at_longest) and ratio > 1
            by_reach.setdefault((ratio, is_open), []).append(scheme.label)
    if not by_reach:
        return []

    parts = []
    farthest_first = sorted(by_reach.items(), key=lambda item: -item[0][0])
    for (ratio, is_open), labels in farthest_first:
        least = "at least " if is_open else ""
        parts.append(f"{list_names(labels)} to {least}{ratio:g}x")
    found = _amounts_by_word({each.label: each.rise_difference for each, _ in judged})
    words = _words_sentence(
        found,
        ("rises less", "rises more"),
        comparison.reference,
        f"at {ENDPOINT_RATIO}x ",
    )
    holds = "Holds"
    if min(scheme.seeds for scheme, _ in judged) < ENOUGH_SEEDS:
        holds = "Holds, these checkpoints alone"  # no word on other seeds
    return [f"{holds}: {'; '.join(parts)}. {words}".rstrip()]


def task_answer(frame: pd.DataFrame, comparison: TaskComparison | None) -> Answer:
    """Return the answer on the schemes of one setting; `comparison`: what
    `results.tasks.compare_tasks` returns for rows `frame`.
    """
    if comparison is None:
        return Answer(["No run was tested on its problems yet."], "")

    ranked = [scheme for scheme in comparison.schemes if scheme.ranked]
    learned = list_names([scheme.label for scheme in ranked]) or "none"
    sentence = f"Learned by most seeds: {learned}."
    # which answer best on the longest problems that were measured
    for ratio in (4, 2):
        medians = {}
        for scheme in ranked:
            share = scheme.shares.get(ratio)
            if share and not math.isnan(share.median):
                medians[scheme.label] = share.median
        if medians:
            highest = max(medians.values())
            best = [label for label, median in medians.items() if median == highest]
            sentence += f" Best at {ratio}x the longest trained problem:"
            sentence += f" {list_names(best)}, {highest:.0%} right."
            break
    sentences = [sentence, *comparison.remarks]

    for ratio in (2, 4):
        found: Found = {}
        for scheme in comparison.schemes:
            if ratio in scheme.tests:
                of_word = found.setdefault(scheme.tests[ratio].word, [])
                of_word.append(short_label(scheme.label))
        words = _words_sentence(
            found, ("better", "worse"), comparison.reference, f"at {ratio}x "
        )
        if words:
            sentences.append(words)
    return _answer_with_missing(sentences, frame, missing_on_task(frame, comparison))


def _amounts_by_word(differences: Mapping[str, Difference | None]) -> Found:
    """Return the labels by word, with the difference in nats where it is resolved."""
    found: Found = {}
    for label, difference in differences.items():
        if difference is None:
            continue
        name = short_label(label)
        if difference.word != NOT_RESOLVED and difference.interval:
            name += f" {difference.interval:+.3f}"
        found.setdefault(difference.word, []).append(name)
    return found


def _words_sentence(
    found: Found, words: Iterable[str], reference: str | None, place: str = ""
) -> str:
    """Return a sentence on the schemes that have these words; empty if none has.

    `place`: what the sentence begins with.
    """
    parts = []
    for word in words:
        if word not in found:
            continue
        comparison = word
        if word != NOT_RESOLVED:
            comparison += f" than {reference}"
        parts.append(f"{comparison}: {list_names(found[word], 2 * LONGEST_LABEL)}")
    if not parts:
        return ""
    text = place + "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def list_names(names: Sequence[str], longest: int = LONGEST_LABEL) -> str:
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
