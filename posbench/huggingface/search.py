"""`posbench evaluate RUN|MODEL extension=search length=N`: which method, with which
factor, for N tokens?

Each candidate gets two ranks on validation text at N tokens: by its loss, and by a
retrieval probe. Its worse rank counts. The candidate with the best one is chosen;
between equals, the one with the lower loss. Then the model is evaluated on test text,
plain and with the chosen method, so that the choice does not depend on any reported
number.
"""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from posbench import machine
from posbench.config.overrides import LENGTH, apply, by_key
from posbench.errors import UserError
from posbench.evaluation.job import evaluate_run
from posbench.huggingface.evaluate import evaluate_model, parse_words
from posbench.huggingface.load import find
from posbench.reports import one_run
from posbench.reports.render import Column, Table
from posbench.results.compare import ALPHA
from posbench.results.estimate import estimate
from posbench.run.run import load_config
from posbench.terminal import console

METHODS = ("yarn", "ntk_by_parts", "llama3", "ntk", "pi")
MULTIPLES = (1, 2)  # factors, in multiples of N / training length
PROBE = "passkey"
_LEAN = ("protocol=fixed_target", "evaluation.windowed=false", "evaluation.sinks=0")


def candidates(ratio: float) -> list[str]:
    """Return the extensions to try; `ratio`: the length divided by the training
    length.
    """
    factors = [f"{multiple * ratio:g}" for multiple in MULTIPLES]
    return [f"{method}:factor={factor}" for method in METHODS for factor in factors] + [
        "dynamic_ntk"
    ]


def ranked(frame: pd.DataFrame, length: int) -> pd.DataFrame:
    """Return the candidates that are defined, best first, with `nll` and `accuracy` at
    a length, and `loss_at_1x`.

    `frame`: rows of one run or model on one text. Column `retrieves`: whether a test
    shows that any candidate beats chance in the probe; if not, the loss alone decides.
    """
    from scipy import stats

    rows = frame[
        frame["newest"] & ~frame["variant"].isin(("windowed", "sinks"))
    ].fillna({"extension": "none"})
    rows = rows.drop_duplicates(
        ["protocol", "task", "length", "extension"], keep="last"
    ).set_index("extension")
    text = rows[
        (rows["protocol"] == "fixed_target") & rows["task"].isna() & rows["nll"].notna()
    ]
    at_1x = text.loc[text["length_ratio"] == 1, "nll"].rename("loss_at_1x")
    probe = rows.loc[
        (rows["task"] == PROBE) & (rows["length"] == length),
        ["accuracy", "chance", "n_blocks"],
    ]
    table = text.query(f"length == {length}")[
        ["nll", "unit_nll", "unit_tokens", "ci_over"]
    ].join([probe, at_1x])
    trials = probe.dropna().to_numpy()
    p = [
        stats.binomtest(round(share * n), int(n), chance, "greater").pvalue
        for share, chance, n in trials
    ]
    ranks = pd.DataFrame(
        {"loss": table["nll"].rank(), "right": table["accuracy"].rank(ascending=False)}
    )
    retrieves = len(table) * min(p, default=1.0) < ALPHA
    worse = ranks.max(axis=1) if retrieves else ranks["loss"]
    return (
        table.assign(worse=worse, retrieves=retrieves)
        .sort_values(["worse", "nll"])
        .reset_index()
    )


def search(subject: str | Path, words: Sequence[str]) -> None:
    """Choose an extension for a run (a path) or a HuggingFace model (its name) on
    validation text; evaluate it on test.

    `words`: what was typed, with `extension=search` and one `length=`, in tokens.

    Raises UserError if no length is beyond training, or no candidate has a number
    there.
    """
    console.log_to_terminal()
    machine.keep_freed_memory()
    settings = by_key(words)
    settings.pop("evaluation.extensions")
    length_text = settings.pop(LENGTH, "")
    words = [f"{key}={text}" for key, text in settings.items()]
    if fixed := settings.keys() & {
        "evaluation.tasks",
        "evaluation.split",
        "evaluation.protocols",
    }:
        raise UserError(
            f"{min(fixed)} cannot be set: extension=search uses {PROBE} on validation"
            " text, then test text"
        )
    config = (
        apply(load_config(subject), words)
        if isinstance(subject, Path)
        else parse_words(find(subject), words)[0]
    )
    train_length = config.training.train_length
    if not length_text.isdigit() or int(length_text) <= train_length:
        raise UserError(
            f"extension=search needs one length beyond {train_length}, such as"
            f" length={4 * train_length}"
        )
    length = int(length_text)
    measured = (length, train_length)
    lengths = f"length={train_length},{length_text}"
    trials = ",".join(candidates(length / train_length))
    folder = _evaluate(
        subject,
        [
            *words,
            lengths,
            f"extension={trials}",
            f"task={PROBE}",
            "split=validation",
            *_LEAN,
        ],
    )
    table = ranked(one_run.read(folder, "validation", measured), length)
    if {*table["extension"]} <= {"none"}:
        raise UserError(
            f"no extension has a number at {length} tokens: its RoPE is not plain, or"
            " the text too short"
        )
    ranking = [*table["extension"], ""]
    best = ranking[0]
    second = ranking[1]
    columns = [
        Column("extension", "extension", "", text=True),
        Column("nll", f"loss at {length:,}", ".4f"),
        Column("accuracy", f"{PROBE} right", ".0%"),
        Column("loss_at_1x", f"loss at {train_length:,}", ".4f"),
    ]
    order = (
        f"worse rank of loss and {PROBE}"
        if table["retrieves"].iloc[0]
        else f"loss: in {PROBE} none beats chance"
    )
    Table(
        f"{length:,} tokens of validation text, best first by {order}", table, columns
    ).print(console.stdout())
    extension = [] if best == "none" else [f"extension={best}"]
    folder = _evaluate(
        subject, [*words, lengths, *extension, f"task={PROBE}", "split=test"]
    )
    one_run.print_results(folder, "test", measured)
    rows = {
        split: one_run.read(folder, split, measured) for split in ("validation", "test")
    }
    for split, at, rival in (
        ("validation", length, second),
        ("test", length, "none"),
        ("test", train_length, "none"),
    ):
        table = ranked(rows[split], at).set_index("extension")
        if rival != best and {best, rival} <= {*table.index}:
            row, nats = table.loc[best], table["unit_nll"]
            gap = estimate((nats[best] - nats[rival])[None], row["unit_tokens"])
            interval = (
                f"95 % {gap.low():+.4f} to {gap.high():+.4f} over {row['ci_over']}"
            )
            print(
                f"{best} less {rival} at {at:,} tokens of {split} text: {gap.mean:+.4f}"
                f" nats per token, {interval}."
            )
    command = (
        f"posbench rope {subject} extension={best} length={length}"
        f" train_length={train_length}"
    )
    print(
        f"Its RoPE: {command}"
        if extension
        else "None of these extensions is better than the model as it is."
    )


def _evaluate(subject: str | Path, words: list[str]) -> Path:
    """Evaluate a run or a model, and return the folder with the rows."""
    if isinstance(subject, str):
        return evaluate_model(subject, words)[0]
    evaluate_run(subject, apply(load_config(subject), words))
    return subject
