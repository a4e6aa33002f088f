"""Every scheme against an implementation that none of us wrote, in values and in gradients (see tests/oracles)."""

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemes
import torch
from torch import Tensor

from posbench.encodings.base import Encoding, Shape
from posbench.model.attention import make_layer
from posbench.model.standalone import attention_logits, attention_output

BATCH, LAYERS = 2, 3

# Each length, head count, head width and kind of positions occurs, but not each combination. Plain loops take time
# proportional to heads and to the square of the length, so no setting has many of both.
SETTINGS = [  # T, H, Dh, positions, seed
    (1, 1, 8, "consecutive", 0),
    (1, 4, 16, "offset", 1),
    (2, 4, 8, "consecutive", 2),
    (2, 6, 16, "gaps", 0),
    (7, 12, 8, "consecutive", 1),
    (7, 1, 16, "offset", 2),
    (7, 4, 8, "gaps", 0),
    (20, 4, 8, "offset", 1),
    (33, 1, 16, "consecutive", 2),
    (20, 6, 8, "gaps", 0),
    (7, 4, 8, "far", 1),
    (20, 4, 8, "fractional", 2),
]


def test_every_scheme_has_an_oracle_and_none_imports_anything_of_ours() -> None:
    for name in schemes.NAMES:
        assert schemes.has_oracle(name), (
            f"'{name}' is unchecked: write tests/oracles/{name}.py (see tests/oracles/__init__.py)"
        )
    tests = Path(__file__).parent
    ours = {"posbench", *(path.stem for path in tests.glob("*.py"))}
    files = sorted(tests.glob("oracles/**/*.py"))  # also those that oracles share
    assert len(files) > len(schemes.NAMES)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {str(module).split(".")[0] for module in names} & ours, path
            by_name = isinstance(node, ast.Constant) and str(node.value).split(".")[0] == "posbench"
            assert not by_name, path  # as importlib takes it


def _comparisons() -> Iterator[Any]:
    """Every scheme and option set, each in two parts, of which `make test` has the first.

    A scheme's first option set has all settings that its oracle can compute, a sixth of them in the first part. Each
    further option set has half of them, and one small setting in the first part.
    """
    met = set()
    for turn, case in enumerate(case for case in schemes.cases() if schemes.has_oracle(case[0])):
        able = getattr(schemes.oracle_of(case[0]), "POSITIONS", ("consecutive", "offset", "gaps", "far"))
        settings = [setting for setting in SETTINGS if setting[3] in able]
        small = [setting for setting in settings if 1 < setting[0] < 20]
        further = case[0] in met
        first = [small[turn % len(small)]] if further else settings[turn % 6 :: 6] or settings[-1:]
        met.add(case[0])
        yield pytest.param(case, first, id=schemes.label(case))
        more = [setting for setting in settings if setting not in first]
        more = more[turn % 2 :: 2] if further else more
        yield pytest.param(case, more, marks=pytest.mark.full, id=f"{schemes.label(case)}-more")


@pytest.mark.parametrize(("case", "settings"), list(_comparisons()))
def test_scheme_equals_its_oracle_in_values_and_gradients(
    case: tuple[str, dict[str, Any]],
    settings: list[tuple[int, int, int, str, int]],
) -> None:
    for setting in settings:
        try:
            compare(case, *setting)
        except Exception as error:
            error.add_note("T {}, {} heads of {}, positions {}, seed {}".format(*setting))
            raise


def compare(case: tuple[str, dict[str, Any]], length: int, heads: int, width: int, kind: str, seed: int) -> None:
    """Compare values and gradients in one setting."""
    name, options = case
    oracle = schemes.oracle_of(name)
    # Far: distances that are no longer whole numbers in bf16, where a scheme that forgets fp32 goes wrong.
    vocabulary = getattr(oracle, "VOCABULARY", ())
    shape = Shape(heads * width, heads, LAYERS, train_length=1024 if kind == "far" else 64, vocabulary=vocabulary)
    encoding = schemes.build(name, options, shape, seed)
    completed = schemes.completed(name, options, shape)
    positions = schemes.positions_of(kind, BATCH, length, shape.train_length, offset=11)
    ids = torch.randint(len(vocabulary), (BATCH, length), generator=torch.Generator()) if vocabulary else None
    given = {"ids": ids} if vocabulary else {}
    for causal in getattr(oracle, "CAUSAL", (True, False)):
        ours = _Inputs(encoding, length, seed, torch.float32)
        theirs = _Inputs(encoding, length, seed, getattr(oracle, "DTYPE", torch.float32))
        expected = oracle.reference(
            theirs.parameters, shape, completed, *theirs.tensors, positions, seed, causal, **given
        )
        assert expected and set(expected) <= {"positions", "embedded", "q", "k", "bias", "probabilities", "output"}
        actual = {key: _ours(key, encoding, ours, positions, ids, seed, causal) for key in expected}
        tolerance = getattr(oracle, "TOLERANCE", {"atol": 1e-5, "rtol": 1e-5})  # fp32 sums in another order
        for key, value in expected.items():
            value = _comparable(key, value, causal, actual[key].shape)
            close(actual[key], value, f"{name}: {key}", largest(value), **tolerance)
        ours.backward(actual)
        theirs.backward({k: _comparable(k, value, causal, actual[k].shape) for k, value in expected.items()})
        ours.take_gradients_of(encoding)
        # A gradient that is 0 in theory (what shifts a whole row) is the rounding of large terms that cancel.
        scale = max(map(largest, theirs.gradients().values()))
        for key, gradient in theirs.gradients().items():
            what = f"{name}: gradient of {key}"
            close(ours.gradients()[key], gradient, what, scale, atol=2e-5, rtol=1e-4)


class _Inputs:
    """The same random q, k, v, x and parameters, once for us and once for the oracle, with their gradients."""

    def __init__(self, encoding: Encoding, length: int, seed: int, dtype: torch.dtype) -> None:
        shape = encoding.shape
        size = (BATCH, shape.n_heads, length, shape.head_dim)
        drawn = [schemes.random(*size, seed=seed + i) for i in range(3)]
        drawn.append(schemes.random(BATCH, length, shape.d_model, seed=seed + 3))
        self.tensors = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        self.parameters = {
            key: value.detach().clone().to(dtype).requires_grad_() for key, value in encoding.named_parameters()
        }

    def backward(self, outputs: dict[str, Tensor]) -> None:
        total = sum(
            (value * schemes.random(*value.shape, seed=i).to(value.dtype)).sum()
            for i, value in enumerate(outputs.values())
        )
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()

    def take_gradients_of(self, encoding: Encoding) -> None:
        for key, parameter in encoding.named_parameters():
            self.parameters[key].grad = parameter.grad
        encoding.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        named = dict(zip("qkvx", self.tensors, strict=True)) | self.parameters
        return {key: torch.zeros_like(value) if value.grad is None else value.grad for key, value in named.items()}


def _ours(
    key: str, encoding: Encoding, inputs: _Inputs, positions: Tensor, ids: Tensor | None, layer: int, causal: bool
) -> Tensor:
    q, k, v, x = inputs.tensors
    if key == "positions":
        assert ids is not None, "it takes a VOCABULARY"
        return encoding.positions(ids, None)
    if key == "embedded":
        return encoding.embed(x[..., : encoding.token_dim()], positions, ids)
    if key in ("q", "k"):
        used, described = encoding.at(make_layer(encoding, positions, layer, x))
        return used.rotate(q, k, described)["qk".index(key)]
    if key == "output":
        return attention_output(encoding, q, k, v, x, layer, positions, causal)
    logits = attention_logits(encoding, q, k, x, layer, positions, causal)
    if key == "probabilities":
        return logits.softmax(-1)
    used, described = encoding.at(make_layer(encoding, positions, layer, x))
    rotated_q, rotated_k = used.rotate(q, k, described)
    return _comparable("bias", logits - rotated_q @ rotated_k.mT * encoding.logit_scale, causal, logits.shape)


def _comparable(key: str, value: Tensor, causal: bool, shape: torch.Size) -> Tensor:
    """Biases that differ by a constant per row are the same bias, and a hidden pair has none."""
    if key != "bias":
        return value
    value = value.expand(shape)
    hidden = torch.ones(shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(shape[-2:], dtype=torch.bool)
    return (value - value[..., :1]).masked_fill(hidden, 0)


def largest(value: Tensor) -> float:
    """What differences are measured by: the largest entry, or 1 where that is less."""
    return max(1.0, float(value.detach().abs().max()))


def close(actual: Tensor, expected: Tensor, what: str, scale: float, atol: float, rtol: float) -> None:
    """Fail unless they are equal within the tolerance; `atol` is in units of `scale`."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} against {tuple(expected.shape)}"
    assert math.isfinite(scale), what
    actual, expected = actual.detach().double(), expected.detach().double()
    torch.testing.assert_close(actual, expected, atol=atol * scale, rtol=rtol, msg=lambda text: f"{what}: {text}")
