"""Problems in windows of text whose answer is one of several tokens: what they say, and
the rows of readers whose share of right answers is known beforehand.
"""

import dataclasses
import re
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from support import nll_of

from posbench.config.schema import Config
from posbench.data.tokenizer import Tokenizer, train_bpe
from posbench.data.tokens import TokenSplit
from posbench.errors import Undefined
from posbench.evaluation import probes, problems
from posbench.evaluation.evaluate import Evaluation, evaluate
from posbench.evaluation.probes import Choice, Encode, Material
from posbench.evaluation.subjects import TrainedGPT, predicted
from posbench.model.gpt import build
from posbench.run.rows import EvaluationRow

L = 64
V = 400
PROBLEMS = 128
# of what is read (C,) and candidates (K,): (K,)
Nll = Callable[[np.ndarray, np.ndarray], np.ndarray]
Rows = list[EvaluationRow]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A subject that is no model. With `window`, it reads only the last tokens."""

    expects: Nll
    name: str = "planted"
    train_length: int = L
    window: int | None = None

    def logits(self, ids, scored, first):
        candidates = np.arange(V)
        count = scored.sum() // len(ids)
        start = None if self.window is None else -self.window - 1
        for read in ids[:, start:-1]:
            nll = self.expects(read, candidates)
            logits = torch.from_numpy(-nll).float()
            yield logits.expand(count, V)

    def shifted(self, offset):
        return self

    def in_variant(self, variant, length):
        narrowed = dataclasses.replace(self, window=variant.window)
        return narrowed, None


def looks_up(ids, candidates):
    """Expect the token that followed the longest earlier occurrence of the last tokens
    read.
    """
    followers = {}
    for at in range(1, len(ids)):
        n_alike = 0
        while n_alike < at:
            if ids[at - 1 - n_alike] != ids[-1 - n_alike]:
                break
            n_alike += 1
        followers[n_alike] = ids[at]

    nll = np.full(len(candidates), 5.0)
    most_alike = max(followers)
    if most_alike > 0:
        nll[candidates == followers[most_alike]] = 0.1
    return nll + candidates / 1e6


def ignores_context(ids, candidates):
    nll = candidates * 7919 % 1009
    return nll.astype(np.float64)


def finds_all_alike(ids, candidates):
    return np.ones(len(candidates))


def text(n: int = 40_000) -> TokenSplit:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, V, n).astype(np.uint16)
    starts = np.array([0, n], dtype=np.int64)
    return TokenSplit(ids, starts)


def pose_of(name: str, length: int, material: Material) -> probes.Pose:
    (probe,) = probes.of(name, length, 8, L)
    return probe.pose_from(material)


def material(tokenizer: Tokenizer) -> Material:
    ids = text().ids.astype(np.int64)
    return Material(ids, tokenizer.encode)


def posed(count: int, task: str, length: int, tokenizer: Tokenizer) -> list[Choice]:
    """Return the problems of windows whose own tokens occur in no problem."""
    pose = pose_of(task, length, material(tokenizer))
    window = np.arange(length) + V
    return [pose(window, number) for number in range(count)]


def places_of_right(choices: list[Choice]) -> list[int]:
    return [choice.right for choice in choices]


@pytest.fixture(scope="module")
def tokenizer():
    line = "the key was asked, remember the key 0 1 2 3 4 5 6 7 8 9 \n"
    return train_bpe([4 * line], V)


def in_words(choice: Choice, tokenizer: Tokenizer) -> str:
    read = choice.ids[:-1]
    of_problem = read[read < V]
    return tokenizer.decode(of_problem.tolist())


def test_passkey_says_its_key_at_its_depth_and_asks_for_it(tokenizer):
    choices = posed(40, "passkey:depth=0.5", 256, tokenizer)

    for choice in choices:
        said = in_words(choice, tokenizer)
        key = tokenizer.decode([choice.candidates[choice.right]])
        assert f'The key is "{key}". Remember: the key is "{key}".' in said
        assert said.endswith('What was the key? The key is "')
        assert choice.ids[0] == V  # the window's own
    before_question = choices[0].ids[:200]
    (places,) = np.nonzero(before_question < V)
    assert abs(places.mean() - 128) < 25  # in the middle, but for the question's length


def test_passkey_of_several_keys_asks_for_each_place_equally_often(tokenizer):
    places = []
    for choice in posed(40, "passkey:keys=4", 512, tokenizer):
        said = in_words(choice, tokenizer)
        (asked,) = re.findall(r'The number of (\w+) is "$', said)
        keys = re.findall(r'The number of (\w+) is "(\d)"\.', said)
        names = [name for name, _ in keys]
        digits = [digit for _, digit in keys]
        place = names.index(asked)
        right = tokenizer.decode([choice.candidates[choice.right]])
        last = tokenizer.decode([choice.candidates[choice.trivial]])

        assert right == digits[place]
        assert last == digits[-1]
        assert len(set(digits)) == 4
        places.append(place)
    counts = np.bincount(places)
    assert counts.tolist() == [10, 10, 10, 10]


def test_induction_asks_what_followed_one_of_its_pairs(tokenizer):
    for choice in posed(40, "induction", 256, tokenizer):
        ids = choice.ids[:-1]
        candidates = choice.candidates.tolist()
        # the first of a pair stands there once, and at the end
        (asked, _) = np.flatnonzero(ids == ids[-1])
        answer = candidates[choice.right]

        assert ids[asked + 1] == answer
        assert choice.ids[-1] == answer
        assert len(candidates) == 8
        for token in candidates:
            assert ids.tolist().count(token) == 1
        assert ids[0] == V


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("passkey", 10),
        ("passkey:keys=4", 10),
        ("induction", 8),
        ("induction:pairs=5", 5),
    ],
)
def test_each_answer_is_right_equally_often_in_no_fixed_order(task, answers, tokenizer):
    """Always "3" was right in 14.8 % of 128 windows, and always the first pair in 17.2
    %.
    """
    choices = posed(PROBLEMS, task, 4 * L, tokenizer)
    right = places_of_right(choices)
    counts = np.bincount(right, minlength=answers)
    first = right[:answers]
    second = right[answers : 2 * answers]

    assert len(counts) == answers
    assert np.ptp(counts) <= 1
    assert first != second
    assert second != sorted(second)


@pytest.mark.parametrize("task", ["passkey", "passkey:keys=2", "induction"])
def test_problems_differ_between_lengths_in_distance_alone(task, tokenizer):
    near = posed(20, task, 200, tokenizer)
    far = posed(20, task, 400, tokenizer)
    assert places_of_right(near) == places_of_right(far)


# A row that was evaluated before is known by its problems: with others it would be
# computed anew, and not pair.
@pytest.mark.parametrize(
    ("task", "digest"),
    [
        ("passkey", "e8c90bdea2f80bed"),
        ("passkey:depth=0.3", "9b3eab3a369db774"),
        ("passkey:keys=2", "8f415677dc88ed40"),
        ("induction", "289f3d935e3fe51c"),
    ],
)
def test_problems_are_those_of_rows_that_exist(task, digest, tokenizer):
    choices = posed(PROBLEMS, task, 2 * L, tokenizer)
    assert problems.choices_sha256(choices)[:16] == digest


def rows_of(expects: Nll, config: Config, encode: Encode, *names: str) -> Rows:
    settings = dataclasses.replace(
        config.evaluation,
        ratios=(1, 8),
        blocks=40,  # each digit and each pair equally often
        protocols=("nonoverlap",),
        probes=names,
    )
    asked = Evaluation(
        subject=Planted(expects),
        split=text(),
        tokenizer=types.SimpleNamespace(encode=encode, token_bytes=None),
        settings=settings,
        checkpoint_step=7,
        dtype="fp32",
        device=torch.device("cpu"),
    )
    return [row for row in evaluate(asked) if row.task]


def test_who_looks_up_is_right_as_far_as_it_sees(tiny_config, tokenizer):
    names = ("passkey", "induction", "passkey:depth=0")
    rows = rows_of(looks_up, tiny_config, tokenizer.encode, *names)
    whole = [row for row in rows if row.window is None]
    windowed = [row for row in rows if row.window == L]
    narrowed = {row.task: row.accuracy for row in windowed}

    assert len(whole) == 6
    for row in whole:
        assert row.status == "ok"
        assert row.accuracy == 1.0
        assert row.exact_match == 1.0
        assert row.n_blocks == 40
    # a share 1 / 8 of the places is within the window
    assert 0.025 < narrowed["passkey"] < 0.475
    assert 0.025 < narrowed["induction"] < 0.475
    # of ten candidates, seen from nowhere
    assert narrowed["passkey:depth=0"] < 0.3


@pytest.mark.parametrize(
    ("task", "chance", "trivial"),
    [
        ("passkey:keys=2", 1 / 10, 1 / 2),
        ("induction", 1 / 8, None),
        ("induction:pairs=2", 1 / 2, None),
    ],
)
def test_who_ignores_context_is_at_chance(
    tiny_config, tokenizer, task, chance, trivial
):
    rows = rows_of(ignores_context, tiny_config, tokenizer.encode, task)
    row = rows[-2]
    n_right = round(row.accuracy * row.n_blocks)
    low, high = stats.binomtest(n_right, row.n_blocks).proportion_ci()

    assert row.chance == chance
    assert low < row.chance < high
    assert row.trivial == trivial


def test_of_candidates_that_are_alike_none_is_the_likeliest(tiny_config, tokenizer):
    rows = rows_of(finds_all_alike, tiny_config, tokenizer.encode, "induction")
    assert rows
    for row in rows:
        assert row.accuracy == 0.0


def test_a_model_of_ours_ranks_by_the_loss_that_it_has(tiny_config, tokenizer):
    gpt = build(tiny_config, V).eval()
    model = TrainedGPT(gpt, L, torch.device("cpu"), torch.float32)
    pose = pose_of("passkey", L, material(tokenizer))
    window = np.arange(L)
    choice = pose(window, 5)
    ids = choice.ids[None]
    candidates = choice.candidates[None]
    is_last = window[None] == L - 1

    nll, _ = predicted(model, ids, is_last, 0, candidates)
    ranked = nll[0].numpy()

    for nll, candidate in zip(ranked, choice.candidates, strict=True):
        ids[0, -1] = candidate
        wanted = nll_of(model, ids, 1, 0)
        assert nll == pytest.approx(wanted.item(), abs=1e-5)
    assert np.ptp(ranked) > 0.01


def as_bytes(texts):
    encoded = [text.encode() for text in texts]
    return [np.array([*content]) for content in encoded]


def as_zeros(texts):
    return [np.zeros(30, np.int64)] * len(texts)


MANY = Material(np.arange(99), as_bytes)
FEW = Material(np.arange(17), as_zeros)
# A task, what its problems are made of, and why a window or a model cannot pose them.
NOT_POSED = [
    ("passkey", MANY, "sentences are 75 tokens of this model"),
    ("induction:pairs=40", MANY, "there is no room for 40 pairs"),
    ("passkey", FEW, "no token of its own for each"),
    ("induction", FEW, "17 different tokens"),
]


@pytest.mark.parametrize(("task", "parts", "reason"), NOT_POSED)
def test_what_has_no_room_or_no_tokens_says_why(task, parts, reason):
    window = np.arange(L)
    with pytest.raises(Undefined, match=reason):
        pose_of(task, L, parts)(window, 0)


def test_what_cannot_be_posed_is_a_row_without_a_number(tiny_config):
    rows = rows_of(looks_up, tiny_config, as_bytes, "passkey", "induction:pairs=40")
    whole = [row for row in rows if not row.window]
    statuses = [(row.task, row.length, row.status) for row in whole]
    assert statuses == [
        ("passkey", L, "undefined"),
        ("passkey", 8 * L, "ok"),
        ("induction:pairs=40", L, "undefined"),
        ("induction:pairs=40", 8 * L, "ok"),
    ]
