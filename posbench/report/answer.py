"""The short answer above a report's table: what is best, what holds, how sure that is, and what to type next."""

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from posbench.report.tables import cut
from posbench.results.compare import ENDPOINT_RATIO, ENOUGH_SEEDS, HALF, NOT_RESOLVED, Losses, main_rows, may_claim
from posbench.results.tasks import task_rows
from posbench.terminal.exits import plural

MOST_NAMED = 5
LONGER = 4  # times the training that is suggested to models that have not learned


def facts(frame: pd.DataFrame) -> str:
    """Return what was run: `six: 6 encodings, 5 seeds, 1.05M parameters, 4M tokens of builtin at 128 tokens`."""
    runs = frame[~frame["repeated"]].drop_duplicates("folder")
    done = runs[runs["run_status"] == "done"]
    first = (done if len(done) else runs).iloc[0]
    parts = [plural(runs["label"].nunique(), "encoding"), plural(runs["seed"].nunique(), "seed")]
    if first["parameters"] is not None and not pd.isna(first["parameters"]):
        parts.append(f"{first['parameters'] / 1e6:.3g}M parameters")
    about = f"task {first['trained_task']}" if first["trained_task"] else first["text"] or "text"
    if not pd.isna(first["trained_tokens"]):
        about = f"{first['trained_tokens'] / 1e6:.3g}M tokens of {about}"
    return f"{', '.join(parts)}, {about}, training length {first['train_length']}"


def of_text(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return at most four sentences on schemes that were compared on text.

    Args:
        frame: of one setting.
        table: of `results.compare.compare`.
    """
    if not table.attrs["schemes"]:
        return ["No run has a loss at its training length yet." + _again(frame)]
    shown = table[table["nll"].notna()]
    gates = shown["learned"].where(shown["learned"].notna(), None)
    judged = shown[[may_claim(gate) for gate in gates]]
    lines = [_at_one(shown, table.attrs)]
    if beyond := _beyond(judged, table.attrs):
        lines.append(beyond)
    if len(less := judged[judged["uses_context"].isin(["no", NOT_RESOLVED])]):
        lines.append(f"Not shown to use more context than a cached n-gram model: {listed(less['label'])}.")
    losses = Losses(main_rows(frame))
    if losses.largest_document >= HALF:
        lines.append(f"One document has {losses.largest_document:.0%} of the targets: nothing is said of other text.")
    elif shown["seeds"].min() < ENOUGH_SEEDS and len(shown) > 1:
        asked = ",".join(map(str, range(ENOUGH_SEEDS)))
        lines.append(
            f"How sure: {plural(int(shown['seeds'].min()), 'seed')} cannot tell of others; words need {ENOUGH_SEEDS}."
            f"{command(frame, {'seed': asked})}"
        )
    if len(unlearned := shown[~shown.index.isin(judged.index)]):
        ngram = f" ({shown['ngram'].median():.3f})" if shown["ngram"].notna().any() else ""
        steps = {"training.tokens": str(_tokens(frame) * LONGER)} if _tokens(frame) else {}
        lines.append(
            f"Not shown to have learned more than an n-gram model{ngram}: {listed(unlearned['label'])}."
            f"{command(frame, steps) if steps else ''}"
        )
    return lines


def _at_one(shown: pd.DataFrame, attrs: Mapping[Any, Any]) -> str:
    """Return the sentence on the training length."""
    best, base = shown.iloc[0], attrs["reference"]
    which = "the lowest loss" if len(shown) > 1 else "a loss of"
    text = f"At {attrs['train_length']} tokens {cut(best['label'])} has {which} {best['nll']:.3f}"
    if len(shown) == 1:
        return f"{text}."
    if base is None:
        return f"{text}; without a reference (--reference NAME) no difference is judged."
    parts = [
        f"{word} than {base}: {listed(_by(shown, 'nll', word))}"
        for word in ("better", "worse")
        if _by(shown, "nll", word)
    ]
    if open_ := _labels(shown, "nll_word", NOT_RESOLVED):
        parts.append(f"not resolved: {listed(open_)}")
    return f"{text}. {'; '.join(parts)[:1].upper()}{'; '.join(parts)[1:]}." if parts else f"{text}."


def _beyond(judged: pd.DataFrame, attrs: Mapping[Any, Any]) -> str:
    """Return the sentence on longer contexts; empty if none was measured or nothing may be said."""
    if "holds_to" not in judged or judged["holds_to"].isna().all():
        return ""
    length, base = attrs["train_length"], attrs["reference"]
    held: dict[str, list[str]] = {}
    for row in (
        judged[judged["holds_to"].notna()].sort_values("holds_to", ascending=False, kind="stable").to_dict("records")
    ):
        further = " at least" if row["holds_further"] is True and row["holds_to"] > length else ""
        held.setdefault(f"to{further} {row['holds_to'] / length:g}x", []).append(row["label"])
    parts = [f"{listed(labels)} {far}" for far, labels in held.items()]
    sentences = [f"Holds: {'; '.join(parts)}."]
    words = [
        f"{word} than {base}: {listed(_by(judged, 'rise', word))}"
        for word in ("rises less", "rises more")
        if _by(judged, "rise", word)
    ]
    sentences += [f"At {ENDPOINT_RATIO}x {'; '.join(words)}."] if words else []
    return " ".join(sentences)


def of_task(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return at most three sentences on schemes that were compared on a task."""
    if not len(table):
        return ["No run was tested on its problems yet." + _again(frame)]
    rows = task_rows(frame)
    ranked = table[table["ranked"]]
    lines = [f"Learned by most seeds: {listed(ranked['label']) or 'none'}."]
    for ratio in (4, 2):
        name = f"accuracy_{ratio}x"
        if name in ranked and ranked[name].notna().any():
            best = ranked.loc[ranked[name].idxmax()]
            lines[0] += f" At {ratio}x the longest trained problem {best['label']} is best, {best[name]:.0%} right."
            break
    words = [
        f"{word} than {table.attrs['reference']} at {ratio}x: {listed(labels)}"
        for ratio in (2, 4)
        for word in ("better", "worse")
        if (labels := _labels(table, f"accuracy_{ratio}x_word", word))
    ]
    lines += [f"{'; '.join(words)[:1].upper()}{'; '.join(words)[1:]}."] if words else []
    if rows.drop_duplicates("folder").groupby("label").size().min() < ENOUGH_SEEDS:
        lines.append(f"Words need {ENOUGH_SEEDS} seeds, better ten.{command(frame, {'seed': '0,1,2,3,4,5,6,7,8,9'})}")
    return lines


def command(frame: pd.DataFrame, values: dict[str, str]) -> str:
    """Return what to type for the runs of a frame with other values; empty if they have no command."""
    asked: dict[str, list[str]] = {}
    for text in dict.fromkeys(frame.drop_duplicates("folder")["command"].dropna()):
        words = shlex.split(text)
        if words[:2] != ["posbench", "train"] or any(word.startswith("-") for word in words):
            return ""
        for word in words[2:]:
            key, _, value = word.partition("=")
            if value not in asked.setdefault(key, []):
                asked[key].append(value)
    if not asked or any("," in value or "[" in value for values_ in asked.values() for value in values_):
        return ""
    merged = {key: ",".join(each) for key, each in asked.items()} | values
    return f" Type:\n  posbench sweep {shlex.join(f'{key}={value}' for key, value in merged.items())}"


def _again(frame: pd.DataFrame) -> str:
    return command(frame, {}).replace("Type:", "To continue, type:")


def _tokens(frame: pd.DataFrame) -> int:
    known = frame["trained_tokens"].dropna()
    return int(known.max()) if len(known) else 0


def _labels(table: pd.DataFrame, column: str, word: str) -> list[str]:
    return list(table.loc[table[column] == word, "label"]) if column in table else []


def _by(table: pd.DataFrame, name: str, word: str) -> list[str]:
    """Return the schemes with this word, each with its difference."""
    if f"{name}_word" not in table:
        return []
    rows = table[table[f"{name}_word"] == word]
    return [f"{cut(row['label'])} {row[f'{name}_difference']:+.3f}" for row in rows.to_dict("records")]


def listed(names: Iterable[str]) -> str:
    """Return names in one phrase, of many only the first: `fox, alibi and 17 more`."""
    every = [cut(name) for name in names]
    if len(every) > MOST_NAMED + 1:
        return f"{', '.join(every[:MOST_NAMED])} and {len(every) - MOST_NAMED} more"
    return ", ".join(every)
