"""How a finished run is to be evaluated: settings as they are typed after `posbench evaluate RUN`."""

import dataclasses
from typing import Any, NamedTuple

from posbench.config import schema, suggest
from posbench.config.overrides import OF_A_FINISHED_RUN, SECTIONS, WORDS, pairs, value
from posbench.config.schema import Config, EvaluationConfig, RuntimeConfig
from posbench.errors import UserError


class Asked(NamedTuple):
    """How a finished run is to be evaluated; None: that was not given."""

    settings: EvaluationConfig
    device: str | None = None
    threads: int | None = None  # of the CPU
    processes: int | None = None


def apply(config: Config, words: list[str]) -> Asked:
    """Apply overrides to a run's evaluation settings.

    New lengths are scored on targets that the run's own lengths allow too, so that all rows are paired.

    Raises:
        UserError: an override that cannot be read, an unknown key or a value that does not fit.
    """
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    given = pairs(words, "length=128,256")
    for key, text in given.items():
        if key not in map(WORDS.get, OF_A_FINISHED_RUN):
            near = suggest.near(key, OF_A_FINISHED_RUN) or f" (evaluate takes {', '.join(OF_A_FINISHED_RUN)})"
            raise UserError(f"unknown key '{key}'{near}")
        section, _, name = key.partition(".")
        sections[section][name] = value(key, text)
    evaluation = sections["evaluation"]
    if (lengths := evaluation.pop("length", None)) is not None:
        evaluation["ratios"] = ratios(lengths, config)
    if evaluation["longest"] is None:
        evaluation["longest"] = max(1.0, config.evaluation.ratios[-1])
    settings = schema.validate(EvaluationConfig, evaluation, "evaluation")
    runtime = schema.validate(RuntimeConfig, sections["runtime"], "runtime")
    dataclasses.replace(config, evaluation=settings)  # checks it against the training length
    names = ("device", "threads", "processes")
    return Asked(settings, **{name: getattr(runtime, name) for name in names if f"runtime.{name}" in given})


def ratios(lengths: list[Any], config: Config) -> tuple[float, ...]:
    """Lengths in tokens as multiples of the training length, each once, ascending.

    Raises:
        UserError: not whole numbers from 1 on, or a task, whose problems have lengths of their own.
    """
    train_length = config.training.train_length
    if config.data.task is not None:
        wrong = f"length is in tokens of text, but data '{config.data.name}' is a task"
        raise UserError(f"{wrong}: give ratio=2,4, in longest trained problems")
    if not lengths or not all(type(length) is int and length >= 1 for length in lengths):
        wrong = f"length is {','.join(map(str, lengths))}"
        raise UserError(f"{wrong}: expected lengths in tokens, such as {train_length // 2},{2 * train_length}")
    return tuple(length / train_length for length in sorted(set(lengths)))
