"""Imports point one way, and nothing heavy is imported before it is needed."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "posbench"

# From the bottom up; a module may import what stands before it, and its own layer's neighbours. A package stands for
# all its modules.
LAYERS = [
    ["errors"],
    ["files", "redaction", "randomness", "plain_yaml", "encodings"],
    ["config"],
    ["encodings.base"],
    ["attention"],
    ["encodings.*", "data", "devices", "console", "exits", "timing", "rms_norm"],
    ["model", "loss", "tasks", "extend", "probe"],
    ["checkpoint", "runs", "tracking"],
    ["protocols", "statistics"],
    ["cells", "scoring"],
    ["evaluate", "properties", "chart"],
    ["train", "show"],
    ["preflight", "evaluation_overrides", "doctor", "listing", "bench"],
    ["report"],
    ["job"],
    ["sweep"],
    ["cli"],
    ["__main__"],
]


def modules() -> dict[str, pathlib.Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def layer_of(name: str) -> int:
    for choice in (name, f"{name.rpartition('.')[0]}.*", name.split(".")[0]):
        for index, layer in enumerate(LAYERS):
            if choice in layer:
                return index
    raise AssertionError(f"module {name} stands in no layer of {pathlib.Path(__file__).name}")


def imports_of(path: pathlib.Path, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "posbench":
            base = node.module.removeprefix("posbench").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                found.add(name if name in known else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("posbench.") for a in node.names if a.name.startswith("posbench.")}
    return found - {""}


@pytest.mark.parametrize("name", modules())
def test_imports_point_downwards(name: str) -> None:
    known = set(modules())
    upwards = {
        other
        for other in imports_of(modules()[name], known)
        if layer_of(other) > layer_of(name) and other.split(".")[0] != name.split(".")[0]
    }
    assert not upwards


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import posbench; posbench.encodings()", ["torch", "hydra", "pydantic", "numpy", "datasets", "wandb"]),
        ("import posbench.cli", ["torch", "hydra", "pydantic", "numpy", "datasets", "wandb"]),
        ("import posbench.runs", ["torch", "hydra", "datasets", "wandb"]),
        ("import posbench.train", ["datasets", "wandb", "hydra", "matplotlib", "scipy"]),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, absent: list[str]) -> None:
    check = f"{code}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
