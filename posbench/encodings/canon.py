"""A short convolution: each token's queries, keys and values see a few tokens before it.

    a'_t = a_t + sum over s = 0 .. width-1 of w_s a_(t-s),   for a in q, k and v; every channel has its own weights w

Order enters because the query, key and value of a token depend on the tokens before it. Farther keys have no order
unless the option `inner` names another encoding, which then gets the convolved q, k and v.

This is the second of the author's four places in a block, Canon-B. The others are outside of attention, where an
encoding has no part: A on the attention's input, C on the feed-forward part's input, and D within that part. His full
Canon models have all four, with RoPE or without. What is measured here says how B alone does. Inkling has the
convolution on k and v only: option `convolved`.

Source: Allen-Zhu, "Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon Layers" (2025),
arXiv:2512.17351. The weights start as those of torch's Conv1d, as in the author's code.
Beyond training length: defined as far as the inner encoding; without one attention spreads over more keys than trained.
Checked against: transformers Inkling's short convolution, before what the inner encoding is checked against.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings._convolution import causal_convolution
from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape

Convolved = Literal["qkv", "qk", "kv"]


class Canon(Wrapper):
    def __init__(
        self,
        shape: Shape,
        width: int = 4,
        convolved: Convolved = "qkv",
        residual: bool = True,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(shape)
        self.expect(width >= 1, "width", width, "at least 1")
        self.residual = residual
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
        self.weights = nn.ParameterDict({a: _initial(shape, heads[a], width) for a in convolved})
        self.history = frozenset({"q"} & set(convolved))
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"rotate", *(["map_values"] if "v" in self.weights else [])}

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self.before(layer, self._queries_and_keys, self._values if "v" in self.weights else None)

    def _queries_and_keys(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._convolved("q", q, layer), self._convolved("k", k, layer)

    def _values(self, v: Tensor, layer: int) -> Tensor:
        return self._convolved("v", v, layer)

    def _convolved(self, name: str, a: Tensor, layer: int) -> Tensor:
        """q, k or v (B, H, T, Dh) after the convolution."""
        if name not in self.weights:
            return a
        weights = self.weights[name][layer].repeat_interleave(a.shape[1] // len(self.weights[name][layer]), dim=0)
        own = F.pad(weights.new_ones(1), (weights.shape[-1] - 1, 0)) if self.residual else 0
        channels = a.transpose(1, 2).flatten(2)  # (B, T, H Dh)
        mixed = causal_convolution(channels, (weights + own).flatten(0, 1))
        return mixed.view(*channels.shape[:2], *weights.shape[:2]).transpose(1, 2)


def _initial(shape: Shape, heads: int, width: int) -> nn.Parameter:
    """Weights (layers, heads, Dh, width), the last for the token itself; initialised like a depthwise Conv1d's."""
    return nn.Parameter(torch.empty(shape.n_layers, heads, shape.head_dim, width).uniform_(-1, 1) * width**-0.5)
