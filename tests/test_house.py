"""How large the project may be, and its surface: what is added later takes something away, or changes a line here."""

from pathlib import Path

from test_layers import room

import posbench
from posbench.cli import app
from posbench.config.schema import keys

ROOT = Path(__file__).parents[1]
# Lines of Python of the rooms of posbench, of all of it, of tests and scripts; words of docs. What was over its budget
# when this was written has that size: it may only fall.
BUDGETS = {
    "config": 1278, "launch": 810, "data": 1127, "encodings": 4251, "model": 900, "tasks": 612, "training": 565,
    "run": 999, "evaluation": 1835, "results": 929, "report": 945, "huggingface": 1300, "claims": 400, "show": 600,
    "serving": 820, "posbench": 19_500, "tests": 17_520, "scripts": 860, "docs": 22_000,
}  # fmt: skip
COMMANDS = "bench evaluate export list prepare properties report reproduce rope runs sample show sweep sync train"
PUBLIC = "Encoding LoadedRun attention attention_logits attention_output build_encoding encodings evaluate load plot"
PUBLIC += " register report runs sweep train"
SECTIONS = {"encoding": 4, "model": 12, "data": 16, "training": 13, "evaluation": 15, "tracking": 6, "runtime": 12}


def lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def test_no_room_is_over_its_budget() -> None:
    sizes = {name: lines([*(ROOT / name).rglob("*.py")]) for name in ("posbench", "tests", "scripts")}
    for path in (ROOT / "posbench").glob("*/*.py"):
        name = room(path.parent.name)
        sizes[name] = sizes.get(name, 0) + lines([path])
    sizes["docs"] = sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md"))
    assert {name: size for name, size in sizes.items() if size > BUDGETS.get(name, size)} == {}


def test_commands_public_names_and_configuration_keys_are_these() -> None:
    assert sorted(command.name or command.callback.__name__ for command in app.registered_commands) == COMMANDS.split()
    assert sorted(posbench.__all__) == PUBLIC.split()
    sections = [key.partition(".")[0] for key in keys() if "." in key]
    assert {name: sections.count(name) for name in dict.fromkeys(sections)} == SECTIONS
