"""`posbench show`: pictures of schemes, in the terminal or as a PNG file."""

from pathlib import Path

from posbench.errors import UserError
from posbench.show import panels


def main(
    names: list[str], png: Path | None = None, phrase: str | None = None, words: tuple[str, str] | None = None
) -> None:
    """Draw schemes side by side.

    Args:
        names: schemes.
        png: write the picture here; default: draw in the terminal.
        phrase, words: instead, move this phrase along a sentence and watch its two words' logit.

    Raises:
        UserError: an unknown scheme or word, `phrase` without `words` or the other way round, or no matplotlib.
    """
    if (phrase is None) != (words is None):
        raise UserError("--phrase and --words go together: --phrase 'my daughter called her' --words daughter,called")
    if phrase is not None and words is not None:
        _show_moved([panels.moved(name, phrase, words) for name in names], phrase, words, png)
    else:
        _show_pictures([panels.picture(name) for name in names], png)


def _show_pictures(pictures: list[panels.Picture], png: Path | None) -> None:
    if png is None:
        from posbench.show import terminal

        terminal.print_pictures(pictures)
    else:
        from posbench.show import plots

        plots.save_pictures(pictures, png)
        print(png)


def _show_moved(rows: list[panels.Moved], phrase: str, words: tuple[str, str], png: Path | None) -> None:
    if png is None:
        from posbench.show import terminal

        terminal.print_moved(rows, phrase, words)
    else:
        from posbench.show import plots

        plots.save_moved(rows, phrase, words, png)
        print(png)
