"""How often distance flips the order of two keys in a query's logits.

Source: Du et al., "RoPE Distinguishes Neither Positions Nor Tokens in Long Contexts,
Provably" (2026), arXiv:2605.15514, whose token inversion this is: of two keys, the one
with the higher logit at one place has the lower one at another. For RoPE its
probability tends to 0.5 as the context grows. Only the abstract and summaries of the
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
LENGTHS = (128, 1024)  # tokens of an input: the training length and 8x
# queries of each head, and the keys of each; the standard error of a share is 0.015
QUERIES, KEYS = 8, 32


@torch.no_grad()
def shares(build: panels.Build) -> list[float]:
    """Return the shares of flipped pairs of keys at `LENGTHS`."""
    encoding = build(SHAPE)
    return [flipped(encoding, length) for length in LENGTHS]


def flipped(encoding: Encoding, length: int) -> float:
    """Return the share of pairs of keys that the last query of an input ranks one way
    near its end, the other way near its start; NaN: it is not defined there, or the
    query does not see so far.

    q, k and the first layer's input are standard normal. Logits are those of the first
    layer, before what replaces a softmax. What acts on the embeddings is left out: it
    adds the same to both logits.
    """
    if encoding.max_length is not None and encoding.max_length < length:
        return math.nan
    near = _order(encoding, length, length - 1 - panels.MARGIN)
    far = _order(encoding, length, panels.MARGIN)
    return float((near - far).abs().mean() / 2)


def _order(encoding: Encoding, length: int, place: int) -> Tensor:
    """Return the signs of the differences of two keys' logits; keys stand at a place in
    turn, among the same other tokens: (QUERIES, pairs, H).
    """
    width = encoding.shape.d_model
    positions = panels.positions_of(encoding, length)
    first, second = torch.triu_indices(KEYS, KEYS, offset=1)
    signs = []
    for seed in range(QUERIES):
        tokens = panels.random(3, 1, length, width, seed=seed)
        # some encodings read neighbours of a key: they are the same at both places
        around = 2 * panels.MARGIN
        tokens[:, :, :around] = tokens[:, :, -around - 1 : -1]

        tokens = tokens.repeat(1, KEYS, 1, 1)
        tokens[1:, :, place] = panels.random(2, KEYS, width, seed=QUERIES + seed)
        q, k, x = tokens
        q, k = (split_heads(part, encoding.shape.n_heads) for part in (q, k))
        logits = attention_logits(encoding, q, k, x, positions=positions, last=1)
        of_keys = logits[:, :, 0, place]
        difference = of_keys[first] - of_keys[second]
        sign = difference.sign()
        # both are -inf where the query does not see the place
        sign[difference.isnan()] = math.nan
        signs.append(sign)
    return torch.stack(signs)
