"""Schemes with randomised parameters and a one-layer model to put them in, for the
contract and the oracle tests.
"""

from typing import Any

import oracles
import pytest
import torch
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Shape, narrower
from posbench.model.attention import (
    attention,
    block_logits,
    make_layer,
    mask_of,
    prepared,
)

NAMES = encodings.names()
Case = tuple[str, dict[str, Any]]  # a scheme and its options


def declared(name: str, what: str, otherwise: Any) -> Any:
    """Return a scheme's attribute `what` in its oracle, or `otherwise`."""
    return getattr(oracles.of(name), what, otherwise)


def cases() -> list[Case]:
    """Return every scheme with each option set of its oracle, or with its defaults if
    it has no oracle.
    """
    found = []
    for name in NAMES:
        for options in declared(name, "CASES", [{}]):
            found.append((name, options))
    return found


def parameters() -> list[Any]:
    """Return the cases for `parametrize`; all but the first of each scheme are marked
    `slow`.
    """
    marked = []
    before = ""
    for case in cases():
        name, _ = case
        marks = [pytest.mark.slow] if name == before else []
        marked.append(pytest.param(case, marks=marks, id=label(case)))
        before = name
    return marked


def label(case: Case) -> str:
    name, options = case
    words = [name]
    for key, value in options.items():
        shown = "by_shape" if callable(value) else value
        words.append(f"{key}={shown}")
    return "-".join(words)


def completed(name: str, options: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """Return a case's options for a shape, and the defaults of the others."""
    complete = encodings.options_of(name)
    for key, value in options.items():
        if callable(value):
            value = value(shape)
        complete[key] = value
    return complete


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
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                drawn = drawn * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn)
    return encoding


def random(*size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator)


def layer_inputs(
    shape: Shape, length: int, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a layer gives to attention: q, k, v (B, H, T, Dh) and its normalised
    input x (B, T, D).
    """
    heads = (batch, shape.n_heads, length, shape.head_dim)
    q = random(*heads, seed=0)
    k = random(*heads, seed=1)
    v = random(*heads, seed=2)
    x = random(batch, length, shape.d_model, seed=3)
    return q, k, v, x


def positions_of(kind, batch, length, below, offset=3):
    """Return positions. consecutive, offset: (1, T) from 0 or `offset`; gaps, far,
    fractional: (B, T), with gaps.
    """
    consecutive = torch.arange(length)[None]
    if kind == "consecutive":
        return consecutive
    if kind == "offset":
        return consecutive + offset
    if kind == "fractional":
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(batch, length, generator=generator)
        return (below - 1) * drawn.sort(dim=-1).values

    sequences = []
    for seed in range(batch):
        generator = torch.Generator().manual_seed(seed)
        shuffled = torch.randperm(below, generator=generator)
        sequences.append(shuffled[:length])
    return torch.stack(sequences).sort(dim=-1).values


def one_layer(encoding, tokens, positions=None, layer=0, consecutive=False):
    """Put tokens (B, T, token_dim) through embed, fixed projections and a layer's
    attention; return (B, H, T, Dh).
    """
    shape = encoding.shape
    ids = torch.zeros(tokens.shape[:2], dtype=torch.long)
    if positions is None:
        positions = encoding.positions(ids, torch.Generator())
    x = encoding.embed(tokens, positions, ids)

    drawn = random(shape.d_model, 3 * shape.d_model, seed=9)
    weight = drawn * shape.d_model**-0.5
    projected = x @ weight
    by_head = projected.unflatten(-1, (3, shape.n_heads, shape.head_dim))
    q, k, v = by_head.permute(2, 0, 3, 1, 4)  # (B, H, T, Dh)
    consecutive = consecutive and counts_tokens(encoding)
    described = make_layer(encoding, positions, layer, x, consecutive=consecutive)
    return attention(encoding, q, k, v, described)


def layer_attention(
    encoding, q, k, v, x, positions, layer, consecutive=False, last=None, **limits
):
    """Return a layer's attention at positions (1|B, T), by the path that posbench
    chooses; with `last` that of the last rows. `limits` are the layer's window and
    sinks.
    """
    described = make_layer(encoding, positions, layer, x, consecutive)
    limited = described.replace(**limits)
    return attention(encoding, q, k, v, limited, last)


def used_at(encoding, positions, layer=0, x=None):
    """Return the encoding that a layer uses, and the layer that its hooks read."""
    return encoding.at(make_layer(encoding, positions, layer, x))


def rotated_at(encoding, q, k, positions, x=None):
    """Return queries and keys after `rotate` in the first layer."""
    used, layer = used_at(encoding, positions, 0, x)
    return used.rotate(q, k, layer)


def counts_tokens(encoding: Encoding) -> bool:
    """Return whether the scheme's positions are 0 .. T-1, which a model then tells
    attention.
    """
    return "positions" not in encoding.hooks


def by_definition(
    encoding,
    inputs,
    positions,
    layer,
    block=None,
    causal=True,
    window=None,
    sinks=0,
    last=None,
):
    """Return a layer's attention by the pairwise hooks, in blocks of rows: q, k, v, x
    to (B, H, T, Dh), or to the last rows.
    """
    q, k, v, x = inputs
    described = make_layer(encoding, positions, layer, x, causal=causal)
    used, q, k, v, described = prepared(encoding, q, k, v, described)
    if causal:
        window = narrower(window, used.window)
    else:
        window = None
    described = described.replace(window=window, sinks=sinks)

    length = q.shape[2]
    step = block or length
    outputs = []
    for start in range(0, length, step):
        end = min(length, start + step)
        rows = slice(start, end)
        keys = slice(0, end if causal else length)
        part = described.replace(rows=rows, keys=keys)
        is_visible = mask_of(part, q.dtype) == 0
        part = part.replace(visible=is_visible)
        logits = block_logits(used, q[:, :, rows], k[:, :, keys], part)
        output = used.attend(logits, v[:, :, keys], part)
        outputs.append(output)

    whole = described.replace(rows=slice(0, length))
    output = used.map_outputs(torch.cat(outputs, dim=2), whole)
    return output[:, :, -(last or length) :]


def with_gradients(encoding, inputs, compute):
    """Return `compute`'s output for q, k, v, x, and the gradients of all inputs and
    parameters, 0 if there is none.
    """
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    encoding.zero_grad()
    output = compute(*leaves)
    weights = random(*output.shape, seed=4)
    total = (output * weights).sum()
    total.backward()

    results = {"output": output.detach()}
    named = dict(zip("qkvx", leaves, strict=True))
    named.update(encoding.named_parameters())
    for name, leaf in named.items():
        gradient = leaf.grad
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        results[f"gradient of {name}"] = gradient
    return results
