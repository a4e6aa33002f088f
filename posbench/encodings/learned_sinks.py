"""Learned attention sinks around another encoding: heads that may attend to nothing.

One learned number per layer and head joins the denominator of every softmax, as the logit of a key that has no value:

    weight_ij = exp(logit_ij) / (exp(s_h) + sum over j' of exp(logit_ij'))

The weights of a row then sum to less than 1. Without a sink, an idle head puts its weight on the first token, which all
queries can find; a window hides that token. The sink is inside every window and has no position. A bias that shifts all
keys of a row alike does nothing in plain softmax; here it changes the sink's share.

Source: transformers' gpt-oss, whose sinks start from N(0, 0.02); it has them around YaRN, under a window in every
other layer, which `layered` can say.
Beyond training length: defined as far as the inner encoding is; over more keys a sink of the same size takes less.
Checked against: transformers gpt-oss, on queries, keys and biases of what the inner encoding is checked against.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError


class LearnedSinks(Wrapper):
    name = "learned_sinks"

    def __init__(self, shape: Shape, inner: str = "rope", inner_options: dict[str, Any] = NO_OPTIONS) -> None:
        super().__init__(shape)
        self.sinks = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads) * 0.02)
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])
        if "attend" in super().hooks:
            raise UserError(
                f"encoding.inner is '{inner}', which replaces the softmax: expected one that keeps it, such as rope"
            )

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"attend"}

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        used, within = self.within(layer)
        return self.altered(used, within, attend=functools.partial(_attended, self.sinks[layer.index]))


def _attended(sinks: Tensor, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Outputs (B, H, Tq, Dh) after sinks (H,) have taken their share of the weights."""
    own = sinks.float()[:, None, None].expand(*logits.shape[:-1], 1)
    weights = torch.cat((logits, own), dim=-1).softmax(-1)[..., :-1]
    return weights @ v.to(weights.dtype)
