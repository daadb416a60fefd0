"""Logs: on standard error one JSON object per line, or lines for people where that is a terminal; in a file, if one is
named, always JSON."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from typing import Any

from .escape import visible
from .log_queue import QueuedFile, QueuedHandler

PACKAGE = "mlflow_llm"  # so that its other parts log in the same form
NAME = f"{PACKAGE}.server"
STANDARD_ERROR = 2
COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
RESET = "\x1b[0m"


class JsonLines(logging.Formatter):
    """The format ``time`` (ISO 8601, UTC), ``level``, ``event``, then the record's ``fields``.

    ``message`` is the sentence that people read, where there is one; a traceback is one string.

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
        if sentence := getattr(record, "sentence", None):
            line["message"] = sentence
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return visible(json.dumps(line, ensure_ascii=False, default=str))


class HumanLines(logging.Formatter):
    """The format of lines for a person at a terminal: local time, level, and the record's sentence; without one, its
    event, then the fields as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        text = getattr(record, "sentence", None) or self._event(record)
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return human_line(text, record.levelname.lower(), record.created)

    def _event(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        shown = " ".join(f"{name}={_plain(value)}" for name, value in fields.items())
        return f"{record.getMessage()}{f'  {shown}' if shown else ''}"


def human_line(text: str, level: str = "info", when: float | None = None) -> str:
    """Return a line as people read it on a terminal, in colour unless NO_COLOR is set."""
    clock = time.strftime("%H:%M:%S", time.localtime(when))
    code = "" if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb" else COLOURS.get(level, "")
    name = f"{code}{level}{RESET if code else ''}"
    return f"{clock} {name} {visible(text)}"


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return os.isatty(STANDARD_ERROR)


def _plain(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return json.dumps(text, ensure_ascii=False) if not text or " " in text else text


def logger() -> logging.Logger:
    return logging.getLogger(NAME)


def configure(level: str = "info", file: str | None = None) -> None:
    """Send this server's log to standard error and, if one is named, to ``file``, once."""
    log = logging.getLogger(PACKAGE)
    log.setLevel(level.upper())
    log.propagate = False
    for one in handlers(file):
        if one not in log.handlers:
            log.addHandler(one)


def take_over(level: str = "info", file: str | None = None) -> None:
    """Configure the log as ``configure`` does, for a process of which standard error is the log alone: what libraries
    log and warn of there gets the same form."""
    configure(level, file)
    root = logging.getLogger()
    root.handlers[:] = handlers(file)
    logging.captureWarnings(True)
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # read when it is imported, in child processes too
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar would be no line of a log


def is_configured() -> bool:
    """Return whether this process has a log, so that what it says belongs there."""
    return bool(logging.getLogger(PACKAGE).handlers)


def flush() -> None:
    """Wait until what was logged is written, but not for a reader that does not read."""
    for one in logging.getLogger(PACKAGE).handlers:
        one.flush()


def handlers(file: str | None = None) -> list[logging.Handler]:
    """Return the process's handlers: for standard error, and for ``file`` if one is named."""
    return [handler(), *([file_handler(file)] if file is not None else [])]


@functools.cache
def handler() -> logging.Handler:
    """Return the process's one handler for standard error, which keeps the lines of all loggers in order."""
    found = QueuedHandler(STANDARD_ERROR)
    found.setFormatter(HumanLines() if is_terminal() else JsonLines())
    return found


@functools.cache
def file_handler(path: str) -> logging.Handler:
    """Return the process's one handler that appends JSON to a file. Raises ``OSError``."""
    found = QueuedFile(path)
    found.setFormatter(JsonLines())
    return found


def event(
    name: str, *, level: int = logging.INFO, exc_info: bool = False, sentence: str | None = None, **fields: Any
) -> None:
    """Log ``name`` with ``fields``; a field that is None is left out. A person reads ``sentence`` in their place."""
    shown = {key: value for key, value in fields.items() if value is not None}
    logger().log(level, name, extra={"fields": shown, "sentence": sentence}, exc_info=exc_info)
