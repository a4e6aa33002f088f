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
from posbench.model import IGNORED
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
        if size == 1:
            return self
        rows = np.arange(len(self.ids)).reshape(parts, size, -1)
        own = rows[:, rank].ravel()
        return self._each(lambda column: column[own])

    def parts(self, count: int) -> "list[Batch]":
        """Split into `count` batches of equal size, and these by document. Some batches
        may have no label to score.
        """
        columns = [self.ids.chunk(count), self.labels.chunk(count)]
        if self.positions is not None:
            columns.append(self.positions.chunk(count))
        parts = [Batch.of(*part) for part in zip(*columns, strict=True)]
        if self.separator is None:
            return parts

        by_document = []
        for part in parts:
            by_document += part._by_document(self.separator)
        return by_document

    def _by_document(self, separator: int) -> "list[Batch]":
        """Give each document its own row, beside similarly long ones: a mask would not
        be exact for every encoding.
        """
        ids = self.ids.flatten()
        labels = self.labels.flatten()

        begins = self.ids == separator
        begins[:, 0] = True  # rows are pieces of text that do not follow one another
        firsts = begins.flatten().nonzero()[:, 0]  # (documents,)
        sizes = firsts.diff(append=torch.tensor([len(ids)]))

        # Documents of a batch fill at least half of their rows, short ones less.
        halvings = (self.ids.shape[1] / sizes).log2().floor().clamp(max=3)
        batches = []
        for number in sorted(set(halvings.tolist())):
            similar = halvings == number
            columns = torch.arange(int(sizes[similar].max()))
            places = (firsts[similar, None] + columns).clamp(max=len(ids) - 1)
            is_inside = columns < sizes[similar, None]
            own_labels = labels[places].where(is_inside, IGNORED)
            batches.append(Batch.of(ids[places], own_labels))
        return batches

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; to CUDA asynchronously, from pinned memory."""

        def moved(column: Tensor) -> Tensor:
            if device.type == "cuda":
                column = column.pin_memory()
            return machine.to_device(column, device)

        return self._each(moved)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed = self._replace(ids=change(self.ids), labels=change(self.labels))
        if self.positions is None:
            return changed
        return changed._replace(positions=change(self.positions))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingBatches:
    """Epochs of non-overlapping blocks of `train_length` tokens in random order, from a
    random offset in each epoch.
    """

    ids: np.ndarray
    train_length: int
    batch_size: int
    seed: int
    separator: int | None = None

    @property
    def blocks_per_epoch(self) -> int:
        # leaves room for the offset
        return max(1, (len(self.ids) - self.train_length) // self.train_length)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0; every label is scored. It may
        span epochs.
        """
        first = step * self.batch_size
        starts = []
        for number in range(first, first + self.batch_size):
            epoch, index = divmod(number, self.blocks_per_epoch)
            starts.append(int(self._order(epoch)[index]))
        batch = _blocks(self.ids, starts, self.train_length)
        return batch._replace(separator=self.separator)

    def spans(self, steps: int) -> np.ndarray:
        """Return the parts of the text in the first `steps` batches, (S, 2): first
        token and end, sorted, disjoint.
        """
        epochs, remainder = divmod(steps * self.batch_size, self.blocks_per_epoch)
        starts = [self._order(epoch) for epoch in range(epochs)]
        starts.append(self._order(epochs)[:remainder])
        firsts = np.unique(np.concatenate(starts))
        ends = firsts + self.train_length + 1  # with the label of the last token
        return merge_spans([np.stack([firsts, ends], axis=1)])

    @functools.lru_cache(2)  # noqa: B019, since a run has one of these objects
    def _order(self, epoch: int) -> np.ndarray:
        """Return the first token of each block of an epoch, in the epoch's order."""
        generator = np.random.default_rng([self.seed, epoch])
        room = len(self.ids) - 1 - self.blocks_per_epoch * self.train_length
        largest_offset = min(max(0, room), self.train_length - 1)
        offset = int(generator.integers(largest_offset + 1))
        order = generator.permutation(self.blocks_per_epoch)
        return offset + self.train_length * order


def merge_spans(spans: Sequence[np.ndarray]) -> np.ndarray:
    """Return the union of several lists of parts of a text, sorted and disjoint: (S,
    2).
    """
    parts = np.concatenate(spans)
    parts = parts[parts[:, 0].argsort(kind="stable")]
    begins = parts[:, 0]
    ends = np.maximum.accumulate(parts[:, 1])  # the furthest so far

    # A part after a gap begins a part of the union, and the one before it ends one.
    after_gaps = np.flatnonzero(begins[1:] > ends[:-1]) + 1
    begin_of_each = begins[np.append(0, after_gaps)]
    end_of_each = ends[np.append(after_gaps - 1, len(ends) - 1)]
    return np.stack([begin_of_each, end_of_each], axis=1)


def validation_batches(
    ids: np.ndarray, length: int, batch_size: int, limit: int
) -> list[Batch]:
    """Return batches of at most `limit` blocks of validation text. The blocks are
    spread evenly and always the same.
    """
    n_blocks = max(1, (len(ids) - 1) // length)
    spread = np.linspace(0, n_blocks - 1, min(limit, n_blocks)).round()
    starts = (np.unique(spread.astype(np.int64)) * length).tolist()
    firsts = range(0, len(starts), batch_size)
    return [_blocks(ids, starts[i : i + batch_size], length) for i in firsts]


def _blocks(ids: np.ndarray, starts: list[int], length: int) -> Batch:
    if len(ids) <= length:
        raise UserError(
            f"the text has {len(ids)} tokens: a block of {length} needs {length + 1}"
        )
    rows = np.stack([ids[start : start + length + 1] for start in starts])
    blocks = torch.from_numpy(rows.astype(np.int64))
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
        labels = torch.full_like(ids, IGNORED)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            part = problem_batch(self.task.problems(rng, int(length), len(rows)))
            size = part.ids.shape[1]
            ids[rows, :size] = part.ids
            labels[rows, :size] = part.labels

        if not self.offset:
            return Batch.of(ids, labels)
        offsets = rng.integers(0, self.offset, self.batch_size, endpoint=True)
        positions = torch.from_numpy(offsets)[:, None] + torch.arange(self.train_length)
        # Only padding lies beyond the last position.
        return Batch.of(ids, labels, positions.clamp(max=self.train_length - 1))


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
    digest = hashlib.sha256(str(problems.ids.shape).encode())
    digest.update(problems.ids.tobytes())
    digest.update(problems.scored.tobytes())
    return digest.hexdigest()
