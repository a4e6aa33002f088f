"""Write the findings of kept rows into docs/claims.md, with their picture:  python scripts/claims.py"""

import pathlib
import shutil
import tarfile
import tempfile

from posbench.ledger import claim, page, reproduce
from posbench.ledger.outcome import Finding
from posbench.report import figures

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def kept() -> list[Finding]:
    """The findings of all claims by docs/rows/ledger*.tar.xz."""
    entries = claim.read(["all"])
    usual = reproduce.needed(entries, [])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for path in (DOCS / "rows").glob("ledger*.tar.xz"):
            with tarfile.open(path) as packed:
                packed.extractall(folder, filter="data")
        settings = {name: text for name, text in claim.settings().items() if (folder / f"ledger_{name}").is_dir()}
        return reproduce.judged(entries, usual, reproduce.elsewhere(entries, [], usual, settings), folder)


def main() -> None:
    findings = kept()
    text = (DOCS / reproduce.PAGE).read_text(encoding="utf-8")
    (DOCS / reproduce.PAGE).write_text(page.written(text, findings), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        if figures.write(page.picture(findings), pathlib.Path(folder), page.PICTURE):
            shutil.copy(pathlib.Path(folder, f"{page.PICTURE}.png"), DOCS)
    print(page.summary(findings))


if __name__ == "__main__":
    main()
