"""Extensions that squeeze positions into the range seen in training, for encodings other than RoPE."""

import math

import torch.nn.functional as F
from torch import Tensor

from posbench.encodings.absolute import Learned, Sinusoidal
from posbench.encodings.base import Encoding, Extended, Layer, Stretch, check_length
from posbench.encodings.distance import FIRE, ALiBi, T5Bias
from posbench.encodings.rope import double
from posbench.options import AtLeast1


class Squeezed(Encoding):
    """An encoding that gets every position and every distance divided by `factor`."""

    def __init__(self, inner: Encoding, factor: float) -> None:
        super().__init__(inner.shape)
        self.inner, self.factor = inner, factor
        vars(self)["overridden"] = inner.hooks & self.overridden

    def token_dim(self) -> int:
        return self.inner.token_dim()

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.inner.embed(x, (double(positions) / self.factor).to(positions.device), ids)

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        return self.inner.distance_bias(distance / self.factor, layer)

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        return self.inner.bias(q, k, layer.replace(positions=layer.positions / self.factor))


class StretchedTable(Encoding):
    """Learned positions with the table's rows spread over `length` positions, linear between them, ends aligned."""

    def __init__(self, inner: Learned, length: int) -> None:
        super().__init__(inner.shape)
        self.inner, self.max_length = inner, length
        self.step = (len(inner.table) - 1) / max(1, length - 1)  # rows per position

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        check_length(self, positions.shape[-1])
        table = self.inner.table
        place = double(positions) * self.step
        below = place.long().clamp(max=len(table) - 1)
        beyond, below = (place - below)[..., None].to(table), below.to(table.device)
        above = (below + 1).clamp(max=len(table) - 1)
        return (x + F.embedding(below, table) * (1 - beyond) + F.embedding(above, table) * beyond).to(x.dtype)


def alibi_pi(alibi: ALiBi, stretch: Stretch, factor: AtLeast1 | None = None) -> Extended:
    """ALiBi with its slopes divided by s, which is position interpolation.

    Source: Chen et al. (2023), arXiv:2306.15595, applied to Press et al. (2021), arXiv:2108.12409.
    """
    s, facts = stretch.factor(factor)
    return Squeezed(alibi, s), facts


def interpolate(
    encoding: Sinusoidal | Learned | T5Bias | FIRE, stretch: Stretch, factor: AtLeast1 | None = None
) -> Extended:
    """Positions and distances divided by s; the table of `learned` stretched linearly over s times its length.

    Source: Chen et al. (2023), arXiv:2306.15595; for tables, Dosovitskiy et al. (2020), arXiv:2010.11929, section 3.2.
    """
    s, facts = stretch.factor(factor)
    if isinstance(encoding, Learned):
        return StretchedTable(encoding, math.ceil(s * stretch.train_length)), facts
    return Squeezed(encoding, s), facts
