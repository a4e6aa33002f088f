"""How large and how dense the code may be, room by room, and the project's surface.

Tokens of code are counted: no comments, docstrings, blank lines or indentation. So
packing a line gains nothing, and a comment or an empty line costs nothing.
"""

import ast
import io
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import posbench
from posbench import encodings
from posbench.cli import app
from posbench.config.schema import keys

ROOT = Path(__file__).parents[1]
# Tokens of code, and tokens per statement, of a room; "files" are the modules beside
# the rooms. A ceiling may only fall.
CEILINGS = {
    "api": (2_255, 11.4),
    "bench": (1_423, 11.6),
    "claims": (4_002, 10.2),
    "cli": (2_513, 13.6),
    "config": (7_776, 10.3),
    "data": (9_501, 11.3),
    "evaluation": (11_982, 11.7),
    "files": (5_892, 10.7),
    "huggingface": (7_911, 13.2),
    "launch": (5_540, 11.1),
    "model": (7_839, 12.4),
    "reports": (13_247, 12.6),
    "results": (9_411, 11.2),
    "rope": (6_083, 11.5),
    "run": (5_659, 11.4),
    "scripts": (6_745, 11.3),
    "show": (6_500, 12.4),
    "tasks": (4_272, 12.0),
    "terminal": (1_897, 10.8),
    "tests": (111_466, 15.0),
    "tracking": (2_306, 10.3),
    "training": (5_004, 10.5),
}
# The same for each scheme: an encoding that is added brings the room that it needs.
PER_SCHEME = {"encodings": (463, 13.2), "oracles": (287, 15.8)}
WORDS = {"docs": 24_000, "README": 1_210}
COMMANDS = """bench evaluate export list prepare properties report reproduce rope runs
    sample show sweep sync train"""
PUBLIC = """Encoding LoadedRun attention attention_logits attention_output
    build_encoding encodings evaluate load plot register report runs sweep train"""
SECTIONS = {
    "encoding": 4,
    "model": 12,
    "data": 16,
    "training": 13,
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


def measure(path: Path) -> Counter[str]:
    """Return how many tokens of code and how many statements a file has."""
    source = path.read_text(encoding="utf-8")
    docstrings = set[int]()
    statements = list[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            statements.append(node.lineno)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            documented = ast.get_docstring(node) is not None
            for text in node.body[:documented]:
                docstrings.update(range(text.lineno, text.end_lineno + 1))

    counts = Counter(statements=sum(line not in docstrings for line in statements))
    depth = 0  # of f-strings, which are one token before Python 3.12
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in UNCOUNTED or token.start[0] in docstrings:
            continue
        name = tokenize.tok_name[token.type]
        counts["tokens"] += depth == 0
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return counts


def room_of(path: Path) -> str:
    folder, *parts = path.relative_to(ROOT).parts
    if parts[0] == "oracles":
        return "oracles"
    if folder != "posbench":
        return folder
    room = parts[0].removesuffix(".py")
    return room if len(parts) > 1 or room in CEILINGS else "files"


@pytest.fixture(scope="module")
def rooms() -> dict[str, Counter[str]]:
    counts = defaultdict[str, Counter[str]](Counter)
    for folder in ("posbench", "tests", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            counts[room_of(path)].update(measure(path))
    return counts


@pytest.fixture(scope="module")
def ceilings() -> dict[str, tuple[int, float]]:
    schemes = len(encodings.names())
    of_schemes = {
        room: (tokens * schemes, density)
        for room, (tokens, density) in PER_SCHEME.items()
    }
    return CEILINGS | of_schemes


def test_no_room_has_more_tokens_than_its_ceiling(rooms, ceilings) -> None:
    tokens = {room: counts["tokens"] for room, counts in rooms.items()}
    over = {room: n for room, n in tokens.items() if n > ceilings[room][0]}
    assert over == {}


def test_no_room_is_denser_than_its_ceiling(rooms, ceilings) -> None:
    densities = {
        room: counts["tokens"] / counts["statements"] for room, counts in rooms.items()
    }
    over = {room: n for room, n in densities.items() if n > ceilings[room][1]}
    assert over == {}


def test_pages_have_at_most_so_many_words() -> None:
    pages = {"docs": [*(ROOT / "docs").glob("*.md")], "README": [ROOT / "README.md"]}
    words = {
        name: sum(len(page.read_text(encoding="utf-8").split()) for page in files)
        for name, files in pages.items()
    }
    assert {name: n for name, n in words.items() if n > WORDS[name]} == {}


def test_commands_public_names_and_configuration_keys_are_these() -> None:
    names = [
        command.name or command.callback.__name__ for command in app.registered_commands
    ]
    assert sorted(names) == COMMANDS.split()
    assert sorted(posbench.__all__) == PUBLIC.split()
    sections = [key.partition(".")[0] for key in keys() if "." in key]
    assert Counter(sections) == SECTIONS
