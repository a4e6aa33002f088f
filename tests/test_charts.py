"""The figures of a report: what they draw, their colours, ranges and names."""

import re

import pandas as pd
import pytest
from fake_study import Truth, rows_of_study, write_study
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from posbench.config.schema import Config
from posbench.errors import UserError
from posbench.reports import charts
from posbench.results.compare import compare, curves
from posbench.results.frame import read


def text_figure(frame: pd.DataFrame, kind: charts.FigureKind = "panels") -> Figure:
    figure = charts.text_figure(frame, compare(frame), kind)
    assert figure is not None
    return figure


def study_of(tmp_path, template: Config, truths: dict[str, Truth]) -> pd.DataFrame:
    return read([write_study(tmp_path / "fake", template, truths, seeds=2)])


def colours_of(axes: Axes) -> dict[str | None, str]:
    """Return the colour of each curve by its scheme."""
    return {line.get_gid(): str(line.get_color()) for line in axes.lines}


def heights_of(axes: Axes, scheme: str) -> list[float]:
    """Return the heights of a scheme's first curve."""
    line = next(line for line in axes.lines if line.get_gid() == f"curve-{scheme}")
    return [*map(float, line.get_ydata())]


def test_the_band_of_a_curve_is_its_interval():
    frame = rows_of_study("six")
    points = curves(frame).query("label == 'rope' and variant == 'plain'")
    points = points[points["ratio"] >= 1 / 4]

    axes = text_figure(frame, "curve").axes[0]

    bands = {band.get_gid(): band for band in axes.collections}
    drawn = {*bands["curve-rope"].get_paths()[0].vertices[:, 1]}
    assert (points["nll_high"] - points["nll_low"] > 0.01).all()
    assert {*points["nll_low"]} <= drawn
    assert {*points["nll_high"]} <= drawn


def test_the_intervals_of_differences_are_the_adjusted_ones():
    frame = rows_of_study("six")
    fox = compare(frame).set_index("label").loc["fox"]
    low = fox["nll_difference_adjusted_low"]
    high = fox["nll_difference_adjusted_high"]

    axes = text_figure(frame).axes[2]

    interval, point = [line for line in axes.lines if line.get_gid() == "curve-fox"]
    assert low < fox["nll_difference_low"]
    assert interval.get_xdata() == pytest.approx([low, high])
    assert point.get_xdata() == pytest.approx([fox["nll_difference"]])


def test_a_scheme_has_one_colour_in_every_panel_and_report():
    six = rows_of_study("six")
    others = six[six["encoding"].isin(["t5", "alibi", "rope"])]

    of_six = [colours_of(axes) for axes in text_figure(six).axes]
    of_others = [colours_of(axes) for axes in text_figure(others).axes]

    for panel in of_six + of_others:
        assert panel["curve-alibi"] == charts.WELL_KNOWN["alibi"]
        assert panel["curve-t5"] == charts.WELL_KNOWN["t5"]


def test_well_known_schemes_have_colours_of_their_own():
    assert len({*charts.WELL_KNOWN.values()}) == len(charts.WELL_KNOWN)


def test_any_other_scheme_has_a_colour_that_its_name_gives():
    own = charts.scheme_colour("own base=5")

    assert re.fullmatch("#[0-9a-f]{6}", own)
    assert own == charts.scheme_colour("own base=5")
    assert own != charts.scheme_colour("own base=6")


def test_the_range_of_changes_holds_the_reference(tmp_path, template):
    flat = {name: Truth(3.6, 0.001) for name in ("alibi", "none", "t5", "fire", "fox")}
    frame = study_of(tmp_path, template, {"rope": Truth(3.6, 0.5), **flat})

    axes = text_figure(frame).axes[1]

    assert axes.get_title() == "Change from the training length"
    assert axes.get_ylim()[1] > max(heights_of(axes, "rope"))


@pytest.mark.parametrize(("ngram", "words"), [(1.0, "below"), (9.0, "above")])
def test_a_simple_reader_never_sets_a_range(tmp_path, template, ngram, words):
    truths = {
        "rope": Truth(3.6, 0.1, ngram=ngram),
        "none": Truth(3.7, 0.1, ngram=ngram),
    }
    frame = study_of(tmp_path, template, truths)

    axes = text_figure(frame).axes[0]

    low, high = axes.get_ylim()
    names = [text.get_text() for text in axes.texts]
    assert low > 3
    assert high < 5
    assert charts.GREY not in colours_of(axes).values()
    assert f"n-gram model {ngram:g}, {words}" in names


def test_a_simple_reader_in_the_range_is_a_grey_line():
    axes = text_figure(rows_of_study("six")).axes[0]

    greys = [line for line in axes.lines if line.get_color() == charts.GREY]

    assert [line.get_ydata()[0] for line in greys] == pytest.approx(
        [3.408, 2.936], abs=5e-4
    )


def test_numbers_in_figures_have_a_true_minus():
    figure = text_figure(rows_of_study("six"))

    figure.draw_without_rendering()

    ticks = [label.get_text() for label in figure.axes[2].get_xticklabels()]
    assert any(tick.startswith("\N{MINUS SIGN}") for tick in ticks)
    assert not any("-" in tick for tick in ticks)


def test_names_that_differ_at_their_ends_stay_apart():
    names = [f"layered layers=2 rope window={size} + none" for size in (64, 128)]

    first, second = map(charts._wrapped_name, names)

    assert first != second
    assert max(map(len, first.split("\n"))) <= charts.LONGEST_LINE


@pytest.mark.slow
def test_names_at_the_ends_of_curves_do_not_collide():
    figure = text_figure(rows_of_study("six"))

    figure.draw_without_rendering()

    assert len(figure.axes) == 3
    for axes in figure.axes:
        # without the lines that lead from a name to its curve
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        boxes += [label.get_window_extent() for label in axes.get_xticklabels()]
        for place, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[place + 1 :])


def test_the_panels_of_a_page_are_those_of_the_figure():
    frame = rows_of_study("six")

    figures = charts.text_figures(frame, compare(frame))

    titles = [figure.axes[0].get_title() for figure in figures]
    assert titles == [axes.get_title() for axes in text_figure(frame).axes]


def test_runs_of_several_settings_are_not_plotted(tmp_path, template):
    six = rows_of_study("six")
    other = six.assign(setting="another", settings="{}")

    with pytest.raises(UserError, match="these runs may not be compared"):
        charts.runs_figure(pd.concat([six, other], ignore_index=True))
