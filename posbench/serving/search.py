"""`posbench evaluate RUN|MODEL extension=search length=N`: which method, with which factor, for N tokens?

Each candidate is scored on validation text at N tokens: by its loss, and by a retrieval probe. The one whose worse rank
is best is chosen, the lower loss among equals. Then plain and chosen are evaluated on test text, so that no number that
is reported had a part in the choice.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from posbench import machine
from posbench.config import overrides
from posbench.errors import UserError
from posbench.evaluation import printed
from posbench.huggingface.evaluate import evaluate_model
from posbench.huggingface.load import find
from posbench.launch import run
from posbench.report.render import Column, Table
from posbench.results import frame as frames
from posbench.run.run import load_config
from posbench.terminal import console

METHODS = ("yarn", "ntk_by_parts", "llama3", "ntk", "pi")
MORE = (1, 2)  # factors, in multiples of N / training length
PROBE = "passkey"
_LEAN = ("protocol=fixed_target", "evaluation.windowed=false")
Evaluate = Callable[[list[str]], Path]  # evaluates by words and returns the folder with the rows


def main(subjects: Sequence[str | Path], words: Sequence[str]) -> None:
    """Search for each run (a path) or HuggingFace model (its name)."""
    console.log_to_terminal()
    machine.keep_freed_memory()
    for subject in subjects:
        if isinstance(subject, Path):
            config = load_config(subject)
            search(functools.partial(_evaluate_run, subject), config.training.train_length, words, str(subject))
        else:
            typed = dict(word.split("=", 1) for word in words)
            length = int(typed.get("train_length") or find(subject).train_length or 0)
            search(functools.partial(_evaluate_model, subject), length, words, subject)


def _evaluate_run(folder: Path, words: list[str]) -> Path:
    run.evaluate(folder, overrides.apply(load_config(folder), words))
    return folder


def _evaluate_model(name: str, words: list[str]) -> Path:
    return evaluate_model(name, words)[0]


def candidates(ratio: float) -> list[str]:
    """Return the extensions that are tried for a length of so many training lengths."""
    factors = [f"{more * ratio:g}" for more in MORE]
    return [f"{method}:factor={factor}" for method in METHODS for factor in factors] + ["dynamic_ntk"]


def ranked(frame: pd.DataFrame, length: int) -> pd.DataFrame:
    """Return the candidates, best first: `extension`, `loss` and `right` at a length, `loss_at_1x`.

    Args:
        frame: rows of one run or model on one text; those of undefined candidates have no number.
    """
    rows = frame[frame["variant"] != "windowed"].assign(extension=frame["extension"].fillna("none"))

    def column(name: str, where: "pd.Series[bool]") -> "pd.Series[float]":
        return rows[where].drop_duplicates("extension", keep="last").set_index("extension")[name]

    of_text, far = (rows["protocol"] == "fixed_target") & rows["task"].isna(), rows["length"] == length
    columns = {
        "loss": column("nll", of_text & far),
        "right": column("accuracy", (rows["task"] == PROBE) & far),
        "loss_at_1x": column("nll", of_text & (rows["length_ratio"] == 1)),
    }
    table = pd.DataFrame(columns).dropna(subset="loss")
    ranks = pd.DataFrame({"loss": table["loss"].rank(), "right": table["right"].rank(ascending=False)})
    worse = ranks.max(axis=1)  # where the probe is undefined, the loss decides alone
    return table.assign(worse=worse).sort_values(["worse", "loss"]).rename_axis("extension").reset_index()


def search(evaluate: Evaluate, train_length: int, words: Sequence[str], name: str = "MODEL") -> str:
    """Choose an extension on validation text, evaluate it on test text, print both; return it, `none` if plain is best.

    Args:
        words: what was typed, with `extension=search` and one `length=`, in tokens.
        name: of the run or model.

    Raises:
        UserError: no length beyond training, or no candidate with a number there.
    """
    given = [word for word in words if word.partition("=")[0] not in ("extension", "length", "task", "split")]
    typed = dict(word.split("=", 1) for word in words)
    if not typed.get("length", "").isdigit() or int(typed["length"]) <= train_length:
        raise UserError(
            f"extension=search needs one length beyond the trained {train_length}: length={4 * train_length}"
        )
    length = int(typed["length"])
    lengths = f"length={train_length},{length}"
    tried = ",".join(candidates(length / train_length))
    folder = evaluate([*given, lengths, f"extension={tried}", f"task={PROBE}", "split=validation", *_LEAN])
    table = ranked(frames.read([folder], "validation"), length)
    if table.empty:
        raise UserError(f"no candidate has a number at {length} tokens: give more validation text, or a shorter length")
    best = str(table["extension"].iloc[0])
    columns = [
        Column("extension", "extension", "", text=True),
        Column("loss", f"loss at {length:,}", ".4f"),
        Column("right", f"{PROBE} right", ".0%"),
        Column("loss_at_1x", f"loss at {train_length:,}", ".4f"),
    ]
    legend = "validation text; best first, by the worse of its ranks in loss and retrieval"
    Table(f"extensions for {length:,} tokens", table, columns, legend).print(console.stdout())
    extension = [] if best == "none" else [f"extension={best}"]
    folder = evaluate([*given, lengths, *extension, f"task={PROBE}", "split=test"])
    printed.print_results(folder, "test")
    if extension:
        print(f"'posbench rope {name} {extension[0]} length={length} --write DIR' tells engines.")
    return best
