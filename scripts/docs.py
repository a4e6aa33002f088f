"""Write the pages of the documentation site: those of docs/, and those made from code
and YAML files.  make docs
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import configuration_pages
import encoding_pages
import yaml

ROOT = Path(__file__).parents[1]
# Files outside docs/ with a page on the site, and its name.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Links to code or configuration lead to the page generated from it.
MADE_FROM = {
    r"configs(/.*)?": "reference/configuration.md",
    r"configs/encoding/(?!index)(\w+)\.yaml": r"encodings/\1.md",
    r"posbench/encodings": "encodings/index.md",
    r"posbench/encodings/([a-z]\w*)\.py": r"encodings/\1.md",
    # encodings/index.md is the list of all
    r"posbench/encodings/index\.py": "encodings/index-encoding.md",
    r"posbench/cli.py": "reference/commands.md",
    r"posbench/__init__\.py": "reference/python.md",
}
_ARXIV = re.compile(r"(?<![\w/\[`])arXiv:(\d{4}\.\d{4,5})(?![\w\]`])")
_MERMAID = re.compile(r"```mermaid\n(.*?)```\n", flags=re.S)
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def write(folder: Path, pictures: bool = True) -> None:
    """Write all pages and the configuration of the site into an empty folder; pictures
    take most of the time.
    """
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("mkdocs.yml"))
    for name, page in PAGES.items():
        shutil.copy(ROOT / name, pages / page)
    for page in pages.rglob("*.md"):
        repository = next(
            (name for name, to in PAGES.items() if pages / to == page),
            f"docs/{page.relative_to(pages)}",
        )
        page.write_text(
            relinked(page.read_text(encoding="utf-8"), repository), encoding="utf-8"
        )
    made = encoding_pages.pages(pages if pictures else None) | {
        "reference/configuration.md": configuration_pages.page(),
        "reference/commands.md": commands(),
        "reference/python.md": PYTHON,
    }
    for name, text in made.items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(text, encoding="utf-8")
    # without a prompt, a console block would be coloured as output
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8").replace("```console\n", "```bash\n")
        text = _MERMAID.sub(lambda match: boxes(match[1]), text)
        page.write_text(
            _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text), encoding="utf-8"
        )
    (folder / "mkdocs.yml").write_text(_site(), encoding="utf-8")


def relinked(text: str, name: str) -> str:
    """Return a page with links into the site, and other links as plain text; `name`:
    its path in the repository.
    """

    def link(match: re.Match[str]) -> str:
        image, words, target, anchor = match[1], match[2], match[3], match[4] or ""
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        there = PAGES.get(path) or (
            path.removeprefix("docs/") if path.startswith("docs/") else None
        )
        for pattern, page in MADE_FROM.items():
            if exact := re.fullmatch(pattern, path):
                there = exact.expand(page)
        here = posixpath.dirname(PAGES.get(name, name.removeprefix("docs/")))
        return (
            f"{image}[{words}]({posixpath.relpath(there, here or '.')}{anchor})"
            if there
            else words
        )

    return _LINK.sub(link, text)


def boxes(drawing: str) -> str:
    """Return a Mermaid drawing as a numbered list of its boxes: the site would load
    Mermaid itself from the network.
    """
    labels = re.findall(r'\["([^"]+)<br/>([^"]+)"\]', drawing)
    return "".join(
        f"{i}. {what}: `{where}`\n" for i, (what, where) in enumerate(labels, 1)
    )


def commands() -> str:
    """Return the command line's own help, as Typer writes it in Markdown."""
    typer = [
        sys.executable,
        "-m",
        "typer",
        "posbench.cli",
        "utils",
        "docs",
        "--name",
        "posbench",
    ]
    done = subprocess.run(
        [*typer, "--title", "Commands"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    # a usage pattern, not a command
    return done.stdout.replace("```console\n$ posbench", "```text\nposbench")


PYTHON = """# Python

Everything that `import posbench` offers. [From Python](../python.md) shows how it is used.

::: posbench
    options:
      show_root_heading: false
      show_root_toc_entry: false
      filters: ["!^_", "!^Encoding$"]

::: posbench.api.runs

## The contract of an encoding

::: posbench.encodings.base.Encoding

::: posbench.encodings.base.Shape

## Errors

::: posbench.errors
    options:
      show_root_heading: false
      show_root_toc_entry: false
"""


def _site() -> str:
    """Return docs/mkdocs.yml with the encodings' pages in its navigation."""
    site: dict[str, Any] = yaml.safe_load(
        (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    )
    for entry in site["nav"]:
        if "Encodings" in entry:
            entry["Encodings"] = [
                {"All of them": "encodings/index.md"},
                *encoding_pages.by_place(),
            ]
    site |= {"docs_dir": "pages", "site_dir": "site"}
    return yaml.safe_dump(site, sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    write(Path(sys.argv[1]))
