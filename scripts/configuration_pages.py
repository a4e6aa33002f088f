"""Make the page of the configuration: every key with its type, its default and the
comment beside it in configs/.
"""

import dataclasses
import itertools
import json
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from posbench import tasks
from posbench.config import compose, overrides, schema
from posbench.config.shipped import NESTED, choices, configs_dir
from posbench.listing import comments

_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    types.NoneType: "`null`",
}


def head(path: Path) -> str:
    """Return the first comment of a YAML file."""
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines()
    )
    return " ".join(line.lstrip("# ") for line in lines if "@package" not in line)


def kind(hint: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in inner)
    if origin in (tuple, list):
        return (
            f"list: {kind(inner[0])}"
            if origin is list or inner[-1] is Ellipsis
            else f"{len(inner)} numbers"
        )
    return _WORDS.get(hint, "mapping")


def plain(value: Any) -> str:
    """Return a value as it is typed on a command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    plainly = isinstance(value, str) and value.isprintable()
    return value if plainly else json.dumps(value, ensure_ascii=False)


def table(rows: list[tuple[str, str, str, str]], first: str = "key") -> str:
    """Return a Markdown table of keys or options with their types, defaults and
    meanings.
    """
    lines = [f"| {first} | type | default | meaning |", "|---|---|---|---|"]
    for name, what, default, meaning in rows:
        cells = [
            cell.replace("|", "\\|")
            for cell in (f"`{name}`", what, f"`{default}`", meaning)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of the page."""
    defaults = schema.flat(schema.to_container(compose.single([])))
    general = [
        name
        for name, hint in _fields(schema.Config)
        if not dataclasses.is_dataclass(hint)
    ]
    sections = {
        name: hint
        for name, hint in _fields(schema.Config)
        if dataclasses.is_dataclass(hint)
    }
    train = comments(configs_dir() / "train.yaml")
    parts = [
        _INTRODUCTION,
        table(_rows(schema.Config, "", defaults, train, only=general)),
    ]
    for section, cls in sections.items():
        parts.append(f"## {section}\n\n{cls.__doc__}\n")
        parts.append(_choices(section))
        if section == "encoding":
            parts.append(
                "The options of each stand on [its page](../encodings/index.md).\n"
            )
            continue
        texts = {
            f"{section}.{key}": text for key, text in _said(section).items()
        } | train
        parts.append(table(_rows(cls, f"{section}.", defaults, texts)))
        if section == "data":
            parts += [
                _task(name, path)
                for name, path in choices(section, pattern=NESTED).items()
            ]
    parts += [f"## {group}\n\n{_choices(group)}" for group in ("experiment", "sweep")]
    parts.append(_WITHOUT_SECTION + _words())
    return "\n".join(part for part in parts if part)


_INTRODUCTION = """# Configuration

`group=name` picks a file of a group (`encoding=alibi`), `section.key=value` changes a value
(`training.tokens=2000000`), and `posbench train --cfg` prints the result. Defaults are those of a bare
`posbench train`, which includes `experiment=demo`; another experiment sets its own.
"""
_WITHOUT_SECTION = """## Words that need no section

In `train`, `sweep`, `bench` and, where they make sense, `evaluate`:

"""


def _words() -> str:
    keys = [
        (word, key)
        for word, key in overrides.WORDS.items()
        if key != f"evaluation.{word}" != f"runtime.{word}"
    ]
    lines = [
        f"- `{word}` for `{key}`"
        for word, key in keys
        if not key.endswith(f".{word}") or key == overrides.LENGTH
    ]
    lines.append(
        "- every key of `evaluation` and `runtime` by its own name, such as `device` or"
        " `batch_tokens`"
    )
    return "\n".join(lines) + "\n"


def _fields(cls: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]


def _rows(
    cls: Any,
    prefix: str,
    defaults: dict[str, Any],
    texts: dict[str, str],
    only: list[str] | None = None,
) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, hint in _fields(cls):
        key = f"{prefix}{name}"
        if only is not None and name not in only:
            continue
        if dataclasses.is_dataclass(hint):
            rows += _rows(hint, f"{key}.", defaults, texts)
        else:
            rows.append(
                (key, kind(hint), plain(defaults.get(key, {})), texts.get(key, ""))
            )
    return rows


def _said(group: str) -> dict[str, str]:
    """Return the comments of a group's keys; if several files have one, that of the
    common base, else the first.
    """
    texts: dict[str, str] = {}
    # the common base, with an underscore, is first
    for path in sorted((configs_dir() / group).glob("*.yaml")):
        texts = {key: text for key, text in comments(path).items() if text} | texts
    return texts


def _choices(group: str) -> str:
    """Return a table of the files of a group, and what each is."""
    files = choices(group) if (configs_dir() / group).is_dir() else {}
    if group == "encoding" or not files:
        return ""
    rows = [f"| `{group}={name}` | {head(path)} |" for name, path in files.items()]
    return "\n".join(["| choice | what it is |", "|---|---|", *rows, ""])


def _task(name: str, path: Path) -> str:
    """Return the description of a task, and its own options."""
    texts, task = (
        comments(path),
        yaml.safe_load(path.read_text(encoding="utf-8"))["task"],
    )
    hints = typing.get_type_hints(tasks.load(task["name"]))
    task.pop("name")
    rows = [
        (f"data.task.{key}", kind(hints[key]), plain(value), texts[f"task.{key}"])
        for key, value in task.items()
    ]
    return f"### data={name}\n\n{head(path)}\n\n{table(rows, 'option')}"
