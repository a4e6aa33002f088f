"""Causal attention by tiles of scores, forward and backward written out in plain torch operations.

On most CPUs torch's fused kernel reaches about a third of what bf16 products do, and a learned bias sends it down a
path that stores every score. Tiles (see `tiles`) stay in cache, and take up biases as they go, so that neither a bias
nor its gradient ever exists at (B, H, T, T). On CPUs with AMX, which that kernel uses, it computes the outputs of tiles
whose probabilities nobody keeps.

Products run in the dtype of q; bias, logits and softmax in fp32 (fp64 for fp64 inputs). Probabilities are kept for the
backward pass in the dtype of q, or computed again if they are many; without gradients nothing is kept, so that memory
grows with heads x block x length.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import machine
from posbench.kernels.bias import Bias
from posbench.kernels.fused import fusible
from posbench.kernels.tiles import Cut, KeyGradient, Tile, exact, flat, product, softmax_backward, unflat


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: "Bias | None" = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention softmax(scale q·k + bias) v.

    Args:
        q, k: queries (B, H, Tq, Dq) and keys (B, H, Tk, Dq), after any rotation, of one dtype. The queries are the last
            ones of Tk tokens; only where they are all of them may `bias` count tokens.
        v: values (B, H, Tk, Dh), of the same dtype.
        scale: what q·k is multiplied by.
        bias: what `kernels.bias` offers; None = no bias.
        window: keys a query may see, itself included; None = all before it.

    Returns:
        (B, H, Tq, Dh) in the same dtype.
    """
    bias = bias or Bias()
    inputs = (q, k, v, *bias.tensors)
    train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    cut = Cut(q.detach(), window, before=k.shape[2] - q.shape[2])
    keep = train and cut.is_kept()
    fused = not keep and q.shape[-1] == v.shape[-1] and fused_is_fast(q)
    call = _Call(cut, bias, scale, keep, fused)
    out: Tensor = _Tiled.apply(call, *inputs)  # type: ignore[no-untyped-call]
    return out


def fused_is_fast(q: Tensor) -> bool:
    """Whether torch's fused kernel computes outputs, if not gradients, faster than tiles: in bf16 on CPUs with AMX."""
    return q.dtype == torch.bfloat16 and q.device.type == "cpu" and machine.has_amx()


# -- the kernel --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    cut: Cut
    bias: Bias
    scale: float
    keep: bool  # hold the probabilities for the backward pass
    fused: bool  # by torch's fused kernel, which tells no probabilities

    def shared(self, tile: Tile) -> Tensor | None:
        """Bias and mask of a tile if all sequences share them."""
        return None if self.bias.per_sequence else self._added(tile, slice(None))

    def probabilities(self, q: Tensor, k: Tensor, tile: Tile, batch: slice, shared: Tensor | None) -> Tensor:
        """Softmax of a tile's logits, from its queries and its keys: (sequences heads, Tq, Tk), in q's dtype."""
        added = self._added(tile, batch) if shared is None else shared
        return _softmax(tile.by_head(product(q, k.mT)), added, self.scale).flatten(0, 1)

    def outputs(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, batch: slice, shared: Tensor | None) -> Tensor:
        """Outputs of a tile's queries by the fused kernel: (sequences heads, Tq, Dh)."""
        q, k, v = (tile.by_head(x) for x in (q, k, v))
        added = self._added(tile, batch) if shared is None else shared
        added = added.expand(*q.shape[:2], *tile.mask.shape)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, scale=self.scale).flatten(0, 1)

    def _added(self, tile: Tile, batch: slice) -> Tensor:
        bias = self.bias.of(tile, batch)
        return tile.mask if bias is None else (bias + tile.mask).contiguous()  # many sequences are added to it


@fusible(dynamic=True)
def _softmax(scores: Tensor, added: Tensor, scale: float) -> Tensor:
    """Probabilities (sequences, heads, Tq, Tk) in the dtype of the scores, from sums in the dtype of `added`."""
    return torch.softmax(torch.add(added, scores, alpha=scale), -1).to(scores.dtype)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        q, k, v = flat(q), flat(k), flat(v)
        out = v.new_empty(*q.shape[:2], v.shape[2])
        kept: list[Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            # What the last block frees, the largest, serves all others; growing, each would take new memory.
            for tile in call.cut.tiles(last_first=not call.keep):
                shared = call.shared(tile)
                for batch in tile.batches:
                    part = tile.part(batch)
                    rows, keys, values = q[part, tile.queries], k[part, tile.keys], v[part, tile.keys]
                    if call.fused:
                        out[part, tile.queries] = call.outputs(rows, keys, values, tile, batch, shared)
                        continue
                    probabilities = call.probabilities(rows, keys, tile, batch, shared)
                    product(probabilities, values, out=out[part, tile.queries])
                    if call.keep:
                        kept.append(probabilities)
        ctx.call = call
        ctx.save_for_backward(q, k, v, *kept)
        return unflat(out, call.cut.like)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, *kept = ctx.saved_tensors
        grad_out = flat(grad_out)
        blocks = len(call.cut.blocks())
        dq, dk, dv = torch.empty_like(q), KeyGradient(k, blocks), KeyGradient(v, blocks)
        bias_gradient = _BiasGradient(call.bias, wanted=any(ctx.needs_input_grad[4:]))
        remaining = iter(kept)
        with torch.autocast(q.device.type, enabled=False):
            for tile in call.cut.tiles():
                shared = None if call.keep else call.shared(tile)
                for batch in tile.batches:
                    part = tile.part(batch)
                    rows, above, keys = q[part, tile.queries], grad_out[part, tile.queries], k[part, tile.keys]
                    if call.keep:
                        probabilities = next(remaining)
                    else:
                        probabilities = call.probabilities(rows, keys, tile, batch, shared)
                    grad = softmax_backward(product(above, v[part, tile.keys].mT), probabilities)
                    product(grad, keys, call.scale, out=dq[part, tile.queries])
                    dk.add(part, tile.keys, grad.mT, rows, call.scale)
                    dv.add(part, tile.keys, probabilities.mT, above)
                    bias_gradient.add(tile, batch, grad)
                bias_gradient.close(tile)
        of_qkv = (unflat(x, call.cut.like) for x in (dq, dk.result(), dv.result()))
        return None, *of_qkv, *bias_gradient.sums


class _BiasGradient:
    """Sums a bias's gradients; where the sequences share the bias, over the sequences first."""

    def __init__(self, bias: Bias, wanted: bool) -> None:
        self.bias = bias
        self.wanted = wanted
        self.sums = [torch.zeros_like(tensor) for tensor in bias.tensors]
        self.total: Tensor | None = None  # of the tile, over the sequences so far

    def add(self, tile: Tile, batch: slice, grad: Tensor) -> None:
        if not self.wanted:
            return
        grad = tile.by_head(grad)
        if self.bias.per_sequence:
            self.bias.pull(self.sums, tile, batch, grad)
        else:
            if self.total is None:
                self.total, grad = grad[0].to(exact(grad), copy=True), grad[1:]
            for sequence in grad:  # faster on CPUs than one sum that widens the dtype
                self.total += sequence

    def close(self, tile: Tile) -> None:
        if self.total is not None:
            self.bias.pull(self.sums, tile, slice(None), self.total)
        self.total = None
