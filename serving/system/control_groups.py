"""The control groups of this process, of cgroup v2 and of v1.

This module must not import torch: it is used before torch is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")


def groups(controller: str, proc: Path = PROC) -> Iterator[Path]:
    """Yield the directories of this process's groups that ``controller`` ("cpu", "memory") may limit.

    The first is its own; those above it follow, up to the mounted root.
    """
    try:
        own = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in own:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found = _mounted(mounts, "cgroup2", None, path)
        elif controller in controllers.split(","):
            found = _mounted(mounts, "cgroup", controller, path)
        else:
            continue
        if found is not None:
            top, group = found
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(top)))


def _mounted(mounts: list[str], kind: str, controller: str | None, path: str) -> tuple[Path, Path] | None:
    """Return where the hierarchy is mounted, and where its group ``path`` is visible there.

    A line of mountinfo (proc_pid_mountinfo(5)): ``36 35 98:0 ROOT PLACE options … - KIND source super-options``.
    """
    for line in mounts:
        left, separator, right = line.partition(" - ")
        fields, (found, *rest) = left.split(" "), right.split(" ")
        if not separator or found != kind or (controller and controller not in rest[-1].split(",")):
            continue
        root, top = fields[3], Path(_unescaped(fields[4]))
        within = os.path.relpath(path, root)
        outside = within.startswith("..")  # our group is above the mounted part: only the mount's limits are visible
        return top, top if outside else Path(os.path.normpath(top / within))
    return None


def _unescaped(text: str) -> str:
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
