"""FlexAttention in its eager form, which needs no GPU, against attention by the definition."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from posbench.encodings.base import Shape
from posbench.kernels import flex
from posbench.kernels.bias import Decay, LaidOut, Table
from posbench.model.attention import dispatch
from posbench.model.attention.dispatch import attention

SHAPE = Shape(d_model=48, n_heads=3, n_layers=2, train_length=64)
LENGTH = 150  # one block and a part of one
CPU = torch.device("cpu")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every layer that FlexAttention would take on CUDA takes it here, uncompiled; the calls it got."""
    calls: list[Any] = []

    def call(*tensors: Tensor, **given: Any) -> Tensor:
        calls.append(given)
        return library.flex_attention(*tensors, **given)

    monkeypatch.setattr(library, "_validate_device", lambda *_: None)  # it refuses gradients on CPUs
    monkeypatch.setattr(flex, "_compiled", lambda _: call)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    yield calls


def compared(name: str, options: dict[str, Any], window: int | None = None, sinks: int = 0) -> dict[str, float]:
    """Relative differences of the output and of all gradients from the definition, and whether any learned one is 0."""
    encoding = schemes.build(name, options, SHAPE)
    inputs, positions = schemes.layer_inputs(SHAPE, LENGTH), torch.arange(LENGTH)[None]

    def fast(*given: Tensor) -> Tensor:
        return attention(encoding, *given, positions, 1, window, sinks, consecutive=True)

    def exact(*given: Tensor) -> Tensor:
        return schemes.by_definition(encoding, given, positions, 1, window=window, sinks=sinks)

    found, expected = (schemes.with_gradients(encoding, inputs, form) for form in (fast, exact))
    found = {key: value.clone() for key, value in found.items()}
    assert found.keys() == expected.keys()
    return {key: float((found[key] - expected[key]).norm() / expected[key].norm().clamp(min=1)) for key in found}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("alibi", {}, "by_distance"),
        ("t5", {"max_distance": 64}, "by_distance"),
        ("fox", {}, "decayed"),
    ],
)
def test_biases_equal_the_definition_in_values_and_gradients(
    eager: list[Any], name: str, options: dict[str, Any], kind: str
) -> None:
    differences = compared(name, options)
    assert [call["score_mod"].__name__ for call in eager] == [kind]
    assert max(differences.values()) < 2e-4, differences


@pytest.mark.sample(12)
@pytest.mark.parametrize(("window", "sinks"), [(2, 0), (40, 0), (130, 0), (40, 4), (1, 140), (149, 1)])
@pytest.mark.parametrize("name", ["none", "rope", "t5", "fox"])
def test_windows_and_sinks_equal_the_definition(eager: list[Any], name: str, window: int, sinks: int) -> None:
    options = {"max_distance": 64} if name == "t5" else {}
    differences = compared(name, options, window, sinks)
    assert len(eager) == 1 and max(differences.values()) < 2e-4, differences


@pytest.mark.parametrize(("length", "window", "sinks"), [
    (128, None, 0), (300, None, 0), (1024, None, 0), (1024, 1, 0), (1024, 128, 0), (1024, 129, 0), (1000, 300, 0),
    (1000, 300, 5), (1000, 1, 128), (1000, 2, 129), (1024, 200, 300), (777, 10_000, 3),
])  # fmt: skip
def test_the_mask_made_by_arithmetic_is_the_one_made_of_all_pairs(length: int, window: int | None, sinks: int) -> None:
    made = flex.block_mask(length, window, sinks, CPU)
    whole = library.create_block_mask(made.mask_mod, None, None, length, length, device="cpu")
    assert made.shape == whole.shape and made.BLOCK_SIZE == whole.BLOCK_SIZE
    assert torch.equal(made.to_dense(), whole.to_dense())
    for one in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(made, one), getattr(whole, one)), one


def test_a_mask_is_made_once_for_a_length() -> None:
    assert flex.block_mask(500, 20, 0, CPU) is flex.block_mask(500, 20, 0, CPU)
    assert flex.block_mask(501, 20, 0, CPU) is not flex.block_mask(500, 20, 0, CPU)


def test_nothing_captured_is_indexed_twice() -> None:
    """Of a tensor that a compiled score_mod indexes twice, FlexAttention computes no gradient."""
    index = [torch.zeros((), dtype=torch.int64)] * 4
    for bias in (Table(torch.randn(2, 9)), Decay(torch.randn(1, 2, 9))):
        mod = flex._score_mod(bias, 9)
        assert mod is not None
        read: list[int] = []

        class Reads(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is Tensor.__getitem__:
                    read.append(id(args[0]))  # noqa: B023
                return func(*args, **(kwargs or {}))

        with Reads():
            mod(torch.zeros(()), *index)
        assert read and len(set(read)) == len(read)


def test_a_mask_that_an_evaluation_asks_for_first_serves_training_too() -> None:
    with torch.inference_mode():
        mask = flex.block_mask(1234, 56, 7, CPU)
    assert not mask.kv_indices.is_inference() and not mask.full_kv_num_blocks.is_inference()


def test_what_is_learned_goes_another_way_where_the_same_bits_are_asked_for_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "serves", lambda _: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
    learned = torch.zeros(2, 256, requires_grad=True)
    assert not flex.takes(q, q, Table(learned)) and flex.takes(q, q, Table(learned.detach()))
    with torch.no_grad():
        assert flex.takes(q, q, Table(learned))


def test_what_flex_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(added: Any, *shape: int, wide: int = 64, dtype: torch.dtype = torch.bfloat16, **seen: Any) -> bool:
        v = torch.empty(shape, dtype=dtype, device="meta")
        return flex.takes(v.new_empty(*shape[:3], wide), v, added, **seen)

    table, size = Table(torch.zeros(3, 256)), (2, 3, 256, 64)
    assert not takes(table, *size)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    assert takes(table, *size) and takes(None, *size, window=9) and takes(None, *size, sinks=1)
    assert not takes(None, *size) and not takes(None, *size, window=256)
    assert not takes(LaidOut(torch.zeros(3, 256, 256)), *size)
    assert not takes(table, *size, dtype=torch.float64)
    assert not takes(table, 2, 3, 64, 64) and not takes(table, 2, 3, 256, 8) and not takes(table, *size, wide=8)


def test_on_a_cpu_no_layer_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.flex, "flex_attention", None)
    assert max(compared("t5", {"max_distance": 64}).values()) < 1e-4
    assert max(compared("none", {}, window=20, sinks=3).values()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window", "sinks"), [("t5", None, 0), ("fox", 40, 4)])
def test_compiled_for_a_cpu_it_is_the_definition_by_a_graph_for_each_length(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None, sinks: int
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    as_training = flex._compiled(True)  # of other lengths' graph CPUs have no right code
    monkeypatch.setattr(flex, "_compiled", lambda _: as_training)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    encoding = schemes.build(name, {"max_distance": 64} if name == "t5" else {}, SHAPE)
    with torch.no_grad():
        for length in (LENGTH, 256):
            inputs, positions = schemes.layer_inputs(SHAPE, length), torch.arange(length)[None]
            found = attention(encoding, *inputs, positions, 1, window, sinks, consecutive=True)
            exact = schemes.by_definition(encoding, inputs, positions, 1, window=window, sinks=sinks)
            torch.testing.assert_close(found, exact, atol=2e-5, rtol=1e-4)
            for layer in (0, 1, 0):  # each with a bias of its own: the graph is that of the length
                attention(encoding, *inputs, positions, layer, window, sinks, consecutive=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
