"""A bigram model of the training tokens: a scheme that has learned anything beats it at the training length.

    p(w | v) = (c(vw) + T(v) p(w)) / (c(v) + T(v))        p(w) = (c(w) + T / V) / (N + T)

c(vw): how often w follows v. c(v): how often anything does. T(v): how many different tokens do. T: how many different
tokens the text has. N: its length. V: the vocabulary. After a token that nothing follows, p(w | v) = p(w).

Sources: Witten and Bell (1991), "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), method C:
something new comes with probability T / (N + T). Interpolated as in Chen and Goodman (1998), "An empirical study of
smoothing techniques for language modeling", TR-10-98.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Floats

COUNTED = 2**24  # training tokens at most, the first of them
CHUNK = 2**21  # counted at a time, so that 8 bytes per token of it are held, not of the text


@dataclasses.dataclass(frozen=True, eq=False)
class BigramModel:
    """Counts the text once, when it is first asked."""

    ids: NDArray[np.integer]  # of the training text
    vocab_size: int

    def nll(self, before: NDArray[np.integer], tokens: NDArray[np.integer]) -> Floats:
        """Nats of each token after the one before it."""
        often, pairs, up_to = self._counts
        unigram = (often + np.count_nonzero(often) / self.vocab_size) / (often.sum() + np.count_nonzero(often))
        before = before.astype(np.int64)
        pair = before * self.vocab_size + tokens
        count = up_to[np.searchsorted(pairs, pair, "right")] - up_to[np.searchsorted(pairs, pair)]
        first, end = (np.searchsorted(pairs, v * self.vocab_size) for v in (before, before + 1))
        kinds = np.maximum(end - first, 1)  # T(v); any number gives the unigram where nothing follows v
        probability: Floats = (count + kinds * unigram[tokens]) / (up_to[end] - up_to[first] + kinds)
        return -np.log(probability)

    @functools.cached_property
    def _counts(self) -> tuple[Integers, Integers, Integers]:
        """How often each token stands, the distinct pairs vw as v V + w, and how many of all pairs are below each."""
        ids = self.ids[:COUNTED]
        often = np.zeros(self.vocab_size, np.int64)
        pairs, times = np.empty(0, np.int64), np.empty(0, np.int64)
        for first in range(0, len(ids), CHUNK):
            chunk = ids[first : first + CHUNK + 1].astype(np.int64)  # the last one begins the next chunk
            often += np.bincount(chunk[:CHUNK], minlength=self.vocab_size)
            found, found_times = np.unique(chunk[:-1] * self.vocab_size + chunk[1:], return_counts=True)
            pairs, place = np.unique(np.concatenate([pairs, found]), return_inverse=True)
            times = np.bincount(place, np.concatenate([times, found_times])).astype(np.int64)
        return often, pairs, np.concatenate([[0], np.cumsum(times)])
