"""Access to the HuggingFace hub: data sets, files of models, and the commits that their
revisions stand for.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors

from posbench.config.schema import DataConfig
from posbench.errors import UserError, is_own_mistake

# the transport's own errors: no network, time-out, a captive portal
_NO_ANSWER = (errors.HTTPError, OSError, ValueError)  # type: ignore[attr-defined]
_commits: dict[tuple[str, str | None], str] = {}  # what the hub has answered


def resolve(config: DataConfig) -> str:
    """Return the commit of a data set that `data.revision` (None: the newest) stands
    for.
    """
    if config.revision and re.fullmatch(r"[0-9a-f]{40}", config.revision):
        return config.revision
    commit = commit_of(str(config.dataset), config.revision)
    if commit is None:
        with _without_network():
            return str(_builder(config, config.revision).hash)
    return commit


def rows(config: DataConfig, commit: str | None) -> Any:
    """Return the rows of a data set at a commit, by split; from the cache, if the hub
    does not answer.
    """
    network: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    is_offline = commit_of(str(config.dataset), commit) is None
    if is_offline:
        network = _without_network()
    with network:
        builder = _builder(config, commit)
        if is_offline and commit not in (None, builder.hash):
            raise UserError(
                f"'{config.dataset}' cannot be read: the hub does not answer, and the"
                f" cache has commit {builder.hash}, not {commit}"
            )
        with one_line(config.dataset):
            if config.max_documents is not None:
                # no more is downloaded than is read
                return builder.as_streaming_dataset()
            builder.download_and_prepare()
            return builder.as_dataset()


@contextlib.contextmanager
def _without_network() -> Iterator[None]:
    """Have the libraries look into their caches alone; else they try for 23 s. Later
    the network may be there: other data sets are sought on it again.
    """
    import datasets

    settings: list[Any] = [datasets.config, huggingface_hub.constants]
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _builder(config: DataConfig, commit: str | None) -> Any:
    """Return the builder of `datasets` for a data set at a commit."""
    import datasets

    with one_line(config.dataset):
        return datasets.load_dataset_builder(
            str(config.dataset), config.subset, revision=commit
        )


@contextlib.contextmanager
def one_line(name: str | None, problem: str = "cannot be read") -> Iterator[None]:
    """Turn an error of the libraries in the block into a UserError of one line: what
    cannot be read, and the root cause.
    """
    try:
        yield
    except Exception as error:  # `datasets` has no common class
        if is_own_mistake(error):
            raise
        cause: BaseException = error
        if error.__cause__ and not isinstance(error, errors.HfHubHTTPError):
            cause = error.__cause__
        reason = " ".join(str(cause).split())
        raise UserError(f"'{name}' {problem}: {reason[:400]}") from None


def model_folder(
    name: str, patterns: Sequence[str] = ("*.json", "*.jinja", "model*.safetensors")
) -> tuple[Path, str]:
    """Return the hub's cache folder with files of a model, `gpt2` or `gpt2@REVISION`,
    and the model's commit.
    """
    repository, _, tag = name.partition("@")
    with one_line(name, "is no folder here, and cannot be read from the hub"):
        place = huggingface_hub.snapshot_download(
            repository, revision=tag or None, allow_patterns=[*patterns]
        )
    return Path(place), Path(place).name


def commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a data set's revision; None if the hub does not answer in
    three seconds. An answer is kept, and no answer is not.
    """
    if (name, revision) in _commits:
        return _commits[name, revision]
    with one_line(name):
        try:
            hub = huggingface_hub.HfApi()
            commit = hub.dataset_info(name, revision=revision, timeout=3.0).sha
        except (
            errors.RepositoryNotFoundError,
            errors.RevisionNotFoundError,
            errors.HFValidationError,
        ):
            raise
        except _NO_ANSWER:
            return None
    if commit is not None:
        _commits[name, revision] = commit
    return commit
