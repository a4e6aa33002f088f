"""The tutorials' properties: measured values against the expected table, and against derivations where a page errs."""

import dataclasses
import io
import json
import math
import re
import sys

import pytest
import torch

import posbench
from posbench.encodings.base import Encoding, Shape
from posbench.errors import UserError
from posbench.show import codes, properties
from posbench.show.schemes import Scheme


class Measured(dict[str, properties.Properties]):
    """By name, each measured when it is asked for: tests are divided among processes, and few need all of them."""

    def __missing__(self, name: str) -> properties.Properties:
        (self[name],) = properties.measure([name])
        return self[name]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured()


@pytest.fixture(scope="module")
def all_measured(measured: Measured) -> list[properties.Properties]:
    return [measured[name] for name in posbench.encodings.names()]


def _figure(one: properties.Properties, title: str, figure: str) -> float:
    return getattr(one, title).figures[figure]


#           order      unique code   logit  shift  cont.  invar. purpose     max. length
EXPECTED = {
    "none": "no        no     yes    yes    n/a    n/a    yes    neither     any",
    "index": "partial   yes    yes    no     yes    yes    yes    both        any",
    "minmax": "yes       yes    yes    no     yes    yes    no     both        any",
    "binary": "yes       yes    no     no     no     no     yes    both        256",
    "sine": "yes       yes    no     no     no     yes    yes    both        any",
    "sinusoidal": "yes       yes    yes    no     yes    yes    yes    both        any",
    "learned": "yes       yes    no     no     no     no     yes    both        train_length",
    "shaw": "partial   no     yes    yes    n/a    no     yes    both        any",
    "t5": "partial   no     yes    yes    n/a    no     yes    scores      any",
    "rope": "yes       yes    yes    yes    n/a    yes    yes    scores      any",
    "alibi": "yes       yes    yes    yes    n/a    yes    yes    scores      any",
    # Not in the tutorials; each verdict is derived in a test below.
    "fox": "partial   yes    yes    yes    n/a    n/a    yes    scores      any",
    "cope": "yes       no     yes    yes    n/a    n/a    yes    scores      any",
    "path": "yes       no     yes    yes    n/a    n/a    yes    scores      any",
    "fire": "yes       yes    no     no     n/a    yes    yes    scores      any",
    "stick_breaking": "partial   yes    yes    yes    n/a    n/a    yes    normaliser  any",
}
COLUMNS = [name for name in properties.PROPERTIES if name not in ("zero_mean", "spread")]


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts_are_the_expected_table(measured: Measured, name: str) -> None:
    expected = [word.replace("_", " ") for word in EXPECTED[name].split()]
    assert dict(zip(COLUMNS, [getattr(measured[name], c).verdict for c in COLUMNS], strict=True)) == dict(
        zip(COLUMNS, expected, strict=True)
    )


def test_every_scheme_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "_measure_one", lambda scheme: scheme.name)
    assert properties.measure() == posbench.encodings.names()


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_overview_fits_80_columns_and_cuts_nothing(
    all_measured: list[properties.Properties], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(properties, "measure", lambda names: all_measured)
    properties.main()
    out.flush()
    lines = out.buffer.getvalue().decode(encoding).splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert {"max.", "length"} <= set(re.findall(r"[\w.]+", " ".join(lines)))


@pytest.mark.full
def test_every_disagreement_with_the_tutorials_is_explained_and_nothing_else_is(
    all_measured: list[properties.Properties],
) -> None:
    found = [(one.name, title, getattr(one, title)) for one in all_measured for title in properties.PROPERTIES]
    disagreements = {(name, title): each for name, title, each in found if each.disagrees}
    assert disagreements.keys() == set(properties.EXPLANATIONS)
    assert all(each.explanation for each in disagreements.values())


# -- order -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("none", 0),
        ("minmax", 1081),
        ("binary", 1081),
        ("sine", 1081),
        ("sinusoidal", 1081),
        ("learned", 1081),
        ("rope", 1081),
        ("alibi", 1081),
        ("t5", 1033),  # 48 of the 1081 pairs share a bucket: see the next test
        ("shaw", 1081 - math.comb(48 - 16, 2)),  # the 32 tokens at distance 16 or more look alike
        ("path", 1081),
    ],
)
def test_swaps_seen_by_the_last_token(measured: Measured, name: str, seen: int) -> None:
    assert _figure(measured[name], "order", "swaps_seen") == seen


def test_t5_misses_exactly_the_swaps_within_a_bucket() -> None:
    encoding = posbench.build_encoding("t5", d_model=32, n_heads=1, n_layers=1, train_length=128)
    sizes = encoding.bucket(torch.arange(1, 48)).unique(return_counts=True)[1].tolist()
    assert 1081 - sum(math.comb(size, 2) for size in sizes) == 1033


def test_shaw_clipped_at_4_sees_135_swaps() -> None:
    shape = Shape(32, n_heads=1, n_layers=2, train_length=160)
    with codes.in_double():
        encoding = posbench.encodings.build("shaw", shape, {"max_distance": 4})
        assert properties._swaps_seen(encoding, layers=1, norm=False) == 1081 - math.comb(44, 2) == 135


def test_no_encoding_sees_order_only_through_a_second_causal_layer(measured: Measured) -> None:
    assert _figure(measured["none"], "order", "swaps_seen_after_layernorm") == 0
    assert _figure(measured["none"], "order", "swaps_seen_by_two_layers") > 1000


def test_a_raw_index_drowns_some_swaps_and_layernorm_repairs_it(measured: Measured) -> None:
    # How many depends on the random weights: the index saturates the softmax.
    assert 0 < _figure(measured["index"], "order", "swaps_seen") / 1081 < 0.99
    assert _figure(measured["index"], "order", "swaps_seen_after_layernorm") == 1081


def test_layernorm_hides_an_index_added_to_all_channels() -> None:
    # LN subtracts the mean over channels: LN(x + i·1) = LN(x).
    with codes.in_double():
        encoding = posbench.build_encoding(
            "index", d_model=32, n_heads=1, n_layers=2, train_length=160, direction="ones", scale=1.0
        )
        assert properties._swaps_seen(encoding, layers=1, norm=True) == 0


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["fox", "stick_breaking"])
def test_forgotten_tokens_are_why_fox_and_stick_breaking_miss_swaps(measured: Measured, name: str) -> None:
    # Untrained, both halve a token's weight with every further one (FoX: gate 1/2; sticks: half broken off), about
    # 1e-9, the threshold, at distance 30. ALiBi at slope 1/2 does likewise. Nearer tokens are all told apart.
    assert math.comb(20, 2) < _figure(measured[name], "order", "swaps_seen") < 1081


def test_cope_misses_at_most_pairs_that_fall_on_the_same_count(measured: Measured) -> None:
    assert _figure(measured["cope"], "order", "swaps_seen") >= 1070


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "directional"), [("none", 0), ("alibi", 0), ("rope", 1), ("t5", 1), ("shaw", 1)])
def test_who_tells_before_from_after_without_a_mask(measured: Measured, name: str, directional: int) -> None:
    assert _figure(measured[name], "order", "directional") == directional


# -- uniqueness --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "gap"),
    [
        ("none", 0.0),
        ("index", 1.0),
        ("minmax", 1 / 255),
        ("binary", 1.0),
        ("sine", 0.431),
        ("sinusoidal", 1.172),
        ("alibi", 2**-8),
        ("shaw", 0.0),
        ("t5", 0.0),
    ],
)
def test_least_gap_between_codes(measured: Measured, name: str, gap: float) -> None:
    assert _figure(measured[name], "uniqueness", "least_gap") == pytest.approx(gap, abs=6e-4)


def test_learned_rows_are_far_apart(measured: Measured) -> None:
    # The page's .080 is for rows of deviation .02; drawn from N(0,1) it is 50 times that, by the luck of the draw.
    assert _figure(measured["learned"], "uniqueness", "least_gap") * 0.02 == pytest.approx(0.08, abs=0.015)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "first"), [("none", 0), ("shaw", 16), ("t5", 16)])
def test_where_codes_begin_to_be_shared(measured: Measured, name: str, first: int) -> None:
    assert _figure(measured[name], "uniqueness", "first_shared") == first


@pytest.mark.parametrize("name", ["index", "minmax", "alibi"])
def test_bf16_merges_every_other_whole_number_above_256(measured: Measured, name: str) -> None:
    # 257 .. 511 odd: 8 significant bits keep even numbers only; minmax and ALiBi are the index times a constant.
    assert _figure(measured[name], "uniqueness", "bf16_collisions") == pytest.approx(
        127, abs=1 if name != "index" else 0
    )


def test_cope_codes_are_shared_once_the_count_is_full(measured: Measured) -> None:
    # Equal tokens have equal gates g, so distance r counts (r + 1)·g and stops at max_position - 1 = 63.
    first = _figure(measured["cope"], "uniqueness", "first_shared")
    assert 63 <= first < 256


@pytest.mark.full
def test_path_codes_merge_as_equal_tokens_project_the_same_direction_away(
    measured: Measured,
) -> None:
    # Equal tokens have one H = I - beta w wᵀ, and H^r shrinks along w by |1 - beta|^r: with beta near 1, nothing is
    # left after a few steps. Tokens that differ span other directions; this is the position-only part.
    assert 1 < _figure(measured["path"], "uniqueness", "first_shared") < 60


# -- relative ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "unevenness"), [("binary", 3.55), ("sine", 2.59)])
def test_unevenness_of_codes(measured: Measured, name: str, unevenness: float) -> None:
    assert _figure(measured[name], "relative_code", "unevenness") == pytest.approx(unevenness, abs=0.006)


def test_learned_codes_are_uneven(measured: Measured) -> None:
    assert 3 < _figure(measured["learned"], "relative_code", "unevenness") < 6  # 4.08 on another draw


@pytest.mark.parametrize(
    ("name", "residual"), [("index", 0), ("minmax", 0), ("sinusoidal", 0), ("sine", 0.335), ("binary", 0.566)]
)
def test_residual_of_the_best_linear_shift(measured: Measured, name: str, residual: float) -> None:
    assert _figure(measured[name], "shift_linear", "residual") == pytest.approx(
        residual, abs=6e-4 if residual else 1e-6
    )


def test_learned_shift_is_as_linear_as_chance_allows(measured: Measured) -> None:
    # 255 pairs, 33 free numbers per channel: a fit of noise leaves sqrt(1 - 33/255) = .933.
    assert _figure(measured["learned"], "shift_linear", "residual") == pytest.approx(0.933, abs=0.02)


@pytest.mark.full
def test_fire_stretches_beyond_its_threshold_only(measured: Measured) -> None:
    # Its normaliser is the query's position once that exceeds the threshold, here the training length of 160 or its
    # quarter. Codes are compared within the training length, logits beyond it as well.
    (whole,) = properties.measure(["fire", "threshold=null"])
    assert _figure(whole, "relative_code", "unevenness") < 1e-12
    assert 1e-5 < _figure(whole, "relative_logit", "range_over_logit") < 0.1
    assert _figure(measured["fire"], "relative_code", "unevenness") > 0.5


# -- continuous, invariance, purpose, mean and spread ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "steepness"), [("index", 1.0), ("minmax", 1 / 63), ("sine", 1.51), ("sinusoidal", 1.21), ("alibi", 2**-8)]
)
def test_steepness_of_codes(measured: Measured, name: str, steepness: float) -> None:
    # minmax: 63 steps over a sequence of 64 whose ends are held; sinusoidal: sqrt(sum of squared frequencies).
    assert _figure(measured[name], "continuous", "steepness") == pytest.approx(steepness, rel=5e-3)


def test_minmax_moves_by_half_when_the_text_doubles(measured: Measured) -> None:
    assert _figure(measured["minmax"], "invariance", "change") == pytest.approx(1 - 31 / 63, abs=1e-9)
    assert round(1 - 31 / 63, 6) == 0.507937


def test_stick_breaking_leaves_logits_and_values_alone(measured: Measured) -> None:
    figures = measured["stick_breaking"].purpose.figures
    assert figures["scores"] == 0
    assert figures["values"] == pytest.approx(0, abs=1e-12)
    assert 0.1 < figures["normaliser"] < 1  # rows sum to 1 as in a softmax, by other weights


@pytest.mark.parametrize(
    ("name", "mean", "std"), [("sinusoidal", 0.337, 0.622), ("sine", 0.169, 0.502), ("binary", 7 / 128, 0.227)]
)
def test_mean_and_spread_of_codes(measured: Measured, name: str, mean: float, std: float) -> None:
    # binary: 7 digits of 64 channels at L = 128, half of them 1 (the page's .375 is 6 digits over 8 channels).
    assert _figure(measured[name], "zero_mean", "mean") == pytest.approx(mean, abs=6e-4)
    assert _figure(measured[name], "zero_mean", "std") == pytest.approx(std, abs=6e-4)


@pytest.mark.parametrize(("name", "rms"), [("sinusoidal", 0.5**0.5), ("minmax", 0.0723)])
def test_root_mean_square_of_codes(measured: Measured, name: str, rms: float) -> None:
    assert _figure(measured[name], "spread", "rms") == pytest.approx(rms, abs=6e-5)


def test_root_mean_square_of_the_index_grows_with_length(measured: Measured) -> None:
    def rms(length: int) -> float:
        return math.sqrt((length - 1) * (2 * length - 1) / 6 / 64)  # sum of squares, in one of 64 channels

    assert _figure(measured["index"], "spread", "rms") == pytest.approx(rms(128))
    assert rms(256) == pytest.approx(18.4, abs=0.05)  # the page's figure is at 256, its minmax one at 128


def test_learned_starts_as_large_as_the_tokens(measured: Measured) -> None:
    assert _figure(measured["learned"], "spread", "rms_over_gpt2_tokens") == pytest.approx(1, abs=0.02)


# -- the probe, and the command ----------------------------------------------------------------------------------------


class Floor(Encoding):
    """A scheme of tomorrow: whole positions only in effect, though it accepts any."""

    def embed(self, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        return x + positions.floor().float()[..., None] / 100


def test_a_staircase_that_accepts_fractions_is_not_continuous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "_build", lambda *args, **kwargs: Floor(Shape(32, 1, 2, 160)))
    with codes.in_double():
        assert properties._continuous(Scheme("floor")).verdict == "no"


def test_schemes_run_in_double_precision_within_the_probe_only() -> None:
    shape = Shape(32, 1, 2, 64)
    with codes.in_double():
        encoding = codes.build("rope", shape)
        assert codes.turn_code(encoding, torch.arange(4)[None]).dtype == torch.float64
        assert torch.zeros(1).float().dtype == torch.float64
    assert torch.zeros(1).dtype == torch.float32
    assert torch.zeros(1).double().float().dtype == torch.float32


def test_measuring_twice_gives_the_same_and_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, second = (properties.measure(["learned", "cope"]) for _ in range(2))
    assert first == second
    assert torch.equal(before, torch.random.get_rng_state())


def test_json_carries_every_verdict_and_figure(capsys: pytest.CaptureFixture[str]) -> None:
    properties.main(["binary"], as_json=True)
    (one,) = json.loads(capsys.readouterr().out)
    assert one["name"] == "binary"
    assert one["relative_code"]["verdict"] == "no"
    assert one["relative_code"]["tutorials"] == "yes"
    assert "two digits" in one["relative_code"]["explanation"]
    assert set(one) == {field.name for field in dataclasses.fields(properties.Properties)}


def test_names_print_their_figures_and_explanations(capsys: pytest.CaptureFixture[str]) -> None:
    properties.main(["binary"])
    out = " ".join(capsys.readouterr().out.split())
    assert "no*" in out and "residual 0.566" in out and "1 and 2 differ in two digits" in out


def test_a_misspelt_name_gets_one_line() -> None:
    with pytest.raises(UserError, match="did you mean 'rope'"):
        properties.measure(["rop"])
