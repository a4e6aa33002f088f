"""Which files on this machine a text is, and which split each belongs to."""

import glob
import itertools
import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from posbench.config.schema import DataConfig
from posbench.errors import UserError, did_you_mean

PACKED = (".gz", ".zst", ".bz2")
WHOLE = (".txt", ".md", ".py", ".rst", ".tex")  # a document each
# A folder means the files of the first of these kinds that it has: reports and settings lie beside data.
KINDS = ((".txt", ".jsonl", ".parquet"), (".csv", ".tsv", ".arrow"), WHOLE, (".json",))
READABLE = [*dict.fromkeys(itertools.chain(*KINDS))]
SPLIT_WORDS = {"train": "train", "training": "train"}
SPLIT_WORDS |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
SPLIT_WORDS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")


def kind(path: Path) -> str:
    """Return `.csv` for `a.csv` and `a.csv.gz`."""
    return Path(path.stem if path.suffix.lower() in PACKED else path.name).suffix.lower()


def builtin_modules() -> dict[str, Path]:
    """Return the file of each module of the built-in corpus that the running Python has, in alphabetical order."""
    lines = Path(__file__).with_name("builtin.txt").read_text(encoding="utf-8").splitlines()
    names = " ".join(line for line in lines if not line.startswith("#")).split()
    root, modules = Path(sysconfig.get_path("stdlib")), {}
    for name in names:
        base = root / name.replace(".", "/")
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file() and path.read_bytes().strip():
                modules[name] = path
    if len(modules) < len(names) // 2:
        raise UserError(f"the standard library's source is not in {root}: data=text data.path=FILE trains on your own")
    return modules


def folder_of(config: DataConfig) -> str | None:
    """Return where text of this machine is: `data.path`, or a folder with a copy of a data set of the hub."""
    if config.path or not config.dataset or not os.path.isdir(folder := os.path.expanduser(config.dataset)):
        return config.path
    subset = os.path.join(folder, config.subset or "")
    return subset if os.path.isdir(subset) else folder


def local_files(config: DataConfig) -> dict[str, dict[str, Path]]:
    """Return the files of text on this machine by split and name. The only split is "" where they give none."""
    if not (path := folder_of(config)):
        raise UserError("data.path is missing: expected a file, a folder or a glob, such as data.path=novels/")
    root = Path(os.path.expanduser(path))
    matching = [root] if root.exists() else map(Path, glob.glob(str(root), recursive=True))
    files = (
        _in_folder(root)
        if root.is_dir()
        else sorted(file for file in matching if file.is_file() and kind(file) in READABLE)
    )
    if not files:
        nearby = [file.name for file in root.parent.glob("*") if file != root]
        near = did_you_mean(root.name, nearby) or f" (expected {' '.join(READABLE)}, also as {' '.join(PACKED)})"
        raise UserError(f"data.path: no file matches '{path}'{near}")
    if not root.is_dir():
        root = Path(os.path.commonpath([file.parent for file in files]))
    names = {file.relative_to(root).as_posix(): file for file in files}
    return {"": names} if len(names) == 1 else _by_split(names, root, config.splits)


def _in_folder(folder: Path) -> list[Path]:
    inside = [file for file in sorted(folder.rglob("*")) if "/." not in f"/{file.relative_to(folder).as_posix()}"]
    # Beside the data that save_to_disk has written may lie what `datasets` remembers of computations.
    inside = [file for file in inside if file.is_file() and not file.match("cache-*.arrow")]
    # Plain ones first: packed files may be copies of them.
    choices = ([f for f in inside if of(f) in kinds] for kinds in KINDS for of in (lambda file: file.suffix, kind))
    return next(filter(None, choices), [])


def _by_split(files: dict[str, Path], root: Path, asked: Mapping[str, str]) -> dict[str, dict[str, Path]]:
    """Sort files into the splits that their names give, if every name gives one, or only those that are asked for."""
    words = {name.lower(): split for split, name in asked.items()} or SPLIT_WORDS
    splits: dict[str, dict[str, Path]] = {}
    for name, file in files.items():
        splits.setdefault(_split_of(Path(name), words), {})[name] = file
    others = splits.pop("", {})
    if others and not asked:
        if "train" in splits and len(splits) > 1 and len(files) > 2 * len(others):
            stray = f"'{root / next(iter(others))}' is of no split, while most of {len(files)} files are"
            raise UserError(f"data.path: {stray}: move it away, or leave it out with a glob")
        return {"": files}
    if "train" not in splits:
        raise UserError(f"data.path: '{root}' has {' and '.join(sorted(splits)) or 'no'} files but no train file")
    return splits


def _split_of(name: Path, words: Mapping[str, str]) -> str:
    """The split that a file's folders say, or else its name; words lie between any of `-._ 0-9`, as on the hub."""
    for part in (name.parent.as_posix(), name.name.removesuffix(name.suffix).removesuffix(kind(name))):
        if splits := {words[word] for word in re.split(r"[-._ 0-9/]+", part.lower()) if word in words}:
            return splits.pop() if len(splits) == 1 else ""
    return ""
