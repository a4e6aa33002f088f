"""Another encoding, or another window, from layer to layer.

    layer l uses layers[l mod n],   n entries, each an encoding with its options and, if given, a window

Several long-context models mix RoPE layers with a window and layers without positions that see everything. Layers with
equal entries share one encoding: it acts at the input once, and they share the parameters that it has for all layers.
An encoding that acts at the input (`sinusoidal`) reaches every layer.

Patterns of published models have names: encoding=layered/gemma3, or gemma4, cohere2, llama4, mistral_large4, smollm3,
olmo3_gnope, swan.

Source: Yang et al., "RoPE to NoPE and Back Again: A New Hybrid Attention Strategy" (2025), arXiv:2501.18795, for the
default pattern: three windowed RoPE layers, then one without positions that sees everything. Puvvada et al., "SWAN-GPT"
(2025), arXiv:2504.08719, for swan, read in summaries: one layer that sees everything, then three windowed ones. Their
scale of logits in evaluation, log(a + n), has a constant fitted to their models, which we have not found. `logn` of
`temperature` stands in for it; it is 1 up to the training length. OLMo-core's `no_global_rope` for olmo3_gnope.
Beyond training length: defined as far as all of its layers are.
Checked against: the implementations that its layers are checked against, layer by layer, under the window's mask.
"""

import dataclasses
import json
from collections import Counter
from typing import Any

from posbench.encodings._wrapper import Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError

_LOCAL: dict[str, Any] = {"name": "rope", "window": 32}
PATTERN: list[dict[str, Any]] = [_LOCAL, _LOCAL, _LOCAL, {"name": "none"}]


class Layered(Wrapper):
    def __init__(self, shape: Shape, layers: list[dict[str, Any]] = PATTERN) -> None:
        super().__init__(shape)
        self.expect(len(layers) > 0, "layers", layers, "at least one entry such as {name: rope, window: 32}")
        entries = [layers[layer % len(layers)] for layer in range(shape.n_layers)]
        keys = [json.dumps(entry, sort_keys=True) for entry in entries]
        distinct = {key: layers.index(entry) for key, entry in zip(keys, entries, strict=True)}
        counts = Counter(keys)
        self.adopt([_build(layers[place], place, shape, counts[key]) for key, place in distinct.items()])
        if sum(inner.token_dim() < shape.d_model for inner in self.inner_encodings) > 1:
            raise UserError("encoding.layers has several encodings that concatenate their code: expected at most one")
        self.listed = len(layers)
        order = list(distinct)
        # For every layer: the index of its encoding, and the number of earlier layers with the same one.
        self.places = [(order.index(key), keys[:layer].count(key)) for layer, key in enumerate(keys)]

    def remarks(self) -> list[str]:
        listed, deep = self.listed, self.shape.n_layers
        unused = f"{self.name}: no layer uses layers[{deep}] and later: {listed} are listed, the model has {deep}"
        return [unused, *super().remarks()] if listed > deep else super().remarks()

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        which, own = self.places[layer.index]
        return self.altered(*self.within(layer.replace(index=own), which))


def _build(entry: dict[str, Any], place: int, shape: Shape, n_layers: int) -> Encoding:
    """Build the encoding of an entry for n_layers layers."""
    key = f"encoding.layers[{place}]"
    options = dict(entry)
    name, window = options.pop("name", None), options.pop("window", None)
    if not isinstance(name, str):
        raise UserError(f"{key} is {entry}: expected a name, such as {{name: rope, window: 32}}")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise UserError(f"{key}.window is {window!r}: expected a number of keys of at least 1, or null for all")
    inner = build_inner(name, dataclasses.replace(shape, n_layers=n_layers), options, key)
    if "positions" in inner.hooks:
        raise UserError(f"{key}: '{name}' chooses positions for all layers: put it around (encoding.inner=layered)")
    inner.window = window
    return inner
