"""Control groups and their mounts as files, for what reads /proc and /sys."""

from __future__ import annotations

from pathlib import Path

V2_MOUNT = "30 23 0:26 {root} {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def machine(tmp_path: Path, cgroup: str, *mounts: str) -> Path:
    """Write a /proc with these lines and mount points below ``tmp_path``, and return its path."""
    own = tmp_path / "proc/self"
    own.mkdir(parents=True)
    (own / "cgroup").write_text(cgroup + "\n")
    (own / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "\n".join(mounts) + "\n")
    return tmp_path / "proc"


def group(top: Path, path: str, **files: str) -> None:
    at = top / path
    at.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (at / name.replace("__", ".")).write_text(text + "\n")


def v1_mount(controllers: str) -> str:
    return "31 23 0:27 {root} {top} rw,nosuid - cgroup cgroup rw," + controllers
