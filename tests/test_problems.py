"""Training and evaluation on synthetic tasks: batches, answers, rows, and the commands
from end to end.
"""

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import support
import torch
import yaml
from torch import Tensor

from posbench import tasks
from posbench.config import compose
from posbench.config.schema import Config
from posbench.config.shipped import configs_dir
from posbench.data.batches import fixed_problems
from posbench.data.tokens import data_of
from posbench.errors import Undefined
from posbench.evaluation.evaluate import evaluate
from posbench.evaluation.models import Variant, Varied
from posbench.evaluation.problems import TaskEvaluation
from posbench.model.loss import IGNORED
from posbench.results.frame import GATE
from posbench.run.model import tokenizer_of
from posbench.run.rows import EvaluationRow, evaluation_rows, training_rows

NAMES = tasks.names()
TINY = (  # 10 updates of 8 x 42 tokens
    "tracking=none data=task/copy experiment=tasks model.n_layers=1 model.d_model=16"
    " training.batch_size=8 training.tokens=3360 training.warmup_tokens=0"
    " training.precision=fp32 evaluation.blocks=16 evaluation.ratios=[1,2]"
    " runtime.device=cpu runtime.threads=1 runtime.validate_every_steps=5"
    " runtime.checkpoint_every_steps=4"
)


@functools.cache
def composed(*overrides: str) -> Config:
    return compose.single(["tracking=none", *overrides])


@dataclasses.dataclass(frozen=True)
class Knows:
    """A subject that is no model: it answers correctly with a probability, and is
    undefined beyond a length.
    """

    share: float = 1.0
    train_length: int = 42
    beyond: int = 10**9
    name: str = "knows"
    right = 0.25  # nats

    def logits(self, ids: Any, scored: Any, first: int) -> Iterator[Tensor]:
        labels = torch.from_numpy(ids[:, 1:][scored])
        for label, nll in zip(
            labels,
            self.nll(np.random.default_rng([first, ids.shape[1]]), len(labels)),
            strict=True,
        ):
            p = math.exp(-nll)
            logits = torch.full((int(ids.max()) + 20,), -math.inf)
            others = range(len(logits) - (1 if nll > self.right else 10), len(logits))
            logits[others] = math.log((1 - p) / len(others))
            logits[label] = -nll
            yield logits[None]

    def nll(self, rng: np.random.Generator, n: int) -> Any:
        return np.where(rng.random(n) < self.share, self.right, 2.0)

    def varied(self, variant: Variant, length: int) -> Varied:
        if length > self.beyond:
            raise Undefined("it ends there")
        return Varied(self, None)

    def shifted(self, offset: int) -> "Knows":
        return self


def asked(subject: Any, task: tasks.Task, *overrides: str) -> list[EvaluationRow]:
    words = ["data=task/copy", "experiment=tasks", "evaluation.blocks=32", *overrides]
    settings = composed(*support.each_once(words)).evaluation
    how: dict[str, Any] = {
        "settings": settings,
        "checkpoint_step": 7,
        "dtype": "fp32",
        "device": torch.device("cpu"),
    }
    return list(evaluate(TaskEvaluation(subject=subject, task=task, **how)))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
def test_yaml_repeats_the_defaults_and_the_longest_problem_fills_a_row(name):
    content = yaml.safe_load(
        (configs_dir() / "data" / "task" / f"{name}.yaml").read_text(encoding="utf-8")
    )
    assert content["task"] == {"name": name, **tasks.options_of(name)}
    for experiment in ("tasks", "tasks_long"):
        config = composed(
            f"experiment={experiment}", f"data=task/{name}", "encoding=t5"
        )
        task = tasks.build(name, config.data.task)
        assert config.data.name == name
        assert config.training.train_length == task.size(task.longest)
        assert config.encoding.options["max_distance"] == config.training.train_length
        assert config.training.tokens % config.training.tokens_per_step == 0
        assert config.evaluation.offsets == (config.training.train_length,)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_a_function_of_seed_and_step_and_scores_answers_alone(name):
    config = composed("experiment=tasks", f"data=task/{name}", "encoding=t5")
    task = tasks.build(name, config.data.task)
    data = data_of(config.data, None)
    first, second = (data.batches(config.training, seed=3) for _ in range(2))
    second.batch(0)
    batch = first.batch(5)
    again = second.batch(5)
    assert torch.equal(batch.ids, again.ids)
    assert torch.equal(batch.labels, again.labels)
    assert not torch.equal(batch.ids, first.batch(6).ids)
    assert not torch.equal(
        batch.ids, data.batches(config.training, seed=4).batch(5).ids
    )
    assert batch.ids.shape == (64, config.training.train_length)
    assert (batch.ids[:, 0] == 0).all()
    scored = batch.labels != IGNORED
    assert scored.any(1).all()
    assert batch.n_scored == int(scored.sum())
    read = scored.clone()
    # the last is not read again
    read[torch.arange(64), [int(row.nonzero().max()) for row in scored]] = False
    # what should follow is what follows
    assert (batch.labels[:, :-1] == batch.ids[:, 1:])[read[:, :-1]].all()
    assert max(int(row.nonzero().max()) + 1 for row in scored) <= task.size(
        task.longest
    )


def test_rows_begin_at_positions_up_to_the_offset_and_end_within_those_of_training():
    config = composed(
        "data=task/copy",
        "experiment=tasks",
        "data.offset=8",
        "training.train_length=50",
    )
    batch = data_of(config.data, None).batches(config.training, seed=0).batch(0)
    assert batch.positions is not None
    assert set(batch.positions[:, 0].tolist()) == set(range(9))
    assert int(batch.positions.max()) == 49
    assert (batch.positions.diff(dim=1)[(batch.labels != IGNORED)[:, 1:]] == 1).all()
    assert torch.equal(
        torch.cat([half.positions for half in batch.parts(2)]), batch.positions
    )  # type: ignore[misc]


def test_who_knows_all_has_all_right_at_every_length_and_place():
    rows = asked(Knows(), tasks.build("passkey"), "windowed=true")
    plain = [
        row
        for row in rows
        if row.task == "passkey" and not row.offset and row.kind == "plain"
    ]
    assert [row.problem_length for row in plain] == [4, 18, 32, 40, 48, 64, 128, 256]
    assert [row.length_ratio for row in plain][2:] == [1, 1.25, 1.5, 2, 4, 8]
    assert {(row.accuracy, row.exact_match, row.perplexity) for row in rows} == {
        (1, 1, None)
    }
    assert [row.nll for row in rows] == pytest.approx([0.25] * len(rows))
    assert {row.length for row in rows if row.kind == "windowed"} == {
        row.length for row in plain if row.length > 42
    }
    assert [(row.problem_length, row.offset) for row in rows if row.offset] == [
        (32, 42)
    ]
    depths = {row.task for row in rows} - {"passkey"}
    assert depths == {f"passkey:depth={depth}" for depth in (0.0, 0.25, 0.5, 0.75, 1.0)}
    assert len({row.key for row in rows}) == len(rows)
    # they pair
    assert (
        plain[0].targets_sha256
        == asked(Knows(0.5), tasks.build("passkey"))[0].targets_sha256
    )


def test_a_row_worked_by_hand():
    """Two problems of two symbols: three answer tokens each, of which one is wrong."""

    class OneWrong(Knows):
        right = 1.0

        def nll(self, rng: np.random.Generator, n: int) -> Any:
            return np.array([3.0, *[1.0] * (n - 1)])

    task = tasks.build("copy", {"shortest": 2, "longest": 2, "vocabulary": 5})
    row = asked(
        OneWrong(), task, "evaluation.blocks=2", "evaluation.ratios=[1]", "offsets=[]"
    )[0]
    assert row.length == 6
    assert row.problem_length == 2
    assert row.offset == 0
    assert row.n_blocks == 2
    assert row.n_tokens == 6
    assert row.accuracy == 5 / 6
    assert row.exact_match == 1 / 2
    assert row.nll == pytest.approx(8 / 6)
    # Four symbols and the separator; both strings fall.
    assert row.n_distinct == 2
    assert row.chance == 1 / 5
    assert row.trivial == 4 / 6


def test_rows_count_the_problems_that_differ_and_have_no_interval_if_most_repeat():
    rows = {row.problem_length: row for row in asked(Knows(0.5), tasks.build("parity"))}
    assert (rows[2].n_blocks, rows[2].n_distinct) == (32, 4)  # 00, 01, 10 and 11
    assert rows[2].ci_low is None
    assert rows[2].ci_high is None
    assert rows[2].ci_over is None
    assert rows[16].n_distinct == 32
    assert rows[16].ci_over == "problems"


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_have_the_trivial_readers_share_which_is_below_the_gate(name):
    task = tasks.build(name)
    tested = [
        fixed_problems(task, "test", multiple * task.longest, 512)
        for multiple in (1, 2, 4, 8)
    ]
    right = [
        (task.trivial(problem) == problem.ids[:, 1:])[problem.scored].mean()
        for problem in tested
    ]
    guessed = 1 / len(np.unique(tested[0].ids[:, 1:][tested[0].scored]))
    shares = " | ".join(f"{100 * share:.0f}" for share in (*right, guessed))
    written = (pathlib.Path(__file__).parents[1] / "docs/data.md").read_text(
        encoding="utf-8"
    )
    assert re.search(
        rf"^\| {name} \| [^|]+ \| {re.escape(shares)} \|$", written, re.MULTILINE
    )
    assert max(right) < GATE


def test_a_run_on_a_task_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert support.posbench("train", *TINY.split()) == 0
    printed = capsys.readouterr().out
    assert all(
        words in printed
        for words in ("trivial reader", "seed 0: task copy", "Not learned")
    )
    (folder,) = pathlib.Path("outputs/tasks").glob("rope-s0-*")
    rows = evaluation_rows(folder)
    assert [(row.problem_length, row.offset) for row in rows] == [
        (8, 0),
        (14, 0),
        (20, 0),
        (40, 0),
        (20, 42),
    ]
    assert {row.n_blocks for row in rows} == {16}
    assert "perplexity" not in printed
    # RoPE is relative: shifted, it is the same
    assert rows[2].nll == pytest.approx(rows[4].nll, abs=1e-5)
    validations = [line for line in training_rows(folder) if "val/accuracy" in line]
    assert [line["step"] for line in validations] == [5, 10]
    assert all(
        0 <= line["val/exact_match"] <= line["val/accuracy"] <= 1
        for line in validations
    )
    tokenizer = tokenizer_of(folder)
    assert tokenizer.encode(["s3 = s1"])[0].tolist() == [5, 1, 3]
    assert tokenizer.decode([5, 1]) == "s3 ="
    assert support.posbench("export", str(folder), "exported", "code=true") == 0
    assert (
        support.posbench("evaluate", str(folder), "ratio=1,2,3", "extension=yarn") == 0
    )
    added = evaluation_rows(folder)[len(rows) :]
    assert [(row.problem_length, row.extension) for row in added][:1] == [(60, None)]
    assert {row.problem_length for row in added if row.extension} == {20, 40, 60}


def test_the_fixed_problems_have_a_digest_that_options_change():
    config = composed("data=task/copy", "experiment=tasks").data
    record = data_of(config).record
    assert record["name"] == "copy"
    assert record["task"]["longest"] == 20
    assert len(record["sha256"]) == 64
    other = dataclasses.replace(config, task={**(config.task or {}), "vocabulary": 31})
    assert data_of(other).record["sha256"] != record["sha256"]
