"""Offset: does a model read the same passage alike wherever it stands?

    fixed_target at L    positions 0 .. L-1      reads  u v w x y    scores  x y z
    offset at length C   positions C-L .. C-1    reads  u v w x y    scores  x y z

L is the training length. All rows score the same targets in the same L tokens: only
absolute positions differ. A relative encoding gives the same loss in all, up to
rounding. A jump at a length shows that a table ends there, that a cache of angles is
too short, or that angles have too low a precision.
"""

from posbench.evaluation.probes import Probe


def rows(length: int, targets: int, train_length: int) -> list[Probe]:
    """Return a probe whose window ends where one of that length would end."""
    return [Probe("offset", train_length, targets, offset=length - train_length)]
