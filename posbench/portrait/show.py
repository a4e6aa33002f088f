"""`posbench show`: pictures of encodings, in the terminal or as a PNG file."""

from pathlib import Path

from posbench.errors import UserError
from posbench.portrait import panels


def main(names: list[str], png: Path | None = None, phrase: str | None = None, words: str | None = None) -> None:
    """Draw encodings side by side.

    Args:
        names: encodings.
        png: write the picture here; default: draw in the terminal.
        phrase: instead, move this phrase along a sentence and watch the logit of two of its words.
        words: those two, separated by a comma.

    Raises:
        UserError: an unknown encoding or word, `phrase` without `words` or the other way round, or no matplotlib.
    """
    if phrase is None and words is None:
        _show_pictures([panels.picture(name) for name in names], png)
        return
    if phrase is None or words is None:
        raise UserError("--phrase and --words go together: --phrase 'my daughter called her' --words daughter,called")
    pair = _pair(words)
    _show_moved([panels.moved(name, phrase, pair) for name in names], phrase, pair, png)


def _pair(words: str) -> tuple[str, str]:
    parts = tuple(word.strip() for word in words.split(","))
    if len(parts) != 2 or parts[0].lower() == parts[1].lower():
        raise UserError(f"--words is '{words}': expected two different words of the phrase, such as daughter,called")
    return parts[0], parts[1]


def _show_pictures(pictures: list[panels.Picture], png: Path | None) -> None:
    if png is None:
        from posbench.portrait import characters

        characters.print_pictures(pictures)
    else:
        from posbench.portrait import plots

        plots.save_pictures(pictures, png)
        print(png)


def _show_moved(rows: list[panels.Moved], phrase: str, words: tuple[str, str], png: Path | None) -> None:
    if png is None:
        from posbench.portrait import characters

        characters.print_moved(rows, phrase, words)
    else:
        from posbench.portrait import plots

        plots.save_moved(rows, phrase, words, png)
        print(png)
