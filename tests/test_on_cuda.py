"""What CUDA compiles of single encodings: compiled here, too, it is the same in values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from posbench.encodings import _rotary as rotary
from posbench.encodings import cope, stick_breaking
from posbench.encodings.base import Shape
from posbench.kernels import fused
from posbench.model.attention import dispatch
from posbench.model.attention.dispatch import attention

CPU = torch.device("cpu")
SHAPE = Shape(d_model=24, n_heads=3, n_layers=2, train_length=32)
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.sample(6)
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


@pytest.mark.parametrize("wanted", [True, False])
def test_attention_that_is_asked_for_the_same_bits_leaves_the_fused_kernel_where_it_has_gradients(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    """Told to warn only, torch's fused kernels on CUDA warn, and sum the gradients of queries in any order."""
    monkeypatch.setattr(dispatch, "tiled_attention", lambda *given: "tiles")
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *given, **more: "fused")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: wanted)
    with FakeTensorMode():
        q = torch.empty(1, 2, 300, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        assert dispatch.kernel(q, q, q, 1.0, None, None) == ("tiles" if wanted else "fused")
        with torch.no_grad():
            assert dispatch.kernel(q, q, q, 1.0, None, None) == "fused"


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotation_in_one_kernel_is_multiplication_by_a_complex_number(
    layout: rotary.Layout, dtype: torch.dtype, backend: str
) -> None:
    torch._dynamo.reset()
    counted = CompileCounterWithBackend(backend)
    in_one = {"interleaved": rotary._turn_interleaved.__wrapped__, "half": rotary._halves_turned}[layout]
    compiled = torch.compile(in_one, backend=counted)
    for batch, length in ((2, 9), (3, 30), (5, 17)):
        x = torch.randn(batch, 3, length, 8, dtype=dtype, requires_grad=True)
        angles = torch.randn(1, length, 4, dtype=torch.float64, requires_grad=True)
        turns, weight = rotary.turns(angles, CPU), torch.randn(x.shape, dtype=dtype)
        laid = [torch.view_as_real(turns)] if layout == "interleaved" else rotary.laid_out(turns, layout)
        found = compiled(x, *laid)
        pairs = x.unflatten(-1, (-1, 2)) if layout == "interleaved" else x.unflatten(-1, (2, -1)).mT
        factors = torch.polar(torch.ones_like(angles), angles)[:, None]
        exact = torch.view_as_real(torch.view_as_complex(pairs.double().contiguous()) * factors)
        exact = (exact if layout == "interleaved" else exact.mT).flatten(-2)
        assert found.dtype == dtype
        close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        torch.testing.assert_close(found.double(), exact, **close)
        for one, expected in zip(
            torch.autograd.grad(found, (x, angles), weight),
            torch.autograd.grad(exact, (x, angles), weight.double()),
            strict=True,
        ):
            scale = float(expected.abs().max())
            torch.testing.assert_close(one / scale, expected / scale, **close)
    assert 1 <= counted.frame_count <= 2


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", None)
    assert fused.fused_on_cuda(torch.neg)(torch.ones(())) == -1


def test_an_error_of_the_device_is_not_taken_for_one_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an assertion on the device nothing runs any more, and what the kernel wrote may be half of it."""
    calls = []

    def plain(x: Tensor) -> Tensor:
        calls.append(x)
        return x

    def broken(error: Exception) -> Callable[..., Any]:
        def raising(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(fused, "compiled", lambda function, dynamic=None: raising)
        return fused.fused(plain)

    for error in (torch.AcceleratorError("device-side assert triggered"), torch.OutOfMemoryError("too much")):
        with pytest.raises(type(error)):
            broken(error)(torch.zeros(1))
    assert not calls and not caplog.messages
    uncompiled = broken(RuntimeError("no triton\nat all"))
    assert [uncompiled(torch.zeros(1)) for _ in range(2)] == calls
    assert caplog.messages == ["plain cannot be compiled here: no triton; it runs uncompiled"]
