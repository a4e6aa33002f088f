"""Negative log-likelihoods of the tokens that windows score."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from posbench import machine
from posbench.data.tokens import TokenSplit
from posbench.encodings.base import Encoding
from posbench.evaluation.protocols import Integers, Windows
from posbench.model import GPT
from posbench.randomness import generator

HEAD_ROWS = 2048  # rows of fp32 logits held at once


def score(
    model: GPT,
    split: TokenSplit,
    windows: Windows,
    device: torch.device,
    dtype: torch.dtype,
    batch_tokens: int,
    rewrite: Callable[[Integers], Integers] | None = None,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Negative log-likelihood in nats of every scored token: (windows, scored).

    Args:
        batch_tokens: tokens per forward pass, at least one window.
        rewrite: changes what a window reads, given its length + 1 tokens; the targets must stay.
        seed: of random positions; they depend on it, the length and the window, not on the batch.
    """
    per_batch = max(1, batch_tokens // windows.length)
    last = windows.scored if windows.scored < windows.length else None
    out = []
    with torch.inference_mode():
        for first in range(0, len(windows.starts), per_batch):
            index = windows.starts[first : first + per_batch, None] + np.arange(windows.length + 1)
            read = split.ids[index].astype(np.int64)
            if rewrite is not None:
                read = np.stack([rewrite(row) for row in read])
            ids = torch.from_numpy(read).to(device)
            positions = _positions(model.encoding, ids[:, :-1], seed, first)
            with machine.autocast(device, dtype):
                hidden = model.hidden(ids[:, :-1], positions, last=last)
            nll = _nll(model, hidden.float().flatten(0, 1), ids[:, -windows.scored :].flatten())
            out.append(nll.view(-1, windows.scored).double().cpu().numpy())
    return np.concatenate(out)


@contextlib.contextmanager
def changed(model: GPT, encoding: Encoding, window: int | None, sinks: int = 0) -> Iterator[None]:
    """Let a model use another encoding of the same shape, and narrow its attention, for a while.

    Args:
        window: keys each query may see, if the model does not see fewer anyway; None = as it was.
        sinks: keys at the beginning that each query sees beside the window.
    """
    before = model.encoding, model.window, model.sinks
    model.encoding = encoding
    if window is not None:
        model.window, model.sinks = min(window, model.window or window), max(sinks, model.sinks)
    try:
        yield
    finally:
        model.encoding, model.window, model.sinks = before


def _positions(encoding: Encoding, ids: Tensor, seed: int, first: int) -> Tensor | None:
    """Positions (B, T) of schemes with their own, each window's from a stream named after it."""
    if "positions" not in encoding.hooks:
        return None
    streams = [generator(seed, "evaluation", ids.shape[1], first + i, device=ids.device) for i in range(len(ids))]
    rows = [encoding.positions(row[None], stream) for row, stream in zip(ids, streams, strict=True)]
    return torch.cat(rows)


def _nll(model: GPT, hidden: Tensor, labels: Tensor) -> Tensor:
    """fp32 head and softmax whatever the model ran in; in pieces, since logits are the largest tensor of all."""
    pieces = zip(torch.split(hidden, HEAD_ROWS), torch.split(labels, HEAD_ROWS), strict=True)
    return torch.cat([F.cross_entropy(model.logits(h), y, reduction="none") for h, y in pieces])
