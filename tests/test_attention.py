"""Every way to compute attention against its definition, in values and gradients, and
the choice between them.
"""

import itertools
from typing import Any

import pytest
import schemes
import torch
from support import Largest
from torch import Tensor
from torch.nn.attention import flex_attention

from posbench import machine
from posbench.encodings.base import Shape
from posbench.model import attention as module
from posbench.model import flex
from posbench.model.attention import make_layer
from posbench.model.standalone import attention_output

SHAPE = Shape(d_model=24, n_heads=3, n_layers=2, train_length=32)
LENGTH = 150  # beyond the training length, and several blocks of rows
NAMES = [
    "none",
    "rope",
    "alibi",
    "t5",
    "fox",
    "fire",
    "shaw",
    "cope",
    "pope",
    "path_fox",
    "stick_breaking",
]
CLOSE, GATES, BF16 = 5e-5, 1e-3, 3e-2  # relative, by the root of summed squares


def differences(
    actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, float]:
    """Return relative differences by the root of summed squares; absolute ones below 1,
    for values that round to 0.
    """
    pairs = {key: (actual[key].double(), expected[key].double()) for key in expected}
    return {
        key: float((value - other).norm() / other.norm().clamp(min=1))
        for key, (value, other) in pairs.items()
    }


def compared(
    name: str, dtype: torch.dtype = torch.float32, **limits: Any
) -> dict[str, float]:
    """Return how a scheme's chosen attention differs from its definition, in the output
    and in all gradients.
    """
    encoding = schemes.build(name, {}, SHAPE)
    positions = torch.arange(LENGTH)[None]
    inputs = schemes.layer_inputs(SHAPE, LENGTH)
    last = limits.pop("last", None)

    def chosen(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        q, k, v = (each.to(dtype) for each in (q, k, v))
        layer = make_layer(
            encoding, positions, 1, x, schemes.counts_tokens(encoding)
        ).replace(**limits)
        return module.attention(encoding, q, k, v, layer, last).float()

    def defined(*given: Tensor) -> Tensor:
        return schemes.by_definition(encoding, given, positions, 1, **limits)[
            :, :, -(last or LENGTH) :
        ]

    if not torch.is_grad_enabled():
        return differences({"output": chosen(*inputs)}, {"output": defined(*inputs)})
    results = [
        schemes.with_gradients(encoding, inputs, form) for form in (chosen, defined)
    ]
    return differences(
        {key: value.clone() for key, value in results[0].items()}, results[1]
    )


KERNELS = ["rows", "fused", "channels", "flex"]
SETTINGS = [
    {},
    {"window": 10},
    {"window": 16, "sinks": 4},
    {"last": 39},
    {"window": 10, "sinks": 2, "last": 3},
]


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kernel", "name"), list(itertools.product(KERNELS, NAMES)))
def test_kernels_equal_the_definition_with_gradients(kernel, name, monkeypatch):
    if kernel == "rows":
        monkeypatch.setattr(module, "fused_is_fast", lambda *_: False)
    elif kernel == "fused":
        monkeypatch.setattr(
            module, "fused_is_fast", lambda q, v: q.shape[-1] == v.shape[-1]
        )
    elif kernel == "channels":
        monkeypatch.setattr(module, "FUSED_FROM", 1)
    calls: list[Any] = []
    if kernel == "flex":  # in its eager form, which needs no GPU
        eager = flex_attention.flex_attention
        # it refuses gradients on CPUs
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
        monkeypatch.setattr(
            flex,
            "_compiled",
            lambda _: lambda *qkv, **given: calls.append(1) or eager(*qkv, **given),
        )
        monkeypatch.setattr(flex, "serves", lambda *_: True)
    for limits in SETTINGS:
        errors = compared(name, **limits)
        # The gradients of a forget gate are long sums of differences that cancel.
        gates = [
            key
            for key in errors
            if key.startswith(("gradient of gate", "gradient of x")) or "weight" in key
        ]
        within = dict.fromkeys(errors, CLOSE) | dict.fromkeys(gates, GATES)
        assert all(errors[key] < within[key] for key in errors), (limits, errors)
        with torch.no_grad():  # other kernels may serve
            assert compared(name, **limits)["output"] < CLOSE, limits
    assert bool(calls) == (
        kernel == "flex"
        and name not in ("fire", "shaw", "cope", "path_fox", "stick_breaking")
    )


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("name", ["none", "alibi", "shaw"])
def test_in_bf16_every_kernel_stays_near_the_definition(name, amx, monkeypatch):
    monkeypatch.setattr(machine, "has_amx", lambda: amx)
    # three channels hold what one in bf16 does not
    monkeypatch.setattr(module, "FUSED_FROM", 1)
    assert max(compared(name, torch.bfloat16).values()) < BF16


FUSED = """
none  fp32            | width
none  bf16            |
none  bf16 amx        |
none  bf16 amx long   | width
alibi fp32            | mask
alibi fp32 long       | channels
t5    fp32            |
t5    fp32 evaluation | mask
cope  fp32 evaluation |
"""


@pytest.mark.parametrize("row", FUSED.strip().splitlines())
def test_the_fused_kernel_serves_where_it_is_faster(row, monkeypatch):
    """On a CPU, bf16 needs AMX and, in training, length. A bias is a mask, or channels
    if long; none if it learns.
    """
    given, _, expected = row.partition("|")
    name, dtype, *settings = given.split()
    real = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def counted(*given: Any, **options: Any) -> Tensor:
        channels = "width" if given[0].shape[-1] == SHAPE.head_dim else "channels"
        calls.append("mask" if options.get("attn_mask") is not None else channels)
        return real(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(machine, "has_amx", lambda: "amx" in settings)
    monkeypatch.setattr(
        module, "FUSED_FROM", LENGTH if "long" in settings else LENGTH + 1
    )
    encoding = schemes.build(name, {}, SHAPE)
    inputs = schemes.layer_inputs(SHAPE, LENGTH)
    *qkv, x = (
        each.to(torch.bfloat16 if dtype == "bf16" else torch.float32) for each in inputs
    )
    with torch.set_grad_enabled("evaluation" not in settings):
        layer = make_layer(encoding, torch.arange(LENGTH)[None], 1, x, True)
        if "window" in settings:
            layer = layer.replace(window=9)
        module.attention(encoding, *qkv, layer)
    assert set(calls) == set(expected.split())


@pytest.mark.parametrize("length", [128, 300, 1025])
def test_a_block_mask_is_that_which_torch_makes_of_all_pairs(length):
    block_mask = flex_attention.BlockMask
    for window, sinks in itertools.product(
        (None, 1, 127, 128, 129, 257), (0, 1, 128, 300)
    ):
        mask = flex.block_mask(length, window, sinks, torch.device("cpu"))
        expected = flex_attention.create_block_mask(
            mask.mask_mod, None, None, length, length, "cpu"
        )
        assert torch.equal(mask.to_dense(), expected.to_dense()), (window, sinks)
        full = [
            block_mask.from_kv_blocks(each.full_kv_num_blocks, each.full_kv_indices)
            for each in (mask, expected)
        ]
        # else pairs are seen unmasked
        assert (full[0].to_dense() <= full[1].to_dense()).all(), (window, sinks)


def test_evaluation_and_training_of_long_inputs_never_hold_all_scores():
    encoding = schemes.build("fox", {}, SHAPE)
    length = 4096
    (q, k, v, x), positions = (
        schemes.layer_inputs(SHAPE, length, batch=1),
        torch.arange(length)[None],
    )
    layer = make_layer(encoding, positions, 1, x, consecutive=True)
    saved = []
    with torch.no_grad(), Largest() as largest:
        module.attention(encoding, q, k, v, layer)
        flex.block_mask(length, 100, 4, torch.device("cpu"))
    assert largest.numbers < SHAPE.n_heads * length**2 / 8
    q.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(each.numel()) or each, lambda each: each
    ):
        module.attention(encoding, q, k, v, layer)
    assert max(saved) < SHAPE.n_heads * length**2 / 8


def test_logits_of_hidden_keys_that_are_no_numbers_hide_nothing_else():
    encoding = schemes.build("xpos", {}, SHAPE)
    q, k, v, x = (each.requires_grad_() for each in schemes.layer_inputs(SHAPE, 40))
    # as far apart as xpos is defined
    positions = torch.linspace(0, 128 * SHAPE.train_length // 2 - 1, 40).long()[None]
    turned = schemes.rotated_at(encoding, q, k, positions, x)
    # else there is nothing to see here
    assert not (turned[0] @ turned[1].mT).isfinite().all()
    out = schemes.layer_attention(encoding, q, k, v, x, positions, 0)
    expected = attention_output(encoding, q, k, v, x, 0, positions)
    assert (
        max(
            differences(
                {"output": out.detach()}, {"output": expected.detach()}
            ).values()
        )
        < CLOSE
    )
    assert all(
        gradient.isfinite().all()
        for gradient in torch.autograd.grad(out.sum(), [q, k, v])
    )
