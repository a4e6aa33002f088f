"""`posbench list` and `posbench show NAME --text`: all choices, and the facts on each encoding and task.

The facts are read from the encodings, the tasks and the YAML files.
"""

import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from posbench import encodings, tasks
from posbench.config.shipped import choices
from posbench.encodings import families
from posbench.errors import UserError
from posbench.evaluation import probes

# Parameters are counted at the size of experiment=demo, as the head of their column says.
DEMO: dict[str, Any] = {"d_model": 128, "n_heads": 4, "n_layers": 4, "train_length": 64}
_LENGTH_DEPENDENT = "A longer input changes its beginning."
_COLUMNS = ("name", "acts", "paper", "title")  # what is printed; JSON has all
_LABELS = r"^(Source|Beyond training length|Checked against):"
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def show(sections: list[str], as_json: bool) -> None:
    """Print the listing: JSON, or aligned lines with what matters most.

    Args:
        sections: those to print, such as `encodings` or `task`; all if empty.
    """
    rows = listing(sections)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for group, entries in rows.items():
        print(f"{group}:")
        cells = [[str(row[key] or "-") for key in _COLUMNS if key in row] for row in entries]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def listing(sections: list[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of each section, of all if none is named. Raises UserError if there is no such section."""
    there: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "encodings": lambda: [describe(name) for name in encodings.names()],
        "patterns of layers": lambda: [
            {**row, "name": f"layered/{row['name']}"} for row in _first_comments("encoding/layered")
        ],
        "extensions": _extensions,
        "probes": lambda: [_probe(name) for name in probes.names()],
        "tasks": lambda: [_task(name) for name in tasks.names()],
        "data": lambda: _first_comments("data"),
        "experiments": lambda: _first_comments("experiment"),
        "models": lambda: _first_comments("model"),
        "sweeps": lambda: _first_comments("sweep"),
        "claims": lambda: _first_comments("claim"),
    }
    by_word = {name.partition(" ")[0].rstrip("s"): name for name in there}
    asked = [by_word.get(section.lower().rstrip("s")) for section in sections]
    for section, found in zip(sections, asked, strict=True):
        if found is None:
            words = ", ".join(name.partition(" ")[0] for name in there)
            of_one = f": 'posbench show {section} --text' describes one encoding"
            near = of_one if section in encodings.names() else f" (there are {words})"
            raise UserError(f"list has no section '{section}'{near}")
    return {name: rows() for name, rows in there.items() if name in (asked or there)}


def page(name: str, width: int) -> str:
    """The facts on one encoding or task, as text in lines of `width` characters.

    Raises:
        UserError: there is no encoding of that name; a task is task/NAME.
    """
    if name.removeprefix("task/") in tasks.names():
        return _filled(_task(name.removeprefix("task/"))["document"], width)
    patterns = choices("encoding/layered")
    pattern = name.removeprefix("layered/") if name.startswith("layered/") else ""
    path = patterns.get(pattern) or choices("encoding").get(name)  # None for an installed encoding
    facts = describe("layered" if pattern in patterns else name)
    size = "{n_layers} layers, width {d_model}, {n_heads} heads, training length {train_length}".format(**DEMO)
    end = f"{facts['max_length']:,} tokens, when trained at {DEMO['train_length']}" if facts["max_length"] else ""
    known = {
        "Acts on": facts["acts"] or "-",
        "Beyond the training length": _beyond(facts),
        "Defined up to": end or "any length",
        "Extended without training by": ", ".join(facts["extensions"]) or "no method",
        "Attention kernels": facts["kernels"],
        "Key-value cache": facts["cache"],
        "Exports to": facts["architectures"],
        "Learned parameters": f"{_counted(facts['parameters'])} in the demo's model ({size})",
        "Paper": facts["source"],
        "Link": ", ".join(f"https://arxiv.org/abs/{number}" for number in _ARXIV.findall(facts["source"] or "")),
        "Checked against": facts["checked_against"],
    }
    lines = [textwrap.fill(f"{name}: {facts['title']}", width), "", _filled(facts["document"], width), ""]
    lines += [textwrap.fill(f"{head}: {text}", width, subsequent_indent="  ") for head, text in known.items() if text]
    lines += ["", "Options:" if facts["options"] else "Options: none"]
    for line in path.read_text(encoding="utf-8").splitlines() if path else []:
        if not line.startswith(("#", "name:")):
            typed = re.sub(r"^(\w+): (?!#)", r"encoding.\1=", line)
            lines.append(textwrap.fill(typed, width, initial_indent="  ", subsequent_indent="      "))
    lines += ["", f"posbench train encoding={name}   trains a model with it"]
    lines += [f"posbench show {name}   draws it"]
    return "\n".join(lines)


def _filled(text: str, width: int) -> str:
    """Rewrap paragraphs to that width; indented ones, such as formulas, keep their lines if these fit."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith(" "):
            lines = paragraph.splitlines()
            found.append("\n".join(textwrap.fill(line, width, subsequent_indent="        ") for line in lines))
        else:
            labels = re.split(r"\n(?=[A-Z][\w ]*:)", paragraph)
            found.append("\n".join(textwrap.fill(" ".join(part.split()), width) for part in labels))
    return "\n\n".join(found)


def describe(name: str) -> dict[str, Any]:
    """The facts on one encoding. Some need it built, at the demo's size; these are None if it cannot be built."""
    cls = encodings.load(name)
    document = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")
    row: dict[str, Any] = {"name": name, "title": document.partition("\n")[0].rstrip("."), "acts": None}
    row |= dict.fromkeys(("parameters", "max_length", "length_dependent", "kernels", "cache", "architectures"))
    from posbench.encodings.base import Shape
    from posbench.encodings.extend.methods import methods_of
    from posbench.huggingface.export import architectures

    try:
        encoding = encodings.build(name, Shape(**DEMO))
    except UserError as error:  # it needs an option without a default
        row["note"], row["extensions"] = str(error), []
    else:
        row["extensions"] = methods_of(encoding)
        row["acts"] = families.acts(encoding.hooks)
        row["parameters"] = sum(parameter.numel() for parameter in encoding.parameters())
        row["max_length"] = encoding.max_length
        row["length_dependent"] = encoding.length_dependent
        row["kernels"], row["cache"] = families.kernels(encoding), families.cache(encoding)
        row["architectures"] = ", ".join(architectures(encoding)) or "posbench's class"
    row["document"] = re.split(_LABELS, document.partition("\n")[2], flags=re.M)[0].strip("\n")
    row["options"] = {
        key: None if value is inspect.Parameter.empty else value for key, value in encodings.options_of(name).items()
    }
    for key, label in (
        ("beyond", "Beyond training length"),
        ("source", "Source"),
        ("checked_against", "Checked against"),
    ):
        row[key] = _section(document, label)
    row["paper"] = next((f"arXiv:{number}" for number in _ARXIV.findall(row["source"] or "")), None)
    return row


def _section(document: str, label: str) -> str | None:
    """A docstring's `Label: text`, up to the next label or an empty line, on one line."""
    found = re.search(rf"^{label}:(.*?)(?=^[A-Z][\w ]*:|^\s*$|\Z)", document, re.DOTALL | re.MULTILINE)
    return " ".join(found[1].split()) or None if found else None


def _extensions() -> list[dict[str, Any]]:
    from posbench.encodings.extend.methods import METHODS

    return [{"name": m.name, "title": m.title, "source": m.source, "options": m.options} for m in METHODS.values()]


def _probe(name: str) -> dict[str, Any]:
    document = importlib.import_module(f"posbench.evaluation.probes.{name}").__doc__ or ""
    return {
        "name": name,
        "title": document.partition("\n")[0].rstrip("."),
        "options": probes.options_of(name),
        "document": inspect.cleandoc(document),
    }


def _task(name: str) -> dict[str, Any]:
    """The facts on a synthetic task, which is chosen as data."""
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


def _counted(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
