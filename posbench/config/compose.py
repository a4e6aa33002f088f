"""From key=value words to configurations. The first mistake in them is a UserError of one line.

Hydra composes the chosen files and runs nothing: no function that a YAML file names is ever called. Typed values are
assigned here, by the types of their keys, and one read by `schema` checks the whole.
"""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import itertools
import json
import logging
import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from posbench import encodings, installed
from posbench.config import start, suggest
from posbench.config.built import build_encoding, check_task
from posbench.config.history import written_out
from posbench.config.identity import spelt, with_paths
from posbench.config.overrides import KEYS, LENGTH, WORDS, pairs, ratios, value, values
from posbench.config.schema import Config, from_container
from posbench.config.shipped import GROUPS, configs_dir, every
from posbench.errors import UserError

logger = logging.getLogger(__name__)
PRIMARY = "train"  # configs/train.yaml
_MOST_RUNS = 10_000  # of a sweep
_WHOLE = "# @package _global_"  # the first line of an experiment, which sets keys of all sections
_SOURCES = {"data.path": "text", "data.dataset": "hub"}  # a key that chooses the data which reads it
_OPEN = ("encoding.", "data.task.", "data.splits.")  # where encodings, tasks and data sets have keys of their own
Folders = tuple[Path, ...]  # where YAML files are beside ours, the first one above the others


def configs(words: list[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Every combination of the values in key=value words, each as words of its own, with its configuration.

    Args:
        config_dir: a folder of further groups and files.
    """
    axes, folders = _axes(words, config_dir)
    _refuse_mixed_options(axes)
    if (runs := math.prod(map(len, axes.values()))) > _MOST_RUNS:
        raise UserError(f"the sweep has {runs:,} runs: expected at most {_MOST_RUNS:,}, so split it")
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [([f"{key}={text}" for key, text in point.items()], _config(point, folders)) for point in points]


def single(words: list[str], config_dir: Path | None = None) -> Config:
    """The configuration of one run; arguments as `configs`."""
    axes, folders = _axes(words, config_dir)
    if several := next((key for key, every in axes.items() if len(every) > 1), None):
        hint = " (several files as one text are a folder or a glob)" if several == "data.path" else ""
        wrong = f"{several}={','.join(axes[several])} gives several values"
        raise UserError(f"{wrong}: 'posbench sweep' runs each of them{hint}")
    return _config({key: text for key, (text,) in axes.items()}, folders)


def _refuse_mixed_options(axes: dict[str, list[str]]) -> None:
    """Refuse an option beside several encodings of which only some have it, with the commands that work."""
    known = [name for name in axes.get("encoding", []) if name in encodings.names()]
    for key in (key for key in axes if key.startswith("encoding.")):
        having = [name for name in known if key.split(".")[1] in encodings.options_of(name)]
        others = [name for name in known if name not in having]
        if having and others:
            first = f"encoding={','.join(having)} {key}={','.join(axes[key])}"
            raise UserError(
                f"{key} is an option of {', '.join(having)}, not of {', '.join(others)}: 'posbench sweep {first} "
                f"study=NAME' and 'posbench sweep encoding={','.join(others)} study=NAME' make one comparison"
            )


def _axes(words: list[str], config_dir: Path | None) -> tuple[dict[str, list[str]], Folders]:
    """The values of each typed key, and where YAML files are."""
    folders = _folders(config_dir)
    begins = any(word.startswith(f"{start.KEY}=") and word != f"{start.KEY}=null" for word in words)
    given = pairs([start.spelt(word) for word in words] if begins else words)
    axes = {key: values(key, text, every(key, folders) if key in GROUPS else ()) for key, text in given.items()}
    return axes | ({start.KEY: start.runs(given[start.KEY])} if begins else {}), folders


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
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value: give it one, {error.full_key}=..."
    lines, cause = str(error).strip().splitlines() or [type(error).__name__], error.__cause__
    if isinstance(cause, OmegaConfBaseException | yaml.YAMLError):
        return f"{lines[0].rstrip('.:')}: {_first_line(cause)}"
    return lines[0]


# -- one configuration -------------------------------------------------------------------------------------------------


def _config(given: dict[str, str], folders: Folders) -> Config:
    """The checked configuration of typed values by their full keys."""
    chosen = {key: text for key, text in given.items() if key in GROUPS}
    cfg = _choose(chosen, folders)
    for key, source in _SOURCES.items():
        if "data" not in given and given.get(key, "null") != "null" and cfg.data.get("source") != source:
            cfg = _choose({**chosen, "data": source}, folders)
    begins = value(start.KEY, given.get(start.KEY, "null"))
    if begins is not None:
        cfg = start.begun(cfg, begins, given.keys())
    before = copy.deepcopy(cfg)
    for key, text in given.items():
        if key not in (*GROUPS, LENGTH, start.KEY):
            _check_key(key, text, cfg)
            try:
                OmegaConf.update(cfg, key, value(key, text), merge=True)
            except (OmegaConfBaseException, ValueError) as error:
                raise UserError(f"{key}={text}: {_first_line(error)}") from None
    _refuse_other_data(before.get("data"), cfg.get("data"), given)
    if begins is not None:
        start.settle(cfg, before, given.keys())
    config = with_paths(from_container(written_out(_plain(cfg), encodings.options_of)))
    config.data.refuse_unread()
    if LENGTH in given:
        lengths = ratios(value(LENGTH, given[LENGTH]), config)
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=lengths))
    build_encoding(config)  # its options are checked where they are declared
    if config.start:
        start.check(config, config.start)
    check_task(config)
    # A folder that happens to have the package's name has no origin.
    backend = config.tracking.backend
    if backend == "tensorboard" and getattr(importlib.util.find_spec(backend), "origin", None) is None:
        raise UserError("tracking.backend is tensorboard, whose package is not installed: pip install tensorboard")
    return config


def _choose(chosen: dict[str, str], folders: Folders) -> DictConfig:
    """A composed configuration, to be changed. Raises UserError if a file that was chosen does not exist."""
    files = dict(chosen)
    for group, name in chosen.items():
        if name in (known := every(group, folders)):
            continue
        if group != "encoding" or not (encodings.is_place(name) or name in encodings.names()):
            raise suggest.unknown_choice(group, name, known)
        del files[group]  # a class without a file: its signature is its YAML
    cfg = copy.deepcopy(_composed(tuple(f"{group}={name}" for group, name in files.items()), folders))
    OmegaConf.set_struct(cfg, False)
    if files != chosen:
        name, source = chosen["encoding"], {}
        if encodings.is_place(name):
            path = spelt(name.rpartition(".py")[0] + ".py")
            cls, digest = encodings.from_file(path + name.rpartition(".py")[2])
            name, source = cls.name, {"file": f"{path}:{cls.__name__}", "file_sha256": digest}
        defaults = encodings.options_of(name).items()
        options = {key: "???" if default is inspect.Parameter.empty else default for key, default in defaults}
        cfg.encoding = OmegaConf.create({"name": name, **options, **source})
    return cfg


def _check_key(key: str, text: str, cfg: DictConfig) -> None:
    """Refuse a key that does not exist, or that is chosen with all that belongs to it."""
    for name, choice in {"encoding.name": text, "data.task": "task/copy", "data.source": text}.items():
        if key in (name, f"{name}.name"):
            group = name.partition(".")[0]
            raise UserError(f"'{key}={text}': it is chosen with its options, {group}={choice}")
    if key.startswith("encoding.") and (option := key.split(".")[1]) not in cfg.encoding:
        name = str(cfg.encoding.name)
        if option not in encodings.options_of(name):  # the encoding itself checks what is nested in it
            encodings.reject_option(name, option)
    elif key not in KEYS and not key.startswith(_OPEN):
        raise suggest.unknown_key(key, [*KEYS, *GROUPS], WORDS)


def _refuse_other_data(chosen: Any, now: Any, given: Collection[str]) -> None:
    """Refuse another data set under the name of the chosen one, unless it is a folder with a copy."""
    dataset, here = chosen.get("dataset"), now.get("dataset")
    if dataset and here != dataset and "data.name" not in given and not Path(str(here)).expanduser().is_dir():
        known = f"'{chosen.get('name')}' is '{dataset}' or a folder with a copy of it"
        raise UserError(f"data.dataset is {here!r}, but {known}: another data set is data=hub data.dataset={here}")
    if now.get("name") == now.get("source") == "hub" and here:  # the data set's own name, which data=hub leaves open
        now["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(here)).name).strip("._-")[:128] or "hub"


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary.

    Raises:
        UserError: a value is missing, or an interpolation calls a function or leads nowhere.
    """
    # Functions such as `${oc.env:...}` would put secrets into records.
    if match := re.search(r'\$\{[^"]*:[^"]*', json.dumps(OmegaConf.to_container(cfg), default=str)):
        raise UserError(f"'{match[0]}': only other keys may be interpolated, such as ${{training.tokens}}")
    try:
        container = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None
    assert isinstance(container, dict)
    return {str(key): item for key, item in container.items()}
