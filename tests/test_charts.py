"""The figures of a report: what they draw, their colours, ranges and names."""

import itertools
import re

import pandas as pd
import pytest
from fake_study import Truth, comparison_of_study, rows_of_study, write_study
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from posbench.errors import UserError
from posbench.reports import charts
from posbench.results.compare import Losses, compare, curves
from posbench.results.frame import read


def text_figure(frame: pd.DataFrame, kind: charts.FigureKind = "panels") -> Figure:
    panels = charts.text_panels(curves(Losses.of(frame)), compare(frame), kind)
    return charts.panels_figure(panels, kind)


def study_of(tmp_path, truths: dict[str, Truth]) -> pd.DataFrame:
    study = write_study(tmp_path / "fake", truths, seeds=2)
    return read([study])


def colours_of(axes: Axes) -> dict[str, str]:
    """Return the colour of each curve by its scheme."""
    return {line.get_gid(): line.get_color() for line in axes.lines}


def lines_of(axes: Axes, scheme: str) -> list[Line2D]:
    return [line for line in axes.lines if line.get_gid() == f"curve-{scheme}"]


@pytest.fixture(scope="module")
def figure_of_six() -> Figure:
    return text_figure(rows_of_study("six_reader"))


def test_the_band_of_a_curve_is_its_interval():
    frame = rows_of_study("six_reader")
    points = curves(Losses.of(frame)).query("label == 'rope' and variant == 'plain'")
    points = points[points["ratio"] >= 1 / 4]

    axes = text_figure(frame, "curve").axes[0]

    bands = {band.get_gid(): band for band in axes.collections}
    (outline,) = bands["curve-rope"].get_paths()
    heights = set(outline.vertices[:, 1])
    widths = points["nll_high"] - points["nll_low"]
    assert widths.min() > 0.01
    assert heights.issuperset(points["nll_low"])
    assert heights.issuperset(points["nll_high"])


def test_the_intervals_of_differences_are_the_adjusted_ones(figure_of_six):
    table = comparison_of_study("six_reader").frame
    fox = table.set_index("label").loc["fox"]
    low = fox["nll_difference_adjusted_low"]
    high = fox["nll_difference_adjusted_high"]

    axes = figure_of_six.axes[2]

    interval, point = lines_of(axes, "fox")
    assert low < fox["nll_difference_low"]
    assert interval.get_xdata() == pytest.approx([low, high])
    assert point.get_xdata() == pytest.approx([fox["nll_difference"]])


def test_a_scheme_has_one_colour_in_every_panel_and_report(figure_of_six):
    six = rows_of_study("six_reader")
    others = six[six["encoding"].isin(["t5", "alibi", "rope"])]

    of_six = [colours_of(axes) for axes in figure_of_six.axes]
    of_others = [colours_of(axes) for axes in text_figure(others).axes]

    for panel in of_six + of_others:
        assert panel["curve-alibi"] == charts.WELL_KNOWN["alibi"]
        assert panel["curve-t5"] == charts.WELL_KNOWN["t5"]


def test_well_known_schemes_have_colours_of_their_own():
    colours = list(charts.WELL_KNOWN.values())
    assert len(set(colours)) == len(colours)


def test_any_other_scheme_has_a_colour_that_its_name_gives():
    own = charts.scheme_colour("own base=5")

    assert re.fullmatch("#[0-9a-f]{6}", own)
    assert own == charts.scheme_colour("own base=5")
    assert own != charts.scheme_colour("own base=6")


def test_the_range_of_changes_holds_the_reference(tmp_path):
    truths = {"rope": Truth(3.6, 0.5)}
    for name in ("alibi", "none", "t5", "fire", "fox"):
        truths[name] = Truth(3.6, 0.001)
    frame = study_of(tmp_path, truths)

    axes = text_figure(frame).axes[1]

    _, top = axes.get_ylim()
    curve = lines_of(axes, "rope")[0]
    assert axes.get_title() == "Change from the training length"
    assert top > max(curve.get_ydata())


@pytest.mark.parametrize(("ngram", "words"), [(1.0, "below"), (9.0, "above")])
def test_a_simple_reader_never_sets_a_range(tmp_path, ngram, words):
    rope = Truth(3.6, 0.1, ngram=ngram)
    none = Truth(3.7, 0.1, ngram=ngram)
    frame = study_of(tmp_path, {"rope": rope, "none": none})

    axes = text_figure(frame).axes[0]

    low, high = axes.get_ylim()
    names = [text.get_text() for text in axes.texts]
    assert low > 3
    assert high < 5
    assert charts.GREY not in colours_of(axes).values()
    assert f"n-gram model {ngram:g}, {words}" in names


def test_a_simple_reader_in_the_range_is_a_grey_line(figure_of_six):
    axes = figure_of_six.axes[0]

    greys = [line for line in axes.lines if line.get_color() == charts.GREY]

    heights = [line.get_ydata()[0] for line in greys]
    assert heights == pytest.approx([3.408, 2.936], abs=5e-4)


def test_numbers_in_figures_have_a_true_minus(figure_of_six):
    figure_of_six.draw_without_rendering()

    labels = figure_of_six.axes[2].get_xticklabels()
    ticks = [label.get_text() for label in labels]
    assert "\N{MINUS SIGN}" in "".join(ticks)
    assert "-" not in "".join(ticks)


def test_names_that_differ_at_their_ends_stay_apart():
    names = [f"layered layers=2 rope window={size} + none" for size in (64, 128)]

    first, second = map(charts._wrapped_name, names)

    assert first != second
    for line in first.split("\n"):
        assert len(line) <= charts.LONGEST_LINE


@pytest.mark.slow
def test_names_at_the_ends_of_curves_do_not_collide(figure_of_six):
    figure_of_six.draw_without_rendering()

    assert len(figure_of_six.axes) == 3
    for axes in figure_of_six.axes:
        # without the lines that lead from a name to its curve
        boxes = [Text.get_window_extent(text) for text in axes.texts]
        boxes += [label.get_window_extent() for label in axes.get_xticklabels()]
        for box, other in itertools.combinations(boxes, 2):
            assert not box.overlaps(other)


def test_the_panels_of_a_page_are_those_of_the_figure(figure_of_six):
    points = curves(Losses.of(rows_of_study("six_reader")))
    panels = charts.text_panels(points, comparison_of_study("six_reader"))

    figures = [charts.panels_figure([panel]) for panel in panels]

    titles = [figure.axes[0].get_title() for figure in figures]
    of_whole = [axes.get_title() for axes in figure_of_six.axes]
    assert titles == of_whole


def test_runs_of_several_settings_are_not_plotted(tmp_path):
    six = rows_of_study("six_reader")
    other = six.assign(setting="another", settings="{}")
    both = pd.concat([six, other], ignore_index=True)

    with pytest.raises(UserError, match="these runs may not be compared"):
        charts.runs_figure(both)
