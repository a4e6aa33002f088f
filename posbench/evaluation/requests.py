"""The rows of an evaluation: each protocol and probe at every length, for the plain
model and for its variants.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from posbench.config.overrides import parse_choice
from posbench.config.schema import Config, EvaluationConfig
from posbench.data.tokens import TokenSplit
from posbench.encodings import extend
from posbench.errors import Undefined, UserError
from posbench.evaluation import probes, protocols
from posbench.evaluation.protocols import MIN_BLOCKS, Integers, Windows
from posbench.evaluation.subjects import AS_TRAINED, Variant
from posbench.processes import World
from posbench.run.rows import PAIRED, WINDOWED, EvaluationRow

# What an evaluation has of a row before its forward passes: the row with all that is
# known by then, and the function that makes them and returns the row with its numbers.
# None: the row says why there is no number.
Requested = tuple[EvaluationRow, Callable[[], EvaluationRow] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyEvaluation:
    """An evaluation of a model, on a text or on a task."""

    settings: EvaluationConfig
    checkpoint_step: int
    trained_tokens: int | None = None  # None: unknown
    dtype: str  # the precision of the model, as rows name it: bf16, fp32
    device: torch.device  # the device whose memory is measured
    # the processes that share the forward passes
    world: World = dataclasses.field(default_factory=World)

    def requested(self, existing: Sequence[EvaluationRow] = ()) -> list[Requested]:
        """Return all rows that the settings ask for, and on text those of the present
        curves, so that all share their targets.
        """
        raise NotImplementedError

    def row(self, **columns: Any) -> EvaluationRow:
        """Return a row that has yet to be computed."""
        return EvaluationRow(
            split=self.settings.split,
            checkpoint_step=self.checkpoint_step,
            tokens=self.trained_tokens,
            status="ok",
            dtype=self.dtype,
            **columns,
        )


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one row of an evaluation on text measures. Two are equal if their forward
    passes are, whatever the rows are called.
    """

    protocol: str = dataclasses.field(compare=False)
    length: int  # tokens
    targets: int = dataclasses.field(compare=False)  # of a block, in `fixed_target`
    windows: Windows | None = None  # None: the text is too short, or not asked yet
    variant: Variant = AS_TRAINED
    offset: int = 0  # the position of a window's first token
    # changes each window's length + 1 tokens
    rewrite: Callable[[Integers], Integers] | None = None
    # makes, from the text, the function that puts a problem in a window's place
    pose_from: Callable[[probes.Material], probes.Pose] | None = None
    task: str | None = dataclasses.field(default=None, compare=False)

    def columns(self, train_length: int) -> dict[str, Any]:
        """Return what its row has in columns that need no windows."""
        return {
            "protocol": self.protocol,
            "length": self.length,
            "length_ratio": self.length / train_length,
            "window": self.variant.window,
            "extension": self.variant.name,
            "task": self.task,
            "offset": self.offset or None,
        }


def lengths_of(settings: EvaluationConfig, train_length: int) -> list[int]:
    """Return the lengths to evaluate in tokens, ascending."""
    return sorted({max(1, round(ratio * train_length)) for ratio in settings.ratios})


def measurements(settings: EvaluationConfig, train_length: int) -> list[Measurement]:
    """Return all that the settings ask for, without windows: protocols, then probes.
    The plain measurements of each come first.

    Lengths below the training length have only `fixed_target` of the unchanged model.
    """
    all_lengths = lengths_of(settings, train_length)
    shorter = [length for length in all_lengths if length < train_length]
    lengths = [length for length in all_lengths if length >= train_length]

    asked = []
    for protocol in settings.protocols:
        points = [(AS_TRAINED, length) for length in lengths]
        if protocol == "fixed_target":
            points = [(AS_TRAINED, length) for length in shorter]
            points += variants_at(settings, lengths, train_length)
        for variant, length in points:
            measurement = Measurement(
                protocol, length, settings.targets, variant=variant
            )
            asked.append(measurement)
    for text in settings.probes:
        of_probe = lengths
        if text == "offset":  # its first row is the baseline
            of_probe = sorted({train_length, *lengths})
        _, colon, options = text.partition(":")
        for variant, length in variants_at(settings, of_probe, train_length):
            for probe in probes.of(text, length, settings.targets, train_length):
                # A window of the probe's length hides nothing, so that it would be the
                # plain one. `offset` reads the training length only.
                if variant.window is not None and probe.length <= variant.window:
                    continue
                measurement = Measurement(
                    "task",
                    probe.length,
                    probe.targets,
                    variant=variant,
                    offset=probe.offset,
                    rewrite=probe.rewrite,
                    pose_from=probe.pose_from,
                    task=f"{probe.name}{colon}{options}",
                )
                asked.append(measurement)
    return asked


def settings_for(
    rows: Sequence[EvaluationRow], settings: EvaluationConfig, train_length: int
) -> EvaluationConfig:
    """Return settings that ask for at least these rows on text, otherwise as given."""
    measured = {row.protocol for row in rows}
    # A row of the probe `offset` begins at the offset and ends where the asked length
    # ends.
    ratios = {(row.length + (row.offset or 0)) / train_length for row in rows}
    # dictionaries keep the order of the rows
    asked_probes: dict[str, None] = {}
    extensions: dict[str, None] = {}
    sinks = 0
    for row in rows:
        # Other rows of a probe, such as `repeat_control`, come with its first one.
        if row.task and row.task.partition(":")[0] in probes.names():
            asked_probes[row.task] = None
        if row.extension == "sinks":
            sinks = (row.extension_options or {}).get("sinks", sinks)
        elif row.extension:
            extensions[row.extension] = None

    return dataclasses.replace(
        settings,
        protocols=tuple(name for name in PAIRED if name in measured),
        ratios=tuple(ratios),
        windowed=any(row.variant == WINDOWED for row in rows),
        sinks=sinks,
        extensions=tuple(extensions),
        probes=tuple(asked_probes),
    )


def with_windows(
    asked: Sequence[Measurement],
    settings: EvaluationConfig,
    split: TokenSplit,
    train_length: int,
) -> list[Measurement]:
    """Return the measurements with their windows. Their targets allow the longest of
    all their lengths for which the text suffices.
    """
    lengths = sorted({train_length, *(each.length for each in asked)})
    # None: none longer is allowed for
    longest = round((settings.longest or 1) * train_length)

    @functools.cache  # those with equal windows share their forward passes
    def windows_of(protocol: str, targets: int) -> dict[int, Windows]:
        return protocols.place_windows(
            protocol,
            split,
            lengths,
            targets,
            settings.blocks,
            settings.documents,
            longest,
            train_length,
        )

    placed = []
    for measurement in asked:
        protocol = measurement.protocol
        if protocol == "task":
            protocol = "fixed_target"
        windows = windows_of(protocol, measurement.targets).get(measurement.length)
        placed.append(dataclasses.replace(measurement, windows=windows))
    return placed


def variants_at(
    settings: EvaluationConfig, lengths: list[int], train_length: int
) -> list[tuple[Variant, int]]:
    """Return variants with lengths: plain, baselines where they differ from it, and
    extensions at all lengths.
    """
    longer = [length for length in lengths if length > train_length]
    points = [(AS_TRAINED, length) for length in lengths]
    if settings.windowed:
        windowed = Variant(window=train_length)
        points += [(windowed, length) for length in longer]
    if settings.sinks:
        sinks = Variant(window=train_length, sinks=settings.sinks)
        points += [(sinks, length) for length in longer]
    for text in settings.extensions:
        points += [(Variant(extension=text), length) for length in lengths]
    return points


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


def refuse_missing_extensions(config: Config) -> None:
    """Raise UserError for an extension that the encoding does not have: none of its
    rows would have a number.
    """
    encoding = config.build_encoding()
    for text in config.evaluation.extensions:
        method, _ = parse_choice(text)
        extend.refuse_method(encoding, method)


def check_settings(
    settings: EvaluationConfig,
    train_length: int,
    extended: Callable[[str, int], object],
) -> None:
    """Raise UserError for settings that no model can meet; `extended` stretches the
    model to a length in tokens.
    """
    # a probe's windows are placed as those of fixed_target
    needs_blocks = settings.probes or "fixed_target" in settings.protocols
    if settings.blocks < MIN_BLOCKS and needs_blocks:
        raise UserError(
            f"evaluation.blocks is {settings.blocks}: expected at least {MIN_BLOCKS},"
            " for an interval"
        )
    for text in settings.probes:
        probes.of(text, train_length, settings.targets, train_length)
    # at every length: the allowed options can depend on it
    for text in settings.extensions:
        for length in lengths_of(settings, train_length):
            if length < train_length:
                continue
            with contextlib.suppress(Undefined):
                extended(text, length)
