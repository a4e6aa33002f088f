"""A page on which the schemes of a comparison are looked at: a map of any two measures,
curves that are laid over each other, and a table that can be sorted and filtered. What
is chosen in one is chosen in all.

Bokeh draws it. Its code is in the page, which needs no network.
"""

import inspect
import re
from typing import Any

import numpy as np
import pandas as pd
from bokeh.embed import components
from bokeh.models import (
    CDSView,
    ColumnDataSource,
    CustomJS,
    DataTable,
    HoverTool,
    IndexFilter,
    NumberFormatter,
    Select,
    TableColumn,
    TextInput,
    Whisker,
)
from bokeh.plotting import figure
from bokeh.resources import Resources

from posbench import encodings
from posbench.listing import encoding_text
from posbench.reports.charts import scheme_colour
from posbench.reports.render import page_html
from posbench.results.comparison import Comparison
from posbench.run.rows import PLAIN

N_CHOSEN = 4  # schemes with the lowest loss, which are chosen at first
HEIGHT = 420  # pixels
# What can be shown: the columns of a comparison, their short and their long titles, and
# how their numbers are printed.
MEASURES = {
    "nll": ("loss", "loss at the training length, nats per token", "0.000"),
    "rise_2x": ("at 2x", "what 2x the context adds, nats per token", "+0.000"),
    "rise_4x": ("at 4x", "what 4x the context adds, nats per token", "+0.000"),
    "rise_8x": ("at 8x", "what 8x the context adds, nats per token", "+0.000"),
    "rise_16x": ("at 16x", "what 16x the context adds, nats per token", "+0.000"),
    "encoding_parameters": ("parameters", "parameters of the encoding", "0,0"),
    "tokens_per_second": ("tokens/s", "tokens per second in training", "0,0"),
}
_MODEL = re.compile(r'"id":"(p\d+)"')  # Bokeh's ids in a script
_PLACE = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ENDS = ("", "_low", "_high")  # of an interval's columns

# What the page does when something is chosen: in JavaScript, on Bokeh's own models.
_CHOOSE_AXIS = """
for (const end of ["", "_low", "_high"]) {
  const name = menu.value + end;
  source.data[axis + end] = source.data[name] ?? source.data[menu.value];
}
title.axis_label = menu.options.find(option => option[0] == menu.value)[1];
source.change.emit();
"""
_LAY_OVER = """
const chosen = new Set(source.selected.indices.map(i => source.data.label[i]));
const parts = Object.fromEntries(Object.keys(curves.data).map(name => [name, []]));
curves.data.label.forEach((label, i) => {
  if (chosen.has(label))
    for (const name in parts) parts[name].push(curves.data[name][i]);
});
lines.data = parts;
"""
_FILTER = """
const wanted = box.value_input.toLowerCase();
const found = [];
source.data.words.forEach((words, i) => { if (words.includes(wanted)) found.push(i); });
const chosen = source.selected.indices;
view.filter = new view.filter.constructor({indices: found});
// the table drops what it does not show
setTimeout(() => { source.selected.indices = chosen; }, 0);
"""


def explore_html(title: str, comparison: Comparison, points: pd.DataFrame) -> str:
    """Return the page on the schemes of a comparison; `points`: what `compare.curves`
    returns for its runs.
    """
    schemes = _schemes(comparison)
    names = ["label", "family", "title", "colour", "words"]
    for measure in MEASURES:
        names += [measure + end for end in ENDS if measure + end in schemes]
    source = ColumnDataSource({name: schemes[name].tolist() for name in names})
    is_reference = schemes["label"] == comparison.reference
    is_chosen = is_reference | (schemes.index < N_CHOSEN)
    source.selected.indices = schemes.index[is_chosen].tolist()
    view = CDSView(filter=IndexFilter([*range(len(schemes))]))

    parts = _map(source, view) | _table(source, view)
    parts["curves"] = _curves(source, schemes, points)
    script, places = components(parts)
    # Bokeh numbers its models and names their places anew each time. Here they are
    # numbered from 0, so that equal runs give an equal page.
    found = dict.fromkeys([*_MODEL.findall(script), *_PLACE.findall(script)])
    numbers = {name: f"part-{i}" for i, name in enumerate(found)}
    of_bokeh = re.compile(rf"\b({'|'.join(numbers)})\b")

    def numbered(text: str) -> str:
        return of_bokeh.sub(lambda match: numbers[match[0]], text)

    library = Resources("inline", components=["bokeh", "bokeh-widgets", "bokeh-tables"])
    return page_html(
        "explore.html.jinja",
        title=title,
        library=library.render_js(),
        script=numbered(script),
        places={name: numbered(place) for name, place in places.items()},
    )


def _schemes(comparison: Comparison) -> pd.DataFrame:
    """Return the measures of each scheme that has a loss, with its family and what its
    class says of itself.
    """
    frame = comparison.frame
    frame = frame[frame["nll_status"] == "ok"].reset_index(drop=True)
    families, titles = [], []
    for name in frame["encoding"]:
        text = ""
        if name in encodings.MODULE_OF:  # read from its file, without torch
            text = encoding_text(name)
        elif name in encodings.REGISTERED:
            text = encodings.documentation(encodings.load(name))
        paragraph, _, _ = inspect.cleandoc(text).partition("\n\n")
        families.append(encodings.MODULE_OF.get(name, "own"))
        titles.append(" ".join(paragraph.split()))
    frame = frame.assign(family=families, title=titles)
    frame["colour"] = frame["label"].map(scheme_colour)
    words = frame["label"] + " " + frame["family"] + " " + frame["title"]
    return frame.assign(words=words.str.lower())


def _plot(tools: str, **options: Any) -> Any:
    plot = figure(height=HEIGHT, sizing_mode="stretch_width", tools=tools, **options)
    plot.outline_line_color = None
    plot.grid.grid_line_alpha = 0.4
    plot.toolbar.logo = None
    return plot


def _map(source: ColumnDataSource, view: CDSView) -> dict[str, Any]:
    """Return a map with a dot for each scheme, and the menus of its two measures."""
    measures = [name for name in MEASURES if name in source.data]
    rises = [name for name in measures if name.startswith("rise")]
    of_axes = {"x": "nll", "y": rises[len(rises) // 2] if rises else measures[-1]}
    for axis, name in of_axes.items():
        for end in ENDS:
            source.data[axis + end] = source.data.get(name + end, source.data[name])

    plot = _plot("pan,wheel_zoom,box_select,tap,reset")
    dots = plot.scatter(
        "x",
        "y",
        source=source,
        view=view,
        size=11,
        color="colour",
        line_color="white",
        nonselection_fill_alpha=0.35,
    )
    whiskers = Whisker(
        base="x", lower="y_low", upper="y_high", source=source, line_color="colour"
    )
    whiskers.update(line_alpha=0.4, upper_head=None, lower_head=None)
    plot.add_layout(whiskers)
    tooltips = [("", "@label (@family)"), ("", "@title")]
    for name in measures:
        short, _, form = MEASURES[name]
        text = f"@{name}{{{form}}}"
        if f"{name}_low" in source.data:
            text += f" [@{name}_low{{{form}}}, @{name}_high{{{form}}}]"
        tooltips.append((short, text))
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tooltips))

    parts = {"map": plot}
    options = [(name, MEASURES[name][1]) for name in measures]
    for axis, title in (("x", "across"), ("y", "up")):
        drawn = plot.xaxis[0] if axis == "x" else plot.yaxis[0]
        drawn.axis_label = MEASURES[of_axes[axis]][1]
        menu = Select(title=title, value=of_axes[axis], options=options)
        menu.sizing_mode = "stretch_width"
        names = {"source": source, "menu": menu, "title": drawn, "axis": axis}
        menu.js_on_change("value", CustomJS(args=names, code=_CHOOSE_AXIS))
        parts[title] = menu
    return parts


def _curves(
    source: ColumnDataSource, schemes: pd.DataFrame, points: pd.DataFrame
) -> Any:
    """Return the losses by context of the chosen schemes, laid over each other."""
    points = points[points["variant"] == PLAIN].sort_values("length")
    curves = schemes[["label", "colour"]].to_dict("list")
    for name, column in (("lengths", "length"), ("losses", "nll")):
        by_label = points.groupby("label")[column].agg(list)
        curves[name] = [by_label[label] for label in curves["label"]]
    chosen = source.selected.indices
    lines = {}
    for name, values in curves.items():
        lines[name] = [values[i] for i in chosen]

    plot = _plot("pan,wheel_zoom,reset", x_axis_type="log")
    plot.xaxis.axis_label = "context, tokens"
    doublings = points.loc[np.log2(points["ratio"]) % 1 == 0, "length"]
    plot.xaxis.ticker = sorted(doublings.unique().tolist())
    plot.yaxis.axis_label = "loss, nats per token"
    drawn = plot.multi_line(
        "lengths",
        "losses",
        source=ColumnDataSource(lines),
        color="colour",
        line_width=2.5,
        legend_field="label",
    )
    plot.legend.update(location="top_left", border_line_color=None)
    plot.add_tools(HoverTool(renderers=[drawn], tooltips="@label"))
    names = {"source": source, "lines": drawn.data_source}
    names["curves"] = ColumnDataSource(curves)
    callback = CustomJS(args=names, code=_LAY_OVER)
    source.selected.js_on_change("indices", callback)
    return plot


def _table(source: ColumnDataSource, view: CDSView) -> dict[str, Any]:
    """Return a table of all measures, and the box that filters its rows."""
    columns = [
        TableColumn(field="label", title="encoding", width=180),
        TableColumn(field="family", title="family", width=100),
    ]
    for name, (short, _, form) in MEASURES.items():
        if name in source.data:
            numbers = NumberFormatter(format=form, nan_format="", text_align="right")
            column = TableColumn(field=name, title=short, formatter=numbers, width=90)
            columns.append(column)
    table = DataTable(source=source, view=view, columns=columns, height=HEIGHT)
    table.update(index_position=None, sizing_mode="stretch_width", autosize_mode="none")
    table.update(selectable="checkbox", scroll_to_selection=False, reorderable=False)
    box = TextInput(placeholder="filter by name, family or words", width=280)
    names = {"source": source, "view": view, "box": box}
    box.js_on_change("value_input", CustomJS(args=names, code=_FILTER))
    return {"table": table, "filter": box}
