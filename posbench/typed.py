"""What the user typed, apart from what was read from a file: only the first can name
code that is run.
"""

import re

PLACE = re.compile(r"(.+\.py)(?::(\w+))?")  # a class in a file: path/to/file.py:Class


class Typed(str):
    """A word that the user typed at the command line or gave to a Python call.

    What a file says is a plain `str`. Most operations on a word also return one, so
    that a word whose origin was forgotten names no code.
    """

    __slots__ = ()


def rewritten(word: str, text: str) -> str:
    """Return a text that was made from a word, as typed as the word is."""
    return type(word)(text)
