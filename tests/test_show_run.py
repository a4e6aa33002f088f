"""Pictures of trained runs: what is drawn is what was learned, and what the model does on its own text."""

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import torch
from matplotlib.image import imread

import posbench
from posbench.config.schema import Config, EncodingConfig
from posbench.data.tokens import TokenSplit
from posbench.errors import UserError
from posbench.model.gpt import GPT, build
from posbench.show import codes, command, panels, plots, schemes, trained
from posbench.show.panels import Curves

LENGTH = 16  # that tiny_config is trained at
TEXT = TokenSplit(
    ids=np.random.default_rng(0).integers(0, 257, 20 * 70).astype(np.uint16), starts=np.arange(0, 21) * 70
)


def built(config: Config, name: str, **options: Any) -> tuple[GPT, Config]:
    config = dataclasses.replace(config, encoding=EncodingConfig(name, options))
    return build(config, 257, tuple(map(str, range(257)))).eval(), config


def drawn(gpt: GPT, config: Config) -> dict[str, Curves]:
    with torch.no_grad():
        found = trained._on_text(gpt, config, TEXT)
    assert all(isinstance(panel, Curves) for panel in found)
    return {panel.title: panel for panel in found if isinstance(panel, Curves)}


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_attention_of_every_encoding_is_drawn_at_and_beyond_the_training_length(name: str, tiny_config: Config) -> None:
    options: dict[str, Any] = {"layers": [{"name": "fox"}, {"name": "rope"}]} if name == "layered" else {}
    gpt, config = built(tiny_config, name, **options)
    panel = list(drawn(gpt, config).values())[-1]
    assert panel.title == "Mean attention, its own text" and panel.limit == LENGTH and panel.end == 4 * LENGTH - 1
    lengths = [LENGTH * ratio for ratio in (1, 2, 4) if LENGTH * ratio <= (gpt.encoding.max_length or math.inf)]
    assert list(panel.series) == [f"at {length}" for length in lengths]
    for length, values in zip(lengths, panel.series.values(), strict=True):
        assert np.isfinite(values[1:3]).all() and np.isnan(values[length:]).all()


def test_alibi_adds_its_slopes_at_every_distance(tiny_config: Config) -> None:
    bias = drawn(*built(tiny_config, "alibi", slopes=[0.5, 0.125]))["Added to the logit"]
    for slope, values in zip((0.5, 0.125), bias.series.values(), strict=True):
        np.testing.assert_allclose(values, -slope * np.arange(4 * LENGTH), atol=1e-5)


def test_forget_gates_are_shown_by_head_and_layer(tiny_config: Config) -> None:
    gpt, config = built(tiny_config, "fox")
    gates = torch.tensor([[0.0, 1.0], [-1.0, 3.0]])  # (layer, head)
    with torch.no_grad():
        gpt.encoding.weight.zero_()
        gpt.encoding.gate_bias.copy_(gates)
    found = drawn(gpt, config)
    kept = found["Forget gates: kept at each token"]
    np.testing.assert_allclose(np.stack(list(kept.series.values())).T, gates.sigmoid().numpy(), rtol=1e-5)
    assert kept.x.tolist() == [1, 2] and kept.points
    for layer in (1, 2):
        slopes = torch.nn.functional.logsigmoid(gates[layer - 1]).tolist()
        for slope, values in zip(slopes, found[f"Added to the logit, layer {layer} of 2"].series.values(), strict=True):
            np.testing.assert_allclose(values, slope * np.arange(4 * LENGTH), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["none", "rope", "stick_breaking", "shaw"])
def test_attention_is_what_arrives_of_each_value(name: str, tiny_config: Config) -> None:
    gpt, _ = built(tiny_config, name)
    ids = torch.from_numpy(TEXT.ids[:LENGTH].astype(np.int64))[None]
    positions = torch.arange(LENGTH)[None]
    with torch.no_grad():
        by_distance = trained._layers(gpt, ids, positions)[0][1]
        q, k, _, x = gpt.layers[0].into_attention(gpt.encoding.embed(gpt.tokens(ids), positions, ids))
        expected = codes.arriving(gpt.encoding, q, k, x, positions)[0, :, -2:]  # an eighth of 16 queries
    last, before = expected[:, 1].flip(-1), expected[:, 0, : LENGTH - 1].flip(-1)
    torch.testing.assert_close(by_distance[:, LENGTH - 1], last[:, LENGTH - 1], atol=1e-6, rtol=1e-5)
    mean = (last[:, : LENGTH - 1] + before) / 2
    torch.testing.assert_close(by_distance[:, : LENGTH - 1], mean, atol=1e-6, rtol=1e-5)


def test_a_window_of_the_model_hides_what_lies_outside(tiny_config: Config) -> None:
    attention = dataclasses.replace(tiny_config.model.attention, window=4)
    config = dataclasses.replace(tiny_config, model=dataclasses.replace(tiny_config.model, attention=attention))
    found = drawn(*built(config, "alibi"))
    for values in found["Mean attention, its own text"].series.values():
        assert np.isfinite(values[:4]).all() and np.isnan(values[4:]).all()
    assert max(values.max() for values in found[f"Mean distance read, at {LENGTH} tokens"].series.values()) <= 3


def test_a_large_model_is_not_read_for_long(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "SECONDS", 0.0)
    panel = drawn(*built(tiny_config, "rope"))["Mean attention, its own text"]
    assert list(panel.series) == ["at 16", "at 32"] and panel.end == 63


def test_short_documents_are_read_on_into_the_next(tiny_config: Config) -> None:
    text = TokenSplit(TEXT.ids, np.arange(0, len(TEXT.ids) + 1, 10))
    windows = trained._windows(text, 64)
    assert len(windows) == len(TEXT.ids) // 64 and all(len(window) == 64 for window in windows)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A T5 run; its folder is below the current one."""
    folder, before = tmp_path_factory.mktemp("shown"), Path.cwd()
    os.chdir(folder)
    support.write_text()
    arguments = [*support.TINY, "data.path=text.txt", "training.tokens=512", "runtime.cache=cache"]
    assert support.posbench("train", "encoding=t5", "encoding.num_buckets=8", *arguments) == 0
    yield next(Path("outputs/demo").glob("t5-s0-*"))
    os.chdir(before)


def test_drawing_a_run_changes_nothing_in_its_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = support.snapshot(run)
    assert support.posbench("show", str(run)) == 0
    assert capsys.readouterr().out == "show.png\n" and Path("show.png").read_bytes().startswith(b"\x89PNG")
    picture = trained.picture(run)
    assert (picture.name, picture.subtitle) == (run.name, "t5, trained")
    assert {"Added to the logit", "Mean attention, its own text"} <= {panel.title for panel in picture.panels}
    assert support.snapshot(run) == before


@pytest.mark.full
def test_runs_and_names_stand_side_by_side_in_one_file(run: Path, tmp_path: Path) -> None:
    assert support.posbench("show", str(run), "rope", "base=100", "t5", "--png", str(tmp_path / "a.png")) == 0
    height, width, _ = imread(tmp_path / "a.png").shape
    assert (width, height) == (round(4 * 4.1 * plots.DPI), round(3 * plots.ROW * plots.DPI))


def test_the_picture_holds_what_the_run_has_learned(run: Path) -> None:
    picture = trained.picture(run)
    bias = picture.panels[0]
    assert isinstance(bias, Curves) and picture.train_length == LENGTH
    encoding = posbench.load(run).model().encoding
    expected = encoding.distance_bias(torch.arange(64), 0).detach().numpy()
    np.testing.assert_allclose(np.stack(list(bias.series.values())), expected, atol=1e-5)


@pytest.mark.parametrize("gone", [True, False])
def test_without_its_text_a_run_shows_its_encoding_and_says_why(run: Path, tmp_path: Path, gone: bool) -> None:
    text = Path("text.txt")
    kept = text.read_bytes()
    try:
        text.unlink() if gone else text.write_text("quite another text. " * 3000, encoding="utf-8")
        picture = trained.picture(run)
    finally:
        text.write_bytes(kept)
    said = "no file matches 'text.txt'" if gone else "the text there is not the one of the run"
    assert f"its text is not available: {'data.path: ' * gone}{said}" in picture.subtitle
    assert picture.panels == ()  # t5 acts on pairs alone


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "base=3"], "is a run with fixed options"),
        (["{run}/.."], r"is not a run folder: it has no config\.yaml"),
        (["base=100", "rope"], "expected options after the encoding, rope base=100"),
        (["encoding=rope"], "expected only the name of the encoding here, rope"),
        (["rope", "bse=100"], "did you mean 'base'"),
        (["rope", "base=fast"], r"encoding\.base is 'fast' for 'rope'"),
        (["rope", "base=1", "base.of=2"], "base is also set by another word"),
        (["alibi", "base=100"], "'alibi' has no option 'base'.*did you mean to choose 'rope'"),
    ],
)
def test_mistakes_get_one_line(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        command.main([word.format(run=run) for word in words])
    assert "\n" not in str(error.value)


def test_a_phrase_is_moved_through_encodings_only(run: Path) -> None:
    with pytest.raises(UserError, match="--phrase takes names of encodings"):
        command.main([str(run)], phrase="a b", words="a,b")


def test_a_run_without_a_checkpoint_gets_one_line(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    with pytest.raises(UserError, match="has no checkpoint"):
        command.main([str(tmp_path / "run")])


# -- options of encodings that are named -------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["base=100"], ["encoding.base=100"], ["base=1e2", "layout=interleaved"]])
def test_options_after_a_name_are_its_own(words: list[str]) -> None:
    scheme = schemes.scheme("rope", words, panels.SHAPE)
    wavelengths = panels.picture(scheme).panels[1]
    assert isinstance(wavelengths, Curves)
    np.testing.assert_allclose(wavelengths.series["wavelength"], 2 * np.pi * 100 ** (np.arange(8) / 8), rtol=1e-6)


def test_a_picture_says_which_options_it_is_of() -> None:
    assert panels.picture(schemes.scheme("rope", ["encoding.base=100"], panels.SHAPE)).name == "rope base=100"


def test_options_of_what_an_encoding_stands_around() -> None:
    scheme = schemes.scheme("randomized", ["inner=rope", "inner_options.base=500"], panels.SHAPE)
    assert scheme.options == {"inner": "rope", "inner_options": {"base": 500}}
    assert panels.picture(scheme).subtitle.endswith("first layer: rope")


@pytest.mark.full
def test_properties_are_measured_with_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert support.posbench("properties", "shaw", "values=false", "shaw") == 0
    out = capsys.readouterr().out
    assert "shaw values=false" in out
    assert support.posbench("properties", "shaw", "valus=false") == 2
    assert "did you mean 'values'" in capsys.readouterr().err
