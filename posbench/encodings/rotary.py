"""Rotary encodings that do more than turn, turn only some channels, or take their
angles from the text.
"""

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, MultipleOf
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape, split_heads
from posbench.encodings.contextual import (
    causal_convolution,
    convolutions,
    draw_layers,
    linears,
    unit,
)
from posbench.encodings.positions import places
from posbench.encodings.rope import (
    Rotary,
    angles,
    check_pairs,
    cos_sin,
    frequencies,
    rotate_both,
    rotate_pairs,
    to_fp64,
)
from posbench.errors import Undefined
from posbench.options import (
    Above1,
    Count,
    Layout,
    Natural,
    NonNegative,
    Positive,
    Start,
)


class XPos(Rotary):
    """Extrapolatable position embedding (xPos): RoPE whose logits fall with distance,
    most in the fast pairs.

        <q_i, k_j>_p is multiplied by zeta_p^((i - j)/B),   zeta_p = (2p/d + 0.4) / 1.4

    Source: Sun et al. (2022), arXiv:2212.10554, 3, without blockwise attention; B is
    512 there, train_length/2 here.
    Beyond training length: defined up to a span of 128·B positions, as fp32 limits the
    factors; beyond, refused or NaN.
    Checked against: x-transformers RotaryEmbedding with use_xpos.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        scale_base: Positive | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        self.scale_base = float(scale_base or max(1.0, shape.train_length / 2))
        self.max_length = self.span = int(128 * self.scale_base)

    def make_tables(self, positions: Tensor) -> Any:
        rotation = super().make_tables(positions)
        size = self.decay(positions).to(positions.device)
        return rotation * size, rotation / size

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = layer.tables
        q = rotate_pairs(q, of_queries, self.layout)
        k = rotate_pairs(k, of_keys, self.layout)
        return q, k

    def decay(self, positions: Tensor) -> Tensor:
        """Return zeta^(i/B) of centred positions (1|B, T): (1|B, 1, T, d/2)."""
        i = to_fp64(positions)
        first = i.amin(-1, keepdim=True)
        last = i.amax(-1, keepdim=True)
        within_span = last - first < self.span
        can_refuse = i.device.type == "cpu" and not torch.compiler.is_compiling()
        if can_refuse and not within_span.all():
            raise Undefined(
                f"positions {self.span} or more apart are beyond 'xpos': raise"
                " encoding.scale_base"
            )
        centre = torch.where(within_span, (first + last) / 2, math.nan)
        d = self.shape.head_dim
        two_p = torch.arange(0, d, 2, dtype=torch.float64, device=i.device)
        zeta = (two_p / d + 0.4) / 1.4
        exponent = (i - centre) / self.scale_base
        return (zeta ** exponent[..., None]).float()[:, None]


class PoPE(Rotary):
    """Polar coordinate position embedding (PoPE): magnitude holds content, angle holds
    position.

        logits_ij = sum over c of softplus(q_ic)·softplus(k_jc)
                                  ·cos((i - j)·base^(-c/d) - phase_c) / sqrt(d)

    Source: Gopalakrishnan et al. (2025), arXiv:2509.10534; phases are learned per head
    and clamped to [-2π, 0].
    Beyond training length: defined everywhere; slow channels reach angles never seen in
    training.
    Checked against: x-transformers PolarEmbedding.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        phase_init: Literal["zero", "uniform"] = "zero",
    ) -> None:
        super().__init__(shape, base)
        self.width = 2 * shape.head_dim
        start = torch.zeros(shape.n_layers, shape.n_heads, shape.head_dim)
        if phase_init == "uniform":
            start.uniform_(-2 * math.pi, 0)
        self.phase = nn.Parameter(start)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        phase = self.phase[layer.index].clamp(-2 * math.pi, 0)  # (H, Dh)
        shift = torch.stack((phase.cos(), phase.sin()))[:, :, None]
        # all cosines, then all sines: (1|B, 1, T, 2 Dh)
        waves = torch.cat(layer.tables.unbind(), dim=-1)
        shifted = rotate_pairs(waves, shift, "half")  # (1|B, H, T, 2 Dh)
        q = F.softplus(q).repeat(1, 1, 1, 2) * waves
        k = F.softplus(k).repeat(1, 1, 1, 2) * shifted
        return q, k


class RoPEPlusPlus(Rotary):
    """RoPE++: heads come in twos, which share q, k and v: one with RoPE's logits, one
    with their imaginary part.

        first:  <R(m) q, R(n) k>   second:  <R(m) J q, R(n) k>,
        J turns each pair by -π/2

    Source: Liu et al. (2025), arXiv:2512.07525, with as many heads (EH); the sign is
    that of the authors' code.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: plain loops over complex numbers.
    """

    name = "rope_pp"

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        q = self.map_values(q, layer)
        k = self.map_values(k, layer)
        cosine, sine = layer.tables
        less_a_quarter = torch.stack((sine, -cosine))
        heads = torch.arange(self.shape.n_heads, device=q.device)
        is_second = heads[:, None, None] % 2 == 1
        of_queries = torch.where(is_second, less_a_quarter, layer.tables)
        q = rotate_pairs(q, of_queries, self.layout)
        k = rotate_pairs(k, layer.tables, self.layout)
        return q, k

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        """Return v with every second head replaced by the one before it."""
        doubled = v[:, ::2].repeat_interleave(2, dim=1)
        return doubled[:, : v.shape[1]]


class FoPE(Encoding):
    """Fourier position embedding (FoPE): each pair turns by a mixture of frequencies,
    all of them fully trained.

        z_u -> z_u · (sum over m of C_mu cos(i f_m) + i·sum over m of S_mu sin(i f_m)),
        u < U = min(M, d/4)

    over the M frequencies f_m >= 2π/L. C and S are the identity plus `gain` times
    Xavier's draw, the same in every run.

    Source: Hua et al. (2024), arXiv:2412.17739; in its code pairs that do not turn have
    sine 1 (`still_sine: 1`).
    Beyond training length: defined everywhere; every frequency that is left has been
    seen at all angles.
    Checked against: plain loops from the paper; without the draw it is RoPE on those
    pairs.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        gain: NonNegative = 0.3,
        learnable: bool = False,
        still_sine: float = 0.0,
    ) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.layout, self.still_sine = layout, still_sine
        f = frequencies(shape.head_dim, base)
        self._f = f[f >= 2 * math.pi / shape.train_length]  # (M,) fp64

        count = len(self._f)  # M
        turning = min(count, shape.head_dim // 4)  # U
        # coefficients of cosines and of sines: (2, layers, H, M, U)
        coefficients = torch.zeros(2, shape.n_layers, shape.n_heads, count, turning)
        if turning:
            # Xavier's fans are H·U and M·U
            std = gain * math.sqrt(2 / (turning * (shape.n_heads + count)))
            same_in_every_run = torch.Generator().manual_seed(0)
            coefficients.normal_(0, std, generator=same_in_every_run)
            own = range(0, count, math.ceil(count / turning))
            for pair, frequency in enumerate(own):
                coefficients[..., frequency, pair] += 1
        self.coefficients: Tensor
        if learnable:
            self.coefficients = nn.Parameter(coefficients)
        else:
            self.coefficients = nn.Buffer(coefficients, persistent=False)

    def make_tables(self, positions: Tensor) -> Tensor:
        """Return cosines and sines of the M remaining frequencies: (2, 1|B, 1, T, M)
        fp32.
        """
        return cos_sin(angles(positions, self._f), positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        cosines, sines = layer.tables
        of_cosines, of_sines = self.coefficients[:, layer.index]
        cosine = cosines @ of_cosines  # (1|B, H, T, U)
        sine = sines @ of_sines

        still = (0, self.shape.head_dim // 2 - cosine.shape[-1])
        cosine = F.pad(cosine, still, value=1.0)
        sine = F.pad(sine, still, value=self.still_sine)
        return rotate_both(q, k, torch.stack((cosine, sine)), self.layout)


class DecoupledRoPE(Rotary):
    """Decoupled RoPE: position in channels of its own, as in multi-head latent
    attention (MLA).

        beside      q'_i = [q_i ; R_i W_Q x_i],   k'_j = [k_j ; R_j W_K x_j],
                    logits q'·k' / sqrt(d + r)
        trailing    R turns the last r channels of a head; `turn_values` turns those of
                    values, too, and outputs back: sum over j of w_ij R(j - i) v_j

    Source: DeepSeek-AI (2024), arXiv:2405.04434, 2.1.3, without compression;
    transformers' DeepSeek V4 (trailing). `turn_values` with all channels turning is
    RoVE (García-Castellanos et al., 2026, arXiv:2606.11275).
    Beyond training length: defined everywhere; slow pairs reach angles never seen in
    training and loss usually rises.
    Checked against: transformers' attention layers of DeepSeek V3 (beside) and DeepSeek
    V4 (trailing, turn_values), without their norms.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        turning: Annotated[int, Ge(2), MultipleOf(2)] | None = None,
        placement: Literal["beside", "trailing"] = "beside",
        turn_values: bool = False,
    ) -> None:
        super().__init__(shape, base, layout)
        self.width = turning or max(2, shape.head_dim // 4 * 2)  # r
        self.beside = placement == "beside"
        self.turn_values = turn_values
        self.expect(
            self.beside or self.width <= shape.head_dim,
            "turning",
            self.width,
            f"at most {shape.head_dim}, or placement=beside",
        )
        self.expect(
            not (turn_values and self.beside),
            "turn_values",
            turn_values,
            "false, or placement=trailing",
        )
        if self.beside:
            n, inputs = shape.n_layers, shape.d_model
            self.query = linears(n, inputs, shape.n_heads * self.width)
            self.key = linears(n, inputs, self.width)
            self.history = frozenset({"x"})
        if not turn_values:
            self.leave_out("map_values", "map_outputs")

    @property
    def logit_scale(self) -> float:
        channels = self.shape.head_dim
        if self.beside:
            channels += self.width
        return float(channels**-0.5)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if not self.beside:
            return self._rotated(q, layer.tables), self._rotated(k, layer.tables)
        x = self.given(layer.x, "makes its channels from")
        more_q = self.query[layer.index](x)
        more_q = split_heads(more_q, self.shape.n_heads)  # (B, H, T, r)
        more_k = self.key[layer.index](x)[:, None].expand_as(more_q)
        more_q, more_k = rotate_both(more_q, more_k, layer.tables, self.layout)
        q = torch.cat((q, more_q), dim=-1)
        k = torch.cat((k, more_k), dim=-1)
        return q, k

    # without the temperature of the logits
    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        if not self.turn_values:
            return v
        angles = self.angles(layer.positions)
        return self._rotated(v, cos_sin(angles, v.device))

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        if not self.turn_values:
            return out
        angles = -self.angles(layer.positions)[:, layer.rows]
        return self._rotated(out, cos_sin(angles, out.device))

    def _rotated(self, a: Tensor, tables: Tensor) -> Tensor:
        """Return (B, H, T, Dh) with its last channels rotated."""
        still = self.shape.head_dim - self.width
        last = rotate_pairs(a[..., still:], tables, self.layout)
        return torch.cat((a[..., :still], last), dim=-1)


class RoPE2D(Encoding):
    """2D-RoPE for text: half of the pairs turn with a token's line, the other half with
    its place in that line.

        angle_p = line · f_p  for the first d/4 pairs,   place · f_p  for the others,
        f_p = base^(-4p/d), p < d/4

    Source: Wen et al. (2026), arXiv:2607.16072, as in the authors' code
    (hhhhhh-925/copy-2dRoPE, rule-based).
    Beyond training length: defined everywhere; more lines, and longer ones, reach
    angles never seen in training.
    Checked against: plain loops over tokens and pairs.
    """

    LINE = 2**20  # a position holds line and place, as line · 2^20 + place

    def __init__(
        self, shape: Shape, base: Above1 = 100.0, layout: Layout = "half"
    ) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape, 4)
        self.layout = layout
        self.base = base
        # lines that a token ends; unknown tokens end 0
        breaks = [text.count("\n") for text in shape.vocabulary]
        self.breaks = nn.Buffer(torch.tensor([*breaks, 0]), persistent=False)

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        known = ids.clamp(max=len(self.breaks) - 1)
        breaks_before = F.pad(self.breaks[known], (1, -1))
        lines = breaks_before.cumsum(-1)
        return lines * self.LINE + places(lines)

    def make_tables(self, positions: Tensor) -> Tensor:
        line = positions.div(self.LINE, rounding_mode="floor")
        place = positions - line * self.LINE
        f = frequencies(self.shape.head_dim // 2, self.base, positions.device)
        of_line = angles(line, f)
        of_place = angles(place, f)
        return cos_sin(torch.cat((of_line, of_place), dim=-1), positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return rotate_both(q, k, layer.tables, self.layout)


class Summed(Encoding):
    """Base of rotary encodings that add up angles from token to token: the order of
    tokens counts, not positions.
    """

    history = frozenset({"x"})

    def __init__(self, shape: Shape, base: float, layout: Layout) -> None:
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.base, self.layout = base, layout

    def steps(self, x: Tensor, layer: int) -> Tensor:
        """Return each token's own angles, from the layer's input (B, T, D): (B, H, T,
        Dh / 2), in fp64 for the sum.
        """
        raise NotImplementedError

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        x = self.given(layer.x, "makes its angles from")
        angles = self.steps(x, layer.index).cumsum(2)
        return rotate_both(q, k, cos_sin(angles, q.device)[:, :, 0], self.layout)


class CARoPE(Summed):
    """Context-aware RoPE (CARoPE): each token sets, per head, the size of its step in
    position.

        angle_tp = sum over s = 0 .. t of θ_s^p,
        θ_s = 1 / (1 + softplus(w_h·x_s + c)),   p = 0 .. d/2-1
        c, which the paper does not have, makes θ = base^(-2/d) where w_h·x is 0:
        w starts at 0, which is RoPE

    Source: Veisi et al., "Context-aware Rotary Position Embedding" (2025),
    arXiv:2507.23083, section 2.
    Beyond training length: defined everywhere; sums reach angles never seen in
    training.
    Checked against: plain loops from the paper; at its start it is RoPE.
    """

    def __init__(
        self, shape: Shape, base: Above1 = 1e4, layout: Layout = "interleaved"
    ) -> None:
        super().__init__(shape, base, layout)
        start = base ** (2 / shape.head_dim) - 1  # 1/θ - 1 where w·x is 0
        self.constant = start + math.log(-math.expm1(-start))  # the inverse of softplus
        self.step = nn.Parameter(
            torch.zeros(shape.n_layers, shape.n_heads, shape.d_model)
        )

    def steps(self, x: Tensor, layer: int) -> Tensor:
        sizes = to_fp64((x @ self.step[layer].mT).mT)  # w·x, (B, H, T)
        logs = (1 + F.softplus(sizes + self.constant)).log()  # -ln θ
        p = torch.arange(self.shape.head_dim // 2, device=logs.device)
        return (-p * logs[..., None]).exp()


class SelectiveRoPE(Summed):
    """Selective RoPE: each token sets its own rotation angles, per head and pair.

        angle_tp = base^(-2p/d) · sum over s = 0 .. t of phi_sp
        phi_t = (conv(W_2 W_1 n(x))_t [+ exp(b)]) [· sigmoid(w_h·n(x)_t + c_h)]

    n scales each head's part of the input to length 1, conv is causal over four tokens,
    brackets are `bias` and `gate`.

    Source: Movahedi et al., "Selective Rotary Position Embedding" (2026),
    arXiv:2511.17388, and the authors' code.
    Beyond training length: defined everywhere; sums reach angles never seen in training
    where tokens turn one way.
    Checked against: plain loops from the authors' description; with a bias alone, it is
    RoPE.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 500000.0,
        layout: Layout = "interleaved",
        rank: Count = 32,
        bias: bool = False,
        gate: bool = False,
        start: Start = "normal",
    ) -> None:
        super().__init__(shape, base, layout)
        n, pairs = shape.n_layers, shape.n_heads * shape.head_dim // 2
        self.down = linears(n, shape.d_model, rank)
        self.up = linears(n, rank, pairs)
        self.convolution = convolutions(n, pairs, 4)
        self.constant = self.gate = None
        if bias:
            self.constant = nn.Parameter(torch.zeros(n, pairs))
        if gate:
            self.gate = linears(n, shape.d_model, shape.n_heads, bias=True)
        draw_layers(self, start)

    def steps(self, x: Tensor, layer: int) -> Tensor:
        parts = x.view(*x.shape[:2], self.shape.n_heads, -1)
        x = unit(parts).flatten(-2)  # n(x)

        kernel = self.convolution[layer].get_parameter("weight")[:, 0]
        phi = causal_convolution(self.up[layer](self.down[layer](x)), kernel)
        if self.constant is not None:
            phi = phi + self.constant[layer].exp()
        phi = split_heads(phi, self.shape.n_heads)  # (B, H, T, Dh/2)
        if self.gate is not None:
            phi = phi * self.gate[layer](x).sigmoid().mT[..., None]
        f = frequencies(self.shape.head_dim, self.base, phi.device)
        return angles(phi, f[:, None]).squeeze(-1)


class RePo(Rotary):
    """Context re-positioning (RePo): a small network places each token, per head, by
    its content.

        r_i = silu(W_g x_i) · (W_c x_i),   z_ih = w_h·r_i,
        then RoPE with the position z_ih instead of i

    Source: Li et al. (2025), arXiv:2512.14391, and the authors' code: plain RoPE in the
    first 5 of 16 layers (`first`).
    Beyond training length: defined everywhere; in re-positioned layers angles do not
    grow with length by themselves.
    Checked against: plain loops from the authors' description; by hand, the authors'
    code, too.
    """

    history = frozenset({"x"})

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 1e4,
        layout: Layout = "interleaved",
        first: Natural | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        if first is None:
            first = round(shape.n_layers * 5 / 16)
        self.first = first
        n = shape.n_layers - first
        width = max(1, shape.d_model // 8)
        self.gate = linears(n, shape.d_model, width)
        self.content = linears(n, shape.d_model, width)
        self.position = linears(n, width, shape.n_heads)
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=0.02, a=-0.06, b=0.06)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if layer.index < self.first:
            return super().rotate(q, k, layer)
        x = self.given(layer.x, "makes its positions from")
        index = layer.index - self.first
        r = F.silu(self.gate[index](x)) * self.content[index](x)
        z = self.position[index](r).mT  # positions, (B, H, T)
        tables = self.make_tables(z.flatten(0, 1))
        tables = tables.view(2, *z.shape, -1)  # (2, B, H, T, Dh/2)
        return rotate_both(q, k, tables, self.layout)
