"""The identity of a run: a digest of all settings that shape its weights, in which a
path or a number has one spelling.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# files of a run folder
RECORD = "run.json"
TOKENIZER = "tokenizer.json"
# the name of a folder that `--restart` put beside the new run's
MOVED_ASIDE = re.compile(r".+\.old-\d+")
# sections that do not change a run's id
NOT_IDENTITY = ("study", "tracking", "evaluation", "runtime")


def digest(shaping: Mapping[str, Any]) -> str:
    """Return the 8 hex digits at the end of an id: a digest of all settings that the
    results depend on.
    """
    text = json.dumps(one_number(shaping), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def one_number(value: Any) -> Any:
    """Return 10000.0 as 10000, at any depth, so that `encoding.base=1e4` and
    `encoding.base=10000` are one run.
    """
    if isinstance(value, dict):
        return {key: one_number(item) for key, item in value.items()}
    if isinstance(value, list):
        return [one_number(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def relative_path(path: str) -> str:
    """Return a path relative to the current folder, which is known by its real name or
    by $PWD; absolute if outside.
    """
    absolute = Path(os.path.abspath(os.path.expanduser(path)))
    for folder in (Path.cwd(), Path(os.environ.get("PWD") or "/")):
        if absolute.is_relative_to(folder) and os.path.samefile(folder, "."):
            return absolute.relative_to(folder).as_posix()
    return str(absolute)
