"""Pictures: the numbers behind them, and the PNG file."""

import collections
import itertools
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

import posbench
from posbench.errors import UserError
from posbench.show import command, panels, plots, schemes
from posbench.show.schemes import Scheme

PHRASE = "my daughter called her brother last night"


def _moved(scheme: Scheme, words: tuple[str, str] = ("daughter", "called")) -> panels.Curves:
    (panel,) = panels.moving([scheme], PHRASE, words).panels
    assert isinstance(panel, panels.Curves)
    return panel


def _titles(name: str) -> list[str]:
    return [panel.title for panel in panels.picture(Scheme(name)).panels]


@pytest.mark.sample(30)
@pytest.mark.parametrize("name", posbench.encodings.names())
def test_every_scheme_is_drawn_and_attention_decay_always(name: str) -> None:
    picture = panels.picture(Scheme(name))
    assert picture.panels[-1].title == "Mean attention, random tokens"
    for panel in picture.panels:
        assert panel.title and panel.x_label and panel.y_label
        drawn = [panel.values] if isinstance(panel, panels.Heatmap) else list(panel.series.values())
        assert all(np.isfinite(values).any() for values in drawn)


@pytest.mark.full
def test_panels_are_chosen_by_what_the_scheme_does() -> None:
    assert _titles("sinusoidal")[:2] == ["Code of each position", "Dot product of two codes"]
    assert _titles("rope")[:3] == [
        "Cosine of the angle turned",
        "Tokens until a pair has turned once",
        "Long-term decay",
    ]
    assert _titles("alibi")[:1] == ["Added to the logit, equal tokens"]
    # The last two change q and k by their neighbours, the first of which there are not: that is no turning.
    assert all(_titles(name) == ["Mean attention, random tokens"] for name in ("none", "canon", "cca"))


@pytest.mark.full
def test_what_turns_at_no_constant_speed_is_drawn_by_what_it_adds_to_a_logit() -> None:
    for name in ("pope", "fope", "decoupled_rope", "transformer_xl", "tupe"):
        assert _titles(name) == ["Added to the logit, equal tokens", "Mean attention, random tokens"], name


def test_a_pattern_of_layers_is_drawn_under_its_own_name() -> None:
    scheme = schemes.scheme("layered/gemma3", [], panels.SHAPE)
    assert (scheme.name, scheme.label, len(scheme.options["layers"])) == ("layered", "layered/gemma3", 6)
    picture = panels.picture(scheme)
    assert (picture.name, picture.subtitle) == ("layered/gemma3", "first layer: rope")
    with pytest.raises(UserError, match="is not a run folder"):
        command.main(["layered/gemma33"])


def test_rope_wavelengths_are_those_of_the_formula() -> None:
    wavelengths = panels.picture(Scheme("rope")).panels[1]
    assert isinstance(wavelengths, panels.Curves)
    expected = 2 * np.pi * 10000 ** (np.arange(8) / 8)  # head_dim 16: theta = base^(-2p/16)
    np.testing.assert_allclose(wavelengths.series["wavelength"], expected, rtol=1e-6)
    assert wavelengths.limit_y == 64


def test_alibi_heads_fall_by_their_slopes() -> None:
    bias = panels.picture(Scheme("alibi")).panels[0]
    assert isinstance(bias, panels.Curves)
    for head, slope in enumerate((1 / 4, 1 / 16, 1 / 64, 1 / 256), start=1):
        np.testing.assert_allclose(bias.series[f"head {head}"], -slope * np.arange(128), atol=1e-12)


def test_the_dot_product_band_is_a_line_for_sinusoids_and_wide_for_sines() -> None:
    width = {}
    for name in ("sinusoidal", "sine"):
        panel = panels.picture(Scheme(name)).panels[1]
        assert isinstance(panel, panels.Curves) and panel.band is not None
        width[name] = float((panel.band[1] - panel.band[0]).max())
    assert width["sinusoidal"] < 1e-9 < 1 < width["sine"]


def test_learned_is_undefined_beyond_its_table() -> None:
    code = panels.picture(Scheme("learned")).panels[0]
    assert isinstance(code, panels.Heatmap)
    assert np.isfinite(code.values[:, :64]).all() and np.isnan(code.values[:, 64:]).all()


def test_attention_without_positions_is_an_even_share() -> None:
    decay = panels.picture(Scheme("none")).panels[-1]
    assert isinstance(decay, panels.Curves)
    np.testing.assert_allclose(decay.series["mean over heads"], 1, atol=0.15)  # the mean of 4096 random weights


@pytest.mark.full
def test_daughter_and_called_keep_their_logit_under_relative_schemes_only() -> None:
    relative = ("none", "rope", "alibi", "t5", "shaw", "fox", "cope", "path", "stick_breaking")
    for name in (*relative, "sinusoidal", "learned", "minmax", "index"):
        assert (_moved(Scheme(name)).note == "stays") == (name in relative), name


def test_fire_keeps_it_up_to_its_threshold() -> None:
    assert _moved(Scheme("fire", {"threshold": None})).note.startswith("stays to 64, then changes by")


def test_the_order_of_words_does_not_matter() -> None:
    first, second = (
        _moved(Scheme("alibi"), pair).series[""] for pair in (("daughter", "called"), ("called", "daughter"))
    )
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, -1 / 4)  # one token apart, first head


# -- PNG files and mistakes --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are written to files."""
    figures: list[Figure] = []
    write = Figure.savefig

    def spy(figure: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(figure)
        write(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return figures


@pytest.mark.full
def test_png_holds_a_row_of_panels_per_scheme(tmp_path: Path, saved: list[Figure]) -> None:
    names = ["sinusoidal", "learned", "none"]
    command.main(names, tmp_path / "a.png")
    rows = saved[0].subfigs
    assert [row.get_suptitle().split()[0] for row in rows] == names
    assert [[axis.get_title() for axis in row.axes if axis.get_title()] for row in rows] == [_titles(n) for n in names]
    height, width, _ = imread(tmp_path / "a.png").shape
    np.testing.assert_array_equal((width, height), (saved[0].get_size_inches() * plots.DPI).round())


@pytest.mark.full
def test_png_of_a_moved_phrase_holds_a_curve_per_scheme(tmp_path: Path, saved: list[Figure]) -> None:
    command.main(["rope", "sinusoidal"], tmp_path / "b.png", PHRASE, "daughter,called")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    for axis, name in zip(saved[0].axes, ("rope", "sinusoidal"), strict=True):
        panel = _moved(Scheme(name))
        assert axis.get_title() == name and panel.note in [text.get_text() for text in axis.get_legend().get_texts()]
        np.testing.assert_array_equal(axis.lines[0].get_xydata(), np.stack([panel.x, panel.series[""]], axis=1))
        low, high = axis.get_ylim()
        assert high - low >= 1 and low < panel.series[""].min() <= panel.series[""].max() < high


@pytest.mark.full
@pytest.mark.parametrize("name", ["t5", "fire", "path", "rope", "index", "shaw"])
def test_a_legend_lies_below_its_panel_and_on_no_other(tmp_path: Path, saved: list[Figure], name: str) -> None:
    command.main([name], tmp_path / "a.png")
    axes = saved[0].subfigs[0].axes
    boxes = [legend.get_window_extent() for axis in axes if (legend := axis.get_legend())]
    taken = [axis.get_window_extent() for axis in axes] + [axis.xaxis.label.get_window_extent() for axis in axes]
    assert len(boxes) >= 2
    assert not any(box.overlaps(other) for box in boxes for other in taken)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x0 >= 0 and box.x1 <= saved[0].bbox.width and box.y0 >= 0 for box in boxes)


@pytest.mark.full
@pytest.mark.parametrize("names", [["bipe"], ["cape"], ["rope", "sinusoidal"]], ids="-".join)
def test_nothing_is_cut_off(tmp_path: Path, names: list[str]) -> None:
    command.main(names, tmp_path / "a.png")
    pixels = imread(tmp_path / "a.png")[..., :3]
    assert all((edge == 1).all() for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]))


@pytest.mark.full
def test_many_panels_are_rows_of_equal_length(tmp_path: Path, saved: list[Figure]) -> None:
    command.main(["bipe"], tmp_path / "a.png")
    tops = collections.Counter(round(axis.get_position().y1, 2) for axis in saved[0].axes if axis.get_title())
    assert list(tops.values()) == [3, 3]


def test_the_heading_of_a_single_panel_is_as_wide_as_the_picture(tmp_path: Path, saved: list[Figure]) -> None:
    command.main(["canon"], tmp_path / "a.png")
    command.main(["rope"], tmp_path / "b.png", PHRASE, "daughter,called")
    for figure, said in zip(saved, ("untrained", "brother"), strict=True):
        (row,) = figure.subfigs
        assert row._suptitle.get_window_extent().x0 >= 0 and said in row.get_suptitle()


@pytest.mark.full
def test_where_attention_is_too_faint_to_draw_the_legend_says_so(tmp_path: Path, saved: list[Figure]) -> None:
    command.main(["fox", "alibi"], tmp_path / "a.png")
    said = [[text.get_text() for text in row.axes[-1].get_legend().get_texts()] for row in saved[0].subfigs]
    assert "below 0.0001: not drawn" in said[0] and "below 0.0001: not drawn" not in said[1]


def test_a_folder_that_does_not_exist_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*: No such file"):
        command.main(["none"], tmp_path / "nowhere" / "a.png")


@pytest.mark.parametrize(
    ("names", "phrase", "words", "message"),
    [
        (["rop"], None, None, "did you mean 'rope'"),
        (["rope"], PHRASE, None, "go together"),
        (["rope"], None, "a,b", "go together"),
        (["rope"], PHRASE, "daughter", "two different words"),
        (["rope"], PHRASE, "doughter,called", "did you mean 'daughter'"),
        (["rope"], "a b " * 40, "a,b", "expected fewer than 64"),
    ],
)
def test_mistakes_get_one_line(names: list[str], phrase: str | None, words: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main(names, phrase=phrase, words=words)


# -- the gallery -------------------------------------------------------------------------------------------------------


def test_the_gallery_holds_a_picture_for_each_of_its_commands() -> None:
    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "gallery.md").read_text(encoding="utf-8").replace("\\\n", "")
    commands = [shlex.split(line) for line in re.findall(r"^    posbench (show .*)$", page, re.MULTILINE)]
    pictures = re.findall(r"\]\(gallery/(.*)\)", page)
    assert pictures == [words[-1] for words in commands]
    assert {path.name for path in (docs / "gallery").iterdir()} == set(pictures)
    assert all((docs / "gallery" / name).stat().st_size < 200_000 for name in pictures)
    shown = {word for words in commands for word in words if word in posbench.encodings.names()}
    assert shown >= {"sinusoidal", "sine", "binary", "learned", "index", "minmax", "rope", "alibi", "t5", "shaw"}
