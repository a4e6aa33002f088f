"""What CUDA compiles of single encodings: compiled here, too, it is the same in values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from posbench.attention.dispatch import attention
from posbench.encodings import cope, stick_breaking
from posbench.encodings.base import Shape
from posbench.kernels import on_cuda, scans

SHAPE = Shape(d_model=24, n_heads=3, n_layers=2, train_length=32)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("module", "functions", "options"),
    [
        (cope, ("_counted", "_uncounted"), {}),
        (stick_breaking, ("_broken", "_unbroken"), {}),
        (stick_breaking, ("_broken", "_unbroken"), {"remainder": False}),
    ],
)
def test_what_is_compiled_gives_the_values_and_gradients_of_what_is_not(
    monkeypatch: pytest.MonkeyPatch, module: Any, functions: tuple[str, ...], options: dict[str, Any], backend: str
) -> None:
    torch._dynamo.reset()
    encoding = schemes.build(module.__name__.rpartition(".")[2], options, SHAPE)

    def found(length: int) -> dict[str, Tensor]:
        def compute(*given: Tensor) -> Tensor:
            positions = torch.arange(length)[None]
            return sum(attention(encoding, *given, positions, layer, consecutive=True) for layer in (0, 1))

        given = schemes.with_gradients(encoding, schemes.layer_inputs(SHAPE, length), compute)
        return {key: value.clone() for key, value in given.items()}

    expected = [found(length) for length in (9, 24, 40)]
    monkeypatch.setattr(scans, "scans", lambda scores: False)  # what CPUs may have in C++
    counting = [CompileCounterWithBackend(backend) for _ in functions]
    for function, counted in zip(functions, counting, strict=True):
        plain: Callable[..., Any] = getattr(module, function).__wrapped__
        monkeypatch.setattr(module, function, torch.compile(plain, backend=counted))
    for length, exact in zip((9, 24, 40), expected, strict=True):
        for key, value in found(length).items():
            torch.testing.assert_close(
                value, exact[key], atol=2e-5, rtol=2e-4, msg=lambda told, key=key: f"{key}: {told}"
            )
    assert all(1 <= counted.frame_count <= 2 for counted in counting)  # the first length, all others; not by layer


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    assert on_cuda.fused_on_cuda(torch.neg)(torch.ones(())) == -1
