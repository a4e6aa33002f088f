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
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from posbench import encodings
from posbench.config import external
from posbench.config.built import build_encoding
from posbench.config.identity import expanded, moved_aside
from posbench.config.overrides import value
from posbench.config.schema import SAVED, Config, StartConfig, to_container
from posbench.encodings import EXTENSIONS
from posbench.errors import Undefined, UserError

KEY, STUDY = "start", "extend"
RATE = 1 / 6  # of the peak: the best of 1, 1/2, 1/6 and 1/20 for a tenth of the tokens (docs/longer.md)
_TAKEN = ("encoding", "model", "data", "training")
_SHARED = ("base", "layout")  # options that an encoding and its stretched forms have in common


def runs(pattern: str) -> list[str]:
    """The run folders that a glob names, without those that --restart moved aside, or the one of this name."""
    folders = [Path(path) for path in sorted(glob.glob(expanded(pattern)))]
    return [str(path) for path in folders if (path / SAVED).is_file() and not moved_aside(path.name)] or [pattern]


def spelt(word: str) -> str:
    """An override of a run that begins from another: there `extension=yarn` is the encoding.

    Raises:
        UserError: the extension has options with it, or is none that can be trained on.
    """
    key, _, text = word.partition("=")
    trained_on = sorted(EXTENSIONS.keys() & set(encodings.names()))
    if key == "extension" and (wrong := set(text.split(",")) - set(trained_on)):
        near = "abf is encoding.base=500000, options are keys here, such as encoding.factor=4"
        raise UserError(f"extension={min(wrong)} is not trained on: expected one of {', '.join(trained_on)}; {near}")
    return f"encoding={text}" if key == "extension" else word


def begun(cfg: DictConfig, run: str, given: Mapping[str, str]) -> None:
    """Give a composed configuration what it takes from the run that it begins from, before typed values are assigned.

    Args:
        run: its folder, which holds a finished run of text that itself began at random.
        given: typed values by full key; groups have been composed.
    """
    for key in given:
        its_own = key in ("model", "training", "experiment") or key.startswith(("model.", f"{KEY}."))
        if its_own and not key.startswith("model.attention."):
            raise UserError(f"{key}: not beside start, which takes it from that run")

    def typed(key: str, default: int) -> int:
        number = value(key, given[key]) if key in given else default
        return int(number) if type(number) in (int, float) and number >= 1 else default  # refused where it is read

    source, start = _read(Path(run))
    taken, old, before = to_container(source), source.training, source.training.train_length
    cfg.update({name: taken[name] for name in _TAKEN if name not in given})
    cfg.seed, cfg.study, cfg.start = source.seed, STUDY, dataclasses.asdict(start)
    length = typed("training.train_length", before)
    batch_size = typed("training.batch_size", max(1, old.batch_size * before // length))
    update = batch_size * typed("training.accumulation", old.accumulation) * length
    tokens = typed("training.tokens", max(old.tokens // 10, update))
    rates = {"learning_rate": old.learning_rate * RATE, "warmup_tokens": tokens // 20}
    cfg.training.update({"batch_size": batch_size, "tokens": tokens, **rates})
    if "data" in given:
        cfg.data.tokenizer = str(Path(start.run) / "tokenizer.json")
    if "encoding" in given:
        options = source.encoding.options
        cfg.encoding.update({name: options[name] for name in _SHARED if name in options and name in cfg.encoding})
        if "factor" in cfg.encoding:  # that of dynamic_ntk multiplies a length's own
            cfg.encoding.factor = 1.0 if cfg.encoding.name == "dynamic_ntk" else max(1.0, length / before)
    if "evaluation" not in given:
        lengths = {round(ratio * before) for ratio in source.evaluation.ratios} | {length}
        lengths |= {times * length for times in (2, 4) if max(lengths) < times * length}  # 4x: a verdict's endpoint
        cfg.evaluation.update({key: taken["evaluation"][key] for key in ("targets", "blocks")})
        cfg.evaluation.update({"ratios": [each / length for each in sorted(lengths)], "at_tokens": [0]})


def check(config: Config, start: StartConfig) -> None:
    """Refuse a model that the weights do not fit, and an encoding that ends before the new training length."""
    from posbench.encodings.base import check_length  # torch comes with it

    source = external.load_saved(Path(start.run) / SAVED)
    assert isinstance(source, Config)
    encoding, before = build_encoding(config), build_encoding(source)
    new, old = ({(name, p.shape) for name, p in each.named_parameters()} for each in (encoding, before))
    if new != old:
        wrong = f"'{encoding.name}' cannot begin from {start.run}: it has not the parameters of '{before.name}' there"
        raise UserError(f"{wrong} ({min(new ^ old)[0]})")
    try:
        check_length(encoding, config.training.train_length)
    except Undefined as error:
        raise UserError(f"training.train_length is {config.training.train_length}: {error}") from None


def _read(folder: Path) -> tuple[Config, StartConfig]:
    """The configuration of a finished run, and what a run that begins from it keeps of it."""
    place = f"start={folder}"
    if not (folder / SAVED).is_file():
        hub = ": a HuggingFace model is trained on alone, by 'posbench train'"
        nothing = f": expected a run folder, outputs/STUDY/RUN; this one has no {SAVED}"
        raise UserError(place + (hub if (folder / "config.json").is_file() else nothing))
    config = external.load_saved(folder / SAVED)
    if not isinstance(config, Config):
        raise UserError(f"{place}: expected a run of posbench; the HuggingFace model is {place}/model")
    if config.start or config.data.task:
        what = f"began from {config.start.run}" if config.start else "was trained on a task"
        raise UserError(f"{place}: it {what}; expected a run on text that began at random")
    training = config.training
    try:
        record = json.loads((folder / "run.json").read_bytes())
        newest = max((folder / "checkpoint").glob("step-*/manifest.json"))  # eight digits
        manifest = json.loads(newest.read_bytes())
        unfinished = int(manifest["step"]) < training.steps or record.get("status") != "done"
        weights = str(manifest["files"]["model.safetensors"]["sha256"])  # verified when they are read
        tokenizer, text = str(record.get("tokenizer_sha256")), str((record.get("data") or {}).get("sha256"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{place}: it has no checkpoint; expected the folder of a trained run") from None
    if unfinished:
        raise UserError(f"{place}: that run is not finished; 'posbench train' with its settings continues it")
    batch, rest = training.batch_size * training.accumulation, (training.tokens, training.warmup_tokens)
    lengths = (config.seed, training.train_length, batch, training.steps)
    return config, StartConfig(str(folder), weights, tokenizer, text, *lengths, *rest)
