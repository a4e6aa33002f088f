"""A temperature that depends on the number of keys, around another encoding.

Softmax over more keys is flatter. These rules sharpen it again: after the inner encoding's rotation, they multiply
query i by a number that grows with n = i + 1, the tokens up to it:

    ssmax            s·ln n                            s learned per layer and head, 1/ln L at the start
    mistral_large4   s·ln n + b                        both learned per layer and head, 0 and 1 at the start
    logn             max(1, ln n / ln L)               L the training length
    llama4           1 + alpha·ln(1 + floor(n/F))      F = `floor`, by default the training length
    inkling          1 + alpha·ln(max(1, n/F))

Biases of the inner encoding are unchanged. A window does not lower n: models with windowed layers use the temperature
in the other layers only, which `layered` can express.

Source: Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025), arXiv:2501.19399 (ssmax; its start is ours);
Qwen's code, `use_logn_attn` (logn); transformers' Mistral Large 4, Llama 4 (F = 8192) and Inkling (F a number of the
model, alpha = 0.1 in both). Ministral 3 counts positions from 0 where Llama 4 counts tokens.
Beyond training length: defined as far as the inner encoding is; meant to hold attention as sharp as it was in training.
Checked against: transformers Ministral 3 (llama4) and Mistral Large 4, plain loops (the others), each on the queries of
what the inner encoding is checked against.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.far_pairs import FarPairs

Rule = Literal["ssmax", "mistral_large4", "logn", "llama4", "inkling"]


class Temperature(Wrapper):
    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        rule: Rule = "ssmax",
        alpha: float = 0.1,
        floor: float | None = None,
    ) -> None:
        super().__init__(shape)
        self.expect(math.isfinite(alpha) and alpha >= 0, "alpha", alpha, "a number of at least 0")
        expected = "a number of tokens above 0, or null for train_length"
        self.expect(floor is None or 0 < floor < math.inf, "floor", floor, expected)
        self.rule, self.alpha, self.floor = rule, alpha, floor or shape.train_length
        self.trained = math.log(max(2, shape.train_length))
        if rule == "ssmax":
            self.scale = _per_head(shape, 1 / self.trained)
        if rule == "mistral_large4":
            self.scale, self.offset = _per_head(shape, 0.0), _per_head(shape, 1.0)
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"rotate"}

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        used, within = self.within(layer)
        hooks: dict[str, Callable[..., Any]] = {"rotate": functools.partial(self._rotated, used, layer.index)}
        if isinstance(used, FarPairs):  # whose logits of far pairs come from `prepare`
            hooks["prepare"] = functools.partial(self._prepared, used, layer.index)
        return self.altered(used, within, **hooks)

    def factor(self, n: Tensor, layer: int) -> Tensor:
        """The factor of queries that see n (T,) keys: (H, T) or (T,), fp32."""
        n = n.float()
        if self.rule == "logn":
            return (n.log() / self.trained).clamp(min=1)
        if self.rule == "llama4":
            return 1 + self.alpha * (n / self.floor).floor().log1p()
        if self.rule == "inkling":
            return 1 + self.alpha * (n / self.floor).clamp(min=1).log()
        sharper: Tensor = self.scale[layer][:, None] * n.log()
        return sharper + self.offset[layer][:, None] if self.rule == "mistral_large4" else sharper

    def _rotated(self, used: Encoding, index: int, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        q, k = used.rotate(q, k, layer)
        return self._sharpened(q, index), k

    def _prepared(self, used: Encoding, layer: int, q: Tensor, *rest: Any) -> list[tuple[Tensor, Tensor]]:
        return [(self._sharpened(of_q, layer), of_k) for of_q, of_k in used.prepare(q, *rest)]

    def _sharpened(self, q: Tensor, layer: int) -> Tensor:
        factor = self.factor(torch.arange(1, q.shape[2] + 1, device=q.device), layer)
        return (q * factor[..., None]).to(q.dtype)


def _per_head(shape: Shape, start: float) -> nn.ParameterList:
    """A number per layer and head: (H,) for each layer."""
    return nn.ParameterList(torch.full((shape.n_heads,), start) for _ in range(shape.n_layers))
