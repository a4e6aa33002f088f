"""Bayesian attention mechanism (BAM): a prior over distances whose shape each head learns.

Attention is content times a prior for where the key is. ALiBi's prior is an exponential one; here it is a generalised
Gaussian, whose logarithm is the bias:

    logits_ij = q_i·k_j / sqrt(d) - exp(a)·(|j - i - mu| + 1e-5)^b,   mu = 2·sinh(m)

a, b and m are one number each per layer and head. b = 1 is ALiBi, b = 0 is no bias, b between them lets far keys fade
more slowly. With b < 0 a head ignores its neighbourhood and the token itself, and looks far back. m is 0 unless
`location` lets heads learn it. a starts at the logarithm of ALiBi's slopes and b at 1: the start is ALiBi.

`ssmax` also multiplies query i's whole logits, bias included, by s·ln n for the n = i + 1 keys it sees, so that
attention stays sharp in long texts. s is learned per layer and head and starts at 1.

Source: Bianchessi et al., "Bayesian Attention Mechanism: A Probabilistic Framework for Positional Encoding and Context
Length Extrapolation" (2025), arXiv:2505.22842 (GGD-BAM and BAM SSMax), and the authors' code
(ArthurSBianchessi/BAM). The paper learns a and b per layer and head, 384 numbers in 12 layers of 16 heads, and holds m
at 0, as here. The defaults of the code are one prior for all layers and a learned m.
Beyond training length: defined everywhere; where b < 1, far keys fade less and less.
Checked against: plain loops from the authors' equation; by hand, also the authors' code.
"""

import torch
from torch import Tensor, nn

from posbench.encodings.alibi import default_slopes
from posbench.encodings.base import Encoding, Layer, Shape

LEAST = 1e-5  # added to distances, whose power may be negative


class BAM(Encoding):
    def __init__(self, shape: Shape, location: bool = False, ssmax: bool = False) -> None:
        super().__init__(shape)
        size = shape.n_layers, shape.n_heads
        self.scale = nn.Parameter(torch.tensor(default_slopes(shape.n_heads)).log().repeat(shape.n_layers, 1))
        self.exponent = nn.Parameter(torch.ones(size))
        self.location = nn.Parameter(torch.zeros(size)) if location else None
        self.sharpness = nn.Parameter(torch.ones(size)) if ssmax else None

    @property
    def hooks(self) -> frozenset[str]:
        unused = {"rotate", "bias"} if self.sharpness is None else {"distance_bias"}
        return self.overridden - unused

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor | None:
        return _log_prior(distance, *self._of(layer.index)) if self.sharpness is None else None

    # With `ssmax` the bias also depends on the number of keys that a query sees.

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        if self.sharpness is None:
            return q, k
        seen = torch.arange(1, q.shape[2] + 1, device=q.device)
        return (q * _sharper(self.sharpness[layer.index], seen)[..., None]).to(q.dtype), k

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        if self.sharpness is None:
            return None
        seen = torch.arange(layer.rows.start + 1, layer.rows.stop + 1, device=q.device)
        prior = _log_prior(layer.distance, *self._of(layer.index))  # (H, 1|B, Tq, Tk)
        return prior.movedim(0, 1) * _sharper(self.sharpness[layer.index], seen)[..., None]

    def _of(self, layer: int) -> list[Tensor]:
        """a, b and, if learned, m of a layer: (H,) each."""
        return [part[layer] for part in (self.scale, self.exponent, self.location) if part is not None]


def _sharper(sharpness: Tensor, seen: Tensor) -> Tensor:
    """The factor of logits by head and by the number of keys seen, from s (H,) and numbers (T,): (H, T)."""
    return sharpness[:, None] * seen.float().log()


def _log_prior(distance: Tensor, scale: Tensor, exponent: Tensor, location: Tensor | None = None) -> Tensor:
    """The bias of query minus key positions (*S), from numbers per head (H,): (H, *S) fp32."""
    heads = -1, *(1,) * distance.dim()
    off = distance.float() if location is None else distance + 2 * location.sinh().view(heads)
    return -scale.exp().view(heads) * (off.abs() + LEAST) ** exponent.view(heads)
