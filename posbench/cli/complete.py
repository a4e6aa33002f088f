"""Shell completion: groups and their choices, read from the YAML files."""

import os

from posbench.config.shipped import GROUPS, choices


def complete(incomplete: str) -> list[str]:
    """Groups and their choices. Bash splits words at `=`, so there the part after it is completed alone."""
    words = os.environ.get("COMP_WORDS", "").split()
    at = int(os.environ.get("COMP_CWORD") or 0)
    if "bash" in os.environ.get("_POSBENCH_COMPLETE", "") and "=" in words[at - 1 : at + 1]:
        equals = at if words[at : at + 1] == ["="] else at - 1
        group, typed = words[equals - 1], words[at] if equals < at < len(words) else ""
        return _choices(group, typed)
    group, equals_sign, typed = incomplete.partition("=")
    if equals_sign:
        return [f"{group}={choice}" for choice in _choices(group, typed)]
    return [f"{group}=" for group in GROUPS if group.startswith(incomplete)]


def _choices(group: str, typed: str) -> list[str]:
    """`rope,al` completes to `rope,alibi`."""
    before, comma, last = typed.rpartition(",")
    return [f"{before}{comma}{name}" for name in choices(group) if group in GROUPS and name.startswith(last)]
