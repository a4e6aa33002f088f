"""A folder of a HuggingFace model: of which kind it is, its files, and whether it can be evaluated.

Nothing in it is run: weights must be `.safetensors`, since pickled ones are programs, and models with custom code are
refused. The kinds listed here are compared with the library's own logits by tests. Other causal language models of
transformers are read in the same way, and called untested.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal

from posbench import files
from posbench.errors import UserError, did_you_mean
from posbench.huggingface import package

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PRECISIONS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}

# Where kinds that are not listed keep their training length.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx",
            "context_length")  # fmt: skip

Position = Literal["rope", "learned", "alibi"]


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model in the library, and its way of encoding positions."""

    position: Position
    length: str = "max_position_embeddings"  # key of config.json: longest training input, or the table's size


FAMILIES = {
    "llama": Family("rope"),
    "gpt_neox": Family("rope"),
    "mistral": Family("rope"),
    "olmo": Family("rope"),
    "olmo2": Family("rope"),
    "starcoder2": Family("rope"),
    "qwen2": Family("rope"),
    "qwen3": Family("rope"),
    "smollm3": Family("rope"),
    "gemma2": Family("rope"),
    "gemma3_text": Family("rope"),
    "gpt2": Family("learned", "n_positions"),
    "opt": Family("learned"),
    "bloom": Family("alibi", "seq_length"),
    "mpt": Family("alibi", "max_seq_len"),
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model folder."""

    folder: Path
    config: dict[str, Any]  # content of config.json
    weights: tuple[Path, ...]  # its files of weights

    @property
    def kind(self) -> str:
        """Its `model_type`."""
        return str(self.config["model_type"])

    @property
    def family(self) -> Family | None:
        """What is known of its kind; None: it is untested."""
        return FAMILIES.get(self.kind)

    @property
    def tokenizer(self) -> Path:
        return self.folder / TOKENIZER

    @functools.cached_property
    def precision(self) -> str:
        """The precision of most of its numbers: fp32, bf16 or fp16; UserError if a file is incomplete."""
        sizes: collections.Counter[str] = collections.Counter()
        for path in self.weights:
            for kind, shape in _header(path):
                sizes[kind] += math.prod(shape)
        return max(_PRECISIONS.items(), key=lambda item: sizes[item[0]])[1]

    def train_length(self) -> int | None:
        """Tokens that it was trained on at a time, if its configuration says so.

        If RoPE was stretched, the length before that: the stretched frequencies depend on it.
        """
        text = self.config.get("text_config") or self.config  # of a model of several parts
        ropes = [text.get("rope_parameters"), text.get("rope_scaling")]
        ropes += [part for rope in ropes if isinstance(rope, dict) for part in rope.values()]
        said = [rope.get("original_max_position_embeddings") for rope in ropes if isinstance(rope, dict)]
        keys = _LENGTHS if self.family is None else (self.family.length,)
        said += [text.get(key) for key in ("original_max_position_embeddings", *keys)]
        return next((length for length in said if type(length) is int and length > 1), None)

    def sha256(self) -> str:
        """Digest of everything that determines results: configuration, tokenizer, weights."""
        digest = hashlib.sha256()
        for path in (self.folder / CONFIG, self.tokenizer, *self.weights):
            digest.update(f"{path.name}\0".encode() + files.sha256(path))
        return digest.hexdigest()


def read(folder: Path) -> Checkpoint:
    """Find the files of a model; UserError if one is missing, or if the model cannot be evaluated."""
    config = content_of(folder / CONFIG)
    kind = config.get("model_type")
    if not isinstance(kind, str) or (kind not in FAMILIES and kind not in package.causal_models()):
        near = did_you_mean(kind, [*FAMILIES, *package.causal_models()]) if isinstance(kind, str) else ""
        known = f"{', '.join(FAMILIES)}, or another causal language model of transformers"
        raise UserError(f"{folder}: model_type is {kind!r}{near}: expected {known}")
    for key, why in (
        ("auto_map", "posbench runs no code of a model folder"),
        ("quantization_config", "its weights are quantised: expected fp32, bf16 or fp16"),
    ):
        if config.get(key):
            raise UserError(f"{folder}: {key} in {CONFIG}: {why}")
    if kind == "mpt" and (config.get("attn_config") or {}).get("alibi") is False:
        raise UserError(f"{folder}: mpt without ALiBi: transformers would compute it with ALiBi")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder} is an adapter: merge it into its model first")
    if not (folder / TOKENIZER).is_file():
        raise UserError(f"{folder} has no {TOKENIZER}: expected one")
    return Checkpoint(folder, config, _weights(folder))


def _weights(folder: Path) -> tuple[Path, ...]:
    """The files that the library reads."""
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        names = sorted({str(name) for name in content_of(folder / INDEX).get("weight_map", {}).values()})
    for name in names:
        if not (folder / name).is_file():
            pickled = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            told = "which may run code: `save_pretrained` of transformers writes the other"
            raise UserError(f"{folder} has no {name}" + (f", but {pickled[0]}, {told}" if pickled else ""))
    return tuple(folder / name for name in names)


def _header(path: Path) -> list[tuple[str, list[int]]]:
    """Type and shape of each tensor of a file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:  # maps the file; needs little memory
            slices = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 - no mapping
            return [(one.get_dtype(), one.get_shape()) for one in slices]
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a complete .safetensors file: {str(error).splitlines()[0][:200]}") from None


def content_of(path: Path) -> dict[str, Any]:
    """The object in a JSON file; UserError if it is none."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content
