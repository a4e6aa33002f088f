"""Write the findings of kept rows into docs/claims.md, with their picture:  python scripts/claims.py"""

import pathlib

from posbench.ledger import claim, page, reproduce
from posbench.ledger.outcome import Finding
from posbench.report import charts
from posbench.results.frame import read

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def kept() -> list[Finding]:
    """The findings of all claims by docs/rows/ledger.parquet."""
    entries = claim.read(["all"])
    return reproduce.judged(entries, reproduce.needed(entries, []), read([DOCS / "rows" / "ledger.parquet"]))


def main() -> None:
    findings = kept()
    text = (DOCS / reproduce.PAGE).read_text(encoding="utf-8")
    (DOCS / reproduce.PAGE).write_text(page.written(text, findings), encoding="utf-8")
    if (picture := page.picture(findings)) is not None:
        (DOCS / f"{page.PICTURE}.png").write_bytes(charts.drawn(picture, "png"))
    print(page.summary(findings))


if __name__ == "__main__":
    main()
