"""Repeat: does the model find a block of tokens that it has read before, g tokens ago?

The window is that of `fixed_target`, but a copy of its last N + 1 tokens overwrites its
first N + 1:

    repeat           reads  A A A A  x x x x x x x  A A A    scores  A A A
                     (A: N + 1 tokens, the first one a cue)
    repeat_control   reads  y y y y  x x x x x x x  A A A    scores  A A A
                     (the text as it is)
                            copy     g tokens       targets

Gain at length C = nll of repeat_control - nll of repeat, paired by target; g = C - 2N -
1, and a target is C - N tokens after its copy. No training is needed: any language
model has some of this skill. N is `evaluation.targets`, but at most a quarter of the
training length, so that training had the gap of 1x, too.
"""

from posbench.evaluation.probes import Ids, Probe


def rows(length: int, targets: int, train_length: int) -> list[Probe]:
    """Return the probe and its control, which has the same targets but no copy before
    them; neither if the copy would reach the targets.
    """
    size = max(1, min(targets, train_length // 4))
    if length <= 2 * size:
        return []

    def copied(ids: Ids) -> Ids:
        window = ids.copy()
        window[: size + 1] = ids[-size - 1 :]
        return window

    repeat = Probe("repeat", length, size, rewrite=copied)
    control = Probe("repeat_control", length, size)
    return [repeat, control]
