"""Documents from files on this machine: which files, which split each belongs to, and their text.

`.txt` (and the built-in corpus's `.py`) hold one document per file, `.jsonl` and `.parquet` one per row. Files are
read as strict UTF-8; line ends stay as they are; a byte-order mark is dropped, being no text.
"""

import codecs
import glob
import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from posbench.errors import UserError, did_you_mean

SUFFIXES = (".txt", ".jsonl", ".parquet")
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}
# ` = Title = `, with exactly one pair of equals signs, opens a WikiText article; ` = = Section = = ` does not.
ARTICLE_HEADING = re.compile(r" = (?!=).*(?<!=) = ?")


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python has, in alphabetical order.

    Raises:
        UserError: the standard library is zipped, compiled only, or absent.
    """
    lines = Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8").splitlines()
    names = " ".join(line for line in lines if not line.startswith("#")).split()
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, Path] = {}
    for name in names:
        module = root.joinpath(*name.split("."))
        for file in (module.with_name(module.name + ".py"), module / "__init__.py"):
            if file.is_file() and file.read_bytes().strip():
                found[name] = file
                break
    if len(found) < len(names) // 2:
        raise UserError(
            f"the standard library's source is not in {root} ({len(found)} of {len(names)} modules): "
            "a zipped or stripped Python; data=text data.path=FILE trains on your own text"
        )
    return found


def find(path: str) -> list[Path]:
    """Return the readable files of a file, a folder (searched to the bottom) or a glob, sorted.

    Raises:
        UserError: nothing there, or a file of a kind that cannot be read.
    """
    here = Path(path).expanduser()
    if here.is_dir():
        hidden = (file for file in here.rglob("*") if not any(p.startswith(".") for p in file.relative_to(here).parts))
        files = sorted(file for file in hidden if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise UserError(f"data.path: no .txt, .jsonl or .parquet file in the folder '{path}'")
        return files
    files = [here] if here.is_file() else sorted(Path(p) for p in glob.glob(str(here), recursive=True))
    files = [file for file in files if file.is_file()]
    if not files:
        nearby = [p.name for p in here.parent.iterdir()] if here.parent.is_dir() else []
        raise UserError(f"data.path: no file matches '{path}'{did_you_mean(here.name, nearby)}")
    for file in files:
        if file.suffix not in SUFFIXES:
            raise UserError(f"data.path: '{file}' ends in '{file.suffix}': expected .txt, .jsonl or .parquet")
    return files


def by_split(files: list[Path], root: Path) -> dict[str, list[Path]]:
    """Sort files into given splits by the words that begin or end their names, or by their folders.

    `train-00000-of-00001.parquet`, `wiki.valid.txt` and `test/a.txt` say where they belong. Only when every file
    says so are the splits given; otherwise the result is empty and the caller splits the documents itself.

    Raises:
        UserError: held-out files are given, but no training file.
    """
    splits: dict[str, list[Path]] = {}
    for file in files:
        split = _split_of(file.relative_to(root) if file.is_relative_to(root) else Path(file.name))
        if split is None:
            return {}
        splits.setdefault(split, []).append(file)
    if "train" not in splits:
        raise UserError(
            f"data.path: '{root}' has {' and '.join(sorted(splits))} files but no train file: "
            "add one, or give a single file to split"
        )
    return splits


def _split_of(file: Path) -> str | None:
    words = re.split(r"[._-]", file.stem.lower())
    for word in (words[0], words[-1], *(part.lower() for part in file.parts[:-1])):
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return None


def read(
    files: tuple[str, ...], column: str, articles: bool, limit: int | None, digest: str
) -> Iterator[dict[str, str]]:
    """Yield `{"text": document}` from files, at most `limit`; blank documents are left out.

    A generator for `datasets.Dataset.from_generator`, which keys its cache by the arguments: `digest` stands for the
    content of the files. They are plain values for the same reason, and no list, which it would divide among calls.

    Raises:
        UserError: no text, bytes that are not UTF-8, a row that is not what was promised, a missing column.
    """
    del digest
    readers: dict[str, Callable[[Path, str], Iterator[str]]] = {".jsonl": _jsonl, ".parquet": _parquet}
    texts: Iterator[str] = itertools.chain.from_iterable(
        readers.get(Path(f).suffix, _whole)(Path(f), column) for f in files
    )
    if articles:
        texts = join_articles(texts)
    where = f"'{files[0]}'" + (f" and {len(files) - 1} more files" if len(files) > 1 else "")
    yield from documents(texts, limit, where)


def documents(texts: Iterable[str | None], limit: int | None, where: str) -> Iterator[dict[str, str]]:
    """Yield `{"text": ...}` for each text that is not blank, at most `limit`.

    Raises:
        UserError: there is none.
    """
    found = itertools.islice((text for text in texts if text and text.strip()), limit)
    first = next(found, None)
    if first is None:
        raise UserError(f"no text in {where}: 0 documents that are not blank")
    yield from ({"text": text} for text in itertools.chain([first], found))


def join_articles(texts: Iterable[str]) -> Iterator[str]:
    """Join WikiText, given line by line or whole, to articles: a first-level heading after a blank line starts one."""
    article: list[str] = []
    blank = True
    for line in itertools.chain.from_iterable(text.removesuffix("\n").split("\n") for text in texts):
        if blank and ARTICLE_HEADING.fullmatch(line) and article:
            yield "".join(article)
            article = []
        article.append(line + "\n")
        blank = not line.strip()
    yield "".join(article)


def _whole(file: Path, column: str) -> Iterator[str]:
    yield _decode(file.read_bytes(), file)


def _decode(raw: bytes, file: Path, start: int = 0) -> str:
    """Decode bytes that begin at byte `start` of a file."""
    mark = len(codecs.BOM_UTF8) if start == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise UserError(f"'{file}' is not UTF-8 text: byte {start + at} is 0x{raw[at]:02x}") from None


def _jsonl(file: Path, column: str) -> Iterator[str]:
    start = 0
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            line = _decode(raw, file, start)
            start += len(raw)
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"'{file}' line {number} is not JSON: {error.msg}") from None
            if not isinstance(row, dict):
                raise UserError(f"'{file}' line {number} is not a JSON object: expected one with a column '{column}'")
            if column not in row:
                raise UserError(missing_column(f"'{file}' line {number}", column, row))
            yield _text(row[column], f"'{file}' line {number}", column)


def _parquet(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        raise UserError(f"'{file}' is not a parquet file: {str(error).splitlines()[0]}") from None
    if column not in table.schema_arrow.names:
        raise UserError(missing_column(f"'{file}'", column, table.schema_arrow.names))
    number = itertools.count(1)
    for batch in table.iter_batches(batch_size=1024, columns=[column]):
        for value in batch.column(0).to_pylist():
            yield _text(value, f"'{file}' row {next(number)}", column)


def _text(value: Any, where: str, column: str) -> str:
    """Check one cell; a null is a blank document."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column '{column}' holds {type(value).__name__}: expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(f"{where}: column '{column}' holds half of a surrogate pair, which is not text") from None
    return value


def missing_column(where: str, column: str, columns: Iterable[str]) -> str:
    """The sentence for a column that is not there."""
    names = list(columns)
    return f"{where} has no column '{column}': it has {', '.join(names) or 'none'}{did_you_mean(column, names)}"
