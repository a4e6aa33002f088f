"""The configuration of a run: frozen dataclasses with their bounds, read from plain data in one place.

`configs/*/*.yaml` explain the fields and hold their defaults. A field with a default here came later: a file that
lacks it is read with that value.
"""

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len, Lt, Predicate

from posbench.config import suggest
from posbench.config.identity import completed, digest, one_number, without_neutral
from posbench.errors import UserError

SAVED = "config.yaml"  # its file in a run folder
_SOURCE = ("file", "file_sha256")  # of an encoding in a file of one's own
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,126}[A-Za-z0-9_-])?")

Name = Annotated[str, Predicate(lambda text: _NAME.fullmatch(text) is not None)]  # also the name of a folder
Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
Fraction = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Ge(0), Lt(1)]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
_Section = TypeVar("_Section")


class Section:
    """What every part of a configuration asks of pydantic: no unknown keys, no infinite numbers."""

    __pydantic_config__ = {"extra": "forbid", "coerce_numbers_to_str": True, "allow_inf_nan": False}  # noqa: RUF012


@dataclasses.dataclass(frozen=True)
class EncodingConfig(Section):
    """Which encoding, and the options that its constructor is given; it checks them itself."""

    name: Name  # of the registry
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # plain data: text, numbers, lists, dictionaries
    file: str | None = None  # path/to/file.py:Class, of a class of the user's own; makes no other run
    file_sha256: str | None = None


@dataclasses.dataclass(frozen=True)
class AttentionConfig(Section):
    """What a query may see, whatever the encoding."""

    window: Count | None = None  # keys a query may see, itself included; None = all before it
    sinks: Natural = 0  # keys at the beginning that every query sees beside its window


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """Size and kind of the transformer block."""

    n_layers: Count  # blocks
    n_heads: Count  # per block; divides d_model
    d_model: Count  # channels
    d_ff: Count | None  # channels of the feed-forward part; None = 4 x d_model, swiglu 8/3 x d_model
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    tie_embeddings: bool  # the head is the token table
    init: Literal["fan_in", "gpt2"]  # standard deviation of weights: width^-0.5, or 0.02
    attention: AttentionConfig
    n_kv_heads: Count | None = None  # heads of keys and values, each for a group of query heads; None = n_heads
    qk_norm: bool = False  # RMSNorm of each head's queries and keys before the encoding

    @property
    def token_rms(self) -> float:
        """Root mean square of the token embeddings at initialisation; GPT-2's is far too small for narrow models."""
        return {"fan_in": 0.05, "gpt2": 0.02}[self.init]

    @property
    def hidden_width(self) -> int:
        """Channels of the feed-forward part: SwiGLU's three matrices have about the weights of two of 4 x d_model."""
        return self.d_ff or (-(-8 * self.d_model // 96) * 32 if self.mlp == "swiglu" else 4 * self.d_model)

    def __post_init__(self) -> None:
        refuse_uneven("model.d_model", self.d_model, self.n_heads, "heads")
        refuse_uneven("model.n_heads", self.n_heads, self.n_kv_heads or self.n_heads, "heads of keys and values")


def refuse_uneven(key: str, value: int, divisor: int, parts: str) -> None:
    """Refuse a number that does not divide among so many parts, with the nearest ones that do."""
    if rest := value % divisor:
        near = f"{value - rest} or {value - rest + divisor}"
        raise UserError(f"{key} is {value}: it does not divide among {divisor} {parts}, nearest: {near}")


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Which text, and how it becomes tokens; or which synthetic task."""

    name: Name  # what runs, tables and figures call it
    source: Literal["builtin", "text", "hub", "task"]  # the standard library, files here, HuggingFace, problems
    path: str | None  # text: a file, folder or glob
    dataset: str | None  # hub: its name there
    subset: str | None  # hub: its configuration
    revision: str | None  # hub: commit, tag or branch; None = the newest
    column: str  # that holds the text, in tables (.jsonl, .json, .csv, .tsv, .parquet, .arrow) and on the hub
    splits: dict[str, str]  # hub: train, validation, test -> the data set's own names
    articles: bool  # a line ` = Title = ` starts a document
    max_documents: Count | None  # per split; None = all
    tokenizer: str  # bpe, bytes, a tokenizer.json, a folder with one, or a model on the hub: gpt2, gpt2@revision
    vocab_size: Count  # bpe: tokens, the 256 bytes and the separator included
    task: dict[str, Any] | None = None  # task: its name and options, which it checks itself; None = text
    offset: Natural = 0  # task: a problem's first token stands at a position from 0 to this
    test_pieces: Count | None = None  # documents or stretches to test on, of text without splits; None = 5 %
    document_mask: bool = False  # training reads no document beside another, and positions restart with each


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Section):
    """Budget, batches and the optimizer (AdamW)."""

    train_length: Annotated[int, Ge(2)]  # tokens per sequence
    tokens: Count  # all in all
    batch_size: Count  # sequences per forward pass
    accumulation: Count  # forward passes per update
    learning_rate: Positive  # the peak
    schedule: Literal["cosine", "constant", "wsd"]  # after the warm-up; wsd is read as constant
    warmup_tokens: Natural  # over which the rate rises linearly; see `warmup_steps`
    decay_fraction: Fraction  # constant: share of the updates over which the rate falls at the end, 0 to 1
    final_learning_rate: Fraction  # the last rate, as a fraction of the peak
    betas: tuple[Share, Share]  # decay per update of the averages of gradients and of their squares
    weight_decay: Annotated[float, Ge(0)]  # per update and unit of learning rate, on matrices of the model
    clip: Positive  # longest gradient: norm over all parameters
    precision: Precision  # of matrix products
    lengths: tuple[tuple[Share, Count], ...] = ()  # from a share of the updates on: tokens per sequence; () = all alike

    def __post_init__(self) -> None:
        if self.schedule == "wsd":
            object.__setattr__(self, "schedule", "constant")
        if self.steps < 1:
            raise UserError(f"training.tokens is {self.tokens}: expected at least {self.tokens_per_step}, one update")
        shares, lengths = [share for share, _ in self.lengths], [length for _, length in self.lengths]
        divide = all(self.train_length % length == 0 for length in lengths)
        if lengths and not (divide and lengths[-1] == self.train_length and shares == sorted({0.0, *shares})):
            rule = "pairs of a share, ascending from 0, and a length that divides the last one, training.train_length"
            raise UserError(f"training.lengths is {[*map(list, self.lengths)]}: expected {rule}, {self.train_length}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update sees."""
        return self.train_length * self.batch_size * self.accumulation

    @property
    def steps(self) -> int:
        """Updates all in all."""
        return self.tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """Updates over which the learning rate rises: a tenth of all for a warm-up that is longer than the training."""
        tokens = self.warmup_tokens if self.warmup_tokens <= self.tokens else self.tokens // 10
        return tokens // self.tokens_per_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Which rows an evaluation has. Nothing here makes another run."""

    protocols: Annotated[tuple[Literal["fixed_target", "nonoverlap", "problems"], ...], Len(1)]
    ratios: Annotated[tuple[Positive, ...], Len(1)]  # in training lengths or longest trained problems; ascending
    at_tokens: tuple[Natural, ...] = ()  # also on the way, after so many trained tokens: fixed_target as trained
    offsets: tuple[Count, ...] = ()  # problems: also with positions that begin there, in tokens
    longest: Annotated[float, Ge(1)] | None = None  # training lengths before all targets; None = last ratio
    windowed: bool  # also with attention cut to the training length
    sinks: Natural = 0  # also so cut, with this many first tokens seen by all; 0 = not
    extensions: tuple[str, ...] = ()  # also with these: yarn, or with options yarn:factor=4
    tasks: tuple[str, ...] = ()  # probes of the use of distant context
    split: Literal["validation", "test"]
    documents: Literal["auto", "doc", "concat"]  # whether a context may cross a document's end
    targets: Count  # fixed_target: tokens per block
    blocks: Count  # of targets; problems: how many of each length
    batch_tokens: Count  # tokens per forward pass
    precision: Precision = "auto"  # of matrix products; auto = the training's

    def __post_init__(self) -> None:
        for key in ("ratios", "at_tokens", "protocols", "extensions", "tasks", "offsets"):
            values = list(getattr(self, key))
            if len(set(values)) < len(values) or (key in ("ratios", "at_tokens") and values != sorted(values)):
                raise UserError(f"evaluation.{key} is {values}: expected each once, and numbers ascending")


@dataclasses.dataclass(frozen=True)
class TrackingConfig(Section):
    """The mirror of the run folder, at Weights & Biases or for TensorBoard."""

    backend: Literal["none", "tensorboard", "wandb"]
    mode: Literal["auto", "online", "offline"]  # auto = online where an API key is set up
    project: str
    entity: str | None  # team or user; None = W&B's default
    tags: tuple[str, ...]  # beside the encoding's name
    details: bool = False  # also the host and its use, the repository that the command runs in, and the command line


@dataclasses.dataclass(frozen=True)
class RuntimeConfig(Section):
    """Where and how to run. Nothing here makes another run."""

    outputs: str  # folder of the studies
    cache: str | None  # folder of tokenized text; None = the user's cache
    device: str  # cpu, cuda, cuda:1, mps or auto
    threads: Count | None  # of the CPU; None = as torch chooses
    compile: Literal[True, False, "auto"]  # what lies between attention layers; auto: where it pays
    log_every_steps: Count  # updates
    validate_every_steps: Natural | None  # updates; 0 = never, None = a few times in a run
    checkpoint_every_steps: Count  # updates
    clean: bool = False  # of a finished run, keep of its checkpoints the newest weights
    processes: Count | None = None  # that train a run together; None = those that torchrun started, or one
    checkpointing: bool = False  # keep the inputs of blocks alone, and compute the rest again backwards
    deterministic: bool = False  # on CUDA, only kernels that give the same bits twice


@dataclasses.dataclass(frozen=True)
class StartConfig(Section):
    """The trained run whose weights training begins from, as it was then (`config.start` reads it)."""

    run: str  # its folder, which makes no other run
    weights_sha256: str  # of the file
    tokenizer_sha256: str
    text_sha256: str  # of the corpus
    seed: int
    train_length: Count  # tokens per sequence: the original length of extensions
    batch_size: Count  # sequences per update
    steps: Count  # updates made
    tokens: Count  # its budget
    warmup_tokens: int


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """A run: what its weights follow from, how they are evaluated, and where all this happens."""

    study: Name  # the folder that a comparison's runs share
    seed: Annotated[int, Ge(0), Lt(2**63)]  # of initial weights, order of the text and random positions
    encoding: EncodingConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    runtime: RuntimeConfig
    start: StartConfig | None = dataclasses.field(default=None, kw_only=True)  # None: initial weights are random

    @property
    def id(self) -> str:
        """`<encoding>-s<seed>-<8 hex digits>`, the digits from all that shapes the trained weights."""
        shaping = without_neutral(to_container(self))
        shaping["encoding"].pop("file", None)  # paths make no other run
        if self.start:
            shaping["start"]["run"] = ""
        return f"{self.encoding.name}-s{self.seed}-{digest(one_number(shaping))}"

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return Path(self.runtime.outputs, self.study, self.id)

    @property
    def original_length(self) -> int:
        """Tokens per sequence that the weights were first trained with: what encodings take as the training length."""
        return self.start.train_length if self.start else self.training.train_length

    def __post_init__(self) -> None:
        refuse_uneven("training.batch_size", self.training.batch_size, self.runtime.processes or 1, "processes")
        asked, length, is_task = self.evaluation, self.training.train_length, self.data.task is not None
        protocols = "problems (experiment=tasks)" if is_task else "fixed_target or nonoverlap, since the data is text"
        most = self.training.tokens
        for key, wrong, expected in (
            ("targets", asked.targets > length and not is_task, f"at most training.train_length, {length}"),
            ("protocols", any((each == "problems") != is_task for each in asked.protocols), protocols),
            ("offsets", asked.offsets and not is_task, "[]: they are for tasks"),
            ("tasks", asked.tasks and is_task, "[]: probes are of text"),
            ("ratios", is_task and asked.ratios[0] < 1, "numbers from 1 on: they are of longest trained problems"),
            ("at_tokens", asked.at_tokens and is_task, "[] (validate_every_steps measures a task on the way)"),
            ("at_tokens", max(asked.at_tokens, default=0) > most, f"at most training.tokens, {most:,}"),
        ):
            if wrong:
                raise UserError(f"evaluation.{key} is {suggest.as_typed(getattr(asked, key))}: expected {expected}")
        short, project = (".{1,64}", "1 to 64"), (r"[^/\\#?%:]{1,128}", r"1 to 128, none of them among /\#?%:")
        names = [("study", self.study, short), ("tracking.project", self.tracking.project, project)]
        names += [("tracking.tags", tag, short) for tag in self.tracking.tags]
        for key, name, (pattern, takes) in names if self.tracking.backend == "wandb" else ():
            if not re.fullmatch(pattern, name):  # W&B would refuse it when the run has begun
                raise UserError(f"{key} is '{name}', {len(name)} characters: W&B takes {takes} (or tracking=none)")
        if is_task and (self.data.document_mask or self.training.lengths):
            raise UserError("data.document_mask and training.lengths are for text: problems are sequences of their own")
        if self.model.attention.sinks and self.model.attention.window is None:
            raise UserError(f"model.attention.sinks is {self.model.attention.sinks}: expected model.attention.window")


# -- reading and saving ------------------------------------------------------------------------------------------------


def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key of a section with its type, `section.key` with a prefix."""
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key, hint = f"{prefix}{field.name}", field.type
        hints |= keys(hint, f"{key}.") if isinstance(hint, type) and dataclasses.is_dataclass(hint) else {key: hint}
    return hints


def kind(hint: Any) -> str:
    """Return how a value of a type is read: `text`, `int`, `float`, `texts` and so on for lists, else `yaml`."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return "yaml" if typing.get_origin(inner[0]) is tuple else f"{kind(inner[0])}s"
    if origin in (Annotated, typing.Union, types.UnionType):
        return kind(inner[0])  # of a union, the other is None
    if hint is str or (origin is Literal and all(isinstance(each, str) for each in inner)):
        return "text"
    return {int: "int", float: "float"}.get(hint, "yaml")


def validate(cls: type[_Section], plain: Mapping[str, Any], section: str = "") -> _Section:
    """Make a configuration dataclass of a plain dictionary; UserError of one line for a wrong key, type or range.

    `encoding` is flat in YAML (`{name: rope, base: 10000}`); here its options are split from its name.
    """
    import pydantic

    hints, plain = keys(cls), completed(plain) if "encoding" in plain else dict(plain)
    if isinstance(encoding := plain.get("encoding"), Mapping):
        known = {key: encoding.get(key) for key in ("name", *_SOURCE)}
        plain["encoding"] = known | {"options": {key: encoding[key] for key in encoding if key not in known}}
    for key, value in flat(plain).items():  # pydantic would read true as 1
        items = value if isinstance(value, list) else [value]
        if kind(hints.get(key)).startswith(("int", "float")) and any(isinstance(item, bool) for item in items):
            raise suggest.invalid({"loc": (key,), "type": "int", "input": value}, hints, section)
    try:
        return _reader(cls).validate_python(plain)  # type: ignore[no-any-return, arg-type] # a class is hashable
    except pydantic.ValidationError as error:
        raise suggest.invalid(dict(error.errors(include_url=False)[0]), hints, section) from None


@functools.cache  # making one takes longer than all it will read
def _reader(cls: Any) -> Any:
    import pydantic

    return pydantic.TypeAdapter(cls)


def to_container(config: Any) -> dict[str, Any]:
    """Return a configuration as plain JSON types, with an encoding's options beside its name."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    options = plain["encoding"].pop("options")
    source = {key: path for key in _SOURCE if (path := plain["encoding"].pop(key))}
    plain["encoding"] |= options | source
    return plain


def flat(container: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in container.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out
