"""Invariants of schemes that no oracle states."""

import pytest
import schemes
import torch

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.model.attention import block_logits, make_layer, prepared
from posbench.model.standalone import attention_logits

SHAPE = Shape(32, 2, 2, 16)  # heads 16 wide
BY_DISTANCE = [
    ("rope", {"layout": "half"}),
    ("rope", {}),
    ("transformer_xl", {}),
]


def have_a_key_bias() -> list[str]:
    names = []
    for name in encodings.names():
        if "key_bias" in encodings.load(name).overridden:
            names.append(name)
    return names


@pytest.mark.parametrize("name", have_a_key_bias())
def test_a_bias_per_key_is_the_bias_up_to_a_constant_of_each_row(name):
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 40)
    positions = torch.arange(40)[None]
    layer = make_layer(encoding, positions, 1, x, consecutive=True)
    encoding, q, k, _, layer = prepared(encoding, q, k, v, layer)
    every = slice(0, 40)
    every_row = layer.replace(rows=every, keys=every)

    per_key = encoding.key_bias(layer)[:, :, None]  # (B, H, 1, T)

    logits = block_logits(encoding, q, k, every_row)
    products = q @ k.mT * encoding.logit_scale
    bias = logits - products  # (B, H, T, T)
    is_later = bias.isinf()
    difference = (bias - per_key).masked_fill(is_later, 0)
    first = difference[..., :1].expand_as(difference)
    constant = first.masked_fill(is_later, 0)
    torch.testing.assert_close(difference, constant, atol=1e-4, rtol=1e-5)


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
