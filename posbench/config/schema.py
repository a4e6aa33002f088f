"""The configuration of a run: frozen dataclasses with their bounds, read from plain
data in one place.

A field says what it means, for `posbench train --cfg`; `configs/` has the defaults.
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


def setting(meaning: str, **default: Any) -> Any:
    """Return the field of a setting, with what it means, as `--cfg` prints it."""
    return dataclasses.field(metadata={"meaning": meaning}, **default)


@typing.dataclass_transform(
    frozen_default=True, field_specifiers=(dataclasses.field, setting)
)
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
    window: Count | None = setting(
        "keys a query may see, itself included; null = all before it"
    )
    sinks: Natural = setting(
        "first keys that every query sees in addition to its window"
    )


class ModelConfig(Section):
    """Size and kind of the transformer block."""

    n_layers: Count = setting("blocks")
    n_heads: Count = setting("attention heads per block")
    d_model: Count = setting("width of the model; a multiple of n_heads")
    d_ff: Natural | None = setting(
        "width of the feed-forward part; 0 = none; null = 4 x d_model (swiglu: 8/3 x"
        " d_model, for an equal number of parameters)"
    )
    norm: Literal["layernorm", "rmsnorm"] = setting("layernorm or rmsnorm")
    mlp: Literal["gelu", "swiglu"] = setting("feed-forward part: gelu or swiglu")
    tie_embeddings: bool = setting("the output layer shares the token table")
    init: Literal["fan_in", "gpt2"] = setting(
        "initial weights: fan_in (width^-0.5, for widths up to 256) or gpt2 (0.02,"
        " for larger ones)"
    )
    attention: AttentionConfig
    n_kv_heads: Count | None = setting(
        "heads of keys and values, each shared by a group of query heads; null ="
        " n_heads"
    )
    qk_norm: bool = setting(
        "RMSNorm of each head's queries and keys before the encoding"
    )

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

    def shape(
        self, train_length: int, vocabulary: tuple[str, ...]
    ) -> "encodings.base.Shape":
        """Return the shape that an encoding in this model has; `vocabulary` as in
        `build_encoding`.
        """
        from posbench.encodings.base import Shape

        return Shape(
            self.d_model,
            self.n_heads,
            self.n_layers,
            train_length,
            vocabulary,
            self.token_rms,
            n_kv_heads=self.n_kv_heads or 0,
        )

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


# the source that reads a setting of data; others would leave it out
_READ_BY = {
    "path": "text",
    "dataset": "hub",
    "subset": "hub",
    "revision": "hub",
    "offset": "task",
}


class DataConfig(Section):
    """Which text, and how it becomes tokens; or which synthetic task."""

    name: Name = setting("name of this text in runs, tables and figures")
    source: Literal["builtin", "text", "hub", "task"] = setting(
        "builtin = the running Python's standard library; text = files on this"
        " machine; hub = HuggingFace; task = problems"
    )
    path: str | None = setting(
        "Your own text: a file, folder or glob. One document per file: .txt .md .py"
        " .rst .tex; one per row: .jsonl .json .csv .tsv .parquet; text also as .gz"
        " .zst .bz2."
    )
    dataset: str | None = setting("its name on the hub")
    subset: str | None = setting(
        "the hub's configuration of the data set; null = its only one"
    )
    revision: str | None = setting(
        "commit, tag or branch on the hub; null = the newest. run.json records the"
        " commit"
    )
    column: str = setting("which column of a table's or the hub's rows holds the text")
    splits: dict[str, str] = setting(
        "on the hub, or in a folder of save_to_disk: our split -> the data set's name"
        " for it; {} = same names. Missing splits are split off the others."
    )
    articles: bool = setting(
        "true = lines of WikiText: a ` = Title = ` line starts a document"
    )
    max_documents: Count | None = setting(
        "read at most this many documents of each split (on the hub: in order of"
        " download); null = all"
    )
    tokenizer: str = setting(
        "bpe = byte-level BPE trained on the training split; bytes = 256 bytes; or an"
        " existing tokenizer: a tokenizer.json, a folder with one, or a model on the"
        " hub, gpt2 or gpt2@revision."
    )
    vocab_size: Count = setting(
        "bpe only: size of the vocabulary, with the 256 bytes and the separator"
    )
    task: dict[str, Any] | None = setting("task only: its name and options")
    offset: Natural = setting(
        "task only: each training problem begins at a random position from 0 to this;"
        " 0 = all begin at 0"
    )
    test_pieces: Count | None = setting(
        "Only for text without its own splits: the test part gets at least this many"
        " documents, as long as 70 % of the text remain for training. A text of fewer"
        " than 20 documents is cut into stretches, and the test part gets this many of"
        " them. null = 5 % of the documents, or 8 stretches."
    )
    document_mask: bool = setting(
        "true = in training, no document sees another one in the same sequence, and"
        " positions restart with each document."
    )
    text_sha256: str | None = setting(
        "text only: posbench writes the digest of the files here; a run's text is"
        " this, wherever they are",
        default=None,
    )
    tokenizer_file_sha256: str | None = setting(
        "the same of a tokenizer's file", default=None
    )


class TrainingConfig(Section):
    """Budget, batches and the optimizer."""

    train_length: Annotated[int, Ge(2)] = setting(
        "tokens per training sequence: the length beyond which a model extrapolates"
    )
    tokens: Count = setting("total tokens trained on")
    batch_size: Count = setting("sequences per forward pass")
    accumulation: Count = setting(
        "forward passes per update; one update sees batch_size x accumulation x"
        " train_length tokens"
    )
    learning_rate: Positive = setting(
        "the peak; in a sweep, tune=true sets it per encoding"
    )
    schedule: Literal["cosine", "constant", "wsd"] = setting(
        "after the warm-up: cosine, or constant with a linear fall at the end (also"
        " called wsd)"
    )
    warmup_tokens: Natural = setting(
        "the learning rate rises linearly over these; over a tenth of tokens, if"
        " tokens is smaller"
    )
    decay_fraction: Fraction = setting(
        "constant schedule only: share of the updates over which the rate falls at"
        " the end"
    )
    final_learning_rate: Fraction = setting(
        "the last learning rate, as a fraction of the peak"
    )
    betas: tuple[Share, Share] = setting(
        "decay rates of AdamW's averages of gradients and of their squares"
    )
    weight_decay: NonNegative = setting(
        "on matrices of the model; never on norms or on an encoding's parameters"
    )
    clip: Positive = setting("largest norm of the gradient, over all parameters")
    precision: Precision = setting(
        "dtype of matrix products: bf16, fp32; auto = bf16 if the device is fast at"
        " it, else fp32"
    )
    optimizer: str | None = setting(
        "a file of posbench/training/optimizers: adamw; muon = Muon for the blocks'"
        " matrices, AdamW for all else; null = adamw",
        default=None,
    )
    muon_ratio: Positive = setting(
        "muon: learning rate of the blocks' matrices, as a multiple of learning_rate;"
        " at 1 their updates are as large as AdamW's",
        default=1.0,
    )
    momentum: Share = setting(
        "muon: decay rate of the average of these matrices' gradients", default=0.95
    )

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
    ] = setting("fixed_target, nonoverlap or both; on tasks problems")
    ratios: Annotated[tuple[Positive, ...], Len(1)] = setting(
        "lengths to evaluate, as multiples of the training length or of the longest"
        " trained problem"
    )
    at_tokens: tuple[Natural, ...] = setting(
        "also evaluate during training, after so many of its tokens: fixed_target at"
        " all lengths, with the model unchanged"
    )
    offsets: tuple[Count, ...] = setting(
        "tasks only: also test problems whose first token is at these positions"
    )
    longest: AtLeast1 | None = setting(
        "text before each target, in training lengths; null = the largest ratio so far"
    )
    windowed: bool = setting(
        "also evaluate with attention cut to the training length, the baseline to beat"
    )
    sinks: Natural = setting(
        "also evaluate with attention cut to the training length plus this many first"
        " tokens; 0 = off"
    )
    extensions: tuple[str, ...] = setting(
        "also evaluate with these context extensions, at every length"
    )
    probes: tuple[str, ...] = setting(
        "of the use of distant context, such as passkey or passkey:keys=4; `posbench"
        " list` names all"
    )
    split: Literal["validation", "test"] = setting(
        "the split to evaluate on: test or validation"
    )
    documents: Literal["auto", "doc", "concat"] = setting(
        "doc: context never crosses a document's end; concat: it may; auto: doc if"
        " documents are long enough"
    )
    targets: Count = setting(
        "fixed_target: target tokens per block, at most train_length"
    )
    blocks: Count = setting(
        "blocks of targets, spread over the documents of the text; confidence"
        " intervals are over documents"
    )
    batch_tokens: Count = setting("tokens per forward pass; fewer need less memory")
    precision: Precision = setting(
        "dtype of matrix products: fp32, bf16; auto = as in training. A named one"
        " replaces rows of other precisions"
    )

    def __post_init__(self) -> None:
        for text in self.extensions:
            encodings.refuse_extension(text.partition(":")[0])
        known = registry.names(registry.PROBES)
        for text in self.probes:
            name = text.partition(":")[0]
            if name not in known:
                raise unknown(
                    "probe",
                    name,
                    known,
                    f"there are {', '.join(known)}; to train on a task: data=task/copy",
                )

    def as_trained(self, **changes: Any) -> "EvaluationConfig":
        """Return these settings, changed, for the model as it was trained: without its
        variants, and without probes.
        """
        return dataclasses.replace(
            self, windowed=False, sinks=0, extensions=(), probes=(), **changes
        )


class TrackingConfig(Section):
    """The mirror of the run folder, at Weights & Biases or for TensorBoard."""

    backend: str = setting("wandb, tensorboard or none; the other keys are for wandb")
    mode: Literal["auto", "online", "offline"] = setting(
        "offline, or auto = online if an API key is set up, else offline; online ="
        " auto, but warns if it is offline; never asks"
    )
    # W&B takes at most 128 characters
    project: Annotated[str, Len(1, 128)] = setting("W&B project of the runs")
    entity: str | None = setting("team or user; null = your default")
    tags: tuple[Annotated[str, Len(1, 64)], ...] = setting("words to filter runs by")

    def __post_init__(self) -> None:
        backends = ["none", *registry.names(registry.TRACKERS)]
        if self.backend not in backends:
            raise unknown("tracker", self.backend, backends)


class RuntimeConfig(Section):
    """Where and how to run. Nothing here makes another run."""

    outputs: str = setting(
        "place of run folders, relative to the current folder: <outputs>/<study>/<run"
        " id>/"
    )
    cache: str | None = setting(
        "cache of tokenized text; null = the user's cache folder"
    )
    device: str = setting("cpu, cuda, cuda:1, mps; auto = cuda, else mps, else cpu")
    threads: Count | None = setting(
        "CPU threads; null = torch's choice. Bit-exact resuming needs the same number"
    )
    compile: bool = setting(
        "torch.compile the code between attention layers: faster on GPUs, and on CPUs"
        " for Llama blocks"
    )
    log_every_steps: Count = setting("updates between lines of metrics")
    validate_every_steps: Natural | None = setting(
        "updates between losses on validation text; null = four in a run, 0 = never"
    )
    checkpoint_every_steps: Count = setting(
        "updates between checkpoints for resuming; the two newest are kept"
    )
    processes: Count | None = setting(
        "processes that train one run, each with a GPU if there are any; null = those"
        " of torchrun, or one"
    )
    checkpointing: bool = setting(
        "keep only the blocks' inputs for the backward pass: less memory, a third"
        " more matrix products"
    )
    deterministic: bool = setting(
        "on CUDA use only kernels that give the same bits twice; slower. CPUs always do"
    )

    def __post_init__(self) -> None:
        if self.device.partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            expected = "auto or cpu; a GPU is cuda, one of Apple mps"
            raise refused("runtime.device", self.device, expected)


class StartConfig(Section):
    """The trained run whose weights training begins from, as it was then
    (`run.start.finished_run` reads it).
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
    study: Name = setting(
        "folder below runtime.outputs for all runs of a comparison; every experiment"
        " sets its own. Without study=, a text that is typed (data.path=,"
        " data.dataset=, data=wikitext-2) has one of its name."
    )
    seed: Annotated[int, Ge(0), Lt(2**63)] = setting(
        "sets initial weights, order of the text and random positions; comparisons"
        " pair runs of one seed"
    )
    encoding: EncodingConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    runtime: RuntimeConfig = setting(
        "How and where to run. These settings do not change the run's identity."
    )
    start: StartConfig | None = setting(
        "begin from a finished run: start=outputs/STUDY/RUN takes its model, data and"
        " seed; a sweep takes several, a,b"
    )

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

        encoding = self.encoding
        if encoding.file:
            from posbench.encodings.own import Recorded, class_of

            code = Recorded(encoding.file, encoding.file_sha256)
            encodings.register(class_of(code)[0])
        shape = self.model.shape(self.original_length, vocabulary)
        # the caller's random numbers stay the same
        with torch.random.fork_rng(devices=[]):
            return encodings.build(encoding.name, shape, encoding.options)

    def __post_init__(self) -> None:
        data = self.data
        attention = self.model.attention
        training = self.training
        for key, source in _READ_BY.items():
            value = getattr(data, key)
            if value and data.source != source:
                expected = f"data={source}: data={data.source} does not read it"
                raise refused(f"data.{key}", value, expected)
        if data.tokenizer == "bpe" and not 257 <= data.vocab_size <= 2**20:
            expected = "257 (the bytes and the separator) to 1,048,576"
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


def meanings(cls: type = Config, prefix: str = "") -> dict[str, str]:
    """Return what every key of a section means, by key as in `keys`."""
    texts: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        key = f"{prefix}{field.name}"
        texts[key] = field.metadata.get("meaning", "")
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            texts |= meanings(field.type, f"{key}.")
    return texts


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
