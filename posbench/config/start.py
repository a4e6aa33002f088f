"""Training on: a run that begins from the weights of another, `start=RUN`.

It takes encoding, model, data, optimizer and seed of that run; what is typed takes their place. Where nothing is typed,

    tokens          a tenth of that run's budget, its first twentieth for the warm-up
    learning_rate   that run's peak times `RATE`
    batch_size      as many tokens per update as that run
    encoding.factor the new training length over the old one, if a newly chosen encoding has a factor
    ratios          that run's evaluated lengths and the new training length, up to at least four times that
    at_tokens       0: what the stretch does before any training

The encoding gets that run's training length as its own: extensions stretch from there.
"""

import dataclasses
import glob
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from posbench import encodings
from posbench.config import external
from posbench.config.identity import moved_aside
from posbench.config.schema import SAVED, Config, StartConfig, to_container
from posbench.config.shape import planned
from posbench.encodings.extend import NAMES
from posbench.errors import Undefined, UserError

KEY, STUDY = "start", "extend"
RATE = 1 / 6  # of the peak: the best of 1, 1/2, 1/6 and 1/20 for a tenth of the tokens (docs/longer.md)
_TAKEN = ("encoding", "model", "data", "training")
_GIVEN = {"model": "the model", "training": "the training settings", "experiment": "the settings"}  # groups it replaces
_SHARED = ("base", "layout")  # options that an encoding and its stretched forms have in common


def runs(pattern: str) -> list[str]:
    """The run folders that a glob names, without those that --restart moved aside, or the one of this name."""
    found = sorted(
        path for path in glob.glob(pattern) if (Path(path) / SAVED).is_file() and not moved_aside(Path(path).name)
    )
    return found or [pattern]


def spelt(text: str) -> str:
    """An override of a run that begins from another: there `extension=yarn` is the encoding.

    Raises:
        UserError: the extension is only for evaluation, or has options with it.
    """
    key, _, typed = text.partition("=")
    if key != "extension":
        return text
    for name in typed.split(","):
        if ":" in name:
            first, _, option = name.partition(":")
            raise UserError(f"extension={name}: options are keys here, extension={first} encoding.{option}")
        if name == "abf":
            raise UserError("extension=abf is a larger base: type encoding.base=500000")
        if name not in (trained_on := sorted(NAMES.keys() & set(encodings.names()))):
            raise UserError(f"extension={name} is not trained on: expected one of {', '.join(trained_on)}")
    return f"encoding={typed}"


def begun(composed: DictConfig, run: Any, typed: Collection[str]) -> DictConfig:
    """A composed configuration with what it takes from the run that it begins from.

    Args:
        run: the folder, as typed.
        typed: all keys and groups that were typed; groups have been composed.

    Raises:
        UserError: the folder is not a finished run of text that itself began at random, or a group was typed that it
            gives.
    """
    if wrong := next((key for key in typed if key in _GIVEN or key.startswith(f"{KEY}.")), None):
        raise UserError(f"{wrong}: not beside start, which takes {_GIVEN.get(wrong, wrong)} from that run")
    source, start = _read(Path(str(run)))
    cfg = composed.copy()
    taken = to_container(source)
    with open_dict(cfg):
        cfg.update({name: taken[name] for name in _TAKEN if name not in typed})
        if "data" in typed and "data.tokenizer" not in typed:
            cfg.data.tokenizer = str(Path(start.run) / "tokenizer.json")
        if "encoding" in typed:
            own = source.encoding.options
            cfg.encoding.update({name: own[name] for name in _SHARED if name in own and name in cfg.encoding})
        cfg.seed, cfg.study, cfg.start = source.seed, STUDY, dataclasses.asdict(start)
        cfg.training.tokens = source.training.tokens // 10
        cfg.training.learning_rate = source.training.learning_rate * RATE
        if "evaluation" not in typed:
            asked = source.evaluation
            cfg.evaluation.targets, cfg.evaluation.blocks = asked.targets, asked.blocks
            cfg.evaluation.ratios = list(asked.ratios)
    return cfg


def settle(cfg: DictConfig, source: DictConfig, typed: Collection[str]) -> None:
    """Set what follows from the typed values, where it was not typed itself.

    Args:
        source: the configuration before values were assigned.
    """
    training, old = cfg.training, source.training
    length, before = training.train_length, cfg.start.train_length
    if not all(type(number) is int and number > 0 for number in (length, training.tokens)):
        return  # refused by the schema
    if "training.batch_size" not in typed:
        training.batch_size = max(1, old.batch_size * before // length)
    if "training.tokens" not in typed:  # at least one update
        training.tokens = max(training.tokens, training.batch_size * training.accumulation * length)
    if "training.warmup_tokens" not in typed:
        training.warmup_tokens = training.tokens // 20
    if "encoding" in typed and "encoding.factor" not in typed and "factor" in cfg.encoding:
        dynamic = cfg.encoding.name == "dynamic_ntk"  # whose factor multiplies a length's own
        cfg.encoding.factor = 1.0 if dynamic else max(1.0, length / before)
    if not {"evaluation", "evaluation.ratios", "evaluation.length"} & set(typed):
        lengths = {round(ratio * before) for ratio in source.evaluation.ratios} | {length}
        lengths |= {times * length for times in (2, 4) if max(lengths) < times * length}  # 4x: a verdict's endpoint
        cfg.evaluation.ratios = [one / length for one in sorted(lengths)]
    if not {"evaluation", "evaluation.at_tokens"} & set(typed):
        cfg.evaluation.at_tokens = [0]


def check(config: Config, start: StartConfig) -> None:
    """Refuse a model that the weights do not fit, and an encoding that ends before the new training length.

    Raises:
        UserError: a size of the model differs, or a learned parameter of the encoding; both in one line.
    """
    from posbench.encodings.base import check_length  # torch comes with it

    source = external.load_saved(Path(start.run) / SAVED)
    assert isinstance(source, Config)
    for field in dataclasses.fields(config.model):
        wanted, there = (getattr(each.model, field.name) for each in (config, source))
        if field.name != "attention" and wanted != there:
            raise UserError(
                f"model.{field.name} is {wanted}: expected {there}, as in {start.run}, where training begins"
            )
    encoding, before = planned(config), planned(source)
    own, theirs = ({name: tuple(p.shape) for name, p in one.named_parameters()} for one in (encoding, before))
    if differing := sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)):
        raise UserError(
            f"'{encoding.name}' cannot begin from {start.run}: '{before.name}' there has not the same parameters "
            f"({differing[0]}); expected {before.name}, with options of its own that change no parameter"
        )
    try:
        check_length(encoding, config.training.train_length)
    except Undefined as error:
        raise UserError(f"training.train_length is {config.training.train_length}: {error}") from None


def _read(folder: Path) -> tuple[Config, StartConfig]:
    if not (folder / SAVED).is_file():
        if (folder / "config.json").is_file():
            raise UserError(f"start={folder}: a HuggingFace model is trained on alone, by 'posbench train'")
        raise UserError(f"start={folder}: expected a run folder, outputs/STUDY/RUN; this one has no {SAVED}")
    config = external.load_saved(folder / SAVED)
    if isinstance(config, external.TrainedOn):
        raise UserError(f"start={folder}: its model is a HuggingFace folder, start={folder}/model")
    if not isinstance(config, Config):
        raise UserError(f"start={folder}: expected a run of posbench, this holds results of {config.model.source}")
    if config.start is not None:
        raise UserError(f"start={folder}: it began from {config.start.run} itself; expected a run that began at random")
    if config.data.task is not None:
        raise UserError(f"start={folder}: it was trained on a task; expected a run on text")
    record = _json(folder / "run.json")
    step, digest = _weights(folder)
    if step < config.training.steps or record.get("status") != "done":
        raise UserError(f"start={folder}: that run is not finished; 'posbench train' with its settings continues it")
    data, training = record.get("data"), config.training
    text = data.get("sha256") if isinstance(data, dict) else None
    return config, StartConfig(
        run=str(folder),
        weights_sha256=digest,
        tokenizer_sha256=str(record.get("tokenizer_sha256")),
        text_sha256=str(text),
        seed=config.seed,
        train_length=training.train_length,
        batch_size=training.batch_size * training.accumulation,
        steps=training.steps,
        tokens=training.tokens,
        warmup_tokens=training.warmup_tokens,
    )


def _weights(folder: Path) -> tuple[int, str]:
    """The newest checkpoint's step and its weights' digest, by its manifest; they are verified when they are read."""
    manifests = [_json(path) for path in sorted((folder / "checkpoint").glob("step-*/manifest.json"))]
    try:
        newest = max(manifests, key=lambda one: int(one["step"]))
        return int(newest["step"]), str(newest["files"]["model.safetensors"]["sha256"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"start={folder}: it has no checkpoint; expected the folder of a trained run") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not what posbench writes: expected an object")
    return found
