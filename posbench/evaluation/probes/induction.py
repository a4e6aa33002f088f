"""Induction: what followed a token when it stood there before?

    induction   reads  x  x  A a  x  x  x  B b  x  C c  x  x  B
                scores  b   (among a b c)

x are tokens drawn independently from the text. Among them stand `pairs` pairs of
tokens, one in each equal share of the window, and the first token of one pair comes
again at the end. The answer is right if the token that followed it is likelier than
those that followed the others. Each of these candidates stands in the window exactly
once, so it does not help to name a token that is common or near: guessing gets 1 of
`pairs`. In every `pairs` windows each pair is asked for once, in shuffled order. The
tokens of pairs are drawn uniformly from the different tokens of the text and stand
nowhere else in the window. They depend on the window's number only, so lengths differ
in the distance and in how much stands between.

Source: Olsson et al., "In-context Learning and Induction Heads" (2022),
arXiv:2209.11895: heads that complete [A][B] ... [A] with [B], which are recognised by
what they do on random tokens that repeat.
Deviates: pairs repeat, not a whole sequence; random tokens are as common as in the
text; scored by likelihood among the candidates.
"""

import functools

import numpy as np

from posbench.errors import Undefined
from posbench.evaluation.probes import (
    Choice,
    Ids,
    Material,
    Pose,
    Probe,
    balanced,
    expect,
)
from posbench.randomness import derive

_MOST_PAIRS = 64


def rows(
    lengths: list[int], targets: int, train_length: int, *, pairs: int = 8
) -> list[Probe]:
    """Return one row per length."""
    expect(
        2 <= pairs <= _MOST_PAIRS, "induction", "pairs", pairs, f"2 to {_MOST_PAIRS}"
    )
    return [
        Probe(
            "induction",
            length,
            targets,
            poses=functools.partial(_poses, length=length, pairs=pairs),
        )
        for length in lengths
    ]


def _poses(material: Material, length: int, pairs: int) -> Pose:
    vocabulary = np.unique(material.text)
    # the pairs, the window's first token, and one filler
    if len(vocabulary) < (needed := 2 * pairs + 2):
        raise Undefined(
            f"the text has {len(vocabulary)} different tokens: {pairs} pairs need"
            f" {needed} of them"
        )
    # the first token stays, the last is the question
    shares = np.linspace(1, length - 1, pairs + 1).astype(np.int64)
    if np.diff(shares).min() < 2:
        raise Undefined(
            f"there is no room for {pairs} pairs and their question in {length} tokens"
        )

    def pose(ids: Ids, number: int) -> Choice:
        rng = np.random.default_rng(derive(0, "induction", number))
        shuffled = rng.permutation(vocabulary)
        first, second = shuffled[shuffled != ids[0]][: 2 * pairs].reshape(2, pairs)
        right, offsets = balanced("induction", number, pairs), rng.random(pairs)
        fillers = material.text[~np.isin(material.text, [first, second])]
        window = rng.choice(fillers, length)
        window[0] = ids[0]
        places = shares[:-1] + (offsets * (np.diff(shares) - 1)).astype(np.int64)
        window[places], window[places + 1] = first, second
        window[-1] = first[right]
        return Choice(np.append(window, second[right]), second, right)

    return pose
