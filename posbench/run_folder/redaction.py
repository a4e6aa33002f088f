"""Secrets are kept out of whatever is written down: command lines, logs, configurations.

Recognised by their form, or by the word before them. A 40-digit hex number alone may be a W&B key; as a pinned revision
or inside a path it is a commit.
"""

import re
from collections.abc import Iterator
from typing import Any

_SECRETS = re.compile(
    r"(?<![\w/.-])(?<!revision=)(?:local-)?[0-9a-f]{40}(?![\w-])"  # W&B
    r"|\bwandb_v\d+_\w{20,}"
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}"
    r"|\bglpat-[\w-]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{16,}"
    r"|\bxox[a-z]-[\w-]{10,}"  # Slack
    r"|\bAIza[\w-]{30,}"  # Google
    r"|\bnpm_[A-Za-z0-9]{20,}|\bpypi-[\w-]{20,}"
    r"|\bA[KS]IA[0-9A-Z]{16}\b"
    # AWS's secret keys: 40 letters and digits, mixed as no path is.
    r"|(?<![\w/+=.-])(?=[A-Za-z/+]*[0-9])(?=(?:[a-z0-9/+]*[A-Z]){5})(?=(?:[A-Z0-9/+]*[a-z]){5})"
    r"[A-Za-z0-9/+]{40}(?![\w/+=.-])"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password of a URL
    r"|(?<![\w./@:-])[\w.+-]+:[^\s/@:=,]{3,}(?=@[\w-]+\.\w|@localhost\b)"  # the same without its scheme
    r"|(?P<label>(?i:"
    r"(?:api[_-]?key|access[_-]?key|secret[_-]?key|secret|password|access[_-]token)[\"']?\s*[=:]\s*[\"']?"
    r"|(?<![a-z])token[\"']?=[\"']?|[\"']token[\"']\s*:\s*[\"']?"
    r"|(?<![\w-])--[\w-]*(?:api-key|password|secret|token)\s+"
    r"|\bbearer\s+(?=\S{8})|\bbasic\s+(?=[\w+/]{16})"
    r"))[^\s&\"',;]+"
)


def redact(text: str) -> str:
    """`text` with everything that looks like a secret replaced by `[redacted]`."""
    return _SECRETS.sub(lambda found: f"{found['label'] or ''}[redacted]", text)


def secret_keys(container: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted keys of a plain configuration which or whose values look like secrets, with those redacted."""
    for key, value in container.items():
        if redact(key) != key:
            yield prefix + redact(key)
        elif isinstance(value, dict):
            yield from secret_keys(value, f"{prefix}{key}.")
        else:
            told = f"{key}={value}" if key == "revision" else f"{value}"  # a commit is no secret there
            if redact(told) != told:
                yield prefix + key
