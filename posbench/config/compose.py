"""From overrides to configurations. The first mistake in them is a UserError of one line.

Hydra suggests no nearest choice, accepts `+typo=1`, and would call functions that a YAML file names. So overrides are
parsed and composed here, each value of a sweep separately. A single run is composed only here; Hydra itself runs a
multirun, a launcher and `--cfg` after this check.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from posbench import encodings, installed
from posbench.config import keys, size, start, task, trackers
from posbench.config.data_only import refuse_code, refuse_elsewhere, refuse_other_hydra, refuse_resolvers
from posbench.config.history import written_out
from posbench.config.identity import in_one_spelling, run_folder
from posbench.config.overrides import (
    FILES,
    LENGTH,
    WORDS,
    ratios,
    refuse_both,
    refuse_lengths_of_problems,
    refuse_long_numbers,
    refuse_twice,
    translated,
)
from posbench.config.schema import Config, from_container
from posbench.config.shape import planned
from posbench.config.shipped import configs_dir
from posbench.config.sources import ASKS_FOR, named, refuse_other_text, refuse_unread
from posbench.config.users_files import refuse_all_but_settings
from posbench.errors import UserError, did_you_mean, unknown

PRIMARY = "train"  # configs/train.yaml
_MOST_RUNS = 10_000  # of a sweep
_MOST_VALUES = 1000  # of one sweep list; what is beyond is checked when its turn comes
_OWN_FOLDER = "${runtime.outputs}/${study}/${posbench.run_id:}"  # hydra.run.dir of configs/train.yaml
# Plugins of Hydra's, and the package that brings each.
_PLUGINS = {
    "optuna": "hydra-optuna-sweeper",
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
# From choices of groups, and of keys of Hydra's own, to what they give, Hydra's part included.
Compose = Callable[[tuple[str, ...]], DictConfig]


def single(overrides: list[str], config_dir: Path | None = None) -> tuple[Config, Path | None]:
    """The configuration of one run and its folder, composed once.

    Returns:
        The folder is None if Hydra itself must start the run, because an override uses more of Hydra than the
        folder's name (hydra.job.chdir, hydra.job.env_set, hydra.output_subdir, hydra.verbose, hydra.mode, a
        hydra/job_logging, or ${hydra:...} in hydra.run.dir).
    """
    refuse_code(overrides)
    _refuse_of_a_multirun(overrides)
    with _hydra() as loader:
        search, own = _parted(_parse_all(overrides, loader), config_dir)
        composed = _composer(search)
        (combination,) = _combinations([*own, *_source(own, composed, search, loader)], multirun=False)
        cfg, lengths = _assigned(combination, composed, search, loader)
        config = _checked(cfg, lengths)
        return config, _folder(cfg, config)


def check(overrides: list[str], config_dir: Path | None = None, multirun: bool = False) -> list[Config]:
    """Check overrides and compose them.

    Args:
        config_dir: a folder of further groups and files, as Hydra's --config-dir.
        multirun: comma lists are sweeps; each value is tried once, with the first values of the other sweeps.

    Returns:
        The configurations tried, the first values of all sweeps first.
    """
    refuse_code(overrides)
    with _hydra() as loader:
        search, own = _parted(_parse_all(overrides, loader), config_dir)
        composed = _composer(search)
        own += _source(own, composed, search, loader)
        return [_checked(*_assigned(each, composed, search, loader)) for each in _combinations(own, multirun)]


def combinations(sets: list[list[str]], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Every combination of the values in each set of overrides, with its configuration: the jobs of a sweep."""
    found, runs = [], 0
    with _hydra() as loader:
        search, _ = _parted([], config_dir)
        composed = _composer(search)
        for overrides in sets:
            refuse_code(overrides)
            own = _parse_all(overrides, loader)
            own += _source(own, composed, search, loader)
            choices = [_values(override, multirun=True, countable=True) for override in own]
            _refuse_options_of_some(choices)
            runs += math.prod(map(len, choices))
            if runs > _MOST_RUNS:
                raise UserError(f"the sweep has {runs:,} runs: expected at most {_MOST_RUNS:,}, so split it")
            for combination in map(list, itertools.product(*choices)):
                found.append((combination, _checked(*_assigned(combination, composed, search, loader))))
    return found


def for_hydra(overrides: list[str], configs: list[Config], config_dir: Path | None = None) -> list[str]:
    """Overrides as Hydra's own main reads them, with those that they imply (`data=text` for data.path).

    Args:
        configs: what `check` made of them.

    Raises:
        UserError: a length in tokens beside several training lengths, or a run to begin from, which no override of
            Hydra's can say.
    """
    if any(config.start for config in configs):
        raise UserError("start is not for Hydra, neither with -m nor with --cfg: posbench sweep runs many")
    found = []
    for text in map(translated, overrides):
        key, _, typed = text.partition("=")
        if key == LENGTH:
            asked = {config.evaluation.ratios for config in configs}
            if len(asked) > 1:
                raise UserError(f"length={typed.strip('[]')} beside several training lengths: give ratio=1,2,4 instead")
            found.append(f"evaluation.ratios={list(asked.pop())}")
        else:
            new_to_hydra = re.match(r"encoding\.\w+(\.|=\s*\{)", text)  # a key below an option, or a mapping
            found.append(f"++{text}" if new_to_hydra else text)
    with _hydra() as loader:
        search, own = _parted([_parse(text, loader) for text in overrides], config_dir)
        found = [text for text in found if not text.lstrip("+").startswith("hydra.searchpath=")]
        found += _searchpath(search[1:] if config_dir else search)  # Hydra is given the folder of --config-dir, too
        return [*found, *(str(each.input_line) for each in _source(own, _composer(search), search, loader))]


def launcher_config(overrides: list[str]) -> DictConfig:
    """What Hydra makes of `hydra/launcher=...` and `hydra.launcher.*`. Raises UserError for unknown ones."""
    refuse_code(overrides)
    with _hydra() as loader:
        parsed = _parse_all(overrides, loader)
        chosen = [override for override in parsed if override.key_or_group == "hydra/launcher"]
        for override in chosen:
            _check_group(override, _options("hydra/launcher", (), loader))
        default = _compose([str(override.input_line) for override in chosen])
        for override in parsed:
            setting = override.key_or_group.removeprefix("hydra.launcher.").partition(".")[0]
            if override not in chosen and setting not in default.hydra.launcher:
                near = did_you_mean(setting, map(str, default.hydra.launcher))
                raise UserError(f"'{chosen[0].value()}' has no setting '{setting}'{near}")
        launcher: DictConfig = _compose(overrides).hydra.launcher
        return launcher


def config_of(cfg: DictConfig, study: Path | None = None) -> Config:
    """The validated configuration of a composed one.

    Args:
        study: the folder in which its run is looked for; its own study's unless given.

    Raises:
        UserError: a value is missing or does not fit, or a key is given that the chosen source of text does not read.
    """
    config = from_container(written_out(plain(cfg), encodings.options_of))
    refuse_unread(config.data)
    return in_one_spelling(dataclasses.replace(config, data=named(config.data)), study)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The resolved configuration as a dictionary, without Hydra's own part.

    Raises:
        UserError: a value is missing, or an interpolation calls a resolver or leads nowhere.
    """
    own = {str(key): cfg._get_node(key) for key in cfg if key != "hydra"}
    for key, node in own.items():
        refuse_resolvers(str(key), OmegaConf.to_container(node) if OmegaConf.is_config(node) else node)
    try:
        return {
            key: OmegaConf.to_container(cfg[key], resolve=True, throw_on_missing=True)
            if OmegaConf.is_config(cfg[key])
            else cfg[key]
            for key in own
        }
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from None


def _refuse_of_a_multirun(overrides: list[str]) -> None:
    """Refuse a launcher or a sweeper, and settings of one, for a single run, which would ignore them."""
    for text in overrides:
        of = next((kind for kind in ("launcher", "sweeper") if text.startswith((f"hydra/{kind}", f"hydra.{kind}"))), "")
        if of:
            raise UserError(f"'{text}': a {of} is for many runs, this is one: add -m, or use posbench sweep")


# -- what Hydra would do -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hydra() -> Iterator[ConfigLoader]:
    """Hydra's reader of our configurations; restores a caller's own Hydra setup afterwards."""
    theirs = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(configs_dir()), job_name="posbench"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = theirs
        _options.cache_clear()
        _parse.cache_clear()


def _parse_all(overrides: list[str], loader: ConfigLoader) -> list[Override]:
    if any(text.startswith(f"{start.KEY}=") and text != f"{start.KEY}=null" for text in overrides):
        overrides = list(map(start.spelt, overrides))
    parsed = [_parse(text, loader) for text in overrides]
    refuse_twice(override.get_key_element().lstrip("+~") for override in parsed)
    return parsed


@functools.cache  # cleared when Hydra's reader is left; a sweep says the same of many runs
def _parse(text: str, loader: ConfigLoader) -> Override:
    refuse_long_numbers(text)
    key, _, typed = text.partition("=")
    keys.refuse_range(key, typed)
    try:
        return OverridesParser.create(config_loader=loader).parse_overrides([translated(text)])[0]
    except HydraException:
        if key in FILES and typed:
            raise UserError(f"{key}: there is no file, folder or glob '{typed}'") from None
        raise UserError(f"cannot read '{text}'{keys.word(text)}") from None


def _composer(search: tuple[str, ...]) -> Compose:
    """A function that composes each choice of groups once, and gives a copy at each call."""

    @functools.cache
    def composed(chosen: tuple[str, ...]) -> DictConfig:
        if not search and not any(each.lstrip("+~").startswith("hydra") for each in chosen):
            return _of_ours(chosen, _stamps())
        cfg = _compose([*_searchpath(search), *chosen])
        if search:
            refuse_other_hydra(cfg, without(tuple(each for each in chosen if each.lstrip("+~").startswith("hydra"))))
            refuse_elsewhere(cfg)
        return cfg

    @functools.cache
    def without(typed: tuple[str, ...]) -> DictConfig:
        return _compose([*_searchpath([source for source in search if not _is_folder(source)]), *typed])

    return lambda chosen: copy.deepcopy(composed(chosen))


@functools.lru_cache(maxsize=128)  # all encodings
def _of_ours(chosen: tuple[str, ...], stamps: tuple[tuple[str, int], ...]) -> DictConfig:
    """Compose our own files, cached while they have these `stamps`: Hydra takes a tenth of a second."""
    return _compose([*chosen])


def _stamps() -> tuple[tuple[str, int], ...]:
    """Each of our own files with the time of its last change, in ns."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(configs_dir()) for name in names)
    return tuple((path, os.lstat(path).st_mtime_ns) for path in found if path.endswith(".yaml"))


def _searchpath(sources: Sequence[str]) -> list[str]:
    """Where further YAML files are, as an override for Hydra."""
    quoted = ",".join(json.dumps(source, ensure_ascii=False) for source in sources)
    return [f"hydra.searchpath=[{quoted}]"] if sources else []


def _is_folder(source: str) -> bool:
    """Whether a source is a folder, not an installed Python package, which is trusted."""
    return not source.startswith("pkg://")


def _compose(overrides: list[str]) -> DictConfig:
    try:
        return compose(PRIMARY, overrides=overrides, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise UserError(_first_line(error)) from None


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


def _parted(parsed: list[Override], config_dir: Path | None) -> tuple[tuple[str, ...], list[Override]]:
    """Where further YAML files are, and all other overrides. Checks those files (`users_files`)."""
    given = next((o.value() for o in parsed if o.key_or_group == "hydra.searchpath"), [])
    if not isinstance(given, list):
        raise UserError(f"hydra.searchpath is {given!r}: expected a list of folders, [file:///a/folder]")
    own = [config_dir.absolute()] if config_dir else []
    brought = installed.config_folders()
    sources = (*(f"file://{folder}" for folder in own), *map(str, given), *(f"file://{path}" for path in brought))
    for source in sources:
        if _is_folder(source):
            refuse_all_but_settings(Path(source.removeprefix("file://")))
    others = [override for override in parsed if override.key_or_group != "hydra.searchpath"]
    return sources, others


def _folder(cfg: DictConfig, config: Config) -> Path | None:
    """The run folder, or None if Hydra must start the run."""
    hydra = cfg.hydra
    if hydra.job.chdir or hydra.job.env_set or hydra.output_subdir is not None or hydra.verbose:
        return None
    if hydra.mode not in (None, RunMode.RUN) or hydra.job_logging is None or hydra.job_logging.root is not None:
        return None
    asked = str(hydra.run._get_node("dir")._value())
    if "${hydra:" in asked:  # what only Hydra knows
        return None
    try:
        return run_folder(config) if asked == _OWN_FOLDER else Path(hydra.run.dir)
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.run.dir={asked}: {_first_line(error)}") from None


# -- sweeps ------------------------------------------------------------------------------------------------------------


def _combinations(parsed: list[Override], multirun: bool) -> list[list[str]]:
    """Override lists to try: the first values of all sweeps, then every other value of each sweep."""
    choices = [_values(override, multirun) for override in parsed]
    _refuse_options_of_some(choices)
    first = [values[0] for values in choices]
    others = [
        [*first[:place], value, *first[place + 1 :]] for place, values in enumerate(choices) for value in values[1:]
    ]
    return [first, *others]


def _refuse_options_of_some(choices: list[list[str]]) -> None:
    """Refuse an encoding's option in a sweep over several encodings, if some of them have it and others do not."""
    listed = next((values for values in choices if values[0].startswith("encoding=")), [])
    names = [name for value in listed if (name := value.removeprefix("encoding=")) in encodings.names()]
    for first, *_ in choices:
        section, _, path = first.partition("=")[0].lstrip("+").partition(".")
        option = path.partition(".")[0]
        if section != "encoding" or not option or len(names) < 2:
            continue
        has = {name: option in encodings.options_of(name) for name in names}
        if any(has.values()) and not all(has.values()):
            having, lacking = (next(name for name in names if has[name] is found) for found in (True, False))
            raise UserError(
                f"'{lacking}' has no option '{option}', '{having}' has: sweep encoding={having} with it by itself "
                "(of the same study, one report has both)"
            )


def _values(override: Override, multirun: bool, countable: bool = False) -> list[str]:
    """The overrides that one sweep expands to. An interval gives its start, or is refused if `countable`."""
    line, key = str(override.input_line), override.get_key_element()
    if not override.is_sweep_override():
        if key == start.KEY and multirun and isinstance(pattern := override.value(), str):
            return [f"{key}={folder}" for folder in start.runs(pattern)]
        return [line]
    if not multirun:
        value = line.partition("=")[2]
        as_list = f" ({key}=[{value}] is one list)" if "." in key else ""
        as_list = " (several files as one text are a folder or a glob)" if key == "data.path" else as_list
        raise UserError(f"{line} gives several values: add -m to run each of them{as_list}")
    if override.is_interval_sweep():
        if countable:
            raise UserError(f"{line} has no end: give a list, {key}=1,2,3")
        return [f"{key}={override.value().start}"]  # type: ignore[union-attr]
    values = [f"{key}={value}" for value in itertools.islice(override.sweep_string_iterator(), _MOST_VALUES + 1)]
    if countable and len(values) > _MOST_VALUES:
        raise UserError(f"{line} gives more than {_MOST_VALUES} values")
    if not values:
        raise UserError(f"{line} matches nothing")
    return values


# -- one configuration -------------------------------------------------------------------------------------------------


def _source(own: list[Override], composed: Compose, search: tuple[str, ...], loader: ConfigLoader) -> list[Override]:
    """`data=text` if data.path is given alone, `data=hub` for data.dataset; empty if the chosen data reads the key."""
    values = {override.key_or_group: override.value() for override in own}
    asked = [choice for key, choice in ASKS_FOR.items() if values.get(key) is not None]
    asked += [str(values["data.source"])] if "data.source" in values else []
    if "data" in values or not asked:
        return []
    groups = _options("", search, loader, ObjectType.GROUP)
    first, *_ = _combinations([override for override in own if _is_group(override, groups)], multirun=True)
    cfg, _ = _assigned(first, composed, search, loader)
    return [] if cfg.data.get("source") == asked[0] else [_parse(f"data={asked[0]}", loader)]


def _assigned(
    combination: list[str], composed: Compose, search: tuple[str, ...], loader: ConfigLoader
) -> tuple[DictConfig, list[Any]]:
    """What a list of overrides gives: its groups composed, its values assigned; and the lengths in tokens, if given."""
    parsed = [_parse(text, loader) for text in combination]
    groups = _options("", search, loader, ObjectType.GROUP)
    chosen, values = [], []
    for override in parsed:
        if _is_group(override, groups):
            chosen.append(str(override.input_line))
            _check_group(override, _options(override.key_or_group, search, loader))
        elif override.key_or_group.startswith("hydra."):
            chosen.append(str(override.input_line))
        else:
            values.append(override)
    cfg = composed(tuple(chosen))
    _refuse_without_class(cfg)
    typed = {override.key_or_group for override in parsed}
    begins = next((value for o in values if o.key_or_group == start.KEY and (value := o.value()) is not None), None)
    if begins is not None:
        cfg = start.begun(cfg, begins, typed)
    data = _data(cfg)
    before = copy.deepcopy(cfg) if begins is not None else cfg
    cfg.hydra.runtime.cwd = os.getcwd()  # not where it was composed first
    refuse_both(override.key_or_group for override in values)
    lengths: list[Any] = []
    for override in values:
        if override.key_or_group == LENGTH:
            lengths = override.value()  # type: ignore[assignment]
        elif override.key_or_group != start.KEY or begins is None:
            _check_key(override, cfg, groups)
            _assign(override, cfg)
    refuse_other_text(data, _data(cfg), {override.key_or_group for override in values})
    if begins is not None:
        start.settle(cfg, before, typed)
    return cfg, lengths


def _refuse_without_class(cfg: DictConfig) -> None:
    """Refuse an encoding's YAML whose name is that of no class: YAML gives options, and Python the class."""
    section = cfg.get("encoding")
    written = OmegaConf.to_container(section) if isinstance(section, DictConfig) else None
    if not isinstance(written, dict):
        return  # no encoding at all: refused where values are checked
    choice, name = str(cfg.hydra.runtime.choices.encoding), written.get("name")
    if name in (None, "???"):
        raise UserError(f"encoding={choice} has no name in its YAML: expected that of its class, such as 'name: rope'")
    if isinstance(name, str) and "${" not in name and name not in encodings.names():
        near = did_you_mean(name, encodings.names()) if name != choice else ""
        raise UserError(
            f"encoding={choice} has the name '{name}' in its YAML, but there is no such class{near or ':'} expected "
            f"posbench/encodings/{name}.py, or an installed package with the entry point '{name}' in "
            f"{installed.ENCODINGS}"
        )


def _is_group(override: Override, groups: list[str]) -> bool:
    return "/" in override.key_or_group or override.key_or_group in groups


def _data(cfg: DictConfig) -> Any:
    """The section `data` as it is written, even if values are missing."""
    return OmegaConf.to_container(cfg.data) if OmegaConf.is_config(cfg.get("data")) else {}


def _checked(cfg: DictConfig, lengths: list[Any]) -> Config:
    config = config_of(cfg)
    if lengths:
        refuse_lengths_of_problems(config)
        asked = ratios(lengths, config.training.train_length)
        config = dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, ratios=asked))
    if size.fits(config):  # else the run is refused where it runs
        planned(config)  # its encoding's options are checked where they are declared
        if config.start:
            start.check(config, config.start)
    task.check(config)
    trackers.refuse_missing(config.tracking)
    return config


@functools.cache  # cleared when Hydra's reader is left
def _options(
    group: str, search: tuple[str, ...], loader: ConfigLoader, kind: ObjectType = ObjectType.CONFIG
) -> list[str]:
    def inside(group: str, kind: ObjectType) -> list[str]:
        if search:
            return loader.get_group_options(group, kind, overrides=_searchpath(search))
        # The same, without the copy of all it knows that the loader makes first.
        return [name for source in loader.get_sources() if source.is_group(group) for name in source.list(group, kind)]

    found = inside(group, kind)
    if group and kind is ObjectType.CONFIG:  # encoding=layered/gemma3
        folders = inside(group, ObjectType.GROUP)
        found += [f"{folder}/{name}" for folder in folders for name in inside(f"{group}/{folder}", kind)]
    hidden = {"hydra", "tuned", "sweep"} if not group else {name for name in found if name.startswith("_")}
    return sorted(set(found) - hidden)


def _check_group(override: Override, options: list[str]) -> None:
    group, value = override.key_or_group, override.value()
    if override.package or not options:
        return  # for Hydra to judge
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise UserError(f"'{override.input_line}': a group is chosen without a sign, {group}={options[0]}")
    if group == "encoding" and value not in options and value in encodings.names():
        raise UserError(
            f"'{value}' is installed, but there is no encoding/{value}.yaml beside ours or in its package's "
            "posbench_configs: --config-dir names its folder"
        )
    if value not in options:
        if group.startswith("hydra/") and value in _PLUGINS:
            raise UserError(f"{group}={value} is not installed: pip install {_PLUGINS[str(value)]}")
        near = keys.choice(group, str(value), options)
        listed = "'posbench list' shows all" if group == "encoding" else f"choices: {', '.join(options)}"
        raise unknown(group, override.get_value_element_as_str(), options, listed, near)


def _check_key(override: Override, cfg: DictConfig, groups: list[str]) -> None:
    key, line = override.key_or_group, override.input_line
    if key == "encoding.name" and override.value() in encodings.names():
        raise UserError(f"'{line}': an encoding is chosen with its options, encoding={override.value()}")
    if key in ("data.task", "data.task.name"):
        raise UserError(f"'{line}': a task is chosen with its options, data=task/copy")
    known = key in _keys_of(cfg)
    if override.is_delete():
        raise UserError(f"'{line}' removes a key: give it a value instead, {key}=...")
    added = override.is_add() or override.is_force_add()
    if known and added:
        raise UserError(f"'{line}': the key exists, write it without a sign, {str(line).lstrip('+')}")
    if known:
        return
    section, _, option = key.partition(".")
    if section != "encoding" or not option:
        raise UserError(f"unknown key '{key}'{keys.suggestion(key, dict.fromkeys([*_keys_of(cfg), *groups]), WORDS)}")
    _check_option(str(cfg.encoding.name), option, added)


def _keys_of(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every key of a configuration, `section` and `section.key`, without Hydra's own."""
    found: list[str] = []
    for key in (str(key) for key in cfg if prefix or key != "hydra"):
        found.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_missing():
            found += _keys_of(node, f"{prefix}{key}.")
    return found


def _check_option(name: str, path: str, added: bool) -> None:
    """Check an option that the encoding's YAML does not list against the encoding's constructor.

    The encoding itself checks what is nested in an option (`inner_options.base`).
    """
    option, _, below = path.partition(".")
    if option not in encodings.options_of(name):
        encodings.reject_option(name, option)
    if not added and not below:
        raise UserError(f"'{name}' takes {option}, but its YAML does not list it: write +encoding.{option}=...")


def _assign(override: Override, cfg: DictConfig) -> None:
    try:
        with open_dict(cfg):
            OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise UserError(f"{override.input_line}: {_first_line(error)}") from None
