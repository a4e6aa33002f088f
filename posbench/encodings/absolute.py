"""Codes of the position added to the token embeddings, or beside them: sinusoidal and learned."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.base import Encoding, Shape, check_length
from posbench.errors import Undefined, UserError
from posbench.options import Above1, Positive

Combine = Literal["add", "concat"]
Scale = Positive | Literal["token"]


class Additive(Encoding):
    """Base of the encodings that add a position code at the input or concatenate one; a subclass implements `code`.

        add:     x'_i = x_i + s·code(i)
        concat:  x'_i = [x_i ; s·code(i)],  the last channels of the model, by default a quarter

    With `scale: token` s is the initial rms of the token embeddings, the paper's ratio of words to positions.
    """

    def __init__(self, shape: Shape, combine: Combine = "add", scale: Scale = "token", width: int = 0) -> None:
        super().__init__(shape)
        self.combine = combine
        self.width = shape.d_model if combine == "add" else width or max(1, shape.d_model // 4)  # of the code
        self.scale = shape.token_rms if scale == "token" else scale

    def code(self, positions: Tensor) -> Tensor:
        """Return the unscaled code of positions (1|B, T): (1|B, T, width), fp32."""
        raise NotImplementedError

    def token_dim(self) -> int:
        return self.shape.d_model - (self.width if self.combine == "concat" else 0)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        code = self.scale * self.code(positions)
        if self.combine == "add":
            return (x + code).to(x.dtype)
        return torch.cat((x, code.to(x.dtype).expand(len(x), -1, -1)), dim=-1)


class Sinusoidal(Additive):
    """Sinusoidal positions of the original transformer: a clock with d/2 hands, the first fast and the last slow.

        PE[i, 2p] = sin(i·θ_p),   PE[i, 2p+1] = cos(i·θ_p),   θ_p = base^(-2p/d)

    PE[i+k] is one matrix times PE[i] for all i. `layout: halves` lays all sines before all cosines.

    Source: Vaswani et al., "Attention Is All You Need" (2017), arXiv:1706.03762, section 3.5.
    Beyond training length: defined everywhere; combinations of the slow hands are unseen there and loss usually rises.
    Checked against: transformers DistilBERT (interleaved) and Marian (halves).
    """

    def __init__(
        self, shape: Shape, base: Above1 = 10000.0, layout: Literal["interleaved", "halves"] = "interleaved",
        combine: Combine = "add", scale: Scale = "token",
    ) -> None:  # fmt: skip
        super().__init__(shape, combine, scale)
        if self.width % 2:
            raise UserError(f"d_model is {shape.d_model}: sinusoidal needs an even width for its code, of {combine}")
        self.base, self.layout = base, layout

    def code(self, positions: Tensor) -> Tensor:
        angles = rotary.angles(positions, rotary.frequencies(self.width, self.base))
        hands = torch.stack((angles.sin(), angles.cos()), dim=-1 if self.layout == "interleaved" else -2)
        return hands.flatten(-2).float().to(positions.device)


class Learned(Encoding):
    """Learned absolute positions, as in GPT-2 and BERT: a vector per position, at first as large as a token's.

        x'_i = x_i + E[i],   E of size train_length x d_model

    Source: Gehring et al., "Convolutional Sequence to Sequence Learning" (2017), arXiv:1705.03122; Devlin et al.,
    "BERT" (2018), arXiv:1810.04805; Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
    Beyond training length: undefined, since the table has no further rows; such inputs are refused.
    Checked against: transformers GPT-2 embeddings.
    """

    whole_positions = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.max_length = shape.train_length
        self.table = nn.Parameter(torch.randn(shape.train_length, shape.d_model) * shape.token_rms)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        check_whole(self, positions)
        return (x + F.embedding(positions, self.table)).to(x.dtype)


def check_whole(encoding: Encoding, positions: Tensor) -> None:
    """Raise UserError for fractional positions, and on a CPU Undefined for more, or larger ones, than have codes."""
    check_length(encoding, positions.shape[-1])
    if positions.is_floating_point():
        raise UserError(f"'{encoding.name}' has a code per whole position: expected integer positions, got fractional")
    looks = positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel()
    if looks and encoding.max_length is not None and (last := int(positions.max())) >= encoding.max_length:
        raise Undefined(f"position {last} is beyond the end of '{encoding.name}' (defined up to {encoding.max_length})")
