"""Every way to compute attention against its definition, in values and gradients, and
the choice between them.
"""

import pytest
import schemes
import torch
from support import Largest
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from posbench import machine
from posbench.encodings.base import Shape
from posbench.model import attention as module
from posbench.model import flex
from posbench.model.standalone import attention_output

SHAPE = Shape(d_model=24, n_heads=3, n_layers=2, train_length=32)
LENGTH = 150  # beyond the training length, and several blocks of rows
FLEX_SERVES = ["none", "rope", "alibi", "t5", "fox", "pope"]
NAMES = [*FLEX_SERVES, "fire", "shaw", "cope", "path_fox", "stick_breaking"]
SCHEMES = pytest.mark.parametrize("name", NAMES)
LIMITS = pytest.mark.parametrize(
    "limits",
    [
        {},
        {"window": 10},
        {"window": 16, "sinks": 4},
        {"last": 39},
        {"window": 10, "sinks": 2, "last": 3},
    ],
)
CLOSE = 5e-5  # relative, by the root of summed squares
# The gradients of a forget gate are long sums of differences that cancel.
CLOSE_GATES = 1e-3
CLOSE_BF16 = 3e-2


def difference(actual: Tensor, expected: Tensor) -> float:
    """Return the relative difference by the root of summed squares; an absolute one
    below 1, for values that round to 0.
    """
    expected = expected.double()
    distance = (actual.double() - expected).norm()
    size = expected.norm().clamp(min=1)
    return float(distance / size)


def differences(name, dtype=torch.float32, last=None, **limits):
    """Return how a scheme's chosen attention differs from its definition, in the output
    and in all gradients; without gradients in the output alone.
    """
    encoding = schemes.build(name, {}, SHAPE)
    counted = schemes.counts_tokens(encoding)
    positions = torch.arange(LENGTH)[None]
    inputs = schemes.layer_inputs(SHAPE, LENGTH)

    def chosen(q, k, v, x):
        qkv = [each.to(dtype) for each in (q, k, v)]
        given = (*qkv, x, positions, 1, counted, last)
        out = schemes.layer_attention(encoding, *given, **limits)
        return out.float()

    def defined(*inputs):
        given = (inputs, positions, 1)
        return schemes.by_definition(encoding, *given, last=last, **limits)

    if not torch.is_grad_enabled():
        actual = chosen(*inputs)
        expected = defined(*inputs)
        return {"output": difference(actual, expected)}

    actual = schemes.with_gradients(encoding, inputs, chosen)
    expected = schemes.with_gradients(encoding, inputs, defined)
    found = {}
    for key, value in expected.items():
        found[key] = difference(actual[key], value)
    return found


def assert_is_the_definition(name, limits):
    for key, error in differences(name, **limits).items():
        bound = CLOSE
        reads_gates = key.startswith(("gradient of gate", "gradient of x"))
        if reads_gates or "weight" in key:
            bound = CLOSE_GATES
        assert error < bound, key


@pytest.fixture(params=["rows", "fused"])
def kernel(request, monkeypatch):
    is_fused = request.param == "fused"

    def fits(q, v):
        return is_fused and q.shape[-1] == v.shape[-1]

    monkeypatch.setattr(module, "fused_is_fast", fits)


@pytest.mark.sample(7)
@SCHEMES
@LIMITS
@pytest.mark.parametrize("trains", [True, False])
def test_a_kernel_equals_the_definition(kernel, name, limits, trains):
    with torch.set_grad_enabled(trains):
        assert_is_the_definition(name, limits)


@pytest.fixture
def flex_calls(monkeypatch):
    """Let FlexAttention serve in its eager form, which needs no GPU; list what it
    computes.
    """
    calls = []
    attention = flex.attention

    def counted(*given):
        out = attention(*given)
        if out is not None:
            calls.append(out)
        return out

    # it refuses gradients on CPUs
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "serves", lambda *_: True)
    monkeypatch.setattr(flex, "attention", counted)
    # torch's stance "force_eager" would lose the gradients of biases
    monkeypatch.setattr(flex, "compiled", lambda function, **_: function)
    flex._compiled.cache_clear()
    yield calls
    flex._compiled.cache_clear()


@pytest.mark.sample(7)
@SCHEMES
@LIMITS
@pytest.mark.parametrize("trains", [True, False])
def test_flex_attention_equals_the_definition(flex_calls, name, limits, trains):
    with torch.set_grad_enabled(trains):
        assert_is_the_definition(name, limits)


@pytest.mark.sample(3)
@SCHEMES
def test_flex_attention_serves_a_window_of_what_it_can_say(flex_calls, name):
    differences(name, window=10)
    has_served = len(flex_calls) > 0
    assert has_served is (name in FLEX_SERVES)


@pytest.fixture
def set_cpu(monkeypatch):
    """Return a function that says what this CPU has, and from which length on it trains
    with the fused kernel.
    """

    def set_cpu(has_amx, fused_from):
        monkeypatch.setattr(machine, "has_amx", lambda: has_amx)
        monkeypatch.setattr(module, "FUSED_FROM", fused_from)

    return set_cpu


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("name", ["none", "alibi", "shaw"])
def test_in_bf16_every_kernel_stays_near_the_definition(name, amx, set_cpu):
    set_cpu(amx, 1)
    for key, error in differences(name, torch.bfloat16).items():
        assert error < CLOSE_BF16, key


FUSED = [
    # scheme, dtype, settings, how the fused kernel is called
    ("none", torch.float32, [], {"width"}),
    ("none", torch.bfloat16, [], set()),
    ("none", torch.bfloat16, ["amx"], set()),
    ("none", torch.bfloat16, ["amx", "long"], {"width"}),
    ("alibi", torch.float32, [], {"mask"}),
    ("alibi", torch.float32, ["long"], {"mask"}),
    ("t5", torch.float32, [], set()),
    ("t5", torch.float32, ["evaluation"], {"mask"}),
    ("cope", torch.float32, ["evaluation"], set()),
]


@pytest.mark.parametrize(("name", "dtype", "settings", "expected"), FUSED)
def test_the_fused_kernel_serves_where_it_is_faster(
    name, dtype, settings, expected, set_cpu, monkeypatch
):
    """On a CPU, bf16 needs AMX and, in training, length. A bias is a mask; none if it
    learns.
    """
    real = functional.scaled_dot_product_attention
    calls = []

    def counted(*qkv, attn_mask=None, **options):
        calls.append("width" if attn_mask is None else "mask")
        return real(*qkv, attn_mask=attn_mask, **options)

    longest = LENGTH if "long" in settings else LENGTH + 1
    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)
    set_cpu("amx" in settings, longest)
    encoding = schemes.build(name, {}, SHAPE)
    in_fp32 = schemes.layer_inputs(SHAPE, LENGTH)
    inputs = [each.to(dtype) for each in in_fp32]
    positions = torch.arange(LENGTH)[None]
    trains = "evaluation" not in settings

    with torch.set_grad_enabled(trains):
        schemes.layer_attention(encoding, *inputs, positions, 1, consecutive=True)

    assert set(calls) == expected


@pytest.mark.parametrize("length", [128, 300, 1025])
@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 257])
@pytest.mark.parametrize("sinks", [0, 1, 128, 300])
def test_a_block_mask_is_that_which_torch_makes_of_all_pairs(length, window, sinks):
    mask = flex.block_mask(length, window, sinks, torch.device("cpu"))

    lengths = (length, length)
    expected = create_block_mask(mask.mask_mod, None, None, *lengths, "cpu")
    assert torch.equal(mask.to_dense(), expected.to_dense())
    # of another block some pairs would be seen unmasked
    is_allowed = full_blocks(mask) <= full_blocks(expected)
    assert is_allowed.all()


def full_blocks(mask: BlockMask) -> Tensor:
    counts = mask.full_kv_num_blocks
    full = BlockMask.from_kv_blocks(counts, mask.full_kv_indices)
    return full.to_dense()


LONG = 4096
ALL_SCORES = SHAPE.n_heads * LONG**2


def attend_to_a_long_input(encoding, *qkvx):
    positions = torch.arange(LONG)[None]
    schemes.layer_attention(encoding, *qkvx, positions, 1, consecutive=True)


def test_evaluation_of_long_inputs_never_holds_all_scores():
    encoding = schemes.build("fox", {}, SHAPE)
    inputs = schemes.layer_inputs(SHAPE, LONG, batch=1)
    with torch.no_grad(), Largest() as largest:
        attend_to_a_long_input(encoding, *inputs)
    assert largest.numbers < ALL_SCORES / 8


def test_training_on_long_inputs_never_keeps_all_scores():
    encoding = schemes.build("fox", {}, SHAPE)
    q, *kvx = schemes.layer_inputs(SHAPE, LONG, batch=1)
    q.requires_grad_()
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    def give_back(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        attend_to_a_long_input(encoding, q, *kvx)

    assert max(sizes) < ALL_SCORES / 8


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_block_on_an_accelerator_has_scores_for_which_there_is_room():
    assert module.at_once(0) == 2**26
    assert module.at_once(2**34) == 2**26
    assert module.at_once(2**37) == 2**28


def test_a_block_of_a_deterministic_run_has_one_size_on_every_machine(deterministic):
    assert module.at_once(2**37) == 2**26


def test_a_block_mask_never_holds_all_pairs():
    with Largest() as largest:
        flex.block_mask(LONG, 100, 4, torch.device("cpu"))
    assert largest.numbers < LONG**2 / 8


def test_logits_of_hidden_keys_that_are_no_numbers_hide_nothing_else():
    encoding = schemes.build("xpos", {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 40)
    leaves = [each.requires_grad_() for each in (q, k, v)]
    # as far apart as xpos is defined
    last = 128 * SHAPE.train_length // 2 - 1
    positions = torch.linspace(0, last, 40).long()[None]
    turned_q, turned_k = schemes.rotated_at(encoding, q, k, positions, x)
    logits = turned_q @ turned_k.mT
    assert not logits.isfinite().all(), "nothing to see here"

    out = schemes.layer_attention(encoding, q, k, v, x, positions, 0)

    expected = attention_output(encoding, q, k, v, x, 0, positions)
    error = difference(out.detach(), expected.detach())
    assert error < CLOSE
    for gradient in torch.autograd.grad(out.sum(), leaves):
        assert gradient.isfinite().all()
