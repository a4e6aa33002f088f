"""Every scheme against an implementation that none of us wrote, in values and in
gradients (see tests/oracles).
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import oracles
import pytest
import schemes
import torch
from torch import Tensor

from posbench.encodings.base import Shape
from posbench.model.standalone import attention_logits, attention_output

BATCH = 2
LAYERS = 3


class Setting(NamedTuple):
    length: int
    heads: int
    width: int  # of a head
    positions: str
    seed: int


# Each length, head count, head width and kind of positions occurs, but not each
# combination.
SETTINGS = [
    Setting(1, 1, 8, "consecutive", 0),
    Setting(1, 4, 16, "offset", 1),
    Setting(2, 4, 8, "consecutive", 2),
    Setting(2, 6, 16, "gaps", 0),
    Setting(7, 12, 8, "consecutive", 1),
    Setting(7, 1, 16, "offset", 2),
    Setting(7, 4, 8, "gaps", 0),
    Setting(20, 4, 8, "offset", 1),
    Setting(33, 1, 16, "consecutive", 2),
    Setting(20, 6, 8, "gaps", 0),
    Setting(7, 4, 8, "far", 1),
    Setting(20, 4, 8, "fractional", 2),
]
POSITIONS = ("consecutive", "offset", "gaps", "far")  # unless an oracle says more


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


def comparisons() -> Iterator[Any]:
    """Yield every scheme and option set, each in two parts. `make test` runs the first
    part.

    A scheme's first option set has all settings that its oracle can compute, a sixth of
    them in the first part. Each further option set has half of them, and one small
    setting in the first part, which `make test` has of every third.
    """
    before = ""
    cases = [case for case in schemes.cases() if oracles.of(case[0])]
    for turn, case in enumerate(cases):
        name = case[0]
        kinds = schemes.declared(name, "POSITIONS", POSITIONS)
        settings = [setting for setting in SETTINGS if setting.positions in kinds]
        marks = []
        if name != before:
            first = settings[turn % 6 :: 6] or settings[-1:]
            more = [setting for setting in settings if setting not in first]
        else:
            small = [setting for setting in settings if 1 < setting.length < 20]
            first = [small[turn % len(small)]]
            more = [setting for setting in settings if setting not in first]
            more = more[turn % 2 :: 2]
            if turn % 3 > 0:
                marks = [pytest.mark.slow]

        label = schemes.label(case)
        yield pytest.param(case, first, marks=marks, id=label)
        yield pytest.param(case, more, marks=pytest.mark.slow, id=f"{label}-more")
        before = name


@pytest.mark.parametrize(("case", "settings"), list(comparisons()))
def test_scheme_equals_its_oracle_in_values_and_gradients(case, settings):
    name, options = case
    directions = schemes.declared(name, "CAUSAL", (True, False))
    for setting in settings:
        for causal in directions:
            try:
                compare(name, options, setting, causal)
            except Exception as error:
                error.add_note(f"{setting}, causal {causal}")
                raise


def compare(name: str, options: dict[str, Any], setting: Setting, causal: bool) -> None:
    """Compare what the oracle computes, and the gradients of inputs and parameters."""
    # Far: distances that are no longer whole numbers in bf16, where a scheme that
    # forgets fp32 goes wrong.
    train_length = 1024 if setting.positions == "far" else 64
    shape = Shape(
        d_model=setting.heads * setting.width,
        n_heads=setting.heads,
        n_layers=LAYERS,
        train_length=train_length,
        vocabulary=schemes.declared(name, "VOCABULARY", ()),
    )
    encoding = schemes.build(name, options, shape, setting.seed)
    parameters = dict(encoding.named_parameters())
    inputs = inputs_of(setting, shape)
    given: dict[str, Any] = dict(places_of(setting, shape))
    given["layer"] = setting.seed
    given["causal"] = causal

    dtype = schemes.declared(name, "DTYPE", torch.float32)
    their_inputs = leaves_of(inputs, dtype)
    their_parameters = leaves_of(parameters, dtype)
    oracle: Any = oracles.of(name)
    expected = oracle.reference(
        parameters=their_parameters,
        shape=shape,
        options=schemes.completed(name, options, shape),
        **their_inputs,
        **given,
    )
    our_inputs = leaves_of(inputs, torch.float32)
    actual = computed(encoding, list(expected), **our_inputs, **given)

    # fp32 sums in another order
    tolerance = schemes.declared(name, "TOLERANCE", {"atol": 1e-5, "rtol": 1e-5})
    if "bias" in expected:
        bias = expected["bias"].expand(actual["bias"].shape)
        expected["bias"] = comparable(bias, causal)
    for key, value in expected.items():
        what = f"{name}: {key}"
        close(actual[key], value, what, largest(value), **tolerance)

    ours = gradients_of(actual, our_inputs | parameters)
    theirs = gradients_of(expected, their_inputs | their_parameters)
    # A gradient that is 0 in theory (what shifts a whole row) is the rounding of large
    # terms that cancel.
    sizes = [largest(gradient) for gradient in theirs.values()]
    scale = max(sizes)
    for key, gradient in theirs.items():
        what = f"{name}: gradient of {key}"
        close(ours[key], gradient, what, scale, atol=2e-5, rtol=1e-4)


def places_of(setting: Setting, shape: Shape) -> dict[str, Tensor]:
    """Return positions, and ids where the scheme looks at the texts of tokens."""
    positions = schemes.positions_of(
        setting.positions, BATCH, setting.length, shape.train_length, offset=11
    )
    if not shape.vocabulary:
        return {"positions": positions}
    sizes = (BATCH, setting.length)
    generator = torch.Generator()
    ids = torch.randint(len(shape.vocabulary), sizes, generator=generator)
    return {"positions": positions, "ids": ids}


def inputs_of(setting: Setting, shape: Shape) -> dict[str, Tensor]:
    heads = (BATCH, setting.heads, setting.length, setting.width)
    wide = (BATCH, setting.length, shape.d_model)
    return {
        "q": schemes.random(*heads, seed=setting.seed),
        "k": schemes.random(*heads, seed=setting.seed + 1),
        "v": schemes.random(*heads, seed=setting.seed + 2),
        "x": schemes.random(*wide, seed=setting.seed + 3),
    }


def leaves_of(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    leaves = {}
    for name, tensor in tensors.items():
        copied = tensor.detach().to(dtype, copy=True)
        leaves[name] = copied.requires_grad_()
    return leaves


def gradients_of(
    outputs: dict[str, Tensor], leaves: dict[str, Tensor]
) -> dict[str, Tensor]:
    total = torch.zeros((), requires_grad=True)
    for seed, output in enumerate(outputs.values()):
        upstream = schemes.random(*output.shape, seed=seed)
        total = total + (output * upstream).sum()
    of = list(leaves.values())
    gradients = torch.autograd.grad(
        total, of, allow_unused=True, materialize_grads=True
    )
    return dict(zip(leaves, gradients, strict=True))


def computed(
    encoding: Any,
    keys: list[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    positions: Tensor,
    layer: int,
    causal: bool,
    ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return what posbench computes under the names that an oracle returned."""
    used, described = schemes.used_at(encoding, positions, layer, x)
    turned_q, turned_k = used.rotate(q, k, described)
    place = (layer, positions, causal)
    results = {}
    for key in keys:
        if key == "positions":
            results[key] = encoding.positions(ids, None)
        elif key == "embedded":
            tokens = x[..., : encoding.token_dim()]
            results[key] = encoding.embed(tokens, positions, ids)
        elif key == "q":
            results[key] = turned_q
        elif key == "k":
            results[key] = turned_k
        elif key == "output":
            results[key] = attention_output(encoding, q, k, v, x, *place)
        elif key == "probabilities":
            logits = attention_logits(encoding, q, k, x, *place)
            results[key] = logits.softmax(-1)
        elif key == "bias":
            logits = attention_logits(encoding, q, k, x, *place)
            products = turned_q @ turned_k.mT * encoding.logit_scale
            results[key] = comparable(logits - products, causal)
    return results


def comparable(bias: Tensor, causal: bool) -> Tensor:
    """Biases that differ by a constant per row are the same bias, and a hidden pair has
    none.
    """
    bias = bias - bias[..., :1]
    if not causal:
        return bias
    pairs = torch.ones(bias.shape[-2:], dtype=torch.bool)
    hidden = pairs.triu(1)
    return bias.masked_fill(hidden, 0)


def largest(value: Tensor) -> float:
    """Return the unit of differences: the largest entry, or 1 if that is less."""
    entry = value.detach().abs().max()
    return max(1.0, float(entry))


def close(
    actual: Tensor, expected: Tensor, what: str, scale: float, atol: float, rtol: float
) -> None:
    """Fail unless they are equal within the tolerance; `atol` is in units of
    `scale`.
    """
    assert actual.shape == expected.shape, what
    assert math.isfinite(scale), what
    torch.testing.assert_close(
        actual.detach().double(),
        expected.detach().double(),
        atol=atol * scale,
        rtol=rtol,
        msg=lambda text: f"{what}: {text}",
    )
