"""Files of every kind that are read as text, right and wrong: their documents, or the
one line.
"""

import bz2
import contextlib
import csv
import gzip
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from test_data import config, write

from posbench.data import sources, text
from posbench.data.sources import local_files
from posbench.errors import UserError

DOCS = [f"document {i} with some words\nand a second line {'x' * i}" for i in range(24)]
ODD = [
    "007",
    "1.0",
    "True",
    "2024-01-01",
    "NA",
    "null",
    "None",
    "nan",
    'two,\n"lines"\r\n',
    "naïve 🙂",
    "a\x00b",
]
TEXT = "A text of one file. " * 400
MARK = b"\xef\xbb\xbf"


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(
        json.dumps({"n": i, "text": row}) + "\n" for i, row in enumerate(rows)
    ).encode()


def table(rows: Iterable[str], separator: str = ",") -> bytes:
    file = io.StringIO(newline="")
    csv.writer(file, delimiter=separator).writerows([["n", "text"], *enumerate(rows)])
    return file.getvalue().encode()


def parquet(rows: list[Any], column: str = "text") -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table({"n": list(range(len(rows))), column: rows}), file
    )
    return file.getvalue()


def zst(content: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


ROWS = DOCS + ODD
# File, content, and the documents.
READ: list[tuple[str, bytes, list[str]]] = [
    *((f"a{end}", TEXT.encode(), [TEXT]) for end in (".txt", ".md", ".py", ".TXT")),
    ("a.txt.gz", gzip.compress(TEXT.encode()), [TEXT]),
    ("a.md.bz2", bz2.compress(TEXT.encode()), [TEXT]),
    ("a.py.zst", zst(TEXT.encode()), [TEXT]),
    ("a[1].jsonl", lines(ROWS), ROWS),
    ("a.json", json.dumps([{"text": doc} for doc in ROWS]).encode(), ROWS),
    ("a.csv", table(ROWS), ROWS),
    ("a.tsv", table(ROWS, "\t"), ROWS),
    ("a.parquet", parquet(ROWS), ROWS),
    # lines, too
    ("a.json", lines(DOCS), DOCS),
    ("a.json", b'{"text": "alone"}', ["alone"]),
    ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    ("a.txt", MARK + TEXT.encode(), [TEXT]),
    ("a.json", MARK + b'[{"text": "a"}]', ["a"]),
    ("a.csv", MARK + b"text\na\nb\n", ["a", "b"]),
    ("a.txt", b"one\r\ntwo\rthree", ["one\r\ntwo\rthree"]),
    ("a.csv", b"text,n\none\x00two,1\n", ["one\x00two"]),
    ("a.jsonl", '{"text": "a\u2028b\u0085c"}\n'.encode(), ["a\u2028b\u0085c"]),
    # only the column of the text has to be there once
    ("a.jsonl", b'{"text": "a", "n": {"x": 1, "x": 2}, "n": 3}\n', ["a"]),
    # blank ones are left out
    (
        "a.jsonl",
        lines(DOCS) + b'{"text": ""}\n{"text": " \\n"}\n{"text": null}\n\n',
        DOCS,
    ),
    ("a.csv", table([*DOCS, "", " "]) + b"\n", DOCS),
    ("a.parquet", parquet([*DOCS, None, " "]), DOCS),
    ("a.csv", b"text\n" + b"x" * 300_000, ["x" * 300_000]),
    ("a.tsv", b'text\nsay "no"\n"say ""yes"""\n', ['say "no"', 'say "yes"']),
]


@pytest.mark.parametrize("number", range(len(READ)))
def test_documents_are_what_the_file_says(tmp_path, number):
    name, content, expected = READ[number]
    (tmp_path / name).write_bytes(content)
    assert documents_of(tmp_path / name) == {"": expected}


def documents_of(path: Path) -> dict[str, list[str]]:
    _, _, read = sources.locate(config(path=path))
    return {split: [*filter(str.strip, texts)] for split, texts in read().items()}


# File | content | the error, in one line.
WRONG: list[tuple[str, bytes, str]] = [
    ("a.txt", b"caf\xe9", r"a.txt': not UTF-8 text \(byte 0xe9\): iconv"),
    (
        "a.txt",
        TEXT.encode("utf-16-le"),
        "this looks like UTF-16, not UTF-8: iconv -f UTF-16 converts it",
    ),
    ("a.csv", "text\nnaïve\n".encode("utf-16-be"), "this looks like UTF-16"),
    (
        "a.csv.gz",
        gzip.compress(b"text\n" + b"a\n" * 9**5 + b"\xe2\x82", mtime=0),
        r"not UTF-8 text",
    ),
    (
        "a.jsonl",
        lines(DOCS) + b'{"text": 5}\n',
        "row 25: column 'text' holds int: expected text",
    ),
    ("a.jsonl", lines(DOCS) + b'{"n": 5}\n', "row 25: no column 'text', only n"),
    (
        "a.jsonl",
        b'{"texts": "a", "id": 1}\n',
        "row 1: no column 'text', only texts, id: give data.column=texts$",
    ),
    ("a.jsonl", b'{"text": "a\\ud800b"}\n', "row 1: .*surrogates"),
    (
        "a.csv",
        b"text\nbye\nHello, world\n",
        "row 2: there are not as many cells as columns: quote",
    ),
    ("a.parquet", parquet([["a"], ["b"]]), "column 'text' holds list: expected text"),
    (
        "a.parquet",
        parquet(DOCS, "body"),
        "no column 'text', only n, body: give data.column=NAME",
    ),
    ("a.csv", b"x" * 9**5 + b"\n", "row 1: no column 'text', only x{200}: give"),
    ("a.jsonl", b'["a", "b"]\n', "row 1: found str: expected an object with columns"),
    ("a.csv", b"text,text\na,b\n", "row 1: there are 2 columns 'text'"),
    ("a.jsonl", b'{"text": "a", "text": "b"}\n', "row 1: there are 2 columns 'text'"),
    ("a.json", b'[{"text": "a", "text": "b"}]', "there are 2 columns 'text'"),
    (
        "a.txt.gz",
        gzip.compress(TEXT.encode())[:60],
        "a.txt.gz': Truncated compressed stream",
    ),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_cannot_be_read_is_one_line(tmp_path, number):
    name, content, line = WRONG[number]
    (tmp_path / name).write_bytes(content)
    settings = config(path=tmp_path / name)
    with pytest.raises(UserError, match=line) as caught:
        text.load(settings, sources.locate(settings), tmp_path)
    assert "\n" not in str(caught.value)


# files, path, documents by split or the error
FILES: dict[str, tuple[dict[str, str], str, Any]] = {
    "a glob": ({"a.txt": "a", "b.txt": "b", "c.md": "c"}, "*.txt", {"": ["a", "b"]}),
    "folders in folders": (
        {"b/2/x [1].txt": "b", "a/y.txt": "a", ".git/d.txt": "d"},
        ".",
        {"": ["a", "b"]},
    ),
    "two kinds": (
        {"a.txt": "a", "b.jsonl": '{"text": "b"}', "c.txt": "c", "d.txt": ""},
        ".",
        {"": ["a", "b", "c"]},
    ),
    "reports beside": (
        {"a.csv": "text\na\n", "README.md": "how", "settings.json": "{}"},
        ".",
        {"": ["a"]},
    ),
    "code": (
        {"train.txt": "c", "test.txt": "b", "read.txt": "a", "go.txt": "d"},
        ".",
        {"": ["a", "b", "c", "d"]},
    ),
    "no training": ({"valid.txt": "a", "test.txt": "b"}, ".", {"": ["a", "b"]}),
    "a stray": (
        {"train.txt": "a", "valid.txt": "b", "c.txt": "c"},
        ".",
        "c.txt' names no split, but others do",
    ),
    "packed and not": (
        {"c.jsonl": '{"text": "a"}', "c.jsonl.gz": "a"},
        ".",
        r"c.jsonl' and '.*c.jsonl.gz' are one text by their names",
    ),
    "a slip": (
        {"dracula.txt": "a"},
        "dracula.text",
        "no file matches '.*dracula.text': did you mean 'dracula.txt'",
    ),
}
SPLITS = {"train": ["x"], "validation": ["y"], "test": ["z"]}
for names in (
    "train.txt valid.txt test.txt",
    "wiki.train.raw.txt wiki.valid.raw.txt wiki.test.raw.txt",
    "c4-train.00000-of-00002.txt c4-val.00000-of-00002.txt c4-eval.00000-of-00002.txt",
    "x/my-training/a.txt x/my-dev/a.txt x/Testing/a.txt",
    "train/test_1.txt valid/train_1.txt test/dev.txt",
):
    FILES[f"splits {names}"] = (
        dict(zip(names.split(), "xyz", strict=True)),
        ".",
        SPLITS,
    )
FILES["a glob over splits"] = (
    {"train/a.txt": "x", "valid/a.txt": "y", "test/a.txt": "z"},
    "*/a.txt",
    SPLITS,
)


@pytest.mark.parametrize("case", FILES)
def test_folders_and_globs_have_their_files_in_their_splits(tmp_path, case):
    files, path, expected = FILES[case]
    write(tmp_path / "data", files)
    with (
        pytest.raises(UserError, match=expected)
        if isinstance(expected, str)
        else contextlib.nullcontext()
    ):
        assert {
            split: sorted(texts)
            for split, texts in documents_of(tmp_path / "data" / path).items()
        } == expected


@pytest.mark.parametrize(
    ("link", "target"), [("loop", "."), ("beside.txt", "a.txt"), ("folder", "b")]
)
def test_a_file_that_links_lead_to_is_read_once(
    tmp_path: Path, link: str, target: str
) -> None:
    write(tmp_path, {"a.txt": "a", "b/c.txt": "c"})
    (tmp_path / link).symlink_to(target)
    assert list(local_files(config(path=tmp_path))[""]) == ["a.txt", "b/c.txt"]


ARTICLES = [
    "\n = First = \n\n Some words . \n\n = = Section = = \n\n More = words = \n\n",
    "\n = Second = \n\n Other words . \n = 3 = \n\n",
]


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_wikitext_by_line_or_whole_and_with_crlf_is_joined_to_articles(whole, ends):
    given = "".join(ARTICLES).replace("\n", ends)
    rows = (
        [given]
        if whole
        else ["" if row == ends else row for row in given.splitlines(keepends=True)]
    )
    articles = [
        article.strip("\n")
        for article in sources.join_articles(rows)
        if article.strip()
    ]
    assert articles == [article.strip("\n") for article in ARTICLES]
