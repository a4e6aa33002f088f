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

from posbench.config.overrides import LENGTH, apply, by_key, value
from posbench.errors import UserError
from posbench.estimate import estimate
from posbench.evaluation.job import evaluate_run
from posbench.huggingface.evaluate import evaluate_model, parse_words
from posbench.huggingface.load import find
from posbench.launch import execute
from posbench.processes import refuse_several
from posbench.reports import one_run
from posbench.reports.render import Column, Table
from posbench.results.compare import ALPHA
from posbench.results.frame import read
from posbench.run.folder import load_config
from posbench.terminal import console

METHODS = ("yarn", "ntk_by_parts", "llama3", "ntk", "pi")
MULTIPLES = (1, 2)  # factors, in multiples of N / training length
PROBE = "passkey"
_CHOSEN_HERE = ("evaluation.probes", "evaluation.split", "evaluation.protocols")
_LEAN = ("protocol=fixed_target", "evaluation.windowed=false", "evaluation.sinks=0")


def candidates(ratio: float) -> list[str]:
    """Return the extensions to try; `ratio`: the length divided by the training
    length.
    """
    texts = ["dynamic_ntk"]
    for method in METHODS:
        for multiple in MULTIPLES:
            texts.append(f"{method}:factor={multiple * ratio:g}")
    return texts


def ranked(frame: pd.DataFrame, length: int, extensions: Sequence[str]) -> pd.DataFrame:
    """Return those of these extensions that are defined, best first, with `nll` and
    `accuracy` at a length, and `loss_at_1x`.

    `frame`: rows of one run or model on one text; `none` is the model as it is. Column
    `retrieves`: whether a test shows that any candidate beats chance in the probe; if
    not, the loss alone decides.
    """
    from scipy import stats

    rows = frame[frame["newest"] & (frame["variant"] != "windowed")]
    rows = rows.fillna({"extension": "none"})
    rows = rows[rows["extension"].isin(extensions)]
    point = ["protocol", "task", "length", "extension"]
    rows = rows.drop_duplicates(point, keep="last").set_index("extension")

    is_text = (rows["protocol"] == "fixed_target") & rows["task"].isna()
    text = rows[is_text & rows["nll"].notna()]
    probe = rows[(rows["task"] == PROBE) & (rows["length"] == length)]
    table = text.loc[
        text["length"] == length, ["nll", "unit_nll", "unit_tokens", "ci_over"]
    ]
    table = table.join(probe[["accuracy", "chance", "n_blocks"]])
    table["loss_at_1x"] = text.loc[text["length_ratio"] == 1, "nll"]

    # whether a candidate beats chance in the probe, adjusted for their number
    table["retrieves"] = False
    for row in table.dropna(subset="accuracy").itertuples():
        right = round(row.accuracy * row.n_blocks)
        test = stats.binomtest(right, int(row.n_blocks), row.chance, "greater")
        if test.pvalue * len(table) < ALPHA:
            table["retrieves"] = True

    worse = table["nll"].rank()
    if table["retrieves"].any():
        by_accuracy = table["accuracy"].rank(ascending=False, na_option="bottom")
        worse = worse.combine(by_accuracy, max)
    return table.assign(worse=worse).sort_values(["worse", "nll"]).reset_index()


def search(subject: str | Path, words: Sequence[str]) -> None:
    """Choose an extension for a run (a path) or a HuggingFace model (its name) on
    validation text; evaluate it on test.

    `words`: what was typed, with `extension=search` and one `length=`, in tokens.

    Raises UserError if no length is beyond training, or no candidate has a number
    there.
    """
    execute.set_up_process()
    words, length, train_length = _asked(subject, words)
    words += [f"length={train_length},{length}", f"probe={PROBE}"]

    tried = candidates(length / train_length)
    trials = f"extension={','.join(tried)}"
    folder = _evaluate(subject, [*words, trials, "split=validation", *_LEAN])
    validation = read([folder], "validation")
    table = ranked(validation, length, [*tried, "none"])
    if {*table["extension"]} <= {"none"}:
        raise UserError(
            f"no extension has a number at {length} tokens: its RoPE is not plain, or"
            " the text too short"
        )
    order = f"loss: in {PROBE} none beats chance"
    if table["retrieves"].any():
        order = f"worse rank of loss and {PROBE}"
    title = f"{length:,} tokens of validation text, best first by {order}"
    columns = [
        Column("extension", "extension", "", text=True),
        Column("nll", f"loss at {length:,}", ".4f"),
        Column("accuracy", f"{PROBE} right", ".0%"),
        Column("loss_at_1x", f"loss at {train_length:,}", ".4f"),
    ]
    Table(title, table, columns).print(console.stdout())

    ranking = [*table["extension"], "none"]
    best = ranking[0]
    second = ranking[1]
    words.append("split=test")
    if best != "none":
        words.append(f"extension={best}")
    folder = _evaluate(subject, words)
    one_run.print_results(folder, "test")
    test = read([folder], "test")
    _print_difference(validation, best, second, length, "validation")
    if best == "none":
        print("None of these extensions is better than the model as it is.")
        return
    for at in (length, train_length):
        _print_difference(test, best, "none", at, "test")


def _asked(subject: str | Path, words: Sequence[str]) -> tuple[list[str], int, int]:
    """Return the words of the evaluations, the length that an extension is sought for,
    and the training length. Raises UserError for a setting that the search chooses
    itself.
    """
    settings = by_key(words)
    del settings["evaluation.extensions"]
    lengths = value(LENGTH, settings.pop(LENGTH, ""))
    for key in _CHOSEN_HERE:
        if key in settings:
            raise UserError(
                f"{key} cannot be set: extension=search sets it itself: fixed_target"
                f" and {PROBE} on validation text, then test text"
            )

    others = [f"{key}={text}" for key, text in settings.items()]
    if isinstance(subject, Path):
        config = load_config(subject)
    else:
        config, *_ = parse_words(find(subject), others)
    train_length = config.training.train_length
    is_beyond = [type(length) is int and length > train_length for length in lengths]
    if is_beyond != [True]:
        raise UserError(
            f"extension=search needs one length beyond {train_length}, such as"
            f" length={4 * train_length}"
        )
    return others, lengths[0], train_length


def _evaluate(subject: str | Path, words: list[str]) -> Path:
    """Evaluate a run or a model, and return the folder with the rows."""
    if isinstance(subject, str):
        return evaluate_model(subject, words)
    config = apply(load_config(subject), words)
    refuse_several(config.runtime.processes)
    evaluate_run(subject, config)
    return subject


def _print_difference(
    frame: pd.DataFrame, best: str, rival: str, length: int, split: str
) -> None:
    """Print the difference of two candidates' losses with its interval, if both have a
    number.
    """
    table = ranked(frame, length, [best, rival]).set_index("extension")
    if {best, rival} <= {*table.index}:
        nats = table["unit_nll"]
        row = table.loc[best]
        gap = estimate((nats[best] - nats[rival])[None], row["unit_tokens"])
        print(
            f"{best} less {rival} at {length:,} tokens of {split} text:"
            f" {gap.mean:+.4f} nats per token, 95 % {gap.low():+.4f} to"
            f" {gap.high():+.4f} over {row['ci_over']}."
        )
