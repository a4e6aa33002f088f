"""Files of every kind that are read as text, right and wrong: their documents, or the
one line.
"""

import csv
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

TEXT = "A text of one file. " * 400
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
    "a\u2028b\u0085c",
]
ROWS = DOCS + ODD
MARK = b"\xef\xbb\xbf"


def lines(rows: Iterable[Any]) -> bytes:
    made = ""
    for number, row in enumerate(rows):
        columns = {"n": number, "text": row}
        line = json.dumps(columns, ensure_ascii=False)
        made += line + "\n"
    return made.encode()


def table(rows: Iterable[str], separator: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=separator)
    writer.writerow(["n", "text"])
    writer.writerows(enumerate(rows))
    return file.getvalue().encode()


def parquet(columns: list[list[Any]], names: list[str]) -> bytes:
    file = io.BytesIO()
    made = pyarrow.table(columns, names)
    pyarrow.parquet.write_table(made, file)
    return file.getvalue()


def packed(content: bytes, kind: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, kind) as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def documents_of(path: Path) -> dict[str, list[str]]:
    """Return the documents of each split that are not blank."""
    located = sources.locate(config(path=path))
    documents = {}
    for split, texts in located.read().items():
        documents[split] = [document for document in texts if document.strip()]
    return documents


READ = [
    ("A.TXT.GZ", packed(TEXT.encode(), "gzip"), [TEXT]),
    ("a.md.bz2", packed(TEXT.encode(), "bz2"), [TEXT]),
    ("a.py.zst", packed(TEXT.encode(), "zstd"), [TEXT]),
    ("a.txt", MARK + TEXT.encode(), [TEXT]),
    ("a.txt", b"one\r\ntwo\rthree", ["one\r\ntwo\rthree"]),
    ("a[1].jsonl", lines(ROWS), ROWS),
    ("a.jsonl", b'[{"text": "a"},\n{"text": "b"}]', ["a", "b"]),
    ("a.json", lines(DOCS), DOCS),
    ("a.json", MARK + b'[{"text": "a"}]', ["a"]),
    ("a.csv", table(ROWS, ","), ROWS),
    ("a.csv", b"text\n" + b"x" * 300_000, ["x" * 300_000]),
    ("a.tsv", table(ROWS, "\t"), ROWS),
    ("a.parquet", parquet([[*ROWS]], ["text"]), ROWS),
    # blank ones are left out
    ("a.jsonl", b'{"text": ""}\n\n{"text": null}\n{"text": "a"}\n', ["a"]),
    # only the column of the text has to be there once
    ("a.jsonl", b'{"text": "a", "n": {"x": 1, "x": 2}, "n": 3}\n', ["a"]),
]


@pytest.mark.parametrize(("name", "content", "expected"), READ)
def test_documents_are_what_the_file_says(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    assert documents_of(path) == {"": expected}


INT = b'{"text": 5}\n'
LIST = b'["a", "b"]\n'
TWICE = b'{"text": "a", "text": "b"}'
FRENCH = "Déjà vu: où étaient les élèves, et ça va très bien. " * 20
RUSSIAN = "Привет, это текст на русском языке.\n" * 20
LATIN = pyarrow.array([b"d\xe9j\xe0"]).view("string")
WRONG = [
    ("a.parquet", parquet([LATIN], ["text"]), "row 1: 'utf-8' codec can't decode"),
    (
        "a.md.gz",
        packed(FRENCH.encode("cp1252"), "gzip"),
        "a.md.gz' is not UTF-8, .*: unpack it, convert .*/a.md > converted.md'",
    ),
    ("a.txt", FRENCH.encode("cp1252"), "probably cp1252: .*iconv -f CP1252 -t UTF-8"),
    ("a.csv", RUSSIAN.encode("cp1251"), "probably cp1251: .*iconv -f CP1251 .*/a.csv"),
    ("a.txt", bytes([255, 0, 129] * 9), "a.txt' is not UTF-8: .*iconv -f ENCODING"),
    ("a.txt", TEXT.encode("utf-16-le"), "this looks like UTF-16, not UTF-8: iconv -f"),
    ("a.csv", "text\nna\n".encode("utf-16-be"), "this looks like UTF-16"),
    ("a.txt.gz", packed(TEXT.encode(), "gzip")[:60], "a.txt.gz': Truncated compressed"),
    ("a.jsonl", lines(DOCS) + INT, "row 25: column 'text' holds int: expected text"),
    ("a.jsonl", b'["x"]\n["y"]\n', "row 1: Extra data.*: expected an object a line"),
    ("a.jsonl", LIST, "row 1: found str: expected an object with columns"),
    ("a.jsonl", b'{"texts": "a", "n": 1}', "only texts, n: give data.column=texts$"),
    ("a.parquet", parquet([["a"]], ["body"]), "only body: give data.column=NAME"),
    ("a.csv", b"x" * 300_000 + b"\n", "no column 'text', only x{200}: give"),
    ("a.jsonl", b'{"text": "a\\ud800b"}\n', "row 1: .*surrogates"),
    ("a.csv", b"text\nbye\nHello, world\n", "row 2: there are not as many cells"),
    ("a.csv", b"text,text\na,b\n", "row 1: there are 2 columns 'text'"),
    ("a.json", b"[" * 100_000, "a.json' row 1: "),
    ("a.jsonl", TWICE, "row 1: there are 2 columns 'text'"),
    ("a.json", b"[%b]" % TWICE, "there are 2 columns 'text'"),
    ("a.parquet", parquet([["a"], ["b"]], ["text", "text"]), "there are 2 columns"),
]


@pytest.mark.parametrize(("name", "content", "line"), WRONG)
def test_what_cannot_be_read_is_one_line(tmp_path, name, content, line):
    path = tmp_path / name
    path.write_bytes(content)
    settings = config(path=path)
    located = sources.locate(settings)
    with pytest.raises(UserError, match=line) as caught:
        text.load(settings, located, tmp_path)
    assert "\n" not in str(caught.value)


def of_files(folder: Path, files: dict[str, str], path: str) -> dict[str, list[str]]:
    """Write files, and return the documents of a path there, in alphabetical order."""
    write(folder, files)
    documents = documents_of(folder / path)
    return {split: sorted(texts) for split, texts in documents.items()}


WITHOUT_SPLITS = [
    # a glob
    ({"a.txt": "a", "b.txt": "b", "c.md": "c"}, "*.txt", ["a", "b"]),
    # folders in folders
    ({"b/2/x [1].txt": "b", "a/y.txt": "a", ".git/d.txt": "d"}, ".", ["a", "b"]),
    # two kinds
    ({"a.txt": "a", "b.jsonl": '{"text": "b"}', "c.txt": ""}, ".", ["a", "b"]),
    # reports beside
    ({"a.csv": "text\na\n", "README.md": "how", "set.json": "{}"}, ".", ["a"]),
    # code, and no training
    ({"train.py": "a", "test.py": "b", "c.py": "c", "d.py": "d"}, ".", [*"abcd"]),
    ({"valid.txt": "a", "test.txt": "b"}, ".", ["a", "b"]),
]


@pytest.mark.parametrize(("files", "path", "expected"), WITHOUT_SPLITS)
def test_files_whose_names_give_no_splits_are_one_text(tmp_path, files, path, expected):
    assert of_files(tmp_path / "data", files, path) == {"": expected}


PATHS_OF_SPLITS = [
    ("c4-train.00000-of-2.txt", "c4-val.00000-of-2.txt", "c4-eval.txt", "."),
    ("x/my-training/a.txt", "x/my-dev/a.txt", "x/Testing/a.txt", "."),
    ("train/test_1.txt", "valid/train_1.txt", "test/dev.txt", "."),
    ("train/a.txt", "valid/a.txt", "test/a.txt", "*/a.txt"),
]


@pytest.mark.parametrize(("train", "validation", "test", "path"), PATHS_OF_SPLITS)
def test_the_first_word_of_a_path_that_names_a_split_counts(
    tmp_path, train, validation, test, path
):
    files = {train: "x", validation: "y", test: "z"}
    splits = of_files(tmp_path / "data", files, path)
    assert splits == {"train": ["x"], "validation": ["y"], "test": ["z"]}


NO_TEXT = [
    ([], ".", r"data' \(expected .txt .jsonl"),
    (["train.txt", "valid.txt", "c.txt"], ".", "c.txt' names no split, but others"),
    (["c.jsonl", "c.jsonl.gz"], ".", r"c.jsonl' and '.*c.jsonl.gz' are one text"),
    (["dracula.txt"], "dracula.text", "no file matches .*: did you mean 'dracula"),
]


@pytest.mark.parametrize(("names", "path", "line"), NO_TEXT)
def test_files_that_are_no_text_are_refused(tmp_path, names, path, line):
    files = dict.fromkeys(names, "a")
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=line):
        of_files(tmp_path / "data", files, path)


@pytest.mark.parametrize(("path", "typed"), [("", "''"), (None, "null")])
def test_no_path_is_not_the_current_folder(path, typed):
    with pytest.raises(UserError, match=f"data.path is {typed}: expected a file"):
        sources.locate(config(path=path))


def test_splits_of_files_are_not_given_by_a_setting(tmp_path):
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    settings = config(path=tmp_path, splits={"train": "a", "test": "b"})
    with pytest.raises(UserError, match="since names of files say their"):
        sources.locate(settings)


def test_links_that_lead_back_are_not_followed(tmp_path):
    write(tmp_path, {"a/1.txt": "1", "b/2.txt": "2", "b/.hidden/3.txt": "3"})
    for link, target in [("x", "."), ("y", "."), ("a/b", "../b"), ("b/a", "../a")]:
        (tmp_path / link).symlink_to(target)
    splits = local_files(config(path=tmp_path))
    assert list(splits[""]) == ["a/1.txt", "b/2.txt"]


LINKS = [("loop", "."), ("beside.txt", "a.txt")]


@pytest.mark.parametrize(("link", "target"), LINKS)
def test_a_file_that_links_lead_to_is_read_once(tmp_path, link, target):
    write(tmp_path, {"a.txt": "a", "b/c.txt": "c"})
    (tmp_path / link).symlink_to(target)
    splits = local_files(config(path=tmp_path))
    assert list(splits[""]) == ["a.txt", "b/c.txt"]


ARTICLES = [
    "\n = First = \n\n Some words . \n\n = = Section = = \n\n More = words = \n\n",
    "\n = Second = \n\n Other words . \n = 3 = \n\n",
]


def joined(rows: list[str]) -> list[str]:
    """Return the articles of rows that are not blank, without the lines around."""
    articles = []
    for article in sources.join_articles(rows):
        stripped = article.strip("\n")
        if stripped:
            articles.append(stripped)
    return articles


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_wikitext_whole_or_by_line_is_joined_to_articles(ends):
    whole = "".join(ARTICLES).replace("\n", ends)
    by_line = whole.splitlines(keepends=True)
    without_ends = [row.removesuffix(ends) for row in by_line]
    articles = [article.strip("\n") for article in ARTICLES]
    assert joined([whole]) == articles
    assert joined(by_line) == articles
    assert joined(without_ends) == articles
