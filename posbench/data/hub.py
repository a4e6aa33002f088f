"""What comes from the HuggingFace hub: data sets, which revision of them is meant and their rows, and tokenizers.

Without network one line says so at once: a short question to the hub comes first, because `datasets` itself retries for
23 seconds. What was downloaded before keeps working. Only formats that hold data are read, never code.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench import files
from posbench.data import reading
from posbench.errors import PosbenchError, UserError, did_you_mean

logger = logging.getLogger(__name__)

PROBE_SECONDS = 3.0
# `cache` serves, offline, what one of the others prepared before.
BUILDERS = ("parquet", "json", "text", "csv", "arrow", "cache")


def resolve(dataset: str, subset: str | None, revision: str | None, remembered: Path) -> str:
    """Return the commit that `revision` (None: the newest) stands for, without loading anything.

    Args:
        dataset: a name on the hub, or a folder here, whose "commit" is a digest of its files.
        remembered: folder of answers for when the hub cannot be asked; after it, `datasets`' own cache is.

    Raises:
        UserError: no such data set or revision, or it can be neither reached nor found in the cache.
    """
    if Path(dataset).is_dir():
        return _folder_digest(Path(dataset))
    if Path(dataset).is_file():
        raise UserError(f"data.dataset is '{dataset}', a file: text of your own is data=text data.path={dataset}")
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    note = remembered / f"{hashlib.sha256(f'{dataset}@{revision}'.encode()).hexdigest()[:16]}.txt"
    if commit := _commit("dataset", dataset, revision):
        with contextlib.suppress(OSError):  # only a convenience for later
            note.parent.mkdir(parents=True, exist_ok=True)
            files.write(note, commit.encode())
        return commit
    if note.is_file():
        return note.read_text(encoding="utf-8")
    if revision:  # a branch or tag that nobody here can look up
        raise _unreachable(dataset)
    return str(_builder(dataset, subset, None).hash)


@dataclasses.dataclass(frozen=True)
class Rows:
    """The location of a data set's text."""

    dataset: str
    subset: str | None
    commit: str
    column: str


def documents(rows: Rows, split: str, articles: bool, limit: int | None) -> Iterator[str]:
    """Yield the documents of one split; blank ones are left out.

    Args:
        split: the data set's own name for it.
        articles: rows are lines of WikiText, to be joined to articles.
        limit: at most this many documents; no more than they need is downloaded.

    Raises:
        UserError: unreachable and not in the cache, or a subset, split or column that is not there.
    """
    texts: Iterable[str] = _rows(rows, split, stream=limit is not None)
    texts = reading.join_articles(texts) if articles else texts
    try:
        yield from reading.documents(texts, limit, f"split '{split}' of '{rows.dataset}'")
    except Exception as error:  # of whatever reads a file as it is downloaded
        raise _unwrapped(error, f"'{rows.dataset}'") from None


def own_splits(rows: Rows) -> dict[str, str]:
    """Our splits -> a data set's own names for them, by those names; its only split is training text.

    Raises:
        UserError: unreachable and not in the cache, or none of several splits is called train.
    """
    builder = _builder(rows.dataset, rows.subset, rows.commit)
    names = [str(name) for name in builder.info.splits or builder.as_streaming_dataset()]
    found: dict[str, str] = {}
    for name in names:
        if name.lower() in reading.SPLIT_WORDS:
            found.setdefault(reading.SPLIT_WORDS[name.lower()], name)
    if len(names) == 1:
        return {"train": names[0]}
    if "train" not in found:
        listed = ", ".join(names)
        raise UserError(
            f"'{rows.dataset}' has the splits {listed}: choose one to train on, data.splits={{train: {names[0]}}}"
        )
    return found


def _unwrapped(error: BaseException, what: str) -> BaseException:
    """Re-raise an error of `datasets` as a line with its reason; errors of posbench and a full disk stay themselves."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, PosbenchError | OSError | MemoryError):
        return cause
    return UserError(f"{what} cannot be read: {reading.reason(cause)}")


def _rows(of: Rows, split: str, stream: bool) -> Any:
    """The text column of a split: a sequence, or an iterable that downloads as it goes."""
    dataset, column = of.dataset, of.column
    builder = _builder(dataset, of.subset, of.commit)
    where = "" if Path(dataset).is_dir() else ", from the hub where it is not in the cache"
    logger.info("reading split '%s' of '%s' at %s%s", split, dataset, of.commit, where)
    if stream and type(builder).__name__ != "Cache":
        rows = builder.as_streaming_dataset()
    else:
        with _offline(type(builder).__name__ == "Cache"):
            _prepare(builder, dataset)
        rows = builder.as_dataset()
    if split not in rows:
        raise UserError(f"'{dataset}' has no split '{split}': it has {', '.join(rows)}{did_you_mean(split, rows)}")
    columns = list(rows[split].features or [column])
    if column not in columns:
        raise UserError(reading.missing_column(f"'{dataset}'", column, columns))
    return rows[split][column]


def _prepare(builder: Any, dataset: str) -> None:
    import datasets

    try:
        builder.download_and_prepare()
    except (OSError, datasets.exceptions.DatasetsError) as wrapped:
        raise _unwrapped(wrapped, f"'{dataset}'") from None


def _builder(dataset: str, subset: str | None, commit: str | None) -> Any:
    """The `datasets` builder of a data set at a commit: from the hub if it answers, else from the local cache."""
    local = Path(dataset).is_dir()
    offline = not local and _commit("dataset", dataset, commit) is None
    with _offline(offline):
        import datasets

        try:
            if saved := reading.saved_to_disk(Path(dataset)) if local else {}:
                arrow = {split: [glob.escape(str(file)) for file in files] for split, files in saved.items()}
                builder = datasets.load_dataset_builder("arrow", data_files=arrow)
            else:
                builder = datasets.load_dataset_builder(dataset, subset, revision=None if local else commit)
        except (ValueError, OSError, RuntimeError) as error:
            if offline:
                raise _unreachable(dataset) from None
            told = " ".join(line for line in str(error).splitlines()[:2] if not line.startswith("Example"))
            unnamed = "Config name is missing" in told or "BuilderConfig" in told
            hint = " (data.subset=NAME, or null for its only one)" if unnamed else ""
            raise UserError(f"'{dataset}' cannot be loaded: {told}{hint}") from None
    kinds = {cls.__module__.removeprefix("datasets.packaged_modules.").split(".")[0] for cls in type(builder).__mro__}
    if not kinds & set(BUILDERS):
        raise UserError(f"'{dataset}' has no files that can be read: expected parquet, JSON, CSV or text")
    if offline and commit and builder.hash != commit:
        raise UserError(f"'{dataset}' is cached here at {builder.hash}, and {commit} cannot be reached")
    return builder


def tokenizer_file(name: str) -> tuple[Path, str]:
    """The `tokenizer.json` of a model on the hub, from the hub's own cache where it is there, and its commit.

    Args:
        name: `gpt2`, `meta-llama/Llama-3.2-1B`, with a commit, tag or branch `gpt2@main`.

    Raises:
        UserError: no such model or revision, it has no such file, or it can be neither reached nor found in the cache.
    """
    import huggingface_hub

    with _asked("tokenizer", name, "a tokenizer.json of this machine, data.tokenizer=FILE") as of:
        file = Path(huggingface_hub.hf_hub_download(filename="tokenizer.json", **of))
    return file, file.parent.name


# Settings of tokenizers and of generation, which a model that is trained on keeps.
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja")


def model_folder(name: str) -> tuple[Path, str]:
    """The folder of a model on the hub, in the hub's own cache, and its commit.

    Downloaded are its configuration, its tokenizer with its settings, and its .safetensors files, and nothing else.

    Args:
        name: `EleutherAI/pythia-160m`, with a commit, tag or branch `EleutherAI/pythia-160m@main`.

    Raises:
        UserError: no such model or revision, or it can be neither reached nor found in the cache.
    """
    import huggingface_hub

    weights = ["model.safetensors.index.json", "model.safetensors", "model-*.safetensors"]
    here = "a folder of this machine that save_pretrained of transformers has written"
    with _asked("model", name, here) as of:
        patterns = ["config.json", "tokenizer.json", *_BESIDE, *weights]
        folder = Path(huggingface_hub.snapshot_download(allow_patterns=patterns, **of))
    return folder, folder.name


@contextlib.contextmanager
def _asked(what: str, name: str, here: str) -> Iterator[dict[str, Any]]:
    """Yield arguments for a download; raise UserError, of one line, in the place of the hub's own errors.

    Args:
        what: is downloaded: a tokenizer, the one file that is asked for by its name, or a model.
        name: of the repository, perhaps with `@` and a revision.
        here: what may be given in its place, without the hub.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repository, _, revision = name.partition("@")
    away = _commit("model", repository, revision or None) is None
    try:
        # By the name of the revision, not its commit, so that the cache knows it by that name later.
        yield {"repo_id": repository, "revision": revision or None, "local_files_only": away}
    except errors.LocalEntryNotFoundError:
        endpoint = huggingface_hub.constants.ENDPOINT
        told = f"{what} '{repository}' cannot be reached at {endpoint} and is not in the local cache"
        raise UserError(f"{told}: connect once, or give {here}") from None
    except errors.EntryNotFoundError:
        raise UserError(
            f"'{repository}' has no tokenizer.json: expected one; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) of transformers makes one"
        ) from None
    except (OSError, errors.HfHubHTTPError) as error:  # of the transfer
        raise UserError(f"{what} '{repository}' cannot be loaded: {str(error).splitlines()[0]}") from None


@functools.lru_cache
def _commit(kind: str, name: str, revision: str | None) -> str | None:
    """Ask the hub for the commit of a revision; None if it does not answer in time or as a hub would."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        found = huggingface_hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=PROBE_SECONDS)
        return found.sha
    except errors.GatedRepoError:
        raise UserError(f"'{name}' is gated: ask for access on its page and log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        called = {"dataset": "data set", "model": "model with a tokenizer"}[kind]
        raise UserError(f"the hub has no {called} '{name}' (or it is private: `hf auth login`)") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"'{name}' has no revision '{revision}'") from None
    except errors.HFValidationError as error:
        told = str(error).splitlines()[0]
        raise UserError(f"'{name}' is neither here nor the name of a {kind} on the hub: {told}") from None
    except Exception as error:  # the transport's own errors: no network, time-out, a captive portal
        logger.info("the hub does not answer (%s): looking in the cache", type(error).__name__)
        return None


@contextlib.contextmanager
def _offline(on: bool) -> Iterator[None]:
    """Keep both HuggingFace libraries from asking, retrying and waiting, as HF_HUB_OFFLINE=1 before import would."""
    if not on:
        yield
        return
    import datasets
    import huggingface_hub

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _unreachable(dataset: str) -> UserError:
    import huggingface_hub

    return UserError(
        f"'{dataset}' cannot be reached at {huggingface_hub.constants.ENDPOINT} and is not in the local cache: "
        "connect once, or name a copy of it on this machine, data.dataset=FOLDER"
    )


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\0".encode())
        digest.update(files.sha256(file))
    return digest.hexdigest()[:40]
