"""A run as a folder that transformers loads by itself: `posbench export RUN DIR`.

    config.json, generation_config.json, model.safetensors            the model, as a stock architecture
    tokenizer.json, tokenizer_config.json, special_tokens_map.json    its tokenizer
    README.md                                                         the model card
    posbench_parity.json                                              difference of its logits from the run's, by length

With code=true the model is posbench's own class instead, which `modeling_posbench.py` in the folder imports.

The folder is written under another name beside it, read again, compared with the run's own model, and renamed into
place. So it is complete and equal to the run, or absent. Nothing is written into the run folder.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.schema import Config
from posbench.data.tokenizer import SEPARATOR, Tokenizer
from posbench.errors import UserError
from posbench.huggingface import parity
from posbench.huggingface.architectures import Stock, stock
from posbench.huggingface.card import card
from posbench.huggingface.package import quiet, transformers
from posbench.huggingface.parity import Agreement
from posbench.run_folder import checkpoint
from posbench.run_folder.facts import versions
from posbench.run_folder.folder import load_config, load_record
from posbench.run_folder.rows import evaluation_rows, headline_split, newest_of_split
from posbench.run_folder.trained import tokenizer_of, with_weights

PARITY = "posbench_parity.json"


def export(run: Path, folder: Path, code: bool = False) -> list[Agreement]:
    """Write a run's newest model into a new folder.

    Args:
        code: as posbench's class, for any encoding, instead of a stock architecture.

    Returns:
        The difference of the written model's logits from the run's, by length.

    Raises:
        UserError: the folder is there and not empty, the run has no complete checkpoint, no stock
            architecture has its model, or what was written is not its model; nothing is left behind.
        RunFailed: no room on the disk.
    """
    config, tokenizer = load_config(run), tokenizer_of(run)
    _refuse_taken(folder)
    transformers()
    trained = checkpoint.trained(run)
    model = with_weights(run, config, tokenizer, trained.weights()).eval()
    if code:
        from posbench.huggingface import modeling  # transformers comes with it

        made = modeling.coded(model, config, tokenizer)
    else:
        made = stock(model, config)
    length = config.training.train_length
    with aside(folder, sum(tensor.nbytes for tensor in made.tensors.values())) as new:
        _write_model(new, made, tokenizer)
        if code:
            files.write_new(new / modeling.FILE, modeling.file_of_the_folder())
        _write_tokenizer(new, tokenizer, length)
        wanted = [min(one, made.longest or one) for one in (1, parity.SHORT, length, 2 * length, 4 * length)]
        found = parity.compare(new, model, tokenizer.vocab_size, config.model.n_heads, wanted)
        parity.refuse_other_ids(new, tokenizer)
        record, known = load_record(run), evaluation_rows(run)
        rows = newest_of_split(known, headline_split(known, config.evaluation.split))
        write_json(new / PARITY, _parity(record, config, made, trained.step, found))
        files.write_new(new / "README.md", card(config, record, made, trained.step, rows, found).encode())
    return found


def told(folder: Path, found: list[Agreement]) -> str:
    """The result of an export, in one line."""
    worst = max(found, key=lambda one: one.difference / max(1.0, one.largest_logit))
    return (
        f"{folder}: logits as the run's within {worst.difference:.1e}, the largest is {worst.largest_logit:.3g} "
        f"({worst.length:,} tokens, the worst of {len(found)} lengths)"
    )


def _refuse_taken(folder: Path) -> None:
    """Raise UserError unless the folder is new, or empty."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is a file or a link: expected a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: expected a new folder, or an empty one")


@contextlib.contextmanager
def aside(folder: Path, needed: int) -> Iterator[Path]:
    """A temporary folder beside the target; renamed to it at the end, removed after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = files.temporary(folder)
    with files.full_disk_as_failure(folder, needed):
        try:
            new.mkdir()
            yield new
            for path in new.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            files.sync_folder(new)
            os.rename(new, folder)
            files.sync_folder(folder.parent)
        except BaseException:
            files.delete(new)
            raise


def _write_model(new: Path, made: Stock, tokenizer: Tokenizer) -> None:
    import safetensors.torch

    separator = {"bos_token_id": tokenizer.separator, "eos_token_id": tokenizer.separator}
    with quiet():
        config = transformers().AutoConfig.for_model(
            made.kind,
            **made.settings,
            **separator,
            pad_token_id=None,
            vocab_size=tokenizer.vocab_size,
            tie_word_embeddings=made.tied,
            architectures=[made.architecture],
            dtype="float32",
        )
        config.save_pretrained(new)
        cached = {} if made.cached else {"use_cache": False}
        transformers().GenerationConfig(**separator, **cached).save_pretrained(new)
    files.write_new(new / "model.safetensors", safetensors.torch.save(made.tensors, metadata={"format": "pt"}))


def _write_tokenizer(new: Path, tokenizer: Tokenizer, length: int) -> None:
    """Write the run's tokenizer; it adds no tokens to a text and reads no separator in it."""
    special = {"bos_token": SEPARATOR, "eos_token": SEPARATOR}
    write_json(new / "tokenizer.json", tokenizer.description | {"post_processor": None})
    write_json(new / "special_tokens_map.json", special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": length,
    }
    write_json(new / "tokenizer_config.json", settings)


def _parity(record: dict[str, Any], config: Config, made: Stock, step: int, found: list[Agreement]) -> dict[str, Any]:
    return {
        "run": record.get("id"),
        "encoding": config.encoding.name,
        "architecture": made.architecture,
        "checkpoint_step": step,
        "train_length": config.training.train_length,
        "versions": {**versions(), "transformers": transformers().__version__},
        "device": "cpu",
        "dtype": "fp32",
        "differences": [one.to_json() for one in found],
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    files.write_new(path, json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")
