"""What CoPE and stick-breaking make of rows of scores: values against their formulas, gradients against differences."""

import math

import pytest
import torch
from torch import Tensor

from posbench.encodings.cope import _ByCount
from posbench.encodings.stick_breaking import _Broken


def drawn(length: int, positions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (1, 2, T, T), what whole positions give (1, 2, T, P), and what each query sees (T, T), 1 or 0."""
    scores = 3 * torch.randn(1, 2, length, length, dtype=torch.float64)
    return scores, torch.randn(1, 2, length, positions, dtype=torch.float64), torch.ones(length, length).double().tril()


def test_a_row_of_each_is_what_its_formula_says() -> None:
    z, whole = [0.3, -1.2, 2.0, 0.1], [0.5, -1.0, 2.0]
    gates = [1 / (1 + math.exp(-x)) for x in z]
    scores = torch.tensor(z).expand(1, 1, 1, 4)
    biased = _ByCount.apply(scores, torch.tensor(whole).expand(1, 1, 1, 3), torch.ones(1, 4))
    weights, rest = _Broken.apply(scores)
    left = 1.0
    for j in reversed(range(4)):
        count = min(sum(gates[j:]), 2)
        part = count - math.floor(count)
        expected = z[j] + (1 - part) * whole[math.floor(count)] + part * whole[math.ceil(count)]
        assert biased[0, 0, 0, j].item() == pytest.approx(expected, abs=2e-6)
        assert weights[0, 0, 0, j].item() == pytest.approx(gates[j] * left, rel=1e-6)
        left *= 1 - gates[j]
    assert rest.item() == pytest.approx(left, rel=1e-6)


@pytest.mark.parametrize(("length", "positions"), [(1, 2), (5, 4), (9, 3)])
def test_their_gradients_are_those_of_their_values(length: int, positions: int) -> None:
    scores, whole, visible = drawn(length, positions)
    given = scores.requires_grad_(), whole.requires_grad_()
    assert torch.autograd.gradcheck(lambda *tensors: _ByCount.apply(*tensors, visible) * visible, given)
    hidden = torch.zeros_like(visible).masked_fill_(visible.tril(-1) == 0, -math.inf)
    assert torch.autograd.gradcheck(lambda z: _Broken.apply(z + hidden), (scores,))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_stays_in_its_row_and_is_no_error(wrong: float) -> None:
    scores, whole, visible = (x.float() for x in drawn(40, 5))
    scores[0, 0, 30, 20] = wrong
    leaves = scores.requires_grad_(), whole.requires_grad_()
    biased = _ByCount.apply(*leaves, visible)
    assert not biased[0, 0, 30, 20].isfinite() and biased[0, 1].isfinite().all()
    assert biased[0, 0, 30, :20].isnan().all() == math.isnan(wrong)  # what counts that gate
    for gradient in torch.autograd.grad(biased, leaves, visible.expand_as(biased)):
        assert gradient[0, 1].isfinite().all()
    weights, rest = _Broken.apply(scores.detach())
    assert weights[0, 1].isfinite().all() and rest[0, 1].isfinite().all()
