"""Write the findings on claims and published numbers from kept rows into
docs/results.md:  python scripts/claims.py
"""

import pathlib

from posbench.claims import claim, reproduce
from posbench.listing import listing_rows
from posbench.results.frame import read
from posbench.terminal.console import plural

DOCS = pathlib.Path(__file__).parents[1] / "docs"
BEGIN = "<!-- claims: written by `python scripts/claims.py` -->\n"
END = "<!-- end of claims -->\n"
STUDIES = ("ledger", "nanogpt", "repro")  # of docs/rows
# Results that need no training. tests/test_rope.py and tests/test_tasks.py compute
# them, the bases for heads of 128.
UNTRAINED = """\
| RoPE's smallest bases of two digits for 1k, 2k ... 32k tokens, untrained | 3 of 6 reproduced \
| 4.3e3, 1.6e4, 2.9e4, 8.4e4, 3.5e5, 6.3e5 | 4.3e3, 1.6e4, 2.7e4, 8.4e4, 3.1e5, 6.4e5 (Men et al. 2024, Table 2) |
| One layer whose logits depend on distances [cannot copy five bits](#copying-five-bits) \
| reproduced | 4 bits, by a linear program | fewer than 5 (Wen et al. 2026, Theorem 3.1) |
"""


def written(page: str) -> str:
    """Return the page with the table of all claims between its marks."""
    entries = claim.read(["all"])
    # of a run in two files, the rows of the first count
    studies = read([DOCS / "rows" / f"{name}.parquet" for name in STUDIES])
    plans = reproduce.plans_of_claims(entries, [])
    table = reproduce.table(reproduce.judge_claims(entries, plans, studies))
    entry_of = {entry.id: entry for entry in entries}
    titles = {row["name"]: row["title"] for row in listing_rows(["claims"])["claims"]}
    rows = ["| claim | outcome | ours | published |\n|---|---|---|---|\n", UNTRAINED]
    not_run = []
    found = table.frame.to_dict("records")
    # published numbers stand first
    found.sort(key=lambda row: not entry_of[row["claim"]].is_published)
    for row in found:
        entry = entry_of[row["claim"]]
        name = f"[{entry.id}](../configs/claim/{entry.path.name})"
        outcome, ours = row["outcome"], row["ours"]
        if outcome == "not run":
            not_run.append(name)
            continue
        title = titles[entry.id]
        if entry.is_published:
            title += f" Deviates: {entry.claim.note}."
            ours += f", {plural(round(row['cpu_minutes']), 'CPU-minute')}"
        rows.append(f"| {name}: {title} | {outcome} | {ours} | {row['published']} |\n")

    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    text = f"{table.notes}\n\n{''.join(rows)}\nNot run: {', '.join(not_run)}.\n"
    return f"{before}{BEGIN}{text}{END}{after}"


if __name__ == "__main__":
    path = DOCS / "results.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
