"""The yardstick for context: what simple readers make of the training text and of the
window, multiplied.

    log p(w) = sum over readers i of a_i log p_i(w) - log Z
    Z makes the sum of p over the vocabulary 1

A model that beats it reads its window better than counts do. Its readers are

- n-gram models of order 1 to 6, interpolated as in `ngrams`;
- counts of the training text after other contexts: single tokens further back, pairs
  of tokens, and the first tokens of this line and of the one before. They leave what
  they discount to the unigram model;
- prediction by partial matching: in the window, what followed the last k tokens, k = 0
  to 5. It escapes by method C to the 6-gram model;
- the tokens of the window, each half as likely as the one 32 tokens later.

The window is the only part of the evaluated text that is read. The weights a_i maximise
the likelihood of validation tokens, each after a window of the targets' mean context:
a concave problem, which Newton's method solves.

Sources: Hinton (2002), "Training products of experts by minimizing contrastive
divergence", Neural Computation 14(8): readers multiplied. Klakow (1998), "Log-linear
interpolation of language models", ICSLP: their weights. Huang et al. (1993), "The
SPHINX-II speech recognition system", Computer Speech & Language 7(2): n-grams with
gaps. Kuhn & De Mori (1990), "A cache-based natural language model for speech
recognition", IEEE PAMI 12(6): the cache. Those of `ngrams` for the rest.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from posbench.evaluation.ngrams import ORDERS, Ids, Readers, discounts
from posbench.evaluation.protocols import Integers

Floats = NDArray[np.floating]  # of single precision where there are many

BACKS = (2,), (3,), (4,), (5,), (6,), (2, 3), (3, 4), (1, 3)  # tokens of a context
HALF_LIFE = 32  # tokens
CACHED = 0.8  # of the cache's probability; the rest is the unigram model's
COUNTED = 2**22  # at most so many training tokens are counted: the first ones
VALIDATION = 1024  # tokens that choose the weights
CELLS = 2**25  # at most so many probabilities of one reader are made for them
KEPT = 2**21  # up to so many stay in memory from round to round: 210 MB of all readers
ROUNDS = 20  # of Newton's method, at most
ENOUGH = 1e-5  # nats per token: a round that gains less is the last
RIDGE = 1e-3  # keeps weights near 0 that the validation tokens do not settle
FACTOR = 0x9E3779B97F4A7C15  # odd: 2^64 over the golden ratio
CHUNK = 2**18  # probabilities of one reader at a time


def window_nats(readers: Readers, places: Integers, context: Integers) -> Floats:
    """Return the nats (n,) of the tokens at these places of the readers' text.

    `context`: (n,), the number of tokens before each in its window.
    """
    assert readers.breaks is not None
    parts = readers.counted(COUNTED)
    mixture = Mixture(parts, readers.vocab_size, readers.breaks)

    n = min(VALIDATION, CELLS // readers.vocab_size)
    validation = readers.validation
    chosen = np.linspace(1, len(validation) - 1, n).astype(np.int64)
    alike = np.minimum(chosen, int(context.mean()))
    weights = mixture.weights(validation, chosen, alike)
    return mixture.nats(weights, readers.text, places, context)


class Counts:
    """What follows each context of the training text, less modified Kneser-Ney
    discounts (`ngrams`).
    """

    def __init__(self, contexts: Ids, tokens: Ids, vocab_size: int) -> None:
        from scipy import sparse

        self.contexts, rows = np.unique(contexts, return_inverse=True)
        counts = sparse.csr_array(
            (np.ones(len(tokens), np.float32), (rows, tokens)),
            shape=(len(self.contexts), vocab_size),
        )  # of one context and token it adds up
        totals = counts.sum(axis=1)
        counts.data -= discounts(counts.data.astype(np.int64))
        self.escapes = (1 - counts.sum(axis=1) / totals).astype(np.float32)
        counts.data /= np.repeat(totals, np.diff(counts.indptr))
        self.shares = counts

    def after(self, contexts: Ids, lower: Floats) -> Floats:
        """Return p of each token after these contexts, (n, V). `lower`: (n, V), p of
        the readers that they leave the rest to.
        """
        rows = np.searchsorted(self.contexts, contexts)
        rows = np.minimum(rows, len(self.contexts) - 1)
        p = self.shares[rows].toarray() + self.escapes[rows, None] * lower
        is_known = self.contexts[rows] == contexts
        return np.where(is_known[:, None], p, lower)


class Mixture:
    """The readers of the parts of a training text, and how they are weighed."""

    def __init__(
        self, parts: Sequence[Ids], vocab_size: int, breaks: NDArray[np.bool_]
    ) -> None:
        """Count. `breaks`: (V,), which tokens end a line."""
        self.vocab_size = vocab_size
        self.breaks = breaks
        self.ngrams: list[Counts] = []  # by order, each as the highest
        self.lower: list[Counts] = []  # the same below the highest
        train = np.concatenate(parts)
        n_before = np.concatenate([np.arange(len(part)) for part in parts])
        ngrams, others = self._contexts(train, np.arange(len(train)), n_before)
        for order, contexts in enumerate(ngrams, 1):
            is_whole = n_before >= order - 1
            counted = Counts(contexts[is_whole], train[is_whole], vocab_size)
            self.ngrams.append(counted)
            # each different n-gram with the token before it counts once
            places = np.flatnonzero(n_before >= order)
            longer = _numbers(train[places - order], contexts[places], train[places])
            _, one = np.unique(longer, return_index=True)
            places = places[one]
            self.lower.append(Counts(contexts[places], train[places], vocab_size))
        self.others = [Counts(contexts, train, vocab_size) for contexts in others]

    def _contexts(
        self, ids: Ids, places: Integers, context: Integers
    ) -> tuple[list[Ids], list[Ids]]:
        """Return the numbers of the contexts of places, (n,) each: of n-gram models,
        and others. A token before the window counts as one that never occurs.
        """
        begin = places - context

        def token(at: Integers) -> Integers:
            is_read = (at >= begin) & (at < places)
            return np.where(is_read, ids[np.maximum(at, 0)], self.vocab_size)

        back = [token(places - distance) for distance in range(1, ORDERS + 1)]
        number: Ids = np.zeros(len(places), np.uint64)
        ngrams = [number]
        for tokens in back[: ORDERS - 1]:
            number = _numbers(number, tokens)
            ngrams.append(number)
        others = [_numbers(*(back[distance - 1] for distance in b)) for b in BACKS]

        # where the line begins that each place is in; the last is after the text
        after = np.where(self.breaks[ids], np.arange(1, len(ids) + 1), 0)
        starts = np.concatenate([[0], np.maximum.accumulate(after)])
        line = starts[places]
        above = starts[np.maximum(line - 1, 0)]
        first = token(np.where(line > begin, line, places))
        first_above = token(np.where(above > begin, above, places))
        newline = token(line - 1)
        others.append(_numbers(newline, first))
        others.append(_numbers(back[0], first))
        others.append(_numbers(back[0], newline))
        others.append(_numbers(first_above, first))
        return ngrams, others

    def logs(self, text: Ids, places: Integers, context: Integers) -> Floats:
        """Return log p of every token at places of a text by each reader: (readers, n,
        V). `context`: (n,), the number of tokens before each in its window.
        """
        ngrams, others = self._contexts(text, places, context)
        shape = (len(places), self.vocab_size)
        p: Floats = np.full(shape, 1 / self.vocab_size, np.float32)
        readers = []
        for highest, lower, contexts in zip(
            self.ngrams, self.lower, ngrams, strict=True
        ):
            readers.append(highest.after(contexts, p))
            p = lower.after(contexts, p)
        unigram = readers[0]
        longest = readers[-1]
        for counts, contexts in zip(self.others, others, strict=True):
            readers.append(counts.after(contexts, unigram))

        # One entry per place and token of its window, the last one first.
        back = np.arange(1, context.max() + 1)
        at = places[:, None] - back  # (n, C)
        begin = (places - context)[:, None]
        read = text[np.maximum(at, 0)].astype(np.int64)
        cell = read + self.vocab_size * np.arange(len(places))[:, None]

        def counted(is_counted: NDArray[np.bool_], weights: Floats) -> Floats:
            counts = np.bincount(cell[is_counted], weights[is_counted], unigram.size)
            return counts.reshape(unigram.shape).astype(np.float32)

        follows = at >= begin
        weights = np.broadcast_to(0.5 ** (back / HALF_LIFE), at.shape)
        cache = counted(follows, weights)
        cache /= cache.sum(axis=1, keepdims=True)
        readers.append(CACHED * cache + (1 - CACHED) * unigram)

        once = np.ones(at.shape)
        for length in range(ORDERS):
            if length:
                same = (
                    text[places - length][:, None] == text[np.maximum(at - length, 0)]
                )
                follows = follows & same & (at - length >= begin)
            found = counted(follows, once)
            kinds = np.maximum((found > 0).sum(axis=1, keepdims=True), 1)
            total = found.sum(axis=1, keepdims=True)
            readers.append((found + kinds * longest) / (total + kinds))
        return np.log(np.stack(readers).astype(np.float32))

    def weights(self, text: Ids, places: Integers, context: Integers) -> Floats:
        """Return the weights that make the tokens at these places likeliest."""
        n_readers = len(self.ngrams) + len(self.others) + 1 + ORDERS
        weights = np.zeros(n_readers)
        weights[-ORDERS + 1] = 1.0  # what follows the last token in the window
        best = weights
        least = np.inf

        def parts() -> Iterator[tuple[slice, Floats]]:
            for part in self._chunks(len(places)):
                yield part, self.logs(text, places[part], context[part])

        # what readers say does not depend on their weights
        kept: list[tuple[slice, Floats]] = []
        if len(places) * self.vocab_size <= KEPT:
            kept.extend(parts())

        for _ in range(ROUNDS):
            nats = RIDGE / 2 * len(places) * float((weights**2).sum())
            gradient = np.zeros(n_readers)
            hessian = np.zeros((n_readers, n_readers))
            for part, logs in kept or parts():
                of_target = _at(logs, text[places[part]])  # (readers, n)
                p, log_z = _normalised(weights, logs)
                nats += float((log_z - weights @ of_target).sum())
                means = np.einsum("inv,nv->in", logs, p)
                gradient += (means - of_target).sum(axis=1)
                centred = (logs - means[:, :, None]) * np.sqrt(p)
                flat = centred.reshape(n_readers, -1)
                hessian += flat @ flat.T
            if nats > least:  # the step was too long
                weights = (weights + best) / 2
                continue
            gain = least - nats
            best = weights
            least = nats
            if gain < ENOUGH * len(places):
                break
            slope = gradient + RIDGE * len(places) * weights
            curvature = hessian + RIDGE * len(places) * np.eye(n_readers)
            weights = weights - np.linalg.solve(curvature, slope)
        return best

    def nats(
        self, weights: Floats, text: Ids, places: Integers, context: Integers
    ) -> Floats:
        """Return the nats (n,) of the tokens at these places of a text."""
        nats = []
        for part in self._chunks(len(places)):
            logs = self.logs(text, places[part], context[part])
            _, log_z = _normalised(weights, logs)
            nats.append(log_z - weights @ _at(logs, text[places[part]]))
        return np.concatenate(nats)

    def _chunks(self, n: int) -> list[slice]:
        size = max(1, CHUNK // self.vocab_size)
        return [slice(start, start + size) for start in range(0, n, size)]


def _numbers(*columns: Ids) -> Ids:
    """Return a number for each row of tokens: a hash, so two rows share one in 1 of
    2^64 cases.
    """
    number: NDArray[np.uint64] = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        number = (number ^ (column.astype(np.uint64) + 1)) * np.uint64(FACTOR)
        number ^= number >> 32  # so that numbers may be numbered again
    return number


def _normalised(weights: Floats, logs: Floats) -> tuple[Floats, Floats]:
    """Return p (n, V) of the product of the readers, and log Z (n,)."""
    scores = np.tensordot(weights.astype(np.float32), logs, 1)
    most = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - most)
    total = p.sum(axis=1, keepdims=True)
    log_z = most + np.log(total)
    return p / total, log_z[:, 0].astype(np.float64)


def _at(logs: Floats, tokens: Ids) -> Floats:
    """Return log p of one token at each place: (readers, n)."""
    return logs[:, np.arange(len(tokens)), tokens].astype(np.float64)
