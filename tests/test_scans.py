"""Sums along rows of scores in C++, against the formulas pair by pair and against torch in fp64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from posbench.encodings import cope, stick_breaking
from posbench.kernels import library, scans

pytestmark = pytest.mark.skipif(library.binary() is None, reason=f"attention here: {library.described()}")

SIZES = [(1, 2), (5, 4), (16, 3), (37, 8), (64, 64), (300, 16)]  # tokens, positions


def drawn(length: int, *more: int) -> tuple[Tensor, ...]:
    """Scores, numbers for each query, what it sees, and a gradient that is 0 where it sees nothing."""
    visible = torch.ones(length, length).tril()
    scores = 3 * torch.randn(2, 3, length, length)
    return scores, torch.randn(2, 3, length, *more), visible, torch.randn_like(scores) * visible


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.double() - exact).norm() / max(float(exact.norm()), 1e-9))


def compared(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[float]:
    """Relative errors of what a function gives in fp32, by what it gives in fp64."""
    assert scans.scans(inputs[0]) and not scans.scans(inputs[0].double())
    found, exact = (function(*(x.to(dtype) for x in inputs)) for dtype in (torch.float32, torch.float64))
    return [error(x, y) for x, y in zip(found, exact, strict=True)]


@pytest.mark.parametrize(("length", "positions"), SIZES)
def test_counts_and_their_gradients(length: int, positions: int) -> None:
    def function(scores: Tensor, whole: Tensor, visible: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        scores, whole = scores.requires_grad_(), whole.requires_grad_()
        biased = cope._ByCount.apply(scores, whole, visible)
        return (biased.detach() * visible, *torch.autograd.grad(biased, (scores, whole), gradient))

    assert max(compared(function, *drawn(length, positions))) < 5e-6


@pytest.mark.parametrize("length", [length for length, _ in SIZES])
def test_broken_sticks_and_their_gradients(length: int) -> None:
    def function(scores: Tensor, of_rest: Tensor, visible: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
        z = scores.masked_fill(visible.tril(-1) == 0, -math.inf).requires_grad_()
        weights, rest = stick_breaking._Broken.apply(z)
        return weights.detach(), rest.detach(), *torch.autograd.grad((weights, rest), (z,), (gradient, of_rest))

    assert max(compared(function, *drawn(length, 1))) < 5e-6


def test_a_row_of_each_is_what_its_formula_says() -> None:
    z, whole = [0.3, -1.2, 2.0, 0.1], [0.5, -1.0, 2.0]
    gates = [1 / (1 + math.exp(-x)) for x in z]
    scores = torch.tensor(z).expand(1, 1, 1, 4)
    biased, _, _ = scans.count(scores, torch.tensor(whole).expand(1, 1, 1, 3), torch.ones(1, 4))
    weights, rest = scans.broken(scores)
    left = 1.0
    for j in reversed(range(4)):
        count = min(sum(gates[j:]), 2)
        part = count - math.floor(count)
        expected = z[j] + (1 - part) * whole[math.floor(count)] + part * whole[math.ceil(count)]
        assert biased[0, 0, 0, j].item() == pytest.approx(expected, abs=2e-6)
        assert weights[0, 0, 0, j].item() == pytest.approx(gates[j] * left, rel=1e-6)
        left *= 1 - gates[j]
    assert rest.item() == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_neither_vanish_nor_reach_beyond_the_table(wrong: float) -> None:
    scores, whole, visible, gradient = drawn(40, 5)
    scores[0, 0, 30, 20] = wrong
    biased, gates, counts = scans.count(scores, whole, visible)
    assert not biased[0, 0, 30, 20].isfinite()
    assert biased[0, 0, 30, :20].isnan().all() == math.isnan(wrong)  # what counts that gate
    assert biased[1].isfinite().all()
    of_scores, of_whole = scans.uncount(gradient, whole, gates, counts)
    assert of_scores[1].isfinite().all() and of_whole[1].isfinite().all()
    weights, rest = scans.broken(scores)
    assert weights[0, 0, 30, :21].isnan().all() == rest[0, 0, 30].isnan().all() == math.isnan(wrong)


def test_they_are_for_numbers_in_fp32_that_there_are() -> None:
    scores = torch.zeros(1, 1, 4, 4)
    assert scans.scans(scores)
    assert not scans.scans(scores.bfloat16()) and not scans.scans(scores.to("meta"))
    with FakeTensorMode() as mode:
        assert not scans.scans(mode.from_tensor(scores))
