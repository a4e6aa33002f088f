"""No positional encoding, and codes of the position at the input: sines, tables,
digits, the index.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posbench.encodings import rope as rotary
from posbench.encodings.base import Encoding, Shape, check_length
from posbench.errors import Undefined, UserError
from posbench.options import Above1, Combine, Direction, Scale


class NoPE(Encoding):
    """No positional encoding (NoPE): order enters only through the number of keys that
    a causal query sees.

        logits_ij = q_i·k_j / sqrt(d)

    Source: Haviv et al. (2022), arXiv:2203.16634; Kazemnejad et al. (2023),
    arXiv:2305.19466.
    Beyond training length: defined everywhere; loss usually rises, since attention
    spreads over more keys than trained.
    Checked against: torch scaled_dot_product_attention.
    """

    name = "none"


class Additive(Encoding):
    """Base of the encodings that add a position code at the input or concatenate one; a
    subclass implements `code`.

        add:     x'_i = x_i + s·code(i)
        concat:  x'_i = [x_i ; s·code(i)],
                 the last channels of the model, by default a quarter

    With `scale: token`, s is the initial rms of the token embeddings: the ratio of
    words to positions in the paper.
    """

    def __init__(
        self,
        shape: Shape,
        combine: Combine = "add",
        scale: Scale = "token",
        width: int = 0,
    ) -> None:
        super().__init__(shape)
        self.combine = combine
        self.width = shape.d_model  # of a code
        if combine == "concat":
            self.width = width or max(1, shape.d_model // 4)
        self.scale = shape.token_rms if scale == "token" else scale

    def code(self, positions: Tensor) -> Tensor:
        """Return the unscaled code of positions (1|B, T): (1|B, T, width), fp32."""
        raise NotImplementedError

    def token_dim(self) -> int:
        if self.combine == "add":
            return self.shape.d_model
        return self.shape.d_model - self.width

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        code = self.scale * self.code(positions)
        if self.combine == "add":
            return (x + code).to(x.dtype)
        code = code.to(x.dtype).expand(len(x), -1, -1)
        return torch.cat((x, code), dim=-1)


class Sinusoidal(Additive):
    """Sinusoidal positions of the original transformer: a clock with d/2 hands, the
    first fast and the last slow.

        PE[i, 2p] = sin(i·θ_p),   PE[i, 2p+1] = cos(i·θ_p),   θ_p = base^(-2p/d)

    Source: Vaswani et al., "Attention Is All You Need" (2017), arXiv:1706.03762,
    section 3.5.
    Beyond training length: defined everywhere; combinations of the slow hands are
    unseen there and loss usually rises.
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
                f"d_model is {shape.d_model}: sinusoidal, by {combine}, needs an even"
                " code width"
            )
        self.base, self.layout = base, layout

    def code(self, positions: Tensor) -> Tensor:
        frequencies = rotary.frequencies(self.width, self.base, positions.device)
        angles = rotary.angles(positions, frequencies)
        hands = (angles.sin(), angles.cos())
        if self.layout == "interleaved":
            code = torch.stack(hands, dim=-1).flatten(-2)
        else:
            code = torch.cat(hands, dim=-1)
        return code.float().to(positions.device)


class Learned(Encoding):
    """Learned absolute positions, as in GPT-2 and BERT: a vector per position, at first
    as large as a token's.

        x'_i = x_i + E[i],   E of size train_length x d_model

    Source: Gehring et al. (2017), arXiv:1705.03122; Devlin et al., "BERT" (2018),
    arXiv:1810.04805; GPT-2.
    Beyond training length: undefined, since the table has no further rows; such inputs
    are refused.
    Checked against: transformers GPT-2 embeddings.
    """

    whole_positions = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.max_length = shape.train_length
        table = torch.randn(shape.train_length, shape.d_model)  # E
        self.table = nn.Parameter(table * shape.token_rms)

    def embed(self, x: Tensor, positions: Tensor, ids: Tensor | None = None) -> Tensor:
        check_whole(self, positions)
        table: Tensor = self.table
        if self.max_length != len(table):  # `extension=interpolate` has set it
            stretched = F.interpolate(
                table.T[None], self.max_length, mode="linear", align_corners=True
            )
            table = stretched[0].T
        return (x + F.embedding(positions, table)).to(x.dtype)


def check_whole(encoding: Encoding, positions: Tensor) -> None:
    """Raise UserError for fractional positions and, on a CPU, Undefined for positions
    that have no code.
    """
    check_length(encoding, positions.shape[-1])
    if positions.is_floating_point():
        raise UserError(
            f"'{encoding.name}' has a code per whole position: expected integer"
            " positions, got fractional"
        )
    can_refuse = positions.device.type == "cpu" and not torch.compiler.is_compiling()
    if encoding.max_length is None or not can_refuse or not positions.numel():
        return
    last = int(positions.max())
    if last >= encoding.max_length:
        raise Undefined(
            f"position {last} is beyond the end of '{encoding.name}' (defined up to"
            f" {encoding.max_length})"
        )


class Index(Additive):
    """The raw index: the position as a number, along a direction u of the embedding or
    in a channel of its own.

        x'_i = x_i + s·i·u    or    [x_i ; s·i],  the token table one channel narrower

    u is the first channel, all channels (`ones`), a fixed unit vector (`random`), or
    learned, starting from that.

    Source: the common first attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; values are larger than any seen in
    training.
    Checked against: a plain loop.
    """

    def __init__(
        self,
        shape: Shape,
        direction: Direction = "first",
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        super().__init__(shape, combine, scale, width=1)
        # The same random vector in every run, so that a checkpoint need not hold it.
        same_in_every_run = torch.Generator().manual_seed(0)
        random = torch.randn(self.width, generator=same_in_every_run)
        random = F.normalize(random, dim=0)
        self.u: Tensor
        if direction == "learned":
            self.u = nn.Parameter(random)
            return
        u = random
        if direction == "first":
            u = torch.eye(1, self.width)[0]
        if direction == "ones":
            u = torch.ones(self.width)
        self.u = nn.Buffer(u, persistent=False)

    def code(self, positions: Tensor) -> Tensor:
        return positions[..., None] * self.u


class MinMax(Index):
    """The index scaled to 0 .. 1 (min-max normalisation), with u as in `index`.

        p_i = (i - min) / (max - min) = i / (T - 1),
        x'_i = x_i + s·p_i·u   or   [x_i ; s·p_i]

    It tells every token how long the text is; `norm: length` puts the training length
    in place of T. T counts a row's padding, too: in training a short problem or
    document gets the first of the row's codes.

    Source: the common second attempt of tutorials on positional encoding; no paper.
    Beyond training length: defined everywhere; with `norm: batch`, neighbours have
    closer codes than in training.
    Checked against: a plain loop.
    """

    def __init__(
        self,
        shape: Shape,
        norm: Literal["batch", "length"] = "batch",
        direction: Direction = "first",
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        super().__init__(shape, direction, combine, scale)
        self.norm = norm
        self.length_dependent = norm == "batch"

    def code(self, positions: Tensor) -> Tensor:
        if self.norm == "length":
            return super().code(positions / max(1, self.shape.train_length - 1))
        low, high = torch.aminmax(positions.float(), dim=-1, keepdim=True)
        span = torch.where(high > low, high - low, 1)  # a single token is at 0
        return super().code((positions - low) / span)


class Binary(Additive):
    """Binary digits of the index: codes are bounded and distinct, but neighbours are
    not equally far apart.

        b_ik = floor(i / 2^k) mod 2,  k = 0 .. digits - 1,
        x'_i = x_i + s·[b_i ; 0 ... 0]   or   [x_i ; s·b_i]

    Source: the binary numeral system, which tutorials use as a step to sinusoids; no
    paper.
    Beyond training length: undefined from 2^digits on, by default the next power of
    two: refused, or NaN on a GPU.
    Checked against: Python's own binary formatting, in a plain loop.
    """

    whole_positions = True

    def __init__(
        self,
        shape: Shape,
        digits: int | None = None,
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        if digits is None:
            digits = max(1, (shape.train_length - 1).bit_length())
        super().__init__(shape, combine, scale, width=digits)
        room = shape.d_model
        if combine == "concat":
            room = shape.d_model - 1
        room = min(62, room)  # 62 fit into an int64
        self.expect(
            1 <= digits <= room,
            "digits",
            digits,
            f"1 to {room}, at d_model {shape.d_model}",
        )
        self.digits = digits
        self.max_length = 2**digits

    def code(self, positions: Tensor) -> Tensor:
        check_whole(self, positions)
        k = torch.arange(self.digits, device=positions.device)
        bits = (positions[..., None] >> k) & 1
        in_range = (positions >= 0) & (positions < 2**self.digits)
        code = torch.where(in_range[..., None], bits, math.nan)
        return F.pad(code, (0, self.width - self.digits))


class Sine(Additive):
    """Sines only: a continuous form of binary digits, the first channel turning
    fastest, the last hardly at all.

        PE_ij = sin( i / base^(j/d) ),  j = 0 .. d - 1,
        x'_i = x_i + s·PE_i   or   [x_i ; s·PE_i]

    Source: in tutorials, the step before Vaswani et al. (2017), arXiv:1706.03762; no
    paper of its own.
    Beyond training length: defined everywhere; slow channels reach values unseen in
    training.
    Checked against: math.sin in a plain loop.
    """

    def __init__(
        self,
        shape: Shape,
        base: Above1 = 10000.0,
        combine: Combine = "add",
        scale: Scale = "token",
    ) -> None:
        super().__init__(shape, combine, scale)
        self.base = base

    def code(self, positions: Tensor) -> Tensor:
        # one per channel: base^(-j/width)
        frequencies = rotary.frequencies(2 * self.width, self.base, positions.device)
        angles = rotary.angles(positions, frequencies)
        return angles.sin().float().to(positions.device)
