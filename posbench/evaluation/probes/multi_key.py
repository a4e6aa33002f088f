"""Needles with several keys: does the model find the one number that belongs to the word it is asked about?

    text        reads  a b c d e f g h i j k l m n o p q r s t u v
    multi_key   reads  a b The number of river is "7". h i j The number of oak is "3". p q The number of river is "
                scores 7    (among 0 1 2 ... 9)

`keys` sentences stand in the text, one in every equal share of it, with different words and different digits. Each
place is asked about in one of every `keys` windows and each digit is right in one of every ten, in shuffled order.
Guessing gets 1 of 10. The trivial reader says the nearest number, that of the last sentence: 1 of `keys`.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
arXiv:2404.06654, section 3.1: needles with several keys. The question asks for one.
Deviates: numbers of one digit, which all candidates are; the question is the beginning of its sentence, without an
instruction, for models that were not trained to follow one; the text around is the one that is evaluated on.
"""

import functools

import numpy as np

from posbench.evaluation.probes import Probe, balanced, expect
from posbench.evaluation.probes._sentences import DIGITS, WORDS, Story, in_words, spread
from posbench.randomness import derive


def rows(lengths: list[int], targets: int, train_length: int, *, keys: int = 4) -> list[Probe]:
    """One row per length."""
    expect(2 <= keys <= len(DIGITS), "multi_key", "keys", keys, f"2 to {len(DIGITS)}")
    return in_words("multi_key", lengths, targets, functools.partial(_story, keys=keys))


def _story(number: int, keys: int) -> Story:
    rng = np.random.default_rng(derive(0, "multi_key", number))
    words = rng.permutation(WORDS)[:keys].tolist()
    asked, right = balanced("multi_key", number, keys), balanced("multi_key digits", number, len(DIGITS))
    digits = rng.permutation([digit for digit in DIGITS if digit != DIGITS[right]]).tolist()
    digits.insert(asked, DIGITS[right])
    told = [f'\nThe number of {word} is "{digit}".\n' for word, digit in zip(words, digits, strict=False)]
    return Story(
        told=tuple(told),
        places=spread(number, keys),
        question=f'\nThe number of {words[asked]} is "',
        answer=digits[asked],
        candidates=DIGITS,
        trivial=digits[keys - 1],
    )
