"""The configuration of a folder with results of a model that was trained elsewhere.

Its sections are called as those of a run. What such a model does not tell (how many tokens it was trained on, at which
learning rate, from which seed) is None, not a guess.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from posbench.config.checks import plain_name, within
from posbench.config.schema import (
    Config,
    DataConfig,
    EncodingConfig,
    EvaluationConfig,
    from_container,
    parted,
    saved_container,
    validate,
)
from posbench.errors import UserError
from posbench.options import MOST


@dataclasses.dataclass(frozen=True)
class ModelElsewhere:
    """Which model."""

    name: str  # what tables and its folder call it
    source: str  # where it was found: a folder, or a name on the hub
    revision: str | None  # hub: the commit
    sha256: str  # of its configuration, tokenizer and weights
    kind: str  # the model_type of its configuration
    n_layers: int
    n_heads: int
    d_model: int

    def __post_init__(self) -> None:
        plain_name("model.name", self.name)
        within(1, MOST, self, "model", "n_layers", "n_heads", "d_model")


@dataclasses.dataclass(frozen=True)
class TrainingElsewhere:
    """What is known of its training."""

    train_length: int  # tokens per sequence
    tokens = learning_rate = None  # not known; no fields, so not saved

    def __post_init__(self) -> None:
        within(2, MOST, self, "training", "train_length")


@dataclasses.dataclass(frozen=True)
class ReadingConfig:
    """What it reads beside the text."""

    separator: int  # id of the token before each document
    first: bool  # whether that token also stands first in every window, in the place of what the text has there

    def __post_init__(self) -> None:
        within(0, MOST, self, "reading", "separator")


@dataclasses.dataclass(frozen=True)
class TrainedElsewhere:
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
        plain_name("study", self.study)
        plain_name("encoding.name", self.encoding.name)
        if self.data.task is not None:
            raise UserError("data.source is task: expected text, which a model that was trained elsewhere reads")

    @property
    def id(self) -> str:
        """`<name>-<8 hex digits>`, the digits from all that its numbers follow from: model, reading, text."""
        text: dict[str, Any] = dataclasses.asdict(self.data)
        for name in ("tokenizer", "vocab_size"):  # the model's own
            del text[name]
        if self.data.test_pieces is None:  # as in ids of before there was such a key
            del text["test_pieces"]
        shaping = {
            "model": self.model.sha256,
            "reading": dataclasses.asdict(self.reading),
            "data": text,
            "train_length": self.training.train_length,
        }
        digest = hashlib.sha256(json.dumps(shaping, sort_keys=True, separators=(",", ":")).encode())
        return f"{self.model.name}-{digest.hexdigest()[:8]}"


AnyConfig = Config | TrainedElsewhere


def load_saved(path: Path) -> AnyConfig:
    """Read the `config.yaml` of a run, or of results of a model from elsewhere; errors as `schema.load_saved`."""
    container = saved_container(path)
    try:
        if "reading" not in container:
            return from_container(container)
        return validate(TrainedElsewhere, parted(container))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
