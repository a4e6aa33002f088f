"""Text, splits, tokenizers, the token cache and batches. No network: the hub is tested on local copies of its data."""

import ast
import bz2
import csv
import dataclasses
import errno
import fcntl
import gzip
import http.server
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import support
import tokenizers
import torch
import yaml
from disks import small_disk

from posbench import files
from posbench.config.schema import DataConfig
from posbench.data import batches, corpus, hub, reading, texts, tokenizer, tokens
from posbench.errors import RunFailed, Stopped, UserError
from posbench.terminal import console, signals

CONFIGS = Path(__file__).parents[1] / "configs" / "data"
STRANGE = (
    "naïve café\r\nпривет мир 你好 🙂👩‍👩‍👧 \u2028 \x00 e\u0301 \ufeff  two  spaces\n\n\tend 123 <|endoftext|> it's"  # noqa: RUF001
)


def config(name: str = "text", **changes: Any) -> DataConfig:
    values: dict[str, Any] = {}
    for file in ("_base", name):
        values |= yaml.safe_load((CONFIGS / f"{file}.yaml").read_text(encoding="utf-8"))
    del values["defaults"]
    values["test_pieces"] = None  # pieces then join to the original; tests of the default give it
    if changes.get("path") is not None:
        changes["path"] = str(changes["path"])
    return DataConfig(**{**values, **changes})


def load(configuration: DataConfig, folder: Path) -> corpus.Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".scratch-", dir=folder))  # a folder is of one text
    return corpus.load(configuration, corpus.locate(configuration, folder / "revisions"), scratch)


def write(folder: Path, documents: dict[str, str]) -> Path:
    for name, text in documents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode())
    return folder


def write_parquet(file: Path, rows: Sequence[str | None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())}), file)


@pytest.fixture
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache for `datasets`."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "huggingface"))


PREPARE = """
import json, logging, pathlib, sys
from posbench.config.schema import DataConfig
from posbench.data import tokens
logging.basicConfig(level=logging.INFO)
try:
    made = tokens.prepare(DataConfig(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))
    print(json.dumps(made.record), "datasets" in sys.modules, "pyarrow" in sys.modules, sep="\\n")
except Exception as error:
    print(type(error).__name__, error)
"""


def preparing(settings: DataConfig, cache: Path, **environment: str) -> "subprocess.Popen[str]":
    """A process that prepares tokens and prints their record and which libraries it imported, or its error."""
    command = [sys.executable, "-c", PREPARE, json.dumps(dataclasses.asdict(settings)), str(cache)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=pipe, stderr=pipe, text=True)


def numbered(n: int) -> dict[str, str]:
    return {f"{i:03}.txt": f"document number {i} says {i * i}\n" * 3 for i in range(n)}


# --- configurations


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_data_config_names_what_is_different_from_the_base_each_key_explained(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    base = yaml.safe_load((CONFIGS / "_base.yaml").read_text(encoding="utf-8"))
    assert list(base) == [field.name for field in dataclasses.fields(DataConfig)]
    if file.stem != "_base":
        assert values.pop("defaults") == ["_base"]
        assert set(values) <= set(base) and values["name"] == file.stem
        same = {key for key in values if values[key] == base[key]}
        assert same <= ({"path"} if file.stem == "text" else set()), "repeated"
    lines = text.splitlines()
    for key in values:
        (number,) = (i for i, line in enumerate(lines) if line.startswith(f"{key}:"))
        assert "#" in lines[number] or lines[number - 1].startswith("#"), key


# --- the built-in corpus


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> corpus.Corpus:
    return load(config("builtin"), tmp_path_factory.mktemp("builtin"))


@pytest.mark.full
def test_builtin_corpus_is_the_same_on_every_load(builtin: corpus.Corpus, tmp_path: Path) -> None:
    again = load(config("builtin"), tmp_path)
    assert again.record == builtin.record
    assert again.record["split"] == "document"
    assert len(again.record["sha256"]) == 64


@pytest.mark.full
def test_builtin_splits_share_no_document_and_no_passage_of_64_words(builtin: corpus.Corpus) -> None:
    def passages(split: str) -> Iterator[str]:
        for text in builtin.documents[split]:
            words = text.split()
            yield from (" ".join(words[i : i + 64]) for i in range(len(words) - 63))

    held_out = {*passages("validation"), *passages("test")}
    assert len(held_out) > 10_000
    assert held_out.isdisjoint(passages("train"))
    texts = [set(builtin.documents[split]) for split in corpus.SPLITS]
    assert len(set.union(*texts)) == sum(map(len, texts))


def test_builtin_corpus_has_text_enough_and_long_test_documents(builtin: corpus.Corpus) -> None:
    assert sum(map(len, builtin.documents["train"])) > 4_000_000
    # A document of 1,100 BPE tokens has about 3.2 bytes per token.
    assert sum(len(text) > 3.5 * 1100 for text in builtin.documents["test"]) >= 45


@pytest.mark.full
def test_builtin_modules_are_not_mostly_tables() -> None:
    """What follows in a table its own lines tell: html.entities alone was once a sixth of all headline targets."""

    def entries(body: list[ast.stmt]) -> Iterator[int]:
        for statement in body:
            for nested in ("body", "orelse"):
                if isinstance(statement, ast.ClassDef | ast.If | ast.Try):
                    yield from entries(getattr(statement, nested, []))
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr) and value is not None:
                kinds = (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.UnaryOp, ast.BinOp, ast.Call)
                parts = [node for node in ast.walk(value) if isinstance(node, ast.expr | ast.comprehension)]
                docstring = isinstance(value, ast.Constant) and isinstance(statement, ast.Expr)
                if not docstring and all(isinstance(node, (*kinds, ast.Name)) for node in parts):
                    yield from range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)

    shares = {}
    for name, file in reading.builtin_modules().items():
        text = file.read_text(encoding="utf-8")
        filled = {number for number, line in enumerate(text.splitlines(), start=1) if line.strip()}
        shares[name] = len(filled & set(entries(ast.parse(text).body))) / len(filled)
    assert max(shares.values()) > 0.3  # so it finds tables
    assert not {name: share for name, share in shares.items() if share > 0.5}


def test_builtin_modules_are_listed_once_in_order_without_code_tables_or_tests() -> None:
    lines = Path(reading.__file__).with_name("builtin.txt").read_text(encoding="utf-8").splitlines()
    names = " ".join(line for line in lines if not line.startswith("#")).split()
    assert names == sorted(set(names))
    assert not [n for n in names if n.startswith(("encodings", "pydoc_data", "test", "idlelib", "lib2to3"))]


def test_python_without_its_source_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"standard library's source is not in .*python311.zip.*data=text"):
        load(config("builtin"), tmp_path)


# --- splits of local text


def test_few_documents_are_cut_so_that_the_pieces_join_to_the_original(tmp_path: Path) -> None:
    texts = {"a.txt": "αβγ🙂\r\n" * 50, "b.txt": "x" * 999}
    result = load(config(path=write(tmp_path / "books", texts)), tmp_path)
    assert result.record["split"] == "contiguous"
    joined = ["".join(pieces) for pieces in zip(*(result.documents[s] for s in corpus.SPLITS), strict=True)]
    assert joined == list(texts.values())
    assert len(result.documents["validation"][1]) == len(result.documents["test"][1]) == 49


def test_many_documents_are_split_whole_and_each_goes_to_one_split(tmp_path: Path) -> None:
    texts = numbered(60)
    result = load(config(path=write(tmp_path / "many", texts)), tmp_path)
    assert result.record["split"] == "document"
    assert result.record["documents"] == {"train": 54, "validation": 3, "test": 3}
    assert sorted(t for s in corpus.SPLITS for t in result.documents[s]) == sorted(texts.values())


def test_an_ordinary_folder_has_thirty_test_documents_and_the_same_validation(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", prose(151, n_words=80))
    before = load(config(path=folder), tmp_path)
    grown = load(config(path=folder, test_pieces=30), tmp_path)
    assert (before.record["documents"]["test"], grown.record["documents"]) == (
        7, {"train": 113, "validation": 8, "test": 30},
    )  # fmt: skip
    assert list(grown.documents["validation"]) == list(before.documents["validation"])
    assert set(before.documents["test"]) < set(grown.documents["test"])


@pytest.mark.sample(3)
@pytest.mark.parametrize(("lengths", "tested"), [([90] * 60, 15), ([10] * 40 + [500] * 20, None), ([90] * 700, 35)])
def test_test_documents_end_where_training_would_have_less_than_seventy_percent_of_the_text(
    tmp_path: Path, lengths: list[int], tested: int | None
) -> None:
    texts = {f"{i:03}.txt": f"{i:04}" + "x" * (n - 4) for i, n in enumerate(lengths)}
    made = load(config(path=write(tmp_path / "many", texts), test_pieces=30), tmp_path)
    left = sum(map(len, made.documents["train"])) / sum(lengths)
    assert left >= 0.7 and len(made.documents["test"]) >= 3
    assert tested in (None, len(made.documents["test"]))


@pytest.mark.parametrize(("test_pieces", "tested"), [(None, 8), (30, 32)])
def test_equal_documents_stay_together(tmp_path: Path, test_pieces: int | None, tested: int) -> None:
    texts = {f"{i:03}.txt": f"text {i // 4:03}" for i in range(160)}  # each text four times
    documents = load(config(path=write(tmp_path / "copies", texts), test_pieces=test_pieces), tmp_path).documents
    sets = [set(documents[s]) for s in corpus.SPLITS]
    assert all(sets) and len(documents["test"]) == tested
    assert len(set.union(*sets)) == sum(map(len, sets)) == 40


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", [[1_500_000], [400_000], [3], [900], [40_000], [300_000, 90_000, 20_000]])
def test_stretches_are_apart_and_join_with_the_rest_to_the_text(tmp_path: Path, sizes: list[int]) -> None:
    texts = {f"{i}.txt": "".join(chr(33 + (i + 7 * k) % 90) for k in range(n)) for i, n in enumerate(sizes)}
    folder = write(tmp_path / "text", texts)
    made = load(config(path=folder, test_pieces=30), tmp_path)
    assert made.record["split"] == "stretches"
    own = {split: list(made.documents[split]) for split in corpus.SPLITS}
    assert sum(len(piece) for pieces in own.values() for piece in pieces) == sum(sizes)
    assert sum(map(len, own["train"])) >= 0.7 * sum(sizes)
    assert tokens.prepare(config(path=folder, test_pieces=30, tokenizer="bytes"), tmp_path).test.sources is not None
    counts = made.record["stretches"]["test"]
    assert len(counts) == len(sizes) and sum(counts) == len(own["test"]) >= 8
    rest = {split: iter(pieces) for split, pieces in own.items()}
    for text, number in zip(texts.values(), counts, strict=True):  # training text ends at each hole
        holes = ["".join(next(rest[split]) for split in corpus.SPLITS) for _ in range(number)]
        assert "".join(holes) + next(rest["train"]) == text
    if len(sizes) == 1 and sizes[0] >= 400_000:
        assert (len(own["test"]), len(own["test"][0])) == {1_500_000: (30, 8192), 400_000: (12, 8333)}[sizes[0]]


def test_tokens_know_the_text_that_a_stretch_was_cut_from_and_have_a_key_of_their_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "text", {"a.txt": "one two three " * 3000, "b.txt": "four five " * 900})
    settings = config(path=folder, tokenizer="bytes", test_pieces=12)
    for _ in range(2):  # made, and found
        made = tokens.prepare(settings, tmp_path / "cache")
        assert made.test.sources is not None and made.train.sources is None
        assert made.record["stretches"]["test"] == np.bincount(made.test.sources).tolist()
        assert len(made.test.starts) == len(made.test.sources) + 1
    before = tokens.prepare(dataclasses.replace(settings, test_pieces=None), tmp_path / "cache")
    assert before.record["split"] == "contiguous" and before.test.sources is None


def prose(n: int, n_words: int = 200) -> dict[str, str]:
    """Documents that share no passage."""
    return {f"{i:03}.txt": " ".join(f"{word}of{i}" for word in range(n_words)) for i in range(n)}


def test_training_documents_with_a_held_out_passage_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clean = load(config(path=write(tmp_path / "many", prose(60))), tmp_path)
    assert clean.record["copies"] == {
        "passage_words": 64, "shared": 0.0, "dropped_documents": 0, "dropped_text": 0.0,
        "held_out_checked": 1.0, "train_checked": 1.0,
    }  # fmt: skip
    assert "held-out" not in caplog.text
    quoted = [" \n".join(clean.documents[split][0].split()[80:180]) for split in ("validation", "test")]
    write(tmp_path / "many", {f"quoting{i}.txt": f"{i} says: {quote}" for i, quote in enumerate(quoted)})
    copied = load(config(path=tmp_path / "many"), tmp_path)
    assert {split: list(copied.documents[split]) for split in corpus.SPLITS} == {
        split: list(clean.documents[split]) for split in corpus.SPLITS
    }
    assert copied.record["sha256"] == clean.record["sha256"]
    shared = copied.record["copies"]
    assert shared["shared"] == pytest.approx(2 * 37 / (6 * 137), abs=1e-6)
    assert shared["dropped_documents"] == 2
    size = sum(len(f"0 says: {quote}") for quote in quoted)
    assert shared["dropped_text"] == pytest.approx(size / (size + sum(map(len, clean.documents["train"]))), abs=1e-6)
    assert "left out 2 of 56 training documents (2.2 % of the text) that share passages of 64 words" in caplog.text
    assert {record.levelname for record in caplog.records if "left out" in record.message} == {"INFO"}


def test_a_licence_in_every_document_is_one_line_since_nothing_would_be_left(tmp_path: Path) -> None:
    licence = " ".join(f"term{i}" for i in range(70))
    folder = write(tmp_path / "many", {name: f"{text} {licence}" for name, text in prose(40).items()})
    with pytest.raises(UserError, match=r"data .text.: every training document shares passages of 64 words .* licence"):
        load(config(path=folder), tmp_path)


@pytest.mark.parametrize("split", ["given", "contiguous"])
def test_training_text_that_is_left_alone_and_holds_held_out_passages_is_a_warning(
    tmp_path: Path, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    novel, other = prose(2, n_words=4000).values()
    words = novel.split()
    for n_shared, warned in ((0, False), (65, False), (100, True)):
        caplog.clear()
        if split == "given":
            held_out = " ".join(other.split()[:400] + words[200 : 200 + n_shared])
            texts = {"train.txt": novel, "valid.txt": "of its own", "test.txt": held_out}
        else:
            texts = {"one.txt": " ".join(words[:3900] + words[200 : 200 + n_shared] + words[3900:])}
        folder = write(tmp_path / f"{n_shared}", texts)
        result = load(config(path=folder), tmp_path)
        assert result.record["split"] == split
        joined = "".join(result.documents["train"])
        assert joined == (novel if split == "given" else texts["one.txt"][: len(joined)])
        shared = result.record["copies"]
        assert (shared["dropped_documents"], shared["dropped_text"]) == (0, 0.0)
        assert (shared["shared"] > 0) == (n_shared > 0) and (shared["shared"] > 0.01) == warned
        lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
        percent = f"{100 * shared['shared']:.1f} %"
        told = f"data 'text': {percent} of the held-out passages of 64 words stand in the training text, too"
        assert lines == ([told] if warned else [])


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.txt", "wiki.valid.txt", "wiki.test.txt"),
        ("train/a.txt", "dev/a.txt", "test/a.txt"),
        ("train-00000-of-00001.txt", "validation-00000-of-00001.txt", "test-00000-of-00001.txt"),
        ("train.txt.gz", "valid.txt.gz", "test.txt.gz"),
    ],
)
def test_given_splits_are_kept(tmp_path: Path, names: tuple[str, str, str]) -> None:
    folder = write(tmp_path / "given", dict(zip(names, ("to learn", "to check", "to test"), strict=True)))
    for file in folder.glob("*.gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    result = load(config(path=folder), tmp_path)
    assert {s: list(result.documents[s]) for s in corpus.SPLITS} == {
        "train": ["to learn"],
        "validation": ["to check"],
        "test": ["to test"],
    }
    assert result.record["split"] == "given"


def test_a_missing_test_split_is_half_of_validation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = write(tmp_path / "given", {"train.txt": "to learn", "valid.txt": "0123456789"})
    documents = load(config(path=folder), tmp_path).documents
    assert [list(documents[s]) for s in corpus.SPLITS] == [["to learn"], ["01234"], ["56789"]]
    assert "has no test split" in caplog.text


def test_held_out_files_without_training_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "given", {"valid.txt": "a", "test.txt": "b"})
    with pytest.raises(UserError, match="has test and validation files but no train file"):
        load(config(path=folder), tmp_path)


def test_a_file_beside_given_splits_is_refused_before_test_text_is_trained_on(tmp_path: Path) -> None:
    texts = {"train/a.txt": "to learn", "valid/b.txt": "to check", "test/c.txt": "to test"}
    folder = write(tmp_path / "given", texts | {"extra.txt": "of none"})
    with pytest.raises(UserError, match=r"given/extra.txt' is of no split, while 3 of 4 files have names of"):
        load(config(path=folder), tmp_path)
    documents = load(config(path=folder / "*" / "*.txt"), tmp_path).documents  # the way out that the docs give
    assert [[*documents[split]] for split in corpus.SPLITS] == [[text] for text in texts.values()]


@pytest.mark.parametrize(
    "names", [["emma", "the-great-test"], ["test/a", "test/b", "emma"], ["train", "test", "read", "write"]]
)
def test_a_title_that_holds_a_split_word_is_no_given_split(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    folder = write(tmp_path / "books", {f"{name}.txt": name[-1] * 100 for name in names})
    assert load(config(path=folder), tmp_path).record["split"] == "contiguous"
    assert "have names of splits (t" in caplog.text and "all are split anew" in caplog.text


def test_jsonl_parquet_and_globs_hold_a_document_per_row(tmp_path: Path) -> None:
    rows = [f"row {i} naïve" for i in range(25)]
    lines = [json.dumps({"text": row, "id": 1}) for row in rows]
    write(tmp_path / "data", {"rows.jsonl": "\n".join(lines) + "\n\n"})
    write_parquet(tmp_path / "data" / "rows.parquet", [*rows, None, "  "])
    for name in ("rows.jsonl", "rows.parquet", "*.parquet"):
        result = load(config(path=tmp_path / "data" / name), tmp_path)
        assert sorted(t for s in corpus.SPLITS for t in result.documents[s]) == sorted(rows)
    with pytest.raises(UserError, match="has no column 'txt': it has text: did you mean 'text'"):
        load(config(path=tmp_path / "data" / "rows.parquet", column="txt"), tmp_path)


def test_a_glob_over_folders_named_by_split_keeps_their_splits(tmp_path: Path) -> None:
    texts = {"train": "red " * 40, "valid": "green " * 40, "test": "blue " * 40}
    for split, text in texts.items():
        write(tmp_path / "data" / split, {"one.txt": text})
    found = load(config(path=tmp_path / "data" / "*" / "*.txt"), tmp_path).documents
    assert [[*found[split]] for split in ("train", "validation", "test")] == [[text] for text in texts.values()]


def packed(content: bytes, packing: str) -> bytes:
    if packing == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return bytes(sink.getvalue())
    return {".gz": gzip.compress, ".bz2": bz2.compress, "": bytes}[packing](content)


ODD = ["007", "2020-01-01", "NA", "null", 'two,\n"lines"', "naïve 🙂", *(f"row {i}" for i in range(20))]


def in_form(kind: str) -> bytes:
    """The odd texts as the rows of a table, beside columns of their own."""
    if kind in (".csv", ".tsv"):
        text = io.StringIO()
        mixed = [["x" if i % 2 else i, texts] for i, texts in enumerate(ODD)]
        csv.writer(text, delimiter="," if kind == ".csv" else "\t").writerows([["id", "text"], *mixed, ["", ""]])
        return text.getvalue().encode()
    rows = [{"id": i, "more": {"a": i}, "text": text} for i, text in enumerate(ODD)]
    if kind == ".json":
        return json.dumps(rows).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("packing", ["", ".gz", ".zst", ".bz2"])
@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl"])
def test_tables_hold_a_document_per_row_as_it_is_written_plain_or_packed(
    tmp_path: Path, kind: str, packing: str
) -> None:
    file = tmp_path / f"a[1]{kind}{packing}"  # brackets: a name, no pattern
    file.write_bytes(packed(in_form(kind), packing))
    result = load(config(path=file), tmp_path)
    assert sorted(text for split in corpus.SPLITS for text in result.documents[split]) == sorted(ODD)


@pytest.mark.parametrize(
    "name", ["a.txt", "a.md", "a.py", "a.rst", "a.tex", "A.TXT", "a.txt.gz", "a.md.zst", "a.py.bz2"]
)
def test_prose_and_code_are_a_document_per_file_plain_or_packed(tmp_path: Path, name: str) -> None:
    packing = Path(name).suffix if Path(name).suffix in reading.PACKED else ""
    (tmp_path / name).write_bytes(packed((STRANGE * 5).encode(), packing))
    result = load(config(path=tmp_path / name), tmp_path)
    assert "".join(result.documents[split][0] for split in corpus.SPLITS) == STRANGE * 5


def test_a_folder_is_what_it_was_before_more_kinds_were_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = write(tmp_path / "many", numbered(25))
    digest = load(config(path=folder), tmp_path).record["sha256"]
    assert digest == "14423c111dfa26c2b1cbd4ef29f743081d59c0008a1ac890c74ebe284beb387b"
    assert "are read" not in caplog.text
    write(folder, {"README.md": "how", "rows.csv": "text\na\n", "settings.json": "{}", "more.txt.gz": "x"})
    assert load(config(path=folder), tmp_path).record["sha256"] == digest
    assert f"of '{folder}' the .txt files are read, not its .csv, .json, .md, .txt: a glob" in caplog.text
    assert [file.name for file in reading.find(str(write(tmp_path / "code", {"a.py": "a", "b.json": "{}"})))] == [
        "a.py"
    ]
    rows = write(tmp_path / "rows", {"README.md": "how", "rows.csv": "text\na\n"})
    assert [file.name for file in reading.find(str(rows))] == ["rows.csv"]


def saved_to_disk(folder: Path, rows: int = 30) -> Path:
    """What `datasets` writes of a data set that was filtered, with a cache of its own beside the data."""
    import datasets

    texts = [f"text number {i} of {rows}" for i in range(rows * 2)]
    made = datasets.Dataset.from_dict({"text": texts, "id": list(range(rows * 2))}).select(range(0, rows * 2, 2))
    made.save_to_disk(str(folder))
    shutil.copy(folder / "data-00000-of-00001.arrow", folder / "cache-0123456789abcdef.arrow")
    return folder


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("key", ["path", "dataset"])
def test_a_folder_of_save_to_disk_is_read_by_either_key(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    name = {"path": "text", "dataset": "hub"}[key]
    one = load(config(name, **{key: str(saved_to_disk(tmp_path / "one"))}), tmp_path)
    assert one.record["split"] == "document" and sum(one.record["documents"].values()) == 30
    saved_to_disk(tmp_path / "all/train")
    saved_to_disk(tmp_path / "all/test", 20)
    (tmp_path / "all/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    given = load(config(name, **{key: str(tmp_path / "all")}), tmp_path)
    assert given.record["split"] == "given"
    assert given.record["documents"] == {"train": 30, "validation": 10, "test": 10}
    assert "from the hub" not in caplog.text


def test_max_documents_is_obeyed(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", numbered(60))
    assert sum(load(config(path=folder, max_documents=30), tmp_path).record["documents"].values()) == 30


# --- wrong text ends in one clear line


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "no text in '.*empty.txt'"),
        ("blank.txt", b" \n\n\t\n", "no text in '.*blank.txt'"),
        ("latin.txt", b"caf\xe9", r"latin.txt' is not UTF-8 text: byte 3 is 0xe9"),
        ("mark.txt", b"\xef\xbb\xbfab\xff", r"mark.txt' is not UTF-8 text: byte 5 is 0xff"),
        ("late.jsonl", b'{"text": "ok"}\n{"text": "\xff"}\n', r"late.jsonl' is not UTF-8 text: byte 25 is 0xff"),
        (
            "column.jsonl",
            b'{"texts": "a", "id": 1}\n',
            "line 1 has no column 'text': it has texts, id: did you mean 'te",
        ),
        ("broken.jsonl", b'{"text": "a"}\n{"te', "broken.jsonl' line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("number.jsonl", b'{"text": 5}\n', "line 1: column 'text' holds int"),
        ("half.jsonl", b'{"text": "\\ud83d"}\n', "line 1: .*surrogate"),
        ("false.parquet", b"no parquet", "false.parquet' is not a parquet file"),
        ("paper.pdf", b"%PDF", "ends in '.pdf': expected .txt, .md, .py, "),
        ("rows.csv", b"texts,id\na,1\n", "rows.csv' has no column 'text': it has texts, id: did you mean 'texts'"),
        ("rows.csv", b"id;text\n0;Hello\n", "rows.csv' has no column 'text': it has id;text"),
        ("rows.csv", b"text,id\ncaf\xe9,1\n", "rows.csv' cannot be read as .csv: 'utf-8' codec can't decode byte 0xe9"),
        ("rows.csv", b'text\n"a', "rows.csv' cannot be read as .csv: "),
        ("rows.csv", b"text,label\nhello,1,\nbye,2,\n", "rows.csv' has rows with more cells than its header"),
        ("rows.csv", b"id,text\n1,Hello, world\n2,bye\n", "rows.csv' has rows with more cells than its header"),
        ("rows.csv", b"text\nbye\nHello, world\n", "rows.csv' cannot be read as .csv: Error tokenizing data"),
        ("rows.json", b'[{"text": "a"}, {"te', "rows.json' is not JSON: Unterminated string.*line 1"),
        ("rows.json", b'[{"text": "a"}, {"text": 5}]', "rows.json' row 2: column 'text' holds int: expected text"),
        ("rows.json", b'{"data": [{"text": "a"}]}', "rows.json' row 1 has no column 'text': it has data"),
        ("rows.arrow", b"no arrow", "rows.arrow' cannot be read as .arrow: "),
        ("a.txt.gz", b"no gzip", "a.txt.gz' cannot be unpacked: "),
        ("a.txt.zst", b"no zstd", "a.txt.zst' cannot be unpacked: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999, mtime=0)[:40], "a.jsonl.gz' cannot be unpacked: "),
        (
            "late.csv.gz",
            gzip.compress(b"text\n" + (b"a" * 999 + b"\n") * 1500 + b"\xe2\x82", mtime=0),
            "late.csv.gz' cannot be read as .csv: 'utf-8' codec can't decode byte",
        ),
        ("a.parquet.gz", b"x", "ends in '.gz': expected .txt, .md, .py, "),
    ],
)
def test_unreadable_text_is_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        load(config(path=tmp_path / name), tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("datasets_cache")
@pytest.mark.parametrize("limit", [None, 5])
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"train-0.jsonl": '{"text": "a"}\n{"text": "bro'}, "cannot be read: JSON parse error"),
        (
            {"train-0.jsonl": '{"text": "a"}\n', "train-1.jsonl": '{"txt": "a"}\n'},
            "cannot be read: .*column names don.t match",
        ),
        ({"train.csv": "text,b\nfine,1\nmore,2,3,4\n"}, "Expected 2 fields in line 3, saw 4"),
    ],
)
def test_what_fails_inside_datasets_says_why(
    tmp_path: Path, rows: dict[str, str], said: str, limit: int | None
) -> None:
    folder = write(tmp_path / "set", rows)
    with pytest.raises(UserError, match=said):
        load(config("hub", dataset=str(folder), max_documents=limit), tmp_path)


def test_a_misspelt_path_names_the_nearest_file(tmp_path: Path) -> None:
    write(tmp_path, {"dracula.txt": "x"})
    with pytest.raises(UserError, match=r"no file matches '.*dracula.text': did you mean 'dracula.txt'"):
        load(config(path=tmp_path / "dracula.text"), tmp_path)
    with pytest.raises(
        UserError, match=r"no file matches 'acme/wiki': a data set of the hub is data.dataset=acme/wiki"
    ):
        reading.find("acme/wiki")
    with pytest.raises(UserError, match=r"no file in the folder '.*' can be read: expected \.txt, "):
        load(config(path=write(tmp_path / "sub", {"a.pdf": "x"})), tmp_path)
    with pytest.raises(UserError, match=r"data\.path is missing"):
        load(dataclasses.replace(config(), path=None), tmp_path)


# --- data sets of the hub


WIKITEXT = ["", " = First = \n", "", " Some words . \n", "", " = = Section = = \n", "", " More = words = \n", ""]
WIKITEXT += ["", " = Second = \n", "", " Other words . \n", " = 3 = \n", ""]


def test_wikitext_lines_are_joined_to_articles() -> None:
    articles = [a for a in reading.join_articles(WIKITEXT) if a.strip()]
    assert [a.split("\n")[0] for a in articles] == [" = First = ", " = Second = "]
    assert "Section" in articles[0] and "More" in articles[0]
    assert " = 3 = " in articles[1]  # a line of text: no blank line before it
    assert list(reading.join_articles(["".join(line or "\n" for line in WIKITEXT)])) == list(
        reading.join_articles(WIKITEXT)
    )


def hub_copy(folder: Path, config_name: str = "default", **splits: Sequence[str | None]) -> Path:
    """A folder laid out as a data set of the hub is."""
    for split, rows in splits.items():
        write_parquet(folder / config_name / f"{split}-00000-of-00001.parquet", rows)
    files = [{"split": split, "path": f"{config_name}/{split}-*"} for split in splits]
    card = yaml.safe_dump({"configs": [{"config_name": config_name, "data_files": files}]})
    return write(folder, {"README.md": f"---\n{card}---\n"})


def some_rows(n: int) -> list[str]:
    return [f"text {i} {i * i} of {n}" for i in range(n)]


@pytest.fixture
def wikitext(tmp_path: Path, datasets_cache: None) -> Path:
    """A copy of the hub's Salesforce/wikitext."""
    rows = {split: [*WIKITEXT, f" in {split} . \n"] for split in corpus.SPLITS}
    return hub_copy(tmp_path / "wikitext", "wikitext-2-raw-v1", **rows)


@pytest.mark.parametrize("key", ["dataset", "path"])
def test_a_hub_data_set_is_read_from_a_local_copy(wikitext: Path, tmp_path: Path, key: str) -> None:
    where = {"dataset": str(wikitext)} if key == "dataset" else {"path": wikitext}
    result = load(config("wikitext-2", **where), tmp_path)
    assert result.record["split"] == "given"
    assert result.record["documents"] == {"train": 2, "validation": 2, "test": 2}
    for split in corpus.SPLITS:
        assert result.documents[split][1].endswith(f" in {split} . \n")
    assert (result.record["revision"] is not None) == (key == "dataset")


def test_with_a_limit_a_hub_data_set_is_streamed_to_whole_documents(wikitext: Path, tmp_path: Path) -> None:
    result = load(config("wikitext-2", dataset=str(wikitext), max_documents=1), tmp_path)
    assert result.record["documents"] == {"train": 1, "validation": 1, "test": 1}
    assert "More" in result.documents["train"][0]


def test_unknown_subset_split_and_column_of_a_data_set_are_one_line(wikitext: Path, tmp_path: Path) -> None:
    for changes, message in (
        ({"subset": "wikitext-3"}, "cannot be loaded: .*wikitext-3.*wikitext-2-raw-v1.*data.subset=NAME, or null"),
        ({"splits": {"train": "trian"}}, "has no split 'trian': it has train, .*did you mean 'train'"),
        ({"column": "txt"}, "has no column 'txt': it has text: did you mean"),
        ({"splits": {"tain": "train"}}, "data.splits names tain"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load(config("wikitext-2", dataset=str(wikitext), **changes), tmp_path)
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("datasets_cache")
def test_a_data_set_of_any_name_has_the_splits_that_it_has(tmp_path: Path) -> None:
    def loaded(folder: Path, **changes: Any) -> dict[str, Any]:
        return load(config("hub", dataset=str(folder), **changes), tmp_path).record

    alone = loaded(hub_copy(tmp_path / "alone", train=some_rows(40)))
    assert (alone["split"], alone["documents"]) == ("document", {"train": 36, "validation": 2, "test": 2})
    odd = loaded(hub_copy(tmp_path / "odd", everything=some_rows(40)))
    assert odd["split"] == "document" and sum(odd["documents"].values()) == 40
    two = loaded(hub_copy(tmp_path / "two", train=some_rows(40), dev=some_rows(40)))
    assert (two["split"], two["documents"]) == ("given", {"train": 40, "validation": 20, "test": 20})
    more = hub_copy(tmp_path / "more", first=some_rows(30), second=some_rows(30), validation=some_rows(30))
    with pytest.raises(
        UserError, match=r"has the splits first, second, validation: choose one to train on, data\.splits="
    ):
        loaded(more)
    assert loaded(more, splits={"train": "second"})["split"] == "document"
    bounded = loaded(hub_copy(tmp_path / "alone", train=some_rows(40)), max_documents=25)
    assert sum(bounded["documents"].values()) == 25
    two_configs = yaml.safe_dump({"configs": [{"config_name": c, "data_files": "default/train-*"} for c in ("a", "b")]})
    write(tmp_path / "alone", {"README.md": f"---\n{two_configs}---\n"})
    with pytest.raises(UserError, match=r"Config name is missing.*'a', 'b'.*\(data.subset=NAME"):
        loaded(tmp_path / "alone")
    assert loaded(tmp_path / "alone", subset="b")["documents"] == alone["documents"]
    with pytest.raises(UserError, match=r"data.dataset is '.*one.txt', a file: .* is data=text data.path="):
        loaded(write(tmp_path, {"one.txt": "x"}) / "one.txt")
    with pytest.raises(UserError, match=r"data\.dataset is missing: expected a name on the hub"):
        load(config("hub"), tmp_path)


@pytest.fixture(params=["offline", "refused"])
def without_network(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process that does not reach the hub."""
    return {"offline": {"HF_HUB_OFFLINE": "1"}, "refused": {"HF_ENDPOINT": "http://127.0.0.1:9"}}[request.param]


@pytest.mark.full
def test_without_network_one_line_says_so_at_once(tmp_path: Path, without_network: dict[str, str]) -> None:
    start = time.monotonic()
    process = preparing(config("wikitext-2"), tmp_path, HF_HOME=str(tmp_path / "huggingface"), **without_network)
    printed, log = process.communicate(timeout=60)
    assert printed.startswith("UserError 'Salesforce/wikitext' cannot be reached at http"), log
    assert "data.dataset=FOLDER" in printed
    assert printed.count("\n") == 1
    # The library's own retries take 23 s. The rest is the import of `datasets` on a busy machine.
    assert time.monotonic() - start < 15


def test_what_was_downloaded_before_works_without_network(
    wikitext: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    commit = "0123456789abcdef0123456789abcdef01234567"
    builder = datasets.load_dataset_builder(str(wikitext), "wikitext-2-raw-v1")
    builder.download_and_prepare()
    cached = tmp_path / "huggingface" / "acme___wiki" / "wikitext-2-raw-v1" / "0.0.0" / commit
    shutil.copytree(builder.cache_dir, cached)
    for arrow in cached.glob("*.arrow"):
        arrow.rename(arrow.with_name(arrow.name.replace("wikitext-", "wiki-")))
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "wiki"}))
    monkeypatch.setattr(hub, "_commit", lambda kind, dataset, revision: None)
    result = load(config("wikitext-2", dataset="acme/wiki"), tmp_path)
    assert result.record["revision"] == commit
    assert result.documents["test"][1].endswith(" in test . \n")
    with pytest.raises(UserError, match=f"is cached here at {commit}, and f+ cannot be reached"):
        load(config("wikitext-2", dataset="acme/wiki", revision="f" * 40), tmp_path)


def test_a_resolved_revision_is_remembered_for_when_the_hub_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_commit", lambda kind, dataset, revision: "c0ffee")
    assert hub.resolve("acme/wiki", None, None, tmp_path / "revisions") == "c0ffee"
    monkeypatch.setattr(hub, "_commit", lambda kind, dataset, revision: None)
    assert hub.resolve("acme/wiki", None, None, tmp_path / "revisions") == "c0ffee"
    with pytest.raises(UserError, match="cannot be reached"):
        hub.resolve("acme/wiki", None, "v2", tmp_path / "revisions")


# --- tokenizers


@pytest.fixture(scope="module")
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_bpe(["the quick brown fox jumps over the lazy dog. привет мир 🙂 " * 20], 400)


@pytest.mark.parametrize("kind", ["bpe", "bytes"])
@pytest.mark.parametrize("text", [STRANGE, "", "\r\n", "a" * 10, "".join(map(chr, range(1, 0x2FF)))])
def test_decoding_gives_the_text_back_and_bytes_are_counted(kind: str, text: str, bpe: tokenizer.Tokenizer) -> None:
    made = bpe if kind == "bpe" else tokenizer.raw_bytes()
    (ids,) = made.encode([text])
    assert made.decode(ids) == text
    assert made.token_bytes is not None
    assert made.token_bytes[ids].sum() == len(text.encode())
    assert made.separator not in ids


def test_raw_bytes_are_their_own_ids() -> None:
    made = tokenizer.raw_bytes()
    assert (made.vocab_size, made.separator) == (257, 256)
    assert made.encode([STRANGE])[0].tolist() == list(STRANGE.encode())


def test_a_long_text_is_learnt_and_encoded_in_pieces_as_if_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (STRANGE + " the lazy dog isn't  quick . ") * 40 + "x" * 9000
    monkeypatch.setattr(tokenizer, "PIECE", len(text))
    bpe = tokenizer.train_bpe([text], 400)
    (whole,) = bpe.encode([text])
    monkeypatch.setattr(tokenizer, "PIECE", 7)
    assert len(list(tokenizer.pieces(text))) > 100
    assert np.array_equal(bpe.encode([text])[0], whole)
    assert tokenizer.train_bpe([text], 400).sha256 == bpe.sha256


def test_a_byte_level_pre_tokenizer_parts_words_at_every_border() -> None:
    characters = [chr(c) for c in range(0x3100) if not 0xD800 <= c < 0xE000]
    text = "".join(f"{c} {c} a {c} 1 {c} " for c in characters)
    parted = {start for _, (start, _) in tokenizer.raw_bytes()._inner.pre_tokenizer.pre_tokenize_str(text)}
    borders = {border.start() for border in tokenizer.BORDER.finditer(text)}
    assert len(borders) > 4 * len(characters) and borders <= parted


def test_bpe_training_is_deterministic_and_says_its_real_size() -> None:
    first, second = (tokenizer.train_bpe(["tiny text"], 2048) for _ in range(2))
    assert first.sha256 == second.sha256
    assert 257 < first.vocab_size < 300
    with pytest.raises(UserError, match="vocab_size is 200: expected at least 257"):
        tokenizer.train_bpe(["x"], 200)


def test_bpe_learns_from_the_training_split_only(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "given",
        {"train.txt": "plain words " * 200, "valid.txt": "zyxwvut " * 500, "test.txt": "zyxwvut " * 500},
    )
    made = tokens.prepare(config(path=folder, vocab_size=300), tmp_path)
    assert len(made.tokenizer.encode(["zyxwvut"])[0]) == len("zyxwvut")
    assert len(made.tokenizer.encode(["plain words"])[0]) == 2


def saved(inner: tokenizers.Tokenizer, folder: Path) -> Path:
    inner.save(str(folder / "mine.json"))
    return folder / "mine.json"


def test_a_tokenizer_file_gets_a_separator_and_never_pads_or_cuts(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    bpe.save(tmp_path / "bpe.json")
    description = json.loads((tmp_path / "bpe.json").read_text())
    del description["added_tokens"][0]
    inner = tokenizers.Tokenizer.from_str(json.dumps(description))
    inner.enable_truncation(3)
    inner.enable_padding()
    made = tokenizer.from_file(saved(inner, tmp_path))
    ids, empty = made.encode(["the quick brown fox jumps over", ""])
    assert made.decode(ids) == "the quick brown fox jumps over"
    assert len(empty) == 0
    assert made.separator not in made.encode([tokenizer.SEPARATOR])[0]


def test_a_tokenizer_that_changes_text_counts_no_bytes(bpe: tokenizer.Tokenizer, tmp_path: Path) -> None:
    def changed(**parts: Any) -> np.ndarray | None:
        inner = tokenizers.Tokenizer.from_str(bpe._inner.to_str())
        for name, part in parts.items():
            setattr(inner, name, part)
        return tokenizer.from_file(saved(inner, tmp_path)).token_bytes

    assert changed() is not None
    assert changed(normalizer=tokenizers.normalizers.NFC()) is None
    assert changed(pre_tokenizer=tokenizers.pre_tokenizers.Whitespace()) is None
    assert changed(pre_tokenizer=tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)) is None


def test_a_wrong_tokenizer_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected bpe, bytes, a tokenizer\.json or its folder, or a model on the hub"):
        tokenizer.find("./bep")
    with pytest.raises(UserError, match=r"the folder '.*' has no tokenizer\.json: expected one"):
        tokenizer.find(str(tmp_path))
    with pytest.raises(UserError, match=r"such as gpt2: did you mean 'wrong\.json'\?"):
        write(tmp_path, {"wrong.json": '{"a": 1}'})
        tokenizer.find(f"{tmp_path}/worng.json")
    write(tmp_path, {"wrong.json": '{"a": 1}'})
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        tokenizer.from_file(tmp_path / "wrong.json")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def fake_hub(bpe: tokenizer.Tokenizer) -> Iterator[tuple[str, list[str]]]:
    """What the hub answers of models: org/mine has a tokenizer, org/code has none, org/gated wants a login.

    Yields:
        Its address, and what it was asked for so far.
    """
    content = bpe._inner.to_str().encode()

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = {f"/api/models/org/{name}": name for name in ("mine", "code", "gated")}
            known |= {f"{path}/revision/{COMMIT}": name for path, name in known.items()}
            if name := known.get(self.path):
                if name == "gated":
                    self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
                else:
                    self.answer(
                        200, json.dumps({"id": f"org/{name}", "modelId": f"org/{name}", "sha": COMMIT}).encode()
                    )
            elif self.path.startswith("/api/models/org/mine/revision/"):
                self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
            elif self.path in (f"/org/mine/resolve/{name}/tokenizer.json" for name in (COMMIT, "main")):
                self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": '"etag"'})
            elif self.path == "/org/code/resolve/main/tokenizer.json":
                self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            else:
                self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    asked: list[str] = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def train_with(setting: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A tiny run of the command line with a tokenizer, below a folder that is its home, cache and output."""
    support.write_text(folder)
    given = [*support.TINY, "data.path=text.txt", "training.tokens=128", "runtime.cache=cache"]
    return subprocess.run(
        [sys.executable, "-m", "posbench", "train", *support.each_once([*given, f"data.tokenizer={setting}"])],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder / "huggingface"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.full
def test_a_tokenizer_of_the_hub_is_cached_recorded_and_used_without_network(
    fake_hub: tuple[str, list[str]], tmp_path: Path, bpe: tokenizer.Tokenizer
) -> None:
    there, asked = fake_hub
    done = train_with("org/mine", tmp_path, HF_ENDPOINT=there)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs/demo").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["data"]["tokenizer_revision"] == COMMIT
    assert record["tokenizer_sha256"] == bpe.sha256
    downloads = [path for path in asked if path.endswith("tokenizer.json")]
    assert {path.rpartition("/")[2] for path in asked if "resolve" in path} == {"tokenizer.json"}
    for nowhere in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        again = train_with("org/mine", tmp_path, **nowhere)
        assert again.returncode == 0, again.stderr
        assert [path.name for path in (tmp_path / "outputs/demo").iterdir()] == [run.name]
    assert downloads == [path for path in asked if path.endswith("tokenizer.json")]


@pytest.mark.full
def test_what_the_hub_has_not_is_one_line(fake_hub: tuple[str, list[str]], tmp_path: Path) -> None:
    code = (
        "import sys; from posbench.data.tokenizer import find\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(find(name)[1])\n"
        "    except Exception as error: print(type(error).__name__, error)"
    )
    names = {
        f"org/mine@{COMMIT}": COMMIT,
        "org/mine@v9": "UserError 'org/mine' has no revision 'v9'",
        "org/code": "UserError 'org/code' has no tokenizer.json: expected one; ",
        "org/gated": "UserError 'org/gated' is gated: ask for access on its page and log in with `hf auth login`",
        "bep": "UserError the hub has no model with a tokenizer 'bep' (or it is private: `hf auth login`): "
        "did you mean 'bpe'?",
    }
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": fake_hub[0]}
    run = [sys.executable, "-c", code, *names]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stderr
    for line, expected in zip(lines, names.values(), strict=True):
        assert line.startswith(expected)


@pytest.mark.full
def test_without_network_a_tokenizer_of_the_hub_is_one_line_at_once(
    tmp_path: Path, without_network: dict[str, str]
) -> None:
    start = time.monotonic()
    done = train_with("gpt2", tmp_path, **without_network)
    assert time.monotonic() - start < 20  # the library's own retries take longer; the rest is start-up
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: tokenizer 'gpt2' cannot be reached at http") and "data.tokenizer=FILE" in last
    assert not (tmp_path / "outputs").exists()


def test_a_folder_with_a_tokenizer_is_that_tokenizer_and_nothing_else_in_it_is_read(
    bpe: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    folder = write(tmp_path / "model", {"tokenization_mine.py": f"open({str(canary)!r}, 'w')"})
    write(folder, {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", null]}}'})
    bpe.save(folder / "tokenizer.json")
    made = tokens.prepare(config(path=write(tmp_path / "t", numbered(25)), tokenizer=str(folder)), tmp_path / "cache")
    assert made.tokenizer.sha256 == bpe.sha256 and "tokenizer_revision" not in made.record
    assert not canary.exists()


# --- the token cache


def test_every_document_begins_with_one_separator_and_decodes_to_itself(tmp_path: Path) -> None:
    texts = {f"{i:02}.txt": f"{i} {STRANGE}" for i in range(40)}
    made = tokens.prepare(config(path=write(tmp_path / "many", texts), vocab_size=300), tmp_path)
    found = []
    for split in (made.train, made.validation, made.test):
        assert split.starts[0] == 0 and split.starts[-1] == len(split.ids)
        assert np.array_equal(np.flatnonzero(split.ids == made.tokenizer.separator), split.starts[:-1])
        found += [
            made.tokenizer.decode(split.ids[a + 1 : b]) for a, b in zip(split.starts, split.starts[1:], strict=False)
        ]
    assert sorted(found) == sorted(texts.values())
    assert made.record["tokens"] == {s: len(getattr(made, s).ids) for s in corpus.SPLITS}
    assert set(made.record) == {"name", "revision", "sha256", "split", "documents", "copies", "tokens"}


@pytest.mark.full
def test_a_long_document_is_encoded_in_batches_and_comes_out_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = "".join(f"word{i} is number {i * i}, " for i in range(20_000))
    settings = config(path=write(tmp_path, {"long.txt": text}) / "long.txt", tokenizer="bytes")
    batches: list[int] = []
    encode = tokenizer.Tokenizer.encode

    def counted(self: tokenizer.Tokenizer, texts: list[str]) -> list[np.ndarray]:
        batches.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(tokenizer.Tokenizer, "encode", counted)
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    monkeypatch.setattr(tokens, "BATCH_CHARACTERS", 10_000)
    monkeypatch.setattr(console, "LINE_EVERY_SECONDS", 0.0)
    made = tokens.prepare(settings, tmp_path / "cache")
    assert max(batches) < 12_000
    whole = b"".join(bytes(split.ids[1:].tolist()) for split in (made.train, made.validation, made.test))
    assert whole.decode() == text
    assert [len(split.starts) for split in (made.train, made.validation, made.test)] == [2, 2, 2]
    assert re.search(r"tokens of [\d,]+ of [\d,]+ characters, about 0:00:\d\d left", caplog.text)


def test_texts_are_written_one_at_a_time_and_read_in_any_order(tmp_path: Path) -> None:
    held = most = 0

    class Text(str):
        def __init__(self, _: str) -> None:
            nonlocal held, most
            held += 1
            most = max(most, held)

        def __del__(self) -> None:
            nonlocal held
            held -= 1

    written = [f"{STRANGE} {i}" * (i % 5) for i in range(500)]
    parts = {"train": written[:300], "test": written[300:]}
    assert texts.write(tmp_path, {s: map(Text, part) for s, part in parts.items()}) == {"train": 300, "test": 200}
    assert most < 3
    found = texts.Texts.of(tmp_path)
    assert list(found) == written and [found[i] for i in (499, 7, 0, -1)] == [written[i] for i in (499, 7, 0, -1)]
    assert texts.characters(found).tolist() == [*map(len, written)]
    spans = [(3, 0, 9), (3, 9, 9), (3, 20, 77), (4, 5, 6), (499, 0, len(written[499]))]
    assert list(found.cut(spans)) == [written[i][first:end] for i, first, end in spans]
    with pytest.raises(IndexError):
        found[500]
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(ValueError, match="ends before byte"):
        list(texts.Texts.of(tmp_path))


@pytest.mark.full
def test_a_second_run_takes_the_cache_and_imports_no_datasets(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", numbered(30))
    first = tokens.prepare(config(path=folder, vocab_size=300), tmp_path)
    (made,) = (p for p in (tmp_path / "tokens").iterdir() if p.is_dir())
    stamps = {p.name: p.stat().st_mtime_ns for p in made.iterdir()}
    printed, log = preparing(config(path=folder, vocab_size=300), tmp_path).communicate()
    record, *imported = printed.splitlines()
    assert json.loads(record) == first.record
    assert imported == ["False", "False"], log
    assert {p.name: p.stat().st_mtime_ns for p in made.iterdir()} == stamps


@pytest.mark.parametrize(("size", "is_small"), [(30_000, True), (80_000, False)])
def test_a_very_small_text_is_said_to_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, is_small: bool
) -> None:
    path = write(tmp_path, {"my.txt": "a few words " * (size // 12)}) / "my.txt"
    tokens.prepare(config(path=path, tokenizer="bytes"), tmp_path / "cache")
    told = [r.getMessage() for r in caplog.records if "is small" in r.getMessage() and r.levelname == "WARNING"]
    assert told == is_small * [
        "data 'text' is small, 27,001 training tokens, which a model soon knows by heart: give a megabyte or more"
    ]


def test_every_run_is_told_which_text_it_reads_cached_or_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    configuration = config(path=write(tmp_path / "many", numbered(30)), tokenizer="bytes")
    for _ in range(2):
        caplog.clear()
        made = tokens.prepare(configuration, tmp_path)
        told = f"data 'text': {len(made.train.ids):,} training tokens, sha256 of the text {made.record['sha256'][:12]}"
        assert caplog.messages[-1] == told


def test_changed_text_or_tokenizer_is_another_cache_entry(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", numbered(30))
    keys = set()
    for changes in ({}, {"vocab_size": 301}, {"tokenizer": "bytes"}, {"max_documents": 30}):
        keys.add(tokens._key(config(path=folder, **changes), corpus.locate(config(path=folder), tmp_path)))
    write(folder, {"000.txt": "other text"})
    keys.add(tokens._key(config(path=folder), corpus.locate(config(path=folder), tmp_path)))
    assert len(keys) == 5


def test_a_lock_of_a_cache_that_is_waited_for_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(1, flush=True); time.sleep(2)"
    command = [sys.executable, "-c", code, str(tmp_path / "key.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline()
        caplog.set_level(logging.INFO, "posbench")
        os.close(files.lock(tmp_path / "key.lock", wait=True))
        assert holder.wait() == 0
    assert f"waiting for another process, which holds {tmp_path / 'key.lock'}" in caplog.text


def test_a_cache_on_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    configuration = config(path=write(tmp_path / "many", numbered(25)), tokenizer="bytes")
    expected = np.array(tokens.prepare(configuration, tmp_path).train.ids)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert np.array_equal(tokens.prepare(configuration, tmp_path).train.ids, expected)
    assert f"{tmp_path / 'tokens'} cannot be locked (No locks available)" in caplog.text


@pytest.mark.full
def test_two_processes_at_once_make_one_cache(tmp_path: Path) -> None:
    folder = write(tmp_path / "many", numbered(30))
    running = [preparing(config(path=folder, vocab_size=300), tmp_path) for _ in range(2)]
    printed, told = zip(*(process.communicate() for process in running), strict=True)
    assert len(set(printed)) == 1 and len(printed[0].splitlines()) == 3
    assert sorted("preparing the tokens" in log for log in told) == [False, True]
    assert len([path for path in (tmp_path / "tokens").iterdir() if path.is_dir()]) == 1


@pytest.mark.full
def test_ids_beyond_16_bits_are_kept_whole(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(70_000)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, "?": 70_000}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    file = saved(inner, tmp_path)
    folder = write(tmp_path / "one", {"a.txt": "w69999 w65536 w1 " * 100})
    made = tokens.prepare(config(path=folder, tokenizer=str(file)), tmp_path / "cache")
    assert made.train.ids.dtype == np.uint32
    assert made.train.ids[:4].tolist() == [70_001, 69_999, 65_536, 1]
    assert made.tokenizer.token_bytes is None


def test_an_id_outside_of_the_vocabulary_is_refused(bpe: tokenizer.Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"token id {bpe.vocab_size} is outside of the vocabulary"):
        tokens._check_ids(np.array([0, bpe.vocab_size]), bpe)


def test_a_signal_while_a_text_is_encoded_is_no_fault_of_the_tokenizer(
    bpe: tokenizer.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping:
        def encode_batch_fast(self, *_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bpe, "_inner", Stopping())
    with pytest.raises(Stopped, match="stopped by SIGTERM"), signals.ended_in_words():
        bpe.encode(["text"])


# --- batches


def test_batches_are_a_function_of_seed_and_step_alone() -> None:
    ids = np.arange(1000)
    one, other = (batches.TrainingBatches(ids, 16, 8, seed=3) for _ in range(2))
    for step in (40, 2, 17, 40):
        np.random.seed(step)
        torch.manual_seed(step)
        for step_before in range(step):
            one.batch(step_before)
        a, b = one.batch(step), other.batch(step)
        assert torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels)
    assert not torch.equal(one.batch(0).ids, batches.TrainingBatches(ids, 16, 8, seed=4).batch(0).ids)


def test_labels_are_the_next_tokens() -> None:
    batch = batches.TrainingBatches(np.arange(100, dtype=np.uint16), 8, 4, seed=0).batch(1)
    assert batch.ids.shape == batch.labels.shape == (4, 8)
    assert batch.ids.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.labels, batch.ids + 1) and batch.n_scored == 4 * 8


def test_an_epoch_visits_nearly_every_token_once_in_another_order_and_offset() -> None:
    data = batches.TrainingBatches(np.arange(1000), 16, 1, seed=0)
    epochs = []
    for epoch in range(3):
        first = epoch * data.blocks_per_epoch
        seen = torch.cat([data.batch(first + i).ids.flatten() for i in range(data.blocks_per_epoch)])
        assert len(seen) == len(set(seen.tolist())) > 1000 - 2 * 16
        epochs.append(seen)
    assert not torch.equal(epochs[0], epochs[1])
    assert len({int(epoch.min()) for epoch in epochs}) > 1


@pytest.mark.parametrize("steps", [1, 5, 14, 15, 40])
def test_the_spans_of_some_batches_are_the_tokens_that_they_hold(steps: int) -> None:
    data = batches.TrainingBatches(np.arange(1000), 16, 4, seed=0)
    held = {token for step in range(steps) for one in (data.batch(step).ids, data.batch(step).labels)
            for token in one.flatten().tolist()}  # fmt: skip
    spans = data.spans(steps)
    assert [token for first, end in spans.tolist() for token in range(first, end)] == sorted(held)
    assert (spans[1:, 0] > spans[:-1, 1]).all()  # what is one stretch of text is one span


def test_a_batch_may_span_epochs() -> None:
    data = batches.TrainingBatches(np.arange(40), 16, 5, seed=0)
    assert data.blocks_per_epoch == 1
    singles = batches.TrainingBatches(np.arange(40), 16, 1, 0)
    assert torch.equal(data.batch(0).ids, torch.cat([singles.batch(i).ids for i in range(5)]))


@pytest.mark.parametrize("n_tokens", [1, 16])
def test_less_text_than_a_block_names_tokens_block_and_need(n_tokens: int) -> None:
    message = f"text has {n_tokens} tokens: a block of 16 needs 17"
    with pytest.raises(UserError, match=f"training {message}"):
        batches.TrainingBatches(np.zeros(n_tokens), 16, 4, seed=0)
    with pytest.raises(UserError, match=f"validation {message}"):
        next(batches.validation_batches(np.zeros(n_tokens), 16, 4, 8))


def test_one_block_and_its_last_label_are_enough() -> None:
    batch = batches.TrainingBatches(np.arange(17), 16, 2, seed=0).batch(5)
    assert batch.ids[0].tolist() == list(range(16))
    assert batch.labels[1].tolist() == list(range(1, 17))


def test_validation_blocks_are_fixed_disjoint_and_spread() -> None:
    def read(limit: int) -> list[list[int]]:
        found = batches.validation_batches(np.arange(1000), 16, batch_size=5, limit=limit)
        return [row for batch in found for row in batch.ids.tolist()]

    assert read(12) == read(12)
    assert len(read(12)) == 12
    assert len({i for row in read(12) for i in row}) == 12 * 16
    assert read(12)[0][0] == 0 and read(12)[-1][-1] > 900
    assert len(read(10_000)) == 999 // 16


# -- what a disk or a user can do to them -----------------------------------------------------------------------------


def text_config(folder: Path, characters: int = 3000) -> DataConfig:
    (folder / "text.txt").write_text("words of a text. " * (characters // 17), encoding="utf-8")
    return config(path=folder / "text.txt", tokenizer="bytes")


def test_a_full_disk_under_the_cache_names_the_place_and_the_need(tmp_path: Path) -> None:
    settings = text_config(tmp_path, 400_000)
    with small_disk(tmp_path / "disk", "300k") as disk, pytest.raises(RunFailed) as caught:
        tokens.prepare(settings, disk)
    told = rf"no room to write {disk}/tokens/\w+ \(No space left on device\): [\d,]+ bytes needed, [\d,]+ free"
    assert re.match(told, str(caught.value)) and caught.value.reason == "disk"


def test_a_text_that_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = text_config(tmp_path)

    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(files, "sha256", refused)
    with pytest.raises(UserError, match=r"the text .*text\.txt cannot be read: Permission denied"):
        tokens.prepare(settings, tmp_path / "cache")


def test_a_text_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    settings = text_config(tmp_path)
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/texts/caf\xe9.txt"))
    odd.parent.mkdir()
    shutil.copy(tmp_path / "text.txt", odd)
    assert tokens.prepare(dataclasses.replace(settings, path=str(odd.parent)), tmp_path / "cache").record["sha256"]


def test_a_vocabulary_smaller_than_asked_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dataclasses.replace(text_config(tmp_path), tokenizer="bpe", vocab_size=5000)
    made = tokens.prepare(settings, tmp_path / "cache")
    told = f"too little text for data.vocab_size=5000: its vocabulary has {made.tokenizer.vocab_size} tokens"
    assert told in caplog.text and made.tokenizer.vocab_size < 5000


@pytest.mark.full
@pytest.mark.parametrize("alphabet", ["abcdefghijklmnop", "+-*/!?", "語言文字", "0123456789"])
def test_a_line_without_a_space_takes_seconds_and_loses_nothing(alphabet: str) -> None:
    line = "".join(np.random.default_rng(0).choice(list(alphabet), 300_000))
    assert max(map(len, tokenizer.pieces(line))) <= tokenizer.LONGEST_WORD
    began = time.monotonic()
    made = tokenizer.train_bpe([line], 1000)
    (ids,) = made.encode([line])
    assert time.monotonic() - began < 30  # minutes where it is one word
    assert made.decode(ids) == line
    words = "one two three " * 1000
    assert made.decode(made.encode([words])[0]) == words


def test_text_of_words_is_cut_nowhere() -> None:
    text = " ".join(f"word{i} " + "x" * (i % 50) for i in range(2000))
    assert list(tokenizer._unending(text)) == [text]
