"""From key=value words to configurations. The first mistake in them is a UserError of one line.

Hydra composes the chosen files and runs nothing: no function that a YAML file names is ever called. Typed values are
assigned here, by the types of their keys, and one read by `schema` checks the whole.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import json
import logging
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
from posbench.config.identity import spelt, with_paths, written_out
from posbench.config.overrides import KEYS, LENGTH, WORDS, pairs, ratios, value, values
from posbench.config.schema import Config, from_container
from posbench.config.shipped import GROUPS, configs_dir, every
from posbench.errors import UserError

logger = logging.getLogger(__name__)
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
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [([f"{key}={text}" for key, text in point.items()], _config(point, folders)) for point in points]


def single(words: list[str], config_dir: Path | None = None) -> Config:
    """The configuration of one run; arguments as `configs`."""
    axes, folders = _axes(words, config_dir)
    for key, texts in axes.items():
        if len(texts) > 1:
            hint = " (several files as one text are a folder or a glob)" if key == "data.path" else ""
            wrong = f"{key}={','.join(texts)} gives several values"
            raise UserError(f"{wrong}: 'posbench sweep' runs each of them{hint}")
    return _config({key: text for key, (text,) in axes.items()}, folders)


def _axes(words: list[str], config_dir: Path | None) -> tuple[dict[str, list[str]], Folders]:
    """The values of each typed key, and where YAML files are."""
    folders = _folders(config_dir)
    begins = any(word.startswith(f"{start.KEY}=") and word != f"{start.KEY}=null" for word in words)
    given = pairs([start.spelt(word) for word in words] if begins else words)
    axes = {key: values(key, text, every(key, folders) if key in GROUPS else ()) for key, text in given.items()}
    return axes | ({start.KEY: start.runs(given[start.KEY])} if begins else {}), folders


def _refuse_mixed_options(axes: dict[str, list[str]]) -> None:
    """Refuse an option beside several encodings of which only some have it, with the commands that work."""
    known = [name for name in axes.get("encoding", []) if name in encodings.names()]
    for key in (key for key in axes if key.startswith("encoding.")):
        having = [name for name in known if key.split(".")[1] in encodings.options_of(name)]
        without = ",".join(name for name in known if name not in having)
        if having and without:
            first = f"encoding={','.join(having)} {key}={','.join(axes[key])}"
            raise UserError(
                f"{key} is an option of {', '.join(having)}, not of {without}: 'posbench sweep {first} study=NAME' "
                f"and 'posbench sweep encoding={without} study=NAME' make one comparison"
            )


# -- files -------------------------------------------------------------------------------------------------------------


def _folders(config_dir: Path | None) -> Folders:
    """Where YAML files are beside ours: the user's own folder, and those of installed packages."""
    if config_dir:
        _composed.cache_clear()  # its files may have changed
        if not config_dir.is_dir():
            raise UserError(f"no folder '{config_dir}' to read configurations from")
        for path in sorted(config_dir.rglob("*.yaml")):
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.parent.name == "experiment" and "# @package _global_" not in text:
                raise UserError(f"{path} lacks the line '# @package _global_', without which it sets nothing")
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
            return compose("train", overrides=[*([f"hydra.searchpath=[{search}]"] if folders else []), *chosen])
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
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    inner = error.__cause__
    return f"{line.rstrip('.:')}: {_first_line(inner)}" if isinstance(inner, OmegaConfBaseException) else line


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
        start.begun(cfg, begins, given)
    chosen_data = copy.copy(cfg.get("data"))
    for key, text in given.items():
        if key not in (*GROUPS, LENGTH, start.KEY):
            _check_key(key, text, cfg)
            try:
                OmegaConf.update(cfg, key, value(key, text), merge=True)
            except (OmegaConfBaseException, ValueError) as error:
                raise UserError(f"{key}={text}: {_first_line(error)}") from None
    _name_data(chosen_data, cfg.get("data"), given)
    config: Config = with_paths(from_container(written_out(_plain(cfg))))
    config.data.refuse_unread()
    if LENGTH in given:
        lengths = ratios(value(LENGTH, given[LENGTH]), config)
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=lengths))
    build_encoding(config)  # its options are checked where they are declared
    if config.start:
        start.check(config, config.start)
    check_task(config)
    return config


def _choose(chosen: dict[str, str], folders: Folders) -> DictConfig:
    """A composed configuration, to be changed. Raises UserError if a file that was chosen does not exist."""
    name = chosen.get("encoding", "")
    own = name not in every("encoding", folders) and (encodings.PLACE.fullmatch(name) or name in encodings.names())
    files = {group: choice for group, choice in chosen.items() if group != "encoding" or not own}
    for group, choice in files.items():
        if choice not in (known := every(group, folders)):
            raise suggest.unknown_choice(group, choice, known)
    cfg = copy.deepcopy(_composed(tuple(f"{group}={choice}" for group, choice in files.items()), folders))
    OmegaConf.set_struct(cfg, False)
    if own:  # a class without a file: its signature is its YAML
        source = {}
        if encodings.PLACE.fullmatch(name):
            from posbench.encodings.own import from_file  # torch comes with it

            path, _, cls_name = name.rpartition(".py")
            path = spelt(f"{path}.py")
            cls, digest = from_file(path + cls_name)
            name, source = encodings.register(cls).name, {"file": f"{path}:{cls.__name__}", "file_sha256": digest}
        options = encodings.options_of(name).items()
        plain = {key: "???" if default is inspect.Parameter.empty else default for key, default in options}
        cfg.encoding = OmegaConf.create({"name": name, **plain, **source})
    return cfg


def _check_key(key: str, text: str, cfg: DictConfig) -> None:
    """Refuse a key that does not exist, or that is chosen with all that belongs to it."""
    for name, choice in {"encoding.name": text, "data.task": "task/copy", "data.source": text}.items():
        if key in (name, f"{name}.name"):
            raise UserError(f"'{key}={text}': it is chosen with its options, {name.partition('.')[0]}={choice}")
    if key.startswith("encoding.") and (option := key.split(".")[1]) not in cfg.encoding:
        name = str(cfg.encoding.name)
        if option not in encodings.options_of(name):  # the encoding itself checks what is nested in it
            encodings.reject_option(name, option)
    elif key not in KEYS and not key.startswith(_OPEN):
        raise suggest.unknown_key(key, [*KEYS, *GROUPS], WORDS)


def _name_data(chosen: Any, now: Any, given: Collection[str]) -> None:
    """Refuse another data set under the name of the chosen one; give a data set of the hub its own name."""
    dataset, here = chosen.get("dataset"), str(now.get("dataset"))
    if dataset and here != dataset and "data.name" not in given and not Path(here).expanduser().is_dir():
        known = f"'{chosen.get('name')}' is '{dataset}' or a folder with a copy of it"
        raise UserError(f"data.dataset is {here!r}, but {known}: another data set is data=hub data.dataset={here}")
    if now.get("name") == now.get("source") == "hub" and now.get("dataset"):
        now["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(here).name).strip("._-")[:128] or "hub"


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary; UserError for a missing value or an interpolation that is refused."""
    # Functions such as `${oc.env:...}` would put secrets into records.
    if match := re.search(r'\$\{[^"]*:[^"]*', json.dumps(OmegaConf.to_container(cfg), default=str)):
        raise UserError(f"'{match[0]}': only other keys may be interpolated, such as ${{training.tokens}}")
    try:
        return dict(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None
