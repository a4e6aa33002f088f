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
    return commit_of(str(config.dataset), config.revision) or str(
        _builder(config, config.revision).hash
    )


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

    if offline := commit_of(str(config.dataset), commit) is None:
        # else it retries for 23 s
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    with one_line(config.dataset):
        build = functools.partial(
            datasets.load_dataset_builder,
            config.dataset,
            config.subset,
            revision=commit,
        )
        try:
            # an option of CSV alone: NA in a cell is text
            builder: Any = build(keep_default_na=False)
        except (ValueError, TypeError):
            builder = build()
        if offline and commit not in (None, builder.hash):
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
        cause = (
            error
            if isinstance(error, errors.HfHubHTTPError)
            else error.__cause__ or error
        )
        raise UserError(
            f"'{name}' cannot be read: {' '.join(str(cause).split())[:400]}"
        ) from None


def model_folder(
    name: str, patterns: Sequence[str] = ("*.json", "*.jinja", "model*.safetensors")
) -> tuple[Path, str]:
    """Return the hub's cache folder with files of a model, `gpt2` or `gpt2@REVISION`,
    and the model's commit.
    """
    repository, _, tag = name.partition("@")
    with one_line(name):
        folder = Path(
            huggingface_hub.snapshot_download(
                repository, revision=tag or None, allow_patterns=[*patterns]
            )
        )
    return folder, folder.name


@functools.lru_cache
def commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a data set's revision; None if the hub does not answer in
    three seconds.
    """
    with one_line(name):
        try:
            return (
                huggingface_hub.HfApi()
                .dataset_info(name, revision=revision, timeout=3.0)
                .sha
            )
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ):
            raise
        # the transport's own errors: no network, time-out, a captive portal
        except Exception:
            return None
