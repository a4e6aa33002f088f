"""Encodings around others and layers that differ: the same model on every path that
computes it.
"""

import dataclasses
from typing import Any

import pytest
import schemes
import torch
from schemes import layer_attention as attention
from torch import Tensor

from posbench import encodings
from posbench.encodings.base import Shape
from posbench.encodings.extend import extend_encoding
from posbench.errors import Undefined, UserError
from posbench.model.standalone import attention_logits, attention_output
from posbench.training.step import tell_progress

SHAPE = Shape(d_model=32, n_heads=4, n_layers=4, train_length=32)
LENGTH = 40
CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # fp32 sums in another order
COUNTED = torch.arange(LENGTH)[None]


def inputs(
    length: int = LENGTH, kv_heads: int = 4
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = schemes.random(2, 4, length, 8, seed=0)
    k, v = (schemes.random(2, kv_heads, length, 8, seed=seed) for seed in (1, 2))
    return q, k, v, schemes.random(2, length, 32, seed=3)


def row_of(encoding: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Return, for each token, the row of an encoding's table that is added to it."""
    added = encoding.embed(x, COUNTED[:, : ids.shape[1]], ids) - x
    return added[:, :, None].sub(encoding.table).abs().sum(-1).argmin(-1)


def test_what_a_temperature_learns_starts_as_the_logits_of_its_encoding_at_the_training_length():
    n = torch.tensor([1, SHAPE.train_length, SHAPE.train_length**2])
    for rule, expected in (
        ("ssmax", [0.0, 1.0, 2.0]),
        ("mistral_large4", [1.0] * 3),
        ("logn", [1.0, 1.0, 2.0]),
    ):
        temperature: Any = encodings.build("temperature", SHAPE, {"rule": rule})
        torch.testing.assert_close(
            temperature.factor(n, 1).expand(4, 3),
            torch.tensor(expected).expand(4, 3),
            msg=rule,
        )


def test_drope_is_rope_before_the_drop_and_nothing_after_it_also_in_a_layer():
    drope = encodings.build("drope", SHAPE, {"drop_at": 0.75, "base": 500.0})
    layered = encodings.build(
        "layered", SHAPE, {"layers": [{"name": "drope", "drop_at": 0.75, "window": 5}]}
    )
    heads = encodings.build(
        "heads", SHAPE, {"heads": [{"name": "drope", "drop_at": 0.75}]}
    )
    given = (*inputs(), COUNTED, 1)
    for done, name in (
        (None, "none"),
        (0.0, "rope"),
        (0.74, "rope"),
        (0.75, "none"),
        (1.0, "none"),
    ):
        for encoding, window, base in (
            (drope, None, 500.0),
            (layered, 5, 10000.0),
            (heads, None, 10000.0),
        ):
            if done is not None:  # before a run it is as after one
                tell_progress(encoding, done)
            expected = encodings.build(
                name, SHAPE, {"base": base} if name == "rope" else {}
            )
            ours = attention(encoding, *given)
            theirs = attention(expected, *given, window=window)
            assert torch.equal(ours, theirs), done


def test_a_window_of_a_class_holds_in_a_layer_and_is_refused_in_heads(monkeypatch):
    monkeypatch.setattr(encodings.load("alibi"), "window", 4)
    for window, n_visible in ((None, 4), (3, 3), (9, 4)):
        layered = encodings.build(
            "layered", SHAPE, {"layers": [{"name": "alibi", "window": window}]}
        )
        assert (
            attention_logits(layered, *inputs()[:2])[0, 0, -1] > -torch.inf
        ).sum() == n_visible
    with pytest.raises(UserError, match="'alibi' acts on all heads at once"):
        encodings.build("heads", SHAPE, {"heads": [{"name": "alibi"}]})


IDS = torch.zeros(3, 30, dtype=torch.long)


def test_randomized_draws_each_position_as_often_and_of_as_many_as_tokens_are_the_encoding_itself():
    encoding = encodings.build("randomized", SHAPE, {"max_length": 40})
    stream = torch.Generator().manual_seed(0)
    counts = torch.cat(
        [encoding.positions(IDS[:, :10], stream)[0] for _ in range(1000)]
    ).bincount(minlength=40)
    # five standard deviations
    assert (counts - 250).abs().max() < 5 * (1000 * 0.25 * 0.75) ** 0.5


def test_shape_starts_anywhere_below_its_shift_in_training_and_behind_it_in_evaluation():
    encoding = encodings.build("shape", SHAPE, {"shift": 7})
    stream = torch.Generator().manual_seed(0)
    assert (encoding.positions(IDS, stream).diff() == 1).all()
    assert {int(encoding.positions(IDS, stream)[0, 0]) for _ in range(200)} == set(
        range(7)
    )
    assert torch.equal(encoding.eval().positions(IDS, None), 7 + torch.arange(30)[None])


def test_cape_moves_jitters_and_stretches_positions_in_training_alone():
    whole = torch.arange(30.0)
    stream = torch.Generator().manual_seed(0)
    nothing = {"global_shift": 0.0, "local_shift": 0.0, "scaling": 1.0}
    # each part by itself
    for options, bound in (({"global_shift": 4.0}, 4), ({"local_shift": 0.5}, 0.5)):
        alone = encodings.build("cape", SHAPE, nothing | options)
        moved = torch.cat([alone.positions(IDS, stream) for _ in range(300)]) - whole
        assert 0.95 * bound < moved.max() <= bound + 1e-5
        assert -bound - 1e-5 <= moved.min() < -0.95 * bound
        same = (moved - moved[:, :1]).abs().amax(1) < 1e-5
        assert same.all() if "global_shift" in options else not same.any()
    alone = encodings.build("cape", SHAPE, nothing | {"scaling": 1.25})
    stretches = (
        torch.cat([alone.positions(IDS, stream) for _ in range(300)])[:, 1:] / whole[1:]
    )
    assert 0.8 <= stretches.min() < 0.81
    assert 1.24 < stretches.max() <= 1.2501
    assert abs(float(stretches.log().mean())) < 0.05  # as often squeezed as stretched
    assert torch.equal(alone.eval().positions(IDS, None), torch.arange(30)[None])


DIGITS = tuple("0123456789+=")


@pytest.mark.parametrize(
    ("name", "options", "problem", "offsets"),
    [
        ("abacus", {"max_offset": 5, "rows": 8}, "12+345=+7777", range(6)),
        ("coupling", {"max_position": 8}, "653+049=2070", range(4)),
    ],
)
def test_digits_begin_anywhere_in_training_by_a_draw_that_follows_from_the_update(
    name, options, problem, offsets
):
    shape = dataclasses.replace(SHAPE, vocabulary=DIGITS)
    encoding: Any = schemes.build(name, options, shape)
    last = len(encoding.table) - 1
    ids = torch.tensor([[DIGITS.index(token) for token in problem]])
    x = schemes.random(*ids.shape, SHAPE.d_model)
    places = row_of(encoding.eval(), x, ids)

    drawn = []
    for update in [*range(100), 99, 7]:
        tell_progress(encoding.train(), update / 100)
        rows = row_of(encoding, x, ids)
        drawn.append(int((rows - places).max()))
        moved = (places + drawn[-1]).clamp(max=last)
        assert torch.equal(rows, torch.where(places > 0, moved, 0))

    assert set(drawn) == set(offsets)
    assert drawn[100:] == [drawn[99], drawn[7]]  # so a continued run draws alike


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", schemes.NAMES)
def test_heads_may_be_wider_than_their_share_of_the_model_and_share_keys_and_values(
    name,
):
    encoding = schemes.build(name, {}, Shape(24, 4, 2, 32, head_dim=8, n_kv_heads=2))
    (q, k, v, _), x, positions = (
        inputs(12, kv_heads=2),
        schemes.random(2, 12, 24, seed=3),
        COUNTED[:, :12],
    )
    expected = attention_output(
        encoding,
        q,
        k.repeat_interleave(2, 1),
        v.repeat_interleave(2, 1),
        x,
        1,
        positions,
    )
    out = attention(
        encoding,
        q,
        k,
        v,
        x,
        positions,
        1,
        consecutive="positions" not in encoding.hooks,
    )
    torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("name", ["partial_rope", "lerope", "grape_m", "pope", "repo"])
def test_interpolated_positions_are_the_trained_ones_and_no_stretch_changes_nothing(
    name,
):
    trained: Any = schemes.build(name, {}, SHAPE)
    q, k, v, x = inputs(32)
    for method in ("pi", "ntk", "ntk_by_parts", "yarn", "llama3"):
        after, _ = extend_encoding(trained, method, 32, 32)
        assert torch.equal(
            attention_output(after, q, k, v, x), attention_output(trained, q, k, v, x)
        ), method
    after, _ = extend_encoding(trained, "pi", 128, 32)
    places = COUNTED[:, :20]
    q = q[:, :, :20]
    k = k[:, :, :20]
    x = x[:, :20]
    ours = attention_logits(after, q, k, x, positions=4 * places)
    torch.testing.assert_close(
        ours, attention_logits(trained, q, k, x, positions=places), atol=1e-5, rtol=1e-5
    )
    after, facts = extend_encoding(trained, "yarn", 64, 32)
    assert after.attention_factor == pytest.approx(
        trained.attention_factor * facts["attention_factor"]
    )


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_wrapper_hands_an_extension_on_to_those_it_is_for_and_they_keep_their_windows(
    method,
):
    entries = [
        {"name": "rope", "window": 12},
        {"name": "none"},
        {"name": "rope", "chunk": LENGTH},
    ]
    layered = encodings.build("layered", SHAPE, {"layers": entries})
    before = [attention(layered, *inputs(), COUNTED, layer) for layer in range(2)]
    after, facts = extend_encoding(layered, method, 128, 32)
    alone, alone_facts = extend_encoding(
        encodings.build("rope", SHAPE), method, 128, 32
    )
    assert torch.equal(
        attention(after, *inputs(), COUNTED, 0),
        attention(alone, *inputs(), COUNTED, 0, window=12),
    )
    assert torch.equal(attention(after, *inputs(), COUNTED, 1), before[1])
    whole = attention(alone, *inputs(), COUNTED, 0)  # a chunk of all tokens hides none
    torch.testing.assert_close(attention(after, *inputs(), COUNTED, 2), whole, **CLOSE)
    # the trained one is as it was
    assert torch.equal(attention(layered, *inputs(), COUNTED, 0), before[0])
    assert facts == {
        "dynamic": alone_facts["dynamic"],
        "extended": {"rope 0": alone_facts, "rope 2": alone_facts},
    }


def test_an_extension_in_a_wrapper_goes_by_the_length_that_was_trained_last():
    """A run that began from another has the shape of that one, and a training length of
    its own.
    """
    cases: list[Any] = [
        ("shape", {"inner": "rope", "shift": 10}, "pi", 2.0),
        ("temperature", {}, "pi", 2.0),
    ]
    cases.append(
        ("shape", {"inner": "sinusoidal", "shift": 10}, "interpolate", 266 / 138)
    )
    for name, options, method, factor in cases:
        _, facts = extend_encoding(
            encodings.build(name, SHAPE, options), method, train_length=128, length=256
        )
        assert [each["factor"] for each in facts["extended"].values()] == [factor]


@pytest.mark.parametrize(
    "inner", [{"inner": "rope"}, {"inner": "canon", "inner_options": {"inner": "rope"}}]
)
def test_a_temperature_acts_on_far_pairs_too(inner):
    trained = schemes.build("temperature", inner, SHAPE)
    after, _ = extend_encoding(
        trained, "self_extend", train_length=32, length=64, group=1
    )
    ours, expected = (
        attention(each, *inputs(), COUNTED, 1) for each in (after, trained)
    )
    torch.testing.assert_close(ours, expected, **CLOSE)


def test_a_temperature_around_heads_is_refused_where_it_would_miss_far_pairs():
    inner = {
        "inner": "heads",
        "inner_options": {"heads": [{"name": "rope"}, {"name": "none"}]},
    }
    after, _ = extend_encoding(
        encodings.build("temperature", SHAPE, inner),
        "rerope",
        train_length=32,
        length=64,
    )
    with pytest.raises(Undefined, match="put it into the entries"):
        attention(after, *inputs(), COUNTED, 1)
