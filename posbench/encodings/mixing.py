"""Wrappers that mix tokens, heads or a sink into another encoding's attention: Canon,
CCA, DAPE and learned sinks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape, split_heads
from posbench.encodings.contextual import convolved_heads, kernels_of_heads
from posbench.encodings.wrapper import (
    NO_OPTIONS,
    Wrapper,
    build_inner,
    refuse_attend,
)
from posbench.errors import UserError
from posbench.options import Count


class Convolving(Wrapper):
    """Base of short convolutions: the hooks of the inner encoding get q and k, or v, as
    `convolved` returns them.
    """

    adds = ("rotate", "map_values")
    # of the index of a layer and tensors (B, H, T, Dh)
    convolved: Callable[..., tuple[Tensor, ...]]

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def of_convolved(hook: Callable[..., Any]) -> Callable[..., Any]:
            def convolving(*tensors_and_layer: Any) -> Any:
                *tensors, inside = tensors_and_layer
                return hook(*self.convolved(layer.index, *tensors), inside)

            return convolving

        hooks = {
            "rotate": of_convolved(inner.rotate),
            "map_values": of_convolved(inner.map_values),
        }
        if "prepare" in inner.hooks:
            hooks["prepare"] = of_convolved(inner.prepare)
        return self.altered(inner, **hooks), inner_layer


class Canon(Convolving):
    """A short convolution: each token's queries, keys and values see a few tokens
    before it.

        a'_t = a_t + sum over s = 0 .. width-1 of w_s a_(t-s),
        for a in q, k and v; every channel has its own w

    Source: Allen-Zhu (2025), arXiv:2512.17351 (Canon-B); weights start as those of
    torch's Conv1d, as in his code.
    Beyond training length: defined as far as the inner encoding is; without one,
    attention spreads over more keys.
    Checked against: transformers Inkling's short convolution, followed by the oracle of
    the inner encoding.
    """

    def __init__(
        self,
        shape: Shape,
        width: Count = 4,
        convolved: Literal["qkv", "qk", "kv"] = "qkv",
        residual: bool = True,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(shape)
        self.residual = residual
        self.weights = kernels_of_heads(shape, convolved, width)
        if "q" in convolved:
            self.history = frozenset({"q"})
        self.wrap(inner, inner_options)

    def convolved(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if len(tensors) == 1:
            return (self._convolved("v", tensors[0], layer),)
        q, k = tensors
        return self._convolved("q", q, layer), self._convolved("k", k, layer)

    def _convolved(self, name: str, a: Tensor, layer: int) -> Tensor:
        if name not in self.weights:
            return a
        kernel: Tensor = self.weights[name][layer]  # (H or Hkv, Dh, width)
        if self.residual:
            own = F.pad(kernel.new_ones(1), (kernel.shape[-1] - 1, 0))
            kernel = kernel + own
        return convolved_heads(a, kernel)


class CCA(Convolving):
    """The convolutions and the late values of compressed convolutional attention (CCA).

        [q'_t ; k'_t] = conv_head(conv_channel([q ; k]))_t + [m_t ; m_t],
        m_t = (q_t + k_t) / 2,   short and causal
        v'_t = [first half of v_t ; second half of v_(t-1)],
        halves are those of all heads side by side

    Source: Figliolia et al. (2025), arXiv:2510.04476, as in transformers' Zaya, without
    compression and norms.
    Beyond training length: defined as far as the inner encoding is; without one,
    attention spreads over more keys.
    Checked against: transformers Zaya, followed by the oracle of the inner encoding.
    """

    history = frozenset({"q"})

    def __init__(
        self,
        shape: Shape,
        channel_width: Count = 2,
        head_width: Count = 2,
        inner: str = "none",
        inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(shape)
        # tokens before the current one that both convolutions see
        self.earlier = channel_width + head_width - 2
        # query heads that share a key head
        self.group = shape.n_heads // shape.n_kv_heads
        heads = shape.n_heads + shape.n_kv_heads
        size = heads * shape.head_dim
        layers = range(shape.n_layers)
        self.by_channel = nn.ModuleList(
            nn.Conv1d(size, size, channel_width, groups=size) for _ in layers
        )
        self.by_head = nn.ModuleList(
            nn.Conv1d(size, size, head_width, groups=heads) for _ in layers
        )
        self.wrap(inner, inner_options)

    def convolved(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if len(tensors) == 1:
            return (self._late(tensors[0]),)
        q, k = tensors
        batch, _, length, width = q.shape
        m = (q + k) / 2
        m_of_keys = m.view(batch, -1, self.group, length, width).mean(2)

        heads = torch.cat((q, k[:, :: self.group]), dim=1)
        channels = heads.mT.flatten(1, 2)  # (B, (H + Hkv)·Dh, T)
        channels = F.pad(channels, (self.earlier, 0))
        convolved = self.by_head[layer](self.by_channel[layer](channels))
        heads = convolved.view(batch, -1, width, length).mT.contiguous()
        of_q, of_k = heads.split((self.shape.n_heads, self.shape.n_kv_heads), dim=1)

        k = (of_k + m_of_keys).repeat_interleave(self.group, dim=1)
        return of_q + m, k

    def _late(self, v: Tensor) -> Tensor:
        """Return v with the second half of its channels from the token before."""
        tokens = v[:, :: self.group].transpose(1, 2)  # (B, T, Hkv, Dh)
        channels = tokens.flatten(2)
        half = channels.shape[-1] // 2
        current, late = channels[..., :half], channels[..., half:]
        late = F.pad(late[:, :-1], (0, 0, 1, 0))
        shifted = torch.cat((current, late), dim=-1)
        heads = split_heads(shifted, self.shape.n_kv_heads)
        return heads.repeat_interleave(self.group, dim=1)


class DAPE(Wrapper):
    """Data-adaptive positions (DAPE): a network over the heads adapts a bias to the
    content.

        logits_ij = z_ij + b_ij + W2 · leaky_relu(W1 · [z_ij ; b_ij] + c1) + c2,
        z_ij = q_i·k_j / sqrt(d)

    z and b, the inner encoding's bias, are vectors over heads; with `per_layer: false`
    all layers share one encoding.

    Source: Zheng et al. (2024), arXiv:2405.14722, section 3, and the authors' code
    (chuanyang-Zheng/DAPE).
    Beyond training length: defined as far as the encoding inside; the network may have
    to judge biases it has not met.
    Checked against: plain loops around the oracle of the encoding inside.
    """

    at = Encoding.at

    def __init__(
        self,
        shape: Shape,
        inner: str = "kerple_log",
        inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: Count = 32,
        per_layer: bool = True,
    ) -> None:
        super().__init__(shape)
        shapes = [shape]
        if per_layer:
            shapes = [dataclasses.replace(shape, n_layers=1)] * shape.n_layers
        self.adopt(
            [
                build_inner(inner, inner_shape, inner_options, "encoding.inner_options")
                for inner_shape in shapes
            ]
        )
        encoding = self.inner_encodings[0]
        acting = encoding.hooks - {"prepare", "key_bias"}
        only_adds = acting in ({"distance_bias"}, {"bias"})
        if type(encoding).at is not Encoding.at or not only_adds:
            raise UserError(
                f"encoding.inner is '{inner}': expected one that only adds a bias, such"
                " as alibi"
            )
        self.networks = nn.ModuleList(
            self._network(hidden) for _ in range(shape.n_layers)
        )

    def _network(self, hidden: int) -> nn.Sequential:
        n_heads = self.shape.n_heads
        first = nn.Linear(2 * n_heads, hidden)
        return nn.Sequential(first, nn.LeakyReLU(), nn.Linear(hidden, n_heads))

    @property
    def hooks(self) -> frozenset[str]:
        # the bias of the inner encoding is added in `scores`
        return frozenset({"prepare", "scores"})

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Any:
        inner, inner_layer = self._inner(layer)
        return inner.prepare(q, k, inner_layer)

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        inner, inner_layer = self._inner(layer)
        by_distance = inner.distance_bias(inner_layer.distance, inner_layer)
        if by_distance is not None:
            bias: Tensor | None = by_distance.movedim(0, 1)
        else:
            bias = inner.bias(q, k, inner_layer)
        assert bias is not None  # one of the two hooks is there
        bias = bias.expand_as(logits)
        biased = logits + bias
        return biased + self.adapted(torch.cat([logits, bias], dim=1), layer)

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        """Return the network's output (B, H, Tq, Tk), to be added, for logits and
        biases (B, 2H, Tq, Tk).
        """
        network = self.networks[layer.index]
        return network(inputs.movedim(1, -1)).movedim(-1, 1)

    def _inner(self, layer: Layer) -> tuple[Encoding, Layer]:
        if len(self.inners) == 1:
            return self.within(layer)
        return self.within(layer.replace(index=0), layer.index)


class DAPEV2(DAPE):
    """DAPE V2: logits of neighbouring keys are read together, as a picture would be.

        logits = z + b + conv2(leaky_relu(conv1([z ; b]))),
        2H -> hidden -> H channels, each over `kernel` keys

    z and b are those of `dape`. In [z ; b] and in conv1's outputs hidden keys count as
    zeros, so that nothing leaks.

    Source: Zheng et al. (2024), arXiv:2410.04798, and the authors' code
    (chuanyang-Zheng/DAPE).
    Beyond training length: defined as far as the encoding inside; the network may have
    to judge biases it has not met.
    Checked against: plain loops around the oracle of the encoding inside; with a kernel
    of 1, it is dape.
    """

    def __init__(
        self,
        shape: Shape,
        inner: str = "kerple_log",
        inner_options: dict[str, Any] = NO_OPTIONS,
        hidden: Count = 32,
        kernel: Count = 3,
        per_layer: bool = True,
    ) -> None:
        super().__init__(shape, inner, inner_options, hidden, per_layer)
        self.expect(kernel % 2 == 1, "kernel", kernel, "an odd number of keys")
        self.reach = kernel // 2  # keys to either side
        self.networks = nn.ModuleList(
            self._wide_network(hidden, kernel) for _ in range(shape.n_layers)
        )

    def _wide_network(self, hidden: int, kernel: int) -> nn.Sequential:
        n_heads, window = self.shape.n_heads, (1, kernel)
        first = nn.Conv2d(2 * n_heads, hidden, window)
        return nn.Sequential(first, nn.LeakyReLU(), nn.Conv2d(hidden, n_heads, window))

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        reach = self.reach
        first, leaky, second = cast(nn.Sequential, self.networks[layer.index])
        # Visible keys and the `reach` keys after them, where the first convolution
        # still sees visible ones.
        shifted = [
            F.pad(layer.visible, (shift, reach - shift)) for shift in range(reach + 1)
        ]
        in_reach = torch.stack(shifted).any(0)

        visible = inputs.masked_fill(~layer.visible, 0)
        hidden = leaky(first(F.pad(visible, (reach, 2 * reach))))
        hidden = hidden.masked_fill(~in_reach, 0)
        return second(F.pad(hidden, (reach, 0)))


class LearnedSinks(Wrapper):
    """Learned attention sinks around another encoding: heads that may attend to
    nothing.

        weight_ij = exp(logit_ij) / (exp(s_h) + sum over j' of exp(logit_ij')),
        s learned per layer and head

    Source: transformers' gpt-oss, whose sinks start from N(0, 0.02) around YaRN, under
    a window in every other layer.
    Beyond training length: defined as far as the inner encoding is; over more keys a
    sink of the same size takes less.
    Checked against: transformers gpt-oss, on queries, keys and biases of the oracle of
    the inner encoding.
    """

    adds = ("attend",)

    def __init__(
        self,
        shape: Shape,
        inner: str = "rope",
        inner_options: dict[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(shape)
        self.sinks = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads) * 0.02)
        self.wrap(inner, inner_options)
        refuse_attend(self, inner)

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def attend(logits: Tensor, v: Tensor, inside: Layer) -> Tensor:
            sinks = self.sinks[layer.index][:, None, None]  # s, (H, 1, 1)
            column = sinks.expand(*logits.shape[:-1], 1)
            with_sink = torch.cat((logits, column), dim=-1)
            weights = with_sink.softmax(-1)[..., :-1]
            return weights @ v.to(weights.dtype)

        return self.altered(inner, attend=attend), inner_layer
