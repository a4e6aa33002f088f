"""Causal convolutions over a few tokens: values and gradients are those of torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.kernels.convolution import causal_convolution


def by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight)).mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "width"), [(1, 3), (2, 16), (5, 8), (37, 4), (40, 1)])
def test_values_and_gradients_of_a_part_of_a_projection_are_those_of_fp64(
    length: int, width: int, dtype: torch.dtype
) -> None:
    packed = torch.randn(3, length, 2, 48).to(dtype).requires_grad_()  # as one projection makes several lie in memory
    weight, upstream = torch.randn(48, width, requires_grad=True), torch.randn(3, length, 48).to(dtype)
    out = causal_convolution(packed[:, :, 1], weight)
    of_packed, of_weight = torch.autograd.grad(out, (packed, weight), upstream)
    assert out.dtype == dtype and of_weight.dtype == torch.float32
    assert not of_packed[:, :, 0].any()
    exact = [packed.detach()[:, :, 1].double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = by_torch(*exact)
    slopes = torch.autograd.grad(expected, exact, upstream.double())
    for name, x, y in zip(
        ("out", "x", "weight"), (out, of_packed[:, :, 1], of_weight), (expected, *slopes), strict=True
    ):
        x, y = x.detach(), y.detach()
        assert float((x - y).norm()) <= (2**-8 if x.dtype == torch.bfloat16 else 1e-6) * float(y.norm()), name
