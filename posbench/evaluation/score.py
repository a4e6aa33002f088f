"""Negative log-likelihoods of the tokens that windows score."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from posbench.data.tokens import TokenSplit
from posbench.evaluation.protocols import Integers, Windows
from posbench.evaluation.subject import Floats, Subject
from posbench.processes import World

_Part = TypeVar("_Part")


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
    """Negative log-likelihood in nats of every scored token: (windows, scored).

    Args:
        batch_tokens: tokens per forward pass, at least one window.
        rewrite: changes what a window reads, given its length + 1 tokens; the targets must stay.
        world: the processes among which the forward passes are divided; all of them get all of the result.
    """

    def nll(some: slice) -> Floats:
        index = windows.starts[some, None] + np.arange(windows.length + 1)
        ids = split.ids[index].astype(np.int64)
        if rewrite is not None:
            ids = np.stack([rewrite(window) for window in ids])
        return subject.nll(ids, windows.scored, some.start)

    return np.concatenate(in_batches(world or World(), len(windows.starts), windows.length, batch_tokens, nll))


def in_batches(world: World, count: int, length: int, batch_tokens: int, work: Callable[[slice], _Part]) -> list[_Part]:
    """The results of `work` for batches of windows, in their order.

    Args:
        world: the processes among which the batches are divided; all of them get all of the result.
        count: number of windows.
        length: tokens of a window.
        batch_tokens: most tokens of a batch, unless a single window has more.
        work: gets the numbers of a batch's windows.
    """
    per_batch = max(1, batch_tokens // length)
    return world.map(lambda first: work(slice(first, first + per_batch)), range(0, count, per_batch))
