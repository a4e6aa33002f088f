"""Our RMSNorm against torch's."""

import pytest
import torch
import torch.nn.functional as F

from posbench.kernels.rms_norm import EPS, RMSNorm


def norm_of(width: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(width).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(width, generator=torch.Generator().manual_seed(0)) + 0.5)
    return norm


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 7, 48), (0, 4)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    x = (3 * torch.randn(shape, dtype=dtype) + 1).requires_grad_()
    norm, above = norm_of(shape[-1], dtype), torch.randn(shape, dtype=dtype)
    ours, theirs = norm(x), F.rms_norm(x, norm.weight.shape, norm.weight, EPS)
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
    for a, b in zip(*(torch.autograd.grad(y, (x, norm.weight), above) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, atol=20 * tolerance, rtol=20 * tolerance)


def test_a_row_of_zeros_has_a_finite_gradient() -> None:
    x = torch.zeros(2, 5, requires_grad=True)
    norm_of(5, torch.float32)(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
