"""Our own models as subjects of an evaluation."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import machine
from posbench.encodings.base import Encoding, check_length
from posbench.encodings.extend import methods
from posbench.errors import Undefined
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Answers, Bools, Floats, Ranked, Varied
from posbench.evaluation.variants import Variant, parse_choice
from posbench.model.gpt import GPT, Reading
from posbench.randomness import generator

Head = Callable[[Tensor], Tensor]  # hidden states (N, D) to logits (N, V), in fp32

HEAD_ROWS = 2048  # rows of fp32 logits held at once


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
        inputs, targets = windows[:, :-1], windows[:, -scored:]
        hidden = self._hidden(inputs, first, scored)
        nll = nll_of(self.model.logits, hidden.float().flatten(0, 1), targets.flatten())
        return nll.view(-1, scored).cpu().double().numpy()  # MPS has no fp64

    @torch.inference_mode()
    def ranked(self, ids: Integers, candidates: Integers, first: int) -> Ranked:
        inputs = machine.sent(torch.from_numpy(ids[:, :-1]), self.device)
        hidden = self._hidden(inputs, first, candidates.shape[1])
        return ranked_by(self.model.logits, hidden.float(), torch.from_numpy(candidates))

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
        """Hidden states (B, last, D) of the last tokens of windows (B, T), of which the first has that number."""
        some = last if last < inputs.shape[1] else None
        with machine.autocast(self.device, self.dtype):
            return self.model.hidden(inputs, self._positions(inputs, first), last=some, reading=self.reading)

    def _positions(self, ids: Tensor, first: int) -> Tensor | None:
        """Positions (1, T) that are shifted; (B, T) of encodings with their own, each window's from its own stream."""
        encoding = self._encoding
        if "positions" not in encoding.hooks:
            return (
                torch.arange(self.offset, self.offset + ids.shape[1], device=ids.device)[None] if self.offset else None
            )
        numbers = range(first, first + len(ids))
        streams = [generator(self.seed, "evaluation", ids.shape[1], number, device=ids.device) for number in numbers]
        drawn = [encoding.positions(window[None], stream) for window, stream in zip(ids, streams, strict=True)]
        return torch.cat(drawn)


def nll_of(head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
    """Of labels (N,) after hidden states (N, D): (N,) in nats, by a head and a softmax in fp32."""
    return torch.cat([F.cross_entropy(*piece, reduction="none") for piece in _in_pieces(head, hidden, labels)])


def ranked_by(head: Head, hidden: Tensor, candidates: Tensor) -> Ranked:
    """Of candidates (B, A, K) after hidden states (B, A, D), by a head and a softmax in fp32."""
    pieces = [
        (-logits.log_softmax(-1).gather(1, tokens), logits.argmax(-1))
        for logits, tokens in _in_pieces(head, hidden.flatten(0, 1), candidates.to(hidden.device).flatten(0, 1))
    ]
    nll, likeliest = (torch.cat(parts).cpu() for parts in zip(*pieces, strict=True))
    return Ranked(nll.double().numpy().reshape(candidates.shape), likeliest.view(candidates.shape[:2]).numpy())


def _in_pieces(head: Head, hidden: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits beside their labels; in pieces, since logits are the largest tensor of all."""
    for states, ids in zip(torch.split(hidden, HEAD_ROWS), torch.split(labels, HEAD_ROWS), strict=True):
        yield head(states), ids
