"""Shared by encodings that depend on token texts."""

from collections.abc import Iterable

import torch
from torch import Tensor

from posbench.encodings.base import Encoding


def ids_of(texts: Iterable[str], vocabulary: tuple[str, ...]) -> Tensor:
    """Ids (N,) of the tokens with one of these texts; empty without a vocabulary."""
    wanted = set(texts)
    return torch.tensor([i for i, text in enumerate(vocabulary) if text in wanted], dtype=torch.long)


def among(ids: Tensor, chosen: Tensor) -> Tensor:
    """Whether each token id (B, T) is among the chosen (N,): (B, T) bool."""
    return (ids[..., None] == chosen).any(-1)  # torch.isin may make the host wait for its device


def remarks_without(encoding: Encoding, ids: Tensor, said: str) -> list[str]:
    """A remark that no token of the vocabulary is one that an encoding looks for; none without a vocabulary."""
    missing = encoding.shape.vocabulary and not len(ids)
    return [f"{encoding.name}: no token of the vocabulary is {said}"] if missing else []


def places(numbers: Tensor) -> Tensor:
    """The count of earlier tokens with the same number: (B, T), from numbers (B, T) that never fall within a row."""
    first = torch.searchsorted(numbers, numbers)
    return torch.arange(numbers.shape[-1], device=numbers.device) - first
