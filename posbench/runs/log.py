"""`log.txt` of a run folder: what posbench logs, one line per record."""

import logging

from posbench.runs.facts import iso
from posbench.runs.redaction import redact
from posbench.terminal.exits import spelt_out


class OneLine(logging.Formatter):
    """One line per record in UTC: a newline in a name cannot forge a line, and secrets stay out."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return iso(record.created)

    def format(self, record: logging.LogRecord) -> str:
        return spelt_out(redact(super().format(record)))


class LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Stay silent: a full disk ends the run by the records that matter, not by a traceback per line here."""
