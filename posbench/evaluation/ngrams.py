"""Two simple readers: n-gram models of the training tokens, and the best of them with a cache of the window's tokens.

A scheme has learned if it beats the first, which reads one to four tokens. It is shown to use its context if it beats
the second, which also knows what its window repeats.

    p_1(w)     = (c(w) + T / V) / (N + T)
    p_n(w | h) = (c(hw) + T(h) p_{n-1}(w | h')) / (c(h) + T(h))        h: n - 1 tokens, h': h without its first

c(hw): how often w follows h. c(h): how often anything does. T(h): how many different tokens do. T: how many different
tokens there are. N: how many tokens. V: the vocabulary. After a context that nothing follows, p_n is p_{n-1}.

    p(w)       = a p_n(w | h) + b c(w) / C + d c(vw) / c(v)

The cache: counts in the C tokens of context. v: the last of them; where it stands nowhere before, the last term is as
the one before. a, b and d, which sum to one, are those most likely on validation text.

Sources: Witten and Bell (1991), "The zero-frequency problem", IEEE Transactions on Information Theory 37(4), method C:
something new comes with probability T / (N + T). Interpolated as in Chen and Goodman (1998), "An empirical study of
smoothing techniques for language modeling", TR-10-98. Kuhn and De Mori (1990), "A cache-based natural language model
for speech recognition", IEEE Transactions on Pattern Analysis and Machine Intelligence 12(6).
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.models import Floats
from posbench.evaluation.protocols import Integers

ORDERS = (1, 2, 3, 4, 5)
COUNTED = 2**24  # training tokens at most, the first of them
CHUNK = 2**20  # counted at a time: memory grows with it and with what is asked, not with the text
WEIGHED = 2**13  # validation tokens, spread evenly, on which the weights of the mixture are chosen
ROUNDS = 100  # of expectation and maximisation (Jelinek & Mercer, 1980)


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
            by_order = self.nll(tokens_before(text, places), text[places])[1:]
            best = int(by_order.mean(1).argmin())
            self._known[key] = ORDERS[1 + best], by_order[best]
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


# -- with a cache of the window ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class CachedNGrams:
    """The best n-gram model mixed with a cache of the tokens in the window."""

    ngrams: NGrams
    text: NDArray[np.integer]  # ids of the text that is scored
    validation: NDArray[np.integer]  # ids of the text that the weights are chosen on

    def nll(self, places: Integers, context: Integers) -> Floats:
        """Return the nats of tokens of the text.

        Args:
            places: (n,) where they stand.
            context: (n,) how many tokens before each are in its window, at least one.
        """
        order, of_ngrams = self.ngrams.best(self.text, places)
        parts = np.stack([np.exp(-of_ngrams), *self._in_text.shares(places, context)])
        mixed: Floats = self._weights(order, int(context.mean())) @ parts
        return -np.log(mixed)

    def _weights(self, order: int, context: int) -> Floats:
        """Return the weights of an order and of the cache by one and by two tokens, after so many tokens of context."""
        places, by_order = self._weighed
        cache = self._in_validation.shares(places, np.minimum(places, context))
        parts, weights = np.stack([np.exp(-by_order[order - 1]), *cache]), np.full(3, 1 / 3)
        for _ in range(ROUNDS):
            likelihoods = weights[:, None] * parts
            weights = (likelihoods / likelihoods.sum(0)).mean(1)
        return weights

    @functools.cached_property
    def _weighed(self) -> tuple[Integers, Floats]:
        """Places in the validation text, and the nats of their tokens by each order."""
        places = np.unique(np.linspace(1, len(self.validation) - 1, WEIGHED).astype(np.int64))
        return places, self.ngrams.nll(tokens_before(self.validation, places), self.validation[places])

    @functools.cached_property
    def _in_text(self) -> "_Cache":
        return _Cache(self.text, self.ngrams.vocab_size)

    @functools.cached_property
    def _in_validation(self) -> "_Cache":
        return _Cache(self.validation, self.ngrams.vocab_size)


class _Cache:
    """Counts of tokens and of pairs of tokens in any stretch of a text."""

    def __init__(self, ids: NDArray[np.integer], vocab_size: int) -> None:
        text: Integers = ids.astype(np.int64)
        self.tokens = _Occurrences(text)
        self.pairs = _Occurrences(np.concatenate([[-1], text[:-1] * vocab_size + text[1:]]))

    def shares(self, places: Integers, context: Integers) -> tuple[Floats, Floats]:
        """Return the share of each token among those of its context, and among those there after the token before it.

        The second is the first where the token before it stands nowhere earlier in the context.
        """
        first, last = places - context, places - 1
        alone = self.tokens.count(places, first, places) / context
        after = self.tokens.count(last, first, last)
        return alone, np.where(after > 0, self.pairs.count(places, first + 1, places) / np.maximum(after, 1), alone)


class _Occurrences:
    """Where each kind of item stands in a sequence, so that those in a stretch are counted without reading it."""

    def __init__(self, items: Integers) -> None:
        self.kinds = np.unique(items, return_inverse=True)[1].reshape(-1)
        self.sorted = np.sort(self.kinds * len(items) + np.arange(len(items)))  # by kind, then by place

    def count(self, like: Integers, first: Integers, end: Integers) -> Integers:
        """Return how many of the items from `first` to before `end` are like those that stand at `like`."""
        kinds = self.kinds[like] * len(self.kinds)
        return np.searchsorted(self.sorted, kinds + end) - np.searchsorted(self.sorted, kinds + first)


def tokens_before(text: NDArray[np.integer], places: Integers) -> NDArray[np.integer]:
    """Return the four tokens before each place of a text, (n, 4); before its beginning stands its first token."""
    return np.stack([text[np.maximum(places - back, 0)] for back in range(len(ORDERS) - 1, 0, -1)], 1)
