"""Causal convolutions over a few tokens: values and gradients are those of torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.kernels import library, native
from posbench.kernels.convolution import causal_convolution


def by_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x.mT, (weight.shape[1] - 1, 0)), weight[:, None], groups=len(weight)).mT


@pytest.mark.parametrize(("length", "width"), [(1, 3), (2, 3), (9, 3), (9, 1), (9, 4)])
def test_the_convolution_is_torchs(length: int, width: int) -> None:
    x = torch.randn(2, length, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, width, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(causal_convolution(x, weight), by_torch(x, weight))
    assert torch.autograd.gradcheck(causal_convolution, (x, weight))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "width"), [(1, 3), (2, 16), (37, 4), (40, 1)])
def test_in_one_pass_it_is_the_same_in_values_and_gradients(
    length: int, width: int, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(native, "binary", lambda: None)
    elif library.binary() is None:
        pytest.skip(f"kernels here: {library.described()}")
    packed = torch.randn(3, length, 2, 48).to(dtype)  # as one projection makes several lie in memory
    weight, upstream = torch.randn(48, width), torch.randn(3, length, 48).to(dtype)

    def with_gradients() -> list[Tensor]:
        leaves = [packed.detach().requires_grad_(), weight.detach().requires_grad_()]
        out = causal_convolution(leaves[0][:, :, 1], leaves[1])
        of_packed, of_weight = torch.autograd.grad(out, leaves, upstream)
        assert out.dtype == dtype and of_weight.dtype == torch.float32
        assert not of_packed[:, :, 0].any()
        return [out.detach(), of_packed[:, :, 1], of_weight]

    found = with_gradients()
    exact = [packed[:, :, 1].double().requires_grad_(), weight.double().requires_grad_()]
    out = by_torch(*exact)
    expected = [out.detach(), *torch.autograd.grad(out, exact, upstream.double())]
    for name, x, y in zip(("out", "x", "weight"), found, expected, strict=True):
        assert float((x - y).norm()) <= (2**-8 if x.dtype == torch.bfloat16 else 1e-6) * float(y.norm()), name
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(before, 2))
        assert all(torch.equal(x, y) for x, y in zip(with_gradients(), found, strict=True)) or not kernels
    finally:
        torch.set_num_threads(before)
