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

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from posbench.errors import Undefined
from posbench.evaluation.probes import Choice, Ids, Material, Pose, Probe, balanced
from posbench.randomness import derive

Pairs = Annotated[int, Ge(2), Le(64)]


def rows(
    length: int, targets: int, train_length: int, *, pairs: Pairs = 8
) -> list[Probe]:
    """Return one row."""

    def pose_from(material: Material) -> Pose:
        vocabulary = np.unique(material.text)
        needed = 2 * pairs + 2  # the pairs, the window's first token, and one filler
        if len(vocabulary) < needed:
            raise Undefined(
                f"the text has {len(vocabulary)} different tokens: {pairs} pairs need"
                f" {needed} of them"
            )
        # the first token stays, the last is the question
        shares = np.linspace(1, length - 1, pairs + 1).astype(np.int64)
        sizes = np.diff(shares)
        if sizes.min() < 2:
            raise Undefined(
                f"there is no room for {pairs} pairs and their question in {length}"
                " tokens"
            )

        def pose(ids: Ids, number: int) -> Choice:
            rng = np.random.default_rng(derive(0, "induction", number))
            shuffled = rng.permutation(vocabulary)
            others = shuffled[shuffled != ids[0]]
            first, second = others[: 2 * pairs].reshape(2, pairs)
            right = balanced("induction", number, pairs)
            depths = rng.random(pairs)  # of each pair in its share

            fillers = material.text[~np.isin(material.text, [first, second])]
            window = rng.choice(fillers, length)
            window[0] = ids[0]
            places = shares[:-1] + (depths * (sizes - 1)).astype(np.int64)
            window[places] = first
            window[places + 1] = second
            window[-1] = first[right]
            return Choice(np.append(window, second[right]), second, right)

        return pose

    return [Probe("induction", length, targets, pose_from=pose_from)]
