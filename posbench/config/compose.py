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
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import encodings, installed
from posbench.config import start, suggest
from posbench.config.built import build_encoding, check_task
from posbench.config.identity import spelt, with_paths, written_out
from posbench.config.overrides import KEYS, LENGTH, WORDS, pairs, ratios, value, values
from posbench.config.schema import Config, validate
from posbench.config.shipped import GROUPS, configs_dir, every
from posbench.errors import UserError

logger = logging.getLogger(__name__)
_SOURCES = {"path": "text", "dataset": "hub"}  # a key of the data that chooses the source which reads it
_OPEN = ("encoding.", "data.task.", "data.splits.")  # where encodings, tasks and data sets have keys of their own
_WITH_OPTIONS = ("encoding.name", "data.source", "data.task", "data.task.name")  # chosen by groups alone
Folders = tuple[Path, ...]  # where YAML files are beside ours, the first one above the others


def configs(words: list[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return every combination of the values in key=value words, as words of its own, with its configuration.

    `config_dir` is a folder of further groups and files.
    """
    axes, folders = _axes(words, config_dir)
    _refuse_mixed_options(axes)
    points = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return [([f"{key}={text}" for key, text in point.items()], _config(point, folders)) for point in points]


def single(words: list[str], config_dir: Path | None = None) -> Config:
    """Return the configuration of one run; arguments as `configs`."""
    axes, folders = _axes(words, config_dir)
    for key, texts in axes.items():
        if len(texts) > 1:
            raise UserError(f"{key}={','.join(texts)} gives several values: 'posbench sweep' runs each of them")
    return _config({key: text for key, (text,) in axes.items()}, folders)


def _axes(words: list[str], config_dir: Path | None) -> tuple[dict[str, list[str]], Folders]:
    """Return the values of each typed key, and where YAML files are."""
    folders = _folders(config_dir)
    given = pairs(words)
    axes = {key: values(key, text, every(key, folders) if key in GROUPS else ()) for key, text in given.items()}
    return axes | ({start.KEY: start.runs(given[start.KEY])} if start.KEY in given else {}), folders


def _refuse_mixed_options(axes: dict[str, list[str]]) -> None:
    """Refuse an option beside several encodings of which only some have it, with the commands that work."""
    known = [name for name in axes.get("encoding", []) if name in encodings.names()]
    for key in (key for key in axes if key.startswith("encoding.")):
        having = [name for name in known if key.split(".")[1] in encodings.options_of(name)]
        without = ",".join(name for name in known if name not in having)
        if having and without:
            first, second = f"encoding={','.join(having)} {key}={','.join(axes[key])}", f"encoding={without}"
            commands = " and ".join(f"'posbench sweep {words} study=NAME'" for words in (first, second))
            raise UserError(f"{key} is no option of {without}: {commands} make one comparison")


def _folders(config_dir: Path | None) -> Folders:
    """Return where YAML files are beside ours: the user's own folder, and those of installed packages."""
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
    """Return what Hydra makes of the chosen files. A caller's own Hydra is there again afterwards."""
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search = ",".join(json.dumps(f"file://{folder}", ensure_ascii=False) for folder in folders)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir()), job_name="posbench"):
            cfg = compose("train", [f"hydra.searchpath=[{search}]", *chosen], return_hydra_config=True)
        OmegaConf.set_struct(cfg, False)
        choices, tuned = cfg.pop("hydra").runtime.choices, cfg.pop("tuned", {})  # what the experiment sets beside them
        cfg.merge_with(*(tuned[f"{key}={name}"] for key, name in choices.items() if f"{key}={name}" in tuned))
        return cfg
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise UserError(_line(error)) from None
    finally:
        GlobalHydra.instance().hydra = theirs


def _line(error: BaseException | None) -> str:
    """Return an error as one line: of Hydra and OmegaConf, which write several, the first of the innermost."""
    while isinstance(error, OmegaConfBaseException | HydraException) and error.__cause__:
        error = error.__cause__
    text = str(error).strip()
    return " ".join(text.split()) if isinstance(error, yaml.YAMLError) else text.partition("\n")[0]


# -- one configuration -------------------------------------------------------------------------------------------------


def _config(given: dict[str, str], folders: Folders) -> Config:
    """Return the checked configuration of typed values by their full keys."""
    groups = {key: text for key, text in given.items() if key in GROUPS}
    cfg = _choose(groups, folders)
    for name, source in _SOURCES.items():
        if "data" not in given and given.get(f"data.{name}", "null") != "null" and cfg.data.get("source") != source:
            cfg = _choose({**groups, "data": source}, folders)
    if (run := value(start.KEY, given.get(start.KEY, "null"))) is not None:
        start.begun(cfg, run, given)
    dataset = cfg.data.get("dataset")
    for key, text in given.items():
        if key in (*GROUPS, LENGTH, start.KEY):
            continue
        if key in _WITH_OPTIONS or (key not in KEYS and not key.startswith(_OPEN)):
            raise suggest.unknown_key(key, [*KEYS, *GROUPS], WORDS)
        try:
            OmegaConf.update(cfg, key, value(key, text), merge=True)
        except (OmegaConfBaseException, ValueError) as error:
            raise UserError(f"{key}={text}: {_line(error)}") from None
    plain = _plain(cfg)
    data = plain["data"]
    another = data["dataset"] != dataset and "data.name" not in given  # than that of the chosen file
    if data["source"] == "hub" and (another or data["name"] == "hub"):
        data["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(data["dataset"])).name).strip("._-")[:128]
    for name, source in _SOURCES.items():
        if data[name] and data["source"] != source:
            wrong = f"data.{name} is {data[name]!r}, which data={data['source']} does not read"
            raise UserError(f"{wrong}: data={source} does")
    config = validate(Config, with_paths(written_out(plain)))
    if LENGTH in given:
        lengths = tuple(ratios(value(LENGTH, given[LENGTH]), config))
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=lengths))
    build_encoding(config)  # which checks its options
    if config.start:
        start.check(config, config.start)
    check_task(config)
    return config


def _choose(groups: dict[str, str], folders: Folders) -> DictConfig:
    """Return a composed configuration, to be changed. Raises UserError if a file that was chosen does not exist."""
    files, signature = dict(groups), None
    name = groups.get("encoding", "")
    if name not in every("encoding", folders) and (encodings.PLACE.fullmatch(name) or name in encodings.names()):
        signature = _signature(files.pop("encoding"))
    for group, choice in files.items():
        if choice not in (known := every(group, folders)):
            raise suggest.unknown_choice(group, choice, known)
    cfg = copy.deepcopy(_composed(tuple(f"{group}={choice}" for group, choice in files.items()), folders))
    if signature:
        cfg.encoding = signature
    return cfg


def _signature(name: str) -> DictConfig:
    """Return the options of a class that has no YAML, by its name or path/to/file.py:Class."""
    source = {}
    if match := encodings.PLACE.fullmatch(name):
        from posbench.encodings.own import from_file  # torch comes with it

        path = spelt(match[1])
        cls, digest = from_file(path + name.removeprefix(match[1]))
        name, source = encodings.register(cls).name, {"file": f"{path}:{cls.__name__}", "file_sha256": digest}
    options = encodings.options_of(name).items()
    plain = {key: "???" if default is inspect.Parameter.empty else default for key, default in options}
    return OmegaConf.create({"name": name, **plain, **source})


def _plain(cfg: DictConfig) -> dict[str, Any]:
    """Return the resolved configuration; UserError for a missing value or an interpolation that is refused."""
    # Functions such as `${oc.env:...}` would put secrets into records.
    if match := re.search(r'\$\{[^"]*:[^"]*', json.dumps(OmegaConf.to_container(cfg), default=str)):
        raise UserError(f"'{match[0]}': only other keys may be interpolated, such as ${{training.tokens}}")
    try:
        return dict(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_line(error)}") from None
