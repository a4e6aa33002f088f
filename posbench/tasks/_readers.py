"""Trivial readers: what they get right without solving a task is the floor that a model has to pass.

A reader sees the right answer tokens before the one it guesses, as a model does. Its guesses have the shape of
`Problems.scored`; only those of scored tokens count.
"""

import numpy as np

from posbench.tasks.base import Integers, Problems

LEFT_OVER = "knows which tokens of the answer are left but not their order, and says the commonest"


def commonest_left(problems: Problems, bag: Integers) -> Integers:
    """Say the commonest token of the bag that the answer has not used yet; the separator if none is left.

    Args:
        bag: (count, n) the tokens that the answer consists of, in any order; 0 is none.
    """
    labels = problems.ids[:, 1:]
    rows = np.arange(len(bag))
    left = np.zeros((len(bag), int(problems.ids.max()) + 1), np.int64)
    np.add.at(left, (rows[:, None], bag), 1)
    guesses = np.zeros_like(labels)
    for t in np.flatnonzero(problems.scored.any(axis=0)):
        left[:, 0] = 0  # of equally common tokens the one of the lowest id, and the separator last
        guesses[:, t] = left.argmax(axis=1)
        left[rows, labels[:, t]] -= problems.scored[:, t]
    return guesses


def tokens_before(problems: Problems, back: int) -> Integers:
    """Say the input that stands `back` tokens before the last one read."""
    return np.pad(problems.ids, ((0, 0), (back, 0)))[:, : problems.scored.shape[1]]
