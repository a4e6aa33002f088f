"""Context re-positioning (RePo): a small network places each token, per head, by its content.

    r_i = silu(W_g x_i) · (W_c x_i),   z_ih = w_h·r_i,   then RoPE with the position z_ih instead of i

W_g and W_c have an eighth of the model's width and serve all heads of a layer. Positions are any real numbers, so that
tokens that belong together can be near each other in one head and far in another. The order of the text itself enters
only through the layers below `first`, which have plain RoPE, and through the causal mask.

Weights start normal with deviation 0.02, cut at three deviations, so that all positions are near 0 at first: such a
layer starts as `none`. The authors then train on a model that has learned its text with RoPE.

Source: Li et al., "RePo: Language Models with Context Re-Positioning" (2025), arXiv:2512.14391, and the authors' code
(SakanaAI/repo), whose 16 layers have plain RoPE in the first 5, with base 500000. `first: null` is that share of the
layers. Their x is not normalised, since OLMo 2 normalises after attention.
Beyond training length: defined everywhere; in re-positioned layers angles do not grow with length by themselves.
Checked against: plain loops from the authors' description; by hand, also the authors' code.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import _rotary as rotary
from posbench.encodings.base import Layer, Shape

STD, CUT = 0.02, 3.0  # of the weights at the start, and where they are cut, in deviations
PLAIN = 5 / 16  # share of the layers with plain RoPE, from the lowest
NARROWER = 8  # d_model divided by the width of the positions' network


class RePo(rotary.Rotary):
    history = frozenset({"x"})

    def __init__(
        self,
        shape: Shape,
        base: float = 10000.0,
        layout: rotary.Layout = "interleaved",
        first: int | None = None,
    ) -> None:
        super().__init__(shape, base, layout)
        layers, width = shape.n_layers, max(1, shape.d_model // NARROWER)
        expected = f"a layer of the model, 0 to {layers - 1}, or null for {PLAIN:.0%} of the layers"
        self.expect(first is None or 0 <= first < layers, "first", first, expected)
        self.first = round(layers * PLAIN) if first is None else first
        own = range(self.first, layers)
        self.gate = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in own)
        self.content = nn.ModuleList(nn.Linear(shape.d_model, width, bias=False) for _ in own)
        self.position = nn.ModuleList(nn.Linear(width, shape.n_heads, bias=False) for _ in own)
        for weight in self.parameters():
            nn.init.trunc_normal_(weight, std=STD, a=-CUT * STD, b=CUT * STD)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if layer.index < self.first:
            return super().rotate(q, k, layer)
        own = self.given(layer.x, "makes its positions from")
        placed = self.placed(own.float(), layer.index)
        turns = self.rotation(placed.flatten(0, 1), q.device).view(*placed.shape, -1)  # (B, H, T, Dh/2)
        made = rotary.laid_out(turns, self.layout)
        return rotary.turn(q, made), rotary.turn(k, made)

    def placed(self, x: Tensor, layer: int) -> Tensor:
        """The positions that a layer gives to its tokens, from its input x (B, T, D): (B, H, T)."""
        at = layer - self.first
        made: Tensor = self.position[at](F.silu(self.gate[at](x)) * self.content[at](x))
        return made.mT
