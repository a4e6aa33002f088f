"""Models that can be evaluated: their interface, how they are changed for a baseline or
an extension, and our own GPT.

Whatever implements `Subject` is evaluated like our own models: a model of another
library, or one spread over devices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench import machine
from posbench.config.overrides import parse_choice
from posbench.data.tokens import TokenSplit
from posbench.encodings import extend
from posbench.encodings.base import Encoding, check_length
from posbench.errors import Undefined
from posbench.evaluation.protocols import Integers, Windows
from posbench.model.gpt import GPT, ChangedReading
from posbench.processes import World
from posbench.randomness import generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Facts = dict[str, Any] | None  # what was changed, for a row's extension_options
_Part = TypeVar("_Part")

HEAD_ROWS = 2048  # rows of fp32 logits held at once
# differences below this share of the logits' SD are rounding
ROUNDING = {"fp32": 1e-3, "bf16": 0.15}
# why a model is refused
NOT_FINITE = "its logits are not finite"
READS_LATER = "later tokens change its earlier logits"
# What is measured of each scored token of a text beside its nll: functions of logits
# (n, V) and tokens (n,) that return (n,). Each has the name of the field of
# `EvaluationRow` that gets the mean.
METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model is changed for a baseline or an extension. The default leaves it
    unchanged.
    """

    window: int | None = None  # keys that each query may see; None: all
    sinks: int = 0  # keys at the beginning that each query also sees
    # a method with its options, such as yarn:factor=4:beta=16
    extension: str | None = None

    @property
    def name(self) -> str | None:
        """The value of a row's column `extension`."""
        return "sinks" if self.sinks else self.extension

    def visible(self, context: Integers) -> Integers:
        """Return the number of preceding tokens that a prediction sees."""
        if self.window is None:
            return context
        return context.clip(max=self.window + self.sinks)


AS_TRAINED = Variant()


class Subject(Protocol):
    """A language model to evaluate."""

    @property
    def train_length(self) -> int:
        """The training length in tokens. Evaluated lengths are multiples of it; longer
        ones need extrapolation.
        """

    def logits(self, ids: Integers, scored: Bools, first: int) -> Iterator[Tensor]:
        """Yield the logits (n, V) in fp32 of scored predictions, window by window, in
        pieces that fit into memory.

        Args:
            ids: (B, C + 1); a window reads its first C tokens and predicts its last C.
            scored: (B, C), whether each of these predictions is wanted.
            first: the number of the first window, counted over all windows that are
                scored together. Random draws for a window must depend on the window's
                number and length, not on its batch.
        """

    def in_variant(self, variant: Variant, length: int) -> tuple["Subject", Facts]:
        """Return this model, changed for a baseline or an extension, for windows of
        `length` tokens, and what was changed.

        Raises:
            Undefined: the model does not exist at that length or has no such extension.
                The row is then `undefined`.
            UserError: the extension is mistyped.
        """

    def shifted(self, offset: int) -> "Subject":
        """Return this model with positions that begin at `offset`; raises Undefined if
        it has no such positions.
        """


class NotFinite(Exception):
    """Raised for a loss that is infinite or NaN: the row has failed and gets no
    numbers.
    """


def check_finite(nll: Floats) -> None:
    """Raise NotFinite if a negative log-likelihood is infinite or not a number."""
    count = int((~np.isfinite(nll)).sum())
    if count:
        raise NotFinite(f"nll is not finite at {count:,} of {nll.size:,} tokens")


@torch.no_grad()
def predicted(
    subject: Subject,
    ids: Integers,
    scored: Bools,
    first: int,
    candidates: Integers,
) -> tuple[Tensor, Tensor]:
    """Return the nats (n, K) of each candidate and the likeliest token (n,) of the
    vocabulary, for each scored prediction, window by window, in the order of the
    tokens; on the model's device, for which the host does not wait. `ids`, `scored` and
    `first` are as in `Subject.logits`.

    `candidates`: (n, K), tokens that may come next.
    """
    tokens = torch.from_numpy(candidates)
    nll = []
    best = []
    start = 0
    for logits in subject.logits(ids, scored, first):
        end = start + len(logits)
        tokens = machine.to_device(tokens, logits.device)
        nll.append(-logits.log_softmax(-1).gather(1, tokens[start:end]))
        best.append(logits.argmax(-1))
        start = end
    return torch.cat(nll), torch.cat(best)


def logits_differ(logits: Tensor, other: Tensor, precision: str) -> bool:
    """Return whether logits differ by more than rounding."""
    difference = (logits - other).square().mean().sqrt()
    return not bool(difference <= ROUNDING[precision] * logits.std())  # NaN differs


def why_not_causal(subject: Subject, vocabulary: int, precision: str) -> str:
    """Return what is wrong, `NOT_FINITE` or `READS_LATER`; empty if nothing is."""
    length = min(64, subject.train_length)
    half = min(64, subject.train_length + 1) // 2
    ids = np.random.default_rng(0).integers(vocabulary, size=(2, length + 1))
    # later tokens that repeat earlier ones show what counts equal tokens
    ids[1] = np.resize(ids[0, :half], length + 1)
    scored = np.arange(length)[None] < half

    logits = torch.cat([*subject.logits(ids[:1], scored, 0)])
    altered = torch.cat([*subject.logits(ids[1:], scored, 0)])
    if not logits.isfinite().all():
        return NOT_FINITE
    if logits_differ(logits, altered, precision):
        return READS_LATER
    return ""


def numbers_of(subject: Subject, ids: Integers, scored: int, first: int) -> Tensor:
    """Return the nats of the last `scored` tokens of windows (B, C + 1), then what
    `METRICS` measures of them: (1 + metrics, B, scored), on the subject's device; the
    host does not wait for them. `first` as in `Subject.logits`.
    """
    mask = np.zeros((len(ids), ids.shape[1] - 1), np.bool_)
    mask[:, -scored:] = True
    labels = torch.from_numpy(ids[:, -scored:].ravel())

    pieces = []
    start = 0
    with torch.no_grad():
        for logits in subject.logits(ids, mask, first):
            end = start + len(logits)
            labels = machine.to_device(labels, logits.device)
            tokens = labels[start:end]
            nll = -logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            numbers = [nll]
            for metric in METRICS.values():
                numbers.append(metric(logits, tokens).to(nll.dtype))
            pieces.append(torch.stack(numbers))
            start = end
    return torch.cat(pieces, 1).view(-1, len(ids), scored)


def on_host(tensors: Sequence[Tensor]) -> list[Floats]:
    """Return tensors in fp64 on the host, which waits for the device once."""
    # MPS has no fp64
    return [tensor.double().numpy() for tensor in machine.to_host(tensors)]


def score(
    subject: Subject,
    split: TokenSplit,
    windows: Windows,
    batch_tokens: int,
    rewrite: Callable[[Integers], Integers] | None = None,
    world: World | None = None,
) -> Floats:
    """Return the negative log-likelihood in nats of every scored token, and its
    metrics: (1 + metrics, windows, scored).

    Args:
        batch_tokens: tokens per forward pass; a pass has at least one window.
        rewrite: changes the tokens that a window reads. It gets length + 1 tokens and
            must not change the targets.
        world: the processes that share the forward passes; each of them gets the whole
            result.
    """

    places = np.arange(windows.length + 1)

    def numbers(batches: Sequence[slice]) -> list[Floats]:
        on_device = []
        for batch in batches:
            ids = split.ids[windows.starts[batch, None] + places].astype(np.int64)
            if rewrite is not None:
                ids = np.stack([rewrite(window) for window in ids])
            on_device.append(numbers_of(subject, ids, windows.scored, batch.start))
        return on_host(on_device)

    n_windows = len(windows.starts)
    world = world or World()
    parts = in_batches(world, n_windows, windows.length, batch_tokens, numbers)
    return np.concatenate(parts, axis=1)


def in_batches(
    world: World,
    count: int,
    length: int,
    batch_tokens: int,
    work: Callable[[Sequence[slice]], list[_Part]],
) -> list[_Part]:
    """Return the results of batches of windows; `work` gets the numbers of the windows
    in each batch of this process. `batch_tokens` as in `score`.
    """
    size = max(1, batch_tokens // length)
    batches = [slice(first, first + size) for first in range(0, count, size)]
    return world.map(work, batches)


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedGPT:
    """A trained model of our own. Its variants are copies: the model stays as it is."""

    model: GPT
    train_length: int
    device: torch.device
    dtype: torch.dtype  # the dtype of matrix products
    seed: int = 0  # the seed of random positions
    reading: ChangedReading = dataclasses.field(default_factory=ChangedReading)
    offset: int = 0  # the first token's position

    @torch.inference_mode()
    def logits(self, ids: Integers, scored: Bools, first: int) -> Iterator[Tensor]:
        inputs = machine.to_device(torch.from_numpy(ids[:, :-1]), self.device)
        length = inputs.shape[1]
        tail = tail_length(scored)
        last = tail if tail < length else None
        with machine.autocast(self.device, self.dtype):
            hidden = self.model.hidden(
                inputs,
                self._positions(inputs, first),
                last=last,
                reading=self.reading,
            )  # (B, tail, D)
        hidden = hidden.flatten(0, 1)

        wanted = scored[:, -tail:].ravel()
        if not wanted.all():
            rows = torch.from_numpy(np.flatnonzero(wanted))
            hidden = hidden[machine.to_device(rows, self.device)]
        # in pieces: logits are the largest tensor of all
        for states in torch.split(hidden.float(), HEAD_ROWS):
            yield self.model.logits(states)

    def _positions(self, inputs: Tensor, first: int) -> Tensor | None:
        """Return the positions (1|B, T) of inputs (B, T); None: the encoding's own."""
        length = inputs.shape[1]
        if self.offset:
            end = self.offset + length
            return torch.arange(self.offset, end, device=inputs.device)[None]
        encoding = self._encoding
        if "positions" not in encoding.hooks:
            return None

        # each window draws them from its own random stream
        drawn = []
        for number, window in enumerate(inputs, first):
            stream = (self.seed, "evaluation", length, number)
            rng = generator(*stream, device=inputs.device)
            drawn.append(encoding.positions(window[None], rng))
        return torch.cat(drawn)

    def in_variant(self, variant: Variant, length: int) -> tuple["TrainedGPT", Facts]:
        encoding = self.model.encoding
        facts: Facts = None
        if variant.sinks:
            facts = {"sinks": variant.sinks}
        if variant.extension is not None:
            method, options = parse_choice(variant.extension)
            encoding, facts = extend.extend_encoding(
                encoding, method, length, self.train_length, **options
            )
        check_length(encoding, length)
        reading = ChangedReading(
            encoding.to(self.device), variant.window, variant.sinks
        )
        return dataclasses.replace(self, reading=reading), facts

    def shifted(self, offset: int) -> "TrainedGPT":
        encoding = self._encoding
        if "positions" in encoding.hooks:
            raise Undefined(
                f"'{encoding.name}' chooses its own positions: they cannot be shifted"
            )
        return dataclasses.replace(self, offset=offset)

    @property
    def _encoding(self) -> Encoding:
        if self.reading.encoding is not None:
            return self.reading.encoding
        return self.model.encoding


def tail_length(scored: Bools) -> int:
    """Return the length of the shortest tail of windows that holds every scored
    prediction (B, C).
    """
    return int(scored.shape[1] - scored.any(axis=0).argmax())
