"""pydantic's findings, as the one line that a user reads."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from posbench.errors import did_you_mean


def strict(cls: type) -> type:
    """Have pydantic refuse unknown keys in a dataclass and in those nested in it."""
    import pydantic

    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            strict(field.type)
    cls.__pydantic_config__ = pydantic.ConfigDict(  # type: ignore[attr-defined]
        extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False
    )
    return cls


def in_one_line(cls: Any, section: str, error: Mapping[str, Any]) -> str:
    parts = [part for part in error["loc"] if isinstance(part, str)]  # indices into lists say little
    key = ".".join([section, *parts] if section else parts)
    if error["type"] == "unexpected_keyword_argument":
        for parent in parts[:-1]:
            cls = next(field.type for field in dataclasses.fields(cls) if field.name == parent)
        return f"unknown key '{key}'" + did_you_mean(parts[-1], [field.name for field in dataclasses.fields(cls)])
    if error["type"] in ("missing", "missing_argument"):
        return f"missing key '{key}'"
    return f"{key} is {as_typed(error['input'])}: {_expected(error)}"


def _expected(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind == "literal_error":
        named = re.findall(r"'([^']*)'|(True|False)", error["ctx"]["expected"])
        choices = [text or truth.lower() for text, truth in named]
        return f"expected {' or '.join(choices)}" + did_you_mean(str(error["input"]), choices).replace(":", ",", 1)
    for start, expected in _EXPECTED.items():
        if kind.startswith(start):
            return expected
    return str(error["msg"][0].lower() + error["msg"][1:])


_EXPECTED = {
    "int": "expected a whole number",
    "finite_number": "expected a finite number",
    "float": "expected a number",
    "bool": "expected true or false",
    "string": "expected text",
    "tuple_type": "expected a list",
    "dict": "expected keys and values",
    "dataclass": "expected keys and values",
}


def as_typed(value: Any) -> str:
    """A value as it is typed in YAML: null and true, not None and True."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
