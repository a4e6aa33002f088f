"""The effect of an encoding alone: its code of each position, and its contribution to a logit.

An encoding's *code* of position i is the vector that it adds to the input. If it acts in attention, the code is the
matrix that turns q and k, the bias of each head at distance i, or the change of the logit of two fixed tokens i apart.
Only public functions are used, so a new encoding needs no code here.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from posbench import encodings
from posbench.encodings.base import Encoding, Shape
from posbench.model.attention.reference import attention_logits, attention_output

CONTENTS = 4  # random tokens per measurement
# First tokens, left out for encodings that read neighbours: the padding before them is no position.
MARGIN = 8


def build(
    name: str, shape: Shape, length: int = 1, draw: bool = True, options: Mapping[str, Any] | None = None
) -> Encoding:
    """Build an encoding, always the same: raw codes (scale 1), and its learned tables drawn from N(0,1).

    Args:
        length: positions that it must cover; if needed, it is built for a longer training length.
        draw: whether to draw tables; a table of zeros would look like no encoding.
        options: of its constructor.

    Raises:
        UserError: an unknown name or option, or a shape that the encoding refuses.
    """
    options = ({"scale": 1.0} if "scale" in encodings.options_of(name) else {}) | dict(options or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoding = encodings.build(name, shape, options)
        if encoding.max_length is not None and encoding.max_length < length:
            encoding = encodings.build(name, dataclasses.replace(shape, train_length=length), options)
        if draw:
            _draw_tables(encoding)
    return encoding


def _draw_tables(encoding: Encoding) -> None:
    """Draw learned position tables from N(0,1).

    These are called `table`, or are the encoding's own parameters with rows. Maps that read the contents (in `prepare`,
    or networks in submodules) keep their initial values, which are random already.
    """
    for name, parameter in encoding.named_parameters(recurse=False):
        if parameter.dim() > 1 and (name == "table" or "prepare" not in encoding.hooks):
            parameter.normal_()


INPUT = frozenset({"positions", "token_dim", "embed"})


def first_layer(encoding: Encoding) -> Encoding:
    """The encoding of the first layer, which is the one measured."""
    return encoding.at(0)[0]


def hooks_of(encoding: Encoding) -> frozenset[str]:
    """The hooks that act at the input and in the first layer."""
    return (encoding.hooks & INPUT) | (first_layer(encoding).hooks - INPUT)


class _Double(TorchFunctionMode):
    """Gives fp64 wherever an encoding asks for fp32 (`.float()`, dtype=...), also to the tensors it creates."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        return func(*map(_wider, args), **{key: _wider(value) for key, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return torch.complex128 if value is torch.complex64 else value


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    """Within it, encodings are built and run in fp64 by one thread, with separate random numbers.

    These shapes are small: several threads gain nothing, and beside a sweep they take twenty times as long.
    """
    default, threads = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), _Double():
            yield
    finally:
        torch.set_default_dtype(default)
        torch.set_num_threads(threads)


def positions_of(encoding: Encoding, length: int) -> Tensor:
    """The encoding's positions (1, T) for an input of this length."""
    ids = torch.zeros(1, length, dtype=torch.long)
    return encoding.positions(ids, torch.Generator().manual_seed(0))


def input_code(encoding: Encoding, positions: Tensor) -> Tensor:
    """The code added to or concatenated with the token embeddings: (1, T) to (T, D)."""
    tokens = torch.zeros(1, positions.shape[-1], encoding.token_dim())
    return encoding.embed(tokens, positions, torch.zeros_like(positions, dtype=torch.long))[0]


def turn_code(encoding: Encoding, positions: Tensor) -> Tensor:
    """The basis vectors after `rotate`, as q and as k of the first head: (1, T) to (T, anything)."""
    length, shape = positions.shape[-1], encoding.shape
    basis = torch.eye(shape.head_dim)[:, None, None].expand(-1, shape.n_heads, length, -1)
    x = fixed_tokens(1, shape.d_model).expand(shape.head_dim, length, -1)
    used, layer = encoding.at(0)
    q, k = used.rotate(basis, basis, x, positions, layer)
    return torch.cat([q, k], dim=-1)[:, 0].transpose(0, 1).flatten(1)


def fixed_tokens(count: int, width: int) -> Tensor:
    """Random tokens (count, 1, width), the same at every call."""
    return torch.randn(count, 1, width, generator=torch.Generator().manual_seed(1))


def contribution(encoding: Encoding, positions: Tensor) -> Tensor:
    """What attention gets from position alone, all tokens being alike, from the margin on: (1, T) to
    (contents, H, T - `MARGIN`, T - `MARGIN`), query by key."""
    return _contribution(encoding, positions)[..., MARGIN:, MARGIN:]


def _contribution(encoding: Encoding, positions: Tensor, last: int | None = None) -> Tensor:
    """The margin included: (1, T) to (contents, H, last or T, T)."""
    length, shape = positions.shape[-1], encoding.shape
    q, k = (t.expand(-1, length, -1)[:, None] for t in fixed_tokens(2 * CONTENTS, shape.head_dim).chunk(2))
    q, k = (t.expand(-1, shape.n_heads, -1, -1) for t in (q, k))
    x = fixed_tokens(CONTENTS, shape.d_model).expand(-1, length, -1)
    logits = pair_scores(encoding, q, k, x, positions, last)
    return logits - (q[..., -(last or length) :, :] @ k.mT) * first_layer(encoding).logit_scale


def pair_scores(
    encoding: Encoding, q: Tensor, k: Tensor, x: Tensor, positions: Tensor, last: int | None = None
) -> Tensor:
    """Logits (B, H, last or T, T); for an encoding with a normaliser of its own, the logarithm of its weights."""
    logits = attention_logits(encoding, q, k, x, positions=positions, last=last)
    if "attend" not in hooks_of(encoding):
        return logits
    weights = arriving(encoding, q, k, x, positions, last)
    shares = weights / weights.sum(-1, keepdim=True)  # with a sink, they sum to less than 1
    if torch.allclose(shares, logits.softmax(-1), atol=1e-6):
        return logits
    return weights.clamp(min=torch.finfo(weights.dtype).tiny).log()


def arriving(encoding: Encoding, q: Tensor, k: Tensor, x: Tensor, positions: Tensor, last: int | None = None) -> Tensor:
    """The weight of each value at each query (B, H, last or T, T): identity matrices for values, as wide as heads
    are at a time."""
    if "attend" not in hooks_of(encoding):
        return attention_logits(encoding, q, k, x, positions=positions, last=last).softmax(-1)
    length, width = q.shape[-2:]
    nothing = attention_output(encoding, q, k, torch.zeros_like(q), x, positions=positions, last=last)
    columns = []
    for start in range(0, length, width):
        v = torch.eye(length, start + width)[:, start:].expand_as(q)
        columns.append(attention_output(encoding, q, k, v, x, positions=positions, last=last) - nothing)
    return torch.cat(columns, dim=-1)[..., :length]


def code(encoding: Encoding, positions: Tensor) -> Tensor:
    """The encoding's code of positions, or of distances if it acts on pairs: (1, T) to (T, anything)."""
    parts = [torch.zeros(positions.shape[-1], 1)]
    if "embed" in hooks_of(encoding):
        parts.append(input_code(encoding, positions))
    if "rotate" in hooks_of(encoding):
        parts.append(turn_code(encoding, positions))
    if "distance_bias" in hooks_of(encoding):
        used, layer = encoding.at(0)
        bias = used.distance_bias(positions[0], layer)
        assert bias is not None
        parts.append(bias.mT)
    if hooks_of(encoding) & {"bias", "scores", "attend"}:
        # The query is last. The keys are at the given distances before it, after a margin.
        farther = positions.max() + 1 + torch.arange(MARGIN)
        distances = torch.cat([positions[0], farther])
        pairs = _contribution(encoding, (distances.max() - distances).flip(0)[None], last=1)[:, :, -1, MARGIN:]
        parts.append(pairs.flatten(0, 1).mT.flip(0))
    return torch.cat(parts, dim=-1)
