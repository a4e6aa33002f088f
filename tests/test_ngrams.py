"""The simple readers, the n-gram model and the mixture: by hand, and against the counts
of the papers in dictionaries, token by token.
"""

import collections

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from posbench.config.schema import EvaluationConfig
from posbench.data.tokens import TokenSplit, data_of
from posbench.evaluation import mixture
from posbench.evaluation.mixture import Mixture, window_nats
from posbench.evaluation.ngrams import ORDERS, Readers
from posbench.evaluation.protocols import targets_of
from posbench.evaluation.requests import measurements, with_windows
from posbench.launch import compose

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


BREAKS = np.arange(V) == C  # c ends a line


def readers_of_window(ids: list[int], context: int) -> np.ndarray:
    """Return p of the last token by each reader of the mixture: (readers,)."""
    mixed = Mixture([text()], V, BREAKS)
    written = np.array(ids, np.uint16)
    last = np.array([len(ids) - 1])
    logs = mixed.logs(written, last, np.array([context]))
    return np.exp(logs[:, 0, ids[-1]])


def test_what_the_window_predicts_counted_by_hand():
    p = readers_of_window([C, A, B, A, B, A, B], context=5)

    longest = p[ORDERS - 1]
    expected = [
        (2 + 2 * longest) / (5 + 2),  # two of five tokens, of two kinds
        (2 + 1 * longest) / (2 + 1),  # a is followed by b twice
        (1 + 1 * longest) / (1 + 1),  # ba by b, once
        (1 + 1 * longest) / (1 + 1),  # aba by b, once
        longest,  # baba ends the window and does not occur before
        longest,
    ]
    assert_allclose(p[-6:], expected, rtol=1e-6)


def test_a_cached_token_is_half_as_likely_as_one_32_tokens_later():
    ids = [A] + [B] * 31 + [A, B, A]
    p = readers_of_window(ids, context=34)
    unigram = p[0]
    weights = 0.5 ** (np.arange(1, 35) / 32)
    of_a = weights[1] + weights[33]
    assert weights[33] == pytest.approx(weights[1] / 2)
    assert p[-7] == pytest.approx(0.8 * of_a / weights.sum() + 0.2 * unigram)


@pytest.mark.parametrize("spans", SPANS, ids=["all", "parts"])
def test_the_mixture_has_the_ngram_models_of_the_paper(spans):
    model = readers(text(), spans)
    places = np.arange(ORDERS, 200)
    scored = repeating(1)
    mixed = Mixture(model.counted(400), V, BREAKS)

    logs = mixed.logs(scored, places, places)

    p = model.probabilities(grams_at(scored, places))
    ours = logs[:ORDERS, np.arange(len(places)), scored[places]]
    assert_allclose(np.exp(ours), p, rtol=1e-5)


def test_tokens_two_back_counted_by_hand():
    """After a, two back, stand a once and c twice; after c twice b; after b, a and b
    once; after none, a and c once. So n_1 = 5, n_2 = 2 and n_3 counts as 1: Y = 5/9,
    D(1) = 5/9 and D(2) = 7/6.
    """
    train = np.array([A, C, A, B, C, A, B, C, B], np.uint16)
    mixed = Mixture([train], V, BREAKS)
    asked = np.array([A, D, A], np.uint16)

    logs = mixed.logs(asked, np.array([2]), np.array([2]))

    p = np.exp(logs[:, 0])
    unigram = p[0]
    escape = (5 / 9 + 7 / 6) / 3
    kept = np.zeros(V)
    kept[A] = (1 - 5 / 9) / 3
    kept[C] = (2 - 7 / 6) / 3
    assert_allclose(p[ORDERS], kept + escape * unigram, rtol=1e-5)


def test_a_training_text_may_end_with_a_line_break():
    ids = np.append(text(), np.uint16(C))

    mixed = Mixture([ids], V, BREAKS)

    p = np.exp(mixed.logs(ids, np.array([len(ids) - 1]), np.array([5])))
    assert_allclose(p.sum(axis=2), 1, rtol=1e-5)


def test_the_mixture_is_a_probability_that_does_not_know_the_token():
    """For each token of the vocabulary in the target's place: they sum to one."""
    mixed = Mixture([text()], V, BREAKS)
    weights = np.random.default_rng(3).normal(0.1, 0.3, 25)
    for place, n in [(40, 1), (90, 7), (150, 30), (200, 150)]:
        total = 0.0
        for token in range(V):
            scored = repeating(1)
            scored[place] = token
            (nats,) = mixed.nats(weights, scored, np.array([place]), np.array([n]))
            total += np.exp(-nats)
        assert total == pytest.approx(1, abs=1e-5)


def test_the_mixture_reads_nothing_outside_the_window():
    places = np.array([40, 90, 200])
    context = np.array([1, 7, 30])
    scored = repeating(1)
    mixed = Mixture([text()], V, BREAKS)
    logs = mixed.logs(scored, places, context)
    for number, (place, n) in enumerate(zip(places, context, strict=True)):
        others = np.full(len(scored), C, np.uint16)
        others[place - n : place] = scored[place - n : place]
        one = slice(number, number + 1)
        alone = mixed.logs(others, places[one], context[one])
        assert_array_equal(logs[:, number], alone[:, 0])


def test_the_weights_are_the_likeliest_of_validation_text():
    mixed = Mixture([text()], V, BREAKS)
    chosen = repeating(2)
    places = np.arange(20, 200)
    context = np.full(180, 20)

    weights = mixed.weights(chosen, places, context)

    def penalised(each):
        nats = mixed.nats(each, chosen, places, context).sum()
        return nats + mixture.RIDGE / 2 * len(places) * (each**2).sum()

    least = penalised(weights)
    rng = np.random.default_rng(0)
    for aside in rng.normal(0, 0.05, (5, len(weights))):
        assert penalised(weights + aside) > least
        assert penalised(weights - aside) > least


def grams_at(ids: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return each token with the five before it, the first for those before the
    text: (n, 6).
    """
    columns = []
    for back in range(5, -1, -1):
        before = np.maximum(places - back, 0)
        columns.append(ids[before])
    return np.stack(columns, 1)


def test_the_best_order_is_that_of_validation_text():
    ids = text()
    model = readers(ids, [(0, 400)])
    places = np.arange(60, 200)

    order, nll = model.ngram(places)

    chosen = np.arange(1, len(model.validation))
    grams = grams_at(model.validation, chosen)
    likelihoods = np.log(model.probabilities(grams)).mean(axis=1)
    assert order == 1 + likelihoods.argmax()
    grams = grams_at(model.text, places)
    p = model.probabilities(grams)[order - 1]
    assert_allclose(nll, -np.log(p), rtol=0, atol=1e-12)


def targets_at_1x(settings: EvaluationConfig, split: TokenSplit, train_length: int):
    rows = measurements(settings, train_length)
    for row in with_windows(rows, settings, split, train_length):
        if row.protocol == "fixed_target" and row.length == train_length:
            return targets_of(row.windows)
    raise AssertionError("no row at 1x")


MEASURED = [
    ([], 3.408, 2.774),
    (["experiment=reader_wide", "ratio=0.125,0.25,0.5,1,2,4"], 3.408, 2.637),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "ngram", "of_window"), MEASURED)
def test_the_readers_are_as_good_as_an_independent_measurement(
    words, ngram, of_window, usual_mixture
):
    """Measured by others on the built-in text of Python 3.11.7: n-gram models, and
    their own mixture, of more readers, which took 75 seconds.
    """
    config = compose.single(["experiment=reader", *words])
    data = data_of(config.data)
    if data.meta["sha256"] != BUILT_IN:
        pytest.skip("another Python has another built-in text")
    batches = data.batches(config.training, config.seed)
    spans = batches.spans(config.training.steps)
    vocab_size = data.tokenizer.vocab_size
    held_out = (data.test.ids, data.validation.ids)
    breaks = np.array(["\n" in token for token in data.tokenizer.texts])
    made = Readers(data.train.ids, spans, vocab_size, *held_out, breaks)
    train_length = config.training.train_length
    targets = targets_at_1x(config.evaluation, data.test, train_length)

    order, nll = made.ngram(targets.indices)
    with_window = window_nats(made, targets.indices, targets.context)

    assert order == 6
    assert nll.mean() == pytest.approx(ngram, abs=0.02)
    assert of_window - 0.06 < with_window.mean() < of_window
