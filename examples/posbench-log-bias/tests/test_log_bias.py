"""What is claimed of the encoding: its equation, in values and gradients, and what it
refuses.
"""

import math

import pytest
import torch
from torch import Tensor

import posbench
from posbench.errors import UserError

SIZES = {"d_model": 32, "n_heads": 4, "n_layers": 2, "train_length": 16}
LENGTH = 23  # beyond the training length


def drawn() -> list[Tensor]:
    """q, k, v (B, H, T, Dh)."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 4, LENGTH, 8, generator=generator, requires_grad=True)
        for _ in range(3)
    ]


def by_loops(q: Tensor, k: Tensor, v: Tensor, strength: float) -> Tensor:
    """Causal attention as the equation says it, one query after the other."""
    rows = []
    for i in range(LENGTH):
        bias = torch.tensor([-strength * math.log(1 + i - j) for j in range(i + 1)])
        logits = (k[:, :, : i + 1] @ q[:, :, i, :, None]).squeeze(-1) / math.sqrt(
            q.shape[-1]
        ) + bias
        rows.append((logits.softmax(-1)[..., None] * v[:, :, : i + 1]).sum(2))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("strength", [1.0, 0.3])
def test_attention_equals_plain_loops_in_values_and_gradients(strength: float) -> None:
    encoding = posbench.build_encoding("log_bias", strength=strength, **SIZES)
    ours, theirs = drawn(), drawn()
    output, expected = (
        posbench.attention_output(encoding, *ours),
        by_loops(*theirs, strength),
    )
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = [
        torch.autograd.grad((out * weights).sum(), of)
        for out, of in ((output, ours), (expected, theirs))
    ]
    for gradient, expected_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-5, rtol=1e-4)


def test_a_strength_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"strength is 0.* for 'log_bias'"):
        posbench.build_encoding("log_bias", strength=0.0, **SIZES)
