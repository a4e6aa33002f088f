"""Passkey: does the model find a digit that a text mentions once, and say it when it is asked?

    text      reads  a b c d e f g h i j k l m n o
    passkey   reads  a b c The key is "7". h i j What was the key? The key is "      scores  7   (among 0 1 2 ... 9)

The sentences are the model's own tokens of this text, in the place of the window's:

    The key is "7". Remember: the key is "7".
    What was the key? The key is "

with a line end around them. The answer is right if its token is likelier than that of each of the nine other digits:
zero-shot, as language models are asked by likelihood; guessing gets 1 of 10. The key stands anywhere between the
beginning and the question, or at a `depth` from 0 (the beginning) to 1 (right before the question). Each digit is right
in one of every ten windows, in shuffled order, and places are spread evenly. Both depend on the window's number only,
so lengths differ in distance alone.

A model that sees only the last L tokens reads the whole sentence in a share (L - s) / (C - 1 - s) of the problems at
length C, with s tokens of the two sentences. This is below L / C: 38 % at twice a length of 64 if s is 25.

Source: Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for Transformers" (2023),
arXiv:2305.16300, where a language model is asked for a number.
Deviates: one digit, which nearly every tokenizer has as a token of its own, so that all candidates are of one length
and one pass gives them all; the text around it is the one that is evaluated on, not a few sentences said over and over.
"""

import functools

from posbench.evaluation.probes import Probe, balanced, expect
from posbench.evaluation.probes._sentences import DIGITS, Story, in_words, spread


def rows(lengths: list[int], targets: int, train_length: int, *, depth: float | None = None) -> list[Probe]:
    """One row per length."""
    expect(depth is None or 0 <= depth <= 1, "passkey", "depth", depth, "a number from 0 to 1, or null")
    return in_words("passkey", lengths, targets, functools.partial(_story, depth=depth))


def _story(number: int, depth: float | None) -> Story:
    key = DIGITS[balanced("passkey", number, len(DIGITS))]
    return Story(
        told=(f'\nThe key is "{key}". Remember: the key is "{key}".\n',),
        places=spread(number, 1) if depth is None else (depth,),
        question='\nWhat was the key? The key is "',
        answer=key,
        candidates=DIGITS,
    )
