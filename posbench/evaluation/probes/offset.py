"""Offset: does a model read the same passage alike wherever it stands?

    fixed_target at L        positions 0 .. L-1                reads  u v w x y    scores  x y z
    offset at length C       positions C-L .. C-1              reads  u v w x y    scores  x y z

L is the training length. All score the same targets in the same L tokens: only absolute positions differ. To a relative
encoding all are equal, up to rounding. A jump at a length names a table's end, a cache of angles that is too short, or
angles in too low a precision.
"""

from posbench.evaluation.probes import Probe


def rows(lengths: list[int], targets: int, train_length: int) -> list[Probe]:
    """Return one probe per length, which ends at that position."""
    return [Probe("offset", train_length, targets, offset=length - train_length) for length in lengths]
