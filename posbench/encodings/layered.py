"""Encodings that differ from layer to layer, or from head to head."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from annotated_types import MinLen
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import Wrapper, build_entry
from posbench.errors import UserError
from posbench.options import Count, checked

Entries = Annotated[list[dict[str, Any]], MinLen(1)]
PATTERN: Entries = [*[{"name": "rope", "window": 32}] * 3, {"name": "none"}]
NAPE: Entries = [{"name": "none"}, {"name": "alibi"}]


class Layered(Wrapper):
    """A different encoding, or a different window, from layer to layer.

        layer l uses layers[l mod n],
        n entries, each an encoding with its options and, if given, a window or a chunk

    With a chunk of c, i sees j only if floor(i/c) = floor(j/c). Equal entries share one
    encoding. See layered/gemma3.

    Source: Yang et al. (2025), arXiv:2501.18795 (default); Puvvada et al. (2025),
    arXiv:2504.08719 (swan, with `logn`).
    Beyond training length: defined as far as all of its layers are.
    Checked against: the implementations that its layers are checked against, layer by
    layer, under the window's mask.
    """

    def __init__(self, shape: Shape, layers: Entries = PATTERN) -> None:
        super().__init__(shape)
        keys = [
            json.dumps(layers[layer % len(layers)], sort_keys=True)
            for layer in range(shape.n_layers)
        ]
        distinct = list(dict.fromkeys(keys))
        self.chunks: list[int | None] = []
        self.adopt(
            [self.entry(layers, keys.index(key), keys.count(key)) for key in distinct]
        )
        if (
            len(
                at_input := [
                    inner.name
                    for inner in self.inner_encodings
                    if "embed" in inner.hooks
                ]
            )
            > 1
        ):
            raise UserError(
                f"encoding.layers: {' and '.join(at_input)} all act on the input:"
                " expected one such entry"
            )
        # For every layer: the index of its encoding, and the number of earlier layers
        # with the same one.
        self.places = [
            (distinct.index(key), keys[:layer].count(key))
            for layer, key in enumerate(keys)
        ]

    def entry(self, layers: Entries, place: int, n_layers: int) -> Encoding:
        """Build the encoding of an entry for n_layers layers."""
        key, options = f"encoding.layers[{place}]", dict(layers[place])
        values = {name: options.pop(name, None) for name in ("window", "chunk")}
        limits = checked(
            values,
            dict.fromkeys(values, Count | None),
            dict.fromkeys(values),
            "layered",
            f"{key}.",
        )
        inner = build_entry(
            options, dataclasses.replace(self.shape, n_layers=n_layers), key
        )
        if "positions" in inner.hooks:
            raise UserError(
                f"{key}: '{inner.name}' chooses positions for all layers: put `layered`"
                " inside it"
            )
        if limits["chunk"] and inner.hooks & {"scores", "attend"}:
            raise UserError(
                f"{key}.chunk: '{inner.name}' has a softmax of its own: expected"
                " another, such as rope"
            )
        inner.window = min(filter(None, (limits["window"], inner.window)), default=None)
        self.chunks.append(limits["chunk"])
        return inner

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        which, index = self.places[layer.index]
        inner, inner_layer = self.within(layer.replace(index=index), which)
        if (chunk := self.chunks[which]) is None:
            return self.altered(inner), inner_layer

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            n = torch.arange(inside.positions.shape[1], device=logits.device) // chunk
            return inner.scores(logits, q, k, inside).masked_fill(
                n[inside.rows, None] != n[inside.keys], -torch.inf
            )

        return self.altered(inner, scores=scores), inner_layer


def _by_block(hook: str) -> Callable[..., Tensor]:
    """Return a hook that concatenates the results of each block's own hook for its
    heads.
    """
    return lambda self, *tensors_and_layer: torch.cat(
        self.of_blocks(hook, *tensors_and_layer), dim=1
    )


class Heads(Wrapper):
    """A different encoding from head to head.

        head h of H uses heads[floor(h n / H)],
        n entries, each an encoding with its options; input codes reach all

    Source: Vasylenko et al. (2025), arXiv:2506.16640 (NAPE, the default), without their
    softmax and with our slopes.
    Beyond training length: defined as far as all of its encodings are.
    Checked against: the implementations that its encodings are checked against, block
    by block of heads.
    """

    at = Encoding.at
    map_values, map_outputs, scores, attend = map(
        _by_block, ("map_values", "map_outputs", "scores", "attend")
    )

    def __init__(self, shape: Shape, heads: Entries = NAPE) -> None:
        super().__init__(shape)
        places = [head * len(heads) // shape.n_heads for head in range(shape.n_heads)]
        self.sizes = [places.count(place) for place in dict.fromkeys(places)]
        inners = []
        for place, size in zip(dict.fromkeys(places), self.sizes, strict=True):
            key, block = (
                f"encoding.heads[{place}]",
                dataclasses.replace(shape, n_heads=size, n_kv_heads=size),
            )
            inners.append(inner := build_entry(heads[place], block, key))
            layered = any(isinstance(part, Layered) for part in inner.modules())
            if layered or inner.window or inner.hooks & {"positions", "logit_scale"}:
                raise UserError(
                    f"{key}: '{inner.name}' acts on all heads at once: expected"
                    " another, such as rope"
                )
        self.adopt(inners)

    def blocks(self, layer: Layer) -> Iterator[tuple[Encoding, Layer]]:
        """Yield the encoding of each block of heads, and the layer as that encoding
        sees it.
        """
        for which in range(len(self.sizes)):
            inner, inner_layer = self.within(layer, which)
            yield (
                inner,
                (
                    inner_layer
                    if layer.state is None
                    else inner_layer.replace(state=layer.state[which])
                ),
            )

    def of_blocks(self, hook: str, *tensors_and_layer: Any) -> list[Any]:
        """Return what a hook of each block returns, given the block's heads of tensors
        (B, H, ...) and the layer.
        """
        *tensors, layer = tensors_and_layer
        parts = zip(
            *(torch.split(tensor, self.sizes, dim=1) for tensor in tensors), strict=True
        )
        blocks = zip(self.blocks(layer), parts, strict=True)
        return [
            getattr(inner, hook)(*of_block, inner_layer)
            for (inner, inner_layer), of_block in blocks
        ]

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[Any]:
        return self.of_blocks("prepare", q, k, layer)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = zip(*self.of_blocks("rotate", q, k, layer), strict=True)
        # some widen queries and keys: zeros add nothing to q·k
        width = max(of_q.shape[-1] for of_q in queries)
        q, k = (
            torch.cat([F.pad(of, (0, width - of.shape[-1])) for of in part], dim=1)
            for part in (queries, keys)
        )
        return q, k

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        biases = (
            inner.distance_bias(distance, inner_layer)
            for inner, inner_layer in self.blocks(layer)
        )
        blocks, zero = (
            zip(self.sizes, biases, strict=True),
            torch.zeros((), device=distance.device),
        )
        return torch.cat(
            [
                (zero if bias is None else bias).expand(size, *distance.shape)
                for size, bias in blocks
            ]
        )

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        blocks, zero = (
            zip(self.sizes, self.of_blocks("bias", q, k, layer), strict=True),
            q.new_zeros(()),
        )
        rows, keys = q.shape[2], k.shape[2]
        return torch.cat(
            [
                (zero if b is None else b).expand(len(q), size, rows, keys)
                for size, b in blocks
            ],
            dim=1,
        )
