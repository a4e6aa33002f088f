"""The factor of an extension, and the checks that all methods share."""

import dataclasses
import math

from posbench.encodings.base import Encoding
from posbench.errors import UserError

# The result of a method: the extended encoding and the facts of the extension.
Extended = tuple[Encoding, dict[str, object]]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The lengths of training and of evaluation, in tokens."""

    train_length: int
    length: int

    def factor(self, fixed: float | None) -> tuple[float, dict[str, object]]:
        """The factor s (`fixed`, or length / train_length but at least 1) and its facts for result rows."""
        if fixed is not None:
            expect(
                math.isfinite(fixed) and fixed >= 1, "factor", fixed, "at least 1, or null for length / train_length"
            )
        chosen = max(1.0, self.length / self.train_length) if fixed is None else fixed
        return chosen, {"factor": chosen, "dynamic": fixed is None}


def expect(holds: bool, option: str, value: object, expected: str) -> None:
    """Raise UserError, in one line, if an option's value does not hold."""
    if not holds:
        raise UserError(f"extension option {option} is {value}: expected {expected}")
