"""Encodings around others and layers that differ: the same model on every path that computes it."""

import dataclasses
import itertools
from typing import Any

import pytest
import schemes
import torch
from schemes import layer_attention as attention
from torch import Tensor

from posbench import encodings
from posbench.config import identity
from posbench.config.schema import Config
from posbench.encodings.base import Shape
from posbench.encodings.extend import extended, methods_of
from posbench.errors import Undefined, UserError
from posbench.model import attention as kernels
from posbench.model.gpt import build
from posbench.model.standalone import attention_logits, attention_output
from posbench.training.step import tell_progress

SHAPE = Shape(d_model=32, n_heads=4, n_layers=4, train_length=32)
LENGTH = 40
CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # fp32 sums in another order
MIXED = [
    {"name": "rope", "window": 5},
    {"name": "fox", "window": 7},
    {"name": "deberta"},  # its logits have a size of their own
    {"name": "shaw"},
]


def inputs(length: int = LENGTH, kv_heads: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = schemes.random(2, 4, length, 8, seed=0)
    k, v = (schemes.random(2, kv_heads, length, 8, seed=seed) for seed in (1, 2))
    return q, k, v, schemes.random(2, length, 32, seed=3)


def counting(length: int = LENGTH) -> Tensor:
    return torch.arange(length)[None]


def ids_in(vocabulary: tuple[str, ...], *rows: str) -> Tensor:
    return torch.tensor([[vocabulary.index(token) for token in row.split(" ")] for row in rows])


def with_vocabulary(*vocabulary: str) -> Shape:
    return dataclasses.replace(SHAPE, vocabulary=vocabulary)


def row_of(encoding: Any, x: Tensor, ids: Tensor) -> Tensor:
    """The row of an encoding's table that is added to each token."""
    added = encoding.embed(x, counting(ids.shape[1]), ids) - x
    return added[:, :, None].sub(encoding.table).abs().sum(-1).argmin(-1)


# -- layered -----------------------------------------------------------------------------------------------------------


def test_a_layer_of_layered_is_its_encoding_under_its_window() -> None:
    layered = schemes.build("layered", {"layers": MIXED}, SHAPE)
    for layer, entry in enumerate(MIXED):
        alone = schemes.build(entry["name"], {}, dataclasses.replace(SHAPE, n_layers=1))
        alone.load_state_dict(layered.inners[layer].state_dict())
        given = (*inputs(), counting(), 0)
        free, narrow = (attention(alone, *given, window, consecutive=True) for window in (None, entry.get("window")))
        assert torch.equal(attention(layered, *inputs(), counting(), layer, consecutive=True), narrow)
        assert torch.allclose(free, narrow, **CLOSE) != ("window" in entry)


@torch.no_grad()
def test_wrappers_keep_the_cheap_form_of_their_encodings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "logits_by_rows", lambda *_: pytest.fail("rows where a kernel would do"))
    monkeypatch.setattr(kernels, "CHANNELS_FROM", 1)
    sharpened = [("temperature", {"inner": inner}) for inner in ("none", "rope", "alibi", "fox")]
    for name, options in (("layered", {"layers": MIXED[:2]}), *sharpened):
        encoding = schemes.build(name, options, SHAPE)
        for layer in range(SHAPE.n_layers):
            attention(encoding, *inputs(), counting(), layer, consecutive=True)
    jumping = schemes.positions_of("gaps", 2, LENGTH, 64)
    attention(schemes.build("randomized", {}, SHAPE), *inputs(), jumping, 0)


def with_encoding(config: Config, name: str, **options: Any) -> Config:
    return dataclasses.replace(config, encoding=dataclasses.replace(config.encoding, name=name, options=options))


def test_a_model_of_equal_layers_is_the_model_of_their_encoding(tiny_config: Config) -> None:
    ids = torch.randint(257, (2, 16))
    for name in ("rope", "t5", "fox"):
        plain = build(with_encoding(tiny_config, name), 257)
        same = build(with_encoding(tiny_config, "layered", layers=[{"name": name}]), 257)
        assert torch.equal(plain(ids), same(ids))
        assert sum(p.numel() for p in same.encoding.parameters()) == sum(p.numel() for p in plain.encoding.parameters())


def test_layers_add_to_the_input_once_and_one_of_them_may_concatenate() -> None:
    layered = encodings.build("layered", SHAPE, {"layers": [{"name": "sinusoidal"}, {"name": "rope"}]})
    x = torch.zeros(1, 9, 32)
    assert torch.equal(layered.embed(x, counting(9)), encodings.build("sinusoidal", SHAPE).embed(x, counting(9)))
    entries = [{"name": "learned"}, {"name": "sine", "combine": "concat"}]
    layered = encodings.build("layered", SHAPE, {"layers": entries})
    assert layered.token_dim() == 24
    embedded = layered.embed(torch.zeros(1, 9, 24), counting(9))
    torch.testing.assert_close(embedded[..., :24], layered.inner_encodings[0].table[None, :9, :24])
    with pytest.raises(UserError, match=r"encoding\.layers has several encodings that concatenate"):
        encodings.build("layered", SHAPE, {"layers": [*entries, {"name": "index", "combine": "concat"}]})


def test_layered_ends_where_the_first_of_its_layers_ends() -> None:
    layered = encodings.build("layered", SHAPE, {"layers": [{"name": "rope"}, {"name": "learned"}]})
    assert layered.max_length == 32
    with pytest.raises(Undefined, match=r"length 40 is beyond the end of 'layered' \(defined up to 32\)"):
        attention(layered, *inputs(), counting(), 0)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "layered", "layers": [{"name": "rope"}, {"name": "alibi", "window": 6}]},
        {"name": "temperature", "inner": "layered", "inner_options": {"layers": [{"name": "rope", "window": 9}]}},
        {"name": "dape", "inner": "alibi"},
    ],
    ids=lambda entry: entry["name"],
)
def test_a_wrapper_in_a_layer_is_under_the_window_that_the_layer_is_given(entry: dict[str, Any]) -> None:
    free, narrow = (schemes.build("layered", {"layers": [entry | window]}, SHAPE) for window in ({}, {"window": 4}))
    for layer, consecutive in itertools.product(range(2), (False, True)):
        given = (*inputs(), counting(), layer)
        windowed = attention(narrow, *given, consecutive=consecutive)
        assert torch.equal(windowed, attention(free, *given, window=4, consecutive=consecutive))
        assert not torch.allclose(windowed, attention(free, *given))


def test_a_wrapper_goes_around_a_wrapper() -> None:
    encoding = encodings.build("randomized", SHAPE, {"inner": "layered", "inner_options": {"layers": MIXED}})
    used = [schemes.used_at(encoding, counting(), layer)[0] for layer in range(4)]
    assert [(each.name, each.window) for each in used] == [(e["name"], e.get("window")) for e in MIXED]
    assert {"positions", "rotate", "key_bias"} <= encoding.hooks


# -- temperature and sinks ---------------------------------------------------------------------------------------------


def test_a_temperature_in_some_layers_only_is_under_their_windows_and_leaves_the_others_alone() -> None:
    sharp = {"name": "temperature", "inner": "rope", "rule": "inkling", "alpha": 1.0, "floor": 4}
    layered = encodings.build("layered", SHAPE, {"layers": [{**sharp, "window": 5}, {"name": "rope"}]})
    q, k, v, x = inputs()
    factor = 1 + (torch.arange(1, LENGTH + 1) / 4).clamp(min=1).log()
    rope = encodings.build("rope", SHAPE)
    for layer, wider, window in ((0, q * factor[:, None], 5), (1, q, None)):
        expected = attention(rope, wider, k, v, x, counting(), layer, window=window)
        for consecutive in (True, False):
            ours = attention(layered, q, k, v, x, counting(), layer, consecutive=consecutive)
            torch.testing.assert_close(ours, expected, **CLOSE)


def test_what_a_temperature_learns_starts_as_the_logits_of_its_encoding_at_the_training_length() -> None:
    n = torch.tensor([1, SHAPE.train_length, SHAPE.train_length**2])
    for rule, expected in (("ssmax", [0.0, 1.0, 2.0]), ("mistral_large4", [1.0] * 3), ("logn", [1.0, 1.0, 2.0])):
        temperature: Any = encodings.build("temperature", SHAPE, {"rule": rule})
        factor = temperature.factor(n, 1).expand(4, 3)
        torch.testing.assert_close(factor, torch.tensor(expected).expand(4, 3), msg=rule)


@pytest.mark.parametrize(
    ("name", "inner", "sentence"),
    [
        *(("learned_sinks", inner, "which replaces the softmax") for inner in ("shaw", "stick_breaking")),
        *(("dape", inner, "expected one that only adds a bias") for inner in ("rope", "shaw", "none", "randomized")),
    ],
)
def test_a_wrapper_refuses_what_it_cannot_go_around(name: str, inner: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"encoding.inner is '{inner}'[:,] {sentence}"):
        encodings.build(name, SHAPE, {"inner": inner})


@pytest.mark.parametrize("name", ["dape", "dape_v2"])
def test_each_layer_of_dape_has_kerple_numbers_of_its_own_as_in_the_authors_code(name: str) -> None:
    # uniform in 0 .. 2 and in 0 .. 1, per head
    inners = encodings.build(name, dataclasses.replace(SHAPE, d_model=2048, n_heads=256)).inners
    assert len(inners) == SHAPE.n_layers
    numbers = torch.stack([torch.stack([inner.r1 / 2, inner.r2]) for inner in inners])  # (layers, 2, heads)
    assert numbers.unique().numel() > 0.99 * numbers.numel()
    assert ((numbers >= 0) & (numbers < 1)).all() and (numbers.mean(-1) - 0.5).abs().max() < 0.1


# -- drope -------------------------------------------------------------------------------------------------------------


def test_drope_is_rope_before_the_drop_and_nothing_after_it_also_in_a_layer() -> None:
    drope = encodings.build("drope", SHAPE, {"drop_at": 0.75, "base": 500.0})
    layered = encodings.build("layered", SHAPE, {"layers": [{"name": "drope", "drop_at": 0.75, "window": 5}]})
    given = (*inputs(), counting(), 1)
    for done, name in ((None, "none"), (0.0, "rope"), (0.74, "rope"), (0.75, "none"), (1.0, "none")):
        for encoding, window, base in ((drope, None, 500.0), (layered, 5, 10000.0)):
            if done is not None:  # before a run it is as after one
                tell_progress(encoding, done)
            expected = encodings.build(name, SHAPE, {"base": base} if name == "rope" else {})
            assert torch.equal(attention(encoding, *given), attention(expected, *given, window)), done


# -- convolutions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outer", ["canon", "cca"])
@pytest.mark.parametrize(
    "inner", ["rope", "t5", "fox", "shaw", "cope", "grape_a", "transformer_xl", "path", "fox_pro", "learned_sinks"]
)
def test_an_encoding_inside_convolutions_is_given_what_comes_of_them(outer: str, inner: str) -> None:
    both = schemes.build(outer, {"inner": inner}, SHAPE)
    alone, plain = schemes.build(inner, {}, SHAPE), encodings.build(outer, SHAPE)
    alone.load_state_dict(both.inners[0].state_dict())
    plain.load_state_dict({key: value for key, value in both.state_dict().items() if not key.startswith("inners.")})
    q, k, v, x = inputs()
    used, within = schemes.used_at(plain, counting(), 2, x)
    convolved = (*used.rotate(q, k, within), used.map_values(v, within))
    for consecutive in (False, True):
        ours = attention(both, q, k, v, x, counting(), 2, 9, consecutive=consecutive)
        expected = attention(alone, *convolved, x, counting(), 2, 9, consecutive=consecutive)
        torch.testing.assert_close(ours, expected, **CLOSE)


def test_a_convolution_with_nothing_inside_keeps_its_weights_and_its_run() -> None:
    for name in ("canon", "cca"):
        assert not [key for key in encodings.build(name, SHAPE).state_dict() if key.startswith("inners")]
        before = {"encoding": {"name": name, "options_of_before": 1}}
        now = identity.completed(before)
        assert now["encoding"]["inner"] == "none" and now["encoding"]["inner_options"] == {}
        assert identity.without_neutral(now) == before


# -- other positions ---------------------------------------------------------------------------------------------------


def test_randomized_draws_are_sorted_distinct_named_by_their_stream_and_each_position_is_as_likely() -> None:
    encoding = encodings.build("randomized", SHAPE)
    ids = torch.zeros(3, 30, dtype=torch.long)
    first, again, other = (encoding.positions(ids, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert first.shape == (1, 30) and torch.equal(first, again) and not torch.equal(first, other)
    assert (first.diff() > 0).all() and first.min() >= 0 and first.max() < 16 * 32
    encoding, stream = encodings.build("randomized", SHAPE, {"max_length": 40}), torch.Generator().manual_seed(0)
    counts = torch.cat([encoding.positions(ids[:, :10], stream)[0] for _ in range(4000)]).bincount(minlength=40)
    assert (counts - 1000).abs().max() < 5 * (4000 * 0.25 * 0.75) ** 0.5  # five standard deviations


def test_as_many_positions_as_tokens_are_the_encoding_itself(tiny_config: Config) -> None:
    ids = torch.randint(257, (2, 16))
    plain = build(with_encoding(tiny_config, "rope"), 257)
    same = build(with_encoding(tiny_config, "randomized", max_length=16), 257)
    torch.testing.assert_close(same(ids), plain(ids), **CLOSE)
    with pytest.raises(Undefined, match=r"length 17 is beyond the end of 'randomized' \(defined up to 16\)"):
        same(torch.randint(257, (2, 17)))


def test_shape_starts_anywhere_below_its_shift_in_training_and_behind_it_in_evaluation() -> None:
    encoding = encodings.build("shape", SHAPE, {"shift": 7})
    ids = torch.zeros(3, 30, dtype=torch.long)
    first, again = (encoding.positions(ids, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (1, 30) and torch.equal(first, again) and (first.diff() == 1).all()
    stream = torch.Generator().manual_seed(0)
    assert {int(encoding.positions(ids, stream)[0, 0]) for _ in range(200)} == set(range(7))
    assert torch.equal(encoding.eval().positions(ids, None), 7 + torch.arange(30)[None])
    learned = encodings.build("shape", SHAPE, {"shift": 7, "inner": "learned"})
    assert learned.max_length == 32 and learned.get_parameter("inners.0.table").shape == (39, SHAPE.d_model)
    longest = learned.eval().positions(torch.zeros(1, 32, dtype=torch.long), None)
    assert learned.embed(torch.zeros(1, 32, SHAPE.d_model), longest).isfinite().all()


def test_cape_moves_jitters_and_stretches_positions_in_training_alone() -> None:
    encoding = encodings.build("cape", SHAPE, {"global_shift": 4.0, "local_shift": 0.5, "scaling": 1.25})
    ids, whole = torch.zeros(3, 30, dtype=torch.long), torch.arange(30.0)
    first, again = (encoding.positions(ids, torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.shape == (1, 30) and torch.equal(first, again) and (first.diff() >= 0).all()
    stream = torch.Generator().manual_seed(0)
    draws = torch.cat([encoding.positions(ids, stream) for _ in range(300)])
    stretches = (draws[:, 15:] - draws[:, :15]).mean(1) / 15
    assert (stretches > 0.74).all() and (stretches < 1.32).all() and stretches.min() < 0.85 and stretches.max() > 1.2
    assert abs(float(stretches.log().mean())) < 0.05  # as often squeezed as stretched
    # Each part by itself, the others at what does nothing.
    for options, bound in (({"global_shift": 4.0}, 4), ({"local_shift": 0.5}, 0.5)):
        alone = encodings.build("cape", SHAPE, {"global_shift": 0.0, "local_shift": 0.0, "scaling": 1.0} | options)
        moved = torch.cat([alone.positions(ids, stream) for _ in range(300)]) - whole
        assert 0.95 * bound < moved.max() <= bound + 1e-5 and -bound - 1e-5 <= moved.min() < -0.95 * bound
        same = (moved - moved[:, :1]).abs().amax(1) < 1e-5
        assert same.all() if "global_shift" in options else not same.any()
    disordered = encodings.build("cape", SHAPE, {"local_shift": 1.0})
    assert (disordered.positions(ids, stream).diff() < 0).any()
    assert torch.equal(encoding.eval().positions(ids, None), torch.arange(30)[None])


@pytest.mark.parametrize("inner", ["sinusoidal", "rope", "t5", "fire"])
def test_cape_that_does_nothing_is_the_encoding_inside(inner: str) -> None:
    nothing = {"inner": inner, "global_shift": 0.0, "local_shift": 0.0, "scaling": 1.0}
    encoding = schemes.build("cape", nothing, SHAPE)
    positions = encoding.positions(torch.zeros(2, LENGTH, dtype=torch.long), torch.Generator().manual_seed(3))
    q, k, v, x = inputs()
    alone = encoding.inners[0]
    assert torch.equal(encoding.embed(x, positions), alone.embed(x, counting()))
    expected = attention(alone, q, k, v, x, counting(), 1)
    torch.testing.assert_close(attention(encoding, q, k, v, x, positions, 1), expected, **CLOSE)


# -- texts of tokens ---------------------------------------------------------------------------------------------------


def test_bipe_gives_segments_as_positions_and_adds_the_places_in_them() -> None:
    vocabulary = ("a", "b", "c", "d", "e", ".", "\n", "end.", "\n\n")
    bipe = schemes.build("bipe", {}, with_vocabulary(*vocabulary))
    ids = ids_in(vocabulary, "a b . c d . e", ". . a \n end. \n\n b")
    segments = bipe.positions(ids, None)
    assert segments.tolist() == [[0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 2, 3, 3, 3]]
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 0], [0, 0, 0, 1, 0, 1, 2]])
    x = schemes.random(2, 7, SHAPE.d_model)
    assert torch.equal(bipe.embed(x, segments, ids), x + bipe.table[places])
    long = torch.zeros(1, 40, dtype=torch.long)  # one segment, beyond the table of 32
    added = bipe.embed(torch.zeros(1, 40, SHAPE.d_model), bipe.positions(long, None), long)[0]
    assert torch.equal(added, bipe.table[torch.arange(40).clamp(max=31)])
    assert not encodings.build("bipe", SHAPE).positions(ids, None).any()  # an unknown vocabulary


def test_bipe_multiplies_the_slopes_of_alibi_unless_they_are_given() -> None:
    for options, factor in (({}, 96.0), ({"alibi_factor": 2.0}, 2.0), ({"inner_options": {"slopes": [1.0] * 4}}, None)):
        bipe = encodings.build("bipe", SHAPE, {"inner": "alibi"} | options)
        expected = torch.ones(4) if factor is None else factor * encodings.build("alibi", SHAPE).slopes
        torch.testing.assert_close(bipe.inner_encodings[0].slopes, expected)


def test_abacus_numbers_the_digits_of_each_number_and_in_training_begins_anywhere() -> None:
    vocabulary = tuple("0123456789+=")
    abacus = schemes.build("abacus", {"max_offset": 5, "rows": 8}, with_vocabulary(*vocabulary))
    ids = ids_in(vocabulary, "1 2 + 3 4 5 =", "+ = 7 7 7 7 7")
    places = torch.tensor([[1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 2, 3, 4, 5]])
    x = schemes.random(2, 7, SHAPE.d_model)
    assert torch.equal(row_of(abacus, x, ids), places)
    drawn = []
    for update in range(100):
        tell_progress(abacus, update / 100)
        rows = row_of(abacus, x, ids)
        drawn.append(int(rows[0, 0]) - 1)
        assert torch.equal(rows, torch.where(places > 0, (places + drawn[-1]).clamp(max=7), 0))
    assert set(drawn) == set(range(6))
    for update in (99, 7):  # it follows from the share of the updates, so a continued run draws alike
        tell_progress(abacus, update / 100)
        assert int(row_of(abacus, x, ids)[0, 0]) - 1 == drawn[update]
    assert torch.equal(row_of(abacus.eval(), x, ids), places)


def test_abacus_starts_as_the_encoding_inside_on_tokens_that_are_no_digits() -> None:
    shape = with_vocabulary("a", "1", " 12")
    ids, x = torch.tensor([[0, 1, 1, 2, 0]]), torch.randn(1, 5, SHAPE.d_model)
    added = encodings.build("abacus", shape).eval().embed(x, counting(5), ids) - x
    assert not added[:, [0, 3, 4]].any() and added[:, [1, 2]].abs().sum(-1).min() > 0
    tables = []
    for others in ("zero", "random"):  # the authors' are random
        torch.manual_seed(0)
        tables.append(encodings.build("abacus", shape, {"others": others}).table.detach())
    assert torch.equal(tables[0][1:], tables[1][1:])
    assert float(tables[1][0].std()) == pytest.approx(shape.token_rms, rel=0.5)


def test_runs_of_other_seeds_draw_other_offsets_for_abacus_and_one_seed_the_same() -> None:
    def drawn(seed: int) -> list[int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            abacus = encodings.build("abacus", SHAPE)
        return [(tell_progress(abacus, update / 9), int(abacus.offset))[1] for update in range(9)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_position_coupling_numbers_the_papers_problem_as_its_drawing_does_and_in_training_reaches_every_row() -> None:
    vocabulary = ("<|endoftext|>", *"0123456789+=")
    shape = with_vocabulary(*vocabulary)
    coupled = schemes.build("coupling", {"max_position": 8}, shape)
    ids = ids_in(vocabulary, "<|endoftext|> 6 5 3 + 0 4 9 = 2 0 7 0 <|endoftext|>")
    drawing = torch.tensor([[0, 6, 7, 8, 9, 6, 7, 8, 9, 8, 7, 6, 5, 0]])  # figure 2, which begins at 6
    places = torch.where(drawing > 0, drawing - 4, 0)
    assert torch.equal(coupled.places(ids), places)
    plain = encodings.build("coupling", shape, {"answer": "plain"}).places(ids)
    # the sum's last digit is at the numbers' last
    assert plain[0].tolist() == [0, 3, 4, 5, 6, 3, 4, 5, 1, 2, 3, 4, 5, 0]
    x, drawn = schemes.random(1, 14, SHAPE.d_model), []
    for update in range(60):
        tell_progress(coupled, update / 60)
        rows = row_of(coupled, x, ids)
        drawn.append(int(rows[0, 1]) - 2)
        assert torch.equal(rows, torch.where(places > 0, places + drawn[-1], 0))
    assert set(drawn) == {0, 1, 2, 3}  # so that the largest position, 5, is at most in row 8
    for update in (59, 7):
        tell_progress(coupled, update / 60)
        assert int(row_of(coupled, x, ids)[0, 1]) - 2 == drawn[update]
    assert torch.equal(row_of(coupled.eval(), x, ids), places)


@pytest.mark.parametrize(
    ("name", "sought", "absent"),
    [("bipe", ".", "one of ['.', '\\n']"), ("abacus", "7", "a digit"), ("coupling", "=", "'='")],
)
def test_a_vocabulary_without_the_tokens_that_an_encoding_looks_for_is_remarked(
    name: str, sought: str, absent: str
) -> None:
    (remark,) = encodings.build(name, with_vocabulary("12", " b")).remarks()
    assert remark.startswith(f"{name}: no token of the vocabulary is {absent} by itself")
    assert encodings.build(name, with_vocabulary(sought)).remarks() == encodings.build(name, SHAPE).remarks() == []


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("randomized", {"inner_options": {"base": -1}}, "encoding.inner_options.base is -1 for 'rope': "),
        ("randomized", {"inner_options": {"base": "x"}}, "encoding.inner_options.base is 'x' for 'rope': input should"),
        ("randomized", {"inner_options": {"bse": 5}}, "encoding.inner_options: 'rope' has no option 'bse': it accepts"),
        ("randomized", {"inner": "rop"}, "encoding.inner_options: unknown encoding 'rop': did you mean 'rope'?"),
        ("randomized", {"inner": "randomized"}, "encoding.inner is 'randomized', which chooses positions itself"),
        ("randomized", {"max_length": 8}, "encoding.max_length is 8 for 'randomized': expected at least train_length"),
        ("shape", {"shift": 0}, "encoding.shift is 0 for 'shape': input should be greater than or equal to 1"),
        ("shape", {"inner": "randomized"}, "encoding.inner is 'randomized', which chooses positions itself: expected"),
        ("cape", {"global_shift": -1.0}, "encoding.global_shift is -1.0 for 'cape': input should be greater than or"),
        ("cape", {"local_shift": float("nan")}, "encoding.local_shift is nan for 'cape': input should be"),
        ("cape", {"inner": "learned"}, "encoding.inner is 'learned', which refuses fractional positions: expected one"),
        ("cape", {"inner": "layered", "inner_options": {"layers": [{"name": "rope"}, {"name": "tupe"}]}},
         "encoding.inner is 'layered', which refuses fractional positions: expected one"),
        ("bipe", {"separators": []}, "encoding.separators is [] for 'bipe': expected at least one text of a token"),
        ("bipe", {"separators": [". "]}, "encoding.separators is ['. '] for 'bipe': expected at least one text of a"),
        ("bipe", {"inner": "shape"}, "encoding.inner is 'shape', which chooses positions itself: expected a relative"),
        ("bipe", {"inner": "learned"}, "encoding.inner is 'learned', which acts at the input: expected a relative one"),
        ("bipe", {"inner": "alibi", "inner_options": {"slopes": [1.0]}},
         "encoding.inner_options.slopes is [1.0] for 'alibi': expected 4 "),
        ("coupling", {"max_position": 1}, "encoding.max_position is 1 for 'coupling': expected at least 2, or null"),
        ("abacus", {"rows": 100}, "encoding.rows is 100 for 'abacus': expected at least max_offset + 2, 101 (default"),
        ("layered", {"layers": []}, "encoding.layers is [] for 'layered': expected at least one entry"),
        ("layered", {"layers": [{"nam": "rope"}]}, "encoding.layers[0] is {'nam': 'rope'}: expected a name"),
        ("layered", {"layers": [{"name": "rope"}, {"name": "t5", "num_buckets": 1}]},
         "encoding.layers[1].num_buckets is 1 for 't5': "),
        ("layered", {"layers": [{"name": "rope", "window": "abc"}]}, "encoding.layers[0].window is 'abc': expected a"),
        ("layered", {"layers": [{"name": "rope", "window": 0}]}, "encoding.layers[0].window is 0: expected a number"),
        ("layered", {"layers": [{"name": "randomized"}]}, "encoding.layers[0]: 'randomized' chooses positions for all"),
        ("layered", {"layers": "rope"}, "encoding.layers is 'rope' for 'layered': input should be a valid list"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_by_its_full_key(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        encodings.build(name, SHAPE, options)
    assert str(error.value).startswith(sentence) and "\n" not in str(error.value)


# -- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "rope", "t5", "fox", "shaw", "fire", "cope", "path"])
@pytest.mark.parametrize("consecutive", [False, True])
def test_a_group_of_query_heads_shares_its_keys_and_values(name: str, consecutive: bool) -> None:
    encoding = schemes.build(name, {}, dataclasses.replace(SHAPE, n_kv_heads=2))
    q, k, v, x = inputs(kv_heads=2)
    expected = attention_output(encoding, q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), x)
    ours = attention(encoding, q, k, v, x, counting(), 0, consecutive=consecutive)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(attention_output(encoding, q, k, v, x), expected, **CLOSE)


@pytest.mark.parametrize("name", schemes.NAMES)
def test_heads_may_be_wider_than_their_share_of_the_model(name: str) -> None:
    encoding = schemes.build(name, {}, Shape(24, 4, 2, 32, head_dim=8))
    q, k, v, _ = inputs(12)
    x = schemes.random(2, 12, 24, seed=3)
    out = attention(encoding, q, k, v, x, counting(12), 1, consecutive="positions" not in encoding.hooks)
    torch.testing.assert_close(out, attention_output(encoding, q, k, v, x, 1, counting(12)), **CLOSE)


# -- extensions --------------------------------------------------------------------------------------------------------

FAR: list[tuple[str, dict[str, float]]] = [("self_extend", {"group": 1}), ("leaky_rerope", {"k": 1.0})]
ROTARY = [
    "rope", "partial_rope", "p_rope", "xpos", "pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope",
    "lerope", "grape_m", "decoupled_rope", "pope", "rope_pp", "repo",
]  # fmt: skip


@pytest.mark.parametrize("name", ROTARY)
def test_interpolated_positions_are_the_trained_ones_and_no_stretch_changes_nothing(name: str) -> None:
    trained = schemes.build(name, {}, SHAPE)
    q, k, v, x = inputs(32)
    for method in ("pi", "ntk", "ntk_by_parts", "yarn", "llama3"):
        after, _ = extended(trained, method, 32, 32)
        assert type(after) is type(trained)
        assert torch.equal(attention_output(after, q, k, v, x), attention_output(trained, q, k, v, x)), method
    after, _ = extended(trained, "pi", 128, 32)
    if name == "xpos":  # its decay is not stretched
        turn = after.rotation(4 * counting(20)), trained.rotation(counting(20))
        return torch.testing.assert_close(*turn)
    near = counting(20) + (SHAPE.train_length if name == "longrope" else 0)  # where one of its sets holds for both
    if name == "dynamic_ntk":  # what its frequencies are depends on the positions
        trained.original_length = after.original_length = 128
    q, k, x = q[:, :, :20], k[:, :, :20], x[:, :20]
    given = attention_logits(after, q, k, x, positions=4 * near), attention_logits(trained, q, k, x, positions=near)
    torch.testing.assert_close(*given, atol=1e-5, rtol=1e-5)


def test_a_stretched_xpos_keeps_its_decay_and_a_stretched_yarn_its_temperature() -> None:
    xpos, yarn = schemes.build("xpos", {}, SHAPE), schemes.build("yarn", {}, SHAPE)
    after, _ = extended(xpos, "pi", 64, 32)
    assert torch.equal(after.decay(counting()), xpos.decay(counting()))
    after, facts = extended(yarn, "yarn", 64, 32)
    assert after.attention_factor == pytest.approx(yarn.attention_factor * facts["attention_factor"])


@pytest.mark.parametrize("method", ["rerope", "self_extend", "dual_chunk"])
def test_far_pairs_of_a_partial_rotary_encoding_leave_its_still_channels_alone(method: str) -> None:
    trained = schemes.build("partial_rope", {"fraction": 0.5}, SHAPE)
    after, _ = extended(trained, method, 128, 32)
    q, k, _, x = inputs()
    q = torch.cat((torch.zeros_like(q[..., :4]), q[..., 4:]), dim=-1)  # what turns is silent
    torch.testing.assert_close(attention_logits(after, q, k, x), attention_logits(trained, q, k, x), **CLOSE)


@pytest.mark.parametrize("method", ["yarn", "rerope", "dual_chunk"])
def test_a_wrapper_hands_an_extension_on_to_those_it_is_for_and_they_keep_their_windows(method: str) -> None:
    entries = [{"name": "rope", "window": 12}, {"name": "none"}]
    layered = encodings.build("layered", SHAPE, {"layers": entries})
    after, facts = extended(layered, method, 128, 32)
    alone, alone_facts = extended(encodings.build("rope", SHAPE), method, 128, 32)
    given = (*inputs(), counting())
    assert torch.equal(attention(after, *given, 0), attention(alone, *given, 0, window=12))
    assert torch.equal(attention(after, *given, 1), attention(layered, *given, 1))
    assert facts == {"dynamic": alone_facts["dynamic"], "extended": {"rope 0": alone_facts}}
    assert layered.inner_encodings[0].stretched is None  # the trained one is as it was
    with pytest.raises(Undefined, match="'layered' has no extension 'alibi_pi': it supports pi, ntk"):
        extended(layered, "alibi_pi", 128, 32)
    assert methods_of(encodings.build("randomized", SHAPE, {"inner": "fox"})) == []


@pytest.mark.parametrize("outer", ["temperature", "layered", "learned_sinks", "canon", "shape"])
def test_an_extension_in_a_wrapper_goes_by_the_length_that_was_trained_last(outer: str) -> None:
    """A run that began from another has the shape of that one, and a training length of its own."""
    options: dict[str, Any] = {"layers": [{"name": "rope"}]} if outer == "layered" else {"inner": "rope"}
    encoding = encodings.build(outer, SHAPE, options)
    assert methods_of(encoding) == methods_of(encodings.build("rope", SHAPE))
    for length, factor in ((128, 1.0), (256, 2.0)):
        _, facts = extended(encoding, "pi", train_length=128, length=length)
        assert {each["factor"] for each in facts["extended"].values()} == {factor}


def test_where_shifted_and_randomized_positions_end_says_how_far_they_are_stretched() -> None:
    shifted = encodings.build("shape", SHAPE, {"inner": "learned", "shift": 10})
    stretched, facts = extended(shifted, "interpolate", train_length=32, length=64)
    assert stretched.max_length == 64 and [each["factor"] for each in facts["extended"].values()] == [74 / 42]
    trained = encodings.build("randomized", SHAPE)
    within, _ = extended(trained, "pi", 512, 32)
    given = (*inputs(), schemes.positions_of("gaps", 2, LENGTH, 512), 0)
    assert torch.equal(attention(within, *given), attention(trained, *given))


@pytest.mark.parametrize(
    ("outer", "inner", "method", "option"),
    [
        *(("temperature", {"inner": inner}, *method) for inner in ("rope", "canon") for method in FAR),
        ("learned_sinks", {"inner": "alibi"}, "alibi_pi", {"factor": 1.0}),
        ("learned_sinks", {"inner": "t5"}, "interpolate", {"factor": 1.0}),
        ("learned_sinks", {"inner": "fire"}, "interpolate", {"factor": 1.0}),
    ],
)
def test_a_wrapper_acts_on_an_extended_encoding_as_before(
    outer: str, inner: dict[str, Any], method: str, option: dict[str, float]
) -> None:
    """Extensions whose options change no distance."""
    more = {"inner_options": {"inner": "rope"}} if inner["inner"] == "canon" else {}
    rule = {"rule": "mistral_large4"} if outer == "temperature" else {}
    trained = schemes.build(outer, inner | more | rule, SHAPE)
    after, _ = extended(trained, method, train_length=32, length=64, **option)
    for consecutive in (False, True):
        ours, expected = (
            attention(each, *inputs(64), counting(64), 1, consecutive=consecutive) for each in (after, trained)
        )
        torch.testing.assert_close(ours, expected, **CLOSE)
