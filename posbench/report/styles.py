"""A colour, mark and dash for each scheme of a report; no two of them share colour and mark.

Schemes listed here look the same in every report; the others take free looks. The colours are those of Okabe and Ito
with black, which colour-blind readers can tell apart. Tol's wine replaces their yellow, which is too light for a line
on white. Grey is for comparisons. There are more schemes than colours: marks tell schemes of one colour apart.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MARKS = "os^DvPX<>p"  # matplotlib's names
DASHES = ("", "6 2", "2 2", "8 2 2 2")  # lengths of strokes and gaps, as in SVG

# Schemes that often share a picture differ in colour: the best-known ones, and those of one family.
_BLUE, _RED, _GREEN, _PINK, _ORANGE, _SKY, _BLACK, _WINE = range(8)
_LISTED = {
    "rope": (_BLUE, "o"), "alibi": (_RED, "s"), "t5": (_GREEN, "^"), "sinusoidal": (_PINK, "D"),
    "fox": (_ORANGE, "^"), "fire": (_SKY, "P"), "none": (_BLACK, "X"), "learned": (_WINE, "p"),
    "binary": (_ORANGE, "D"), "index": (_RED, "p"), "minmax": (_GREEN, "o"), "sine": (_SKY, "s"),
    "llama3": (_WINE, "^"), "longrope": (_SKY, "v"), "ntk": (_RED, "^"), "p_rope": (_PINK, "^"),
    "partial_rope": (_GREEN, "v"), "pi": (_SKY, "D"), "xpos": (_ORANGE, "s"), "yarn": (_BLACK, "s"),
    "cope": (_BLACK, "o"), "path": (_BLUE, "^"), "shaw": (_PINK, "s"), "stick_breaking": (_WINE, "o"),
    "layered": (_GREEN, "D"), "randomized": (_ORANGE, "o"), "pope": (_BLUE, "v"), "deberta": (_GREEN, "s"),
    "transformer_xl": (_WINE, "s"), "tupe": (_BLACK, "v"), "dape": (_SKY, "o"), "kerple_log": (_ORANGE, "v"),
    "kerple_power": (_BLUE, "s"), "sandwich": (_RED, "D"), "cable": (_ORANGE, "<"), "projected_bias": (_GREEN, "<"),
    "grape_a": (_SKY, "<"), "dynamic_bias": (_PINK, "<"), "dynamic_ntk": (_RED, "<"),
    "ntk_by_parts": (_BLACK, "<"), "lerope": (_BLUE, "<"), "grape_m": (_GREEN, ">"), "decoupled_rope": (_SKY, ">"),
    "fope": (_PINK, ">"), "canon": (_ORANGE, ">"), "selective_rope": (_WINE, "<"), "cca": (_WINE, ">"),
    "rope_pp": (_BLUE, ">"), "temperature": (_RED, ">"), "learned_sinks": (_BLACK, ">"), "hope": (_BLUE, "D"),
    "carope": (_ORANGE, "p"), "liere": (_GREEN, "P"), "comrope": (_PINK, "P"), "path_fox": (_BLACK, "^"),
    "wall": (_RED, "v"), "fox_pro": (_ORANGE, "X"), "dape_v2": (_SKY, "X"), "spe": (_WINE, "D"),
    "drope": (_WINE, "v"), "shape": (_BLACK, "P"), "cape": (_RED, "P"), "bipe": (_PINK, "X"),
    "abacus": (_ORANGE, "P"), "algebraic": (_BLUE, "P"), "bam": (_PINK, "v"), "repo": (_GREEN, "X"),
    "coupling": (_BLACK, "p"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Style:
    colour: str
    mark: str
    dash: str


def assign(schemes: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """Label -> style, for the name and the label of every scheme of a report.

    A variant (`rope base=64`) has the colour of its name while marks are left. If the scheme itself is not in the
    report, its first variant takes its look. Beyond eighty schemes, dashes tell them apart.
    """
    known_first = sorted(schemes, key=lambda scheme: (scheme[0] not in _LISTED, scheme[0] != scheme[1], scheme))
    taken: list[tuple[int, str]] = []
    variants: Counter[str] = Counter()
    found = {}
    for name, label in known_first:
        look = _free(_LISTED.get(name), taken)
        dash = DASHES[(variants[name] + taken.count(look)) % len(DASHES)]
        found[label] = Style(COLOURS[look[0]], look[1], dash)
        taken.append(look)
        variants[name] += 1
    return found


def _free(listed: tuple[int, str] | None, taken: list[tuple[int, str]]) -> tuple[int, str]:
    """A free look: the listed one, else one of the same colour, else the least used."""
    looks = list(itertools.product(range(len(COLOURS)), MARKS))
    often = Counter(taken)
    fewest = min(often[look] for look in looks)
    colours, marks = Counter(colour for colour, _ in taken), Counter(mark for _, mark in taken)

    def cost(look: tuple[int, str]) -> tuple[bool, bool, int, int]:
        colour, mark = look
        own = listed is not None and colour == listed[0]
        return look != listed, not own, colours[colour], marks[mark]

    return min((look for look in looks if often[look] == fewest), key=cost)
