"""One scheme is another in a limit, and invariants that no oracle states: checks of the
schemes against each other.
"""

import fnmatch
import math
from typing import Any

import pytest
import schemes
import torch

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.encodings.distance import default_slopes
from posbench.model.attention import logits_by_rows, make_layer, prepared
from posbench.model.standalone import attention_logits

SHAPE = Shape(32, 2, 2, 16)  # heads 16 wide
SLOPES = default_slopes(2)
LN_2 = [math.log(2)] * 2
# above the diagonal, where RoPE has -sin
EVEN = -16 * 10000.0 ** -torch.arange(0, 1, 0.125)[:, None]

# A scheme, its options, parameters that are set, and the scheme with its options that
# it then is.
LIMITS: list[tuple[str, dict[str, Any], dict[str, Any], str, dict[str, Any]]] = [
    *(
        (name, {"factor": 1.0}, {}, "rope", {})
        for name in ("pi", "ntk", "yarn", "llama3", "longrope", "ntk_by_parts")
    ),
    *((name, {}, {}, "rope", {}) for name in ("lerope", "grape_m", "carope")),
    *((name, {"fraction": 1.0}, {}, "rope", {}) for name in ("partial_rope", "p_rope")),
    ("dynamic_ntk", {"original_length": 40}, {}, "rope", {}),
    ("xpos", {"scale_base": 1e9}, {}, "rope", {}),
    ("decoupled_rope", {"placement": "trailing", "turning": 16}, {}, "rope", {}),
    (
        "selective_rope",
        {"bias": True},
        {"up.*.weight": 0.0},
        "rope",
        {"base": 500000.0},
    ),
    ("algebraic", {"base": 500.0, "decay": 1.0}, {}, "rope", {"base": 500.0}),
    ("comrope", {}, {"above": EVEN}, "rope", {}),
    ("comrope", {"block": 16}, {}, "liere", {}),
    ("bam", {}, {}, "alibi", {}),
    (
        "kerple_power",
        {},
        {"r1": torch.tensor([0.5, 0.0625]), "r2": 1.0},
        "alibi",
        {"slopes": [0.5, 0.0625]},
    ),
    (
        "grape_a",
        {"gate": "key"},
        {"key": 0.0},
        "alibi",
        {"slopes": [math.log(2) * slope for slope in SLOPES]},
    ),
    (
        "grape_a",
        {"gate": "both"},
        {"query": 0.0, "key": 0.0},
        "alibi",
        {"slopes": [math.log(4) * s for s in SLOPES]},
    ),
    ("fox", {}, {"weight": 0.0}, "alibi", {"slopes": LN_2}),
    ("cable", {}, {"weight": 0.0}, "alibi", {"slopes": LN_2}),
    ("path_fox", {"gate_bias": 100.0}, {}, "path", {}),
    ("path", {}, {"beta.*.bias": -200.0}, "none", {}),
    ("wall", {"gate_bias": 100.0}, {}, "none", {}),
    ("dape_v2", {"kernel": 1}, {}, "dape", {}),
    ("dape", {"inner": "alibi"}, {"networks.*.2.*": 0.0}, "alibi", {}),
]


@pytest.mark.parametrize(
    ("name", "options", "parameters", "limit", "limit_options"), LIMITS
)
def test_a_scheme_is_another_one_in_a_limit(
    name: str,
    options: dict[str, Any],
    parameters: dict[str, Any],
    limit: str,
    limit_options: dict[str, Any],
) -> None:
    encoding, other = (
        encodings.build(name, SHAPE, options),
        encodings.build(limit, SHAPE, limit_options),
    )
    with torch.no_grad():
        for pattern, value in parameters.items():
            for key in fnmatch.filter(encoding.state_dict(), pattern):
                encoding.get_parameter(key).copy_(torch.as_tensor(value))
        for key, parameter in other.named_parameters():
            parameter.copy_(encoding.get_parameter(key).view_as(parameter))
    q, k, _, x = schemes.layer_inputs(SHAPE, 40)
    ours, theirs = (
        attention_logits(each, q, k, x, layer=1) for each in (encoding, other)
    )
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in encodings.names()
        if "key_bias" in encodings.load(name).overridden
    ],
)
def test_a_bias_per_key_is_the_bias_up_to_a_constant_of_each_row(name: str) -> None:
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 40)
    layer = make_layer(encoding, torch.arange(40)[None], 1, x, consecutive=True)
    encoding, q, k, _, layer = prepared(encoding, q, k, v, layer)
    block = layer.replace(rows=slice(0, 40), keys=slice(0, 40))
    bias = logits_by_rows(encoding, q, k, block) - q @ k.mT * encoding.logit_scale
    per_key = encoding.key_bias(layer)
    assert per_key is not None
    constant = (bias - per_key[:, :, None]).masked_fill(bias.isinf(), 0)
    expected = constant[..., :1].expand_as(constant).masked_fill(bias.isinf(), 0)
    torch.testing.assert_close(constant, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [("rope", {"layout": "half"}), ("rope", {}), ("transformer_xl", {})],
)
def test_logits_depend_on_distance_alone_a_million_tokens_out(
    name: str, options: dict[str, Any]
) -> None:
    encoding, counted = schemes.build(name, options, SHAPE), torch.arange(20)
    q, k, *_ = schemes.layer_inputs(SHAPE, 20)
    places = (counted, counted + 1_000_000, counted.flip(0))
    near, far, back = (
        attention_logits(encoding, q, k, positions=each) for each in places
    )
    # angles built in fp32 are off by 0.06 there
    torch.testing.assert_close(far, near, atol=1e-4, rtol=0)
    assert not torch.allclose(back, near, atol=1e-2)  # and order is visible
