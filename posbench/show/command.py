"""`posbench show`: pictures of encodings and of trained runs, as a PNG file."""

from pathlib import Path

from posbench.errors import UserError
from posbench.show import panels, plots, schemes

PNG = "show.png"


def main(names: list[str], png: Path = Path(PNG), phrase: str | None = None, words: str | None = None) -> None:
    """Draw encodings and trained runs side by side.

    Args:
        names: encodings or patterns of layers, each followed by its options (rope base=100), and run folders.
        png: write the picture here.
        phrase: draw instead how the logit of two of its words changes as the phrase moves along a sentence.
        words: these two words, separated by a comma.

    Raises:
        UserError: an unknown encoding, option or word, a folder that is no run, or only one of `phrase` and `words`.
    """
    asked = schemes.parted(names)
    if phrase is None and words is None:
        pictures = [_picture(name, options) for name, options in asked]
    elif phrase is None or words is None:
        raise UserError("--phrase and --words go together: --phrase 'my daughter called her' --words daughter,called")
    elif run := next((name for name, _ in asked if _is_run(name)), None):
        raise UserError(f"--phrase takes names of encodings, such as rope: {run} is a run")
    else:
        chosen = [schemes.scheme(name, options, panels.SHAPE) for name, options in asked]
        pictures = [panels.moving(chosen, phrase, _pair(words))]
    plots.save_pictures(pictures, png)
    print(png)


def _picture(name: str, options: list[str]) -> panels.Picture:
    if not _is_run(name):
        return panels.picture(schemes.scheme(name, options, panels.SHAPE))
    if options:
        raise UserError(f"{name} is a run with fixed options: give {options[0]} after the name of an encoding")
    from posbench.show import trained

    return trained.picture(Path(name))


def _is_run(word: str) -> bool:
    """Whether a word is the path of a folder; an encoding of the same name has precedence."""
    return not schemes.is_scheme(word) and ("/" in word or Path(word).is_dir())


def _pair(words: str) -> tuple[str, str]:
    parts = tuple(word.strip() for word in words.split(","))
    if len(parts) != 2 or parts[0].lower() == parts[1].lower():
        raise UserError(f"--words is '{words}': expected two different words of the phrase, such as daughter,called")
    return parts[0], parts[1]
