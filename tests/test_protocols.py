"""Which tokens each protocol scores, and with how much context."""

import dataclasses

import numpy as np
import pytest

from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.protocols import Targets, Windows, targets_of

LENGTHS = [16, 32, 64, 128, 256]
PROTOCOLS = ["fixed_target", "nonoverlap"]
SIZES = (1700, 90, 2200, 1300, 1260)  # of the documents


def split_of(*sizes: int, seed: int = 0) -> TokenSplit:
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, 50, sum(sizes))
    starts = np.cumsum([0, *sizes])
    return TokenSplit(ids.astype(np.uint16), starts)


def windows_of(
    protocol: str,
    split: TokenSplit,
    documents: str = "concat",
    targets: int = 8,
    blocks: int = 40,
) -> dict[int, Windows]:
    return protocols.place_windows(protocol, split, LENGTHS, targets, blocks, documents)


def targets_at_64(split: TokenSplit, targets: int = 8) -> Targets:
    windows = windows_of("fixed_target", split, targets=targets)
    return targets_of(windows[64])


def digest_at_64(split: TokenSplit, targets: int = 8) -> str:
    return targets_at_64(split, targets).sha256(split)


@pytest.fixture
def split() -> TokenSplit:
    return split_of(*SIZES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens(protocol, split):
    windows = windows_of(protocol, split, blocks=1000)

    digests = set()
    for each in windows.values():
        targets = targets_of(each)
        digests.add(targets.sha256(split))
    assert list(windows) == LENGTHS
    assert len(digests) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_doc_windows_stay_inside_one_document(protocol):
    split = split_of(2900, 90, 2500, 300, 2700)

    windows = windows_of(protocol, split, "doc")

    for each in windows.values():
        ends = each.starts + each.length
        starts = split.starts
        document = starts.searchsorted(each.starts, "right")
        last = starts.searchsorted(ends, "right")
        assert (document == last).all()


def test_blocks_lie_in_the_middle_of_equal_shares_of_a_document():
    split = split_of(51)  # 24 places for two targets, from token 3 on, and 8 blocks

    windows = protocols.place_windows("fixed_target", split, [4], 2, 8, "doc")

    firsts = targets_of(windows[4]).indices[::2]
    assert firsts.tolist() == [5, 11, 17, 23, 29, 35, 41, 47]


def test_documents_get_blocks_in_turn_and_the_last_round_is_spread_over_the_text():
    split = split_of(400, 20, 400, 400, 400, 400)  # the second has one place

    windows = protocols.place_windows("fixed_target", split, [16], 8, 14, "doc")

    places = targets_of(windows[16]).indices[::8]
    documents = split.starts.searchsorted(places, "right") - 1
    assert np.bincount(documents).tolist() == [3, 1, 2, 3, 2, 3]


@pytest.mark.parametrize(
    ("protocol", "halving"), [("fixed_target", 128), ("nonoverlap", 32)]
)
def test_a_text_too_short_for_the_longest_length_serves_a_halving(protocol, halving):
    split = split_of(300)  # has no 8 blocks for 256 tokens
    whole = protocols.place_windows(protocol, split, [16, halving], 8, 8, "doc")

    windows = protocols.place_windows(protocol, split, [16], 8, 8, "doc", longest=256)

    expected = targets_of(whole[16])
    assert targets_of(windows[16]).sha256(split) == expected.sha256(split)


@pytest.mark.parametrize(("blocks", "spans"), [(40, 10), (16, 8)])
def test_nonoverlap_has_a_quarter_as_many_spans_as_blocks_but_at_least_8(blocks, spans):
    split = split_of(6000)

    windows = windows_of("nonoverlap", split, blocks=blocks)

    for each in windows.values():
        assert each.blocks.max() + 1 == spans
        assert len(each.starts) * each.length == spans * LENGTHS[-1]


def test_targets_below_the_training_length_have_half_of_the_window_before_them():
    split = split_of(500, 700)
    lengths = [1, 2, 5, 16, 24, 48, 64, 256]

    windows = protocols.place_windows(
        "fixed_target", split, lengths, 12, 20, "doc", train_length=64
    )

    least = []
    for each in windows.values():
        context = targets_of(each).context
        least.append(int(context.min()))
    assert list(windows) == lengths
    assert least == [1, 2, 4, 11, 13, 37, 53, 245]


def test_the_digest_follows_the_text_the_targets_and_their_blocks(split):
    targets = targets_at_64(split)
    merged = dataclasses.replace(targets, blocks=targets.blocks // 2)
    digest = targets.sha256(split)

    of_other_text = targets.sha256(split_of(*SIZES, seed=1))
    of_fewer = digest_at_64(split, targets=4)
    of_other_blocks = merged.sha256(split)

    digests = {digest, of_other_text, of_fewer, of_other_blocks}
    assert len(digests) == 4


def test_the_digest_does_not_follow_the_order_of_windows(split):
    targets = targets_at_64(split)

    indices = targets.indices[::-1]
    blocks = targets.blocks[::-1]
    backwards = dataclasses.replace(targets, indices=indices, blocks=blocks)

    assert backwards.sha256(split) == targets.sha256(split)
