"""Probes that are asked in words: by readers that solve them, and readers that do not."""

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from posbench.config.schema import Config
from posbench.data.tokenizer import Tokenizer, train_bpe
from posbench.data.tokens import TokenSplit
from posbench.evaluation.evaluate import Evaluation, evaluate
from posbench.evaluation.models import Subject, Variant, Varied
from posbench.run.rows import EvaluationRow

L, PROBLEMS = 160, 40  # each digit, place and word equally often
LENGTHS = (160, 200, 512)
ENDS = re.compile(r'The (?:key|number of \w+) is "')
NUMBERS = re.compile(r'The number of (\w+) is "(\d)"\.')
# What solves a probe, by the text up to the answer.
SOLVERS: dict[str, Callable[[str], str]] = {
    "passkey": lambda text: re.findall(r'The key is "(\d)". Remember', text)[0],
    "passkey:keys=4": lambda text: dict(NUMBERS.findall(text))[
        re.findall(r'The number of (\w+) is "$', text)[0]
    ],
}
WORDS = (
    "apple bread cloud door earth fire gold house iron jar king lamp moon night oak"
    " paper queen river stone tree uncle voice water yard"
)
SENTENCES = (
    'The key is "7". Remember: the key is "7". What was the key?\nThe number of\nA'
    " number of\n0 1 2 3 4 5 6 7 8 9 "
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for some words and several for others, with and
    without a space before them.
    """
    return train_bpe(
        [SENTENCES * 20, f"{WORDS[:60]}\n" * 20, WORDS[40:80].replace(" ", "\n") * 9],
        400,
    )


@pytest.fixture(scope="module")
def text(tokenizer: Tokenizer) -> TokenSplit:
    """Return a text of words without digits, lines or sentences: anything else in a
    problem comes from the probe.
    """
    text = " ".join(
        np.random.default_rng(1).choice(
            ["of", "a", "was", "common", "value", *WORDS.split()], 9000
        )
    )
    ids = tokenizer.encode([text])[0]
    return TokenSplit(ids=ids, starts=np.array([0, len(ids)], dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class Reader:
    """A subject that is no model: it answers as a reader of the last `window` tokens
    would.
    """

    tokenizer: Tokenizer
    says: Callable[[str], str]  # the answer, by the text before it
    name: str = "reader"
    train_length: int = L
    window: int | None = None

    def logits(
        self, ids: np.ndarray, scored: np.ndarray, first: int
    ) -> Iterator[Tensor]:
        tokens = np.arange(self.tokenizer.vocab_size)
        for window in ids:
            nll = np.where(tokens == self._said(window), 0.1, 5.0) + tokens % 7 / 1e3
            yield torch.from_numpy(-nll).float().expand(scored.sum() // len(ids), -1)

    def shifted(self, offset: int) -> Subject:
        return self

    def _said(self, ids: np.ndarray) -> int:
        read = self.tokenizer.decode(
            ids if self.window is None else ids[-self.window :]
        )
        # a window of the text, with no question
        if not (ends := [*ENDS.finditer(read)]):
            return 0
        try:
            answer = self.says(read[: ends[-1].end()])
        except (LookupError, ValueError):
            answer = "0"
        asked = "\n" + read[read.rindex("\n", 0, ends[-1].start()) + 1 : ends[-1].end()]
        return int(self.tokenizer.encode([asked + answer])[0][-1])

    def varied(self, variant: Variant, length: int) -> Varied:
        return Varied(dataclasses.replace(self, window=variant.window), None)


def rows_of(
    subject: object, config: Config, text: TokenSplit, tokenizer: Tokenizer, task: str
) -> list[EvaluationRow]:
    settings = dataclasses.replace(
        config.evaluation,
        ratios=tuple(length / L for length in LENGTHS),
        targets=8,
        blocks=PROBLEMS,
        windowed=True,
        protocols=("nonoverlap",),
        tasks=(task,),
    )
    asked = Evaluation(
        subject=subject,
        split=text,
        tokenizer=tokenizer,
        settings=settings,
        checkpoint_step=7,
        dtype="fp32",
        device=torch.device("cpu"),
    )
    return [row for row in evaluate(asked) if row.task]


@pytest.mark.sample(2)
@pytest.mark.parametrize("task", SOLVERS)
def test_who_solves_a_probe_has_all_of_it_and_who_sees_nothing_is_at_chance(
    task: str, tiny_config: Config, text: TokenSplit, tokenizer: Tokenizer
) -> None:
    solver = Reader(tokenizer, SOLVERS[task])
    assert isinstance(solver, Subject)
    rows = rows_of(solver, tiny_config, text, tokenizer, task)
    plain = [row for row in rows if row.window is None]
    assert [(row.length, row.status) for row in plain] == [
        (length, "ok") for length in LENGTHS
    ]
    for row in plain:
        assert (row.accuracy, row.exact_match, row.chance) == (1.0, 1.0, 0.1)
        assert (
            row.trivial is None
            if task == "passkey"
            else abs(row.trivial - 1 / 4) < 0.09
        ), row.length
    narrowed = {row.length: row.accuracy for row in rows if row.window is not None}
    assert 0.05 < narrowed[512] < 0.55 and narrowed[512] < narrowed[200]
    for row in rows_of(
        Reader(tokenizer, lambda text: "3"), tiny_config, text, tokenizer, task
    ):
        # each digit equally often
        assert row.accuracy == pytest.approx(row.chance, abs=1e-9)
