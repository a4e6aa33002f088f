"""Causal attention by torch's FlexAttention: biases by data, windows and sinks in one fused kernel on CUDA.

FlexAttention is compiled alone, and what it captures is made outside of it as contiguous fp32: a bias made in the same
compiled region has had wrong gradients. Gradients of what is captured are sums by atomic additions: they are right, and
not the same to the bit twice. `make gpu` compares values and gradients with the definition on a device.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024),
arXiv:2412.05496.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from posbench.kernels.bias import Bias, Decay, Table
from posbench.kernels.fused import fused

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Index = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, query, key to a score

BLOCK = 128  # queries, and keys, of which the mask says at once whether they see each other
MIN_LENGTH = BLOCK  # below it, another kernel of FlexAttention's would be compiled, for single queries
MIN_WIDTH = 16  # channels of a head that it takes
# With each block of keys, what a table holds for its pairs is loaded ahead, too, in fp32. By the compiler's own choice
# that takes 245,760 bytes for bf16 heads of 64 channels, of the 232,448 of an H100 or H200; by two stages 147,456.
STAGES_OF_TABLE = 2


def serves(device: torch.device) -> bool:
    """Whether FlexAttention can be used on this device: its backward pass needs CUDA."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def takes(q: Tensor, v: Tensor, bias: Bias | None, window: int | None = None, sinks: int = 0) -> bool:
    """Whether FlexAttention is used for queries and values (B, H, T, their Dh) under this bias."""
    length = v.shape[2]
    if not serves(v.device) or v.dtype == torch.float64:
        return False
    if length < MIN_LENGTH or min(v.shape[3], q.shape[3]) < MIN_WIDTH:
        return False
    if bias is None:  # fused attention is faster where nothing acts on the logits
        return bool(sinks) or (window is not None and window < length)
    learned = torch.is_grad_enabled() and any(one.requires_grad for one in bias.tensors)
    if learned and torch.are_deterministic_algorithms_enabled():
        return False  # its gradients are sums in no fixed order
    return isinstance(bias, Table | Decay)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Bias | None = None, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v; arguments and result as of `tiled_attention`.

    Args:
        sinks: keys at the beginning that every query sees beside its window.
    """
    options = {"num_stages": STAGES_OF_TABLE} if isinstance(bias, Table) else {}
    mask = block_mask(q.shape[2], window, sinks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _compiled(torch.is_grad_enabled())(
            q, k, v, score_mod=_score_mod(bias, q.shape[2]), block_mask=mask, scale=scale, kernel_options=options
        )
    return out


@functools.cache
def _compiled(training: bool) -> Callable[..., Tensor]:
    """One graph for each shape, kind of bias and dtype of training.

    An evaluation has many shapes, at some seconds of compiling each: one graph for the first, another for all others.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return fused(flex_attention, dynamic=False if training else None)


def _score_mod(bias: Bias | None, length: int) -> Index | None:
    """The score modification of a kind of bias. It runs on hidden pairs, too, so no index may leave a table.

    Nothing captured is indexed twice: of two gradients of one tensor FlexAttention computes none.
    """
    if isinstance(bias, Table):
        values = bias.values.contiguous()

        def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + values[h, (i - j).clamp(0, length - 1)]

        return by_distance
    if isinstance(bias, Decay):
        # Softmax does not see what a whole row shares, so that the query's sum has no gradient.
        sums, of_query = bias.sums.contiguous(), bias.sums.detach().contiguous()

        def decayed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + of_query[b, h, i] - sums[b, h, j]

        return decayed
    return None


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # what an evaluation made first, training may keep
def block_mask(length: int, window: int | None, sinks: int, device: torch.device) -> "BlockMask":
    """Which blocks of queries see which blocks of keys, all or some of them, by arithmetic: no mask (T, T) is made."""
    from torch.nn.attention.flex_attention import BlockMask

    first = torch.arange(0, length, BLOCK, device=device)
    last = first + BLOCK - 1
    nearest, farthest = first[:, None] - last, last[:, None] - first  # distances within a pair of blocks
    whole = (last < length)[:, None] & (last < length)
    some, every = farthest >= 0, (nearest >= 0) & whole
    if window is not None:
        some = some & ((nearest < window) | (first < sinks))
        every = every & ((farthest < window) | (last < sinks))
    made: BlockMask = BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=_causal if window is None else _near(window, sinks),
        seq_lengths=(length, length),
    )
    return made


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of blocks (Q, K), how many of keys each of queries sees, (1, 1, Q), and their numbers, first, (1, 1, Q, K)."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


def _causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def _near(window: int, sinks: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i - j < window) | (j < sinks))

    return near
