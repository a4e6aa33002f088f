"""Causal attention in bf16 on CPUs by posbench's C++ kernel (`native.cpp`), if it can be built.

All sources in C++ beside this file become one library, which library.py builds and loads. Without it, tiles of torch's
operations serve.

To the bit, a sequence's outputs and gradients do not depend on the number of threads nor on the other sequences of a
batch, and a query's output not on the tokens after it.
"""

import ctypes
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench import machine
from posbench.kernels.bias import Bias, Counts, Decay, LaidOut, Line, Lines, Slopes, Sticks, Table
from posbench.kernels.library import binary, built

# As in the source: channels that are computed at once; widths are multiples of a block, lengths are filled up to one.
LANES, BLOCK = 16, 32
KINKS, LINES = 32, 48  # between straight lines, and numbers that slopes or intercepts of these take
MARGIN = 128  # keys of the largest block: it reads a table that far beyond its beginning, and a block beyond its end
# The gradient of a bias that sequences share is summed by head and group of sequences. There are at least this many
# sums, if there are enough sequences, so that every thread has work. Results do not depend on the number of threads,
# for neither does the number of sums.
GROUPS = 16


def serves(device: torch.device) -> bool:
    """Whether the library is used on this device for what it supports."""
    return device.type == "cpu" and binary() is not None


def reads(x: Tensor) -> bool:
    """Whether the library can read a tensor: it has memory and is no stand-in of a tracer."""
    return type(x) is Tensor and not torch.compiler.is_compiling() and serves(x.device)


def fits(q: Tensor, *others: Tensor) -> bool:
    """Whether queries (B, H, T, Dq), of any width, are for the library: bf16, on a CPU."""
    return all(x.shape[:3] == q.shape[:3] and x.dtype == torch.bfloat16 for x in (q, *others)) and reads(q)


def takes(q: Tensor, k: Tensor, v: Tensor, bias: Bias | Sticks | Counts | None) -> bool:
    """Whether the kernel computes such attention, with queries, keys and values as for `native_attention`.

    Where no gradient is wanted and there is no AMX, tiles of torch's products are as fast or faster, except for FIRE's
    lines; sticks and counts have no tiles.
    """
    return (
        q.shape[3] == k.shape[3]
        and fits(q, k, v)
        and q.shape[0] * q.shape[1] >= torch.get_num_threads()
        and (bias is None or type(bias) in (Bias, Table, Line, LaidOut, Lines, Decay, Slopes, Sticks, Counts))
        and not (isinstance(bias, Lines) and len(bias.kinks) != KINKS)
        and (torch.is_grad_enabled() or machine.has_amx() or isinstance(bias, Lines | Sticks | Counts))
    )


def native_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Bias | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`tiled_attention` in bf16, of queries that are all tokens, under a bias of a kind that `takes` names.

    Queries, keys and values are filled up to one width, a multiple of 32.
    """
    bias, width = bias or Bias(), v.shape[3]
    q, k, v = _filled_up(q, k, v)
    out: Tensor = _Native.apply(scale, bias, window, q, k, v, sinks, *bias.tensors)  # type: ignore[no-untyped-call]
    return out if out.shape[3] == width else out[..., :width]


def native_banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    near_keys: Tensor,
    near_values: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """`banded_attention`, which see, for what `takes` names."""
    width, near_values = v.shape[3], near_keys.new_zeros(near_keys.shape) if near_values is None else near_values
    q, k, v, *vectors = _filled_up(q, k, v, near_keys, near_values)
    bias = _Vectors((vectors[0], vectors[1]))
    out: Tensor = _Native.apply(scale, bias, window, q, k, v, None, *vectors)  # type: ignore[no-untyped-call]
    return out if out.shape[3] == width else out[..., :width]


def native_running_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, running: Sticks | Counts, window: int | None = None
) -> Tensor:
    """Attention with what is made of running sums over keys, otherwise as `native_attention`."""
    width, given = v.shape[3], [running.vectors] if isinstance(running, Counts) else []
    q, k, v, *vectors = _filled_up(q, k, v, *given)
    bias = _Running(running, tuple(vectors))
    out: Tensor = _Native.apply(scale, bias, window, q, k, v, None, *vectors)  # type: ignore[no-untyped-call]
    return out if out.shape[3] == width else out[..., :width]


def _filled_up(*given: Tensor) -> list[Tensor]:
    """Pad with zeros to one width, a multiple of a block."""
    width = max(x.shape[-1] for x in given)
    width += -width % BLOCK
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in given]


@dataclasses.dataclass(frozen=True)
class _Vectors(Bias):
    """Vectors of the nearest keys and values, each (K, Dh) at the distances K-1 .. 0."""

    tensors: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Running(Bias):
    """Sticks, which add nothing, or counts with their vectors, (P, Dh)."""

    kind: Sticks | Counts
    tensors: tuple[Tensor, ...] = ()


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scale: float,
        bias: Bias,
        window: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        q, k, v = by_channel(q), by_channel(k), by_channel(v)
        batch, heads, length, width = q.shape
        added = _Laid.out(bias, length, by_key=False)
        sizes = Sizes(batch, heads, length, width, min(window or length, length), added.near, scale=scale)
        out = like_by_token(q)
        logs = q.new_empty(batch, heads, length, dtype=torch.float32) if any(ctx.needs_input_grad) else None
        counts = torch.empty_like(logs) if logs is not None and added.kind == _COUNTED else None
        heads_sinks = None if sinks is None else sinks.detach().float().contiguous()
        sizes.run(
            "forward", strided(q), strided(k), strided(v), at(added.struct(counts=counts)), pointer(heads_sinks),
            strided(out), pointer(logs),
        )  # fmt: skip
        ctx.sizes, ctx.bias = sizes, bias
        ctx.save_for_backward(q, k, v, out, logs, heads_sinks, counts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logs, sinks, counts = ctx.saved_tensors
        sizes: Sizes = ctx.sizes
        grad_out = by_channel(grad_out)
        batch, heads, length, width = q.shape
        packed = q.new_empty(batch, length, 3, heads, width)  # as the gradient of one projection of all three lies
        dq, dk, dv = packed.permute(2, 0, 3, 1, 4).unbind()
        added = _Laid.out(ctx.bias, length, by_key=True)
        groups, sums = batch, None
        if any(ctx.needs_input_grad[7:]):
            if not ctx.bias.per_sequence:
                groups = min(batch, -(-GROUPS // heads))
            sums = added.sums(groups, sizes)
        inner = None if sinks is None else torch.empty_like(logs)
        sizes.run(
            "backward", strided(q), strided(k), strided(v), at(added.struct(sums, counts)), strided(out), pointer(logs),
            strided(grad_out), strided(dq), strided(dk), strided(dv), pointer(inner), groups,
        )  # fmt: skip
        of_bias: tuple[Tensor | None, ...] = (None,) * len(ctx.bias.tensors)
        if sums is not None:
            of_bias = added.own(sums if ctx.bias.per_sequence else sums.sum(0), ctx.bias, sizes)
        of_sinks = None
        if sinks is not None:
            sunk = (sinks[:, None] - logs).exp_().mul_(inner)  # by row, what its other logits receive in all
            of_sinks = -sunk.sum(2).sum(0)
            if isinstance(ctx.bias, Decay) and sums is not None:
                of_bias = (of_bias[0] + sunk,)
        return None, None, None, dq, dk, dv, of_sinks, *of_bias


def like_by_token(x: Tensor) -> Tensor:
    """An empty tensor shaped like x (B, H, T, Dh), laid out as (B, T, H, Dh)."""
    batch, heads, length, width = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def by_channel(x: Tensor) -> Tensor:
    """x with contiguous channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclasses.dataclass(frozen=True)
class _Laid:
    """A bias as the kernel reads it: padded to whole blocks."""

    kind: int  # as in the source
    values: Tensor | None = None  # (1|B, H, *) fp32
    first: int = 0  # number of `*` that the kernel counts from
    row: int = 0  # numbers between rows; of lines, before the one that it counts from
    uniform: int = 0  # of lines, sticks and counts, as in the source
    more: int = 0
    vectors: Tensor | None = None  # (2, *, Dh) bf16

    @property
    def near(self) -> int:
        """Nearest keys that have vectors, as filled up."""
        return 0 if self.vectors is None else self.vectors.shape[1]

    @classmethod
    def out(cls, bias: Bias, length: int, by_key: bool) -> "_Laid":
        """Lay a bias out for a pass whose rows are queries (forwards), or keys (backwards, `by_key`)."""
        if isinstance(bias, _Running):
            return cls._running(bias.kind, *bias.tensors)
        if not bias.tensors:
            return cls(_NOTHING)
        if isinstance(bias, _Vectors):  # filled up by what is farther
            vectors = torch.stack([x.detach().bfloat16() for x in bias.tensors])
            return cls(_NEAR, vectors=F.pad(vectors, (0, 0, -vectors.shape[1] % BLOCK, 0)).contiguous())
        if isinstance(bias, Lines):
            return cls._lines(bias, length, by_key)
        values = bias.tensors[0].detach().float()
        values = values if bias.per_sequence else values[None]
        if isinstance(bias, Table):
            return cls(_BY_DISTANCE, *_by_distance(values, by_key))
        more = -length % BLOCK
        if isinstance(bias, LaidOut):
            return cls(_BY_PAIR, F.pad(values, (0, more, 0, more)) if more else values.contiguous(), 0, length + more)
        if isinstance(bias, Slopes):
            both = torch.stack((bias.queries, bias.keys), dim=2).detach().float()
            return cls(_SLOPES, F.pad(both, (0, more)), row=length + more)
        return cls(_DECAY, F.pad(values, (0, more)) if more else values.contiguous())

    @classmethod
    def _running(cls, kind: Sticks | Counts, *tensors: Tensor) -> "_Laid":
        if isinstance(kind, Sticks):
            return cls(_STICK, uniform=int(kind.remainder))
        vectors = tensors[0].detach().bfloat16()
        filled = F.pad(vectors, (0, 0, 0, -len(vectors) % BLOCK))
        return cls(_COUNTED, uniform=len(vectors), vectors=torch.stack((filled, torch.zeros_like(filled))))

    @classmethod
    def _lines(cls, bias: Lines, length: int, by_key: bool) -> "_Laid":
        heads = bias.slopes.shape[1]
        curve, first = _by_distance(bias.curve.detach(), by_key)
        parts = [curve, F.pad(bias.scales.detach(), (0, -length % BLOCK)), bias.kinks]
        lines = (F.pad(x.detach().mT, (0, LINES - KINKS - 1)) for x in (bias.slopes, bias.intercepts))
        values = torch.cat([*(part.expand(heads, -1) for part in parts), *lines], dim=-1).float()
        return cls(_LINES, values[None], first, first, uniform=bias.uniform, more=len(curve) - first)

    def struct(self, sums: Tensor | None = None, counts: Tensor | None = None) -> "_Added":
        """As the kernel takes it, with sums (groups, H, *) that it adds gradients to, and whole counts (B, H, T)."""
        added = _Added(self.kind, pointer(self.values, self.first))
        added.counts = pointer(counts)
        added.row, added.uniform, added.more, added.vectors = self.row, self.uniform, self.more, pointer(self.vectors)
        if self.values is not None:
            assert self.values.dtype == torch.float32
            batch, added.head = self.values.stride()[:2]
            added.batch = batch if len(self.values) > 1 else 0
        if sums is not None:
            added.sums, added.sums_group, added.sums_head = pointer(sums, self.first), *sums.stride()[:2]
        return added

    def sums(self, groups: int, sizes: "Sizes") -> Tensor:
        """Memory for sums: zeros, or unwritten where the kernel writes a number per pair (groups of one sequence)."""
        if self.vectors is not None:
            return torch.zeros(groups, sizes.heads, *self.vectors.shape)
        assert self.values is not None  # something is added
        made = torch.empty if self.kind == _BY_PAIR and groups == sizes.batch else torch.zeros
        return made(groups, *self.values.shape[1:])

    def own(self, sums: Tensor, bias: Bias, sizes: "Sizes") -> tuple[Tensor, ...]:
        """Gradients of the bias's own numbers, without padding, from sums (..., H, *)."""
        length = sizes.length
        if isinstance(bias, _Vectors):
            of_keys, of_values = sums.sum(0)[:, -len(bias.tensors[0]) :]
            return of_keys * sizes.scale, of_values
        if isinstance(bias, _Running):
            return (sums.sum(0)[0, : len(bias.tensors[0])] * sizes.scale,)
        if self.kind == _BY_DISTANCE:
            return (sums[..., MARGIN : MARGIN + length],)
        if self.kind == _LINES:
            parts = [self.row + self.more, length + -length % BLOCK, KINKS, LINES, LINES]
            of_curve, of_scales, _, *of_lines = torch.split(sums, parts, dim=-1)
            of_slopes, of_intercepts = (x[..., : KINKS + 1].mT for x in of_lines)
            return of_slopes, of_intercepts, of_curve.sum(0)[MARGIN : MARGIN + length], of_scales.sum(0)[:length]
        if self.kind == _SLOPES:
            return sums[..., :length].unbind(2)
        return (sums[..., :length, :length] if self.kind == _BY_PAIR else sums[..., :length],)


def _by_distance(values: Tensor, by_key: bool) -> tuple[Tensor, int]:
    """What belongs to distances (..., T), as it is read, and which of its numbers the kernel counts from.

    Rows of queries see it from far to near, and each begins a number earlier.
    """
    length = values.shape[-1]
    values = F.pad(values if by_key else values.flip(-1), (MARGIN, BLOCK + -length % LANES))
    return values, MARGIN + (0 if by_key else length - 1)


# -- the library -------------------------------------------------------------------------------------------------------
# Structures and constants are those of the source.

_NOTHING, _BY_DISTANCE, _BY_PAIR, _LINES, _DECAY, _SLOPES, _NEAR, _STICK, _COUNTED = range(9)


class Sizes(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "width", "window", "near", "threads")),
        ("scratch", ctypes.c_void_p),
        ("scratch_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
    ]

    def run(self, name: str, *arguments: Any) -> None:
        """Call a function of the library, with as much memory for all threads as these sizes ask for."""
        self.threads = torch.get_num_threads()
        self.scratch_stride = getattr(built(), f"scratch_of_{name}")(at(self))
        scratch = torch.empty(self.threads * self.scratch_stride, dtype=torch.uint8)
        self.scratch = scratch.data_ptr()
        getattr(built(), name)(at(self), *arguments)


class Strided(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "time"))]


class _Added(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "row", "uniform", "more")),
        ("vectors", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("sums_group", "sums_head")),
        ("counts", ctypes.c_void_p),
    ]


at = ctypes.byref


def strided(x: Tensor) -> Any:
    """A tensor (B, H, T, Dh), where it lies."""
    return at(Strided(x.data_ptr(), *x.stride()[:3]))


def pointer(x: Tensor | None, first: int = 0) -> ctypes.c_void_p | None:
    """The address of a tensor's number."""
    return None if x is None else ctypes.c_void_p(x.data_ptr() + first * x.element_size())
