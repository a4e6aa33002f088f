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
import math

import numpy as np

from posbench.errors import Undefined
from posbench.evaluation.probes import Choice, Ids, Material, Pose, Probe, balanced, expect

_TELLS = '\nThe key is "{0}". Remember: the key is "{0}".\n'
_ASKS = '\nWhat was the key? The key is "{0}'
_DIGITS = range(10)
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, spread evenly however many are taken


def rows(lengths: list[int], targets: int, train_length: int, *, depth: float | None = None) -> list[Probe]:
    """One row per length."""
    expect(depth is None or 0 <= depth <= 1, "passkey", "depth", depth, "a number from 0 to 1, or null")
    return [
        Probe("passkey", length, targets, poses=functools.partial(_poses, length=length, depth=depth))
        for length in lengths
    ]


def _poses(material: Material, length: int, depth: float | None) -> Pose:
    if material.encode is None:
        raise Undefined("passkey is asked in words, and this model's tokenizer is not known")
    told, asked = (material.encode([text.format(digit) for digit in _DIGITS]) for text in (_TELLS, _ASKS))
    if not all(map(len, asked)):
        raise Undefined("the tokenizer has no tokens for passkey's sentences")
    question, candidates = asked[0][:-1], np.array([each[-1] for each in asked], dtype=np.int64)
    alike = all(np.array_equal(each[:-1], question) for each in asked) and len(set(candidates.tolist())) == len(asked)
    if not alike or not all(key in each for key, each in zip(candidates, told, strict=True)):
        raise Undefined("the tokenizer has no token of its own for each digit of passkey's sentences")
    needed = 1 + max(map(len, told)) + len(question)  # the first token stays: a model may need the one it has there
    if length < needed:
        raise Undefined(f"the sentences of passkey are {needed} tokens of this model: there is no room for them")

    def posed(ids: Ids, number: int) -> Choice:
        right, place = balanced("passkey", number, len(_DIGITS)), (number + 0.5) * _GOLDEN % 1
        sentence = told[right]
        at = 1 + round((place if depth is None else depth) * (length - 1 - len(sentence) - len(question)))
        out = ids.copy()
        out[at : at + len(sentence)] = sentence
        out[-len(question) :] = question
        return Choice(out, candidates, right)

    return posed
