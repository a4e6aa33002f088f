"""Models of transformers, from a folder or the hub, read as data: no code of a folder
runs, no pickle is opened.
"""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

import torch

from posbench import files
from posbench.data import hub
from posbench.errors import UserError, did_you_mean
from posbench.rope.imports import library_errors, transformers
from posbench.rope.reading import language_part
from posbench.run import TOKENIZER

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ROPE = (
    "llama gpt_neox mistral olmo olmo2 starcoder2 qwen2 qwen3 smollm3 gemma2"
    " gemma3_text"
)
# By model_type, how the model encodes positions; tests compare these with the library's
# own logits.
TESTED = dict.fromkeys(_ROPE.split(), "rope") | {
    "gpt2": "learned",
    "opt": "learned",
    "bloom": "alibi",
    "mpt": "alibi",
}
# Keys of config.json for the training length, or for the size of a table of positions.
LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "n_ctx",
    "context_length",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be evaluated: its files and its configuration."""

    folder: Path
    origin: str  # what the user typed: a folder, or a name on the hub
    revision: str | None  # hub: the commit
    settings: dict[str, Any]  # content of config.json
    config: Any  # the library's configuration

    @property
    def kind(self) -> str:
        return str(self.config.model_type)

    @property
    def name(self) -> str:
        """The name of its folder of results: the last part of its path."""
        origin = self.origin
        if self.revision:
            origin = origin.partition("@")[0]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(origin).resolve().name)
        return name[:100].strip(".-_") or "model"

    @property
    def precision(self) -> str:
        """The precision to compute in: bf16 if its configuration names that, else
        fp32.
        """
        return next(
            (name for name, dtype in DTYPES.items() if dtype == self.config.dtype),
            "fp32",
        )

    @property
    def train_length(self) -> int | None:
        """The training length in tokens, before any extension of its RoPE; None if its
        configuration has none.
        """
        text = language_part(self.settings)
        ropes = [text.get("rope_parameters"), text.get("rope_scaling")]
        ropes += [
            part for rope in ropes if isinstance(rope, dict) for part in rope.values()
        ]
        lengths = [
            rope.get("original_max_position_embeddings")
            for rope in ropes
            if isinstance(rope, dict)
        ]
        lengths += [
            text.get(key) for key in ("original_max_position_embeddings", *LENGTHS)
        ]
        return next(
            (length for length in lengths if type(length) is int and length > 1), None
        )

    def sha256(self) -> str:
        """Return the digest of everything that determines results: configuration,
        tokenizer, weights.
        """
        digest, weights = (
            hashlib.sha256(),
            sorted(self.folder.glob("model*.safetensors")),
        )
        for path in (self.folder / "config.json", self.folder / TOKENIZER, *weights):
            digest.update(f"{path.name}\0".encode() + files.sha256(path))
        return digest.hexdigest()


def find(location: str) -> Source:
    """Find a model in a folder, in the hub's cache or on the hub; UserError if there is
    none, or it is not accepted.
    """
    library = transformers()
    causal = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    folder, revision = (
        (Path(location), None)
        if Path(location).exists()
        else hub.model_folder(location)
    )
    data_only = {"trust_remote_code": False, "local_files_only": True}
    with library_errors(f"{location}: transformers cannot read its configuration"):
        settings, _ = library.PretrainedConfig.get_config_dict(folder, **data_only)
    kind = settings.get("model_type")
    expected = f"{', '.join(TESTED)}, or another causal language model of transformers"
    for wrong, reason in (
        (not settings, "it has no config.json, or an empty one"),
        (
            kind not in causal,
            (
                f"model_type is {kind!r}{did_you_mean(str(kind), causal)}: expected"
                f" {expected}"
            ),
        ),
        (
            settings.get("auto_map"),
            "auto_map in config.json: posbench runs no code of a model folder",
        ),
        (
            settings.get("quantization_config"),
            "its weights are quantised: expected fp32, bf16 or fp16",
        ),
        (
            kind == "mpt" and (settings.get("attn_config") or {}).get("alibi") is False,
            "transformers has no such mpt",
        ),
        (
            (folder / "adapter_config.json").exists(),
            "an adapter: merge it into its model first",
        ),
        (not (folder / TOKENIZER).is_file(), f"it has no {TOKENIZER}: expected one"),
        (
            not [*folder.glob("model*.safetensors")],
            "it has no .safetensors: pickled weights may run code",
        ),
    ):
        if wrong:
            raise UserError(f"{location}: {reason}")
    with library_errors(f"{location}: transformers refuses its configuration"):
        config = library.AutoConfig.from_pretrained(folder, **data_only)
    return Source(folder, location, revision, settings, config)


def load(folder: Path, config: Any, precision: str) -> Any:
    """Return the library's model of a folder, in eval mode, on the CPU; UserError if
    tensors are missing or unused.
    """
    auto = transformers().AutoModelForCausalLM
    with library_errors(f"{folder}: transformers cannot load it"):
        model, report = auto.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[precision],
            attn_implementation=(
                "sdpa" if auto._model_mapping[type(config)]._supports_sdpa else "eager"
            ),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    # the first would be random numbers, the second left out
    for key in ("missing_keys", "unexpected_keys"):
        if names := sorted(report[key]):
            raise UserError(
                f"{folder}: weights do not match its configuration: {key}"
                f" {', '.join(names[:3])}"
            )
    return model.eval()


def position_of(config: Any) -> str:
    """Return how a model encodes positions: rope, learned or alibi; other for untested
    kinds without RoPE.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    return TESTED.get(config.model_type) or ("rope" if rope else "other")
