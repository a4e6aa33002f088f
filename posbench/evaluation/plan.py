"""The rows of an evaluation: each protocol and probe at every length, for the plain
model and for its variants.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from posbench.config.schema import Config, EvaluationConfig
from posbench.data.tokens import TokenSplit
from posbench.encodings import extend
from posbench.errors import Undefined, UserError
from posbench.evaluation import probes, protocols
from posbench.evaluation.models import AS_TRAINED, Variant, parse_choice
from posbench.evaluation.protocols import MIN_BLOCKS, Integers, Windows
from posbench.processes import World
from posbench.run.rows import EvaluationRow

# a row; what fills in its numbers
Planned = tuple[EvaluationRow, Callable[[EvaluationRow], EvaluationRow]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyEvaluation:
    """An evaluation of a model, on a text or on a task."""

    settings: EvaluationConfig
    checkpoint_step: int
    tokens: int | None = None  # tokens of training; None: unknown
    dtype: str  # the precision of the model, as rows name it: bf16, fp32
    device: torch.device  # the device whose memory is measured
    # the processes that share the forward passes
    world: World = dataclasses.field(default_factory=World)

    def planned(self) -> list[Planned]:
        """Return all rows that the settings ask for, with what is known of them before
        their forward passes.
        """
        raise NotImplementedError

    def row(self, **columns: Any) -> EvaluationRow:
        """Return a row that has yet to be computed."""
        columns |= {
            "split": self.settings.split,
            "checkpoint_step": self.checkpoint_step,
            "tokens": self.tokens,
        }
        return EvaluationRow(status="ok", dtype=self.dtype, **columns)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of an evaluation on text. Two are equal if their forward passes are,
    whatever the rows are called.
    """

    protocol: str = dataclasses.field(compare=False)
    length: int  # tokens
    windows: Windows | None  # None: the text is too short
    variant: Variant = AS_TRAINED
    offset: int = 0  # the position of a window's first token
    # changes each window's length + 1 tokens
    rewrite: Callable[[Integers], Integers] | None = None
    # puts a problem in each window's place
    poses: Callable[[probes.Material], probes.Pose] | None = None
    task: str | None = dataclasses.field(default=None, compare=False)


def lengths_of(
    settings: EvaluationConfig, train_length: int, shortest: int = 1
) -> list[int]:
    """Return the lengths to evaluate from `shortest` on, in tokens, ascending."""
    lengths = {max(1, round(ratio * train_length)) for ratio in settings.ratios}
    return sorted(length for length in lengths if length >= shortest)


def measurements(
    settings: EvaluationConfig, split: TokenSplit, train_length: int
) -> list[Measurement]:
    """Return all rows that the settings ask for: protocols, then probes. The plain rows
    of each come first.

    Lengths below the training length have only `fixed_target` rows of the unchanged
    model.
    """
    all_lengths, lengths = (
        lengths_of(settings, train_length),
        lengths_of(settings, train_length, train_length),
    )
    longest = round((settings.longest or 1) * train_length)

    @functools.cache  # rows with equal windows share their forward passes
    def plan(protocol: str, targets: int) -> dict[int, Windows]:
        # `offset` reads that length
        planned = (
            sorted({*all_lengths, train_length}) if settings.tasks else all_lengths
        )
        selected, of_text = (
            planned if protocol == "fixed_target" else lengths,
            (settings.blocks, settings.documents),
        )
        return protocols.plan(
            protocol, split, selected, targets, *of_text, longest, train_length
        )

    below = [(AS_TRAINED, length) for length in all_lengths if length < train_length]
    rows: list[Measurement] = []
    for protocol in settings.protocols:
        variants = [(AS_TRAINED, length) for length in lengths]
        if protocol == "fixed_target":
            variants = [*below, *varied(settings, lengths, train_length)]
        windows_of = plan(protocol, settings.targets)
        rows += [
            Measurement(protocol, length, windows_of.get(length), variant)
            for variant, length in variants
        ]
    for text in settings.tasks:
        task, colon, options = text.partition(":")
        # the first is the baseline
        probe_lengths = (
            sorted({train_length, *lengths}) if task == "offset" else lengths
        )
        for variant, length in varied(settings, probe_lengths, train_length):
            for probe in probes.of(text, [length], settings.targets, train_length):
                windows, name = (
                    plan("fixed_target", probe.targets).get(probe.length),
                    f"{probe.task}{colon}{options}",
                )
                if variant.window and probe.length <= variant.window:
                    continue
                of_probe = (probe.offset, probe.rewrite, probe.poses, name)
                rows.append(
                    Measurement("task", probe.length, windows, variant, *of_probe)
                )
    return rows


def varied(
    settings: EvaluationConfig, lengths: list[int], train_length: int
) -> list[tuple[Variant, int]]:
    """Return variants with lengths: plain, baselines where they differ from it, and
    extensions at all lengths.
    """
    variants = [AS_TRAINED]
    if settings.windowed:
        variants.append(Variant(window=train_length))
    if settings.sinks:
        variants.append(Variant(window=train_length, sinks=settings.sinks))
    variants += [Variant(extension=text) for text in settings.extensions]
    return [
        (v, length)
        for v in variants
        for length in lengths
        if v.window is None or length > v.window
    ]


def check(config: Config) -> None:
    """Raise UserError for settings that cannot be met. What an encoding lacks becomes
    an `undefined` row instead.
    """
    train_length = config.training.train_length

    def extended(text: str, length: int) -> None:
        method, options = parse_choice(text)
        extend.extend_encoding(
            config.build_encoding(), method, length, train_length, **options
        )

    check_settings(config.evaluation, train_length, extended)


def check_settings(
    settings: EvaluationConfig,
    train_length: int,
    extended: Callable[[str, int], object],
) -> None:
    """Raise UserError for settings that no model can meet; `extended` stretches the
    model to a length in tokens.
    """
    if settings.blocks < MIN_BLOCKS and "fixed_target" in settings.protocols:
        raise UserError(
            f"evaluation.blocks is {settings.blocks}: expected at least {MIN_BLOCKS},"
            " for an interval"
        )
    for text in settings.tasks:
        probes.of(text, [], settings.targets, train_length)
    # at every length: the allowed options can depend on it
    for text in settings.extensions:
        for length in lengths_of(settings, train_length, train_length):
            with contextlib.suppress(Undefined):
                extended(text, length)
