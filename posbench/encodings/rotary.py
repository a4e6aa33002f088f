"""Encodings that rotate queries and keys and do something else beside, or rotate only some of their channels."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.rope import Layout, Rotary, angles, check_pairs, double, frequencies, turn, turned, turns
from posbench.errors import Undefined
from posbench.options import Above1, NonNegative, Positive


class XPos(Rotary):
    """Extrapolatable position embedding (xPos): RoPE whose logits fall with distance, most in the fast pairs.

        <q_i, k_j>_p is multiplied by zeta_p^((i - j)/B),   zeta_p = (2p/d + 0.4) / 1.4

    Source: Sun et al. (2022), arXiv:2212.10554, 3, without blockwise attention; B is 512, here half of train_length.
    Beyond training length: defined up to a span of 128·B positions, where the factors leave fp32. A larger one is
    refused on a CPU; an accelerator or compiled code gives NaN.
    Checked against: x-transformers RotaryEmbedding with use_xpos.
    """

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", scale_base: Positive | None = None
    ) -> None:
        super().__init__(shape, base, layout)
        self.scale_base = float(scale_base or max(1.0, shape.train_length / 2))
        self.max_length = int(128 * self.scale_base)

    def make_tables(self, positions: Tensor) -> Any:
        rotation, size = super().make_tables(positions), self.decay(positions).to(positions.device)
        return rotation * size, rotation / size

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        of_q, of_k = layer.tables
        return turn(q, of_q, self.layout), turn(k, of_k, self.layout)

    def decay(self, positions: Tensor) -> Tensor:
        """Return zeta^(i/B) of centred positions (1|B, T): (1|B, 1, T, d/2)."""
        i, d, span = double(positions), self.shape.head_dim, int(128 * self.scale_base)
        first, last = i.amin(-1, keepdim=True), i.amax(-1, keepdim=True)
        defined = last - first < span
        waits = i.device.type != "cpu" or torch.compiler.is_compiling()  # the host, for the values
        if not waits and not defined.all():
            raise Undefined(
                f"positions {(last - first).max().item():g} apart are beyond the end of 'xpos' (its factors fit fp32 "
                f"for less than {span}); a larger encoding.scale_base reaches farther"
            )
        centre = torch.where(defined, (first + last) / 2, math.nan)
        zeta = (torch.arange(0, d, 2, dtype=torch.float64, device=i.device) / d + 0.4) / 1.4
        return (zeta ** ((i - centre) / self.scale_base)[..., None]).float()[:, None]


class PoPE(Rotary):
    """Polar coordinate position embedding (PoPE): magnitude holds content, angle holds position.

        logits_ij = sum over c of softplus(q_ic)·softplus(k_jc)·cos((i - j)·base^(-c/d) - phase_c) / sqrt(d)

    Every channel c is one complex number; keys add a learned phase per head, clamped to [-2π, 0].

    Source: Gopalakrishnan et al. (2025), arXiv:2509.10534.
    Beyond training length: defined everywhere; slow channels reach angles never seen in training.
    Checked against: x-transformers PolarEmbedding.
    """

    def __init__(self, shape: Shape, base: Above1 = 10000.0, phase_init: Literal["zero", "uniform"] = "zero") -> None:
        super().__init__(shape, base)
        start = torch.zeros(shape.n_layers, shape.n_heads, shape.head_dim)
        self.phase = nn.Parameter(start if phase_init == "zero" else start.uniform_(-2 * math.pi, 0))

    @property
    def width(self) -> int:
        return 2 * self.shape.head_dim

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        phase = self.phase[layer.index].clamp(-2 * math.pi, 0)
        shifted = layer.tables * torch.polar(torch.ones_like(phase), phase)[:, None]
        q, k = F.softplus(q) * layer.tables, F.softplus(k) * shifted
        return torch.cat((q.real, q.imag), dim=-1), torch.cat((k.real, k.imag), dim=-1)


class RoPEPlusPlus(Rotary):
    """RoPE++: heads come in twos, one with RoPE's logits and one with their imaginary part.

        first:  <R(m) q, R(n) k>      second:  <R(m) J q, R(n) k>,   J turns each pair by -π/2

    The two share queries, keys and values, as in the authors' form with an equal number of heads (EH).

    Source: Liu et al. (2025), arXiv:2512.07525; the sign is that of the authors' code.
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: plain loops over complex numbers.
    """

    name = "rope_pp"

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        quarter = torch.ones(self.shape.n_heads, 1, 1, dtype=layer.tables.dtype, device=q.device)
        quarter[1::2].mul_(-1j)
        q, k = self.map_values(q, layer), self.map_values(k, layer)
        return turn(q, layer.tables * quarter, self.layout), turn(k, layer.tables, self.layout)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        """Return v with every second head replaced by the one before it."""
        return v[:, ::2].repeat_interleave(2, dim=1)[:, : v.shape[1]]


class FoPE(Encoding):
    """Fourier position embedding (FoPE): each pair turns by a mixture of frequencies, all of them fully trained.

        z_u -> z_u · (sum over m of C_mu cos(i f_m) + i·sum over m of S_mu sin(i f_m)),   u < U = min(M, d/4)

    over the M frequencies f_m >= 2π/L. Other pairs do not turn. C and S are the identity plus a normal draw (Xavier's,
    times `gain`), per head and layer, the same in every run.

    Source: Hua et al. (2024), arXiv:2412.17739; its code gives pairs that do not turn sine 1: `still_sine: 1`.
    Beyond training length: defined everywhere; every frequency that is left has been seen at all angles.
    Checked against: plain loops from the paper; without the draw it is RoPE on those pairs.
    """

    coefficients: Tensor  # of cosines and of sines: (2, layers, H, M, U)

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved",
        gain: NonNegative = 0.3, learnable: bool = False, still_sine: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(shape)
        check_pairs(self.name, shape)
        self.layout, self.still_sine = layout, still_sine
        every = frequencies(shape.head_dim, base)
        self.f = every[every >= 2 * math.pi / shape.train_length]  # (M,) fp64
        kept, turning = len(self.f), min(len(self.f), shape.head_dim // 4)
        drawn = torch.zeros(2, shape.n_layers, shape.n_heads, kept, turning)
        if turning:
            std = gain * math.sqrt(2 / (turning * (shape.n_heads + kept)))  # Xavier's fans are H·U and M·U
            drawn.normal_(0, std, generator=torch.Generator().manual_seed(0))
            for pair, frequency in enumerate(range(0, kept, math.ceil(kept / turning))):
                drawn[..., frequency, pair] += 1
        if learnable:
            self.coefficients = nn.Parameter(drawn)
        else:
            self.register_buffer("coefficients", drawn, persistent=False)

    def make_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the M remaining frequencies: (1|B, 1, T, M) fp32 each."""
        waves = turns(angles(positions, self.f), positions.device)
        return waves.real.contiguous(), waves.imag.contiguous()

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        of_layer = self.coefficients[:, layer.index]
        cosine, sine = (
            waves @ weights for waves, weights in zip(layer.tables, of_layer, strict=True)
        )  # (1|B, H, T, U)
        still = (0, self.shape.head_dim // 2 - cosine.shape[-1])
        factor = torch.complex(F.pad(cosine, still, value=1.0), F.pad(sine, still, value=self.still_sine))
        return turned(q, k, factor, self.layout)


class DecoupledRoPE(Rotary):
    """Decoupled RoPE: position in channels of its own, as in multi-head latent attention (MLA).

        beside      q'_i = [q_i ; R_i W_Q x_i],   k'_j = [k_j ; R_j W_K x_j],   logits q'·k' / sqrt(d + r)
        trailing    R turns the last r of the d channels of a head; nothing is learned

    All heads share the key's r channels. `turn_values` turns values, and outputs back: R_-i sum_j a_ij R_j v_j.

    Source: DeepSeek-AI (2024), arXiv:2405.04434, 2.1.3, without compression; transformers' DeepSeek V4 (trailing).
    Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
    Checked against: transformers DeepSeek V3 (beside, its whole attention) and DeepSeek V4 (trailing, turn_values).
    """

    name = "decoupled_rope"

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Layout = "interleaved", turning: int | None = None,
        placement: Literal["beside", "trailing"] = "beside", turn_values: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(shape, base, layout)
        self.turning = max(2, shape.head_dim // 4 * 2) if turning is None else turning
        self.beside, self.turn_values = placement == "beside", turn_values
        self.history = frozenset({"x"} if self.beside else ())
        fits = self.turning >= 2 and self.turning % 2 == 0 and (self.beside or self.turning <= shape.head_dim)
        most = "" if self.beside else f" up to {shape.head_dim}"
        self.expect(fits, "turning", self.turning, f"an even number of channels{most}, or null for half of the head")
        self.expect(not (turn_values and self.beside), "turn_values", turn_values, "false, or placement=trailing")
        layers = range(shape.n_layers if self.beside else 0)
        self.query = nn.ModuleList(nn.Linear(shape.d_model, shape.n_heads * self.turning, bias=False) for _ in layers)
        self.key = nn.ModuleList(nn.Linear(shape.d_model, self.turning, bias=False) for _ in layers)
        vars(self)["overridden"] = self.overridden - (set() if turn_values else {"map_values", "map_outputs"})

    @property
    def width(self) -> int:
        return self.turning

    @property
    def logit_scale(self) -> float:
        return float((self.shape.head_dim + self.beside * self.turning) ** -0.5)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if not self.beside:
            return self._turned(q, layer.tables), self._turned(k, layer.tables)
        x = self.given(layer.x, "makes its channels from")
        more_q = self.query[layer.index](x).unflatten(-1, (-1, self.turning)).transpose(1, 2)  # (B, H, T, r)
        more_k = self.key[layer.index](x)[:, None].expand_as(more_q)
        more_q, more_k = turned(more_q, more_k, layer.tables, self.layout)
        return torch.cat((q, more_q), dim=-1), torch.cat((k, more_k), dim=-1)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        # Without the temperature of the logits.
        return self._turned(v, turns(self.angles(layer.positions), v.device)) if self.turn_values else v

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        angles = -self.angles(layer.positions)[:, layer.rows]
        return self._turned(out, turns(angles, out.device)) if self.turn_values else out

    def _turned(self, a: Tensor, turns: Tensor) -> Tensor:
        """Return (B, H, T, Dh) with its last channels turned."""
        still = self.shape.head_dim - self.turning
        return torch.cat((a[..., :still], turn(a[..., still:], turns, self.layout)), dim=-1)
