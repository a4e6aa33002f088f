"""Draw the pictures of docs/gallery.md by the commands that stand on it:  python scripts/gallery.py"""

import pathlib
import re
import shlex

from PIL import Image

from posbench.show import command

DOCS = pathlib.Path(__file__).parents[1] / "docs"

if __name__ == "__main__":
    page = (DOCS / "gallery.md").read_text(encoding="utf-8").replace("\\\n", "")
    for line in re.findall(r"^    posbench show (.*)$", page, re.MULTILINE):
        *names, option, file = shlex.split(line)
        phrase, words = None, None
        if "--phrase" in names:
            at = names.index("--phrase")
            names, phrase, words = names[:at], names[at + 1], names[at + 3]
        command.main(names, DOCS / "gallery" / file, phrase, words)
        path = DOCS / "gallery" / file
        Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)  # a third of the size
