"""A simple reader: the n-gram model of the training tokens that a scheme has to beat to
have learned. It reads up to five tokens.

It is modified Kneser-Ney, interpolated. h is the n - 1 tokens before w, h' is h without
its first token, V is the size of the vocabulary:

    p_n(w | h) = (c(hw) - D(c(hw)) + g(h) p_{n-1}(w | h')) / sum over v of c(hv)
    g(h)       = sum over v of D(c(hv))
    p_0(w)     = 1 / V
    D(c)       = c - (c + 1) Y n_{c+1} / n_c, for c = 1, 2, 3
    Y          = n_1 / (n_1 + 2 n_2)

c(hw): how often w follows h; below the highest order, how many different tokens stand
before hw. n_i: how many n-grams have the count i. D(0) is 0; counts above 3 have D(3).
If nothing follows h, p_n is p_{n-1}. Lest small texts have none, n_i is at least 1
and D(c) at least c / 10.

Source: Chen and Goodman (1998), "An empirical study of smoothing techniques for
language modeling", TR-10-98, section 3: modified Kneser-Ney.
"""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from posbench.config.schema import Config
from posbench.data.batches import merge_spans
from posbench.data.tokens import Tokens
from posbench.evaluation.protocols import Integers
from posbench.evaluation.subjects import Floats

Ids = NDArray[np.integer]  # tokens

ORDERS = 6  # n-gram models of order 1 to 6
COUNTED = 2**24  # at most so many training tokens are counted: the first ones
CHOOSING = 2**13  # validation tokens, spread evenly, that choose the order


@dataclasses.dataclass(frozen=True, eq=False)
class Readers:
    """What simple readers know: the tokens that a run was trained on, and two texts."""

    ids: Ids  # training text
    # (S, 2): first token and end of each part that the run was trained on
    spans: Integers
    vocab_size: int
    text: Ids  # the text that is scored
    validation: Ids  # the text that chooses order and weights
    # (V,), which tokens end a line, for `mixture`; None: that is not asked
    breaks: NDArray[np.bool_] | None = None

    @classmethod
    def of_run(
        cls, tokens: Tokens, config: Config, step: int, text: Ids
    ) -> "Readers | None":
        """Return the readers for the tokens that a run, and the run it began from,
        trained on; None if unknown.
        """
        spans = []
        if step:  # else the run began from another one
            spans.append(tokens.batches(config.training, config.seed).spans(step))
        start = config.start
        if start is not None:
            if start.text_sha256 != tokens.meta["sha256"]:
                return None
            earlier = dataclasses.replace(
                config.training,
                train_length=start.train_length,
                batch_size=start.batch_size,
                accumulation=1,
            )
            spans.append(tokens.batches(earlier, start.seed).spans(start.steps))

        breaks = None
        if step == config.training.steps:  # on the way nothing needs it
            breaks = np.array(["\n" in token for token in tokens.tokenizer.texts])
        return cls(
            tokens.train.ids,
            merge_spans(spans),
            tokens.tokenizer.vocab_size,
            text,
            tokens.validation.ids,
            breaks,
        )

    def counted(self, limit: int) -> list[Ids]:
        """Return the parts that the run was trained on, up to so many tokens."""
        parts = []
        for begin, end in self.spans:
            parts.append(self.ids[begin:end][:limit])
            limit -= len(parts[-1])
        return parts

    def ngram(self, places: Integers) -> tuple[int, Floats]:
        """Return the order of the n-gram model, and the nats (n,) of the tokens at
        these places of the text.
        """
        order, p = self._best(places.tobytes())
        return order, -np.log(p)

    @functools.lru_cache(8)  # noqa: B019, since curves score the same tokens
    def _best(self, places_as_bytes: bytes) -> tuple[int, Floats]:
        """Return the order that is likeliest on validation text, and its p of tokens of
        the text.
        """
        scored = grams_at(self.text, np.frombuffer(places_as_bytes, np.int64))
        chosen = np.linspace(1, len(self.validation) - 1, CHOOSING).astype(np.int64)
        choosing = grams_at(self.validation, chosen)
        p = self.probabilities(np.concatenate([scored, choosing]))
        n = len(scored)
        best = int(np.log(p[:, n:]).sum(1).argmax())
        return 1 + best, p[best, :n]

    def probabilities(self, asked: Ids) -> Floats:
        """Return p of the last token of each n-gram that is asked for, by order: (6,
        n). `asked`: (n, 6), tokens.
        """
        size = self.vocab_size
        parts = self.counted(COUNTED)

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


def discounts(counts: Integers) -> Floats:
    """Return D of each count of an n-gram."""
    n = np.maximum(np.bincount(np.minimum(counts, 5), minlength=5), 1)
    c = np.arange(4)
    y = n[1] / (n[1] + 2 * n[2])
    higher = (c + 1) * y * n[c + 1] / n[c]
    by_count: Floats = np.maximum(c - higher, c / 10)
    return by_count[np.minimum(counts, 3)]  # 0 where the count is


def _interpolated(
    counts: Integers, contexts: Integers, asked: Integers, lower: Floats
) -> Floats:
    """Return p_n of the n-grams that are asked for, by their numbers.

    `counts`, `contexts`: c(hw) and the number of h, of each n-gram; `lower`: p_{n-1}.
    """
    discount = discounts(counts)
    context = contexts[asked]
    totals = np.bincount(contexts, counts)[context]
    escapes = np.bincount(contexts, discount)[context]
    p = ((counts - discount)[asked] + escapes * lower) / np.maximum(totals, 1)
    return np.where(totals > 0, p, lower)
