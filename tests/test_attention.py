"""The fast kernels against attention by the definition in fp64, and the choice between them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import schemes
import torch
from support import Largest
from torch import Tensor

import posbench
from posbench import machine
from posbench.encodings.base import Encoding, Rows, Shape, declared
from posbench.errors import UserError
from posbench.kernels import tiled, tiles
from posbench.kernels.bias import Bias, Decay, LaidOut, Table
from posbench.kernels.tiled import tiled_attention
from posbench.model.attention import dispatch
from posbench.model.attention.dispatch import attention
from posbench.model.attention.reference import attention_output

KINDS = ("none", "table", "decay", "laid out", "each laid out")

# (B, H, T, Dq, Dh): one token, below a block, odd, one head, wider queries, several blocks, several sequences per tile
SIZES = [
    (1, 1, 1, 4, 4),
    (2, 3, 37, 8, 8),
    (3, 1, 5, 8, 6),
    (2, 2, 300, 8, 12),
    (1, 3, 515, 4, 4),
    (9, 2, 64, 8, 8),
]

# Relative error (root of summed squares) in bf16: products round at 2^-9 = 2e-3, the probabilities once more. A bias's
# gradient sums differences that cancel (rows of the softmax gradient sum to zero), which magnifies rounding.
BF16, BF16_BIAS = 1e-2, 4e-2


class Case:
    """Inputs of one kind of bias, its fast form, and its definition."""

    def __init__(self, kind: str, size: tuple[int, ...], dtype: torch.dtype, window: int | None = None) -> None:
        self.kind, self.window = kind, window
        batch, heads, length, width, value_width = size
        exact = torch.promote_types(dtype, torch.float32)
        draw = torch.Generator().manual_seed(0)

        def leaf(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            # Drawn in the time-major layout that a model's projections give.
            order = shape if len(shape) != 4 else (shape[0], shape[2], shape[1], shape[3])
            x = torch.randn(order, generator=draw, dtype=torch.float64).to(dtype)
            return (x.transpose(1, 2) if len(shape) == 4 else x).requires_grad_()

        self.scale = 0.7 * width**-0.5
        self.qkv = [leaf(batch, heads, length, width), leaf(batch, heads, length, width)]
        self.qkv.append(leaf(batch, heads, length, value_width))
        self.learned: list[Tensor] = []
        if kind == "table":
            self.learned = [leaf(heads, length, dtype=exact)]
        elif kind == "decay":
            gates = torch.randn(batch, heads, length, generator=draw, dtype=torch.float64)
            self.learned = [torch.nn.functional.logsigmoid(gates + 2).cumsum(-1).to(exact).requires_grad_()]
        elif kind == "laid out":
            self.learned = [leaf(heads, length, length, dtype=exact)]
        elif kind == "each laid out":
            self.learned = [leaf(batch, heads, length, length, dtype=exact)]

    @property
    def inputs(self) -> list[Tensor]:
        return self.qkv + self.learned

    def fast(self, *inputs: Tensor) -> Tensor:
        q, k, v, *learned = inputs
        kinds: dict[str, Callable[..., Bias]] = {
            "none": Bias,
            "table": Table,
            "decay": Decay,
            "laid out": LaidOut,
            "each laid out": LaidOut,
        }
        return tiled_attention(q, k, v, self.scale, kinds[self.kind](*learned), self.window)

    def exact(self, *inputs: Tensor) -> Tensor:
        q, k, v, *learned = (x.double() for x in inputs)
        index = torch.arange(q.shape[2])
        distance = index[:, None] - index
        visible = (distance >= 0) & (distance < (self.window or math.inf))
        logits = q @ k.mT * self.scale
        if self.kind == "table":
            logits = logits + learned[0][:, distance.clamp(min=0)]
        elif self.kind == "decay":
            logits = logits + learned[0][..., :, None] - learned[0][..., None, :]
        elif self.kind.endswith("laid out"):
            logits = logits + learned[0]
        return logits.masked_fill(~visible, -math.inf).softmax(-1) @ v


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of a fixed weighting of it."""
    out = function(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight.to(out.dtype))]


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, by the root of summed squares; absolute below 1, for what is zero but for rounding."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1))


def calls_of(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:
    """A list that grows by the function's name whenever a module calls it."""
    called: list[str] = []
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: called.append(name) or real(*args, **kwargs))
    return called


def names(case: Case) -> list[str]:
    return ["output", "q", "k", "v", *(f"learned {n}" for n in range(len(case.learned)))]


# -- values and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.sample(10)
@pytest.mark.parametrize("window", [None, 1, 5, 70, 1000])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fp32_equals_the_definition_in_values_and_gradients(
    kind: str, size: tuple[int, ...], window: int | None
) -> None:
    case = Case(kind, size, torch.float32, window)
    expected = gradients(case.exact, case.inputs)
    for name, x, y in zip(names(case), gradients(case.fast, case.inputs), expected, strict=True):
        assert error(x, y) < 1e-5, name


@pytest.mark.sample(5)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_stays_near_the_definition_in_values_and_gradients(kind: str, size: tuple[int, ...]) -> None:
    case = Case(kind, size, torch.bfloat16)
    expected = gradients(case.exact, case.inputs)
    for name, x, y in zip(names(case), gradients(case.fast, case.inputs), expected, strict=True):
        assert error(x, y) < (BF16_BIAS if "learned" in name else BF16), name


@pytest.mark.sample(12)
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_fused_kernel_gives_what_tiles_give_where_no_probabilities_are_kept(
    monkeypatch: pytest.MonkeyPatch, kind: str, size: tuple[int, ...], window: int | None
) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: True)
    fused = calls_of(monkeypatch, tiled.F, "scaled_dot_product_attention")
    case = Case(kind, size, torch.bfloat16, window)
    exact = gradients(case.exact, case.inputs)
    expected = exact[0]
    with torch.no_grad():
        found = case.fast(*case.inputs)
        assert error(found, expected) < BF16
        assert bool(fused) == (size[-2] == size[-1])  # else torch would store every score
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(case.fast(*case.inputs), found)  # it rounds no bias
        q, k, v, *learned = case.inputs
        if kind in ("none", "table"):  # the last rows
            fused.clear()
            last = tiled_attention(q[:, :, -3:], k, v, case.scale, Table(*learned) if learned else None, window)
            assert error(last, expected[:, :, -3:]) < BF16 and bool(fused) == (size[-2] == size[-1])
    fused.clear()
    case.fast(*case.inputs)
    assert not fused  # they are kept for the gradients
    monkeypatch.setattr(tiles, "KEPT_BYTES", 0)
    for name, x, y in zip(names(case), gradients(case.fast, case.inputs), exact, strict=True):
        assert error(x, y) < (BF16_BIAS if "learned" in name else BF16), name
    assert bool(fused) == (size[-2] == size[-1])


@pytest.mark.sample(6)
@pytest.mark.parametrize(("rows", "scores"), [(256, 2**30), (16, 700), (7, 1), (1, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_how_scores_are_cut_up_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, scores: int
) -> None:
    case = Case(kind, (5, 3, 41, 8, 8), torch.float64)
    expected = gradients(case.exact, case.inputs)
    small_tiles(monkeypatch, rows, scores)
    for name, x, y in zip(names(case), gradients(case.fast, case.inputs), expected, strict=True):
        assert error(x, y) < 1e-12, name


@pytest.mark.parametrize("kind", KINDS)
def test_computing_probabilities_again_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(machine, "has_amx", lambda: False)  # else another kernel computes the outputs then
    case = Case(kind, (2, 2, 300, 8, 8), torch.bfloat16)
    kept = gradients(case.fast, case.inputs)
    monkeypatch.setattr(tiles, "KEPT_BYTES", 0)
    for name, x, y in zip(names(case), gradients(case.fast, case.inputs), kept, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("window", [None, 3, 70])
@pytest.mark.parametrize("queries", [1, 10, 299])
def test_queries_may_be_the_last_tokens_only(monkeypatch: pytest.MonkeyPatch, queries: int, window: int | None) -> None:
    small_tiles(monkeypatch, 50, 2000)
    case = Case("each laid out", (2, 2, 300, 8, 12), torch.float32, window)

    def fast(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return case.fast(q[:, :, -queries:], k, v, bias[:, :, -queries:])

    expected = gradients(lambda *inputs: case.exact(*inputs)[:, :, -queries:], case.inputs)
    for name, x, y in zip(names(case), gradients(fast, case.inputs), expected, strict=True):
        assert error(x, y) < 1e-5, name


def test_biases_stay_in_fp32_until_they_are_added() -> None:
    """Two keys whose biases differ by less than bf16 can tell apart at that size."""
    q = k = torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 0.0], dtype=torch.bfloat16)[None, None, :, None].expand(1, 1, 2, 4)
    table = torch.tensor([[1000.0, 1001.0]])  # bf16 knows 1000 and 1004
    weight = tiled_attention(q, k, v, 1.0, Table(table))[0, 0, 1, 0].item()
    assert weight == pytest.approx(1 / (1 + math.exp(-1)), rel=2**-8)


def small_tiles(monkeypatch: pytest.MonkeyPatch, rows: int, scores: int) -> None:
    monkeypatch.setattr(tiles, "MIN_ROWS", rows)
    monkeypatch.setattr(tiles, "MAX_ROWS", rows)
    monkeypatch.setattr(tiles.Cut, "_tile_scores", lambda self: scores)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "laid out" not in kind])  # which are given all pairs
def test_evaluation_memory_grows_with_block_times_length(kind: str) -> None:
    batch, heads, length = 1, 2, 4096
    case = Case(kind, (batch, heads, length, 4, 4), torch.bfloat16)
    with torch.no_grad(), Largest() as largest:
        case.fast(*case.inputs)
    assert largest.numbers <= heads * tiles.MAX_ROWS * (length + tiles.MAX_ROWS)  # all scores: 16 times as many


def test_where_nothing_is_kept_no_block_needs_more_memory_than_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small_tiles(monkeypatch, 16, 2**20)
    case, sizes, mask = Case("none", (1, 2, 300, 4, 4), torch.float32), [], tiles.Cut._mask

    def looked_at(self: tiles.Cut, rows: int, keys: int) -> Tensor:
        sizes.append(rows * keys)
        return mask(self, rows, keys)

    monkeypatch.setattr(tiles.Cut, "_mask", looked_at)
    with torch.no_grad():
        case.fast(*case.inputs)
    assert len(sizes) == 19 and sizes[1:] == sorted(sizes[1:], reverse=True)  # the first has 12 rows of 16


@pytest.mark.parametrize("kind", KINDS)
def test_above_the_budget_training_keeps_no_scores(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tiles, "KEPT_BYTES", 0)
    case = Case(kind, (1, 2, 300, 4, 4), torch.float32)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        case.fast(*case.inputs)
    assert max(saved) <= 2 * 310 * 4  # q, k, v, padded by a few keys


def test_without_gradients_no_probabilities_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(tiles.Cut, "is_kept", lambda self: bool(asked.append(True)) or True)
    case = Case("table", (1, 2, 9, 4, 4), torch.float32)
    with torch.no_grad():
        case.fast(*case.inputs)
    assert not asked
    case.fast(*case.inputs)
    assert asked


def test_a_small_mask_is_made_once_also_where_evaluation_is_the_first_to_ask() -> None:
    tiles._kept_mask.cache_clear()
    queries = torch.empty(1, 1, 300, 4)
    with torch.inference_mode():
        first = [tile.mask for tile in tiles.Cut(queries, window=40).tiles()]
    again = [tile.mask for tile in tiles.Cut(queries, window=40).tiles()]
    assert len(first) > 2 and all(one is other for one, other in zip(first, again, strict=True))
    assert not any(mask.is_inference() for mask in first)
    index = torch.arange(300)
    gap = index[128:256, None] - index[89:256]  # the second block sees 39 keys before its first row
    assert torch.equal(first[1] == 0, (gap >= 0) & (gap < 40))
    large = [list(tiles.Cut(torch.empty(1, 1, 4096, 4)).tiles())[-1].mask for _ in range(2)]
    assert large[0] is not large[1]


def test_on_an_accelerator_blocks_are_larger_and_more_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles.machine, "device_memory", lambda device: 24 * 2**30)

    def cut(*size: int, device: str = "meta", **given: Any) -> tiles.Cut:
        return tiles.Cut(torch.empty(size, dtype=torch.bfloat16, device=device), **given)

    assert len(cut(8, 12, 4096, 64, device="cpu").blocks()) == 32 and len(cut(8, 12, 4096, 64).blocks()) == 4
    assert cut(32, 12, 512, 64).is_kept() and not cut(32, 12, 512, 64, device="cpu").is_kept()
    assert not cut(128, 12, 512, 64).is_kept()


# -- the choice --------------------------------------------------------------------------------------------------------

SHAPE = Shape(d_model=24, n_heads=3, n_layers=2, train_length=32)
LENGTH = 45  # beyond train_length


def layer_inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, x = (tensor.requires_grad_() for tensor in schemes.layer_inputs(SHAPE, length))
    return q, k, v, x


@pytest.mark.parametrize("last", [None, 39])
@pytest.mark.parametrize(("name", "options"), [("xpos", {}), ("temperature", {"inner": "xpos"})], ids=str)
def test_logits_of_hidden_keys_that_are_no_numbers_hide_nothing_else(
    name: str, options: dict[str, Any], last: int | None
) -> None:
    encoding = schemes.build(name, options, SHAPE)
    q, k, v, x = layer_inputs(40)
    positions = torch.linspace(0, 128 * SHAPE.train_length // 2 - 1, 40).long()[None]  # as far apart as xpos is defined
    turned = encoding.at(0)[0].rotate(q, k, x, positions, 0)
    assert not (turned[0] @ turned[1].mT).isfinite().all()  # else there is nothing to see here
    out = attention(encoding, q, k, v, x, positions, 0, last=last)
    expected = attention_output(encoding, q, k, v, x, 0, positions)
    assert error(out, expected[:, :, -(last or 40) :]) < 1e-5
    assert all(found.isfinite().all() for found in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("window", [1, 10, 64])
@pytest.mark.parametrize("name", ["none", "alibi", "fox", "shaw"])
def test_a_window_hides_the_same_keys_on_every_path(name: str, window: int) -> None:
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = layer_inputs()
    positions = torch.arange(LENGTH)[None]
    fast = attention(encoding, q, k, v, x, positions, 0, window, consecutive=True)
    rows = schemes.by_definition(encoding, (q, k, v, x), positions, 0, window=window)
    assert error(fast, rows) < 1e-5
    with torch.no_grad():
        assert error(attention(encoding, q, k, v, x, positions, 0, window, consecutive=True), rows) < 1e-5


def test_on_cpus_the_fused_kernel_serves_where_nothing_is_added_and_it_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles_of = calls_of(monkeypatch, dispatch, "tiled_attention")

    def tiled(name: str, dtype: torch.dtype, train: bool, window: int | None = None, amx: bool = False) -> bool:
        monkeypatch.setattr(machine, "has_amx", lambda: amx)
        tiles_of.clear()
        q, k, v, x = (tensor.detach().to(dtype) for tensor in layer_inputs())
        positions = torch.arange(LENGTH)[None]
        with torch.set_grad_enabled(train):
            attention(schemes.build(name, {}, SHAPE), q, k, v, x, positions, 0, window, consecutive=True)
        return len(tiles_of) == 1

    for amx in (False, True):
        assert not tiled("none", torch.float32, train=False, amx=amx)
        assert tiled("none", torch.float32, train=False, window=4, amx=amx)
        assert tiled("none", torch.float32, train=True, amx=amx)
        assert tiled("none", torch.bfloat16, train=False, amx=amx) != amx
        assert tiled("none", torch.bfloat16, train=False, window=4, amx=amx)
        assert tiled("none", torch.bfloat16, train=True, amx=amx)
        assert tiled("alibi", torch.bfloat16, train=False, amx=amx)
        assert tiled("alibi", torch.float32, train=False, amx=amx)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "FUSED_GRADIENTS_FROM", LENGTH)
            assert tiled("none", torch.bfloat16, train=True, amx=amx) != amx
            assert tiled("alibi", torch.bfloat16, train=True, amx=amx)


def test_what_is_declared_as_data_is_fp32_under_autocast() -> None:
    encoding = schemes.build("fox", {}, SHAPE)
    q, k, _, x = layer_inputs()
    positions = torch.arange(LENGTH)[None]
    exact = declared(encoding, q, k, x, positions, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = declared(encoding, q, k, x, positions, 0)
    assert isinstance(exact, Decay) and isinstance(cast, Decay)
    assert cast.sums.dtype == torch.float32 and torch.equal(cast.sums, exact.sums)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("name", ["rope", "alibi", "fox", "shaw", "cope"])
def test_a_window_with_sinks_costs_what_it_sees_and_not_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, name: str, sinks: int
) -> None:
    length, window, last = 300, 16, 200
    encoding = schemes.build(name, {}, SHAPE)
    inputs, positions = schemes.layer_inputs(SHAPE, length), torch.arange(length)[None]
    widths = []
    plain = dispatch._row_block

    def looked_at(encoding: Encoding, rows: Rows, *others: Any) -> Tensor:
        widths.append(rows.k.shape[2])
        return plain(encoding, rows, *others)

    monkeypatch.setattr(dispatch, "_row_block", looked_at)
    out = attention(encoding, *inputs, positions, 0, window, sinks, last=last)
    expected = schemes.by_definition(encoding, inputs, positions, 0, window=window, sinks=sinks)[:, :, -last:]
    assert error(out, expected) < 1e-5
    all_of_it = sinks and name in ("cope", "shaw")  # whose hooks may sum over keys, hidden ones too
    assert max(widths) == (length if all_of_it else dispatch.MIN_ROWS + window - 1 + sinks)


# -- the reference, as it is offered to others -------------------------------------------------------------------------

EQUAL_TO_NONE = {"none", "drope", "cope"}  # docs/python.md says so: cope's table begins at zero
EQUAL_AT_LAYER_3 = EQUAL_TO_NONE | {"layered"}  # whose fourth layer has no encoding
AT_THE_INPUT = {
    "abacus", "binary", "cape", "index", "learned", "minmax", "coupling", "shape", "sine", "sinusoidal",
}  # and no more  # fmt: skip
CHOOSE_POSITIONS = {"bipe", "cape", "randomized", "shape"}


def offered(name: str) -> Encoding:
    vocabulary = tuple("0123456789abcdef .\n")
    return posbench.build_encoding(
        name, d_model=64, n_heads=4, n_layers=4, train_length=16, vocabulary=vocabulary
    ).requires_grad_(False)


@pytest.mark.parametrize("name", posbench.encodings.names())
def test_an_encoding_by_itself_changes_the_output_or_is_refused_or_known_to_be_none(name: str) -> None:
    torch.manual_seed(0)
    encoding, ids = offered(name), torch.arange(24).view(2, 12) % 19
    (q, k, v), layer_input = torch.randn(3, 2, 4, 12, 16), torch.randn(2, 12, 64)
    try:
        output = posbench.attention_output(encoding, q, k, v)
    except UserError as error:
        assert str(error).startswith(f"'{name}' ") and "pass " in str(error) and "\n" not in str(error)
    else:
        assert not encoding.hooks & {"embed", "positions"}
        changed = not torch.equal(output, posbench.attention_output(offered("none"), q, k, v))
        assert changed == (name not in EQUAL_TO_NONE)
    # What docs/python.md calls right for every encoding:
    positions = encoding.positions(ids, None)
    embeddings = torch.randn(2, 12, encoding.token_dim())
    x = encoding.embed(embeddings, positions, ids)
    assert x.shape == (2, 12, 64) and (name not in AT_THE_INPUT or not torch.equal(x, embeddings))
    for layer, equal in ((0, EQUAL_TO_NONE | AT_THE_INPUT), (3, EQUAL_AT_LAYER_3 | AT_THE_INPUT)):
        output = posbench.attention_output(encoding, q, k, v, x=layer_input, layer=layer, positions=positions)
        none = posbench.attention_output(offered("none"), q, k, v)
        assert output.shape == q.shape and torch.equal(output, none) == (name in equal)
    assert ("positions" in encoding.hooks) == (name in CHOOSE_POSITIONS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"q": (2, 12, 4, 16)},
            "q is (2, 12, 4, 16): expected (B, H, T, Dh), here (B, 4, T, 16), so q.transpose(1, 2)",
        ),
        ({"q": (2, 12, 64)}, "q is (2, 12, 64): expected (B, H, T, Dh), here (B, 4, T, 16)"),
        ({"k": (2, 12, 4, 16)}, "k is (2, 12, 4, 16): expected that of q, (2, 4, 12, 16), or with fewer heads"),
        ({"v": (2, 3, 12, 16)}, "v is (2, 3, 12, 16): expected that of q, (2, 4, 12, 16), or with fewer heads"),
        ({"x": (2, 12, 32)}, "x is (2, 12, 32): expected (B, T, D), here (2, 12, 64)"),
        ({"positions": (3,)}, "positions is (3,): expected (12,) or (2, 12)"),
        ({"layer": 4}, "layer is 4: expected 0 to 3 for this 'rope'"),
    ],
)
def test_shapes_that_do_not_fit_an_encoding_are_one_sentence(changed: dict[str, Any], message: str) -> None:
    shapes = {name: changed.get(name, (2, 4, 12, 16)) for name in "qkv"}
    shapes |= {name: shape for name, shape in changed.items() if name != "layer"}
    given = {name: torch.zeros(shape) for name, shape in shapes.items()} | {"layer": changed.get("layer", 0)}
    with pytest.raises(UserError) as error:
        posbench.attention_output(offered("rope"), **given)
    assert str(error.value) == message
