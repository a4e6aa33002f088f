"""Which rows an evaluation has: protocols and tasks, at every length, plain and in the variants to hold it against."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import yaml

from posbench import extend, protocols, tasks
from posbench.config import EvaluationConfig
from posbench.data.tokens import TokenSplit
from posbench.encodings.base import Encoding
from posbench.errors import UserError, did_you_mean
from posbench.protocols import Integers, Windows
from posbench.runs.folder import load_config

Plan = Callable[..., dict[int, tuple[Windows, ...]]]


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the model is changed for a baseline or an extension; as it stands, not at all."""

    window: int | None = None  # keys each query may see
    sinks: int = 0  # keys at the beginning that it sees beside them
    extension: str | None = None  # yarn, or with options yarn:factor=4:beta_fast=16

    @property
    def name(self) -> str | None:
        """The row's `extension`."""
        return "sinks" if self.sinks else self.extension

    def apply(self, encoding: Encoding, length: int, train_length: int) -> tuple[Encoding, dict[str, Any] | None]:
        """The encoding to evaluate with, and the row's `extension_options`.

        Raises:
            UserError: the scheme does not support the extension, or an option is wrong.
        """
        if self.extension is None:
            return encoding, {"sinks": self.sinks} if self.sinks else None
        method, options = parse_extension(self.extension)
        return extend.extended(encoding, method, length, train_length, **options)


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a model reads, and in which variant. Cells that agree on it share the computation."""

    windows: tuple[Windows, ...]  # none: the text is too short
    variant: Variant = Variant()
    rewrite: Callable[[Integers], Integers] | None = None  # of each window's length + 1 tokens

    @property
    def length(self) -> int:
        return self.windows[0].length


@dataclasses.dataclass(frozen=True)
class KeyTokens:
    """Only targets count whose nll under the reference model falls by more than `nats` from one pass to the other."""

    short: Forward
    long: Forward
    nats: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """One row of an evaluation."""

    protocol: str
    length: int  # tokens
    forward: Forward
    stride: int | None = None
    task: str | None = None
    above: int | None = None  # per_position: only predictions with more than so much context, up to `length`
    select: KeyTokens | None = None

    @property
    def possible(self) -> bool:
        """Whether the text is long enough."""
        needed = [self.forward, *((self.select.short, self.select.long) if self.select else ())]
        return all(forward.windows for forward in needed)


def check(settings: EvaluationConfig) -> None:
    """Refuse what can be seen to be wrong before any work.

    Raises:
        UserError: unknown task or extension, or a reference that is no run.
    """
    for name in settings.tasks:
        tasks.probes(name, [], 1, 1)
    for text in settings.extensions:
        method, _ = parse_extension(text)
        if method not in extend.METHODS:
            known = sorted(extend.METHODS)
            raise UserError(f"unknown extension '{method}'{did_you_mean(method, known)} (there are {', '.join(known)})")
    if settings.reference is not None:
        load_config(pathlib.Path(settings.reference))


def parse_extension(text: str) -> tuple[str, dict[str, Any]]:
    """`yarn:factor=4:beta_fast=16` as a method and its options.

    Raises:
        UserError: an option without a value.
    """
    method, *parts = text.split(":")
    options = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"cannot read extension '{text}': expected name:option=value, such as yarn:factor=4")
        options[key] = yaml.safe_load(value)
    return method, options


def cells(settings: EvaluationConfig, split: TokenSplit, train_length: int) -> list[Cell]:
    """All cells that the settings ask for: by protocol, then by task; in each the plain ones come first."""
    lengths = [round(ratio * train_length) for ratio in settings.ratios]
    longest = round((settings.longest or 1) * train_length)
    stride = settings.stride or max(1, train_length // 2)

    @functools.cache  # cells with equal windows share their forward passes
    def planned(protocol: str, targets: int, every: tuple[int, ...]) -> dict[int, tuple[Windows, ...]]:
        return protocols.plan(
            protocol, split, list(every), targets, settings.blocks, settings.documents, stride, longest
        )

    def plan(protocol: str, targets: int = settings.targets, *more: int) -> dict[int, tuple[Windows, ...]]:
        return planned(protocol, targets, tuple(sorted({*lengths, *more})))

    found: list[Cell] = []
    for protocol in settings.protocols:
        if protocol == "fixed_target":
            for variant, length in _varied(settings, lengths, train_length):
                found.append(Cell(protocol, length, Forward(plan(protocol)[length], variant)))
        elif protocol == "per_position":
            found += _by_position(plan("nonoverlap", settings.targets, max(longest, lengths[-1])))
        else:
            step = stride if protocol == "sliding" else None
            found += [Cell(protocol, length, Forward(plan(protocol)[length]), stride=step) for length in lengths]
    for name in settings.tasks:
        found += _of_task(name, settings, lengths, train_length, plan)
    return found


def _varied(settings: EvaluationConfig, lengths: list[int], train_length: int) -> list[tuple[Variant, int]]:
    """Plain, the baselines at the lengths where they differ from it, and the extensions at all lengths."""
    variants = [Variant()]
    if settings.windowed:
        variants.append(Variant(window=train_length))
    if settings.sinks:
        variants.append(Variant(window=train_length, sinks=settings.sinks))
    variants += [Variant(extension=text) for text in settings.extensions]
    return [(v, length) for v in variants for length in lengths if v.window is None or length > v.window]


def _by_position(planned: dict[int, tuple[Windows, ...]]) -> list[Cell]:
    """One cell per range of contexts, all from one pass at the longest length that the text allows."""
    longest = max((length for length, windows in planned.items() if windows), default=None)
    if longest is None:
        return [Cell("per_position", max(planned), Forward(()))]
    forward = Forward(planned[longest])
    edges = protocols.position_edges(longest)
    return [Cell("per_position", edge, forward, above=low) for low, edge in zip([0, *edges], edges, strict=False)]


def _of_task(name: str, settings: EvaluationConfig, lengths: list[int], train_length: int, plan: Plan) -> list[Cell]:
    found = []
    for variant, length in _varied(settings, lengths, train_length):
        for probe in tasks.probes(name, [length], settings.targets, train_length):
            task, select = probe.task, None
            planned = plan("fixed_target", probe.targets)
            if probe.select:
                planned = plan("fixed_target", probe.targets, probe.select.short, probe.select.long)
                short, long = (Forward(planned[c]) for c in (probe.select.short, probe.select.long))
                select = KeyTokens(short, long, probe.select.nats)
                task = task if settings.reference else f"{task}_self"
            forward = Forward(planned[length], variant, probe.rewrite)
            found.append(Cell("task", length, forward, task=task, select=select))
    return found
