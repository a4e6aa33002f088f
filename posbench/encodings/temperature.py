"""A temperature that depends on the number of keys, around another encoding: softmax over more keys is flatter.

After the inner encoding's rotation, query i is multiplied by a number that grows with n = i + 1, the tokens up to it:

    ssmax            s·ln n                            s learned per layer and head, 1/ln L at the start
    mistral_large4   s·ln n + b                        both learned per layer and head, 0 and 1 at the start
    logn             max(1, ln n / ln L)               L the training length
    llama4           1 + alpha·ln(1 + floor(n/F))      F = `floor`, by default the training length
    inkling          1 + alpha·ln(max(1, n/F))

Biases of the inner encoding are unchanged. A window does not lower n.

Source: Nakanishi (2025), arXiv:2501.19399 (ssmax; its start is ours); Qwen's code, `use_logn_attn` (logn);
transformers' Mistral Large 4, Llama 4 (F = 8192) and Inkling. Ministral 3 counts from 0 where Llama 4 counts tokens.
Beyond training length: defined as far as the inner encoding is; meant to hold attention as sharp as it was in training.
Checked against: transformers Ministral 3 (llama4) and Mistral Large 4, plain loops (the others), each on the queries of
what the inner encoding is checked against.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.far_pairs import FarPairs
from posbench.encodings.wrapper import NO_OPTIONS, Altered, Wrapper
from posbench.options import NonNegative, Positive


class Temperature(Wrapper):
    adds = ("rotate",)

    def __init__(
        self, shape: Shape, inner: str = "rope", inner_options: dict[str, Any] = NO_OPTIONS,
        rule: Literal["ssmax", "mistral_large4", "logn", "llama4", "inkling"] = "ssmax",
        alpha: NonNegative = 0.1, floor: Positive | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.rule, self.alpha, self.floor = rule, alpha, floor or shape.train_length
        self.trained = math.log(max(2, shape.train_length))
        if rule in ("ssmax", "mistral_large4"):
            self.scale = _per_head(shape, 1 / self.trained if rule == "ssmax" else 0.0)
        if rule == "mistral_large4":
            self.offset = _per_head(shape, 1.0)
        self.wrap(inner, inner_options)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, within = self.within(layer)

        def sharpened(q: Tensor) -> Tensor:
            return q * self.factor(torch.arange(1, q.shape[2] + 1, device=q.device), layer.index)[..., None]

        def rotate(q: Tensor, k: Tensor, inside: Layer) -> tuple[Tensor, Tensor]:
            q, k = inner.rotate(q, k, inside)
            return sharpened(q), k

        def prepare(q: Tensor, k: Tensor, inside: Layer) -> list[tuple[Tensor, Tensor]]:
            return [(sharpened(of_q), of_k) for of_q, of_k in inner.prepare(q, k, inside)]

        core = inner
        while isinstance(core, Altered):
            core = core.inner
        if isinstance(core, FarPairs):  # whose logits of far pairs come from `prepare`
            return self.altered(inner, rotate=rotate, prepare=prepare), within
        return self.altered(inner, rotate=rotate), within

    def factor(self, n: Tensor, layer: int) -> Tensor:
        """Return the factor of queries that see n (T,) keys: (H, T) or (T,)."""
        if self.rule == "logn":
            return (n.log() / self.trained).clamp(min=1)
        if self.rule == "llama4":
            return 1 + self.alpha * (n / self.floor).floor().log1p()
        if self.rule == "inkling":
            return 1 + self.alpha * (n / self.floor).clamp(min=1).log()
        sharper: Tensor = self.scale[layer][:, None] * n.log()
        return sharper + self.offset[layer][:, None] if self.rule == "mistral_large4" else sharper


def _per_head(shape: Shape, start: float) -> nn.ParameterList:
    """Return a number per layer and head: (H,) for each layer."""
    return nn.ParameterList(torch.full((shape.n_heads,), start) for _ in range(shape.n_layers))
