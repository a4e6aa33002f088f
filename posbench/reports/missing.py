"""What a report lacks for verdicts, and the one command that supplies all of it.

The command has the words of the sweep that made the runs, with other values of what is
missing.
"""

import contextlib
import dataclasses
import shlex
from pathlib import Path

import pandas as pd

from posbench.config.overrides import LENGTH, RATIOS, split, values
from posbench.errors import UserError
from posbench.results.compare import (
    ENDPOINT_RATIO,
    ENOUGH_SEEDS,
    NOT_BEATEN,
    REFERENCE,
    main_rows,
)
from posbench.results.comparison import Comparison, TaskComparison
from posbench.results.tasks import SEEDS_OF_TASK
from posbench.run.facts import NOT_FAILED
from posbench.run.folder import load_config
from posbench.run.speed import time_here
from posbench.run.sweeps import words_by_run
from posbench.terminal.console import plural

TOKENS = "training.tokens"
LONGER = 4  # factor on the training tokens, as a suggestion

Words = dict[str, str]  # what was typed, `ratio=1,2`, by full key


@dataclasses.dataclass
class Missing:
    """What verdicts lack."""

    parts: list[str] = dataclasses.field(default_factory=list)  # in words
    # values that supply it, by full key
    changes: dict[str, str] = dataclasses.field(default_factory=dict)
    reference: str = ""  # an encoding to be added


def missing_on_text(frame: pd.DataFrame, comparison: Comparison) -> Missing:
    """Return what verdicts on text lack; `comparison`: what `results.compare.compare`
    returns for rows `frame`.
    """
    missing = Missing()
    measured = comparison.measured
    needed = {1}
    if len(measured) > 1:
        needed.add(ENDPOINT_RATIO)
        counts = []
        for scheme, _ in measured:
            difference = scheme.nll_difference
            counts.append(scheme.seeds)
            if difference:  # over the seeds that the reference has, too
                paired = difference.interval
                counts.append(len(paired.seeds) if paired else 0)
        n_seeds = min(counts)
        if not comparison.silence and n_seeds < ENOUGH_SEEDS:
            missing.parts.append(f"seeds ({n_seeds} of {ENOUGH_SEEDS})")
            missing.changes["seed"] = _seed_list(frame, ENOUGH_SEEDS)
        if comparison.reference is None:
            missing.parts.append(f"a reference ({REFERENCE})")
            missing.reference = REFERENCE

    # lengths at which losses and rises are compared may not have been asked for
    ratios = set(main_rows(frame)["length_ratio"])
    if ratios and not needed <= ratios:
        lacking = ", ".join(f"{ratio}x" for ratio in sorted(needed - ratios))
        missing.parts.append(f"lengths ({lacking})")
        asked = sorted(ratios | {1, 2, ENDPOINT_RATIO})
        missing.changes[RATIOS] = ",".join(f"{ratio:g}" for ratio in asked)
    if any(numbers.learned in NOT_BEATEN for _, numbers in measured):
        _add_tokens(missing, frame)
    return missing


def missing_on_task(frame: pd.DataFrame, comparison: TaskComparison) -> Missing:
    """Return what verdicts on a task lack."""
    missing = Missing()
    n_seeds = min(scheme.seeds for scheme in comparison.schemes)
    if n_seeds < ENOUGH_SEEDS:
        missing.parts.append(
            f"seeds ({n_seeds} of {ENOUGH_SEEDS}, better {SEEDS_OF_TASK})"
        )
        missing.changes["seed"] = _seed_list(frame, SEEDS_OF_TASK)
    if not any(scheme.ranked for scheme in comparison.schemes):
        _add_tokens(missing, frame)
    return missing


def _add_tokens(missing: Missing, frame: pd.DataFrame) -> None:
    missing.parts.append(f"tokens ({LONGER} times as many)")
    tokens = frame["trained_tokens"].max()
    if not pd.isna(tokens):
        missing.changes[TOKENS] = str(int(tokens) * LONGER)


def _seed_list(frame: pd.DataFrame, needed: int) -> str:
    """Return the seeds of a frame and as many more as are needed, as they are typed.

    A seed of which a run failed is not counted: the same seed would fail again.
    """
    seeds = sorted(frame["seed"].unique())
    failed = frame.loc[~frame["run_status"].isin(NOT_FAILED), "seed"].unique()
    more = 0
    while len(seeds) - len(failed) < needed:
        if more not in seeds:
            seeds.append(more)
        more += 1
    return ",".join(map(str, sorted(seeds)))


def command_line(frame: pd.DataFrame, missing: Missing) -> str:
    """Return one line for a shell that makes a frame's runs with what is missing; empty
    if there is none.

    Runs that start from another run have its seed and go on from its tokens, so that
    none is known for them.
    """
    words = _words_of_sweep(frame)
    if not words or "start" in words:
        return ""
    for key, value in missing.changes.items():
        word = "ratio" if key == RATIOS else key
        words[key] = f"{word}={value}"
    if RATIOS in missing.changes:
        words.pop(LENGTH, None)

    if missing.reference:
        has_options = any(key.startswith("encoding.") for key in words)
        if has_options or "encoding" not in words:
            return ""
        names = values("encoding", split(words["encoding"])[1])
        if names != ["all"] and missing.reference not in names:
            names.append(missing.reference)
        words["encoding"] = f"encoding={','.join(names)}"
    return f"posbench sweep {shlex.join(words.values())}"


def time_needed(frame: pd.DataFrame, missing: Missing) -> str:
    """Return how many runs are missing and how long they train on this machine; empty
    if none is missing, or the frame is of a file and has no run folders.
    """
    runs = frame.drop_duplicates("folder")
    folders = [Path(folder).absolute() for folder in runs["folder"]]
    folders = [folder for folder in folders if folder.is_dir()]
    if not folders:
        return ""

    schemes = set(runs["label"])
    if missing.reference:
        schemes.add(missing.reference)  # its runs may be there, and have failed
    n_seeds = runs["seed"].nunique()
    if "seed" in missing.changes:
        n_seeds = len(missing.changes["seed"].split(","))
    n_runs = len(schemes) * n_seeds
    tokens = runs["trained_tokens"].astype(float).max()
    if TOKENS in missing.changes:
        tokens = float(missing.changes[TOKENS])
    else:
        is_done = (runs["run_status"] == "done") & ~runs["repeated"]
        n_runs -= is_done.sum()
    if n_runs <= 0:
        return ""

    sentence = f"{plural(n_runs, 'run')} to do for this table."
    with contextlib.suppress(UserError):  # this version cannot read the settings
        work = [(load_config(folders[0]), n_runs * tokens)]  # all have one size
        outputs = {folder.parent.parent for folder in folders}
        sentence += f" {time_here(work, outputs)}"
    return sentence


def _words_of_sweep(frame: pd.DataFrame) -> Words:
    """Return what the one sweep of a frame's runs was typed with, else the words of one
    that would make them all; empty if they differ in more than encoding and seed, or
    the command of one is not known.
    """
    runs = frame.drop_duplicates("folder")
    sweeps = []
    for folder in map(Path, runs["folder"]):
        words = words_by_run(folder.parent).get(folder.name, [])
        if words not in sweeps:
            sweeps.append(words)
    if len(sweeps) == 1 and sweeps[0]:
        return {split(word)[0]: word for word in sweeps[0]}

    if not runs["command"].fillna("").all():  # trials of learning rates have none
        return {}
    encodings = list[str]()
    seeds = list[str]()
    others = []
    for run in runs.to_dict("records"):
        typed = shlex.split(run["command"])[2:]
        words_of_run = {split(word)[0]: word for word in typed}
        encoding = words_of_run.pop("encoding", f"encoding={run['encoding']}")
        seed = words_of_run.pop("seed", f"seed={run['seed']}")
        encodings.append(encoding.partition("=")[2])
        seeds.append(seed.partition("=")[2])
        others.append(words_of_run)
    shared = others[0]
    if others.count(shared) < len(others):
        return {}
    encoding = ",".join(dict.fromkeys(encodings))
    seed = ",".join(dict.fromkeys(seeds))
    return {"encoding": f"encoding={encoding}", "seed": f"seed={seed}", **shared}
