"""Runs that begin from another: `start=outputs/STUDY/RUN` takes that run's encoding,
model, data and training settings, and what is typed is set after that.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from posbench import encodings, files
from posbench.config.overrides import parse_choice, value, values
from posbench.config.schema import (
    Config,
    EncodingConfig,
    StartConfig,
    to_container,
)
from posbench.errors import UserError
from posbench.run import CONFIG, TOKENIZER, find
from posbench.run.saved import load_any, load_record, other_run
from posbench.typed import PLACE

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from posbench.encodings.base import Encoding

STUDY = "extend"  # the study of runs that begin from another run
# times that run's peak rate: the best of 1, 1/2, 1/6 and 1/20 for a tenth of the tokens
# (docs/longer.md)
RATE = 1 / 6
_TRAINED_ELSEWHERE = " (a HuggingFace model trains in its own trainer)"


class Change(NamedTuple):
    """What the encoding of a run that begins is to the one that it replaces."""

    method: str  # the encoding's name as it was typed: an extension's, perhaps `abf`
    # the layers of a pattern where it is; None: it replaces the pattern
    layers: str | None


def spelt_out(point: dict[str, str]) -> tuple[dict[str, str], Change | None]:
    """Return a point in which `encoding=yarn:factor=4:layers=global` is
    `encoding=yarn encoding.factor=4`, and what that changes; None without an encoding.
    """
    if "encoding" not in point:
        return point, None
    text = point["encoding"]
    if PLACE.fullmatch(text):
        return point, Change(text, None)
    name, options = parse_choice(text)
    trained = [each for each in encodings.EXTENSIONS if each in encodings.names()]
    if name == "search" or name in {*encodings.EXTENSIONS} - {*trained, "abf"}:
        raise UserError(
            f"nothing is trained with {name}: expected {', '.join(trained)}, abf or an"
            f" encoding; 'posbench evaluate RUN extension={name}' extends a run"
        )
    layers = None
    if name in encodings.EXTENSIONS:
        layers = "all"
    if "layers" in options:
        layers = str(options.pop("layers"))
    change = Change(name, layers)
    if name == "abf":
        name = "rope"
        options = {"base": encodings.ABF_BASE} | options
    spelt = {f"encoding.{key}": json.dumps(option) for key, option in options.items()}
    return {**spelt, **point, "encoding": name}, change


def folders_of(text: str) -> list[str]:
    """Return the run folders that the value of `start=` names: folders, ids, studies
    and globs, with commas between them; `null` names none. UserError if there are none.
    """
    if text == "null":
        return [text]
    if not text:
        raise UserError(
            "start names no run: expected start=outputs/STUDY/RUN, or start=null for"
            " random weights"
        )
    paths = [Path(item).expanduser() for item in values("start", text)]
    try:
        folders = find.run_folders(paths, _TRAINED_ELSEWHERE)
    except UserError as error:
        raise UserError(f"start={text}: {error}") from None
    return list(map(str, folders))


def inherit(cfg: "DictConfig", run: str, point: Mapping[str, str]) -> Config:
    """Copy into a configuration the settings of the run that it starts from
    (docs/longer.md), and return those of that run; typed ones come later.
    """
    for key in point:
        is_of_source = key.startswith(("model", "experiment", "start."))
        is_of_source |= key == "training"  # a file of all of its settings
        if is_of_source and not key.startswith("model.attention."):
            raise UserError(
                f"{key} cannot be set beside start, which takes it from that run"
            )
    source, facts = finished_run(run)
    container = to_container(source)
    for name in ("encoding", "model", "data", "training"):
        if name not in point:
            cfg[name] = container[name]
    cfg.seed = source.seed
    cfg.study = STUDY
    cfg.start = dataclasses.asdict(facts)
    if "data" in point:
        cfg.data.tokenizer = str(Path(run) / TOKENIZER)

    # a tenth of the tokens, as many in an update, at a sixth of the rate
    training = source.training
    train_length = training.train_length
    typed = _typed_counts(point)
    length = typed.get("training.train_length", train_length)
    batch_size = max(1, training.batch_size * train_length // length)
    batch_size = typed.get("training.batch_size", batch_size)
    accumulation = typed.get("training.accumulation", training.accumulation)
    tokens = max(training.tokens // 10, batch_size * accumulation * length)
    tokens = typed.get("training.tokens", tokens)
    cfg.training.batch_size = batch_size
    cfg.training.tokens = tokens
    cfg.training.learning_rate = training.learning_rate * RATE
    cfg.training.warmup_tokens = tokens // 20

    if "encoding" in point:
        _stretch(cfg, source, length / train_length)
    if "evaluation" not in point:
        # the lengths of the earlier run, and 1, 2 and 4 times the new one
        lengths = {round(ratio * train_length) for ratio in source.evaluation.ratios}
        lengths |= {length, 2 * length, 4 * length}
        cfg.evaluation.targets = source.evaluation.targets
        cfg.evaluation.blocks = source.evaluation.blocks
        cfg.evaluation.ratios = [context / length for context in sorted(lengths)]
        cfg.evaluation.at_tokens = [0]
    return source


def _typed_counts(point: Mapping[str, str]) -> dict[str, int]:
    """Return the typed settings of training that are counts. Others are refused when
    the whole configuration is checked.
    """
    counts = {}
    for key, text in point.items():
        if key.startswith("training."):
            number = value(key, text)
            if type(number) in (int, float) and 1 <= number < 2**63:
                counts[key] = int(number)
    return counts


def _stretch(cfg: "DictConfig", source: Config, factor: float) -> None:
    """Give a typed encoding what RoPE keeps of the one that it stretches, and the
    factor.
    """
    encoding, options = cfg.encoding, source.encoding.options
    for name in encodings.KEPT:
        if name in options and name in encoding:
            encoding[name] = options[name]
    if "factor" in encoding:
        encoding.factor = max(1.0, factor)
        if encoding.name == "dynamic_ntk":  # it multiplies with each length's factor
            encoding.factor = 1.0


def placed(
    cfg: "DictConfig", source: EncodingConfig, change: Change, point: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the settings of a typed encoding. A wrapper goes around `source`, the
    encoding of the run that it begins from. If that is a pattern of layers, the typed
    one stands in the pattern, in the named layers.

    Raises UserError where an extension would replace another encoding than plain RoPE.
    """
    from posbench.encodings.layered import entry_with, is_among  # it imports torch

    encoding = cfg.encoding
    run = point["start"]
    method, layers = change
    extends = method in encodings.EXTENSIONS
    is_among({}, layers or "all")  # refuses other names
    if source.name != "layered" and layers not in (None, "all"):
        raise UserError(
            f"start={run}: layers={layers} is for patterns of layers, this run has"
            f" '{source.name}' in all"
        )
    if source.name != "layered" or layers is None:
        if extends:
            _refuse_not_plain({"name": source.name, **source.options}, method, run)
        is_wrapper = "inner" in encoding and "encoding.inner" not in point
        return wrapped(cfg, source) if is_wrapper else encoding

    settings = {}  # in each of the layers
    defaults = encodings.options_of(encoding["name"])
    for key, option in encoding.items():
        is_typed = f"encoding.{key}" in point
        if is_typed or key in ("name", "factor") or option != defaults.get(key):
            settings[key] = option
    entries = []
    for entry in source.options["layers"]:
        has_no_rope = extends and entry["name"] == "none"
        if has_no_rope or not is_among(entry, layers):
            entries.append(entry)
            continue
        if extends:
            _refuse_not_plain(entry, method, run)
        entries.append(entry_with(entry, settings))
    if entries == list(source.options["layers"]):
        raise UserError(f"start={run}: {method} changes none of its {layers} layers")
    # the class of a file stands in the pattern under its name
    code = {"file": source.file, "file_sha256": source.file_sha256}
    return {"name": "layered", "layers": entries, **code}


def wrapped(cfg: "DictConfig", source: EncodingConfig) -> dict[str, Any]:
    """Return the settings of a typed wrapper, around the encoding that the weights were
    trained with.
    """
    inside = {
        "inner": source.name,
        "inner_options": {**cfg.start.options, **cfg.encoding.inner_options},
        "file": source.file,
        "file_sha256": source.file_sha256,
    }
    return {**cfg.encoding, **inside}


def _refuse_not_plain(entry: Mapping[str, Any], method: str, run: str) -> None:
    """Refuse to extend another encoding than RoPE, or RoPE whose frequencies are its
    own.
    """
    replaced = f"'{entry['name']}'"
    is_geometric = entry.get("frequencies", "geometric") == "geometric"
    if not is_geometric:
        replaced += " with frequencies of its own"
    if entry["name"] != "rope" or not is_geometric:
        raise UserError(
            f"start={run}: {method} extends plain rope, it would replace {replaced}"
        )


def finished_run(run: str) -> tuple[Config, StartConfig]:
    """Return the configuration of a finished run, and the facts that a run which begins
    from it records.
    """
    folder = Path(run)
    config = None
    if (folder / CONFIG).is_file():
        config = load_any(folder)
    if config is None or not config.is_trained_here or config.start or config.data.task:
        raise UserError(
            f"start={folder}: expected a finished run{_TRAINED_ELSEWHERE} on text, from"
            " random weights"
        )

    training = config.training
    record = load_record(folder)
    newest: dict[str, Any] = {"step": 0}
    # names sort by step
    manifests = sorted((folder / "checkpoint").glob("step-*/manifest.json"))
    if manifests:
        newest = files.read_json(manifests[-1])
        wrong = other_run(newest.get("run"), record)
        if wrong:
            raise UserError(f"{manifests[-1].parent} {wrong}")
    is_done = record.status == "done" and newest["step"] >= training.steps
    if not (is_done and record.tokenizer_sha256 and record.text_sha256):
        raise UserError(
            f"start={folder}: that run is not finished; 'posbench train' with its"
            " settings continues it"
        )

    encoding = config.encoding
    defaults = {} if encoding.file else encodings.options_of(encoding.name)
    changed = {}
    for key, option in encoding.options.items():
        if option != defaults.get(key, ...):
            changed[key] = option
    return config, StartConfig(
        run=str(folder),
        weights_sha256=newest["files"]["model.safetensors"]["sha256"],
        tokenizer_sha256=record.tokenizer_sha256,
        text_sha256=record.text_sha256,
        seed=config.seed,
        train_length=training.train_length,
        batch_size=training.batch_size * training.accumulation,
        steps=training.steps,
        tokens=training.tokens,
        warmup_tokens=training.warmup_tokens,
        options=changed,
    )


def refuse_other_parameters(encoding: "Encoding", run: str) -> None:
    """Refuse an encoding whose learned parameters are not those of the run that it
    begins from.
    """
    old = finished_run(run)[0].build_encoding()
    if _shapes_of(encoding) != _shapes_of(old):
        raise UserError(
            f"'{encoding.name}' cannot begin from {run}: it has other parameters"
        )


def _shapes_of(encoding: "Encoding") -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in encoding.named_parameters()}
