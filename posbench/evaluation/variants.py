"""How a model is changed for a baseline or an extension of its context."""

import dataclasses
from typing import Any

from posbench.config import overrides
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
        """How many of the tokens before them predictions see."""
        return context if self.window is None else context.clip(max=self.window + self.sinks)


AS_TRAINED = Variant()


def parse_extension(text: str) -> tuple[str, dict[str, Any]]:
    """`yarn:factor=4:beta=16` as a method and its options.

    Raises:
        UserError: an option without a value, or given twice.
    """
    method, *parts = text.split(":")
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, typed = part.partition("=")
        if not equals or not typed:
            raise UserError(f"cannot read extension '{text}': expected name:option=value, such as yarn:factor=4")
        if key in options:
            raise UserError(f"extension '{text}' gives {key} twice: expected each option once")
        options[key] = overrides.value(typed)
    return method, options
