"""Curves that tokens mix, laid out by the kernel in C++, against the same sums in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from posbench.attention.dispatch import kernel
from posbench.kernels import curves, native
from posbench.kernels.bias import Curves
from posbench.kernels.tiled import tiled_attention

pytestmark = pytest.mark.skipif(not native.serves(torch.device("cpu")), reason="no kernels in C++ on this machine")

# Sequences, heads, tokens; channels and reach of what queries mix, and of what keys do.
Size = tuple[Any, ...]
SIZES: list[Size] = [
    (2, 3, 70, (5, 90), None),
    (1, 1, 1, (1, 1), (1, 1)),
    (3, 2, 33, (32, 33), (40, 7)),
    (2, 2, 64, (16, 20), (3, 200)),
    (1, 2, 300, (70, 300), (64, 130)),
]


def case(size: Size, shared: bool) -> list[Tensor]:
    batch, heads, length, *sides = size
    draw = torch.Generator().manual_seed(0)
    found = []
    for channels, reach in (side for side in sides if side):
        # As projections lie: by token, all heads of one next to each other.
        found.append(torch.randn(batch, length, heads, channels, generator=draw).transpose(1, 2).requires_grad_())
        found.append(torch.randn(1 if shared else heads, channels, reach, generator=draw).requires_grad_())
    return found


def exact(tensors: list[Tensor]) -> Tensor:
    """(B, H, T, T) fp64, 0 for keys after the query."""
    total = torch.zeros(())
    length = tensors[0].shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for mixtures, each, who in zip(tensors[::2], tensors[1::2], ("bhic", "bhjc"), strict=False):
        own = each.double().expand(mixtures.shape[1], -1, -1)
        near = (distance >= 0) & (distance < own.shape[-1])
        by_pair = own[..., distance.clamp(0, own.shape[-1] - 1)] * near
        total = total + torch.einsum(f"{who},hcij->bhij", mixtures.double(), by_pair)
    return total


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_they_are_mixed_as_by_exact_sums(size: Size, shared: bool) -> None:
    tensors = case(size, shared)
    found, expected = curves.laid_out(Curves(*tensors)).tril(), exact(tensors)
    assert float((found - expected).detach().abs().max()) < 2**-14 * float(expected.detach().abs().max())
    above = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).tril()
    of_found = torch.autograd.grad(found, tensors, above)
    of_expected = torch.autograd.grad(expected, tensors, above.double())
    for x, y in zip(of_found, of_expected, strict=True):
        assert x.shape == y.shape and float((x - y).norm()) <= 2**-7 * float(y.norm())


def test_neither_threads_nor_other_sequences_nor_later_tokens_change_a_bit() -> None:
    tensors = case(SIZES[-1], shared=False)
    tensors = [x.detach().expand(3, -1, -1, -1).contiguous() if x.dim() == 4 else x.detach() for x in tensors]
    tensors[0][0] = tensors[2][2] = 1
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_() for x in tensors]
            out = curves.laid_out(Curves(*leaves)).tril()
            found.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out).tril())])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    short = [x[1:2, :, :75] if x.dim() == 4 else x for x in tensors]
    assert torch.equal(curves.laid_out(Curves(*short)).tril()[0], found[0][0][1, :, :75, :75])


@pytest.mark.parametrize("length", [70, 4200])
def test_attention_by_them_equals_that_by_tiles(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many pairs to hold a number for each, tiles it is."""
    asked: list[Curves] = []
    monkeypatch.setattr(curves, "laid_out", lambda bias, laid_out=curves.laid_out: asked.append(bias) or laid_out(bias))
    q, k, v = (torch.randn(1, 2, length, 32).bfloat16() for _ in range(3))
    bias = Curves(*(x.detach() for x in case((1, 2, length, (8, 200), (8, 64)), shared=False)))
    with torch.enable_grad():  # without, tiles serve where there is no AMX
        found, expected = kernel(q, k, v, 0.2, bias, None), tiled_attention(q, k, v, 0.2, bias)
    assert (asked == [bias]) == native.holds_pairs(q) == (length == 70)
    assert float((found.float() - expected.float()).norm()) < 2**-7 * float(expected.float().norm())
