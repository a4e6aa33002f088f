"""Every scheme against an implementation that none of us wrote, in values and in
gradients (see tests/oracles).
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import schemes
import torch
from torch import Tensor

from posbench.encodings.base import Shape
from posbench.model.attention import make_layer
from posbench.model.standalone import attention_logits, attention_output

BATCH, LAYERS = 2, 3

# Each length, head count, head width and kind of positions occurs, but not each
# combination.
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


def test_every_scheme_has_an_oracle():
    unchecked = [name for name in schemes.NAMES if oracles.of(name) is None]
    assert not unchecked, "write a class in tests/oracles (see its __init__.py)"


OURS = r"^ *(from|import) (posbench|schemes|support)\b|[\"']posbench[.\"']"
HERE = Path(__file__).parent
INDEPENDENT = ["recompute.py", "task_solvers.py", "oracles/*.py"]


@pytest.mark.parametrize("files", INDEPENDENT)
def test_what_posbench_is_compared_with_imports_nothing_of_ours(files):
    for path in HERE.glob(files):
        text = path.read_text(encoding="utf-8")
        assert not re.search(OURS, text, re.MULTILINE), path


def _comparisons() -> Iterator[Any]:
    """Yield every scheme and option set, each in two parts. `make test` runs the first
    part.

    A scheme's first option set has all settings that its oracle can compute, a sixth of
    them in the first part. Each further option set has half of them, and one small
    setting in the first part, which `make test` has of every third.
    """
    met = set()
    for turn, case in enumerate(
        case for case in schemes.cases() if oracles.of(case[0])
    ):
        able = schemes.declared(
            case[0], "POSITIONS", ("consecutive", "offset", "gaps", "far")
        )
        settings = [setting for setting in SETTINGS if setting[3] in able]
        small = [setting for setting in settings if 1 < setting[0] < 20]
        further = case[0] in met
        first = (
            [small[turn % len(small)]]
            if further
            else settings[turn % 6 :: 6] or settings[-1:]
        )
        met.add(case[0])
        marks = [pytest.mark.slow] * (further and turn % 3 > 0)
        yield pytest.param(case, first, marks=marks, id=schemes.label(case))
        more = [setting for setting in settings if setting not in first]
        more = more[turn % 2 :: 2] if further else more
        yield pytest.param(
            case, more, marks=pytest.mark.slow, id=f"{schemes.label(case)}-more"
        )


@pytest.mark.parametrize(("case", "settings"), list(_comparisons()))
def test_scheme_equals_its_oracle_in_values_and_gradients(case, settings):
    for setting in settings:
        for causal in schemes.declared(case[0], "CAUSAL", (True, False)):
            try:
                compare(*case, *setting, causal=causal)
            except Exception as error:
                error.add_note(
                    "T {}, {} heads of {}, positions {}, seed {}".format(*setting)
                    + f", causal {causal}"
                )
                raise


def compare(
    name: str,
    options: dict[str, Any],
    length: int,
    heads: int,
    width: int,
    kind: str,
    seed: int,
    causal: bool,
) -> None:
    oracle: Any = oracles.of(name)
    vocabulary = getattr(oracle, "VOCABULARY", ())
    # Far: distances that are no longer whole numbers in bf16, where a scheme that
    # forgets fp32 goes wrong.
    shape = Shape(
        heads * width,
        heads,
        LAYERS,
        train_length=1024 if kind == "far" else 64,
        vocabulary=vocabulary,
    )
    encoding = schemes.build(name, options, shape, seed)
    positions = schemes.positions_of(kind, BATCH, length, shape.train_length, offset=11)
    ids = (
        torch.randint(len(vocabulary), (BATCH, length), generator=torch.Generator())
        if vocabulary
        else None
    )

    inputs = [
        schemes.random(BATCH, heads, length, width, seed=seed + i) for i in range(3)
    ]
    inputs.append(schemes.random(BATCH, length, shape.d_model, seed=seed + 3))
    inputs += [parameter.detach() for parameter in encoding.parameters()]
    names = [*"qkvx", *(key for key, _ in encoding.named_parameters())]

    leaves = [
        tensor.clone().to(getattr(oracle, "DTYPE", torch.float32)).requires_grad_()
        for tensor in inputs
    ]
    parameters = dict(zip(names[4:], leaves[4:], strict=True))
    given = {"ids": ids} if vocabulary else {}
    completed = schemes.completed(name, options, shape)
    expected = oracle.reference(
        parameters=parameters,
        shape=shape,
        options=completed,
        positions=positions,
        layer=seed,
        causal=causal,
        **dict(zip("qkvx", leaves, strict=False)),
        **given,
    )

    copies = [
        *(tensor.clone().requires_grad_() for tensor in inputs[:4]),
        *encoding.parameters(),
    ]
    actual = _ours(expected.keys(), encoding, copies[:4], positions, ids, seed, causal)
    expected = {
        key: _comparable(key, value, causal, actual[key].shape)
        for key, value in expected.items()
    }
    for key, value in expected.items():
        # fp32 sums in another order
        tolerance = getattr(oracle, "TOLERANCE", {"atol": 1e-5, "rtol": 1e-5})
        close(actual[key], value, f"{name}: {key}", largest(value), **tolerance)

    gradients = _gradients(copies, actual)
    theirs = _gradients(leaves, expected)
    # A gradient that is 0 in theory (what shifts a whole row) is the rounding of large
    # terms that cancel.
    scale = max(map(largest, theirs))
    for key, ours, gradient in zip(names, gradients, theirs, strict=True):
        close(ours, gradient, f"{name}: gradient of {key}", scale, atol=2e-5, rtol=1e-4)


def _gradients(leaves: list[Tensor], outputs: dict[str, Tensor]) -> list[Tensor]:
    weighted = (
        (value * schemes.random(*value.shape, seed=i)).sum()
        for i, value in enumerate(outputs.values())
    )
    total = sum(weighted, start=torch.zeros((), requires_grad=True))
    return list(
        torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    )


def _ours(
    keys: Any,
    encoding: Any,
    inputs: list[Tensor],
    positions: Tensor,
    ids: Tensor | None,
    layer: int,
    causal: bool,
) -> dict[str, Tensor]:
    q, k, v, x = inputs
    used, described = encoding.at(make_layer(encoding, positions, layer, x))
    rotated = used.rotate(q, k, described)

    def bias() -> Tensor:
        logits = attention_logits(encoding, q, k, x, layer, positions, causal)
        return _comparable(
            "bias",
            logits - rotated[0] @ rotated[1].mT * encoding.logit_scale,
            causal,
            logits.shape,
        )

    compute = {
        "positions": lambda: encoding.positions(ids, None),
        "embedded": lambda: encoding.embed(
            x[..., : encoding.token_dim()], positions, ids
        ),
        "q": lambda: rotated[0],
        "k": lambda: rotated[1],
        "bias": bias,
        "probabilities": (
            lambda: attention_logits(
                encoding, q, k, x, layer, positions, causal
            ).softmax(-1)
        ),
        "output": lambda: attention_output(
            encoding, q, k, v, x, layer, positions, causal
        ),
    }
    return {key: compute[key]() for key in keys}


def _comparable(key: str, value: Tensor, causal: bool, shape: torch.Size) -> Tensor:
    """Biases that differ by a constant per row are the same bias, and a hidden pair has
    none.
    """
    if key != "bias":
        return value
    value = value.expand(shape)
    return (value - value[..., :1]).masked_fill(
        torch.ones(shape[-2:], dtype=torch.bool).triu(1) & causal, 0
    )


def largest(value: Tensor) -> float:
    """Return the unit of differences: the largest entry, or 1 if that is less."""
    return max(1.0, float(value.detach().abs().max()))


def close(
    actual: Tensor, expected: Tensor, what: str, scale: float, atol: float, rtol: float
) -> None:
    """Fail unless they are equal within the tolerance; `atol` is in units of
    `scale`.
    """
    assert actual.shape == expected.shape, (
        f"{what}: {tuple(actual.shape)} against {tuple(expected.shape)}"
    )
    assert math.isfinite(scale), what
    actual = actual.detach().double()
    expected = expected.detach().double()
    torch.testing.assert_close(
        actual,
        expected,
        atol=atol * scale,
        rtol=rtol,
        msg=lambda text: f"{what}: {text}",
    )
