"""Archives of rows: run folders without weights, packed as STUDY/RUN/FILE in a .tar.xz.

`docs/rows` of a checkout has those behind the figures of the pages; `scripts/keep_rows.py` makes them. An archive may
come from a stranger: anything else than a run's four files of rows and a study's records of its sweeps is refused,
and so is what is too large.
"""

import lzma
import re
import tarfile
from pathlib import Path

from posbench import files
from posbench.config.shipped import configs_dir
from posbench.errors import UserError
from posbench.run_folder import jsonl
from posbench.run_folder.names import BLOCKS, CONFIG, EVALUATION, RECORD

FILES = (CONFIG, EVALUATION, BLOCKS, RECORD)
LARGEST = 2**30  # bytes of an archive when unpacked; a run has about three million
_PIECE = 2**20  # bytes
_FOLDER = r"\w[\w.=+-]*/"
_OF_A_RUN, _OF_A_STUDY = "|".join(map(re.escape, FILES)), r"(?:sweep|tuning)\.json"
_NAME = re.compile(rf"{_FOLDER}(?:{_FOLDER}(?:{_OF_A_RUN})|{_OF_A_STUDY})", re.ASCII)


def kept(pattern: str = "*") -> list[Path]:
    """The archives of `docs/rows` whose name fits, sorted.

    Raises:
        UserError: posbench was installed from a wheel, which has none.
    """
    folder = configs_dir().parent / "docs" / "rows"
    if not folder.is_dir():
        raise UserError(
            "no kept rows here: they are in docs/rows of a checkout of posbench's repository, not in a wheel"
        )
    return sorted(folder.glob(f"{pattern}.tar.xz"))


def unpack(archive: Path, folder: Path) -> list[Path]:
    """Unpack an archive into an existing folder; the run folders, sorted.

    Raises:
        UserError: it cannot be read, is larger than `LARGEST`, or holds anything but files of rows in their places.
    """
    with files.of_this_process() as place:
        plain = place / "rows.tar"
        try:
            _decompress(archive, plain)
            with tarfile.open(plain, "r:") as packed:
                return _members(archive, packed, folder)
        except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise UserError(f"{archive} cannot be read as a .tar.xz of rows: {why}") from None


def _decompress(archive: Path, plain: Path) -> None:
    with files.open_itself(archive) as packed, lzma.open(packed) as data, plain.open("xb") as out:
        while piece := data.read(_PIECE):
            if out.tell() + len(piece) > LARGEST:
                raise UserError(f"{archive} unpacks to more than {LARGEST:,} bytes: refused")
            out.write(piece)


def _members(archive: Path, packed: tarfile.TarFile, folder: Path) -> list[Path]:
    runs = set()
    for member in packed:
        if member.isdir():
            continue
        if not member.isreg() or member.issparse() or not _NAME.fullmatch(member.name):
            raise UserError(f"{archive} has {member.name!r}: expected files such as STUDY/RUN/{EVALUATION} only")
        if member.size > jsonl.LARGEST:
            raise UserError(f"{archive}: {member.name} has {member.size:,} bytes: refused")
        content = packed.extractfile(member)
        assert content
        path = folder / member.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content.read())
        if path.name in FILES:
            runs.add(path.parent)
    return sorted(runs)
