"""Attention by the definition: fp32, row blocks or one block, no cleverness. Every fast path is tested against it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Rows, check_length, fitting, part_of, rotated_by
from posbench.errors import UserError


def attention_logits(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    x: Tensor | None = None,
    layer: int = 0,
    positions: Tensor | None = None,
    causal: bool = True,
    last: int | None = None,
) -> Tensor:
    """Logits of one attention layer under `encoding`, before softmax.

    Args:
        encoding: of the whole model; `layer` says where in it.
        q: raw (un-rotated) queries (B, H, T, Dh).
        k: raw keys (B, Hkv, T, Dh); each of their heads serves a group of queries' heads.
        x: the layer's normalised input (B, T, D), for encodings that look at it. An encoding with `embed` needs it,
            too: q, k and v carry what `embed` added only if they were computed from such an x.
        layer: which layer's parameters to use, from 0. Pass it in every layer: nothing tells if it is left out.
        positions: (T,), (1, T) or (B, T); default 0 .. T-1, if the encoding does not choose positions by itself.
        causal: hide keys after the query.
        last: only the last so many query rows; None = all T.

    Returns:
        (B, H, last or T, T) fp32: scaled, biased, -inf where masked.

    Raises:
        UserError: a shape or the layer does not fit the encoding, the encoding needs `x` or `positions` and they are
            None, or the input is longer than the encoding is defined for.
    """
    check_inputs(encoding, q, k, k, x, layer, positions)
    with torch.autocast(q.device.type, enabled=False):
        q, k = q.float(), k.float()
        blocks = rows_of(encoding, q, k, k, _float(x), by_sequence(positions, q), layer, causal=causal, last=last)
        return logits_of(encoding.at(layer)[0], next(iter(blocks)))


def attention_output(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None = None,
    layer: int = 0,
    positions: Tensor | None = None,
    causal: bool = True,
    last: int | None = None,
) -> Tensor:
    """Output of one attention layer: (B, H, last or T, Dh) fp32.

    Arguments and errors are those of `attention_logits`; `v` are raw values, of the shape of `k`.
    """
    check_inputs(encoding, q, k, v, x, layer, positions)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, x, positions = q.float(), k.float(), v.float(), _float(x), by_sequence(positions, q)
        rows = next(iter(rows_of(encoding, q, k, v, x, positions, layer, causal=causal, last=last)))
        encoding, layer = encoding.at(layer)
        out = encoding.attend(logits_of(encoding, rows), rows)
        return encoding.map_outputs(out, None if x is None else x[:, rows.queries], rows.positions, layer)


def check_inputs(
    encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, layer: int, positions: Tensor | None
) -> None:
    """Raise UserError for inputs that would raise a raw error or leave the encoding out."""
    shape, name = encoding.shape, encoding.name
    if q.dim() != 4 or q.shape[1] != shape.n_heads or q.shape[3] != shape.head_dim:
        hint = ", so q.transpose(1, 2)" if q.dim() == 4 and q.shape[2:] == (shape.n_heads, shape.head_dim) else ""
        raise UserError(
            f"q is {tuple(q.shape)}: expected (B, H, T, Dh), here (B, {shape.n_heads}, T, {shape.head_dim}){hint}"
        )
    batch, heads, length, _ = q.shape
    for what, given in (("k", k), ("v", v)):
        fits = given.dim() == 4 and (given.shape[0], given.shape[2]) == (batch, length) and given.shape[1] > 0
        if not fits or given.shape[3] != q.shape[3] or heads % given.shape[1]:
            raise UserError(
                f"{what} is {tuple(given.shape)}: expected that of q, {tuple(q.shape)}, or with fewer heads"
            )
    if not 0 <= layer < shape.n_layers:
        raise UserError(f"layer is {layer}: expected 0 to {shape.n_layers - 1} for this '{name}'")
    if x is not None and x.shape != (batch, length, shape.d_model):
        raise UserError(f"x is {tuple(x.shape)}: expected (B, T, D), here {(batch, length, shape.d_model)}")
    if positions is not None and positions.shape not in ((length,), (1, length), (batch, length)):
        raise UserError(f"positions is {tuple(positions.shape)}: expected {(length,)} or {(batch, length)}")
    check_length(encoding, length)  # more to the point than what is still missing
    if x is None and "embed" in encoding.hooks:
        raise UserError(
            f"'{name}' acts on the model's input: compute q, k, v from encoding.embed(embeddings, positions, ids) and "
            "pass the layer's input as x"
        )
    if positions is None and "positions" in encoding.hooks:
        raise UserError(f"'{name}' chooses positions by itself: pass positions=encoding.positions(ids, None)")


def rows_of(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    positions: Tensor,
    layer: int,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
    block: int | None = None,
    last: int | None = None,
) -> Iterator[Rows]:
    """Cut the whole (raw q, k, v) into blocks of query rows, each with just the keys it may see.

    Pairwise hooks are then asked of `encoding.at(layer)`.

    Args:
        positions: (1|B, T).
        window: keys a query may see, itself included (causal only).
        sinks: keys at the beginning that every query sees beside its window.
        block: query rows per block; default all.
        last: only the last so many query rows; default all.
    """
    check_length(encoding, q.shape[2])
    encoding, layer = encoding.at(layer)
    window = narrower(window, encoding.window) if causal else None
    k, v = grouped(k, q), encoding.map_values(grouped(v, q), x, positions, layer)
    state = encoding.prepare(q, k, x, positions, layer)
    q, k = rotated_by(encoding, q, k, x, positions, layer)
    length = q.shape[2]
    step = block or length
    index = torch.arange(length, device=q.device)
    for start in range(length - (last or length), length, step):
        stop = min(length, start + step)
        first = max(0, start - window + 1) if window else 0
        keys: slice | Tensor = slice(first, stop if causal else length)
        if sinks and first > sinks:
            # What sums over keys has to see those between the sinks and the window, too, though they are hidden.
            sums = encoding.hooks & {"scores", "attend"}
            keys = slice(0, stop) if sums else torch.cat((index[:sinks], index[first:stop]))
        elif sinks:
            keys = slice(0, stop)
        gap = index[start:stop, None] - index[None, keys]
        visible = torch.ones_like(gap, dtype=torch.bool)
        distance = positions[:, start:stop, None] - positions[:, None, keys]
        if causal:
            visible = gap >= 0
            distance = distance.clamp(min=0)
        if window:
            visible = visible & ((gap < window) | (index[keys] < sinks))
        yield Rows(
            q=part_of(q, slice(start, stop)),
            k=part_of(k, keys),
            v=part_of(v, keys),
            positions=positions[:, start:stop],
            distance=distance,
            visible=visible,
            queries=slice(start, stop),
            keys=keys,
            layer=layer,
            state=state,
        )


def logits_of(encoding: Encoding, rows: Rows) -> Tensor:
    """Masked logits (B, H, Tq, Tk) of a block of rows under a layer's encoding, fp32 from the scale onwards."""
    logits = (rows.q @ rows.k.mT).float() * encoding.logit_scale
    for bias in biases_of(encoding, rows):
        logits = logits + bias
    # Chosen, not added, for what is hidden may be no number: XPos' logits of keys after the query are not, far out.
    return torch.where(rows.visible, encoding.scores(logits, rows), -math.inf)


def biases_of(encoding: Encoding, rows: Rows) -> list[Tensor]:
    """The additions to the scaled logits of a block of rows, each broadcastable to (B, H, Tq, Tk), fp32."""
    by_distance, bias = encoding.distance_bias(rows.distance, rows.layer), encoding.bias(rows)
    found = []
    if by_distance is not None:
        fitting(encoding, "distance_bias", by_distance, (encoding.shape.n_heads, *rows.distance.shape), "(H, *S)")
        found.append(by_distance.movedim(0, 1))  # (H, 1|B, Tq, Tk) -> (1|B, H, Tq, Tk)
    return found if bias is None else [*found, bias]


def narrower(first: int | None, second: int | None) -> int | None:
    """The smaller of two windows; None is as wide as can be."""
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def grouped(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, Hkv, T, Dh) with as many heads as the queries, each shared by a group of them."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def by_sequence(positions: Tensor | None, q: Tensor) -> Tensor:
    """Positions as (1|B, T); None = 0 .. T-1, of as many tokens as there are queries."""
    if positions is None:
        positions = torch.arange(q.shape[2], device=q.device)
    return positions if positions.dim() == 2 else positions[None]


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()
