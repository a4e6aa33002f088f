"""Factors of the logits that depend on the number of keys or on distance, around
another encoding.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.extend import FarPairs
from posbench.encodings.layered import Heads
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper, core_of
from posbench.errors import Undefined
from posbench.options import NonNegative, Positive


class Temperature(Wrapper):
    """A temperature that depends on the number of keys, around another encoding:
    softmax over more keys is flatter.

    After the inner encoding's rotation, query i is multiplied by a number that grows
    with n = i + 1, also in a window:

        ssmax            s·ln n
                         s learned per layer and head, 1/ln L at the start
        mistral_large4   s·ln n + b
                         both learned per layer and head, 0 and 1 at the start
        logn             max(1, ln n / ln L)
                         L the training length
        llama4           1 + alpha·ln(1 + floor(n/F))
                         F = `floor`, by default the training length
        inkling          1 + alpha·ln(max(1, n/F))

    Source: Nakanishi (2025), arXiv:2501.19399 (ssmax; its start is ours); Qwen's code,
    `use_logn_attn` (logn); transformers' Mistral Large 4, Llama 4 (F = 8192) and
    Inkling.
    Beyond training length: defined as far as the inner encoding is; meant to hold
    attention as sharp as in training.
    Checked against: transformers Ministral 3 (llama4) and Mistral Large 4, plain loops
    (the others), on inner queries.
    """

    adds = ("rotate",)
    scale: nn.ParameterList  # a number per layer and head
    offset: nn.ParameterList

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        rule: Literal["ssmax", "mistral_large4", "logn", "llama4", "inkling"] = "ssmax",
        alpha: NonNegative = 0.1,
        floor: Positive | None = None,
    ) -> None:
        super().__init__(shape)
        self.rule, self.alpha = rule, alpha
        self.floor = floor or shape.train_length
        self.trained = math.log(max(2, shape.train_length))  # ln L
        if rule == "ssmax":
            self.scale = self._numbers(1 / self.trained)
        if rule == "mistral_large4":
            self.scale = self._numbers(0.0)
            self.offset = self._numbers(1.0)
        self.wrap(inner, inner_options)

    def _numbers(self, start: float) -> nn.ParameterList:
        """Return a number per layer and head."""
        n_heads, layers = self.shape.n_heads, range(self.shape.n_layers)
        return nn.ParameterList(torch.full((n_heads,), start) for _ in layers)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def sharpened(q: Tensor) -> Tensor:
            n = torch.arange(1, q.shape[2] + 1, device=q.device)
            return q * self.factor(n, layer.index)[..., None]

        def rotate(q: Tensor, k: Tensor, inside: Layer) -> tuple[Tensor, Tensor]:
            q, k = inner.rotate(q, k, inside)
            return sharpened(q), k

        def prepare(q: Tensor, k: Tensor, inside: Layer) -> list[tuple[Tensor, Tensor]]:
            far = inner.prepare(q, k, inside)
            return [(sharpened(of_q), of_k) for of_q, of_k in far]

        core = core_of(inner)
        if isinstance(core, Heads):
            _refuse_far_pairs(self, core)
        if isinstance(core, FarPairs):  # its far logits come from `prepare`
            return self.altered(inner, rotate=rotate, prepare=prepare), inner_layer
        return self.altered(inner, rotate=rotate), inner_layer

    def factor(self, n: Tensor, layer: int) -> Tensor:
        """Return the factor of queries that see n (T,) keys: (H, T) or (T,)."""
        if self.rule == "logn":
            return (n.log() / self.trained).clamp(min=1)
        if self.rule == "llama4":
            return 1 + self.alpha * (n / self.floor).floor().log1p()
        if self.rule == "inkling":
            return 1 + self.alpha * (n / self.floor).clamp(min=1).log()
        s = self.scale[layer][:, None]
        if self.rule == "ssmax":
            return s * n.log()
        b = self.offset[layer][:, None]
        return s * n.log() + b


class ScaleInvariant(Wrapper):
    """Scale-invariant attention around another encoding: far logits spread and fall, so
    that all ranges weigh alike.

        logits'_ij = logits_ij · sqrt(2 ln(r/tau + 1) + 1) - 2 ln(r/tau + 1),
        r = |i - j|

    Source: Anson et al. (2025), arXiv:2505.17083, with its tau, around RoPE without its
    slow pairs (there p-RoPE).
    Beyond training length: defined as far as the inner encoding is; far keys' total
    weight grows with ln T alone.
    Checked against: plain loops of this equation, derived from the paper's two
    conditions; not from its printed form.
    """

    adds = ("scores",)

    def __init__(
        self,
        shape: Shape,
        inner: str = "p_rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
        tau: Positive = 10.0,
    ) -> None:
        super().__init__(shape)
        self.tau = tau
        self.wrap(inner, inner_options)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            r = inside.distance.abs()
            growth = 2 * (r / self.tau).log1p()[:, None]
            logits = inner.scores(logits, q, k, inside)
            return logits * (growth + 1).sqrt() - growth

        return self.altered(inner, scores=scores), inner_layer


def _refuse_far_pairs(encoding: Encoding, heads: Heads) -> None:
    """Raise Undefined if some heads have far pairs, whose logits would stay as they
    are.
    """
    if any(isinstance(part, FarPairs) for part in heads.modules()):
        raise Undefined(
            f"'{encoding.name}' around 'heads' does not reach far pairs: put it into"
            " the entries"
        )
