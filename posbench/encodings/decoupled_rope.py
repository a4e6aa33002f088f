"""Decoupled RoPE: position in channels of its own, as in multi-head latent attention (MLA).

RoPE acts on r channels of a head; the other channels carry no position. `placement` says which channels:

    beside      r more channels per head, computed from the layer's input x; all heads share the key's:
                q'_i = [q_i ; R_i W_Q x_i],   k'_j = [k_j ; R_j W_K x_j],   logits q'·k' / sqrt(d + r)
    trailing    the last r of the d channels of a head; nothing is learned

In models whose keys are also the values, RoPE turns both. With `turn_values` it turns the values here too. The output
is then turned back by the position of its query, R_-i sum_j a_ij R_j v_j: each value arrives turned by its distance.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), arXiv:2405.04434, section 2.1.3, for `beside`, without its compression of
queries, keys and values; `trailing` and `turn_values` are those of transformers' DeepSeek V4 (with one tensor for keys
and values, which is the model's business).
Beyond training length: defined everywhere; slow pairs reach angles never seen in training and loss usually rises.
Checked against: transformers DeepSeek V3 (beside, its whole attention) and DeepSeek V4 (trailing, turn_values).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape

Placement = Literal["beside", "trailing"]


class DecoupledRoPE(rotary.Rotary):
    name = "decoupled_rope"

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        turning: int | None = None,
        placement: Placement = "beside",
        turn_values: bool = False,
    ) -> None:
        super().__init__(shape, base, layout)
        self.turning = max(2, shape.head_dim // 4 * 2) if turning is None else turning
        self.beside = placement == "beside"
        self.history = frozenset({"x"} if self.beside else ())
        fits = self.turning >= 2 and self.turning % 2 == 0 and (self.beside or self.turning <= shape.head_dim)
        most = "" if self.beside else f" up to {shape.head_dim}"
        self.expect(fits, "turning", self.turning, f"an even number of channels{most}, or null for half of the head")
        self.expect(not (turn_values and self.beside), "turn_values", turn_values, "false, or placement=trailing")
        self.turn_values = turn_values
        layers = range(shape.n_layers if self.beside else 0)
        self.query = nn.ModuleList(nn.Linear(shape.d_model, shape.n_heads * self.turning, bias=False) for _ in layers)
        self.key = nn.ModuleList(nn.Linear(shape.d_model, self.turning, bias=False) for _ in layers)

    @property
    def width(self) -> int:
        return self.turning

    @property
    def hooks(self) -> frozenset[str]:
        return self.overridden if self.turn_values else self.overridden - {"map_values", "map_outputs"}

    @property
    def logit_scale(self) -> float:
        return float((self.shape.head_dim + self.beside * self.turning) ** -0.5)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        made = layer.tables
        if not self.beside:
            return self._turned(q, made), self._turned(k, made)
        x = self.given(layer.x, "makes its channels from")
        more_q = self.query[layer.index](x.float()).unflatten(-1, (-1, self.turning)).transpose(1, 2)  # (B, H, T, r)
        more_k = self.key[layer.index](x.float())[:, None].expand_as(more_q)
        more_q, more_k = rotary.turn(more_q, made), rotary.turn(more_k, made)
        return torch.cat((q, more_q.to(q.dtype)), dim=-1), torch.cat((k, more_k.to(k.dtype)), dim=-1)

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return self._turned(v, self._by_position(layer.positions, v)) if self.turn_values else v

    def map_outputs(self, out: Tensor, layer: Layer) -> Tensor:
        return self._turned(out, self._by_position(-layer.positions[:, layer.rows], out)) if self.turn_values else out

    def _by_position(self, positions: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Turns for values: rotations only, without the temperature of the logits."""
        return rotary.laid_out(rotary.turns(self.angles(positions), values.device), self.layout)

    def _turned(self, a: Tensor, made: tuple[Tensor, ...]) -> Tensor:
        """(B, H, T, Dh) with its last channels turned."""
        still = self.shape.head_dim - self.turning
        return torch.cat((a[..., :still], rotary.turn(a[..., still:], made)), dim=-1)
