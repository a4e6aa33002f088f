"""The change of a query-key product by the reflections in between (PaTH), with a hand-written gradient.

    change_ij = q_i · (H_i H_{i-1} ... H_{j+1}) k_j - q_i·k_j,        H_t = I - beta_t w_t w_tᵀ

Blocks of keys are taken from the right, since what a key meets lies to its right. `turned` is what the blocks behind
the one at hand have changed in each query. With K, W and B = diag(beta) of this block alone,

    change = turned Kᵀ - S M,        turned -= S V,        S = tril((Q + turned) Wᵀ)
    [M | V] = X B [G | W],           G = stril(W Kᵀ),      X = (I + stril(B A))^-1,   A = W Wᵀ

The second line knows no queries: it is computed for all blocks at once. Its gradient is that of a linear system. What
arrives at [M | V], times Xᵀ, is the gradient of the right-hand side B [G | W]; times -[M | V]ᵀ, that of the matrix.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from posbench.kernels.tiles import flat, product, unflat

# Fewer make the products slim; with more, more of what is multiplied is zeros above a diagonal.
KEYS_PER_BLOCK = 32


def change_by_reflections(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, before: int, scale: float = 1.0) -> Tensor:
    """`change` as above times `scale`, (B, H, Tq, Tk), in the dtype of w and beta, which is fp32 or fp64.

    The products of its gradient are in the dtype of q and k, as those of q·k itself. Not so its own: a key that meets
    the same vector again and again would meet the same rounding each time.

    Args:
        q: (B, H, Tq, Dh).
        k, w: (B, H, Tk, Dh); w are unit vectors.
        beta: (B, H, Tk).
        before: keys before the first query's own: query r meets the tokens up to r + before.
    """
    keys = k.shape[2]
    size = min(KEYS_PER_BLOCK, keys)
    if short := -keys % size:  # tokens that reflect nothing fill the last block
        k, w, beta = F.pad(k, (0, 0, 0, short)), F.pad(w, (0, 0, 0, short)), F.pad(beta, (0, short))
    change: Tensor = _Change.apply(q, k, w, beta, before, size, scale)  # type: ignore[no-untyped-call]
    return change[..., :keys]


class _Change(torch.autograd.Function):
    """In here batch and heads are one axis, and what belongs to keys is (blocks B H, size, ...).

    All blocks' products are then one call, and each block's part is contiguous. Products that go to some rows of a
    tensor are made apart and copied: in place torch would take fp32 matrices one by one on CPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, w: Tensor, beta: Tensor, before: int, size: int, scale: float
    ) -> Tensor:
        queries = flat(q).to(w.dtype)
        kb, wb, bb = (_by_block(x, size).to(w.dtype) for x in (k, w, beta[..., None]))
        along, onto_keys = torch.bmm(wb, wb.mT), torch.bmm(wb, kb.mT).tril_(-1)  # A, G
        unit = torch.eye(size, dtype=w.dtype, device=w.device)
        # Reads nothing but what is below the diagonal. From the left it would be the same in twice the time.
        inverse = torch.linalg.solve_triangular(bb * along, unit, upper=False, left=False, unitriangular=True)
        weighted = inverse * bb.mT
        rest = slice(len(queries), None)  # without the first block: to the left of it are no keys to want its V
        m, v = torch.bmm(weighted, onto_keys), torch.bmm(weighted[rest], wb[rest])

        change, total = queries.new_zeros(*queries.shape[:2], k.shape[2]), torch.zeros_like(queries)
        blocks = list(_from_the_right(change, before, size))
        wanted = any(ctx.needs_input_grad)
        met: list[Tensor] = []  # turned, Q + turned and S of every block
        for block in blocks:
            rows, own = block.rows, block.own
            turned = total[:, rows]
            reaching = queries[:, rows] + turned
            s = torch.bmm(reaching, wb[own].mT).tril_(block.diagonal)
            part = product(s, m[own], -scale)
            if not block.is_last:
                part.baddbmm_(turned, kb[own].mT, alpha=scale)
            change[:, rows, block.keys] = part
            if wanted:
                met += turned.to(q.dtype, copy=True), reaching.to(q.dtype), s.to(q.dtype)
            if not block.is_first:
                turned -= torch.bmm(s, v[block.own_in_rest])
        if wanted:
            ctx.blocks, ctx.scale = blocks, scale
            kept = (x.to(q.dtype) for x in (kb, wb, onto_keys, inverse, m, v))
            ctx.save_for_backward(bb, along, *kept, *met)
        return unflat(change, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(above.device.type, enabled=False):
            dq, *others = _gradients(flat(above), ctx.blocks, ctx.scale, *ctx.saved_tensors)
        dk, dw, dbeta = (_by_key(x, above) for x in others)
        return unflat(dq, above), dk, dw, dbeta[..., 0], None, None, None


def _gradients(
    above: Tensor,
    blocks: list["_Block"],
    scale: float,
    bb: Tensor,
    along: Tensor,
    kb: Tensor,
    wb: Tensor,
    onto_keys: Tensor,
    inverse: Tensor,
    m: Tensor,
    v: Tensor,
    *met: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, w and beta, from that of `change` and the saved tensors."""
    above = above.to(kb.dtype)
    dq, dtotal = (above.new_zeros(*above.shape[:2], kb.shape[2], dtype=bb.dtype) for _ in range(2))
    dk, dw, dm, dv = (torch.zeros_like(x) for x in (kb, wb, m, v))
    for block, turned, reaching, s in reversed(list(zip(blocks, met[::3], met[1::3], met[2::3], strict=True))):
        rows, own = block.rows, block.own
        part = above[:, rows, block.keys]
        ds = product(part, m[own].mT, -scale)
        product(s.mT, part, -scale, out=dm[own])
        if not block.is_first:
            dturned = dtotal[:, rows].to(ds.dtype)
            ds.baddbmm_(dturned, v[block.own_in_rest].mT, alpha=-1)
            product(s.mT, dturned, -1.0, out=dv[block.own_in_rest])
        ds.tril_(block.diagonal)
        dreaching = torch.bmm(ds, wb[own])
        torch.bmm(ds.mT, reaching, out=dw[own])
        dq[:, rows] += dreaching
        if not block.is_last:
            dtotal[:, rows] += dreaching.baddbmm_(part, kb[own], alpha=scale)
            product(part.mT, turned, scale, out=dk[own])

    solved, rest = inverse.mT, slice(len(above), None)
    of_keys, of_vectors = torch.bmm(solved, dm), torch.bmm(solved[rest], dv)  # of B G and B W
    of_matrix = torch.bmm(of_keys, m.mT)  # of -stril(B A)
    of_matrix[rest].baddbmm_(of_vectors, v.mT)
    of_matrix.tril_(-1)
    of_keys.tril_(-1)  # as G has nothing else
    dbeta = (of_keys * onto_keys - of_matrix * along).sum(-1, keepdim=True)
    dbeta[rest] += (of_vectors * wb[rest]).sum(-1, keepdim=True)
    of_keys *= bb
    of_matrix *= bb
    dk.baddbmm_(of_keys.mT, wb)
    dw.baddbmm_(of_keys, kb).baddbmm_(of_matrix + of_matrix.mT, wb, alpha=-1)
    dw[rest] += of_vectors * bb[rest]
    return dq.to(kb.dtype), dk, dw.to(bb.dtype), dbeta


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of keys, and the query rows that see one of them."""

    keys: slice
    rows: slice
    own: slice  # its part of what all blocks have
    diagonal: int  # row r of these rows meets the tokens up to r + diagonal of these keys
    is_first: bool  # of all keys
    is_last: bool  # that a query meets

    @property
    def own_in_rest(self) -> slice:
        """The same of what all blocks but the first have."""
        heads = self.own.stop - self.own.start
        return slice(self.own.start - heads, self.own.start)


def _from_the_right(change: Tensor, before: int, size: int) -> Iterator[_Block]:
    heads, rows, keys = change.shape  # (B H, Tq, Tk)
    last = (min(keys, before + rows) - 1) // size
    for number in range(last, -1, -1):
        start = number * size
        first = max(0, start - before)
        yield _Block(
            keys=slice(start, start + size),
            rows=slice(first, None),
            own=slice(number * heads, (number + 1) * heads),
            diagonal=before + first - start,
            is_first=number == 0,
            is_last=number == last,
        )


def _by_block(x: Tensor, size: int) -> Tensor:
    """x (B, H, T, ...) as contiguous (T/size B H, size, ...)."""
    batch, heads, length, *width = x.shape
    return x.reshape(batch, heads, length // size, size, *width).movedim(2, 0).reshape(-1, size, *width)


def _by_key(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_by_block`, with B and H those of `like`."""
    return x.view(-1, *like.shape[:2], *x.shape[1:]).movedim(0, 2).flatten(2, 3)
