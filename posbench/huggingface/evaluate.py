"""Evaluate a HuggingFace model from a folder or the hub; the results are a folder like
a run's.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch

from posbench import machine
from posbench.config.overrides import (
    KEYS,
    LENGTH,
    OF_A_FINISHED_RUN,
    WORDS,
    by_key,
    value,
)
from posbench.config.schema import (
    Config,
    EncodingConfig,
    EvaluationConfig,
    ModelElsewhere,
    ReadingConfig,
    TrainedElsewhere,
    TrainingElsewhere,
)
from posbench.data import sources
from posbench.data.tokens import Tokens, note_use, prepare
from posbench.errors import UserError, did_you_mean
from posbench.evaluation.evaluate import Evaluation
from posbench.evaluation.job import rows_into
from posbench.evaluation.requests import check_settings
from posbench.evaluation.subjects import Variant
from posbench.huggingface.load import TESTED, Source, find, load, position_of
from posbench.huggingface.subject import HuggingFaceModel
from posbench.launch import compose, execute
from posbench.processes import refuse_several
from posbench.reports import one_run
from posbench.rope.imports import library_errors, transformers
from posbench.run import TOKENIZER
from posbench.run.folder import Run
from posbench.run.rows import every_row
from posbench.terminal.signals import signals_as_errors

logger = logging.getLogger(__name__)

STUDY = "models"  # the folder of results
RATIOS = (1.0, 2.0, 4.0)  # default lengths, as multiples of the training length
# Keys that a user may set; the model decides the others.
_USED = {key for key in KEYS if key.startswith("data.")}
_USED -= {"data.tokenizer", "data.vocab_size"}
_USED |= {"data", LENGTH, "runtime.outputs", "runtime.cache"}
_USED |= {*OF_A_FINISHED_RUN.values()}
_USED -= {"runtime.processes"}


def evaluate_models(words: list[str], overrides: list[str], as_json: bool) -> None:
    """Evaluate models, folders or names on the hub, one after the other, and print
    their curves, or in the end their rows as JSON.
    """
    execute.set_up_process()
    folders = []

    def show(folder: Path, split: str) -> None:
        folders.append(folder)
        if not as_json:
            one_run.print_results(folder, split)

    def show_all() -> None:
        if as_json:
            one_run.print_json(folders)

    with execute.shown(show_all):
        execute.each(words, lambda word: evaluate_model(word, overrides, show))


def evaluate_model(
    word: str,
    overrides: list[str],
    show: Callable[[Path, str], object] = lambda folder, split: None,
) -> Path:
    """Compute the missing rows of one model, show them, and return its folder of
    results. `show` gets the folder and the split of the text.
    """
    refuse_several()
    source = find(word)
    settings, bos = parse_words(source, overrides)
    evaluation = settings.evaluation
    config = configuration(source, settings, bos)
    device = machine.current(machine.resolve(settings.runtime.device))
    threads = machine.set_threads(settings.runtime.threads)
    precision = precision_of(source, evaluation, device)
    subject = subject_of(source, config, precision, device)
    tokens = text_of(config, settings.runtime.cache)

    folder = Path(settings.runtime.outputs) / STUDY / config.id
    command = ["posbench", "evaluate", word, *overrides]
    with (
        execute.shown(functools.partial(show, folder, evaluation.split)),
        Run.open(folder, config, command) as run,
        signals_as_errors(),
    ):
        refuse_another_text(run, tokens)
        run.begin_attempt(device=str(device), dtype=precision, threads=threads)
        note_use(tokens, folder)
        record_found(run, subject, tokens, config.reading)
        if not evaluate_into(run, subject, tokens, evaluation):
            logger.info("all requested rows exist; nothing to do: %s", folder)
        run.finish("done")
    return folder


def parse_words(source: Source, words: list[str]) -> tuple[Config, str | None]:
    """Return the configuration in the words (its data, train_length, evaluation and
    runtime are used), and `bos`.
    """
    settings = by_key(words, WORDS | OF_A_FINISHED_RUN)
    bos = settings.pop("bos", None)
    typed_length = settings.pop("train_length", str(source.train_length))
    length = value("training.train_length", typed_length)
    name = settings.get("data", "")
    if name.startswith("task/"):
        raise UserError(
            f"data={name} is a task: a HuggingFace model is evaluated on text"
        )
    for key in settings:
        if key not in _USED:
            hint = did_you_mean(key, _USED)
            raise UserError(f"{key} cannot be set for a HuggingFace model{hint}")
    if type(length) is not int or length < 2:
        raise UserError(
            f"{source.origin}: expected train_length=N, its training length in tokens,"
            f" not {length}"
        )

    values = {
        "tracking": "none",
        "evaluation.longest": RATIOS[-1],
        "training.train_length": length,
        "training.tokens": length,
        "training.batch_size": 1,
        "training.accumulation": 1,
    }
    if not settings.keys() & {LENGTH, "evaluation.ratios"}:
        values["evaluation.ratios"] = [*RATIOS]
    values |= settings
    typed = [f"{key}={text}" for key, text in values.items()]
    return compose.single(typed), bos


def configuration(
    source: Source, settings: Config, bos: str | None
) -> TrainedElsewhere:
    """Return the configuration of a model's folder of results: what the model is, and
    how it is evaluated on which text.
    """
    text = source.config.get_text_config()
    encoding = EncodingConfig(position_of(source.config), {})
    if encoding.name == "rope":
        parameters = json.loads(json.dumps(text.rope_parameters))
        encoding = EncodingConfig("rope", {"parameters": parameters})
    model = ModelElsewhere(
        name=source.name,
        source=source.origin,
        revision=source.revision,
        sha256=source.sha256(),
        kind=source.kind,
        n_layers=text.num_hidden_layers,
        n_heads=getattr(text, "num_attention_heads", None),
        d_model=text.hidden_size,
    )
    tokenizer = str(source.folder / TOKENIZER)
    data = dataclasses.replace(
        sources.identified(settings.data),
        tokenizer=tokenizer,
        vocab_size=int(text.vocab_size),
    )
    # reports show test rows; those of validation only while there are none
    evaluation = dataclasses.replace(settings.evaluation, split="test")
    return TrainedElsewhere(
        study=STUDY,
        encoding=encoding,
        model=model,
        reading=reading_of(source, bos),
        data=data,
        training=TrainingElsewhere(settings.training.train_length),
        evaluation=evaluation,
    )


def reading_of(source: Source, bos: str | None) -> ReadingConfig:
    """Return the token before each document, and whether it also begins every window:
    `bos` decides, or the tokenizer.

    The tokenizer names that token if it puts one before a text; else it is the
    configuration's begin or end token.
    """
    if bos not in (None, "document", "window"):
        raise UserError(f"bos is {bos}: expected bos=document or bos=window")
    path = source.folder / TOKENIZER
    with library_errors(f"{path} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    ids = tokenizer.encode("a").ids
    plain_ids = tokenizer.encode("a", add_special_tokens=False).ids
    if ids[:1] != plain_ids[:1]:
        return ReadingConfig(ids[0], bos != "document")

    config = source.config.get_text_config()
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, list):
            token = token[0]
        if type(token) is not int or token >= config.vocab_size:
            continue
        if tokenizer.id_to_token(token) is not None:
            return ReadingConfig(token, bos == "window")
    raise UserError(
        f"{source.folder}: its tokenizer has no token for bos_token_id or eos_token_id"
    )


def precision_of(
    source: Source, settings: EvaluationConfig, device: torch.device
) -> str:
    """Return the requested precision; `auto` is bf16 for weights in bf16 if the device
    computes fast in it, else fp32.
    """
    if settings.precision != "auto":
        return settings.precision
    # BLOOM's biases would be rounded too, so that far positions collide.
    if source.kind == "bloom" or not machine.bf16_is_fast(device):
        return "fp32"
    return "bf16" if source.config.dtype == torch.bfloat16 else "fp32"


def subject_of(
    source: Source, config: TrainedElsewhere, precision: str, device: torch.device
) -> HuggingFaceModel:
    """Return the model as it is evaluated; UserError if it is not causal, or a probe or
    extension is mistyped.
    """
    length = config.training.train_length
    first_token = config.reading.separator if config.reading.first else None
    cure = "a smaller model, or another evaluation.precision,"
    with machine.out_of_memory_as_failure(cure):
        model = load(source.folder, source.config, precision).to(device)
        subject = HuggingFaceModel(model, source.name, length, precision, first_token)
        subject.refuse_not_causal()

    def extended(text: str, longer: int) -> None:
        subject.in_variant(Variant(extension=text), longer)

    check_settings(config.evaluation, length, extended)
    return subject


def text_of(config: TrainedElsewhere, cache: str | None) -> Tokens:
    """Return the text as the model's tokens; UserError if the model's table has no row
    for one of them.
    """
    with signals_as_errors():
        tokens = prepare(config.data, cache, config.reading.separator)
    table_rows = config.data.vocab_size
    for split in (tokens.train, tokens.validation, tokens.test):
        highest = int(split.ids.max(initial=0))
        if highest >= table_rows:
            raise UserError(
                f"the tokenizer belongs to another model: it gives id {highest:,}, its"
                f" table has {table_rows:,} rows"
            )
    return tokens


def refuse_another_text(run: Run, tokens: Tokens) -> None:
    """Raise UserError if the folder has results on another text."""
    if run.record.text_sha256 not in (None, tokens.meta["sha256"]):
        raise UserError(
            f"{run.folder} has results on another text: restore that, or name the new"
            " one: data.name=NAME"
        )


def record_found(
    run: Run, subject: HuggingFaceModel, tokens: Tokens, reading: ReadingConfig
) -> None:
    """Record in `run.json`, and log, the text, the tokenizer, the model's size, and
    whether its kind is tested.
    """
    separator = {
        "id": reading.separator,
        "text": tokens.tokenizer.decode([reading.separator]),
        "first_in_every_window": reading.first,
    }
    kind = subject.model.config.model_type
    level = "tested" if kind in TESTED else "untested"
    version = transformers().__version__
    total = subject.model.num_parameters()
    run.update(
        data={**tokens.meta, "separator": separator},
        tokenizer_sha256=tokens.tokenizer.sha256,
        parameters={**run.record.parameters, "total": total},
        support={"level": level, "transformers": version},
    )
    logger.info(
        f"{kind} with transformers {version}: {level}, {total:,} parameters in"
        f" {subject.precision}"
    )
    places = "documents and in every window" if reading.first else "documents"
    logger.info(f"before {places}: {separator['text']!r}")


def evaluate_into(
    run: Run, subject: HuggingFaceModel, tokens: Tokens, settings: EvaluationConfig
) -> int:
    """Evaluate a model, write the rows to its folder, and return their number."""
    evaluation = Evaluation(
        subject=subject,
        settings=settings,
        split=getattr(tokens, settings.split),
        tokenizer=tokens.tokenizer,
        checkpoint_step=0,
        trained_tokens=None,  # unknown
        dtype=subject.precision,
        device=subject.model.device,
    )
    return rows_into(run, evaluation, every_row(run.folder))
