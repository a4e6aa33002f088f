"""Saving a model that was trained on: a folder like the one that it came from, which transformers loads by itself.

    config.json, generation_config.json       its configuration, with the new rotary parameters
    model.safetensors, or several with index  its weights: names, files and precision as before
    tokenizer.json and what belongs to it     as before
    README.md, posbench_parity.json           what was done to it; difference of its logits from the trained model's

The folder that it came from may be untrusted: of its JSON files, only known keys with plain values are taken over.
"""

import contextlib
import copy
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from posbench import files
from posbench.config.external import TrainedOn
from posbench.errors import UserError
from posbench.huggingface import card, parity, rope
from posbench.huggingface import folder as folders
from posbench.huggingface.building import DTYPES
from posbench.huggingface.export import PARITY, aside, write_json
from posbench.huggingface.folder import Checkpoint
from posbench.huggingface.learning import rounded
from posbench.huggingface.package import quiet
from posbench.run_folder.facts import versions
from posbench.run_folder.rows import EvaluationRow

logger = logging.getLogger(__name__)

_LARGEST = 2**22  # bytes of a file beside the weights
_TEMPLATE = "chat_template.jinja"
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "additional_special_tokens", "extra_special_tokens")
_TAKEN = {  # file -> the keys that are taken over
    "tokenizer_config.json": (
        *_TOKENS, "tokenizer_class", "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder",
        "chat_template", "clean_up_tokenization_spaces", "errors", "legacy", "padding_side", "split_special_tokens",
        "truncation_side",
    ),
    "special_tokens_map.json": _TOKENS,
    "generation_config.json": (
        "bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k", "top_p",
        "repetition_penalty", "max_length", "max_new_tokens",
    ),
}  # fmt: skip


def save(
    folder: Path,
    model: Any,
    checkpoint: Checkpoint,
    config: TrainedOn,
    command: object,
    rows: Sequence[EvaluationRow],
) -> None:
    """Write the trained model into a new folder, read it again, and compare.

    Args:
        model: the library's model, in fp32.
        command, rows: the command line and its results, for the card.

    Raises:
        UserError: transformers computes other logits with what was written; nothing is left behind.
        RunFailed: no room on the disk.
    """
    own = DTYPES[checkpoint.weights.precision]
    with aside(folder, sum(weight.numel() for weight in model.parameters()) * own.itemsize) as new:
        _write_config(new, model.config, checkpoint, config)
        _write_weights(new, model, checkpoint, own)
        _write_tokenizer(new, checkpoint, config)
        trained = rounded(model, own, torch.float32, device=torch.device("cpu"))
        length, rows_of_table = config.training.train_length, config.data.vocab_size
        wanted = [min(one, length) for one in (1, parity.SHORT, config.start.train_length, length)]

        def ours(ids: torch.Tensor) -> torch.Tensor:
            rope.restore(trained)
            logits: torch.Tensor = trained(input_ids=ids, use_cache=False).logits
            return logits

        found = parity.compare(new, ours, rows_of_table, config.model.n_heads or 1, wanted)
        differences = [one.to_json() for one in found]
        write_json(new / PARITY, {"run": config.id, "versions": versions(), "differences": differences})
        files.write_new(new / "README.md", card.of_trained_on(config, command, rows, found).encode())


def _write_config(new: Path, library: Any, checkpoint: Checkpoint, config: TrainedOn) -> None:
    made, family = copy.deepcopy(library), checkpoint.family
    every = made.rope_parameters if family.position == "rope" else {}
    parameters = every.get("full_attention", every)  # of the layers that see everything, where kinds of layers differ
    kind = parameters.get("rope_type")
    made.architectures, made.dtype = [family.model], DTYPES[checkpoint.weights.precision]
    made.use_cache = kind not in ("dynamic", "longrope")  # cached keys would have the frequencies of a shorter text
    if kind != "dynamic" and family.position != "learned":  # `dynamic` starts from this setting
        before = checkpoint.config.get(family.length)
        lengths = [config.training.train_length, *([before] if isinstance(before, int) else [])]
        setattr(made, family.length, max(lengths))
    with quiet():
        made.save_pretrained(new)


def _write_weights(new: Path, model: Any, checkpoint: Checkpoint, own: torch.dtype) -> None:
    """Write each file with the tensors that it had, without those that are no parameters: masks and frequencies."""
    import safetensors.torch
    from transformers.core_model_loading import revert_weight_conversion

    every = dict(model.named_parameters(remove_duplicate=False))
    known: dict[str, torch.Tensor] = revert_weight_conversion(model, every)  # version 5 has other names in memory
    left = {weight.data_ptr(): name for name, weight in known.items()}
    short = f"{model.base_model_prefix}."  # left out in files that were saved without the head
    known |= {name.removeprefix(short): weight for name, weight in known.items()}
    placed: dict[str, str] = {}
    for path in checkpoint.weights.paths:
        names = [name for name in folders.header(path) if name in known]
        for name in names:
            left.pop(known[name].data_ptr(), None)
        if path == checkpoint.weights.paths[-1]:
            names += left.values()
        tensors = {name: known[name].detach().to("cpu", own, copy=True).contiguous() for name in names}
        placed |= dict.fromkeys(tensors, path.name)
        files.write_new(new / path.name, safetensors.torch.save(tensors, metadata={"format": "pt"}))
    if (checkpoint.folder / folders.INDEX).exists():
        size = sum(known[name].numel() for name in placed) * own.itemsize
        write_json(new / folders.INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))})


def _write_tokenizer(new: Path, checkpoint: Checkpoint, config: TrainedOn) -> None:
    """Write the tokenizer, what is known of its special tokens, and the settings of `generate`."""
    tokenizer = folders.own(checkpoint.folder, folders.TOKENIZER).read_bytes()
    files.write_new(new / folders.TOKENIZER, tokenizer)
    for name, keys in _TAKEN.items():
        taken = {key: value for key, value in _content(checkpoint.folder, name).items() if key in keys}
        if name == "tokenizer_config.json":
            taken = {
                **(taken or _usual(tokenizer, checkpoint.config)),
                "model_max_length": config.training.train_length,
            }
        if taken:
            write_json(new / name, taken)
    if (checkpoint.folder / _TEMPLATE).exists():
        with _left_out(_TEMPLATE):
            files.write_new(new / _TEMPLATE, files.read(folders.own(checkpoint.folder, _TEMPLATE), _LARGEST))


def _content(folder: Path, name: str) -> dict[str, Any]:
    """The content of a JSON file; nothing if there is none, or if it cannot be read (warns)."""
    if (folder / name).exists():
        with _left_out(name):
            return folders.content_of(folders.own(folder, name), _LARGEST)
    return {}


@contextlib.contextmanager
def _left_out(name: str) -> Iterator[None]:
    try:
        yield
    except (UserError, OSError) as error:
        logger.warning("%s is left out: %s", name, error)


def _usual(tokenizer: bytes, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of a tokenizer that came without: its begin and end tokens are those of the model's configuration."""
    added = {token["id"]: token["content"] for token in json.loads(tokenizer).get("added_tokens") or []}
    ids = {name: config.get(f"{name}_id") for name in ("bos_token", "eos_token")}
    tokens = {name: added[number] for name, number in ids.items() if type(number) is int and number in added}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
