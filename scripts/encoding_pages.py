"""The pages of encodings: docstring, facts and picture of each."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import configuration_pages
import readme

from posbench import encodings
from posbench.cli import listing
from posbench.config.shipped import choices
from posbench.encodings._wrapper import Wrapper
from posbench.encodings.base import Shape
from posbench.encodings.extend.methods import METHODS, methods_of
from posbench.evaluation import probes
from posbench.show import command, places, properties

ROOT = Path(__file__).parents[1]
SPEED = ROOT / "docs" / "performance.md"


def pages(draw_into: Path | None = None) -> dict[str, str]:
    """The texts of the pages by name, `encodings/rope.md`.

    Args:
        draw_into: the folder of all pages, for pictures; None: no pictures and no measured properties.
    """
    files = choices("encoding")
    speeds, measured = measured_speeds(), {}
    if draw_into is not None:
        (draw_into / "encodings").mkdir(exist_ok=True)
        measured = {one.name: one for one in properties.measure(list(files))}
        for name in files:
            draw(name, draw_into / "encodings")
    found = {f"encodings/{page_of(name)}": _page(name, speeds, measured.get(name)) for name in files}
    return found | {"encodings/index.md": _overview(list(files), measured)}


def page_of(name: str) -> str:
    """The file of an encoding's page. For `index` it is not index.md, which is the page of the whole folder."""
    return "index-encoding.md" if name == "index" else f"{name}.md"


def by_place() -> list[dict[str, list[dict[str, str]]]]:
    """The encodings' pages for the navigation, grouped by the place where they act."""
    found: dict[str, list[dict[str, str]]] = {}
    for name in choices("encoding"):
        found.setdefault(places.family(name), []).append({name: f"encodings/{page_of(name)}"})
    return [{family.capitalize(): found[family]} for family in places.FAMILIES if family in found]


def draw(name: str, folder: Path) -> None:
    """Write NAME.png, the picture of `posbench show`."""
    with contextlib.redirect_stdout(io.StringIO()):  # `show` prints the file's name
        command.main([name], folder / f"{name}.png")


def measured_speeds() -> dict[str, list[tuple[str, list[str], list[str]]]]:
    """For each encoding its rows in docs/performance.md: caption, columns, cells."""
    found: dict[str, list[tuple[str, list[str], list[str]]]] = {}
    section = SPEED.read_text(encoding="utf-8").partition("### Two threads")[2].partition("\n##")[0]
    for caption, columns, rows in re.findall(
        r"^Tokens per second[^;]*; (.*?)\. Peak.*\n(?:[^|].*\n|\n)*(\|.*\n)\| ---.*\n((?:\|.*\n)+)", section, flags=re.M
    ):
        for row in rows.splitlines():
            name, *cells = _cells(row)
            found.setdefault(name, []).append((caption, _cells(columns)[1:], cells))
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _page(name: str, speeds: dict[str, list[tuple[str, list[str], list[str]]]], measured: Any) -> str:
    facts = listing.describe(name)
    parts = [
        f"# {name}\n",
        f"{configuration_pages.head(choices('encoding')[name])}\n",
        f"```console\nposbench train encoding={name}\n```\n",
        f"## {facts['title']}\n",
        _body(name),
        f"Source: {facts['source']}\n",
        _options(name),
        _facts(name, facts),
        _cost(name, facts, speeds),
    ]
    if measured:
        picture = f"The picture of `posbench show {name}`; the [gallery](../gallery.md) explains how to read it.\n"
        parts += ["## Picture\n", picture, f"![{name}]({name}.png)\n", "## Properties, measured\n", _verdicts(measured)]
    return "\n".join(part for part in parts if part)


def _body(name: str) -> str:
    """A docstring without its first line and its labelled ends, with HTML tags escaped."""
    body = listing.describe(name)["document"]
    escaped = re.sub(r"^(?! {4}).*<.*", lambda found: found[0].replace("<", "&lt;"), body, flags=re.M)
    return re.sub(r"(?:^ {4}.*\n|^\n(?= {4}))+", _formula, f"{escaped}\n", flags=re.M)


def _formula(found: re.Match[str]) -> str:
    """An indented block in the style of formulas: it wraps and has no copy button."""
    return f"\n``` {{ .text .formula .no-copy }}\n{inspect.cleandoc(found[0])}\n```\n"


def _options(name: str) -> str:
    said = configuration_pages.comments(choices("encoding")[name])
    hints = inspect.get_annotations(encodings.load(name).__init__, eval_str=True)
    defaults = encodings.options_of(name)
    if not defaults:
        return "## Options\n\nNone.\n"
    rows = [
        (f"encoding.{key}", configuration_pages.kind(hints[key]), configuration_pages.plain(value), said.get(key, ""))
        for key, value in defaults.items()
        if value is not inspect.Parameter.empty
    ]
    return "## Options\n\n" + configuration_pages.table(rows, "option")


def _facts(name: str, facts: dict[str, Any]) -> str:
    built = encodings.build(name, Shape(**listing.DEMO))
    able = [f"`{method}`" for method in methods_of(built)]
    wrapper = issubclass(encodings.load(name), Wrapper)
    acts = "where the inner encodings act" if wrapper else facts["acts"]
    end = f"{facts['max_length']:,} tokens" if facts["max_length"] else "any length"
    lines = [
        f"- Acts on: {acts}",
        f"- Beyond the training length: {facts['beyond']}",
        f"- Defined up to: {end}, when trained at {listing.DEMO['train_length']}",
        f"- A longer input changes its beginning: {'yes' if facts['length_dependent'] else 'no'}",
        f"- Extended without training by: {', '.join(able) or 'no method'}"
        + (" ([what they do](index.md#context-extension))" if able else ""),
        f"- Checked against: {facts['checked_against']}",
        f"- Attention kernels: {facts['kernels']}; key-value cache: {facts['cache']}; exports to: "
        f"{facts['architectures']} ([what that means](../use.md#a-key-value-cache))",
    ]
    return "## Facts\n\n" + "\n".join(lines) + "\n"


def _cost(name: str, facts: dict[str, Any], speeds: dict[str, list[tuple[str, list[str], list[str]]]]) -> str:
    sizes = "4 layers, width 128, 4 heads, training length 64"
    text = f"## Cost\n\nLearned parameters in the demo's model ({sizes}): {facts['parameters']:,}.\n"
    for caption, columns, cells in speeds.get(name, []):
        text += f"\nTokens per second, {caption}:\n\n| {' | '.join(columns)} |\n|{'---:|' * len(columns)}\n"
        text += f"| {' | '.join(cells)} |\n"
    if name in speeds:
        return text + "\n[Speed](../performance.md) has the machine, the method and the other encodings.\n"
    return text + "\nIts speed was not measured.\n"


def _verdicts(measured: Any) -> str:
    lines = [f"| {' | '.join(_PROPERTIES.values())} |", f"|{'---|' * len(_PROPERTIES)}"]
    lines.append(f"| {' | '.join(getattr(measured, key).verdict for key in _PROPERTIES)} |")
    return "\n".join(lines) + "\n\n`posbench properties` says how each is measured.\n"


_PROPERTIES = {
    "order": "order",
    "uniqueness": "unique",
    "relative_code": "relative code",
    "relative_logit": "relative logit",
    "shift_linear": "shift linear",
    "continuous": "continuous",
    "invariance": "invariant",
    "purpose": "changes",
}


def _overview(names: list[str], measured: dict[str, Any]) -> str:
    files = choices("encoding")
    rows = [f"| [`{name}`]({page_of(name)}) | {configuration_pages.head(files[name])} |" for name in names]
    parts = ["# Encodings\n", readme.table(), "| encoding | what it is |\n|---|---|", *rows]
    if measured:
        parts += [_ABOUT_PROPERTIES, f"| encoding | {' | '.join(_PROPERTIES.values())} |"]
        parts.append(f"|---|{'---|' * len(_PROPERTIES)}")
        for name, one in measured.items():
            parts.append(f"| `{name}` | {' | '.join(getattr(one, key).verdict for key in _PROPERTIES)} |")
    parts += ["\n## Context extension\n", _EXTENSION, "| method | what it does | options | source |\n|---|---|---|---|"]
    for method in METHODS.values():
        options = ", ".join(f"`{key}`" for key in method.options)
        parts.append(f"| `{method.name}` | {method.title} | {options or 'none'} | {method.source} |")
    parts += ["\n## Probes\n", "`posbench evaluate RUN task=NAME`; [the protocol](../protocol.md) explains them.\n"]
    for name in probes.names():
        parts.append(f"- `{name}`: {listing._probe(name)['title']}")
    return "\n".join(parts) + "\n"


_ABOUT_PROPERTIES = """
## Properties, measured

Properties from tutorials, measured by `posbench properties`: does order matter, has every position its own code, do
codes and logits depend on distance alone, is the next code a linear function of this one, is there a code between two
positions, does a longer input leave the beginning unchanged, and what does the encoding change.
"""
_EXTENSION = """Methods that make a trained encoding reach beyond its training length, without further training.
`posbench evaluate RUN extension=yarn` applies one, `extension=yarn:factor=4` with an option.
"""
