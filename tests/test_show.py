"""Pictures: the numbers behind them, of encodings and of runs, and the PNG file."""

from pathlib import Path

import numpy as np
import pytest
import support
import torch

import posbench
from posbench.model.gpt import build
from posbench.show import command, panels
from posbench.show.panels import Panel

TEXT = torch.from_numpy(np.random.default_rng(0).integers(0, 257, 20 * 70))


def drawn(name: str, *options: str) -> dict[str, Panel]:
    return {
        panel.title: panel
        for panel in panels.picture(*command.builder(name, list(options))).panels
    }


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_every_encoding_is_drawn_and_mean_attention_always(name):
    pictures = drawn(name)
    assert list(pictures)[-1] == "Mean attention, random tokens"
    lines = [
        values
        for panel in pictures.values()
        for values in (*panel.curves.values(), panel.image)
    ]
    assert all(np.isfinite(values).any() for values in lines if values.size)


def test_a_bias_is_drawn_by_distance_for_each_head():
    slopes = drawn("alibi")["Added to the logit, equal tokens"].curves
    for head, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256), start=1):
        np.testing.assert_allclose(
            slopes[f"head {head}"], -slope * np.arange(128), atol=1e-4
        )


def test_what_depends_on_the_place_is_drawn_with_its_spread():
    panel = "Dot product of two codes"
    assert [*drawn("sinusoidal")[panel].curves] == ["at every place"]
    assert [*drawn("sine")[panel].curves] == ["mean over places", "lowest", "highest"]


def test_a_table_is_drawn_to_its_end():
    image = drawn("learned")["Code of each position"].image
    assert np.isfinite(image[:, :64]).all()
    assert np.isnan(image[:, 64:]).all()


def test_a_rotation_is_drawn_by_the_product_of_ones():
    curves = drawn("rope", "base=100")["q·k of ones"].curves
    angles = np.arange(128)[:, None] * 100 ** (-np.arange(8) / 8)
    expected = 2 * np.cos(angles).sum(1)
    np.testing.assert_allclose(curves["at every place"], expected, atol=1e-3)


@pytest.mark.parametrize("name", ["learned", "stick_breaking"])
def test_attention_is_drawn_as_far_as_the_encoding_is_defined(name, tiny_config):
    config = support.changed(
        support.encoded(tiny_config, name), model={"n_kv_heads": 1}
    )
    with torch.no_grad():
        curves = panels.text_panels(build(config, 257).eval(), config, TEXT)[-1].curves
    assert (
        list(curves) == ["at 16"] if name == "learned" else ["at 16", "at 32", "at 64"]
    )
    assert all(np.isfinite(values[1:3]).all() for values in curves.values())


@pytest.mark.slow
def test_a_run_is_drawn_as_learned_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    support.write_text()
    arguments = [
        *support.TINY,
        "data.path=text.txt",
        "training.tokens=128",
        "runtime.cache=cache",
    ]
    assert (
        support.posbench("train", "encoding=t5", "encoding.num_buckets=8", *arguments)
        == 0
    )
    run = next(Path("outputs/demo").glob("t5-s0-*"))
    before = support.snapshot(run)
    assert support.posbench("show", str(run), "rope", "base=100") == 0
    assert Path("show.png").read_bytes().startswith(b"\x89PNG")
    assert support.snapshot(run) == before
    expected = (
        posbench.load(run)
        .model()
        .encoding.distance_bias(torch.arange(64), 0)
        .detach()
        .numpy()
    )
    np.testing.assert_allclose(
        list(panels.run_picture(run).panels[0].curves.values()), expected, atol=1e-5
    )
