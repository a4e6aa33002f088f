"""PaTH attention: position as an accumulated product of reflections, without and with a forget gate."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _start as starts
from posbench.encodings.base import Encoding, Layer, Shape, part_of
from posbench.encodings.canon import causal_convolution
from posbench.options import Count

KEYS_PER_BLOCK = 32  # fewer make the products slim; with more, more of what is multiplied is zeros above a diagonal


class PaTH(Encoding):
    """PaTH attention: a key is multiplied by a reflection for each token between it and the query.

        logits_ij = q_i · (H_i H_{i-1} ... H_{j+1}) k_j / sqrt(d),        H_t = I - beta_t w_t w_tᵀ

    w_t is a unit vector (low rank 32, a causal convolution over three tokens, a SiLU), and beta_t = 2 sigmoid(.) lies
    in (0, 2) per head: 0 keeps the key, 1 projects w_t away, 2 reflects. Order is that of the tokens.

    Source: Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations" (2025),
    arXiv:2505.16381; SiLU (without it `silu: false`) and start as in the authors' layer in fla.
    Beyond training length: defined everywhere; longer products than trained, of matrices that never enlarge a vector.
    Checked against: fla naive_path_attn, and the product of matrices in a plain loop.
    """

    history = frozenset({"x"})

    def __init__(self, shape: Shape, rank: Count = 32, silu: bool = True, start: starts.Start = "normal") -> None:
        super().__init__(shape)
        width, layers = shape.n_heads * shape.head_dim, range(shape.n_layers)
        self.silu = silu
        self.down = nn.ModuleList(nn.Linear(shape.d_model, rank, bias=False) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in layers)
        self.convolution = nn.ModuleList(nn.Conv1d(width, width, 3, groups=width, bias=False) for _ in layers)
        self.beta = nn.ModuleList(nn.Linear(shape.d_model, shape.n_heads) for _ in layers)
        starts.start(self, start)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """Return unit vectors w (B, H, T, Dh) and strengths beta (B, H, T)."""
        x = self.given(layer.x, "makes its reflections from")
        weights = self.convolution[layer.index].get_parameter("weight")[:, 0]
        w = causal_convolution(self.up[layer.index](self.down[layer.index](x)), weights)
        w = (F.silu(w) if self.silu else w).view(*x.shape[:2], self.shape.n_heads, -1).transpose(1, 2)
        return w * (w * w).sum(-1, keepdim=True).clamp(min=1e-24).rsqrt(), 2 * self.beta[layer.index](x).sigmoid().mT

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        assert isinstance(layer.keys, slice)  # always, for an encoding with `scores`
        w, beta = (part_of(part, layer.keys) for part in layer.state[:2])
        return logits + self.logit_scale * _change(q, k, w, beta, layer.rows.start - layer.keys.start)


class PaTHFoX(PaTH):
    """PaTH with a forget gate (PaTH-FoX): each token reflects earlier keys and sets how fast they fade.

        logits_ij = (q_i · (H_i H_{i-1} ... H_{j+1}) k_j + sum over t = j+1 .. i of ln f_t) / sqrt(d)

    H_t is that of `path`, f_t that of `fox`. Unlike in `fox`, logarithms too are divided by sqrt(d): keys fade slower.

    Source: Yang et al. (2025), arXiv:2505.16381, as in fla's layer with its forget gate.
    Beyond training length: defined everywhere; it fades at a rate that the text chooses.
    Checked against: fla naive_path_attn.
    """

    name = "path_fox"

    def __init__(
        self, shape: Shape, rank: Count = 32, silu: bool = True, start: starts.Start = "normal", gate_bias: float = 0.0
    ) -> None:
        super().__init__(shape, rank, silu, start)
        self.gate = nn.Parameter(torch.randn(shape.n_layers, shape.n_heads, shape.d_model) * 0.02)
        self.gate_bias = nn.Parameter(torch.full((shape.n_layers, shape.n_heads), gate_bias))

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, ...]:
        """Return w and beta of the reflections, and sums of the log gates (B, H, T)."""
        reflections = super().prepare(q, k, layer)
        assert layer.x is not None  # `super` has refused None
        gates = F.linear(layer.x, self.gate[layer.index], self.gate_bias[layer.index])
        return *reflections, F.logsigmoid(gates).mT.contiguous().cumsum(-1)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        total = layer.state[-1]
        return self.logit_scale * (total[:, :, layer.rows, None] - total[:, :, None, layer.keys])


def _change(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, before: int) -> Tensor:
    """Return the change of q·k by the reflections in between, (B, H, Tq, Tk); query r sees the keys up to r + before.

    No product of matrices is ever formed. With Q, K, W, B = diag(beta) over the visible tokens, the change is

        -tril(Q Wᵀ) (I + stril(B W Wᵀ))^-1 B stril(W Kᵀ)

    solved by blocks of keys from the right, since a key meets only the tokens to its right. `turned` is what the blocks
    behind the one at hand have changed in each query. With K, W and B of the block,

        change = turned Kᵀ - S M,        turned -= S V,        S = tril((Q + turned) Wᵀ)
        [M | V] = (I + stril(B W Wᵀ))^-1 B [stril(W Kᵀ) | W]
    """
    keys, rows = k.shape[2], q.shape[2]
    size = min(KEYS_PER_BLOCK, keys)
    if short := -keys % size:  # tokens that reflect nothing fill the last block
        k, w, beta = F.pad(k, (0, 0, 0, short)), F.pad(w, (0, 0, 0, short)), F.pad(beta, (0, short))
    k, w, beta = (x.reshape(*x.shape[:2], -1, size, *x.shape[3:]) for x in (k, w, beta))  # (B, H, blocks, size, ...)
    unit = torch.eye(size, dtype=w.dtype, device=w.device)
    # Reads nothing but what is below the diagonal. From the left it would be the same in twice the time.
    matrix = beta[..., None] * (w @ w.mT)
    inverse = torch.linalg.solve_triangular(matrix, unit, upper=False, left=False, unitriangular=True)
    weighted = inverse * beta[..., None, :]
    m, v = weighted @ (w @ k.mT).tril(-1), weighted @ w
    turned, parts = torch.zeros_like(q), []
    for block in reversed(range(k.shape[2])):
        first = min(rows, max(0, block * size - before))  # of the queries that see one of these keys
        behind = turned[:, :, first:]
        s = ((q[:, :, first:] + behind) @ w[:, :, block].mT).tril(before + first - block * size)
        parts.append(F.pad(behind @ k[:, :, block].mT - s @ m[:, :, block], (0, 0, first, 0)))
        turned = turned - F.pad(s @ v[:, :, block], (0, 0, first, 0))
    return torch.cat(parts[::-1], dim=-1)[..., :keys]
