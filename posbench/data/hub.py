"""What comes from the HuggingFace hub: data sets, files of models, and which commit of them is meant.

A short question to the hub comes first: without network `datasets` itself retries for 23 seconds.
"""

import contextlib
import errno
import functools
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from posbench.config.schema import DataConfig
from posbench.data import readers
from posbench.data.paths import SPLIT_WORDS
from posbench.errors import PosbenchError, UserError

logger = logging.getLogger(__name__)

PROBE_SECONDS = 3.0
MODEL = ("*config.json", "tokenizer.json", "special_tokens_map.json", "chat_template.jinja", "model*.safetensors",
         "model.safetensors.index.json")  # fmt: skip


def resolve(config: DataConfig) -> str:
    """Return the commit of a data set that `data.revision` (None: the newest) stands for."""
    if config.dataset is None:
        raise UserError("data.dataset is missing: expected a name on the hub, such as Salesforce/wikitext")
    if config.revision and re.fullmatch(r"[0-9a-f]{40}", config.revision):
        return config.revision
    return commit_of("dataset", config.dataset, config.revision) or str(_builder(config, config.revision).hash)


def texts(config: DataConfig, commit: str | None) -> dict[str, Iterable[str]]:
    """Return the documents of each split of a data set, by our names for the splits; its only one is training text."""
    with _one_line(config.dataset):
        builder = _builder(config, commit)
        if config.max_documents is not None and type(builder).__name__ != "Cache":
            rows = builder.as_streaming_dataset()  # no more is downloaded than they need
        else:
            builder.download_and_prepare()
            rows = builder.as_dataset()
        named = {SPLIT_WORDS[name.lower()]: name for name in reversed([*rows]) if name.lower() in SPLIT_WORDS}
        splits = config.splits or (named if len(rows) > 1 else {"train": next(iter(rows))})
        if "train" not in splits or not {*splits.values()} <= {*rows}:
            has = f"'{config.dataset}' has the splits {', '.join(rows)}"
            raise UserError(f"{has}: choose what to train on, such as data.splits={{train: {next(iter(rows))}}}")
    return {split: _cells(rows[name], config) for split, name in splits.items()}


def _cells(rows: Any, config: DataConfig) -> Iterator[str]:
    with _one_line(config.dataset):
        readers.refuse_missing(config.column, [*(rows.features or [config.column])])
        yield from (readers.checked(value, config.column) for value in rows[config.column])


def _builder(config: DataConfig, commit: str | None) -> Any:
    """The builder of `datasets` for a data set at a commit; in the cache alone, if the hub does not answer."""
    import datasets

    away = commit_of("dataset", str(config.dataset), commit) is None
    if away:  # as HF_HUB_OFFLINE=1 before the import would, so that neither library retries and waits
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    build = functools.partial(datasets.load_dataset_builder, config.dataset, config.subset, revision=commit)
    with _one_line(config.dataset, away):
        try:
            builder: Any = build(keep_default_na=False)  # of CSV alone: cells that say NA are text
        except (ValueError, TypeError):
            builder = build()
        if away and commit not in (None, builder.hash):
            raise FileNotFoundError(f"the hub does not answer, and the cache has commit {builder.hash}, not {commit}")
    return builder


@contextlib.contextmanager
def _one_line(what: str | None, away: bool = False) -> Iterator[None]:
    """Raise the root cause of a library's error with what it is about; ours, a signal or a full disk stays itself."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, errors.HfHubHTTPError):
            cause = cause.__cause__
        if isinstance(cause, PosbenchError) or getattr(cause, "errno", None) == errno.ENOSPC:
            raise cause from None
        why = "reached and is not in the local cache" if away else "read"
        raise UserError(f"'{what}' cannot be {why}: {' '.join(str(cause).split())[:400]}") from None


def model_folder(name: str, patterns: Sequence[str] = MODEL) -> tuple[Path, str]:
    """Return the folder in the hub's own cache with files of a model, `gpt2` or `gpt2@REVISION`, and its commit."""
    repository, _, tag = name.partition("@")
    away = commit_of("model", repository, tag or None) is None
    # By the name of the revision, not its commit, so that the cache knows it by that name later.
    where: dict[str, Any] = {"revision": tag or None, "allow_patterns": list(patterns), "local_files_only": away}
    with _one_line(name, away):
        folder = Path(huggingface_hub.snapshot_download(repository, **where))
    return folder, folder.name


@functools.lru_cache
def commit_of(kind: str, name: str, revision: str | None) -> str | None:
    """Ask the hub for the commit of a revision; None if it does not answer in time or as a hub would."""
    with _one_line(name):
        try:
            return huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS).sha
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
            raise
        except Exception as error:  # the transport's own errors: no network, time-out, a captive portal
            logger.info("the hub does not answer (%s): looking in the cache", type(error).__name__)
    return None
