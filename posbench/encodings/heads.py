"""Another encoding from head to head.

    head h of H uses heads[floor(h n / H)],   n entries, each an encoding with its options

Each entry has a block of neighbouring heads, and is made for a model of that many: ALiBi on 4 of 8 heads has the slopes
of 4 heads. By default half of the heads have no positions and the others ALiBi, so that some look anywhere and others
at the nearest words (NAPE). What an encoding adds at the input reaches all heads.

Source: Vasylenko et al., "Long-Context Generalization with Sparse Attention" (2025), arXiv:2506.16640, for the default,
without their replacement of softmax; slopes and the order of the heads are ours.
Beyond training length: defined as far as all of its encodings are.
Checked against: the implementations that its encodings are checked against, block by block of heads.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import Wrapper, build_inner
from posbench.errors import UserError

NAPE: list[dict[str, Any]] = [{"name": "none"}, {"name": "alibi"}]


class Heads(Wrapper):
    def __init__(self, shape: Shape, heads: list[dict[str, Any]] = NAPE) -> None:
        super().__init__(shape)
        self.expect(len(heads) > 0, "heads", heads, "at least one entry such as {name: alibi}")
        places = [head * len(heads) // shape.n_heads for head in range(shape.n_heads)]
        self.sizes = [places.count(place) for place in dict.fromkeys(places)]
        used = zip(dict.fromkeys(places), self.sizes, strict=True)
        self.adopt([_build(heads[place], f"encoding.heads[{place}]", shape, size) for place, size in used])

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self, layer

    def blocks(self, layer: Layer) -> Iterator[tuple[int, Encoding, Layer]]:
        """Yield the size of each block of heads, its encoding, and the layer as that sees it."""
        for which, size in enumerate(self.sizes):
            inner, within = self.within(layer, which)
            if inner.window is not None:
                raise UserError(f"encoding.heads: '{inner.name}' has a window, which is that of all heads of a layer")
            yield size, inner, within if layer.state is None else within.replace(state=layer.state[which])

    def of_blocks(self, hook: str, layer: Layer, *tensors: Tensor) -> list[Any]:
        """Return what a hook of each block gives for its heads of tensors (B, H, ...)."""
        parts = zip(*(torch.split(tensor, self.sizes, dim=1) for tensor in tensors), strict=True)
        blocks = zip(self.blocks(layer), parts, strict=True)
        return [getattr(inner, hook)(*of_block, within) for (_, inner, within), of_block in blocks]

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[Any]:
        return self.of_blocks("prepare", layer, q, k)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = zip(*self.of_blocks("rotate", layer, q, k), strict=True)
        if len({each.shape[-1] for each in queries}) > 1:
            raise UserError("encoding.heads: its encodings widen queries and keys differently, expected all alike")
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return torch.cat(self.of_blocks("map_values", layer, v), dim=1)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        return torch.cat(self.of_blocks("map_outputs", layer, out), dim=1)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        parts = []
        for size, inner, within in self.blocks(layer):
            bias = inner.distance_bias(distance, within)
            parts.append(torch.zeros(size, *distance.shape, device=distance.device) if bias is None else bias)
        return torch.cat(parts)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        parts = [q.new_zeros(()) if part is None else part for part in self.of_blocks("bias", layer, q, k)]
        wide = zip(parts, self.sizes, strict=True)
        return torch.cat([part.expand(len(q), size, q.shape[2], k.shape[2]) for part, size in wide], dim=1)

    def key_bias(self, layer: Layer) -> Tensor | None:
        parts = []
        for size, inner, within in self.blocks(layer):
            per_key = inner.key_bias(within)
            if per_key is None:
                if inner.hooks & {"distance_bias", "bias"}:
                    return None
                per_key = torch.zeros(1, size, layer.positions.shape[1], device=layer.positions.device)
            parts.append(per_key)
        batch = max(len(part) for part in parts)
        return torch.cat([part.expand(batch, -1, -1) for part in parts], dim=1)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return torch.cat(self.of_blocks("scores", layer, logits, q, k), dim=1)

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return torch.cat(self.of_blocks("attend", layer, logits, v), dim=1)


def _build(entry: dict[str, Any], key: str, shape: Shape, size: int) -> Encoding:
    """Build the encoding of an entry for a block of heads."""
    options = dict(entry)
    if not isinstance(name := options.pop("name", None), str):
        raise UserError(f"{key} is {entry}: expected a name, such as {{name: alibi}}")
    inner = build_inner(name, dataclasses.replace(shape, n_heads=size, n_kv_heads=size), options, key)
    if refused := inner.hooks & {"positions", "logit_scale"}:
        does = "chooses positions for all heads" if "positions" in refused else "scales all logits"
        raise UserError(f"{key}: '{name}' {does}, expected another, such as rope or alibi")
    return inner
