"""Documents on the disk, each read when it is asked for, so that memory does not grow with the text.

Three files: `text` has the documents' UTF-8, one after another; `rows.npy` says where each is; `keys.npy` has the
sha256 of each. A document takes 56 bytes of memory.
"""

import array
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Span = tuple[int, int, int]  # number of a document, first character, end


class Texts(Sequence[str]):
    """Documents of a file, or pieces of them.

    Attributes:
        rows: (n, 3) int64: first byte, end, and number of characters.
        keys: (n,) S32: the sha256 of each document's bytes; None for pieces.
    """

    def __init__(self, file: Any, rows: np.ndarray, keys: np.ndarray | None = None) -> None:
        self._file, self.rows, self.keys = file, rows, keys

    @classmethod
    def of(cls, folder: Path) -> "Texts":
        """The documents that `write` wrote."""
        file = (folder / "text").open("rb")
        return cls(file, np.load(folder / "rows.npy"), np.load(folder / "keys.npy"))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.raw(index).decode()

    def __iter__(self) -> Iterator[str]:
        return (raw.decode() for raw in self.raws())

    def raws(self) -> Iterator[bytes]:
        """The bytes of each document."""
        return (self.raw(i) for i in range(len(self)))

    def raw(self, index: int) -> bytes:
        """The bytes of a document. Raises ValueError if the file has fewer than it should."""
        begin, end, _ = self.rows[index].tolist()
        self._file.seek(begin)
        raw: bytes = self._file.read(end - begin)
        if len(raw) < end - begin:
            raise ValueError(f"{self._file.name} ends before byte {end}")
        return raw

    def select(self, indices: Any) -> "Texts":
        """Some of the documents: an array of their numbers, or a slice."""
        return Texts(self._file, self.rows[indices], None if self.keys is None else self.keys[indices])

    def at(self, rows: np.ndarray) -> "Texts":
        """Other documents or pieces of the same file."""
        return Texts(self._file, rows)

    def cut(self, spans: Iterable[Span]) -> "Texts":
        """Pieces of documents; those of one document stand together, in order."""
        rows = []
        for number, pieces in itertools.groupby(spans, key=lambda span: span[0]):
            text, (byte, _, _), character = self[number], self.rows[number].tolist(), 0
            for _, first, end in pieces:
                begins = byte + len(text[character:first].encode())
                byte, character = begins + len(text[first:end].encode()), end
                rows.append((begins, byte, end - first))
        return self.at(np.array(rows, dtype=np.int64).reshape(-1, 3))


def characters(texts: Sequence[str]) -> np.ndarray:
    """The length of each text: (n,) int64."""
    return texts.rows[:, 2] if isinstance(texts, Texts) else np.array([len(text) for text in texts], dtype=np.int64)


def write(folder: Path, splits: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Write the documents of all splits into a folder, and return how many each has."""
    at = 0
    rows, keys, counts = array.array("q"), bytearray(), {}
    with (folder / "text").open("xb") as file:
        for split, texts in splits.items():
            before = len(rows)
            for text in texts:
                raw = text.encode()
                file.write(raw)
                rows.extend((at, at + len(raw), len(text)))
                keys += hashlib.sha256(raw).digest()
                at += len(raw)
            counts[split] = (len(rows) - before) // 3
    np.save(folder / "rows.npy", np.frombuffer(rows, dtype=np.int64).reshape(-1, 3))
    np.save(folder / "keys.npy", np.frombuffer(keys, dtype="S32"))
    return counts
