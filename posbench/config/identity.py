"""Which run a configuration is: a name that survives new keys."""

import hashlib
import json
from typing import Any

from posbench.config.schema import Config, to_container

# What may change without making it another run (another run id).
NOT_IDENTITY = ("tracking", "evaluation", "runtime")


def run_id(config: Config) -> str:
    """`<encoding>-s<seed>-<8 hex digits>`, the digits from everything that shapes the trained weights."""
    identity = {k: _one_spelling(v) for k, v in to_container(config).items() if k not in NOT_IDENTITY}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{config.encoding.name}-s{config.seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _one_spelling(value: Any) -> Any:
    """10000 and 10000.0 are one value, so that `encoding.base=1e4` is the run that `encoding.base=10000` is."""
    if isinstance(value, dict):
        return {key: _one_spelling(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_one_spelling(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
