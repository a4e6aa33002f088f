"""How a model is changed for a baseline or an extension of its context."""

import dataclasses
from typing import Any

from posbench.config.overrides import read
from posbench.errors import UserError
from posbench.evaluation.protocols import Integers


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the model is changed for a baseline or an extension; as it stands, not at all."""

    window: int | None = None  # keys each query may see
    sinks: int = 0  # keys at the beginning that it sees beside them
    extension: str | None = None  # yarn, or with options yarn:factor=4:beta=16

    @property
    def name(self) -> str | None:
        """The row's `extension`."""
        return "sinks" if self.sinks else self.extension

    def visible(self, context: Integers) -> Integers:
        """The number of preceding tokens that a prediction sees."""
        return context if self.window is None else context.clip(max=self.window + self.sinks)


AS_TRAINED = Variant()


def parse_choice(text: str, example: str = "yarn:factor=4") -> tuple[str, dict[str, Any]]:
    """`yarn:factor=4:beta=16` as a name and its options: how extensions, probes and variants of tasks are written.

    Raises:
        UserError: an option without a value, or given twice.
    """
    name, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, typed = part.partition("=")
        if not equals or not typed:
            raise UserError(f"cannot read '{text}': expected name:option=value, such as {example}")
        if key in options:
            raise UserError(f"'{text}' gives {key} twice: expected each option once")
        options[key] = read(typed)
    return name, options
