"""The configuration of a run: frozen dataclasses, made once from what Hydra or a saved file composed.

Below this module nobody sees YAML. Field meanings are explained in `configs/*/*.yaml`, which hold the defaults.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from posbench.config.checks import above_zero, at_least, fraction, plain_name
from posbench.config.history import completed
from posbench.config.messages import in_one_line, strict
from posbench.errors import UserError

_Section = TypeVar("_Section")
SAVED = "config.yaml"  # its file in a run folder


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    window: int | None = None  # keys a query may see, itself included; None = all before it
    sinks: int = 0  # keys at the beginning that every query sees beside its window

    def __post_init__(self) -> None:
        at_least(1, self, "model.attention", "window")
        at_least(0, self, "model.attention", "sinks")
        if self.sinks and self.window is None:
            raise UserError(f"model.attention.sinks is {self.sinks}: expected 0, or a model.attention.window beside it")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    n_layers: int
    n_heads: int
    d_model: int
    d_ff: int | None
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    tie_embeddings: bool
    init: Literal["fan_in", "gpt2"]
    attention: AttentionConfig

    @property
    def token_rms(self) -> float:
        """Root mean square of the token embeddings at initialisation; GPT-2's is far too small for narrow models."""
        return {"fan_in": 0.05, "gpt2": 0.02}[self.init]

    def __post_init__(self) -> None:
        at_least(1, self, "model", "n_layers", "n_heads", "d_model", "d_ff")
        if self.d_model % self.n_heads:
            below = self.d_model - self.d_model % self.n_heads
            near = " or ".join(str(width) for width in (below, below + self.n_heads) if width)
            raise UserError(
                f"model.d_model is {self.d_model}: it does not divide into {self.n_heads} heads, nearest: {near}"
            )


@dataclasses.dataclass(frozen=True)
class DataConfig:
    name: str
    source: Literal["builtin", "text", "hub"]
    path: str | None
    dataset: str | None
    subset: str | None
    revision: str | None
    column: str
    splits: dict[str, str]
    articles: bool
    max_documents: int | None
    tokenizer: str  # bpe, bytes, or the path of a tokenizer.json
    vocab_size: int

    def __post_init__(self) -> None:
        plain_name("data.name", self.name)
        at_least(1, self, "data", "max_documents", "vocab_size")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    train_length: int
    tokens: int
    batch_size: int
    accumulation: int
    learning_rate: float
    schedule: Literal["cosine", "constant"]
    warmup_tokens: int
    decay_fraction: float
    final_learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    clip: float
    precision: Literal["auto", "fp32", "bf16"]

    def __post_init__(self) -> None:
        at_least(2, self, "training", "train_length")
        at_least(1, self, "training", "batch_size", "accumulation")
        at_least(self.tokens_per_step, self, "training", "tokens")  # train_length x batch_size x accumulation
        at_least(0, self, "training", "warmup_tokens", "weight_decay")
        above_zero(self, "training", "learning_rate", "clip")
        fraction(self, "training", "decay_fraction", "final_learning_rate")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"training.betas is {list(self.betas)}: expected two numbers from 0 to below 1")
        if self.warmup_tokens > self.tokens:
            raise UserError(f"training.warmup_tokens is {self.warmup_tokens}: expected at most tokens, {self.tokens}")

    @property
    def tokens_per_step(self) -> int:
        return self.train_length * self.batch_size * self.accumulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    protocols: tuple[Literal["fixed_target", "nonoverlap", "sliding", "per_position"], ...]
    ratios: tuple[float, ...]
    longest: float | None = None  # in training lengths, as ratios
    windowed: bool
    sinks: int = 0
    extensions: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    reference: str | None = None
    stride: int | None = None
    split: Literal["validation", "test"]
    documents: Literal["auto", "doc", "concat"]
    targets: int
    blocks: int
    bootstrap: int
    batch_tokens: int

    def __post_init__(self) -> None:
        at_least(1, self, "evaluation", "targets", "blocks", "bootstrap", "batch_tokens", "longest", "stride")
        at_least(0, self, "evaluation", "sinks")
        ratios = list(self.ratios)
        if not ratios or ratios != sorted(set(ratios)) or not all(1 <= ratio < math.inf for ratio in ratios):
            raise UserError(f"evaluation.ratios is {ratios}: expected ascending numbers from 1 on, such as [1, 2, 4]")
        if not self.protocols or len(set(self.protocols)) < len(self.protocols):
            raise UserError(f"evaluation.protocols is {list(self.protocols)}: expected at least one, each once")
        for name in ("extensions", "tasks"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UserError(f"evaluation.{name} is {list(getattr(self, name))}: expected each once")


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    backend: Literal["wandb", "none"]
    mode: Literal["auto", "online", "offline"]
    project: str
    entity: str | None
    group: str | None
    tags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    outputs: str
    cache: str | None
    device: str
    threads: int | None
    compile: bool
    log_every_steps: int
    validate_every_steps: int | None
    checkpoint_every_steps: int

    def __post_init__(self) -> None:
        every = ("log_every_steps", "validate_every_steps", "checkpoint_every_steps")
        at_least(1, self, "runtime", "threads", *every)


@dataclasses.dataclass(frozen=True)
class Config:
    study: str
    seed: int
    encoding: EncodingConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    runtime: RuntimeConfig

    def __post_init__(self) -> None:
        plain_name("study", self.study)
        plain_name("encoding.name", self.encoding.name)
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}: expected a whole number from 0 to 2^63 - 1")
        if self.evaluation.targets > self.training.train_length:
            raise UserError(
                f"evaluation.targets is {self.evaluation.targets}: expected at most training.train_length, "
                f"{self.training.train_length}"
            )
        if (self.evaluation.stride or 1) > self.training.train_length:
            raise UserError(
                f"evaluation.stride is {self.evaluation.stride}: expected at most training.train_length, "
                f"{self.training.train_length}"
            )


def from_container(container: Mapping[str, Any]) -> Config:
    """Turn the resolved plain dictionary of a composed or saved configuration into a `Config`.

    `encoding` is flat in YAML (`{name: rope, base: 10000}`); here its options are parted from its name. Keys that came
    after the configuration was written are filled in.

    Raises:
        UserError: an unknown or missing key, a value of the wrong type or outside its range; one line.
    """
    plain = completed(container)
    encoding = plain.get("encoding")
    if not isinstance(encoding, Mapping):
        raise UserError(
            "missing key 'encoding'" if encoding is None else f"encoding is {encoding!r}: expected a scheme"
        )
    options = {key: value for key, value in encoding.items() if key != "name"}
    plain["encoding"] = {"name": encoding.get("name"), "options": options}
    return validate(Config, plain)


def validate(cls: type[_Section], plain: Mapping[str, Any], section: str = "") -> _Section:
    """Make a configuration dataclass of a plain dictionary; `section` is its name in messages.

    Raises:
        UserError: as `from_container`.
    """
    import pydantic

    try:
        made: object = pydantic.TypeAdapter(strict(cls)).validate_python(dict(plain))
    except pydantic.ValidationError as error:
        raise UserError(in_one_line(cls, section, error.errors(include_url=False)[0])) from None
    assert isinstance(made, cls)
    return made


def load_saved(path: Path) -> Config:
    """Read a saved `config.yaml`. It may come from a stranger: nothing in it is executed, expanded or looked up.

    Raises:
        UserError: the file cannot be read, is not plain data, or is not a configuration.
    """
    from posbench.config import plain_yaml

    container = plain_yaml.load(path)
    if not isinstance(container, dict):
        raise UserError(f"{path} is not a saved configuration: expected keys such as study, seed, encoding")
    try:
        return from_container(container)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def to_container(config: Config) -> dict[str, Any]:
    """The inverse of `from_container`: plain JSON types, encoding options flat beside the name."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    plain["encoding"] = {"name": config.encoding.name, **plain["encoding"]["options"]}
    return plain


def flat(container: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in container.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
