"""Write README's folded table of encodings from the encodings themselves:  make
readme
"""

import logging
import pathlib

from posbench import encodings, listing
from posbench.config.shipped import configs_dir
from posbench.encodings.wrapper import Wrapper

README = pathlib.Path(__file__).parents[1] / "README.md"
BEGIN = "<!-- encodings: written by `make readme` -->\n"
END = "<!-- end of encodings -->\n"


def written(text: str) -> str:
    """Return the page with an updated table of encodings."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    names = table()
    summary = f"<summary>All {names.count('`') // 2} names, by where they act</summary>"
    folded = f"<details>\n{summary}\n\n{names}\n</details>\n"
    return f"{before}{BEGIN}{folded}{END}{after}"


def table() -> str:
    """Return a table of the repository's own encodings by where they act, in the order
    of the forward pass.
    """
    groups: dict[str, list[str]] = {}
    for path in sorted((configs_dir() / "encoding").glob("*.yaml")):
        if issubclass(encodings.load(path.stem), Wrapper):
            acts = encodings.OTHERS
        else:
            acts = listing.encoding_row(path.stem)["acts"]
        groups.setdefault(acts, []).append(f"`{path.stem}`")

    def place(group: str) -> list[int]:
        return [encodings.FAMILIES.index(part) for part in group.split(", ")]

    rows = [
        f"| {group} | {' '.join(groups[group])} |"
        for group in sorted(groups, key=place)
    ]
    return "\n".join(["| acts on | encodings |", "|---|---|", *rows]) + "\n"


if __name__ == "__main__":
    # hides warnings of encodings at the demo's size
    logging.getLogger("posbench").setLevel(logging.ERROR)
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
