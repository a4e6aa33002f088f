"""The value checks that the sections of a configuration share; each refuses in one line."""

import re

from posbench.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # also the name of a folder


def plain_name(key: str, name: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UserError(
            f"{key} is {name!r}: expected letters, digits, '.', '_' and '-', at most 128, a letter or digit first"
        )


def at_least(least: float, section: object, prefix: str, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < least:
            raise UserError(f"{prefix}.{name} is {value}: expected at least {least}")


def above_zero(section: object, prefix: str, *names: str) -> None:
    for name in names:
        if getattr(section, name) <= 0:
            raise UserError(f"{prefix}.{name} is {getattr(section, name)}: expected a number above 0")


def fraction(section: object, prefix: str, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(section, name) <= 1:
            raise UserError(f"{prefix}.{name} is {getattr(section, name)}: expected a number from 0 to 1")
