"""A server's own directory: record, spec, plan, counters and sockets of its processes, as long as one of them lives.

The server removes it when it ends. If the server was killed, its controller process removes it when the workers have
finished; if all of them were killed, the next start of a server does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from ..system.file_locks import create_locked, is_held
from ..system.files import replace_file
from .plan import PlanDirectory

PREFIX = "mlflow-llm-server-"
LOCK = "server.lock"  # held by the server as long as it lives
RECORD = "server.json"


class ServerRecord(Struct, frozen=True, kw_only=True):
    """The process of a server, and the URLs on which it listens; none yet while its models are loaded."""

    pid: int
    addresses: tuple[str, ...] = ()


def write_record(directory: Path, record: ServerRecord) -> None:
    """Replace the record of the server in ``directory``. Raises ``OSError``."""
    replace_file(directory / RECORD, msgspec.json.encode(record))


def running_servers() -> list[tuple[Path, ServerRecord]]:
    """Return the directories and records of this user's running servers, in the order of their starts."""
    found = []
    for directory in _directories():
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if is_held(str(directory / LOCK)):
                record = msgspec.json.decode((directory / RECORD).read_bytes(), type=ServerRecord)
                found.append((directory.stat().st_ctime, directory, record))
    return [(directory, record) for _, directory, record in sorted(found, key=lambda one: one[:2])]


@contextlib.contextmanager
def server_directory() -> Iterator[Path]:
    """Create a new server directory, and remove it at the end of the ``with`` block."""
    sweep()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = create_locked(str(directory / LOCK))  # created held, so that a sweep never sees it free
    write_record(directory, ServerRecord(pid=os.getpid()))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def sweep() -> None:
    """Remove the directories of servers that were killed together with their controller process and workers."""
    for directory in _directories():
        with contextlib.suppress(OSError):  # another server may sweep at the same time
            if _is_left(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _directories() -> list[Path]:
    """Return the server directories of this user."""
    with os.scandir(tempfile.gettempdir()) as found:
        named = [entry for entry in found if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)]
    own = []
    for entry in named:
        with contextlib.suppress(OSError):  # removed in the meantime
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                own.append(Path(entry.path))
    return own


def _is_left(directory: Path) -> bool:
    lock = directory / LOCK
    return lock.exists() and not is_held(str(lock)) and not PlanDirectory(directory).workers()
