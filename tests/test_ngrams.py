"""The readers that the learning gate compares with: against the counts of the paper in dictionaries, token by token."""

import collections
import math

import numpy as np
import pytest

from posbench.evaluation import ngrams
from posbench.evaluation.ngrams import ORDERS, NGrams

V = 6


def text(n: int = 400, vocab_size: int = V) -> np.ndarray:
    """Some tokens often, some never."""
    return np.minimum(np.random.default_rng(0).geometric(0.4, n), vocab_size - 2).astype(np.uint16)


def witten_bell(spans: list[list[int]], before: list[int], token: int, vocab_size: int) -> float:
    """Method C of Witten and Bell (1991) at every level: the escape's share T / (N + T) goes to the level below."""
    often = collections.Counter(token for span in spans for token in span)
    escape = len(often) / (often.total() + len(often))
    p = (1 - escape) * often[token] / often.total() + escape / vocab_size
    for n in range(1, len(before) + 1):
        after = collections.Counter(
            span[at] for span in spans for at in range(n, len(span)) if span[at - n : at] == before[-n:]
        )
        if after:
            escape = len(after) / (after.total() + len(after))
            p = (1 - escape) * after[token] / after.total() + escape * p
    return p


def asked(ids: np.ndarray, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of a text and of no text, each with a token."""
    rng = np.random.default_rng(1)
    at = rng.integers(4, len(ids), n)
    seen = np.stack([ids[at - back] for back in (4, 3, 2, 1)], 1)
    return np.concatenate([seen, rng.integers(0, V, (n, 4))]), np.concatenate([ids[at], rng.integers(0, V, n)])


@pytest.mark.sample(4)
@pytest.mark.parametrize("chunk", [ngrams.CHUNK, 399, 7, 1])
@pytest.mark.parametrize("spans", [[(0, 400)], [(3, 90), (100, 103), (200, 400)]], ids=["all", "parts"])
def test_probabilities_are_those_of_the_paper_in_chunks_of_any_size(
    spans: list[tuple[int, int]], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "CHUNK", chunk)
    ids = text()
    before, tokens = asked(ids)
    parts = [ids[first:end].tolist() for first, end in spans]
    found = NGrams(ids, np.array(spans), V).nll(before, tokens)
    assert found.shape == (len(ORDERS), len(tokens))
    for order, nll in zip(ORDERS, found, strict=True):
        rows = [row[5 - order :] for row in before.tolist()]
        expected = [-math.log(witten_bell(parts, b, w, V)) for b, w in zip(rows, tokens.tolist(), strict=True)]
        np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-12)


def test_probabilities_over_the_vocabulary_sum_to_one() -> None:
    before = np.repeat(asked(text())[0], V, axis=0)
    nll = NGrams(text(), np.array([(0, 400)]), V).nll(before, np.tile(np.arange(V), len(before) // V))
    np.testing.assert_allclose(np.exp(-nll).reshape(len(ORDERS), -1, V).sum(2), 1, rtol=0, atol=1e-12)


def test_tokens_as_they_are_stored_do_not_overflow() -> None:
    ids = np.array([65_000, 64_999, 65_000, 64_999, 7], np.uint16)
    before, tokens = np.array([[7, 7, 7, 65_000], [7, 65_000, 64_999, 65_000]]), np.array([64_999, 64_999])
    found = NGrams(ids, np.array([(0, 5)]), 65_535).nll(before, tokens)
    expected = [-math.log(witten_bell([ids.tolist()], row, 64_999, 65_535)) for row in before.tolist()]
    np.testing.assert_allclose(found[-1], expected, rtol=0, atol=1e-12)


def test_only_the_beginning_of_a_long_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text()
    beginning = NGrams(ids, np.array([(0, 100), (200, 250)]), V).nll(*asked(ids))
    monkeypatch.setattr(ngrams, "COUNTED", 150)
    cut = NGrams(ids, np.array([(0, 100), (200, 400)]), V).nll(*asked(ids))
    np.testing.assert_array_equal(beginning, cut)
