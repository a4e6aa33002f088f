"""FlexAttention in its eager form, which needs no GPU, against attention by the definition."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as library

from posbench.encodings.base import Encoding, Shape
from posbench.model import flex
from posbench.model.attention import attention, make_layer

SHAPE = Shape(d_model=48, n_heads=3, n_layers=2, train_length=64)
LENGTH = 150  # one block and a part of one
CASES = {"none": {}, "t5": {"max_distance": 64}, "fox": {}, "pope": {}}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every layer that FlexAttention would take on CUDA takes it here, uncompiled; the calls it got."""
    calls: list[Any] = []

    def call(*tensors: Tensor, **given: Any) -> Tensor:
        calls.append(given)
        return library.flex_attention(*tensors, **given)

    monkeypatch.setattr(library, "_validate_device", lambda *_: None)  # it refuses gradients on CPUs
    monkeypatch.setattr(flex, "_compiled", lambda _: call)
    monkeypatch.setattr(flex, "serves", lambda *_: True)
    yield calls


def chosen(encoding: Encoding, inputs: Any, window: int | None = None, sinks: int = 0) -> Tensor:
    q, k, v, x = inputs
    layer = make_layer(encoding, torch.arange(q.shape[2])[None], 1, x, consecutive=True)
    return attention(encoding, q, k, v, layer, window, sinks)


@pytest.mark.parametrize(("window", "sinks"), [(None, 0), (40, 4)])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_definition_in_values_and_gradients(
    eager: list[Any], name: str, window: int | None, sinks: int
) -> None:
    encoding, inputs = schemes.build(name, CASES[name], SHAPE), schemes.layer_inputs(SHAPE, LENGTH)
    positions, limits = torch.arange(LENGTH)[None], {"window": window, "sinks": sinks}
    actual = schemes.with_gradients(encoding, inputs, lambda *given: chosen(encoding, given, **limits))
    actual = {key: value.clone() for key, value in actual.items()}
    assert len(eager) == (window is not None or name != "none")  # without any, another fused kernel is faster
    expected = schemes.with_gradients(
        encoding, inputs, lambda *given: schemes.by_definition(encoding, given, positions, 1, **limits)
    )
    for key, value in expected.items():
        assert float((actual[key] - value).norm() / value.norm().clamp(min=1)) < 5e-5, key


def test_what_it_cannot_express_goes_by_rows(eager: list[Any]) -> None:
    inputs = schemes.layer_inputs(SHAPE, LENGTH)
    for name in ("fire", "shaw", "cope"):
        chosen(schemes.build(name, {}, SHAPE), inputs)
    encoding = schemes.build("t5", {}, SHAPE)
    schemes.layer_attention(encoding, *inputs, torch.arange(LENGTH)[None], 1)  # positions that are not known to count
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        chosen(encoding, inputs)  # its gradient is a sum in no fixed order
        assert not eager
        with torch.no_grad():
            chosen(encoding, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(eager) == 1
