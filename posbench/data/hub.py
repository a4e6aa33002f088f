"""What comes from the HuggingFace hub: data sets, files of models, and which commit of them is meant.

A short question to the hub comes first: without network `datasets` itself retries for 23 seconds. What was downloaded
before keeps working. Only formats that hold data are read, never code. UserError, in one line, for what is not there.
"""

import contextlib
import errno
import functools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from posbench.config.schema import DataConfig
from posbench.data import readers
from posbench.data.paths import SPLIT_WORDS
from posbench.errors import PosbenchError, UserError, did_you_mean

logger = logging.getLogger(__name__)

PROBE_SECONDS = 3.0


def resolve(config: DataConfig) -> str:
    """Return the commit of a data set that `data.revision` (None: the newest) stands for, without loading anything.

    Where the hub does not answer it is the one in `datasets`' own cache.
    """
    if config.dataset is None:
        raise UserError("data.dataset is missing: expected a name on the hub, such as Salesforce/wikitext")
    if config.splits and ("train" not in config.splits or set(config.splits) - {"train", "validation", "test"}):
        raise UserError(f"data.splits names {', '.join(config.splits)}: expected train, and validation and test")
    if config.revision and re.fullmatch(r"[0-9a-f]{40}", config.revision):
        return config.revision
    commit = commit_of("dataset", config.dataset, config.revision)
    return commit or str(_builder(config, config.revision).hash)


def texts(config: DataConfig, commit: str | None) -> dict[str, Iterator[str]]:
    """Return the documents of each split of a data set, by our names for the splits; its only one is training text.

    With `data.max_documents` no more is downloaded than they need.
    """
    builder = _builder(config, commit)
    with _one_line(config.dataset):
        if config.max_documents is not None and type(builder).__name__ != "Cache":
            rows = builder.as_streaming_dataset()
        else:
            builder.download_and_prepare()
            rows = builder.as_dataset()
    named = {SPLIT_WORDS[name.lower()]: name for name in reversed([*rows]) if name.lower() in SPLIT_WORDS}
    splits = config.splits or (named if len(rows) > 1 else {"train": next(iter(rows))})
    has = f"'{config.dataset}' has the splits {', '.join(rows)}"
    if absent := [name for name in splits.values() if name not in rows]:
        raise UserError(f"{has}, not '{absent[0]}'{did_you_mean(absent[0], rows)}")
    if "train" not in splits:
        raise UserError(f"{has}: choose one to train on, data.splits={{train: {next(iter(rows))}}}")
    return {split: _cells(rows[name], config) for split, name in splits.items()}


def _cells(rows: Any, config: DataConfig) -> Iterator[str]:
    with _one_line(config.dataset):
        columns = [*(rows.features or [config.column])]
        if config.column not in columns:
            raise readers.missing(config.column, columns)
        yield from (readers.checked(value, config.column) for value in rows[config.column])


def _builder(config: DataConfig, commit: str | None) -> Any:
    """The builder of `datasets` for a data set at a commit; in the cache alone, if the hub does not answer."""
    import datasets

    away = commit_of("dataset", str(config.dataset), commit) is None
    if away:  # as HF_HUB_OFFLINE=1 before the import would, so that neither library retries and waits
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    build = functools.partial(datasets.load_dataset_builder, config.dataset, config.subset, revision=commit)
    with contextlib.suppress(UserError) if away else contextlib.nullcontext(), _one_line(config.dataset):
        try:
            builder: Any = build(keep_default_na=False)  # of CSV alone: cells that say NA are text
        except (ValueError, TypeError):
            builder = build()
        if not away or commit in (None, builder.hash):
            return builder
    raise _unreachable(f"'{config.dataset}'" + (f" at {commit}" if commit else ""), "data.dataset=FOLDER")


@contextlib.contextmanager
def _one_line(what: str | None) -> Iterator[None]:
    """Raise the root cause of an error of a library with what it is about; a signal or a full disk stays itself."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
            cause = cause.__cause__
        if isinstance(cause, PosbenchError | MemoryError) or getattr(cause, "errno", None) == errno.ENOSPC:
            raise cause from None
        reason = " ".join(str(cause).split())[:400] or type(cause).__name__
        hint = " (data.subset=NAME, or null for its only one)" if re.search("Config name|BuilderConfig", reason) else ""
        raise UserError(f"'{what}' cannot be read: {reason}{hint}") from None


def _unreachable(what: str, instead: str) -> UserError:
    where = f"{huggingface_hub.constants.ENDPOINT} and is not in the local cache"
    return UserError(f"{what} cannot be reached at {where}: connect once, or name a copy on this machine, {instead}")


def tokenizer_file(name: str) -> tuple[Path, str]:
    """Return the `tokenizer.json` of a model on the hub and its commit."""
    folder, commit = _download(name, ["tokenizer.json"], "data.tokenizer=FILE")
    if not (folder / "tokenizer.json").is_file():
        way = "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) of transformers makes one"
        raise UserError(f"'{name}' has no tokenizer.json: expected one; {way}")
    return folder / "tokenizer.json", commit


def model_folder(name: str) -> tuple[Path, str]:
    """Return the folder of a model on the hub with configuration, tokenizer and weights, and its commit."""
    patterns = ["*config.json", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja"]
    return _download(name, [*patterns, "model*.safetensors", "model.safetensors.index.json"], "a folder of it")


def _download(name: str, patterns: list[str], instead: str) -> tuple[Path, str]:
    """Return the folder in the hub's own cache with these files of a model, `gpt2` or `gpt2@REVISION`, and its commit.

    It is asked for by the name of the revision, not its commit, so that the cache knows it by that name later.
    """
    repository, _, revision = name.partition("@")
    away = commit_of("model", repository, revision or None) is None
    with _one_line(name):
        try:
            folder = huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns, local_files_only=away
            )
        except errors.LocalEntryNotFoundError:
            raise _unreachable(f"model '{repository}'", instead) from None
    return Path(str(folder)), Path(str(folder)).name


@functools.lru_cache
def commit_of(kind: str, name: str, revision: str | None) -> str | None:
    """Ask the hub for the commit of a revision; None if it does not answer in time or as a hub would."""
    try:
        return huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS).sha
    except errors.GatedRepoError:
        reason = "is gated: ask for access on its page and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = f"is no {kind} of the hub (or it is private: `hf auth login`)"
    except errors.RevisionNotFoundError:
        reason = f"has no revision '{revision}'"
    except errors.HFValidationError:
        reason = f"is neither here nor the name of a {kind} on the hub"
    except Exception as error:  # the transport's own errors: no network, time-out, a captive portal
        logger.info("the hub does not answer (%s): looking in the cache", type(error).__name__)
        return None
    raise UserError(f"'{name}' {reason}")
