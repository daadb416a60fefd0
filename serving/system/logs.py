"""Structured logs: one JSON object per line on standard error."""

from __future__ import annotations

import functools
import json
import logging
import time
from typing import Any

from .escape import visible
from .log_queue import QueuedHandler

PACKAGE = "mlflow_llm"  # so that its other parts log in the same form
NAME = f"{PACKAGE}.server"
STANDARD_ERROR = 2


class JsonLines(logging.Formatter):
    """The format ``time`` (ISO 8601, UTC), ``level``, ``event``, then the record's ``fields``; a traceback is one
    string.

    A JSON parser returns the original texts, but the line itself has no raw control characters (``visible``).
    """

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "pid": record.process,
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return visible(json.dumps(line, ensure_ascii=False, default=str))


def logger() -> logging.Logger:
    return logging.getLogger(NAME)


def configure(level: str = "info") -> None:
    """Send this server's log to standard error, once."""
    log = logging.getLogger(PACKAGE)
    log.setLevel(level.upper())
    log.propagate = False
    if not log.handlers:
        log.addHandler(handler())


@functools.cache
def handler() -> logging.Handler:
    """Return the process's one handler for standard error, which keeps the lines of all loggers in order."""
    found = QueuedHandler(STANDARD_ERROR)
    found.setFormatter(JsonLines())
    return found


def event(name: str, *, level: int = logging.INFO, exc_info: bool = False, **fields: Any) -> None:
    """Log ``name`` with ``fields``; a field that is None is left out."""
    shown = {key: value for key, value in fields.items() if value is not None}
    logger().log(level, name, extra={"fields": shown}, exc_info=exc_info)
