"""What is compiled for CUDA, computed by Triton's interpreter on this machine, beside what is not compiled.

    LD_PRELOAD=guard.so TRITON_INTERPRET=1 python values.py

prints a line of JSON for each case: relative differences of its results, gradients among them. Graphs are compiled for
fake tensors of a device that is not there; where one is called, each fake tensor stands for a real one on the host, and
the graph's kernels run on those. The interpreter has no bf16; fp16 stands for both.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cuda_compiler

cuda_compiler.stand_in((9, 0))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._inductor.output_code import CompiledFxGraph  # noqa: E402
from torch._inductor.runtime import triton_helpers  # noqa: E402
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle  # noqa: E402

from posbench.encodings import _rotary as rotary  # noqa: E402
from posbench.encodings import cope, stick_breaking  # noqa: E402
from posbench.kernels import convolution, cross_entropy, flex  # noqa: E402
from posbench.kernels.bias import Bias, Decay, LaidOut, Slopes, Table  # noqa: E402
from posbench.kernels.tiled import tiled_attention  # noqa: E402

CPU = torch.device("cpu")
MASKS = [f"{full}{side}_{what}" for full in ("", "full_") for side in ["kv", "q"] for what in ("num_blocks", "indices")]
launched = 0


class Stands:
    """Real tensors behind fake ones, by the storages of these, all of which are kept."""

    def __init__(self) -> None:
        self._real: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    def fake(self, real: Tensor) -> Tensor:
        """A fake tensor on the device that stands for this one, from the beginning of its storage on."""
        assert not real.storage_offset()
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")
        self._kept.append(fake)
        self._real[fake.untyped_storage()._cdata] = real
        return fake.requires_grad_(real.requires_grad)

    def real(self, fake: Any) -> Any:
        if not isinstance(fake, FakeTensor):
            return fake
        with _disable_current_modes():
            base = self._real[fake.untyped_storage()._cdata].detach()
            return torch.as_strided(base, fake.shape, fake.stride(), fake.storage_offset())


stands = Stands()


def call(self: CompiledFxGraph, inputs: list[Any]) -> tuple[Any, ...]:
    given = [stands.real(one) for one in inputs]
    inputs.clear()
    with _disable_current_modes(), torch.no_grad():
        found = self.current_callable(given)
    return tuple(stands.fake(one) if isinstance(one, Tensor) else one for one in found)


def launch(self: CachingAutotuner, *args: Any, stream: Any, **_: Any) -> None:
    """The kernel, over its whole grid, with its first configuration."""
    global launched
    launched += 1
    names, config = self.fn.arg_names, self.configs[0]
    constants = {
        key if isinstance(key, str) else names[key[0]]: one for key, one in self.triton_meta["constants"].items()
    }
    constants |= config.kwargs
    sizes = {name: one for name, one in zip(names, args, strict=False) if isinstance(one, int)}
    sizes |= {f"_grid_{i}": one for i, one in enumerate(args[-3:])}  # of a template, after its arguments
    grid = GridExpr.from_meta(self.inductor_meta, config).eval_slow({**sizes, **constants})
    given = dict(zip(names, args, strict=False))
    self.fn[grid](**given, **{name: one for name, one in constants.items() if name in names and name not in given})


def block_mask(*given: Any) -> Any:
    """That of the host, its tensors on the device."""
    with _disable_current_modes():
        mask = made(*given[:-1], CPU)
    for name in MASKS:
        setattr(mask, name, stands.fake(getattr(mask, name)))
    return mask


made = flex.block_mask.__wrapped__


class Libdevice:
    """Of NVIDIA's library, which the interpreter does not have, functions of one number that numpy has."""

    def __getattr__(self, name: str) -> Callable[[tl.tensor], tl.tensor]:
        function = getattr(np, name)
        return lambda x: tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)


def computed(function: Callable[..., Any], given: Sequence[Any]) -> list[Tensor]:
    """What a function that calls graphs returns, computed by their kernels."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = function(*(stands.fake(one) if isinstance(one, Tensor) else one for one in given))
    return [stands.real(one).clone() for one in (found if isinstance(found, tuple | list) else [found])]


def differences(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    return [float((x.double() - y.double()).norm() / y.double().norm()) for x, y in zip(found, expected, strict=True)]


# -- cases -------------------------------------------------------------------------------------------------------------


def attention(
    kind: type[Bias],
    dtype: torch.dtype,
    of_queries: int,
    of_values: int,
    length: int,
    window: int | None = None,
    sinks: int = 0,
) -> list[float]:
    """FlexAttention under a kind of bias: the output, then all gradients."""
    draw = torch.Generator().manual_seed(0)
    widths = (of_values, of_queries, of_queries, of_values)
    given = [torch.randn(2, 2, length, width, generator=draw).to(dtype) for width in widths]
    sizes = [[length if one == 200 else one for one in size] for size in flex.KINDS[kind]]
    given += [0.1 * torch.randn(size, generator=draw) for size in sizes]
    options = flex.ladder(kind)[0]

    def by_flex(weight: Tensor, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> list[Tensor]:
        scale = of_queries**-0.5
        out = flex.flex_attention(q, k, v, scale, kind(*learned), window, sinks, options)
        return [out, *torch.autograd.grad(out, [q, k, v, *learned], weight, materialize_grads=True)]

    def exactly(weight: Tensor, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> list[Tensor]:
        hidden = None
        if sinks:  # which tiles do not know: as numbers for each pair
            i, j = torch.arange(length)[:, None], torch.arange(length)
            hidden = LaidOut(torch.where((i - j < window) | (j < sinks), 0.0, -torch.inf).repeat(2, 1, 1))
        out = tiled_attention(q, k, v, of_queries**-0.5, hidden or kind(*learned), None if sinks else window)
        return [out, *torch.autograd.grad(out, [q, k, v, *learned], weight)]

    found = computed(by_flex, [one.clone().requires_grad_() for one in given])
    return differences(found, exactly(*(one.float().requires_grad_() for one in given)))


def evaluated(length: int) -> list[float]:
    """FlexAttention under a table, of as many sequences as there are hundreds of tokens."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length // 100, 2, length, 16, generator=draw) for _ in range(3))
    table = torch.randn(2, length, generator=draw)
    with torch.no_grad():
        found = computed(lambda q, k, v, table: flex.flex_attention(q, k, v, 0.25, Table(table)), [q, k, v, table])
        return differences(found, [tiled_attention(q, k, v, 0.25, Table(table))])


def function(plain: Callable[..., Any], *given: Any) -> list[float]:
    """A function that CUDA compiles: all that it returns, then the tensors that it was given."""

    def with_given(run: Callable[..., Any], *tensors: Any) -> list[Tensor]:
        found = run(*tensors)
        return [*(found if isinstance(found, tuple) else [found]), *(one for one in tensors if isinstance(one, Tensor))]

    compiled = torch.compile(plain)
    exact = with_given(plain, *map(widened, given))
    return differences(computed(lambda *tensors: with_given(compiled, *tensors), given), exact)


def widened(one: Any) -> Any:
    """A copy, in fp64 if it is of real numbers."""
    if not isinstance(one, Tensor):
        return one
    return one.double() if one.is_floating_point() else one.clone()


def cases() -> Iterator[tuple[str, list[float]]]:
    single, half = torch.float32, torch.float16
    for kind in (Table, Decay, Slopes, LaidOut):
        yield f"{kind.__name__} fp32", attention(kind, single, 16, 16, 200)
        yield f"{kind.__name__} fp16", attention(kind, half, 64, 64, 256)
    yield "window fp32", attention(Bias, single, 32, 16, 300, window=70)
    yield "window and sinks fp16", attention(Bias, half, 64, 64, 384, window=100, sinks=4)

    for length in (256, 300, 513):
        yield f"evaluation of {length}", evaluated(length)

    draw = torch.Generator().manual_seed(0)
    logits, at_whole = torch.randn(1, 2, 16, 40, generator=draw), torch.randn(1, 2, 16, 8, generator=draw)
    visible = torch.ones(16, 40).tril(24)
    counted = cope._counted.__wrapped__
    yield "_counted", function(counted, logits, at_whole, visible)
    gradient = torch.randn(logits.shape, generator=draw)
    yield "_uncounted", function(cope._uncounted.__wrapped__, gradient, 8, *counted(logits, at_whole, visible)[1:])
    broken = stick_breaking._broken.__wrapped__
    yield "_broken", function(broken, logits)
    of_rest = torch.randn(1, 2, 16, 1, generator=draw)
    yield "_unbroken", function(stick_breaking._unbroken.__wrapped__, gradient, of_rest, logits, *broken(logits))
    x, angles = torch.randn(2, 3, 10, 8, generator=draw), torch.randn(1, 1, 10, 4, generator=draw)
    turns = torch.stack((angles.cos(), angles.sin()), dim=-1)
    yield "_turn_interleaved", function(rotary._turn_interleaved.__wrapped__, x, turns)
    yield "_turn_interleaved fp16", function(rotary._turn_interleaved.__wrapped__, x.half(), turns)
    cosine, sine = rotary.laid_out(torch.view_as_complex(turns), "half")
    yield "_halves_turned", function(rotary._halves_turned, x, cosine, sine)
    above, x, weight = (torch.randn(size, generator=draw) for size in ((2, 9, 6), (2, 9, 6), (6, 4)))
    yield "_convolved", function(convolution._convolved.__wrapped__, x, weight)
    yield "_unconvolved fp16", function(convolution._unconvolved.__wrapped__, above.half(), x.half(), weight)
    scores, labels = torch.randn(9, 70, generator=draw), torch.randint(70, (9, 1), generator=draw)
    yield "_piece", function(cross_entropy._piece, scores, labels, True, 0.25)
    yield "_piece fp16", function(cross_entropy._piece, scores.half(), labels, True, None)


def atomic_add(self: InterpreterBuilder, what: Any, at: Any, value: Any, *given: Any) -> Any:
    """As it is, which reads a number that is broadcast beyond its end."""
    return unsafe_add(self, what, at, TensorHandle(np.ascontiguousarray(value.data), value.dtype), *given)


unsafe_add = InterpreterBuilder.create_atomic_rmw


def main() -> None:
    CachingAutotuner.precompile = lambda *_, **__: None
    CachingAutotuner.run = launch
    CompiledFxGraph.__call__ = call
    cuda_compiler.memory(torch.empty_strided)
    torch._C._dynamo.guards.assert_size_stride = lambda *_: None
    triton_helpers.libdevice = Libdevice()
    InterpreterBuilder.create_atomic_rmw = atomic_add
    flex.block_mask = block_mask
    for name, found in cases():
        graphs = counters["stats"]["unique_graphs"]
        print(json.dumps({"case": name, "differences": found, "launched": launched, "graphs": graphs}), flush=True)


if __name__ == "__main__":
    main()
