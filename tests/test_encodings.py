"""The contract, for every scheme found, with randomised parameters (zero-initialised
tables would hide errors).
"""

import contextlib
import functools
import inspect
import re
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
from posbench.model.standalone import attention_output

SHAPE = Shape(d_model=32, n_heads=4, n_layers=2, train_length=32)
CASES = pytest.mark.parametrize("case", schemes.parameters())
CONFIGS = Path(__file__).parents[1] / "configs" / "encoding"
Case = tuple[str, dict[str, Any]]

# Whether attention is told that positions are 0 .. T-1. It then uses a scheme's cheaper
# form, otherwise its hooks.
COUNTED = (False, True)

# fp32 sums in another order; convolutions over logits (dape_v2) differ by up to 3.4e-5
# on some CPUs
CLOSE = {"atol": 4e-5, "rtol": 2e-5}
# Beyond every default table and window (16 of shaw, 64 of cope, 128 of t5), a block of
# PaTH's keys and of rows
LONG = 150


def tokens(encoding: Encoding, length: int, batch: int = 2, seed: int = 5) -> Tensor:
    return schemes.random(batch, length, encoding.token_dim(), seed=seed)


def assert_same(
    actual: dict[str, Tensor], expected: dict[str, Tensor], setting: str
) -> None:
    """Compare output and gradients. Gradients are sums that cancel, so their tolerance
    follows their largest entry.
    """
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        tolerance = (
            CLOSE
            if key == "output"
            else {"atol": 1e-4 * max(1.0, float(value.abs().max())), "rtol": 1e-4}
        )
        message = f"{setting}, {key}"
        torch.testing.assert_close(
            actual[key], value, **tolerance, msg=lambda text, m=message: f"{m}: {text}"
        )


@CASES
@torch.no_grad()
def test_the_future_does_not_change_the_past_nor_does_a_longer_input_unless_declared(
    case,
):
    encoding = schemes.build(*case, SHAPE)
    long = tokens(encoding, min(40, encoding.max_length or 40))
    changed = torch.cat((long[:, :12], tokens(encoding, 8, seed=6)), dim=1)
    short, whole = (
        schemes.one_layer(encoding, x, consecutive=True) for x in (long[:, :20], long)
    )
    assert torch.allclose(short, whole[:, :, :20], **CLOSE) != encoding.length_dependent
    short, other = (schemes.one_layer(encoding, x) for x in (long[:, :20], changed))
    torch.testing.assert_close(short[:, :, :12], other[:, :, :12], **CLOSE)
    assert not torch.allclose(short[:, :, 12:], other[:, :, 12:])


@pytest.mark.sample(3)
@CASES
@torch.no_grad()
def test_beyond_its_end_a_scheme_refuses_and_otherwise_stays_finite(case):
    encoding = schemes.build(*case, SHAPE)
    longest = encoding.max_length or LONG
    for counted in COUNTED:
        assert (
            schemes.one_layer(encoding, tokens(encoding, longest), consecutive=counted)
            .isfinite()
            .all()
        )
        if encoding.max_length is not None:
            with pytest.raises(
                UserError, match=rf"(?=.*\b{longest + 1}\b)(?=.*\b{longest}\b)"
            ):
                schemes.one_layer(
                    encoding, tokens(encoding, longest + 1), consecutive=counted
                )


# length, positions, whether they are counted, limits
SETTINGS: list[tuple[int, str, bool, dict[str, Any]]] = [
    (19, "gaps", False, {}),
    (19, "gaps", False, {"window": 6}),
    (19, "consecutive", False, {"window": 1}),
    (19, "consecutive", True, {"last": 4}),
    (19, "consecutive", True, {"window": 6, "sinks": 2}),
    (19, "consecutive", False, {"window": 6, "sinks": 2, "last": 4}),
    (LONG, "consecutive", True, {}),
    (LONG, "consecutive", True, {"window": 70}),
]


@pytest.mark.sample(5)
@CASES
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
def test_the_chosen_attention_equals_the_definition(case, again, monkeypatch):
    encoding = schemes.build(*case, SHAPE)
    if again:
        monkeypatch.setattr(attention, "KEPT_BYTES", 0)
        # a sequence at a time, as few rows as may be
        monkeypatch.setattr(attention, "AT_ONCE", 1)
    for length, kind, counted, limits in (
        [(70, "gaps", False, {})] if again else SETTINGS
    ):
        length = min(length, encoding.max_length or length)
        positions = schemes.positions_of(
            kind, 2, length, min(1024, encoding.max_length or 1024)
        )
        whole = {name: limits[name] for name in limits if name != "last"}
        given = {"positions": positions, "layer": 1, "consecutive": counted, **limits}
        chosen = functools.partial(schemes.layer_attention, encoding, **given)

        def defined(
            *inputs: Tensor,
            positions: Tensor = positions,
            whole: Any = whole,
            limits: Any = limits,
        ) -> Tensor:
            return schemes.by_definition(encoding, inputs, positions, 1, **whole)[
                :, :, -limits.get("last", 0) :
            ]

        inputs = schemes.layer_inputs(SHAPE, length)
        results = (
            schemes.with_gradients(encoding, inputs, compute)
            for compute in (chosen, defined)
        )
        assert_same(
            *results, setting=f"{length} tokens, {kind}, counted {counted}, {limits}"
        )


OF_EACH_FILE = {
    encodings.load(name).__module__: name for name in schemes.NAMES
}.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", schemes.NAMES if support.EVERY else OF_EACH_FILE)
def test_torch_compile_traces_it_as_one_graph(name):
    encoding = schemes.build(name, {}, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 16)
    embeddings = tokens(encoding, 16)
    positions = torch.arange(16)[None]

    def step(embeddings: Tensor, q: Tensor) -> Tensor:
        embedded = encoding.embed(embeddings, positions)
        return (
            schemes.layer_attention(
                encoding, q, k, v, x, positions, 1, consecutive=True
            )
            + embedded.sum()
        )

    torch._dynamo.reset()
    compiled = torch.compile(
        step,
        backend="aot_eager",
        fullgraph=not schemes.declared(name, "GRAPH_BREAKS", ""),
    )
    torch.testing.assert_close(compiled(embeddings, q), step(embeddings, q), **CLOSE)


@CASES
@torch.no_grad()
def test_fractional_positions_are_used_refused_or_never_read(case):
    encoding = schemes.build(*case, SHAPE)
    x = tokens(encoding, 9)

    def every_layer(positions: Tensor) -> Tensor:
        return torch.stack(
            [
                schemes.one_layer(encoding, x, positions, n)
                for n in range(SHAPE.n_layers)
            ]
        )

    # so that distances are fractions too
    between = torch.arange(9)[None] + torch.tensor([0.0, 0.3, 0.6]).repeat(3)
    if not schemes.declared(case[0], "reads_positions", lambda _: True)(
        schemes.completed(*case, SHAPE)
    ):
        assert torch.equal(every_layer(between), every_layer(torch.arange(9)[None]))
    elif encoding.whole_positions:
        with pytest.raises(UserError):
            every_layer(between)
    else:
        out = every_layer(between)
        assert out.isfinite().all()
        assert not any(
            torch.allclose(out, every_layer(at), **CLOSE)
            for at in (between.floor(), between.round())
        )


@pytest.mark.sample(2)
@CASES
@torch.no_grad()
def test_angles_biases_and_codes_are_fp32_under_autocast_and_outputs_in_the_dtype_of_inputs(
    case,
):
    encoding = schemes.build(*case, SHAPE)
    q, k, v, x = schemes.layer_inputs(SHAPE, 19)
    # far out, neighbouring positions are one number in bf16
    positions = torch.arange(19)[None] + (0 if encoding.max_length else 5000)

    def both() -> list[Tensor]:
        return [
            encoding.embed(tokens(encoding, 19), positions),
            attention_output(encoding, q, k, v, x, 1, positions),
        ]

    plain = both()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # bf16 would differ by 4e-3
        torch.testing.assert_close(both(), plain, atol=1e-5, rtol=1e-5)
        halves = [each.bfloat16() for each in (q, k, v)]
        assert (
            schemes.layer_attention(encoding, *halves, x, positions, 1).dtype
            == torch.bfloat16
        )
        assert (
            encoding.embed(tokens(encoding, 19).bfloat16(), positions).dtype
            == torch.bfloat16
        )


@CASES
@torch.no_grad()
def test_a_checkpoint_holds_the_learned_parameters_of_the_published_number_and_a_seed_remakes_them(
    case,
):
    torch.manual_seed(7)
    encoding = schemes.untrained(*case, SHAPE)
    torch.manual_seed(7)
    again = schemes.untrained(*case, SHAPE)
    x = tokens(encoding, 19)
    before = schemes.one_layer(encoding, x)
    schemes.one_layer(again, tokens(again, 32))  # leaves nothing behind
    assert torch.equal(schemes.one_layer(again, x), before)
    saved = {key: value.clone() for key, value in encoding.state_dict().items()}
    assert saved.keys() == dict(encoding.named_parameters()).keys()
    other = schemes.build(*case, SHAPE, seed=1)
    other.load_state_dict(saved)
    torch.testing.assert_close(schemes.one_layer(other, x), before, atol=0, rtol=0)
    expected = schemes.declared(case[0], "parameter_count", lambda shape, options: 0)
    for shape in (SHAPE, Shape(d_model=48, n_heads=6, n_layers=3, train_length=40)):
        count = sum(
            parameter.numel()
            for parameter in schemes.untrained(*case, shape).parameters()
        )
        assert count == expected(shape, schemes.completed(*case, shape)), (
            "parameter_count of its oracle"
        )


@CASES
def test_a_finite_gradient_reaches_every_parameter_trained_or_not(case):
    for make, counted in ((schemes.build, False), (schemes.untrained, True)):
        encoding = make(*case, SHAPE)
        x = tokens(encoding, SHAPE.train_length)
        outs = [
            schemes.one_layer(encoding, x, layer=n, consecutive=counted)
            for n in range(SHAPE.n_layers)
        ]
        assert all(out.isfinite().all() for out in outs)
        if any(True for _ in encoding.parameters()):
            sum(
                (out * schemes.random(*out.shape, seed=4)).sum() for out in outs
            ).backward()
        for key, parameter in encoding.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key
            reached = parameter.grad != 0
            if make is schemes.build:
                assert (
                    reached.any()
                    if schemes.declared(case[0], "PARTLY_UNUSED", "")
                    else reached.all()
                ), key


@pytest.mark.parametrize("name", schemes.NAMES)
def test_a_scheme_has_a_yaml_of_its_defaults_and_a_docstring_with_source_behaviour_and_check(
    name,
):
    assert sorted(path.stem for path in CONFIGS.glob("*.yaml")) == schemes.NAMES
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text) == {"name": name, **encodings.options_of(name)}
    document = inspect.cleandoc(encodings.documentation(encodings.load(name)))
    for start in ("Source: ", "Beyond training length: ", "Checked against: "):
        assert re.search(rf"^{start}\S", document, re.MULTILINE), f"no line '{start}'"


class Slopes(Encoding):
    """An encoding of one's own with a mistake in one place."""

    def __init__(self, shape: Shape, mistake: str = "") -> None:
        if mistake != "super":
            super().__init__(shape)
        self.mistake = mistake
        self.slopes = [torch.nn.Parameter(torch.ones(1))] if mistake == "list" else 1.0
        if mistake == "constructor":
            self.slopes.no_such_method()

    def rotate(self, q: Tensor, k: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
        return q, k[:, :, 2 * (self.mistake == "rotate") :]

    def bias(self, q: Tensor, k: Tensor, layer: Layer) -> Tensor | None:
        if self.mistake == "broadcast":
            return torch.ones(4) * layer.distance
        return -layer.distance[..., :-1] if self.mistake == "bias" else None


MISTAKES = {
    "": "",
    "super": (
        r"'slopes', __init__: test_encodings.py, line \d+: expected"
        r" super\(\).__init__\(shape\) first"
    ),
    "list": (
        r"'slopes', __init__: .*, line \d+: slopes is neither trained nor moved .*:"
        r" expected nn.Parameter"
    ),
    "constructor": (
        r"__init__: test_encodings.py, line \d+: AttributeError: .*no_such_method"
    ),
    "broadcast": (
        r"'slopes', bias: test_encodings.py, line \d+: RuntimeError: The size of tensor"
    ),
    "bias": r"bias: .*: gave \[\(1, 20, 19\)\], expected \(2, 4, 20, 20\)",
    "rotate": r"rotate: .*: gave .*\(2, 4, 18, 8\)\], expected two of \(2, 4, 20, 8\)",
}


def test_an_encoding_without_a_hook_is_refused(monkeypatch):
    monkeypatch.setattr(encodings, "_registered", {})
    encodings.register(
        type("Misspelt", (Encoding,), {"rotates": lambda self, q, k, layer: (q, k)})
    )
    with pytest.raises(UserError, match="'misspelt' overrides no hook"):
        encodings.build("misspelt", SHAPE)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_encoding_of_ones_own_is_one_line(mistake, monkeypatch):
    monkeypatch.setattr(encodings, "_registered", {})
    encodings.register(Slopes)
    with (
        pytest.raises(UserError, match=MISTAKES[mistake])
        if mistake
        else contextlib.nullcontext()
    ):
        encoding = encodings.build("slopes", SHAPE, {"mistake": mistake})
        assert attention_output(encoding, *schemes.layer_inputs(SHAPE, 20)).shape == (
            2,
            4,
            20,
            8,
        )


def test_a_scheme_whose_file_has_no_class_of_its_name_is_refused(monkeypatch):
    monkeypatch.setitem(encodings._MODULE_OF, "other", "base")
    with pytest.raises(UserError, match=r"base\.py: expected a class other"):
        encodings.load("other")
