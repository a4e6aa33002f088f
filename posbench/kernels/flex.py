"""Causal attention by torch's FlexAttention: biases by data, windows and sinks in one fused kernel on CUDA.

FlexAttention is compiled alone, and what it captures is made outside of it as contiguous fp32: a bias made in the same
compiled region has had wrong gradients. Gradients of what is captured are sums by atomic additions: they are right, and
not the same to the bit twice. Before a kind of bias is used on a device, at a dtype and width of heads, its results
and, in training, gradients are compared with those of the tiled kernel there; where they differ or nothing can be
compiled, one warning says so, and the tiled kernel serves. Training and evaluation have their own graphs and checks.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels" (2024),
arXiv:2412.05496.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posbench.kernels.bias import Added, Bias, Decay, Dense, LaidOut, Line, Slopes, Table
from posbench.kernels.fused import compiled
from posbench.kernels.tiled import tiled_attention
from posbench.kernels.tiles import kept_bytes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

Index = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # score, batch, head, query, key to a score

BLOCK = 128  # queries, and keys, of which the mask says at once whether they see each other
MIN_LENGTH = BLOCK  # below it, another kernel of FlexAttention's would be compiled, for single queries
MIN_WIDTH = 16  # channels of a head that it takes
# Numbers of a `Dense` bias that is laid out, H x T x T in fp32. Above it, and in training above the bytes that a layer
# may keep, tiles make it as they go.
LARGEST_TABLE = 2**28
# Biases that it is for, and the axes of what they hold: sequences, heads, tokens.
KINDS: dict[type, tuple[str, ...]] = {
    Bias: (),
    Table: ("HT",),
    Line: (),
    Decay: ("BHT",),
    Slopes: ("BHT", "BHT"),
    Dense: ("HT",),
    LaidOut: ("HTT",),
}
# Sequences, heads and tokens in the check of training, and in that of evaluation, whose second shape is computed by
# the graph that then serves all others.
CHECKED = {True: ((2, 2, 200),), False: ((2, 2, 200), (3, 4, 300))}
# What the compiler is told, until the kernels fit the device's shared memory. Of itself it loads two or three blocks of
# keys ahead, as many as fit where nothing is captured.
Options = Mapping[str, int]
LADDER: tuple[Options, ...] = (
    {},
    {"num_stages": 2},
    {"num_stages": 1},
    {"num_stages": 1, "BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_M1": 32, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 32},
)
# With each block of keys, what these hold for its pairs is loaded ahead, too, in fp32. Of the 232,448 bytes of an H100
# or H200, bf16 heads of 64 channels would take 245,760 by the compiler's own choice and 147,456 by two stages, heads of
# 128 channels 262,144 and 196,608. Before torch 2.13 what does not fit is an error, since then nothing is loaded ahead.
LOADED_BY_PAIR = (Table, Dense, LaidOut)
_TOLERANCE = 2e-3  # relative; products are TF32 where a user has switched that on
# The same in bf16 or fp16: rounding is .007 of them in bf16, and .06 of the gradient of slopes, sums over distances.
_TOLERANCE_HALF, _TOLERANCE_SLOPES = 3e-2, 0.15


def serves(device: torch.device) -> bool:
    """Whether FlexAttention can be used on this device: its backward pass needs CUDA."""
    return device.type == "cuda" and not torch.compiler.is_compiling()


def options_for(q: Tensor, v: Tensor, added: Added | None, window: int | None = None, sinks: int = 0) -> Options | None:
    """The options of FlexAttention for queries and values (B, H, T, their Dh) under this bias; None: it is not used."""
    if not serves(v.device) or v.dtype == torch.float64:
        return None
    _, heads, length, width = v.shape
    kind: type = Bias if added is None else type(added)
    if kind not in KINDS or length < MIN_LENGTH or min(width, q.shape[3]) < MIN_WIDTH:
        return None
    if added is None and not sinks and (window is None or window >= length):
        return None  # nothing acts on the logits: fused attention is faster
    learned = isinstance(added, Bias) and torch.is_grad_enabled() and any(one.requires_grad for one in added.tensors)
    if learned and torch.are_deterministic_algorithms_enabled():
        return None  # its gradients are sums in no fixed order
    if isinstance(added, Dense):
        numbers = heads * length**2
        if numbers > LARGEST_TABLE or (learned and 4 * numbers > kept_bytes(v.device)):
            return None
    return checked(v.device, kind, v.dtype, (q.shape[3], width), torch.is_grad_enabled())


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Bias | None = None,
    window: int | None = None,
    sinks: int = 0,
    options: Options = LADDER[0],
) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v; arguments and result as of `tiled_attention`.

    Args:
        sinks: keys at the beginning that every query sees beside its window.
        options: of `options_for`.
    """
    mask = block_mask(q.shape[2], window, sinks, q.device)
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = _compiled(torch.is_grad_enabled())(
            q, k, v, score_mod=_score_mod(bias, q.shape[2]), block_mask=mask, scale=scale, kernel_options=dict(options)
        )
    return out


@functools.cache
def _compiled(training: bool) -> Callable[..., Tensor]:
    """One graph for each shape, kind of bias and dtype of training.

    An evaluation has many shapes, at some seconds of compiling each: one graph for the first, another for all others.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return compiled(flex_attention, dynamic=False if training else None)


# -- biases ------------------------------------------------------------------------------------------------------------


def _score_mod(bias: Bias | None, length: int) -> Index | None:
    """The score modification of a kind of bias. It runs on hidden pairs, too, so no index may leave a table.

    Nothing captured is indexed twice: of two gradients of one tensor FlexAttention computes none.
    """
    if isinstance(bias, Line):
        slopes = bias.slopes.contiguous()

        def falling(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j)

        return falling
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
        if isinstance(bias, Dense):  # what the table is made of is larger than it, and made again in the backward pass
            made: Tensor = checkpoint(bias.laid_out, length, use_reentrant=False, preserve_rng_state=False)
        else:
            made = bias.values
        table = made.contiguous()

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


def ladder(kind: type) -> tuple[Options, ...]:
    """The options to try for a kind of bias, in order."""
    return LADDER[1:] if kind in LOADED_BY_PAIR else LADDER


@functools.cache
def checked(
    device: torch.device, kind: type, dtype: torch.dtype, widths: tuple[int, int], training: bool
) -> Options | None:
    """The first options by which kernels for queries and values of these widths fit the device, and are right.

    Returns:
        None, and one warning, where results, in training gradients too, are not those of the tiled kernel, or nothing
        can be compiled.
    """
    said, in_half = "", _TOLERANCE_SLOPES if kind is Slopes else _TOLERANCE_HALF
    for options in ladder(kind):
        try:
            worst = _difference(device, kind, dtype, widths, options, training)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, of Triton, of a driver: whatever it is, there is another kernel
            said = "does not run: " + str(error).partition("\n")[0]
            if "out of resource" in str(error):
                continue
            break
        if worst < (_TOLERANCE if dtype == torch.float32 else in_half):
            return options
        said = f"differs from the reference by {worst:.1e}, in values{' or gradients' if training else ''}"
        break
    what = "training" if training else "evaluation"
    logger.warning("FlexAttention (%s, %s) on %s %s; slower kernels serve", kind.__name__, what, device, said)
    return None


def _difference(
    device: torch.device, kind: type, dtype: torch.dtype, widths: tuple[int, int], options: Options, training: bool
) -> float:
    """The largest relative difference from the tiled kernel in fp32, of outputs and in training of every gradient."""
    draw = torch.Generator().manual_seed(0)
    of_queries, of_values = widths
    differences: list[Tensor] = []
    for shape in CHECKED[training]:
        sizes = dict(zip("BHT", shape, strict=True))
        drawn = [
            torch.randn(*shape, width, generator=draw).to(dtype)
            for width in (of_values, of_queries, of_queries, of_values)  # of the weights of the sum, q, k and v
        ]
        drawn += [0.1 * torch.randn([sizes[axis] for axis in axes], generator=draw) for axes in KINDS[kind]]
        given = [tensor.to(device) for tensor in drawn]
        found = _results(functools.partial(flex_attention, options=options), given, kind, training)
        expected = _results(tiled_attention, [tensor.float() for tensor in given], kind, training)
        differences += [(x.float() - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]
    return float(torch.stack(differences).max())  # NaN if any of them is


def _results(kernel: Callable[..., Tensor], given: Sequence[Tensor], kind: Any, training: bool) -> list[Tensor]:
    weight, *inputs = (tensor.detach().requires_grad_(training) for tensor in given)
    q, k, v, *learned = inputs
    bias = _line(q) if kind is Line else kind(*([_outer, tuple(learned)] if kind is Dense else learned))
    out = kernel(q, k, v, q.shape[3] ** -0.5, bias, None if learned else 70)
    gradients = torch.autograd.grad(out, inputs, weight, materialize_grads=True) if training else ()
    return [out.detach(), *gradients]


def _line(q: Tensor) -> Line:
    slopes = torch.logspace(-0.3, -2, q.shape[1], device=q.device)
    return Line(-slopes[:, None] * torch.arange(q.shape[2], device=q.device), slopes)


def _outer(distance: Tensor, where: Tensor, values: Tensor) -> Tensor:
    return torch.sin(values[:, where, None] + values[:, distance])
