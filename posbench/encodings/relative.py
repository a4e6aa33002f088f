"""Attention between words and vectors of positions or distances: Shaw, Transformer-XL,
DeBERTa, TUPE, Inkling.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.absolute import check_whole
from posbench.encodings.base import Encoding, Layer, Shape, part_of, split_heads
from posbench.encodings.distance import T5Bias
from posbench.errors import UserError
from posbench.options import Above1, Count


class Shaw(Encoding):
    """Relative position representations (Shaw et al.): a learned vector per clipped
    distance, for keys and for values.

        logits_ij = q_i·(k_j + a_r) / sqrt(d),
        output_i = sum over j of α_ij (v_j + b_r),   r = clip(j - i, -K, K)

    Source: Shaw et al., "Self-Attention with Relative Position Representations" (2018),
    arXiv:1803.02155.
    Beyond training length: defined everywhere; distances beyond K are one class, as in
    training.
    Checked against: transformers Wav2Vec2-BERT (keys); plain loops from the paper
    (values).
    """

    def __init__(
        self, shape: Shape, max_distance: Count = 16, values: bool = True
    ) -> None:
        super().__init__(shape)
        self.max_distance = max_distance
        size = (shape.n_layers, 2 * max_distance + 1, shape.head_dim)
        self.keys = nn.Parameter(torch.randn(size) * 0.02)  # a
        self.values: nn.Parameter | None = None  # b
        if values:
            self.values = nn.Parameter(torch.randn(size) * 0.02)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        by_row = q @ self.keys[layer.index].mT * self.logit_scale  # (B, H, Tq, 2K+1)
        # all but the last K keys are K or more back
        if layer.consecutive and layer.causal:
            far, near, _ = by_row.tensor_split((1, 1 + self.max_distance), dim=-1)
            return _by_pairs(near - far, k.shape[2]) + far
        rows = self._table_rows(layer).expand(*q.shape[:3], -1)
        return by_row.gather(-1, rows)

    def attend(self, logits: Tensor, v: Tensor, layer: Layer) -> Tensor:
        if self.values is None:
            return super().attend(logits, v, layer)
        weights = logits.softmax(-1)  # α
        table = self.values[layer.index]
        output = weights @ v.to(weights.dtype)
        if layer.consecutive and layer.causal:
            far, near, _ = table.tensor_split((1, 1 + self.max_distance))
            # the weights of a row sum to 1
            return output + _diagonals(weights, self.max_distance) @ (near - far) + far
        rows = self._table_rows(layer).expand_as(weights)
        sums = weights.new_zeros(*weights.shape[:-1], len(table))
        sums = sums.scatter_add(-1, rows, weights)  # of the weights by table row
        return output + sums @ table

    def _table_rows(self, layer: Layer) -> Tensor:
        """Return the table row of each pair, (1|B, 1, Tq, Tk): row 0 is K or more back,
        row K the query itself.
        """
        furthest = self.max_distance
        clipped = (-layer.distance).clamp(-furthest, furthest)
        return (clipped.round().long() + furthest)[:, None]


# To shift each row one place against the row before, pad rows to one number too many
# and read them as rows without it.
def _by_pairs(near: Tensor, keys: int) -> Tensor:
    """Return (B, H, Tq, keys): values (B, H, Tq, K) at the K keys up to each of the
    last queries, 0 elsewhere.
    """
    batch, heads, rows, width = near.shape
    wide = F.pad(near, (keys - rows, rows)).flatten(2)[..., :-rows]
    return wide.view(batch, heads, rows, -1)[..., width - 1 :]


def _diagonals(x: Tensor, width: int) -> Tensor:
    """Return x (B, H, Tq, Tk) at the `width` keys up to each of the last queries: (B,
    H, Tq, width).
    """
    batch, heads, rows, keys = x.shape
    flat = F.pad(x, (width - 1, 0)).flatten(2)
    wide = F.pad(flat, (0, rows)).view(batch, heads, rows, -1)
    return wide[..., keys - rows : keys - rows + width]


class TransformerXL(Encoding):
    """Transformer-XL's relative attention: queries meet the content of keys and a
    sinusoid of their distance.

        logits_ij = [(q_i + u_h)·k_j + (q_i + v_h)·(W_h rho_(i-j))] / sqrt(d),
        rho_r = [sin f_p r | cos f_p r]

    f_p = base^(-2p/D), p = 0 .. D/2-1 with D the width of the model; u, v and W are
    learned per layer.

    Source: Dai et al. (2019), arXiv:1901.02860, section 3.3, without its memory and its
    clamping of far distances.
    Beyond training length: defined everywhere; distances never trained have sinusoids
    never seen.
    Checked against: transformers XLNet; plain loops from the paper at positions that
    jump.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0) -> None:
        super().__init__(shape)
        if shape.d_model % 2:
            raise UserError(
                f"d_model is {shape.d_model}: '{self.name}' needs an even number"
            )
        self.base = base
        heads = (shape.n_layers, shape.n_heads, shape.head_dim)
        self.content = nn.Parameter(torch.randn(heads) * 0.02)  # u
        self.position = nn.Parameter(torch.randn(heads) * 0.02)  # v
        self.projection = nn.Parameter(torch.randn(*heads, shape.d_model) * 0.02)  # W

    def make_tables(self, positions: Tensor) -> Tensor:
        f = rotary.frequencies(self.shape.d_model, self.base, positions.device)
        return rotary.cos_sin(rotary.angles(positions, f), positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return q + self.content[layer.index, :, None], k

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        # With [a | b] = Wᵀ(q_i + v) a sinusoid of i - j is a product of D channels,
        # whose key side reads j alone: a sin(f i - f j) + b cos(f i - f j) = (a sin f i
        # + b cos f i) cos f j + (b sin f i - a cos f i) sin f j
        cosine, sine = layer.tables
        q_and_v = q + self.position[layer.index, :, None]
        projected = q_and_v * self.logit_scale @ self.projection[layer.index]
        a, b = projected.chunk(2, dim=-1)
        of_queries = torch.cat((a * sine + b * cosine, b * sine - a * cosine), -1)
        of_keys = torch.cat((cosine, sine), -1)
        return of_queries, of_keys

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        of_queries, of_keys = layer.state
        return of_queries[:, :, layer.rows] @ part_of(of_keys, layer.keys).mT


class DeBERTa(Encoding):
    """DeBERTa's disentangled attention: content and position are two vectors, and three
    of their four products count.

        logits_ij = [q_i·k_j + q_i·(K p_r) + (Q p_r)·k_j] / sqrt(3d),
        r = clip(i - j, -S, S - 1)

    With `num_buckets` b, S is b; distances beyond b/2 share vectors, the more of them
    the farther they are.

    Source: He et al. (2020), arXiv:2006.03654, and the authors' code, without
    `share_att_key` and biases.
    Beyond training length: defined everywhere; distances beyond S, by default the
    training length, are one class.
    Checked against: transformers DeBERTa-v2, with and without buckets.
    """

    def __init__(
        self,
        shape: Shape,
        max_distance: Count | None = None,
        num_buckets: int | None = None,
    ) -> None:
        super().__init__(shape)
        self.max_distance = max_distance or shape.train_length
        valid = num_buckets is None or (
            num_buckets % 2 == 0 and 4 <= num_buckets < self.max_distance
        )
        self.expect(
            valid,
            "num_buckets",
            num_buckets,
            f"an even number from 4 to below {self.max_distance}, or null",
        )
        self.num_buckets = num_buckets
        self.span = num_buckets or self.max_distance  # S
        heads = (shape.n_layers, shape.n_heads, shape.head_dim, shape.d_model)
        self.table = nn.Parameter(torch.randn(2 * self.span, shape.d_model) * 0.02)  # p
        self.keys = nn.Parameter(torch.randn(heads) * 0.02)  # K
        self.queries = nn.Parameter(torch.randn(heads) * 0.02)  # Q

    @property
    def logit_scale(self) -> float:
        return float((3 * self.shape.head_dim) ** -0.5)

    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        return q  # raw, since a wrapper may scale the queries of `bias`

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        q = part_of(layer.state, layer.rows)
        r = layer.distance.round()
        if self.num_buckets is not None:
            r = self.bucket(r)
        rows = (r.long() + self.span).clamp(0, 2 * self.span - 1)  # of the table
        rows = rows[:, None].expand(*q.shape[:3], -1)  # (B, H, Tq, Tk)

        key_vectors = self.table @ self.keys[layer.index].mT  # K p, (H, 2S, Dh)
        to_position = q @ key_vectors.mT  # (B, H, Tq, 2S)
        query_vectors = self.table @ self.queries[layer.index].mT  # Q p
        from_position = k @ query_vectors.mT  # (B, H, Tk, 2S)
        from_pairs = from_position.gather(-1, rows.mT).mT
        return (to_position.gather(-1, rows) + from_pairs) * self.logit_scale

    def bucket(self, distance: Tensor) -> Tensor:
        """Return signed bucket numbers of whole distances, computed in fp32 as DeBERTa
        does.
        """
        middle = self.span // 2
        far = distance.abs().float().clamp(min=middle)
        log_max = torch.tensor((self.max_distance - 1) / middle).log()
        growth = (far / middle).log() / log_max
        beyond = (growth * (middle - 1)).ceil() + middle
        is_near = distance.abs() <= middle
        return torch.where(is_near, distance, distance.sign() * beyond)


class TUPE(Encoding):
    """TUPE: transformers with untied positional encoding, where words attend to words
    and positions to positions.

        logits_ij = [q_i·k_j + (Q n_i)·(K n_j)] / sqrt(2d) + b_(i-j),
        n_i = LayerNorm(p_i)

    p, Q and K (with biases) are shared by all layers. b is 0 (TUPE-A) or, with
    `relative` (TUPE-R), T5's bias.

    Source: Ke, He and Liu (2020), arXiv:2006.15595, section 3, and the authors' code,
    without its untying of [CLS].
    Beyond training length: undefined, since p has no further vectors; such inputs are
    refused.
    Checked against: plain loops from the paper; for the bias, transformers T5Attention.
    """

    whole_positions = True

    def __init__(self, shape: Shape, relative: bool = False) -> None:
        super().__init__(shape)
        self.max_length = shape.train_length
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * 0.02)
        self.norm = nn.LayerNorm(shape.d_model)
        # Q and K
        self.projection = nn.Linear(shape.d_model, 2 * shape.n_heads * shape.head_dim)
        nn.init.normal_(self.projection.weight, std=0.02)
        nn.init.zeros_(self.projection.bias)
        self.relative: T5Bias | None = None
        if relative:
            self.relative = T5Bias(shape, rate=1.0)
        else:
            self.leave_out("distance_bias")

    @property
    def logit_scale(self) -> float:
        return float((2 * self.shape.head_dim) ** -0.5)

    # of queries and keys, (1|B, H, T, Dh) each
    def make_tables(self, positions: Tensor) -> tuple[Tensor, ...]:
        check_whole(self, positions)
        n = self.norm(F.embedding(positions, self.table))
        both = self.projection(n).unflatten(-1, (2, self.shape.n_heads, -1))
        return both.transpose(1, 3).unbind(2)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        queries, keys = layer.tables
        queries = queries.expand(len(q), -1, -1, -1)
        keys = keys.expand(len(k), -1, -1, -1)
        q = torch.cat((q, queries), dim=-1)
        k = torch.cat((k, keys), dim=-1)
        return q, k

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        if self.relative is None:
            return None
        return self.relative.distance_bias(distance, layer)


class ProjectedBias(Encoding):
    """A bias that each query mixes from learned curves over distance.

        logits_ij = q_i·k_j / sqrt(d) + sum_c (W_h x_i)_c · curve_c(i - j),
        0 beyond `extent` distances

    Source: the relative logits of the Inkling model (Thinking Machines) in
    transformers; no paper.
    Beyond training length: defined everywhere; keys beyond the extent have no bias: all
    look equally far.
    Checked against: transformers InklingRelativeLogits.
    """

    whole_positions = True

    def __init__(
        self, shape: Shape, extent: Count | None = None, curves: Count = 16
    ) -> None:
        super().__init__(shape)
        self.extent = extent or shape.train_length
        size = (shape.n_layers, shape.n_heads, curves, shape.d_model)
        self.weight = nn.Parameter(torch.randn(size) * 0.02)
        size_of_curves = (shape.n_layers, curves, self.extent)
        self.curves = nn.Parameter(torch.randn(size_of_curves) * 0.02)

    # the weight of each curve, (B, H, T, curves)
    def prepare(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        x = self.given(layer.x, "mixes its curves by")
        weights = F.linear(x, self.weight[layer.index].flatten(0, 1))
        return split_heads(weights, self.shape.n_heads)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor:
        check_whole(self, layer.positions)
        distance = layer.distance[:, None]
        weights = layer.state[:, :, layer.rows]
        by_distance = weights @ self.curves[layer.index]  # (B, H, Tq, extent)
        index = distance.clamp(0, self.extent - 1).expand(*weights.shape[:3], -1)
        is_beyond = (distance < 0) | (distance >= self.extent)
        return by_distance.gather(-1, index).masked_fill(is_beyond, 0)
