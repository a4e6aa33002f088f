"""Another encoding, or another window, from layer to layer.

    layer l uses layers[l mod n],   n entries, each an encoding with its options and, if given, a window or a chunk

With a chunk of c, token i sees j only if floor(i/c) = floor(j/c), as in Llama 4. Layers with equal entries share one
encoding. One that acts at the input reaches every layer. Patterns of published models have names:
encoding=layered/gemma3, gemma4, gpt_oss, mimo_v2, olmo3, olmo3_gnope, cohere2, llama4, mistral_large4, smollm3 or swan.

Source: Yang et al. (2025), arXiv:2501.18795, for the default pattern; Puvvada et al. (2025), arXiv:2504.08719, for
swan, with `logn` of `temperature` in place of their fitted scale of logits; OLMo-core for olmo3_gnope.
Beyond training length: defined as far as all of its layers are.
Checked against: the implementations that its layers are checked against, layer by layer, under the window's mask.
"""

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import Wrapper, build_entry
from posbench.errors import UserError
from posbench.options import Count, checked

_LOCAL: dict[str, Any] = {"name": "rope", "window": 32}
PATTERN: list[dict[str, Any]] = [_LOCAL, _LOCAL, _LOCAL, {"name": "none"}]


class Layered(Wrapper):
    def __init__(self, shape: Shape, layers: list[dict[str, Any]] = PATTERN) -> None:
        super().__init__(shape)
        self.expect(len(layers) > 0, "layers", layers, "at least one entry such as {name: rope, window: 32}")
        keys = [json.dumps(layers[layer % len(layers)], sort_keys=True) for layer in range(shape.n_layers)]
        distinct = list(dict.fromkeys(keys))
        self.chunks: list[int | None] = []
        self.adopt([self.entry(layers, keys.index(key), keys.count(key)) for key in distinct])
        if sum(inner.token_dim() < shape.d_model for inner in self.inner_encodings) > 1:
            raise UserError("encoding.layers has several encodings that concatenate their code: expected at most one")
        self.listed = len(layers)
        # For every layer: the index of its encoding, and the number of earlier layers with the same one.
        self.places = [(distinct.index(key), keys[:layer].count(key)) for layer, key in enumerate(keys)]

    def entry(self, layers: list[dict[str, Any]], place: int, n_layers: int) -> Encoding:
        """Build the encoding of an entry for n_layers layers."""
        key, options = f"encoding.layers[{place}]", dict(layers[place])
        given = {name: options.pop(name, None) for name in ("window", "chunk")}
        limits = checked(given, dict.fromkeys(given, Count | None), dict.fromkeys(given), "layered", f"{key}.")
        window, chunk = limits["window"], limits["chunk"]
        inner = build_entry(options, dataclasses.replace(self.shape, n_layers=n_layers), key)
        if "positions" in inner.hooks:
            name = inner.name
            raise UserError(f"{key}: '{name}' chooses positions for all layers: put it around (encoding.inner=layered)")
        if chunk and inner.hooks & {"scores", "attend"}:
            raise UserError(f"{key}.chunk: '{inner.name}' has a softmax of its own: expected another, such as rope")
        inner.window = window
        self.chunks.append(chunk)
        return inner

    def remarks(self) -> list[str]:
        listed, deep = self.listed, self.shape.n_layers
        unused = f"{self.name}: no layer uses layers[{deep}] and later: {listed} are listed, the model has {deep}"
        return [unused, *super().remarks()] if listed > deep else super().remarks()

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        which, index = self.places[layer.index]
        inner, within = self.within(layer.replace(index=index), which)
        if (chunk := self.chunks[which]) is None:
            return self.altered(inner), within

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            number = torch.arange(inside.positions.shape[1], device=logits.device) // chunk
            return logits.masked_fill(number[inside.rows, None] != number[inside.keys], -torch.inf)

        return self.altered(inner, scores=scores), within
