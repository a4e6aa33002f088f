"""Learned attention sinks around another encoding: heads that may attend to nothing.

One learned number per layer and head joins the denominator of every softmax, as the logit of a key that has no value:

    weight_ij = exp(logit_ij) / (exp(s_h) + sum over j' of exp(logit_ij'))

Source: transformers' gpt-oss, whose sinks start from N(0, 0.02) around YaRN, under a window in every other layer.
Beyond training length: defined as far as the inner encoding is; over more keys a sink of the same size takes less.
Checked against: transformers gpt-oss, on queries, keys and biases of what the inner encoding is checked against.
"""

from typing import Any

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.errors import UserError


class LearnedSinks(Wrapper):
    name = "learned_sinks"
    adds = ("attend",)

    def __init__(self, shape: Shape, inner: str = "rope", inner_options: dict[str, Any] = NO_OPTIONS) -> None:
        super().__init__(shape)
        self.sinks = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads) * 0.02)
        self.wrap(inner, inner_options)
        if "attend" in self.inner_encodings[0].hooks:
            raise UserError(f"encoding.inner is '{inner}', which replaces the softmax: expected another, such as rope")

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, within = self.within(layer)

        def attend(logits: Tensor, v: Tensor, inside: Layer) -> Tensor:
            sinks = self.sinks[layer.index][:, None, None].expand(*logits.shape[:-1], 1)
            weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
            return weights @ v.to(weights.dtype)

        return self.altered(inner, attend=attend), within
