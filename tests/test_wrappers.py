"""Encodings around others and layers that differ: the same model on every path that
computes it.
"""

import dataclasses
import re
from typing import Any

import pytest
import schemes
import torch
from schemes import layer_attention as attention
from torch import Tensor
from torch.testing import assert_close

from posbench import encodings
from posbench.encodings.base import Layer, Shape
from posbench.encodings.distance import ALiBi
from posbench.encodings.extend import extend_encoding
from posbench.encodings.temperature import entmax
from posbench.errors import Undefined, UserError
from posbench.model.standalone import attention_logits, attention_output
from posbench.training.step import set_progress

SHAPE = Shape(d_model=32, n_heads=4, n_layers=4, train_length=32)
LENGTH = 40
CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # fp32 sums in another order
COUNTED = torch.arange(LENGTH)[None]


def build(name: str, **options: Any) -> Any:
    return encodings.build(name, SHAPE, options)


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return schemes.layer_inputs(SHAPE, length)


RULES = [
    ("ssmax", [0.0, 1.0, 2.0]),
    ("mistral_large4", [1.0, 1.0, 1.0]),
    ("logn", [1.0, 1.0, 2.0]),
]


@pytest.mark.parametrize(("rule", "expected"), RULES)
def test_a_temperature_starts_at_1_at_the_training_length(rule, expected):
    n = torch.tensor([[[1, SHAPE.train_length, SHAPE.train_length**2]]])
    temperature = build("temperature", rule=rule)
    factor = temperature.factor(n, Layer(index=1, positions=n[0]))
    of_each_head = torch.tensor(expected).expand(1, 4, 3)
    assert_close(factor.expand(1, 4, 3), of_each_head)


SENSELESS = [
    ("temperature", "gated_delta", {}),
    ("temperature", "tapa", {}),
    ("temperature", "canon", {"inner": "tapa"}),
    ("scale_invariant", "gated_delta", {}),
]


@pytest.mark.parametrize(("name", "inner", "options"), SENSELESS)
def test_a_change_of_logits_is_refused_where_it_has_no_meaning(name, inner, options):
    with pytest.raises(UserError, match="has no meaning around"):
        build(name, inner=inner, inner_options=options)


@pytest.mark.parametrize("name", ["temperature", "scale_invariant"])
@pytest.mark.parametrize("inner", ["stick_breaking", "fox", "learned_sinks", "entmax"])
def test_a_change_of_logits_goes_around_what_attends_by_itself(name, inner):
    plain = outputs(build(inner))
    changed = outputs(build(name, inner=inner))
    assert not torch.allclose(plain, changed)


def test_entmax_has_the_weights_that_its_authors_print():
    """The example in the readme of deep-spin/entmax."""
    weights = entmax(torch.tensor([-2, 0, 0.5]), 1.5)
    printed = torch.tensor([0.0, 0.3260, 0.6740])
    assert_close(weights, printed, atol=5e-5, rtol=0.0)


DROPPED = {"name": "drope", "drop_at": 0.75, "base": 500.0}


def outputs(encoding: Any, layer: int = 1, **limits: Any) -> Tensor:
    """Return the attention of a layer for fixed inputs at positions 0, 1, ..."""
    return attention(encoding, *inputs(), COUNTED, layer, **limits)


DROPPING = [
    (build("drope", drop_at=0.75, base=500.0), None),
    (build("layered", layers=[{**DROPPED, "window": 5}]), 5),
    (build("heads", heads=[DROPPED]), None),
]


@pytest.mark.parametrize(("encoding", "window"), DROPPING)
def test_drope_is_rope_before_the_drop_and_nothing_after_it(encoding, window):
    plain_rope = build("rope", base=500.0)
    no_encoding = build("none")
    rope = outputs(plain_rope, window=window)
    none = outputs(no_encoding, window=window)

    before_a_run = outputs(encoding)  # as after one
    assert torch.equal(before_a_run, none)
    for done in (0.0, 0.74):
        set_progress(encoding, done)
        made = outputs(encoding)
        assert torch.equal(made, rope)
    for done in (0.75, 1.0):
        set_progress(encoding, done)
        made = outputs(encoding)
        assert torch.equal(made, none)


class Near(ALiBi):
    """A class of a user's that sees four tokens."""

    window = 4


WINDOWS = [(None, 4), (3, 3), (9, 4)]


@pytest.mark.parametrize(("window", "n_visible"), WINDOWS)
def test_the_narrower_window_of_a_class_and_of_a_layer_holds(window, n_visible):
    encodings.register(Near)
    layered = build("layered", layers=[{"name": "near", "window": window}])
    q, k, *_ = inputs()
    logits = attention_logits(layered, q, k)
    last_row = logits[0, 0, -1]
    assert last_row.isfinite().sum() == n_visible


def test_a_class_with_a_window_is_refused_in_heads():
    encodings.register(Near)
    with pytest.raises(UserError, match="'near' acts on all heads at once"):
        build("heads", heads=[{"name": "near"}])


IDS = torch.zeros(3, 30, dtype=torch.long)
WHOLE = torch.arange(30)


def drawn(encoding: Any, times: int, ids: Tensor = IDS) -> Tensor:
    """Return what is drawn in training, (times · B, T)."""
    stream = torch.Generator().manual_seed(0)
    batches = [encoding.positions(ids, stream) for _ in range(times)]
    return torch.cat(batches)


def test_randomized_draws_each_position_as_often():
    encoding = build("randomized", max_length=40)
    positions = drawn(encoding, 1000, IDS[:1, :10])
    counts = positions.flatten().bincount(minlength=40)
    deviation = (1000 * 0.25 * 0.75) ** 0.5
    farthest = (counts - 250).abs().max()
    assert farthest < 5 * deviation


def test_shape_starts_anywhere_below_its_shift_in_training():
    encoding = build("shape", shift=7)
    positions = drawn(encoding, 200)
    first = positions[:, 0].tolist()
    assert (positions.diff() == 1).all()
    assert set(first) == set(range(7))


def test_shape_starts_behind_its_shift_in_evaluation():
    encoding = build("shape", shift=7).eval()
    positions = encoding.positions(IDS, None)
    assert torch.equal(positions, 7 + WHOLE[None])


def test_pose_jumps_once_where_and_as_far_as_its_authors_do():
    encoding = build("pose", max_length=SHAPE.train_length + 8)
    jumps = drawn(encoding, 2000).diff() - 1
    sizes, places = jumps.max(dim=-1)
    assert torch.equal(sizes, jumps.sum(-1))
    assert set(sizes.tolist()) == set(range(9))
    first_chunks = 1 + places[sizes > 0]
    assert set(first_chunks.tolist()) == set(range(1, 17))


@pytest.mark.parametrize("name", ["randomized", "pose"])
def test_positions_need_a_range_that_holds_the_training_length(name):
    with pytest.raises(UserError, match=r"encoding\.max_length is 0"):
        build(name, max_length=0)


def test_pose_counts_tokens_in_evaluation():
    positions = build("pose").eval().positions(IDS, None)
    assert torch.equal(positions, WHOLE[None])


def test_cape_moves_all_positions_of_a_sequence_alike():
    encoding = build("cape", global_shift=4.0, local_shift=0.0, scaling=1.0)
    moved = drawn(encoding, 300) - WHOLE
    first = moved[:, :1]
    assert_close(moved, first.expand_as(moved))
    assert 3.8 < moved.max() <= 4
    assert -4 <= moved.min() < -3.8


def test_cape_jitters_each_position():
    encoding = build("cape", global_shift=0.0, local_shift=0.5, scaling=1.0)
    moved = drawn(encoding, 300) - WHOLE
    spread = moved.amax(1) - moved.amin(1)
    assert spread.min() > 0.1
    assert 0.475 < moved.max() <= 0.50001
    assert -0.50001 <= moved.min() < -0.475


def test_cape_squeezes_as_often_as_it_stretches():
    encoding = build("cape", global_shift=0.0, local_shift=0.0, scaling=1.25)
    positions = drawn(encoding, 300)
    stretches = positions[:, 1:] / WHOLE[1:]
    mean = float(stretches.log().mean())
    assert 0.8 <= stretches.min() < 0.81
    assert 1.24 < stretches.max() <= 1.2501
    assert abs(mean) < 0.05


def test_cape_counts_tokens_in_evaluation():
    encoding = build("cape", scaling=1.25).eval()
    positions = encoding.positions(IDS, None)
    assert torch.equal(positions, WHOLE[None])


DIGITS = tuple("0123456789+=")


ANYWHERE = [
    ("abacus", {"max_offset": 5, "rows": 8}, "12+345=+7777", range(6)),
    ("coupling", {"max_position": 8}, "653+049=2070", range(4)),
]


@pytest.mark.parametrize(("name", "options", "problem", "offsets"), ANYWHERE)
def test_digits_begin_anywhere_in_training_by_a_draw_that_follows_from_the_update(
    name, options, problem, offsets
):
    shape = dataclasses.replace(SHAPE, vocabulary=DIGITS)
    encoding: Any = schemes.build(name, options, shape)
    last = len(encoding.table) - 1
    digits = [DIGITS.index(token) for token in problem]
    ids = torch.tensor([digits])
    positions = COUNTED[:, : len(problem)]
    x = schemes.random(1, len(problem), SHAPE.d_model)

    def rows() -> Tensor:
        """Return, for each token, the row of the table that is added to it."""
        added = encoding.embed(x, positions, ids) - x
        difference = added[:, :, None] - encoding.table
        distance = difference.abs().sum(-1)
        return distance.argmin(-1)

    encoding.eval()
    places = rows()
    encoding.train()
    drawn = []
    for update in [*range(100), 99, 7]:
        set_progress(encoding, update / 100)
        offset = int((rows() - places).max())
        moved = (places + offset).clamp(max=last)
        expected = torch.where(places > 0, moved, 0)
        assert torch.equal(rows(), expected)
        drawn.append(offset)

    assert set(drawn) == set(offsets)
    # a continued run draws alike
    assert drawn[100] == drawn[99]
    assert drawn[101] == drawn[7]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", schemes.NAMES)
def test_heads_may_be_wider_than_their_share_of_the_model_and_share_keys_and_values(
    name,
):
    shape = Shape(24, 4, 2, 32, head_dim=8, n_kv_heads=2)
    encoding = schemes.build(name, {}, shape)
    counted = schemes.counts_tokens(encoding)
    positions = COUNTED[:, :12]
    q, k, v, _ = inputs(12)
    x = schemes.random(2, 12, 24, seed=3)
    k = k[:, :2]
    v = v[:, :2]

    out = attention(encoding, q, k, v, x, positions, 1, consecutive=counted)

    every_k = k.repeat_interleave(2, dim=1)
    every_v = v.repeat_interleave(2, dim=1)
    expected = attention_output(encoding, q, every_k, every_v, x, 1, positions)
    assert_close(out, expected, **CLOSE)


SQUEEZED = ["partial_rope", "lerope", "grape_m", "pope", "repo"]


@pytest.mark.parametrize("name", SQUEEZED)
@pytest.mark.parametrize("method", ["pi", "ntk", "ntk_by_parts", "yarn", "llama3"])
def test_an_extension_to_the_trained_length_changes_nothing(name, method):
    trained = schemes.build(name, {}, SHAPE)
    expected = attention_output(trained, *inputs(32))

    after, _ = extend_encoding(trained, method, 32, 32)

    made = attention_output(after, *inputs(32))
    assert torch.equal(made, expected)


@pytest.mark.parametrize("name", SQUEEZED)
def test_interpolated_positions_are_the_trained_ones(name):
    trained = schemes.build(name, {}, SHAPE)
    after, _ = extend_encoding(trained, "pi", 128, 32)
    q, k, _, x = inputs(20)
    places = COUNTED[:, :20]
    ours = attention_logits(after, q, k, x, positions=4 * places)
    expected = attention_logits(trained, q, k, x, positions=places)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SQUEEZED)
def test_yarn_multiplies_the_attention_factor(name):
    trained: Any = schemes.build(name, {}, SHAPE)
    after, facts = extend_encoding(trained, "yarn", 64, 32)
    expected = trained.attention_factor * facts["attention_factor"]
    assert after.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize("method", ["yarn", "rerope"])
def test_a_wrapper_hands_an_extension_on_to_those_it_is_for(method):
    entries = [
        {"name": "rope", "window": 12},
        {"name": "none"},
        {"name": "rope", "chunk": LENGTH},  # a chunk of all tokens hides none
    ]
    layered = build("layered", layers=entries)
    trained_first = outputs(layered, layer=0)
    trained_second = outputs(layered, layer=1)

    after, facts = extend_encoding(layered, method, 128, 32)

    trained_rope = build("rope")
    rope, rope_facts = extend_encoding(trained_rope, method, 128, 32)
    windowed = outputs(rope, layer=0, window=12)
    whole = outputs(rope, layer=0)
    first = outputs(after, layer=0)
    second = outputs(after, layer=1)
    third = outputs(after, layer=2)
    assert torch.equal(first, windowed)
    assert torch.equal(second, trained_second)
    assert_close(third, whole, **CLOSE)
    of_layers = {"rope 0": rope_facts, "rope 2": rope_facts}
    assert facts == {"dynamic": rope_facts["dynamic"], "extended": of_layers}
    again = outputs(layered, layer=0)  # the trained one is as it was
    assert torch.equal(again, trained_first)


PATTERN = [
    {"name": "rope", "window": 12},
    {"name": "rope", "base": 500},
    {"name": "rope", "chunk": 8},
    {"name": "none"},
]


@pytest.mark.parametrize(
    ("layers", "changed"),
    [("all", {0, 1, 2}), ("local", {0, 2}), ("global", {1})],
)
@pytest.mark.parametrize("method", ["pi", "abf", "yarn"])
def test_an_extension_changes_the_frequencies_of_the_named_layers(
    method, layers, changed
):
    trained: Any = build("layered", layers=PATTERN)

    after, facts = extend_encoding(trained, method, 128, 32, layers)

    assert facts["extended"].keys() == {f"rope {number}" for number in changed}
    for number, base in enumerate([10_000.0, 500.0, 10_000.0]):
        wanted: Any = build("rope", base=base)
        if number in changed:
            wanted, _ = extend_encoding(wanted, method, 128, 32)
        rope = after.inner_encodings[number]
        assert torch.equal(rope.inv_freq(), wanted.inv_freq())
        assert rope.attention_factor == wanted.attention_factor
    assert after.inner_encodings[3] is trained.inner_encodings[3]


def test_layers_of_a_pattern_inside_a_wrapper_are_named_alike():
    around = build("shape", inner="layered", inner_options={"layers": PATTERN})
    _, facts = extend_encoding(around, "pi", 128, 32, "global")
    assert facts["extended"]["layered 0"]["extended"].keys() == {"rope 1"}


NO_SUCH_LAYERS = [
    ("rope", "pi", "global", Undefined, "is for patterns of layers"),
    ("layered", "pi", "global", Undefined, "no global layers that 'pi' extends"),
    ("layered", "pi", "globl", UserError, "unknown layers 'globl': did you mean 'gl"),
    ("layered", "pi", 3, UserError, "unknown layers '3' (there are all, global, loc"),
]


@pytest.mark.parametrize(("name", "method", "layers", "error", "says"), NO_SUCH_LAYERS)
def test_layers_that_are_not_there_are_refused(name, method, layers, error, says):
    with pytest.raises(error, match=re.escape(says)):
        extend_encoding(build(name), method, 128, 32, layers)


FACTORS = [
    ("shape", {"inner": "rope", "shift": 10}, "pi", 2.0),
    ("temperature", {}, "pi", 2.0),
    ("shape", {"inner": "sinusoidal", "shift": 10}, "interpolate", 266 / 138),
]


@pytest.mark.parametrize(("name", "options", "method", "factor"), FACTORS)
def test_an_extension_in_a_wrapper_goes_by_the_length_that_was_trained_last(
    name, options, method, factor
):
    """A run that began from another has the shape of that one, and a training length of
    its own.
    """
    trained = build(name, **options)
    _, facts = extend_encoding(trained, method, 256, 128)
    (inner,) = facts["extended"].values()
    assert inner["factor"] == factor


AROUND_ROPE = [
    {"inner": "rope"},
    {"inner": "canon", "inner_options": {"inner": "rope"}},
]


@pytest.mark.parametrize("inner", AROUND_ROPE)
def test_a_temperature_acts_on_far_pairs_too(inner):
    trained = schemes.build("temperature", inner, SHAPE)
    after, _ = extend_encoding(trained, "self_extend", 64, 32, group=1)
    ours = outputs(after)
    expected = outputs(trained)
    assert_close(ours, expected, **CLOSE)


def test_a_temperature_around_heads_is_refused_where_it_would_miss_far_pairs():
    heads = {"heads": [{"name": "rope"}, {"name": "none"}]}
    trained = build("temperature", inner="heads", inner_options=heads)
    after, _ = extend_encoding(trained, "rerope", 64, 32)
    with pytest.raises(Undefined, match="put it into the entries"):
        outputs(after)
