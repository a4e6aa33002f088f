"""`log.txt` of a run folder: what posbench logs, one line per record."""

import contextlib
import logging
from collections.abc import Iterator

from posbench.run_folder.facts import iso
from posbench.terminal.exits import Escaped


class OneLine(Escaped):
    """One line per record, in UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return iso(record.created)


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Stay silent: a full disk ends the run by the records that matter, not by a traceback per line here."""


@contextlib.contextmanager
def heard_by(handler: logging.Handler) -> Iterator[None]:
    """Within it, posbench's log goes to a handler, too, from INFO on if no other level is set."""
    logger = logging.getLogger("posbench")
    level = logger.level
    logger.setLevel(level or logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
