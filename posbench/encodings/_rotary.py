"""The mathematics of the rotary family: frequencies, angles, and the rotation of channel pairs.

Pair p of a head of width d turns by  angle_p = position · base^(-2p/d).  Which two channels are a pair is the layout:

    interleaved   (x_2p, x_2p+1)      the paper, GPT-J
    half          (x_p, x_p+d/2)      GPT-NeoX, Llama, the default of transformers

They differ by a fixed permutation of channels, so a model that learns its projections cannot tell them apart.
Interleaved is the default: such a pair already lies in memory as a complex number, and turns at half the cost.
A pair is one complex number and its rotation is one product:  (x_a + i·x_b) · e^(i·angle).
"""

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor

from posbench import machine
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError

Layout = Literal["half", "interleaved"]


class Rotary(Encoding):
    """Base of the encodings that rotate q and k by position · `inv_freq`; most differ only in the frequencies."""

    attention_factor: float = 1.0  # multiplies q and k, so the logits by its square; YaRN's temperature
    # Frequencies that replace the base's: (head_dim / 2,) fp64, CPU. Not a buffer: .to(bfloat16) would round it.
    stretched: Tensor | None = None

    def __init__(self, shape: Shape, base: float = 10000.0, layout: Layout = "interleaved") -> None:
        super().__init__(shape)
        self.expect(1 < base < math.inf, "base", base, "a number above 1")
        check_pairs(self.name, shape)
        self.base = base
        self.layout = layout

    def inv_freq(self, device: torch.device) -> Tensor:
        """Radians per position of each pair: (width / 2,) fp64."""
        if self.stretched is None:
            return frequencies(self.width, self.base, device)
        return machine.sent(self.stretched, has_fp64(device))

    @property
    def width(self) -> int:
        """Number of rotated channels per head."""
        return self.shape.head_dim

    def angles(self, positions: Tensor) -> Tensor:
        """The angle of each pair at positions (1|B, T): (1|B, T, head_dim / 2) fp64."""
        return angles(positions, self.inv_freq(positions.device))

    def make_tables(self, positions: Tensor) -> Any:
        """Turns of queries and keys as `turn` takes them."""
        return laid_out(self.rotation(positions, positions.device), self.layout)

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return turn(q, layer.tables), turn(k, layer.tables)

    def rotation(self, positions: Tensor, device: torch.device) -> Tensor:
        """The complex factors of the pairs at positions (1|B, T): (1|B, 1, T, head_dim / 2) complex64."""
        rotation = turns(self.angles(positions), device)
        return rotation if self.attention_factor == 1 else rotation * self.attention_factor

    def rescaled(self, inv_freq: Tensor, attention_factor: float = 1.0) -> Self:
        """The same encoding, sharing its parameters, with other frequencies, (width / 2,) fp64 on the CPU.

        `attention_factor` multiplies q and k, on top of the encoding's own factor.
        """
        made = self.sharing()
        made.stretched = inv_freq
        made.attention_factor = self.attention_factor * attention_factor
        return made


class PureRotary(Rotary):
    """A rotary encoding that rotates q and k alike, by their positions only."""

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """q or k (B, H, T, Dh), rotated by positions (1|B, T)."""
        return rotate(x, self.rotation(positions, x.device), self.layout)


def check_pairs(encoding: str, shape: Shape) -> None:
    """Raise UserError if the head width is odd."""
    if shape.head_dim % 2:
        step = 2 * shape.n_heads
        below = shape.d_model - shape.d_model % step
        nearest = f"{below} or {below + step}" if below else f"{step}"
        raise UserError(
            f"head_dim is {shape.head_dim} (d_model {shape.d_model} / n_heads {shape.n_heads}): "
            f"{encoding} rotates pairs and needs it even; nearest d_model: {nearest}"
        )


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Radians per position of each pair, highest first: (width/2,) fp64."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=has_fp64(device)) / width)


def angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """positions (1|B, T) times frequencies (P,), or (1|B, 1, P) for frequencies per sequence: (1|B, T, P) fp64.

    In bf16, integers above 256 collide, which breaks every rotary encoding. In fp32, the error at position 65k is
    already 2e-4.
    """
    return exact(positions)[..., None] * inv_freq


def exact(positions: Tensor) -> Tensor:
    """Positions in fp64, so that angles stay exact at large positions."""
    return positions.cpu().double() if positions.device.type == "mps" else positions.double()


def turns(angles: Tensor, device: torch.device) -> Tensor:
    """The rotations e^(i·angle), with a head axis: (1|B, 1, T, P) complex64."""
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)[:, None]


def rotate(x: Tensor, turns: Tensor, layout: Layout) -> Tensor:
    """Rotate the pairs of x (B, H, T, d) by turns (1|B, 1, T, d/2): same shape and dtype, computed in fp32.

    Fewer turns than pairs rotate the first channels and leave the others unchanged.
    """
    return turn(x, laid_out(turns, layout))


def laid_out(turns: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Turns as `turn` takes them: unchanged if interleaved; cosines and signed sines (1|B, 1, T, d) fp32 if half."""
    if layout == "interleaved":
        return (turns,)
    return torch.cat((turns.real, turns.real), dim=-1), torch.cat((-turns.imag, turns.imag), dim=-1)


def turn(x: Tensor, laid: tuple[Tensor, ...]) -> Tensor:
    """Like `rotate`, with turns from `laid_out`."""
    turning = laid[0].shape[-1] * (2 if len(laid) == 1 else 1)
    if turning < x.shape[-1]:
        return torch.cat((turn(x[..., :turning], laid), x[..., turning:]), dim=-1) if turning else x
    if len(laid) == 1:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * laid[0]).flatten(-2).to(x.dtype)
    return _turn_halves(x, *laid)


def _turn_halves(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = x.float()
    partner = torch.cat(wide.chunk(2, dim=-1)[::-1], dim=-1)
    return torch.addcmul(wide * cosine, partner, sine).to(x.dtype)


def has_fp64(device: torch.device) -> torch.device:
    """The device that builds the (small) fp64 tables: the CPU for MPS, which has no fp64."""
    return torch.device("cpu") if device.type == "mps" else device
