"""Evaluate a HuggingFace model from a folder or the hub; the results are a folder like
a run's.
"""

import dataclasses
import json
import logging
import os
from pathlib import Path

import tokenizers
import torch

from posbench import machine
from posbench.config import compose
from posbench.config.overrides import (
    KEYS,
    LENGTH,
    OF_A_FINISHED_RUN,
    WORDS,
    by_key,
    read,
    unknown_key,
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
from posbench.config.shipped import GROUPS
from posbench.data import tokens as data
from posbench.data.tokens import Tokens
from posbench.errors import UserError
from posbench.evaluation.evaluate import Evaluation
from posbench.evaluation.job import rows_into
from posbench.evaluation.models import Variant
from posbench.evaluation.plan import check_settings, lengths_of
from posbench.huggingface.load import (
    TESTED,
    Source,
    find,
    load,
    position_of,
)
from posbench.huggingface.subject import HuggingFaceModel
from posbench.reports import one_run
from posbench.rope.imports import library_errors, transformers
from posbench.run import TOKENIZER
from posbench.run.rows import every_row
from posbench.run.run import Run
from posbench.terminal import console
from posbench.terminal.signals import signals_as_errors

logger = logging.getLogger(__name__)

STUDY = "models"  # the folder of results
RATIOS = (1.0, 2.0, 4.0)  # default lengths, as multiples of the training length


def evaluate_models(words: list[str], overrides: list[str]) -> None:
    """Evaluate models, folders or names on the hub, one after the other, and print
    their curves.
    """
    console.log_to_terminal()
    machine.keep_freed_memory()
    for word in words:
        one_run.print_results(*evaluate_model(word, overrides))


def evaluate_model(word: str, overrides: list[str]) -> tuple[Path, str, list[int]]:
    """Compute the missing rows of one model; return its folder of results, the split of
    the text, and the lengths.
    """
    source = find(word)
    settings, bos = parse_words(source, overrides)
    config = configuration(source, settings, bos)
    device = machine.current(machine.resolve(settings.runtime.device))
    threads = machine.set_threads(settings.runtime.threads)
    subject = subject_of(
        source, config, precision_of(source, settings.evaluation, device), device
    )
    tokens = text_of(config, settings.runtime.cache)
    folder = Path(settings.runtime.outputs) / STUDY / config.id
    with (
        Run.open(folder, config, ["posbench", "evaluate", word, *overrides]) as run,
        signals_as_errors(),
    ):
        run.begin_attempt(device=str(device), dtype=subject.precision, threads=threads)
        old_digest, digest = (
            (run.record["data"] or {}).get("sha256"),
            tokens.record["sha256"],
        )
        if old_digest not in (None, digest):
            raise UserError(
                f"{folder} has results on another text: restore that, or name the new"
                " one: data.name=NAME"
            )
        record(run, subject, tokens, config.reading)
        if not evaluate_into(run, subject, tokens, settings.evaluation):
            logger.info("all requested rows exist; nothing to do: %s", folder)
        run.finish("done")
    return (
        folder,
        settings.evaluation.split,
        lengths_of(settings.evaluation, settings.training.train_length),
    )


def parse_words(source: Source, words: list[str]) -> tuple[Config, str | None]:
    """Return the configuration in the words (its data, train_length, evaluation and
    runtime are used), and `bos`.
    """
    settings = by_key(words, WORDS | OF_A_FINISHED_RUN)
    length, bos = (
        read(settings.pop("train_length", str(source.train_length))),
        settings.pop("bos", None),
    )
    for key in settings:
        if key not in (LENGTH, *KEYS, *GROUPS):
            raise unknown_key(key, [*KEYS], (*WORDS, "train_length", "bos"))
        of_the_text = key.partition(".")[0] == "data" and key not in (
            "data.tokenizer",
            "data.vocab_size",
        )
        if not of_the_text and key not in (
            *OF_A_FINISHED_RUN.values(),
            "runtime.outputs",
            "runtime.cache",
        ):
            raise UserError(
                f"{key} cannot be set for a HuggingFace model: it has its own value, or"
                " needs none"
            )
    if type(length) is not int or length < 2:
        raise UserError(
            f"{source.origin}: expected train_length=N, its training length in tokens,"
            f" not {length}"
        )
    defaults = {
        "tracking": "none",
        "evaluation.longest": RATIOS[-1],
        "training.train_length": length,
    }
    defaults |= {
        "training.tokens": length,
        "training.batch_size": 1,
        "training.accumulation": 1,
    }
    defaults |= {
        "evaluation.targets": min(
            length, compose.single(["tracking=none"]).evaluation.targets
        )
    }
    if not {"evaluation.length", "evaluation.ratios"} & settings.keys():
        defaults["evaluation.ratios"] = list(RATIOS)
    return (
        compose.single(
            [f"{key}={text}" for key, text in (defaults | settings).items()]
        ),
        bos,
    )


def configuration(
    source: Source, settings: Config, bos: str | None
) -> TrainedElsewhere:
    """Return the configuration of a model's folder of results: what the model is, and
    how it is evaluated on which text.
    """
    text = source.config.get_text_config()
    position = position_of(source.config)
    options = {}
    if position == "rope":
        options["parameters"] = json.loads(json.dumps(text.rope_parameters))
    location = source.origin
    if source.revision is None:
        location = os.path.normpath(location)
    return TrainedElsewhere(
        study=STUDY,
        encoding=EncodingConfig(position, options),
        model=ModelElsewhere(
            name=source.name,
            source=location,
            revision=source.revision,
            sha256=source.sha256(),
            kind=source.kind,
            n_layers=text.num_hidden_layers,
            n_heads=getattr(text, "num_attention_heads", None),
            d_model=text.hidden_size,
        ),
        reading=reading_of(source, bos),
        data=dataclasses.replace(
            settings.data,
            tokenizer=str(source.folder / TOKENIZER),
            vocab_size=int(text.vocab_size),
        ),
        training=TrainingElsewhere(settings.training.train_length),
        # another split counts while there is no test
        evaluation=dataclasses.replace(settings.evaluation, split="test"),
    )


def reading_of(source: Source, bos: str | None) -> ReadingConfig:
    """Return the token before each document, and whether it also begins every window:
    `bos` decides, or the tokenizer.

    The tokenizer names that token if it puts one before a text; else it is the
    configuration's begin or end token.
    """
    if bos not in (None, "document", "window"):
        raise UserError(f"bos is {bos}: expected bos=document or bos=window")
    with library_errors(f"{source.folder / TOKENIZER} is not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_file(str(source.folder / TOKENIZER))
    plain_ids, ids = (
        tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True)
    )
    if ids[:1] != plain_ids[:1]:
        return ReadingConfig(ids[0], bos != "document")
    config = source.config.get_text_config()
    ends = (
        config.eos_token_id
        if isinstance(config.eos_token_id, list)
        else [config.eos_token_id]
    )
    for token in (getattr(config, "bos_token_id", None), *ends[:1]):
        if (
            type(token) is int
            and token < config.vocab_size
            and tokenizer.id_to_token(token) is not None
        ):
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
    return source.precision


def subject_of(
    source: Source, config: TrainedElsewhere, precision: str, device: torch.device
) -> HuggingFaceModel:
    """Return the model as it is evaluated; UserError if it is not causal, or a probe or
    extension is mistyped.
    """
    length, settings = config.training.train_length, config.evaluation
    with machine.out_of_memory_as_failure(
        "a smaller model, or another evaluation.precision,"
    ):
        model = load(source.folder, source.config, precision).to(device)
        first_token = config.reading.separator if config.reading.first else None
        subject = HuggingFaceModel(model, source.name, length, precision, first_token)
        subject.refuse_not_causal()
    check_settings(
        settings,
        length,
        lambda text, longer: subject.varied(Variant(extension=text), longer),
    )
    return subject


def text_of(config: TrainedElsewhere, cache: str | None) -> Tokens:
    """Return the text as the model's tokens; UserError if the model's table has no row
    for one of them.
    """
    with signals_as_errors():
        tokens = data.prepare(config.data, cache, config.reading.separator)
    highest = max(
        int(split.ids.max(initial=0))
        for split in (tokens.train, tokens.validation, tokens.test)
    )
    if highest >= (rows := config.data.vocab_size):
        raise UserError(
            f"the tokenizer belongs to another model: it gives id {highest:,}, its"
            f" table has {rows:,} rows"
        )
    return tokens


def record(
    run: Run, subject: HuggingFaceModel, tokens: Tokens, reading: ReadingConfig
) -> None:
    """Record in `run.json`, and log, the text, the tokenizer, the model's size, and
    whether its kind is tested.
    """
    kind, version, total = (
        subject.model.config.model_type,
        transformers().__version__,
        subject.model.num_parameters(),
    )
    level, text = (
        "tested" if kind in TESTED else "untested",
        tokens.tokenizer.decode([reading.separator]),
    )
    begin = {
        "id": reading.separator,
        "text": text,
        "first_in_every_window": reading.first,
    }
    run.update(
        data={**tokens.record, "separator": begin},
        tokenizer_sha256=tokens.tokenizer.sha256,
        parameters={**run.record["parameters"], "total": total},
        support={"level": level, "transformers": version},
    )
    summary = (
        f"{kind} with transformers {version}: {level}, {total:,} parameters in"
        f" {subject.precision}"
    )
    logger.info(
        "%s; before documents%s: %r",
        summary,
        " and in every window" if reading.first else "",
        text,
    )


def evaluate_into(
    run: Run, subject: HuggingFaceModel, tokens: Tokens, settings: EvaluationConfig
) -> int:
    """Evaluate a model, write the rows to its folder, and return their number."""
    device = subject.model.device
    evaluation = Evaluation(
        subject=subject,
        settings=settings,
        split=getattr(tokens, settings.split),
        tokenizer=tokens.tokenizer,
        checkpoint_step=0,
        tokens=None,  # of training: unknown
        dtype=subject.precision,
        device=device,
    )
    n_rows = rows_into(run, evaluation, every_row(run.folder))
    earlier_peak = run.record["peak_memory_bytes"] or 0
    run.update(peak_memory_bytes=max(earlier_peak, machine.peak_memory(device)))
    return n_rows
