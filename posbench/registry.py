"""Optimizers, trackers and probes by name: each stands in a file of its own, and is
found by the file's name.
"""

import ast
import functools
import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OPTIMIZERS = "training.optimizers"
TRACKERS = "tracking.sessions"
PROBES = "evaluation.probes"


def folder(package: str) -> Path:
    """Return the folder of a package of posbench."""
    return Path(__file__).parent.joinpath(*package.split("."))


def names(package: str) -> list[str]:
    """Return the names of a package's modules, sorted. Imports none of them."""
    return sorted(path.stem for path in folder(package).glob("[!_]*.py"))


def load(package: str, name: str) -> Any:
    """Return the class of a module: it has the module's name without underscores, in
    any case.
    """
    module = importlib.import_module(f"posbench.{package}.{name}")
    spelling = name.replace("_", "")
    for attribute, cls in vars(module).items():
        if isinstance(cls, type) and attribute.lower() == spelling:
            return cls
    raise ImportError(f"{module.__file__} has no class {spelling}")


def documentation(name: str, paths: Iterable[Path]) -> str:
    """Return the docstring of a class or function of these files, spelt as in `load`,
    or else of the last file's module. Imports none of them.
    """
    of_file: dict[str, str] = {}
    for path in paths:
        of_file = _docstrings(path)
        if name.replace("_", "") in of_file:
            return of_file[name.replace("_", "")]
    return of_file[""]


def constructor(name: str, path: Path) -> ast.arguments | None:
    """Return what the constructor of a file's class declares; the class is spelt as in
    `load`, or says `name`. It may be that of a base, here or in a file beside it. None
    if there is no such class. Imports nothing.
    """
    for node in parsed(path).body:
        if not isinstance(node, ast.ClassDef):
            continue
        is_spelt_so = node.name.lower() == name.replace("_", "").lower()
        if is_spelt_so or f"name = {name!r}" in map(ast.unparse, node.body):
            for line in node.body:
                if isinstance(line, ast.FunctionDef) and line.name == "__init__":
                    return line.args
            return constructor(ast.unparse(node.bases[0]), path)
    for beside in imported(path):
        declared = constructor(name, beside)
        if declared:
            return declared
    return None


def function(name: str, path: Path) -> ast.arguments | None:
    """Return what the function of this name in a file declares; None if there is none.
    Imports nothing.
    """
    for node in parsed(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node.args
    return None


def keywords(name: str, paths: Iterable[Path]) -> list[str]:
    """Return the options of the function of this name in these files: its arguments
    with a default. Imports nothing.
    """
    for path in paths:
        declared = function(name, path)
        if declared:
            needed = len(declared.args) - len(declared.defaults)
            options = [*declared.args[needed:], *declared.kwonlyargs]
            return [option.arg for option in options]
    return []


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the statements of a file, in `body`."""
    return ast.parse(path.read_bytes())


def imported(path: Path) -> list[Path]:
    """Return the files beside this one from which it imports names."""
    files = []
    for node in parsed(path).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            package, _, module = node.module.rpartition(".")
            if package == f"posbench.{path.parent.name}":
                files.append(path.with_name(f"{module}.py"))
    return files


def constant(name: str, path: Path) -> Any:
    """Return the literal to which a file, or one from which it imports, sets a name.
    Raises NameError if there is none, ValueError if it is no literal.
    """
    for file in (path, *imported(path)):
        for line in parsed(file).body:
            if not isinstance(line, ast.Assign | ast.AnnAssign):
                continue
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            if line.value and ast.unparse(target) == name:
                return ast.literal_eval(line.value)
    raise NameError(name)


@functools.cache
def _docstrings(path: Path) -> dict[str, str]:
    """Return a file's docstrings: of classes, which may say their `name`, else of
    functions by their spelling, and of the module as "".
    """
    module = parsed(path)
    texts = {"": ast.get_docstring(module) or ""}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            texts[node.name.replace("_", "")] = ast.get_docstring(node) or ""
    for node in module.body:
        if not isinstance(node, ast.ClassDef):
            continue
        text = ast.get_docstring(node)
        if not text:  # that of the module counts
            continue
        texts[node.name.lower()] = text
        for line in node.body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "name":
                name = ast.literal_eval(line.value)
                texts[name.replace("_", "")] = text
    return texts
