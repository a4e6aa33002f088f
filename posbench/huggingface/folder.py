"""A folder of a HuggingFace model, read as plain data, and the check whether it can be evaluated.

Such a folder is untrusted. Nothing in it is run, and no link is followed out of it. Only `config.json`,
`tokenizer.json` and `.safetensors` files are read, since pickled weights are programs. Models with custom code are
refused. The kinds listed here are verified by tests; other causal language models of transformers are probed.
"""

import dataclasses
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

from posbench import files
from posbench.errors import UserError, did_you_mean
from posbench.huggingface import package

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_CONFIG, _LARGEST_INDEX, LARGEST_TOKENIZER = 2**20, 2**25, 50 * 2**20  # bytes
_MOST_FILES = 1000  # most weight files
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors", re.ASCII)
_PRECISIONS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
# Masks that old versions of the library saved like weights; the library ignores them.
_MASK = re.compile(r".*\b(attn|attention)\.(bias|masked_bias)")

# Where kinds that are not listed keep their training length.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx",
            "context_length")  # fmt: skip
# Keys of a model of several parts that also hold for its text part.
_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
TEXT_PART, _TEXT_TENSORS = "text_config", "language_model"

Position = Literal["rope", "learned", "alibi"]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model in the library, and its way of encoding positions."""

    model: str  # the class
    position: Position | None  # None: of this kind it is not known
    length: str = "max_position_embeddings"  # key of config.json: longest training input, or the table's size
    narrows: bool = True  # accepts our attention by blocks; otherwise it makes a matrix of all scores
    verified: bool = True  # compared with the library's own logits by tests; otherwise each model is probed


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "rope"),
    "gpt_neox": Family("GPTNeoXForCausalLM", "rope"),
    "mistral": Family("MistralForCausalLM", "rope"),
    "olmo": Family("OlmoForCausalLM", "rope"),
    "olmo2": Family("Olmo2ForCausalLM", "rope"),
    "starcoder2": Family("Starcoder2ForCausalLM", "rope"),
    "qwen2": Family("Qwen2ForCausalLM", "rope"),
    "qwen3": Family("Qwen3ForCausalLM", "rope"),
    "smollm3": Family("SmolLM3ForCausalLM", "rope"),
    "gemma2": Family("Gemma2ForCausalLM", "rope"),
    "gemma3_text": Family("Gemma3ForCausalLM", "rope"),
    "gpt2": Family("GPT2LMHeadModel", "learned", "n_positions"),
    "opt": Family("OPTForCausalLM", "learned"),
    "bloom": Family("BloomForCausalLM", "alibi", "seq_length", narrows=False),
    "mpt": Family("MptForCausalLM", "alibi", "max_seq_len", narrows=False),
}


@dataclasses.dataclass(frozen=True)
class Weights:
    """The tensors of a model's files, as their headers describe them."""

    paths: tuple[Path, ...]
    shapes: dict[str, tuple[int, ...]]
    precision: str  # fp32, bf16 or fp16: that of most numbers

    @property
    def numbers(self) -> int:
        """The number of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def learned(self) -> int:
        """The number of parameters without masks."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not _MASK.fullmatch(name))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model folder that passed all checks."""

    folder: Path
    config: dict[str, Any]  # content of config.json, of a model of several parts that of its text part
    weights: Weights
    whole: str | None = None  # `model_type` of the model whose text part this is

    @property
    def kind(self) -> str:
        """Its `model_type`."""
        return str(self.config["model_type"])

    @property
    def family(self) -> Family:
        listed = FAMILIES.get(self.kind)
        return listed or Family(package.causal_models()[self.kind], None, narrows=False, verified=False)

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER

    def train_length(self) -> int | None:
        """Tokens that it was trained on at a time, if its configuration says so.

        If RoPE was stretched, the length before that: the stretched frequencies depend on it.
        """
        ropes = [self.config.get("rope_parameters"), self.config.get("rope_scaling")]
        ropes += [part for rope in ropes if isinstance(rope, dict) for part in rope.values()]
        said = [rope.get("original_max_position_embeddings") for rope in ropes if isinstance(rope, dict)]
        keys = (self.family.length,) if self.family.verified else _LENGTHS
        said += [self.config.get(key) for key in ("original_max_position_embeddings", *keys)]
        return next((length for length in said if type(length) is int and length > 1), None)

    def sha256(self) -> str:
        """Digest of everything that determines results: configuration, tokenizer, weights."""
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG, self.tokenizer, *self.weights.paths):
            digest.update(f"{path.name}\0".encode() + files.sha256(path))
        return digest.hexdigest()


def read(folder: Path) -> Checkpoint:
    """Check a model folder; UserError if a file is missing, too large, a link, unsupported, or a program."""
    config = content_of(own(folder, CONFIG), _LARGEST_CONFIG)
    _refuse_code(folder, config)
    whole = None
    if isinstance(part := config.get(TEXT_PART), dict):
        _refuse_code(folder, part)
        whole = str(config.get("model_type"))
        config = {key: config[key] for key in _SHARED if key in config} | part
    kind = config.get("model_type")
    if not isinstance(kind, str) or (kind not in FAMILIES and kind not in package.causal_models()):
        near = did_you_mean(kind, [*FAMILIES, *package.causal_models()]) if isinstance(kind, str) else ""
        known = f"{', '.join(FAMILIES)}, or another causal language model of transformers"
        raise UserError(f"{folder}: model_type is {kind!r}{near}: expected {known}")
    if kind == "mpt" and (config.get("attn_config") or {}).get("alibi") is False:
        raise UserError(f"{folder}: mpt without ALiBi: transformers would compute it with ALiBi")
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder} has no {TOKENIZER}: expected one")
    if (size := own(folder, TOKENIZER).stat().st_size) > LARGEST_TOKENIZER:
        raise UserError(f"{folder / TOKENIZER} has {size:,} bytes: expected at most {LARGEST_TOKENIZER:,}")
    return Checkpoint(folder, config, _weights(folder, text_only=whole is not None), whole)


def text_tensor(name: str) -> str | None:
    """The name that a tensor of a model of several parts has in its text part alone; None: it is of another part."""
    _, part, inner = name.rpartition(f"{_TEXT_TENSORS}.")
    if not part:
        return name if name.startswith("lm_head.") else None
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    for key, why in (
        ("auto_map", "posbench runs no code of a model folder"),
        ("use_bidirectional_attention", "its tokens see later tokens: expected a causal model"),
        ("quantization_config", "its weights are quantised: expected fp32, bf16 or fp16"),
    ):
        if config.get(key) and config[key] != "vision":  # Gemma 4: only between tokens of an image
            raise UserError(f"{folder}: {key} in {CONFIG}: {why}")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} is an adapter: merge it into its model first")


# -- its weights -------------------------------------------------------------------------------------------------------


def _weights(folder: Path, text_only: bool) -> Weights:
    if (folder / INDEX).exists():
        listed = content_of(own(folder, INDEX), _LARGEST_INDEX).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{folder / INDEX} has no weight_map of names")
        names = sorted(set(listed.values()))
        if strange := next((name for name in names if not _SHARD.fullmatch(name)), None):
            raise UserError(f"{folder / INDEX} names the file {strange!r}: expected .safetensors files beside it")
        if len(names) > _MOST_FILES:
            raise UserError(f"{folder / INDEX} names {len(names):,} files: expected at most {_MOST_FILES:,}")
    elif (folder / WEIGHTS).exists():
        listed, names = None, [WEIGHTS]
    else:
        _refuse_without_weights(folder)
    paths = tuple(own(folder, name) for name in names)
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for path in paths:
        for name, (kind, shape) in header(path).items():
            if name in shapes or (listed is not None and listed.get(name, path.name) != path.name):
                raise UserError(f"{path}: tensor {name!r} occurs twice, or is in another file than in {INDEX}")
            shapes[name] = shape
            if kind in _PRECISIONS:
                sizes[kind] = sizes.get(kind, 0) + math.prod(shape)
            elif not _MASK.fullmatch(name):
                raise UserError(f"{path}: tensor {name!r} is {kind}: expected {', '.join(_PRECISIONS)}")
    if missing := sorted(set(listed or ()) - set(shapes)):
        raise UserError(f"{folder}: {INDEX} lists {missing[0]!r}, but no file has it")
    if not sizes:
        raise UserError(f"{folder}: no numbers in {', '.join(names)}")
    if text_only:
        shapes = {text: shape for name, shape in shapes.items() if (text := text_tensor(name)) is not None}
    return Weights(paths, shapes, _PRECISIONS[max(sizes, key=lambda kind: sizes[kind])])


def _refuse_without_weights(folder: Path) -> None:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise UserError(
            f"{folder} holds its weights as {pickled[0]}, which may run code: expected {WEIGHTS}; "
            "`save_pretrained` of transformers writes it"
        )
    raise UserError(f"{folder} has no {WEIGHTS}")


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:  # maps the file; needs little memory
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {name: (one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"{path} is not a complete .safetensors file: {str(error).splitlines()[0][:200]}") from None


# -- untrusted files ---------------------------------------------------------------------------------------------------


def own(folder: Path, name: str) -> Path:
    """The path of a file in the folder. In the hub's cache, files are links to blobs beside the snapshots.

    Raises:
        UserError: it is missing, no regular file, or a link to elsewhere.
    """
    path = folder / name
    try:
        blobs = folder.resolve().parent.parent / "blobs"
        if not path.is_symlink() or path.resolve(strict=True).parent != blobs:
            path.lstat()
        elif not path.is_file():
            raise UserError(f"{path} is no regular file: refused")
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = "" if isinstance(error, FileNotFoundError) else f": {error.__class__.__name__}"
        raise UserError(f"{folder} has no {name}{why}") from None
    return path


def content_of(path: Path, most: int) -> dict[str, Any]:
    """The object in a JSON file of at most so many bytes; UserError if it is none."""
    try:
        content = json.loads(files.read(path, most), parse_constant=_constant, object_hook=_untagged)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


def _constant(name: str) -> float:
    if name == "Infinity":  # time_step_limit of Mamba 2
        return math.inf
    raise ValueError(f"{name} is no JSON number")


def _untagged(content: dict[str, Any]) -> Any:
    """A number that the library writes as {"__float__": "Infinity"}."""
    return _constant(str(content["__float__"])) if content.keys() == {"__float__"} else content
