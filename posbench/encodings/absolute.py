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
        concat:  x'_i = [x_i ; s·code(i)],  the last quarter of the model's width; the token table is narrower

    With `scale: token` s is the initial rms of the token embeddings, the paper's ratio of words to positions:
    there embeddings times sqrt(d_model) have rms 1 and sinusoids rms 0.71.
    """

    def __init__(self, shape: Shape, combine: Combine = "add", scale: Scale = "token") -> None:
        super().__init__(shape)
        self.combine = combine
        self.width = shape.d_model if combine == "add" else max(1, shape.d_model // 4)  # of the code
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
    """Sinusoidal positions of the original transformer.

    A clock with d/2 hands, the first fast and the last slow. Sine and cosine of each are added to the embeddings:

        PE[i, 2p] = sin(i·θ_p),   PE[i, 2p+1] = cos(i·θ_p),   θ_p = base^(-2p/d)

    PE[i+k] is one matrix times PE[i] for all i. `layout: halves` lays all sines before all cosines.

    Source: Vaswani et al., "Attention Is All You Need" (2017), arXiv:1706.03762, section 3.5.
    Beyond training length: defined everywhere; combinations of the slow hands are unseen there and loss usually rises.
    Checked against: transformers DistilBERT (interleaved) and Marian (halves).
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 10000.0,
        layout: Literal["interleaved", "halves"] = "interleaved",
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        if self.width % 2:
            raise UserError(
                f"d_model is {shape.d_model}: sinusoidal pairs a cosine with every sine and needs an even width for "
                f"its code, here {self.width} (combine: {combine})"
            )
        self.base = base
        self.layout = layout

    def code(self, positions: Tensor) -> Tensor:
        angles = rotary.angles(positions, rotary.frequencies(self.width, self.base))
        hands = torch.stack((angles.sin(), angles.cos()), dim=-1 if self.layout == "interleaved" else -2)
        return hands.flatten(-2).float().to(positions.device)


class Learned(Encoding):
    """Learned absolute positions, as in GPT-2 and BERT.

    A table with a vector per position is added to the token embeddings, and starts with their deviation, as in GPT-2:

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
    """Raise UserError for fractional positions, and Undefined for more, or larger ones, than there are codes.

    An accelerator or compiled code does not stop to look at the values.
    """
    check_length(encoding, positions.shape[-1])
    if positions.is_floating_point():
        raise UserError(f"'{encoding.name}' has a code per whole position: expected integer positions, got fractional")
    looks = positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel()
    if looks and encoding.max_length is not None and (last := int(positions.max())) >= encoding.max_length:
        raise Undefined(f"position {last} is beyond the end of '{encoding.name}' (defined up to {encoding.max_length})")
