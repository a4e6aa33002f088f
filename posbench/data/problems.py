"""Problems of a synthetic task: fresh ones to train on, and fixed ones to validate and test on.

A row of a training batch is one problem, whose length is drawn evenly from those that are trained; the separator fills
the rest, and only predictions of the answer are scored:

    ids      <|endoftext|>  s7  s2  =   s7  s2  <|endoftext|>  <|endoftext|> ...
    labels         -        -   -   s7  s2  <|endoftext|>  -        -        ...
"""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import torch

from posbench.config.built import task_of
from posbench.config.schema import DataConfig, TrainingConfig
from posbench.data import tokens
from posbench.data.batches import Batch
from posbench.data.tokenizer import Tokenizer, of_symbols
from posbench.data.tokens import Tokens
from posbench.model.loss import IGNORED
from posbench.randomness import derive
from posbench.tasks.base import Problems, Task

FIXED_SEED = 0  # of all problems that are not trained on, in streams that no training reads: runs answer the same ones
VALIDATION_PROBLEMS = 256  # of the longest trained length; accuracy during training is measured on them


@dataclasses.dataclass(frozen=True)
class ProblemBatches:
    """Fresh problems for every update, each of a length that is drawn evenly."""

    data: "TaskData"
    train_length: int  # tokens per row
    batch_size: int  # rows of an update
    seed: int  # of the problems alone

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""
        rng = np.random.default_rng(derive(self.seed, "problems", step))
        task, offset = self.data.task, self.data.offset
        lengths = rng.integers(task.shortest, task.longest, self.batch_size, endpoint=True)
        ids = torch.zeros(self.batch_size, self.train_length, dtype=torch.int64)
        labels, positions = torch.full_like(ids, IGNORED), None
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            read, answers = _read(task.problems(rng, int(length), len(rows)))
            ids[rows, : read.shape[1]], labels[rows, : read.shape[1]] = read, answers
        if offset:
            first = torch.from_numpy(rng.integers(0, offset, self.batch_size, endpoint=True))
            # No row has a token of its problem beyond the last position, only of what fills it.
            positions = (first[:, None] + torch.arange(self.train_length)).clamp(max=self.train_length - 1)
        return Batch.of(ids, labels, positions)


@dataclasses.dataclass(frozen=True)
class TaskData:
    """A task as data to train on, and what `run.json` records of it; beside `tokens.Tokens`, of text."""

    task: Task
    offset: int  # a training problem's first token stands at a position from 0 to this
    tokenizer: Tokenizer
    record: dict[str, Any]

    def batches(self, training: TrainingConfig, seed: int) -> ProblemBatches:
        """Return the training batches of a configuration, by update."""
        return ProblemBatches(self, training.train_length, training.batch_size * training.accumulation, seed)

    def validation_batches(self, training: TrainingConfig) -> list[Batch]:
        """Return fixed problems of the longest trained length, the same each time."""
        whole = Batch.of(*_read(fixed(self.task, "validation", self.task.longest, VALIDATION_PROBLEMS)))
        return whole.parts(-(-VALIDATION_PROBLEMS // training.batch_size))


def prepare(config: DataConfig, cache: str | None = None) -> Tokens | TaskData:
    """Return the data of a run: the problems of a task, or the tokens of a text; `cache` is `runtime.cache`."""
    if config.task is None:
        return tokens.prepare(config, tokens.cache_folder(cache))
    task, offset = task_of(config), config.offset
    options = json.dumps({**dataclasses.asdict(task), "name": task.name, "offset": offset}, sort_keys=True)
    tested = [sha256(fixed(task, "test", length, 64)) for length in sorted({task.shortest, task.longest})]
    digest = hashlib.sha256("\n".join([options, *tested]).encode()).hexdigest()
    record = {"name": config.name, "sha256": digest, "task": config.task, "offset": offset}
    return TaskData(task, offset, of_symbols(task.symbols), record)


def fixed(task: Task, split: str, length: int, count: int, variant: str = "") -> Problems:
    """Return problems that are the same for every run; each variant, such as depth=0.5, has some of its own."""
    stream = derive(FIXED_SEED, "fixed problems", split, task.name, variant, length)
    return task.problems(np.random.default_rng(stream), length, count)


def sha256(problems: Problems) -> str:
    """Return the identity of problems; rows that share it are paired."""
    shape, ids, scored = str(problems.ids.shape), problems.ids, problems.scored
    return hashlib.sha256(shape.encode() + ids.tobytes() + scored.tobytes()).hexdigest()


def _read(problems: Problems) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels: (count, size) int64 each."""
    labels = np.where(problems.scored, problems.ids[:, 1:], IGNORED)
    return torch.from_numpy(problems.ids[:, :-1]), torch.from_numpy(labels)
