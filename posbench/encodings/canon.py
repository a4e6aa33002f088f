"""Short convolutions of queries, keys and values, before another encoding gets them."""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper
from posbench.options import Count


class Convolving(Wrapper):
    """Base of these wrappers: the hooks of the inner encoding get what the two methods below return."""

    adds = ("rotate", "map_values")

    def queries_and_keys(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def values(self, v: Tensor, layer: int) -> Tensor:
        raise NotImplementedError

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, within = self.within(layer)

        def of_convolved(hook: Callable[..., Any]) -> Callable[..., Any]:
            return lambda q, k, inside: hook(*self.queries_and_keys(q, k, layer.index), inside)

        def map_values(v: Tensor, inside: Layer) -> Tensor:
            return inner.map_values(self.values(v, layer.index), inside)

        names = {"rotate"} | (inner.hooks & {"prepare"})
        hooks = {name: of_convolved(getattr(inner, name)) for name in names}
        return self.altered(inner, map_values=map_values, **hooks), within


class Canon(Convolving):
    """A short convolution: each token's queries, keys and values see a few tokens before it.

        a'_t = a_t + sum over s = 0 .. width-1 of w_s a_(t-s),   for a in q, k and v; every channel has its own w

    Of the author's four places in a block this is the second, Canon-B. Inkling convolves k and v only.

    Source: Allen-Zhu (2025), arXiv:2512.17351; weights start as those of torch's Conv1d, as in the author's code.
    Beyond training length: defined as far as the inner encoding; without one attention spreads over more keys.
    Checked against: transformers Inkling's short convolution, before what the inner encoding is checked against.
    """

    def __init__(
        self, shape: Shape, width: Count = 4, convolved: Literal["qkv", "qk", "kv"] = "qkv", residual: bool = True,
        inner: str = "none", inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.residual = residual
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
        sizes = {a: (shape.n_layers, heads[a], shape.head_dim, width) for a in convolved}  # the last is the token's own
        self.weights = nn.ParameterDict(
            {a: nn.Parameter(torch.empty(size).uniform_(-1, 1) * width**-0.5) for a, size in sizes.items()}
        )
        self.history = frozenset({"q"} & set(convolved))
        self.wrap(inner, inner_options)

    def queries_and_keys(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        return self._convolved("q", q, layer), self._convolved("k", k, layer)

    def values(self, v: Tensor, layer: int) -> Tensor:
        return self._convolved("v", v, layer)

    def _convolved(self, name: str, a: Tensor, layer: int) -> Tensor:
        """Return q, k or v (B, H, T, Dh) after the convolution."""
        if name not in self.weights:
            return a
        weights = self.weights[name][layer].repeat_interleave(a.shape[1] // len(self.weights[name][layer]), dim=0)
        itself = F.pad(weights.new_ones(1), (weights.shape[-1] - 1, 0)) if self.residual else 0
        channels = a.transpose(1, 2).flatten(2)  # (B, T, H Dh)
        mixed = causal_convolution(channels, (weights + itself).flatten(0, 1))
        return mixed.view(*channels.shape[:2], *weights.shape[:2]).transpose(1, 2)


class CCA(Convolving):
    """The convolutions and the late values of compressed convolutional attention (CCA).

        [q'_t ; k'_t] = conv_head(conv_channel([q ; k]))_t + [m_t ; m_t],   m_t = (q_t + k_t) / 2
        v'_t = [first half of v_t ; second half of v_(t-1)]

    The convolutions are short and causal, one per channel and one across the channels of a head. If a group of query
    heads shares a key head, k' gets the mean of their m. The halves are halves of all heads side by side.

    Source: Figliolia et al. (2025), arXiv:2510.04476, as in transformers' Zaya, without compression and norms.
    Beyond training length: defined as far as the inner encoding; without one attention spreads over more keys.
    Checked against: transformers Zaya, before what the inner encoding is checked against.
    """

    history = frozenset({"q"})

    def __init__(
        self, shape: Shape, channel_width: Count = 2, head_width: Count = 2,
        inner: str = "none", inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.earlier = channel_width + head_width - 2  # tokens before the current one that both convolutions see
        self.group = shape.n_heads // shape.n_kv_heads  # query heads that share a key head
        heads = shape.n_heads + shape.n_kv_heads
        size, layers = heads * shape.head_dim, range(shape.n_layers)
        self.by_channel = nn.ModuleList(nn.Conv1d(size, size, channel_width, groups=size) for _ in layers)
        self.by_head = nn.ModuleList(nn.Conv1d(size, size, head_width, groups=heads) for _ in layers)
        self.wrap(inner, inner_options)

    def queries_and_keys(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        mean = (q + k) / 2
        of_keys = mean.view(len(q), -1, self.group, *mean.shape[2:]).mean(2)
        channels = torch.cat((q, k[:, :: self.group]), dim=1).mT.flatten(1, 2)  # (B, (H + Hkv) Dh, T)
        mixed = self.by_head[layer](self.by_channel[layer](F.pad(channels, (self.earlier, 0))))
        mixed = mixed.view(len(q), -1, self.shape.head_dim, q.shape[2]).mT.contiguous()
        of_q, of_k = mixed.split((self.shape.n_heads, self.shape.n_kv_heads), dim=1)
        return of_q + mean, (of_k + of_keys).repeat_interleave(self.group, dim=1)

    def values(self, v: Tensor, layer: int) -> Tensor:
        tokens = v[:, :: self.group].transpose(1, 2)  # (B, T, Hkv, Dh)
        now = tokens.flatten(2)
        half = now.shape[-1] // 2
        late = F.pad(now[:, :-1, half:], (0, 0, 1, 0))
        shifted = torch.cat((now[..., :half], late), dim=-1).view_as(tokens).transpose(1, 2)
        return shifted.repeat_interleave(self.group, dim=1)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sum over s = 0 .. K-1 of weight_(K-1-s) x_(t-s), of x (B, T, C) and weight (C, K).

    As a sum, since torch's own takes three times as long on CPUs.
    """
    length, width = x.shape[1], weight.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    out = padded[:, :length] * weight[:, 0]
    for ahead in range(1, width):
        out = out + padded[:, ahead : ahead + length] * weight[:, ahead]
    return out.to(x.dtype)
