"""The training loss against torch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from posbench.model import loss as module
from posbench.model.loss import cross_entropy, linear_cross_entropy


def both(logits: torch.Tensor, labels: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Loss and gradient of the hidden states, ours and torch's in fp64, for logits that a linear layer made."""
    out = []
    for function in (cross_entropy, lambda z, y: F.cross_entropy(z.double().flatten(0, -2), y.flatten())):
        leaf = logits.detach().clone().requires_grad_()
        value = function(leaf * 1.0, labels)  # not a leaf: ours may write over it
        (3.0 * value).backward()
        assert leaf.grad is not None
        out.append((value.detach(), leaf.grad))
    return out


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-7), (torch.float64, 1e-12)])
def test_the_loss_and_its_gradient_are_torchs(
    rows: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", rows * 50)
    logits = 5 * torch.randn(3, 43, 50, dtype=dtype)  # 129 rows: no multiple of anything
    (ours, gradient), (theirs, exact) = both(logits, torch.randint(50, (3, 43)))
    torch.testing.assert_close(ours.double(), theirs, atol=20 * tolerance, rtol=1e-6)
    torch.testing.assert_close(gradient.double(), exact.double(), atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [1, 7, 16, 300, 2048])
def test_bf16_logits_keep_an_exact_loss_and_a_gradient_within_their_rounding(vocabulary: int) -> None:
    logits = (5 * torch.randn(64, vocabulary)).bfloat16()
    (ours, gradient), (theirs, exact) = both(logits, torch.randint(vocabulary, (64,)))
    assert ours.dtype == torch.float32
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)
    if vocabulary == 1:
        assert not gradient.any()
        return
    error = (gradient.double() - exact.double()).norm() / exact.double().norm()
    assert float(error) < 2**-8  # half a unit of bf16's last place, twice: the product with the outer gradient


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    made = torch.randn(8, 20, requires_grad=True) * 1.0
    before, where = made.detach().clone(), made.data_ptr()
    cross_entropy(made, torch.zeros(8, dtype=torch.long))
    assert made.data_ptr() == where and not torch.equal(made.detach(), before)


def test_by_itself_the_loss_gives_what_it_gives_times_1() -> None:
    """On a CPU that product is left out."""
    logits, labels, gradients = torch.randn(40, 20), torch.randint(20, (40,)), []
    for factor in (1.0, 2.0):
        leaf = logits.clone().requires_grad_()
        (factor * cross_entropy(leaf * 1.0, labels)).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad / factor)  # exact: a power of 2
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


def test_without_a_gradient_the_logits_stay() -> None:
    logits = torch.randn(8, 20)
    before = logits.clone()
    cross_entropy(logits, torch.zeros(8, dtype=torch.long))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_logits_give_no_nan_and_those_that_are_none_do(dtype: torch.dtype) -> None:
    low = float(torch.tensor(-1e4, dtype=dtype))
    logits = torch.tensor([[-low, low, 0.0], [low, low, low]], dtype=dtype)
    labels = torch.tensor([1, 2])
    assert float(cross_entropy(logits.clone(), labels)) == pytest.approx((-2 * low + 1.0986) / 2, rel=1e-6)
    for wrong in (float("nan"), float("inf")):
        logits[1, 0] = wrong
        assert cross_entropy(logits.clone(), labels).isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("label", [-100, 20])
def test_a_label_that_is_no_token_is_refused(dtype: torch.dtype, label: int) -> None:
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy(torch.randn(3, 20).to(dtype), torch.tensor([0, label, 1]))


def test_of_no_rows_the_loss_is_0_with_a_gradient_of_none() -> None:
    leaf = torch.randn(0, 20, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.detach() == 0 and leaf.grad is not None and leaf.grad.shape == (0, 20)


# -- compiled pieces, as CUDA has them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_pieces_give_the_loss_and_gradient_of_plain_ones_from_one_graph(
    monkeypatch: pytest.MonkeyPatch, backend: str, dtype: torch.dtype
) -> None:
    torch._dynamo.reset()
    counting = CompileCounterWithBackend(backend)
    logits, labels = (5 * torch.randn(96, 50)).to(dtype), torch.randint(50, (96,))
    monkeypatch.setattr(module, "AT_ONCE", 32 * 50)
    monkeypatch.setattr(module, "AT_ONCE_ACCELERATOR", 32 * 50)
    (plain, gradient), exact = both(logits, labels)
    monkeypatch.setattr(module, "_is_worth_compiling", lambda _: True)
    monkeypatch.setattr(module, "_fused_piece", torch.compile(module._piece, backend=counting))
    (found, fused_gradient), _ = both(logits, labels)
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-6)
    tolerance = 1e-8 if dtype == torch.float32 else 8e-3 * float(exact[1].abs().max())
    torch.testing.assert_close(fused_gradient, gradient, rtol=1e-5, atol=tolerance)
    both(logits[:64], labels[:64])  # another number of tokens: the same graph serves
    assert counting.frame_count == 1


# -- from the head on, as on CUDA --------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [2**29, 128 * 7])
@pytest.mark.parametrize(("width", "vocabulary"), [(24, 50), (16, 128), (16, 257)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_loss_from_the_head_on_is_torchs_of_the_whole_logits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, vocabulary: int, at_once: int
) -> None:
    monkeypatch.setattr(module, "HEAD_AT_ONCE", at_once)
    monkeypatch.setattr(module, "AT_ONCE_ACCELERATOR", 3 * vocabulary)
    draw = torch.Generator().manual_seed(0)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    given = [torch.randn(size, generator=draw, dtype=exact) for size in ((40, width), (vocabulary, width))]
    labels = torch.randint(vocabulary, (40,), generator=draw)

    def found(loss_of: Any) -> list[Tensor]:
        hidden, weight = (one.clone().requires_grad_() for one in given)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
            loss = loss_of(hidden, weight) / 3  # what is divided comes back from above
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    ours = found(lambda hidden, weight: linear_cross_entropy(hidden, weight, labels))
    theirs = found(lambda hidden, weight: F.cross_entropy(F.linear(hidden, weight).to(exact), labels))
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for one, expected in zip(ours, theirs, strict=True):
        assert one.dtype == expected.dtype and one.shape == expected.shape
        assert float((one - expected).norm()) < close * float(expected.norm())


def test_the_loss_from_the_head_on_keeps_what_a_scale_saves_in_fp16_and_is_0_of_no_token() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(4096, 16, generator=draw), torch.randn(50, 16, generator=draw) * 0.1
    labels = torch.randint(50, (4096,), generator=draw)

    def gradients(loss: Tensor) -> list[Tensor]:
        return [one / 2.0**16 for one in torch.autograd.grad(loss * 2.0**16, leaves)]

    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    with torch.autocast("cpu", dtype=torch.float16):
        ours = gradients(linear_cross_entropy(*leaves, labels))
    for one, expected in zip(ours, gradients(F.cross_entropy(F.linear(*leaves), labels)), strict=True):
        assert float((one - expected).norm()) < 5e-3 * float(expected.norm())
    none = linear_cross_entropy(leaves[0][:0], leaves[1], labels[:0])
    assert none == 0 and not torch.autograd.grad(none, leaves[1])[0].any()


def test_the_loss_of_the_head_makes_no_gradient_that_nobody_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights require gradients while a model is only scored, too."""
    asked, plain = [], module._piece
    monkeypatch.setattr(module, "_piece", lambda *given: asked.append(given[2]) or plain(*given))
    hidden, weight = torch.randn(5, 8), torch.randn(16, 8, requires_grad=True)
    labels = torch.randint(16, (5,))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            loss = linear_cross_entropy(hidden, weight, labels)
    assert asked == [False, False, True]
    loss.backward()
    assert weight.grad is not None
