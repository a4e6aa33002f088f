"""Passages that held-out and training text share, against sets of words kept whole."""

import itertools
import random

import pytest

from posbench.data import copies

WORDS = ["a", "naïve", "мир", "🙂", "<end>", *(f"w{i}" for i in range(200))]


def text(n_words: int, seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", "\n", "\r\n", "\t", "  ", " \x00 "]) for _ in range(n_words))


def words(text: str) -> list[str]:
    return text.replace("\x00", " ").split()


def passages(text: str) -> set[tuple[str, ...]]:
    parts = words(text)
    return {tuple(parts[i : i + 64]) for i in range(max(1, len(parts) - 63))}


def planted(seed: int) -> tuple[list[list[str]], list[str]]:
    """Held-out documents of two splits, and training documents, every fifth with some words of a held-out one."""
    held_out = [[text(n, seed + n) for n in sizes] for sizes in ((300, 20, 64), (700, 5, 1500))]
    pieces = itertools.cycle(words(document) for split in held_out for document in split)
    train = [text(n, 10_000 + seed + n) for n in range(10, 800, 20)]
    for i in range(0, len(train), 5):
        piece, cut = next(pieces), 20 * i
        train[i] += " ".join(piece[cut % len(piece) :][: 40 + 3 * i]) + " " + text(30, 20_000 + i)
    return held_out, [*train, " ".join(words(held_out[0][1])), held_out[1][2]]


@pytest.mark.parametrize("piece", [copies.PIECE_CHARACTERS, 1000, 2500])
def test_all_shared_passages_are_found_however_the_text_is_cut(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_CHARACTERS", piece)
    held_out, train = planted(seed=1)
    wanted = set[tuple[str, ...]]().union(*(passages(document) for split in held_out for document in split))
    there = set[tuple[str, ...]]().union(*map(passages, train))
    found = copies.find(held_out, train)
    assert found.documents == [i for i, document in enumerate(train) if not wanted.isdisjoint(passages(document))]
    assert 4 < len(found.documents) < 15
    assert found.shared == len(wanted & there) / len(wanted)
    assert found.text == sum(len(train[i]) for i in found.documents) / sum(map(len, train))
    assert (found.held_out_checked, found.train_checked) == (1.0, 1.0)


def test_a_passage_of_63_words_is_none_and_one_of_64_is_whatever_its_white_space() -> None:
    document = text(200, 3)
    for n, there in ((63, []), (64, [1])):
        train = [text(90, 4), text(90, 5) + "\n" + " ".join(words(document)[50 : 50 + n]) + " " + text(90, 6)]
        assert copies.find([[document]], train).documents == there


def test_the_order_of_words_and_where_they_part_count() -> None:
    document = words(text(64, 8))
    half, quarter, pair = 32, 16, 2
    others = [
        document[half:] + document[:half],
        document[:quarter] + document[half : half + quarter] + document[quarter:half] + document[half + quarter :],
        document[1:pair] + document[:1] + document[pair:],
        ["".join(document[:2]), *document[2:], "a"],
    ]
    assert copies.find([[" ".join(document)]], [" ".join(other) for other in others]).documents == []
    assert copies.find([[" ".join(document)]], [" ".join(document)]).documents == [0]
