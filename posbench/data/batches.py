"""Batches of text blocks or of a task's problems, for training and for a quick
validation loss.

The batch of a step is a pure function of (seed, step): neither resuming nor the
encoding changes what a run sees.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posbench import machine
from posbench.errors import UserError
from posbench.model.loss import IGNORED
from posbench.randomness import derive
from posbench.tasks.base import Problems, Task


class Batch(NamedTuple):
    """Tokens and their labels."""

    ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64, `IGNORED` where not scored
    # scored labels of all processes of a run; counted on the host, so that no step
    # waits for a device
    n_scored: int
    positions: Tensor | None = None  # (B, T) int64; None = the encoding's own
    # begins each document, if documents must not read one another
    separator: int | None = None

    @classmethod
    def of(
        cls, ids: Tensor, labels: Tensor, positions: Tensor | None = None
    ) -> "Batch":
        return cls(ids, labels, int((labels != IGNORED).sum()), positions)

    def share(self, parts: int, rank: int, size: int) -> "Batch":
        """Return the rows of process `rank` of `size`, an equal share of each part.
        `n_scored` stays that of all.
        """
        rows = np.arange(len(self.ids)).reshape(parts, size, -1)[:, rank].ravel()
        return self._each(lambda column: column[rows]) if size > 1 else self

    def parts(self, count: int) -> "list[Batch]":
        """Split into `count` batches of equal size, and these by document. Some batches
        may have no label to score.
        """
        columns = [
            column.chunk(count)
            for column in (self.ids, self.labels, self.positions)
            if column is not None
        ]
        parts = [Batch.of(*part) for part in zip(*columns, strict=True)]
        if self.separator is None:
            return parts
        return [
            documents
            for part in parts
            for documents in part._by_document(self.separator)
        ]

    def _by_document(self, separator: int) -> "list[Batch]":
        """Give each document its own row, beside similarly long ones: a mask would not
        be exact for every encoding.
        """
        ids, labels, length = (
            self.ids.flatten(),
            self.labels.flatten(),
            self.ids.shape[1],
        )
        firsts = (
            ((self.ids == separator) | (torch.arange(length) == 0))
            .flatten()
            .nonzero()[:, 0]
        )
        sizes = firsts.diff(append=torch.tensor([len(ids)]))
        halvings = (length / sizes).log2().floor().clamp(max=3)
        pieces = []
        for similar in (
            halvings == number for number in sorted(set(halvings.tolist()))
        ):
            columns = torch.arange(int(sizes[similar].max()))
            places = (firsts[similar, None] + columns).clamp(max=len(ids) - 1)
            pieces.append(
                Batch.of(
                    ids[places],
                    labels[places].where(columns < sizes[similar, None], IGNORED),
                )
            )
        return pieces

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; to CUDA asynchronously, from pinned memory."""
        return self._each(
            lambda x: machine.to_device(
                x.pin_memory() if device.type == "cuda" else x, device
            )
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        positions = None if self.positions is None else change(self.positions)
        return self._replace(
            ids=change(self.ids), labels=change(self.labels), positions=positions
        )


class TrainingBatches:
    """Epochs of non-overlapping blocks of `train_length` tokens in random order, from a
    random offset in each epoch.
    """

    def __init__(
        self,
        ids: np.ndarray,
        length: int,
        batch_size: int,
        seed: int,
        separator: int | None = None,
    ) -> None:
        self._separator = separator
        self._ids, self._train_length, self._batch_size, self._seed = (
            ids,
            length,
            batch_size,
            seed,
        )
        # leaves room for the offset
        self.blocks_per_epoch = max(1, (len(ids) - length) // length)
        self._order = functools.lru_cache(2)(self._order_of)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0; every label is scored. It may
        span epochs.
        """
        places = (
            divmod(step * self._batch_size + i, self.blocks_per_epoch)
            for i in range(self._batch_size)
        )
        starts = [int(self._order(epoch)[index]) for epoch, index in places]
        return _blocks(self._ids, starts, self._train_length)._replace(
            separator=self._separator
        )

    def spans(self, steps: int) -> np.ndarray:
        """Return the parts of the text in the first `steps` batches, (S, 2): first
        token and end, sorted, disjoint.
        """
        epochs, remainder = divmod(steps * self._batch_size, self.blocks_per_epoch)
        starts = np.unique(
            np.concatenate(
                [*map(self._order, range(epochs)), self._order(epochs)[:remainder]]
            )
        )
        return merge_spans([np.stack([starts, starts + self._train_length + 1], 1)])

    def _order_of(self, epoch: int) -> np.ndarray:
        generator = np.random.default_rng([self._seed, epoch])
        room = max(0, len(self._ids) - 1 - self.blocks_per_epoch * self._train_length)
        offset = int(generator.integers(min(room, self._train_length - 1) + 1))
        return offset + self._train_length * generator.permutation(
            self.blocks_per_epoch
        )


def merge_spans(spans: Sequence[np.ndarray]) -> np.ndarray:
    """Return the union of several lists of parts of a text, sorted and disjoint: (S,
    2).
    """
    parts = np.concatenate(spans)
    parts = parts[parts[:, 0].argsort(kind="stable")]
    ends = np.maximum.accumulate(parts[:, 1])
    breaks = np.flatnonzero(parts[1:, 0] > ends[:-1]) + 1
    return np.stack(
        [parts[np.r_[0, breaks], 0], ends[np.r_[breaks - 1, len(ends) - 1]]], 1
    )


def validation_batches(
    ids: np.ndarray, length: int, batch_size: int, limit: int
) -> list[Batch]:
    """Return batches of at most `limit` blocks of validation text. The blocks are
    spread evenly and always the same.
    """
    blocks = max(1, (len(ids) - 1) // length)
    starts = (
        np.unique(
            np.linspace(0, blocks - 1, min(limit, blocks)).round().astype(np.int64)
        )
        * length
    )
    return [
        _blocks(ids, starts[i : i + batch_size].tolist(), length)
        for i in range(0, len(starts), batch_size)
    ]


def _blocks(ids: np.ndarray, starts: list[int], length: int) -> Batch:
    if len(ids) <= length:
        raise UserError(
            f"the text has {len(ids)} tokens: a block of {length} needs {length + 1}"
        )
    blocks = torch.from_numpy(
        np.stack([ids[start : start + length + 1] for start in starts]).astype(np.int64)
    )
    return Batch.of(blocks[:, :-1], blocks[:, 1:])


@dataclasses.dataclass(frozen=True)
class ProblemBatches:
    """Fresh problems for every update. Each has a trained length and its own row, which
    separators fill up.
    """

    task: Task
    offset: int  # a problem's first token stands at a position from 0 to this
    train_length: int  # tokens per row
    batch_size: int  # rows of an update
    seed: int  # draws the problems and nothing else

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""
        rng = np.random.default_rng(derive(self.seed, "problems", step))
        lengths = rng.integers(
            self.task.shortest, self.task.longest, self.batch_size, endpoint=True
        )
        ids = torch.zeros(self.batch_size, self.train_length, dtype=torch.int64)
        labels, positions = torch.full_like(ids, IGNORED), None
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            part = problem_batch(self.task.problems(rng, int(length), len(rows)))
            ids[rows, : part.ids.shape[1]], labels[rows, : part.ids.shape[1]] = (
                part.ids,
                part.labels,
            )
        if self.offset:
            offsets = torch.from_numpy(
                rng.integers(0, self.offset, self.batch_size, endpoint=True)
            )
            # padding
            positions = (offsets[:, None] + torch.arange(self.train_length)).clamp(
                max=self.train_length - 1
            )
        return Batch.of(ids, labels, positions)


def problem_batch(problems: Problems) -> Batch:
    """Return problems as inputs and labels."""
    labels = np.where(problems.scored, problems.ids[:, 1:], IGNORED)
    return Batch.of(torch.from_numpy(problems.ids[:, :-1]), torch.from_numpy(labels))


def fixed_problems(
    task: Task, split: str, length: int, count: int, variant: str = ""
) -> Problems:
    """Return problems that are the same for every run. Each variant has a random stream
    that no training reads.
    """
    stream = derive(0, "fixed problems", split, task.name, variant, length)
    return task.problems(np.random.default_rng(stream), length, count)


def problems_sha256(problems: Problems) -> str:
    """Return the digest of problems; rows that share it are paired."""
    parts = (
        str(problems.ids.shape).encode(),
        problems.ids.tobytes(),
        problems.scored.tobytes(),
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()
