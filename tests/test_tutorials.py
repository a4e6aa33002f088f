"""What tutorials on positional encoding claim, as tests: their numbers, identities and examples."""

import itertools
import math

import pytest
import torch

import posbench
from posbench.errors import UserError

FP32 = {"atol": 1e-5, "rtol": 1e-5}  # a few roundings of numbers of size 1
ABSOLUTE = ("index", "minmax", "binary", "sine", "sinusoidal", "learned")
RELATIVE = ("shaw", "t5", "rope", "alibi")


def build(name, d_model=32, n_heads=4, n_layers=1, train_length=128, **options):
    """A scheme for a small model, its learned parameters drawn afresh so that none is zero."""
    encoding = posbench.build_encoding(
        name, d_model=d_model, n_heads=n_heads, n_layers=n_layers, train_length=train_length, **options
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(generator=generator)
    return encoding


def code(name, positions, d_model=8, **options):
    """What a scheme adds to the token embeddings, (T, D), in its own size."""
    encoding = build(name, d_model=d_model, n_heads=1, scale=1.0, **options)
    positions = torch.as_tensor(positions)
    return encoding.embed(torch.zeros(1, len(positions), d_model), positions[None])[0]


def rotated(x, positions, **options):
    """RoPE's f(x, m): x (T, d) at positions (T,)."""
    encoding = build("rope", d_model=x.shape[-1], n_heads=1, **options)
    q, k = encoding.rotate(x[None, None], x[None, None], None, torch.as_tensor(positions)[None], 0)
    torch.testing.assert_close(q, k)
    return q[0, 0]


def plane(angle):
    """The 2 x 2 matrix R(angle) by which RoPE turns: with one pair, the angle is the position."""
    return rotated(torch.eye(2), [float(angle)] * 2).mT


def sentence(text):
    """Embeddings (1, T, 32) of a text's words: the same word, the same vector."""
    words = text.lower().split()
    rows = [torch.randn(32, generator=torch.Generator().manual_seed(sum(map(ord, word)))) for word in words]
    return torch.stack(rows)[None]


def attend(encoding, x, causal):
    """Logits (H, T, T) and outputs (T, D) of one attention layer of fixed random weights over embeddings x."""
    length = x.shape[1]
    x = encoding.embed(x, torch.arange(length)[None])
    weights = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1)) / 32**0.5
    q, k, v = (x @ weights.mT).view(3, 1, length, 4, 8).transpose(2, 3)
    logits = posbench.attention_logits(encoding, q, k, x=x, causal=causal)
    output = posbench.attention_output(encoding, q, k, v, x=x, causal=causal)
    return logits[0], output[0].transpose(0, 1).reshape(length, 32)


# -- without positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "order"),
    [
        ("I think therefore I am", "I am therefore I think", [0, 4, 2, 3, 1]),
        ("only who can prevent forest fires", "who can prevent forest fires only", [1, 2, 3, 4, 5, 0]),
        ("Warriors beat Celtics", "Celtics beat Warriors", [2, 1, 0]),
    ],
)
def test_without_positions_and_mask_a_sentence_and_its_shuffle_are_the_same(one, other, order):
    _, first = attend(build("none"), sentence(one), causal=False)
    _, second = attend(build("none"), sentence(other), causal=False)
    torch.testing.assert_close(second, first[order], **FP32)


@pytest.mark.parametrize("name", [*ABSOLUTE, *RELATIVE])
def test_every_scheme_tells_i_think_therefore_i_am_from_i_am_therefore_i_think(name):
    _, first = attend(build(name), sentence("I think therefore I am"), causal=False)
    _, second = attend(build(name), sentence("I am therefore I think"), causal=False)
    assert (second - first[[0, 4, 2, 3, 1]]).abs().max() > 1e-3


def test_under_a_causal_mask_the_last_word_of_one_layer_sees_no_order_without_positions():
    text = sentence("my daughter called her brother last night")
    shuffled = text[:, [3, 1, 0, 5, 2, 4, 6]]
    _, first = attend(build("none"), text, causal=True)
    _, second = attend(build("none"), shuffled, causal=True)
    torch.testing.assert_close(second[-1], first[-1], **FP32)
    assert (second[-2] - first[-2]).abs().max() > 1e-3  # the mask itself shows order to the others


@pytest.mark.parametrize("name", ["shaw", "t5", "rope"])
def test_swapping_warriors_and_celtics_changes_what_beat_pays_to_each(name):
    logits, _ = attend(build(name), sentence("Warriors beat Celtics"), causal=False)
    swapped, _ = attend(build(name), sentence("Celtics beat Warriors"), causal=False)
    assert (logits[:, 1, [0, 2]] - swapped[:, 1, [2, 0]]).abs().max() > 1e-3


def test_alibi_knows_how_far_but_without_a_mask_not_on_which_side():
    logits, _ = attend(build("alibi"), sentence("Warriors beat Celtics"), causal=False)
    swapped, _ = attend(build("alibi"), sentence("Celtics beat Warriors"), causal=False)
    torch.testing.assert_close(logits[:, 1, [0, 2]], swapped[:, 1, [2, 0]], **FP32)


# -- the index, normalised, in digits, in sines -----------------------------------------------------------------------


def test_index_grows_without_bound():
    norms = code("index", torch.arange(5000), direction="ones").norm(dim=-1)
    torch.testing.assert_close(norms, torch.arange(5000) * math.sqrt(8))


def test_index_in_a_channel_of_its_own_is_the_word_followed_by_its_number():
    encoding = build("index", d_model=4, n_heads=1, combine="concat", scale=1.0)
    words = torch.randn(1, 3, encoding.token_dim())
    expected = torch.cat([words, torch.tensor([[[0.0], [1.0], [2.0]]])], dim=-1)
    torch.testing.assert_close(encoding.embed(words, torch.arange(3)[None]), expected)


def test_minmax_changes_with_the_length_of_the_sequence():
    short, long = (code("minmax", torch.arange(length))[:, 0] for length in (32, 64))
    assert short[10].item() == pytest.approx(0.322581, abs=1e-6)
    assert long[10].item() == pytest.approx(0.158730, abs=1e-6)
    assert (short - long[:32]).abs().max().item() == pytest.approx(0.507937, abs=1e-6)
    assert short[-1] == long[-1] == 1


def test_minmax_by_training_length_does_not_change_with_the_length_of_the_sequence():
    short, long = (code("minmax", torch.arange(length), norm="length") for length in (32, 64))
    torch.testing.assert_close(short, long[:32])


def test_minmax_of_a_single_word_is_zero():
    assert code("minmax", [0]).abs().max() == 0


@pytest.mark.parametrize("name", [name for name in ABSOLUTE if name not in ("minmax", "learned")])
def test_codes_are_invariant_to_sequence_length(name):
    torch.testing.assert_close(code(name, torch.arange(32)), code(name, torch.arange(64))[:32], rtol=0, atol=0)


def test_binary_digits_count_with_the_fastest_first():
    digits = code("binary", torch.arange(8), digits=3)[:, :3]
    written = ["".join(str(int(digit)) for digit in row) for row in digits]
    assert written == ["000", "100", "010", "110", "001", "101", "011", "111"]


def test_binary_distances_between_neighbours_are_uneven():
    digits = code("binary", torch.arange(5), digits=3)
    assert (digits[1:] - digits[:-1]).abs().sum(-1).tolist() == [1, 2, 1, 3]


def test_binary_never_wraps_in_silence():
    encoding = build("binary", train_length=8)
    assert encoding.max_length == 8
    q = torch.zeros(1, 4, 9, 8)
    with pytest.raises(UserError, match=r"length 9 .*'binary' \(defined up to 8\)"):
        posbench.attention_logits(encoding, q, q)
    for positions in ([0, 8], [0, 9], [-1, 0]):
        with pytest.raises(UserError, match="3 digits count from 0 to 7"):
            encoding.embed(torch.zeros(1, 2, 32), torch.tensor([positions]))


def test_binary_is_not_continuous():
    with pytest.raises(UserError, match="whole positions"):
        code("binary", [0.0, 0.5])


def test_sine_gives_every_channel_its_own_period():
    table = code("sine", [0, 1, 2], d_model=4)
    expected = [[0, 0, 0, 0], [0.841471, 0.099833, 0.0099998, 0.001], [0.909297, 0.198669, 0.0199987, 0.002]]
    torch.testing.assert_close(table, torch.tensor(expected), atol=1e-6, rtol=0)
    # Periods run from 2π to nearly 10000 · 2π: a full turn brings a channel back.
    slowest = 2 * math.pi * 10000 ** (3 / 4)
    turned = code("sine", torch.tensor([5.0, 5.0 + 2 * math.pi, 5.0 + slowest], dtype=torch.float64), d_model=4)
    torch.testing.assert_close(turned[1, 0], turned[0, 0], **FP32)
    torch.testing.assert_close(turned[2, 3], turned[0, 3], **FP32)


def test_sines_alone_do_not_know_distance_and_sines_with_cosines_do():
    def spread_along_diagonals(table):
        gram = table.double() @ table.double().mT
        return max((gram.diagonal(k).max() - gram.diagonal(k).min()).item() for k in range(1, 10))

    assert spread_along_diagonals(code("sine", torch.arange(64))) > 0.5
    assert spread_along_diagonals(code("sinusoidal", torch.arange(64))) < 1e-5


# -- sinusoids --------------------------------------------------------------------------------------------------------


def test_sinusoidal_table_of_four_positions_and_eight_channels():
    expected = torch.tensor(
        [
            [0.0000e00, 1.0000e00, 0.0000e00, 1.0000e00, 0.0000e00, 1.0000e00, 0.0000e00, 1.0000e00],
            [8.4147e-01, 5.4030e-01, 9.9833e-02, 9.9500e-01, 9.9998e-03, 9.9995e-01, 1.0000e-03, 1.0000e00],
            [9.0930e-01, -4.1615e-01, 1.9867e-01, 9.8007e-01, 1.9999e-02, 9.9980e-01, 2.0000e-03, 1.0000e00],
            [1.4112e-01, -9.8999e-01, 2.9552e-01, 9.5534e-01, 2.9995e-02, 9.9955e-01, 3.0000e-03, 1.0000e00],
        ]
    )
    table = code("sinusoidal", torch.arange(4))
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-7)  # printed with five digits
    torch.testing.assert_close(table.norm(dim=1), torch.full((4,), 2.0))


def test_sinusoidal_angles_are_the_position_times_a_power_of_ten_per_pair():
    table = code("sinusoidal", torch.arange(4))
    radians = torch.atan2(table[:, 0::2], table[:, 1::2])
    expected = torch.arange(4.0)[:, None] * torch.tensor([1, 0.1, 0.01, 0.001])
    torch.testing.assert_close(radians, expected, **FP32)


@pytest.mark.parametrize("d_model", [8, 64, 512])
def test_every_sinusoidal_code_lies_on_the_sphere_of_radius_root_half_d(d_model):
    table = code("sinusoidal", torch.arange(1000), d_model=d_model)
    assert table.abs().max() <= 1
    torch.testing.assert_close(table.norm(dim=1), torch.full((1000,), math.sqrt(d_model / 2)))


@pytest.mark.parametrize("step", [1, 2, 17])
def test_a_step_along_sinusoids_is_one_linear_map_for_all_positions(step):
    theta = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    blocks = [[[math.cos(step * t), math.sin(step * t)], [-math.sin(step * t), math.cos(step * t)]] for t in theta]
    shift = torch.block_diag(*torch.tensor(blocks))  # T^k of PE[pos + k] = T^k PE[pos], for pairs (sin, cos)
    table = code("sinusoidal", torch.arange(100))
    torch.testing.assert_close(table[:-step] @ shift.mT, table[step:], **FP32)


@pytest.mark.parametrize("phi", [0.25, 1.0, 7.5])
def test_adding_an_angle_to_cosine_and_sine_is_a_rotation(phi):
    n = torch.arange(50.0)
    here, there = code("sinusoidal", n, d_model=2).flip(-1), code("sinusoidal", n + phi, d_model=2).flip(-1)
    turn = torch.tensor([[math.cos(phi), -math.sin(phi)], [math.sin(phi), math.cos(phi)]])
    torch.testing.assert_close(here @ turn.mT, there, **FP32)  # (cos n, sin n) to (cos(n + φ), sin(n + φ))


# -- learned ----------------------------------------------------------------------------------------------------------


def test_learned_positions_end_at_the_training_length():
    encoding = build("learned", train_length=8)
    encoding.embed(torch.zeros(1, 8, 32), torch.arange(8)[None])
    with pytest.raises(UserError, match=r"length 9 .*'learned' \(defined up to 8\)"):
        encoding.embed(torch.zeros(1, 9, 32), torch.arange(9)[None])


# -- relative positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("causal", "used"), [(False, 9), (True, 5)])
def test_shaw_clipped_at_four_learns_nine_vectors_of_which_five_words_use(causal, used):
    encoding = build("shaw", max_distance=4)
    q, k, v = torch.randn(3, 1, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    posbench.attention_output(encoding, q, k, v, causal=causal).square().sum().backward()
    for table in (encoding.keys, encoding.values):
        assert table.shape == (1, 9, 8)
        assert (table.grad[0].abs().sum(-1) > 0).sum() == used


def test_shaw_sees_one_distance_beyond_the_clip():
    encoding = build("shaw", max_distance=4)
    q = torch.randn(1, 4, 1, 8).expand(1, 4, 12, 8)
    logits = posbench.attention_logits(encoding, q, torch.zeros(1, 4, 12, 8))[0, :, -1]  # distances 11 .. 0
    torch.testing.assert_close(logits[:, :8], logits[:, :1].expand(4, 8))
    assert (logits[:, 8:].diff(dim=-1).abs() > 0).all()


def test_shaw_changes_values_unless_told_not_to():
    q = torch.randn(1, 4, 6, 8)
    zeros = torch.zeros_like(q)
    assert posbench.attention_output(build("shaw"), q, q, zeros).abs().max() > 0.1
    assert posbench.attention_output(build("shaw", values=False), q, q, zeros).abs().max() == 0


def t5_buckets(distances, **options):
    encoding = build("t5", n_heads=1, **options)
    with torch.no_grad():
        encoding.table.copy_(torch.arange(len(encoding.table))[:, None])
    return encoding.distance_bias(torch.as_tensor(distances), 0)[0].int().tolist()


def test_t5_buckets_are_exact_up_to_15_and_then_widen():
    expected = {
        **{r: r for r in range(17)},
        **{17: 16, 18: 16, 19: 17, 20: 17, 21: 18, 23: 18, 24: 19, 25: 19, 31: 21, 32: 21, 40: 23, 63: 26, 64: 26},
        **{100: 30, 112: 30, 113: 31, 127: 31, 128: 31, 1000: 31, -1: 0},
    }
    assert t5_buckets(list(expected)) == list(expected.values())


def test_t5_bucket_sizes_grow():
    buckets = t5_buckets(range(129))
    sizes = [len(list(group)) for _, group in itertools.groupby(buckets)]
    assert sizes == [1] * 16 + [3, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 10, 10, 12, 14, 16]
    assert sorted(set(buckets)) == list(range(32))


def test_t5_adds_a_scalar_per_head_and_distance_the_same_in_every_layer():
    encoding = build("t5", n_layers=3)
    assert [tuple(p.shape) for p in encoding.parameters()] == [(32, 4)]
    q, k = torch.randn(2, 1, 4, 6, 8)
    added = [
        posbench.attention_logits(encoding, q, k, layer=layer) - posbench.attention_logits(build("none"), q, k)
        for layer in range(3)
    ]
    for r in range(6):
        diagonals = torch.stack([bias[0].diagonal(-r, 1, 2) for bias in added])
        torch.testing.assert_close(diagonals, encoding.table[r].view(1, 4, 1).expand_as(diagonals), **FP32)


@pytest.mark.parametrize(
    ("n_heads", "slopes"),
    [
        (1, [2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
        (8, [2**-h for h in range(1, 9)]),
        (12, [*(2**-h for h in range(1, 9)), 0.707107, 0.353553, 0.176777, 0.088388]),
    ],
)
def test_alibi_slopes_for_any_number_of_heads(n_heads, slopes):
    bias = build("alibi", d_model=8 * n_heads, n_heads=n_heads).distance_bias(torch.tensor([0, 1, 10]), 0)
    expected = -torch.tensor(slopes)[:, None] * torch.tensor([0, 1, 10])
    torch.testing.assert_close(bias, expected, atol=1e-5, rtol=0)  # slopes written with six digits, times 10


# -- rotations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "b"), [(0.3, 1.1), (2.0, -5.5), (math.pi, 40.0)])
def test_rotations_compose_and_their_transpose_undoes_them(a, b):
    torch.testing.assert_close(plane(-a), plane(a).mT, **FP32)
    torch.testing.assert_close(plane(a).mT @ plane(a), torch.eye(2), **FP32)
    torch.testing.assert_close(plane(a) @ plane(b), plane(a + b), **FP32)
    expected = torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]])
    torch.testing.assert_close(plane(a), expected, **FP32)


@pytest.mark.parametrize(("r", "theta", "alpha"), [(1.0, 0.4, 0.5), (2.5, 2.0, -3.0)])
def test_a_vector_at_angle_theta_turns_to_theta_plus_alpha(r, theta, alpha):
    turned = plane(alpha) @ torch.tensor([r * math.cos(theta), r * math.sin(theta)])
    expected = torch.tensor([r * math.cos(theta + alpha), r * math.sin(theta + alpha)])
    torch.testing.assert_close(turned, expected, **FP32)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_position_zero_leaves_a_vector_as_it_is_and_no_position_changes_its_length(layout):
    x = torch.randn(200, 16)
    torch.testing.assert_close(rotated(x, [0] * 200, layout=layout), x, rtol=0, atol=0)
    torch.testing.assert_close(rotated(x, torch.arange(200), layout=layout).norm(dim=-1), x.norm(dim=-1))


def test_angles_are_an_arithmetic_progression_from_zero():
    x = torch.randn(1, 8).expand(100, 8)
    numbers = torch.view_as_complex(rotated(x, torch.arange(100), layout="interleaved").unflatten(-1, (-1, 2)))
    torch.testing.assert_close((numbers[0] / numbers[0]).angle(), torch.zeros(4))
    steps = (numbers[1:] / numbers[:-1]).angle()
    expected = torch.tensor([1, 0.1, 0.01, 0.001]).expand(99, 4)
    torch.testing.assert_close(steps, expected, **FP32)


def test_equal_positions_leave_the_dot_product_alone():
    q, k = torch.randn(2, 50, 8)
    turned = (rotated(q, torch.arange(50)) * rotated(k, torch.arange(50))).sum(-1)
    torch.testing.assert_close(turned, (q * k).sum(-1), **FP32)


def test_complex_numbers_rotation_matrices_and_both_layouts_are_one_scheme():
    x = torch.randn(30, 8)
    m = torch.arange(30)
    theta = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    interleaved = rotated(x, m, layout="interleaved")

    turns = torch.polar(torch.ones(30, 4, dtype=torch.float64), m[:, None] * theta)
    as_complex = torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turns
    torch.testing.assert_close(interleaved, torch.view_as_real(as_complex).flatten(-2).float(), **FP32)

    for i in range(30):
        blocks = [[[math.cos(i * t), -math.sin(i * t)], [math.sin(i * t), math.cos(i * t)]] for t in theta]
        as_matrix = torch.block_diag(*torch.tensor(blocks)) @ x[i]
        torch.testing.assert_close(interleaved[i], as_matrix, **FP32)

    halves = [0, 2, 4, 6, 1, 3, 5, 7]  # where the half layout keeps the interleaved channels
    torch.testing.assert_close(rotated(x[:, halves], m, layout="half"), interleaved[:, halves], **FP32)


def test_a_score_is_the_real_part_of_q_times_conjugate_k_turned_by_their_distance():
    q, k = torch.randn(2, 1, 1, 9, 2)
    logits = posbench.attention_logits(build("rope", d_model=2, n_heads=1), q, k, causal=False)[0, 0]
    q, k = torch.view_as_complex(q[0, 0]), torch.view_as_complex(k[0, 0])
    m, n = torch.arange(9.0)[:, None], torch.arange(9.0)
    expected = (q[:, None] * k.conj() * torch.exp(1j * (m - n))).real / math.sqrt(2)
    torch.testing.assert_close(logits, expected, **FP32)


@pytest.mark.parametrize(
    ("k", "m", "n", "score"),
    [
        ([1.0, 0.0], 3, 1, math.cos(2)),
        ([0.0, 1.0], 3, 1, math.sin(2)),
        ([0.0, 1.0], 1, 3, -math.sin(2)),  # order shows in the sign
    ],
)
def test_worked_scores_in_two_dimensions(k, m, n, score):
    turned_q, turned_k = rotated(torch.tensor([[1.0, 0.0], k]), [m, n])
    assert (turned_q @ turned_k).item() == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("interleaved", [-1.142640, 1.922076, 2.959851, 4.029800]),
        ("half", [-1.984111, 1.959901, 2.462378, 4.019800]),
    ],
)
def test_worked_rotation_in_four_dimensions(layout, expected):
    turned = rotated(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [1], layout=layout)
    torch.testing.assert_close(turned, torch.tensor([expected]), atol=2e-6, rtol=0)


def test_a_head_of_256_is_128_planes_that_turn_independently():
    turned = rotated(torch.eye(256), [1] * 256, layout="interleaved")
    blocks = turned.view(128, 2, 128, 2)
    outside = blocks * (1 - torch.eye(128)).view(128, 1, 128, 1)
    assert outside.abs().max() == 0
    angles = torch.atan2(turned[0::2, 1::2].diagonal(), turned[0::2, 0::2].diagonal())
    assert len(angles.unique()) == 128


# -- absolute against relative ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RELATIVE)
def test_a_relative_scheme_gives_equal_logits_for_equal_distances_wherever_the_words_stand(name):
    encoding = build(name)
    q, k = torch.randn(2, 1, 4, 10, 8)
    here = posbench.attention_logits(encoding, q, k, positions=torch.arange(10), causal=False)
    for offset in (1, 7, 190):
        there = posbench.attention_logits(encoding, q, k, positions=torch.arange(10) + offset, causal=False)
        torch.testing.assert_close(there, here, **FP32)


@pytest.mark.parametrize("name", ["none", *RELATIVE])
def test_daughter_and_called_keep_their_logit_as_they_move_under_a_relative_scheme(name):
    first, _ = attend(build(name), sentence("my daughter called her brother last night"), causal=True)
    second, _ = attend(build(name), sentence("last night my daughter called her brother"), causal=True)
    torch.testing.assert_close(second[:, 4, 3], first[:, 2, 1], **FP32)


@pytest.mark.parametrize("name", ABSOLUTE)
def test_daughter_and_called_change_their_logit_as_they_move_under_an_absolute_scheme(name):
    first, _ = attend(build(name), sentence("my daughter called her brother last night"), causal=True)
    second, _ = attend(build(name), sentence("last night my daughter called her brother"), causal=True)
    assert (second[:, 4, 3] - first[:, 2, 1]).abs().max() > 1e-3
