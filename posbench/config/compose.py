"""Turn key=value words into configurations. The first mistake in them raises a
UserError of one line.

Hydra composes the chosen files and runs nothing: no function that a YAML file names is
ever called. Typed values are read here by the types of their keys; then `schema` checks
the whole configuration at once.
"""

import copy
import dataclasses
import functools
import glob
import inspect
import itertools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml
from hydra import compose, conf, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from posbench import encodings, tasks
from posbench.config.identity import (
    MOVED_ASIDE,
    relative_path,
    with_paths,
)
from posbench.config.overrides import (
    KEYS,
    LENGTH,
    OF_A_SWEEP,
    WORDS,
    by_key,
    ratios,
    unknown_key,
    value,
    values,
)
from posbench.config.schema import (
    SAVED,
    Config,
    StartConfig,
    load_saved,
    to_container,
    validate,
)
from posbench.config.shipped import EVERY, GROUPS, choice_file, choices, configs_dir
from posbench.errors import UserError, did_you_mean

# keys of data, each with the source that it chooses
_SOURCES = {"path": "text", "dataset": "hub"}
# where encodings, tasks and data sets have keys of their own
_OPEN = ("encoding.", "data.task.", "data.splits.")
# only a group sets these
_WITH_OPTIONS = ("encoding.name", "data.source", "data.task", "data.task.name")
STUDY = "extend"  # the study of runs that begin from another run
# times that run's peak rate: the best of 1, 1/2, 1/6 and 1/20 for a tenth of the tokens
# (docs/longer.md)
RATE = 1 / 6


def single(words: list[str], config_dir: Path | None = None) -> Config:
    """Return the configuration of one run. The arguments are those of `configs`."""
    return configs(words, config_dir, several=False)[0][1]


def configs(
    words: list[str], config_dir: Path | None = None, several: bool = True
) -> list[tuple[list[str], Config]]:
    """Return the words and the configuration of each combination of values;
    `config_dir` has further YAML files.
    """
    folders = (config_dir.absolute(),) if config_dir else ()
    if config_dir:
        _hydra_config.cache_clear()  # its files may have changed
    axes = {}
    for key, text in by_key(words).items():
        if key == "start":
            axes[key] = _run_folders(text)
        elif key == "encoding" and text == "all":
            axes[key] = list(choices(key, folders))
        else:
            axes[key] = values(key, text)
        if len(axes[key]) > 1 and not several:
            raise UserError(
                f"{key}={text} gives several values: 'posbench sweep' runs each of them"
            )
    points = [
        dict(zip(axes, point, strict=True))
        for point in itertools.product(*axes.values())
    ]
    try:
        return [
            ([f"{key}={text}" for key, text in point.items()], _config(point, folders))
            for point in points
        ]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        cause: BaseException = error  # the innermost error names the mistake
        while (
            isinstance(cause, HydraException | OmegaConfBaseException)
            and cause.__cause__
        ):
            cause = cause.__cause__
        raise UserError(" ".join(str(cause).split())) from None


# room for all encodings; Hydra takes a tenth of a second for each
@functools.lru_cache(maxsize=128)
def _hydra_config(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> DictConfig:
    """Return what Hydra composes, without Hydra's own settings (a third of the time). A
    caller's Hydra is restored.
    """
    callers_hydra = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search = ",".join(
        json.dumps(f"file://{folder}", ensure_ascii=False) for folder in folders
    )
    try:
        with initialize_config_dir(str(configs_dir()), "posbench", version_base="1.3"):
            unread = (
                f"~hydra/{key}"
                for part in conf.HydraConf().defaults
                for key in part
                if part[key]
            )
            cfg = compose(
                "train",
                [f"hydra.searchpath=[{search}]", *unread, *overrides],
                return_hydra_config=True,
            )
            OmegaConf.set_struct(cfg, False)
            # tuned: settings for a choice
            names, tuned = cfg.pop("hydra").runtime.choices, cfg.pop("tuned", {})
            cfg.merge_with(
                *(
                    tuned[f"{key}={name}"]
                    for key, name in names.items()
                    if f"{key}={name}" in tuned
                )
            )
            return cfg
    finally:
        GlobalHydra.instance().hydra = callers_hydra


def _config(point: dict[str, str], folders: tuple[Path, ...]) -> Config:
    """Return the checked configuration of a point, which holds typed values by full
    key.
    """
    groups = {key: text for key, text in point.items() if key in GROUPS}
    cfg = _base_config(groups, folders)
    for name, source in _SOURCES.items():
        if (
            "data" not in point
            and point.get(f"data.{name}", "null") != "null"
            and cfg.data.get("source") != source
        ):
            cfg, point = (
                _base_config({**groups, "data": source}, folders),
                {**point, "data": source},
            )
    if (run := point.get("start", "null")) != "null":
        _inherit_settings(cfg, run, point)
    dataset = cfg.data.get("dataset")
    for key in (key for key in point if key not in (*GROUPS, LENGTH, "start")):
        if key in _WITH_OPTIONS or (key not in KEYS and not key.startswith(_OPEN)):
            raise unknown_key(key, [*KEYS, *GROUPS], (*WORDS, *OF_A_SWEEP))
        OmegaConf.update(cfg, key, value(key, point[key]), merge=True)
    # Functions such as `${oc.env:...}` would put secrets into records.
    if match := re.search(
        r'\$\{[^"]*:[^"]*', json.dumps(OmegaConf.to_container(cfg), default=str)
    ):
        raise UserError(
            f"'{match[0]}': only other keys may be interpolated, such as"
            " ${training.tokens}"
        )
    plain = dict(OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
    data = plain["data"]
    # not the chosen file's
    other_dataset = data["dataset"] != dataset and "data.name" not in point
    if data["source"] == "hub" and (other_dataset or data["name"] == "hub"):
        data["name"] = re.sub(
            r"[^A-Za-z0-9._-]+", "-", Path(str(data["dataset"])).name
        ).strip("._-")[:128]
    config = validate(Config, with_paths(plain))
    if LENGTH in point:
        lengths = tuple(ratios(value(LENGTH, point[LENGTH]), config))
        config = dataclasses.replace(
            config, evaluation=dataclasses.replace(config.evaluation, ratios=lengths)
        )
    _check(config)
    return config


def _base_config(groups: dict[str, str], folders: tuple[Path, ...]) -> DictConfig:
    """Return a composed configuration that the caller may change. Raises UserError if a
    chosen file does not exist.
    """
    files, name, signature = dict(groups), groups.get("encoding", ""), None
    is_class = encodings.PLACE.fullmatch(name) or name in encodings.names()
    if is_class and name not in choices("encoding", folders, EVERY):
        signature = _signature(files.pop("encoding"))
    for group, choice in files.items():
        choice_file(
            group, choice, folders, encodings.names() if group == "encoding" else ()
        )
    cfg = copy.deepcopy(
        _hydra_config(
            tuple(f"{group}={choice}" for group, choice in files.items()), folders
        )
    )
    cfg.encoding = signature or cfg.encoding
    return cfg


def _signature(name: str) -> DictConfig:
    """Return the options of a class that has no YAML, by its name or
    path/to/file.py:Class.
    """
    source = {}
    if match := encodings.PLACE.fullmatch(name):
        from posbench.encodings.own import from_file  # it imports torch

        path = relative_path(match[1])
        cls, digest = from_file(path + name.removeprefix(match[1]))
        name, source = (
            encodings.register(cls).name,
            {"file": f"{path}:{cls.__name__}", "file_sha256": digest},
        )
    options = encodings.options_of(name).items()
    plain = {
        key: "???" if default is inspect.Parameter.empty else default
        for key, default in options
    }
    return OmegaConf.create({"name": name, **plain, **source})


def _check(config: Config) -> None:
    """Refuse options that are wrong, weights or problems that do not fit, and positions
    that cannot be shifted.
    """
    encoding, data, length = (
        config.build_encoding(),
        config.data,
        config.training.train_length,
    )
    if config.start:
        old = _finished_run(config.start.run)[0].build_encoding()
        shapes, old_shapes = (
            {(name, p.shape) for name, p in module.named_parameters()}
            for module in (encoding, old)
        )
        if shapes != old_shapes:
            raise UserError(
                f"'{encoding.name}' cannot begin from {config.start.run}: it has other"
                " parameters"
            )
    if encoding.max_length is not None and length > encoding.max_length:
        raise UserError(
            f"training.train_length is {length}: '{encoding.name}' ends at"
            f" {encoding.max_length}"
        )
    if data.task is None:
        return
    task = tasks.build(data.task["name"], data.task)
    if (size := task.size(task.longest) + data.offset) > length:
        raise UserError(
            f"training.train_length is {length}: expected at least {size}, for problems"
            f" of '{data.name}'"
        )
    if data.offset and "positions" in encoding.hooks:
        raise UserError(
            f"data.offset is {data.offset}: '{encoding.name}' chooses positions itself,"
            " expected 0"
        )


def _run_folders(pattern: str) -> list[str]:
    """Return the run folders that a glob matches, except those that --restart moved
    aside; if none, the glob itself.
    """
    folders = map(Path, sorted(glob.glob(os.path.expanduser(pattern))))
    return [
        str(run)
        for run in folders
        if (run / SAVED).is_file() and not MOVED_ASIDE.fullmatch(run.name)
    ] or [pattern]


def _inherit_settings(cfg: DictConfig, run: str, point: Mapping[str, str]) -> None:
    """Copy into a configuration the settings of the run that it starts from
    (docs/longer.md); typed ones come later.
    """
    for key in point:
        if key.startswith(("model", "experiment", "start.")) and not key.startswith(
            "model.attention."
        ):
            raise UserError(
                f"{key} cannot be set beside start, which takes it from that run"
            )
    settings = {
        key: value(key, text)
        for key, text in point.items()
        if key.startswith("training.")
    }
    # else an error
    ints = {
        key: int(n)
        for key, n in settings.items()
        if type(n) in (int, float) and 1 <= n < 2**63
    }
    source, start = _finished_run(run)
    container, training, train_length = (
        to_container(source),
        source.training,
        source.training.train_length,
    )
    cfg.update(
        {
            name: container[name]
            for name in ("encoding", "model", "data", "training")
            if name not in point
        }
    )
    cfg.seed, cfg.study, cfg.start = source.seed, STUDY, dataclasses.asdict(start)
    length = ints.get("training.train_length", train_length)
    batch_size = ints.get(
        "training.batch_size", max(1, training.batch_size * train_length // length)
    )
    tokens = max(
        training.tokens // 10,
        batch_size * ints.get("training.accumulation", training.accumulation) * length,
    )
    tokens = ints.get("training.tokens", tokens)
    rates = {
        "learning_rate": training.learning_rate * RATE,
        "warmup_tokens": tokens // 20,
    }
    cfg.training.update({"batch_size": batch_size, "tokens": tokens, **rates})
    if "data" in point:
        cfg.data.tokenizer = str(Path(run) / "tokenizer.json")
    if "encoding" in point:
        # a stretched form has the base and layout of what it stretches
        options = source.encoding.options
        is_plain = (
            source.encoding.name == "rope"
            or cfg.encoding.name not in encodings.EXTENSIONS
        )
        if not is_plain or options.get("frequencies", "geometric") != "geometric":
            raise UserError(
                f"start={run}: {cfg.encoding.name} extends plain rope, it would replace"
                " this encoding"
            )
        cfg.encoding.update(
            {
                name: options[name]
                for name in {"base", "layout"} & options.keys() & cfg.encoding.keys()
            }
        )
        # dynamic_ntk multiplies it with the factor of each length
        if "factor" in cfg.encoding:
            cfg.encoding.factor = (
                1.0
                if cfg.encoding.name == "dynamic_ntk"
                else max(1.0, length / train_length)
            )
    if "evaluation" not in point:
        lengths = {
            round(ratio * train_length) for ratio in source.evaluation.ratios
        } | {length, 2 * length, 4 * length}
        cfg.evaluation.update(
            {key: container["evaluation"][key] for key in ("targets", "blocks")}
        )
        cfg.evaluation.update(
            {
                "ratios": [context / length for context in sorted(lengths)],
                "at_tokens": [0],
            }
        )


def _finished_run(run: str) -> tuple[Config, StartConfig]:
    """Return the configuration of a finished run, and the facts that a run which begins
    from it records.
    """
    folder = Path(run)
    config = load_saved(folder / SAVED) if (folder / SAVED).is_file() else None
    if not config or not config.is_trained_here or config.start or config.data.task:
        hint = (
            ""
            if folder.exists()
            else did_you_mean(
                folder.name, [path.name for path in folder.parent.glob("*/")]
            )
        )
        raise UserError(
            f"start={folder}: expected a finished run (a HuggingFace model trains in"
            f" its own trainer) on text, from random weights{hint}"
        )
    training, record = config.training, json.loads((folder / "run.json").read_bytes())
    # names sort by step
    manifest = max((folder / "checkpoint").glob("step-*/manifest.json"), default=None)
    newest = json.loads(manifest.read_bytes()) if manifest else {}
    if newest.get("step", 0) < training.steps or record["status"] != "done":
        raise UserError(
            f"start={folder}: that run is not finished; 'posbench train' with its"
            " settings continues it"
        )
    digests = (
        newest["files"]["model.safetensors"]["sha256"],
        record["tokenizer_sha256"],
        record["data"]["sha256"],
    )
    sizes = (
        config.seed,
        training.train_length,
        training.batch_size * training.accumulation,
        training.steps,
    )
    defaults = (
        {} if config.encoding.file else encodings.options_of(config.encoding.name)
    )
    options = {
        key: option
        for key, option in config.encoding.options.items()
        if option != defaults.get(key, ...)
    }
    return config, StartConfig(
        str(folder), *digests, *sizes, training.tokens, training.warmup_tokens, options
    )
