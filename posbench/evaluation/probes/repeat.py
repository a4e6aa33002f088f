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
model has some of this skill. N is the option `size`; by default it is
`evaluation.targets`, but at most a quarter of the training length, so that training had
the gap of 1x, too.
"""

from posbench.evaluation.probes import Ids, Probe, expect


def rows(
    lengths: list[int], targets: int, train_length: int, *, size: int | None = None
) -> list[Probe]:
    """Return the probe of each length and its control, which has the same targets but
    no copy before them.
    """
    if size is None:
        size = max(1, min(targets, train_length // 4))
    else:
        maximum = train_length // 2
        expect(
            1 <= size <= maximum,
            "repeat",
            "size",
            size,
            f"1 to half the training length, {maximum}",
        )

    def copied(ids: Ids) -> Ids:
        window = ids.copy()
        window[: size + 1] = ids[-size - 1 :]
        return window

    lengths = [length for length in lengths if length > 2 * size]
    pairs = [
        (Probe("repeat", length, size, copied), Probe("repeat_control", length, size))
        for length in lengths
    ]
    return [probe for pair in pairs for probe in pair]
