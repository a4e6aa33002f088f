"""List all choices: `posbench list`, `posbench show NAME --text`, and settings with the
comments of the YAML files.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from posbench import encodings
from posbench.config.shipped import EVERY, choice_file, choices, configs_dir
from posbench.errors import UserError, unknown
from posbench.reports.card import DEMO, decision_card

_COLUMNS = ("name", "acts", "paper", "title")  # what is printed; JSON has all
# The labels of paragraphs at the end of a docstring.
_LABELS = {
    "beyond": "Beyond training length",
    "source": "Source",
    "checked_against": "Checked against",
}
_LABELS |= {"deviates": "Deviates"}
_ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
# the title of a claim above its name
_CLAIM = re.compile(r"^# (.+)\n(\w+):$", re.MULTILINE)
# The file that holds a section's keys and defaults, by section; experiment=demo
# overrides some.
_FILES = {
    "": "train",
    "model.": "model/gpt",
    "data.": "data/_base",
    "training.": "training/lm",
}
_FILES |= {"evaluation.": "evaluation/extrapolation", "tracking.": "tracking/wandb"}


def comments(path: Path) -> dict[str, str]:
    """Return a YAML file's comments by key (`section.key` if nested): the one beside a
    key, else the lines above it.
    """
    texts: dict[str, str] = {}
    above: list[str] = []
    parents: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        if line.lstrip().startswith("#"):
            # the first line is about the file
            above += [line.strip("# ")] if number else []
            continue
        if match := re.match(r"( *)(\w+):", line):
            parents = [*parents[: len(match[1]) // 2], match[2]]
            texts[".".join(parents)] = (
                re.split(r"\s# ", line, maxsplit=1)[-1]
                if " # " in line
                else " ".join(above)
            )
        above = []
    return texts


def explained(container: dict[str, Any]) -> str:
    """Return a configuration as YAML, each key with its comment."""
    of_encoding = choices("encoding").get(container["encoding"]["name"])
    texts = {
        f"encoding.{key}": text
        for key, text in (comments(of_encoding) if of_encoding else {}).items()
    }
    for section, name in _FILES.items():
        texts |= {
            f"{section}{key}": text
            for key, text in comments(configs_dir() / f"{name}.yaml").items()
        }
    return "\n".join(_lines(container, texts, "")) + "\n"


def _lines(container: dict[str, Any], texts: dict[str, str], prefix: str) -> list[str]:
    lines = []
    for key, value in container.items():
        path, indent = f"{prefix}{key}", "  " * prefix.count(".")
        if (
            value
            and isinstance(value, dict)
            and (not prefix or any(name.startswith(f"{path}.") for name in texts))
        ):
            lines += [f"{indent}{key}:", *_lines(value, texts, f"{path}.")]
            continue
        text = yaml.safe_dump(
            [value], default_flow_style=True, width=float("inf"), allow_unicode=True
        ).strip()[1:-1]
        lines.append(
            f"{indent}{key}: {text}{f'  # {texts[path]}' if texts.get(path) else ''}"
        )
    return lines


def show(sections: list[str], as_json: bool) -> None:
    """Print the rows of sections such as `encodings` or `task`, or of all: JSON, or
    aligned lines of some columns.
    """
    rows = listing(sections)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for group, entries in rows.items():
        print(f"{group}:")
        cells = [
            [str(row[key] or "-") for key in _COLUMNS if key in row] for row in entries
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for line in cells:
            print(
                "  "
                + "  ".join(
                    cell.ljust(width) for cell, width in zip(line, widths, strict=True)
                ).rstrip()
            )


def listing(sections: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each section; of all if none is named. Raises UserError if
    there is no such section.
    """
    from posbench import tasks
    from posbench.encodings.extend import methods
    from posbench.evaluation import probes

    facts = ("name", "title", "source", "options")
    kinds: dict[str, tuple[Callable[..., dict[str, Any]], Iterable[Any]]] = {
        "encodings": (describe, encodings.names()),
        "patterns of layers": (_first_comment, choices("encoding/layered").items()),
        "extensions": (
            lambda method: {key: getattr(method, key) for key in facts},
            methods().values(),
        ),
        "probes": (probe, probes.names()),
        "tasks": (task, tasks.names()),
    }
    for group in ("experiment", "model", "sweep", "data"):
        # tasks have a section of their own
        files = choices(group) if group == "data" else choices(group, (), EVERY)
        kinds[group if group == "data" else f"{group}s"] = (
            _first_comment,
            files.items(),
        )
    text = "\n".join(
        path.read_text(encoding="utf-8") for path in choices("claim").values()
    )
    kinds["claims"] = (
        lambda claim: {"name": claim[1], "title": claim[0]},
        _CLAIM.findall(text),
    )
    by_word = {name.partition(" ")[0].rstrip("s"): name for name in kinds}
    names = [by_word.get(section.lower().rstrip("s"), "") for section in sections]
    if "" in names:
        raise unknown(
            "section",
            sections[names.index("")],
            (name.partition(" ")[0] for name in kinds),
        )
    return {
        name: [make(item) for item in items]
        for name, (make, items) in kinds.items()
        if name in (names or kinds)
    }


def page(name: str) -> str:
    """Return the documentation of an encoding or task (task/NAME) and its options;
    UserError if there is none.
    """
    from posbench import tasks

    group, _, inner = name.rpartition("/")
    path, choice, key = None, f"data={name}", "data.task"
    if group == "task" and inner in tasks.names():
        document, values = tasks.load(inner).__doc__, tasks.options_of(inner)
    else:
        cls, values = encodings.load(group or name), encodings.options_of(group or name)
        # None: a user's
        path = (
            choice_file("encoding/layered", inner)
            if group
            else choices("encoding").get(inner)
        )
        document = encodings.documentation(cls)
        values = yaml.safe_load(path.read_text(encoding="utf-8")) if path else values
        choice, key = f"encoding={name}", "encoding"
    meanings = {
        option: f"  # {meaning}"
        for option, meaning in (comments(path) if path else {}).items()
    }
    text = inspect.cleandoc(document or "")
    options = [
        f"  {key}.{word}={value}{meanings.get(word, '')}"
        for word, value in values.items()
        if word != "name"
    ]
    links = [
        f"https://arxiv.org/abs/{number}"
        for number in dict.fromkeys(_ARXIV.findall(text))
    ]
    return "\n".join(
        [
            f"{name}: {text}",
            "",
            *links,
            "Options:",
            *options,
            "",
            f"posbench train {choice}",
        ]
    )


def describe(name: str) -> dict[str, Any]:
    """Return the facts on one encoding. Those that need it built, at the demo's size,
    are None if that fails.
    """
    from posbench.encodings.extend import methods_of

    cls, defaults = encodings.load(name), encodings.options_of(name)
    row = _documented(name, encodings.documentation(cls))
    row["paper"] = next(
        (f"arXiv:{number}" for number in _ARXIV.findall(row["source"] or "")), None
    )
    row["options"] = {
        key: None if value is inspect.Parameter.empty else value
        for key, value in defaults.items()
    }
    try:
        encoding = encodings.build(name, DEMO)
    except UserError as error:  # it needs an option without a default
        facts = (
            "acts",
            "parameters",
            "max_length",
            "length_dependent",
            "kernels",
            "cache",
            "architectures",
            "models",
        )
        return row | dict.fromkeys(facts) | {"note": str(error), "extensions": []}
    return row | {
        "acts": encodings.acts(encoding.hooks),
        "parameters": sum(parameter.numel() for parameter in encoding.parameters()),
        "max_length": encoding.max_length,
        "length_dependent": encoding.length_dependent,
        **decision_card(encoding),
        "extensions": methods_of(encoding),
    }


def probe(name: str) -> dict[str, Any]:
    """Return the facts on one probe of the use of context."""
    from posbench.evaluation import probes

    document = (
        importlib.import_module(f"posbench.evaluation.probes.{name}").__doc__ or ""
    )
    return _documented(name, document) | {"options": probes.options_of(name)}


def task(name: str) -> dict[str, Any]:
    """Return the facts on a synthetic task, which is chosen as data."""
    from posbench import tasks

    return _documented(f"task/{name}", tasks.load(name).__doc__ or "") | {
        "options": tasks.options_of(name)
    }


def _documented(name: str, text: str) -> dict[str, Any]:
    """Return a docstring's title, its text, and its last paragraphs by their label."""
    title, _, document = inspect.cleandoc(text).partition("\n")
    row: dict[str, Any] = {"name": name, "title": title.rstrip(".")}
    for key, label in _LABELS.items():
        match = re.search(
            rf"^{label}:(.*?)(?=^[A-Z][\w ]*:|^\s*$|\Z)",
            document,
            re.DOTALL | re.MULTILINE,
        )
        row[key] = " ".join(match[1].split()) or None if match else None
        document = document.replace(match[0], "") if match else document
    return row | {"document": document.strip("\n")}


def _first_comment(choice: tuple[str, Path]) -> dict[str, Any]:
    """Return the name and first comment of a file of a configuration group."""
    name, path = choice
    lines = path.read_text(encoding="utf-8").splitlines()
    title = next(
        line[1:].strip()
        for line in lines
        if line.startswith("#") and "@package" not in line
    )
    return {
        "name": f"layered/{name}" if path.parent.name == "layered" else name,
        "title": title,
    }
