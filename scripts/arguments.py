"""The common arguments of scripts that time a training step: shape, length and threads."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from posbench.bench import speed
from posbench.errors import PosbenchError


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with these arguments; `sizes` turns shape and length into sizes."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="3m", help=", ".join(speed.SHAPES))
    made.add_argument("--length", type=int, help="training length, at equal tokens per batch")
    made.add_argument("--threads", type=int, help="CPU threads")
    return made


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End with one line on errors, like the commands of posbench."""
    try:
        yield
    except PosbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
