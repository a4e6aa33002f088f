"""Two simple readers: n-gram models of the training tokens, and the best of them with a
cache of the window's tokens.

A scheme has learned if it beats the first, which reads one to four tokens. It is shown
to use its context if it beats the second, which also knows what its window repeats.

    p_1(w)     = (c(w) + T / V) / (N + T)
    p_n(w | h) = (c(hw) + T(h) p_{n-1}(w | h')) / (c(h) + T(h))
    h: n - 1 tokens, h': h without its first

c(hw): how often w follows h. c(h): how often any token follows h. T(h): how many
different tokens follow h. N: the number of tokens. T: the number of different tokens.
V: the vocabulary size. If nothing follows h, p_n is p_{n-1}.

    p(w)       = a p_n(w | h) + b c(w) / C + d c(vw) / c(v)

In the cache c counts in the C tokens of context, and v is the last of them. If v does
not occur earlier, c(w) / C replaces the last ratio. The weights a, b and d sum to one
and maximise the likelihood of validation text.

Sources: Witten and Bell (1991), "The zero-frequency problem", IEEE Transactions on
Information Theory 37(4), method C: a new token comes with probability T / (N + T).
Interpolated as in Chen and Goodman (1998), "An empirical study of smoothing techniques
for language modeling", TR-10-98. Kuhn and De Mori (1990), "A cache-based natural
language model for speech recognition", IEEE Transactions on Pattern Analysis and
Machine Intelligence 12(6).
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.models import Floats
from posbench.evaluation.protocols import Integers

ORDERS = (1, 2, 3, 4, 5)
COUNTED = 2**24  # at most so many training tokens are counted: the first ones
# validation tokens, spread evenly, that choose the weights of the mixture
WEIGHED = 2**13
ROUNDS = 100  # rounds of expectation maximisation (Jelinek & Mercer, 1980)


@dataclasses.dataclass(frozen=True, eq=False)
class NGrams:
    """N-gram models of the tokens that a run was trained on. Only the contexts that are
    asked for are counted.
    """

    ids: NDArray[np.integer]  # token ids of the training text
    # (S, 2): first token and end of each part that the run was trained on
    spans: Integers
    vocab_size: int
    _known: dict[bytes, tuple[int, Floats]] = dataclasses.field(default_factory=dict)

    def best(self, text: NDArray[np.integer], places: Integers) -> tuple[int, Floats]:
        """Return the order, 2 or more, with the lowest mean nll on some tokens of a
        text, and its nats of each token.

        `text`: token ids, the same in every call; `places`: (n,), the places of the
        tokens in the text.
        """
        key = places.tobytes()  # curves score the same tokens at every length
        if key not in self._known:
            by_order = self.nll(tokens_before(text, places), text[places])
            best = 1 + int(by_order[1:].mean(1).argmin())
            self._known[key] = ORDERS[best], by_order[best]
        return self._known[key]

    def nll(self, before: NDArray[np.integer], tokens: NDArray[np.integer]) -> Floats:
        """Return the nats of each token, given the tokens before it: (5, n), a row per
        order.

        `before`: (n, 4), the four tokens before each token, the nearest one last;
        `tokens`: (n,).
        """
        size = self.vocab_size
        targets = tokens.astype(np.int64)
        places, n_before = self._counted()
        unigrams = np.bincount(self.ids[places], minlength=size)
        n_different = np.count_nonzero(unigrams)
        n_tokens = unigrams.sum()
        lower = (unigrams[targets] + n_different / size) / (n_tokens + n_different)
        by_order: list[Floats] = [lower]

        # A context is the next shorter one with one more token in front. Its number is
        # its place among the contexts that are asked for. Only tokens after these are
        # counted, so that memory shrinks from order to order.
        of_target = np.zeros(len(targets), np.int64)  # the number of its context
        of_place = np.zeros(len(places), np.int64)
        for back in range(1, len(ORDERS)):
            wanted = of_target * size + before[:, -back].astype(np.int64)
            contexts, of_target = np.unique(wanted, return_inverse=True)

            long_enough = n_before >= back
            places = places[long_enough]
            n_before = n_before[long_enough]
            of_place = of_place[long_enough] * size + self.ids[places - back]
            index, is_wanted = _find(contexts, of_place)
            places = places[is_wanted]
            n_before = n_before[is_wanted]
            of_place = index[is_wanted]

            # c(hw), c(h) and T(h)
            followed = of_place * size + self.ids[places]
            grams, counts = np.unique(followed, return_counts=True)
            index, occurs = _find(grams, of_target * size + targets)
            hits = np.where(occurs, np.append(counts, 0)[index], 0)
            totals = np.bincount(grams // size, counts, len(contexts))[of_target]
            kinds = np.bincount(grams // size, minlength=len(contexts))[of_target]

            interpolated = (hits + kinds * lower) / np.maximum(totals + kinds, 1)
            lower = np.where(totals > 0, interpolated, lower)
            by_order.append(lower)
        return -np.log(np.stack(by_order))

    def _counted(self) -> tuple[Integers, Integers]:
        """Return the places of the tokens that are counted, and how many tokens stand
        before each in its span.
        """
        ends = (self.spans[:, 1] - self.spans[:, 0]).cumsum()
        lengths = np.diff(np.minimum(ends, COUNTED), prepend=0)
        n_before = np.concatenate([np.arange(length) for length in lengths])
        return np.repeat(self.spans[:, 0], lengths) + n_before, n_before


def _find(ascending: Integers, items: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Return the index at which each item would stand in an ascending array, and
    whether it is there.
    """
    index = np.searchsorted(ascending, items)
    return index, np.append(ascending, -1)[index] == items


@dataclasses.dataclass(frozen=True, eq=False)
class CachedNGrams:
    """The best n-gram model mixed with a cache of the tokens in the window."""

    ngrams: NGrams
    text: NDArray[np.integer]  # ids of the text that is scored
    validation: NDArray[np.integer]  # ids of the text that the weights are chosen on

    def nll(self, places: Integers, context: Integers) -> Floats:
        """Return the nats (n,) of tokens of the text.

        `places`: (n,), where they stand; `context`: (n,), the number of tokens before
        each in its window, at least one.
        """
        order, of_ngrams = self.ngrams.best(self.text, places)
        shares = self._text_cache.shares(places, context)
        weights = self._weights(order, int(context.mean()))
        mixture: Floats = weights @ np.stack([np.exp(-of_ngrams), *shares])
        return -np.log(mixture)

    def _weights(self, order: int, context: int) -> Floats:
        """Return the weights (3,) of an order, of the cached tokens and of the cached
        pairs, after `context` tokens.
        """
        places, by_order, cache = self._weighed
        shares = cache.shares(places, np.minimum(places, context))
        parts = np.stack([np.exp(-by_order[order - 1]), *shares])  # (3, n)
        weights = np.full(3, 1 / 3)
        for _ in range(ROUNDS):
            likelihoods = weights[:, None] * parts
            weights = (likelihoods / likelihoods.sum(0)).mean(1)
        return weights

    @functools.cached_property
    def _text_cache(self) -> "_Cache":
        return _Cache(self.text, self.ngrams.vocab_size)

    @functools.cached_property
    def _weighed(self) -> "tuple[Integers, Floats, _Cache]":
        """Evenly spread places in the validation text, the nats of their tokens by each
        order, and the text's cache.
        """
        text = self.validation
        spread = np.linspace(1, len(text) - 1, WEIGHED)
        places = np.unique(spread.astype(np.int64))
        by_order = self.ngrams.nll(tokens_before(text, places), text[places])
        return places, by_order, _Cache(text, self.ngrams.vocab_size)


class _Cache:
    """Counts of tokens and of pairs of tokens in any stretch of a text."""

    def __init__(self, ids: NDArray[np.integer], vocab_size: int) -> None:
        tokens: Integers = ids.astype(np.int64)
        pairs = np.concatenate([[-1], tokens[:-1] * vocab_size + tokens[1:]])
        self._tokens = _Occurrences(tokens)
        self._pairs = _Occurrences(pairs)  # each at the place of its second token

    def shares(self, places: Integers, context: Integers) -> tuple[Floats, Floats]:
        """Return each token's share of its context, and its share of the tokens there
        that follow its predecessor.

        Where the predecessor does not occur earlier in the context, the second share
        equals the first.
        """
        first = places - context
        previous = places - 1
        share = self._tokens.count(places, first, places) / context
        n_after = self._tokens.count(previous, first, previous)
        n_pairs = self._pairs.count(places, first + 1, places)
        return share, np.where(n_after > 0, n_pairs / np.maximum(n_after, 1), share)


class _Occurrences:
    """Where equal items of a sequence stand."""

    def __init__(self, items: Integers) -> None:
        # a number of its own for each item at each place, those of equal items together
        _, kinds = np.unique(items, return_inverse=True)
        self._kinds = kinds * (len(items) + 1)
        self._sorted = np.sort(self._kinds + np.arange(len(items)))

    def count(self, places: Integers, first: Integers, end: Integers) -> Integers:
        """Count the items in `first` .. `end` - 1 that equal those at `places`."""
        kinds = self._kinds[places]
        n_before_end = np.searchsorted(self._sorted, kinds + end)
        n_before_first = np.searchsorted(self._sorted, kinds + first)
        return n_before_end - n_before_first


def tokens_before(text: NDArray[np.integer], places: Integers) -> NDArray[np.integer]:
    """Return the four tokens before each place of a text, (n, 4). The first token
    stands for those before the text.
    """
    back = np.arange(len(ORDERS) - 1, 0, -1)
    before: NDArray[np.integer] = text[np.maximum(places[:, None] - back, 0)]
    return before
