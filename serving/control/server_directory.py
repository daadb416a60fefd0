"""A server's own directory: spec, plan, counters and sockets of its processes, as long as one of them lives.

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

from ..system.file_locks import create_locked, is_held
from .plan import PlanDirectory

PREFIX = "mlflow-llm-server-"
LOCK = "server.lock"  # held by the server as long as it lives


@contextlib.contextmanager
def server_directory() -> Iterator[Path]:
    """Create a new server directory, and remove it at the end of the ``with`` block."""
    sweep()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = create_locked(str(directory / LOCK))  # created held, so that a sweep never sees it free
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        lock.release()


def sweep() -> None:
    """Remove the directories of servers that were killed together with their controller process and workers."""
    with os.scandir(tempfile.gettempdir()) as found:
        named = [entry for entry in found if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False)]
    for entry in named:
        with contextlib.suppress(OSError):  # another server may sweep at the same time
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid() and _is_left(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_left(directory: Path) -> bool:
    lock = directory / LOCK
    return lock.exists() and not is_held(str(lock)) and not PlanDirectory(directory).workers()
