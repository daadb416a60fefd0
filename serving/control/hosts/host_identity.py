"""The id of this host among the joined hosts of a database; it stays the same over restarts of the host's command."""

from __future__ import annotations

import secrets
from pathlib import Path

from ...interface.errors import PackagingError
from ...system.file_locks import FileLock, try_acquire
from ...system.files import replace_file

ID, LOCK = "engine-host", "engine-host.lock"


class HostIdentity:
    """The id ``host``, kept in ``state_dir``, which one process holds at a time.

    Raises ``PackagingError`` if another process has it, or if the directory cannot be written.
    """

    def __init__(self, state_dir: Path) -> None:
        path = state_dir / ID
        try:
            state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = try_acquire(str(state_dir / LOCK))
            if lock is None:
                raise PackagingError(f"another `mlflow-llm engine --join` runs with the state directory {state_dir}")
            if not path.exists():
                replace_file(path, secrets.token_hex(8).encode())
            self.host = path.read_text(encoding="ascii")
        except OSError as error:
            raise PackagingError(f"the state directory {state_dir}: {error.strerror}") from None
        self.lock: FileLock = lock
