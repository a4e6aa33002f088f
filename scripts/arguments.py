"""What the scripts that time a training step are told alike: its shape, its length and the threads."""

import argparse
import contextlib
import sys
from collections.abc import Iterator

from posbench.bench import speed
from posbench.errors import PosbenchError


def parser(description: str | None) -> argparse.ArgumentParser:
    """One that knows these; `sizes` makes sizes of shape and length."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="3m", help=", ".join(speed.SHAPES))
    made.add_argument("--length", type=int, help="training length, with as many tokens per batch")
    made.add_argument("--threads", type=int, help="CPU threads")
    return made


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """As the commands of posbench end."""
    try:
        yield
    except PosbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
