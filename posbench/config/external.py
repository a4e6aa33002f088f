"""The configurations of folders with results of models that were trained elsewhere, or began there.

Their sections are called as those of a run. What such a model does not tell (how many tokens it was trained on, at
which learning rate, from which seed) is None, not a guess.
"""

import dataclasses
from pathlib import Path

from posbench.config import schema
from posbench.config.history import completed, without_neutral
from posbench.config.identity import NOT_IDENTITY, digest
from posbench.config.schema import Config, DataConfig, EncodingConfig, EvaluationConfig, Section, validate
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


@dataclasses.dataclass(frozen=True)
class TrainedElsewhere(Section):
    """A model that was trained elsewhere, and how it is evaluated."""

    study: str
    encoding: EncodingConfig  # how it knows where its tokens are
    model: ModelElsewhere
    reading: ReadingConfig
    data: DataConfig  # the text it is evaluated on
    training: TrainingElsewhere
    evaluation: EvaluationConfig
    seed = None  # not known; no field, so not saved

    def __post_init__(self) -> None:
        _refuse_task(self.data)

    @property
    def id(self) -> str:
        """`<name>-<8 hex digits>`, the digits from all that its numbers follow from: model, reading, text."""
        text = {key: each for key, each in dataclasses.asdict(self.data).items() if key not in _OF_THE_MODEL}
        if text["test_pieces"] is None:
            del text["test_pieces"]
        reading, length = dataclasses.asdict(self.reading), self.training.train_length
        shaping = {"model": self.model.sha256, "reading": reading, "data": text, "train_length": length}
        return f"{self.model.name}-{digest(shaping)}"


@dataclasses.dataclass(frozen=True)
class TrainedOn(Section):
    """A model that was trained elsewhere and is trained on here."""

    study: str
    seed: int  # of the order of the text
    encoding: EncodingConfig  # how it knows where its tokens are from now on
    model: ModelElsewhere  # as it was before
    reading: ReadingConfig
    data: DataConfig  # the text it is trained on, and evaluated on
    start: TrainingElsewhere  # what is known of its training before
    training: schema.TrainingConfig
    evaluation: EvaluationConfig
    tracking: schema.TrackingConfig
    runtime: schema.RuntimeConfig

    def __post_init__(self) -> None:
        _refuse_task(self.data)
        if self.evaluation.at_tokens and self.evaluation.at_tokens[-1] > self.training.tokens:
            wrong = f"evaluation.at_tokens ends at {self.evaluation.at_tokens[-1]:,}"
            raise UserError(f"{wrong}: expected at most training.tokens, {self.training.tokens:,}")

    @property
    def id(self) -> str:
        """`<model>-<encoding>-s<seed>-<8 hex digits>`, the digits from all that its weights follow from."""
        whole = without_neutral(schema.to_container(self))
        shaping = {key: each for key, each in whole.items() if key not in NOT_IDENTITY}
        shaping["model"] = self.model.sha256
        shaping["data"] = {key: each for key, each in whole["data"].items() if key not in _OF_THE_MODEL}
        return f"{self.model.name}-{self.encoding.name}-s{self.seed}-{digest(shaping)}"


Trains = Config | TrainedOn  # what training and its records know
AnyConfig = Config | TrainedElsewhere | TrainedOn


def _refuse_task(data: DataConfig) -> None:
    if data.task is not None:
        raise UserError("data.source is task: expected text, which a model that was trained elsewhere reads")


def load_saved(path: Path) -> AnyConfig:
    """Read the `config.yaml` of a run, or of results of a model from elsewhere. Nothing in it is executed or looked up.

    Raises:
        UserError: the file cannot be read, is not plain data, or is not a configuration.
    """
    container = schema.saved_container(path)
    try:
        if "reading" not in container:
            return schema.from_container(container)
        if "start" in container:
            return validate(TrainedOn, schema.split_encoding(completed(container)))
        return validate(TrainedElsewhere, schema.split_encoding(container))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
