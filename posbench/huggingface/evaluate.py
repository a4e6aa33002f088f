"""Evaluate a HuggingFace model from a folder or the hub; the results are a folder like a run's."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posbench import machine
from posbench.config.asked import apply
from posbench.config.external import ModelElsewhere, ReadingConfig, TrainedElsewhere, TrainingElsewhere
from posbench.config.overrides import pairs, read
from posbench.config.schema import Config, DataConfig, EncodingConfig, EvaluationConfig
from posbench.data import hub
from posbench.data import tokens as data
from posbench.data.tokens import Tokens
from posbench.errors import PosbenchError, Stopped, Undefined, UserError
from posbench.evaluation import curve, probes
from posbench.evaluation.evaluate import Evaluation
from posbench.evaluation.job import rows_into
from posbench.evaluation.plan import from_training_on, lengths_of, measurements
from posbench.huggingface import building, package
from posbench.huggingface import folder as folders
from posbench.huggingface.folder import Checkpoint
from posbench.huggingface.subject import HuggingFaceModel, extension_of, position_of
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run
from posbench.run_folder.names import MODEL, RECORD
from posbench.run_folder.rows import EvaluationRow
from posbench.run_folder.tracking import Mirror
from posbench.terminal import console, exits
from posbench.terminal.signals import ended_in_words

logger = logging.getLogger(__name__)

STUDY = "models"  # the folder of results
RATIOS = (1.0, 2.0, 4.0)  # default lengths, in training lengths
OWN = ("train_length", "bos")  # settings for models only
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 100


@dataclasses.dataclass(frozen=True)
class Found:
    """A model that can be evaluated."""

    checkpoint: Checkpoint
    source: str  # as the user gave it
    revision: str | None  # hub: the commit

    @property
    def name(self) -> str:
        """The name of its folder of results: the last part of `source`; of a model that a run trained, the run's."""
        path = Path(self.source.partition("@")[0] if self.revision else self.source).resolve()
        last = path.parent.name if path.name == MODEL and (path.parent / RECORD).is_file() else path.name
        return _NOT_A_NAME.sub("-", last)[:_LONGEST_NAME].strip(".-_") or "model"


@dataclasses.dataclass(frozen=True)
class Asked:
    """The requested evaluation of a model, before its text is read."""

    base: Config  # configuration of a run on the same text: data and runtime
    settings: EvaluationConfig
    device: torch.device
    threads: int | None
    train_length: int
    bos: str | None  # as `reading_of` takes it


def evaluate_models(words: list[str], overrides: list[str]) -> None:
    """Evaluate models, report on the terminal, and draw their curves; a failed one does not stop the others.

    Args:
        words: folders of models, and names on the hub.
        overrides: settings as typed, the same for all.

    Raises:
        UserError: a model or a setting that cannot be used.
        PosbenchError: some models were not evaluated; with a single one, its own error.
    """
    package.transformers()
    console.log_to_terminal()
    machine.keep_freed_memory()
    failed = []
    for word in words:
        try:
            folder, split = evaluate_model(word, overrides)
            curve.print_curves(folder, split)
        except PosbenchError as error:
            if len(words) == 1 or isinstance(error, Stopped):
                raise
            exits.report(error)
            failed.append(word)
    if failed:
        raise PosbenchError(f"{len(failed)} of {len(words)} models not evaluated: {', '.join(failed)}")


def evaluate_model(word: str, overrides: list[str]) -> tuple[Path, str]:
    """Evaluate one model; computes only missing rows.

    Returns:
        The folder of results, and the name of the text.

    Raises:
        UserError: the model, its tokenizer, the text or a setting cannot be used.
        RunFailed: memory or the disk is full.
        Stopped: a signal asked for an end; finished rows are kept.
    """
    found = find(word)
    asked = asked_of(found.checkpoint, overrides)
    machine.set_threads(asked.threads)
    subject, results = _made(found, asked)
    folder = Path(asked.base.runtime.outputs) / STUDY / results.id
    command = ["posbench", "evaluate", word, *overrides]
    with ended_in_words():
        tokens = data.prepare(results.data, data.cache_folder(asked.base.runtime.cache), results.reading.separator)
    refuse_other_ids(tokens, subject.config.vocab_size)
    with Run.open(folder, results, command) as run, _outcome_kept(run), ended_in_words():
        run.log_to_file()
        run.begin_attempt(Where(str(asked.device), subject.precision, torch.get_num_threads()))
        _refuse_other_text(run, tokens)
        record(run, subject, tokens, results.reading)
        if not evaluate_into(run, subject, tokens, asked.settings):
            logger.info("all requested rows exist; nothing to do: %s", run.folder)
    return folder, asked.settings.split


def _made(found: Found, asked: Asked) -> tuple[HuggingFaceModel, TrainedElsewhere]:
    """The model as a subject, and its description for the folder of results.

    Raises:
        UserError: it cannot be loaded, is not causal, or a setting does not fit it.
        RunFailed: memory ran out.
    """
    checkpoint, longest = found.checkpoint, max(lengths_of(asked.settings, asked.train_length))
    library = building.configuration(checkpoint, longest)
    config = library.get_text_config()
    precision = precision_of(checkpoint, asked.settings, asked.device)
    check(checkpoint, config, asked.settings, asked.train_length)
    reading = reading_of(checkpoint, config, asked.bos)
    with machine.out_of_memory_as_failure("a smaller model, or another evaluation.precision,"):
        subject = HuggingFaceModel(
            checkpoint=checkpoint,
            model=building.built(checkpoint, library, precision).to(asked.device),
            name=found.name,
            train_length=asked.train_length,
            device=asked.device,
            precision=precision,
            first_token=reading.separator if reading.first else None,
        )
        subject.refuse_not_causal()
    return subject, _results(found, config, reading, asked)


def find(word: str) -> Found:
    """Find a model in a folder, or on the hub, whose cache comes first; UserError if there is none that is accepted."""
    if Path(word).exists():
        return Found(folders.read(Path(word)), word, None)
    folder, commit = hub.model_folder(word)
    try:
        return Found(folders.read(folder), word, commit)
    except UserError as error:
        raise UserError(f"'{word}': {str(error).replace(str(folder), 'its repository on the hub')}") from None


def asked_of(checkpoint: Checkpoint, overrides: list[str]) -> Asked:
    """Parse overrides: text as in training, evaluation as for a finished run, and settings for models only.

    Raises:
        UserError: an override that cannot be read, an unknown key or a value that does not fit.
    """
    from posbench.config import compose

    own: dict[str, Any] = {}
    text, rest = ["tracking=none"], []
    for key, typed in pairs(overrides, "length=4096,8192").items():
        if key in OWN:
            own[key] = read(typed)
        elif key in ("data.tokenizer", "data.vocab_size"):
            raise UserError(f"{key} cannot be set: a model always uses its own {folders.TOKENIZER}")
        elif key.partition(".")[0] == "data" or key in ("runtime.outputs", "runtime.cache"):
            text.append(f"{key}={typed}")
        else:
            rest.append(f"{key}={typed}")
    length = own.get("train_length", checkpoint.train_length())
    if type(length) is not int or length < 2:
        said = "does not give its training length" if length is None else f"train_length is {length}"
        raise UserError(f"{checkpoint.folder}: {said}: expected train_length=N, in tokens")
    base = compose.single(text)
    usual = dataclasses.replace(base.evaluation, ratios=RATIOS, targets=min(base.evaluation.targets, length))
    training = dataclasses.replace(
        base.training, train_length=length, batch_size=1, accumulation=1, tokens=length, warmup_tokens=0
    )
    base = dataclasses.replace(base, training=training, evaluation=usual)
    settings, device, threads, processes = apply(base, rest)
    if processes not in (None, 1):
        raise UserError(f"processes is {processes}: a HuggingFace model is evaluated in one process")
    return Asked(
        base=base,
        settings=settings,
        device=machine.current(machine.resolve(device or base.runtime.device)),
        threads=threads or base.runtime.threads,
        train_length=length,
        bos=own.get("bos"),
    )


def precision_of(checkpoint: Checkpoint, settings: EvaluationConfig, device: torch.device) -> str:
    """The requested precision; for `auto` that of the weights if the device is good at it, else fp32."""
    if settings.precision != "auto":
        return settings.precision
    own = checkpoint.precision
    if checkpoint.kind == "bloom":  # its biases would be rounded too: far positions collide
        return "fp32"
    fast = {"bf16": machine.bf16_is_fast(device), "fp16": device.type == "cuda", "fp32": True}
    return own if fast[own] else "fp32"


def reading_of(checkpoint: Checkpoint, config: Any, bos: Any) -> ReadingConfig:
    """The token before each document, and whether it is also first in every window.

    It is the begin token of the tokenizer, else of the configuration, else the end token.

    Args:
        bos: `document`, `window`, or None: first in every window if the tokenizer begins every text with it.

    Raises:
        UserError: there is none of these tokens, or `bos` is something else.
    """
    if bos not in (None, "document", "window"):
        raise UserError(f"bos is {bos}: expected bos=document or bos=window")
    try:
        tokenizer = json.loads(checkpoint.tokenizer.read_bytes())
        ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
        begins, vocabulary = _begins(tokenizer.get("post_processor") or {}, ids), tokenizer["model"]["vocab"]
        known = {*(vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))), *ids.values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{checkpoint.tokenizer} is not a tokenizer.json") from None
    if begins is not None and begins in known:
        return ReadingConfig(begins, bos != "document")
    ends = config.eos_token_id[0] if isinstance(config.eos_token_id, list) and config.eos_token_id else None
    for token in (getattr(config, "bos_token_id", None), config.eos_token_id, ends):
        if type(token) is int and token in known and token < config.vocab_size:
            return ReadingConfig(token, bos == "window")
    raise UserError(f"{checkpoint.folder}: its tokenizer has no token for bos_token_id or eos_token_id")


def _begins(processor: dict[str, Any], ids: dict[str, int]) -> int | None:
    """The token that the tokenizer's post-processor puts before a text; None if it puts none."""
    for step in processor.get("processors") or [processor]:
        if step.get("type") == "TemplateProcessing" and step["single"] and "SpecialToken" in step["single"][0]:
            name = step["single"][0]["SpecialToken"]["id"]
            known = [*step["special_tokens"].get(name, {}).get("ids", []), ids.get(name)]
            return known[0] if type(known[0]) is int else None
    return None


def check(checkpoint: Checkpoint, config: Any, settings: EvaluationConfig, train_length: int) -> None:
    """Raise UserError, before any work, for an unknown probe or extension, or a wrong option.

    What is undefined for the model becomes rows that say so.
    """
    for text in settings.tasks:
        probes.of(text, [], settings.targets, train_length)
    for text in settings.extensions:
        for length in from_training_on(settings, train_length):
            with contextlib.suppress(Undefined):
                extension_of(checkpoint, config, text, length, train_length)


def encoding_of(position: str, config: Any, name: str | None = None) -> EncodingConfig:
    """A model's position encoding as a section of the configuration; its name is `name`, by default the position."""
    options = {"parameters": config.rope_parameters} if position == "rope" else {}
    return EncodingConfig(name or position, json.loads(json.dumps(options)))


def described(found: Found, config: Any) -> ModelElsewhere:
    """Which model it is, for the folder of results."""
    return ModelElsewhere(
        name=found.name,
        source=os.path.normpath(found.source) if found.revision is None else found.source,
        revision=found.revision,
        sha256=found.checkpoint.sha256(),
        kind=found.checkpoint.kind,
        n_layers=config.num_hidden_layers,
        n_heads=getattr(config, "num_attention_heads", None),
        d_model=config.hidden_size,
    )


def text_of(base: DataConfig, checkpoint: Checkpoint, config: Any) -> DataConfig:
    """The text, read with the model's own tokenizer."""
    return dataclasses.replace(base, tokenizer=str(checkpoint.tokenizer), vocab_size=int(config.vocab_size))


def _results(found: Found, config: Any, reading: ReadingConfig, asked: Asked) -> TrainedElsewhere:
    return TrainedElsewhere(
        study=STUDY,
        encoding=encoding_of(position_of(found.checkpoint, config), config),
        model=described(found, config),
        reading=reading,
        data=text_of(asked.base.data, found.checkpoint, config),
        training=TrainingElsewhere(asked.train_length),
        evaluation=asked.settings,
    )


@contextlib.contextmanager
def _outcome_kept(run: Run) -> Iterator[None]:
    """Record the outcome."""
    try:
        yield
    except BaseException as error:
        run.ended_by(error)
        raise
    run.finish("done")


def _refuse_other_text(run: Run, tokens: Tokens) -> None:
    """Raise UserError if the text is not that of the folder's rows."""
    known = run.record["data"]
    before = known.get("sha256") if isinstance(known, dict) else None
    if before not in (None, tokens.record["sha256"]):
        raise UserError(
            f"{run.folder} holds results on another text (sha256 {str(before)[:12]}, now "
            f"{tokens.record['sha256'][:12]}): restore that text, or name the new one with data.name=NAME"
        )


def refuse_other_ids(tokens: Tokens, rows: int) -> None:
    """Raise UserError if the text has tokens that the model's table, of so many rows, does not know."""
    highest = max(int(split.ids.max(initial=0)) for split in (tokens.train, tokens.validation, tokens.test))
    if highest >= rows:
        raise UserError(f"the tokenizer belongs to another model: it gives id {highest:,}, its table has {rows:,} rows")


def _encoded(tokens: Tokens, rows: int, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode further texts with the model's tokenizer; Undefined if the model's table has no rows for their tokens."""
    found = tokens.tokenizer.encode(texts)
    if (highest := max(int(ids.max(initial=0)) for ids in found)) >= rows:
        raise Undefined(f"the tokenizer gives id {highest:,}, the model's table has {rows:,} rows")
    return found


def record(run: Run, subject: HuggingFaceModel, tokens: Tokens, reading: ReadingConfig) -> None:
    """Write into `run.json`, and log: the text, the tokenizer, the model's size, and how sure its numbers are.

    `support` has whether this kind of model is tested.
    """
    checkpoint, version = subject.checkpoint, package.transformers().__version__
    level = "untested" if checkpoint.family is None else "tested"
    begins = {"id": reading.separator, "text": tokens.tokenizer.decode([reading.separator])}
    total = sum(parameter.numel() for parameter in subject.model.parameters())
    run.update(
        data={**tokens.record, "separator": {**begins, "first_in_every_window": reading.first}},
        tokenizer_sha256=tokens.tokenizer.sha256,
        parameters={**run.record["parameters"], "total": total},
        support={"level": level, "transformers": version},
    )
    told = "token %d (%r) stands before each document%s"
    logger.info(told, begins["id"], begins["text"], " and first in every window" if reading.first else "")
    told = "%s parameters, saved in %s, evaluated in %s"
    logger.info(told, f"{total:,}", checkpoint.precision, subject.precision)
    logger.info("%s: %s with transformers %s", checkpoint.kind, level, version)


def evaluate_into(
    run: Run,
    subject: HuggingFaceModel,
    tokens: Tokens,
    settings: EvaluationConfig,
    tracker: Mirror | None = None,
    step: int = 0,
    trained: int | None = None,
) -> int:
    """Evaluate into a folder of results, and its mirror if there is one; returns how many rows were missing.

    Args:
        step, trained: updates made, and tokens trained on here; None: it was not.
    """
    known = run.whole_rows()
    split = getattr(tokens, settings.split)
    to_read = _tokens_to_read(settings, subject.train_length, split, known, step)
    evaluation = Evaluation(
        subject=dataclasses.replace(subject, told=console.Work(to_read, "%s of %s tokens read, about %s left").add),
        split=split,
        token_bytes=tokens.tokenizer.token_bytes,
        encode=functools.partial(_encoded, tokens, subject.config.vocab_size),
        settings=settings,
        checkpoint_step=step,
        tokens=trained,
        dtype=subject.precision,
        device=subject.device,
    )
    try:
        return rows_into(run, tracker or Mirror(), evaluation, known)
    finally:
        peak = max(run.record["peak_memory_bytes"] or 0, machine.peak_memory(subject.device))
        run.update(peak_memory_bytes=peak)


def _tokens_to_read(
    settings: EvaluationConfig, train_length: int, split: Any, known: list[EvaluationRow], step: int
) -> int:
    """The most tokens that forward passes for missing rows can read."""
    rows = (row for row in known if row.checkpoint_step == step)
    there = {(row.protocol, row.length, row.stride, row.window, row.extension, row.task) for row in rows}
    passes = {
        m.forward
        for m in measurements(settings, split, train_length)
        if (m.protocol, m.length, m.stride, m.forward.variant.window, m.forward.variant.name, m.task) not in there
    }
    return sum(window.length * len(window.starts) for forward in passes for window in forward.windows)
