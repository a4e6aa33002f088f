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

import numpy as np

from posbench.errors import Undefined
from posbench.evaluation.probes import (
    Choice,
    Encode,
    Ids,
    Material,
    Pose,
    Probe,
    balanced,
    expect,
)
from posbench.randomness import derive

DIGITS = tuple("0123456789")
# No two begin with the same letter, so that no tokenizer begins two of them with the
# same token.
WORDS = (
    "apple",
    "bread",
    "cloud",
    "door",
    "earth",
    "fire",
    "gold",
    "house",
    "iron",
    "jar",
    "king",
    "lamp",
    "moon",
    "night",
    "oak",
    "paper",
    "queen",
    "river",
    "stone",
    "tree",
    "uncle",
    "voice",
    "water",
    "yard",
)
# its multiples, modulo 1, spread evenly however many are taken
_GOLDEN = (math.sqrt(5) - 1) / 2

# sentences, question, answer, the trivial reader's answer
Story = tuple[tuple[str, ...], str, int, int | None]


def rows(
    lengths: list[int],
    targets: int,
    train_length: int,
    *,
    keys: int = 1,
    depth: float | None = None,
) -> list[Probe]:
    """Return one row per length."""
    expect(1 <= keys <= len(DIGITS), "passkey", "keys", keys, f"1 to {len(DIGITS)}")
    expect(
        depth is None or (0 <= depth <= 1 and keys == 1),
        "passkey",
        "depth",
        depth,
        "0 to 1 with one key, or null",
    )
    poses = [
        functools.partial(_poses, length=length, keys=keys, depth=depth)
        for length in lengths
    ]
    return [
        Probe("passkey", length, targets, poses=pose)
        for length, pose in zip(lengths, poses, strict=True)
    ]


def _story(number: int, keys: int) -> Story:
    """Return the problem, in words, of the window of this number. Its sentences are in
    the order of the text.
    """
    if keys == 1:
        key = balanced("passkey", number, len(DIGITS))
        sentence = f'\nThe key is "{key}". Remember: the key is "{key}".\n'
        return (sentence,), '\nWhat was the key? The key is "', key, None
    rng = np.random.default_rng(derive(0, "multi_key", number))
    words = rng.permutation(WORDS)[:keys].tolist()
    place, right = (
        balanced("multi_key", number, keys),
        balanced("multi_key digits", number, len(DIGITS)),
    )
    digits = rng.permutation(
        [digit for digit in DIGITS if digit != DIGITS[right]]
    ).tolist()
    digits.insert(place, DIGITS[right])
    sentences = [
        f'\nThe number of {word} is "{digit}".\n'
        for word, digit in zip(words, digits, strict=False)
    ]
    return (
        tuple(sentences),
        f'\nThe number of {words[place]} is "',
        right,
        int(digits[keys - 1]),
    )


def _poses(material: Material, length: int, keys: int, depth: float | None) -> Pose:
    if material.encode is None:
        raise Undefined("passkey needs the model's tokenizer, which is not known")
    encode = material.encode

    def pose(ids: Ids, number: int) -> Choice:
        *_, answer, trivial = story = _story(number, keys)
        sentences, question, digits = _story_tokens(encode, story)
        # without the window's first token, which stays
        tokens = sum(map(len, sentences)) + len(question)
        spare, begin = length - 1 - tokens, 1
        if spare < 0:
            raise Undefined(
                f"passkey's sentences are {1 + tokens} tokens of this model: the window"
                " is too short"
            )
        # how deep in its share each sentence stands
        window, fraction = ids.copy(), (number + 0.5) * _GOLDEN % 1
        for n, sentence in enumerate(sentences):
            start = begin + round(
                ((n + fraction) / keys if depth is None else depth) * spare
            )
            window[start : start + len(sentence)] = sentence
            begin += len(sentence)
        window[len(window) - len(question) :] = question
        return Choice(np.append(window, digits[answer]), digits, answer, trivial)

    return pose


# rows of other lengths and variants have the same stories
@functools.lru_cache(maxsize=256)
def _story_tokens(encode: Encode, story: Story) -> tuple[list[Ids], Ids, Ids]:
    """Return the tokens of the sentences, of the question, and of each digit after it.

    Raises:
        Undefined: the digits do not differ in one token each, or the sentences encode
            the answer as another token.
    """
    sentences, question, answer, _ = story
    texts = [*sentences, *(question + digit for digit in DIGITS)]
    encoded = [np.asarray(ids, dtype=np.int64) for ids in encode(texts)]
    sentence_ids, question_ids = encoded[: -len(DIGITS)], encoded[-len(DIGITS) :]
    if len({len(ids) for ids in question_ids}) == 1 and len(question_ids[0]):
        *prefixes, digits = np.stack(question_ids).T
        same_prefix, all_differ = (
            all(np.ptp(column) == 0 for column in prefixes),
            len(np.unique(digits)) == len(DIGITS),
        )
        if (
            same_prefix
            and all_differ
            and digits[answer] in np.concatenate(sentence_ids)
        ):
            return sentence_ids, question_ids[0][:-1], digits
    raise Undefined("the tokenizer has no token of its own for each answer of passkey")
