"""What comes from the HuggingFace hub: data sets, files of models, and which commit of them is meant.

A short question to the hub comes first: without network `datasets` itself retries for 23 seconds. What was downloaded
before keeps working. Only formats that hold data are read, never code.
"""

import contextlib
import errno
import functools
import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import readers
from posbench.data.paths import SPLIT_WORDS
from posbench.errors import PosbenchError, UserError, did_you_mean

logger = logging.getLogger(__name__)

PROBE_SECONDS = 3.0


def resolve(config: DataConfig, notes: Path) -> str:
    """Return the commit of a data set that `data.revision` (None: the newest) stands for, without loading anything.

    Args:
        notes: folder of answers for when the hub cannot be asked; after it, `datasets`' own cache is.

    Raises:
        UserError: no such data set or revision, or it can be neither reached nor found in the cache.
    """
    dataset, revision = config.dataset, config.revision
    if dataset is None:
        raise UserError("data.dataset is missing: expected a name on the hub, such as Salesforce/wikitext")
    if config.splits and ("train" not in config.splits or set(config.splits) - {"train", "validation", "test"}):
        raise UserError(f"data.splits names {', '.join(config.splits)}: expected train, and validation and test")
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    note = notes / f"{hashlib.sha256(f'{dataset}@{revision}'.encode()).hexdigest()[:16]}.txt"
    if commit := commit_of("dataset", dataset, revision):
        with contextlib.suppress(OSError):  # only a convenience for later
            note.parent.mkdir(parents=True, exist_ok=True)
            files.write(note, commit.encode())
        return commit
    if note.is_file():
        return note.read_text(encoding="utf-8")
    return str(_builder(config, revision).hash)


def texts(config: DataConfig, commit: str | None) -> dict[str, Iterator[str]]:
    """Return the documents of each split of a data set, by our names for the splits; its only one is training text.

    With `data.max_documents` no more is downloaded than they need.
    """
    builder = _builder(config, commit)
    try:
        if config.max_documents is not None and type(builder).__name__ != "Cache":
            rows = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            rows = builder.as_dataset()
    except Exception as error:
        raise _in_a_line(error, config) from None
    named = {SPLIT_WORDS[name.lower()]: name for name in reversed([*rows]) if name.lower() in SPLIT_WORDS}
    splits = config.splits or (named if len(rows) > 1 else {"train": next(iter(rows))})
    has = f"'{config.dataset}' has the splits {', '.join(rows)}"
    if absent := [name for name in splits.values() if name not in rows]:
        raise UserError(f"{has}, not '{absent[0]}'{did_you_mean(absent[0], rows)}")
    if "train" not in splits:
        raise UserError(f"{has}: choose one to train on, data.splits={{train: {next(iter(rows))}}}")
    return {split: _cells(rows[name], config) for split, name in splits.items()}


def _cells(rows: Any, config: DataConfig) -> Iterator[str]:
    try:
        columns = [*(rows.features or [config.column])]
        if config.column not in columns:
            raise readers.missing(config.column, columns)
        yield from (readers.checked(value, config.column) for value in rows[config.column])
    except Exception as error:  # of whatever reads a file as it is downloaded
        raise _in_a_line(error, config) from None


def _builder(config: DataConfig, commit: str | None) -> Any:
    """The builder of `datasets` for a data set at a commit; in the cache alone, if the hub does not answer."""
    import datasets
    import huggingface_hub

    away = commit_of("dataset", str(config.dataset), commit) is None
    if away:  # as HF_HUB_OFFLINE=1 before the import would, so that neither library retries and waits
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    build = functools.partial(datasets.load_dataset_builder, config.dataset, config.subset, revision=commit)
    builder: Any = None
    try:
        with contextlib.suppress(ValueError, TypeError):
            builder = build(keep_default_na=False)  # of CSV alone: cells that say NA are text
        builder = builder or build()
    except Exception as error:
        if not away:
            raise _in_a_line(error, config) from None
    if away and (builder is None or commit not in (None, builder.hash)):
        at = f" at {commit}" if commit else ""
        raise UserError(
            f"'{config.dataset}'{at} cannot be reached at {huggingface_hub.constants.ENDPOINT} and is not in the local "
            "cache: connect once, or name a copy of it on this machine, data.dataset=FOLDER"
        )
    return builder


def _in_a_line(error: BaseException, config: DataConfig) -> BaseException:
    """The root cause of an error of `datasets`, with the data set's name; a signal or a full disk stays itself."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, PosbenchError | MemoryError) or getattr(error, "errno", None) == errno.ENOSPC:
        return error
    reason = " ".join(str(error).split())[:400] or type(error).__name__
    hint = " (data.subset=NAME, or null for its only one)" if re.search("Config name|BuilderConfig", reason) else ""
    return UserError(f"'{config.dataset}' cannot be read: {reason}{hint}")


def tokenizer_file(name: str) -> tuple[Path, str]:
    """Return the `tokenizer.json` of a model on the hub, in the hub's own cache, and its commit; see `_download`."""
    folder = _download(name, ["tokenizer.json"], "a tokenizer.json of this machine, data.tokenizer=FILE")
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"'{name}' has no tokenizer.json: expected one; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) of transformers makes one"
        )
    return folder / "tokenizer.json", folder.name


def model_folder(name: str) -> tuple[Path, str]:
    """Return the folder of a model on the hub, in the hub's own cache, and its commit; see `_download`.

    It has the configuration, the tokenizer with its settings, the .safetensors files, and nothing else.
    """
    patterns = ["config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    patterns += ["generation_config.json", "chat_template.jinja"]
    patterns += ["model.safetensors.index.json", "model.safetensors", "model-*.safetensors"]
    folder = _download(name, patterns, "a folder of this machine that save_pretrained of transformers has written")
    return folder, folder.name


def _download(name: str, patterns: Sequence[str], instead: str) -> Path:
    """Return the folder in the hub's own cache with these files of a model.

    Args:
        name: `gpt2`, `meta-llama/Llama-3.2-1B`, with a commit, tag or branch `gpt2@main`.
        instead: what may be given in its place, without the hub.

    Raises:
        UserError: no such model or revision, or it can be neither reached nor found in the cache.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")
    away = commit_of("model", repository, revision or None) is None
    try:
        # By the name of the revision, not its commit, so that the cache knows it by that name later.
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=[*patterns], local_files_only=away
        )
    except errors.LocalEntryNotFoundError:
        where = huggingface_hub.constants.ENDPOINT
        line = f"model '{repository}' cannot be reached at {where} and is not in the local cache"
        raise UserError(f"{line}: connect once, or give {instead}") from None
    except (OSError, errors.HfHubHTTPError) as error:  # of the transfer
        raise UserError(f"model '{repository}' cannot be loaded: {str(error).splitlines()[0]}") from None
    return Path(str(folder))


@functools.lru_cache
def commit_of(kind: str, name: str, revision: str | None) -> str | None:
    """Ask the hub for the commit of a revision; None if it does not answer in time or as a hub would."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        info = huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS)
        return info.sha
    except errors.GatedRepoError:
        raise UserError(f"'{name}' is gated: ask for access on its page and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"the hub has no {kind} '{name}' (or it is private: `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"'{name}' has no revision '{revision}'") from None
    except errors.HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"'{name}' is neither here nor the name of a {kind} on the hub: {reason}") from None
    except Exception as error:  # the transport's own errors: no network, time-out, a captive portal
        logger.info("the hub does not answer (%s): looking in the cache", type(error).__name__)
        return None
