"""Invariants of schemes that no oracle states."""

import pytest
import schemes
import torch

from posbench.encodings.base import Shape
from posbench.model.standalone import attention_logits

SHAPE = Shape(32, 2, 2, 16)  # heads 16 wide
BY_DISTANCE = [
    ("rope", {"layout": "half"}),
    ("rope", {}),
    ("transformer_xl", {}),
]


@pytest.mark.parametrize(("name", "options"), BY_DISTANCE)
def test_logits_depend_on_distance_alone_a_million_tokens_out(name, options):
    encoding = schemes.build(name, options, SHAPE)
    q, k, *_ = schemes.layer_inputs(SHAPE, 20)
    counted = torch.arange(20)
    a_million_on = counted + 1_000_000
    reversed_order = counted.flip(0)

    near = attention_logits(encoding, q, k, positions=counted)
    far = attention_logits(encoding, q, k, positions=a_million_on)
    back = attention_logits(encoding, q, k, positions=reversed_order)

    # angles built in fp32 are off by 0.06 there
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)
    assert not torch.allclose(back, near, atol=1e-2)  # order is visible
