"""One point of the values that are typed, as a configuration.

Hydra composes the chosen files and runs nothing: no function that a YAML file names is
ever called. Typed values are read here by the types of their keys; then `schema` checks
the whole configuration at once.
"""

import copy
import dataclasses
import functools
import inspect
import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, conf, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import encodings
from posbench.config.digest import relative_path
from posbench.config.overrides import KEYS, LENGTH, ratios, refuse_variants, value
from posbench.config.schema import NAME_BYTES, Config, in_names, validate
from posbench.config.shipped import (
    GROUPS,
    choices,
    chosen_files,
    configs_dir,
    load,
)
from posbench.errors import UserError
from posbench.options import refuse_unknown
from posbench.run import start
from posbench.typed import PLACE, Typed

# keys of data, each with the source that it chooses
_SOURCES = {"path": "text", "dataset": "hub"}


# room for all encodings; Hydra takes a tenth of a second for each
@functools.lru_cache(maxsize=128)
def hydra_config(
    overrides: tuple[str, ...], optimizer: str | None, folders: tuple[Path, ...]
) -> DictConfig:
    """Return what Hydra composes, without Hydra's own settings (a third of the time),
    with what the experiment sets for these choices. A caller's Hydra is restored.

    `optimizer` is the one that is typed.
    """
    callers_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    places = json.dumps([f"file://{folder}" for folder in folders], ensure_ascii=False)
    words = [f"hydra.searchpath={places}"]
    for default in conf.HydraConf().defaults:
        for key, choice in default.items():
            if choice:
                words.append(f"~hydra/{key}")
    try:
        with initialize_config_dir(str(configs_dir()), "posbench", version_base="1.3"):
            cfg = compose("train", [*words, *overrides], return_hydra_config=True)
    finally:
        GlobalHydra.instance().hydra = callers_hydra

    OmegaConf.set_struct(cfg, False)
    chosen = {f"{key}={name}" for key, name in cfg.pop("hydra").runtime.choices.items()}
    chosen.add(f"training.optimizer={optimizer or cfg.training.optimizer}")
    for choices_of_entry, settings in cfg.pop("tuned", {}).items():
        if chosen.issuperset(choices_of_entry.split()):
            cfg.merge_with(settings)
    return cfg


def config_of(point: dict[str, str], folders: tuple[Path, ...]) -> Config:
    """Return the configuration of a point, which holds typed values by full key. Its
    options may still be wrong: see `check`.
    """
    try:
        return _config(point, folders)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        # Hydra's own message may be empty
        reason = str(error.__cause__ or error)
        raise UserError(" ".join(reason.split())) from None


def _config(point: dict[str, str], folders: tuple[Path, ...]) -> Config:
    # in this order: files, then the settings of the run that it starts from, then what
    # is typed
    run = point.get("start", "null")
    source = change = None
    if run != "null":
        point, change = start.spelt_out(point)
    cfg, point = _chosen(point, folders)
    if run != "null":
        source = start.inherit(cfg, run, point)
    dataset_of_file = cfg.data.get("dataset")
    for key, text in point.items():
        if key in (*GROUPS, LENGTH, "start"):
            continue
        OmegaConf.update(cfg, key, value(key, text), merge=True)
    if source and change:
        cfg.encoding = start.placed(cfg, source.encoding, change, point)
    cfg.encoding = _with_class_inside(cfg.encoding, point)

    plain = _plain(cfg, point, dataset_of_file)
    config = validate(Config, plain)
    # each path is spelt in one way: one file is one run
    data_config = config.data
    if data_config.path:
        path = relative_path(data_config.path)
        data_config = dataclasses.replace(data_config, path=path)
    if os.path.exists(os.path.expanduser(data_config.tokenizer)):  # else a name
        tokenizer = relative_path(data_config.tokenizer)
        data_config = dataclasses.replace(data_config, tokenizer=tokenizer)
    outputs = os.path.expanduser(config.runtime.outputs)
    runtime = dataclasses.replace(config.runtime, outputs=outputs)
    config = dataclasses.replace(config, data=data_config, runtime=runtime)
    if LENGTH in point:  # no key: it needs the training length
        typed_ratios = tuple(ratios(value(LENGTH, point[LENGTH]), config))
        evaluation = dataclasses.replace(config.evaluation, ratios=typed_ratios)
        config = dataclasses.replace(config, evaluation=evaluation)
    file = choices("encoding").get(config.encoding.name)
    if file:  # it has every option
        _, *accepted = load(file)
        refuse_unknown(config.encoding.options, accepted, config.encoding.name)
    return config


def _plain(
    cfg: DictConfig, point: dict[str, str], dataset_of_file: str | None
) -> dict[str, Any]:
    """Return a composed configuration as plain data, with the names of its text and
    study; `dataset_of_file` is the data set that the chosen file names.

    Raises UserError for a function such as `${oc.env:...}`, which would put secrets
    into records, and for data that lack a key, as those of a user's file may.
    """
    written = json.dumps(OmegaConf.to_container(cfg), default=str)
    function = re.search(r'\$\{[^"]*:[^"]*', written)
    if function:
        raise UserError(
            f"'{function[0]}': only other keys may be interpolated, such as"
            " ${training.tokens}"
        )
    for key in OmegaConf.missing_keys(cfg):
        raise UserError(f"{key} has no default: expected {key}=VALUE")
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    for key in KEYS:
        section, _, name = key.partition(".")
        if section == "data" and name not in plain["data"]:
            raise UserError(
                f"missing key '{key}': begin your file with 'defaults: [_base]'"
            )

    data = plain["data"]
    # a file's name is not that of a typed data set; `hub` is the name of none
    is_other = data["dataset"] != dataset_of_file and "data.name" not in point
    if data["source"] == "hub" and (is_other or data["name"] == "hub"):
        data["name"] = _name_of_file(str(data["dataset"]))
    begins_anew = point.get("start", "null") == "null"
    if "data" in point and begins_anew and "study" not in point:
        # the name of a text that is typed: of a file without ending, or of the folder
        # of a glob; other data have no study of their own
        study = str(data["name"])
        if study == "text" and data["path"]:
            folder = re.split(r"[^/]*[*?\[]", str(data["path"]))[0]
            study = Path(os.path.abspath(folder)).name.partition(".")[0]
        if data["source"] in _SOURCES.values():
            plain["study"] = _name_of_file(study) or plain["study"]
    return plain


def _chosen(
    point: dict[str, str], folders: tuple[Path, ...]
) -> tuple[DictConfig, dict[str, str]]:
    """Return the composed files of a point, and the point with the data that a path or
    a data set of the hub stands for.
    """
    groups = {key: text for key, text in point.items() if key in GROUPS}
    optimizer = point.get("training.optimizer")
    if optimizer == "null":
        optimizer = "adamw"  # what null stands for
    cfg = _base_config(groups, optimizer, folders)
    if "data" in point:
        return cfg, point
    for name, source in _SOURCES.items():
        is_given = point.get(f"data.{name}", "null") != "null"
        if is_given and cfg.data.get("source") != source:
            chosen = {"data": source}
            cfg = _base_config(groups | chosen, optimizer, folders)
            return cfg, point | chosen
    return cfg, point


def _name_of_file(path: str) -> str:
    """Return the end of a path, or of a data set's name on the hub, as posbench's own
    files may be named.
    """
    # on a Mac, ü may be two characters
    whole = unicodedata.normalize("NFC", Path(path).name)
    kept = [letter if in_names(letter) else " " for letter in whole]
    name = "-".join("".join(kept).split()).encode()[:NAME_BYTES]
    return name.decode(errors="ignore").strip("._-")


def _base_config(
    groups: dict[str, str], optimizer: str | None, folders: tuple[Path, ...]
) -> DictConfig:
    """Return a composed configuration that the caller may change."""
    files = chosen_files(groups, folders)
    words = tuple(f"{group}={choice}" for group, choice in files.items())
    cfg = copy.deepcopy(hydra_config(words, optimizer, folders))
    if "encoding" in groups and "encoding" not in files:
        cfg.encoding = _signature(groups["encoding"])
    return cfg


def _signature(name: str) -> DictConfig:
    """Return the options of a class that has no YAML, by its name or by
    path/to/file.py:Class, which must be typed.
    """
    source = {}
    place = PLACE.fullmatch(name)
    if place:
        if not isinstance(name, Typed):
            raise _not_typed(name)
        from posbench.encodings.own import class_of  # it imports torch

        path = relative_path(place[1])
        cls, digest = class_of(Typed(path + name.removeprefix(place[1])))
        name = encodings.register(cls).name
        source = {"file": f"{path}:{cls.__name__}", "file_sha256": digest}
    options = {}
    for key, default in encodings.options_of(name).items():
        options[key] = default
        if default is inspect.Parameter.empty:
            options[key] = "???"  # it has to be given
    return OmegaConf.create({"name": str(name), **options, **source})


def _not_typed(place: str) -> UserError:
    """Return the error about code that a file names."""
    return UserError(
        f"a file names {place} as code: nothing in a file is executed; type it"
        f" yourself, as in encoding={place}"
    )


def _places(settings: Any) -> set[str]:
    """Return the classes in files, path/to/file.py:Class, that plain settings name."""
    written = json.dumps(settings, ensure_ascii=False)
    texts = re.findall(r'"([^"]*)"', written)
    return {text for text in texts if PLACE.fullmatch(text)}


def _with_class_inside(encoding: DictConfig, point: dict[str, str]) -> DictConfig:
    """Return an encoding's settings in which a class in a file, inside of `layered`,
    `heads` or `randomized`, stands under its name. It must be typed in `point`.
    """
    plain = OmegaConf.to_container(encoding)
    places = _places(plain)
    places.discard(encoding.get("file"))
    if not places:
        return encoding
    typed = set[str]()
    for key, text in point.items():
        if isinstance(text, Typed) and key.startswith("encoding."):
            typed |= _places(value(key, text))
    for place in sorted(places - typed):
        raise _not_typed(place)
    if len(places) > 1 or encoding.get("file"):
        raise UserError(
            f"encoding has {' and '.join(sorted(places))}: expected one class of a file"
        )
    (place,) = places
    inner = _signature(Typed(place))
    written = json.dumps(plain, ensure_ascii=False)
    inside = json.loads(written.replace(f'"{place}"', f'"{inner.name}"'))
    return OmegaConf.create(
        {**inside, "file": inner.file, "file_sha256": inner.file_sha256}
    )


def check(config: Config) -> None:
    """Refuse options that are wrong, weights or problems that do not fit, and positions
    that cannot be shifted.
    """
    refuse_variants(config.evaluation)
    encodings.refuse_values(config.encoding.name, config.encoding.options)
    encoding = config.build_encoding()
    data = config.data
    length = config.training.train_length
    if config.start:
        start.refuse_other_parameters(encoding, config.start.run)
    if encoding.max_length is not None and length > encoding.max_length:
        raise UserError(
            f"training.train_length is {length}: '{encoding.name}' ends at"
            f" {encoding.max_length}"
        )
    if data.task is None:
        return
    from posbench import tasks  # it imports NumPy

    task = tasks.build(data.task["name"], data.task)
    size = task.size(task.longest) + data.offset
    if size > length:
        raise UserError(
            f"training.train_length is {length}: expected at least {size}, for problems"
            f" of '{data.name}'"
        )
    if data.offset and "positions" in encoding.hooks:
        raise UserError(
            f"data.offset is {data.offset}: '{encoding.name}' chooses positions itself,"
            " expected 0"
        )
