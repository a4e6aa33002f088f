"""Make the pages of encodings: docstring, measurements, facts and picture of each."""

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import configuration_pages
import measured

from posbench import encodings, listing
from posbench.config.shipped import choices
from posbench.encodings.extend import methods, methods_of
from posbench.encodings.wrapper import Wrapper
from posbench.show import command


def pages(draw_into: Path | None = None) -> dict[str, str]:
    """Return the texts of the pages by name, as `encodings/rope.md`; `draw_into`: the
    folder of pages, for pictures.
    """
    names = list(choices("encoding"))
    pages = {}
    for name in names:
        pages[f"encodings/{page_of(name)}"] = _page(name, draw_into is not None)
    pages["encodings/index.md"] = _overview(names)
    if draw_into is not None:
        (draw_into / "encodings").mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):  # `show` prints the file's name
            for name in names:
                command.main([name], draw_into / "encodings" / f"{name}.png")
    return pages


def page_of(name: str) -> str:
    """Return the file of an encoding's page; for `index` not index.md, which is the
    page of the whole folder.
    """
    return "index-encoding.md" if name == "index" else f"{name}.md"


def by_place() -> list[dict[str, list[dict[str, str]]]]:
    """Return the encodings' pages for the navigation, grouped by the place where they
    act.
    """
    by_family: dict[str, list[dict[str, str]]] = {}
    for name in choices("encoding"):
        cls = encodings.load(name)
        place, _, _ = encodings.acts(cls.overridden).partition(", ")
        if issubclass(cls, Wrapper):
            place = encodings.OTHERS
        by_family.setdefault(place, []).append({name: f"encodings/{page_of(name)}"})
    families = [place for place in encodings.FAMILIES if place in by_family]
    return [{place.capitalize(): by_family[place]} for place in families]


def _page(name: str, pictured: bool) -> str:
    facts = listing.encoding_row(name) | listing.encoding_facts(name)
    parts = [
        f"# {name}\n",
        f"{configuration_pages.head(choices('encoding')[name])}\n",
        f"```console\nposbench train encoding={name}\n```\n",
        f"## Definition\n\n{facts['title']}.\n",
        _body(facts["document"]),
        f"Source: {facts['source']}\n",
        measured.section(name),
        _options(name),
        _facts(name, facts),
    ]
    if pictured:
        parts.append(
            "## Picture\n\nThe [gallery](../gallery.md) explains how to read"
            f" it.\n\n![{name}]({name}.png)\n"
        )
    return "\n".join(part for part in parts if part)


def _body(body: str) -> str:
    """Return a description with escaped HTML tags, and with its indented formulas as
    code blocks.
    """
    text = re.sub(r"^(?! {4}).*<.*", _escaped, body, flags=re.M)
    return re.sub(r"(?:^ {4}.*\n|^\n(?= {4}))+", _formula, f"{text}\n", flags=re.M)


def _escaped(match: re.Match[str]) -> str:
    return match[0].replace("<", "&lt;")


def _formula(match: re.Match[str]) -> str:  # the block wraps and has no copy button
    return f"\n``` {{ .text .formula .no-copy }}\n{inspect.cleandoc(match[0])}\n```\n"


def _options(name: str) -> str:
    defaults = encodings.options_of(name)
    if not defaults:
        return "## Options\n\nNone.\n"
    texts = listing.comments_by_key(choices("encoding")[name])
    signature = inspect.signature(encodings.load(name), eval_str=True)
    rows = []
    for key, value in defaults.items():
        if value is not inspect.Parameter.empty:
            kind = configuration_pages.kind(signature.parameters[key].annotation)
            default = configuration_pages.plain(value)
            rows.append((f"encoding.{key}", kind, default, texts.get(key, "")))
    return "## Options\n\n" + configuration_pages.table(rows, "option")


def _facts(name: str, facts: dict[str, Any]) -> str:
    built = listing.at_demo_size(name)
    acts = facts["acts"]
    if issubclass(encodings.load(name), Wrapper):
        acts = "where the inner encodings act"
    end = "any length"
    if facts["max_length"]:
        end = f"{facts['max_length']:,} tokens"
    changes = "yes" if facts["length_dependent"] else "no"
    able = "no method"
    names = ", ".join(f"`{method}`" for method in methods_of(built))
    if names:
        able = f"{names} ([what they do](index.md#context-extension))"
    lines = [
        f"- Acts on: {acts}",
        f"- Learned parameters in the demo's model: {facts['parameters']:,}",
        f"- Beyond the training length: {facts['beyond']}",
        f"- Defined up to: {end}, when trained at {listing.DEMO['train_length']}",
        f"- A longer input changes its beginning: {changes}",
        f"- Extended without training by: {able}",
        f"- Checked against: {facts['checked_against']}",
        (
            f"- Attention kernels: {facts['kernels']}; key-value cache:"
            f" {facts['cache']}; exports to: {facts['architectures']} ([what that"
            " means](../python.md#a-key-value-cache))"
        ),
        f"- In transformers: {facts['models'] or 'no model'}",
    ]
    return "## Facts\n\n" + "\n".join(lines) + "\n"


def _overview(names: list[str]) -> str:
    files = choices("encoding")
    rows = [
        f"| [`{name}`]({page_of(name)}) | {configuration_pages.head(files[name])} |"
        for name in names
    ]
    parts = [
        "# Encodings\n",
        _by_acts(names),
        "| encoding | what it is |\n|---|---|",
        *rows,
    ]
    parts += [
        "\n## Context extension\n",
        _EXTENSION,
        "| method | what it does | options | source |\n|---|---|---|---|",
    ]
    for method in methods().values():
        options = ", ".join(f"`{key}`" for key in method.options)
        parts.append(
            f"| `{method.name}` | {method.title} | {options or 'none'} |"
            f" {method.source} |"
        )
    return "\n".join(parts) + "\n"


def _by_acts(names: list[str]) -> str:
    """Return a table of encodings by where they act, in the order of the forward
    pass.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        if issubclass(encodings.load(name), Wrapper):
            acts = encodings.OTHERS
        else:
            acts = listing.encoding_facts(name)["acts"]
        groups.setdefault(acts, []).append(f"`{name}`")

    def place(group: str) -> list[int]:
        return [encodings.FAMILIES.index(part) for part in group.split(", ")]

    rows = [
        f"| {group} | {' '.join(groups[group])} |"
        for group in sorted(groups, key=place)
    ]
    return "\n".join(["| acts on | encodings |", "|---|---|", *rows]) + "\n"


_EXTENSION = (
    "`posbench evaluate RUN extension=yarn` applies one, `extension=yarn:factor=4` with"
    " an option.\n"
)
