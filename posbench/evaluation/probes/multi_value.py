"""Needles with several values: does the model find all numbers of a word, in the order of the text?

    text          reads  a b c d e f g h i j k l m n o p q r s t u v w x
    multi_value   reads  a b A number of river is "4". h i A number of river is "7". n o The numbers of river are "4", "
                  scores 4 and 7    (each among 0 1 2 ... 9)

`values` sentences stand in the text, one in every equal share of it, on one word and with different digits. Each digit
is right in each place in one of every ten windows, in shuffled order. Guessing gets 1 of 10. The trivial reader knows
the numbers of the text and those that are said, but not their order, and says the smallest that is left.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
arXiv:2404.06654, section 3.1: needles with several values. The question asks for all.
Deviates: numbers of one digit; they are to be said in the order of the text, so that there is one right answer; the
question has no instruction; the text around is the one that is evaluated on.
"""

import functools

import numpy as np

from posbench.evaluation.probes import Probe, balanced, expect
from posbench.evaluation.probes._sentences import DIGITS, WORDS, Spare, Story, in_words, spread
from posbench.randomness import derive


def rows(lengths: list[int], targets: int, train_length: int, *, values: int = 4) -> list[Probe]:
    """One row per length."""
    expect(2 <= values <= len(DIGITS), "multi_value", "values", values, f"2 to {len(DIGITS)}")
    return in_words("multi_value", lengths, targets, functools.partial(_story, values=values))


def _story(number: int, _: Spare, values: int) -> Story:
    word = WORDS[balanced("multi_value words", number, len(WORDS))]
    first = balanced("multi_value", number, len(DIGITS))
    # The steps from digit to digit are those of the ten windows: so each digit comes once in each place of them.
    turn = np.random.default_rng(derive(0, "multi_value steps", number // len(DIGITS)))
    steps = [0, *(1 + turn.permutation(len(DIGITS) - 1)).tolist()]
    digits = tuple(DIGITS[(first + step) % len(DIGITS)] for step in steps[:values])
    return Story(
        told=tuple(f'\nA number of {word} is "{digit}".\n' for digit in digits),
        places=spread(number, values),
        question=f'\nThe numbers of {word} are "',
        answers=digits,
        candidates=DIGITS,
        trivial=tuple(min(digits[n:]) for n in range(values)),
        between='", "',
    )
