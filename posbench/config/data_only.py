"""A configuration is data only: overrides and files must not call code, read the environment or steer Hydra."""

import re
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from posbench.config import plain_yaml
from posbench.errors import UserError

_ABSENT = object()
WRITTEN_TO = ("runtime.outputs", "runtime.cache")
_BELOW = "another place than a folder below the current one is chosen on the command line only"
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


def refuse_other_hydra(cfg: DictConfig, without: DictConfig) -> None:
    """Refuse files that change Hydra's own part in a way that `users_files` did not foresee; names the first key.

    Args:
        cfg: composed with them.
        without: composed without them.
    """
    found, expected = (_hydras_keys(OmegaConf.to_container(each.hydra)) for each in (cfg, without))
    for key in sorted(found.keys() | expected.keys()):
        if found.get(key, _ABSENT) != expected.get(key, _ABSENT):
            raise UserError(f"a file sets {key}: Hydra's own part is set on the command line only")


def refuse_elsewhere(cfg: DictConfig) -> None:
    """Refuse files that make posbench write outside the current folder, or to a path that is not spelt out.

    Args:
        cfg: composed with them, without what is typed.
    """
    runtime = OmegaConf.to_container(cfg.runtime) if OmegaConf.is_dict(cfg.get("runtime")) else {}
    for key in WRITTEN_TO:
        place = runtime.get(key.removeprefix("runtime.")) if isinstance(runtime, dict) else None
        if place is not None and not _stays_below(str(place)):
            raise UserError(f"a file sets {key} to '{place}': {_BELOW}")


def refuse_elsewhere_typed(override: str, key: str, path: Path) -> None:
    """Refuse an override in a sweep file that makes posbench write outside the current folder."""
    typed = override.partition("=")[2].strip("'\"")
    if key == "runtime" or (key in WRITTEN_TO and not _stays_below(typed)):
        raise UserError(f"{path} has '{override}': {_BELOW}")


def _stays_below(place: str) -> bool:
    return bool(re.fullmatch(r"[\w. -][\w./ -]*", place)) and ".." not in place.split("/")


def _hydras_keys(value: Any, key: str = "hydra") -> dict[str, Any]:
    """Each key and its value, without the keys that record which files were read."""
    if key in ("hydra.runtime", "hydra.overrides", "hydra.searchpath", "hydra.job.override_dirname"):
        return {}
    if isinstance(value, dict) and value:
        return {name: item for own in value for name, item in _hydras_keys(value[own], f"{key}.{own}").items()}
    return {key: value}
