"""Access to the HuggingFace hub: data sets, files of models, and the commits that their
revisions stand for.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from posbench.config.schema import DataConfig
from posbench.errors import UserError


def resolve(config: DataConfig) -> str:
    """Return the commit of a data set that `data.revision` (None: the newest) stands
    for.
    """
    if config.revision and re.fullmatch(r"[0-9a-f]{40}", config.revision):
        return config.revision
    commit = commit_of(str(config.dataset), config.revision)
    if commit is None:
        return str(_builder(config, config.revision).hash)
    return commit


def rows(config: DataConfig, commit: str | None) -> Any:
    """Return the rows of a data set at a commit, by split."""
    builder = _builder(config, commit)
    with one_line(config.dataset):
        if config.max_documents is not None:
            return builder.as_streaming_dataset()  # no more is downloaded than is read
        builder.download_and_prepare()
        return builder.as_dataset()


def _builder(config: DataConfig, commit: str | None) -> Any:
    """Return the builder of `datasets` for a data set at a commit; from the cache, if
    the hub does not answer.
    """
    import datasets

    is_offline = commit_of(str(config.dataset), commit) is None
    if is_offline:
        # else it retries for 23 s
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    with one_line(config.dataset):
        builder = datasets.load_dataset_builder(
            str(config.dataset), config.subset, revision=commit
        )
        if is_offline and commit not in (None, builder.hash):
            raise FileNotFoundError(
                f"the hub does not answer, and the cache has commit {builder.hash}, not"
                f" {commit}"
            )
    return builder


@contextlib.contextmanager
def one_line(name: str | None) -> Iterator[None]:
    """Turn any error of the block into a UserError of one line: what cannot be read,
    and the root cause.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        if error.__cause__ and not isinstance(error, errors.HfHubHTTPError):
            cause = error.__cause__
        reason = " ".join(str(cause).split())
        raise UserError(f"'{name}' cannot be read: {reason[:400]}") from None


def model_folder(
    name: str, patterns: Sequence[str] = ("*.json", "*.jinja", "model*.safetensors")
) -> tuple[Path, str]:
    """Return the hub's cache folder with files of a model, `gpt2` or `gpt2@REVISION`,
    and the model's commit.
    """
    repository, _, tag = name.partition("@")
    with one_line(name):
        place = huggingface_hub.snapshot_download(
            repository, revision=tag or None, allow_patterns=[*patterns]
        )
    return Path(place), Path(place).name


@functools.lru_cache
def commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a data set's revision; None if the hub does not answer in
    three seconds.
    """
    with one_line(name):
        try:
            hub = huggingface_hub.HfApi()
            return hub.dataset_info(name, revision=revision, timeout=3.0).sha
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ):
            raise
        # the transport's own errors: no network, time-out, a captive portal
        except Exception:
            return None
