"""Learned absolute positions, as in GPT-2 and BERT.

A table with one vector per position, trained like any other weight and added to the token embeddings at the input:

    x'_i = x_i + E[i],   E of size train_length x d_model

Neighbouring rows have nothing in common at the start; order and distance must be learned. The table starts with the
standard deviation of the token embeddings, as in GPT-2.

Source: Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), arXiv:1705.03122; Devlin et al., "BERT"
(2018), arXiv:1810.04805; Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
Beyond training length: undefined, since the table has no further rows; such inputs are refused.
Checked against: transformers GPT-2 embeddings.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings.base import Encoding, Shape, check_length
from posbench.errors import UserError


class Learned(Encoding):
    whole_positions = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.max_length = shape.train_length
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * shape.token_rms)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        check_length(self, positions.shape[-1])
        if positions.is_floating_point():
            raise UserError("'learned' has a row per whole position: expected integer positions, got fractional ones")
        return (x + F.embedding(positions, self.table)).to(x.dtype)
