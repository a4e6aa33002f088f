"""Training and evaluation on synthetic tasks: batches, answers, rows, and the commands
from end to end.
"""

import dataclasses
import functools
import math
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import support
import torch
import yaml
from torch import Tensor

from posbench import tasks
from posbench.config.schema import Config
from posbench.config.shipped import configs_dir
from posbench.data.batches import fixed_problems
from posbench.data.tokens import data_of
from posbench.evaluation.evaluate import evaluate
from posbench.evaluation.problems import TaskEvaluation
from posbench.evaluation.subjects import Variant
from posbench.launch import compose
from posbench.model import IGNORED
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
    """A subject that is no model: it answers correctly."""

    train_length: int = 42
    name: str = "knows"
    right = 0.25  # nats

    def logits(self, ids: Any, scored: Any, first: int) -> Iterator[Tensor]:
        labels = torch.from_numpy(ids[:, 1:][scored])
        n_tokens = int(ids.max()) + 20
        for label, nll in zip(labels, self.nll(len(labels)), strict=True):
            # One other token has all that is left, and more than the answer where that
            # is wrong; or ten share it.
            n_others = 1 if nll > self.right else 10
            left = 1 - math.exp(-nll)
            logits = torch.full((n_tokens,), -math.inf)
            logits[-n_others:] = math.log(left / n_others)
            logits[label] = -nll
            yield logits[None]

    def nll(self, n: int) -> list[float]:
        return [self.right] * n

    def in_variant(self, variant: Variant, length: int) -> tuple["Knows", None]:
        return self, None

    def shifted(self, offset: int) -> "Knows":
        return self


def asked(subject: Any, task: tasks.Task, *overrides: str) -> list[EvaluationRow]:
    """Return the rows of an evaluation."""
    words = ["data=task/copy", "experiment=tasks", "evaluation.blocks=32", *overrides]
    config = composed(*support.each_once(words))
    evaluation = TaskEvaluation(
        subject=subject,
        task=task,
        settings=config.evaluation,
        checkpoint_step=7,
        dtype="fp32",
        device=torch.device("cpu"),
    )
    return list(evaluate(evaluation))


@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_repeats_the_defaults_of_its_task(name):
    file = configs_dir() / "data" / "task" / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    defaults = tasks.options_of(name)
    assert content["task"] == {"name": name, **defaults}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("experiment", ["tasks", "tasks_long"])
def test_the_longest_problem_fills_a_row(name, experiment):
    config = composed(f"experiment={experiment}", f"data=task/{name}", "encoding=t5")
    task = tasks.build(name, config.data.task)
    length = config.training.train_length
    assert config.data.name == name
    assert length == task.size(task.longest)
    assert config.encoding.options["max_distance"] == length
    assert config.training.tokens % config.training.tokens_per_step == 0
    assert config.evaluation.offsets == (length,)


def batches_of(config: Config, seed: int) -> Any:
    data = data_of(config.data, None)
    return data.batches(config.training, seed)


def test_a_batch_is_a_function_of_seed_and_step():
    config = composed("experiment=tasks", "data=task/copy")
    batch = batches_of(config, 3).batch(5)

    batches = batches_of(config, 3)
    batches.batch(0)
    again = batches.batch(5)
    next_one = batches.batch(6)
    of_another_seed = batches_of(config, 4).batch(5)

    assert torch.equal(again.ids, batch.ids)
    assert torch.equal(again.labels, batch.labels)
    assert not torch.equal(next_one.ids, batch.ids)
    assert not torch.equal(of_another_seed.ids, batch.ids)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_scores_answers_alone(name):
    config = composed("experiment=tasks", f"data=task/{name}", "encoding=t5")
    task = tasks.build(name, config.data.task)
    batch = batches_of(config, 3).batch(5)
    scored = batch.labels != IGNORED
    assert batch.ids.shape == (64, config.training.train_length)
    assert (batch.ids[:, 0] == 0).all()
    assert scored.any(dim=1).all()
    assert batch.n_scored == scored.sum()
    size = task.size(task.longest)
    for ids, labels, is_scored in zip(batch.ids, batch.labels, scored, strict=True):
        places = is_scored.nonzero().flatten().tolist()
        *read, last = places  # the last is not read again
        assert last < size
        for t in read:
            assert labels[t] == ids[t + 1]


def test_rows_begin_at_positions_up_to_the_offset_and_end_within_those_of_training():
    config = composed(
        "data=task/copy",
        "experiment=tasks",
        "data.offset=8",
        "training.train_length=50",
    )
    batch = batches_of(config, 0).batch(0)
    positions = batch.positions
    assert positions is not None
    first = positions[:, 0].tolist()
    assert set(first) == set(range(9))
    assert positions.max() == 49
    scored = batch.labels[:, 1:] != IGNORED
    steps = positions.diff(dim=1)
    assert (steps[scored] == 1).all()
    halves = [half.positions for half in batch.parts(2)]
    assert torch.equal(torch.cat(halves), positions)


@pytest.fixture(scope="module")
def known() -> list[EvaluationRow]:
    """Return the rows of a subject that knows all."""
    task = tasks.build("passkey")
    return asked(Knows(), task, "windowed=true")


@pytest.fixture(scope="module")
def curve(known) -> list[EvaluationRow]:
    """Return the rows of unchanged problems from position 0."""
    plain = [row for row in known if row.variant == "plain"]
    unmoved = [row for row in plain if not row.offset]
    return [row for row in unmoved if row.task == "passkey"]


def test_who_knows_all_has_all_right_at_every_length_and_place(known):
    for row in known:
        assert row.accuracy == 1
        assert row.exact_match == 1
        assert row.perplexity is None
        assert row.nll == pytest.approx(0.25)


def test_a_task_is_asked_at_its_lengths_and_multiples_of_the_longest(curve):
    lengths = [row.problem_length for row in curve]
    assert lengths == [4, 18, 32, 40, 48, 64, 128, 256]
    ratios = [row.length_ratio for row in curve[2:]]
    assert ratios == [1, 1.25, 1.5, 2, 4, 8]


def test_a_task_is_asked_windowed_beyond_the_training_length(known, curve):
    windowed = {row.length for row in known if row.variant == "windowed"}
    beyond = {row.length for row in curve if row.length > 42}
    assert windowed == beyond


def test_the_longest_problem_of_training_is_asked_at_an_offset(known):
    (moved,) = [row for row in known if row.offset]
    assert moved.problem_length == 32
    assert moved.offset == 42


def test_a_passkey_is_asked_at_every_depth(known):
    asked_of = {row.task for row in known}
    assert asked_of == {
        "passkey",
        "passkey:depth=0.0",
        "passkey:depth=0.25",
        "passkey:depth=0.5",
        "passkey:depth=0.75",
        "passkey:depth=1.0",
    }


def test_rows_have_keys_of_their_own(known):
    keys = {row.key for row in known}
    assert len(keys) == len(known)


def test_rows_of_two_subjects_pair(curve):
    task = tasks.build("passkey")
    other = asked(OneWrong(), task)[0]
    assert curve[0].targets_sha256 == other.targets_sha256


class OneWrong(Knows):
    right = 1.0

    def nll(self, n: int) -> list[float]:
        return [3.0, *[1.0] * (n - 1)]


def test_a_row_worked_by_hand():
    """Two problems of two symbols: three answer tokens each, of which one is wrong."""
    task = tasks.build("copy", {"shortest": 2, "longest": 2, "vocabulary": 5})
    words = ["evaluation.blocks=2", "evaluation.ratios=[1]", "offsets=[]"]
    row, *_ = asked(OneWrong(), task, *words)
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
    rows = asked(Knows(), tasks.build("parity"))
    by_length = {row.problem_length: row for row in rows}
    short = by_length[2]
    assert short.n_blocks == 32
    assert short.n_distinct == 4  # 00, 01, 10 and 11
    assert short.ci_low is None
    assert short.ci_high is None
    assert short.ci_over is None
    assert by_length[16].n_distinct == 32
    assert by_length[16].ci_over == "problems"


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_have_the_trivial_readers_share_which_is_below_the_gate(name):
    task = tasks.build(name)
    shares = []
    for multiple in (1, 2, 4, 8):
        length = multiple * task.longest
        problems = fixed_problems(task, "test", length, 512)
        right = task.trivial(problems) == problems.ids[:, 1:]
        of_answers = right[problems.scored]
        shares.append(of_answers.mean())
    assert max(shares) < GATE

    problems = fixed_problems(task, "test", task.longest, 512)
    answer_ids = problems.ids[:, 1:][problems.scored]
    answers = np.unique(answer_ids)
    shares.append(1 / len(answers))  # of guesses
    cells = " | ".join(f"{100 * share:.0f}" for share in shares)
    page = pathlib.Path(__file__).parents[1] / "docs" / "data.md"
    row = rf"^\| {name} \| [^|]+ \| {re.escape(cells)} \|$"
    text = page.read_text(encoding="utf-8")
    assert re.search(row, text, re.MULTILINE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
    """Return the folder of a run on a task, trained by the command line."""
    folder = tmp_path_factory.mktemp("task")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert support.posbench("train", *TINY.split()) == 0
        (run,) = pathlib.Path("outputs/tasks").resolve().glob("rope-s0-*")
    return run


@pytest.fixture
def run(trained, tmp_path) -> pathlib.Path:
    """Return a copy of it."""
    return shutil.copytree(trained, tmp_path / trained.name)


def test_a_run_on_a_task_is_printed_with_accuracies(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert support.posbench("train", *TINY.split()) == 0
    printed = capsys.readouterr().out
    assert "trivial reader" in printed
    assert "seed 0: task copy" in printed
    assert "Not learned" in printed
    assert "perplexity" not in printed


def test_a_run_on_a_task_has_rows_of_its_lengths_and_an_offset(run):
    rows = evaluation_rows(run)
    lengths = [(row.problem_length, row.offset) for row in rows]
    assert lengths == [(8, 0), (14, 0), (20, 0), (40, 0), (20, 42)]
    assert {row.n_blocks for row in rows} == {16}
    # RoPE is relative: shifted, it is the same
    assert rows[2].nll == pytest.approx(rows[4].nll, abs=1e-5)


def test_a_run_on_a_task_validates_accuracies(run):
    rows = [row for row in training_rows(run) if "val/accuracy" in row]
    assert [row["step"] for row in rows] == [5, 10]
    for row in rows:
        assert 0 <= row["val/accuracy"] <= 1


def test_a_run_on_a_task_has_a_tokenizer_of_its_symbols(run):
    tokenizer = tokenizer_of(run)
    (ids,) = tokenizer.encode(["s3 = s1"])
    assert ids.tolist() == [5, 1, 3]
    assert tokenizer.decode([5, 1]) == "s3 ="


def test_a_run_on_a_task_is_exported(run, tmp_path):
    out = str(tmp_path / "exported")
    assert support.posbench("export", str(run), out, "code=true") == 0


def test_a_run_on_a_task_is_evaluated_further(run):
    before = len(evaluation_rows(run))
    words = ["ratio=1,2,3", "extension=yarn"]
    assert support.posbench("evaluate", str(run), *words) == 0
    added = evaluation_rows(run)[before:]
    assert added[0].problem_length == 60
    assert added[0].extension is None
    extended = {row.problem_length for row in added if row.extension}
    assert extended == {20, 40, 60}


def test_the_fixed_problems_have_a_digest_that_options_change():
    config = composed("data=task/copy", "experiment=tasks").data
    smaller = {**config.task, "vocabulary": 31}
    other = dataclasses.replace(config, task=smaller)

    meta = data_of(config).meta
    other_meta = data_of(other).meta

    assert meta["name"] == "copy"
    assert meta["task"]["longest"] == 20
    assert len(meta["sha256"]) == 64
    assert other_meta["sha256"] != meta["sha256"]
