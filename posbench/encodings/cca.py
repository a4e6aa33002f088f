"""The convolutions and the late values of compressed convolutional attention (CCA).

Queries and keys pass through two short causal convolutions, one per channel and one across the channels of a head.
Their mean is added. Half of all value channels come from the token before:

    [q'_t ; k'_t] = conv_head(conv_channel([q ; k]))_t + [m_t ; m_t],   m_t = (q_t + k_t) / 2
    v'_t = [first half of v_t ; second half of v_(t-1)]

If a group of query heads shares a key head, k' gets the mean of their m. The halves are halves of all heads side by
side: with several heads, the second half of the heads has the values of the token before. The option `inner` names
another encoding, which then gets q', k' and v'.

Source: Figliolia et al., "Compressed Convolutional Attention: Efficient Attention in a Compressed Latent Space" (2025),
arXiv:2510.04476, as in transformers' Zaya: without the compression and the norm of queries and keys. Its RoPE, on half
of the channels, is `inner: partial_rope`.
Beyond training length: defined as far as the inner encoding; without one attention spreads over more keys than trained.
Checked against: transformers Zaya, before what the inner encoding is checked against.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings._wrapper import NO_OPTIONS, Wrapper, build_inner
from posbench.encodings.base import Encoding, Layer, Shape


class CCA(Wrapper):
    history = frozenset({"q"})

    def __init__(
        self,
        shape: Shape,
        channel_width: int = 2,
        head_width: int = 2,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(shape)
        for option, width in (("channel_width", channel_width), ("head_width", head_width)):
            self.expect(width >= 1, option, width, "at least 1")
        self.earlier = channel_width + head_width - 2  # tokens before the current one that both convolutions see
        heads = shape.n_heads + shape.n_kv_heads
        size, layers = heads * shape.head_dim, range(shape.n_layers)
        self.by_channel = nn.ModuleList(nn.Conv1d(size, size, channel_width, groups=size) for _ in layers)
        self.by_head = nn.ModuleList(nn.Conv1d(size, size, head_width, groups=heads) for _ in layers)
        self.adopt([build_inner(inner, shape, inner_options, "encoding.inner_options")])

    @property
    def hooks(self) -> frozenset[str]:
        return super().hooks | {"rotate", "map_values"}

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        return self.before(layer, self._queries_and_keys, self._values)

    def _queries_and_keys(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        mean = (q.float() + k.float()) / 2
        of_keys = mean.view(len(q), self.shape.n_kv_heads, -1, *mean.shape[2:]).mean(2)
        channels = torch.cat((q.float(), self._few(k.float())), dim=1).mT.flatten(1, 2)  # (B, (H + Hkv) Dh, T)
        mixed = self.by_head[layer](self.by_channel[layer](F.pad(channels, (self.earlier, 0))))
        mixed = mixed.view(len(q), -1, self.shape.head_dim, q.shape[2]).mT.contiguous()
        of_q, of_k = mixed.split((self.shape.n_heads, self.shape.n_kv_heads), dim=1)
        return (of_q + mean).to(q.dtype), self._many(of_k + of_keys).to(k.dtype)

    def _values(self, v: Tensor, layer: int) -> Tensor:
        few = self._few(v)
        now = few.transpose(1, 2).flatten(2)  # (B, T, Hkv Dh)
        half = now.shape[-1] // 2
        late = F.pad(now[:, :-1, half:], (0, 0, 1, 0))
        return self._many(torch.cat((now[..., :half], late), dim=-1).view_as(few.transpose(1, 2)).transpose(1, 2))

    def _few(self, shared: Tensor) -> Tensor:
        """Keys or values (B, H, T, Dh) without the repetition of heads for groups of query heads."""
        return shared[:, :: self.shape.n_heads // self.shape.n_kv_heads]

    def _many(self, few: Tensor) -> Tensor:
        return few.repeat_interleave(self.shape.n_heads // self.shape.n_kv_heads, dim=1)
