"""Passkey and induction by likelihood: on subjects whose share of right answers is
known beforehand.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from posbench.config.schema import Config
from posbench.data.tokenizer import Tokenizer, train_bpe
from posbench.data.tokens import TokenSplit
from posbench.errors import Undefined, UserError
from posbench.evaluation import probes, problems
from posbench.evaluation.evaluate import Evaluation, evaluate
from posbench.evaluation.models import (
    Subject,
    TrainedGPT,
    Variant,
    Varied,
    nll_of,
    predicted,
)
from posbench.evaluation.probes import Choice, Encode, Material
from posbench.model.gpt import build
from posbench.run.rows import EvaluationRow

L, V = 64, 400
PROBLEMS = 128
# of what is read (C,) and candidates (K,): (K,)
Nll = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A subject that is no model. With `window`, it reads only the last tokens."""

    expects: Nll
    name: str = "planted"
    train_length: int = L
    window: int | None = None

    def logits(
        self, ids: np.ndarray, scored: np.ndarray, first: int
    ) -> Iterator[Tensor]:
        for read in (
            ids[:, :-1] if self.window is None else ids[:, -self.window - 1 : -1]
        ):
            yield (
                torch.from_numpy(-self.expects(read, np.arange(V)))
                .float()
                .expand(scored.sum() // len(ids), V)
            )

    def shifted(self, offset: int) -> Subject:
        return self

    def varied(self, variant: Variant, length: int) -> Varied:
        return Varied(dataclasses.replace(self, window=variant.window), None)


def looks_up(ids: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Expect the token that followed the longest earlier occurrence of the last tokens
    read.
    """
    followers: dict[int, int] = {}
    for at in range(1, len(ids)):
        same = 0
        while same < at and ids[at - 1 - same] == ids[-1 - same]:
            same += 1
        followers[same] = ids[at]
    best = max(followers)
    return (
        np.where((candidates == followers[best]) & (best > 0), 0.1, 5.0)
        + candidates / 1e6
    )


def text(n: int = 40_000) -> TokenSplit:
    ids = np.random.default_rng(1).integers(0, V, n).astype(np.uint16)
    return TokenSplit(ids=ids, starts=np.array([0, n], dtype=np.int64))


def pose_of(task: str, length: int, material: Material) -> probes.Pose:
    (probe,) = probes.of(task, length, 8, L)
    assert probe.poses is not None
    return probe.poses(material)


def material(tokenizer: Tokenizer) -> Material:
    return Material(text().ids.astype(np.int64), tokenizer.encode)


def posed(task: str, tokenizer: Tokenizer) -> list[Choice]:
    pose = pose_of(task, 2 * L, material(tokenizer))
    return [pose(np.arange(2 * L) + V, number) for number in range(PROBLEMS)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(
        ["the key was asked, remember the key 0 1 2 3 4 5 6 7 8 9 \n" * 4], V
    )


def rows_of(
    subject: Planted, config: Config, encode: Encode, *tasks: str
) -> list[EvaluationRow]:
    settings = dataclasses.replace(
        config.evaluation,
        ratios=(1, 2, 8),
        targets=8,
        blocks=PROBLEMS,
        windowed=True,
        protocols=("fixed_target",),
        tasks=tasks,
    )
    asked = Evaluation(
        subject=subject,
        split=text(),
        tokenizer=types.SimpleNamespace(encode=encode, token_bytes=None),
        settings=settings,
        checkpoint_step=7,
        dtype="fp32",
        device=torch.device("cpu"),
    )
    return [row for row in evaluate(asked) if row.task]


@pytest.mark.slow
def test_who_looks_up_is_right_and_who_ignores_context_is_at_chance(
    tiny_config: Config, tokenizer: Tokenizer
) -> None:
    assert isinstance(Planted(looks_up), Subject)
    rows = rows_of(
        Planted(looks_up),
        tiny_config,
        tokenizer.encode,
        "passkey",
        "induction",
        "passkey:depth=0",
    )
    by = {(row.task, row.length, row.window): row for row in rows}
    for (_, length, window), row in by.items():
        if window is None:
            assert (row.accuracy, row.exact_match, row.n_blocks, row.status) == (
                1.0,
                1.0,
                PROBLEMS,
                "ok",
            )
        # a share L / length of the places is within the window
        elif row.task != "passkey:depth=0":
            assert L / length - 0.1 < row.accuracy < L / length + 0.35
    # of ten candidates, seen from nowhere
    assert by["passkey:depth=0", 8 * L, L].accuracy < 0.3

    ignores_context = Planted(
        lambda ids, candidates: (candidates * 7919 % 1009).astype(np.float64)
    )
    for row in rows_of(
        ignores_context,
        tiny_config,
        tokenizer.encode,
        "passkey",
        "induction",
        "induction:pairs=2",
    ):
        assert (
            row.chance
            == {"passkey": 1 / 10, "induction": 1 / 8, "induction:pairs=2": 1 / 2}[
                row.task
            ]
        )
        low, high = stats.binomtest(
            round(row.accuracy * row.n_blocks), row.n_blocks
        ).proportion_ci()
        assert low < row.chance < high
    alike = rows_of(
        Planted(lambda ids, candidates: np.ones(len(candidates))),
        tiny_config,
        tokenizer.encode,
        "induction",
    )
    assert {row.accuracy for row in alike} == {0.0}  # none is the likeliest


def test_problems_are_what_they_say(tokenizer: Tokenizer) -> None:
    window, of = np.arange(100, 100 + 256), material(tokenizer)

    def posed(task: str, number: int, length: int = 256) -> Choice:
        return pose_of(task, length, of)(window[:length], number)

    keys = [posed("passkey:depth=0.5", number) for number in range(40)]
    for choice in keys:
        key = tokenizer.decode([choice.candidates[choice.right]])
        text = tokenizer.decode(choice.ids[:-1])
        assert f'The key is "{key}". Remember: the key is "{key}".' in text
        assert (
            text.endswith('What was the key? The key is "')
            and choice.ids[0] == window[0]
        )
    assert {choice.right for choice in keys} == set(range(10))
    places = np.flatnonzero(keys[0].ids[:200] != window[:200])
    assert abs(places.mean() - 128) < 25  # in the middle, but for the question's length
    # by number, whatever the length
    assert posed("passkey", 3).right == posed("passkey", 3, 200).right

    for number in range(40):
        choice = posed("induction", number)
        ids, candidates = choice.ids[:-1], choice.candidates.tolist()
        assert (
            all((ids == token).sum() == 1 for token in candidates)
            and len(set(candidates)) == 8
        )
        (asked, _) = np.flatnonzero(ids == ids[-1])  # there once, and at the end
        assert (
            ids[asked + 1] == candidates[choice.right] == choice.ids[-1]
            and ids[0] == window[0]
        )


@pytest.mark.parametrize(
    ("task", "answers"), [("passkey", 10), ("induction", 8), ("induction:pairs=5", 5)]
)
def test_each_answer_is_right_equally_often(
    task: str, answers: int, tokenizer: Tokenizer
) -> None:
    """Always "3" was right in 14.8 % of 128 windows, and always the first pair in 17.2
    %.
    """
    right = [choice.right for choice in posed(task, tokenizer)]
    counts = np.bincount(right, minlength=answers)
    assert len(counts) == answers and np.ptp(counts) <= 1
    # no fixed order
    assert (
        right[:answers]
        != right[answers : 2 * answers]
        != sorted(right[answers : 2 * answers])
    )


def test_a_model_of_ours_ranks_by_the_loss_that_it_has(
    tiny_config: Config, tokenizer: Tokenizer
) -> None:
    model = TrainedGPT(
        build(tiny_config, V).eval(), L, torch.device("cpu"), torch.float32
    )
    choice = pose_of("passkey", L, material(tokenizer))(np.arange(L), 5)
    wanted = [
        nll_of(model, np.append(choice.ids[:-1], each)[None], 1, 0)[0, 0]
        for each in choice.candidates
    ]
    got = predicted(
        model, choice.ids[None], np.arange(L)[None] == L - 1, 0, choice.candidates[None]
    ).nll[0]
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.ptp(got) > 0.01


def as_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.array(list(text.encode())) for text in texts]


@pytest.mark.slow
def test_what_cannot_be_posed_is_a_row_that_says_why(tiny_config: Config) -> None:
    tasks = ("passkey", "induction:pairs=40")
    rows = rows_of(Planted(looks_up), tiny_config, as_bytes, *tasks)
    undefined = {row.task: row.reason for row in rows if row.status == "undefined"}
    assert "sentences are 75 tokens of this model" in undefined["passkey"]
    assert "no room for 40 pairs" in undefined["induction:pairs=40"]
    assert {row.length for row in rows if row.status == "ok"} == {2 * L, 8 * L}


def test_a_tokenizer_without_tokens_for_digits_poses_no_passkey() -> None:
    zeros = Material(np.arange(99), lambda texts: [np.zeros(30)] * len(texts))
    with pytest.raises(Undefined, match="no token of its own for each answer"):
        pose_of("passkey", L, zeros)(np.arange(L), 0)


def test_a_text_of_few_tokens_poses_no_pairs() -> None:
    with pytest.raises(Undefined, match="17 different tokens"):
        pose_of("induction", L, Material(np.arange(17), as_bytes))


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("passkey:depth=2", "less than or equal to 1 "),
        ("passkey:keys=2:depth=0.5", "expected one key"),
        ("passkey:keys=11", "less than or equal to 10 "),
        ("induction:pairs=1", "greater than or equal to 2 "),
        ("shuffle:keep=1", "at least evaluation.targets"),
    ],
)
def test_an_option_out_of_range_is_refused(task: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        probes.of(task, L, 8, L)


def test_problems_are_those_of_rows_that_exist(tokenizer: Tokenizer) -> None:
    """A row that was evaluated before is known by its problems: with others it would be
    computed anew, and not pair.
    """
    digests = {
        "passkey": "e8c90bdea2f80bed",
        "passkey:depth=0.3": "9b3eab3a369db774",
        "induction": "289f3d935e3fe51c",
    }
    for task, digest in digests.items():
        assert problems.sha256(posed(task, tokenizer)).startswith(digest), task
