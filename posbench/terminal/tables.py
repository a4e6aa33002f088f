"""The common form of tables in the terminal. Names in cells are data, as everywhere on posbench's consoles."""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import TextType

from posbench.terminal.console import carries_unicode

BORDER, TIGHT = 2, 1  # characters between two columns


def table(console: Console, title: TextType | None = None, caption: str | None = None, tight: bool = False) -> Table:
    """An empty table: a line below its head, text to the left, ASCII if the console needs it.

    Args:
        tight: one space between columns instead of two, for a table that needs all of 80 characters.
    """
    return Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD if carries_unicode(console) else box.ASCII2,
        padding=0 if tight else (0, 1),
        pad_edge=False,
        collapse_padding=True,
    )


def fitted(
    console: Console,
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    spare: Sequence[int],
    title: TextType | None = None,
    caption: str | Callable[[list[int]], str] | None = None,
) -> Table:
    """Lines of cells with as many columns as fit; labels are aligned left, numbers right.

    Args:
        spare: as of `fitting`.
        caption: or what makes it of the columns shown.
    """
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    shown = fitting(widths, spare, console.width)
    made = table(console, title, caption(shown) if callable(caption) else caption)
    for column in shown:
        made.add_column(heads[column], justify="right" if column else "left", no_wrap=True)
    for line in lines:
        made.add_row(*(line[column] for column in shown))
    return made


def fitting(widths: Sequence[int], spare: Sequence[int], room: int, border: int = BORDER) -> list[int]:
    """The columns to show: spare columns are dropped, least important first, until the rest fits.

    Args:
        widths: the least width of each column.
        spare: columns that can be left out, the least important first.
        room: characters of the console.
        border: characters between two columns.
    """
    shown = list(range(len(widths)))
    for column in spare:
        if sum(widths[one] for one in shown) + border * (len(shown) + 1) <= room:
            break
        shown.remove(column)
    return shown
