"""Synthetic tasks: problems worked by hand, solvers of plain loops, what chance must
look like, and options.
"""

import hashlib
from typing import Any

import numpy as np
import pytest
import task_solvers
from scipy import optimize, stats

from posbench import tasks
from posbench.errors import Undefined

# Every task by default, and with options that take another way through its generator.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in tasks.names()),
    ("addition", {"answer": "reversed"}),
    ("addition", {"hints": 64}),
    ("addition", {"answer": "reversed", "hints": 49}),
    ("copy", {"vocabulary": 2}),
    ("repeat", {"vocabulary": 2}),
    ("selective_copy", {"tokens": 1}),
    ("passkey", {"depth": 0.0, "digits": 5}),
    ("passkey", {"depth": 0.3}),
    ("passkey", {"depth": 1.0, "fillers": 1}),
    ("recall", {"slots": 1, "fillers": 1}),
    ("recall", {"slots": 7, "power": 1.0}),
    ("flip_flop", {"ignore": 0.0}),
    ("flip_flop", {"ignore": 0.98}),
    ("counting", {"reset": 0.0}),
    ("counting", {"reset": 1.0}),
]


def drawn(task: tasks.Task, length: int, count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return task.problems(rng, length, count)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_plain_loops_find_the_answers_of_every_length(name, options):
    task = tasks.build(name, options)
    solve = getattr(task_solvers, name)
    for length in (task.least, task.shortest, task.longest, 8 * task.longest):
        problems = drawn(task, length, 10)
        for ids, scored in zip(problems.ids, problems.scored, strict=True):
            words = [task.symbols[number] for number in ids]
            answer = {}
            for before in scored.nonzero()[0]:
                place = int(before) + 1
                answer[place] = words[place]
            assert solve(words, options) == answer


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_problems_have_the_size_of_their_length(name, options):
    task = tasks.build(name, options)
    for length in (task.least, task.longest):
        problems = drawn(task, length, 10)
        size = task.size(length)
        assert problems.ids.shape == (10, size + 1)
        assert problems.scored.shape == (10, size)


def test_draws_are_those_of_earlier_runs():
    digest = hashlib.sha256()
    for name, options in CASES:
        task = tasks.build(name, options)
        problems = drawn(task, 8, 64, seed=7)
        digest.update(problems.ids.tobytes())
        digest.update(problems.scored.tobytes())
    assert digest.hexdigest()[:16] == "ccb4a78081fda112"


def ids_of(name: str, length: int, count: int = 20_000, **options: Any) -> Any:
    task = tasks.build(name, options)
    return drawn(task, length, count).ids


def assert_is_drawn(counts: Any, shares: Any) -> None:
    """Test how often each value was drawn."""
    expected = shares * counts.sum()
    assert len(counts) == len(shares)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def assert_is_even(counts: Any) -> None:
    n_values = len(counts)
    assert_is_drawn(counts, np.full(n_values, 1 / n_values))


def test_a_passkey_stands_at_each_depth_as_often():
    ids = ids_of("passkey", 9)
    fillers_before = (ids == 2).argmax(axis=1) - 1
    counts = np.bincount(fillers_before, minlength=10)
    assert_is_even(counts)


def test_a_trigger_of_induction_stands_at_each_place_as_often():
    before_the_question = ids_of("induction", 9)[:, :-2]
    places = (before_the_question == 1).argmax(axis=1) - 1
    counts = np.bincount(places, minlength=8)
    assert_is_even(counts)


def test_blanks_of_selective_copy_stand_at_each_place_as_often():
    ids = ids_of("selective_copy", 7, tokens=3)
    is_blank = ids[:, 1:11] == 2
    assert_is_even(is_blank.sum(axis=0))


def test_bits_of_parity_are_as_often_1_at_each_place():
    ids = ids_of("parity", 13)
    is_one = ids[:, 1:14] == 3
    assert_is_even(is_one.sum(axis=0))


def test_a_parity_is_as_often_even_as_odd():
    answers = ids_of("parity", 13)[:, -1]
    counts = np.bincount(answers)
    assert_is_even(counts[2:])


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_instructions_of_flip_flop_have_their_shares(ignore):
    task = tasks.build("flip_flop", {"ignore": ignore})

    problems = drawn(task, 102, 1000)

    instructions = problems.ids[:, 3:-2:2].flatten()
    counts = np.bincount(instructions, minlength=4)[1:]
    write_or_read = (1 - ignore) / 2
    shares = np.array([write_or_read, write_or_read, ignore])
    assert_is_drawn(counts, shares)


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_keys_of_recall_are_asked_by_a_power_law_in_the_slots_that_are_left(power):
    task = tasks.build("recall", {"power": power, "slots": 5})

    ids = drawn(task, 2, 20_000).ids

    asked = ids[:, 5::2]
    first_key = ids[:, 1, None]
    second_key = ids[:, 3, None]
    slots_of_first = (asked == first_key).argmax(axis=1)
    slots_of_second = (asked == second_key).argmax(axis=1)

    law = np.arange(1, 11) ** (power - 1)
    law = law / law.sum()
    after_first = np.zeros(10)
    for first in range(10):
        left = law / (1 - law[first])
        left[first] = 0
        after_first += law[first] * left

    counts = np.bincount(slots_of_first, minlength=10)
    assert_is_drawn(counts, law)
    counts = np.bincount(slots_of_second, minlength=10)
    assert_is_drawn(counts, after_first)


def logit_gaps(length: int, line: int | None) -> list[Any]:
    """Return, for each next token of each copied string of bits, the logit's terms that
    have to be larger than those of each other token: (4 tokens, 4 queries, 4 keys, 32
    distances), flat.

    With lines, `=` ends one, and the answer stands a whole line below the string.
    """
    places = np.arange(2 * length + 2)
    if line is not None:
        places[length + 2 :] += line - length - 2
    task = tasks.build("copy", {"vocabulary": 2})
    every = drawn(task, length, 512).ids

    gaps = []
    for ids in np.unique(every, axis=0):
        for t in range(length + 1, 2 * length + 2):
            distances = places[t] - places[: t + 1]
            terms = np.zeros((4, 4, 32))
            terms[ids[t], ids[: t + 1], distances] = 1
            right = ids[t + 1]
            for wrong in {0, 2, 3} - {right}:
                gap = np.zeros(4)
                gap[right] = 1
                gap[wrong] = -1
                gaps.append(np.kron(gap, terms.ravel()))
    return gaps


COPIED = [
    (4, None, True),
    (5, None, False),
    (5, 20, True),
]


@pytest.mark.parametrize(("longest", "line", "exist"), COPIED)
def test_one_head_can_copy_strings_of_four_bits_and_of_five_where_it_sees_lines(
    longest, line, exist
):
    """Wen et al. (2026), arXiv:2607.16072, Theorems 3.1 and 4.1, of attention alone: the
    next token is the one with the largest sum over keys of terms that depend on query,
    key and distance. Are there such terms?
    """
    gaps = []
    for length in range(1, longest + 1):
        gaps += logit_gaps(length, line)

    nothing = np.zeros(2048)  # to minimise
    at_least = np.ones(len(gaps))
    no_bounds = (None, None)
    found = optimize.linprog(nothing, -np.array(gaps), -at_least, bounds=no_bounds)

    infeasible = 2  # scipy's status
    expected = 0 if exist else infeasible
    assert found.status == expected


LIMITS = [
    ("recall", {}, 64),
    ("counting", {}, 192),
    ("addition", {"hints": 9}, 8),
]


@pytest.mark.parametrize(("name", "options", "limit"), LIMITS)
def test_problems_that_the_vocabulary_has_no_room_for_do_not_exist(
    name, options, limit
):
    task = tasks.build(name, options)
    assert task.limit == limit
    assert drawn(task, limit, 1)
    message = f"'{name}' has no problem of length {limit + 1}"
    with pytest.raises(Undefined, match=message):
        drawn(task, limit + 1, 1)
