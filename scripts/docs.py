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

from posbench.reports.explore import explore_html
from posbench.results.compare import Losses, compare, curves
from posbench.results.frame import read

ROOT = Path(__file__).parents[1]
# Files outside docs/ with a page on the site, and its name.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
# Links to code or configuration lead to the page generated from it.
MADE_FROM = {
    r"configs(/.*)?": "reference/configuration.md",
    r"configs/encoding/(?!index)(\w+)\.yaml": r"encodings/\1.md",
    r"posbench/encodings": "encodings/index.md",
    r"posbench/cli.py": "reference/commands.md",
    r"posbench/__init__\.py": "reference/python.md",
    r"docs/rows/catalogue_again\.parquet": "explore.html",
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
    name_of = {pages / page: name for name, page in PAGES.items()}
    for page in pages.rglob("*.md"):
        name = name_of.get(page, f"docs/{page.relative_to(pages)}")
        text = relinked(page.read_text(encoding="utf-8"), name)
        page.write_text(text, encoding="utf-8")

    rows = read([ROOT / "docs" / "rows" / "catalogue_again.parquet"])
    points = curves(Losses.of(rows))
    explored = explore_html("The catalogue, seed 1", compare(rows), points)
    (pages / "explore.html").write_text(explored, encoding="utf-8")

    made = encoding_pages.pages(pages if pictures else None)
    made["reference/configuration.md"] = configuration_pages.page()
    made["reference/commands.md"] = commands()
    made["reference/python.md"] = PYTHON
    for name, text in made.items():
        (pages / name).parent.mkdir(exist_ok=True)
        (pages / name).write_text(text, encoding="utf-8")

    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        # without a prompt, a console block would be coloured as output
        text = text.replace("```console\n", "``` { .bash .commands }\n")
        text = _MERMAID.sub(lambda match: boxes(match[1]), text)
        text = _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
        page.write_text(text, encoding="utf-8")
    (folder / "mkdocs.yml").write_text(_site(), encoding="utf-8")


def relinked(text: str, name: str) -> str:
    """Return a page with links into the site, and other links as plain text; `name`:
    its path in the repository.
    """

    here = posixpath.dirname(PAGES.get(name, name.removeprefix("docs/")))

    def link(match: re.Match[str]) -> str:
        image, words, target = match[1], match[2], match[3]
        if "://" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        there = _page_of(path)
        if there is None:
            return words
        to = posixpath.relpath(there, here or ".")
        return f"{image}[{words}]({to}{match[4] or ''})"

    return _LINK.sub(link, text)


def _page_of(path: str) -> str | None:
    """Return the site's page of a file in the repository; None: it has none."""
    page = PAGES.get(path)
    if path.startswith("docs/"):
        page = path.removeprefix("docs/")
    for pattern, made in MADE_FROM.items():
        match = re.fullmatch(pattern, path)
        if match:
            page = match.expand(made)
    return page


def boxes(drawing: str) -> str:
    """Return a Mermaid drawing as a numbered list of its boxes: the site would load
    Mermaid itself from the network.
    """
    labels = re.findall(r'\["([^"]+)<br/>([^"]+)"\]', drawing)
    lines = [f"{i}. {what}: `{where}`\n" for i, (what, where) in enumerate(labels, 1)]
    return "".join(lines)


def commands() -> str:
    """Return the command line's own help, as Typer writes it in Markdown."""
    words = ["utils", "docs", "--name", "posbench", "--title", "Commands"]
    done = subprocess.run(
        [sys.executable, "-m", "typer", "posbench.cli", *words],
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
    text = (ROOT / "docs" / "mkdocs.yml").read_text(encoding="utf-8")
    site: dict[str, Any] = yaml.safe_load(text)
    pages = [{"All of them": "encodings/index.md"}, *encoding_pages.by_place()]
    for entry in site["nav"]:
        if "Encodings" in entry:
            entry["Encodings"] = pages
    site |= {"docs_dir": "pages", "site_dir": "site"}
    return yaml.safe_dump(site, sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    write(Path(sys.argv[1]))
