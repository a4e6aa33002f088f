"""Where a run's text comes from: which source a key asks for, which keys each source reads, and what it is called."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from posbench.config.messages import as_typed
from posbench.config.schema import DataConfig
from posbench.errors import UserError

ASKS_FOR = {"data.path": "text", "data.dataset": "hub"}  # key -> the choice of data that reads it
_OF_TEXT = ("column", "max_documents", "tokenizer", "vocab_size")
_UNREAD = {
    "builtin": ("path", "dataset", "subset", "revision", "column", "splits", "articles", "test_pieces"),
    "text": ("dataset", "subset", "revision", "splits"),
    "hub": ("path",),
    "task": ("path", "dataset", "subset", "revision", "splits", "articles", "test_pieces", *_OF_TEXT),
}
_OF_TASKS = ("task", "offset")
_WHOLE_FILE = re.compile(r".*\.(?:txt|md|py|rst|tex)(?:\.(?:gz|zst|bz2))?", re.IGNORECASE)  # one document each
# As in _base.yaml; the others are null.
_UNSET: dict[str, Any] = {"column": "text", "splits": {}, "articles": False, "offset": 0}
_UNSET |= {"tokenizer": "bpe", "vocab_size": 2048}


def refuse_unread(data: DataConfig) -> None:
    """Refuse keys that the chosen source does not read, so that a run is about the text that its command names."""
    for name in (*_UNREAD[data.source], *(() if data.source == "task" else _OF_TASKS)):
        value = getattr(data, name)
        if value != _UNSET.get(name):
            reads = [source for source in _UNREAD if name not in _UNREAD[source]]
            readers = "data=task/copy" if name in _OF_TASKS else " and ".join(f"data={source}" for source in reads)
            raise UserError(f"data.{name} is {as_typed(value)}, which data={data.source} does not read: {readers} does")
    if data.source == "text" and data.column != _UNSET["column"] and _WHOLE_FILE.fullmatch(data.path or ""):
        raise UserError(
            f"data.column is {as_typed(data.column)}, which '{data.path}' does not have: files with rows do"
        )


def refuse_other_text(chosen: Mapping[str, Any], now: Mapping[str, Any], given: Collection[str]) -> None:
    """Refuse another source than the chosen one, and under its name another data set that is no copy of its own.

    Args:
        chosen, now: the section `data` as it was chosen, and with the values of the command line.
        given: the keys that those were of, such as data.dataset.
    """
    source, before, here = now.get("source"), chosen.get("dataset"), now.get("dataset")
    if source != chosen.get("source"):
        raise UserError(f"data.source is {as_typed(source)}: a source is chosen with all that it reads, data={source}")
    if before and here != before and "data.name" not in given and not Path(str(here)).expanduser().is_dir():
        known = f"data.dataset is {as_typed(here)}, but '{chosen['name']}' is '{before}' or a folder with a copy of it"
        raise UserError(f"{known}: another data set is data=hub data.dataset={here}")


def named(data: DataConfig) -> DataConfig:
    """The section with the data set's own name, where data=hub left it open."""
    own = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(data.dataset or "").name).strip("._-")[:128]
    return dataclasses.replace(data, name=own) if data.name == data.source == "hub" and own else data
