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
def split() -> TokenSplit:
    return split_of(1700, 90, 2200, 1300, 1260)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens_each_once(
    protocol: str, split: TokenSplit
) -> None:
    plan = {
        length: targets_of(windows)
        for length, windows in plan_of(protocol, split, blocks=1000).items()
    }
    assert (
        list(plan) == LENGTHS
        and len({targets.sha256(split) for targets in plan.values()}) == 1
    )
    assert all(
        len(np.unique(targets.indices)) == len(targets.indices) > 8 * 50
        for targets in plan.values()
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_doc_windows_stay_inside_one_document_and_never_score_its_first_token(
    protocol: str,
) -> None:
    split = split_of(*[2900, 90, 2500, 300, 2700])
    for windows in plan_of(protocol, split, "doc").values():
        document = np.searchsorted(split.starts, windows.starts, side="right")
        last = np.searchsorted(
            split.starts, windows.starts + windows.length, side="right"
        )
        np.testing.assert_array_equal(document, last)
        assert not np.isin(targets_of(windows).indices, split.starts).any()


@pytest.mark.parametrize(
    ("blocks", "dealt"), [(20, [4, 2, 5, 4, 5]), (99, [31, 2, 31, 18, 17])]
)
def test_blocks_are_dealt_to_documents_in_turn_whatever_their_length(
    blocks: int, dealt: list[int]
) -> None:
    """A long document has no more than others as long as those have text left; each
    one's are spread evenly.
    """
    lengths = [1_000, 271, 800, 400, 390]  # with 93, 2, 68, 18 and 17 candidates
    split = split_of(*lengths, 250)  # the last is too short
    targets = targets_of(
        plan_of("fixed_target", split, "doc", blocks=blocks)[256]
    ).indices.reshape(-1, 8)
    assert (np.diff(targets[:, 0]) >= 8).all()
    counts = np.bincount(
        np.searchsorted(split.starts, targets[:, 0], side="right") - 1, minlength=6
    ).tolist()
    assert counts == [*dealt, 0]
    # among the first document's 93 candidates
    places = (targets[: counts[0], 0] - 249) // 8
    assert places.tolist() == [
        (2 * j + 1) * 93 // (2 * counts[0]) for j in range(counts[0])
    ]


def test_below_the_training_length_the_same_targets_have_more_than_half_of_the_window_before_them() -> (
    None
):
    split, lengths = split_of(500, 700), [1, 2, 5, 16, 24, 48, 64, 256]
    plan = protocols.plan(
        "fixed_target", split, lengths, 12, 20, "doc", train_length=64
    )
    of = {length: targets_of(plan[length]) for length in lengths}
    assert len({targets.sha256(split) for targets in of.values()}) == 1
    assert {length: int(of[length].context.min()) for length in lengths} == {
        1: 1,
        2: 2,
        5: 4,
        16: 11,
        24: 13,
        48: 37,
        64: 53,
        256: 245,
    }
    for length, targets in of.items():
        assert targets.context.max() == length and 2 * targets.context.min() > length


def test_a_single_length_can_be_scored_on_the_targets_of_a_longer_one(
    split: TokenSplit,
) -> None:
    whole = plan_of("fixed_target", split)[64]
    alone = protocols.plan("fixed_target", split, [64], 8, 40, "concat", longest=256)[
        64
    ]
    other = protocols.plan("fixed_target", split, [64], 8, 40, "concat")[64]
    assert (
        targets_of(alone).sha256(split)
        == targets_of(whole).sha256(split)
        != targets_of(other).sha256(split)
    )


def test_the_digest_follows_the_text_the_targets_and_their_blocks_and_not_the_order_of_windows(
    split: TokenSplit,
) -> None:
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
