"""Which files on this machine a text is, and which split each belongs to. UserError, in one line, for what is wrong."""

import glob
import itertools
import logging
import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from posbench.config.schema import DataConfig
from posbench.errors import UserError, did_you_mean

logger = logging.getLogger(__name__)

PACKED = (".gz", ".zst", ".bz2")
WHOLE = (".txt", ".md", ".py", ".rst", ".tex")  # a document each
COLUMNAR = (".parquet", ".arrow")
# A folder means the files of the first of these kinds that it has: reports and settings lie beside data.
KINDS = ((".txt", ".jsonl", ".parquet"), (".csv", ".tsv", ".arrow"), WHOLE, (".json",))
READABLE = f"expected {', '.join(dict.fromkeys(itertools.chain(*KINDS)))}; text also as {', '.join(PACKED)}"
SPLIT_WORDS = {"train": "train", "training": "train"}
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
SPLIT_WORDS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")


def expanded(path: str, key: str) -> Path:
    """Return a path that a key of the configuration has, with its `~` expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"{key} is '{path}': there is no such user") from None


def kind(path: Path) -> str:
    """Return `.csv` for `a.csv` and `a.csv.gz`; nothing for what cannot be read."""
    packed = path.suffix.lower() in PACKED
    suffix = Path(path.stem if packed else path.name).suffix.lower()
    return suffix if suffix in itertools.chain(*KINDS) and not (packed and suffix in COLUMNAR) else ""


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python has, in alphabetical order."""
    lines = Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8").splitlines()
    names = " ".join(line for line in lines if not line.startswith("#")).split()
    root = Path(sysconfig.get_path("stdlib"))
    modules: dict[str, Path] = {}
    for name in names:
        for path in (root / name.replace(".", "/") / "__init__.py", root / f"{name.replace('.', '/')}.py"):
            if path.is_file() and path.read_bytes().strip():
                modules[name] = path
    if len(modules) < len(names) // 2:
        raise UserError(
            f"the standard library's source is not in {root} ({len(modules)} of {len(names)} modules): "
            "a zipped or stripped Python; data=text data.path=FILE trains on your own text"
        )
    return modules


def folder_of(config: DataConfig) -> str | None:
    """Return where text of this machine is: `data.path`, or a folder with a copy of a data set of the hub."""
    if config.path or not config.dataset:
        return config.path
    folder = expanded(config.dataset, "data.dataset")
    if folder.is_file():
        raise UserError(f"data.dataset is '{folder}', a file: text of your own is data=text data.path={folder}")
    subset = folder / (config.subset or "")
    return str(subset if subset.is_dir() else folder) if folder.is_dir() else None


def local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    """Return the files of text on this machine by split and name. The only split is "" where they give none."""
    path = folder_of(config)
    if not path:
        raise UserError("data.path is missing: expected a file, a folder or a glob, such as data.path=novels/")
    root = expanded(path, "data.path")
    files = [root] if root.is_file() else sorted(map(Path, glob.glob(str(root), recursive=True)))
    files = _in_folder(root) if root.is_dir() else [file for file in files if file.is_file()]
    if not files:
        nearby = [file.name for file in root.parent.iterdir()] if root.parent.is_dir() else []
        hub = f": a data set of the hub is data.dataset={path}" if re.fullmatch(r"[\w-]+/[\w-]+", path) else ""
        raise UserError(f"data.path: no file matches '{path}'{did_you_mean(root.name, nearby) or hub}")
    if strange := [file for file in files if not kind(file)]:
        raise UserError(f"data.path: '{strange[0]}' ends in '{strange[0].suffix}': {READABLE}")
    if not root.is_dir():
        root = Path(os.path.commonpath([file.parent for file in files]))
    names = {file.relative_to(root).as_posix(): file for file in files}
    return {"": names} if len(names) == 1 else _by_split(names, root, config.splits)


def _in_folder(folder: Path) -> list[Path]:
    inside = [file for file in sorted(folder.rglob("*")) if "/." not in f"/{file.relative_to(folder).as_posix()}"]
    # Beside the data that save_to_disk has written may lie what `datasets` remembers of computations.
    inside = [file for file in inside if kind(file) and file.is_file() and not file.match("cache-*.arrow")]
    # Plain ones first: packed files may be copies of them.
    choices = ([f for f in inside if of(f) in kinds] for kinds in KINDS for of in (lambda file: file.suffix, kind))
    if not (files := next(filter(None, choices), [])):
        raise UserError(f"data.path: no file in the folder '{folder}' can be read: {READABLE}")
    if others := sorted({kind(file) for file in {*inside} - {*files}}):
        line = "data.path: of '%s' the %s files are read, not its %s: a glob names others"
        logger.info(line, folder, ", ".join(sorted({*map(kind, files)})), ", ".join(others))
    return files


def _by_split(files: dict[str, Path], root: Path, asked: Mapping[str, str]) -> dict[str, dict[str, Path]]:
    """Sort files into the splits that their names give, if every name gives one.

    Args:
        asked: our splits -> a data set's names for them: only these are read, and other files may lie beside them.
    """
    words = {word: s for word, s in SPLIT_WORDS.items() if not asked or SPLIT_WORDS.get(asked.get(s, "").lower()) == s}
    words |= {name.lower(): split for split, name in asked.items()}
    splits: dict[str, dict[str, Path]] = {}
    for name, file in files.items():
        splits.setdefault(_split_of(Path(name), words), {})[name] = file
    others = splits.pop("", {})
    if others and not asked:
        stray, named, names = root / next(iter(others)), len(files) - len(others), ", ".join(sorted(splits))
        line = f"'{stray}' is of no split, while {named} of {len(files)} files have names of splits ({names})"
        if "train" in splits and len(splits) > 1 and named > len(others):
            raise UserError(f"data.path: {line}: move it away, or leave it out with a glob")
        if splits:
            logger.warning("data.path: %s: all are split anew", line)
        return {"": files}
    if "train" not in splits:
        raise UserError(f"data.path: '{root}' has {' and '.join(sorted(splits)) or 'no'} files but no train file")
    return splits


def _split_of(name: Path, words: Mapping[str, str]) -> str:
    """The split that a file's folders say, or else its name; words lie between any of `-._ 0-9`, as on the hub."""
    stem = name.stem if name.suffix.lower() in PACKED else name.name
    for part in (name.parent.as_posix(), Path(stem).stem):
        if splits := {words[word] for word in re.split(r"[-._ 0-9/]+", part.lower()) if word in words}:
            return splits.pop() if len(splits) == 1 else ""
    return ""
