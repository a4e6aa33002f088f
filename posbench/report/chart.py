"""The page's chart: a Vega-Lite specification. vl-convert has the libraries that draw it, as one script.

Names from run folders are values of the data and nothing else: no field, expression or HTML is made of them.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from posbench import files
from posbench.report import styles
from posbench.report.styles import Style
from posbench.run_folder.rows import multiple

_SHAPES = {  # by matplotlib's names
    "o": "circle", "s": "square", "^": "triangle-up", "v": "triangle-down", "D": "diamond", "<": "triangle-left",
    ">": "triangle-right", "P": "cross", "X": "M-1-.6-.6-1 0-.4.6-1 1-.6.4 0 1 .6.6 1 0 .4-.6 1-1 .6-.4 0Z",
    "p": "M0-1 .95-.31.59.81-.59.81-.95-.31Z", "": "stroke",
}  # fmt: skip
_STOP = "M-.4-1h.8l.6 .6v.8l-.6 .6h-.8l-.6-.6v-.8z"  # an octagon
_MOST_BANDS = 8  # curves with bands, beyond which bands hide each other
_START = """
for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(place.querySelector("script").textContent), said = { disableDefaultStyle: true };
  vegaEmbed(place.querySelector(".drawn"), spec, { actions: false, ast: true, defaultStyle: false, renderer: "svg",
    tooltip: said });
}
"""


@dataclasses.dataclass(frozen=True)
class Dot:
    """A point of a curve, or of one seed of it."""

    ratio: float  # multiple of the training length
    length: int | None
    value: float
    interval: tuple[float, float] | None = None
    seed: int | None = None  # None: over seeds
    learned: bool = True
    is_joined: bool = True  # by a line to its neighbours
    between: str = "95 %"  # what the interval is: of that level, or the range of seeds


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve of the chart: its dots by view."""

    label: str
    style: Style
    dots: dict[str, list[Dot]]
    is_on: bool = True  # from the start
    is_outside: bool = False  # so high that it would flatten the others
    undefined_at: float | None = None


@dataclasses.dataclass(frozen=True)
class Axes:
    """What a chart's axes say."""

    views: dict[str, str]  # a view's name, and the word for it
    value: str
    length: str
    trained: str | None  # what the line at 1x says; None: there is none, and lengths are no multiples
    scale: float = 1.0  # of values
    before: tuple[float, str] | None = None  # a second line, of runs that began from others: its ratio, what it says


def spec(series: Sequence[Series], axes: Axes) -> dict[str, Any]:
    """The specification of a chart of curves, with a legend that isolates them, readings, zoom and views."""
    series = [one for one in series if any(one.dots.values())]
    rows = [row for one in series for view, dots in one.dots.items() for row in _rows(one, view, dots, axes)]
    ticks = {dot.ratio: dot.length for one in series for dots in one.dots.values() for dot in dots}
    position = {
        "x": {
            "field": "ratio", "type": "quantitative", "title": axes.length,
            "scale": {"type": "log", "base": 2, "nice": False, "padding": 16},
            "axis": {"values": sorted(ticks), "labelExpr": _tick_labels(ticks, axes), "labelOverlap": True,
                     "grid": True},
        },
        "y": {
            "field": "value", "type": "quantitative", "title": axes.value,
            "scale": {"zero": False, "nice": False, **_limits(series, axes)},
        },
    }  # fmt: skip
    seen = {"condition": {"param": "only", "value": 1}, "value": 0.08}
    own = {"color": _colours(series), "opacity": seen}
    dashes = [[float(part) for part in one.style.dash.split()] or [1, 0] for one in series]
    marked = [(1.0, axes.trained), *([axes.before] if axes.before else [])]
    lines = [{"ratio": ratio, "said": told} for ratio, told in marked]
    at_one: list[dict[str, Any]] = [
        {"mark": {"type": "rule", "strokeDash": [2, 3], "color": "var(--text)", "aria": False},
         "data": {"values": lines}, "encoding": {"x": position["x"]}},
        {"mark": {"type": "text", "align": "left", "baseline": "top", "dx": 5, "dy": 2, "color": "var(--text)"},
         "data": {"values": lines},
         "encoding": {"x": position["x"], "y": {"value": 0}, "text": {"field": "said"}}},
    ]  # fmt: skip
    layers: list[dict[str, Any]] = [
        *(at_one if axes.trained else []),
        {"transform": [{"filter": "datum.line"}],
         "mark": {"type": "line", "clip": True, "aria": False},
         "encoding": {**position, **own, "detail": {"field": "seed"},
                      "strokeDash": _by_curve(series, dashes),
                      "strokeWidth": {"condition": {"test": "isValid(datum.seed)", "value": 1}, "value": 2.2}}},
        {"params": [
            {"name": "only", "select": {"type": "point", "fields": ["curve"]}, "bind": "legend"},
            {"name": "zoom", "bind": "scales",
             "select": {"type": "interval", "zoom": "wheel![event.shiftKey]",
                        "translate": "[pointerdown[event.shiftKey], window:pointerup] > window:pointermove!"}}],
         "mark": {"type": "point", "clip": True, "strokeWidth": 1.4},
         "encoding": {**position, "opacity": seen, "stroke": _colours(series),
                      "shape": _by_curve(series, [_SHAPES[one.style.mark] for one in series]),
                      "fill": {"condition": {"test": "!datum.learned", "value": "var(--page)"}, **_colours(series)},
                      "size": {"condition": {"param": "near", "empty": False, "value": 150}, "value": 55},
                      "description": {"field": "said"}}},
        {"params": [{"name": "near", "select": {"type": "point", "on": "pointerover", "clear": "pointerout"}}],
         "mark": {"type": "point", "clip": True, "size": 900, "fill": "transparent", "strokeWidth": 0, "aria": False},
         "encoding": {**position, "tooltip": [{"field": name} for name in ("of", "at", "is")]}},
    ]  # fmt: skip
    if any(row["low"] is not None for row in rows) and sum(one.is_on for one in series) <= _MOST_BANDS:
        shade = {"condition": {"param": "only", "value": 0.14}, "value": 0}
        edges = {"y": {**position["y"], "field": "low"}, "y2": {"field": "high"}}
        layers.insert(len(layers) - 3, {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "area", "clip": True, "aria": False},
            "encoding": {**position, **own, **edges, "opacity": shade},
        })  # fmt: skip
    if any(row["ends"] for row in rows):
        layers.append({
            "transform": [{"filter": "datum.ends"}],
            "mark": {"type": "point", "shape": _STOP, "xOffset": 16, "size": 110, "stroke": "var(--page)",
                     "fill": "var(--stop)"},
            "encoding": {**position, "opacity": seen, "tooltip": {"field": "ends"}, "description": {"field": "ends"}},
        })  # fmt: skip
    return {
        "width": "container", "height": 380, "autosize": {"type": "fit-x", "contains": "padding"},
        "background": "transparent",
        "description": f"{axes.value} against {axes.length}; the tables below have the numbers",
        "params": _inputs(series, axes),
        "data": {"values": rows},
        "transform": [{"filter": "datum.view == view && (datum.on || more)"}],
        "layer": layers,
        "config": _CONFIG,
    }  # fmt: skip


@functools.cache
def script() -> str:
    """The libraries and the lines that draw each chart of a page.

    Making them takes seconds, so they are kept in the user's cache, beside the digest that they must have.
    """
    import vl_convert

    version = importlib.metadata.version("vl-convert-python")
    kept = files.private_cache("chart") / f"vega-{version}.js"
    if kept.is_file():
        digest, _, text = kept.read_text(encoding="utf-8").partition("\n")
        if digest == hashlib.sha256(text.encode()).hexdigest():
            return text + _START
    made = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")
    files.write(kept, f"{hashlib.sha256(made.encode()).hexdigest()}\n{made}".encode())
    return made + _START


def _rows(one: Series, view: str, dots: list[Dot], axes: Axes) -> list[dict[str, Any]]:
    last = max((dot.ratio for dot in dots), default=None)
    found = []
    for dot in dots:
        value, *ends = (axes.scale * number for number in (dot.value, *(dot.interval or ())))
        times = f" ({multiple(dot.ratio)})" if axes.trained else ""
        at = multiple(dot.ratio) if dot.length is None else f"{dot.length:,} tokens{times}"
        seed = "" if dot.seed is None else ", one seed" if dot.learned else ", one seed, not learned"
        said = f"{value:.4g} ({dot.between}: {ends[0]:.4g} to {ends[1]:.4g})" if ends else f"{value:.4g}"
        stops = dot.ratio == last and one.undefined_at
        found.append({
            "view": view, "curve": one.label, "on": one.is_on, "ratio": dot.ratio, "value": value,
            "low": ends[0] if ends else None, "high": ends[1] if ends else None,
            "seed": dot.seed, "learned": dot.learned, "line": dot.is_joined,
            "of": one.label + seed, "at": at, "is": said, "said": f"{one.label} at {at}: {value:.4g}",
            "ends": f"undefined from {one.undefined_at:g}x" if stops else None,
        })  # fmt: skip
    return found


def _limits(series: Sequence[Series], axes: Axes) -> dict[str, Any]:
    """The value axis: of all curves but those that would flatten the others, which leave the picture."""
    kept = [one for one in series if not one.is_outside] or series
    found = {"domainMin": "0", "domainMax": "1"}
    for view in axes.views:
        ends = [v for one in kept if one.is_on for dot in one.dots.get(view, ()) for v in dot.interval or (dot.value,)]
        low, high = (axes.scale * end for end in (min(ends, default=0.0), max(ends, default=1.0)))
        room = max(0.05 * (high - low), 0.02 * axes.scale)
        for name, end in (("domainMin", low - room), ("domainMax", high + room)):
            found[name] = f"view == '{view}' ? {end!r} : {found[name]}"
    return {name: {"expr": text} for name, text in found.items()}


def _tick_labels(ticks: dict[float, int | None], axes: Axes) -> str:
    """An expression for a tick's label: the length, and below it the multiple."""

    def label(ratio: float, length: int | None) -> str:
        if axes.trained:
            return f"['{'' if length is None else length}', '{ratio:g}x']"
        return f"format({length}, '.2~s')"

    return "".join(f"datum.value == {place!r} ? {label(place, at)} : " for place, at in sorted(ticks.items())) + "''"


def _by_curve(series: Sequence[Series], looks: Sequence[Any]) -> dict[str, Any]:
    """An encoding that gives each curve its look. Only what is shown has a place in the legend."""
    return {
        "field": "curve", "type": "nominal", "title": None,
        "scale": {"domain": [one.label for one in series], "range": looks},
        "legend": {"values": {"expr": "more ? every_curve : curves_on"}},
    }  # fmt: skip


def _colours(series: Sequence[Series]) -> dict[str, Any]:
    inks = [f"var(--ink-{styles.COLOURS.index(one.style.colour)})" for one in series]  # page.css: for light and dark
    return _by_curve(series, inks)


def _inputs(series: Sequence[Series], axes: Axes) -> list[dict[str, Any]]:
    views = list(axes.views)
    radio = {"input": "radio", "options": views, "labels": list(axes.views.values()), "name": "show "}
    box = {"input": "checkbox", "name": "windowed and extended curves of all "}
    more = {"name": "more", "value": False, **({} if all(one.is_on for one in series) else {"bind": box})}
    every, on = [one.label for one in series], [one.label for one in series if one.is_on]
    labels = [{"name": "every_curve", "value": every}, {"name": "curves_on", "value": on}]
    return [{"name": "view", "value": views[0], "bind": radio}, more, *labels]


_TEXT = {"labelColor": "var(--text)", "titleColor": "var(--text)", "labelFontSize": 12, "titleFontSize": 13}
_CONFIG = {
    "font": 'system-ui, "DejaVu Sans", sans-serif',
    "view": {"stroke": None},
    "text": {"fontSize": 12},
    "axis": {**_TEXT, "titleFontWeight": "normal", "gridColor": "var(--grid)", "domainColor": "var(--soft)",
             "tickColor": "var(--soft)"},
    "legend": {**_TEXT, "orient": "bottom", "columns": {"expr": "max(2, floor(width / 200))"}, "symbolLimit": 0,
               "labelLimit": {"expr": "width < 400 ? width / 2 - 36 : 165"},
               "symbolSize": 90, "symbolStrokeWidth": 2, "symbolOpacity": 1},
}  # fmt: skip
