"""Selective RoPE: each token sets its own rotation angles.

RoPE turns a pair by the same angle per token. Here each token has its own angle per head and pair, computed from the
layer's input, and a position is the sum of all angles up to it:

    angle_tp = base^(-2p/d) · sum over s = 0 .. t of phi_sp
    phi_t = (conv(W_2 W_1 n(x))_t [+ exp(b)]) [· sigmoid(w_h·n(x)_t + c_h)]

n scales each head's part of the input to length 1. conv is a causal convolution over four tokens, per channel. W_2 W_1
has a low rank. The brackets are the options `bias` and `gate`. With a bias and zero weights, all angles are RoPE's.
Order is that of the tokens; position numbers are not used.

Weights start normal with deviation 0.02, as all linear maps and convolutions do in the authors' models. Three of them
follow one another, so the first angles are near 0: the model starts as `none`. `start: torch` gives torch's larger
ones.

Source: Movahedi et al., "Selective Rotary Position Embedding" (2026), arXiv:2511.17388; formula and start are those of
the authors' code (neither bias nor gate, rank 32 as in its language models, 16 where none is given).
Beyond training length: defined everywhere; sums reach angles never seen in training where tokens turn one way.
Checked against: plain loops from the authors' description; with a bias alone, it is RoPE.
"""

import math

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings import _start as starts
from posbench.encodings._convolution import causal_convolution
from posbench.encodings.base import Encoding, Layer, Shape

TOKENS = 4  # width of the convolution


class SelectiveRoPE(Encoding):
    name = "selective_rope"
    history = frozenset({"x"})

    def __init__(
        self,
        shape: Shape,
        base: float = 500000.0,
        layout: rotary.Layout = "interleaved",
        rank: int = 32,
        bias: bool = False,
        gate: bool = False,
        start: starts.Start = "normal",
    ) -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        self.expect(rank >= 1, "rank", rank, "at least 1")
        rotary.check_pairs(self.name, shape)
        self.base, self.layout = base, layout
        pairs, layers = shape.n_heads * shape.head_dim // 2, range(shape.n_layers)
        self.down = nn.ModuleList(nn.Linear(shape.d_model, rank, bias=False) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(rank, pairs, bias=False) for _ in layers)
        self.convolution = nn.ModuleList(nn.Conv1d(pairs, pairs, TOKENS, groups=pairs, bias=False) for _ in layers)
        self.constant = nn.Parameter(torch.zeros(shape.n_layers, pairs)) if bias else None
        self.gate = nn.ModuleList(nn.Linear(shape.d_model, shape.n_heads) for _ in layers) if gate else None
        starts.start(self, start)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        x = self.given(layer.x, "makes its angles from")
        exact = rotary.has_fp64(x.device)  # sums over thousands of tokens
        sums = self._phi(x.float(), layer.index).to(exact).double().cumsum(2)  # (B, H, T, P)
        angles = sums * rotary.frequencies(self.shape.head_dim, self.base, exact)
        turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(x.device)
        made = rotary.laid_out(turns, self.layout)
        return rotary.turn(q, made), rotary.turn(k, made)

    def _phi(self, x: Tensor, layer: int) -> Tensor:
        """The angle by which each token turns each pair, before its frequency: (B, T, D) to (B, H, T, P)."""
        heads = self.shape.n_heads
        parts = x.view(len(x), x.shape[1], heads, -1)
        x = (parts * (parts.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).flatten(-2)
        phi = causal_convolution(
            self.up[layer](self.down[layer](x)), self.convolution[layer].get_parameter("weight")[:, 0]
        )
        if self.constant is not None:
            phi = phi + self.constant[layer].exp()
        phi = phi.view(*x.shape[:2], heads, -1).transpose(1, 2)
        return phi if self.gate is None else phi * self.gate[layer](x).sigmoid().mT[..., None]
