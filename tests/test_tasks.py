"""Synthetic tasks: problems worked by hand, solvers of plain loops, what chance must look like, and options."""

import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import task_readers
import task_solvers
from scipy import stats

from posbench import tasks
from posbench.data import tokenizer
from posbench.errors import Undefined, UserError
from posbench.evaluation.models import parse_choice
from posbench.tasks.base import SEPARATOR, Problems, Task

# Every task by default, and with options that take another way through its generator.
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in tasks.names()] + [
    ("addition", {"answer": "reversed"}),
    ("addition", {"hints": 64}),
    ("addition", {"answer": "reversed", "hints": 49}),
    ("copy", {"vocabulary": 2}),
    ("repeat", {"vocabulary": 2}),
    ("passkey", {"depth": 0.0, "digits": 5}),
    ("passkey", {"depth": 0.3}),
    ("passkey", {"depth": 1.0, "fillers": 1}),
    ("recall", {"slots": 1, "fillers": 1}),
    ("recall", {"slots": 7, "power": 1.0}),
    ("selective_copy", {"tokens": 1}),
    ("flip_flop", {"ignore": 0.0}),
    ("flip_flop", {"ignore": 0.98}),
    ("counting", {"reset": 0.0}),
    ("counting", {"reset": 1.0}),
]


def words_of(task: Task, ids: Any) -> list[str]:
    symbols = task.symbols
    return [symbols[number] for number in ids]


def answers(task: Task, problems: Problems, row: int) -> dict[int, str]:
    """What is scored, by its place in the ids."""
    words = words_of(task, problems.ids[row])
    return {int(t) + 1: words[t + 1] for t in problems.scored[row].nonzero()[0]}


# -- by hand -----------------------------------------------------------------------------------------------------------


class Scripted:
    """A generator whose draws are written down beforehand; they must be asked for in this order and shape."""

    def __init__(self, *draws: Any) -> None:
        self.draws = [np.array(draw) for draw in draws]

    def _next(self, size: Any) -> Any:
        draw = self.draws.pop(0)
        assert draw.shape == (size if isinstance(size, tuple) else (size,))
        return draw

    def integers(self, low: int, high: int, size: Any) -> Any:
        draw = self._next(size)
        assert ((low <= draw) & (draw < high)).all()
        return draw

    def random(self, size: Any) -> Any:
        return self._next(size)

    exponential = random


def ranked(number: int, *first: int) -> list[list[float]]:
    """Draws of which these are the smallest, in this order."""
    draws = [1.0] * number
    for rank, place in enumerate(first):
        draws[place] = rank / number
    return [draws]


S = 2  # id of s0 in the tasks of strings
HAND: list[tuple[str, dict[str, Any], int, Scripted]] = [
    ("addition", {}, 2, Scripted([[[4, 7]], [[8, 5]]])),
    ("addition", {"answer": "reversed"}, 2, Scripted([[[4, 7]], [[8, 5]]])),
    ("addition", {"hints": 64}, 2, Scripted([[[4, 7]], [[8, 5]]], [[8]])),
    ("copy", {}, 4, Scripted([[S + 7, S + 2, S + 2, S + 9]])),
    ("counting", {}, 6, Scripted([[0.44, 0.46, 0.91, 0.0, 0.2, 0.89]])),
    ("flip_flop", {}, 5, Scripted([[0.5, 0.9, 0.15, 0.05, 0.5]], [[1, 0, 0, 0, 1]])),
    ("induction", {}, 5, Scripted([[S, S + 7, S + 2, S + 1, S + 9, S + 2, S + 3, S + 4]], [2])),
    ("parity", {}, 4, Scripted([[1, 0, 1, 1]])),
    # The drawn depth is 2; 13 is f0, and what stands where the key goes is overwritten.
    ("passkey", {}, 5, Scripted([[7, 3, 10]], [[16, 13, 20, 20, 20, 20, 16, 22, 14]], [[2]])),
    (
        "recall",
        {"slots": 3},
        2,
        # Filler f0 has id 129. The pair of k4 draws the fourth slot, though the first one is likelier.
        Scripted(
            ranked(64, 4, 0),
            ranked(64, 1, 7),
            [[129, *[130] * 4, 130, 130, 131, 134, 130, 130, 130, 130, 129, 132, 132, 133]],
            [[0.01, 1e3, 1e3, 1e-6, 1e3, 1e3]],
        ),
    ),
    ("repeat", {}, 4, Scripted([[7]], [[27, 27, 2]])),  # 27 more than 7 is 2, of 32
    ("reverse", {}, 4, Scripted([[S + 7, S + 2, S + 2, S + 9]])),
    ("selective_copy", {"tokens": 3}, 4, Scripted([[S + 8, S + 3, S + 3]], ranked(7, 5, 1, 4))),
    ("sort", {}, 4, Scripted([[S + 7, S + 2, S + 9, S + 2]])),
]


def drawings(name: str) -> list[tuple[str, list[str], dict[int, str]]]:
    """Problems that a task's docstring draws: what is said of them, the words read, and what stands below them.

    A label stands below the word after which it is to be said.
    """
    lines = inspect.cleandoc(tasks.load(name).__doc__ or "").splitlines()
    found = []
    for above, below in itertools.pairwise(lines):
        said, reads, _ = above.partition("  reads   ")
        if reads:
            words = [m for m in re.finditer(r"\S+", above) if m.start() >= len(said) + len(reads)]
            columns = [m.start() for m in words]
            labels = [m for m in re.finditer(r"\S+", below) if m.start() >= columns[0]]
            assert below.split()[0] == "scores"
            found.append(
                (said.strip(), [m.group() for m in words], {columns.index(m.start()) + 1: m.group() for m in labels})
            )
    return found


@pytest.mark.parametrize(
    ("name", "options", "length", "rng"), HAND, ids=[f"{name}{options}" for name, options, *_ in HAND]
)
def test_the_drawing_in_the_docstring_is_what_these_draws_make(
    name: str, options: dict[str, Any], length: int, rng: Scripted
) -> None:
    task = tasks.build(name, options)
    problems = task.problems(cast(np.random.Generator, rng), length, 1)
    wanted = f"{next(iter(options))}={next(iter(options.values()))}" if options else f"length {length}"
    (drawn,) = (drawing for drawing in drawings(name) if wanted in drawing[0])
    assert words_of(task, problems.ids[0, :-1]) == drawn[1]
    assert answers(task, problems, 0) == drawn[2]
    assert not rng.draws


def test_every_drawing_is_worked_by_hand() -> None:
    assert len(HAND) == sum(len(drawings(name)) for name in tasks.names())
    assert {name for name, *_ in HAND} == set(tasks.names())


# -- by a second implementation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), CASES)
def test_plain_loops_find_the_answers_of_every_length_and_guess_as_the_trivial_reader_does(
    name: str, options: dict[str, Any]
) -> None:
    task = tasks.build(name, options)
    lengths = {task.least, task.shortest, (task.shortest + task.longest) // 2, task.longest, 8 * task.longest}
    for length in sorted(lengths):
        problems, again, other = (
            task.problems(np.random.default_rng(seed), length, 20) for seed in (length, length, 999)
        )
        assert (problems.ids == again.ids).all() and (problems.scored == again.scored).all()
        assert (problems.ids != other.ids).any() or length < 4 or options == {"reset": 1.0}
        again.ids[0, 0] = again.scored[0, 0] = True  # whoever is given problems may write into them
        assert problems.ids.dtype == np.int64 and problems.scored.dtype == np.bool_
        assert problems.ids.shape == (20, task.size(length) + 1)
        assert problems.scored.shape == (20, task.size(length))
        guesses = task.trivial(problems)
        assert guesses.shape == problems.scored.shape
        for row in range(20):
            words = words_of(task, problems.ids[row])
            known = answers(task, problems, row)
            assert getattr(task_solvers, name)(words, options) == known
            said = {at: task.symbols[guesses[row, at - 1]] for at in known}
            assert said == getattr(task_readers, name)(words, list(known), options)


@pytest.mark.parametrize("name", tasks.names())
def test_the_vocabulary_begins_with_the_separator_and_all_of_it_is_drawn(name: str) -> None:
    task = tasks.build(name)
    assert task.symbols[0] == SEPARATOR == tokenizer.SEPARATOR
    assert len(set(task.symbols)) == len(task.symbols)
    assert not any(re.search(r"\s", symbol) for symbol in task.symbols)
    found = np.unique(task.problems(np.random.default_rng(0), task.longest, 2000).ids)
    most = 4 + task.longest if name == "counting" else len(task.symbols) - 1  # no count is above the length
    assert found[0] == 0 and found[-1] <= most
    if name != "counting":
        assert len(found) == len(task.symbols)


# -- by chance ---------------------------------------------------------------------------------------------------------


def uniform(counts: Any) -> bool:
    return bool(stats.chisquare(counts).pvalue > 1e-3)


def test_the_key_stands_at_every_depth_equally_often() -> None:
    task = tasks.build("passkey")
    ids = task.problems(np.random.default_rng(0), 9, 20_000).ids
    places = (ids == task.symbols.index("key")).argmax(axis=1)
    counts = np.bincount(places)[1:]
    assert len(counts) == 10 and uniform(counts)
    counts[0] += 300
    assert not uniform(counts)
    for depth, place in ((0.0, 1), (0.5, 9), (1.0, 17)):
        (at,) = np.unique((task.varied(depth=depth).problems(np.random.default_rng(0), 16, 50).ids == 2).argmax(axis=1))
        assert at == place
    first, last = (task.varied(depth=depth).problems(np.random.default_rng(3), 20, 8).ids for depth in (0.0, 1.0))
    assert (first[:, -3:] == last[:, -3:]).all()  # a depth changes no key


def test_triggers_and_blanks_stand_everywhere_equally_often() -> None:
    induction = tasks.build("induction").problems(np.random.default_rng(0), 9, 20_000).ids
    assert uniform(np.bincount((induction[:, :-2] == 1).argmax(axis=1))[1:])
    selective = tasks.build("selective_copy", {"tokens": 3}).problems(np.random.default_rng(0), 7, 20_000).ids
    assert uniform((selective[:, 1:11] == 2).sum(axis=0))


def test_answers_of_parity_are_a_coin() -> None:
    task = tasks.build("parity")
    ids = task.problems(np.random.default_rng(0), 13, 20_000).ids
    assert uniform(np.bincount(ids[:, -1])[2:]) and uniform((ids[:, 1:14] == 3).sum(axis=0))


@pytest.mark.parametrize("ignore", [0.8, 0.98, 0.1])
def test_flip_flop_ignores_as_often_as_asked_and_writes_as_often_as_it_reads(ignore: float) -> None:
    task = tasks.build("flip_flop", {"ignore": ignore})
    middle = task.problems(np.random.default_rng(0), 102, 1000).ids[:, 3:-2:2]
    counts = [int((middle == task.symbols.index(word)).sum()) for word in "wri"]
    expected = np.array([(1 - ignore) / 2, (1 - ignore) / 2, ignore]) * middle.size
    assert middle.shape[1] == 100 and stats.chisquare(counts, expected).pvalue > 1e-3


def test_questions_of_recall_follow_the_power_law() -> None:
    """Of a pair's first draw; the second pair draws from the slots that are left."""
    for power in (0.01, 0.5, 1.0):
        task = tasks.build("recall", {"power": power, "slots": 5})
        ids = task.problems(np.random.default_rng(0), 2, 20_000).ids
        rest = ids[:, 5::2]
        slots = [(rest == ids[:, at, None]).argmax(axis=1) for at in (1, 3)]
        law = np.arange(1, 11) ** (power - 1)
        law = law / law.sum()
        assert stats.chisquare(np.bincount(slots[0], minlength=10), law * 20_000).pvalue > 1e-3
        after_first = np.array([sum(law[i] * law[j] / (1 - law[i]) for i in range(10) if i != j) for j in range(10)])
        assert stats.chisquare(np.bincount(slots[1], minlength=10), after_first * 20_000).pvalue > 1e-3


def test_counts_hardly_grow_with_length() -> None:
    task = tasks.build("counting")
    short, long = (task.problems(np.random.default_rng(0), n, 20_000).ids[:, -1] - 5 for n in (24, 192))
    assert long.mean() < 1.2 * short.mean()
    assert (long > 24).mean() == pytest.approx(1 / 150, rel=0.2)  # as the docstring says


# -- options and the registry ------------------------------------------------------------------------------------------

LENGTHS = "expected a length from"
SYMBOLS = "expected a whole number from"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"shortest": 0}, f"data.task.shortest is 0 for '{name}': {LENGTHS}") for name in tasks.names()),
    *((name, {"longest": 0}, f"data.task.shortest is {tasks.build(name).shortest} for") for name in tasks.names()),
    *((name, {"vocabulary": 1}, f"data.task.vocabulary is 1 for '{name}': {SYMBOLS} 2 to 10000 (default")
      for name in ("copy", "reverse", "sort", "repeat", "induction", "selective_copy")),
    ("copy", {"vocabulary": 10_001}, "expected a whole number from 2 to 10000 (default 32)"),
    ("copy", {"vocabulary": "many"}, "data.task.vocabulary is 'many' for 'copy': input should be a valid integer"),
    ("copy", {"vocabluary": 3}, "'copy' has no option 'vocabluary': it accepts shortest, longest, vocabulary;"),
    ("repeat", {"shortest": 1}, "expected a length from 2 to longest, 20 (default 8)"),
    ("addition", {"answer": "revrsed"}, "data.task.answer is 'revrsed' for 'addition': input should be 'plain' or"),
    ("addition", {"hints": -1}, f"data.task.hints is -1 for 'addition': {SYMBOLS} 2 to 10000 (default 0)"),
    ("addition", {"hints": 6}, "longest is 6 for 'addition': expected at most 5, which the vocabulary allows"),
    ("passkey", {"digits": 0}, f"data.task.digits is 0 for 'passkey': {SYMBOLS} 1 to 10000 (default 3)"),
    ("passkey", {"fillers": 0}, "data.task.fillers is 0 for 'passkey'"),
    ("passkey", {"depth": 1.5}, "depth is 1.5 for 'passkey': expected a number from 0 to 1, or null (default None)"),
    ("passkey", {"depth": float("nan")}, "data.task.depth is nan for 'passkey'"),
    ("recall", {"keys": 7}, "data.task.longest is 8 for 'recall': expected at most 7, which the vocabulary allows"),
    ("recall", {"values": 0}, "data.task.values is 0 for 'recall'"),
    ("recall", {"fillers": 0}, "data.task.fillers is 0 for 'recall'"),
    ("recall", {"slots": 0}, "data.task.slots is 0 for 'recall'"),
    ("recall", {"power": 0}, "data.task.power is 0 for 'recall': expected a number above 0, at most 1 (default 0.01)"),
    ("selective_copy", {"tokens": 0}, "data.task.tokens is 0 for 'selective_copy'"),
    ("flip_flop", {"ignore": -0.1}, "data.task.ignore is -0.1 for 'flip_flop': expected a probability from 0 to 1"),
    ("counting", {"reset": 2}, "data.task.reset is 2 for 'counting': expected a probability from 0 to 1 (default 0.1)"),
    ("counting", {"highest": 20}, "data.task.longest is 24 for 'counting': expected at most 20"),
    ("counting", {"highest": 0}, "data.task.highest is 0 for 'counting'"),
    ("passkeys", {}, "unknown task 'passkeys': did you mean 'passkey'? (there are addition, copy, counting"),
    ("base", {}, "unknown task 'base'"),
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


def test_the_readme_names_all_and_a_docstring_has_its_parts() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^Tasks: (.*)\.$", readme, re.MULTILINE)
    assert line.split(", ") == [f"`{name}`" for name in tasks.names()]
    for name in tasks.names():
        text = inspect.cleandoc(tasks.load(name).__doc__ or "")
        assert all(re.search(rf"^{part}: \w", text, re.MULTILINE) for part in ("Source", "Deviates"))
        assert tasks.load(name).name == name
