"""Secrets are kept out of whatever is written down: command lines, logs, configurations.

Recognised by their form. A 40-digit hex number alone may be a W&B key; as a pinned revision or inside a path it is a
commit.
"""

import re
from collections.abc import Iterator
from typing import Any

_SECRETS = re.compile(
    r"(?<![\w/.-])(?<!revision=)(?:local-)?[0-9a-f]{40}(?![\w/.-])"  # W&B
    r"|\bwandb_v\d+_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password of a URL
    r"|(?i:(?<=api_key=)|(?<=api-key=)|(?<=password=)|(?<=secret=)|(?<=access_token=))[^\s&]+"
)


def redact(text: str) -> str:
    """`text` with everything that looks like a secret replaced by `[redacted]`."""
    return _SECRETS.sub("[redacted]", text)


def secret_keys(container: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a plain configuration whose values look like secrets."""
    for key, value in container.items():
        if isinstance(value, dict):
            yield from secret_keys(value, f"{prefix}{key}.")
        elif key != "revision" and redact(f"{value}") != f"{value}":
            yield prefix + key
