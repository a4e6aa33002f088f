"""Key tokens: the loss on those few tokens that distant context helps to predict.

    fixed_target   reads  a b c d e f g h i j    scores  h i j k
    key_tokens     reads  a b c d e f g h i j    scores  h   j      (those that distant context helped a reference)

A target is a key token if its nll under the reference falls by more than 1 nat from L to 4L tokens of context. The mean
over all tokens hides them: few tokens need distant context. With a run as `evaluation.reference` all runs are scored on
that run's key tokens and are paired. Without one the model chooses its own (`key_tokens_self`): those are not paired
with other runs', and the gain from L to 4L on them is partly luck, as they were chosen by it.
"""

from posbench.evaluation.probes import KeyTokens, Probe


def rows(lengths: list[int], targets: int, train_length: int) -> list[Probe]:
    """One row per length, all over the same tokens."""
    select = KeyTokens(short=train_length, long=4 * train_length, nats=1.0)
    return [Probe("key_tokens", length, targets, select=select) for length in lengths]
