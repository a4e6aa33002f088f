"""Synthetic tasks: problems worked by hand, solvers of plain loops, what chance must look like, and options."""

import dataclasses
import hashlib
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_readers
import task_solvers
from scipy import stats

from posbench import tasks
from posbench.data import tokens
from posbench.errors import Undefined, UserError
from posbench.evaluation.models import parse_choice
from posbench.tasks.base import SEPARATOR, Task

# Every task by default, and with options that take another way through its generator.
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in tasks.names()),
    ("addition", {"answer": "reversed"}), ("addition", {"hints": 64}),
    ("addition", {"answer": "reversed", "hints": 49}), ("copy", {"vocabulary": 2}),
    ("repeat", {"vocabulary": 2}), ("selective_copy", {"tokens": 1}),
    ("passkey", {"depth": 0.0, "digits": 5}), ("passkey", {"depth": 0.3}), ("passkey", {"depth": 1.0, "fillers": 1}),
    ("recall", {"slots": 1, "fillers": 1}), ("recall", {"slots": 7, "power": 1.0}),
    ("flip_flop", {"ignore": 0.0}), ("flip_flop", {"ignore": 0.98}),
    ("counting", {"reset": 0.0}), ("counting", {"reset": 1.0}),
]  # fmt: skip


def answers(task: Task, words: Any, scored: Any) -> dict[int, str]:
    """What is scored of one problem, by its place in the words."""
    return {int(t) + 1: task.symbols[words[t + 1]] for t in scored.nonzero()[0]}


def drawings(name: str) -> dict[str, tuple[list[str], dict[int, str]]]:
    """Problems that a task's docstring draws, by what they are of: the words read, and the labels below them.

    A label stands below the word after which it is to be said.
    """
    found, lines = {}, inspect.cleandoc(tasks.load(name).__doc__ or "").splitlines()
    for above, below in itertools.pairwise(lines):
        what, reads, _ = above.partition("  reads   ")
        if reads:
            start = len(what) + len(reads)
            words, labels = (
                {m.start(): m.group() for m in re.finditer(r"\S+", line) if m.start() >= start}
                for line in (above, below)
            )
            known = {list(words).index(at) + 1: label for at, label in labels.items()}
            found[what.rpartition(", ")[2].strip()] = (list(words.values()), known)
    return found


@pytest.mark.parametrize("name", tasks.names())
def test_docstrings_draw_problems_with_their_answers_and_name_their_source(name: str) -> None:
    for what, (words, known) in drawings(name).items():
        key, _, value = what.partition("=")
        options = {key: int(value) if value.isdigit() else value} if value else {}
        assert getattr(task_solvers, name)([*words, known.get(len(words), "f0")], options) == known
    text = inspect.cleandoc(tasks.load(name).__doc__ or "")
    assert drawings(name) and all(re.search(rf"^{part}: \w", text, re.MULTILINE) for part in ("Source", "Deviates"))


def test_the_readme_names_all() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"\nTasks: {', '.join(f'`{name}`' for name in tasks.names())}.\n" in readme


# -- by a second implementation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES)
def test_plain_loops_find_the_answers_of_every_length_and_guess_as_the_trivial_reader_does(
    name: str, options: dict[str, Any]
) -> None:
    task = tasks.build(name, options)
    for length in {task.least, task.shortest, (task.shortest + task.longest) // 2, task.longest, 8 * task.longest}:
        problems, again, other = (
            task.problems(np.random.default_rng(seed), length, 20) for seed in (length, length, 999)
        )
        assert (problems.ids == again.ids).all() and (problems.scored == again.scored).all()
        assert (problems.ids != other.ids).any() or length < 4 or options == {"reset": 1.0}
        assert problems.ids.dtype == np.int64 and problems.ids.shape == (20, task.size(length) + 1)
        assert problems.scored.dtype == np.bool_ and problems.scored.shape == (20, task.size(length))
        guesses = np.pad(task.trivial(problems), ((0, 0), (1, 0)))
        for ids, scored, guess in zip(problems.ids, problems.scored, guesses, strict=True):
            words, known = [task.symbols[number] for number in ids], answers(task, ids, scored)
            assert getattr(task_solvers, name)(words, options) == known
            assert answers(task, guess, scored) == getattr(task_readers, name)(words, list(known), options)


def test_draws_are_those_of_earlier_runs() -> None:
    digest = hashlib.sha256()
    for name, options in CASES:
        problems = tasks.build(name, options).problems(np.random.default_rng(7), 8, 64)
        digest.update(problems.ids.tobytes() + problems.scored.tobytes())
    assert digest.hexdigest()[:16] == "ccb4a78081fda112"


@pytest.mark.parametrize("name", tasks.names())
def test_the_vocabulary_begins_with_the_separator_and_all_of_it_is_drawn(name: str) -> None:
    task = tasks.build(name)
    assert task.symbols[0] == SEPARATOR == tokens.SEPARATOR and task.name == name
    assert len(set(task.symbols)) == len(task.symbols) and not re.search(r"\s", "".join(task.symbols))
    drawn = np.unique(task.problems(np.random.default_rng(0), task.longest, 2000).ids)
    if name == "counting":  # no count is above the length
        assert drawn[0] == 0 and drawn[-1] <= 4 + task.longest
    else:
        assert drawn.tolist() == list(range(len(task.symbols)))


# -- by chance ---------------------------------------------------------------------------------------------------------


def drawn(name: str, length: int, count: int = 20_000, **options: Any) -> Any:
    return tasks.build(name, options).problems(np.random.default_rng(0), length, count).ids


def test_the_key_stands_where_a_depth_says_and_a_depth_changes_no_key() -> None:
    ids = {depth: drawn("passkey", 16, 50, depth=depth) for depth in (0.0, 0.5, 1.0)}
    assert [np.unique((each == 2).argmax(axis=1)).tolist() for each in ids.values()] == [[1], [9], [17]]
    assert (ids[0.0][:, -3:] == ids[1.0][:, -3:]).all()


def test_places_and_bits_are_drawn_as_often_as_the_definition_says() -> None:
    counts = [
        np.bincount((drawn("passkey", 9) == 2).argmax(axis=1), minlength=11)[1:],  # keys, from no filler to all
        np.bincount((drawn("induction", 9)[:, :-2] == 1).argmax(axis=1), minlength=9)[1:],  # triggers
        (drawn("selective_copy", 7, tokens=3)[:, 1:11] == 2).sum(axis=0),  # blanks
        np.bincount(drawn("parity", 13)[:, -1])[2:],
        (drawn("parity", 13)[:, 1:14] == 3).sum(axis=0),
    ]
    expected = [each.sum() / len(each) for each in counts]
    for ignore in (0.8, 0.98, 0.1):
        instructions = drawn("flip_flop", 102, 1000, ignore=ignore)[:, 3:-2:2]
        counts.append(np.bincount(instructions.flatten(), minlength=4)[1:])  # writes, reads, ignored
        expected.append(np.array([(1 - ignore) / 2, (1 - ignore) / 2, ignore]) * instructions.size)
    assert [len(each) for each in counts] == [10, 8, 10, 2, 13, 3, 3, 3]
    assert all(stats.chisquare(*each).pvalue > 1e-3 for each in zip(counts, expected, strict=True))


def test_questions_of_recall_follow_the_power_law() -> None:
    """Of a pair's first draw; the second pair draws from the slots that are left."""
    for power in (0.01, 0.5, 1.0):
        ids = drawn("recall", 2, power=power, slots=5)
        slots = [(ids[:, 5::2] == ids[:, at, None]).argmax(axis=1) for at in (1, 3)]
        law = np.arange(1, 11) ** (power - 1)
        law = law / law.sum()
        after_first = [sum(law[i] * law[j] / (1 - law[i]) for i in range(10) if i != j) for j in range(10)]
        for slot, expected in zip(slots, (law, np.array(after_first)), strict=True):
            assert stats.chisquare(np.bincount(slot, minlength=10), expected * 20_000).pvalue > 1e-3


def test_counts_hardly_grow_with_length() -> None:
    short, long = (drawn("counting", length)[:, -1] - 5 for length in (24, 192))
    assert long.mean() < 1.2 * short.mean()
    assert (long > 24).mean() == pytest.approx(1 / 150, rel=0.2)  # as the docstring says


# -- options and the registry ------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"shortest": 0}, f"data.task.shortest is 0 for '{name}': expected a length") for name in tasks.names()),
    *((name, {"longest": 0}, "data.task.shortest is") for name in tasks.names()),
    *((name, {"vocabulary": 1}, f"data.task.vocabulary is 1 for '{name}': input should be greater than or equal to 2")
      for name in ("copy", "reverse", "sort", "repeat", "induction", "selective_copy")),
    ("copy", {"vocabulary": "many"}, "data.task.vocabulary is 'many' for 'copy': input should be a valid integer"),
    ("copy", {"vocabluary": 3}, "'copy' has no option 'vocabluary': it accepts shortest, longest, vocabulary;"),
    ("repeat", {"shortest": 1}, "expected a length from 2 to longest, 20"),
    ("addition", {"answer": "revrsed"}, "data.task.answer is 'revrsed' for 'addition': input should be 'plain' or"),
    ("addition", {"hints": -1}, "data.task.hints is -1"),
    ("addition", {"hints": 6}, "longest is 6 for 'addition': expected at most 5"),
    ("passkey", {"digits": 0}, "data.task.digits is 0"), ("passkey", {"fillers": 0}, "data.task.fillers is 0"),
    ("passkey", {"depth": 1.5}, "depth is 1.5"), ("passkey", {"depth": float("nan")}, "data.task.depth is nan"),
    ("recall", {"keys": 7}, "data.task.longest is 8 for 'recall': expected at most 7"),
    ("recall", {"values": 0}, "expected at most 0"), ("recall", {"fillers": 0}, "data.task.fillers is 0"),
    ("recall", {"slots": 0}, "data.task.slots is 0"), ("recall", {"power": 0}, "input should be greater than 0"),
    ("selective_copy", {"tokens": 0}, "data.task.tokens is 0"), ("flip_flop", {"ignore": -0.1}, "ignore is -0.1"),
    ("counting", {"reset": 2}, "data.task.reset is 2"), ("counting", {"highest": 20}, "expected at most 20"),
    ("passkeys", {}, "unknown task 'passkeys': did you mean 'passkey'? (there are addition, copy, counting"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "line"), REFUSED)
def test_an_option_is_refused_in_one_line(name: str, options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        tasks.build(name, options)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_every_option_has_a_value_that_is_refused() -> None:
    refused = {(name, option) for name, options, _ in REFUSED for option in options}
    assert {(name, option) for name in tasks.names() for option in tasks.options_of(name)} <= refused


def test_problems_that_the_vocabulary_has_no_room_for_do_not_exist() -> None:
    for name, options, limit in (("recall", {}, 64), ("counting", {}, 192), ("addition", {"hints": 9}, 8)):
        task = tasks.build(name, options)
        assert task.limit == limit and task.problems(np.random.default_rng(0), limit, 1)
        with pytest.raises(Undefined, match=f"'{name}' has no problem of length {limit + 1}"):
            task.problems(np.random.default_rng(0), limit + 1, 1)


@pytest.mark.parametrize("name", tasks.names())
def test_variants_are_options_that_make_other_problems_of_one_vocabulary(name: str) -> None:
    task = tasks.build(name)
    for text in task.variants:
        _, options = parse_choice(f"{name}:{text}")
        other = task.varied(**options)
        assert other != task and other.symbols == task.symbols and other.size(9) == task.size(9)
        assert dataclasses.replace(other, **{key: getattr(task, key) for key in options}) == task
