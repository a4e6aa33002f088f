"""Causal attention by torch's FlexAttention on CUDA: biases, windows and sinks in one
fused kernel.

FlexAttention is compiled alone. The biases that it captures are made outside of it as
contiguous fp32, since a bias from the same compiled region has had wrong gradients.
Their gradients are sums by atomic additions: they are right, but two runs may differ in
the last bits. `make gpu` compares values and gradients with the definition on a device.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized
Attention Kernels" (2024), arXiv:2412.05496.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer
from posbench.model.compiled import compiled

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# queries or keys of a block; the mask says of two blocks whether they see each other
BLOCK = 128
MIN_WIDTH = 16  # fewest channels of a head that FlexAttention takes
# With each block of keys, the table's biases of its pairs are loaded ahead, in fp32.
# With the compiler's own number of stages that takes 245,760 bytes for bf16 heads of 64
# channels, but an H100 or H200 has 232,448. Two take 147,456.
STAGES_OF_TABLE = 2


def serves(q: Tensor, v: Tensor) -> bool:
    """Return whether FlexAttention takes such queries and values here; its backward
    pass needs CUDA.
    """
    if q.device.type != "cuda" or q.dtype == torch.float64:
        return False
    if torch.compiler.is_compiling():
        return False
    # For fewer queries than a block, FlexAttention compiles another kernel, which is
    # made for single queries.
    return q.shape[2] >= BLOCK and min(v.shape[3], q.shape[3]) >= MIN_WIDTH


def attention(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, layer: Layer
) -> Tensor | None:
    """Return attention of q, k and v after the hooks on the whole sequence, or None if
    the kernel cannot compute it. No hook may rewrite logits or weights.
    """
    if not layer.consecutive:
        return None
    modifier = None
    options = {}
    if encoding.hooks & {"distance_bias", "bias"}:
        biases = encoding.key_bias(layer)  # (1|B, H, T)
        if biases is None and "bias" not in encoding.hooks:
            positions = layer.positions
            distances = torch.arange(positions.shape[1], device=positions.device)
            biases = encoding.distance_bias(distances, layer)  # (H, T)
        if biases is None or (
            biases.requires_grad and torch.are_deterministic_algorithms_enabled()
        ):
            return None
        if biases.dim() == 2:
            options["num_stages"] = STAGES_OF_TABLE
        modifier = _bias_modifier(biases.float().contiguous())
    kernel = _compiled(torch.is_grad_enabled())
    return kernel(
        q,
        k,
        v,
        score_mod=modifier,
        block_mask=block_mask(q.shape[2], layer.window, layer.sinks, q.device),
        scale=encoding.logit_scale,
        kernel_options=options,
    )


def _bias_modifier(
    values: Tensor,
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a function that adds a bias to a score, from biases per key, (1|B, H, T),
    or per distance, (H, T).
    """
    if values.dim() == 2:
        # hidden pairs are computed, too, and may have distances beyond the table
        last = values.shape[1] - 1

        def add_by_distance(
            score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor
        ) -> Tensor:
            distance = (i - j).clamp(0, last)
            return score + values[h, distance]

        return add_by_distance
    if len(values) == 1:
        return lambda score, b, h, i, j: score + values[0, h, j]
    return lambda score, b, h, i, j: score + values[b, h, j]


@functools.cache
def _compiled(training: bool) -> Callable[..., Tensor]:
    """Return compiled FlexAttention. Training has one graph for each shape, kind of
    bias and dtype.

    An evaluation has many shapes, and each would take seconds to compile: the first has
    a graph, all others share one.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention, dynamic=False if training else None)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may use a mask that an evaluation has made
def block_mask(
    length: int, window: int | None, sinks: int, device: torch.device
) -> "BlockMask":
    """Return which blocks of queries see which blocks of keys under a window and sinks,
    without a table of pairs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if window is None:
            return i >= j
        return (i >= j) & ((i - j < window) | (j < sinks))

    first = torch.arange(0, length, BLOCK, device=device)  # first token of each block
    gap = first[:, None] - first
    # Whether some pair, and whether every pair, of two blocks is visible. A shorter
    # last block is masked pair by pair.
    any_visible = gap >= 0
    all_visible = (gap > 0) & (first[:, None] + BLOCK <= length)
    if window is not None:
        # the distances i - j of the pairs of two blocks
        nearest = gap - (BLOCK - 1)
        furthest = gap + (BLOCK - 1)
        any_visible &= (nearest < window) | (first < sinks)
        all_visible &= (furthest < window) | (first + BLOCK <= sinks)
    return BlockMask.from_kv_blocks(
        *_seen(any_visible & ~all_visible),
        *_seen(all_visible),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _seen(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries how many blocks of keys it sees, then which."""
    count = blocks.sum(-1).int()
    which = blocks.int().argsort(descending=True).int()
    return count[None, None], which[None, None]
