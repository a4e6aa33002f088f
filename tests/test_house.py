"""How large and how dense the code may be, room by room, and the project's surface.

Tokens of code are counted: no comments, docstrings, blank lines or indentation. So
packing a line gains nothing, and a comment or an empty line costs nothing.
"""

import ast
import io
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

import posbench
from posbench import encodings
from posbench.cli import app
from posbench.config.schema import keys

ROOT = Path(__file__).parents[1]
# Tokens of code, and tokens per statement, of a room; "files" are the modules beside
# the rooms. A ceiling rises only in a commit that says why.
CEILINGS = {
    "api": (2_223, 11.3),
    "bench": (1_407, 10.6),
    "claims": (4_404, 9.6),
    "cli": (2_623, 11.9),
    "config": (8_726, 9.5),
    "data": (10_240, 11.2),
    "evaluation": (13_641, 11.2),
    "files": (6_639, 10.2),
    "huggingface": (7_884, 10.4),
    "launch": (6_586, 9.2),
    "model": (8_050, 12.0),
    "reports": (15_557, 10.7),
    "results": (9_496, 11.1),
    "rope": (7_644, 10.4),
    "run": (6_130, 9.7),
    "scripts": (8_162, 11.0),
    "show": (7_650, 12.0),
    "tasks": (4_256, 11.9),
    "terminal": (1_963, 9.1),
    "tests": (137_503, 11.2),
    "tracking": (2_338, 10.0),
    "training": (5_236, 10.2),
}
# The same for each scheme: an encoding that is added brings the room that it needs.
PER_SCHEME = {"encodings": (481, 13.0), "oracles": (294, 11.2)}
WORDS = {"docs": 25_000, "README": 1_000}
COMMANDS = """bench evaluate export list prepare properties report reproduce rope runs
    sample show sweep sync train"""
PUBLIC = """Encoding LoadedRun attention attention_logits attention_output
    build_encoding encodings evaluate load plot register report runs sweep train"""
SECTIONS = {
    "encoding": 4,
    "model": 12,
    "data": 16,
    "training": 14,
    "evaluation": 15,
    "tracking": 5,
    "runtime": 11,
}
UNCOUNTED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    lines = set[int]()
    for node in ast.walk(tree):
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if is_documented and ast.get_docstring(node) is not None:
            text = node.body[0]
            lines.update(range(text.lineno, text.end_lineno + 1))
    return lines


def count_tokens(source: str, docstrings: set[int]) -> int:
    count = 0
    depth = 0  # of f-strings, which are one token before Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in UNCOUNTED or token.start[0] in docstrings:
            continue
        name = tokenize.tok_name[token.type]
        if depth == 0:
            count += 1
        if name == "FSTRING_START":
            depth += 1
        if name == "FSTRING_END":
            depth -= 1
    return count


def measure(path: Path) -> Counter[str]:
    """Return how many tokens of code and how many statements a file has."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings = lines_of_docstrings(tree)
    statements = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno not in docstrings:
            statements += 1
    return Counter(tokens=count_tokens(source, docstrings), statements=statements)


def room_of(path: Path) -> str:
    folder, first, *deeper = path.relative_to(ROOT).parts
    if first == "oracles":
        return "oracles"
    if folder != "posbench":
        return folder
    room = first.removesuffix(".py")
    if deeper or room in CEILINGS:
        return room
    return "files"


@pytest.fixture(scope="module")
def rooms():
    counts = defaultdict[str, Counter[str]](Counter)
    for folder in ("posbench", "tests", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            counts[room_of(path)].update(measure(path))
    return counts


@pytest.fixture(scope="module")
def ceilings():
    ceilings = dict(CEILINGS)
    schemes = len(encodings.names())
    for room, (tokens, density) in PER_SCHEME.items():
        ceilings[room] = (tokens * schemes, density)
    return ceilings


def test_no_room_has_more_tokens_than_its_ceiling(rooms, ceilings):
    over = {}
    for room, counts in rooms.items():
        most, _ = ceilings[room]
        if counts["tokens"] > most:
            over[room] = counts["tokens"]
    assert over == {}


def test_no_room_is_denser_than_its_ceiling(rooms, ceilings):
    over = {}
    for room, counts in rooms.items():
        _, most = ceilings[room]
        density = counts["tokens"] / counts["statements"]
        if density > most:
            over[room] = density
    assert over == {}


def words_of(pages: Iterable[Path]) -> int:
    count = 0
    for page in pages:
        text = page.read_text(encoding="utf-8")
        count += len(text.split())
    return count


def test_pages_have_at_most_so_many_words():
    pages = (ROOT / "docs").glob("*.md")
    assert words_of(pages) <= WORDS["docs"]
    assert words_of([ROOT / "README.md"]) <= WORDS["README"]


def test_commands_are_these():
    commands = app.registered_commands
    names = [command.name or command.callback.__name__ for command in commands]
    assert sorted(names) == COMMANDS.split()


def test_public_names_are_these():
    assert sorted(posbench.__all__) == PUBLIC.split()


def test_configuration_keys_are_so_many():
    sections = [key.partition(".")[0] for key in keys() if "." in key]
    assert Counter(sections) == SECTIONS
