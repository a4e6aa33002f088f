"""Imports point one way, and nothing heavy is imported before it is needed."""

import ast
import functools
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "posbench"

# From the top down: a room may import what stands after it, and nothing else.
ROOMS = (
    "__main__ cli listing api claims launch show bench huggingface rope training"
    " evaluation tracking reports results run "
)
ROOMS += (
    "data model config encodings tasks options terminal processes machine"
    " randomness files errors"
)


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    imports = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            imports[name] = path
    return imports


def room(name: str) -> str:
    return name.partition(".")[0]


@functools.cache
def imports_of(name: str) -> set[str]:
    """Return the modules of posbench that a module of posbench imports, anywhere in
    it.
    """
    names, known = set(), modules()
    for node in ast.walk(ast.parse(known[name].read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "posbench"
        ):
            base = node.module.removeprefix("posbench").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                names.add(name if name in known else base)
        elif isinstance(node, ast.Import):
            names |= {
                a.name.removeprefix("posbench.")
                for a in node.names
                if a.name.startswith("posbench.")
            }
    return names - {""}


def test_every_room_has_its_place_and_every_place_its_room() -> None:
    assert sorted(ROOMS.split()) == sorted({room(name) for name in modules()})


def test_imports_point_down_the_list() -> None:
    place = {name: ROOMS.split().index(room(name)) for name in modules()}
    assert not [
        (name, other)
        for name in modules()
        for other in imports_of(name)
        if place[other] < place[name]
    ]


def test_no_circle_within_a_room() -> None:
    uses = {
        module: (
            {other for other in imports_of(module) if room(other) == room(module)}
            - {module}
        )
        for module in modules()
    }
    while free := {module for module, others in uses.items() if not others}:
        uses = {
            module: others - free
            for module, others in uses.items()
            if module not in free
        }
    assert not uses, f"these import each other in a circle: {uses}"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import posbench as p; p.encodings.names(); dir(p)",
            "torch hydra pydantic numpy pandas datasets wandb",
        ),
        ("import posbench.cli", "torch hydra pydantic numpy datasets wandb"),
        ("import posbench.run", "torch hydra datasets wandb"),
        ("import posbench.training.train", "datasets wandb hydra matplotlib scipy"),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, absent: str) -> None:
    check = (
        f"{code}; import sys; print([m for m in {absent.split()!r} if m in"
        " sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
