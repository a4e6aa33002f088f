"""Training on a model of transformers, `posbench train start=FOLDER`: from a folder or the hub to a folder of results.

A model's folder does not say how it was trained. Settings that are not typed are:

    learning_rate    2e-5, as Chen et al. (2023) and Peng et al. (2023) have it for PI and YaRN
    batches          single sequences, so many to an update that there are about 400 updates (those of YaRN)
    warm-up          the first twentieth of the tokens
    ratios           the length before and the new one, up to four times that
    at_tokens        0: what the stretch does before any training
"""

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import torch

from posbench import machine
from posbench.config import start
from posbench.config.external import TrainedOn, TrainingElsewhere
from posbench.config.overrides import read, split, value
from posbench.config.schema import Config, EvaluationConfig, validate
from posbench.data import tokens as data
from posbench.errors import RunFailed, Undefined, UserError
from posbench.evaluation.job import show_results
from posbench.evaluation.plan import lengths_of
from posbench.huggingface import building, evaluate, learning, rope, saving
from posbench.huggingface.evaluate import Found
from posbench.huggingface.folder import FAMILIES
from posbench.huggingface.learning import Learning
from posbench.huggingface.package import transformers
from posbench.huggingface.subject import HuggingFaceModel, position_of
from posbench.run_folder import checkpoint, tracking
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run, held_config
from posbench.run_folder.names import MODEL, TOKENIZER
from posbench.run_folder.rows import evaluation_rows, headline_split
from posbench.terminal.signals import ended_in_words
from posbench.training.journal import RunJournal
from posbench.training.step import learner_for
from posbench.training.train import failures_recorded, fit, goes_on_exactly, warn_of_rows_passed

logger = logging.getLogger(__name__)

RATE, UPDATES = 2e-5, 400
# Keys and groups that are for posbench's own models.
_OTHERS = (
    "model", "encoding", "training", "experiment", "evaluation", "data.tokenizer", "data.vocab_size",
    "runtime.compile", "runtime.processes",
)  # fmt: skip
_PARTS = ("training.batch_size", "training.accumulation")


@dataclasses.dataclass(frozen=True)
class _Begun:
    """A model as training begins."""

    found: Found
    config: TrainedOn
    library: Any  # the library's configuration, extended
    turns: list[rope.Turns]  # what its rotary modules must return


def train_model(word: str, overrides: list[str], restart: bool = False, config_dir: Path | None = None) -> Path:
    """Train a model on, evaluate it, and save it as a folder of the same kind; repeated, it continues.

    Args:
        word: a folder, or a name on the hub.
        overrides: all settings as typed.

    Returns:
        The folder of results.

    Raises:
        UserError: the model, its tokenizer, the text or a setting cannot be used.
        RunFailed: the training diverged or ran out of memory or disk; what was computed is kept.
        Stopped: a signal asked for an end; the run was saved and can be continued.
    """
    transformers()
    found = evaluate.find(word)
    _refuse_untested(found)
    begun = _begun(found, [text for text in overrides if not text.startswith("start=")], config_dir)
    config, source = begun.config, begun.found.checkpoint
    device = machine.current(machine.resolve(config.runtime.device))
    dtype = machine.resolve_precision(config.training.precision, device)
    machine.be_deterministic(device, config.runtime.deterministic)
    folder = Path(config.runtime.outputs) / config.study / config.id
    if not restart:
        held_config(folder, config)
    threads = machine.set_threads(config.runtime.threads)
    with ended_in_words():
        tokens = data.prepare(config.data, data.cache_folder(config.runtime.cache), config.reading.separator)
        evaluate.refuse_other_ids(tokens, config.data.vocab_size)
    batches = tokens.batches(config.training, config.seed)
    command = ["posbench", "train", *overrides]
    with (
        Run.open(folder, config, command, restart=restart) as run,
        tracking.mirror(config, run) as tracker,
        failures_recorded(run),
        ended_in_words(),
    ):
        run.log_to_file()
        run.refuse_other_text(tokens.record["sha256"], tokens.tokenizer.sha256)
        where = Where(device=str(device), dtype=machine.dtype_name(dtype), threads=threads)
        run.begin_attempt(where, bit_exact=goes_on_exactly(run, config, where))
        with machine.out_of_memory_as_failure("a smaller training.batch_size, with more training.accumulation,"):
            model = _built(begun).to(device)
            first = config.reading.separator if config.reading.first else None
            learner = learner_for(Learning(model, first, config.runtime.checkpointing), config, device, dtype)
            subject = _subject(begun, model, device)
            subject.refuse_not_causal()
            tokens.tokenizer.save(run.folder / TOKENIZER)
            evaluate.record(run, subject, tokens, config.reading)

            def measured(step: int, asked: EvaluationConfig) -> int:
                trained = step * config.training.tokens_per_step
                logger.info("after %s tokens of training:", f"{trained:,}")
                now = dataclasses.replace(subject, model=_as_saved(begun, model, subject.precision))
                missing = evaluate.evaluate_into(run, now, tokens, asked, tracker, step, trained)
                show_results(run.folder, config, tracker)
                return missing

            step = fit(learner, batches, tokens, config, RunJournal(run, tracker, config, where), measured)
        warn_of_rows_passed(run, config)
        learner.optimizer.zero_grad(set_to_none=True)  # room for copies of the weights
        with machine.out_of_memory_as_failure("the same command again, which goes on from the trained weights,"):
            measured(step, config.evaluation)
            if not (run.folder / MODEL).exists():
                rows = evaluation_rows(run.folder)
                split = headline_split(rows, config.evaluation.split)
                rows = [row for row in rows if row.is_headline and row.kind == "plain" and row.split == split]
                saving.save(run.folder / MODEL, model, source, config, run.record["command"], rows)
            logger.info("the trained model, for transformers: %s", run.folder / MODEL)
        run.finish("done")
        if config.runtime.clean:
            checkpoint.keep_weights(run.folder, config.training.steps)
    return folder


# -- what was asked for ------------------------------------------------------------------------------------------------


def _refuse_untested(found: Found) -> None:
    """Raise UserError for a model whose loss and saved folder no test compares with the library's."""
    checkpoint = found.checkpoint
    if checkpoint.family is None:
        known = ", ".join(FAMILIES)
        raise UserError(f"{found.source}: a model of kind {checkpoint.kind} is evaluated only: expected {known}")


def _begun(found: Found, overrides: list[str], config_dir: Path | None) -> _Begun:
    """What is trained on and how, by what was typed.

    Raises:
        UserError: a setting that cannot be read, or that such a model cannot have.
    """
    typed: dict[str, Any] = {}
    options: dict[str, Any] = {}
    rest: list[str] = []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"start={found.source}: a HuggingFace model is trained on in one process")
    method: str | None = None
    for text in overrides:
        key, given = split(text, "training.train_length=4096")
        if key in _OTHERS or key.startswith("model."):
            raise UserError(f"{key}: not beside start={found.source}, a HuggingFace model that is trained on as it is")
        if text.startswith("extension="):
            method = start.spelt(text).partition("=")[2]
            if "," in method:
                raise UserError(f"{text}: expected one, for one run")
        elif key.startswith("encoding."):
            options[key.removeprefix("encoding.")] = read(given)
        elif key in ("start.train_length", "bos", "evaluation.at_tokens"):
            typed[key] = value(key, given) if key == "evaluation.at_tokens" else read(given)
        else:
            typed[key] = given
            rest.append(text)
    before = typed.get("start.train_length", found.checkpoint.train_length())
    if type(before) is not int or before < 2:
        raise UserError(f"{found.source}: expected start.train_length=N, the tokens that it was trained on at a time")
    base, asked = _composed(rest, typed, before, config_dir)
    library, turns, name = _extended(found, base, before, method, options)
    reading = evaluate.reading_of(found.checkpoint, library, typed.get("bos"))
    evaluate.check(found.checkpoint, library, asked, base.training.train_length)
    config = TrainedOn(
        study=base.study,
        seed=base.seed,
        encoding=evaluate.encoding_of(position_of(found.checkpoint, library), library, name),
        model=evaluate.described(found, library),
        reading=reading,
        data=evaluate.text_of(base.data, found.checkpoint, library),
        start=TrainingElsewhere(before),
        training=base.training,
        evaluation=asked,
        tracking=base.tracking,
        runtime=base.runtime,
    )
    return _Begun(found, config, library, turns)


def _composed(
    rest: list[str], typed: dict[str, Any], before: int, config_dir: Path | None
) -> tuple[Config, EvaluationConfig]:
    """The settings of a run that were typed, with what follows from them; its evaluation, also before any training.

    Args:
        before: the model's training length, in tokens.

    Raises:
        UserError: length or budget is missing, or as `compose.single`.
    """
    from posbench.config import compose

    for key in ("training.train_length", "training.tokens"):
        if key not in typed:
            raise UserError(f"{key}: expected a number of tokens, which a HuggingFace model does not bring with it")
    numbers = [value(key, typed.get(key, "1")) for key in ("training.train_length", "training.tokens", *_PARTS)]
    if all(type(number) is int and number > 0 for number in numbers):  # else it is refused where it is read
        length, tokens, batch_size, accumulation = numbers
        sequences = tokens / UPDATES / length
        usual = {
            "study": start.STUDY,
            "training.batch_size": max(1, round(sequences / accumulation)) if _PARTS[1] in typed else 1,
            "training.accumulation": max(1, round(sequences / batch_size)),
            "training.warmup_tokens": tokens // 20,
            "training.learning_rate": RATE,
        }
        if not {"evaluation.length", "evaluation.ratios"} & typed.keys():
            lengths = sorted({before, length, 2 * length, 4 * length})
            usual["evaluation.ratios"] = [one / length for one in lengths]
        rest = [*rest, *(f"{key}={worth}" for key, worth in usual.items() if key not in typed)]
    base = compose.single(rest, config_dir)
    asked = dataclasses.asdict(base.evaluation) | {"at_tokens": typed.get("evaluation.at_tokens", [0])}
    return base, validate(EvaluationConfig, asked, "evaluation")


def _extended(
    found: Found, base: Config, before: int, method: str | None, options: dict[str, Any]
) -> tuple[Any, list[rope.Turns], str]:
    """The library's configuration for the new length, what its rotary modules must return, and the encoding's name.

    Raises:
        UserError: the model cannot be read at that length, or not be extended in that way.
    """
    source, length = found.checkpoint, base.training.train_length
    library = building.configuration(source, max(length, *lengths_of(base.evaluation, length)))
    position = position_of(source, library)
    if position == "learned" and length > library.max_position_embeddings:
        told = f"{source.kind} has a table of {library.max_position_embeddings:,} positions"
        raise UserError(f"training.train_length is {length:,}: {told}, and no extension")
    if method is None and not options:
        return library, [], position
    if position != "rope":
        raise UserError(f"{source.folder}: {source.kind} has no rotary encoding, which extensions are of")
    if method is None and options.keys() != {"base"}:
        raise UserError(f"encoding.{min(options)}: expected extension=NAME beside it, or encoding.base alone")
    try:
        made = rope.extended(library, method or "abf", length, before, options, every_length=True)
    except Undefined as error:
        raise UserError(f"extension={method or 'abf'}: {error}") from None
    return made.config, made.turns, method or "rope"


# -- the model ---------------------------------------------------------------------------------------------------------


def _built(begun: _Begun) -> Any:
    """The library's model, in fp32, with the weights that it came with."""
    source = begun.found.checkpoint
    model = building.built(source, begun.library, "fp32")
    if begun.turns and not rope.agrees(model, begun.turns, begun.config.training.train_length):
        raise RunFailed(f"transformers built {begun.found.name} with other rotary frequencies than requested")
    return model


def _subject(begun: _Begun, model: Any, device: torch.device) -> HuggingFaceModel:
    config, source = begun.config, begun.found.checkpoint
    return HuggingFaceModel(
        checkpoint=source,
        model=model,
        name=begun.found.name,
        train_length=config.training.train_length,
        device=device,
        precision=evaluate.precision_of(source, config.evaluation, device),
        first_token=config.reading.separator if config.reading.first else None,
    )


def _as_saved(begun: _Begun, model: Any, precision: str) -> Any:
    """The model with the weights that its folder will have, in the precision of the evaluation."""
    own = begun.found.checkpoint.precision
    return learning.rounded(model, building.DTYPES[own], building.DTYPES[precision])
