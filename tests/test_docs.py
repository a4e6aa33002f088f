"""What the documents say exists, exists: commands, files, folders, encodings."""

import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import support
import test_encodings
from test_frozen import cells as cells_of

from posbench.cli import app
from posbench.results.compare import compare
from posbench.results.frame import read

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands_in(page: pathlib.Path) -> list[str]:
    """Lines of the page's console blocks and inline code that call posbench or make."""
    text = page.read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, flags=re.S))
    lines = [line.partition("  #")[0].strip().removeprefix("$ ") for line in blocks.splitlines()]
    inline = re.findall(r"`((?:posbench|make) [^`]+)`", text)
    return [line for line in [*lines, *inline] if line.startswith(("posbench ", "make "))]


def test_commands_in_the_documents_exist() -> None:
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for line in itertools.chain(*map(commands_in, PAGES)):
        program, *words = shlex.split(line)
        names = [word for word in words if not word.startswith("-") and "=" not in word]
        if program == "make":
            assert set(names) <= targets, line
        elif names and not words[0].startswith("-"):
            assert words[0] in known, line


def test_choices_in_the_documents_are_files() -> None:
    for page in PAGES:
        for line in commands_in(page):
            for word in shlex.split(line):
                group, equals, value = word.partition("=")
                if equals and (ROOT / "configs" / group).is_dir() and "{" not in value and value.islower():
                    for choice in value.split(","):
                        invented = page.name == "CONTRIBUTING.md" and choice == "log_bias"
                        assert invented or (ROOT / "configs" / group / f"{choice}.yaml").exists(), line


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} points to {target}"


def rows_of(text: str) -> list[list[str]]:
    """The cells of all rows of the text's tables, without emphasis."""
    lines = [line.replace("**", "") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_the_results_of_the_readme_and_of_the_front_page_are_those_of_the_page_of_results() -> None:
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/results.md", "README.md", "docs/index.md")]
    results, readme, home = (page.replace("\\[", "[").replace("\\]", "]") for page in pages)
    section = re.split(r"^## ", results, flags=re.M)[1]
    assert section.startswith("At a size that reads")
    levels, against = (
        {row[0]: row[1:] for row in rows_of(section.split(heading)[1].partition("\n#")[0])}
        for heading in ("# Beyond the training length", "# Against rope")
    )
    shown = [row for row in rows_of(readme) if "±0." in "".join(row)]
    for name, level, at_1x, *rises, verdict in shown:
        assert [level, *rises] == [levels[name][column] for column in (0, 2, 3)], name
        expected = [against[name][column] for column in (0, 4)] if name != "rope" else ["", "the reference"]
        assert [at_1x, verdict] == expected, name
    rows = [row for row in rows_of(home) if "±0." in "".join(row)]
    for name, *cells in rows:
        assert cells == [levels[name][column] for column in (0, 2, 3, 5, 6)], name
    assert len(shown) == len(rows) == 6
    quoted = " ".join(line.removeprefix("> ") for line in readme.splitlines() if line.startswith("> "))
    assert f"> {quoted}\n" in section


@pytest.mark.full
@pytest.mark.parametrize(("heading", "study"), [("At a size that reads", "six"), ("The demo: six schemes", "six_demo")])
def test_the_tables_of_a_page_are_those_of_the_rows_beside_it(heading: str, study: str) -> None:
    """Losses, rises, reach, uses, differences and adjusted intervals of each scheme."""
    table = compare(read([ROOT / "docs" / "rows" / f"{study}.parquet"]))
    known = {cell.replace("[", r"\[").replace("]", r"\]") for row in cells_of(table) for cell in row}
    for row in table.to_dict("records"):
        for name in ("nll_difference", "rise_difference"):
            known.add(f"{row[f'{name}_adjusted_low']:+.3f} to {row[f'{name}_adjusted_high']:+.3f}")
    sections = re.split(r"^## ", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), flags=re.M)
    (section,) = (part for part in sections if part.startswith(heading))
    for title in ("Beyond the training length", "Against rope"):
        part = section[section.index(f"### {title}") :].split("\n\n")[1]
        lines = [line.strip("| ").split(" | ") for line in part.splitlines()[2:]]
        assert len(lines) >= 5
        numbers = [cell for line in lines for cell in line if re.match(r"[-+\d≥]", cell)]
        assert len(numbers) >= 20 and set(numbers) <= known


def paths_in_the_tree() -> set[pathlib.Path]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = re.search(r"## What is where\n.*?```text\n(.*?)```", text, flags=re.S)
    assert tree
    parents: list[str] = []
    found = set()
    for line in tree[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        for name in line.split("  ", 1)[0].split() if depth == 0 else line.strip().split("  ", 1)[0].split():
            parents = [*parents[:depth], name.rstrip("/")]
            found.add(ROOT.joinpath(*parents))
    return found


def test_every_path_in_the_tree_exists() -> None:
    assert {path for path in paths_in_the_tree() if not path.exists()} == set()


def test_the_readmes_table_of_encodings_is_the_generated_one() -> None:
    readme = support.script("readme")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.written(text) == text, "README's table of encodings is out of date: run `make readme`"


# -- the contributors' example -----------------------------------------------------------------------------------------


class Example(NamedTuple):
    """The contributors' guide's blocks of code, as files."""

    encoding: str
    yaml: str
    oracle: str
    entry_point: str


@pytest.fixture(scope="module")
def example() -> Example:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^( *)```(python|yaml|toml)\n(.*?)^\1```$", text, flags=re.S | re.M)
    assert [language for _, language, _ in blocks] == ["python", "yaml", "python", "toml"]
    return Example(*(textwrap.dedent(block) for _, _, block in blocks))


@pytest.fixture
def checkout(tmp_path: pathlib.Path, example: Example) -> pathlib.Path:
    """A copy of the repository with the example's three files in it, and `make readme` done."""
    root = tmp_path / "checkout"
    generated = shutil.ignore_patterns("__pycache__", ".*", "outputs", "dist", "build")
    for name in ("posbench", "configs", "tests", "scripts", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=generated)
    for name in ("README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    (root / "posbench/encodings/log_bias.py").write_text(example.encoding, encoding="utf-8")
    (root / "configs/encoding/log_bias.yaml").write_text(example.yaml, encoding="utf-8")
    (root / "tests/oracles/log_bias.py").write_text(example.oracle, encoding="utf-8")
    run("scripts/readme.py", folder=root, path=root)
    return root


def run(*arguments: str, folder: pathlib.Path, path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Python in a folder, with another on its path; fails the test where it fails."""
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.full
def test_the_contributors_example_passes_the_whole_contract_with_three_files(checkout: pathlib.Path) -> None:
    chosen = "log_bias or every_yaml or generated_one"
    files = ["test_encodings", "test_oracles", "test_model", "test_scoring", "test_show", "test_config", "test_docs"]
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, "--junitxml=done.xml"]
    run(*command, *(f"tests/{file}.py" for file in files), folder=checkout, path=checkout)
    cases = ElementTree.parse(checkout / "done.xml").iter("testcase")
    passed = {str(case.get("name")).partition("[")[0] for case in cases if case.find("skipped") is None}
    of_an_encoding = {
        name
        for name, test in vars(test_encodings).items()
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "parametrize" and mark.args[0] in ("case", "name")
    }
    assert passed >= of_an_encoding
    assert "test_the_readmes_table_of_encodings_is_the_generated_one" in passed
    assert "`log_bias`" in (checkout / "README.md").read_text(encoding="utf-8")


PACKAGE = ROOT / "examples" / "posbench-log-bias"


def test_the_example_package_is_what_the_contributors_guide_shows(example: Example) -> None:
    source = PACKAGE / "src" / "posbench_log_bias"
    written, shown = ((source / "log_bias.py").read_text(encoding="utf-8"), example.encoding)
    assert written.split('"""')[2] == shown.split('"""')[2]  # the source is named where it is a real one
    assert (source / "posbench_configs/encoding/log_bias.yaml").read_text(encoding="utf-8") == example.yaml
    declared = example.entry_point.replace("your_package", "posbench_log_bias")
    assert declared in (PACKAGE / "pyproject.toml").read_text(encoding="utf-8")
