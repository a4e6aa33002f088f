"""Another encoding from head to head.

    head h of H uses heads[floor(h n / H)],   n entries, each an encoding with its options

Each entry has a block of neighbouring heads, and is made for a model of that many. By default half of the heads have no
positions and the others ALiBi (NAPE). What an encoding adds at the input reaches all heads.

Source: Vasylenko et al. (2025), arXiv:2506.16640, for the default, without their softmax; slopes and order are ours.
Beyond training length: defined as far as all of its encodings are.
Checked against: the implementations that its encodings are checked against, block by block of heads.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import Wrapper, build_entry
from posbench.errors import UserError

NAPE: list[dict[str, Any]] = [{"name": "none"}, {"name": "alibi"}]


def _by_block(hook: str) -> Callable[..., Tensor]:
    """Return a hook that puts together what that of each block makes of its heads."""

    def of_all(self: "Heads", *tensors_and_layer: Any) -> Tensor:
        *tensors, layer = tensors_and_layer
        return torch.cat(self.of_blocks(hook, layer, *tensors), dim=1)

    return of_all


class Heads(Wrapper):
    map_values, map_outputs, scores, attend = map(_by_block, ("map_values", "map_outputs", "scores", "attend"))

    def __init__(self, shape: Shape, heads: list[dict[str, Any]] = NAPE) -> None:
        super().__init__(shape)
        self.expect(len(heads) > 0, "heads", heads, "at least one entry such as {name: alibi}")
        places = [head * len(heads) // shape.n_heads for head in range(shape.n_heads)]
        self.sizes = [places.count(place) for place in dict.fromkeys(places)]
        shapes = [dataclasses.replace(shape, n_heads=size, n_kv_heads=size) for size in self.sizes]
        keys = [(f"encoding.heads[{place}]", heads[place]) for place in dict.fromkeys(places)]
        self.adopt([build_entry(entry, part, key) for (key, entry), part in zip(keys, shapes, strict=True)])
        for (key, _), inner in zip(keys, self.inner_encodings, strict=True):
            if inner.hooks & {"positions", "logit_scale"}:
                raise UserError(f"{key}: '{inner.name}' acts on all heads: expected another, such as rope or alibi")

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self, layer

    def blocks(self, layer: Layer) -> Iterator[tuple[Encoding, Layer]]:
        """Yield the encoding of each block of heads, and the layer as that sees it."""
        for which in range(len(self.sizes)):
            inner, within = self.within(layer, which)
            if inner.window is not None:
                raise UserError(f"encoding.heads: '{inner.name}' has a window, which is that of all heads of a layer")
            yield inner, within if layer.state is None else within.replace(state=layer.state[which])

    def of_blocks(self, hook: str, layer: Layer, *tensors: Tensor) -> list[Any]:
        """Return what a hook of each block gives for its heads of tensors (B, H, ...)."""
        parts = zip(*(torch.split(tensor, self.sizes, dim=1) for tensor in tensors), strict=True)
        blocks = zip(self.blocks(layer), parts, strict=True)
        return [getattr(inner, hook)(*of_block, within) for (inner, within), of_block in blocks]

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[Any]:
        return self.of_blocks("prepare", layer, q, k)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = zip(*self.of_blocks("rotate", layer, q, k), strict=True)
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        biases = zip(
            self.sizes, (inner.distance_bias(distance, within) for inner, within in self.blocks(layer)), strict=True
        )
        zeros = torch.zeros(1, *distance.shape, device=distance.device)
        return torch.cat([(zeros if bias is None else bias).expand(size, *distance.shape) for size, bias in biases])

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        biases = zip(self.sizes, self.of_blocks("bias", layer, q, k), strict=True)
        zero, pairs = q.new_zeros(()), (q.shape[2], k.shape[2])
        return torch.cat(
            [(zero if bias is None else bias).expand(len(q), size, *pairs) for size, bias in biases], dim=1
        )
