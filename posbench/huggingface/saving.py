"""Saving a model that was trained on: a folder like the one that it came from, which transformers loads by itself.

config.json, generation_config.json       its configuration, with the new rotary parameters
model.safetensors, or several with index  its weights, in the precision that they came in
tokenizer.json and what belongs to it     as before
README.md, posbench_parity.json           what was done to it; difference of its logits from the trained model's
"""

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posbench import files
from posbench.config.external import TrainedOn
from posbench.huggingface import card, parity, rope
from posbench.huggingface.building import DTYPES
from posbench.huggingface.export import PARITY, aside, write_json
from posbench.huggingface.folder import TOKENIZER, Checkpoint, content_of
from posbench.huggingface.learning import rounded
from posbench.huggingface.package import quiet, transformers
from posbench.run_folder.facts import versions
from posbench.run_folder.rows import EvaluationRow

_BESIDE = (TOKENIZER, "special_tokens_map.json", "chat_template.jinja")  # files that stay as they are
_SETTINGS, _GENERATION = "tokenizer_config.json", "generation_config.json"


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
    own = DTYPES[checkpoint.precision]
    with aside(folder, sum(weight.numel() for weight in model.parameters()) * own.itemsize) as new:
        _write_model(new, rounded(model, own, device=torch.device("cpu")), checkpoint, config)
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


def _write_model(new: Path, rounded_model: Any, checkpoint: Checkpoint, config: TrainedOn) -> None:
    saved = copy.copy(rounded_model)  # another configuration, the same weights
    saved.config = made = copy.deepcopy(saved.config)
    family = checkpoint.family
    assert family is not None  # only tested kinds are trained on
    every = made.rope_parameters if family.position == "rope" else {}
    kind = every.get("full_attention", every).get("rope_type")  # of the layers that see everything, if kinds differ
    made.use_cache = kind not in ("dynamic", "longrope")  # cached keys would have the frequencies of a shorter text
    if kind != "dynamic" and family.position != "learned":  # `dynamic` starts from this setting
        before = checkpoint.config.get(family.length)
        lengths = [config.training.train_length, *([before] if isinstance(before, int) else [])]
        setattr(made, family.length, max(lengths))
    with quiet():
        saved.generation_config = transformers().GenerationConfig.from_model_config(made)
        saved.save_pretrained(new)
    if (checkpoint.folder / _GENERATION).exists():
        (new / _GENERATION).unlink()
        cache = {} if made.use_cache else {"use_cache": False}
        write_json(new / _GENERATION, content_of(checkpoint.folder / _GENERATION) | cache)


def _write_tokenizer(new: Path, checkpoint: Checkpoint, config: TrainedOn) -> None:
    for name in _BESIDE:
        if (checkpoint.folder / name).exists():
            shutil.copyfile(checkpoint.folder / name, new / name)
    if (checkpoint.folder / _SETTINGS).exists():
        settings = content_of(checkpoint.folder / _SETTINGS)
    else:
        settings = _usual(checkpoint)
    write_json(new / _SETTINGS, settings | {"model_max_length": config.training.train_length})


def _usual(checkpoint: Checkpoint) -> dict[str, Any]:
    """Settings of a tokenizer that came without: its begin and end tokens are those of the model's configuration."""
    tokenizer = json.loads(checkpoint.tokenizer.read_bytes())
    added = {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or []}
    ids = {name: checkpoint.config.get(f"{name}_id") for name in ("bos_token", "eos_token")}
    tokens = {name: added[number] for name, number in ids.items() if type(number) is int and number in added}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
