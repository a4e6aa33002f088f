"""Text in three splits, and how much of the held-out ones training has, too.

- `given`: the source has splits. If validation or test is missing, the other one is
  halved.
- `document`: whole documents are held out. Training documents that share a passage with
  them are dropped.
- `stretches`: with under 20 documents, separate stretches of each one are held out,
  `data.test_pieces` in all.

Only `document` drops what is shared; `copies.shared` records its share for all.
"""

import functools
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posbench.config.schema import DataConfig
from posbench.data.sources import Source, builtin_modules, digest, join_articles
from posbench.errors import UserError

SPLITS = ("train", "validation", "test")
HELD_OUT, BUILTIN_HELD_OUT = (0.05, 0.05), (0.06, 0.20)  # shares of validation and test
FEWEST_DOCUMENTS = 20  # needed to split by document
# the share of the characters that `data.test_pieces` leaves for training at least
TRAINING = 0.70
# characters that a held-out stretch should have: some 2,000 tokens of context before
# its targets
STRETCH = 2**13
# in a short text they become shorter, not fewer: fewer would give no interval
FEWEST_STRETCHES = 8
# training and held-out text must not share so many in a row, or a whole shorter
# document
PASSAGE_WORDS = 64
# with more characters only every 16th passage is sought, which finds copies of 79 words
LARGE, EVERY = 50_000_000, 16
# what each word of a passage is multiplied by in the passage's hash; odd numbers
_FACTORS = np.random.default_rng(0).integers(
    2**64, size=PASSAGE_WORDS, dtype=np.uint64
) | np.uint64(1)


class Texts(Sequence[str]):
    """Parts of documents. Each is read when it is asked for; `sizes` are in
    characters.
    """

    def __init__(self, document: Callable[[int], str], parts: Any) -> None:
        self.document = document
        self.parts = np.array(parts)  # (n, 3): number of the document, first, end
        self.sizes = self.parts[:, 2] - self.parts[:, 1]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: Any) -> Any:
        number, first, end = self.parts[index].tolist()
        return self.document(number)[first:end]

    def sample(self, n_characters: int) -> Iterator[str]:
        """Yield parts that are drawn evenly, so many characters of them: the last one
        is cut.
        """
        room = n_characters
        for number in np.random.default_rng(0).permutation(len(self)):
            if room > 0:
                yield self[number][:room]
            room -= self.sizes[number]


def load(
    config: DataConfig, source: Source, folder: Path
) -> tuple[dict[str, Texts], dict[str, Any]]:
    """Read the documents of a located source into files of a folder. Return them by
    split, and what `meta.json` says of them.
    """
    given = {}
    for split, documents in source.read().items():
        if config.articles:
            documents = join_articles(documents)
        not_blank = filter(str.strip, documents)
        first_ones = itertools.islice(not_blank, config.max_documents)
        given[split] = _write(folder / f"{split}.documents", first_ones)

    split_by, splits = _split(config, given)

    train = splits["train"]
    n_characters = sum(texts.sizes.sum() for texts in splits.values())
    every = EVERY if n_characters > LARGE else 1
    held_out = itertools.chain(splits["validation"], splits["test"])
    copied, shared = copies(train, held_out, every)

    dropped = copied if split_by == "document" else []
    splits["train"] = Texts(train.document, np.delete(train.parts, dropped, axis=0))
    for split, texts in splits.items():
        if not texts:
            raise UserError(
                f"data '{config.name}': the split '{split}' is empty: of the"
                f" {len(train):,} training documents {len(dropped):,} share"
                f" {PASSAGE_WORDS} words in a row with held-out ones, such as a"
                " licence, and equal ones stay together: expected more documents that"
                " differ, or these without it"
            )

    def parts() -> Iterator[bytes]:
        for split in SPLITS:
            yield split.encode()
            yield from map(str.encode, splits[split])

    meta = {
        "name": config.name,
        "revision": source.commit,
        "split": split_by,
        "copies": {
            "every": every,
            "shared": round(shared, 6),
            "dropped_documents": len(dropped),
            "in_training": n_repeated(splits["train"]),
        },
        "sha256": digest(parts()),
        "documents": {split: len(splits[split]) for split in SPLITS},
    }
    if split_by == "stretches":
        # how many are held out of each document, as many in validation as in test
        counts = np.bincount(splits["test"].parts[:, 0]).tolist()
        meta["stretches"] = dict.fromkeys(SPLITS[1:], counts)
    return splits, meta


def _write(path: Path, texts: Iterable[str]) -> Texts:
    """Write documents into a file, one after another, and map it."""
    n_bytes = list[int]()
    n_characters = list[int]()
    with path.open("xb") as file:
        for text in texts:
            n_bytes.append(file.write(text.encode()))
            n_characters.append(len(text))
    if not n_bytes:
        raise UserError("no text: 0 documents that are not blank")

    data = np.memmap(path, np.uint8, "r")
    ends = np.cumsum(n_bytes)
    starts = ends - n_bytes

    @functools.lru_cache(1)
    def document(number: int) -> str:
        return data[starts[number] : ends[number]].tobytes().decode()

    numbers = np.arange(len(ends))
    return Texts(document, np.stack([numbers, 0 * numbers, n_characters], axis=1))


def _split(config: DataConfig, given: dict[str, Texts]) -> tuple[str, dict[str, Texts]]:
    """Return how a text is split, and its three splits."""
    if len(given) == len(SPLITS):
        return "given", given
    if len(given) > 1:  # the only held-out split is halved
        (texts,) = (texts for split, texts in given.items() if split != "train")
        if len(texts) >= FEWEST_DOCUMENTS:
            halves = _by_document(texts, texts, (0.5, 0.5))
            return "given", halves | {"train": given["train"]}
        numbers, starts, ends = texts.parts.T
        middles = ends // 2
        first_halves = np.stack([numbers, starts, middles], axis=1)
        second_halves = np.stack([numbers, middles, ends], axis=1)
        return "given", {
            "train": given["train"],
            "validation": Texts(texts.document, first_halves),
            "test": Texts(texts.document, second_halves),
        }

    texts = next(iter(given.values()))
    names: Sequence[str] = texts  # equal documents stay together
    shares = HELD_OUT
    if config.source == "builtin":
        names = list(builtin_modules())[: len(texts)]
        shares = BUILTIN_HELD_OUT
    elif len(texts) < FEWEST_DOCUMENTS:
        count = config.test_pieces or FEWEST_STRETCHES
        parts = stretches(texts.sizes.tolist(), count)
        splits = {split: Texts(texts.document, parts[split]) for split in SPLITS}
        return "stretches", splits
    return "document", _by_document(texts, names, shares, config.test_pieces or 0)


def _by_document(
    texts: Texts, names: Iterable[str], shares: Sequence[float], fewest: int = 0
) -> dict[str, Texts]:
    """Split documents by the sha256 of their names. Test gets at least `fewest`
    documents if there is room.
    """
    keys = np.array([hashlib.sha256(name.encode()).digest() for name in names])
    order = keys.argsort(kind="stable")
    # Documents of one name stay together: a split ends where a name ends.
    _, n_of_name = np.unique(keys, return_counts=True)
    borders = n_of_name.cumsum()

    def first_border(count: int) -> int:
        return int(borders[borders >= count][0])

    # With so many documents held out, training still has its share of the text.
    total = texts.sizes.sum()
    for_training = total - texts.sizes[order].cumsum()[borders - 1]
    n_spare = int(borders[for_training >= TRAINING * total].max(initial=0))

    n_validation = first_border(max(1, round(shares[0] * len(texts))))
    n_wanted = max(
        n_validation + 1,  # test has one at least
        round(sum(shares) * len(texts)),
        min(n_spare, n_validation + fewest),
    )
    n_held_out = first_border(min(len(texts), n_wanted))

    validation, test, train = np.split(order, [n_validation, n_held_out])
    return {
        "train": Texts(texts.document, texts.parts[np.sort(train)]),
        "validation": Texts(texts.document, texts.parts[np.sort(validation)]),
        "test": Texts(texts.document, texts.parts[np.sort(test)]),
    }


def stretches(
    sizes: Sequence[int], count: int
) -> dict[str, list[tuple[int, int, int]]]:
    """Return parts of texts by split, as in `Texts`.

    A text is cut into equal parts with a hole in the middle: a validation stretch (5 %
    of the text in all) and a test stretch. This has `STRETCH` characters if 5 % to 25 %
    of the text suffice; else stretches are fewer, then shorter.
    """
    # of test in the text; validation has HELD_OUT[0] of it
    share = max(HELD_OUT[1], count * STRETCH / sum(sizes))
    share = min(share, 1 - TRAINING - HELD_OUT[0])
    # stretches of each text
    most = math.ceil(count / len(sizes))
    fewest = math.ceil(min(count, FEWEST_STRETCHES) / len(sizes))

    parts: dict[str, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
    for text, size in enumerate(sizes):
        n_holes = min(most, max(fewest, int(share * size / STRETCH)))
        n_validation = int(HELD_OUT[0] * size / n_holes)
        n_test = int(share * size / n_holes)
        end = 0
        for hole in range(n_holes):
            middle = (2 * hole + 1) * size // (2 * n_holes)
            validation = middle - (n_validation + n_test) // 2
            test = validation + n_validation
            parts["train"].append((text, end, validation))
            parts["validation"].append((text, validation, test))
            end = test + n_test
            parts["test"].append((text, test, end))
        parts["train"].append((text, end, size))
    return parts


def copies(
    train: Iterable[str], held_out: Iterable[str], every: int = 1
) -> tuple[list[int], float]:
    """Seek each n-th held-out passage. Return the numbers of training documents that
    have one, and the share found.
    """
    # `data` reads the hashes one by one: a text may be a gigabyte.
    sought = set[int]()
    for text in held_out:
        sought.update(_passages(text)[::every].data)

    copied = []
    found = set[int]()
    for number, text in enumerate(train):
        hits = sought.intersection(_passages(text).data)
        if hits:
            copied.append(number)
            found |= hits
    return copied, len(found) / max(1, len(sought))


def first_of_equals(texts: Sequence[str]) -> np.ndarray:
    """Return the number of the first text that equals each one but for white space,
    (n,): line ends and spaces make no other text.
    """
    seen: dict[bytes, int] = {}
    firsts = []
    for number, text in enumerate(texts):
        content = "".join(text.split()).encode()
        digest = hashlib.sha256(content).digest()
        firsts.append(seen.setdefault(digest, number))
    return np.array(firsts, dtype=np.int64)


def n_repeated(texts: Sequence[str]) -> int:
    """Return how many texts equal an earlier one but for white space."""
    return len(texts) - len(np.unique(first_of_equals(texts)))


def _passages(text: str) -> np.ndarray:
    """Return a hash of each passage of a text, or of the whole text if it is
    shorter.
    """
    hashes = (hash(word[0]) for word in re.finditer(r"\S+", text))
    words = np.fromiter(hashes, np.int64).view(np.uint64)
    missing = max(0, PASSAGE_WORDS - len(words))
    padded = np.pad(words, (0, missing))
    # of word i: the sum over s of words[i + s] · _FACTORS[s], modulo 2^64
    passages = np.correlate(padded, _FACTORS, "valid")
    return passages[: len(words)]  # a text without words has none
