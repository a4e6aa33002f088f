"""Models that can be evaluated: their interface, how they are changed for a baseline or an extension, and our own GPT.

Whatever implements `Subject` is evaluated like our own models: a model of another library, or one spread over devices.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from posbench import machine
from posbench.config.overrides import read
from posbench.data.tokens import TokenSplit
from posbench.encodings.base import Encoding, check_length
from posbench.encodings.extend import methods
from posbench.errors import Undefined, UserError
from posbench.evaluation.protocols import Integers, Windows
from posbench.model.gpt import GPT, Reading
from posbench.processes import World
from posbench.randomness import generator

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Head = Callable[[Tensor], Tensor]  # hidden states (N, D) to logits (N, V), in fp32
_Part = TypeVar("_Part")

HEAD_ROWS = 2048  # rows of fp32 logits held at once


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model is changed for a baseline or an extension; as it stands, not at all."""

    window: int | None = None  # keys each query may see
    sinks: int = 0  # keys at the beginning that it sees beside them
    extension: str | None = None  # yarn, or with options yarn:factor=4:beta=16

    @property
    def name(self) -> str | None:
        """The row's `extension`."""
        return "sinks" if self.sinks else self.extension

    def visible(self, context: Integers) -> Integers:
        """Return the number of preceding tokens that a prediction sees."""
        return context if self.window is None else context.clip(max=self.window + self.sinks)


AS_TRAINED = Variant()


def parse_choice(text: str, example: str = "yarn:factor=4") -> tuple[str, dict[str, Any]]:
    """Read `yarn:factor=4:beta=16` as a name and its options: so are extensions, probes and variants of tasks written.

    Raises:
        UserError: an option without a value, or given twice.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, typed = part.partition("=")
        if not equals or not typed:
            raise UserError(f"cannot read '{text}': expected name:option=value, such as {example}")
        if key in options:
            raise UserError(f"'{text}' gives {key} twice: expected each option once")
        options[key] = read(typed)
    return name, options


# -- the interface -----------------------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """An entry for each scored prediction: problem by problem, in the order of the tokens."""

    nll: Floats  # nats
    correct: Bools  # the likeliest token was the right one


class Ranked(NamedTuple):
    """Of windows, what is predicted for each of their last A tokens."""

    nll: Floats  # (B, A, K) in nats, of the candidates
    likeliest: Integers  # (B, A), of the whole vocabulary


class Varied(NamedTuple):
    """A model that was changed."""

    subject: "Subject"
    facts: dict[str, Any] | None  # what was done to it: a row's extension_options


@runtime_checkable
class Subject(Protocol):
    """A language model to evaluate."""

    @property
    def name(self) -> str: ...

    @property
    def train_length(self) -> int:
        """In tokens; lengths are multiples of it, and beyond it begins extrapolation."""

    def nll(self, ids: Integers, scored: int, first: int) -> Floats:
        """Return the negative log-likelihoods in nats (B, scored) of each window's last `scored` predictions.

        Args:
            ids: (B, C + 1); a window reads its first C tokens and predicts its last C.
            first: number of the first of these windows among all that are scored together. What a model draws for a
                window must depend on the window's number and length, not on the batch that it comes in.
        """

    def varied(self, variant: Variant, length: int) -> Varied:
        """Return this model, changed for a baseline or an extension, at a length in tokens.

        Raises:
            Undefined: the model does not exist at that length, or has no such extension; a result.
            UserError: the extension is mistyped.
        """


@runtime_checkable
class Solver(Subject, Protocol):
    """A language model that also answers problems. Its variants are solvers, too."""

    def answers(self, ids: Integers, scored: Bools, first: int) -> Answers:
        """Answer problems (B, C + 1), of which predictions (B, C) belong to the answer; `first` as for `nll`."""

    def shifted(self, offset: int) -> "Solver":
        """Return this model with positions that begin at `offset`; raises Undefined if it draws them itself."""


@runtime_checkable
class Ranker(Subject, Protocol):
    """A language model that also ranks candidates for tokens of an answer. Its variants do, too."""

    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        """Rank candidates (B, A, K) for the last A tokens of windows (B, C + 1), each after the tokens before it."""


# -- scoring -----------------------------------------------------------------------------------------------------------


class NotFinite(Exception):
    """A row has failed: it has no numbers."""


def check_finite(nll: Floats, unit: str = "tokens") -> None:
    """Refuse to average what is no finite number.

    Raises:
        NotFinite: a negative log-likelihood is infinite or not a number.
    """
    if wrong := int((~np.isfinite(nll)).sum()):
        raise NotFinite(f"nll is not finite at {wrong:,} of {nll.size:,} {unit}")


def score(
    subject: Subject,
    split: TokenSplit,
    windows: Windows,
    batch_tokens: int,
    rewrite: Callable[[Integers], Integers] | None = None,
    world: World | None = None,
) -> Floats:
    """Return the negative log-likelihood in nats of every scored token: (windows, scored).

    Args:
        batch_tokens: tokens per forward pass, at least one window.
        rewrite: changes what a window reads, given its length + 1 tokens; the targets must stay.
        world: the processes among which the forward passes are divided; all of them get all of the result.
    """

    def nll(some: slice) -> Floats:
        ids = split.ids[windows.starts[some, None] + np.arange(windows.length + 1)].astype(np.int64)
        if rewrite is not None:
            ids = np.stack([rewrite(window) for window in ids])
        return subject.nll(ids, windows.scored, some.start)

    return np.concatenate(in_batches(world or World(), len(windows.starts), windows.length, batch_tokens, nll))


def in_batches(world: World, count: int, length: int, batch_tokens: int, work: Callable[[slice], _Part]) -> list[_Part]:
    """Return the results of `work` for batches of windows, given their numbers, in order; arguments as of `score`."""
    per_batch = max(1, batch_tokens // length)
    return world.map(lambda first: work(slice(first, first + per_batch)), range(0, count, per_batch))


# -- our own models ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedGPT:
    """A trained model of our own, which is not changed by what is tried with it."""

    model: GPT
    name: str
    train_length: int
    device: torch.device  # where the model lies
    dtype: torch.dtype  # of matrix products
    seed: int = 0  # of random positions
    reading: Reading = dataclasses.field(default_factory=Reading)
    offset: int = 0  # the first token's position

    @torch.inference_mode()
    def nll(self, ids: Integers, scored: int, first: int) -> Floats:
        windows = machine.sent(torch.from_numpy(ids), self.device)
        hidden = self._hidden(windows[:, :-1], first, scored).float().flatten(0, 1)
        pieces = _in_pieces(self.model.logits, hidden, windows[:, -scored:].flatten())
        nll = torch.cat([F.cross_entropy(*piece, reduction="none") for piece in pieces])
        return nll.view(-1, scored).cpu().double().numpy()  # MPS has no fp64

    @torch.inference_mode()
    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        inputs = machine.sent(torch.from_numpy(ids[:, :-1]), self.device)
        hidden = self._hidden(inputs, first, candidates.shape[1]).float().flatten(0, 1)
        tokens = torch.from_numpy(candidates).to(self.device).flatten(0, 1)
        pieces = [
            (-logits.log_softmax(-1).gather(1, asked), logits.argmax(-1))
            for logits, asked in _in_pieces(self.model.logits, hidden, tokens)
        ]
        nll, likeliest = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
        return Ranked(nll.double().numpy().reshape(candidates.shape), likeliest.view(candidates.shape[:2]).numpy())

    @torch.inference_mode()
    def answers(self, ids: Integers, scored: Bools, first: int) -> Answers:
        problems = machine.sent(torch.from_numpy(ids), self.device)
        chosen = machine.sent(torch.from_numpy(np.flatnonzero(scored)), self.device)
        hidden = self._hidden(problems[:, :-1], first, scored.shape[1]).flatten(0, 1)[chosen].float()
        labels = problems[:, 1:].flatten()[chosen]
        pieces = [
            (F.cross_entropy(logits, right, reduction="none"), logits.argmax(-1) == right)
            for logits, right in _in_pieces(self.model.logits, hidden, labels)
        ]
        nll, correct = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
        return Answers(nll.double().numpy(), correct.numpy())

    def varied(self, variant: Variant, length: int) -> Varied:
        encoding = self.model.encoding
        facts: dict[str, Any] | None = {"sinks": variant.sinks} if variant.sinks else None
        if variant.extension is not None:
            method, options = parse_choice(variant.extension)
            encoding, facts = methods.extended(encoding, method, length, self.train_length, **options)
        check_length(encoding, length)
        reading = Reading(encoding.to(self.device), variant.window, variant.sinks)
        return Varied(dataclasses.replace(self, reading=reading), facts)

    def shifted(self, offset: int) -> "TrainedGPT":
        if "positions" in self._encoding.hooks:
            raise Undefined(f"'{self._encoding.name}' chooses positions itself: there are none to shift")
        return dataclasses.replace(self, offset=offset)

    @property
    def _encoding(self) -> Encoding:
        return self.model.encoding if self.reading.encoding is None else self.reading.encoding

    def _hidden(self, inputs: Tensor, first: int, last: int) -> Tensor:
        """Return hidden states (B, last, D) of the last tokens of windows (B, T), of which the first has that number.

        An encoding with positions of its own draws each window's from a stream of that window's.
        """
        encoding, length = self._encoding, inputs.shape[1]
        positions = torch.arange(self.offset, self.offset + length, device=inputs.device)[None] if self.offset else None
        if "positions" in encoding.hooks:
            streams = [
                generator(self.seed, "evaluation", length, number, device=inputs.device)
                for number in range(first, first + len(inputs))
            ]
            drawn = [encoding.positions(ids[None], stream) for ids, stream in zip(inputs, streams, strict=True)]
            positions = torch.cat(drawn)
        some = last if last < length else None
        with machine.autocast(self.device, self.dtype):
            return self.model.hidden(inputs, positions, last=some, reading=self.reading)


def _in_pieces(head: Head, hidden: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits beside their labels; in pieces, since logits are the largest tensor of all."""
    for states, ids in zip(torch.split(hidden, HEAD_ROWS), torch.split(labels, HEAD_ROWS), strict=True):
        yield head(states), ids
