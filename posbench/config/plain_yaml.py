"""YAML from outside: read as plain data, or refused in one line.

A saved run may come from a stranger. Nothing here builds objects, follows aliases or knows Hydra and OmegaConf.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from posbench import files
from posbench.errors import UserError

# The parser in C takes a tenth of the time; a PyYAML built without it has the one in Python.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_DIGITS = 40
# Keys by which Hydra would call a function named in the file.
CALLS = ("_target_", "_partial_", "_args_", "_recursive_", "_convert_")
# YAML 1.1: whole numbers in base 2, 8, 10 and 16, and numbers in base 60 such as 1:30 and 1:30.5.
_WHOLE_NUMBER = re.compile(r"[+-]?(0b[01_]+|0x[\da-fA-F_]+|\d[\d_]*(:[0-5]?\d)*|\d[\d_]*(:[0-5]?\d)+\.[\d_]*)")


def load(path: Path) -> Any:
    """The content of a saved YAML file: null, booleans, numbers, text, lists and dictionaries with text keys.

    Raises:
        UserError: not readable, too large or too deep, aliases, doubled keys, interpolations, `hydra` or `_target_`
            keys, or anything else that is not plain data.
    """
    text = read_text(path)
    for event in events(path, text):
        if isinstance(event, yaml.AliasEvent):
            raise UserError(f"{path}, line {event.start_mark.line + 1}: aliases are not allowed in a saved file")
    try:
        _refuse_doubled_keys(path, yaml.compose(text, Loader=_Loader))
        content = yaml.load(text, Loader=_Loader)  # noqa: S506, it is a safe loader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        raise UserError(_where(path, error)) from None
    _expect_plain(path, content)
    return content


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """The text of a small file. Raises UserError if it is unreadable, too large, or not UTF-8."""
    try:
        return files.read(path, most).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None


def events(path: Path, text: str) -> Iterator[yaml.Event]:
    """What the parser sees, without building anything.

    Raises:
        UserError: not YAML, nested too deep, or with a number of so many digits that Python refuses to read or to
            print it.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UserError(f"{path} is nested deeper than {MAX_DEPTH} levels")
            if (
                isinstance(event, yaml.ScalarEvent)
                and event.implicit[0]
                and len(event.value) > MAX_DIGITS
                and _WHOLE_NUMBER.fullmatch(event.value)
            ):
                raise UserError(
                    f"{path}, line {event.start_mark.line + 1}: a number of {len(event.value):,} characters: "
                    f"expected at most {MAX_DIGITS}"
                )
            yield event
    except yaml.YAMLError as error:
        raise UserError(_where(path, error)) from None


def _refuse_doubled_keys(path: Path, node: Any) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise UserError(f"{path}, line {key.start_mark.line + 1}: key '{key.value}' stands twice")
            seen.add(str(key.value))
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            _refuse_doubled_keys(path, part)


def _expect_plain(path: Path, value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(name, str):
                raise UserError(f"{path}: key {name!r} is not text")
            if name in CALLS or (name == "hydra" and not key):
                raise UserError(f"{path}: '{name}' is not allowed in a saved file, which is data only")
            _expect_plain(path, item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for item in value:
            _expect_plain(path, item, key)
    elif isinstance(value, str) and "${" in value:
        raise UserError(f"{path}: {key} holds an interpolation, '${{...}}': a saved file is resolved")
    elif not isinstance(value, str | int | float | None):
        raise UserError(f"{path}: {key} is a {type(value).__name__}: expected text, a number, true, false or null")


def _where(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f", line {mark.line + 1}" if mark else ""
    return f"{path}{line}: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"
