"""Configurations of models that were trained elsewhere, with sections as a run has them; what is not known is None."""

import dataclasses
from pathlib import Path

from posbench.config import schema, shipped
from posbench.config.identity import NOT_IDENTITY, digest, without_neutral
from posbench.config.schema import Config, Section
from posbench.errors import UserError

_OF_THE_MODEL = ("tokenizer", "vocab_size")  # keys of the data that are the model's own


@dataclasses.dataclass(frozen=True)
class ModelElsewhere(Section):
    """Which model."""

    name: str  # what tables and its folder call it
    source: str  # where it was found: a folder, or a name on the hub
    revision: str | None  # hub: the commit
    sha256: str  # of its configuration, tokenizer and weights
    kind: str  # the model_type of its configuration
    n_layers: int
    n_heads: int | None  # None: it has no attention
    d_model: int


@dataclasses.dataclass(frozen=True)
class TrainingElsewhere(Section):
    """What is known of its training."""

    train_length: int  # tokens per sequence
    tokens = learning_rate = None  # not known; no fields, so not saved


@dataclasses.dataclass(frozen=True)
class ReadingConfig(Section):
    """What it reads beside the text."""

    separator: int  # id of the token before each document
    first: bool  # whether that token also replaces the first one of every window


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Elsewhere(Section):
    study: str
    encoding: schema.EncodingConfig  # how it knows where its tokens are, from now on
    model: ModelElsewhere  # as it was before
    reading: ReadingConfig
    data: schema.DataConfig  # the text it is evaluated on, and trained on
    evaluation: schema.EvaluationConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedElsewhere(_Elsewhere):
    """A model that was trained elsewhere, and how it is evaluated."""

    training: TrainingElsewhere
    seed = None  # not known; no field, so not saved

    @property
    def id(self) -> str:
        """`<name>-<8 hex digits>`, the digits from all that its numbers follow from: model, reading, text."""
        shaping = without_neutral(schema.to_container(self))
        text = {key: value for key, value in shaping["data"].items() if key not in _OF_THE_MODEL}
        text = {"task": None, "offset": 0} | text  # which such ids have always had
        shaping = {"model": self.model.sha256, "reading": shaping["reading"], "data": text}
        return f"{self.model.name}-{digest(shaping | {'train_length': self.training.train_length})}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedOn(_Elsewhere):
    """A model that was trained elsewhere and is trained on here."""

    seed: int  # of the order of the text
    start: TrainingElsewhere  # what is known of its training before
    training: schema.TrainingConfig
    tracking: schema.TrackingConfig
    runtime: schema.RuntimeConfig
    lora: schema.Count | None = None  # rank of the adapters that are trained; None: all weights are

    @property
    def id(self) -> str:
        """`<model>-<encoding>-s<seed>-<8 hex digits>`, the digits from all that its weights follow from."""
        shaping = without_neutral(schema.to_container(self))
        if self.lora is None:  # a later key
            del shaping["lora"]
        text = {key: value for key, value in shaping["data"].items() if key not in _OF_THE_MODEL}
        shaping |= {"model": self.model.sha256, "data": text}
        return f"{self.model.name}-{self.encoding.name}-s{self.seed}-{digest(shaping)}"


Trains = Config | TrainedOn  # what training and its records know
AnyConfig = Config | TrainedElsewhere | TrainedOn


def load_saved(path: Path) -> AnyConfig:
    """Read the `config.yaml` of a run, or of results of a model from elsewhere; UserError if it is none."""
    container = shipped.load(path)
    kind: type[AnyConfig] = Config
    if "reading" in container:
        kind = TrainedOn if "start" in container else TrainedElsewhere
    known = schema.keys(kind)
    for section in NOT_IDENTITY:  # of earlier versions, keys that made no other run and are gone
        if isinstance(settings := container.get(section), dict):
            container[section] = {key: settings[key] for key in settings if f"{section}.{key}" in known}
    try:
        return schema.validate(kind, container)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
