"""One colour, mark and dash per scheme, the same in every report whatever else is in it.

The colours are those of Okabe and Ito with black and grey, which the colour-blind tell apart; yellow is left out, being
too light for a line on white. There are more schemes than colours: the mark tells those of one colour apart.
"""

import dataclasses
import hashlib

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKS = "os^DvPX<>p"  # as matplotlib names them
DASHES = ("", "6 2", "2 2", "8 2 2 2")  # lengths of strokes and gaps, as in SVG

# Schemes that often meet in one picture differ in colour. What is not listed here gets its style from its name.
_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, _GREY = range(8)
_ASSIGNED = {
    "rope": (_BLUE, "o"), "alibi": (_RED, "s"), "t5": (_GREEN, "^"), "sinusoidal": (_PINK, "D"),
    "kerple_log": (_ORANGE, "v"), "fire": (_SKY, "P"), "none": (_BLACK, "X"), "learned": (_GREY, "p"),
    "xpos": (_BLUE, "s"), "partial_rope": (_BLUE, "^"), "p_rope": (_BLUE, "D"), "pope": (_BLUE, "v"),
    "kerple_power": (_ORANGE, "s"), "sandwich": (_RED, "D"), "fox": (_ORANGE, "^"), "shaw": (_GREEN, "o"),
    "deberta": (_GREEN, "D"), "transformer_xl": (_GREEN, "s"), "tupe": (_GREEN, "v"), "cope": (_BLACK, "o"),
    "dape": (_SKY, "o"), "path": (_SKY, "s"), "stick_breaking": (_SKY, "^"), "randomized": (_ORANGE, "o"),
    "sine": (_PINK, "s"), "index": (_GREY, "s"), "minmax": (_GREY, "^"), "binary": (_GREY, "D"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Style:
    colour: str
    mark: str
    dash: str


def style(name: str, label: str) -> Style:
    """The style of a scheme; a variant of it (`rope base=64`) has its colour and another mark and dash."""
    colour, mark = _ASSIGNED.get(name, (_number(name) % len(COLOURS), MARKS[_number(name) // 8 % len(MARKS)]))
    if label == name:
        return Style(COLOURS[colour], mark, DASHES[0])
    chosen = _number(label)
    return Style(COLOURS[colour], MARKS[chosen % len(MARKS)], DASHES[1 + chosen // len(MARKS) % (len(DASHES) - 1)])


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:4], "big")
