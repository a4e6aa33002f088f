"""From overrides to configurations. The first mistake in them is a UserError of one line.

Hydra composes the chosen files and runs nothing: no function that a YAML file names is ever called. Typed values are
assigned here, so that every key is checked and a sweep composes each choice once.
"""

import copy
import dataclasses
import fnmatch
import functools
import inspect
import itertools
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from posbench import encodings, installed
from posbench.config import keys, start, task, trackers
from posbench.config.history import written_out
from posbench.config.identity import in_one_spelling
from posbench.config.overrides import (
    FILES,
    LENGTH,
    WORDS,
    is_there,
    items,
    parted,
    ratios,
    refuse_both,
    refuse_lengths_of_problems,
    refuse_twice,
    typed_value,
)
from posbench.config.schema import Config, from_container
from posbench.config.shape import planned
from posbench.config.shipped import GROUPS, choices, configs_dir, nested
from posbench.config.sources import ASKS_FOR, named, refuse_other_text, refuse_unread
from posbench.errors import UserError, did_you_mean, unknown

logger = logging.getLogger(__name__)
PRIMARY = "train"  # configs/train.yaml
_MOST_RUNS = 10_000  # of a sweep
_WHOLE = "# @package _global_"  # the first line of an experiment, which sets keys of all sections
_RANGE = re.compile(r"range\((-?\d+),(-?\d+)\)")
_GLOB = re.compile(r"glob\((.+)\)")
Folders = tuple[Path, ...]  # where YAML files are beside ours, the first one above the others


def single(overrides: list[str], config_dir: Path | None = None) -> Config:
    """The configuration of one run.

    Args:
        config_dir: a folder of further groups and files.
    """
    folders = _folders(config_dir)
    pairs = _pairs(overrides)
    for key, typed in pairs:
        if len(_values(key, typed, folders)) > 1:
            hint = f" ({key}=[{typed}] is one list)" if "." in key else ""
            hint = " (several files as one text are a folder or a glob)" if key == "data.path" else hint
            raise UserError(f"{key}={typed} gives several values: 'posbench sweep' runs each of them{hint}")
    return _config(dict(pairs), folders)


def combinations(sets: list[list[str]], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Every combination of the values in each set of overrides, with its configuration: the jobs of a sweep."""
    folders = _folders(config_dir)
    points, runs = [], 0
    for overrides in sets:
        axes = [[(key, value) for value in _values(key, typed, folders)] for key, typed in _pairs(overrides)]
        runs += math.prod(map(len, axes))
        if runs > _MOST_RUNS:
            raise UserError(f"the sweep has {runs:,} runs: expected at most {_MOST_RUNS:,}, so split it")
        for point in itertools.product(*axes):
            points.append(([f"{key}={value}" for key, value in point], _config(dict(point), folders)))
    return points


def _pairs(overrides: list[str]) -> list[tuple[str, str]]:
    """The full key and the value of each override, as it is typed."""
    if any(text.startswith(f"{start.KEY}=") and text != f"{start.KEY}=null" for text in overrides):
        overrides = list(map(start.spelt, overrides))
    pairs = list(map(parted, overrides))
    refuse_twice(key for key, _ in pairs)
    refuse_both(key for key, _ in pairs)
    return pairs


def _values(key: str, typed: str, folders: Folders) -> list[str]:
    """The values that one override gives: those of `a,b`, `range(0,5)` or `glob(*)`, else the one typed.

    A list of an evaluation setting is one value: such settings make no other run.
    """
    if key.startswith("evaluation.") or (key in FILES and is_there(typed)):
        return start.runs(typed) if key == start.KEY else [typed]
    if match := _RANGE.fullmatch(typed):
        values = [str(number) for number in range(int(match[1]), int(match[2]))]
    elif (match := _GLOB.fullmatch(typed)) and key in GROUPS:
        values = fnmatch.filter(choices(key, folders), match[1])
    else:
        values = items(typed)
    if not values:
        raise UserError(f"{key}={typed} matches nothing")
    return values


# -- files -------------------------------------------------------------------------------------------------------------


def _folders(config_dir: Path | None) -> Folders:
    """Where YAML files are beside ours: the user's own folder, and those of installed packages.

    Raises:
        UserError: there is no such folder, or an experiment in it would set nothing.
    """
    if config_dir:
        _composed.cache_clear()  # its files may have changed
        if not config_dir.is_dir():
            raise UserError(f"no folder '{config_dir}' to read configurations from")
        for path in sorted(config_dir.rglob("*.yaml")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.parent.name == "experiment" and not path.name.startswith("_") and _WHOLE not in text:
                raise UserError(f"{path} does not begin with '{_WHOLE}': without that line, an experiment sets nothing")
            if re.search(r"^\s*hydra:|/hydra/", text, re.MULTILINE):
                logger.warning("%s: keys of Hydra's own part do nothing here", path)
    return (*([config_dir.absolute()] if config_dir else []), *installed.config_folders())


@functools.lru_cache(maxsize=128)  # all encodings; Hydra takes a tenth of a second for each
def _composed(chosen: tuple[str, ...], folders: Folders) -> DictConfig:
    """What Hydra makes of the chosen files. A caller's own Hydra is there again afterwards."""
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search = ",".join(json.dumps(f"file://{folder}", ensure_ascii=False) for folder in folders)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir()), job_name="posbench"):
            return compose(PRIMARY, overrides=[*([f"hydra.searchpath=[{search}]"] if folders else []), *chosen])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(_first_line(error)) from None
    finally:
        GlobalHydra.instance().hydra = theirs


def _first_line(error: BaseException) -> str:
    """The first line of the innermost error: Hydra and OmegaConf write several, and this one says what is wrong."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value: give it one, {error.full_key}=..."
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException | yaml.YAMLError):
        return f"{lines[0].rstrip('.:')}: {_first_line(cause)}"
    return lines[0]


# -- one configuration -------------------------------------------------------------------------------------------------


def _config(given: dict[str, str], folders: Folders) -> Config:
    """The checked configuration of typed values by their full keys."""
    chosen = {key: value for key, value in given.items() if key in GROUPS}
    for group, name in chosen.items():
        _check_choice(group, name, folders)
    cfg = _choose(chosen, folders)
    if source := _source(given, cfg):
        cfg = _choose(chosen := {**chosen, "data": source}, folders)
    begins = typed_value(start.KEY, given.get(start.KEY, "null"))
    if begins is not None:
        cfg = start.begun(cfg, begins, given.keys())
    data, before = _data(cfg), copy.deepcopy(cfg)
    values = {key: typed for key, typed in given.items() if key not in (*GROUPS, LENGTH, start.KEY)}
    for key, typed in values.items():
        _check_key(key, typed, cfg)
        _assign(key, typed, cfg)
    refuse_other_text(data, _data(cfg), values.keys())
    if begins is not None:
        start.settle(cfg, before, given.keys())
    config = from_container(written_out(_plain(cfg), encodings.options_of))
    refuse_unread(config.data)
    config = in_one_spelling(dataclasses.replace(config, data=named(config.data)))
    if LENGTH in given:
        refuse_lengths_of_problems(config)
        asked = ratios(typed_value(LENGTH, given[LENGTH]), config.training.train_length)
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=asked))
    planned(config)  # its encoding's options are checked where they are declared
    if config.start:
        start.check(config, config.start)
    task.check(config)
    trackers.refuse_missing(config.tracking)
    return config


def _choose(chosen: dict[str, str], folders: Folders) -> DictConfig:
    """A composed configuration, to be changed. A class that the user registered has no file: its signature is it."""
    files = {group: name for group, name in chosen.items() if name not in _registered(group)}
    cfg = copy.deepcopy(_composed(tuple(f"{group}={name}" for group, name in files.items()), folders))
    if (name := chosen.get("encoding")) is not None and name not in files.values():
        defaults = encodings.options_of(name).items()
        options = {key: "???" if value is inspect.Parameter.empty else value for key, value in defaults}
        cfg.encoding = OmegaConf.create({"name": name, **options})
    return cfg


def _registered(group: str) -> list[str]:
    return encodings.registered() if group == "encoding" else []


def _source(given: dict[str, str], cfg: DictConfig) -> str | None:
    """`text` if data.path is given alone, `hub` for data.dataset; None if the chosen data reads the key."""
    asked = [choice for key, choice in ASKS_FOR.items() if typed_value(key, given.get(key, "null")) is not None]
    asked += [given["data.source"]] if "data.source" in given else []
    if "data" in given or not asked or cfg.data.get("source") == asked[0]:
        return None
    if asked[0] not in choices("data"):
        raise unknown("data", asked[0], choices("data"))
    return asked[0]


def _check_choice(group: str, name: str, folders: Folders) -> None:
    known = [*choices(group, folders), *nested(group, folders), *_registered(group)]
    if name in known:
        return
    if group == "encoding" and name in encodings.names():
        raise UserError(
            f"'{name}' is installed, but there is no encoding/{name}.yaml beside ours or in its package's "
            "posbench_configs: --config-dir names its folder"
        )
    listed = "'posbench list' shows all" if group == "encoding" else f"choices: {', '.join(known)}"
    raise unknown(group, name, known, listed, did_you_mean(name, known, cutoff=0.6))


def _data(cfg: DictConfig) -> Any:
    """The section `data` as it is written, even if values are missing."""
    return OmegaConf.to_container(cfg.data) if OmegaConf.is_config(cfg.get("data")) else {}


def _check_key(key: str, typed: str, cfg: DictConfig) -> None:
    if key == "encoding.name" and typed in encodings.names():
        raise UserError(f"'{key}={typed}': an encoding is chosen with its options, encoding={typed}")
    if key in ("data.task", "data.task.name"):
        raise UserError(f"'{key}={typed}': a task is chosen with its options, data=task/copy")
    if key in (known := _keys_of(cfg)):
        return
    section, _, option = key.partition(".")
    if section != "encoding" or not option:
        raise UserError(f"unknown key '{key}'{keys.suggestion(key, dict.fromkeys([*known, *GROUPS]), WORDS)}")
    option = option.partition(".")[0]  # the encoding itself checks what is nested in it
    if option not in encodings.options_of(name := str(cfg.encoding.name)):
        encodings.reject_option(name, option)


def _keys_of(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every key of a configuration, `section` and `section.key`."""
    found: list[str] = []
    for key in map(str, cfg):
        found.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found += _keys_of(node, f"{prefix}{key}.")
    return found


def _assign(key: str, typed: str, cfg: DictConfig) -> None:
    try:
        with open_dict(cfg):
            OmegaConf.update(cfg, key, typed_value(key, typed), merge=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{key}={typed}: {_first_line(error)}") from None


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary.

    Raises:
        UserError: a value is missing, or an interpolation calls a resolver or leads nowhere.
    """
    _refuse_resolvers("", OmegaConf.to_container(cfg))
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _refuse_resolvers(key: str, value: Any) -> None:
    """Interpolations may name other keys; functions such as `${oc.env:...}` would put secrets into records."""
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_resolvers(f"{key}.{name}".lstrip("."), item)
    elif isinstance(value, list):
        for item in value:
            _refuse_resolvers(key, item)
    elif isinstance(value, str) and "${" in value and ":" in value.partition("${")[2]:
        raise UserError(f"{key} is {value!r}: only other keys may be interpolated, such as ${{training.tokens}}")
