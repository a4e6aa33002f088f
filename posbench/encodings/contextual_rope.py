"""Rotary encodings whose positions or angles are computed from what the tokens say."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _start as starts
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.contextual import causal_convolution
from posbench.encodings.rope import Layout, Rotary, check_pairs, double, frequencies, turned
from posbench.options import Above1, Count


class Summed(Encoding):
    """Base of rotary encodings that add up angles from token to token: their order counts, not position numbers."""

    history = frozenset({"x"})

    def __init__(self, shape: Shape, base: float, layout: Layout) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.base, self.layout = base, layout

    def steps(self, x: Tensor, layer: int) -> Tensor:
        """Return the angle of each token, from the layer's input (B, T, D): (B, H, T, Dh / 2), fp64 before the sum."""
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        angles = self.steps(self.given(layer.x, "makes its angles from"), layer.index).cumsum(2)
        rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(q.device)
        return turned(q, k, rotation, self.layout)


class CARoPE(Summed):
    """Context-aware RoPE (CARoPE): each token sets, per head, the size of its step in position.

        angle_tp = sum over s = 0 .. t of θ_s^p,   θ_s = 1 / (1 + softplus(w_h·x_s + c)),   p = 0 .. d/2-1

    The constant c, which the paper does not have, makes θ = base^(-2/d) where w_h·x is 0: w starts at 0, which is RoPE.

    Source: Veisi et al., "Context-aware Rotary Position Embedding" (2025), arXiv:2507.23083, section 2.
    Beyond training length: defined everywhere; sums reach angles never seen in training.
    Checked against: plain loops from the paper; at its start it is RoPE.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__(shape, base, layout)
        start = base ** (2 / shape.head_dim) - 1  # 1/θ - 1 where w·x is 0
        self.constant = start + math.log(-math.expm1(-start))  # the inverse of softplus
        self.step = nn.Parameter(torch.zeros(shape.n_layers, shape.n_heads, shape.d_model))

    def steps(self, x: Tensor, layer: int) -> Tensor:
        sizes = double((x @ self.step[layer].mT).mT)  # (B, H, T)
        logs = (1 + F.softplus(sizes + self.constant)).log()
        return (-torch.arange(self.shape.head_dim // 2, device=logs.device) * logs[..., None]).exp()


class SelectiveRoPE(Summed):
    """Selective RoPE: each token sets its own rotation angles, per head and pair.

        angle_tp = base^(-2p/d) · sum over s = 0 .. t of phi_sp
        phi_t = (conv(W_2 W_1 n(x))_t [+ exp(b)]) [· sigmoid(w_h·n(x)_t + c_h)]

    n scales each head's part of the input to length 1, conv is a causal convolution over four tokens, the brackets are
    the options `bias` and `gate`. It starts near `none`, as in the authors' models.

    Source: Movahedi et al., "Selective Rotary Position Embedding" (2026), arXiv:2511.17388, and the authors' code.
    Beyond training length: defined everywhere; sums reach angles never seen in training where tokens turn one way.
    Checked against: plain loops from the authors' description; with a bias alone, it is RoPE.
    """

    name = "selective_rope"

    def __init__(
        self, shape: Shape, base: Above1 = 500000.0, layout: Layout = "interleaved", rank: Count = 32,
        bias: bool = False, gate: bool = False, start: starts.Start = "normal",
    ) -> None:  # fmt: skip
        super().__init__(shape, base, layout)
        pairs, layers = shape.n_heads * shape.head_dim // 2, range(shape.n_layers)
        self.down = nn.ModuleList(nn.Linear(shape.d_model, rank, bias=False) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(rank, pairs, bias=False) for _ in layers)
        self.convolution = nn.ModuleList(nn.Conv1d(pairs, pairs, 4, groups=pairs, bias=False) for _ in layers)
        self.constant = nn.Parameter(torch.zeros(shape.n_layers, pairs)) if bias else None
        self.gate = nn.ModuleList(nn.Linear(shape.d_model, shape.n_heads) for _ in layers) if gate else None
        starts.start(self, start)

    def steps(self, x: Tensor, layer: int) -> Tensor:
        parts = x.view(*x.shape[:2], self.shape.n_heads, -1)
        x = (parts * (parts.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)
        weight = self.convolution[layer].get_parameter("weight")[:, 0]
        phi = causal_convolution(self.up[layer](self.down[layer](x)), weight)
        if self.constant is not None:
            phi = phi + self.constant[layer].exp()
        phi = phi.view(*x.shape[:2], self.shape.n_heads, -1).transpose(1, 2)
        if self.gate is not None:
            phi = phi * self.gate[layer](x).sigmoid().mT[..., None]
        phi = double(phi)
        return phi * frequencies(self.shape.head_dim, self.base).to(phi.device)


class RePo(Rotary):
    """Context re-positioning (RePo): a small network places each token, per head, by its content.

        r_i = silu(W_g x_i) · (W_c x_i),   z_ih = w_h·r_i,   then RoPE with the position z_ih instead of i

    W_g and W_c have an eighth of the model's width. Layers below `first` have plain RoPE.

    Source: Li et al. (2025), arXiv:2512.14391, and the authors' code, which has plain RoPE in 5 of 16 layers.
    Beyond training length: defined everywhere; in re-positioned layers angles do not grow with length by themselves.
    Checked against: plain loops from the authors' description; by hand, also the authors' code.
    """

    history = frozenset({"x"})

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", first: int | None = None
    ) -> None:
        super().__init__(shape, base, layout)
        layers, width = shape.n_layers, max(1, shape.d_model // 8)
        self.first = round(layers * 5 / 16) if first is None else first
        self.expect(0 <= self.first < layers, "first", first, f"a layer of the model, 0 to {layers - 1}, or null")
        placed = range(self.first, layers)
        self.gate = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in placed)
        self.content = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in placed)
        self.position = nn.ModuleList(nn.Linear(width, shape.n_heads, bias=False) for _ in placed)
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=0.02, a=-0.06, b=0.06)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if layer.index < self.first:
            return super().rotate(q, k, layer)
        x, index = self.given(layer.x, "makes its positions from"), layer.index - self.first
        positions = self.position[index](F.silu(self.gate[index](x)) * self.content[index](x)).mT  # (B, H, T)
        turns = self.make_tables(positions.flatten(0, 1)).view(*positions.shape, -1)  # (B, H, T, Dh/2)
        return turned(q, k, turns, self.layout)
