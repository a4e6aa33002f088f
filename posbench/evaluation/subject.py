"""The interface of models that can be evaluated.

Whatever implements `Subject` is evaluated like our own models: a model of another library, or one spread over devices.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.protocols import Integers
from posbench.evaluation.variants import Variant

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@runtime_checkable
class Subject(Protocol):
    """A language model to evaluate."""

    @property
    def name(self) -> str: ...

    @property
    def train_length(self) -> int:
        """In tokens; lengths are multiples of it, and beyond it begins extrapolation."""

    def nll(self, ids: Integers, scored: int, first: int) -> Floats:
        """Negative log-likelihoods in nats (B, scored) of each window's last `scored` predictions.

        Args:
            ids: (B, C + 1); a window reads its first C tokens and predicts its last C.
            first: number of the first of these windows among all that are scored together. What a model draws for a
                window must depend on the window's number and length, not on the batch that it comes in.
        """

    def varied(self, variant: Variant, length: int) -> "Varied":
        """This model, changed for a baseline or an extension, at a length in tokens.

        Raises:
            Undefined: the model does not exist at that length, or has no such extension; a result.
            UserError: the extension is mistyped.
        """


@runtime_checkable
class Solver(Subject, Protocol):
    """A language model that also answers problems. Its variants are solvers, too."""

    def answers(self, ids: Integers, scored: Bools, first: int) -> "Answers":
        """Answer problems.

        Args:
            ids: (B, C + 1); of a problem its first C tokens are read and its last C predicted.
            scored: (B, C), which predictions belong to the answer.
            first: number of the first of these problems, as for `nll`.
        """

    def shifted(self, offset: int) -> "Solver":
        """This model with positions that begin at `offset`.

        Raises:
            Undefined: it draws its positions itself.
        """


@runtime_checkable
class Ranker(Subject, Protocol):
    """A language model that also ranks candidates for tokens of an answer. Its variants do, too."""

    def ranked(self, ids: Integers, candidates: Integers, first: int) -> "Ranked":
        """Rank candidates for each of the last A tokens, each after the tokens before it.

        Args:
            ids: (B, C + 1), of which the first C are read.
            candidates: (B, A, K), for the last A of them.
            first: number of the first of these windows, as for `nll`.
        """


@dataclasses.dataclass(frozen=True)
class Answers:
    """An entry for each scored prediction: problem by problem, in the order of the tokens."""

    nll: Floats  # nats
    correct: Bools  # the likeliest token was the right one

    @classmethod
    def joined(cls, parts: "Sequence[Answers]") -> "Answers":
        return cls(np.concatenate([part.nll for part in parts]), np.concatenate([part.correct for part in parts]))


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Of windows, what is predicted for each of their last A tokens."""

    nll: Floats  # (B, A, K) in nats, of the candidates
    likeliest: Integers  # (B, A), of the whole vocabulary

    @classmethod
    def joined(cls, parts: "Sequence[Ranked]") -> "Ranked":
        return cls(np.concatenate([part.nll for part in parts]), np.concatenate([part.likeliest for part in parts]))


@dataclasses.dataclass(frozen=True)
class Varied:
    subject: Subject
    facts: dict[str, Any] | None  # what was done to it: a row's extension_options
