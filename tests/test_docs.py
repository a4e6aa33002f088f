"""What the documents say exists, exists: commands, files, folders, encodings."""

import importlib.util
import pathlib
import re
import shlex

import pytest

import posbench
from posbench.cli.app import app

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_in(page: pathlib.Path) -> list[str]:
    """Lines of the page's console blocks and inline code that call posbench or make."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, flags=re.S))
    lines = [line.partition("  #")[0].strip().removeprefix("$ ") for line in blocks.splitlines()]
    inline = re.findall(r"`((?:posbench|make) [^`]+)`", text)
    return [line for line in [*lines, *inline] if line.startswith(("posbench ", "make "))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documents_exist(page: pathlib.Path) -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for line in commands_in(page):
        program, *words = shlex.split(line)
        names = [word for word in words if not word.startswith("-") and "=" not in word]
        if program == "make":
            assert set(names) <= targets, line
        elif names and not words[0].startswith("-"):
            assert words[0] in known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_choices_in_the_documents_are_files(page: pathlib.Path) -> None:
    for line in commands_in(page):
        for word in shlex.split(line):
            group, equals, value = word.partition("=")
            if equals and (ROOT / "configs" / group).is_dir() and "{" not in value and value.islower():
                for choice in value.split(","):
                    invented = page.name == "CONTRIBUTING.md" and choice == "log_bias"
                    assert invented or (ROOT / "configs" / group / f"{choice}.yaml").exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_documents_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} points to {target}"


def test_every_path_in_the_readmes_tree_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = re.search(r"## What is where\n.*?```text\n(.*?)```", text, flags=re.S)
    assert tree
    parents: list[str] = []
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.split("  ", 1)[0].split() if depth == 0 else line.strip().split("  ", 1)[0].split():
            parents = [*parents[:depth], name.rstrip("/")]
            path = ROOT.joinpath(*parents)
            assert path.exists(), f"README's tree has {'/'.join(parents)}"


def test_the_readmes_table_of_encodings_is_the_generated_one() -> None:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts" / "readme.py")
    assert spec and spec.loader
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.written(text) == text, "README's table of encodings is out of date: run `make readme`"


def test_the_example_encoding_of_the_contributors_guide_works(tmp_path: pathlib.Path) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", text, flags=re.S)
    assert block
    scope: dict[str, object] = {"__name__": "log_bias"}
    source = "\n".join(line.removeprefix("   ") for line in block[1].splitlines())
    exec(compile(source, "log_bias.py", "exec"), scope)
    import torch

    from posbench.encodings.base import Shape

    encoding = scope["LogBias"](Shape(32, 4, 2, 16), strength=2.0)  # type: ignore[operator]
    q = torch.zeros(1, 4, 3, 8)
    logits = posbench.attention_logits(encoding, q, q)
    torch.testing.assert_close(logits[0, :, 2], -2.0 * torch.tensor([3.0, 2.0, 1.0]).log().expand(4, 3))
