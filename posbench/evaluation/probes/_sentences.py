"""Problems in words: sentences somewhere in a text, and a question that they answer.

    text      reads  a b c d e f g h i j k l m n o p q r s t
    problem   reads  a b c SENTENCE. h i SENTENCE. m n QUESTION: ans    scores  answ    (among several words)

Sentences, question and answer are the model's own tokens; they stand in the place of the window's. C tokens are read:
the text, the question, and the answer but for its last token. So one forward pass has all of it, each token of the
answer after the right ones before it. Two scores come from that pass:

- where candidates for an answer begin to differ, is the right one's token likelier than each other candidate's?
- are all tokens of the answer the likeliest of the vocabulary? This is so exactly if greedy decoding says the answer:
  up to its first error it would read the same tokens.

What a problem asks depends on the window's number, so lengths differ in the distances and in what stands between.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from posbench.errors import Undefined
from posbench.evaluation.probes import Choice, Encode, Ids, Material, Pose, Probe

DIGITS = tuple("0123456789")
# No two begin with the same letter, so that no tokenizer begins two of them with the same token.
WORDS = (
    "apple", "bread", "cloud", "door", "earth", "fire", "gold", "house", "iron", "jar", "king", "lamp", "moon", "night",
    "oak", "paper", "queen", "river", "stone", "tree", "uncle", "voice", "water", "yard",
)  # fmt: skip
_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, spread evenly however many are taken


@dataclasses.dataclass(frozen=True)
class Story:
    """A problem before it is spelt in tokens."""

    told: tuple[str, ...]  # sentences, from the first to the last
    places: tuple[float, ...]  # of each, ascending: from 0, the text's beginning, to 1, right before the question
    question: str  # up to its answer
    answer: str
    candidates: tuple[str, ...]
    trivial: str | None = None  # what the trivial reader says; None: there is none


Tell = Callable[[int], Story]  # the story of a window, by its number


@dataclasses.dataclass(frozen=True, eq=False)
class _Spelt:
    told: list[Ids]
    end: Ids  # question and answer
    candidates: Ids  # (A, K), right and trivial as those of a Choice
    right: Ids
    trivial: Ids | None

    @property
    def tokens(self) -> int:
        """That are read, beside the first one, which stays: a model may need the one it has there."""
        return sum(map(len, self.told)) + len(self.end) - 1


def in_words(task: str, lengths: list[int], targets: int, tell: Tell) -> list[Probe]:
    """One row per length, with a story in each window."""
    return [
        Probe(task, length, targets, poses=functools.partial(_poses, task=task, length=length, tell=tell))
        for length in lengths
    ]


def spread(number: int, sentences: int) -> tuple[float, ...]:
    """Places of sentences in a window, by its number: one in every equal share of the text.

    How deep in its share a sentence stands is the same for all of them, and spread evenly over windows.
    """
    depth = (number + 0.5) * _GOLDEN % 1
    return tuple((n + depth) / sentences for n in range(sentences))


def _poses(material: Material, task: str, length: int, tell: Tell) -> Pose:
    if material.encode is None:
        raise Undefined(f"{task} is asked in words, and this model's tokenizer is not known")
    spell = functools.partial(_spelt, material.encode, task)

    def posed(ids: Ids, number: int) -> Choice:
        story = tell(number)
        spelt = spell(story)
        spare, begin = length - 1 - spelt.tokens, 1
        if spare < 0:
            raise Undefined(f"the sentences of {task} are {1 + spelt.tokens} tokens of this model: there is no room")
        out = np.append(ids, 0)
        for sentence, place in zip(spelt.told, story.places, strict=True):
            at = begin + round(place * spare)
            out[at : at + len(sentence)] = sentence
            begin += len(sentence)
        out[-len(spelt.end) :] = spelt.end
        return Choice(out, spelt.candidates, spelt.right, spelt.trivial)

    return posed


@functools.lru_cache(maxsize=256)  # rows of other lengths and variants tell the same stories
def _spelt(encode: Encode, task: str, story: Story) -> _Spelt:
    """The tokens of a story.

    Raises:
        Undefined: the candidates do not differ in one token each, or the sentences spell the answer in other tokens.
    """
    texts = [*story.told, story.question + story.answer]
    found = encode([*texts, *(story.question + candidate for candidate in story.candidates)])
    *told, end = (np.asarray(ids, dtype=np.int64) for ids in found[: len(texts)])
    spellings, one = found[len(texts) :], story.candidates.index(story.answer)
    at, tokens = _parting(spellings, task)
    if not np.array_equal(spellings[one][: at + 1], end[: at + 1]) or tokens[one] not in np.concatenate(told):
        raise _indistinct(task)
    answer = end[at:]
    candidates = np.repeat(answer[:, None], len(story.candidates), axis=1)
    candidates[0] = tokens
    trivial = None if story.trivial is None else _first(story.candidates.index(story.trivial), len(answer))
    return _Spelt(told, end, candidates, _first(one, len(answer)), trivial)


def _first(chosen: int, tokens: int) -> Ids:
    """Which candidate is chosen at the first of so many tokens; at the others there is no choice."""
    return np.array([chosen, *[-1] * (tokens - 1)], dtype=np.int64)


def _parting(spellings: Sequence[np.ndarray], task: str) -> tuple[int, Ids]:
    """The first place where texts are not all the same, and their tokens there.

    Raises:
        Undefined: there is none, or two of the tokens are the same.
    """
    shortest = min(map(len, spellings))
    table = np.stack([np.asarray(ids[:shortest], dtype=np.int64) for ids in spellings])
    for at in np.flatnonzero((table != table[0]).any(axis=0))[:1].tolist():
        if len(np.unique(table[:, at])) == len(table):
            return at, table[:, at]
    raise _indistinct(task)


def _indistinct(task: str) -> Undefined:
    return Undefined(f"the tokenizer has no token of its own for each answer of {task}")
