"""Training on: a run that begins from the weights of another, `start=RUN` (docs/longer.md).

It takes encoding, model, data, optimizer and seed of that run, and its training length as that of the encoding:
extensions stretch from there. What is typed takes their place, and that of the values derived here.
"""

import dataclasses
import glob
import json
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from posbench.config import external
from posbench.config.built import build_encoding
from posbench.config.identity import expanded, moved_aside
from posbench.config.overrides import value
from posbench.config.schema import SAVED, Config, StartConfig, to_container
from posbench.errors import Undefined, UserError

KEY, STUDY = "start", "extend"
RATE = 1 / 6  # of the peak: the best of 1, 1/2, 1/6 and 1/20 for a tenth of the tokens (docs/longer.md)


def runs(pattern: str) -> list[str]:
    """Return the run folders that a glob names, without those that --restart moved aside, or the one of this name."""
    folders = [Path(path) for path in sorted(glob.glob(expanded(pattern)))]
    return [str(path) for path in folders if (path / SAVED).is_file() and not moved_aside(path.name)] or [pattern]


def begun(cfg: DictConfig, run: str, given: Mapping[str, str]) -> None:
    """Give a composed configuration what it takes from a run's folder, before typed values by full key are assigned."""
    for key in given:
        if key.startswith(("model", "experiment", "start.")) and not key.startswith("model.attention."):
            raise UserError(f"{key}: not beside start, which takes it from that run")

    def typed(key: str, default: int) -> int:
        number = value(key, given[key]) if key in given else default
        return int(number) if type(number) in (int, float) and number >= 1 else default  # refused where it is read

    source, start = _read(Path(run))
    taken, old, before = to_container(source), source.training, source.training.train_length
    cfg.update({name: taken[name] for name in ("encoding", "model", "data", "training") if name not in given})
    cfg.seed, cfg.study, cfg.start = source.seed, STUDY, dataclasses.asdict(start)
    length = typed("training.train_length", before)
    batch_size = typed("training.batch_size", max(1, old.batch_size * before // length))
    tokens = max(old.tokens // 10, batch_size * typed("training.accumulation", old.accumulation) * length)
    tokens = typed("training.tokens", tokens)
    rates = {"learning_rate": old.learning_rate * RATE, "warmup_tokens": tokens // 20}
    cfg.training.update({"batch_size": batch_size, "tokens": tokens, "lengths": [], **rates})
    if "data" in given:
        cfg.data.tokenizer = str(Path(start.run) / "tokenizer.json")
    if "encoding" in given:
        options = source.encoding.options  # a stretched form has the base and layout of what it stretches
        if options.get("frequencies", "geometric") != "geometric":
            raise UserError(f"{KEY}={run}: its encoding.frequencies={options['frequencies']} would be lost")
        shared = {"base", "layout"} & options.keys() & cfg.encoding.keys()
        cfg.encoding.update({name: options[name] for name in shared})
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

    encoding, before = build_encoding(config), build_encoding(_read(Path(start.run))[0])
    new, old = ({(name, p.shape) for name, p in each.named_parameters()} for each in (encoding, before))
    if new != old:
        wrong = f"'{encoding.name}' cannot begin from {start.run}: it has not the parameters of '{before.name}' there"
        raise UserError(f"{wrong} ({min(new ^ old)[0]})")
    try:
        check_length(encoding, config.training.train_length)
    except Undefined as error:
        raise UserError(f"training.train_length is {config.training.train_length}: {error}") from None


def _read(folder: Path) -> tuple[Config, StartConfig]:
    """Return the configuration of a finished run, and what a run that begins from it keeps of it."""
    config = external.load_saved(folder / SAVED) if (folder / SAVED).is_file() else None
    if not isinstance(config, Config) or config.start or config.data.task:
        raise UserError(f"start={folder}: expected a run folder, outputs/STUDY/RUN, on text, that began at random")
    training, record = config.training, json.loads((folder / "run.json").read_bytes())
    manifest = max((folder / "checkpoint").glob("step-*/manifest.json"), default=None)  # eight digits
    newest = json.loads(manifest.read_bytes()) if manifest else {}
    if newest.get("step", 0) < training.steps or record["status"] != "done":
        raise UserError(f"start={folder}: that run is not finished; 'posbench train' with its settings continues it")
    digests = (newest["files"]["model.safetensors"]["sha256"], record["tokenizer_sha256"], record["data"]["sha256"])
    sizes = (config.seed, training.train_length, training.batch_size * training.accumulation, training.steps)
    return config, StartConfig(str(folder), *digests, *sizes, training.tokens, training.warmup_tokens)
