"""Encodings that differ from layer to layer, or from head to head."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Layer, Shape, narrower
from posbench.encodings.wrapper import Wrapper, build_entry
from posbench.errors import UserError, unknown
from posbench.options import Count, Entries, checked

PATTERN: Entries = [
    {"name": "rope", "window": 32},
    {"name": "rope", "window": 32},
    {"name": "rope", "window": 32},
    {"name": "none"},
]
NAPE: Entries = [{"name": "none"}, {"name": "alibi"}]
LIMITS = ("window", "chunk")  # of an entry, which are no options of its encoding
LAYERS = ("all", "global", "local")  # which layers of a pattern an extension changes


def is_among(entry: Mapping[str, Any], layers: str) -> bool:
    """Return whether an entry of `layered` is among these layers: `all`, the `local`
    ones, which have a window or a chunk, or the `global` ones, which have none.
    """
    if layers not in LAYERS:
        raise unknown("layers", layers, LAYERS)
    is_local = any(entry.get(key) for key in LIMITS)
    return layers == "all" or is_local == (layers == "local")


def entry_with(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `layered` with another encoding, under the same window or
    chunk. RoPE's options stay if the settings have none, and a wrapper goes around the
    encoding that the entry has.
    """
    accepted = encodings.options_of(settings["name"])
    kept = [key for key in encodings.KEPT if key in accepted]
    changed = {"name": settings["name"]}
    changed |= {key: entry[key] for key in [*kept, *LIMITS] if key in entry}
    changed |= settings
    if "inner" in accepted and "inner" not in settings:
        changed["inner"] = entry["name"]
        options = {key: entry[key] for key in entry if key not in ("name", *LIMITS)}
        changed["inner_options"] = {**options, **settings.get("inner_options", {})}
    return changed


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
        of_layers = [layers[layer % len(layers)] for layer in range(shape.n_layers)]
        keys = [json.dumps(entry, sort_keys=True) for entry in of_layers]
        distinct = list(dict.fromkeys(keys))
        self.entries = [json.loads(key) for key in distinct]  # of the inner encodings

        self.chunks: list[int | None] = []
        inners = [
            self.entry(layers, keys.index(key), keys.count(key)) for key in distinct
        ]
        self.adopt(inners)

        at_input = [inner.name for inner in inners if "embed" in inner.hooks]
        if len(at_input) > 1:
            raise UserError(
                f"encoding.layers: {' and '.join(at_input)} all act on the input:"
                " expected one such entry"
            )
        # For every layer: the index of its encoding, and the number of earlier layers
        # with the same one.
        self.places = []
        for layer, key in enumerate(keys):
            self.places.append((distinct.index(key), keys[:layer].count(key)))

    def entry(self, layers: Entries, place: int, n_layers: int) -> Encoding:
        """Build the encoding of an entry for n_layers layers."""
        key = f"encoding.layers[{place}]"
        options = dict(layers[place])
        window, chunk = self._limits(options, key)
        shape = dataclasses.replace(self.shape, n_layers=n_layers)
        inner = build_entry(options, shape, key)
        if "positions" in inner.hooks:
            raise UserError(
                f"{key}: '{inner.name}' chooses positions for all layers: put `layered`"
                " inside it"
            )
        if chunk and inner.hooks & {"scores", "attend"}:
            raise UserError(
                f"{key}.chunk: '{inner.name}' has a softmax of its own: expected"
                " another, such as rope"
            )
        inner.window = narrower(window, inner.window)
        self.chunks.append(chunk)
        return inner

    def _limits(self, options: dict[str, Any], key: str) -> tuple[Any, Any]:
        """Take window and chunk, each a count or None, out of an entry's options."""
        values = {name: options.pop(name, None) for name in LIMITS}
        hints = dict.fromkeys(LIMITS, Count | None)
        limits = checked(values, hints, dict.fromkeys(LIMITS), "layered", f"{key}.")
        return limits["window"], limits["chunk"]

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        which, index = self.places[layer.index]
        inner, inner_layer = self.within(layer.replace(index=index), which)
        chunk = self.chunks[which]
        if chunk is None:
            return self.altered(inner), inner_layer

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            tokens = torch.arange(inside.positions.shape[1], device=logits.device)
            number = tokens // chunk  # of each token's chunk
            is_other = number[inside.rows, None] != number[inside.keys]
            logits = inner.scores(logits, q, k, inside)
            return logits.masked_fill(is_other, -torch.inf)

        return self.altered(inner, scores=scores), inner_layer


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

    def __init__(self, shape: Shape, heads: Entries = NAPE) -> None:
        super().__init__(shape)
        of_heads = [head * len(heads) // shape.n_heads for head in range(shape.n_heads)]
        self.sizes: list[int] = []  # heads of each block
        inners = []
        for place in dict.fromkeys(of_heads):
            size = of_heads.count(place)
            self.sizes.append(size)
            block = dataclasses.replace(shape, n_heads=size, n_kv_heads=size)
            key = f"encoding.heads[{place}]"
            inner = build_entry(heads[place], block, key)
            inners.append(inner)
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
            if layer.state is not None:
                inner_layer = inner_layer.replace(state=layer.state[which])
            yield inner, inner_layer

    def of_blocks(self, hook: str, *tensors_and_layer: Any) -> list[Any]:
        """Return what a hook of each block returns, given the block's heads of tensors
        (B, H, ...) and the layer.
        """
        *tensors, layer = tensors_and_layer
        split = [tensor.split(self.sizes, dim=1) for tensor in tensors]
        results = []
        for which, (inner, inner_layer) in enumerate(self.blocks(layer)):
            of_block = [parts[which] for parts in split]
            results.append(getattr(inner, hook)(*of_block, inner_layer))
        return results

    def joined(self, hook: str, *tensors_and_layer: Any) -> Tensor:
        """Return what `of_blocks` returns, for all heads side by side."""
        return torch.cat(self.of_blocks(hook, *tensors_and_layer), dim=1)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self.joined("map_values", v, layer)

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        return self.joined("map_outputs", out, layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return self.joined("scores", logits, q, k, layer)

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return self.joined("attend", logits, v, layer)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> list[Any]:
        return self.of_blocks("prepare", q, k, layer)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = zip(*self.of_blocks("rotate", q, k, layer), strict=True)
        return _widened(queries), _widened(keys)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        biases = []
        blocks = zip(self.sizes, self.blocks(layer), strict=True)
        for size, (inner, inner_layer) in blocks:
            bias = inner.distance_bias(distance, inner_layer)
            if bias is None:
                bias = torch.zeros((), device=distance.device)
            biases.append(bias.expand(size, *distance.shape))
        return torch.cat(biases)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        biases = []
        of_blocks = self.of_blocks("bias", q, k, layer)
        for size, bias in zip(self.sizes, of_blocks, strict=True):
            if bias is None:
                bias = q.new_zeros(())
            biases.append(bias.expand(len(q), size, q.shape[2], k.shape[2]))
        return torch.cat(biases, dim=1)


def _widened(blocks: Sequence[Tensor]) -> Tensor:
    """Return blocks of heads, widened to one width: zeros add nothing to q·k."""
    width = max(block.shape[-1] for block in blocks)
    widened = [F.pad(block, (0, width - block.shape[-1])) for block in blocks]
    return torch.cat(widened, dim=1)
