"""Near-copies: passages of held-out text that stand in the training text, too.

A passage is 64 words in a row, or a whole document of fewer. Words are what ASCII white space and control characters
part. A passage is known by a 64-bit hash that depends on nothing but its words, so that the same text gives the same
answer in every process and on every machine.

The cost is bounded. Of the held-out text up to four million distinct passages are looked for: all of some 25 MB of
English. Of more text only those with the lowest hashes are looked for, so that a passage is either looked for
everywhere or nowhere. If these are one in k, a copy of n passages is missed with probability (1 - 1/k)^n. Of each text
up to 2^30 characters are read, once; of a longer text, pieces spread evenly.

A text without white space is one word: of it only whole copies are found.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from posbench.data import texts as on_disk

PASSAGE_WORDS = 64  # a power of two
MOST_PASSAGES = 2**22  # of the held-out text, looked for
MOST_CHARACTERS = 2**30  # of the held-out and of the training text each, looked through
PIECE_CHARACTERS = 2**18  # what is worked on at a time; longer documents are cut

_TABLE_BITS = 26  # 64 MiB in which 94 % of the passages that nobody looks for are told at once
_WORD = re.compile(r"[^\x00-\x20]*")
_WORD_AND_MORE = re.compile(rf"[^\x00-\x20]*(?:[\x00-\x20]+[^\x00-\x20]+){{0,{PASSAGE_WORDS - 1}}}")
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True)
class Copies:
    """The overlap of held-out and training text, as shares of 1."""

    documents: list[int]  # training documents that hold a held-out passage
    text: float  # share of the training text that these documents are
    shared: float  # share of the held-out passages looked for that stand in the training text
    held_out_checked: float  # share of the held-out passages that were looked for
    train_checked: float  # share of the training text that was looked through


def find(held_out: Sequence[Sequence[str]], train: Sequence[str]) -> Copies:
    """Look in the training documents for passages of the documents of held-out splits."""
    sizes = on_disk.characters(train)
    n_held_out = max(1, sum(int(on_disk.characters(texts).sum()) for texts in held_out))
    n_train = max(1, int(sizes.sum()))
    held_out_share, train_share = min(1.0, MOST_CHARACTERS / n_held_out), min(1.0, MOST_CHARACTERS / n_train)
    known, kept = _lowest(hashes for hashes, _ in _passages(itertools.chain(*held_out), held_out_share))
    table = np.zeros(2**_TABLE_BITS, dtype=bool)
    table[_row(known)] = True
    found = np.zeros(len(known), dtype=bool)
    documents: set[int] = set()
    for hashes, of_document in _passages(train, train_share):
        candidates = np.flatnonzero(table[_row(hashes)])
        places = np.searchsorted(known[:-1], hashes[candidates])  # never past the last
        equal = known[places] == hashes[candidates]
        found[places[equal]] = True
        documents.update(of_document[candidates[equal]].tolist())
    return Copies(
        documents=sorted(documents),
        text=int(sizes[sorted(documents)].sum()) / n_train,
        shared=float(found.sum()) / max(1, len(found)),
        held_out_checked=held_out_share * kept,
        train_checked=train_share,
    )


def _row(hashes: np.ndarray) -> np.ndarray:
    """The row of a hash in the table."""
    return hashes & np.uint64(2**_TABLE_BITS - 1)


def _lowest(batches: Iterable[np.ndarray]) -> tuple[np.ndarray, float]:
    """The distinct hashes in order, and the share kept: below 1 if there are too many and only the lowest stay."""
    waiting = [np.empty(0, dtype=np.uint64)]
    limit = 2**64 - 1
    for hashes in batches:
        waiting.append(hashes[hashes <= limit])
        if sum(map(len, waiting)) > 2 * MOST_PASSAGES:
            known, limit = _thinned(waiting, limit)
            waiting = [known]
    known, limit = _thinned(waiting, limit)
    return known, (limit + 1) / 2**64


def _thinned(batches: list[np.ndarray], limit: int) -> tuple[np.ndarray, int]:
    known = np.sort(np.concatenate(batches))
    known = known[np.diff(known, prepend=~known[:1]) != 0]  # ten times as fast as np.unique
    while len(known) > MOST_PASSAGES:
        limit //= 2
        known = known[known <= limit]
    return known, limit


# -- hashes of passages ------------------------------------------------------------------------------------------------


def _passages(texts: Iterable[str], share: float) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes of passages and their documents, for this share of a text."""
    for pieces, documents in _batches(texts, share):
        words, piece = _words(pieces)
        n_words = np.bincount(piece, minlength=len(pieces))
        missing = np.where(n_words > 0, np.maximum(0, PASSAGE_WORDS - n_words), 0)
        ends = np.repeat(np.cumsum(n_words), missing)
        words = np.insert(words, ends, np.uint64(0))  # to one passage
        piece = np.insert(piece, ends, np.repeat(np.arange(len(pieces)), missing))
        hashes = _runs(words)
        whole = piece[: len(hashes)] == piece[PASSAGE_WORDS - 1 :]
        yield hashes[whole], np.array(documents)[piece[: len(hashes)][whole]]


def _words(pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each word, and the number of the piece it is in."""
    encoded = [piece.encode() for piece in pieces]
    data = np.frombuffer(b" ".join(encoded), dtype=np.uint8)
    letters = np.flatnonzero(data > ord(" "))
    if not len(letters):
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
    first = np.flatnonzero(np.diff(letters, prepend=-2) > 1)  # of each word, its first among the letters
    place = letters - np.repeat(letters[first], np.diff(first, append=len(letters)))
    powers = np.multiply.accumulate(np.full(place.max() + 1, _ODD))
    polynomials = np.add.reduceat(powers[place] * data[letters], first)
    ends = np.cumsum([len(piece) + 1 for piece in encoded])
    return _mixed(polynomials), np.searchsorted(ends, letters[first], side="right")


def _runs(hashes: np.ndarray) -> np.ndarray:
    """The hash of each run of `PASSAGE_WORDS` words, from those of runs half as long."""
    half = 1
    while half < PASSAGE_WORDS:
        # Mixed each time: without it, exchanging the two middle quarters of a run would leave its hash.
        hashes = _mixed(hashes[:-half] * _ODD + hashes[half:])
        half *= 2
    return hashes


def _mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit integers that makes each bit depend on all: the one of SplitMix64.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014), figure 17.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


# -- pieces of text ----------------------------------------------------------------------------------------------------


def _batches(texts: Iterable[str], share: float) -> Iterator[tuple[list[str], list[int]]]:
    """Batches of pieces, each with its document."""
    pieces: list[str] = []
    documents: list[int] = []
    characters = 0
    for document, piece in _pieces(texts, share):
        pieces.append(piece)
        documents.append(document)
        characters += len(piece)
        if characters >= PIECE_CHARACTERS:
            yield pieces, documents
            pieces, documents, characters = [], [], 0
    if pieces:
        yield pieces, documents


def _pieces(texts: Iterable[str], share: float) -> Iterator[tuple[int, str]]:
    """Documents, long ones in pieces, that make up a share of all: as many as keep up with it."""
    seen = taken = 0
    for document, text in enumerate(texts):
        cuts = range(0, max(1, len(text) - PIECE_CHARACTERS // 2), PIECE_CHARACTERS)  # no last piece of a few words
        for begin, end in itertools.pairwise([*cuts, len(text)]):
            if taken <= share * seen:
                taken += end - begin
                yield document, _widened(text, begin, end)
            seen += end - begin


def _widened(text: str, begin: int, end: int) -> str:
    """The words that begin between two places, and those after them that their passages reach to."""
    if begin > 0 and (word := _WORD.match(text, begin - 1)):
        begin = word.end()
    if end < len(text) and (rest := _WORD_AND_MORE.match(text, end - 1)):
        end = rest.end()
    return text[begin:end]
