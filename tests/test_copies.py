"""Passages that held-out and training text share, against sets of words kept whole."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
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


def test_no_passage_crosses_from_document_to_document() -> None:
    document = words(text(100, 7))
    train = [" ".join(document[:50]), " ".join(document[50:])]
    assert copies.find([[" ".join(document)]], train).documents == []
    assert copies.find([train], [" ".join(document)]).documents == []


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


def test_blank_text_shares_nothing() -> None:
    assert copies.find([["", " \n"], []], ["", "\t", text(100, 9)]) == copies.Copies([], 0.0, 0.0, 1.0, 1.0)
    assert copies.find([[]], []) == copies.Copies([], 0.0, 0.0, 1.0, 1.0)


def test_of_too_many_passages_a_fixed_share_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = [[text(400, seed) for seed in range(50)]]
    train = [text(400, seed) for seed in range(50, 100)]
    train[7] += held_out[0][3]
    train[30] += " ".join(words(held_out[0][20])[:200])
    half = [*held_out[0][:25], text(400, 100)]
    monkeypatch.setattr(copies, "MOST_PASSAGES", 1000)
    sampled = copies.find(held_out, train)
    assert sampled.documents == [7, 30]
    assert sampled.held_out_checked == 1 / 32  # 50 documents of 337 passages; 1/16 of them would be 1053
    # A share of some 527 passages has a standard deviation of .022.
    assert copies.find(held_out, half).shared == pytest.approx(0.5, abs=4 * 0.022)
    assert copies.find(held_out, train) == sampled


def test_of_too_much_text_pieces_spread_evenly_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(copies, "MOST_CHARACTERS", 20_000)
    held_out = text(100, 0)
    train = [f"{text(50, seed)} {held_out} " for seed in range(1, 201)]
    found = copies.find([[held_out]], train)
    whole = copies.find([[held_out]], ["".join(train)])
    size = sum(map(len, train))
    for one in (found, whole):
        assert (one.shared, one.held_out_checked, one.train_checked) == (1.0, 1.0, 20_000 / size)
    assert whole.documents == [0]
    assert set(np.diff([0, *found.documents, 200])) <= {0, size // 20_000, size // 20_000 + 1}
    assert abs(sum(len(train[i]) for i in found.documents) - 20_000) < 1000  # a piece
    pieces = [piece for _, piece in copies._pieces(["".join(train)], 20_000 / size)]
    places = [0, *("".join(train).index(piece) for piece in pieces), size]
    assert len(pieces) == 20 and max(np.diff(places)) <= size / 20 + 2000


def test_hashes_are_those_of_the_formula_in_every_process() -> None:
    def mixed(value: int) -> int:
        return int(copies._mixed(np.array([value % 2**64], dtype=np.uint64))[0])

    def run(hashes: Sequence[int]) -> int:
        if len(hashes) == 1:
            return hashes[0]
        half = len(hashes) // 2
        return mixed(run(hashes[:half]) * odd + run(hashes[half:]))

    odd = 0x9E3779B97F4A7C15
    # The first numbers of Java's SplittableRandom with seeds 0 and 1234567.
    assert mixed(odd) == 0xE220A8397B1DCDAF
    assert mixed(odd + 1234567) == 6457827717110365317
    parts = [f"wörd{i}" for i in range(64)]
    each = [mixed(sum(byte * odd ** (i + 1) for i, byte in enumerate(part.encode()))) for part in parts]
    ((hashes, documents),) = copies._passages([" ".join(parts)], 1.0)
    assert hashes.tolist() == [run(each)] and documents.tolist() == [0]
