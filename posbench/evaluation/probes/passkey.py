"""Passkey: does the model find a digit that a text mentions once, and say it when it is
asked?

    text             reads  a b c d e f g h i j k l m n o
    passkey          reads  a b c The key is "7". h i j What was the key? The key is "
                     scores  7 (among 0 1 2 ... 9)
    passkey:keys=2   reads  a The number of river is "7". h The number of oak is "3". p
                            The number of river is "

The sentences, in the model's own tokens, take the place of tokens of the window. With
one key they are

    The key is "7". Remember: the key is "7".
    What was the key? The key is "

With several `keys` there are as many sentences, one in each equal share of the text,
with different words and digits.
One of them is asked about: in every `keys` windows, each place once. The trivial reader
answers with the last digit.

The answer is right if its token is likelier than those of the nine other digits. So the
model answers zero-shot, by likelihood; guessing gets 1 of 10. A sentence stands
anywhere in its share; a single key can have a `depth` from 0 (the beginning) to 1
(right before the question). In every ten windows each digit is right once, in shuffled
order, and places are spread evenly. Both depend on the window's number only, so lengths
differ in distance alone.

A model that sees only the last L tokens reads the whole sentence in a share (L - s) /
(C - 1 - s) of the problems at length C, where the two sentences have s tokens. This is
below L / C: 38 % at twice a length of 64 if s is 25.

Sources: Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context
Length for Transformers" (2023), arXiv:2305.16300; for several keys Hsieh et al.,
"RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024),
arXiv:2404.06654, section 3.1.
Deviates: the key is one digit, a token of its own in nearly every tokenizer, so that
one pass gives all candidates; the question is the beginning of its sentence, without an
instruction; the text around is that of the evaluation.
"""

import functools
import math
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from posbench.errors import OptionError, Undefined
from posbench.evaluation.probes import (
    Choice,
    Encode,
    Ids,
    Material,
    Pose,
    Probe,
    balanced,
)
from posbench.options import Fraction
from posbench.randomness import derive

Keys = Annotated[int, Ge(1), Le(10)]
DIGITS = 10
# No two begin with the same letter, so that no tokenizer begins two of them with the
# same token.
WORDS = (
    "apple bread cloud door earth fire gold house iron jar king lamp moon night oak"
    " paper queen river stone tree uncle voice water yard"
)
# its multiples, modulo 1, spread evenly however many are taken
_GOLDEN = (math.sqrt(5) - 1) / 2


class Story(NamedTuple):
    """A problem in words."""

    sentences: tuple[str, ...]  # in the order of the text
    question: str
    answer: int
    # the digit of the last sentence, if there are several
    last: int | None

    @classmethod
    def of_window(cls, number: int, keys: int) -> "Story":
        """Return the problem of the window of this number."""
        if keys == 1:
            key = balanced("passkey", number, DIGITS)
            sentence = f'\nThe key is "{key}". Remember: the key is "{key}".\n'
            return cls((sentence,), '\nWhat was the key? The key is "', key, None)

        rng = np.random.default_rng(derive(0, "multi_key", number))
        words = rng.permutation(WORDS.split())[:keys].tolist()
        asked = balanced("multi_key", number, keys)
        answer = balanced("multi_key digits", number, DIGITS)
        digits = rng.permutation([digit for digit in range(DIGITS) if digit != answer])
        digits = np.insert(digits, asked, answer)[:keys].tolist()

        sentences = []
        for word, digit in zip(words, digits, strict=True):
            sentences.append(f'\nThe number of {word} is "{digit}".\n')
        question = f'\nThe number of {words[asked]} is "'
        return cls(tuple(sentences), question, answer, digits[-1])

    # rows of other lengths and variants have the same stories
    @functools.lru_cache(maxsize=256)  # noqa: B019
    def tokens(self, encode: Encode) -> tuple[list[Ids], Ids, Ids]:
        """Return the tokens of the sentences, of the question, and of each digit after
        it.

        Raises:
            Undefined: the digits do not differ in one token each, or the sentences
                encode the answer as another token.
        """
        questions = [f"{self.question}{digit}" for digit in range(DIGITS)]
        texts = [*self.sentences, *questions]
        encoded = [np.asarray(ids, np.int64) for ids in encode(texts)]
        sentences = encoded[:-DIGITS]
        with_digit = encoded[-DIGITS:]

        prefixes = {ids[:-1].tobytes() for ids in with_digit}
        digits = np.concatenate([ids[-1:] for ids in with_digit])
        one_prefix = len(prefixes) == 1
        all_differ = len(np.unique(digits)) == DIGITS
        answer_is_told = digits[self.answer] in np.concatenate(sentences)
        if not (one_prefix and all_differ and answer_is_told):
            raise Undefined(
                "the tokenizer has no token of its own for each answer of passkey"
            )
        return sentences, with_digit[0][:-1], digits


def rows(
    length: int,
    targets: int,
    train_length: int,
    *,
    keys: Keys = 1,
    depth: Fraction | None = None,
) -> list[Probe]:
    """Return one row."""
    if depth is not None and keys > 1:
        raise OptionError(
            "depth", f"is {depth} for 'passkey': expected one key, or null"
        )

    def pose_from(material: Material) -> Pose:
        def pose(ids: Ids, number: int) -> Choice:
            story = Story.of_window(number, keys)
            sentences, question, digits = story.tokens(material.encode)
            # without the window's first token, which stays
            tokens = sum(map(len, sentences)) + len(question)
            spare = length - 1 - tokens
            if spare < 0:
                raise Undefined(
                    f"passkey's sentences are {1 + tokens} tokens of this model: the"
                    " window is too short"
                )

            in_share = depth  # how deep in its share each sentence stands
            if in_share is None:
                in_share = (number + 0.5) * _GOLDEN % 1
            window = ids.copy()
            begin = 1
            for n, sentence in enumerate(sentences):
                start = begin + round((n + in_share) / keys * spare)
                window[start : start + len(sentence)] = sentence
                begin += len(sentence)
            window[length - len(question) :] = question
            right = digits[story.answer]
            return Choice(np.append(window, right), digits, story.answer, story.last)

        return pose

    return [Probe("passkey", length, targets, pose_from=pose_from)]
