"""Factors of the logits that depend on the number of keys or on distance, and entmax,
around another encoding.
"""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Gt, Lt
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape, exact
from posbench.encodings.contextual import TAPA, GatedDelta, linears
from posbench.encodings.extend import FarPairs
from posbench.encodings.layered import Heads
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper, core_of, refuse_attend
from posbench.errors import Undefined, UserError
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
        asentmax         1 + softplus(w_h·x_i)·ln(n + 1)^(2 tanh(u_h·x_i))
                         w and u learned per layer

    Source: Nakanishi (2025), arXiv:2501.19399 (ssmax; its start is ours); Qwen's code,
    `use_logn_attn` (logn); transformers' Mistral Large 4, Llama 4 (F = 8192) and
    Inkling; Vasylenko et al. (2025), arXiv:2506.16640, as in their code (asentmax).
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
        rule: Literal[
            "ssmax", "mistral_large4", "logn", "llama4", "inkling", "asentmax"
        ] = "ssmax",
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
        if rule == "asentmax":
            self.beta = linears(shape.n_layers, shape.d_model, shape.n_heads)  # w
            self.gamma = linears(shape.n_layers, shape.d_model, shape.n_heads)  # u
        self.wrap(inner, inner_options)
        # an output's norm cancels a factor of the logits; a phase is no logit
        _refuse_inside(self, GatedDelta, TAPA)

    def _numbers(self, start: float) -> nn.ParameterList:
        """Return a number per layer and head."""
        n_heads, layers = self.shape.n_heads, range(self.shape.n_layers)
        return nn.ParameterList(torch.full((n_heads,), start) for _ in layers)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def sharpened(q: Tensor) -> Tensor:
            n = torch.arange(1, q.shape[2] + 1, device=q.device)
            return q * self.factor(n[None, None], layer)[..., None]

        def rotate(q: Tensor, k: Tensor, inside: Layer) -> tuple[Tensor, Tensor]:
            q, k = inner.rotate(q, k, inside)
            return sharpened(q), k

        def prepare(q: Tensor, k: Tensor, inside: Layer) -> list[tuple[Tensor, Tensor]]:
            far = inner.prepare(q, k, inside)
            return [(sharpened(of_q), of_k) for of_q, of_k in far]

        core = core_of(inner)
        if isinstance(core, Heads):
            for part in core.modules():
                if isinstance(part, FarPairs):  # its far logits would stay as they are
                    raise Undefined(
                        f"'{self.name}' around 'heads' does not reach far pairs: put it"
                        " into the entries"
                    )
        if isinstance(core, FarPairs):  # its far logits come from `prepare`
            return self.altered(inner, rotate=rotate, prepare=prepare), inner_layer
        return self.altered(inner, rotate=rotate), inner_layer

    def factor(self, n: Tensor, layer: Layer) -> Tensor:
        """Return the factor of queries that see n (1, 1, T) keys, (1|B, 1|H, T)."""
        if self.rule == "logn":
            return (n.log() / self.trained).clamp(min=1)
        if self.rule == "llama4":
            return 1 + self.alpha * (n / self.floor).floor().log1p()
        if self.rule == "inkling":
            return 1 + self.alpha * (n / self.floor).clamp(min=1).log()
        if self.rule == "asentmax":
            x = exact(self.given(layer.x, "makes its scale from"))
            beta = F.softplus(self.beta[layer.index](x)).mT  # (B, H, T)
            gamma = 2 * self.gamma[layer.index](x).tanh().mT
            return 1 + beta * n.log1p() ** gamma
        s = self.scale[layer.index][:, None]
        if self.rule == "ssmax":
            return s * n.log()
        b = self.offset[layer.index][:, None]
        return s * n.log() + b


class Entmax(Wrapper):
    """Entmax in place of softmax, around another encoding: far below the largest logit,
    weights are 0. By default its temperature is learned (ASEntmax).

        weight_ij = max(0, (alpha - 1) logit_ij - tau_i)^(1/(alpha - 1)),
        tau_i such that a query's weights sum to 1

    Source: Vasylenko et al. (2025), arXiv:2506.16640, whose heads have no position, or
    ALiBi without the temperature (see `heads`); Peters et al. (2019), arXiv:1905.05702.
    Beyond training length: defined as far as the inner encoding is; the number of keys
    that have a weight need not grow.
    Checked against: bisection in fp64, with the Jacobian of Peters et al., on the
    oracle of the inner encoding; weights that the package entmax prints.
    """

    adds = ("attend",)

    def __init__(
        self,
        shape: Shape,
        inner: str = "temperature",
        inner_options: dict[str, Any] = NO_OPTIONS,
        alpha: Annotated[float, Gt(1), Lt(2)] = 1.5,
    ) -> None:
        super().__init__(shape)
        self.alpha = alpha
        if inner == "temperature":
            inner_options = {"rule": "asentmax"} | inner_options
        self.wrap(inner, inner_options)
        refuse_attend(self, inner)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def attend(logits: Tensor, v: Tensor, inside: Layer) -> Tensor:
            weights = entmax(logits, self.alpha)
            return weights @ v.to(weights.dtype)

        return self.altered(inner, attend=attend), inner_layer


def entmax(logits: Tensor, alpha: float) -> Tensor:
    """Return the weights of alpha-entmax over the last axis; 0 where a logit is -inf.

    Their sum falls in tau and is convex. So Newton's method, begun where the largest
    logit has weight 1, nears tau from below, in about ln(keys) steps and a few more.
    """
    power = 1 / (alpha - 1)
    z = (alpha - 1) * logits
    z = z - z.amax(-1, keepdim=True)
    tau = torch.full_like(z[..., :1], -1.0)
    with torch.no_grad():
        for _ in range(int(math.log(z.shape[-1])) + 6):
            tau = _newton_step(z, tau, power)
    # the last step has gradients: with them the sum of weights stays 1
    tau = _newton_step(z, tau, power)
    return (z - tau).clamp(min=0) ** power


def _newton_step(z: Tensor, tau: Tensor, power: float) -> Tensor:
    """Return a tau with which the sum of weights is nearer to 1."""
    above = (z - tau).clamp(min=0)
    excess = (above**power).sum(-1, keepdim=True) - 1
    slope = power * (above.detach() ** (power - 1)).sum(-1, keepdim=True)
    return tau + excess / slope


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
        _refuse_inside(self, GatedDelta)  # its weights have signs, and no softmax

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def scores(logits: Tensor, q: Tensor, k: Tensor, inside: Layer) -> Tensor:
            r = inside.distance.abs()
            growth = 2 * (r / self.tau).log1p()[:, None]
            logits = inner.scores(logits, q, k, inside)
            return logits * (growth + 1).sqrt() - growth

        return self.altered(inner, scores=scores), inner_layer


def _refuse_inside(wrapper: Wrapper, *kinds: type[Encoding]) -> None:
    """Raise UserError for an encoding of these classes inside."""
    for part in wrapper.modules():
        if isinstance(part, kinds):
            raise UserError(
                f"'{wrapper.name}' has no meaning around '{part.name}': expected"
                " another encoding inside, such as rope"
            )
