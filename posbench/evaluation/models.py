"""Models that can be evaluated: their interface, how they are changed for a baseline or
an extension, and our own GPT.

Whatever implements `Subject` is evaluated like our own models: a model of another
library, or one spread over devices.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from posbench import machine
from posbench.config.overrides import read
from posbench.data.tokens import TokenSplit
from posbench.encodings import extend
from posbench.encodings.base import Encoding, check_length
from posbench.errors import Undefined, UserError
from posbench.evaluation.protocols import Integers, Windows
from posbench.model.gpt import GPT, Reading
from posbench.processes import World
from posbench.randomness import generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_Part = TypeVar("_Part")

HEAD_ROWS = 2048  # rows of fp32 logits held at once
# differences below this share of the logits' SD are rounding
ROUNDING = {"fp32": 1e-3, "bf16": 0.15}


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
        return (
            context
            if self.window is None
            else context.clip(max=self.window + self.sinks)
        )


AS_TRAINED = Variant()


def parse_choice(
    text: str, example: str = "yarn:factor=4"
) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of `yarn:factor=4:beta=16`: an extension, a
    probe, or a variant of a task.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise UserError(
                f"cannot read '{text}': expected name:option=value, such as {example}"
            )
        if key in options:
            raise UserError(f"'{text}' gives {key} twice: expected each option once")
        options[key] = read(value)
    return name, options


class Varied(NamedTuple):
    """A model that was changed."""

    subject: "Subject"
    facts: dict[str, Any] | None  # what was changed, for a row's extension_options


@runtime_checkable
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

    def varied(self, variant: Variant, length: int) -> Varied:
        """Return this model, changed for a baseline or an extension, for windows of
        `length` tokens.

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


def check_finite(nll: Floats, unit: str = "tokens") -> None:
    """Raise NotFinite if a negative log-likelihood is infinite or not a number."""
    if count := int((~np.isfinite(nll)).sum()):
        raise NotFinite(f"nll is not finite at {count:,} of {nll.size:,} {unit}")


class Predicted(NamedTuple):
    """One entry per scored prediction, window by window, in the order of the tokens."""

    nll: Floats  # (n, K): nats of each candidate
    # (n,): the likeliest tokens of the whole vocabulary; (0,) if they were not wanted
    likeliest: Integers


@torch.no_grad()
def predicted(
    subject: Subject,
    ids: Integers,
    scored: Bools,
    first: int,
    candidates: Integers,
    likeliest: bool = True,
) -> Predicted:
    """Return a model's predictions. `ids`, `scored` and `first` are as in
    `Subject.logits`.

    `candidates`: (n, K), tokens that may come next; `likeliest`: also find the
    likeliest tokens, which takes time.
    """
    nll, best, start = [], [torch.empty(0, dtype=torch.int64)], 0
    for logits in subject.logits(ids, scored, first):
        tokens = torch.from_numpy(candidates[start : start + len(logits)]).to(
            logits.device
        )
        nll.append(-logits.log_softmax(-1).gather(1, tokens).cpu())
        if likeliest:
            best.append(logits.argmax(-1).cpu())
        start += len(logits)
    # MPS has no fp64
    return Predicted(torch.cat(nll).double().numpy(), torch.cat(best).numpy())


def differ(logits: Tensor, other: Tensor, precision: str) -> bool:
    """Return whether logits differ by more than rounding."""
    return not bool(
        (logits - other).square().mean().sqrt() <= ROUNDING[precision] * logits.std()
    )


def refuse_not_causal(
    subject: Subject, vocabulary: int, precision: str, name: str
) -> None:
    """Raise UserError unless logits are finite, and later tokens change no earlier
    logits.
    """
    length, half = min(64, subject.train_length), min(64, subject.train_length + 1) // 2
    ids = np.random.default_rng(0).integers(vocabulary, size=(2, length + 1))
    ids[1, :half] = ids[0, :half]
    logits, altered = (
        torch.cat([*subject.logits(row[None], np.arange(length)[None] < half, 0)])
        for row in ids
    )
    if not logits.isfinite().all():
        raise UserError(f"{name}: its logits are not finite in {precision}")
    if differ(logits, altered, precision):
        raise UserError(
            f"{name} is no causal model: later tokens change its earlier logits"
        )


def nll_of(subject: Subject, ids: Integers, scored: int, first: int) -> Floats:
    """Return the nats (B, scored) of the last `scored` tokens of windows (B, C + 1);
    `first` as in `Subject.logits`.
    """
    mask = np.zeros((len(ids), ids.shape[1] - 1), np.bool_)
    mask[:, -scored:] = True
    predictions = predicted(
        subject, ids, mask, first, ids[:, -scored:].reshape(-1, 1), likeliest=False
    )
    return predictions.nll.reshape(-1, scored)


def score(
    subject: Subject,
    split: TokenSplit,
    windows: Windows,
    batch_tokens: int,
    rewrite: Callable[[Integers], Integers] | None = None,
    world: World | None = None,
) -> Floats:
    """Return the negative log-likelihood in nats of every scored token: (windows,
    scored).

    Args:
        batch_tokens: tokens per forward pass; a pass has at least one window.
        rewrite: changes the tokens that a window reads. It gets length + 1 tokens and
            must not change the targets.
        world: the processes that share the forward passes; each of them gets the whole
            result.
    """

    def nll(batch: slice) -> Floats:
        ids = split.ids[
            windows.starts[batch, None] + np.arange(windows.length + 1)
        ].astype(np.int64)
        if rewrite is not None:
            ids = np.stack([rewrite(window) for window in ids])
        return nll_of(subject, ids, windows.scored, batch.start)

    return np.concatenate(
        in_batches(
            world or World(), len(windows.starts), windows.length, batch_tokens, nll
        )
    )


def in_batches(
    world: World,
    count: int,
    length: int,
    batch_tokens: int,
    work: Callable[[slice], _Part],
) -> list[_Part]:
    """Return the results of `work`, called with the numbers of each batch of windows;
    `batch_tokens` as in `score`.
    """
    per_batch = max(1, batch_tokens // length)
    return world.map(
        lambda first: work(slice(first, first + per_batch)), range(0, count, per_batch)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedGPT:
    """A trained model of our own. Its variants are copies: the model stays as it is."""

    model: GPT
    train_length: int
    device: torch.device
    dtype: torch.dtype  # the dtype of matrix products
    seed: int = 0  # the seed of random positions
    reading: Reading = dataclasses.field(default_factory=Reading)
    offset: int = 0  # the first token's position

    @torch.inference_mode()
    def logits(self, ids: Integers, scored: Bools, first: int) -> Iterator[Tensor]:
        encoding, inputs = (
            self._encoding,
            machine.to_device(torch.from_numpy(ids[:, :-1]), self.device),
        )
        length, tail, positions = scored.shape[1], tail_length(scored), None
        if self.offset:
            positions = torch.arange(
                self.offset, self.offset + length, device=inputs.device
            )[None]
        # each window draws them from its own random stream
        if "positions" in encoding.hooks:
            streams = [
                (self.seed, "evaluation", length, number)
                for number in range(first, first + len(ids))
            ]
            generators = [
                generator(*stream, device=inputs.device) for stream in streams
            ]
            positions = torch.cat(
                [
                    encoding.positions(*pair)
                    for pair in zip(inputs[:, None], generators, strict=True)
                ]
            )
        with machine.autocast(self.device, self.dtype):
            hidden = self.model.hidden(
                inputs,
                positions,
                last=tail if tail < length else None,
                reading=self.reading,
            )
        hidden = hidden.flatten(0, 1)
        if not (mask := scored[:, -tail:].ravel()).all():
            hidden = hidden[
                machine.to_device(torch.from_numpy(np.flatnonzero(mask)), self.device)
            ]
        # in pieces: logits are the largest tensor of all
        for states in torch.split(hidden.float(), HEAD_ROWS):
            yield self.model.logits(states)

    def varied(self, variant: Variant, length: int) -> Varied:
        encoding = self.model.encoding
        facts: dict[str, Any] | None = (
            {"sinks": variant.sinks} if variant.sinks else None
        )
        if variant.extension is not None:
            method, options = parse_choice(variant.extension)
            encoding, facts = extend.extend_encoding(
                encoding, method, length, self.train_length, **options
            )
        check_length(encoding, length)
        reading = Reading(encoding.to(self.device), variant.window, variant.sinks)
        return Varied(dataclasses.replace(self, reading=reading), facts)

    def shifted(self, offset: int) -> "TrainedGPT":
        if "positions" in self._encoding.hooks:
            raise Undefined(
                f"'{self._encoding.name}' chooses its own positions: they cannot be"
                " shifted"
            )
        return dataclasses.replace(self, offset=offset)

    @property
    def _encoding(self) -> Encoding:
        return (
            self.model.encoding
            if self.reading.encoding is None
            else self.reading.encoding
        )


def tail_length(scored: Bools) -> int:
    """Return the length of the shortest tail of windows that holds every scored
    prediction (B, C).
    """
    return int(scored.shape[1] - scored.any(axis=0).argmax())
