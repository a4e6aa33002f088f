"""`posbench evaluate RUN|MODEL extension=search length=N`: which method, with which factor, for N tokens?

Each candidate is scored on validation text at N tokens: by its loss, and by a retrieval probe. The one whose worse rank
is best is chosen, the lower loss among equals. Then plain and chosen are evaluated on test text, so that no number that
is reported had a part in the choice.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from posbench import machine
from posbench.config import overrides
from posbench.errors import UserError
from posbench.evaluation import printed
from posbench.evaluation.job import evaluate_run
from posbench.huggingface.evaluate import evaluate_model
from posbench.huggingface.load import find
from posbench.report.render import Column, Table
from posbench.results import frame as frames
from posbench.run.run import load_config
from posbench.terminal import console

METHODS = ("yarn", "ntk_by_parts", "llama3", "ntk", "pi")
MORE = (1, 2)  # factors, in multiples of N / training length
PROBE = "passkey"
_LEAN = ("protocol=fixed_target", "evaluation.windowed=false", "evaluation.sinks=0")


def candidates(ratio: float) -> list[str]:
    """Return the extensions that are tried for a length of so many training lengths."""
    factors = [f"{more * ratio:g}" for more in MORE]
    return [f"{method}:factor={factor}" for method in METHODS for factor in factors] + ["dynamic_ntk"]


def ranked(frame: pd.DataFrame, length: int) -> pd.DataFrame:
    """Return the candidates, best first: `extension`, `loss` and `right` at a length, `loss_at_1x`.

    `frame`: rows of one run or model on one text; those of undefined candidates have no number.
    """
    rows = frame[~frame["variant"].isin(("windowed", "sinks"))].assign(extension=frame["extension"].fillna("none"))

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


def search(subject: str | Path, words: Sequence[str]) -> None:
    """Choose an extension for a run (a path) or a HuggingFace model (its name) on validation text; evaluate it on test.

    `words`: what was typed, with `extension=search` and one `length=`, in tokens.

    Raises UserError if no length is beyond training, or no candidate has a number there.
    """
    console.log_to_terminal()
    machine.keep_freed_memory()
    typed = overrides.by_key(words)
    typed.pop("evaluation.extensions")
    wanted = typed.pop(overrides.LENGTH, "")
    given = [f"{key}={text}" for key, text in typed.items() if key not in ("evaluation.tasks", "evaluation.split")]
    if isinstance(subject, Path):
        train_length = load_config(subject).training.train_length
    else:
        train_length = int(typed.get("train_length") or find(subject).train_length or 0)
    if not wanted.isdigit() or int(wanted) <= train_length:
        raise UserError(
            f"extension=search needs one length beyond the trained {train_length}: length={4 * train_length}"
        )
    length = int(wanted)
    lengths = f"length={train_length},{length}"
    tried = ",".join(candidates(length / train_length))
    folder = _evaluated(subject, [*given, lengths, f"extension={tried}", f"task={PROBE}", "split=validation", *_LEAN])
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
    folder = _evaluated(subject, [*given, lengths, *extension, f"task={PROBE}", "split=test"])
    printed.print_results(folder, "test")
    if extension:
        print(f"'posbench rope {subject} {extension[0]} length={length} --write DIR' tells engines.")


def _evaluated(subject: str | Path, words: list[str]) -> Path:
    """Evaluate a run or a model, and return the folder with the rows."""
    if isinstance(subject, str):
        return evaluate_model(subject, words)[0]
    evaluate_run(subject, overrides.apply(load_config(subject), words))
    return subject
