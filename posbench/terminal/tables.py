"""The one form of tables in the terminal. A name in a cell is data, as everywhere on our consoles."""

from rich import box
from rich.console import Console
from rich.table import Table

from posbench.terminal.console import carries_unicode


def table(console: Console, title: str | None = None, caption: str | None = None, tight: bool = False) -> Table:
    """A table to be given columns and rows: a line below its head, texts to the left, ASCII where the console asks.

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
