"""Negative log-likelihoods of the tokens that windows score."""

from collections.abc import Callable

import numpy as np

from posbench.data.tokens import TokenSplit
from posbench.evaluation.protocols import Integers, Windows
from posbench.evaluation.subject import Floats, Subject
from posbench.processes import World


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
    per_batch = max(1, batch_tokens // windows.length)

    def nll(first: int) -> Floats:
        index = windows.starts[first : first + per_batch, None] + np.arange(windows.length + 1)
        ids = split.ids[index].astype(np.int64)
        if rewrite is not None:
            ids = np.stack([rewrite(window) for window in ids])
        return subject.nll(ids, windows.scored, first)

    return np.concatenate((world or World()).mapped(nll, range(0, len(windows.starts), per_batch)))
