"""Which tokens each protocol scores, and with how much context."""

import numpy as np
import pytest

from posbench import protocols
from posbench.data.tokens import TokenSplit

LENGTHS = [16, 32, 64, 128, 256]


def split_of(*document_lengths: int, seed: int = 0) -> TokenSplit:
    ids = np.random.default_rng(seed).integers(1, 50, sum(document_lengths)).astype(np.uint16)
    starts = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int64)
    return TokenSplit(ids=ids, starts=starts)


@pytest.fixture
def split() -> TokenSplit:
    return split_of(700, 90, 1200, 300, 260)


@pytest.mark.parametrize("protocol", ["fixed_target", "nonoverlap"])
def test_every_length_scores_the_same_tokens(protocol: str, split: TokenSplit) -> None:
    plan = protocols.plan(protocol, split, LENGTHS, targets=8, blocks=40, documents="concat")
    digests = {windows.targets_sha256(split) for windows in plan.values() if windows}
    assert len(plan) == 5 and len(digests) == 1
    assert all(windows is not None for windows in plan.values())


def test_fixed_target_windows_end_with_their_targets_and_differ_in_their_beginning_only(split: TokenSplit) -> None:
    plan = protocols.plan("fixed_target", split, LENGTHS, targets=8, blocks=40, documents="doc")
    for length, windows in plan.items():
        assert windows is not None
        np.testing.assert_array_equal(windows.targets()[:, -1], windows.starts + length)
        assert windows.scored == 8


def test_targets_are_never_shared_between_blocks(split: TokenSplit) -> None:
    plan = protocols.plan("fixed_target", split, LENGTHS, targets=8, blocks=1000, documents="doc")
    targets = plan[256].targets().ravel()  # type: ignore[union-attr]
    assert len(np.unique(targets)) == len(targets) > 8 * 50


def test_doc_windows_stay_inside_one_document_and_never_score_its_first_token(split: TokenSplit) -> None:
    for protocol in ("fixed_target", "nonoverlap"):
        plan = protocols.plan(protocol, split_of(900, 90, 1500, 300, 700), LENGTHS, 8, 40, "doc")
        for length, windows in plan.items():
            assert windows is not None
            starts = np.array([0, 900, 990, 2490, 2790, 3490])
            document = np.searchsorted(starts, windows.starts, side="right")
            last = np.searchsorted(starts, windows.starts + length, side="right")
            np.testing.assert_array_equal(document, last)
            assert not np.isin(windows.targets(), starts).any()


def test_auto_takes_whole_documents_where_they_are_long_enough_and_says_what_it_took() -> None:
    long = protocols.plan("fixed_target", split_of(600, 600), LENGTHS, 8, 40, "auto")
    short = protocols.plan("fixed_target", split_of(*[100] * 30), LENGTHS, 8, 40, "auto")
    assert {w.documents for w in long.values() if w} == {"doc"}
    assert {w.documents for w in short.values() if w} == {"concat"}


def test_a_length_the_text_is_too_short_for_is_none_and_the_others_are_scored() -> None:
    plan = protocols.plan("fixed_target", split_of(200), LENGTHS, targets=8, blocks=40, documents="auto")
    assert plan[256] is None
    assert all(plan[length] is not None for length in (16, 32, 64, 128))
    assert protocols.plan("fixed_target", split_of(10), LENGTHS, 8, 40, "auto") == dict.fromkeys(LENGTHS)


def test_mean_context_counts_the_tokens_each_prediction_may_read(split: TokenSplit) -> None:
    fixed = protocols.plan("fixed_target", split, LENGTHS, targets=8, blocks=40, documents="concat")[64]
    cut = protocols.plan("nonoverlap", split, LENGTHS, targets=8, blocks=40, documents="concat")[64]
    assert fixed is not None and cut is not None
    assert fixed.mean_context() == np.mean([57, 58, 59, 60, 61, 62, 63, 64])
    assert cut.mean_context() == (64 + 1) / 2  # Press et al. (2021), section 2
    assert fixed.mean_context(window=16) == 16
    assert cut.mean_context(window=2) == (1 + 2 * 63) / 64


def test_nonoverlap_windows_tile_their_span(split: TokenSplit) -> None:
    plan = protocols.plan("nonoverlap", split, LENGTHS, targets=8, blocks=40, documents="concat")
    whole, halves = plan[256], plan[128]
    assert whole is not None and halves is not None
    np.testing.assert_array_equal(halves.starts.reshape(-1, 2)[:, 0], whole.starts)
    np.testing.assert_array_equal(halves.starts.reshape(-1, 2)[:, 1], whole.starts + 128)
    np.testing.assert_array_equal(halves.blocks.reshape(-1, 2)[:, 1], whole.blocks)


def test_the_digest_follows_the_text_and_the_targets(split: TokenSplit) -> None:
    plan = protocols.plan("fixed_target", split, LENGTHS, targets=8, blocks=40, documents="concat")[64]
    other = protocols.plan("fixed_target", split, LENGTHS, targets=4, blocks=40, documents="concat")[64]
    changed = split_of(700, 90, 1200, 300, 260, seed=1)
    assert plan is not None and other is not None
    assert len({plan.targets_sha256(split), other.targets_sha256(split), plan.targets_sha256(changed)}) == 3
