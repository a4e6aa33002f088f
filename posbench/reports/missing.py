"""What a report lacks for verdicts, and the one command that supplies all of it.

The command has the words of the sweeps that made the runs, or of their `train`
commands, with other values of what is missing.
"""

import dataclasses
import shlex
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from posbench.config.overrides import LENGTH, RATIOS, split, values
from posbench.reports.sweeps import words_by_run
from posbench.results.compare import (
    ENDPOINT_RATIO,
    ENOUGH_SEEDS,
    ENOUGH_SEEDS_IN_GROUPS,
    HALF,
    NOT_BEATEN,
    REFERENCE,
    main_rows,
)

ENOUGH_SEEDS_OF_TASKS = 10  # as a suggestion: words need `ENOUGH_SEEDS`
LONGER = 4  # factor on the training tokens, as a suggestion
MOST_COMMANDS = 3  # in one line; runs that need more have none
# Values of these keys are joined where two commands are otherwise the same.
_JOINED = ("encoding", "seed")
_UNFINISHED = ("done", "running", "stopped", "died")

Words = dict[str, str]  # what was typed, `ratio=1,2`, by full key


@dataclasses.dataclass
class Missing:
    """What verdicts lack."""

    parts: list[str] = dataclasses.field(default_factory=list)  # in words
    # values that supply it, by full key
    changes: dict[str, str] = dataclasses.field(default_factory=dict)
    reference: str = ""  # an encoding to be added


def missing_on_text(frame: pd.DataFrame, table: pd.DataFrame) -> Missing:
    """Return what verdicts on text lack; `table`: what `results.compare.compare`
    returns for rows `frame`.
    """
    missing = Missing()
    measured = table[table["nll"].notna()]
    if len(measured) > 1:
        if table.attrs["largest_document"] < HALF:
            _add_seeds(missing, frame, measured)
        if table.attrs["reference"] is None:
            missing.parts.append(f"a reference ({REFERENCE})")
            missing.reference = REFERENCE
        _add_lengths(missing, frame)
    if measured["learned"].isin(NOT_BEATEN).any():
        _add_tokens(missing, frame)
    return missing


def missing_on_task(frame: pd.DataFrame, table: pd.DataFrame) -> Missing:
    """Return what verdicts on a task lack; `table`: what
    `results.tasks.compare_tasks` returns.
    """
    missing = Missing()
    n_seeds = int(table["seeds"].min())
    if n_seeds < ENOUGH_SEEDS:
        missing.parts.append(
            f"seeds ({n_seeds} of {ENOUGH_SEEDS}, better {ENOUGH_SEEDS_OF_TASKS})"
        )
        missing.changes["seed"] = _seed_list(frame, ENOUGH_SEEDS_OF_TASKS)
    if not table["ranked"].any():
        _add_tokens(missing, frame)
    return missing


def _add_seeds(missing: Missing, frame: pd.DataFrame, measured: pd.DataFrame) -> None:
    needed = ENOUGH_SEEDS
    for name in ("nll_why", "rise_why"):
        if name in measured and measured[name].str.contains("two groups").any():
            needed = ENOUGH_SEEDS_IN_GROUPS
    n_seeds = int(measured["seeds"].min())
    if n_seeds >= needed:
        return
    part = f"seeds ({n_seeds} of {needed}"
    if frame["settings"].str.contains('"start.run"', na=False).any():
        part += ", each from a run of its own"
    missing.parts.append(f"{part})")
    missing.changes["seed"] = _seed_list(frame, needed)


def _add_lengths(missing: Missing, frame: pd.DataFrame) -> None:
    """Add the length at which rises are compared, unless it was asked for."""
    ratios = set(main_rows(frame)["length_ratio"])
    if ENDPOINT_RATIO in ratios:
        return
    missing.parts.append(f"lengths (to {ENDPOINT_RATIO}x)")
    asked = sorted(ratios | {1, 2, ENDPOINT_RATIO})
    missing.changes[RATIOS] = ",".join(f"{ratio:g}" for ratio in asked)


def _add_tokens(missing: Missing, frame: pd.DataFrame) -> None:
    missing.parts.append(f"tokens ({LONGER} times as many)")
    tokens = frame["trained_tokens"].max()
    if not pd.isna(tokens):
        missing.changes["training.tokens"] = str(int(tokens) * LONGER)


def _seed_list(frame: pd.DataFrame, needed: int) -> str:
    """Return the seeds of a frame and as many more as are needed, as they are typed.

    A seed of which a run failed is not counted: the same seed would fail again.
    """
    seeds = sorted(frame["seed"].unique())
    failed = frame.loc[~frame["run_status"].isin(_UNFINISHED), "seed"].unique()
    more = 0
    while len(seeds) - len(failed) < needed:
        if more not in seeds:
            seeds.append(more)
        more += 1
    return ",".join(map(str, sorted(seeds)))


def command_line(frame: pd.DataFrame, missing: Missing) -> str:
    """Return one line for a shell that makes a frame's runs with what is missing; empty
    if there is none.
    """
    sweeps = []
    for words in _sweeps(frame):
        supplied = _supplied(words, missing)
        if supplied != words or not missing.parts:
            sweeps.append(supplied)
    sweeps = _joined(sweeps)
    if len(sweeps) > MOST_COMMANDS:
        return ""
    commands = [f"posbench sweep {shlex.join(words.values())}" for words in sweeps]
    return " && ".join(commands)


def _sweeps(frame: pd.DataFrame) -> list[Words]:
    """Return the words of the sweeps that a frame's runs are of, each sweep once; of a
    run without a sweep those of its own command.
    """
    sweeps: list[Words] = []
    runs = frame.drop_duplicates("folder")
    for folder, command in zip(runs["folder"], runs["command"], strict=True):
        run = Path(folder)
        words = words_by_run(run.parent).get(run.name)
        if words is None:
            words = shlex.split(command or "")[2:]  # after `posbench train`
        by_key = {split(word)[0]: word for word in words}
        if by_key and by_key not in sweeps:
            sweeps.append(by_key)
    return sweeps


def _supplied(words: Words, missing: Missing) -> Words:
    """Return the words of a sweep with what is missing.

    Runs that start from another run have its seed and go on from its tokens, so that
    only their lengths may be changed here.
    """
    words = dict(words)
    for key, value in missing.changes.items():
        if key == RATIOS:
            words.pop(LENGTH, None)
            words[key] = f"ratio={value}"
        elif "start" not in words:
            words[key] = f"{key}={value}"

    has_options = any(key.startswith("encoding.") for key in words)
    if missing.reference and "encoding" in words and not has_options:
        encodings = values("encoding", split(words["encoding"])[1])
        words["encoding"] = _word("encoding", [*encodings, missing.reference])
    return words


def _joined(sweeps: Iterable[Words]) -> list[Words]:
    """Return sweeps that together make the same runs: two that differ only in their
    encodings, or only in their seeds, as one.
    """
    for key in _JOINED:
        by_others: dict[tuple[str, ...], Words] = {}
        for words in sweeps:
            others = tuple(sorted(word for name, word in words.items() if name != key))
            first = by_others.setdefault((str(key in words), *others), dict(words))
            if key in words:
                texts = f"{split(first[key])[1]},{split(words[key])[1]}"
                first[key] = _word(key, values(key, texts))
        sweeps = by_others.values()
    return list(sweeps)


def _word(key: str, texts: Iterable[str]) -> str:
    """Return values as one word, each once."""
    return f"{key}={','.join(dict.fromkeys(texts))}"
