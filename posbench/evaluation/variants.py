"""How a model is changed for a baseline or an extension of its context."""

import dataclasses
from typing import Any

import yaml

from posbench import extend
from posbench.encodings.base import Encoding
from posbench.errors import UserError


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the model is changed for a baseline or an extension; as it stands, not at all."""

    window: int | None = None  # keys each query may see
    sinks: int = 0  # keys at the beginning that it sees beside them
    extension: str | None = None  # yarn, or with options yarn:factor=4:beta_fast=16

    @property
    def name(self) -> str | None:
        """The row's `extension`."""
        return "sinks" if self.sinks else self.extension

    def apply(self, encoding: Encoding, length: int, train_length: int) -> tuple[Encoding, dict[str, Any] | None]:
        """The encoding to evaluate with, and the row's `extension_options`.

        Raises:
            UserError: the scheme does not support the extension, or an option is wrong.
        """
        if self.extension is None:
            return encoding, {"sinks": self.sinks} if self.sinks else None
        method, options = parse_extension(self.extension)
        return extend.extended(encoding, method, length, train_length, **options)


AS_TRAINED = Variant()


def parse_extension(text: str) -> tuple[str, dict[str, Any]]:
    """`yarn:factor=4:beta_fast=16` as a method and its options.

    Raises:
        UserError: an option without a value.
    """
    method, *parts = text.split(":")
    options = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"cannot read extension '{text}': expected name:option=value, such as yarn:factor=4")
        options[key] = yaml.safe_load(value)
    return method, options
