"""A configuration is data only: what would call code or read the environment is refused before Hydra sees it."""

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from posbench.config import plain_yaml
from posbench.errors import UserError

_RESOLVER = re.compile(r"\$\{\s*([\w.]+)\s*:")


def refuse_code(overrides: list[str]) -> None:
    """Refuse overrides that name a callable, a callback or an environment variable."""
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        if key == "hydra" or re.match(r"hydra[./]callbacks", key):
            raise UserError(
                f"'{text}': callbacks and the whole of hydra cannot be set, single keys such as hydra.job can"
            )
        for word in (*plain_yaml.CALLS, "oc.env"):
            if word in text:
                raise UserError(f"'{text}': {word} is not allowed, a configuration is data only")


def refuse_code_in_files(folder: Path) -> None:
    """Refuse a folder of YAML files that name callables; raises UserError with file and line."""
    if not folder.is_dir():
        raise UserError(f"no folder '{folder}' to read configurations from")
    for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        for event in plain_yaml.events(path, plain_yaml.read_text(path)):
            if isinstance(event, yaml.ScalarEvent) and event.value in plain_yaml.CALLS:
                line = event.start_mark.line + 1
                raise UserError(f"{path}, line {line}: {event.value} is not allowed, a configuration is data only")


def refuse_resolvers(key: str, value: Any) -> None:
    """Interpolations may name other keys; functions such as `${oc.env:...}` would put secrets into records."""
    if isinstance(value, dict):
        for name, item in value.items():
            refuse_resolvers(f"{key}.{name}", item)
    elif isinstance(value, list):
        for item in value:
            refuse_resolvers(key, item)
    elif isinstance(value, str) and (found := _RESOLVER.search(value)):
        raise UserError(f"{key} calls '{found[1]}': only other keys may be interpolated, such as ${{training.tokens}}")


def refuse_callbacks(cfg: DictConfig) -> None:
    """Refuse callbacks that a YAML file put into Hydra's part."""
    if cfg.hydra.callbacks:
        raise UserError("hydra.callbacks are not allowed, a configuration is data only")
