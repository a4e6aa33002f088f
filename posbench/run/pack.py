"""A study as one file, with all that a colleague needs to report, evaluate and extend
it elsewhere.

It is a zip of `STUDY/RUN/`, each with its settings, record, rows, tokenizer and newest
weights, of `STUDY/code/` with the files of own encodings, of `STUDY/tokenizer/` with
those of typed tokenizers, and, if asked for, of `STUDY/text/`. Nothing in it is
executed: code that it brings waits to be approved.
"""

import glob
import logging
import tempfile
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from posbench import files
from posbench.data import sources, tokenizer
from posbench.errors import InUse, UserError
from posbench.run import CONFIG, RECORD, ROWS, TOKENIZER, checkpoint
from posbench.run.folder import in_use
from posbench.run.model import tokenizer_of
from posbench.run.rows import rows_and_faults
from posbench.run.saved import load_any, load_record, load_settings

logger = logging.getLogger(__name__)
# folders beside the runs of a study
CODE = "code"
TEXT = "text"
TOKENIZERS = "tokenizer"


def pack(
    folders: Collection[Path], path: Path, optimizer: bool = False, text: bool = False
) -> None:
    """Write runs into one new file; `optimizer`: with what training goes on from,
    `text`: with the files of their text.

    Raises UserError if the file exists, a run cannot be read, or its text or the file
    of its encoding is gone; InUse if a process has one of the runs.
    """
    if path.exists():
        raise UserError(f"{path} exists: expected a new file")
    contents: dict[str, Path] = {}
    for folder in folders:
        if in_use(folder):
            raise InUse(f"{folder} is in use by another process: nothing was packed")
        contents |= _contents(folder, optimizer, text)
    temporary = files.temporary(path)
    with files.full_disk_as_failure(path):
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED) as archive:
            for name, file in contents.items():
                if not file.is_file():
                    raise UserError(f"{file} is gone: expected it, for {name}")
                archive.write(file, name)
        temporary.rename(path)


def _contents(folder: Path, optimizer: bool, text: bool) -> dict[str, Path]:
    """Return the files of a run, each by its name in the zip."""
    config = load_any(folder)
    run = folder.resolve()
    study = run.parent.name
    names = [CONFIG, RECORD, ROWS, TOKENIZER]
    if config.is_trained_here:
        parts: tuple[str, ...] = checkpoint.PARTS
        if not optimizer:
            parts = (checkpoint.WEIGHTS, checkpoint.STATE)
        saved = checkpoint.newest(folder, parts)
        if saved:
            top = f"checkpoint/{saved.path.name}"
            names += [f"{top}/{part}" for part in (checkpoint.MANIFEST, *parts)]
    contents = {}
    for name in names:
        if (folder / name).is_file():  # a task has no tokenizer
            contents[f"{study}/{run.name}/{name}"] = folder / name
    for place in _places(load_settings(folder)):
        code = Path(place["file"].rpartition(":")[0]).expanduser()
        contents[f"{study}/{CODE}/{_short(place)}.py"] = code
    of_tokenizer = config.data.tokenizer_file_sha256
    if of_tokenizer:
        name = f"{study}/{TOKENIZERS}/{of_tokenizer[:8]}.json"
        contents[name] = tokenizer.file_of(config.data.tokenizer)
    digest = config.data.text_sha256
    if text and digest:
        sources.same_text(config.data)
        for name, file in sources.files_of(config.data):
            contents[f"{study}/{TEXT}/{digest[:8]}/{name}"] = file
    return contents


def unpack(path: Path, outputs: Path) -> list[Path]:
    """Take the runs of a packed file into `outputs`, and return their folders. A run
    or file that is there already stays as it is.

    Raises UserError, before any run is taken in, if the file is no pack, or if a run's
    id or a digest is not that of its files.
    """
    outputs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=outputs, prefix=".tmp-") as folder:
        new = Path(folder)
        try:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(new)  # which leaves none outside of it
        except (zipfile.BadZipFile, OSError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{path}: {reason}: expected a file of --pack") from None
        found = sorted(record.parent for record in new.glob(f"*/*/{RECORD}"))
        if not found:
            raise UserError(f"{path} has no runs: expected a file of --pack")
        for run in found:
            try:
                _refuse_faults(run)
            except UserError as error:
                fault, _, _ = str(error).replace(f"{new}/", "").partition("; ")
                raise UserError(f"{path}: {fault}; pack it anew") from None
            _write_places(run, outputs / run.parent.name)
        for part in (CODE, TEXT, TOKENIZERS):
            for file in filter(Path.is_file, new.glob(f"*/{part}/**/*")):
                place = outputs / file.relative_to(new)
                if not place.exists():  # names have digests
                    place.parent.mkdir(parents=True, exist_ok=True)
                    file.rename(place)
        taken = []
        for run in found:
            place = outputs / run.relative_to(new)
            taken.append(place)
            if place.exists():
                logger.warning("%s exists: it stays as it is", place)
                continue
            place.parent.mkdir(exist_ok=True)
            run.rename(place)
    return taken


def _refuse_faults(run: Path) -> None:
    """Raise UserError if a part of a run folder is not that of its record."""
    load_any(run)
    if load_record(run).id != run.name:
        raise UserError(f"{run} is another run: expected {load_record(run).id}")
    if (run / TOKENIZER).is_file():
        tokenizer_of(run)
    _, faults = rows_and_faults(run)
    for saved in checkpoint.every(run):
        fault = saved.fault((checkpoint.WEIGHTS, checkpoint.STATE))
        if fault:
            faults.append(f"{saved.path} {fault}")
    if faults:
        raise UserError(faults[0])


def _write_places(run: Path, study: Path) -> None:
    """Write into a run's settings where its code, its tokenizer's file and its text
    will be; none of these places is part of its id.
    """
    settings = load_settings(run)
    for place in _places(settings):
        _, _, name = place["file"].rpartition(":")
        place["file"] = f"{study / CODE / _short(place)}.py:{name}"
    data = settings["data"]
    of_tokenizer = data.get("tokenizer_file_sha256")
    if of_tokenizer:
        data["tokenizer"] = f"{study / TOKENIZERS / of_tokenizer[:8]}.json"
    digest = data.get("text_sha256") or ""
    text = run.parent / TEXT / digest[:8]
    if digest and text.is_dir():
        several = "/**" if glob.has_magic(data["path"]) else ""
        data["path"] = f"{study / TEXT / digest[:8]}{several}"
    content = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    files.write(run / CONFIG, content.encode())


def _places(settings: Any) -> list[dict[str, Any]]:
    """Return each part of a configuration that names a file of code, at any depth."""
    if not isinstance(settings, dict):
        return []
    found = [settings] if settings.get("file") else []
    for value in settings.values():
        found += _places(value)
    return found


def _short(place: dict[str, Any]) -> str:
    """Return a name for a file of code: its class's and the start of its digest."""
    _, _, name = place["file"].rpartition(":")
    return f"{name}-{str(place.get('file_sha256'))[:8]}"
