"""The configuration of a run: frozen dataclasses, made once from what Hydra or a saved file composed.

Below this module nobody sees YAML. Field meanings are explained in `configs/*/*.yaml`, which hold the defaults.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from posbench.errors import UserError, did_you_mean

# What may change without making it another run (another run id).
NOT_IDENTITY = ("tracking", "evaluation", "runtime")


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    window: int | None = None  # keys a query may see, itself included; None = all before it


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
    max_documents: int | None
    tokenizer: str  # bpe, bytes, or the path of a tokenizer.json
    vocab_size: int


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


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    protocols: tuple[Literal["fixed_target", "nonoverlap"], ...]
    ratios: tuple[float, ...]
    windowed: bool
    split: Literal["validation", "test"]
    documents: Literal["auto", "doc", "concat"]
    targets: int
    blocks: int
    bootstrap: int
    batch_tokens: int


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


def from_container(container: Mapping[str, Any]) -> Config:
    """Turn the resolved plain dictionary of a composed or saved configuration into a `Config`.

    `encoding` is flat in YAML (`{name: rope, base: 10000}`); here its options are parted from its name.

    Raises:
        UserError: an unknown or missing key, a value of the wrong type, one line with the nearest choice.
    """
    import pydantic

    plain = dict(container)
    encoding = dict(plain.get("encoding") or {})
    plain["encoding"] = {"name": encoding.pop("name", None), "options": encoding}
    try:
        config = pydantic.TypeAdapter(_strict(Config)).validate_python(plain)
    except pydantic.ValidationError as error:
        raise UserError(_one_line(error.errors(include_url=False)[0])) from None
    assert isinstance(config, Config)
    return config


def to_container(config: Config) -> dict[str, Any]:
    """The inverse of `from_container`: plain JSON types, encoding options flat beside the name."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    plain["encoding"] = {"name": config.encoding.name, **plain["encoding"]["options"]}
    return plain


def run_id(config: Config) -> str:
    """`<encoding>-s<seed>-<8 hex digits>`, the digits from everything that shapes the trained weights."""
    identity = {k: v for k, v in to_container(config).items() if k not in NOT_IDENTITY}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return f"{config.encoding.name}-s{config.seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _strict(cls: type) -> type:
    """A pydantic twin of a dataclass and of those nested in it, that refuses unknown keys."""
    import pydantic

    for field in dataclasses.fields(cls):
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            _strict(field.type)
    cls.__pydantic_config__ = pydantic.ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return cls


def _one_line(error: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "unexpected_keyword_argument":
        *parents, last = error["loc"]
        cls: Any = Config
        for parent in parents:
            cls = next(field.type for field in dataclasses.fields(cls) if field.name == parent)
        return f"unknown key '{key}'" + did_you_mean(str(last), [field.name for field in dataclasses.fields(cls)])
    if error["type"] in ("missing", "missing_argument"):
        return f"missing key '{key}'"
    return f"{key} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
