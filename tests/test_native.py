"""The attention kernel in C++ against attention by the definition in fp64, its promises, and how it is built."""

import math
from collections.abc import Callable, Iterator

import pytest
import schemes
import support
import torch
import torch.nn.functional as F
from test_attention import BF16, BF16_BIAS, Case, error, gradients, lines, names
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from posbench import machine
from posbench.encodings.base import Shape
from posbench.kernels import library
from posbench.kernels.bias import Bias, Counts, Decay, Dense, LaidOut, Lines, Slopes, Sticks, Table
from posbench.kernels.native import (
    native_attention,
    native_banded_attention,
    native_running_attention,
    takes,
)
from posbench.model.attention import dispatch
from posbench.model.attention.dispatch import attention

needs_it = pytest.mark.skipif(library.binary() is None, reason=f"attention here: {library.described()}")

BIASES: dict[str, Callable[..., Bias]] = {
    "none": Bias,
    "table": Table,
    "laid out": LaidOut,
    "each laid out": LaidOut,
    "lines": lines,
    "decay": Decay,
    "slopes": Slopes,
}
KINDS = [*BIASES, "banded", "banded keys"]
BUILDS = ["as built here", "without AMX"]
# (B, H, T, Dq, Dh): one token, odd lengths, below a block and above a chunk, more sequences than groups, other widths
SIZES = [
    (1, 1, 1, 32, 32),
    (2, 3, 37, 32, 32),
    (2, 2, 300, 64, 64),
    (1, 2, 1100, 32, 32),
    (9, 2, 64, 96, 96),
    (33, 1, 31, 32, 32),
    (2, 2, 40, 16, 16),
    (2, 2, 70, 48, 40),
    (2, 2, 70, 24, 64),
]
SETTING = ("kind", "size", "window", "build")


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both sets of instructions that the source is written for, as far as this CPU has them."""
    if request.param == "without AMX":
        if "amx_bf16" not in machine.cpu_flags():
            pytest.skip("this CPU has no AMX: it is built without anyway")
        without = frozenset(flag for flag in machine.cpu_flags() if not flag.startswith("amx"))
        monkeypatch.setattr(machine, "cpu_flags", lambda: without)
        library._found.cache_clear()
    yield
    monkeypatch.undo()
    library._found.cache_clear()


class Native(Case):
    """A case whose fast form is the kernel in C++."""

    def fast(self, *inputs: Tensor) -> Tensor:
        q, k, v, *learned = inputs
        sinks = learned.pop() if self.sunk else None
        if self.kind in BIASES:
            return native_attention(q, k, v, self.scale, BIASES[self.kind](*learned), self.window, sinks)
        return native_banded_attention(q, k, v, self.scale, *learned, window=self.window)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@needs_it
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(SETTING, support.crossed(KINDS, SIZES, [None, 1, 70], BUILDS), indirect=["build"])
def test_values_and_gradients_are_those_of_the_definition(kind: str, size: tuple[int, ...], window: int | None) -> None:
    if (kind, window) == ("banded", 1):  # of a single key's softmax the gradient is 0 but for the rounding of outputs
        window = 2
    case = Native(kind, size, torch.bfloat16, window)
    assert takes(*case.qkv, BIASES[kind](*case.learned) if kind in BIASES else None)
    expected = gradients(case.exact, case.inputs)
    found = gradients(case.fast, case.inputs)
    for name, x, y in zip(names(case), found, expected, strict=True):
        assert error(x, y) < (BF16_BIAS if "learned" in name else BF16), name
    with torch.no_grad(), torch.autocast("cpu"):  # as a model calls it
        assert torch.equal(case.fast(*case.inputs), found[0])


@pytest.mark.sample(3)
@needs_it
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(SETTING, support.crossed([*BIASES], SIZES, [None, 2, 70], BUILDS), indirect=["build"])
def test_so_they_are_beside_sinks(kind: str, size: tuple[int, ...], window: int | None) -> None:
    case = Native(kind, size, torch.bfloat16, window, sunk=True)
    expected = gradients(case.exact, case.inputs)
    found = gradients(case.fast, case.inputs)
    tiles = gradients(super(Native, case).fast, case.inputs)  # whose sums may cancel as far
    for name, x, y, z in zip(names(case), found, expected, tiles, strict=True):
        assert error(x, y) < (max(BF16_BIAS, 1.5 * error(z, y)) if "learned" in name else BF16), name


@needs_it
def test_numbers_that_are_not_finite_are_seen_by_the_queries_that_see_them() -> None:
    q, k, v = (torch.randn(1, 1, 40, 32).bfloat16() for _ in range(3))
    for given, where in ((q, slice(20, 21)), (k, slice(20, None)), (v, slice(20, None))):
        spoilt = given.clone()
        spoilt[0, 0, 20, 3] = math.nan
        wrong = native_attention(*(spoilt if x is given else x for x in (q, k, v)), 0.2).isnan().any(-1)[0, 0]
        assert wrong[where].all()
        if given is not v:  # a hidden value that is no number, times 0, is none
            assert wrong.sum() == wrong[where].numel()


@needs_it
@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_large_logits_neither_overflow_nor_lose_the_largest(size: float) -> None:
    q = (torch.randn(2, 2, 70, 32) * size).bfloat16().requires_grad_()
    k, v = (torch.randn(2, 2, 70, 32).bfloat16().requires_grad_() for _ in range(2))
    out = native_attention(q, k, v, 1.0)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.double() for x in (q, k, v)), is_causal=True, scale=1.0
    )
    assert error(out, exact) < BF16
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), (q, k, v)))  # a gradient of stride 0


@needs_it
def test_biases_stay_in_fp32_until_they_are_added() -> None:
    """Two keys whose biases differ by less than bf16 can tell apart at that size."""
    q = torch.zeros(1, 1, 2, 32, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 0.0], dtype=torch.bfloat16)[None, None, :, None].expand(1, 1, 2, 32)
    weight = native_attention(q, q, v, 1.0, Table(torch.tensor([[1000.0, 1001.0]])))[0, 0, 1, 0].item()
    assert weight == pytest.approx(1 / (1 + math.exp(-1)), rel=2**-8)


@needs_it
def test_products_of_other_libraries_are_right_before_and_after() -> None:
    """They configure the same unit for tiles."""
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    expected = a @ b
    q = torch.randn(2, 2, 64, 32).bfloat16()
    for _ in range(3):
        native_attention(q, q, q, 0.2)
        assert torch.equal(a @ b, expected)


# -- when it serves ----------------------------------------------------------------------------------------------------


def lines_of(kinks: int) -> Lines:
    lines = torch.zeros(kinks + 1, 2)
    return Lines(torch.zeros(kinks), lines, lines, torch.zeros(8), torch.zeros(8), 0)


@needs_it
def test_it_takes_what_it_was_written_for_and_nothing_else() -> None:
    q, k, v = (torch.zeros(2, 2, 8, 32, dtype=torch.bfloat16) for _ in range(3))
    sums = torch.zeros(2, 2, 8)
    assert takes(q, k, v, None) and takes(q, k, v, Decay(sums))
    assert not takes(q.float(), k.float(), v.float(), None)
    assert takes(q[..., :20], k[..., :20], v, None) and not takes(q[..., :20], k, v, None)
    assert not takes(q[:, :, -3:], k, v, None)
    assert not takes(q[:1, :0], k[:1, :0], v[:1, :0], None)  # fewer than threads
    assert not takes(q.to("meta"), k.to("meta"), v.to("meta"), None)
    assert not takes(q, k, v, Dense(lambda distance, where: distance[None].float(), ()))
    with torch.no_grad():
        assert takes(q, k, v, None) == machine.has_amx()
        assert takes(q, k, v, lines_of(32)) and not takes(q, k, v, lines_of(31))
    with FakeTensorMode() as mode:
        assert not takes(*(mode.from_tensor(x) for x in (q, k, v)), None)


@needs_it
def test_layers_go_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, 2, 40, 32).bfloat16() for _ in range(3))
    table = Table(torch.randn(2, 40))
    expected = native_attention(q, k, v, 0.2, table, 9)
    assert torch.equal(dispatch.kernel(q, k, v, 0.2, table, 9), expected)
    monkeypatch.setattr(dispatch, "takes", lambda *given: False)
    other = dispatch.kernel(q, k, v, 0.2, table, 9)
    assert not torch.equal(other, expected) and error(other, expected.double()) < BF16


@needs_it
@pytest.mark.parametrize("threshold", [None, 100, 40, 1])
@pytest.mark.usefixtures("build")
def test_a_fire_by_lines_is_that_of_its_hooks(monkeypatch: pytest.MonkeyPatch, threshold: float | None) -> None:
    shape = Shape(d_model=64, n_heads=2, n_layers=2, train_length=32)
    encoding = schemes.build("fire", {"threshold": threshold}, shape)
    inputs, positions = schemes.layer_inputs(shape, 75), torch.arange(75)[None]

    def fast(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        half = (tensor.bfloat16() for tensor in (q, k, v))
        return attention(encoding, *half, x, positions, 1, consecutive=True).float()

    def exact(*given: Tensor) -> Tensor:
        return schemes.by_definition(encoding, given, positions, 1)

    monkeypatch.setattr(dispatch, "tiled_attention", None)
    found, expected = (
        {key: value.clone() for key, value in schemes.with_gradients(encoding, inputs, form).items()}
        for form in (fast, exact)
    )
    for key, value in expected.items():
        if not key.endswith("2.bias"):  # the same for all keys of a query, so that nothing is left of it but rounding
            assert error(found[key], value) < (BF16 if value.dim() == 4 else BF16_BIAS), key


@needs_it
def test_a_fire_that_is_no_number_gives_none() -> None:
    """As in a training that has diverged, which then says so."""
    shape = Shape(d_model=64, n_heads=2, n_layers=1, train_length=32)
    encoding = schemes.build("fire", {}, shape)
    torch.nn.init.constant_(encoding.get_parameter("multiplier"), math.nan)
    q, k, v, x = (tensor.bfloat16() for tensor in schemes.layer_inputs(shape, 40))
    assert attention(encoding, q, k, v, x, torch.arange(40)[None], 0, consecutive=True).isnan().any()


def sticks(q: Tensor, k: Tensor, v: Tensor, scale: float, remainder: bool, window: int | None) -> Tensor:
    """By products of what each key leaves of a stick."""
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    shares = torch.sigmoid(q @ k.mT * scale) * ((back > 0) & (back < (window or math.inf)))
    left = (1 - shares).flip(-1).cumprod(-1).flip(-1)  # by the key and all nearer ones
    out = (shares * F.pad(left[..., 1:], (0, 1), value=1.0)) @ v
    return out + left[..., :1] * v if remainder else out


def counted(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, scale: float, window: int | None) -> Tensor:
    """By what the vectors at the whole counts on both sides give, as the paper has it."""
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    visible, logits = (back >= 0) & (back < (window or math.inf)), q @ k.mT * scale
    counts = (logits.sigmoid() * visible).flip(-1).cumsum(-1).flip(-1).clamp(max=len(vectors) - 1)
    whole, below = q @ vectors.mT, counts.detach().floor().long()
    above, part = (below + 1).clamp(max=len(vectors) - 1), counts - below
    logits = logits + whole.gather(-1, below) * (1 - part) + whole.gather(-1, above) * part
    return logits.masked_fill(~visible, -math.inf).softmax(-1) @ v


RUNNING = ["sticks", "sticks and what is left", "counts", "two counts"]  # what is made of sums over keys


class Running:
    """One of these in the sizes of a case, with the kernel and in fp64 by a formula of its own."""

    def __init__(self, kind: str, size: tuple[int, ...], window: int | None = None) -> None:
        case = Case("none", size, torch.bfloat16, window)
        self.kind, self.scale, self.window, self.inputs = kind, case.scale, window, case.qkv
        self.names = names(case)
        if "counts" in kind:
            draw = torch.Generator().manual_seed(2)
            vectors = torch.randn(2 if kind == "two counts" else 40, size[3], generator=draw).bfloat16().float()
            self.inputs = [*self.inputs, (vectors * 0.25).requires_grad_()]
            self.names = [*self.names, "learned"]

    def fast(self, q: Tensor, k: Tensor, v: Tensor, *vectors: Tensor) -> Tensor:
        running = Counts(*vectors) if vectors else Sticks("left" in self.kind)
        return native_running_attention(q, k, v, self.scale, running, self.window)

    def exact(self, *inputs: Tensor) -> Tensor:
        q, k, v, *vectors = (x.double() for x in inputs)
        if vectors:
            return counted(q, k, v, *vectors, self.scale, self.window)
        return sticks(q, k, v, self.scale, "left" in self.kind, self.window)


@pytest.mark.sample(3)
@needs_it
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(SETTING, support.crossed(RUNNING, SIZES, [None, 2, 70], BUILDS), indirect=["build"])
def test_running_sums_over_keys_are_those_of_their_formulas(
    kind: str, size: tuple[int, ...], window: int | None
) -> None:
    case = Running(kind, size, window)
    found, expected = gradients(case.fast, case.inputs), gradients(case.exact, case.inputs)
    for name, x, y in zip(case.names, found, expected, strict=True):
        assert error(x, y) < (BF16_BIAS if name == "learned" else BF16), name
    with torch.no_grad():  # keys for which nothing is left of a stick are left out then
        assert torch.equal(case.fast(*case.inputs), found[0])


@pytest.mark.sample(3)
@needs_it
@pytest.mark.parametrize("kind", [*KINDS, *RUNNING])
def test_neither_threads_nor_other_sequences_nor_later_tokens_change_a_bit(kind: str) -> None:
    size = (5, 4, 1100, 32, 32)
    case = Running(kind, size) if kind in RUNNING else Native(kind, size, torch.bfloat16)
    found = gradients(case.fast, case.inputs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, gradients(case.fast, case.inputs), found))
    finally:
        torch.set_num_threads(before)

    def cut(x: Tensor, first: slice, length: int) -> Tensor:
        for dim, size in enumerate(x.shape):
            x = x.narrow(dim, 0, length) if size == 1100 else x
        return x[first] if len(x) == 5 else x

    alone = case.fast(*(cut(x, slice(2, 3), 1100) for x in case.inputs))
    assert torch.equal(alone, found[0][2:3])
    shorter = case.fast(*(cut(x, slice(None), 75) for x in case.inputs))
    assert torch.equal(shorter, found[0][:, :, :75])


@needs_it
@pytest.mark.parametrize("kind", RUNNING)
@pytest.mark.parametrize("size", [1e-3, 1e2, 1e4])
def test_of_logits_of_any_size_they_are_finite_and_right(kind: str, size: float) -> None:
    case = Running(kind, (2, 2, 300, 32, 32))
    q, *others = case.inputs
    inputs = [(q.detach() * size).requires_grad_(), *others]
    out = case.fast(*inputs)
    assert error(out, case.exact(*inputs)) < BF16
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), inputs))


@needs_it
@pytest.mark.parametrize("kind", RUNNING)
def test_what_is_no_number_is_none_for_all_queries_that_see_it(kind: str) -> None:
    case = Running(kind, (1, 1, 40, 32, 32))
    q, k, *others = (x.detach().clone() for x in case.inputs)
    k[0, 0, 20, 3] = math.nan
    wrong = case.fast(q, k, *others).isnan().any(-1)[0, 0]
    assert wrong[21:].all() and not wrong[:20].any()


@needs_it
@pytest.mark.parametrize("name", ["cope", "stick_breaking"])
def test_queries_and_keys_in_bf16_may_meet_values_in_fp32(name: str) -> None:
    shape = Shape(d_model=64, n_heads=2, n_layers=1, train_length=32)
    encoding = schemes.build(name, {}, shape)
    q, k, v, x = schemes.layer_inputs(shape, 40)
    positions = torch.arange(40)[None]
    found = attention(encoding, q.bfloat16(), k.bfloat16(), v, x, positions, 0, consecutive=True)
    expected = attention(encoding, q, k, v, x, positions, 0, consecutive=True)
    assert found.dtype == torch.float32 and error(found, expected) < BF16


@needs_it
@pytest.mark.parametrize("name", ["cope", "stick_breaking"])
def test_without_gradients_running_sums_are_computed_by_the_kernel_on_any_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows, every number of every pair would be written down several times."""
    monkeypatch.setattr(machine, "has_amx", lambda: False)
    shape = Shape(d_model=64, n_heads=2, n_layers=1, train_length=32)
    encoding = schemes.build(name, {}, shape)
    q, k, v, x = schemes.layer_inputs(shape, 40)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    with torch.no_grad():
        assert encoding.additions(q, k, x, torch.arange(40)[None], 0) is not None
