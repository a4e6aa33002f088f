"""Key tokens: the loss on those few tokens that distant context helps to predict.

    fixed_target   reads  a b c d e f g h i j    scores  h i j k
    key_tokens     reads  a b c d e f g h i j    scores  h   j      (those that distant context helped a reference)

A target is a key token if its nll under the reference falls by more than 1 nat from L to 4L tokens of context; other
numbers than 1 and 4 are the options `nats` and `ratio`. The mean over all tokens hides them: few tokens need distant
context. With a run as `evaluation.reference` all runs are scored on that run's key tokens and are paired. Without one
the model chooses its own (`key_tokens_self`): those are not paired with other runs', and the gain from L to 4L on them
is partly luck, as they were chosen by it.
"""

import math

from posbench.config.schema import LONGEST
from posbench.evaluation.probes import KeyTokens, Probe, expect


def rows(lengths: list[int], targets: int, train_length: int, *, nats: float = 1.0, ratio: int = 4) -> list[Probe]:
    """One row per length, all over the same tokens."""
    expect(0 < nats < math.inf, "key_tokens", "nats", nats, "a number above 0")
    expect(2 <= ratio <= LONGEST, "key_tokens", "ratio", ratio, f"2 to {LONGEST:,} training lengths")
    select = KeyTokens(short=train_length, long=ratio * train_length, nats=nats)
    return [Probe("key_tokens", length, targets, select=select) for length in lengths]
