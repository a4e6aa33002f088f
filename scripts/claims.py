"""Write what kept rows say of the claims into the table of docs/results.md:  python scripts/claims.py"""

import pathlib

import pandas as pd

from posbench.claims import claim, reproduce
from posbench.results.frame import read

DOCS = pathlib.Path(__file__).parents[1] / "docs"
BEGIN, END = "<!-- claims: written by `python scripts/claims.py` -->\n", "<!-- end of claims -->\n"


def findings() -> pd.DataFrame:
    """What docs/rows/ledger.parquet says of all claims."""
    entries = claim.read(["all"])
    return reproduce.judged(entries, reproduce.needed(entries, []), read([DOCS / "rows" / "ledger.parquet"]))


def written(page: str) -> str:
    """The page with the table of all claims between its marks."""
    table = reproduce.table(findings())
    files = {entry.id: entry.path.name for entry in claim.read(["all"])}
    rows, not_run = ["| claim | outcome | ours | published |\n|---|---|---|---|\n"], []
    for row in table.frame.to_dict("records"):
        name = f"[{row['claim']}](../configs/claim/{files[row['claim']]})"
        if row["outcome"] == "not run":
            not_run.append(name)
        else:
            rows.append(f"| {name}: {row['sentence']} | {row['outcome']} | {row['ours']} | {row['published']} |\n")
    before, _, rest = page.partition(BEGIN)
    text = f"{table.notes}\n\n{''.join(rows)}\nNot run: {', '.join(not_run)}.\n"
    return f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = DOCS / "results.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
