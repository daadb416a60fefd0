"""The permissions of a saved model's files: those that this process gives to any new file."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path


def apply_umask(root: Path, *, copy_links: bool) -> None:
    """Let the files under ``root`` be read by all whom this process's umask lets read its files.

    safetensors writes files that only their owner can read, whatever the umask, and stores copy the permissions: a
    registry on a shared disk would have models that its other users cannot load. A file that is a hard link to the
    caller's has the caller's permissions. With ``copy_links``, for models that are uploaded, it is replaced by a copy;
    otherwise it stays as it is.
    """
    allowed = 0o666 & ~_umask()
    for path in root.rglob("*"):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or not allowed & ~found.st_mode & 0o444:
            continue
        if found.st_nlink > 1:
            if not copy_links:
                continue
            copy = path.with_name(f".{path.name}")
            shutil.copyfile(path, copy)
            copy.replace(path)
        path.chmod(stat.S_IMODE(found.st_mode) | allowed)


def _umask() -> int:
    """Return this process's umask, from /proc where there is one: to ask the system is to change it for a moment."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    except OSError:
        pass
    current = os.umask(0o077)
    os.umask(current)
    return current
