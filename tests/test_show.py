"""Pictures: the numbers behind them, of encodings and of runs, and the PNG file."""

from pathlib import Path

import numpy as np
import pytest
import support
import torch
from numpy.testing import assert_allclose

import posbench
from posbench.model.gpt import build
from posbench.show import command, panels
from posbench.show.panels import Panel

RNG = np.random.default_rng(0)
TEXT = torch.from_numpy(RNG.integers(0, 257, 20 * 70))


def drawn(name: str, *options: str) -> dict[str, Panel]:
    """Return the panels of an encoding's picture, by title."""
    label, build_encoding = command.builder(name, list(options))
    picture = panels.picture(label, build_encoding)
    return {panel.title: panel for panel in picture.panels}


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_every_encoding_is_drawn_and_mean_attention_always(name):
    pictures = drawn(name)
    assert list(pictures)[-1] == "Mean attention, random tokens"
    for panel in pictures.values():
        for values in (*panel.curves.values(), panel.image):
            assert values.size == 0 or np.isfinite(values).any()


def test_a_bias_is_drawn_by_distance_for_each_head():
    panel = drawn("alibi")["Added to the logit, equal tokens"]
    distance = np.arange(128)
    expected = {
        "head 1": -distance / 4,
        "head 2": -distance / 16,
        "head 3": -distance / 64,
        "head 4": -distance / 256,
    }
    for head, bias in expected.items():
        assert_allclose(panel.curves[head], bias, atol=1e-4)


def test_the_command_says_how_often_distance_flips_an_order(capsys, tmp_path):
    assert support.posbench("show", "learned", "--png", f"{tmp_path}/show.png") == 0
    assert "distance: 0.00 at 128 tokens, n/a at 1,024" in capsys.readouterr().out


def test_what_depends_on_the_place_is_drawn_with_its_spread():
    of_sinusoidal = drawn("sinusoidal")["Dot product of two codes"]
    of_sine = drawn("sine")["Dot product of two codes"]
    assert list(of_sinusoidal.curves) == ["at every place"]
    assert list(of_sine.curves) == ["mean over places", "lowest", "highest"]


def test_a_table_is_drawn_to_its_end():
    image = drawn("learned")["Code of each position"].image
    in_table = image[:, :64]
    beyond = image[:, 64:]
    assert np.isfinite(in_table).all()
    assert np.isnan(beyond).all()


def test_a_rotation_is_drawn_by_the_product_of_ones():
    panel = drawn("rope", "base=100")["q·k of ones"]
    frequencies = 100 ** (-np.arange(8) / 8)
    angles = np.arange(128)[:, None] * frequencies
    expected = 2 * np.cos(angles).sum(1)
    assert_allclose(panel.curves["at every place"], expected, atol=1e-3)


DRAWN_TO = [
    ("learned", ["at 16"]),
    ("stick_breaking", ["at 16", "at 32", "at 64"]),
]


@pytest.mark.parametrize(("name", "lengths"), DRAWN_TO)
@torch.no_grad()
def test_attention_is_drawn_as_far_as_the_encoding_is_defined(
    name, lengths, tiny_config
):
    config = support.encoded(tiny_config, name)
    config = support.changed(config, model={"n_kv_heads": 1})
    model = build(config, 257).eval()

    *_, attention = panels.text_panels(model, config, TEXT)

    assert list(attention.curves) == lengths
    for values in attention.curves.values():
        assert np.isfinite(values[1:3]).all()


@pytest.mark.slow
def test_a_run_is_drawn_as_learned_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    words = [
        "encoding=t5",
        "encoding.num_buckets=8",
        *support.TINY,
        "data.path=text.txt",
        "training.tokens=128",
        "runtime.cache=cache",
    ]
    assert support.posbench("train", *words) == 0
    run = next(Path("outputs/text").glob("t5-s0-*"))
    before = support.snapshot(run)

    assert support.posbench("show", str(run), "rope", "base=100") == 0
    curves = panels.run_picture(run).panels[0].curves

    png = Path("show.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert support.snapshot(run) == before
    model = posbench.load(run).model()
    distance = torch.arange(64)
    learned = model.encoding.distance_bias(distance, 0).detach()
    drawn = list(curves.values())
    assert_allclose(drawn, learned, atol=1e-5)
