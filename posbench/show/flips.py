"""How often distance flips the order of two keys in a query's logits.

Source: Du et al., "RoPE Distinguishes Neither Positions Nor Tokens in Long Contexts,
Provably" (2026), arXiv:2605.15514, whose token inversion this is: of two keys, the one
with the higher logit at one place has the lower one at another. For RoPE its
probability tends to LIMIT as the context grows. Only the abstract and a summary of the
paper were at hand; the two places and the distribution of keys are our choice.
"""

import math

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Shape, split_heads
from posbench.model.standalone import attention_logits
from posbench.show import panels

# the model of the catalogue
SHAPE = Shape(d_model=128, n_heads=4, n_layers=4, train_length=128)
RATIOS = (1, 8)  # measured lengths, as multiples of the training length
LIMIT = 0.5  # one order says nothing of the other
# queries of each head, and the keys of each; the standard error of a share is 0.015
QUERIES, KEYS = 8, 32


def line(label: str, build: panels.Build) -> str:
    """Return the shares of an encoding, as `posbench show` prints them."""
    parts = []
    for ratio, share in zip(RATIOS, shares(build), strict=True):
        text = "n/a" if math.isnan(share) else f"{share:.2f}"
        parts.append(f"{text} at {ratio * SHAPE.train_length:,} tokens")
    return (
        f"{label}: share of key pairs whose order flips with distance:"
        f" {', '.join(parts)} (limit {LIMIT})"
    )


@torch.no_grad()
def shares(build: panels.Build) -> list[float]:
    """Return the shares of flipped pairs of keys at the lengths of `RATIOS`."""
    encoding = build(SHAPE)
    return [flipped(encoding, ratio * SHAPE.train_length) for ratio in RATIOS]


def flipped(encoding: Encoding, length: int) -> float:
    """Return the share of pairs of keys that the last query of an input ranks one way
    near its end, the other way near its start; NaN: it is not defined there, or the
    query does not see so far.

    q, k and the first layer's input are standard normal. What acts on the embeddings is
    left out, since it adds the same to both logits.
    """
    if encoding.max_length is not None and encoding.max_length < length:
        return math.nan
    first, second = torch.triu_indices(KEYS, KEYS, offset=1)
    flips = []
    for seed in range(QUERIES):
        near = _logits(encoding, length, length - 1 - panels.MARGIN, seed)
        far = _logits(encoding, length, panels.MARGIN, seed)
        if not far.isfinite().all():
            return math.nan
        is_flipped = (near[first] > near[second]) != (far[first] > far[second])
        flips.append(is_flipped.double().mean())
    return float(torch.stack(flips).mean())


def _logits(encoding: Encoding, length: int, place: int, seed: int) -> Tensor:
    """Return the last query's logits of keys that stand at a place in turn, among the
    same other tokens: (KEYS, H).
    """
    width, n_heads = encoding.shape.d_model, encoding.shape.n_heads
    tokens = panels.random(3, 1, length, width, seed=seed)
    # some encodings read neighbours of a key: they are the same near the start
    around = 2 * panels.MARGIN
    tokens[:, :, :around] = tokens[:, :, -around - 1 : -1]

    tokens = tokens.repeat(1, KEYS, 1, 1)
    tokens[1:, :, place] = panels.random(2, KEYS, width, seed=QUERIES + seed)
    q, k, x = tokens
    q, k = split_heads(q, n_heads), split_heads(k, n_heads)
    positions = panels.positions_of(encoding, length)
    logits = attention_logits(encoding, q, k, x, positions=positions, last=1)
    return logits[:, :, 0, place]
