"""Variable tracking: does the model follow a chain of assignments to the number where it begins?

    text                reads  a b c d e f g h i j k l m n o p q r s t u v w x
    variable_tracking   reads  a river = "7" d oak = "3" g h stone = river k l king = oak o p The value of stone is "
                        scores 7    (among 0 1 2 ... 9)

`chains` chains of assignments stand in the text in random order, one line in every equal share of it: a variable that
is set to a digit, and `hops` more that are each set to the one before. The question is for the last variable of a
chain. The chains, by the place of their numbers, are each asked for in one of every `chains` windows, and each digit is
right in one of every ten, in shuffled order. Guessing gets 1 of 10. The trivial reader says the nearest number: 1 of
`chains`.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
arXiv:2404.06654, section 3.2: variable tracking, by chains of X2 = X1, X3 = X2 after X1 = number.
Deviates: asks for the number of the last variable, not for all variables of a number, whose order would be open;
several chains, since with one its number is the only one there; names are words, not five capital letters; two hops,
not four, so that it fits into shorter texts; no instruction; the text around is the one that is evaluated on.
"""

import functools

import numpy as np

from posbench.evaluation.probes import Probe, balanced, expect
from posbench.evaluation.probes._sentences import DIGITS, WORDS, Spare, Story, in_words, spread
from posbench.randomness import derive


def rows(lengths: list[int], targets: int, train_length: int, *, chains: int = 4, hops: int = 2) -> list[Probe]:
    """One row per length."""
    expect(2 <= chains <= len(DIGITS), "variable_tracking", "chains", chains, f"2 to {len(DIGITS)}")
    fits = f"at least 1, and at most {len(WORDS)} variables in all {chains} chains"
    expect(1 <= hops < len(WORDS) // chains, "variable_tracking", "hops", hops, fits)
    return in_words("variable_tracking", lengths, targets, functools.partial(_story, chains=chains, hops=hops))


def _story(number: int, _: Spare, chains: int, hops: int) -> Story:
    rng = np.random.default_rng(derive(0, "variable_tracking", number))
    variables = rng.permutation(WORDS)[: chains * (hops + 1)].reshape(chains, hops + 1).tolist()
    asked = balanced("variable_tracking", number, chains)
    right = balanced("variable_tracking digits", number, len(DIGITS))
    digits = rng.permutation([digit for digit in DIGITS if digit != DIGITS[right]]).tolist()
    digits.insert(asked, DIGITS[right])
    drawn = rng.permutation(np.repeat(np.arange(chains), hops + 1)).tolist()
    by_first_line = list(dict.fromkeys(drawn))  # chains are numbered as the text gives their numbers
    told, lines = [], [0] * chains
    for chain in map(by_first_line.index, drawn):
        line = lines[chain]
        value = f'"{digits[chain]}"' if line == 0 else variables[chain][line - 1]
        told.append(f"\n{variables[chain][line]} = {value}\n")
        lines[chain] += 1
    return Story(
        told=tuple(told),
        places=spread(number, len(told)),
        question=f'\nThe value of {variables[asked][-1]} is "',
        answers=(digits[asked],),
        candidates=DIGITS,
        trivial=(digits[chains - 1],),
    )
