"""The rows of an evaluation: protocols and tasks at every length, plain and in the variants it is compared with."""

import dataclasses
import functools
from collections.abc import Callable

from posbench.config.schema import EvaluationConfig
from posbench.data.tokens import TokenSplit
from posbench.evaluation import probes, protocols
from posbench.evaluation.protocols import Integers, Windows
from posbench.evaluation.variants import AS_TRAINED, Variant

Plan = Callable[..., dict[int, tuple[Windows, ...]]]


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward pass: what is read, by which variant of the model. Equal ones are computed once."""

    windows: tuple[Windows, ...]  # none: the text is too short
    variant: Variant = AS_TRAINED
    rewrite: Callable[[Integers], Integers] | None = None  # of each window's length + 1 tokens
    poses: Callable[[probes.Material], probes.Pose] | None = None  # a problem in each window's place

    @property
    def length(self) -> int:
        return self.windows[0].length


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of an evaluation."""

    protocol: str
    length: int  # tokens
    forward: Forward
    stride: int | None = None
    task: str | None = None


def lengths_of(settings: EvaluationConfig, train_length: int) -> list[int]:
    """The lengths to evaluate, in tokens, ascending."""
    return sorted({max(1, round(ratio * train_length)) for ratio in settings.ratios})


def from_training_on(settings: EvaluationConfig, train_length: int) -> list[int]:
    """The lengths to evaluate with every variant, probe and protocol, in tokens, ascending."""
    return [length for length in lengths_of(settings, train_length) if length >= train_length]


def measurements(settings: EvaluationConfig, split: TokenSplit, train_length: int) -> list[Measurement]:
    """All rows that the settings ask for: by protocol, then by task; in each the plain ones come first.

    Below the training length there is `fixed_target` alone, as trained.
    """
    every = lengths_of(settings, train_length)
    lengths = from_training_on(settings, train_length)
    longest = round((settings.longest or 1) * train_length)
    stride = settings.stride or max(1, train_length // 2)

    @functools.cache  # rows with equal windows share their forward passes
    def plan(protocol: str, targets: int = settings.targets) -> dict[int, tuple[Windows, ...]]:
        wanted = every if protocol == "fixed_target" else lengths
        return protocols.plan(
            protocol, split, wanted, targets, settings.blocks, settings.documents, stride, longest, train_length
        )

    rows: list[Measurement] = []
    for protocol in settings.protocols:
        if protocol == "fixed_target":
            below = [(AS_TRAINED, length) for length in every if length < train_length]
            for variant, length in [*below, *varied(settings, lengths, train_length)]:
                rows.append(Measurement(protocol, length, Forward(plan(protocol)[length], variant)))
        else:
            step = stride if protocol == "sliding" else None
            rows += [Measurement(protocol, length, Forward(plan(protocol)[length]), stride=step) for length in lengths]
    for text in settings.tasks:
        rows += _of_probe(text, settings, lengths, train_length, plan)
    return rows


def varied(settings: EvaluationConfig, lengths: list[int], train_length: int) -> list[tuple[Variant, int]]:
    """Plain, the baselines at the lengths where they differ from it, and the extensions at all lengths."""
    variants = [AS_TRAINED]
    if settings.windowed:
        variants.append(Variant(window=train_length))
    if settings.sinks:
        variants.append(Variant(window=train_length, sinks=settings.sinks))
    variants += [Variant(extension=text) for text in settings.extensions]
    return [(v, length) for v in variants for length in lengths if v.window is None or length > v.window]


def _of_probe(
    text: str, settings: EvaluationConfig, lengths: list[int], train_length: int, plan: Plan
) -> list[Measurement]:
    rows = []
    _, colon, options = text.partition(":")
    for variant, length in varied(settings, lengths, train_length):
        for probe in probes.of(text, [length], settings.targets, train_length):
            planned = plan("fixed_target", probe.targets)
            forward = Forward(planned[length], variant, probe.rewrite, probe.poses)
            rows.append(Measurement("task", length, forward, task=f"{probe.task}{colon}{options}"))
    return rows
