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
    *(("counting", {"reset": share}) for share in (0.0, 1.0)),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_plain_loops_find_the_answers_of_every_length(name, options):
    task = tasks.build(name, options)
    for length in {task.least, task.shortest, task.longest, 8 * task.longest}:
        problems, again = (
            task.problems(np.random.default_rng(length), length, 10) for _ in range(2)
        )
        assert (problems.ids == again.ids).all()
        assert (problems.scored == again.scored).all()
        assert problems.ids.shape == (
            10,
            task.size(length) + 1,
        )
        assert problems.scored.shape == (10, task.size(length))
        for ids, scored in zip(problems.ids, problems.scored, strict=True):
            words = [task.symbols[number] for number in ids]
            expected = {int(t) + 1: words[t + 1] for t in scored.nonzero()[0]}
            assert getattr(task_solvers, name)(words, options) == expected


def test_draws_are_those_of_earlier_runs():
    digest = hashlib.sha256()
    for name, options in CASES:
        problems = tasks.build(name, options).problems(np.random.default_rng(7), 8, 64)
        digest.update(problems.ids.tobytes() + problems.scored.tobytes())
    assert digest.hexdigest()[:16] == "ccb4a78081fda112"


def drawn(name: str, length: int, count: int = 20_000, **options: Any) -> Any:
    return (
        tasks.build(name, options).problems(np.random.default_rng(0), length, count).ids
    )


def test_places_and_bits_are_drawn_as_often_as_the_definition_says():
    counts = [
        # keys, from no filler to all
        np.bincount((drawn("passkey", 9) == 2).argmax(axis=1), minlength=11)[1:],
        # triggers
        np.bincount((drawn("induction", 9)[:, :-2] == 1).argmax(axis=1), minlength=9)[
            1:
        ],
        (drawn("selective_copy", 7, tokens=3)[:, 1:11] == 2).sum(axis=0),  # blanks
        np.bincount(drawn("parity", 13)[:, -1])[2:],
        (drawn("parity", 13)[:, 1:14] == 3).sum(axis=0),
    ]
    expected = [each.sum() / len(each) for each in counts]
    for ignore in (0.8, 0.98, 0.1):
        instructions = drawn("flip_flop", 102, 1000, ignore=ignore)[:, 3:-2:2]
        # writes, reads, ignored
        counts.append(np.bincount(instructions.flatten(), minlength=4)[1:])
        expected.append(
            np.array([(1 - ignore) / 2, (1 - ignore) / 2, ignore]) * instructions.size
        )
    # the second pair of recall draws from the slots that are left
    for power in (0.01, 0.5, 1.0):
        ids = drawn("recall", 2, power=power, slots=5)
        counts += [
            np.bincount((ids[:, 5::2] == ids[:, at, None]).argmax(axis=1), minlength=10)
            for at in (1, 3)
        ]
        law = np.arange(1, 11) ** (power - 1) / sum(np.arange(1, 11) ** (power - 1))
        after_first = [
            sum(law[i] * law[j] / (1 - law[i]) for i in range(10) if i != j)
            for j in range(10)
        ]
        expected += [law * 20_000, np.array(after_first) * 20_000]
    assert [len(each) for each in counts] == [10, 8, 10, 2, 13, 3, 3, 3, *[10] * 6]
    assert all(
        stats.chisquare(*each).pvalue > 1e-3
        for each in zip(counts, expected, strict=True)
    )


def test_one_head_can_copy_strings_of_four_bits_and_of_five_where_it_sees_lines():
    """Wen et al. (2026), arXiv:2607.16072, Theorems 3.1 and 4.1, of attention alone: of
    tokens that whose sum over keys is the largest is said. A term depends on query, key
    and distance. With lines, `=` ends one.
    """
    # 0: there are such terms; 2: there are none
    for longest, line, status in ((4, 0, 0), (5, 0, 2), (5, 20, 0)):
        larger = []  # sums of terms that have to be above 0
        for length in range(1, longest + 1):
            places = np.arange(2 * length + 2)
            places[length + 2 :] += line and line - length - 2
            for ids in np.unique(drawn("copy", length, 512, vocabulary=2), axis=0):
                for t in range(length + 1, 2 * length + 2):
                    terms = np.zeros((4, 4, 32))
                    answers = np.eye(4)
                    terms[ids[t], ids[: t + 1], places[t] - places[: t + 1]] = 1
                    gaps = (
                        answers[ids[t + 1]]
                        - answers[[each for each in (0, 2, 3) if each != ids[t + 1]]]
                    )
                    larger += [np.kron(gap, terms.ravel()) for gap in gaps]
        program = optimize.linprog(
            np.zeros(2048),
            -np.array(larger),
            -np.ones(len(larger)),
            bounds=(None, None),
        )
        assert program.status == status


def test_problems_that_the_vocabulary_has_no_room_for_do_not_exist():
    for name, options, limit in (
        ("recall", {}, 64),
        ("counting", {}, 192),
        ("addition", {"hints": 9}, 8),
    ):
        task = tasks.build(name, options)
        assert task.limit == limit
        assert task.problems(np.random.default_rng(0), limit, 1)
        with pytest.raises(
            Undefined, match=f"'{name}' has no problem of length {limit + 1}"
        ):
            task.problems(np.random.default_rng(0), limit + 1, 1)
