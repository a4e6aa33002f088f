"""Which tokens each protocol scores, and with how much context."""

import numpy as np
import pytest

from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.protocols import Targets, Windows, targets_of

LENGTHS = [16, 32, 64, 128, 256]
PROTOCOLS = ["fixed_target", "nonoverlap"]
SIZES = (1700, 90, 2200, 1300, 1260)  # of the documents


def split_of(*sizes: int, seed: int = 0) -> TokenSplit:
    ids = np.random.default_rng(seed).integers(1, 50, sum(sizes))
    starts = np.cumsum([0, *sizes])
    return TokenSplit(ids.astype(np.uint16), starts)


def windows_of(
    protocol: str,
    split: TokenSplit,
    documents: str = "concat",
    targets: int = 8,
    blocks: int = 40,
) -> dict[int, Windows]:
    return protocols.plan(protocol, split, LENGTHS, targets, blocks, documents)


def targets_at_64(split: TokenSplit, targets: int = 8) -> Targets:
    return targets_of(windows_of("fixed_target", split, targets=targets)[64])


@pytest.fixture
def split() -> TokenSplit:
    return split_of(*SIZES)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens(protocol, split):
    windows = windows_of(protocol, split, blocks=1000)

    digests = {targets_of(each).sha256(split) for each in windows.values()}
    assert list(windows) == LENGTHS
    assert len(digests) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_token_is_scored_once(protocol, split):
    windows = windows_of(protocol, split, blocks=1000)

    for each in windows.values():
        indices = targets_of(each).indices
        assert len(np.unique(indices)) == len(indices) > 8 * 50


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_doc_windows_stay_inside_one_document(protocol):
    split = split_of(2900, 90, 2500, 300, 2700)

    windows = windows_of(protocol, split, "doc")

    for each in windows.values():
        ends = each.starts + each.length
        document = np.searchsorted(split.starts, each.starts, side="right")
        last = np.searchsorted(split.starts, ends, side="right")
        np.testing.assert_array_equal(document, last)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_doc_windows_never_score_the_first_token_of_a_document(protocol):
    split = split_of(2900, 90, 2500, 300, 2700)

    windows = windows_of(protocol, split, "doc")

    for each in windows.values():
        indices = targets_of(each).indices
        assert not np.isin(indices, split.starts).any()


def test_targets_below_the_training_length_have_half_of_the_window_before_them():
    split = split_of(500, 700)
    lengths = [1, 2, 5, 16, 24, 48, 64, 256]

    windows = protocols.plan(
        "fixed_target", split, lengths, 12, 20, "doc", train_length=64
    )

    least = [int(targets_of(windows[length]).context.min()) for length in lengths]
    assert least == [1, 2, 4, 11, 13, 37, 53, 245]


def test_the_digest_follows_the_text_the_targets_and_their_blocks(split):
    targets = targets_at_64(split)
    changed = split_of(*SIZES, seed=1)
    merged = Targets(
        targets.indices, targets.blocks // 2, targets.context, targets.n_blocks
    )

    digests = {
        targets.sha256(split),
        targets_at_64(split, targets=4).sha256(split),
        merged.sha256(split),
        targets.sha256(changed),
    }

    assert len(digests) == 4


def test_the_digest_does_not_follow_the_order_of_windows(split):
    targets = targets_at_64(split)

    backwards = Targets(
        targets.indices[::-1],
        targets.blocks[::-1],
        targets.context[::-1],
        targets.n_blocks,
    )

    assert backwards.sha256(split) == targets.sha256(split)


def test_a_longer_length_that_the_text_does_not_allow_changes_no_target(split):
    lengths = [*LENGTHS, 10_000]

    windows = protocols.plan("fixed_target", split, lengths, 8, 40, "concat")

    assert list(windows) == LENGTHS
    digest = targets_of(windows[64]).sha256(split)
    assert digest == targets_at_64(split).sha256(split)


def test_targets_allow_a_length_that_is_asked_for_and_not_evaluated(split):
    later = protocols.plan("fixed_target", split, [*LENGTHS, 512], 8, 40, "concat")

    now = protocols.plan("fixed_target", split, LENGTHS, 8, 40, "concat", longest=512)

    digest = targets_of(now[64]).sha256(split)
    assert digest == targets_of(later[64]).sha256(split)
