"""Causal attention by torch's FlexAttention: biases by data, windows and sinks in one fused kernel on CUDA.

FlexAttention is compiled alone, and what it captures is made outside of it as contiguous fp32: a bias made in the same
compiled region has had wrong gradients. Gradients of what is captured are sums by atomic additions: they are right, and
not the same to the bit twice. Before a kind of bias is used on a device, values and gradients are compared with the
tiled kernel there; where they differ or nothing can be compiled, one warning says so, and the tiled kernel serves.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024),
arXiv:2412.05496.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from posbench.kernels.bias import Added, Bias, Decay, Dense, LaidOut, Slopes, Table
from posbench.kernels.tiled import tiled_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

Index = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, query, key to a score

BLOCK = 128  # queries, and keys, of which the mask says at once whether they see each other
MIN_LENGTH = BLOCK  # below it, another kernel of FlexAttention's would be compiled, for single queries
MIN_WIDTH = 16  # channels of a head that it takes
LARGEST_TABLE = 2**28  # numbers of a `Dense` bias that is laid out, H x T x T; above it, tiles make it as they go
# Biases that it is for, and sizes of what they hold in the check: two sequences and heads, 200 tokens.
KINDS: dict[type, tuple[tuple[int, ...], ...]] = {
    Bias: (),
    Table: ((2, 200),),
    Decay: ((2, 2, 200),),
    Slopes: ((2, 2, 200), (2, 2, 200)),
    Dense: ((2, 200),),
    LaidOut: ((2, 200, 200),),
}
_TOLERANCE = 2e-3  # relative; the products of the check are fp32, or TF32 where a user has switched that on


def serves(device: torch.device) -> bool:
    """Whether FlexAttention may be used there: forwards and backwards it is for CUDA only."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def takes(v: Tensor, added: Added | None, window: int | None = None, sinks: int = 0) -> bool:
    """Whether a layer with values such as these (B, H, T, Dh), under this bias and window, is for FlexAttention."""
    if not serves(v.device) or v.dtype == torch.float64:
        return False
    _, heads, length, width = v.shape
    kind: type = Bias if added is None else type(added)
    if kind not in KINDS or length < MIN_LENGTH or width < MIN_WIDTH:
        return False
    if added is None and not sinks and (window is None or window >= length):
        return False  # nothing acts on the logits: fused attention is faster
    if isinstance(added, Dense) and heads * length**2 > LARGEST_TABLE:
        return False
    return is_right(v.device, kind)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Bias | None = None, window: int | None = None, sinks: int = 0
) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v; arguments and result as of `tiled_attention`.

    Args:
        sinks: keys at the beginning that every query sees beside its window.
    """
    mask = block_mask(q.shape[2], window, sinks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _compiled()(q, k, v, score_mod=_score_mod(bias, q.shape[2]), block_mask=mask, scale=scale)
    return out


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    """One graph for each length, kind of bias and dtype, more of them than torch compiles unasked."""
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, dynamic=False)


# -- biases ------------------------------------------------------------------------------------------------------------


def _score_mod(bias: Bias | None, length: int) -> Index | None:
    """What a kind of bias does to a score. It is asked about hidden pairs, too, so that no index may leave a table.

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
    if isinstance(bias, Slopes):
        of_queries, of_keys = bias.queries.contiguous(), bias.keys.contiguous()

        def sloped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - (i - j) * (of_queries[b, h, i] + of_keys[b, h, j])

        return sloped
    if isinstance(bias, Dense | LaidOut):
        table = (bias.laid_out(length) if isinstance(bias, Dense) else bias.values).contiguous()

        def laid_out(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + table[h, i, j]

        return laid_out
    return None


# -- masks -------------------------------------------------------------------------------------------------------------


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


# -- the check ---------------------------------------------------------------------------------------------------------


@functools.cache
def is_right(device: torch.device, kind: type) -> bool:
    """Whether values and all gradients are those of the tiled kernel on this device; said once where they are not."""
    try:
        worst = _difference(device, kind)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of the compiler, of Triton, of a driver: whatever it is, there is another kernel
        said = str(error).partition("\n")[0]
        logger.warning("FlexAttention (%s) does not run on %s: %s; slower kernels serve", kind.__name__, device, said)
        return False
    if not worst < _TOLERANCE:
        told = (
            "FlexAttention (%s) on %s differs from the reference by %.1e, in values or gradients; slower kernels serve"
        )
        logger.warning(told, kind.__name__, device, worst)
    return worst < _TOLERANCE


def _difference(device: torch.device, kind: type) -> float:
    """The largest relative difference from the tiled kernel, of the output and of every gradient."""
    draw = torch.Generator().manual_seed(0)
    heads = (2, 2, 200, MIN_WIDTH)
    with torch.inference_mode(False), torch.enable_grad():  # also where the first to ask is an evaluation
        drawn = [torch.randn(heads, generator=draw) for _ in range(4)]
        drawn += [0.1 * torch.randn(size, generator=draw) for size in KINDS[kind]]
        weight, *inputs = (tensor.to(device).requires_grad_() for tensor in drawn)
        found, expected = (
            _with_gradients(kernel, inputs, kind, weight) for kernel in (flex_attention, tiled_attention)
        )
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


def _with_gradients(kernel: Callable[..., Tensor], inputs: Sequence[Tensor], kind: Any, weight: Tensor) -> list[Tensor]:
    q, k, v, *learned = inputs
    given = [_outer, tuple(learned)] if kind is Dense else learned
    out = kernel(q, k, v, 0.25, kind(*given), None if learned else 70)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight, materialize_grads=True)]


def _outer(distance: Tensor, where: Tensor, values: Tensor) -> Tensor:
    return torch.sin(values[:, where, None] + values[:, distance])
