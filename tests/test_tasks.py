"""Synthetic tasks: problems worked by hand, solvers of plain loops, what chance must
look like, and options.
"""

import hashlib
from typing import Any

import numpy as np
import pytest
import task_solvers
from scipy import stats

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


def assert_is_drawn(counts: Any, shares: Any) -> None:
    """Test how often each value was drawn."""
    expected = shares * counts.sum()
    assert len(counts) == len(shares)
    assert stats.chisquare(counts, expected).pvalue > 1e-3


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_instructions_of_flip_flop_have_their_shares(ignore):
    task = tasks.build("flip_flop", {"ignore": ignore})

    problems = drawn(task, 102, 1000)

    instructions = problems.ids[:, 3:-2:2]
    counts = np.bincount(instructions.flatten(), minlength=4)[1:]
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
