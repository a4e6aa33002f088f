"""The factor of an extension, and the checks that all methods share."""

import dataclasses
import math

from posbench.encodings.base import Encoding
from posbench.errors import UserError

# What a method gives back: the extended encoding, and what there is to know about how it was extended.
Extended = tuple[Encoding, dict[str, object]]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """From the length of training to the length of evaluation, both in tokens."""

    train_length: int
    length: int

    def factor(self, fixed: float | None) -> tuple[float, dict[str, object]]:
        """The factor s: `fixed`, or length / train_length and at least 1; and what a row says of it."""
        if fixed is not None:
            expect(
                math.isfinite(fixed) and fixed >= 1, "factor", fixed, "at least 1, or null for length / train_length"
            )
        chosen = max(1.0, self.length / self.train_length) if fixed is None else fixed
        return chosen, {"factor": chosen, "dynamic": fixed is None}


def expect(holds: bool, option: str, value: object, expected: str) -> None:
    """Refuse an option's value in one line.

    Raises:
        UserError: `holds` is false.
    """
    if not holds:
        raise UserError(f"extension option {option} is {value}: expected {expected}")
