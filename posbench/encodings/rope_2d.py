"""2D-RoPE for text: half of the pairs turn with a token's line, the other half with its place in that line.

    angle_p = line · f_p  for the first d/4 pairs,   place · f_p  for the others,   f_p = base^(-4p/d), p < d/4

A token is copied from the same place some lines above. A line ends behind a token that holds a line break; one that
holds n ends n lines. Without a known vocabulary a text is one line. Positions hold both, as line · 2^20 + place.

Source: Wen et al., "Frontier Language Models Struggle to Copy: Text Can Be Better Viewed in 2D" (2026),
arXiv:2607.16072, as the authors' code has it (hhhhhh-925/copy-2dRoPE, rule-based), with its bases of 100.
Beyond training length: defined everywhere; more lines, and longer ones, reach angles never seen in training.
Checked against: plain loops over tokens and pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.arithmetic import places
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.encodings.rope import Layout, angles, frequencies, turned, turns
from posbench.errors import UserError
from posbench.options import Above1

LINE = 2**20


class RoPE2D(Encoding):
    name = "rope_2d"
    breaks: Tensor

    def __init__(self, shape: Shape, base: Above1 = 100.0, layout: Layout = "half") -> None:
        super().__init__(shape)
        if shape.head_dim % 4:
            raise UserError(f"head_dim is {shape.head_dim}: {self.name} needs a multiple of 4")
        self.layout, self.frequencies = layout, frequencies(shape.head_dim // 2, base)
        breaks = torch.tensor([*(text.count("\n") for text in shape.vocabulary), 0])  # the last is of unknown tokens
        self.register_buffer("breaks", breaks, persistent=False)

    def positions(self, ids: Tensor, generator: torch.Generator | None) -> Tensor:
        before = F.pad(self.breaks[ids.clamp(max=len(self.breaks) - 1)], (1, -1)).cumsum(-1)
        return before * LINE + places(before)

    def make_tables(self, positions: Tensor) -> Tensor:
        line = positions.div(LINE, rounding_mode="floor")
        of_both = [angles(number, self.frequencies) for number in (line, positions - line * LINE)]
        return turns(torch.cat(of_both, dim=-1), positions.device)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return turned(q, k, layer.tables, self.layout)
