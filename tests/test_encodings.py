"""The contract, for every scheme found, with randomised parameters (zero-initialised
tables would hide errors).
"""

import inspect
import re
from pathlib import Path

import pytest
import schemes
import support
import torch
import yaml
from torch import Tensor
from torch.testing import assert_close

from posbench import encodings
from posbench.encodings import rope
from posbench.encodings.base import Encoding, Shape
from posbench.errors import UserError
from posbench.model import attention
from posbench.model.standalone import attention_output

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
WIDER = Shape(d_model=48, n_heads=6, n_layers=3, train_length=40)
CASES = pytest.mark.parametrize("case", schemes.parameters())
CONFIGS = Path(__file__).parents[1] / "configs" / "encoding"

# Whether attention is told that positions are 0 .. T-1. It then uses a scheme's cheaper
# form, otherwise its hooks.
COUNTED = pytest.mark.parametrize("counted", [False, True], ids=["given", "counted"])

# fp32 sums in another order; convolutions over logits (dape_v2) differ by up to 3.4e-5
# on some CPUs
CLOSE = {"atol": 4e-5, "rtol": 2e-5}
# Beyond every default table and window (16 of shaw, 64 of cope, 128 of t5), a block of
# PaTH's keys and of rows
LONG = 150


def tokens(encoding: Encoding, length: int, batch: int = 2, seed: int = 5) -> Tensor:
    return schemes.random(batch, length, encoding.token_dim(), seed=seed)


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Compare output and gradients. Gradients are sums that cancel, so their tolerance
    follows their largest entry.
    """
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = CLOSE
        if key != "output":
            largest = float(value.abs().max())
            tolerance = {"atol": 1e-4 * max(1.0, largest), "rtol": 1e-4}
        assert_close(actual[key], value, **tolerance, msg=key)


@pytest.mark.sample(3)
@CASES
@torch.no_grad()
def test_the_future_does_not_change_the_past(case):
    encoding = schemes.build(*case, SHAPE)
    past = tokens(encoding, 12)
    future = tokens(encoding, 8, seed=6)
    other_future = tokens(encoding, 8, seed=7)

    one = schemes.one_layer(encoding, torch.cat([past, future], dim=1))
    other = schemes.one_layer(encoding, torch.cat([past, other_future], dim=1))

    assert_close(other[:, :, :12], one[:, :, :12], **CLOSE)
    assert not torch.allclose(other[:, :, 12:], one[:, :, 12:])


@pytest.mark.sample(4)
@CASES
@torch.no_grad()
def test_a_longer_input_changes_its_beginning_only_where_that_is_declared(case):
    encoding = schemes.build(*case, SHAPE)
    length = min(40, encoding.max_length or 40)
    x = tokens(encoding, length)

    short = schemes.one_layer(encoding, x[:, :20], consecutive=True)
    whole = schemes.one_layer(encoding, x, consecutive=True)

    is_same = torch.allclose(short, whole[:, :, :20], **CLOSE)
    assert is_same != encoding.length_dependent


@pytest.mark.sample(3)
@CASES
@COUNTED
@torch.no_grad()
def test_attention_is_finite_as_far_as_a_scheme_is_defined(case, counted):
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, encoding.max_length or LONG)

    out = schemes.one_layer(encoding, x, consecutive=counted)

    assert out.isfinite().all()


@pytest.mark.sample(3)
@CASES
@COUNTED
@torch.no_grad()
def test_beyond_its_end_a_scheme_refuses(case, counted):
    encoding = schemes.build(*case, SHAPE)
    longest = encoding.max_length
    if longest is None:
        return
    x = tokens(encoding, longest + 1)
    both_lengths = rf"(?=.*\b{longest + 1}\b)(?=.*\b{longest}\b)"
    with pytest.raises(UserError, match=both_lengths):
        schemes.one_layer(encoding, x, consecutive=counted)


# length, positions, whether they are counted, limits
SETTINGS = [
    (19, "gaps", False, {}),
    (19, "gaps", False, {"window": 6}),
    (19, "consecutive", False, {"window": 1}),
    (19, "consecutive", True, {"last": 4}),
    (19, "consecutive", True, {"window": 6, "sinks": 2}),
    (19, "consecutive", False, {"window": 6, "sinks": 2, "last": 4}),
    (LONG, "consecutive", True, {}),
    (LONG, "consecutive", True, {"window": 70}),
]


def assert_is_the_definition(case, length, kind, counted, limits):
    """Compare the attention that posbench chooses with the definition by rows."""
    encoding = schemes.build(*case, SHAPE)
    length = min(length, encoding.max_length or length)
    below = min(1024, encoding.max_length or 1024)
    positions = schemes.positions_of(kind, 2, length, below)
    inputs = schemes.layer_inputs(SHAPE, length)

    def chosen(*inputs):
        given = (*inputs, positions, 1, counted)
        return schemes.layer_attention(encoding, *given, **limits)

    def defined(*inputs):
        return schemes.by_definition(encoding, inputs, positions, 1, **limits)

    actual = schemes.with_gradients(encoding, inputs, chosen)
    expected = schemes.with_gradients(encoding, inputs, defined)
    assert_same(actual, expected)


@pytest.mark.sample(20)
@CASES
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_chosen_attention_equals_the_definition(case, setting):
    assert_is_the_definition(case, *setting)


@pytest.mark.sample(9)
@CASES
def test_attention_computed_again_equals_the_definition(case, monkeypatch):
    monkeypatch.setattr(attention, "KEPT_BYTES", 0)
    monkeypatch.setattr(attention, "AT_ONCE", 1)  # a sequence at a time, few rows
    assert_is_the_definition(case, 70, "gaps", False, {})


def compiled_names():
    """Return every scheme, or one of each file."""
    if support.EVERY:
        return schemes.NAMES
    of_file = {}
    for name in schemes.NAMES:
        of_file[encodings.load(name).__module__] = name
    return of_file.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", compiled_names())
def test_torch_compile_traces_it_as_one_graph(name):
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 16)
    embeddings = tokens(encoding, 16)
    positions = torch.arange(16)[None]

    def step(embeddings, q):
        embedded = encoding.embed(embeddings, positions)
        qkvx = (q, k, v, x)
        out = schemes.layer_attention(encoding, *qkvx, positions, 1, consecutive=True)
        return out + embedded.sum()

    torch._dynamo.reset()
    one_graph = not schemes.declared(name, "GRAPH_BREAKS", "")
    compiled = torch.compile(step, backend="aot_eager", fullgraph=one_graph)
    out = compiled(embeddings, q)
    assert_close(out, step(embeddings, q), **CLOSE)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_compiled_turns_are_the_uncompiled_ones_to_the_last_bit(layout, monkeypatch):
    angles = schemes.random(1, 20, 8, seed=0).double()
    tables = rope.cos_sin(angles, torch.device("cpu"))
    x = schemes.random(2, 3, 20, 16, seed=1).requires_grad_()
    weights = schemes.random(2, 3, 20, 16, seed=2)

    plain = rope.rotate_pairs(x, tables, layout)
    (gradient,) = torch.autograd.grad(plain, x, weights)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled = rope.rotate_pairs(x, tables, layout)
    (gradient_of_compiled,) = torch.autograd.grad(compiled, x, weights)

    assert compiled.equal(plain)
    assert gradient_of_compiled.equal(gradient)


@pytest.mark.parametrize("start", [0, 1])
def test_pairs_turn_wherever_they_lie_in_memory(start):
    angles = schemes.random(1, 20, 8, seed=0).double()
    tables = rope.cos_sin(angles, torch.device("cpu"))
    wide = schemes.random(2, 20, 3, 19, seed=1)  # rows of an odd width
    x = wide[..., start : start + 16].transpose(1, 2)

    turned = rope.rotate_pairs(x, tables, "interleaved")

    assert turned.equal(rope.rotate_pairs(x.contiguous(), tables, "interleaved"))


@pytest.mark.sample(8)
@CASES
@torch.no_grad()
def test_fractional_positions_are_used_refused_or_never_read(case):
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, 9)
    whole = torch.arange(9)[None]
    # so that distances are fractions too
    between = whole + torch.tensor([0.0, 0.3, 0.6]).repeat(3)

    def every_layer(positions):
        outs = []
        for layer in range(SHAPE.n_layers):
            out = schemes.one_layer(encoding, x, positions, layer)
            outs.append(out)
        return torch.stack(outs)

    reads_positions = schemes.declared(case[0], "reads_positions", lambda options: True)
    if not reads_positions(schemes.completed(*case, SHAPE)):
        assert torch.equal(every_layer(between), every_layer(whole))
    elif encoding.whole_positions:
        with pytest.raises(UserError):
            every_layer(between)
    else:
        out = every_layer(between)
        rounded_down = every_layer(between.floor())
        rounded = every_layer(between.round())
        assert out.isfinite().all()
        assert not torch.allclose(out, rounded_down, **CLOSE)
        assert not torch.allclose(out, rounded, **CLOSE)


def far_positions(encoding: Encoding) -> Tensor:
    """Return positions of 19 tokens; far out neighbours are one number in bf16."""
    start = 0 if encoding.max_length else 5000
    return torch.arange(19)[None] + start


@pytest.mark.sample(9)
@CASES
@torch.no_grad()
def test_angles_biases_and_codes_are_fp32_under_autocast(case):
    encoding = schemes.build(*case, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 19)
    embeddings = tokens(encoding, 19)
    positions = far_positions(encoding)

    embedded = encoding.embed(embeddings, positions)
    output = attention_output(encoding, q, k, v, x, 1, positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_embedded = encoding.embed(embeddings, positions)
        cast_output = attention_output(encoding, q, k, v, x, 1, positions)

    # bf16 would differ by 4e-3
    assert_close(cast_embedded, embedded, atol=1e-5, rtol=1e-5)
    assert_close(cast_output, output, atol=1e-5, rtol=1e-5)


@pytest.mark.sample(9)
@CASES
@torch.no_grad()
def test_outputs_under_autocast_have_the_dtype_of_inputs(case):
    encoding = schemes.build(*case, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 19)
    halves = [each.bfloat16() for each in (q, k, v)]
    embeddings = tokens(encoding, 19).bfloat16()
    positions = far_positions(encoding)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = schemes.layer_attention(encoding, *halves, x, positions, 1)
        embedded = encoding.embed(embeddings, positions)

    assert output.dtype == torch.bfloat16
    assert embedded.dtype == torch.bfloat16


@pytest.mark.sample(8)
@CASES
@torch.no_grad()
def test_a_seed_makes_an_encoding_anew_and_use_leaves_nothing_behind(case):
    torch.manual_seed(7)
    encoding = schemes.untrained(*case, SHAPE)
    torch.manual_seed(7)
    again = schemes.untrained(*case, SHAPE)
    x = tokens(encoding, 19)
    longer = tokens(encoding, 32)

    schemes.one_layer(again, longer)

    out = schemes.one_layer(again, x)
    assert torch.equal(out, schemes.one_layer(encoding, x))


@pytest.mark.sample(8)
@CASES
@torch.no_grad()
def test_a_checkpoint_holds_the_learned_parameters_and_nothing_else(case):
    encoding = schemes.untrained(*case, SHAPE)
    other = schemes.build(*case, SHAPE, seed=1)
    x = tokens(encoding, 19)

    saved = encoding.state_dict()
    other.load_state_dict(saved)

    learned = dict(encoding.named_parameters())
    assert saved.keys() == learned.keys()
    out = schemes.one_layer(other, x)
    assert torch.equal(out, schemes.one_layer(encoding, x))


@CASES
@pytest.mark.parametrize("shape", [SHAPE, WIDER], ids=["small", "wider"])
def test_a_scheme_has_as_many_parameters_as_its_oracle_says(case, shape):
    encoding = schemes.untrained(*case, shape)
    options = schemes.completed(*case, shape)
    published = schemes.declared(case[0], "parameter_count", lambda shape, options: 0)
    count = sum(parameter.numel() for parameter in encoding.parameters())
    assert count == published(shape, options)


def gradients_of(encoding: Encoding, counted: bool) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter from the outputs of all layers."""
    x = tokens(encoding, SHAPE.train_length)
    total = torch.zeros((), requires_grad=True)
    for layer in range(SHAPE.n_layers):
        out = schemes.one_layer(encoding, x, layer=layer, consecutive=counted)
        assert out.isfinite().all()
        weights = schemes.random(*out.shape, seed=4)
        total = total + (out * weights).sum()
    total.backward()
    return {name: each.grad for name, each in encoding.named_parameters()}


@pytest.mark.sample(8)
@CASES
def test_a_finite_gradient_reaches_every_trained_parameter(case):
    encoding = schemes.build(*case, SHAPE)
    gradients = gradients_of(encoding, counted=False)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name
        if schemes.declared(case[0], "PARTLY_UNUSED", ""):
            assert gradient.any(), name
        else:
            assert gradient.all(), name


@pytest.mark.sample(8)
@CASES
def test_a_finite_gradient_reaches_every_parameter_at_the_start(case):
    encoding = schemes.untrained(*case, SHAPE)
    gradients = gradients_of(encoding, counted=True)
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.isfinite().all(), name


def test_every_scheme_has_a_yaml():
    names = [path.stem for path in CONFIGS.glob("*.yaml")]
    assert sorted(names) == schemes.NAMES


@pytest.mark.parametrize("name", schemes.NAMES)
def test_a_yaml_repeats_the_defaults_of_its_scheme(name):
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    options = yaml.safe_load(text)
    assert options.pop("name") == name
    assert options == encodings.options_of(name)


@pytest.mark.parametrize(
    "start", ["Source", "Beyond training length", "Checked against"]
)
@pytest.mark.parametrize("name", schemes.NAMES)
def test_a_docstring_says_source_behaviour_and_check(name, start):
    scheme = encodings.load(name)
    document = inspect.cleandoc(encodings.documentation(scheme))
    assert re.search(rf"^{start}: \S", document, re.MULTILINE)


class Slopes(Encoding):
    """An encoding of one's own with a mistake in one place."""

    def __init__(self, shape: Shape, mistake: str = ""):
        if mistake != "super":
            super().__init__(shape)
        self.mistake = mistake
        self.slopes = 1.0
        if mistake == "list":
            slope = torch.ones(1)
            self.slopes = [torch.nn.Parameter(slope)]
        if mistake == "constructor":
            self.slopes.no_such_method()

    def rotate(self, q, k, layer):
        if self.mistake == "rotate":
            return q, k[:, :, 2:]
        return q, k

    def bias(self, q, k, layer):
        if self.mistake == "broadcast":
            return torch.ones(4) * layer.distance
        if self.mistake == "bias":
            return -layer.distance[..., :-1]
        return None


HERE = r"test_encodings.py, line \d+"
MISTAKES = {
    "super": rf"'slopes', __init__: {HERE}: expected super\(\).__init__\(shape\) first",
    "list": r"'slopes', __init__: .*, line \d+: slopes is neither trained nor moved .*: expected nn.Parameter",
    "constructor": rf"__init__: {HERE}: AttributeError: .*no_such_method",
    "broadcast": rf"'slopes', bias: {HERE}: RuntimeError: The size of tensor",
    "bias": r"bias: .*: gave \[\(1, 20, 19\)\], expected \(2, 4, 20, 20\)",
    "rotate": r"rotate: .*: gave .*\(2, 4, 18, 8\)\], expected two of \(2, 4, 20, 8\)",
}


@pytest.fixture
def slopes():
    encodings.register(Slopes)


def output_of_slopes(mistake: str) -> Tensor:
    encoding = encodings.build("slopes", SHAPE, {"mistake": mistake})
    inputs = schemes.layer_inputs(SHAPE, 20)
    return attention_output(encoding, *inputs)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_encoding_of_ones_own_is_one_line(slopes, mistake):
    with pytest.raises(UserError, match=MISTAKES[mistake]):
        output_of_slopes(mistake)


def test_an_encoding_of_ones_own_without_a_mistake_works(slopes):
    output = output_of_slopes("")
    assert output.shape == (2, 4, 20, 8)


def test_an_encoding_without_a_hook_is_refused():
    class Misspelt(Encoding):
        def rotates(self, q, k, layer):
            return q, k

    encodings.register(Misspelt)
    with pytest.raises(UserError, match="'misspelt' overrides no hook"):
        encodings.build("misspelt", SHAPE)


def test_a_scheme_whose_file_has_no_class_of_its_name_is_refused(monkeypatch):
    monkeypatch.setitem(encodings.MODULE_OF, "other", "base")
    with pytest.raises(UserError, match=r"base\.py: expected a class other"):
        encodings.load("other")
