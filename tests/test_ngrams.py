"""The readers that the gates compare with: by hand, and against the counts of the
papers in dictionaries, token by token.
"""

import collections

import numpy as np
import pytest

from posbench.evaluation.ngrams import ORDERS, Readers, predictions

V = 6
A, B, C, D = range(4)


def text(n: int = 400, seed: int = 0) -> np.ndarray:
    """Return a text in which some tokens are frequent and one never occurs."""
    drawn = np.random.default_rng(seed).geometric(0.4, n)
    return np.minimum(drawn, V - 2).astype(np.uint16)


def repeating(seed: int) -> np.ndarray:
    """Return a text that says each of thirty phrases three times."""
    rng = np.random.default_rng(seed)
    phrases = [np.tile(rng.integers(0, V, 9), 3) for _ in range(30)]
    return np.concatenate(phrases).astype(np.uint16)


def readers(
    ids: np.ndarray, spans: list[tuple[int, int]], vocab_size: int = V
) -> Readers:
    return Readers(ids, np.array(spans), vocab_size, repeating(1), repeating(2))


def test_bigrams_counted_by_hand():
    # ab and ba occur twice, ac once: n_1 = 1, n_2 = 2, so Y = 1/5, D(1) = 1/5 and
    # D(2) = 17/10. One token stands before each of a, b and c: Y = 3/5 = D(1).
    one_token = (1 - 0.6) / 3 + 3 * 0.6 / 3 / 4
    escape = (1.7 + 0.2) / 3

    ids = np.array([A, B, A, B, A, C], np.uint16)
    asked = np.array([[D, D, D, D, A, token] for token in (A, B, C, D)])
    p = readers(ids, [(0, 6)], vocab_size=4).probabilities(asked)

    after_a = [
        escape * one_token,
        (2 - 1.7) / 3 + escape * one_token,
        (1 - 0.2) / 3 + escape * one_token,
        escape * 3 * 0.6 / 3 / 4,
    ]
    np.testing.assert_allclose(p[1], after_a, rtol=0, atol=1e-15)
    # Nothing follows da, so that trigrams leave it to ab and ac: each after one token.
    trigram_of_b = (1 - 0.6) / 2 + 2 * 0.6 / 2 * one_token
    assert p[2, B] == p[2, C] == pytest.approx(trigram_of_b)


def discount(counts: collections.Counter, count: int) -> float:
    """Return D(count) of Chen and Goodman (1998), with n_i at least 1."""
    often = collections.Counter(counts.values())
    n = {i: max(often[i], 1) for i in (1, 2, 3, 4)}
    y = n[1] / (n[1] + 2 * n[2])
    c = min(count, 3)
    return max(c - (c + 1) * y * n[c + 1] / n[c], c / 10)


def kneser_ney(
    parts: list[list[int]], gram: tuple[int, ...], is_highest: bool = True
) -> float:
    """Return p of the last token of an n-gram, from dictionaries of all n-grams."""
    if not gram:
        return 1 / V
    counts: collections.Counter = collections.Counter()
    size = len(gram) + (not is_highest)
    grams = [
        tuple(part[i : i + size]) for part in parts for i in range(len(part) - size + 1)
    ]
    if is_highest:
        counts.update(grams)
    else:
        counts.update(longer[1:] for longer in set(grams))

    lower = kneser_ney(parts, gram[1:], is_highest=False)
    after = {each: n for each, n in counts.items() if each[:-1] == gram[:-1]}
    if not after:
        return lower
    kept = 0.0
    if gram in after:
        kept = after[gram] - discount(counts, after[gram])
    escape = sum(discount(counts, n) for n in after.values())
    return (kept + escape * lower) / sum(after.values())


@pytest.mark.parametrize(
    "spans", [[(0, 400)], [(3, 90), (100, 103), (200, 400)]], ids=["all", "parts"]
)
def test_probabilities_are_those_of_the_paper(spans):
    ids = text()
    rng = np.random.default_rng(1)
    ends = rng.integers(ORDERS, len(ids), 20)
    of_text = [ids[end - ORDERS : end].tolist() for end in ends]
    asked = of_text + rng.integers(0, V, (20, ORDERS)).tolist()

    p = readers(ids, spans).probabilities(np.array(asked))

    parts = [ids[first:end].tolist() for first, end in spans]
    for order in range(1, ORDERS + 1):
        expected = [kneser_ney(parts, tuple(gram[-order:])) for gram in asked]
        np.testing.assert_allclose(p[order - 1], expected, rtol=0, atol=1e-12)


def test_few_tokens_give_every_token_a_probability():
    for n in (1, 2, 3, 9):
        asked = np.array([[B] * (ORDERS - 1) + [token] for token in range(V)])
        p = readers(np.full(9, B, np.uint16), [(0, n)]).probabilities(asked)
        assert p.min() > 0
        np.testing.assert_allclose(p.sum(axis=1), 1, rtol=0, atol=1e-12)


def test_what_the_window_predicts_counted_by_hand():
    window = [A, B, A, B, A]
    ids = np.array([C, *window, B], np.uint16)
    places = np.array([6])

    parts = predictions(ids, places, np.array([5]), np.array([0.1]))

    expected = [
        0.1,
        (2 + 2 * 0.1) / (5 + 2),  # two of five tokens, of two kinds
        (2 + 1 * 0.1) / (2 + 1),  # a is followed by b twice
        (1 + 1 * 0.1) / (1 + 1),  # ba by b, once
        (1 + 1 * 0.1) / (1 + 1),  # aba by b, once
        0.1,  # baba ends the window and does not occur before
        0.1,
    ]
    np.testing.assert_allclose(parts[:, 0], expected, rtol=0, atol=1e-15)


def test_only_the_window_is_looked_up():
    ids = repeating(1)
    places = np.array([40, 90, 200])
    context = np.array([1, 7, 30])
    p = np.full(3, 0.1)
    parts = predictions(ids, places, context, p)
    for number, (place, n) in enumerate(zip(places, context, strict=True)):
        alone = ids[place - n : place + 1]
        window = predictions(alone, np.array([n]), np.array([n]), p[:1])
        np.testing.assert_array_equal(parts[:, number], window[:, 0])


def test_the_best_order_and_weights_are_those_of_validation_text():
    model = readers(text(), [(0, 400)])
    places = np.arange(60, 200)
    context = np.arange(60, 200) % 25 + 1

    order, nll = model.ngram(places)
    of_window = model.with_window(places, context)

    def grams(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        return np.stack(
            [ids[np.maximum(places - back, 0)] for back in range(5, -1, -1)], 1
        )

    chosen = np.arange(1, len(model.validation))
    p_chosen = model.probabilities(grams(model.validation, chosen))
    assert order == 1 + np.log(p_chosen).mean(axis=1).argmax()
    p = model.probabilities(grams(model.text, places))[order - 1]
    np.testing.assert_allclose(nll, -np.log(p), rtol=0, atol=1e-12)

    mixed = predictions(model.text, places, context, p)
    weights = np.linalg.lstsq(mixed.T, np.exp(-of_window))[0]
    np.testing.assert_allclose(weights @ mixed, np.exp(-of_window), rtol=0, atol=1e-12)
    assert weights.sum() == pytest.approx(1)
    assert weights.min() > -1e-9
    # Most likely: no part is likelier than the mixture, on the mean of ratios.
    alike = np.minimum(chosen, int(context.mean()))
    parts = predictions(model.validation, chosen, alike, p_chosen[order - 1])
    ratios = (parts / (weights @ parts)).mean(axis=1)
    assert ratios.max() < 1.01
    assert of_window.mean() < nll.mean()  # the text repeats itself
