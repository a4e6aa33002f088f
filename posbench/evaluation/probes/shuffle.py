"""Shuffle: does the model use the order of context beyond its training length L, or
only which tokens are there?

    fixed_target at C   reads  a b c d e f  u v w x y    scores  x y z
    shuffle at C        reads  d a f c e b  u v w x y    scores  x y z
                        (the last L tokens read stay as they are)
    fixed_target at L   reads               u v w x y    scores  x y z

All three score the same targets and are paired. nll of shuffle - nll of fixed_target at
C is what the order of distant tokens is worth; nll of fixed_target at L - nll of
shuffle is what the distant tokens are worth without their order. All windows of a
length have the same permutation. The option `keep` sets how many tokens stay, by
default L; it is at least the number of scored tokens.
"""

import numpy as np

from posbench.errors import OptionError
from posbench.evaluation.probes import Ids, Probe


def rows(
    length: int, targets: int, train_length: int, *, keep: int | None = None
) -> list[Probe]:
    """Return a probe, or none if the length is not above the number of tokens that
    stay.
    """
    if keep is None:
        keep = train_length
    elif keep < targets:
        expected = f"expected at least evaluation.targets, {targets}"
        raise OptionError("keep", f"is {keep} for 'shuffle': {expected}")

    def shuffled(ids: Ids) -> Ids:
        distant = len(ids) - 1 - keep
        order = np.random.default_rng(0).permutation(distant)
        return np.concatenate([ids[:distant][order], ids[distant:]])

    if length <= keep:
        return []
    return [Probe("shuffle", length, targets, rewrite=shuffled)]
