"""Make the page of the configuration: every key with its type, its default and the
comment beside it in configs/.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import yaml

from posbench import tasks
from posbench.config import overrides, schema
from posbench.config.shipped import NESTED, choices, configs_dir
from posbench.launch import compose
from posbench.listing import comments_by_key

_WORDS = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "`true` or `false`",
    types.NoneType: "`null`",
}


def head(path: Path) -> str:
    """Return the first comment of a YAML file."""
    words = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            words.append(line.lstrip("# "))
    return " ".join(words)


def kind(hint: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return kind(inner[0])
    if origin is typing.Literal:
        return " or ".join(f"`{choice}`" for choice in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(kind(each) for each in inner)
    if origin is list or inner[-1:] == (Ellipsis,):
        return f"list: {kind(inner[0])}"
    if origin is tuple:
        return f"{len(inner)} numbers"
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
        cells = [f"`{name}`", what, f"`{default}`", meaning]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the text of the page."""
    defaults = schema.flat(schema.to_container(compose.single([])))
    texts = schema.meanings()
    general, sections = [], {}
    for name, hint in _fields(schema.Config):
        if dataclasses.is_dataclass(hint):
            sections[name] = hint
        else:
            general.append(_row(name, hint, defaults, texts))
    parts = [_INTRODUCTION, table(general)]
    for section, cls in sections.items():
        parts.append(f"## {section}\n\n{cls.__doc__}\n")
        parts.append(_choices(section))
        if section == "encoding":
            parts.append(
                "The options of each stand on [its page](../encodings/index.md).\n"
            )
            continue
        parts.append(table(_rows(cls, f"{section}.", defaults, texts)))
        if section == "data":
            for name, path in choices(section, pattern=NESTED).items():
                parts.append(_task(name, path))
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
    lines = []
    for word, key in overrides.WORDS.items():
        if key in (f"evaluation.{word}", f"runtime.{word}"):
            continue
        if not key.endswith(f".{word}") or key == overrides.LENGTH:
            lines.append(f"- `{word}` for `{key}`")
    lines.append(
        "- every key of `evaluation` and `runtime` by its own name, such as `device` or"
        " `batch_tokens`"
    )
    return "\n".join(lines) + "\n"


def _fields(cls: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field.name, hints[field.name]) for field in dataclasses.fields(cls)]


def _rows(
    cls: Any, prefix: str, defaults: dict[str, Any], texts: dict[str, str]
) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, hint in _fields(cls):
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(hint):
            rows += _rows(hint, f"{key}.", defaults, texts)
        else:
            rows.append(_row(key, hint, defaults, texts))
    return rows


def _row(
    key: str, hint: Any, defaults: dict[str, Any], texts: dict[str, str]
) -> tuple[str, str, str, str]:
    return key, kind(hint), plain(defaults.get(key, {})), texts.get(key, "")


def _choices(group: str) -> str:
    """Return a table of the files of a group, and what each is."""
    if group == "encoding" or not (configs_dir() / group).is_dir():
        return ""
    files = choices(group)
    if not files:
        return ""
    rows = [f"| `{group}={name}` | {head(path)} |" for name, path in files.items()]
    return "\n".join(["| choice | what it is |", "|---|---|", *rows, ""])


def _task(name: str, path: Path) -> str:
    """Return the description of a task, and its own options."""
    texts = comments_by_key(path)
    task = yaml.safe_load(path.read_text(encoding="utf-8"))["task"]
    hints = typing.get_type_hints(tasks.load(task.pop("name")))
    rows = []
    for key, value in task.items():
        meaning = texts[f"task.{key}"]
        rows.append((f"data.task.{key}", kind(hints[key]), plain(value), meaning))
    return f"### data={name}\n\n{head(path)}\n\n{table(rows, 'option')}"
