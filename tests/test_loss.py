"""The training loss from hidden states against torch's of whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.model import loss as module
from posbench.model.loss import linear_cross_entropy


@pytest.mark.parametrize("at_once", [2**29, 128 * 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_torchs_of_the_whole_logits(monkeypatch, dtype, at_once):
    width, vocabulary = 24, 50
    monkeypatch.setattr(module, "HEAD_AT_ONCE", at_once)
    monkeypatch.setattr(module, "AT_ONCE", 3 * vocabulary)
    draw = torch.Generator().manual_seed(0)
    exact = torch.promote_types(dtype, torch.float32)
    given = [
        torch.randn(size, generator=draw, dtype=exact)
        for size in ((40, width), (vocabulary, width))
    ]
    labels = torch.randint(vocabulary, (40,), generator=draw)

    def results(loss_of: Any) -> list[Tensor]:
        hidden, weight = (each.clone().requires_grad_() for each in given)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
            loss = loss_of(hidden, weight) / 3  # what is divided comes back from above
        return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]

    ours = results(lambda hidden, weight: linear_cross_entropy(hidden, weight, labels))
    theirs = results(
        lambda hidden, weight: F.cross_entropy(
            F.linear(hidden, weight).to(exact), labels
        )
    )
    close = 1e-12 if dtype == torch.float64 else 2e-2
    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert float((actual - expected).norm()) < close * float(expected.norm())


def test_extreme_logits_give_no_nan_those_that_are_none_do_and_labels_that_are_no_token_are_refused():
    low = -1e4
    logits = torch.tensor([[-low, low, 0.0], [low, low, low]])
    labels = torch.tensor([1, 2])
    identity = torch.eye(3)
    assert float(linear_cross_entropy(logits, identity, labels)) == pytest.approx(
        (-2 * low + 1.0986) / 2, rel=1e-6
    )
    for wrong in (float("nan"), float("inf")):
        logits[1, 0] = wrong
        assert linear_cross_entropy(logits, identity, labels).isnan()
    for label in (-100, 20):
        with pytest.raises((IndexError, RuntimeError)):
            linear_cross_entropy(
                torch.randn(3, 3), identity, torch.tensor([0, label, 1])
            )
