"""Wrappers that mix tokens, heads or a sink into another encoding's attention: Canon,
CCA, DAPE and learned sinks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.contextual import causal_convolution
from posbench.encodings.wrapper import NO_OPTIONS, Wrapper, build_inner
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
            return lambda *tensors: hook(
                *self.convolved(layer.index, *tensors[:-1]), tensors[-1]
            )

        names = {"rotate", "map_values"} | (inner.hooks & {"prepare"})
        return (
            self.altered(
                inner, **{name: of_convolved(getattr(inner, name)) for name in names}
            ),
            inner_layer,
        )


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
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
        # the last is the token's own
        sizes = {
            a: (shape.n_layers, heads[a], shape.head_dim, width) for a in convolved
        }
        self.weights = nn.ParameterDict(
            {
                a: nn.Parameter(torch.empty(size).uniform_(-1, 1) * width**-0.5)
                for a, size in sizes.items()
            }
        )
        self.history = frozenset({"q"} & set(convolved))
        self.wrap(inner, inner_options)

    def convolved(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        names = "qk" if len(tensors) == 2 else "v"
        return tuple(
            self._convolved(name, tensor, layer)
            for name, tensor in zip(names, tensors, strict=True)
        )

    def _convolved(self, name: str, a: Tensor, layer: int) -> Tensor:
        if name not in self.weights:
            return a
        weights = self.weights[name][layer].repeat_interleave(
            a.shape[1] // len(self.weights[name][layer]), dim=0
        )
        identity = (
            F.pad(weights.new_ones(1), (weights.shape[-1] - 1, 0))
            if self.residual
            else 0
        )
        channels = a.transpose(1, 2).flatten(2)  # (B, T, H Dh)
        mixed = causal_convolution(channels, (weights + identity).flatten(0, 1))
        return mixed.view(*channels.shape[:2], *weights.shape[:2]).transpose(1, 2)


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
        size, layers = heads * shape.head_dim, range(shape.n_layers)
        self.by_channel = nn.ModuleList(
            nn.Conv1d(size, size, channel_width, groups=size) for _ in layers
        )
        self.by_head = nn.ModuleList(
            nn.Conv1d(size, size, head_width, groups=heads) for _ in layers
        )
        self.wrap(inner, inner_options)

    def convolved(self, layer: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        if len(tensors) == 1:
            return (self._late(*tensors),)
        q, k = tensors
        mean = (q + k) / 2
        of_keys = mean.view(len(q), -1, self.group, *mean.shape[2:]).mean(2)
        # (B, (H + Hkv) Dh, T)
        channels = torch.cat((q, k[:, :: self.group]), dim=1).mT.flatten(1, 2)
        convolved = self.by_head[layer](
            self.by_channel[layer](F.pad(channels, (self.earlier, 0)))
        )
        convolved = convolved.view(
            len(q), -1, self.shape.head_dim, q.shape[2]
        ).mT.contiguous()
        of_q, of_k = convolved.split((self.shape.n_heads, self.shape.n_kv_heads), dim=1)
        return of_q + mean, (of_k + of_keys).repeat_interleave(self.group, dim=1)

    def _late(self, v: Tensor) -> Tensor:
        tokens = v[:, :: self.group].transpose(1, 2)  # (B, T, Hkv, Dh)
        current, late = tokens.flatten(2).tensor_split(
            (self.shape.n_kv_heads * self.shape.head_dim // 2,), dim=-1
        )
        shifted = (
            torch.cat((current, F.pad(late[:, :-1], (0, 0, 1, 0))), dim=-1)
            .view_as(tokens)
            .transpose(1, 2)
        )
        return shifted.repeat_interleave(self.group, dim=1)


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
        shapes = (
            [dataclasses.replace(shape, n_layers=1)] * shape.n_layers
            if per_layer
            else [shape]
        )
        self.adopt(
            [
                build_inner(inner, inner_shape, inner_options, "encoding.inner_options")
                for inner_shape in shapes
            ]
        )
        encoding, biases = self.inner_encodings[0], ({"distance_bias"}, {"bias"})
        if (
            type(encoding).at is not Encoding.at
            or encoding.hooks - {"prepare", "key_bias"} not in biases
        ):
            raise UserError(
                f"encoding.inner is '{inner}': expected one that only adds a bias, such"
                " as alibi"
            )
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(2 * shape.n_heads, hidden),
                nn.LeakyReLU(),
                nn.Linear(hidden, shape.n_heads),
            )
            for _ in range(shape.n_layers)
        )

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
        bias = (
            inner.bias(q, k, inner_layer)
            if by_distance is None
            else by_distance.movedim(0, 1)
        )
        assert bias is not None  # one of the two hooks is there
        bias = bias.expand_as(logits)
        return logits + bias + self.adapted(torch.cat([logits, bias], dim=1), layer)

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        """Return the network's output (B, H, Tq, Tk), to be added, for logits and
        biases (B, 2H, Tq, Tk).
        """
        return self.networks[layer.index](inputs.movedim(1, -1)).movedim(-1, 1)

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
        widths = 2 * shape.n_heads, hidden, shape.n_heads
        self.networks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(*widths[:2], (1, kernel)),
                nn.LeakyReLU(),
                nn.Conv2d(*widths[1:], (1, kernel)),
            )
            for _ in range(shape.n_layers)
        )

    def adapted(self, inputs: Tensor, layer: Layer) -> Tensor:
        reach, (first, leaky, second) = (
            self.reach,
            cast(nn.Sequential, self.networks[layer.index]),
        )
        # Visible keys and the `reach` keys after them, where the first convolution
        # still sees visible ones.
        in_reach = torch.stack(
            [F.pad(layer.visible, (shift, reach - shift)) for shift in range(reach + 1)]
        ).any(0)
        visible = F.pad(inputs.masked_fill(~layer.visible, 0), (reach, 2 * reach))
        return second(
            F.pad(leaky(first(visible)).masked_fill(~in_reach, 0), (reach, 0))
        )


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
        if "attend" in self.inner_encodings[0].hooks:
            raise UserError(
                f"encoding.inner is '{inner}', which replaces the softmax: expected"
                " another, such as rope"
            )

    def at(self, layer: Layer) -> tuple[Encoding, Layer]:
        inner, inner_layer = self.within(layer)

        def attend(logits: Tensor, v: Tensor, inside: Layer) -> Tensor:
            sinks = self.sinks[layer.index][:, None, None].expand(*logits.shape[:-1], 1)
            weights = torch.cat((logits, sinks), dim=-1).softmax(-1)[..., :-1]
            return weights @ v.to(weights.dtype)

        return self.altered(inner, attend=attend), inner_layer
