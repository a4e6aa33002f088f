"""YAML files as plain data: nothing in them builds an object, runs or is looked up."""

from pathlib import Path
from typing import Any

import yaml

from posbench.errors import UserError

# The parser in C takes a tenth of the time; a PyYAML built without it has the one in Python.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load(path: Path) -> Any:
    """The content of a YAML file. Raises UserError if it cannot be read or is not YAML."""
    try:
        return yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506, it is a safe loader
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path}{line}: {getattr(error, 'problem', None) or str(error).splitlines()[0]}") from None
