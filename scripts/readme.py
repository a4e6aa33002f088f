"""Write README's folded table of encodings from the encodings themselves:  make readme"""

import logging
import pathlib

from posbench import encodings, listing
from posbench.config.shipped import configs_dir
from posbench.encodings.wrapper import Wrapper

README = pathlib.Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- encodings: written by `make readme` -->\n"
END = "<!-- end of encodings -->\n"


def written(text: str) -> str:
    """The page with an updated table of encodings."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{README.name} lacks the lines around the table: {BEGIN.strip()} {END.strip()}")
    names = table()
    summary = f"<summary>All {names.count('`') // 2} names, by where they act</summary>"
    return f"{before}{begin}<details>\n{summary}\n\n{names}\n</details>\n{end}{after}"


def table() -> str:
    """The repository's own encodings by where they act, in the order of the forward pass."""
    groups: dict[str, list[str]] = {}
    for path in sorted((configs_dir() / "encoding").glob("*.yaml")):
        groups.setdefault(_acts(path.stem), []).append(f"`{path.stem}`")

    def place(group: str) -> list[int]:
        return [encodings.FAMILIES.index(part) for part in group.split(", ")]

    rows = [f"| {group} | {' '.join(groups[group])} |" for group in sorted(groups, key=place)]
    return "\n".join(["| acts on | encodings |", "|---|---|", *rows]) + "\n"


def _acts(name: str) -> str:
    return encodings.OTHERS if issubclass(encodings.load(name), Wrapper) else listing.describe(name)["acts"]


if __name__ == "__main__":
    logging.getLogger("posbench").setLevel(logging.ERROR)  # hides warnings of encodings at the demo's size
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
