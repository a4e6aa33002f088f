"""The tutorials' properties: measured values against the expected table, and against derivations where a page errs."""

import math

import pytest
import torch

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
def of_the_tutorials(measured: Measured) -> list[properties.Properties]:
    return [measured[name] for name in properties.TUTORIALS]


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
    # Not in the tutorials.
    "fox": "partial   yes    yes    yes    n/a    n/a    yes    scores      any",
    "cope": "yes       no     yes    yes    n/a    n/a    yes    scores      any",
    "path": "yes       no     yes    yes    n/a    n/a    yes    scores      any",
    "fire": "yes       yes    no     no     n/a    yes    yes    scores      any",
    "stick_breaking": "partial   yes    yes    yes    n/a    n/a    yes    normaliser  any",
}
COLUMNS = [name for name in properties.PROPERTIES if name not in ("zero_mean", "spread")]
PAIRS = math.comb(47, 2)  # swaps of two tokens before the last of 48

# Figures behind the verdicts: a number, or what it lies between.
FIGURES: dict[str, dict[str, float | tuple[float, float]]] = {
    "none": {
        "swaps_seen": 0, "swaps_seen_after_layernorm": 0, "directional": 0, "least_gap": 0, "first_shared": 0,
        "swaps_seen_by_two_layers": (1000, math.inf),  # the causal mask of a second layer shows order
    },
    "index": {
        # How many swaps drown depends on the random weights: the index saturates the softmax, and LayerNorm repairs it.
        "swaps_seen": (0, 0.99 * PAIRS), "swaps_seen_after_layernorm": PAIRS,
        "least_gap": 1, "residual": 0, "steepness": 1,
        "bf16_collisions": 127,  # 257 .. 511 odd: 8 significant bits keep even numbers only
        "rms": math.sqrt(127 * 255 / 6 / 64),  # of the positions below 128, in one of 64 channels
    },
    "minmax": {
        "swaps_seen": PAIRS, "least_gap": 1 / 255, "bf16_collisions": (125, 129), "residual": 0, "rms": 0.0723,
        "steepness": 1 / 63,  # 63 steps over a sequence of 64 whose ends are held
        "change": 1 - 31 / 63,
    },
    "binary": {
        "swaps_seen": PAIRS, "least_gap": 1, "unevenness": 3.55, "residual": 0.566,
        "mean": 7 / 128, "std": 0.227,  # 7 digits of 64 channels at a length of 128, half of them 1
    },
    "sine": {
        "swaps_seen": PAIRS, "least_gap": 0.431, "unevenness": 2.59, "residual": 0.335, "steepness": 1.51,
        "mean": 0.1694, "std": 0.502,
    },
    "sinusoidal": {
        "swaps_seen": PAIRS, "least_gap": 1.172, "residual": 0, "mean": 0.337, "std": 0.622, "rms": 0.5**0.5,
        "steepness": 1.21,  # sqrt(sum of squared frequencies)
    },
    "learned": {
        "swaps_seen": PAIRS, "least_gap": (3.25, 4.75), "unevenness": (3, 6), "rms_over_gpt2_tokens": (0.98, 1.02),
        "residual": (0.913, 0.953),  # 255 pairs, 33 free numbers per channel: noise leaves sqrt(1 - 33/255) = 0.933
    },
    "shaw": {
        "swaps_seen": PAIRS - math.comb(48 - 16, 2),  # the 32 tokens at distance 16 or more look alike
        "directional": 1, "least_gap": 0, "first_shared": 16,
    },
    "t5": {
        "swaps_seen": PAIRS - sum(math.comb(size, 2) for size in (3, 2, 3, 3, 4, 4, 5, 6, 2)),  # distances in a bucket
        "directional": 1, "least_gap": 0, "first_shared": 16,
    },
    "rope": {"swaps_seen": PAIRS, "directional": 1},
    "alibi": {
        "swaps_seen": PAIRS, "directional": 0, "least_gap": 2**-8, "steepness": 2**-8, "bf16_collisions": (125, 129),
    },
    # Untrained, both halve a token's weight with every further one (FoX: gate 1/2; sticks: half broken off), about
    # 1e-9, the threshold, at distance 30. ALiBi at slope 1/2 does likewise. Nearer tokens are all told apart.
    "fox": {"swaps_seen": (math.comb(20, 2), PAIRS)},
    "stick_breaking": {
        "swaps_seen": (math.comb(20, 2), PAIRS), "scores": 0, "values": 0,
        "normaliser": (0.1, 1),  # rows sum to 1 as in a softmax, by other weights
    },
    "cope": {
        "swaps_seen": (PAIRS - 12, PAIRS + 1),  # all but pairs that fall on the same count
        # Equal tokens have equal gates g, so distance r counts (r + 1)·g and stops at max_position - 1 = 63.
        "first_shared": (62, 256),
    },
    # Equal tokens have one H = I - beta w wᵀ, and H^r shrinks along w by |1 - beta|^r: with beta near 1, nothing is
    # left after a few steps. Tokens that differ span other directions; this is the position-only part.
    "path": {"swaps_seen": PAIRS, "first_shared": (1, 60)},
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts_and_figures_are_the_expected_ones(measured: Measured, name: str) -> None:
    verdicts = {column: getattr(measured[name], column).verdict.replace(" ", "_") for column in COLUMNS}
    assert verdicts == dict(zip(COLUMNS, EXPECTED[name].split(), strict=True))
    found = {key: value for title in properties.PROPERTIES for key, value in _figures(measured[name], title).items()}
    for key, expected in FIGURES.get(name, {}).items():
        if isinstance(expected, tuple):
            assert expected[0] < found[key] < expected[1], key
        else:
            assert found[key] == pytest.approx(expected, rel=2e-3, abs=1e-6), key


def _figures(one: properties.Properties, title: str) -> dict[str, float]:
    return getattr(one, title).figures


@pytest.mark.full
def test_every_disagreement_with_the_tutorials_is_explained_and_nothing_else_is(
    of_the_tutorials: list[properties.Properties],
) -> None:
    found = [(one.name, title, getattr(one, title)) for one in of_the_tutorials for title in properties.PROPERTIES]
    disagreements = {(name, title): each for name, title, each in found if each.disagrees}
    assert disagreements.keys() == set(properties.EXPLANATIONS)
    assert all(each.explanation for each in disagreements.values())


@pytest.mark.full
def test_fire_stretches_beyond_its_threshold_only(measured: Measured) -> None:
    # Its normaliser is the query's position once that exceeds the threshold, here the training length of 160 or its
    # quarter. Codes are compared within the training length, logits beyond it as well.
    (whole,) = properties.measure(["fire", "threshold=null"])
    assert _figures(whole, "relative_code")["unevenness"] < 1e-12
    assert 1e-5 < _figures(whole, "relative_logit")["range_over_logit"] < 0.1
    assert _figures(measured["fire"], "relative_code")["unevenness"] > 0.5


# -- the probe, and the command ----------------------------------------------------------------------------------------


class Floor(Encoding):
    """A scheme of tomorrow: whole positions only in effect, though it accepts any."""

    def embed(self, x: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        return x + positions.floor().float()[..., None] / 100


def test_a_staircase_that_accepts_fractions_is_not_continuous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(properties, "_build", lambda *args, **kwargs: Floor(Shape(32, 1, 2, 160)))
    with codes.in_double():
        assert properties._continuous(Scheme("floor")).verdict == "no"


def test_schemes_run_in_double_precision_by_one_thread_within_the_probe_only() -> None:
    shape = Shape(32, 1, 2, 64)
    torch.set_num_threads(2)
    with codes.in_double():
        assert torch.get_num_threads() == 1
        encoding = codes.build("rope", shape)
        assert codes.turn_code(encoding, torch.arange(4)[None]).dtype == torch.float64
        assert torch.zeros(1).float().dtype == torch.float64
    assert torch.zeros(1).dtype == torch.float32
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    assert torch.zeros(1).double().float().dtype == torch.float32


def test_a_misspelt_name_gets_one_line() -> None:
    with pytest.raises(UserError, match="did you mean 'rope'"):
        properties.measure(["rop"])
