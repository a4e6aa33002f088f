"""What PaTH's reflections change in logits: values against the product of matrices, gradients against differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.kernels import reflections
from posbench.kernels.reflections import change_by_reflections

# Queries, keys, keys before the first query's own: all rows at once, one row, some rows, their window, no mask.
CASES = [(1, 1, 0), (4, 4, 0), (11, 11, 0), (1, 11, 10), (5, 11, 6), (5, 9, 2), (3, 11, 0), (3, 11, 4)]


def inputs(rows: int, keys: int, width: int = 3) -> list[Tensor]:
    """q, k, w and beta in fp64, some of the strengths at both ends of what they can be."""
    shapes = [(2, 2, rows, width), (2, 2, keys, width), (2, 2, keys, width), (2, 2, keys)]
    q, k, w, beta = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    beta = 2 * beta.sigmoid()
    beta[..., ::5], beta[..., 1::5] = 0, 2
    return [q, k, F.normalize(w, dim=-1), beta]


def by_products(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, before: int) -> Tensor:
    """Each token reflects all keys before it, and then the query there meets them."""
    changed, rows = k, []
    for t in range(before + q.shape[2]):
        along = torch.einsum("bhjd,bhd->bhj", changed, w[:, :, t]) * beta[:, :, t, None]
        along[..., t:] = 0
        changed = changed - along[..., None] * w[:, :, t, None]
        if t >= before:
            rows.append(torch.einsum("bhjd,bhd->bhj", changed - k, q[:, :, t - before]))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize(("rows", "keys", "before"), CASES)
def test_it_is_what_the_product_of_reflections_changes(
    rows: int, keys: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflections, "KEYS_PER_BLOCK", 4)
    given = inputs(rows, keys)
    torch.testing.assert_close(change_by_reflections(*given, before, 0.3), 0.3 * by_products(*given, before))


@pytest.mark.sample(8)
@pytest.mark.parametrize(("rows", "keys", "before"), CASES)
def test_its_gradients_are_those_of_its_values(
    rows: int, keys: int, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflections, "KEYS_PER_BLOCK", 4)
    given = [tensor.requires_grad_() for tensor in inputs(rows, keys)]
    assert torch.autograd.gradcheck(lambda *tensors: change_by_reflections(*tensors, before, 0.3), given)


def test_blocks_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    given, found = inputs(70, 100, 8), []
    for size in (100, 32, 7):
        monkeypatch.setattr(reflections, "KEYS_PER_BLOCK", size)
        found.append(change_by_reflections(*given, 30))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_in_bf16_values_are_exact_and_gradients_within_the_rounding_of_products() -> None:
    given = [tensor.float() for tensor in inputs(64, 64, 32)]
    given[:2] = (tensor.bfloat16().float() for tensor in given[:2])
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        change = change_by_reflections(*(leaf.to(dtype) for leaf in leaves[:2]), *leaves[2:], 0, 32**-0.5)
        upstream = torch.randn(change.shape, generator=torch.Generator().manual_seed(0))
        found.append((change.detach(), torch.autograd.grad(change, leaves, upstream)))
    (exact, slopes), (change, rounded) = found
    assert change.dtype == torch.float32
    torch.testing.assert_close(change, exact)
    for name, slope, near in zip(("q", "k", "w", "beta"), slopes, rounded, strict=True):
        assert float((near - slope).norm() / slope.norm()) < 0.02, name
