"""Evaluate a HuggingFace model from a folder or the hub; the results are a folder like a run's."""

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from posbench import machine
from posbench.config.asked import apply
from posbench.config.external import ModelElsewhere, ReadingConfig, TrainedElsewhere, TrainingElsewhere
from posbench.config.overrides import pairs, read
from posbench.config.schema import Config, DataConfig, EncodingConfig, EvaluationConfig
from posbench.data import tokens as data
from posbench.data.tokens import Tokens
from posbench.errors import PosbenchError, Stopped, Undefined, UserError
from posbench.evaluation import printed, probes
from posbench.evaluation.evaluate import Evaluation
from posbench.evaluation.job import rows_into
from posbench.evaluation.models import Variant
from posbench.evaluation.plan import from_training_on, refuse_few_blocks
from posbench.huggingface.load import TESTED, TOKENIZER, Source, find, load, position_of, transformers
from posbench.huggingface.subject import HuggingFaceModel
from posbench.run_folder.facts import Where
from posbench.run_folder.folder import Run
from posbench.run_folder.rows import every_row
from posbench.run_folder.tracking import Mirror
from posbench.terminal import console, exits
from posbench.terminal.signals import signals_as_errors
from posbench.training.train import failures_recorded

logger = logging.getLogger(__name__)

STUDY = "models"  # the folder of results
RATIOS = (1.0, 2.0, 4.0)  # default lengths, in training lengths


def evaluate_models(words: list[str], overrides: list[str]) -> None:
    """Evaluate models, report on the terminal, and draw their curves; a failed one does not stop the others.

    Args:
        words: folders of models, and names on the hub.
        overrides: settings as typed, the same for all.

    Raises:
        UserError: a model or a setting that cannot be used.
        PosbenchError: some models were not evaluated; with a single one, its own error.
    """
    console.log_to_terminal()
    machine.keep_freed_memory()
    failed = []
    for word in words:
        try:
            folder, split = evaluate_model(word, overrides)
            printed.print_results(folder, split)
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
    source = find(word)
    asked, bos = asked_of(source, overrides)
    length, settings, runtime = asked.training.train_length, asked.evaluation, asked.runtime
    sections = described(source, source.config, asked.data, bos)
    config = TrainedElsewhere(STUDY, training=TrainingElsewhere(length), evaluation=settings, **sections)
    device = machine.current(machine.resolve(runtime.device))
    machine.set_threads(runtime.threads)
    precision = precision_of(source, settings, device)
    with machine.out_of_memory_as_failure("a smaller model, or another evaluation.precision,"):
        model = load(source.folder, source.config, precision).to(device)
        first_token = config.reading.separator if config.reading.first else None
        subject = HuggingFaceModel(model, source.name, length, precision, first_token)
        subject.refuse_not_causal()
    check(subject, settings)
    tokens = text_of(config, runtime.cache)
    folder = Path(runtime.outputs) / STUDY / config.id
    with (
        Run.open(folder, config, ["posbench", "evaluate", word, *overrides]) as run,
        failures_recorded(run),
        signals_as_errors(),
    ):
        run.log_to_file()
        run.begin_attempt(Where(str(device), precision, torch.get_num_threads()))
        before, now = (run.record["data"] or {}).get("sha256"), tokens.record["sha256"]
        if before not in (None, now):
            raise UserError(
                f"{folder} holds results on another text (sha256 {str(before)[:12]}, now {now[:12]}): restore that "
                "text, or name the new one with data.name=NAME"
            )
        record(run, subject, tokens, config.reading)
        if not evaluate_into(run, subject, tokens, settings):
            logger.info("all requested rows exist; nothing to do: %s", folder)
        run.finish("done")
    return folder, settings.split


# -- what was asked for ------------------------------------------------------------------------------------------------


def asked_of(source: Source, overrides: list[str]) -> tuple[Config, Any]:
    """Parse overrides: text as in training, evaluation as for a finished run, and settings for models only.

    Returns:
        The configuration of a run on the same text, of which data, training length, evaluation and runtime count; and
        the setting `bos` as it was typed.

    Raises:
        UserError: an override that cannot be read, an unknown key or a value that does not fit.
    """
    from posbench.config import compose

    only_here: dict[str, Any] = {}
    text, rest = ["tracking=none"], []
    for key, typed in pairs(overrides, "length=4096,8192").items():
        if key in ("train_length", "bos"):
            only_here[key] = read(typed)
        elif key in ("data.tokenizer", "data.vocab_size"):
            raise UserError(f"{key} cannot be set: a model always uses its own {TOKENIZER}")
        elif key.partition(".")[0] == "data" or key in ("runtime.outputs", "runtime.cache"):
            text.append(f"{key}={typed}")
        else:
            rest.append(f"{key}={typed}")
    length = only_here.get("train_length", source.train_length)
    if type(length) is not int or length < 2:
        problem = "does not give its training length" if length is None else f"train_length is {length}"
        raise UserError(f"{source.folder}: {problem}: expected train_length=N, in tokens")
    base = compose.single(text)
    usual = dataclasses.replace(base.evaluation, ratios=RATIOS, targets=min(base.evaluation.targets, length))
    training = dataclasses.replace(
        base.training, train_length=length, batch_size=1, accumulation=1, tokens=length, warmup_tokens=0
    )
    base = dataclasses.replace(base, training=training, evaluation=usual)
    settings, device, threads, processes = apply(base, rest)
    if processes not in (None, 1):
        raise UserError(f"processes is {processes}: a HuggingFace model is evaluated in one process")
    runtime = dataclasses.replace(
        base.runtime, device=device or base.runtime.device, threads=threads or base.runtime.threads
    )
    return dataclasses.replace(base, evaluation=settings, runtime=runtime), only_here.get("bos")


def described(source: Source, config: Any, text: DataConfig, bos: Any, name: str | None = None) -> dict[str, Any]:
    """The sections about a model and its text, for the configuration of a folder of results.

    Args:
        config: the library's configuration, extended or not.
        text: what is read, with the model's own tokenizer.
        bos: as `reading_of` takes it.
        name: of the encoding, by default the way in which the model encodes positions.
    """
    position, config = position_of(config), config.get_text_config()
    options = {"parameters": config.rope_parameters} if position == "rope" else {}
    model = ModelElsewhere(
        name=source.name,
        source=os.path.normpath(source.given) if source.revision is None else source.given,
        revision=source.revision,
        sha256=source.sha256(),
        kind=source.kind,
        n_layers=config.num_hidden_layers,
        n_heads=getattr(config, "num_attention_heads", None),
        d_model=config.hidden_size,
    )
    return {
        "encoding": EncodingConfig(name or position, json.loads(json.dumps(options))),
        "model": model,
        "reading": reading_of(source, bos),
        "data": dataclasses.replace(text, tokenizer=str(source.tokenizer), vocab_size=int(config.vocab_size)),
    }


def reading_of(source: Source, bos: Any) -> ReadingConfig:
    """The token before each document, and whether it is also first in every window.

    It is the token that the tokenizer puts before a text, else the begin token of the configuration, else its end
    token.

    Args:
        bos: `document`, `window`, or None: first in every window if the tokenizer puts it before every text.

    Raises:
        UserError: there is none of these tokens, or `bos` is something else.
    """
    if bos not in (None, "document", "window"):
        raise UserError(f"bos is {bos}: expected bos=document or bos=window")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(source.tokenizer))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{source.tokenizer} is not a tokenizer.json: {error}") from None
    plain, whole = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    if whole[:1] != plain[:1]:
        return ReadingConfig(whole[0], bos != "document")
    config = source.config.get_text_config()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    for token in (getattr(config, "bos_token_id", None), *ends[:1]):
        if type(token) is int and token < config.vocab_size and tokenizer.id_to_token(token) is not None:
            return ReadingConfig(token, bos == "window")
    raise UserError(f"{source.folder}: its tokenizer has no token for bos_token_id or eos_token_id")


def precision_of(source: Source, settings: EvaluationConfig, device: torch.device) -> str:
    """The requested precision; for `auto` that of the weights if the device is good at it, else fp32."""
    if settings.precision != "auto":
        return settings.precision
    fast = {"bf16": machine.bf16_is_fast(device), "fp16": device.type == "cuda", "fp32": True}
    # BLOOM's biases would be rounded too, so that far positions collide.
    return source.precision if fast[source.precision] and source.kind != "bloom" else "fp32"


def check(subject: HuggingFaceModel, settings: EvaluationConfig) -> None:
    """Raise UserError, before any work, for an unknown probe or extension, or a wrong option.

    What is undefined for the model becomes rows that say so.
    """
    refuse_few_blocks(settings)
    for text in settings.tasks:
        probes.of(text, [], settings.targets, subject.train_length)
    for text in settings.extensions:
        for length in from_training_on(settings, subject.train_length):
            with contextlib.suppress(Undefined):
                subject.varied(Variant(extension=text), length)


# -- the work ----------------------------------------------------------------------------------------------------------


def text_of(config: Any, cache: str | None) -> Tokens:
    """The text as tokens of the model; UserError if it has some that the model's table does not know."""
    with signals_as_errors():
        tokens = data.prepare(config.data, data.cache_folder(cache), config.reading.separator)
    highest = max(int(split.ids.max(initial=0)) for split in (tokens.train, tokens.validation, tokens.test))
    if highest >= (rows := config.data.vocab_size):
        raise UserError(f"the tokenizer belongs to another model: it gives id {highest:,}, its table has {rows:,} rows")
    return tokens


def record(run: Run, subject: HuggingFaceModel, tokens: Tokens, reading: ReadingConfig) -> None:
    """Write into `run.json`, and log: the text, the tokenizer, the model's size, and whether its kind is tested."""
    kind, version = subject.model.config.model_type, transformers().__version__
    level = "tested" if kind in TESTED else "untested"
    begin = {"id": reading.separator, "text": tokens.tokenizer.decode([reading.separator])}
    total = sum(parameter.numel() for parameter in subject.model.parameters())
    run.update(
        data={**tokens.record, "separator": {**begin, "first_in_every_window": reading.first}},
        tokenizer_sha256=tokens.tokenizer.sha256,
        parameters={**run.record["parameters"], "total": total},
        support={"level": level, "transformers": version},
    )
    every_window = " and first in every window" if reading.first else ""
    logger.info("token %d (%r) stands before each document%s", begin["id"], begin["text"], every_window)
    logger.info("%s with transformers %s: %s, %s parameters in %s", kind, version, level, total, subject.precision)


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

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encoded = tokens.tokenizer.encode(texts)
        highest, rows = max(int(ids.max(initial=0)) for ids in encoded), subject.config.vocab_size
        if highest >= rows:
            raise Undefined(f"the tokenizer gives id {highest:,}, the model's table has {rows:,} rows")
        return encoded

    evaluation = Evaluation(
        subject=subject,
        split=getattr(tokens, settings.split),
        token_bytes=tokens.tokenizer.token_bytes,
        encode=encode,
        settings=settings,
        checkpoint_step=step,
        tokens=trained,
        dtype=subject.precision,
        device=subject.model.device,
    )
    try:
        return rows_into(run, tracker or Mirror(), evaluation, every_row(run.folder))
    finally:
        peak = max(run.record["peak_memory_bytes"] or 0, machine.peak_memory(subject.model.device))
        run.update(peak_memory_bytes=peak)
