"""The short answer above a report's table: what is best, what holds, how sure that is, and what to type next."""

import shlex
from collections.abc import Iterable

import pandas as pd

from posbench.report.tables import cut
from posbench.results.compare import ENDPOINT_RATIO, ENOUGH_SEEDS, HALF, NOT_RESOLVED, may_claim
from posbench.terminal.exits import plural

MOST_NAMED = 5
LONGER = 4  # times the training that is suggested to models that have not learned


def facts(frame: pd.DataFrame) -> str:
    """Return what was run: `6 encodings, 5 seeds, 1.05M parameters, 4M tokens of builtin, training length 128`."""
    runs = frame[~frame["repeated"]].drop_duplicates("folder")
    done = runs[runs["run_status"] == "done"]
    first = (done if len(done) else runs).iloc[0]
    parts = [plural(runs["label"].nunique(), "encoding"), plural(runs["seed"].nunique(), "seed")]
    parts += [] if pd.isna(first["parameters"]) else [f"{first['parameters'] / 1e6:.3g}M parameters"]
    about = f"task {first['trained_task']}" if first["trained_task"] else first["text"] or "text"
    tokens = "" if pd.isna(first["trained_tokens"]) else f"{first['trained_tokens'] / 1e6:.3g}M tokens of "
    return f"{', '.join(parts)}, {tokens}{about}, training length {first['train_length']}"


def of_text(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on schemes that were compared on text.

    Args:
        frame: of one setting.
        table: of `results.compare.compare`.
    """
    if not table.attrs["schemes"]:
        return ["No run has a loss at its training length yet." + command(frame, {}, "To continue, type")]
    shown = table[table["nll"].notna()]
    judged = shown["learned"].map(may_claim).astype(bool)
    lines = [_at_one(shown), *_beyond(shown[judged])]
    if len(less := shown[judged & shown["uses_context"].isin(["no", NOT_RESOLVED])]):
        lines.append(f"Not shown to use more context than a cached n-gram model: {listed(less['label'])}.")
    seeds, tokens = int(shown["seeds"].min()), frame["trained_tokens"].max()
    if table.attrs["largest_document"] >= HALF:
        share = f"{table.attrs['largest_document']:.0%}"
        lines.append(f"One document has {share} of the targets: nothing is said of other text.")
    elif seeds < ENOUGH_SEEDS and len(shown) > 1:
        more = command(frame, {"seed": ",".join(map(str, range(ENOUGH_SEEDS)))})
        lines.append(f"How sure: {plural(seeds, 'seed')} cannot tell of others; words need {ENOUGH_SEEDS}.{more}")
    if len(unlearned := shown[~judged]):
        loss = f" ({shown['ngram'].median():.3f})" if shown["ngram"].notna().any() else ""
        longer = "" if pd.isna(tokens) else command(frame, {"training.tokens": str(int(tokens) * LONGER)})
        names = listed(unlearned["label"])
        lines.append(f"Not shown to have learned more than an n-gram model{loss}: {names}.{longer}")
    return lines


def _at_one(shown: pd.DataFrame) -> str:
    """Return what is best at the training length, and how it differs from the reference."""
    best = shown.iloc[0]
    which = "the lowest loss" if len(shown) > 1 else "a loss of"
    text = f"At {shown.attrs['train_length']} tokens {cut(best['label'])} has {which} {best['nll']:.3f}"
    if len(shown) > 1 and shown.attrs["reference"] is None:
        return f"{text}; without a reference (--reference NAME) no difference is judged."
    return " ".join([f"{text}.", *_words(shown, "nll", ("better", "worse", NOT_RESOLVED))])


def _beyond(judged: pd.DataFrame) -> list[str]:
    """Return how far schemes hold and where they rise less than the reference, if longer contexts were measured."""
    if "holds_to" not in judged or judged["holds_to"].isna().all():
        return []
    held: dict[str, list[str]] = {}
    for row in (
        judged.dropna(subset="holds_to").sort_values("holds_to", ascending=False, kind="stable").to_dict("records")
    ):
        ratio = row["holds_to"] / judged.attrs["train_length"]
        further = " at least" if row["holds_further"] is True and ratio > 1 else ""
        held.setdefault(f"to{further} {ratio:g}x", []).append(row["label"])
    first = "; ".join(f"{listed(labels)} {far}" for far, labels in held.items())
    words = _words(judged, "rise", ("rises less", "rises more"), f"at {ENDPOINT_RATIO}x ")
    return [" ".join([f"Holds: {first}.", *words])]


def of_task(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Return a few sentences on schemes that were compared on a task.

    Args:
        frame: of one setting.
        table: of `results.tasks.compare_tasks`.
    """
    if not len(table):
        return ["No run was tested on its problems yet." + command(frame, {}, "To continue, type")]
    ranked = table[table["ranked"]]
    lines = [f"Learned by most seeds: {listed(ranked['label']) or 'none'}."]
    measured = [name for name in ("accuracy_4x", "accuracy_2x") if name in ranked and ranked[name].notna().any()]
    for name in measured[:1]:
        best = ranked.loc[ranked[name].idxmax()]
        lines[0] += f" At {name[9:]} the longest trained problem {best['label']} is best, {best[name]:.0%} right."
    for ratio in ("2x", "4x"):
        lines += _words(table, f"accuracy_{ratio}", ("better", "worse"), f"at {ratio} ")
    if table["seeds"].min() < ENOUGH_SEEDS:
        lines.append(f"Words need {ENOUGH_SEEDS} seeds, better ten.{command(frame, {'seed': '0,1,2,3,4,5,6,7,8,9'})}")
    return lines


def _words(table: pd.DataFrame, name: str, words: Iterable[str], at: str = "") -> list[str]:
    """Return a sentence on the schemes that have these words, with their differences in nats; none without any."""
    parts = []
    for word in words if f"{name}_word" in table else ():
        rows = table[table[f"{name}_word"] == word].to_dict("records")
        form = " {:+.3f}" if name in ("nll", "rise") and word != NOT_RESOLVED else ""
        names = [cut(row["label"]) + form.format(row[f"{name}_difference"]) for row in rows]
        than = "" if word == NOT_RESOLVED else f" than {table.attrs['reference']}"
        parts += [f"{word}{than}: {listed(names)}"] if names else []
    text = at + "; ".join(parts)
    return [f"{text[0].upper()}{text[1:]}."] if parts else []


def command(frame: pd.DataFrame, values: dict[str, str], invitation: str = "Type") -> str:
    """Return what to type for the runs of a frame with other values; empty if they have no command."""
    asked: dict[str, list[str]] = {}
    for text in frame.drop_duplicates("folder")["command"].dropna().unique():
        words = shlex.split(text)
        if words[:2] != ["posbench", "train"] or any(word.startswith("-") for word in words):
            return ""
        for word in words[2:]:
            key, _, value = word.partition("=")
            if value not in asked.setdefault(key, []):
                asked[key].append(value)
    if not asked or any("," in value or "[" in value for given in asked.values() for value in given):
        return ""
    merged = {key: ",".join(given) for key, given in asked.items()} | values
    return f" {invitation}:\n  posbench sweep {shlex.join(f'{key}={value}' for key, value in merged.items())}"


def listed(names: Iterable[str]) -> str:
    """Return names in one phrase, of many only the first: `fox, alibi and 17 more`."""
    every = [cut(name) for name in names]
    more = len(every) - MOST_NAMED
    return f"{', '.join(every[:MOST_NAMED])} and {more} more" if more > 1 else ", ".join(every)
