"""Imports point one way, and nothing heavy is imported before it is needed."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "posbench"

# What stands beside the experiment: a command or a Python call imports it when it is
# called.
SATELLITES = ("bench", "claims", "huggingface", "reports", "rope", "show")


def rooms_of_drawing() -> list[str]:
    """Return the rooms as CONTRIBUTING draws them, from the top down: each may import
    what stands after it, and nothing else.
    """
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawing = text.partition("\nposbench/ ")[2].partition("\ntests/ ")[0]
    rooms = ["__main__"]
    for line in drawing.splitlines()[1:]:
        names, _, _ = line.strip().partition("  ")
        rooms += [name.removesuffix(".py").rstrip("/") for name in names.split()]
    return rooms


ROOMS = rooms_of_drawing()


def imports_of(path: pathlib.Path) -> set[str]:
    """Return the names that a module imports from posbench, anywhere in it."""
    names = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    prefix = "posbench."
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def room(name: str) -> str:
    return name.partition(".")[0]


@pytest.fixture(scope="module")
def uses():
    """Return the modules of posbench that each module of posbench imports."""
    paths = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts)
        paths[name.removesuffix(".__init__")] = path
    del paths["__init__"]

    uses = {}
    for module, path in paths.items():
        uses[module] = set()
        for name in imports_of(path):
            # a module, or something in it
            for imported in (name, name.rpartition(".")[0]):
                if imported in paths:
                    uses[module].add(imported)
                    break
    return uses


def test_every_room_has_its_place_and_every_place_its_room(uses):
    found = {room(module) for module in uses}
    assert sorted(ROOMS) == sorted(found)


def test_imports_point_down_the_list(uses):
    up = []
    for module, others in uses.items():
        place = ROOMS.index(room(module))
        for other in others:
            if ROOMS.index(room(other)) < place:
                up.append((module, other))
    assert up == []


@pytest.mark.parametrize("door", ["cli", "api"])
def test_a_door_opens_no_satellite_before_it_is_asked_to(door):
    tree = ast.parse((PACKAGE / f"{door}.py").read_text(encoding="utf-8"))
    opened = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                opened.add(
                    room(f"{node.module}.{alias.name}".removeprefix("posbench."))
                )
    assert opened.isdisjoint(SATELLITES)


def test_no_circle_within_a_room(uses):
    left = {}
    for module, others in uses.items():
        own_room = room(module)
        left[module] = {other for other in others if room(other) == own_room}
        left[module].discard(module)

    is_less = True
    while is_less:
        free = {module for module, others in left.items() if not others}
        is_less = bool(free)
        left = {name: left[name] - free for name in left if name not in free}
    assert not left, f"these import each other in a circle: {left}"


def typed(line: str) -> str:
    """Return code that runs a command line."""
    return f"import sys, posbench.cli as c; sys.argv = '_ {line}'.split(); c.main()"


LIGHT = [
    (
        "import posbench as p; p.encodings.names(); dir(p)",
        "torch hydra pydantic numpy pandas datasets wandb",
    ),
    (
        typed("--help"),
        "torch hydra omegaconf pydantic numpy datasets tokenizers wandb",
    ),
    (typed("list"), "torch hydra numpy pandas pyarrow"),
    (typed("train sed=1"), "torch hydra numpy pandas pyarrow"),
    (typed("sweep encoding=rope,alibii"), "torch hydra numpy pandas pyarrow"),
    (typed("sweep encoding=rope,alibi encoding.base=3"), "torch numpy pandas pyarrow"),
    ("import posbench.run", "torch hydra datasets wandb"),
    ("import posbench.training.train", "datasets wandb hydra matplotlib scipy"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("code", "absent"), LIGHT)
def test_nothing_heavy_is_imported_before_it_is_needed(code, absent):
    python = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    done = subprocess.run(python, capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert imported.isdisjoint(absent.split())
