"""The main memory that a process may use: the machine's, control groups' limits, ulimit."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest
from control_group_files import V2_MOUNT, group, machine, v1_mount

from mlflow_llm.serving.system.main_memory import MainMemory, main_memory

MIB = 2**20


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine whose own memory is no limit."""
    found = psutil.virtual_memory()._replace(total=64 << 30, available=48 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def limited(top: Path, path: str, maximum: str, used: int, cached: int = 0) -> None:
    stat = f"anon 7\ninactive_file {cached}\nactive_file {cached // 2}"
    group(top, path, memory__max=maximum, memory__current=str(used), memory__stat=stat)


def test_the_smallest_room_up_the_tree_applies(tmp_path: Path) -> None:
    """With cgroup v2 the group with the least room, up the tree, applies; "max" is no limit."""
    top = tmp_path / "cg"
    proc = machine(tmp_path, "0::/pods/pod/box", V2_MOUNT.format(root="/", top=top))
    assert main_memory(proc) == MainMemory(64 << 30, 48 << 30)
    limited(top, "pods/pod/box", str(900 * MIB), 100 * MIB)
    limited(top, "pods/pod", str(1000 * MIB), 600 * MIB)
    limited(top, "pods", "max", 0)
    assert main_memory(proc) == MainMemory(900 * MIB, 400 * MIB)


def test_the_page_cache_is_free(tmp_path: Path) -> None:
    """The page cache in ``memory.current`` counts as free."""
    top = tmp_path / "cg"
    proc = machine(tmp_path, "0::/box", V2_MOUNT.format(root="/", top=top))
    limited(top, "box", str(2000 * MIB), 1999 * MIB, cached=1000 * MIB)
    assert main_memory(proc) == MainMemory(2000 * MIB, 1501 * MIB)
    limited(top, "box", str(2000 * MIB), 2001 * MIB)
    assert main_memory(proc).free == 0


def test_version_1(tmp_path: Path) -> None:
    """cgroup v1's files are read, and its 2^63 is no limit."""
    top = tmp_path / "memory"
    proc = machine(tmp_path, "4:memory:/a/b\n0::/", v1_mount("memory").format(root="/", top=top))
    stat = f"total_inactive_file {5 * MIB}\ntotal_active_file {MIB}\ninactive_file 1"
    group(top, "a/b", memory__limit_in_bytes=str(100 * MIB), memory__usage_in_bytes=str(50 * MIB), memory__stat=stat)
    group(top, "a", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="1", memory__stat="")
    assert main_memory(proc) == MainMemory(100 * MIB, 56 * MIB)


def test_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ulimit -v`` leaves what this process has not mapped yet."""
    proc = machine(tmp_path, "0::/")
    (proc / "self/statm").write_text("1000 900 1 1 1 1 0\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (500 * MIB, resource.RLIM_INFINITY))
    assert main_memory(proc) == MainMemory(500 * MIB, 500 * MIB - 1000 * resource.getpagesize())
    assert str(main_memory(proc)).endswith("GiB free of 0.5 GiB")
