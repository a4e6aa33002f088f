"""The readers that the learning gate compares with: against the counts of the paper in
dictionaries, token by token.
"""

import collections
import itertools
import math

import numpy as np
import pytest

from posbench.evaluation.ngrams import ORDERS, CachedNGrams, NGrams

V = 6


def text(n: int = 400, vocab_size: int = V) -> np.ndarray:
    """Return a text in which some tokens are frequent and some never occur."""
    return np.minimum(
        np.random.default_rng(0).geometric(0.4, n), vocab_size - 2
    ).astype(np.uint16)


def witten_bell(
    spans: list[list[int]], before: list[int], token: int, vocab_size: int
) -> float:
    """Return p by method C of Witten and Bell (1991): at every level, the escape T / (N
    + T) goes to the one below.
    """
    often = collections.Counter(token for span in spans for token in span)
    escape = len(often) / (often.total() + len(often))
    p = (1 - escape) * often[token] / often.total() + escape / vocab_size
    for n in range(1, len(before) + 1):
        after = collections.Counter(
            span[at]
            for span in spans
            for at in range(n, len(span))
            if span[at - n : at] == before[-n:]
        )
        if after:
            escape = len(after) / (after.total() + len(after))
            p = (1 - escape) * after[token] / after.total() + escape * p
    return p


def asked(ids: np.ndarray, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return contexts, from a text and at random, each with a token."""
    rng = np.random.default_rng(1)
    at = rng.integers(4, len(ids), n)
    seen = np.stack([ids[at - back] for back in (4, 3, 2, 1)], 1)
    return np.concatenate([seen, rng.integers(0, V, (n, 4))]), np.concatenate(
        [ids[at], rng.integers(0, V, n)]
    )


@pytest.mark.parametrize(
    "spans", [[(0, 400)], [(3, 90), (100, 103), (200, 400)]], ids=["all", "parts"]
)
def test_probabilities_are_those_of_the_paper(spans):
    ids = text()
    before, tokens = asked(ids)
    parts = [ids[first:end].tolist() for first, end in spans]
    losses = NGrams(ids, np.array(spans), V).nll(before, tokens)
    assert losses.shape == (len(ORDERS), len(tokens))
    for order, nll in zip(ORDERS, losses, strict=True):
        rows = [row[5 - order :] for row in before.tolist()]
        expected = [
            -math.log(witten_bell(parts, b, w, V))
            for b, w in zip(rows, tokens.tolist(), strict=True)
        ]
        np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-12)


def cache_shares(ids: list[int], place: int, context: int) -> list[float]:
    """Return the shares of a token in its context, and there after the token before it,
    counted token by token.
    """
    window = ids[place - context : place]
    token = ids[place]
    alone = window.count(token) / context
    followers = [
        after for before, after in itertools.pairwise(window) if before == window[-1]
    ]
    return [alone, followers.count(token) / len(followers) if followers else alone]


def likelihood(weights: np.ndarray, parts: np.ndarray) -> float:
    return float(np.log(weights @ parts).mean())


def test_the_cached_model_is_the_mixture_most_likely_on_validation_text():
    rng = np.random.default_rng(3)
    # repeats itself
    ids = np.concatenate([np.tile(rng.integers(0, V, 9), 3) for _ in range(30)]).astype(
        np.uint16
    )
    scored = ids[:400]
    validation = ids[400:]
    model = NGrams(text(), np.array([(0, 400)]), V)
    places = rng.choice(np.arange(20, 400), 80, replace=False)
    context = rng.integers(1, 20, 80)
    order, of_ngrams = model.best(scored, places)

    length = int(context.mean())
    rows = [
        [0.0, *cache_shares(validation.tolist(), at, min(at, length))]
        for at in range(1, len(validation))
    ]
    before = np.stack(
        [
            validation[np.maximum(np.arange(1, len(rows) + 1) - back, 0)]
            for back in (4, 3, 2, 1)
        ],
        1,
    )
    parts = np.array(rows).T
    parts[0] = np.exp(-model.nll(before, validation[1:])[order - 1])
    grid = [
        np.array([1 - a - b, a, b])
        for a in np.arange(0, 0.99, 0.01)
        for b in np.arange(0, 0.99 - a, 0.01)
    ]

    nll = CachedNGrams(model, scored, validation).nll(places, context)
    shares = np.array(
        [
            cache_shares(scored.tolist(), *pair)
            for pair in zip(places.tolist(), context, strict=True)
        ]
    )
    mixed = np.stack([np.exp(-of_ngrams), *shares.T])
    weights = np.linalg.lstsq(mixed.T, np.exp(-nll))[0]
    # it is a mixture of these three
    np.testing.assert_allclose(weights @ mixed, np.exp(-nll), rtol=0, atol=1e-12)
    assert weights.sum() == pytest.approx(1)
    assert weights.min() > -1e-9
    most_likely = max(likelihood(each, parts) for each in grid)
    assert most_likely - 1e-5 < likelihood(weights, parts) < most_likely + 1e-3
    assert nll.mean() < of_ngrams.mean()
