"""The configuration of a run: frozen dataclasses, made once from what Hydra or a saved file composed.

Below this module nobody sees YAML. Field meanings are explained in `configs/*/*.yaml`, which hold the defaults.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from posbench.config.checks import above_zero, at_least, fraction, plain_name
from posbench.config.history import completed
from posbench.config.messages import in_one_line, strict
from posbench.errors import UserError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_Section = TypeVar("_Section")
SAVED = "config.yaml"  # its file in a run folder


@dataclasses.dataclass(frozen=True)
class EncodingConfig:
    """Which encoding, and the options that its constructor is given; it checks them itself."""

    name: str  # of encodings/<name>.py or an entry point
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # plain data: text, numbers, lists, dictionaries


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What a query may see, whatever the encoding."""

    window: int | None = None  # keys a query may see, itself included; None = all before it
    sinks: int = 0  # keys at the beginning that every query sees beside its window

    def __post_init__(self) -> None:
        at_least(1, self, "model.attention", "window")
        at_least(0, self, "model.attention", "sinks")
        if self.sinks and self.window is None:
            raise UserError(f"model.attention.sinks is {self.sinks}: expected 0, or a model.attention.window beside it")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Size and kind of the transformer block."""

    n_layers: int  # blocks
    n_heads: int  # per block; divides d_model
    d_model: int  # channels
    d_ff: int | None  # channels of the feed-forward part; None = 4 x d_model, swiglu 8/3 x d_model
    norm: Literal["layernorm", "rmsnorm"]
    mlp: Literal["gelu", "swiglu"]
    tie_embeddings: bool  # the head is the token table
    init: Literal["fan_in", "gpt2"]  # standard deviation of weights: width^-0.5, or 0.02
    attention: AttentionConfig

    @property
    def token_rms(self) -> float:
        """Root mean square of the token embeddings at initialisation; GPT-2's is far too small for narrow models."""
        return {"fan_in": 0.05, "gpt2": 0.02}[self.init]

    @property
    def hidden_width(self) -> int:
        """Channels of the feed-forward part, `d_ff` or what stands for its null."""
        if self.d_ff is not None:
            return self.d_ff
        # 8/3 of the width gives three matrices the parameters of two of 4 times it; rounded up to a multiple of 32.
        return -(-8 * self.d_model // 96) * 32 if self.mlp == "swiglu" else 4 * self.d_model

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
    """Which text, and how it becomes tokens; or which synthetic task."""

    name: str  # what runs, tables and figures call it
    source: Literal["builtin", "text", "hub", "task"]  # the standard library, files here, HuggingFace, problems
    path: str | None  # text: a file, folder or glob
    dataset: str | None  # hub: its name there, or a local folder with a copy
    subset: str | None  # hub: its configuration
    revision: str | None  # hub: commit, tag or branch; None = the newest
    column: str  # that holds the text, in tables (.jsonl, .json, .csv, .tsv, .parquet, .arrow) and on the hub
    splits: dict[str, str]  # hub: train, validation, test -> the data set's own names
    articles: bool  # a line ` = Title = ` starts a document
    max_documents: int | None  # per split; None = all
    tokenizer: str  # bpe, bytes, a tokenizer.json, a folder with one, or a model on the hub: gpt2, gpt2@revision
    vocab_size: int  # bpe: tokens, the 256 bytes and the separator included
    task: dict[str, Any] | None = None  # task: its name and options, which it checks itself; None = text
    offset: int = 0  # task: a problem's first token stands at a position from 0 to this
    test_pieces: int | None = None  # documents or stretches to hold out of text without splits; None = 5 %, as before

    def __post_init__(self) -> None:
        plain_name("data.name", self.name)
        at_least(1, self, "data", "max_documents", "vocab_size", "test_pieces")
        at_least(0, self, "data", "offset")
        if (self.source == "task") != (self.task is not None):
            raise UserError(f"data.source is {self.source}, data.task {self.task}: choose a task with data=task/NAME")
        if self.task is not None and not isinstance(self.task.get("name"), str):
            raise UserError(f"data.task is {self.task}: expected its name and options")


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Budget, batches and the optimizer (AdamW)."""

    train_length: int  # tokens per sequence
    tokens: int  # all in all
    batch_size: int  # sequences per forward pass
    accumulation: int  # forward passes per update
    learning_rate: float  # the peak
    schedule: Literal["cosine", "constant"]  # after the warm-up
    warmup_tokens: int  # over which the rate rises linearly; see `warmup_steps`
    decay_fraction: float  # constant: share of the updates over which the rate falls at the end, 0 to 1
    final_learning_rate: float  # the last rate, as a fraction of the peak
    betas: tuple[float, float]  # decay per update of the averages of gradients and of their squares
    weight_decay: float  # per update and unit of learning rate, on matrices of the model
    clip: float  # longest gradient: norm over all parameters
    precision: Literal["auto", "fp32", "bf16", "fp16"]  # of matrix products

    def __post_init__(self) -> None:
        at_least(2, self, "training", "train_length")
        at_least(1, self, "training", "batch_size", "accumulation")
        at_least(self.tokens_per_step, self, "training", "tokens")
        at_least(0, self, "training", "warmup_tokens")
        at_least(0, self, "training", "weight_decay")
        above_zero(self, "training", "learning_rate", "clip")
        fraction(self, "training", "decay_fraction", "final_learning_rate")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"training.betas is {list(self.betas)}: expected two numbers from 0 to below 1")

    def refuse_uneven(self, processes: int) -> None:
        """Refuse sequences of a batch that do not divide equally among so many processes."""
        if self.batch_size % processes:
            small = [n for n in range(1, math.isqrt(self.batch_size) + 1) if self.batch_size % n == 0]
            near = sorted({*small, *(self.batch_size // n for n in small)})
            near = sorted(sorted(near, key=lambda n: abs(n - processes))[:2])
            raise UserError(
                f"training.batch_size is {self.batch_size}: it does not divide among {processes} processes, "
                f"nearest: {' or '.join(map(str, near))}"
            )

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
        """Updates over which the learning rate rises.

        A warm-up that is longer than the training is cut to a tenth of it. A short trial can then keep the default
        warm-up, which is made for a longer training.
        """
        tokens = self.warmup_tokens if self.warmup_tokens <= self.tokens else self.tokens // 10
        return tokens // self.tokens_per_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Which rows an evaluation has. Nothing here makes another run."""

    protocols: tuple[Literal["fixed_target", "nonoverlap", "sliding", "problems"], ...]
    ratios: tuple[float, ...]  # lengths, in training lengths or longest trained problems; ascending
    at_tokens: tuple[int, ...] = ()  # also on the way, after so many trained tokens: fixed_target as trained; ascending
    offsets: tuple[int, ...] = ()  # problems: also with positions that begin there, in tokens
    longest: float | None = None  # context that all targets have before them, in training lengths; None = last ratio
    windowed: bool  # also with attention cut to the training length
    sinks: int = 0  # also so cut, with this many first tokens seen by all; 0 = not
    extensions: tuple[str, ...] = ()  # also with these: yarn, or with options yarn:factor=4
    tasks: tuple[str, ...] = ()  # probes of the use of distant context
    stride: int | None = None  # sliding: tokens that each window adds; None = half the training length
    split: Literal["validation", "test"]
    documents: Literal["auto", "doc", "concat"]  # whether a context may cross a document's end
    targets: int  # fixed_target: tokens per block
    blocks: int  # of targets; problems: how many of each length
    batch_tokens: int  # tokens per forward pass
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"  # of matrix products; auto = the training's

    def __post_init__(self) -> None:
        at_least(1, self, "evaluation", "targets", "blocks", "batch_tokens", "stride")
        at_least(1, self, "evaluation", "longest")
        at_least(0, self, "evaluation", "sinks")
        ratios = list(self.ratios)
        if not ratios or ratios != sorted(set(ratios)) or not all(ratio > 0 for ratio in ratios):
            raise UserError(f"evaluation.ratios is {ratios}: expected ascending numbers above 0, such as [0.5, 1, 2]")
        if list(self.at_tokens) != sorted(set(self.at_tokens)) or not all(tokens >= 0 for tokens in self.at_tokens):
            told = f"evaluation.at_tokens is {list(self.at_tokens)}"
            raise UserError(f"{told}: expected ascending numbers of tokens, such as [500000, 1000000]")
        if not self.protocols or len(set(self.protocols)) < len(self.protocols):
            raise UserError(f"evaluation.protocols is {list(self.protocols)}: expected at least one, each once")
        if not all(offset >= 1 for offset in self.offsets):
            raise UserError(f"evaluation.offsets is {list(self.offsets)}: expected positions from 1 on")
        for name in ("extensions", "tasks", "offsets"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise UserError(f"evaluation.{name} is {list(getattr(self, name))}: expected each once")


@dataclasses.dataclass(frozen=True)
class TrackingConfig:
    """The mirror of the run folder, at Weights & Biases or for TensorBoard."""

    backend: str  # wandb, tensorboard or none
    mode: Literal["auto", "online", "offline"]  # auto = online where an API key is set up
    project: str
    entity: str | None  # team or user; None = W&B's default
    group: str | None  # of runs shown together; None = the study
    tags: tuple[str, ...]  # beside the encoding's name
    system_metrics: bool = False  # use of CPU, memory, GPU and disk over time, and the host
    git: bool = False  # commit and address of the repository that the command runs in
    command: bool = False  # the command line

    def __post_init__(self) -> None:
        plain_name("tracking.backend", self.backend)


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """Where and how to run. Nothing here makes another run."""

    outputs: str  # folder of the studies
    cache: str | None  # folder of tokenized text; None = the user's cache
    device: str  # cpu, cuda, cuda:1, mps or auto
    threads: int | None  # of the CPU; None = as torch chooses
    compile: Literal[True, False, "auto"]  # what lies between attention layers; auto: where it pays
    log_every_steps: int  # updates
    validate_every_steps: int | None  # updates; None = never
    checkpoint_every_steps: int  # updates
    clean: bool = False  # of a finished run, keep of its checkpoints the newest weights
    processes: int | None = None  # that train a run together; None = those that torchrun started, or one
    checkpointing: bool = False  # keep the inputs of blocks alone, and compute the rest again backwards
    deterministic: bool = False  # on CUDA, only kernels that give the same bits twice

    def __post_init__(self) -> None:
        every = ("log_every_steps", "validate_every_steps", "checkpoint_every_steps")
        at_least(1, self, "runtime", "threads")
        at_least(1, self, "runtime", "processes")
        at_least(1, self, "runtime", *every)


@dataclasses.dataclass(frozen=True)
class StartConfig:
    """The trained run whose weights training begins from, as it was then (`config.start` reads it)."""

    run: str  # its folder, which makes no other run
    weights_sha256: str  # of the file
    tokenizer_sha256: str
    text_sha256: str  # of the corpus
    seed: int
    train_length: int  # tokens per sequence: the original length of extensions
    batch_size: int  # sequences per update
    steps: int  # updates made
    tokens: int  # its budget
    warmup_tokens: int

    def __post_init__(self) -> None:
        at_least(1, self, "start", "train_length", "batch_size", "steps", "tokens")


@dataclasses.dataclass(frozen=True)
class Config:
    """A run: what its weights follow from, how they are evaluated, and where all this happens."""

    study: str  # the folder that a comparison's runs share
    seed: int  # of initial weights, order of the text and random positions
    encoding: EncodingConfig
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    tracking: TrackingConfig
    runtime: RuntimeConfig
    start: StartConfig | None = dataclasses.field(default=None, kw_only=True)  # None: initial weights are random

    @property
    def original_length(self) -> int:
        """Tokens per sequence that the weights were first trained with: what encodings take as the training length."""
        return self.start.train_length if self.start else self.training.train_length

    def __post_init__(self) -> None:
        plain_name("study", self.study)
        plain_name("encoding.name", self.encoding.name)
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}: expected a whole number from 0 to 2^63 - 1")
        self.training.refuse_uneven(self.runtime.processes or 1)
        self._refuse_other_protocols()
        for name, value in (("targets", self.evaluation.targets), ("stride", self.evaluation.stride or 1)):
            if value > self.training.train_length and (name == "stride" or self.data.task is None):
                told = f"evaluation.{name} is {value}: expected at most training.train_length"
                raise UserError(f"{told}, {self.training.train_length}")

    def _refuse_other_protocols(self) -> None:
        """Text has no answers, and problems no text: each is measured in its own way."""
        asked, name = self.evaluation, self.data.name
        for protocol in asked.protocols:
            if self.data.task is None and protocol == "problems":
                raise UserError(
                    f"evaluation.protocols has problems, but data '{name}' is text: expected data=task/copy or another "
                    "task, or evaluation=extrapolation"
                )
            if self.data.task is not None and protocol != "problems":
                raise UserError(
                    f"evaluation.protocols has {protocol}, for text, but data '{name}' is a task: expected "
                    "evaluation=problems, which experiment=tasks brings"
                )
        if self.data.task is None and asked.offsets:
            raise UserError(
                f"evaluation.offsets is {list(asked.offsets)}: they are for tasks, and data '{name}' is text"
            )
        if self.data.task is not None and asked.at_tokens:
            told = f"evaluation.at_tokens is {list(asked.at_tokens)}: data '{name}' is a task"
            raise UserError(f"{told}, expected [] (validate_every_steps measures it on the way)")
        if asked.at_tokens and asked.at_tokens[-1] > self.training.tokens:
            told = f"evaluation.at_tokens ends at {asked.at_tokens[-1]:,}"
            raise UserError(f"{told}: expected at most training.tokens, {self.training.tokens:,}")
        if asked.at_tokens and asked.at_tokens[0] == 0 and self.start is None:
            raise UserError("evaluation.at_tokens begins at 0: expected 1 or more, or start=RUN beside it")
        if self.data.task is not None and asked.ratios[0] < 1:
            told = f"evaluation.ratios is {list(asked.ratios)}: lengths of problems are longest trained ones"
            raise UserError(f"{told}, expected numbers from 1 on, such as [1, 2, 4]")
        if self.data.task is not None and asked.tasks:
            told = f"evaluation.tasks is {list(asked.tasks)}: probes are of text"
            raise UserError(f"{told}, and data '{name}' is a task: expected []")


def from_container(container: Mapping[str, Any]) -> Config:
    """Turn the resolved plain dictionary of a composed or saved configuration into a `Config`.

    `encoding` is flat in YAML (`{name: rope, base: 10000}`); here its options are parted from its name. Keys that came
    after the configuration was written are filled in.

    Raises:
        UserError: an unknown or missing key, a value of the wrong type or outside its range; one line.
    """
    return validate(Config, parted(completed(container)))


def parted(plain: dict[str, Any]) -> dict[str, Any]:
    """A configuration of YAML, its encoding's options parted from the name. Raises UserError if it has no encoding."""
    encoding = plain.get("encoding")
    if not isinstance(encoding, Mapping):
        raise UserError(
            "missing key 'encoding'" if encoding is None else f"encoding is {encoding!r}: expected an encoding"
        )
    options = {key: value for key, value in encoding.items() if key != "name"}
    return {**plain, "encoding": {"name": encoding.get("name"), "options": options}}


def validate(cls: type[_Section], plain: Mapping[str, Any], section: str = "") -> _Section:
    """Make a configuration dataclass of a plain dictionary; errors as `from_container`, which name the section."""
    import pydantic

    try:
        made: object = _reader(cls).validate_python(dict(plain))  # type: ignore[arg-type] # a class is hashable
    except pydantic.ValidationError as error:
        raise UserError(in_one_line(cls, section, error.errors(include_url=False)[0])) from None
    assert isinstance(made, cls)
    return made


@functools.cache
def _reader(cls: type) -> "TypeAdapter[Any]":
    """What reads one kind of configuration. It is made once, since that takes longer than all it will read."""
    import pydantic

    return pydantic.TypeAdapter(strict(cls))


def load_saved(path: Path) -> Config:
    """Read a saved `config.yaml`. It may come from a stranger: nothing in it is executed, expanded or looked up.

    Raises:
        UserError: the file cannot be read, is not plain data, or is not a configuration.
    """
    container = saved_container(path)
    try:
        return from_container(container)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def saved_container(path: Path) -> dict[str, Any]:
    """The content of a saved configuration, of whatever kind. Raises UserError if it is not plain data with keys."""
    from posbench.config import plain_yaml

    container = plain_yaml.load(path)
    if not isinstance(container, dict):
        raise UserError(f"{path} is not a saved configuration: expected keys such as study, seed, encoding")
    return container


class Configured(Protocol):
    """A dataclass with an encoding, of a run or of a model from elsewhere."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def encoding(self) -> EncodingConfig: ...


def to_container(config: Configured) -> dict[str, Any]:
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
