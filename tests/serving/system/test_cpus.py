"""CPUs that a process may use: affinity, physical cores, quotas of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from control_group_files import V2_MOUNT, group, machine, v1_mount

from mlflow_llm.serving.system import cpus as module
from mlflow_llm.serving.system.control_groups import groups
from mlflow_llm.serving.system.cpus import AvailableCpus, available_cpus, num_threads, quota


def test_the_smallest_quota_up_the_tree_applies(tmp_path: Path) -> None:
    """With cgroup v2 the smallest cpu.max of the nested groups applies; "max" is no limit."""
    top = tmp_path / "cg"
    proc = machine(tmp_path, "0::/pods/pod/box", V2_MOUNT.format(root="/", top=top))
    group(top, "pods/pod/box", cpu__max="400000 100000")
    group(top, "pods/pod", cpu__max="150000 100000")
    group(top, "pods", cpu__max="max 100000")
    assert list(groups("cpu", proc)) == [top / "pods/pod/box", top / "pods/pod", top / "pods", top]
    assert quota(proc) == 1.5
    group(top, "pods/pod", cpu__max="max 100000")
    assert quota(proc) == 4.0


def test_half_a_cpu_in_cgroup_v1(tmp_path: Path) -> None:
    """With cgroup v1 the quota over the period of the group and those above applies; -1 is no limit."""
    top = tmp_path / "cpu"
    proc = machine(tmp_path, "4:memory:/x\n3:cpu,cpuacct:/a/b\n0::/", v1_mount("cpu,cpuacct").format(root="/", top=top))
    group(top, "a/b", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(top, "a", cpu__cfs_quota_us="25000", cpu__cfs_period_us="50000")
    assert quota(proc) == 0.5


@pytest.mark.parametrize("own", ["/docker/abc", "/docker/abc/below"])
def test_a_container_sees_its_group_at_the_mount(own: str, tmp_path: Path) -> None:
    """If a group is mounted instead of the whole tree, paths are relative to that group."""
    top = tmp_path / "a b"
    proc = machine(tmp_path, f"0::{own}", V2_MOUNT.format(root="/docker/abc", top=str(top).replace(" ", "\\040")))
    group(top, "below", cpu__max="max 100000")
    group(top, "", cpu__max="200000 100000")
    assert quota(proc) == 2.0


def test_a_group_above_the_mount(tmp_path: Path) -> None:
    """A process moved out of its namespace's root sees the mount's own limit."""
    top = tmp_path / "cg"
    proc = machine(tmp_path, "0::/../other", V2_MOUNT.format(root="/", top=top))
    group(top, "", cpu__max="300000 100000")
    assert quota(proc) == 3.0


def test_no_limit_where_nothing_can_be_read(tmp_path: Path) -> None:
    """Without readable control groups there is no quota."""
    assert quota(tmp_path) is None
    top = tmp_path / "cg"
    proc = machine(tmp_path, "0::/a\n2:cpuset:/", V2_MOUNT.format(root="/", top=top))
    assert quota(proc) is None
    group(top, "a", cpu__max="")
    assert quota(proc) is None


@pytest.mark.parametrize(
    ("cores", "limit", "threads"), [(2, None, 2), (2, 0.5, 1), (2, 1.0, 1), (2, 1.5, 2), (4, 2.0, 2), (4, 9.0, 4)]
)
def test_threads_follow_the_quota(cores: int, limit: float | None, threads: int) -> None:
    """There is one thread a core, and no more than the quota rounded up."""
    assert AvailableCpus(allowed=cores, cores=cores, quota=limit).threads == threads


def test_siblings_of_a_core_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hyperthreads of a core count once, and only CPUs that the affinity allows count."""
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(module, "affinity", lambda: frozenset({0, 1, 4}))
    found = available_cpus(tmp_path / "proc", tmp_path)
    assert (found.allowed, found.cores, found.quota) == (3, 2, None)
    assert str(found) == "3 usable on 2 cores"


def test_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPUs found are within the machine's; a numeric OMP_NUM_THREADS takes precedence."""
    found = available_cpus()
    assert 1 <= found.threads <= found.cores <= found.allowed == len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", "7,2")
    assert num_threads() == 7
    for odd in ("", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", odd)
        assert num_threads() == found.threads
