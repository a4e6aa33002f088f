"""Pack the rows of studies, without weights, so that others continue them and recompute what was found.

    python scripts/keep_rows.py docs/rows/ledger.tar.xz outputs/ledger --final
    mkdir -p outputs && tar xf docs/rows/ledger.tar.xz -C outputs   # there: its runs count as done

Of each run that is done it takes config.yaml, run.json, evaluation.jsonl and evaluation_blocks.jsonl. --final takes the
blocks that verdicts need, those of a text at the last checkpoint: a quarter of the size. The same runs make the same file.
"""

import argparse
import io
import json
import lzma
import tarfile
from pathlib import Path

from posbench import files
from posbench.report.comparison import load
from posbench.run_folder import archive, finding
from posbench.run_folder.names import BLOCKS


def pack(folders: list[Path], final: bool = False) -> bytes:
    """The archive of run folders; `final` takes only the blocks that verdicts need."""
    paths = {run / name: f"{run.parent.name}/{run.name}/{name}" for run in folders for name in archive.FILES}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9 | lzma.PRESET_EXTREME) as out:
        for path, name in sorted(paths.items(), key=lambda item: item[1]):
            content = files.read(path, archive.LARGEST)
            content = of_verdicts(content) if final and path.name == BLOCKS else content
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def of_verdicts(blocks: bytes) -> bytes:
    """Those of the last checkpoint; none of a task, whose verdicts count seeds by their rows."""
    lines = [(json.loads(line), line) for line in blocks.splitlines(keepends=True)]
    last = max((block["checkpoint_step"] for block, _ in lines), default=None)
    return b"".join(line for block, line in lines if block["checkpoint_step"] == last and block["task"] is None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="a .tar.xz; replaced if it exists")
    parser.add_argument("studies", type=Path, nargs="+", help="study folders or run folders")
    parser.add_argument("--final", action="store_true", help="only the blocks that verdicts need")
    given = parser.parse_args()
    folders = finding.run_folders(given.studies)
    done = [folder for folder in folders if load.read(folder).done]
    files.write(given.archive, content := pack(done, given.final))
    print(f"{given.archive}: {len(done)} runs, {len(content):,} bytes; {len(folders) - len(done)} left out, not done")


if __name__ == "__main__":
    main()
