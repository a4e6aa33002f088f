"""The contract, for every scheme found, with randomised parameters (zero-initialised tables would hide errors)."""

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemes
import support
import torch
import yaml
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Encoding, Layer, Shape
from posbench.errors import UserError
from posbench.model import attention
from posbench.model.attention import make_layer
from posbench.model.standalone import attention_logits, attention_output

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
CASES = pytest.mark.parametrize("case", schemes.parameters())
NAMES = pytest.mark.parametrize("name", schemes.NAMES)
Case = tuple[str, dict[str, Any]]

# Whether attention is told that positions are 0 .. T-1. It then uses a scheme's cheaper form, otherwise its hooks.
COUNTED = (False, True)

# fp32 sums in another order; convolutions over logits (dape_v2) differ by up to 3.4e-5 on some CPUs
CLOSE = {"atol": 4e-5, "rtol": 2e-5}
# Beyond every default table and window (16 of shaw, 64 of cope, 128 of t5), a block of PaTH's 64 keys and a tile of 128
# rows; five times the training length.
LONG = 150


def tokens(encoding: Encoding, length: int, batch: int = 2, seed: int = 5) -> Tensor:
    return schemes.random(batch, length, encoding.token_dim(), seed=seed)


def below(encoding: Encoding) -> int:
    """The end of the tested positions: far beyond training if the scheme allows it."""
    return min(1024, encoding.max_length or 1024)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare output and gradients. Gradients are sums that cancel, so their tolerance follows their largest entry."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        tolerance = CLOSE if key == "output" else {"atol": 1e-4 * scale, "rtol": 1e-4}
        torch.testing.assert_close(actual[key], value, **tolerance, msg=lambda text, key=key: f"{key}: {text}")


@contextlib.contextmanager
def where(**setting: Any) -> Iterator[None]:
    """Name the setting in which a comparison failed; a test for each setting would take twice the time."""
    try:
        yield
    except Exception as error:
        error.add_note(str(setting))
        raise


# -- causality and length ----------------------------------------------------------------------------------------------


@CASES
def test_the_future_does_not_change_the_past(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    before = tokens(encoding, 20)
    after = before.clone()
    after[:, 12:] = tokens(encoding, 8, seed=6)
    first, second = (schemes.one_layer(encoding, x) for x in (before, after))
    torch.testing.assert_close(first[:, :, :12], second[:, :, :12], **CLOSE)
    assert not torch.allclose(first[:, :, 12:], second[:, :, 12:])


@CASES
def test_a_longer_input_leaves_earlier_outputs_unless_declared(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    long = tokens(encoding, min(LONG, encoding.max_length or LONG))
    for counted in COUNTED:
        short, whole = (schemes.one_layer(encoding, x, consecutive=counted)[:, :, :17] for x in (long[:, :17], long))
        with where(counted=counted):
            if encoding.length_dependent:
                assert not torch.allclose(short, whole, **CLOSE)
            else:
                torch.testing.assert_close(short, whole, **CLOSE)


@pytest.mark.sample(3)
@CASES
def test_beyond_its_end_a_scheme_refuses_and_otherwise_stays_finite(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    longest = tokens(encoding, encoding.max_length or LONG)
    for counted in COUNTED:
        assert schemes.one_layer(encoding, longest, consecutive=counted).isfinite().all(), f"{counted=}"
    if encoding.max_length is None:
        return
    length = encoding.max_length + 1
    q, k, v, x = schemes.layer_inputs(SHAPE, length)
    both = rf"(?=.*\b{length}\b)(?=.*\b{encoding.max_length}\b)"
    for counted in COUNTED:
        with where(counted=counted), pytest.raises(UserError, match=both):
            schemes.one_layer(encoding, tokens(encoding, length), consecutive=counted)
    with pytest.raises(UserError, match=both):
        attention_output(encoding, q, k, v, x)


# -- every way to compute it is the same -------------------------------------------------------------------------------

SETTINGS: list[tuple[int, str, bool, dict[str, Any]]] = [  # length, positions, whether they are counted, limits
    *((19, "gaps", False, {"window": window}) for window in (None, 1, 6)),
    *((19, "consecutive", counted, {"window": window}) for window in (None, 1, 6) for counted in COUNTED),
    *((19, "consecutive", counted, {"last": 4}) for counted in COUNTED),
    *((19, "consecutive", counted, {"window": 6, "sinks": 2}) for counted in COUNTED),
    *((19, "consecutive", counted, {"window": 6, "sinks": 2, "last": 4}) for counted in COUNTED),
    (LONG, "gaps", False, {}),
    (LONG, "consecutive", True, {}),
    (LONG, "consecutive", True, {"window": 70}),
]


@pytest.mark.sample(3)
@CASES
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_the_chosen_attention_equals_the_definition(case: Case, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = schemes.build(*case, SHAPE)
    if again:
        monkeypatch.setattr(attention, "KEPT_BYTES", 0)
        monkeypatch.setattr(attention, "AT_ONCE", 1)  # a sequence at a time, as few rows as may be
    for length, kind, counted, limits in [(LONG, "gaps", False, {})] if again else SETTINGS:
        length = min(length, encoding.max_length or length)
        last, whole = limits.get("last", length), {name: limits[name] for name in limits if name != "last"}
        positions = schemes.positions_of(kind, 2, length, below(encoding))
        chosen = functools.partial(_chosen, encoding, positions, limits, counted)
        defined = functools.partial(_defined, encoding, positions, whole, last)
        inputs = schemes.layer_inputs(SHAPE, length)
        with where(length=length, kind=kind, counted=counted, **limits):
            assert_same(*(schemes.with_gradients(encoding, inputs, compute) for compute in (chosen, defined)))


def _chosen(encoding: Encoding, positions: Tensor, limits: Any, counted: bool, *inputs: Tensor) -> Tensor:
    return schemes.layer_attention(encoding, *inputs, positions, 1, consecutive=counted, **limits)


def _defined(encoding: Encoding, positions: Tensor, limits: Any, last: int, *inputs: Tensor) -> Tensor:
    return schemes.by_definition(encoding, inputs, positions, 1, **limits)[:, :, -last:]


@pytest.mark.sample(3)
@CASES
def test_blocks_and_last_rows_of_the_definition_are_those_of_the_whole(case: Case) -> None:
    encoding, inputs = schemes.build(*case, SHAPE), schemes.layer_inputs(SHAPE, 19)
    for kind, which in itertools.product(("consecutive", "gaps"), ({}, {"causal": False}, {"window": 6})):
        positions = schemes.positions_of(kind, 2, 19, below(encoding))

        def computed(block: int | None, positions: Tensor = positions, which: Any = which) -> dict[str, Tensor]:
            def compute(*inputs: Tensor) -> Tensor:
                return schemes.by_definition(encoding, inputs, positions, 1, block, **which)

            return schemes.with_gradients(encoding, inputs, compute)

        with where(kind=kind, **which):
            assert_same(computed(block=5), computed(block=None))
        if "window" in which:
            continue
        q, k, v, x = inputs
        for form, qkv in ((attention_output, (q, k, v)), (attention_logits, (q, k))):
            whole, last = (form(encoding, *qkv, x, 1, positions, last=rows, **which) for rows in (None, 3))
            torch.testing.assert_close(last, whole[:, :, -3:])


@pytest.mark.slow
@NAMES
def test_torch_compile_traces_it_as_one_graph(name: str) -> None:
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 16)
    embeddings, positions = tokens(encoding, 16), torch.arange(16)[None]

    def step(embeddings: Tensor, q: Tensor) -> Tensor:
        embedded = encoding.embed(embeddings, positions)
        return schemes.layer_attention(encoding, q, k, v, x, positions, 1, consecutive=True) + embedded.sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=not schemes.declared(name, "GRAPH_BREAKS", ""))
    torch.testing.assert_close(compiled(embeddings, q), step(embeddings, q), **CLOSE)


# -- positions ---------------------------------------------------------------------------------------------------------


@CASES
def test_fractional_positions_are_used_refused_or_never_read(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, 9)

    def every_layer(positions: Tensor) -> Tensor:
        return torch.stack([schemes.one_layer(encoding, x, positions, n) for n in range(SHAPE.n_layers)])

    between = torch.arange(9)[None] + torch.tensor([0.0, 0.3, 0.6]).repeat(3)  # so that distances are fractions too
    reads_positions = schemes.declared(case[0], "reads_positions", lambda options: True)
    if not reads_positions(schemes.completed(*case, SHAPE)):
        assert torch.equal(every_layer(between), every_layer(torch.arange(9)[None]))
        return
    try:
        out = every_layer(between)
    except UserError:
        assert encoding.whole_positions
        return
    assert out.isfinite().all() and not encoding.whole_positions
    for whole in (between.floor(), between.round()):
        assert not torch.allclose(out, every_layer(whole), **CLOSE)


# -- number formats ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@CASES
def test_bf16_autocast_keeps_the_dtype_and_stays_close(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    *qkv, x = schemes.layer_inputs(SHAPE, 19)
    positions = torch.arange(19)[None]
    for counted, window in ((False, None), (True, None), (True, 6)):
        exact = schemes.by_definition(encoding, (*qkv, x), positions, 1, window=window).detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = (tensor.bfloat16() for tensor in qkv)
            out = schemes.layer_attention(encoding, q, k, v, x, positions, 1, window, consecutive=counted)
            embedded = encoding.embed(tokens(encoding, 19).bfloat16(), positions)
        with where(counted=counted, window=window):
            assert out.dtype == torch.bfloat16 and embedded.dtype == torch.bfloat16
            # bf16 has 8 significant bits: 2^-8 per rounding, several of them, on logits of size up to 10
            assert float((out.float() - exact).pow(2).mean().sqrt()) < 0.03 * float(exact.pow(2).mean().sqrt())


@CASES
def test_angles_biases_and_codes_are_fp32_under_autocast(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 19)
    # far out, neighbouring positions are one number in bf16
    positions = torch.arange(19)[None] + (0 if encoding.max_length else 5000)

    def everything() -> list[Tensor]:
        embedded = encoding.embed(tokens(encoding, 19), positions)
        logits = attention_logits(encoding, q, k, x, 1, positions)
        return [embedded, logits, attention_output(encoding, q, k, v, x, 1, positions)]

    plain = everything()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = everything()
    for expected, actual in zip(plain, cast, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)  # bf16 would differ by 4e-3


# -- parameters and checkpoints ----------------------------------------------------------------------------------------


@CASES
def test_a_checkpoint_holds_the_learned_parameters_and_nothing_else(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, 19)
    before = schemes.one_layer(encoding, x)
    saved = {key: value.clone() for key, value in encoding.state_dict().items()}
    assert saved.keys() == dict(encoding.named_parameters()).keys()
    other = schemes.build(*case, SHAPE, seed=1)
    other.load_state_dict(saved)
    torch.testing.assert_close(schemes.one_layer(other, x), before, atol=0, rtol=0)


@CASES
def test_parameter_count_is_the_published_one(case: Case) -> None:
    name, options = case
    expected = schemes.declared(name, "parameter_count", lambda shape, options: 0)
    for shape in (SHAPE, Shape(d_model=48, n_heads=6, n_layers=3, train_length=40)):
        encoding = schemes.untrained(name, options, shape)
        count = sum(parameter.numel() for parameter in encoding.parameters())
        published = expected(shape, schemes.completed(name, options, shape))
        assert count == published, f"parameter_count(shape, options) of tests/oracles/{name}.py gives {published}"


@CASES
def test_the_gradient_reaches_every_parameter(case: Case) -> None:
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, SHAPE.train_length)
    outs = [schemes.one_layer(encoding, x, layer=layer) for layer in range(SHAPE.n_layers)]
    total = sum((out * schemes.random(*out.shape, seed=4)).sum() for out in outs)
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()
    for key, parameter in encoding.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        reached = parameter.grad != 0
        assert reached.any() if schemes.declared(case[0], "PARTLY_UNUSED", "") else reached.all(), key


@pytest.mark.sample(3)
@CASES
def test_the_untrained_scheme_gets_a_finite_gradient(case: Case) -> None:
    for counted in COUNTED:
        encoding = schemes.untrained(*case, SHAPE)
        x = tokens(encoding, 19)
        outs = [schemes.one_layer(encoding, x, layer=layer, consecutive=counted) for layer in range(SHAPE.n_layers)]
        assert all(out.isfinite().all() for out in outs), f"{counted=}"
        if any(True for _ in encoding.parameters()):
            sum(out.sum() for out in outs).backward()
        for key, parameter in encoding.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), f"{key}, {counted=}"


@pytest.mark.sample(3)
@CASES
def test_the_same_seed_gives_the_same_scheme_and_output(case: Case) -> None:
    outputs = []
    for _ in range(2):
        torch.manual_seed(7)
        encoding = schemes.untrained(*case, SHAPE)
        outputs.append(schemes.one_layer(encoding, tokens(encoding, 19)))
        schemes.one_layer(encoding, tokens(encoding, 32))  # leaves nothing behind
        outputs.append(schemes.one_layer(encoding, tokens(encoding, 19)))
    assert all(torch.equal(outputs[0], out) for out in outputs)


@pytest.mark.sample(3)
@CASES
def test_one_head_and_one_token_are_no_special_case(case: Case) -> None:
    for heads, length in ((1, 1), (1, 5), (4, 1), (2, 2)):
        with where(heads=heads, length=length):
            encoding = schemes.build(*case, Shape(8 * heads, heads, 2, 32))
            x = tokens(encoding, length, batch=1)
            out, counted = (schemes.one_layer(encoding, x, consecutive=consecutive) for consecutive in COUNTED)
            assert out.shape == (1, heads, length, 8) and out.isfinite().all()
            torch.testing.assert_close(counted, out, **CLOSE)


# -- what is written beside the code -----------------------------------------------------------------------------------


@NAMES
def test_a_scheme_has_a_yaml_of_its_defaults_and_a_docstring_with_source_behaviour_and_check(name: str) -> None:
    text = (Path(__file__).parents[1] / "configs" / "encoding" / f"{name}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"name": name, **encodings.options_of(name)}
    document = inspect.cleandoc(encodings.documentation(encodings.load(name)))
    for start in ("Source: ", "Beyond training length: ", "Checked against: "):
        assert re.search(rf"^{start}\S", document, re.MULTILINE), f"no line '{start}'"


def test_every_yaml_is_a_scheme() -> None:
    folder = Path(__file__).parents[1] / "configs" / "encoding"
    assert sorted(path.stem for path in folder.glob("*.yaml")) == schemes.NAMES


# -- the registry and its sentences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("rop", {}, "unknown encoding 'rop': did you mean 'rope'? ('posbench list' shows all)"),
        ("rope", {"base": -1}, "encoding.base is -1 for 'rope': "),
        ("alibi", {"base": 1}, "'alibi' has no option 'base': it accepts slopes; did you mean to choose 'rope'?"),
        ("alibi", {"slopes": [1.0]}, "encoding.slopes is [1.0] for 'alibi': expected 4 "),
        ("shaw", {"max_distance": 0}, "encoding.max_distance is 0 for 'shaw': "),
        ("sinusoidal", {"scale": -2}, "encoding.scale is -2 for 'sinusoidal': "),
    ],
)
def test_a_wrong_choice_is_answered_in_one_line(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        encodings.build(name, SHAPE, options)
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_shapes_that_do_not_divide_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"head_dim is 33 \(d_model 99 / n_heads 3\): .* nearest d_model: 96 or 102"):
        encodings.build("rope", Shape(99, 3, 1, 8))
    assert Shape(30, 4, 2, 32, head_dim=16).head_dim == 16


def test_a_scheme_that_reads_the_layer_input_asks_for_it() -> None:
    encoding = encodings.build("fox", SHAPE)
    q, k, _, _ = schemes.layer_inputs(SHAPE, 4)
    with pytest.raises(UserError, match="pass x"):
        encoding.prepare(q, k, make_layer(encoding, torch.arange(4)[None]))


# -- an encoding of one's own that is not what it was meant to be ------------------------------------------------------


class Misspelt(Encoding):
    def distance_bais(self, distance: Tensor, layer: Layer) -> Tensor:
        return -distance.float()


class Slopes(Encoding):
    """An encoding of one's own with a mistake in one place."""

    def __init__(self, shape: Shape, mistake: str = "") -> None:
        if mistake != "super":
            super().__init__(shape)
        self.mistake = mistake
        if mistake == "tensor":
            self.slopes = torch.ones(4, requires_grad=True)
        elif mistake == "list":
            self.slopes = [torch.nn.Parameter(torch.ones(1))]
        elif mistake != "super":
            self.slopes = torch.nn.Parameter(torch.ones(4))
        if mistake == "constructor":
            self.slopes.no_such_method()

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return {"pair": q, "rotate": (q, k[:, :, :18])}.get(self.mistake, (q, k))  # type: ignore[return-value]

    def distance_bias(self, distance: Tensor, layer: Layer) -> Tensor:
        return torch.zeros(4, *distance.shape)[..., 2 * (self.mistake == "distance_bias") :]

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        if self.mistake == "broadcast":
            return self.slopes * layer.distance
        return -layer.distance[..., :-1] if self.mistake == "bias" else None

    def map_values(self, v: Tensor, layer: Layer) -> Tensor:
        return v[:, :1] if self.mistake == "map_values" else v


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        ("", ""),
        ("super", r"'slopes', __init__: test_encodings.py, line \d+: .*expected super\(\).__init__\(shape\) first"),
        ("tensor", r"'slopes', __init__: .*: slopes is neither trained nor moved .*: expected nn.Parameter, a buffer"),
        ("list", r"'slopes', __init__: .*: slopes is neither trained nor moved"),
        ("constructor", r"__init__: test_encodings.py, line {no_such}: AttributeError: .*no_such_method"),
        ("broadcast", r"'slopes', bias: test_encodings.py, line {rows}: RuntimeError: The size of tensor"),
        ("bias", r"bias: .*: gave \[\(1, 20, 19\)\], expected \(2, 4, 20, 20\)"),
        ("map_values", r"map_values: .*: gave \[\(2, 1, 20, 8\)\], expected \(2, 4, 20, 8\)"),
        ("distance_bias", r"distance_bias: .*: gave \[\(4, 1, 20, 18\)\], expected \(4, 1, 20, 20\)"),
        ("rotate", r"rotate: .*: gave .*\(2, 4, 18, 8\)\], expected two of \(2, 4, 20, 8\)"),
        ("pair", r"rotate: .*: gave \[\(2, 4, 20, 8\)\], expected two of \(2, 4, 20, 8\)"),
    ],
)
def test_a_mistake_in_an_encoding_of_ones_own_is_one_line(
    mistake: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encodings, "_registered", {})
    encodings.register(Slopes)
    lines = {text.strip(): at for at, text in enumerate(Path(__file__).read_text().splitlines(), start=1)}
    where = {"no_such": lines["self.slopes.no_such_method()"], "rows": lines["return self.slopes * layer.distance"]}
    with contextlib.ExitStack() as stack:
        if mistake:
            pattern = re.sub(r"\{(no_such|rows)\}", lambda found: str(where[found[1]]), sentence)
            stack.enter_context(pytest.raises(UserError, match=pattern))
        encoding = encodings.build("slopes", SHAPE, {"mistake": mistake})
        output = attention_output(encoding, *schemes.layer_inputs(SHAPE, 20))
        assert encoding.remarks() == [] and output.shape == (2, 4, 20, 8)


def test_an_encoding_without_a_hook_is_remarked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "_registered", {})
    (remark,) = encodings.build(encodings.register(Misspelt).name, SHAPE).remarks()
    assert remark == "'misspelt' overrides no hook, so it gives no position: is one misspelt?"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("import no_such_module\n", "broken.py, line 1: ModuleNotFoundError: No module named 'no_such_module'"),
        ("\nclass Broken(\n", r"broken.py, line 2: SyntaxError: '\(' was never closed"),
    ],
)
def test_an_encoding_that_cannot_be_imported_says_where(code: str, sentence: str, tmp_path: Path) -> None:
    with support.encoding_installed(tmp_path, "broken", code), pytest.raises(UserError, match=sentence):
        encodings.load("broken")
