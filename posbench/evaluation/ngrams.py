"""N-gram models of the training tokens: readers of one to four tokens, which a scheme has to beat to have learned.

    p_1(w)     = (c(w) + T / V) / (N + T)
    p_n(w | h) = (c(hw) + T(h) p_{n-1}(w | h')) / (c(h) + T(h))        h: n - 1 tokens, h': h without its first

c(hw): how often w follows h. c(h): how often anything does. T(h): how many different tokens do. T: how many different
tokens there are. N: how many tokens. V: the vocabulary. After a context that nothing follows, p_n is p_{n-1}.

Sources: Witten and Bell (1991), "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), method C:
something new comes with probability T / (N + T). Interpolated as in Chen and Goodman (1998), "An empirical study of
smoothing techniques for language modeling", TR-10-98.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.protocols import Integers
from posbench.evaluation.subject import Floats

ORDERS = (1, 2, 3, 4, 5)
COUNTED = 2**24  # training tokens at most, the first of them
CHUNK = 2**20  # counted at a time: memory grows with it and with what is asked, not with the text


@dataclasses.dataclass(frozen=True, eq=False)
class NGrams:
    """Counts of the tokens that a run was trained on, made for the contexts that are asked for."""

    ids: NDArray[np.integer]  # of the training text
    spans: Integers  # (S, 2): the parts of it that the run was trained on, first token and end
    vocab_size: int
    _known: dict[bytes, tuple[int, Floats]] = dataclasses.field(default_factory=dict)

    def best(self, text: NDArray[np.integer], places: Integers) -> tuple[int, Floats]:
        """The order of 2 or more with the lowest mean on some tokens of a text, and its nats of each.

        Args:
            text: token ids, always the same.
            places: (n,) where the tokens stand in it.
        """
        key = places.tobytes()  # curves score the same tokens at every length
        if key not in self._known:
            before = np.stack([text[np.maximum(places - back, 0)] for back in range(len(ORDERS) - 1, 0, -1)], 1)
            by_order = self.nll(before, text[places])[1:]
            found = int(by_order.mean(1).argmin())
            self._known[key] = ORDERS[1 + found], by_order[found]
        return self._known[key]

    def nll(self, before: NDArray[np.integer], tokens: NDArray[np.integer]) -> Floats:
        """Nats of each token after those before it, by each order.

        Args:
            before: (n, 4), the tokens before each; the last column is the nearest.
            tokens: (n,)

        Returns:
            (5, n), a row for each of `ORDERS`.
        """
        wanted: Integers = tokens.astype(np.int64)
        asked = _Contexts.of(before.astype(np.int64), self.vocab_size)
        unigrams = np.zeros(self.vocab_size, np.int64)
        grams: list[list[tuple[Integers, Integers]]] = [[] for _ in asked]
        for first, end, start in self._chunks():
            text = self.ids[start:end].astype(np.int64)
            places = np.arange(first - start, end - start)
            unigrams += np.bincount(text[places], minlength=self.vocab_size)
            found = np.zeros(len(places), np.int64)  # the context of no token is one
            for back, (context, seen) in enumerate(zip(asked, grams, strict=True), start=1):
                kept = places >= back
                places, found = places[kept], context.find(found[kept], text[places[kept] - back])
                places, found = places[found >= 0], found[found >= 0]
                seen.append(np.unique(found * self.vocab_size + text[places], return_counts=True))
        total, kinds = unigrams.sum(), np.count_nonzero(unigrams)
        by_order: list[Floats] = [(unigrams[wanted] + kinds / self.vocab_size) / (total + kinds)]
        for context, seen in zip(asked, grams, strict=True):
            by_order.append(_interpolated(by_order[-1], context.own, wanted, seen, len(context.keys), self.vocab_size))
        return -np.log(np.stack(by_order))

    def _chunks(self) -> "list[tuple[int, int, int]]":
        """Parts of the spans: the first token that is counted, the end, and where the tokens before the first begin."""
        found, left = [], COUNTED
        for first, end in self.spans.tolist():
            end = min(end, first + left)
            left -= end - first
            found += [(at, min(at + CHUNK, end), max(first, at - ORDERS[-1])) for at in range(first, end, CHUNK)]
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class _Contexts:
    """The contexts of one length that are asked for. Each is a shorter one with one more token in front."""

    keys: Integers  # sorted: number of the shorter context x V + the token in front
    own: Integers  # (n,) each asked context's number, its place in `keys`
    vocab_size: int

    @classmethod
    def of(cls, before: Integers, vocab_size: int) -> "list[_Contexts]":
        """Those of one to four tokens."""
        found, shorter = [], np.zeros(len(before), np.int64)
        for back in range(1, len(ORDERS)):
            keys, own = np.unique(shorter * vocab_size + before[:, -back], return_inverse=True)
            found.append(cls(keys, own.reshape(-1), vocab_size))
            shorter = found[-1].own
        return found

    def find(self, shorter: Integers, token: Integers) -> Integers:
        """The numbers of contexts by the shorter ones' numbers; -1 if a context is not asked for."""
        key = shorter * self.vocab_size + token
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[place] == key, place, -1)


def _interpolated(
    shorter: Floats, own: Integers, tokens: Integers, seen: list[tuple[Integers, Integers]], count: int, vocab_size: int
) -> Floats:
    """The probabilities of one order from those of the order below.

    Args:
        own: (n,) the number of each context.
        seen: by chunk, distinct grams as number x V + token, and how often each stands there.
        count: how many contexts there are.
    """
    grams, place = np.unique(np.concatenate([gram for gram, _ in seen]), return_inverse=True)
    often = np.bincount(place.reshape(-1), np.concatenate([times for _, times in seen]), len(grams))
    context = grams // vocab_size
    total, kinds = np.bincount(context, often, count)[own], np.bincount(context, minlength=count)[own]
    asked = own * vocab_size + tokens
    at = np.minimum(np.searchsorted(grams, asked), len(grams) - 1)
    hits = np.where(grams[at] == asked, often[at], 0.0) if len(grams) else np.zeros(len(own))
    return np.where(total > 0, (hits + kinds * shorter) / np.maximum(total + kinds, 1), shorter)
