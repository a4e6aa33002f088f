"""The configuration of a run: frozen dataclasses with their bounds, read from plain
data in one place.

`configs/*/*.yaml` explain the fields and hold their defaults.
"""

import dataclasses
import json
import re
import typing
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Len, Lt, Predicate

from posbench import encodings, registry
from posbench.config import shipped
from posbench.config.digest import run_id
from posbench.errors import UserError, unknown
from posbench.options import (
    AtLeast1,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Positive,
    Share,
)

NAME_BYTES = 128  # in UTF-8: a folder's name has at most 255, with a run's id
_SOURCE = ("file", "file_sha256")  # keys of an encoding in a user's file


def in_names(character: str) -> bool:
    """Return whether names may have a character: letters of any script, with their
    marks, and digits.
    """
    return character in "._-" or unicodedata.category(character)[0] in "LMN"


def _is_name(text: str) -> bool:
    is_short = len(text.encode()) <= NAME_BYTES
    has_ends = text[:1].isalnum() and not text.endswith(".")
    return is_short and has_ends and all(map(in_names, text))


# it also names a folder
Name = Annotated[str, Predicate(_is_name)]
Precision = Literal["auto", "fp32", "bf16"]
_Section = TypeVar("_Section")
_VALIDATORS: dict[type, Any] = {}
# What was expected, by the first word of pydantic's name for a mistake, where
# pydantic's message says less.
_EXPECTED = {
    "int": "a whole number, such as 1e6 or 1M",
    "float": "a number, such as 2 or 0.5",
    "tuple": "a list",
    "too": "one value or more",
    "missing": "two numbers, such as [0.9,0.95]",
    "predicate": (
        "letters, digits, '.', '_' and '-', at most 128 bytes, a letter or digit first"
    ),
}


@typing.dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Section:
    """A part of a configuration: a frozen dataclass, read by pydantic without unknown
    keys and infinite numbers.
    """

    __pydantic_config__ = {  # noqa: RUF012
        "extra": "forbid",
        "allow_inf_nan": False,
    }

    def __init_subclass__(cls, kw_only: bool = False) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)


class EncodingConfig(Section):
    """Which encoding, and the options for its constructor, which checks them itself."""

    name: Name  # in the registry
    # plain data: text, numbers, lists, dictionaries
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    # path/to/file.py:Class of a user's class; not part of a run's id
    file: str | None = None
    file_sha256: str | None = None


class AttentionConfig(Section):  # what a query may see, whatever the encoding
    # keys a query may see, itself included; None = all before it
    window: Count | None
    sinks: Natural  # keys at the beginning that every query sees beside its window


class ModelConfig(Section):
    """Size and kind of the transformer block."""

    n_layers: Count  # blocks
    n_heads: Count  # per block; divides d_model
    d_model: Count  # channels
    # channels of the feed-forward part, 0 = none; None = 4 x d_model, swiglu 8/3 x
    # d_model
    d_ff: Natural | None
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    tie_embeddings: bool  # the output layer shares the token table
    # standard deviation of weights: width^-0.5, or 0.02
    init: Literal["fan_in", "gpt2"]
    attention: AttentionConfig
    # heads of keys and values, each for a group of query heads; None = n_heads
    n_kv_heads: Count | None
    qk_norm: bool  # RMSNorm of each head's queries and keys before the encoding

    @property
    def token_rms(self) -> float:
        """Root mean square of the token embeddings at initialisation; GPT-2's is far
        too small for narrow models.
        """
        return {"fan_in": 0.05, "gpt2": 0.02}[self.init]

    @property
    def hidden_width(self) -> int:
        """Feed-forward channels. By default SwiGLU's three matrices have about as many
        weights as GELU's two.
        """
        if self.d_ff is not None:
            return self.d_ff
        defaults = {"gelu": 4 * self.d_model, "swiglu": -(-8 * self.d_model // 96) * 32}
        return defaults[self.mlp]

    def __post_init__(self) -> None:
        refuse_uneven("model.d_model", self.d_model, self.n_heads, "heads")
        refuse_uneven(
            "model.n_heads",
            self.n_heads,
            self.n_kv_heads or self.n_heads,
            "heads of keys and values",
        )


def refused(key: str, value: Any, expected: str) -> UserError:
    """Return the error about a value that a key cannot have."""
    # as it is typed: null and true, not None and True
    typed = json.dumps(value, ensure_ascii=False, default=str).replace('"', "'")
    return UserError(f"{key} is {typed}: expected {expected}")


def refuse_uneven(key: str, value: int, divisor: int, parts: str) -> None:
    """Refuse a number that `divisor` does not divide, and name the nearest numbers that
    it divides.
    """
    remainder = value % divisor
    if remainder:
        near = f"{value - remainder} or {value - remainder + divisor}"
        raise UserError(
            f"{key} is {value}: it does not divide among {divisor} {parts}, nearest:"
            f" {near}"
        )


class DataConfig(Section):
    """Which text, and how it becomes tokens; or which synthetic task."""

    name: Name  # what runs, tables and figures call it
    # the standard library, files here, HuggingFace, problems
    source: Literal["builtin", "text", "hub", "task"]
    path: str | None  # text: a file, folder or glob, where it was last seen
    dataset: str | None  # hub: its name there
    subset: str | None  # hub: its configuration
    revision: str | None  # hub: commit, tag or branch; None = the newest
    # the column of the text in tables (.jsonl, .json, .csv, .tsv, .parquet) and on the
    # hub
    column: str
    splits: dict[str, str]  # hub: train, validation, test -> the data set's own names
    articles: bool  # a line ` = Title = ` starts a document
    max_documents: Count | None  # per split; None = all
    # bpe, bytes, a tokenizer.json, a folder with one, or a model on the hub: gpt2,
    # gpt2@revision
    tokenizer: str
    # bpe: number of tokens, including the 256 bytes and the separator
    vocab_size: Count
    # task: its name and options, which it checks itself; None = text
    task: dict[str, Any] | None
    # task: the highest position of a problem's first token; the lowest is 0
    offset: Natural
    # text without splits: documents or stretches to test on; None = 5 %
    test_pieces: Count | None
    # in training no document sees another, and positions restart with each
    document_mask: bool
    # text: the digest of its files, which is what tells it from others; None: not read
    text_sha256: str | None = None


class TrainingConfig(Section):
    """Budget, batches and the optimizer."""

    train_length: Annotated[int, Ge(2)]  # tokens per sequence
    tokens: Count  # of the whole training
    batch_size: Count  # sequences per forward pass
    accumulation: Count  # forward passes per update
    learning_rate: Positive  # the peak rate
    # after the warm-up; wsd is read as constant
    schedule: Literal["cosine", "constant", "wsd"]
    warmup_tokens: Natural  # the rate rises linearly over these; see `warmup_steps`
    # constant: share of the updates over which the rate falls at the end, 0 to 1
    decay_fraction: Fraction
    final_learning_rate: Fraction  # the last rate, as a fraction of the peak
    # decay per update of the averages of gradients and of their squares
    betas: tuple[Share, Share]
    # per update and unit of learning rate, on matrices of the model
    weight_decay: NonNegative
    clip: Positive  # largest norm of the gradient, over all parameters
    precision: Precision  # the dtype of matrix products
    # a module of `training/optimizers`; None = adamw
    optimizer: str | None = None
    # muon: its learning rate for the blocks' matrices, as a multiple of learning_rate
    muon_ratio: Positive = 1.0
    # muon: decay per update of the average of the blocks' gradients
    momentum: Share = 0.95

    def __post_init__(self) -> None:
        if self.schedule == "wsd":
            object.__setattr__(self, "schedule", "constant")
        if self.optimizer == "adamw":
            object.__setattr__(self, "optimizer", None)
        optimizers = registry.names(registry.OPTIMIZERS)
        if self.optimizer is not None and self.optimizer not in optimizers:
            raise unknown("optimizer", self.optimizer, optimizers)

    @property
    def tokens_per_step(self) -> int:
        return self.train_length * self.batch_size * self.accumulation

    @property
    def steps(self) -> int:  # updates
        return self.tokens // self.tokens_per_step

    @property
    def warmup_steps(self) -> int:
        """The updates over which the learning rate rises; a tenth of all if the warm-up
        is longer than the training.
        """
        tokens = self.warmup_tokens
        if tokens > self.tokens:
            tokens = self.tokens // 10
        return tokens // self.tokens_per_step


class EvaluationConfig(Section, kw_only=True):
    """Which rows an evaluation has. Nothing here makes another run."""

    protocols: Annotated[
        tuple[Literal["fixed_target", "nonoverlap", "problems"], ...], Len(1)
    ]
    # in training lengths or longest trained problems
    ratios: Annotated[tuple[Positive, ...], Len(1)]
    # evaluate during training, too, after so many tokens: fixed_target as trained
    at_tokens: tuple[Natural, ...]
    # problems: further positions of the first token to test
    offsets: tuple[Count, ...]
    # training lengths of text before each target; None = largest ratio
    longest: AtLeast1 | None
    windowed: bool  # evaluate with attention cut to the training length, too
    # the same, but every query also sees this many first tokens; 0 = off
    sinks: Natural
    # evaluate with each of these, too: yarn, or with options yarn:factor=4
    extensions: tuple[str, ...]
    probes: tuple[str, ...]  # of the use of distant context
    split: Literal["validation", "test"]
    # whether a context may cross a document's end
    documents: Literal["auto", "doc", "concat"]
    targets: Count  # fixed_target: tokens per block
    blocks: Count  # blocks of targets; problems: how many of each length
    batch_tokens: Count  # tokens per forward pass
    # the dtype of matrix products; auto = that of training
    precision: Precision

    def as_trained(self, **changes: Any) -> "EvaluationConfig":
        """Return these settings, changed, for the model as it was trained: without its
        variants, and without probes.
        """
        return dataclasses.replace(
            self, windowed=False, sinks=0, extensions=(), probes=(), **changes
        )


class TrackingConfig(Section):
    """The mirror of the run folder, at Weights & Biases or for TensorBoard."""

    backend: str  # none, or a module of `tracking/sessions`
    # auto = online where an API key is set up
    mode: Literal["auto", "online", "offline"]
    project: Annotated[str, Len(1, 128)]  # W&B takes at most 128 characters
    entity: str | None  # team or user; None = W&B's default
    tags: tuple[Annotated[str, Len(1, 64)], ...]  # tags beside the encoding's name

    def __post_init__(self) -> None:
        backends = ["none", *registry.names(registry.TRACKERS)]
        if self.backend not in backends:
            raise unknown("tracker", self.backend, backends)


class RuntimeConfig(Section):
    """Where and how to run. Nothing here makes another run."""

    outputs: str  # folder of the studies
    cache: str | None  # folder of tokenized text; None = the user's cache
    device: str  # cpu, cuda, cuda:1, mps or auto
    threads: Count | None  # CPU threads; None = torch's choice
    # compile the code between attention layers; on CUDA also attention by blocks
    compile: bool
    log_every_steps: Count  # updates between lines of metrics
    # updates between validations; 0 = never, None = a few times in a run
    validate_every_steps: Natural | None
    checkpoint_every_steps: Count  # updates between checkpoints
    # processes that train one run; None = those that torchrun started, or one
    processes: Count | None
    # keep only the inputs of blocks, and recompute the rest in the backward pass
    checkpointing: bool
    deterministic: bool  # on CUDA, only kernels that give the same bits twice


class StartConfig(Section):
    """The trained run whose weights training begins from, as it was then (`compose`
    reads it).
    """

    run: str  # its folder, which is not part of the id
    weights_sha256: str  # of the file of weights
    tokenizer_sha256: str
    text_sha256: str  # of the corpus
    seed: int
    train_length: Count  # tokens per sequence: the original length for extensions
    batch_size: Count  # sequences per update
    steps: Count  # updates made
    tokens: Count  # its budget for training
    warmup_tokens: int
    # of its encoding, other than the defaults
    options: dict[str, Any]


class Config(Section):
    """A run: what its weights follow from, how they are evaluated, and where all this
    happens.
    """

    is_trained_here: ClassVar[Literal[True]] = True
    study: Name  # the folder that a comparison's runs share
    # sets initial weights, order of the text and random positions
    seed: Annotated[int, Ge(0), Lt(2**63)]
    encoding: EncodingConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    runtime: RuntimeConfig
    # None: initial weights are random
    start: StartConfig | None

    @property
    def id(self) -> str:
        """The run's name; its digits are a digest of all that shapes the weights."""
        return run_id(to_container(self))

    @property
    def folder(self) -> Path:
        return Path(self.runtime.outputs, self.study, self.id)

    @property
    def original_length(self) -> int:
        """Tokens per sequence that the weights were first trained with: what encodings
        take as the training length.
        """
        return self.start.train_length if self.start else self.training.train_length

    def build_encoding(
        self, vocabulary: tuple[str, ...] = ()
    ) -> "encodings.base.Encoding":
        """Build the run's encoding; `vocabulary` holds token texts by id. Raises
        UserError for a wrong option.
        """
        import torch

        from posbench.encodings.base import Shape

        model = self.model
        encoding = self.encoding
        if encoding.file:
            from posbench.encodings.own import Recorded, class_of

            code = Recorded(encoding.file, encoding.file_sha256)
            encodings.register(class_of(code)[0])
        sizes = (model.d_model, model.n_heads, model.n_layers, self.original_length)
        n_kv_heads = model.n_kv_heads or 0
        shape = Shape(*sizes, vocabulary, model.token_rms, n_kv_heads=n_kv_heads)
        # the caller's random numbers stay the same
        with torch.random.fork_rng(devices=[]):
            return encodings.build(encoding.name, shape, encoding.options)

    def __post_init__(self) -> None:
        data = self.data
        attention = self.model.attention
        training = self.training
        processes = self.runtime.processes or 1
        refuse_uneven(
            "training.batch_size", training.batch_size, processes, "processes"
        )
        if data.path and data.source != "text":
            expected = f"data=text: data={data.source} does not read it"
            raise refused("data.path", data.path, expected)
        if data.dataset and data.source != "hub":
            expected = f"data=hub: data={data.source} does not read it"
            raise refused("data.dataset", data.dataset, expected)
        if data.tokenizer == "bpe" and data.vocab_size < 257:
            expected = "at least 257, the bytes and the separator"
            raise refused("data.vocab_size", data.vocab_size, expected)
        if attention.sinks and attention.window is None:
            raise refused(
                "model.attention.sinks", attention.sinks, "model.attention.window"
            )
        if training.steps < 1:
            expected = f"at least {training.tokens_per_step}, one update"
            raise refused("training.tokens", training.tokens, expected)
        if data.task is None:
            self._refuse_rows_of_problems()
        else:
            self._refuse_rows_of_text()

    def _refuse_rows_of_problems(self) -> None:
        """Refuse settings of evaluation that only a task has, and targets that do not
        fit into a training sequence.
        """
        evaluation = self.evaluation
        length = self.training.train_length
        if "problems" in evaluation.protocols:
            expected = "fixed_target or nonoverlap, since the data is text"
            raise refused("evaluation.protocols", evaluation.protocols, expected)
        if evaluation.offsets:
            expected = f"[] for data={self.data.source}"
            raise refused("evaluation.offsets", evaluation.offsets, expected)
        if evaluation.targets > length:
            expected = f"at most training.train_length, {length}"
            raise refused("evaluation.targets", evaluation.targets, expected)

    def _refuse_rows_of_text(self) -> None:
        """Refuse settings of evaluation that only a text has."""
        evaluation = self.evaluation
        if evaluation.protocols != ("problems",):
            expected = "problems (experiment=tasks)"
            raise refused("evaluation.protocols", evaluation.protocols, expected)
        if evaluation.probes:
            raise refused("evaluation.probes", evaluation.probes, "[] for data=task")
        if evaluation.at_tokens:
            raise refused(
                "evaluation.at_tokens", evaluation.at_tokens, "[] for data=task"
            )


class ModelElsewhere(Section):  # a model that was trained elsewhere
    name: str  # what tables and its folder call it
    source: str  # where it was found: a folder, or a name on the hub
    revision: str | None  # hub: the commit
    sha256: str  # of its configuration, tokenizer and weights
    kind: str  # the model_type of its configuration
    n_layers: int
    n_heads: int | None  # None: it has no attention
    d_model: int


class TrainingElsewhere(Section):  # what is known of that model's training
    train_length: int  # tokens per sequence


class ReadingConfig(Section):  # what that model reads beside the text
    separator: int  # id of the token before each document
    first: bool  # whether that token also replaces the first one of every window


class TrainedElsewhere(Section, kw_only=True):
    """A model that was trained elsewhere, and how it is evaluated."""

    is_trained_here: ClassVar[Literal[False]] = False
    study: str
    encoding: EncodingConfig  # the encoding that it has here
    model: ModelElsewhere  # the model as it was found
    reading: ReadingConfig
    data: DataConfig  # the text it is evaluated on
    evaluation: EvaluationConfig
    training: TrainingElsewhere

    @property
    def id(self) -> str:
        """Its name; the digits are a digest of model, reading and text."""
        return run_id(to_container(self))


# what the folder of a run, or of an evaluated model, holds
AnyConfig = Config | TrainedElsewhere


def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key of a section with its type, `section.key` with a prefix."""
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        hint = field.type
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            hints |= keys(hint, f"{key}.")
        else:
            hints[key] = hint
    return hints


class ValueType(NamedTuple):
    """How a value is read."""

    item: Literal["text", "number", "yaml"]
    is_list: bool = False


def value_type(hint: Any) -> ValueType:
    """Return how a value of a type is read. What is no text or number is YAML."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is str or origin is Literal:
        return ValueType("text")
    if hint in (int, float):
        return ValueType("number")
    if origin in (None, dict):
        return ValueType("yaml")
    if origin is tuple:
        return ValueType(value_type(inner[0]).item, is_list=True)
    return value_type(inner[0])  # a union's other type is None


def validate(cls: type[_Section], plain: Mapping[str, Any]) -> _Section:
    """Make a section from plain data (`encoding` is flat). A wrong key, type or range
    is a UserError of one line.
    """
    hints = keys(cls)
    plain = dict(plain)
    encoding = plain.get("encoding")
    if isinstance(encoding, Mapping):
        options = dict(encoding)
        fields = {key: options.pop(key, None) for key in ("name", *_SOURCE)}
        plain["encoding"] = fields | {"options": options}

    for key, value in flat(plain).items():  # pydantic would read true as 1
        is_number = value_type(hints.get(key)).item == "number"
        if is_number and re.search("True|False", str(value)):
            raise refused(key, value, "a number")

    if cls not in _VALIDATORS:  # making one takes longer than all that it will read
        import pydantic

        _VALIDATORS[cls] = pydantic.TypeAdapter(cls)
    try:
        return _VALIDATORS[cls].validate_python(plain)  # type: ignore[no-any-return]
    except ValueError as errors:
        error: Any = errors.errors(include_url=False)[0]  # type: ignore[attr-defined]

    # pydantic's first error as one line
    place, mistake, message = error["loc"], error["type"], error["msg"]
    # indices into lists say little
    key = ".".join(part for part in place if isinstance(part, str))
    if mistake == "unexpected_keyword_argument":
        raise unknown("key", key, hints, "'posbench train --cfg' shows all")
    if mistake in ("missing", "missing_argument") and isinstance(place[-1], str):
        raise UserError(f"missing key '{key}'")

    expected = _EXPECTED.get(mistake.partition("_")[0])
    if (key, error["input"]) == ("tracking.mode", "disabled"):
        expected = "tracking=none instead"
    if expected is None:
        expected = message.removeprefix("Input should be ")
        expected = expected.replace("greater than or equal to", "at least")
        expected = expected.replace("less than or equal to", "at most")
        in_a_file = "text (in a file, put it into quotation marks)"
        expected = expected.replace("a valid string", in_a_file)
    raise refused(key, error["input"], expected)


def load_plain(path: Path) -> dict[str, Any]:
    """Return the `config.yaml` of a run as plain data, with the names that keys have
    now. Raises UserError if it cannot be read.
    """
    container = shipped.load(path)
    evaluation = container.get("evaluation")
    if isinstance(evaluation, dict) and "tasks" in evaluation:
        evaluation["probes"] = evaluation.pop("tasks")
    return container


def load_saved(path: Path) -> AnyConfig:
    """Read the `config.yaml` of a run, or of a model from elsewhere. Raises UserError
    if it is not one.
    """
    container = load_plain(path)
    cls: type[AnyConfig] = Config
    if "reading" in container:
        cls = TrainedElsewhere
    try:
        return validate(cls, container)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def to_container(config: Any) -> dict[str, Any]:
    """Return a configuration as plain JSON types, with an encoding's options beside its
    name.
    """
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    fields = plain["encoding"]
    plain["encoding"] = {"name": fields["name"], **fields["options"]}
    for key in _SOURCE:
        if fields[key]:
            plain["encoding"][key] = fields[key]
    return plain


def flat(container: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with dotted keys."""
    settings: dict[str, Any] = {}
    for key, value in container.items():
        if isinstance(value, dict):
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value
    return settings
