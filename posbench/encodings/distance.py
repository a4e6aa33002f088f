"""Biases that depend on the distance of query and key: ALiBi, BAM, KERPLE, T5,
Sandwich, FIRE and a plain network.
"""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, MultipleOf
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.options import Count, Positive


class ALiBi(Encoding):
    """Attention with linear biases (ALiBi): a penalty that grows with distance, at a
    fixed slope per head.

        logits_ij = q_i·k_j / sqrt(d) - m_h · |i - j|,   m_h = 2^(-8h/H) for h = 1 .. H

    Source: Press, Smith and Lewis, "Train Short, Test Long" (2021), arXiv:2108.12409,
    section 3.
    Beyond training length: defined everywhere; loss usually stays flat. A key about
    87/m_h tokens back weighs 0.
    Checked against: transformers BLOOM (causal) and x-transformers AlibiPositionalBias.
    """

    def __init__(self, shape: Shape, slopes: list[float] | None = None) -> None:
        super().__init__(shape)
        m = slopes
        if m is None:
            m = default_slopes(shape.n_heads)
        self.expect(
            len(m) == shape.n_heads,
            "slopes",
            slopes,
            f"{shape.n_heads} numbers, one per head",
        )
        self.slopes = nn.Buffer(torch.tensor(m, dtype=torch.float32), persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return -by_head(self.slopes, distance) * distance.abs()

    def key_bias(self, layer: Layer) -> Tensor | None:
        # distances may be clamped, which no number per key can express
        if not layer.consecutive:
            return None
        # Up to a constant per query, -m·(i - j) is m·j. Less the last position, the
        # largest bias is 0.
        places = layer.positions - layer.positions[:, -1:]  # (1|B, T)
        return self.slopes[:, None] * places[:, None]  # (1|B, H, T)


def default_slopes(n_heads: int) -> list[float]:
    """Return the authors' slopes; if H is no power of two, those of the power below and
    every other of its double.
    """
    power = 1 << (n_heads.bit_length() - 1)  # of two, the largest up to n_heads
    every_other_of_double = _slopes(2 * power)[::2]
    return _slopes(power) + every_other_of_double[: n_heads - power]


def _slopes(n_heads: int) -> list[float]:
    """Return m_h for h = 1 .. n_heads, a power of two."""
    return [2 ** (-8 * h / n_heads) for h in range(1, n_heads + 1)]


def by_head(numbers: Tensor, distance: Tensor) -> Tensor:
    """Return numbers per head as (H, 1, ..., 1), to broadcast with distances (*S) to
    (H, *S).
    """
    ones = [1] * distance.dim()
    return numbers.view(-1, *ones)


class BAM(Encoding):
    """Bayesian attention mechanism (BAM): a prior over distances whose shape each head
    and layer learns.

        logits_ij = q_i·k_j / sqrt(d) - exp(a)·(|j - i - mu| + 1e-5)^b,   mu = 2·sinh(m)

    b starts at 1, as in ALiBi; m is 0 without `location`. `ssmax` multiplies query i's
    logits by a learned s·ln(i + 1).

    Source: Bianchessi et al. (2025), arXiv:2505.22842; in the authors' code layers
    share a prior and m is learned.
    Beyond training length: defined everywhere; where b < 1, far keys fade less and
    less.
    Checked against: plain loops from the authors' equation.
    """

    def __init__(
        self, shape: Shape, location: bool = False, ssmax: bool = False
    ) -> None:
        super().__init__(shape)
        size = shape.n_layers, shape.n_heads
        a = torch.tensor(default_slopes(shape.n_heads)).log()
        self.scale = nn.Parameter(a.repeat(shape.n_layers, 1))
        self.exponent = nn.Parameter(torch.ones(size))
        self.location = self.sharpness = None
        if location:
            self.location = nn.Parameter(torch.zeros(size))
        if ssmax:
            self.sharpness = nn.Parameter(torch.ones(size))
        else:
            self.leave_out("scores")

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        a = by_head(self.scale[layer.index], distance)
        b = by_head(self.exponent[layer.index], distance)
        if self.location is not None:
            m = self.location[layer.index]
            distance = distance + 2 * by_head(m.sinh(), distance)
        # 1e-5: the exponent may be negative
        return -a.exp() * (distance.abs() + 1e-5) ** b

    def scores(self, logits: Tensor, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        assert self.sharpness is not None
        s = self.sharpness[layer.index][:, None, None]
        first = layer.rows.start + 1  # keys that the first query sees
        counts = torch.arange(first, first + q.shape[2], device=q.device)
        return logits * s * counts[:, None].log()


class KerpleLog(Encoding):
    """KERPLE with the logarithmic kernel: each head learns the size and the scale of
    its penalty.

        logits_ij = q_i·k_j / sqrt(d) - r1_h · ln(1 + r2_h · |i - j|),   r1, r2 ≥ 0.01

    Source: Chi et al. (2022), arXiv:2205.09921, section 4; start and lower bound from
    the authors' code.
    Beyond training length: defined everywhere; each doubling of a distance costs the
    same, and loss usually stays flat.
    Checked against: plain loops from the paper's equation.
    """

    starts = 2.0, 1.0  # r1 and r2 are drawn from 0 to these
    most = math.inf, math.inf  # bounds of r1 and r2, which the gradient ignores

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        most_r1, most_r2 = self.starts
        self.r1 = nn.Parameter(torch.rand(shape.n_heads) * most_r1)
        self.r2 = nn.Parameter(torch.rand(shape.n_heads) * most_r2)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        most_r1, most_r2 = self.most
        r1 = by_head(_bounded(self.r1, most_r1), distance)
        r2 = by_head(_bounded(self.r2, most_r2), distance)
        return -r1 * self.kernel(distance.abs(), r2)

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return (r2 * distance).log1p()


class KerplePower(KerpleLog):
    """KERPLE with the power kernel: each head learns a slope and an exponent. With
    exponent 1 it is ALiBi.

        logits_ij = q_i·k_j / sqrt(d) - r1_h · |i - j|^(r2_h),
        r1 ≥ 0.01,  0.01 ≤ r2 ≤ 2

    Source: Chi et al. (2022), arXiv:2205.09921, section 4; starting values and bounds
    from the authors' code.
    Beyond training length: defined everywhere; far keys get ever less weight, as with
    ALiBi.
    Checked against: plain loops from the paper's equation; ALiBi, where the exponent is
    1.
    """

    starts = 1.0, 2.0
    most = math.inf, 2.0

    def kernel(self, distance: Tensor, r2: Tensor) -> Tensor:
        return distance**r2


def _bounded(r: Tensor, most: float) -> Tensor:
    """Return r from 0.01 to `most`, with the gradient of r itself."""
    return r.clamp(0.01, most).detach() + (r - r.detach())


class T5Bias(Encoding):
    """T5's bucketed relative bias: each head learns a number per bucket of distances,
    the same in every layer.

        logits_ij = q_i·k_j / sqrt(d) + E[bucket(i - j), h]
        bucket(r) = r   for r < m, otherwise
        bucket(r) = min(n - 1, m + floor((n - m) · ln(r / m) / ln(max_distance / m))),
        m = floor(n/2)

    AdamW moves a number by about the learning rate per update, and E must grow to the
    size of logits. So its learning rate is `rate` times as large.

    Source: Raffel et al. (2020), arXiv:1910.10683, section 2.1, the decoder's form, but
    with 1/sqrt(d).
    Beyond training length: defined everywhere; far distances share a bucket; buckets
    not met in training are untrained.
    Checked against: transformers T5Attention, x-transformers RelativePositionBias.
    """

    name = "t5"

    def __init__(
        self,
        shape: Shape,
        num_buckets: Annotated[int, Ge(2)] = 32,
        max_distance: int = 128,
        rate: Positive = 10.0,
    ) -> None:
        super().__init__(shape)
        self.expect(
            2 * max_distance > num_buckets,
            "max_distance",
            max_distance,
            "more than half of num_buckets",
        )
        self.num_buckets, self.max_distance = num_buckets, max_distance
        table = torch.empty(num_buckets, shape.n_heads)  # E
        self.table = nn.Parameter(table.normal_(std=shape.d_model**-0.5))
        if rate != 1:
            self.rates = {"table": rate}

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        biases = F.embedding(self.bucket(distance), self.table)  # (*S, H)
        return biases.movedim(-1, 0)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return bucket numbers, computed in fp32 as T5 does."""
        m = self.num_buckets // 2
        r = distance.float().clamp(min=0)
        # near distances do not use it; the clamp avoids ln 0
        log_r = torch.log(r.clamp(min=m) / m)
        log_max = math.log(self.max_distance / m)
        share = log_r / log_max
        far = m + (share * (self.num_buckets - m)).long()  # floor, as it is positive
        far = far.clamp(max=self.num_buckets - 1)
        return torch.where(r < m, r.long(), far)


class Sandwich(Encoding):
    """Sandwich: the inner product of sinusoidal positions, as a bias.

        logits_ij = q_i·k_j / sqrt(d)
                    + H / (8h) · sum_{p < D/2} cos((i - j) · 10000^(-2p/D)),
        h = 1 .. H, D = `width`

    Source: Chi et al. (2022), arXiv:2212.10356, appendix E, with the sum from p = 0 as
    in meta-pytorch/attention-gym.
    Beyond training length: defined everywhere; it falls slowly with distance, and loss
    usually stays flat.
    Checked against: plain loops, and the inner products of transformers DistilBERT's
    sinusoidal positions.
    """

    def __init__(
        self, shape: Shape, width: Annotated[int, Ge(2), MultipleOf(2)] = 128
    ) -> None:
        super().__init__(shape)
        self._frequencies = rotary.frequencies(width, 10000.0)
        h = torch.arange(1, shape.n_heads + 1, dtype=torch.float32)
        self.strength = nn.Buffer(shape.n_heads / (8 * h), persistent=False)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        cosines = rotary.angles(distance, self._frequencies).cos()  # (*S, D/2) fp64
        total = cosines.sum(-1).float().to(distance.device)
        return by_head(self.strength, distance) * total


class DynamicBias(Encoding):
    """A network turns distances into biases (continuous position bias), the same in all
    layers.

        logits_ij = q_i·k_j / sqrt(d) + f(s(i - j))_h,   s(r) = sign(r)·ln(1 + |r|)
        or, with `log: false`, r itself

    f is 1 -> width -> ... -> H with SiLU and `depth` hidden layers, by default a
    quarter of the model's width wide.

    Source: Liu et al., "Swin Transformer V2" (2021), arXiv:2111.09883, in one
    dimension; network as in x-transformers.
    Beyond training length: defined everywhere; past the inputs met in training the
    network continues almost as a line.
    Checked against: x-transformers DynamicPositionBias, and its network run at each
    pair.
    """

    def __init__(
        self,
        shape: Shape,
        log: bool = True,
        width: Count | None = None,
        depth: Annotated[int, Ge(1), Le(100)] = 2,
    ) -> None:
        super().__init__(shape)
        self.log = log
        width = width or max(1, shape.d_model // 4)
        blocks = [nn.Sequential(nn.Linear(1, width), nn.SiLU())]
        blocks += [
            nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(depth - 1)
        ]
        self.network = nn.Sequential(*blocks, nn.Linear(width, shape.n_heads))

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        inputs = distance.float()  # s
        if self.log:
            inputs = distance.sign() * distance.abs().log1p()
        return self.network(inputs[..., None]).movedim(-1, 0)


class FIRE(Encoding):
    """FIRE, functional interpolation for relative positions: a network of shares of the
    longest distance.

        logits_ij = q_i·k_j / sqrt(d) + f( psi(i - j) / psi(max(i, |a·threshold|)) )_h,
        psi(r) = ln(|c r| + 1)

    f is 1 -> 32 -> H with ReLU; f, c and a, a multiplier of the threshold, are learned,
    per layer. The threshold is a quarter of the training length (`quarter`), all of it
    (`null`), or a number of tokens.

    Source: Li et al. (2023), arXiv:2310.04418, section 3, where the threshold is 512 of
    2048 tokens.
    Beyond training length: defined everywhere; inputs stay within the trained range.
    Checked against: the network run on each pair in a plain loop, and worked arguments.
    """

    def __init__(
        self, shape: Shape, threshold: Positive | Literal["quarter"] | None = "quarter"
    ) -> None:
        super().__init__(shape)
        if threshold == "quarter":
            threshold = shape.train_length / 4
        if threshold is None:
            threshold = shape.train_length
        self.threshold_at_start = float(threshold)
        self.c = nn.Parameter(torch.full((shape.n_layers,), 0.1))
        self.multiplier = nn.Parameter(torch.ones(shape.n_layers))  # a
        self.networks = nn.ModuleList()  # f of each layer
        for _ in range(shape.n_layers):
            first = nn.Linear(1, 32)
            last = nn.Linear(32, shape.n_heads)
            self.networks.append(nn.Sequential(first, nn.ReLU(), last))

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        c = self.c[layer.index]
        threshold = (self.multiplier[layer.index] * self.threshold_at_start).abs()
        i = layer.positions[:, layer.rows, None]  # (1|B, Tq, 1)
        longest = torch.maximum(i, threshold)  # (1|B, Tq, 1)
        psi_longest = (c * longest).abs().log1p()
        psi_distance = (c * layer.distance).abs().log1p()  # (1|B, Tq, Tk)
        shares = psi_distance / (psi_longest + 1e-6)  # with c = 0 it would be 0 / 0
        # as the network of shares[..., None], with the heads in front: (H, 1|B, Tq, Tk)
        outputs = _network(self.networks[layer.index], shares)
        return outputs.movedim(0, 1)


def _network(network: nn.Module, shares: Tensor) -> Tensor:
    """Return network(shares[..., None]), but as (H, *S) for shares (*S), and cheaper.

    With weights w, v and biases b, b' the output of a head is the sum over units of
    v · max(0, w·share + b), plus b'. A unit turns on or off at its kink, the share
    -b / w. Between two of the 32 kinks the same units are on, so the output is a
    straight line: slope · share + intercept, of the units that are on

        slope = sum of w·v,     intercept = sum of b·v, plus b'
    """
    # of the layers 1 -> 32 and 32 -> H
    first_weight, b, second_weight, last_bias = network.parameters()  # the last: b'
    w = first_weight[:, 0]  # (32,)
    v = second_weight.mT  # (32, H)

    # Two lines meet at a kink, so that moving it changes no output: no gradient.
    kinks = (-b / w).detach()
    kinks = kinks.nan_to_num(0.0)  # of a unit with w = b = 0, which is never on
    kinks = kinks.clamp(-1e4, 1e4)  # far from every share: these are about 0 .. 1
    kinks = kinks.sort().values

    # One input inside each of the 33 pieces tells which units are on there.
    between = (kinks[1:] + kinks[:-1]) / 2
    inside = torch.cat([kinks[:1] - 1, between, kinks[-1:] + 1])
    is_on = inside[:, None] * w + b > 0  # (33 pieces, 32 units)
    is_on = is_on.to(w.dtype)

    slopes = (is_on * w) @ v  # (33, H)
    intercepts = (is_on * b) @ v + last_bias  # (33, H)
    # how many kinks are below a share: the number of its piece, (*S)
    piece = torch.searchsorted(kinks, shares.detach())
    return _picked(slopes, piece) * shares + _picked(intercepts, piece)


def _picked(table: Tensor, piece: Tensor) -> Tensor:
    """Return the rows of a table (33, H) at pieces (*S): (H, *S)."""
    # on CPUs the gradient of gather is far cheaper than that of indexing
    index = piece.flatten().expand(table.shape[1], -1)
    return table.mT.gather(1, index).view(-1, *piece.shape)


class GrapeA(Encoding):
    """GRAPE-A: a penalty linear in distance, at a slope that keys or queries gate.

        logits_ij = q_i·k_j / sqrt(d) - |i - j| · m_h · softplus(ω_h) · G_ij,
        m_h ALiBi's slopes
        G_ij = softplus(u_h·k_j / sqrt(d)),   softplus(v_h·q_i / sqrt(d))
        or the sum of both, with |u| = |v| = 1

    Source: Zhang et al. (2025), arXiv:2512.07805, as in the authors' code
    (model-architectures/GRAPE), without norms.
    Beyond training length: defined everywhere; far keys get ever less weight unless
    gates close, as with ALiBi.
    Checked against: plain loops from the equation.
    """

    def __init__(
        self, shape: Shape, gate: Literal["key", "query", "both"] = "key"
    ) -> None:
        super().__init__(shape)
        m = torch.tensor(default_slopes(shape.n_heads))
        self.slopes = nn.Buffer(m, persistent=False)
        # ω: softplus is 1
        start = torch.full((shape.n_layers, shape.n_heads), math.log(math.e - 1))
        self.strength = nn.Parameter(start)
        size = shape.n_layers, shape.n_heads, shape.head_dim
        self.query = self.key = None  # v and u, before they are normalised
        if gate != "key":
            self.query = nn.Parameter(torch.randn(size) * shape.head_dim**-0.5)
        if gate != "query":
            self.key = nn.Parameter(torch.randn(size) * shape.head_dim**-0.5)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        slopes = self.slopes * F.softplus(self.strength[layer.index])  # (H,)
        of_queries = self._gated(q, self.query, slopes, layer)
        of_keys = self._gated(k, self.key, slopes, layer)
        return of_queries, of_keys

    def _gated(
        self, x: Tensor, directions: Tensor | None, slopes: Tensor, layer: Layer
    ) -> Tensor:
        """Return the slopes times the gates of queries or of keys x, (B, H, T)."""
        if directions is None:
            return x.new_zeros(x.shape[:-1])
        direction = F.normalize(directions[layer.index], dim=-1)[..., None]
        gates = (x @ direction).squeeze(-1) * self.shape.head_dim**-0.5
        return slopes[:, None] * F.softplus(gates)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        queries, keys = layer.state
        slopes = queries[:, :, layer.rows, None] + keys[:, :, None, layer.keys]
        return -layer.distance[:, None].abs() * slopes
