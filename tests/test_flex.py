"""FlexAttention in its eager form, which needs no GPU, against attention by the definition."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from posbench.encodings import fire
from posbench.encodings.base import Shape
from posbench.kernels import flex
from posbench.kernels.bias import Bias, Decay, Dense, LaidOut, Line, Near, Table
from posbench.model.attention import dispatch
from posbench.model.attention.dispatch import attention

SHAPE = Shape(d_model=48, n_heads=3, n_layers=2, train_length=64)
LENGTH = 150  # one block and a part of one; beyond train_length, where FIRE's rows begin to differ
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
    monkeypatch.setattr(flex, "checked", lambda *_: flex.LADDER[0])
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
        ("alibi", {}, "falling"),
        ("t5", {"max_distance": 64}, "by_distance"),
        ("fox", {}, "decayed"),
        ("grape_a", {}, "sloped"),
        ("fire", {}, "laid_out"),
    ],
)
def test_biases_equal_the_definition_in_values_and_gradients(
    eager: list[Any], name: str, options: dict[str, Any], kind: str
) -> None:
    differences = compared(name, options)
    assert [call["score_mod"].__name__ for call in eager] == [kind]
    assert max(differences.values()) < 2e-4, differences


def test_what_is_too_large_to_be_laid_out_for_all_layers_is_for_each(
    eager: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fire, "LaidOut", None)
    monkeypatch.setattr(fire, "LAID_OUT", 2 * 3 * LENGTH**2 - 1)
    differences = compared("fire", {})
    assert [call["score_mod"].__name__ for call in eager] == ["laid_out"]
    assert max(differences.values()) < 2e-4, differences


def test_training_keeps_nothing_of_a_layers_own_bias_but_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fire, "LAID_OUT", 0)
    q, k, _, x = schemes.layer_inputs(SHAPE, LENGTH)
    bias = schemes.build("fire", {}, SHAPE).additions(q, k, x, torch.arange(LENGTH)[None], 1)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        mod = flex._score_mod(bias, LENGTH)
    assert mod is not None and max(kept, default=0) < LENGTH**2
    table = mod(torch.zeros(()), *torch.meshgrid(*map(torch.arange, (1, 3, LENGTH, LENGTH)), indexing="ij"))
    assert torch.equal(table[0], bias.laid_out(LENGTH))


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
    for bias in (
        Table(torch.randn(2, 9)),
        Decay(torch.randn(1, 2, 9)),
        Dense(lambda d, w, t: t[:, d], (torch.randn(2, 9),)),
        LaidOut(torch.randn(2, 9, 9)),
    ):
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


# -- the start-up check ------------------------------------------------------------------------------------------------


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was checked before, and FlexAttention takes gradients on this CPU."""
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)
    flex.checked.cache_clear()
    yield
    flex.checked.cache_clear()


def checked(kind: type[Bias], dtype: torch.dtype = torch.float32, training: bool = True) -> flex.Options | None:
    with torch.inference_mode(not training):
        return flex.checked(CPU, kind, dtype, (24, 16), training)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == flex.__name__]


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", flex.KINDS)
def test_the_check_passes_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
    unchecked: None,
    caplog: pytest.LogCaptureFixture,
    kind: type[Bias],
    dtype: torch.dtype,
    training: bool,
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda _: library.flex_attention)
    assert checked(kind, dtype, training) is not None and not said(caplog)


def test_a_mask_that_an_evaluation_asks_for_first_serves_training_too() -> None:
    with torch.inference_mode():
        mask = flex.block_mask(1234, 56, 7, CPU)
    assert not mask.kv_indices.is_inference() and not mask.full_kv_num_blocks.is_inference()


@pytest.mark.parametrize("fault", ["raises", "is wrong"])
def test_an_evaluation_whose_graph_of_many_shapes_is_broken_goes_another_way_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, unchecked: None, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Training's graph is of one shape, and right; so is the first of an evaluation."""
    shapes: list[torch.Size] = []

    def of(training: bool) -> Any:
        def call(q: Tensor, *tensors: Tensor, **given: Any) -> Tensor:
            shapes.append(q.shape)
            out = library.flex_attention(q, *tensors, **given)
            if training or len(set(shapes)) == 1:
                return out
            if fault == "raises":
                raise RuntimeError("no code for symbols\nmore")
            return 2 * out

        return call

    monkeypatch.setattr(flex, "_compiled", of)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    encoding, inputs = schemes.build("fox", {}, SHAPE), schemes.layer_inputs(SHAPE, LENGTH)

    def out() -> Tensor:
        return attention(encoding, *inputs, torch.arange(LENGTH)[None], 1, consecutive=True)

    exact = out()
    assert LENGTH in {shape[2] for shape in shapes} and not said(caplog)
    shapes.clear()
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(out(), exact, atol=2e-5, rtol=1e-4)
    assert LENGTH not in {shape[2] for shape in shapes}
    (told,) = said(caplog)
    reason = "does not run: no code for symbols" if fault == "raises" else "differs from the reference by 1.0e+00"
    assert told.startswith(f"FlexAttention (Decay, evaluation) on cpu {reason}")


def test_the_check_finds_a_gradient_that_is_wrong_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, unchecked: None, caplog: pytest.LogCaptureFixture
) -> None:
    def doubling(*tensors: Tensor, score_mod: Any, **given: Any) -> Tensor:
        def doubled(score: Tensor, *index: Tensor) -> Tensor:
            added = score_mod(score, *index) - score
            return score + 2 * added - added.detach()

        return library.flex_attention(*tensors, score_mod=doubled, **given)

    monkeypatch.setattr(flex, "_compiled", lambda _: doubling)
    with caplog.at_level(logging.WARNING):
        assert checked(Table) is None and checked(Table) is None
    (told,) = said(caplog)
    assert "(Table, training) on cpu differs from the reference by 1.0e+00" in told


def test_the_check_finds_a_gradient_that_is_no_number(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return library.flex_attention(q, k, v, **given) + 0 * (k.sum() - k.sum().detach()).sqrt()

    monkeypatch.setattr(flex, "_compiled", lambda _: broken)
    assert checked(Decay) is None


@pytest.mark.parametrize(("kind", "fits", "tried"), [(Decay, 1, 1), (Decay, 3, 3), (Table, 2, 1), (Table, 0, 3)])
def test_what_does_not_fit_the_shared_memory_is_tried_smaller(
    monkeypatch: pytest.MonkeyPatch,
    unchecked: None,
    caplog: pytest.LogCaptureFixture,
    kind: type[Bias],
    fits: int,
    tried: int,
) -> None:
    asked: list[dict[str, int]] = []

    def small(*tensors: Tensor, kernel_options: dict[str, int], **given: Any) -> Tensor:
        asked.append(kernel_options)
        if kernel_options not in flex.LADDER[fits - 1 :] or not fits:
            raise RuntimeError("No valid triton configs.\nout of resource: Required: 245760 Hardware limit: 232448")
        return library.flex_attention(*tensors, **given)

    monkeypatch.setattr(flex, "_compiled", lambda _: small)
    assert checked(kind) == (flex.LADDER[fits - 1] if fits else None) and len(asked) == tried
    assert [("does not run: No valid triton configs." in told) for told in said(caplog)] == [True] * (not fits)


def test_what_cannot_be_compiled_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, unchecked: None, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: bool) -> Any:
        raise RuntimeError("Cannot find a working triton installation.\nmore")

    monkeypatch.setattr(flex, "_compiled", broken)
    with caplog.at_level(logging.WARNING):
        assert checked(Decay) is None and checked(Decay) is None
    (told,) = said(caplog)
    assert "(Decay, training) on cpu does not run: Cannot find a working triton installation.; slower" in told


def test_what_is_learned_goes_another_way_where_the_same_bits_are_asked_for_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flex, "serves", lambda _: True)
    monkeypatch.setattr(flex, "checked", lambda *_: flex.LADDER[0])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    q = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
    learned, slopes = torch.zeros(2, 256, requires_grad=True), torch.ones(2)
    assert flex.options_for(q, q, Table(learned)) is None
    assert flex.options_for(q, q, Line(torch.zeros(2, 256), slopes)) is not None
    with torch.no_grad():
        assert flex.options_for(q, q, Table(learned)) is not None


def test_what_flex_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(added: Any, *shape: int, wide: int = 64, dtype: torch.dtype = torch.bfloat16, **seen: Any) -> bool:
        v = torch.empty(shape, dtype=dtype, device="meta")
        return flex.options_for(v.new_empty(*shape[:3], wide), v, added, **seen) is not None

    table, size = Table(torch.zeros(3, 256)), (2, 3, 256, 64)
    assert not takes(table, *size)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    monkeypatch.setattr(flex, "checked", lambda *_: flex.LADDER[0])
    assert takes(table, *size) and takes(None, *size, window=9) and takes(None, *size, sinks=1)
    assert not takes(None, *size) and not takes(None, *size, window=256) and not takes(Near(torch.zeros(2, 64)), *size)
    assert not takes(table, *size, dtype=torch.float64)
    assert not takes(table, 2, 3, 64, 64) and not takes(table, 2, 3, 256, 8) and not takes(table, *size, wide=8)
    dense, longest = Dense(lambda *_: torch.zeros(()), (torch.zeros(1),)), math.isqrt(flex.LARGEST_TABLE // 4)
    assert takes(dense, 1, 4, longest, 64) and not takes(dense, 1, 4, longest + 1, 64)
    monkeypatch.setattr(flex, "kept_bytes", lambda _: 4 * 4 * 256**2)  # of a layer: the table of 256 tokens
    trained = dataclasses.replace(dense, parameters=(torch.zeros(1, requires_grad=True),))
    assert takes(trained, 1, 4, 256, 64) and not takes(trained, 1, 4, 257, 64) and takes(dense, 1, 4, 257, 64)
    with torch.no_grad():
        assert takes(trained, 1, 4, 257, 64)


def test_on_a_cpu_no_layer_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.flex, "flex_attention", None)
    assert max(compared("t5", {"max_distance": 64}).values()) < 1e-4
    assert max(compared("none", {}, window=20, sinks=3).values()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window", "sinks"), [("t5", None, 0), ("fox", 40, 4), ("fire", None, 0)])
def test_compiled_for_a_cpu_it_is_the_definition_by_a_graph_for_each_length(
    monkeypatch: pytest.MonkeyPatch, name: str, window: int | None, sinks: int
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    as_training = flex._compiled(True)  # of other lengths' graph CPUs have no right code
    monkeypatch.setattr(flex, "_compiled", lambda _: as_training)
    monkeypatch.setattr(flex, "serves", lambda _: True)
    monkeypatch.setattr(flex, "checked", lambda *_: flex.LADDER[0])
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
