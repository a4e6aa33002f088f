"""`posbench list`: what can be chosen, and what is known of each encoding. Read from the encodings themselves."""

import importlib
import inspect
import json
import re
import sys
from typing import Any

from posbench import encodings
from posbench.config.shipped import choices
from posbench.errors import UserError
from posbench.evaluation import probes
from posbench.portrait import places

# Parameters are counted at the size of experiment=demo.
DEMO: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 4, "train_length": 64}
_LENGTH_DEPENDENT = "A longer input changes its beginning."
_COLUMNS = ("name", "acts", "parameters", "title", "beyond")


def show(as_json: bool) -> None:
    """Print the listing: JSON, a table on a terminal, plain aligned lines otherwise."""
    rows = listing()
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_tables(rows)
    else:
        for group, entries in rows.items():
            print(f"{group}:")
            _print_lines(entries)


def listing() -> dict[str, list[dict[str, Any]]]:
    """Encodings, extensions, tasks, data sets and experiments, each a list of rows."""
    from posbench.extend.methods import METHODS

    return {
        "encodings": [describe(name) for name in encodings.names()],
        "extensions": [{"name": m.name, "title": m.title, "source": m.source} for m in METHODS.values()],
        "tasks": [_task(name) for name in probes.names()],
        "data": _first_comments("data"),
        "experiments": _first_comments("experiment"),
    }


def describe(name: str) -> dict[str, Any]:
    """What is known of one encoding. What it is once built is said of the demo's size, and None if it cannot be."""
    cls = encodings.load(name)
    document = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")
    row: dict[str, Any] = {"name": name, "title": document.partition("\n")[0].rstrip("."), "acts": None}
    row |= {"parameters": None, "max_length": None, "length_dependent": None}
    try:
        from posbench.encodings.base import Shape

        encoding = encodings.build(name, Shape(**DEMO))
    except UserError as error:  # it needs an option without a default
        row["note"] = str(error)
    else:
        row["acts"] = places.acts(encoding.hooks)
        row["parameters"] = sum(parameter.numel() for parameter in encoding.parameters())
        row["max_length"] = encoding.max_length
        row["length_dependent"] = encoding.length_dependent
    for key, label in (
        ("beyond", "Beyond training length"),
        ("source", "Source"),
        ("checked_against", "Checked against"),
    ):
        row[key] = _section(document, label)
    return row


def _section(document: str, label: str) -> str | None:
    """A docstring's `Label: text`, up to the next label or an empty line, on one line."""
    found = re.search(rf"^{label}:(.*?)(?=^[A-Z][\w ]*:|^\s*$|\Z)", document, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) or None if found else None


def _task(name: str) -> dict[str, Any]:
    document = importlib.import_module(f"posbench.evaluation.probes.{name}").__doc__ or ""
    return {"name": name, "title": document.partition("\n")[0].rstrip("."), "document": inspect.cleandoc(document)}


def _first_comments(group: str) -> list[dict[str, Any]]:
    """Name and first comment of each file of a configuration group."""
    rows = []
    for name, path in choices(group).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
        rows.append({"name": name, "title": comments[0] if comments else ""})
    return rows


def _cells(row: dict[str, Any], columns: tuple[str, ...] = _COLUMNS) -> list[str]:
    if row.get("length_dependent"):
        row = {**row, "beyond": f"{row['beyond'] or ''} {_LENGTH_DEPENDENT}".strip()}
    shown = [row[column] for column in columns if column in row]
    return ["-" if value is None else f"{value:,}" if isinstance(value, int) else str(value) for value in shown]


def _print_lines(rows: list[dict[str, Any]]) -> None:
    table = [_cells(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for cells in table:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _print_tables(rows: dict[str, list[dict[str, Any]]]) -> None:
    from posbench.terminal import console, tables

    out = console.stdout()
    columns = _COLUMNS if out.width >= 120 else _COLUMNS[:-1]  # the longest texts need a wide terminal
    for group, entries in rows.items():
        if not entries:
            continue
        table = tables.table(out, title=group)
        for column in (column for column in columns if column in entries[0]):
            table.add_column(column, justify="right" if column == "parameters" else "left", no_wrap=column == "name")
        for row in entries:
            table.add_row(*_cells(row, columns))
        out.print(table)
