"""Two simple readers: n-gram models of the training tokens, and the best of them mixed
with what the tokens of the window predict.

A scheme has learned if it beats the first, which reads up to five tokens. It is shown
to use its context if it beats the second, which also knows what its window repeats.

The first is modified Kneser-Ney, interpolated. h is the n - 1 tokens before w, h' is h
without its first token, V is the size of the vocabulary:

    p_n(w | h) = (c(hw) - D(c(hw)) + g(h) p_{n-1}(w | h')) / sum over v of c(hv)
    g(h)       = sum over v of D(c(hv))
    p_0(w)     = 1 / V
    D(c)       = c - (c + 1) Y n_{c+1} / n_c, for c = 1, 2, 3
    Y          = n_1 / (n_1 + 2 n_2)

c(hw): how often w follows h; below the highest order, how many different tokens stand
before hw. n_i: how many n-grams have the count i. D(0) is 0; counts above 3 have D(3).
If nothing follows h, p_n is p_{n-1}. Lest small texts have none, n_i is at least 1
and D(c) at least c / 10.

The second looks up the last k tokens among the C tokens of the window, k = 0 .. 5, as
prediction by partial matching does. It escapes by method C to the first reader:

    q_k(w) = (c_k(w) + T_k p(w)) / (c_k + T_k)
    p'(w)  = a p(w) + a_0 q_0(w) + .. + a_5 q_5(w)

c_k: how many tokens of the window follow these k. c_k(w): how many of them are w. T_k:
how many are different. If there are none, q_k is p. The weights sum to one and maximise
the likelihood of validation text.

Sources: Chen and Goodman (1998), "An empirical study of smoothing techniques for
language modeling", TR-10-98, section 3: modified Kneser-Ney. Cleary and Witten (1984),
"Data compression using adaptive coding and partial string matching", IEEE Transactions
on Communications 32(4): contexts of several lengths, blended by weights. Moffat (1990),
"Implementing the PPM data compression scheme", the same journal 38(11): method C.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.models import Floats
from posbench.evaluation.protocols import Integers

Ids = NDArray[np.integer]  # tokens

ORDERS = 6  # n-gram models of order 1 to 6
COUNTED = 2**24  # at most so many training tokens are counted: the first ones
# validation tokens, spread evenly, that choose the order and the weights
WEIGHED = 2**13
ROUNDS = 100  # rounds of expectation maximisation (Jelinek & Mercer, 1980)


@dataclasses.dataclass(frozen=True, eq=False)
class Readers:
    """The two readers of a text, for the tokens that a run was trained on."""

    ids: Ids  # training text
    # (S, 2): first token and end of each part that the run was trained on
    spans: Integers
    vocab_size: int
    text: Ids  # the text that is scored
    validation: Ids  # the text that chooses order and weights

    def ngram(self, places: Integers) -> tuple[int, Floats]:
        """Return the order of the n-gram model, and the nats (n,) of the tokens at
        these places of the text.
        """
        order, p, _ = self._best(places.tobytes())
        return order, -np.log(p)

    def with_window(self, places: Integers, context: Integers) -> Floats:
        """Return the nats (n,) of the same tokens if the window is read as well.

        `context`: (n,), the number of tokens before each in its window.
        """
        _, p, p_chosen = self._best(places.tobytes())
        alike = np.minimum(self._chosen, int(context.mean()))
        parts = predictions(self.validation, self._chosen, alike, p_chosen)

        # expectation maximisation (Jelinek & Mercer, 1980)
        weights = np.ones(len(parts))  # after a round their sum is 1
        for _ in range(ROUNDS):
            mixed = weights @ parts
            weights *= (parts / mixed).mean(1)
        return -np.log(weights @ predictions(self.text, places, context, p))

    @functools.cached_property
    def _chosen(self) -> Integers:
        """Evenly spread places of the validation text."""
        return np.linspace(1, len(self.validation) - 1, WEIGHED).astype(np.int64)

    @functools.lru_cache(8)  # noqa: B019, since curves score the same tokens
    def _best(self, places_as_bytes: bytes) -> tuple[int, Floats, Floats]:
        """Return the order that is likeliest on validation text, and its p of tokens of
        the text and of the validation text.
        """
        scored = grams_at(self.text, np.frombuffer(places_as_bytes, np.int64))
        chosen = grams_at(self.validation, self._chosen)
        p = self.probabilities(np.concatenate([scored, chosen]))
        n = len(scored)
        best = int(np.log(p[:, n:]).sum(1).argmax())
        return 1 + best, p[best, :n], p[best, n:]

    def probabilities(self, asked: Ids) -> Floats:
        """Return p of the last token of each n-gram that is asked for, by order: (6,
        n). `asked`: (n, 6), tokens.
        """
        size = self.vocab_size
        parts = []
        left = COUNTED
        for begin, end in self.spans:
            parts.append(self.ids[begin:end][:left])
            left -= len(parts[-1])

        # What is asked for is numbered along with the training text, but not counted.
        parts.extend(asked)
        ids = np.concatenate(parts)
        n_before = np.concatenate([np.arange(len(part)) for part in parts])
        n_counted = len(ids) - asked.size

        # The number of the n-gram that ends at each token, of one order after another.
        # There is one of order 0, which is empty.
        numbers = np.zeros(len(ids), np.int64)
        contexts = asked_numbers = numbers  # of the order before; first set at order 1
        lower = np.full(len(asked), 1 / size)  # p of the order before
        by_order = []
        for order in range(1, ORDERS + 1):
            # An n-gram is a context, which ends one token before, and a token.
            places = np.flatnonzero(n_before >= order - 1)
            keys = numbers[places - 1] * size + ids[places]
            grams, one_place, number = np.unique(
                keys, return_index=True, return_inverse=True
            )
            counts = np.bincount(number[places < n_counted], minlength=len(grams))

            if order > 1:
                # `numbers` are still of the order before: here of what each n-gram that
                # occurs is without its first token. So each different n-gram counts
                # once, as the counts below the highest order need it.
                shorter = numbers[places[one_place]][counts > 0]
                n_different = np.bincount(shorter, minlength=len(contexts))
                lower = _interpolated(n_different, contexts, asked_numbers, lower)

            numbers[places] = number
            # at the last token of each n-gram that is asked for
            asked_numbers = numbers[n_counted + ORDERS - 1 :: ORDERS]
            contexts = grams // size
            # as the highest order, by how often each n-gram occurs
            by_order.append(_interpolated(counts, contexts, asked_numbers, lower))
        return np.stack(by_order)


def grams_at(text: Ids, places: Integers) -> Ids:
    """Return the tokens at these places of a text, each after the five before it: (n,
    6). The first token of the text stands for those before it.
    """
    around = places[:, None] + np.arange(1 - ORDERS, 1)
    grams: Ids = text[np.maximum(around, 0)]
    return grams


def _interpolated(
    counts: Integers, contexts: Integers, asked: Integers, lower: Floats
) -> Floats:
    """Return p_n of the n-grams that are asked for, by their numbers.

    `counts`, `contexts`: c(hw) and the number of h, of each n-gram; `lower`: p_{n-1}.
    """
    n = np.maximum(np.bincount(np.minimum(counts, 5), minlength=5), 1)
    c = np.arange(4)
    y = n[1] / (n[1] + 2 * n[2])
    higher = (c + 1) * y * n[c + 1] / n[c]
    discounts = np.maximum(c - higher, c / 10)
    discount = discounts[np.minimum(counts, 3)]  # 0 where the count is

    context = contexts[asked]
    totals = np.bincount(contexts, counts)[context]
    escapes = np.bincount(contexts, discount)[context]
    p = ((counts - discount)[asked] + escapes * lower) / np.maximum(totals, 1)
    return np.where(totals > 0, p, lower)


def predictions(text: Ids, places: Integers, context: Integers, p: Floats) -> Floats:
    """Return p and q_0 .. q_5 of the tokens at these places of a text: (7, n).

    `context`: (n,), the number of tokens before each in its window; `p`: (n,), of the
    first reader.
    """
    count = functools.partial(np.bincount, minlength=len(places))  # by window
    # One entry per token of each window: the window, the tokens before it there, and
    # its place in the text. Those that stay follow the last `back - 1` tokens.
    window, n_before = np.nonzero(np.arange(context.max()) < context[:, None])
    place = (places - context)[window] + n_before
    parts = [p]
    for back in range(1, ORDERS + 1):
        tokens = text[place].astype(np.int64)
        n_tokens = count(window)
        hits = count(window[tokens == text[places[window]]])
        pairs = np.unique(window + tokens * len(places))  # of a window and a token
        n_kinds = count(pairs % len(places))
        n_kinds = np.maximum(n_kinds, 1)  # without any q is p
        parts.append((hits + n_kinds * p) / (n_tokens + n_kinds))

        # of these tokens, those whose context agrees one token further back
        follows = text[place - back] == text[places[window] - back]
        follows &= n_before >= back
        window = window[follows]
        place = place[follows]
        n_before = n_before[follows]
    return np.stack(parts)
