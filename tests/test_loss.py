"""The training loss from hidden states against torch's of whole logits."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posbench.model import loss as module
from posbench.model.compiled import compiled
from posbench.model.loss import linear_cross_entropy

TOKENS = 40
WIDTH = 24
VOCABULARY = 50


DTYPES = [
    (torch.float64, torch.float64, 1e-12),
    (torch.bfloat16, torch.float32, 2e-2),
]


@pytest.mark.parametrize("at_once", [2**29, 128 * 7])
@pytest.mark.parametrize(("dtype", "sums", "close"), DTYPES)
def test_loss_and_gradients_are_torchs_of_the_whole_logits(
    monkeypatch, dtype, sums, close, at_once
):
    monkeypatch.setattr(module, "HEAD_AT_ONCE", at_once)
    monkeypatch.setattr(module, "AT_ONCE", 3 * VOCABULARY)
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw, dtype=sums)
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=sums)
    labels = torch.randint(VOCABULARY, (TOKENS,), generator=draw)

    def whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).to(sums)
        return F.cross_entropy(logits, labels)

    def results(loss_of: Any) -> list[Tensor]:
        own_hidden = hidden.clone().requires_grad_()
        own_weight = weight.clone().requires_grad_()
        leaves = [own_hidden, own_weight]
        in_bf16 = dtype == torch.bfloat16
        with torch.autocast("cpu", dtype=dtype, enabled=in_bf16):
            loss = loss_of(*leaves, labels) / 3  # what is divided comes from above
        gradients = torch.autograd.grad(loss, leaves)
        return [loss.detach(), *gradients]

    ours = results(linear_cross_entropy)
    theirs = results(whole)

    for actual, expected in zip(ours, theirs, strict=True):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        error = float((actual - expected).norm())
        size = float(expected.norm())
        assert error < close * size


LOW = -1e4


def test_extreme_logits_give_no_nan():
    logits = torch.tensor([[-LOW, LOW, 0.0], [LOW, LOW, LOW]])
    labels = torch.tensor([1, 2])
    loss = linear_cross_entropy(logits, torch.eye(3), labels)
    expected = (-2 * LOW + 1.0986) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_nan(wrong):
    logits = torch.tensor([[-LOW, LOW, 0.0], [wrong, LOW, LOW]])
    labels = torch.tensor([1, 2])
    loss = linear_cross_entropy(logits, torch.eye(3), labels)
    assert loss.isnan()


@pytest.mark.parametrize("label", [-100, 20])
def test_labels_that_are_no_token_are_refused(label):
    logits = torch.randn(3, 3)
    labels = torch.tensor([0, label, 1])
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(logits, torch.eye(3), labels)


def failing(changes: bool) -> Any:
    """Return what stands for torch.compile: its program fails, perhaps halfway."""

    def compile_(function: Any, **options: Any) -> Any:
        def program(x: Tensor) -> Tensor:
            if changes:
                x += 1
            raise RuntimeError("no room on the device")

        return program

    return compile_


def add_one(x: Tensor) -> Tensor:
    x += 1
    return x


def test_what_fails_halfway_is_not_run_again_on_changed_inputs(monkeypatch):
    monkeypatch.setattr(torch, "compile", failing(changes=True))
    x = torch.zeros(3)

    with pytest.raises(RuntimeError, match="no room"):
        compiled(add_one)(x)

    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("writes", "runs"), [(False, True), (True, False)])
def test_what_fails_runs_uncompiled_if_it_cannot_have_written(
    monkeypatch, writes, runs
):
    monkeypatch.setattr(torch, "compile", failing(changes=False))
    x = torch.zeros(3)
    function = compiled(add_one, writes=writes)

    if runs:
        assert function(x).tolist() == [1, 1, 1]
    else:
        with pytest.raises(RuntimeError, match="no room"):
            function(x)
