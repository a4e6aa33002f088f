"""Schemes with randomised parameters and a one-layer model to put them in, for the
contract and the oracle tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Layer, Shape, narrower
from posbench.model.attention import (
    attention,
    logits_by_rows,
    make_layer,
    mask_of,
    prepared,
)

NAMES = encodings.names()


def declared(name: str, what: str, otherwise: Any) -> Any:
    """Return a scheme's attribute `what` in its oracle, or `otherwise`."""
    return getattr(oracles.of(name), what, otherwise)


def cases() -> list[tuple[str, dict[str, Any]]]:
    """Return every scheme with each option set of its oracle, or with its defaults if
    it has no oracle.
    """
    return [(name, case) for name in NAMES for case in declared(name, "CASES", [{}])]


def parameters() -> list[Any]:
    """Return the cases for `parametrize`; all but the first of each scheme are marked
    `slow`.
    """
    slow = [pytest.mark.slow]
    names = ["", *(name for name, _ in cases())]
    marks = [
        slow * (before == case[0]) for before, case in zip(names, cases(), strict=False)
    ]
    return [
        pytest.param(case, marks=marked, id=label(case))
        for case, marked in zip(cases(), marks, strict=True)
    ]


def label(case: tuple[str, dict[str, Any]]) -> str:
    options = [
        f"{key}={'by_shape' if callable(value) else value}"
        for key, value in case[1].items()
    ]
    return "-".join([case[0], *options])


def completed(name: str, options: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a case's options for a shape, and the defaults of the others."""
    given = {
        key: value(shape) if callable(value) else value
        for key, value in options.items()
    }
    return encodings.options_of(name) | given


def untrained(name: str, options: dict[str, Any], shape: Shape) -> Encoding:
    """Return a scheme as it is at the start of a run."""
    return encodings.build(name, shape, completed(name, options, shape))


def build(name: str, options: dict[str, Any], shape: Shape, seed: int = 0) -> Encoding:
    """Return a scheme whose learned parameters are drawn from a normal distribution:
    zeros would hide errors.
    """
    encoding = untrained(name, options, shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return encoding


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def layer_inputs(
    shape: Shape, length: int, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a layer gives to attention: q, k, v (B, H, T, Dh) and its normalised
    input x (B, T, D).
    """
    q, k, v = (
        random(batch, shape.n_heads, length, shape.head_dim, seed=i) for i in range(3)
    )
    return q, k, v, random(batch, length, shape.d_model, seed=3)


def positions_of(
    kind: str, batch: int, length: int, below: int, offset: int = 3
) -> Tensor:
    """Return positions. consecutive, offset: (1, T) from 0 or `offset`; gaps, far,
    fractional: (B, T), with gaps.
    """
    if kind == "fractional":
        return (below - 1) * torch.rand(
            batch, length, generator=torch.Generator().manual_seed(0)
        ).sort(dim=-1).values
    if kind in ("gaps", "far"):
        draws = [
            torch.randperm(below, generator=torch.Generator().manual_seed(b))[:length]
            for b in range(batch)
        ]
        return torch.stack(draws).sort(dim=-1).values
    return torch.arange(length)[None] + (offset if kind == "offset" else 0)


def one_layer(
    encoding: Encoding,
    tokens: Tensor,
    positions: Tensor | None = None,
    layer: int = 0,
    consecutive: bool = False,
) -> Tensor:
    """Put tokens (B, T, token_dim) through embed, fixed projections and a layer's
    attention; return (B, H, T, Dh).
    """
    shape = encoding.shape
    ids = torch.zeros(tokens.shape[:2], dtype=torch.long)
    positions = (
        encoding.positions(ids, torch.Generator()) if positions is None else positions
    )
    x = encoding.embed(tokens, positions, ids)
    weight = random(shape.d_model, 3 * shape.d_model, seed=9) * shape.d_model**-0.5
    qkv = (
        (x @ weight)
        .unflatten(-1, (3, shape.n_heads, shape.head_dim))
        .permute(2, 0, 3, 1, 4)
    )
    known = consecutive and counts_tokens(encoding)
    return attention(
        encoding, *qkv, make_layer(encoding, positions, layer, x, consecutive=known)
    )


def layer_attention(
    encoding: Encoding,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    positions: Tensor,
    layer: int,
    consecutive: bool = False,
    last: int | None = None,
    **limits: Any,
) -> Tensor:
    """Return a layer's attention at positions (1|B, T), by the path that posbench
    chooses. `limits` are the layer's window and sinks.
    """
    described = make_layer(encoding, positions, layer, x, consecutive)
    return attention(encoding, q, k, v, described.replace(**limits), last)


def used_at(
    encoding: Encoding, positions: Tensor, layer: int = 0, x: Tensor | None = None
) -> tuple[Encoding, Layer]:
    """Return the encoding that a layer uses, and the layer that its hooks read."""
    return encoding.at(make_layer(encoding, positions, layer, x))


def rotated_at(
    encoding: Encoding, q: Tensor, k: Tensor, positions: Tensor, x: Tensor | None = None
) -> Any:
    """Return queries and keys after `rotate` in the first layer."""
    used, layer = used_at(encoding, positions, 0, x)
    return used.rotate(q, k, layer)


def counts_tokens(encoding: Encoding) -> bool:
    """Return whether the scheme's positions are 0 .. T-1, which a model then tells
    attention.
    """
    return "positions" not in encoding.hooks


def by_definition(
    encoding: Encoding,
    inputs: Sequence[Any],
    positions: Tensor,
    layer: int,
    block: int | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: int = 0,
) -> Tensor:
    """Return a layer's attention by the pairwise hooks, in blocks of rows: q, k, v, x
    to (B, H, T, Dh).
    """
    q, k, v, x = inputs
    described = make_layer(encoding, positions, layer, x, causal=causal)
    used, q, k, v, described = prepared(encoding, q, k, v, described)
    length = q.shape[2]
    window = narrower(window, used.window) if causal else None
    out = []
    for start in range(0, length, block or length):
        rows = slice(start, min(length, start + (block or length)))
        seen = slice(0, rows.stop if causal else length)
        part = described.replace(rows=rows, keys=seen, window=window, sinks=sinks)
        part = part.replace(visible=mask_of(part, q.dtype) == 0)
        keys = k[:, :, seen]
        logits = logits_by_rows(used, q[:, :, rows], keys, part)
        out.append(used.attend(logits, v[:, :, seen], part))
    return used.map_outputs(
        torch.cat(out, dim=2), described.replace(rows=slice(0, length))
    )


def with_gradients(
    encoding: Encoding, inputs: Sequence[Tensor], compute: Callable[..., Tensor]
) -> dict[str, Tensor]:
    """Return `compute`'s output for q, k, v, x, and the gradients of all inputs and
    parameters, 0 if there is none.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = compute(*leaves)
    encoding.zero_grad()
    (out * random(*out.shape, seed=4)).sum().backward()
    named = dict(zip("qkvx", leaves, strict=True)) | dict(encoding.named_parameters())
    none = {key: torch.zeros_like(leaf) for key, leaf in named.items()}
    gradients = {
        f"gradient of {key}": none[key] if leaf.grad is None else leaf.grad
        for key, leaf in named.items()
    }
    return {"output": out.detach(), **gradients}
