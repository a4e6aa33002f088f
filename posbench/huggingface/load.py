"""Models of transformers, from a folder or the hub, read as data: no code of a folder
runs, no pickle is opened.
"""

import dataclasses
import hashlib
import re
from pathlib import Path
from typing import Any

from posbench import files, machine
from posbench.data import hub
from posbench.errors import UserError, did_you_mean
from posbench.rope.imports import library_errors, transformers
from posbench.rope.keys import language_part, rope_sections
from posbench.run import TOKENIZER

_WEIGHTS = "model*.safetensors"
_INDEX = "model.safetensors.index.json"
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
# with extended RoPE: the length before that
_ORIGINAL = "original_max_position_embeddings"
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
        last = Path(origin).resolve().name
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", last)
        return name[:100].strip(".-_") or "model"

    @property
    def train_length(self) -> int | None:
        """The training length in tokens, before any extension of its RoPE; None if its
        configuration has none.
        """
        text = language_part(self.settings)
        lengths = [section.get(_ORIGINAL) for _, section in rope_sections(text)]
        lengths += [text.get(key) for key in (_ORIGINAL, *LENGTHS)]
        for length in lengths:
            if type(length) is int and length > 1:
                return length
        return None

    def sha256(self) -> str:
        """Return the digest of everything that determines results: configuration,
        tokenizer, weights.
        """
        weights = sorted(self.folder.glob(_WEIGHTS))
        digest = hashlib.sha256()
        for path in (self.folder / "config.json", self.folder / TOKENIZER, *weights):
            digest.update(f"{path.name}\0".encode())
            digest.update(files.sha256(path))
        return digest.hexdigest()


def find(location: str) -> Source:
    """Find a model in a folder, in the hub's cache or on the hub; UserError if there is
    none, or it is not accepted.
    """
    library = transformers()
    folder = Path(location)
    revision = None
    if not folder.exists():
        folder, revision = hub.model_folder(location)
    data_only = {"trust_remote_code": False, "local_files_only": True}
    with library_errors(f"{location}: transformers cannot read its configuration"):
        settings, _ = library.PretrainedConfig.get_config_dict(folder, **data_only)
    problems = [_problem_of_kind(settings)]
    if (folder / "adapter_config.json").exists():
        problems.append("an adapter: merge it into its model first")
    if not (folder / TOKENIZER).is_file():
        problems.append(f"it has no {TOKENIZER}: expected one")
    weights = [path.name for path in folder.glob(_WEIGHTS)]
    if not weights:
        problems.append("it has no .safetensors: pickled weights may run code")
    # transformers would read the first without a word, which may be the older
    whole = "model.safetensors"
    shards = [name for name in weights if name.startswith("model-")]
    shards += [path.name for path in folder.glob(_INDEX)]
    if shards and whole in weights:
        both = f"{whole} and {min(shards)}"
        problems.append(f"two sets of weights, {both}: expected one")
    for problem in filter(None, problems):
        raise UserError(f"{location}: {problem}")
    with library_errors(f"{location}: transformers refuses its configuration"):
        config = library.AutoConfig.from_pretrained(folder, **data_only)
    return Source(folder, location, revision, settings, config)


def _problem_of_kind(settings: dict[str, Any]) -> str | None:
    """Return why the model of a config.json is not accepted; None if it is."""
    if not settings:
        return "it has no config.json, or an empty one"
    causal = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = settings.get("model_type")
    if kind not in causal:
        return (
            f"model_type is {kind!r}{did_you_mean(str(kind), causal)}: expected"
            f" {', '.join(TESTED)}, or another causal language model of transformers"
        )
    if settings.get("auto_map"):
        return "auto_map in config.json: posbench runs no code of a model folder"
    if settings.get("quantization_config"):
        return "its weights are quantised: expected fp32, bf16 or fp16"
    attention = settings.get("attn_config") or {}
    if kind == "mpt" and attention.get("alibi") is False:
        return "attn_config.alibi is false, but transformers' mpt always adds ALiBi"
    return None


def load(folder: Path, config: Any, precision: str) -> Any:
    """Return the library's model of a folder, in eval mode, on the CPU; UserError if
    tensors are missing or unused.
    """
    auto = transformers().AutoModelForCausalLM
    with library_errors(f"{folder}: transformers cannot load it"):
        attention = "eager"
        if auto._model_mapping[type(config)]._supports_sdpa:
            attention = "sdpa"
        model, report = auto.from_pretrained(
            folder,
            config=config,
            dtype=machine.DTYPES[precision],
            attn_implementation=attention,  # never one that the folder names
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    # the first would be random numbers, the second left out
    for key in ("missing_keys", "unexpected_keys"):
        names = sorted(report[key])
        if names:
            raise UserError(
                f"{folder}: weights do not match its configuration: {key}"
                f" {', '.join(names[:3])}"
            )
    return model.eval()


def position_of(config: Any) -> str:
    """Return how a model encodes positions: rope, learned or alibi; other for untested
    kinds without RoPE.
    """
    kind = config.model_type
    if kind in TESTED:
        return TESTED[kind]
    if getattr(config.get_text_config(), "rope_parameters", None):
        return "rope"
    return "other"
