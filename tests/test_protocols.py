"""Which tokens each protocol scores, and with how much context."""

import numpy as np
import pytest

from posbench.data.tokens import TokenSplit
from posbench.evaluation import protocols
from posbench.evaluation.protocols import Targets, Windows, targets_of

LENGTHS = [16, 32, 64, 128, 256]
PROTOCOLS = ["fixed_target", "nonoverlap"]


def split_of(*document_lengths: int, seed: int = 0) -> TokenSplit:
    ids = (
        np.random.default_rng(seed)
        .integers(1, 50, sum(document_lengths))
        .astype(np.uint16)
    )
    starts = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int64)
    return TokenSplit(ids=ids, starts=starts)


def plan_of(
    protocol: str, split: TokenSplit, documents: str = "concat", **options: int
) -> dict[int, Windows]:
    return protocols.plan(
        protocol,
        split,
        LENGTHS,
        documents=documents,
        **{"targets": 8, "blocks": 40} | options,
    )


@pytest.fixture
def split():
    return split_of(1700, 90, 2200, 1300, 1260)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens_each_once(protocol, split):
    plan = {
        length: targets_of(windows)
        for length, windows in plan_of(protocol, split, blocks=1000).items()
    }
    assert list(plan) == LENGTHS
    assert len({targets.sha256(split) for targets in plan.values()}) == 1
    assert all(
        len(np.unique(targets.indices)) == len(targets.indices) > 8 * 50
        for targets in plan.values()
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_doc_windows_stay_inside_one_document_and_never_score_its_first_token(protocol):
    split = split_of(*[2900, 90, 2500, 300, 2700])
    for windows in plan_of(protocol, split, "doc").values():
        document = np.searchsorted(split.starts, windows.starts, side="right")
        last = np.searchsorted(
            split.starts, windows.starts + windows.length, side="right"
        )
        np.testing.assert_array_equal(document, last)
        assert not np.isin(targets_of(windows).indices, split.starts).any()


def test_targets_below_the_training_length_have_half_of_the_window_before_them():
    split = split_of(500, 700)
    lengths = [1, 2, 5, 16, 24, 48, 64, 256]
    plan = protocols.plan(
        "fixed_target", split, lengths, 12, 20, "doc", train_length=64
    )
    least = [int(targets_of(plan[length]).context.min()) for length in lengths]
    assert least == [1, 2, 4, 11, 13, 37, 53, 245]


def test_the_digest_follows_the_text_the_targets_and_their_blocks_and_not_the_order_of_windows(
    split,
):
    targets = targets_of(plan_of("fixed_target", split)[64])
    other = targets_of(plan_of("fixed_target", split, targets=4)[64])
    merged = Targets(
        targets.indices, targets.blocks // 2, targets.context, targets.n_blocks
    )
    changed = split_of(1700, 90, 2200, 1300, 1260, seed=1)
    assert (
        len(
            {
                targets.sha256(split),
                other.sha256(split),
                merged.sha256(split),
                targets.sha256(changed),
            }
        )
        == 4
    )
    backwards = Targets(
        targets.indices[::-1],
        targets.blocks[::-1],
        targets.context[::-1],
        targets.n_blocks,
    )
    assert backwards.sha256(split) == targets.sha256(split)
