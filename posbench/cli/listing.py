"""`posbench list`: what can be chosen, and what is known of each encoding. Read from the encodings themselves."""

import importlib
import inspect
import json
import re
import sys
from typing import Any

from posbench import encodings, tasks
from posbench.config.shipped import choices
from posbench.errors import UserError
from posbench.evaluation import probes
from posbench.portrait import places

# Parameters are counted at the size of experiment=demo, as the head of their column says.
DEMO: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 4, "train_length": 64}
_LENGTH_DEPENDENT = "A longer input changes its beginning."
# Columns and their heads. The longest texts stand last, where lines may end anywhere.
_COLUMNS = {
    "name": "name",
    "acts": "acts on",
    "parameters": "params (demo)",
    "title": "what it is",
    "beyond": "beyond the training length",
}
_SPARE = ("beyond", "acts", "parameters")  # of a narrow terminal, the least important first
_TITLE, _BEYOND = 45, 30  # characters, at least


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
    """Encodings, patterns of `layered`, extensions, probes, tasks, data and experiments, each a list of rows."""
    from posbench.extend.methods import METHODS

    return {
        "encodings": [describe(name) for name in encodings.names()],
        "patterns of layers": [
            {**row, "name": f"layered/{row['name']}"} for row in _first_comments("encoding/layered")
        ],
        "extensions": [{"name": m.name, "title": m.title, "source": m.source} for m in METHODS.values()],
        "probes": [_probe(name) for name in probes.names()],
        "tasks": [_task(name) for name in tasks.names()],
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


def _probe(name: str) -> dict[str, Any]:
    document = importlib.import_module(f"posbench.evaluation.probes.{name}").__doc__ or ""
    return {
        "name": name,
        "title": document.partition("\n")[0].rstrip("."),
        "options": probes.options_of(name),
        "document": inspect.cleandoc(document),
    }


def _task(name: str) -> dict[str, Any]:
    """What is known of a synthetic task, which is chosen as data."""
    document = inspect.cleandoc(sys.modules[tasks.load(name).__module__].__doc__ or "")
    return {
        "name": f"task/{name}",
        "title": document.partition("\n")[0].rstrip("."),
        "source": _section(document, "Source"),
        "deviates": _section(document, "Deviates"),
        "options": tasks.options_of(name),
        "document": document,
    }


def _first_comments(group: str) -> list[dict[str, Any]]:
    """Name and first comment of each file of a configuration group."""
    rows = []
    for name, path in choices(group).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
        rows.append({"name": name, "title": comments[0] if comments else ""})
    return rows


def _beyond(row: dict[str, Any]) -> str | None:
    return f"{row['beyond'] or ''} {_LENGTH_DEPENDENT}".strip() if row.get("length_dependent") else row["beyond"]


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The cells of each column that these rows have, all that is known."""
    known = [{**row, "beyond": _beyond(row)} if "beyond" in row else row for row in rows]
    return {key: [_shown(row[key]) for row in known] for key in _COLUMNS if known and key in known[0]}


def _print_lines(rows: list[dict[str, Any]]) -> None:
    columns = {key: [_COLUMNS[key], *cells] for key, cells in _columns(rows).items()}
    for cells in zip(*columns.values(), strict=True):
        line = []
        for (key, column), cell in zip(columns.items(), cells, strict=True):
            width = max(map(len, column))
            line.append(cell.rjust(width) if key == "parameters" else cell.ljust(width))
        print("  " + "  ".join(line).rstrip())


def _print_tables(rows: dict[str, list[dict[str, Any]]]) -> None:
    from posbench.terminal import console, tables

    out = console.stdout()
    for group, entries in rows.items():
        columns = _columns(entries)
        if "beyond" in columns:  # what follows the first clause needs lines of its own: it is in the JSON
            columns["beyond"] = [re.split(r"[;,.]", cell)[0] for cell in columns["beyond"]]
        least = {key: max(map(len, [*_COLUMNS[key].split(), *cells])) for key, cells in columns.items()}
        least |= {key: min(least[key], most) for key, most in (("title", _TITLE), ("beyond", _BEYOND)) if key in least}
        keys = list(columns)
        spare = [keys.index(key) for key in _SPARE if key in keys]
        shown = [keys[column] for column in tables.fitting(list(least.values()), spare, out.width)]
        table = tables.table(out, title=group)
        for key in shown:
            width = None if key in ("title", "beyond") else least[key]
            table.add_column(_COLUMNS[key], justify="right" if key == "parameters" else "left", width=width)
        for cells in zip(*(columns[key] for key in shown), strict=True):
            table.add_row(*cells)
        if len(shown) < len(keys):
            left = ", ".join(_COLUMNS[key] for key in keys if key not in shown)
            table.caption = f"No room here for: {left}. 'posbench list --json' and 'posbench list | less -S' have all."
        out.print(table)
