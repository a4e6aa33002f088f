"""The ceiling of the learning gate: against the counts of the paper in dictionaries, one token at a time."""

import collections
import itertools
import math

import numpy as np
import pytest

from posbench.evaluation import bigram
from posbench.evaluation.bigram import BigramModel

V = 12


def text(n: int = 400, vocab_size: int = V) -> np.ndarray:
    """Some tokens often, some never."""
    return np.minimum(np.random.default_rng(0).geometric(0.3, n), vocab_size - 2).astype(np.uint16)


def witten_bell(ids: list[int], before: int, token: int, vocab_size: int = V) -> float:
    """Method C of Witten and Bell (1991) at both levels: the escape's share T / (N + T) goes to the level below."""
    often, after = collections.Counter(ids), collections.defaultdict(collections.Counter)
    for v, w in itertools.pairwise(ids):
        after[v][w] += 1
    escape = len(often) / (len(ids) + len(often))
    unigram = (1 - escape) * often[token] / len(ids) + escape / vocab_size
    if before not in after:
        return unigram
    followers = after[before]
    escape = len(followers) / (followers.total() + len(followers))
    return (1 - escape) * followers[token] / followers.total() + escape * unigram


def every_pair() -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(V), V), np.tile(np.arange(V), V)


@pytest.mark.parametrize("chunk", [bigram.CHUNK, 400, 399, 7, 1])
def test_probabilities_are_those_of_the_paper_in_chunks_of_any_size(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bigram, "CHUNK", chunk)
    ids, (before, tokens) = text(), every_pair()
    expected = [-math.log(witten_bell(ids.tolist(), v, w)) for v, w in zip(before, tokens, strict=True)]
    np.testing.assert_allclose(BigramModel(ids, V).nll(before, tokens), expected, rtol=0, atol=1e-12)


def test_probabilities_over_the_vocabulary_sum_to_one() -> None:
    sums = np.exp(-BigramModel(text(), V).nll(*every_pair())).reshape(V, V).sum(1)
    np.testing.assert_allclose(sums, 1, rtol=0, atol=1e-12)


def test_after_a_token_that_nothing_follows_it_is_the_unigram_model() -> None:
    model = BigramModel(np.array([1, 2, 1, 3], np.uint16), V)  # 3 ends the text, 5 is not in it
    unigram = [(count + 3 / V) / (4 + 3) for count in (0, 2, 1, 1)]
    for before in (3, 5):
        nll = model.nll(np.full(4, before), np.arange(4))
        np.testing.assert_allclose(np.exp(-nll), unigram, rtol=0, atol=1e-12)


def test_tokens_as_they_are_stored_do_not_overflow() -> None:
    ids = np.array([65_000, 64_999, 65_000, 64_999, 7], np.uint16)
    nll = BigramModel(ids, 65_535).nll(ids[:2], ids[1:3])
    expected = [-math.log(witten_bell(ids.tolist(), v, w, 65_535)) for v, w in ((65_000, 64_999), (64_999, 65_000))]
    np.testing.assert_allclose(nll, expected, rtol=0, atol=1e-12)


def test_only_the_beginning_of_a_long_text_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, (before, tokens) = text(), every_pair()
    beginning = BigramModel(ids[:150], V).nll(before, tokens)
    assert not np.allclose(beginning, BigramModel(ids, V).nll(before, tokens))
    monkeypatch.setattr(bigram, "COUNTED", 150)
    np.testing.assert_array_equal(beginning, BigramModel(ids, V).nll(before, tokens))
