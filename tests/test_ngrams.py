"""The readers that the gates compare with: by hand, and against the counts of the
papers in dictionaries, token by token.
"""

import collections

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posbench.config import compose
from posbench.config.schema import EvaluationConfig
from posbench.data.tokens import TokenSplit, data_of
from posbench.evaluation.ngrams import ORDERS, Readers, predictions
from posbench.evaluation.protocols import targets_of
from posbench.evaluation.requests import measurements, with_windows

V = 6  # size of the vocabulary
A, B, C, D = range(4)
BUILT_IN = "639fd9706e91be557aedb7ecc88f1a1472dc2945bc7e70d9c9db1926b8dcd01a"


def text(n: int = 400, seed: int = 0) -> np.ndarray:
    """Return a text in which some tokens are frequent and one never occurs."""
    rng = np.random.default_rng(seed)
    drawn = rng.geometric(0.4, n)
    drawn = np.minimum(drawn, V - 2)
    return drawn.astype(np.uint16)


def repeating(seed: int) -> np.ndarray:
    """Return a text that says each of thirty phrases three times."""
    rng = np.random.default_rng(seed)
    phrases = []
    for _ in range(30):
        phrase = rng.integers(0, V, 9)
        phrases += [phrase, phrase, phrase]
    return np.concatenate(phrases).astype(np.uint16)


def readers(
    ids: np.ndarray, spans: list[tuple[int, int]], vocab_size: int = V
) -> Readers:
    scored = repeating(1)
    validation = repeating(2)
    parts = np.array(spans)
    return Readers(ids, parts, vocab_size, scored, validation)


def test_bigrams_counted_by_hand():
    # ab and ba occur twice, ac once: n_1 = 1, n_2 = 2, so Y = 1/5, D(1) = 1/5 and
    # D(2) = 17/10. One token stands before each of a, b and c: Y = 3/5 = D(1).
    unseen = 3 * 0.6 / 3 / 4
    one_token = (1 - 0.6) / 3 + unseen
    escape = (1.7 + 0.2) / 3

    ids = np.array([A, B, A, B, A, C], np.uint16)
    model = readers(ids, [(0, 6)], vocab_size=4)
    asked = [
        [D, D, D, D, A, A],
        [D, D, D, D, A, B],
        [D, D, D, D, A, C],
        [D, D, D, D, A, D],
    ]
    p = model.probabilities(np.array(asked))

    after_a = [
        escape * one_token,
        (2 - 1.7) / 3 + escape * one_token,
        (1 - 0.2) / 3 + escape * one_token,
        escape * unseen,
    ]
    assert_allclose(p[1], after_a, rtol=0, atol=1e-15)
    # Nothing follows da, so that trigrams leave it to ab and ac: each after one token.
    trigram = (1 - 0.6) / 2 + 2 * 0.6 / 2 * one_token
    assert p[2, B] == pytest.approx(trigram)
    assert p[2, C] == p[2, B]


def discount(counts: collections.Counter, count: int) -> float:
    """Return D(count) of Chen and Goodman (1998), with n_i at least 1."""
    often = collections.Counter(counts.values())
    n = {i: max(often[i], 1) for i in (1, 2, 3, 4)}
    y = n[1] / (n[1] + 2 * n[2])
    c = min(count, 3)
    next_to_c = n[c + 1] / n[c]
    by_formula = c - (c + 1) * y * next_to_c
    return max(by_formula, c / 10)


def grams_of(part: list[int], size: int) -> list[tuple[int, ...]]:
    """Return all n-grams of a text, in order."""
    grams = []
    for end in range(size, len(part) + 1):
        gram = part[end - size : end]
        grams.append(tuple(gram))
    return grams


def kneser_ney(
    parts: list[list[int]], gram: tuple[int, ...], is_highest: bool = True
) -> float:
    """Return p of the last token of an n-gram, from dictionaries of all n-grams."""
    if not gram:
        return 1 / V
    counts: collections.Counter = collections.Counter()
    if is_highest:
        for part in parts:
            grams = grams_of(part, len(gram))
            counts.update(grams)
    else:
        longer = set()
        for part in parts:
            grams = grams_of(part, len(gram) + 1)
            longer.update(grams)
        counts.update(each[1:] for each in longer)

    lower = kneser_ney(parts, gram[1:], is_highest=False)
    history = gram[:-1]
    after = {each: n for each, n in counts.items() if each[:-1] == history}
    if not after:
        return lower
    kept = 0.0
    if gram in after:
        kept = after[gram] - discount(counts, after[gram])
    escape = sum(discount(counts, n) for n in after.values())
    total = sum(after.values())
    return (kept + escape * lower) / total


SPANS = [[(0, 400)], [(3, 90), (100, 103), (200, 400)]]


@pytest.mark.parametrize("spans", SPANS, ids=["all", "parts"])
def test_probabilities_are_those_of_the_paper(spans):
    ids = text()
    rng = np.random.default_rng(1)
    ends = rng.integers(ORDERS, len(ids), 20)
    of_text = [ids[end - ORDERS : end].tolist() for end in ends]
    random = rng.integers(0, V, (20, ORDERS))
    asked = of_text + random.tolist()

    model = readers(ids, spans)
    p = model.probabilities(np.array(asked))

    parts = [ids[first:end].tolist() for first, end in spans]
    for order in range(1, ORDERS + 1):
        expected = []
        for gram in asked:
            last = tuple(gram[-order:])
            expected.append(kneser_ney(parts, last))
        assert_allclose(p[order - 1], expected, rtol=0, atol=1e-12)


def test_few_tokens_give_every_token_a_probability():
    ids = np.full(9, B, np.uint16)
    asked = np.full((V, ORDERS), B)
    asked[:, -1] = np.arange(V)
    for n in (1, 2, 3, 9):
        model = readers(ids, [(0, n)])
        p = model.probabilities(asked)
        assert p.min() > 0
        sums = p.sum(axis=1)
        assert_allclose(sums, 1, rtol=0, atol=1e-12)


def test_what_the_window_predicts_counted_by_hand():
    window = [A, B, A, B, A]
    ids = np.array([C, *window, B], np.uint16)
    places = np.array([6])
    context = np.array([5])
    p = np.array([0.1])

    parts = predictions(ids, places, context, p)

    expected = [
        0.1,
        (2 + 2 * 0.1) / (5 + 2),  # two of five tokens, of two kinds
        (2 + 1 * 0.1) / (2 + 1),  # a is followed by b twice
        (1 + 1 * 0.1) / (1 + 1),  # ba by b, once
        (1 + 1 * 0.1) / (1 + 1),  # aba by b, once
        0.1,  # baba ends the window and does not occur before
        0.1,
    ]
    assert_allclose(parts[:, 0], expected, rtol=0, atol=1e-15)


def test_only_the_window_is_looked_up():
    ids = repeating(1)
    places = np.array([40, 90, 200])
    context = np.array([1, 7, 30])
    p = np.full(3, 0.1)
    parts = predictions(ids, places, context, p)
    for number, (place, n) in enumerate(zip(places, context, strict=True)):
        alone = ids[place - n : place + 1]
        last = np.array([n])
        window = predictions(alone, last, last, p[:1])
        assert_array_equal(parts[:, number], window[:, 0])


def grams_at(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return each token with the five before it, the first for those before the
    text: (n, 6).
    """
    columns = []
    for back in range(5, -1, -1):
        before = np.maximum(places - back, 0)
        columns.append(ids[before])
    return np.stack(columns, 1)


def test_the_best_order_and_weights_are_those_of_validation_text():
    ids = text()
    model = readers(ids, [(0, 400)])
    places = np.arange(60, 200)
    context = np.arange(60, 200) % 25 + 1

    order, nll = model.ngram(places)
    of_window = model.with_window(places, context)

    chosen = np.arange(1, len(model.validation))
    grams = grams_at(model.validation, chosen)
    p_chosen = model.probabilities(grams)
    likelihoods = np.log(p_chosen).mean(axis=1)
    assert order == 1 + likelihoods.argmax()
    grams = grams_at(model.text, places)
    p = model.probabilities(grams)[order - 1]
    expected = -np.log(p)
    assert_allclose(nll, expected, rtol=0, atol=1e-12)

    mixed = predictions(model.text, places, context, p)
    p_of_window = np.exp(-of_window)
    weights = np.linalg.lstsq(mixed.T, p_of_window)[0]
    assert_allclose(weights @ mixed, p_of_window, rtol=0, atol=1e-12)
    assert weights.sum() == pytest.approx(1)
    assert weights.min() > -1e-9
    # Most likely: no part is likelier than the mixture, on the mean of ratios.
    alike = np.minimum(chosen, int(context.mean()))
    parts = predictions(model.validation, chosen, alike, p_chosen[order - 1])
    ratios = parts / (weights @ parts)
    assert ratios.mean(axis=1).max() < 1.01
    assert of_window.mean() < nll.mean()  # the text repeats itself


def targets_at_1x(settings: EvaluationConfig, split: TokenSplit, train_length: int):
    rows = measurements(settings, train_length)
    for row in with_windows(rows, settings, split, train_length):
        if row.protocol == "fixed_target" and row.length == train_length:
            return targets_of(row.windows)
    raise AssertionError("no row at 1x")


MEASURED = [
    ([], 3.408, 2.932),
    (["experiment=reader_wide", "ratio=0.125,0.25,0.5,1,2,4"], 3.408, 2.791),
    (["experiment=reader_wide"], 3.535, 2.832),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "ngram", "of_window"), MEASURED)
def test_the_readers_are_as_good_as_an_independent_measurement(words, ngram, of_window):
    """Measured by others on the built-in text of Python 3.11.7."""
    config = compose.single(["experiment=reader", *words])
    data = data_of(config.data)
    if data.record["sha256"] != BUILT_IN:
        pytest.skip("another Python has another built-in text")
    batches = data.batches(config.training, config.seed)
    spans = batches.spans(config.training.steps)
    vocab_size = data.tokenizer.vocab_size
    held_out = (data.test.ids, data.validation.ids)
    made = Readers(data.train.ids, spans, vocab_size, *held_out)
    train_length = config.training.train_length
    targets = targets_at_1x(config.evaluation, data.test, train_length)

    order, nll = made.ngram(targets.indices)
    with_window = made.with_window(targets.indices, targets.context)

    assert order == 6
    assert nll.mean() == pytest.approx(ngram, abs=0.02)
    assert with_window.mean() == pytest.approx(of_window, abs=0.03)
