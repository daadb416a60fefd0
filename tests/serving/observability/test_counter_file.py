"""Counters whose file has no room on a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from prometheus_client.mmap_dict import MmapedDict

from mlflow_llm.serving.observability.counter_file import CounterFile
from mlflow_llm.serving.observability.worker_counters import merge_ended

Full = Callable[[], AbstractContextManager[None]]
MANY = [f"counter {number} {'of a long name' * 20}" for number in range(1000)]


def stored(path: Path) -> dict[str, float]:
    return {key: value for key, value, *_ in MmapedDict.read_all_values_from_file(str(path))}


@pytest.fixture
def full_disk() -> Full:
    """Simulate a full disk, in a context."""

    def fallocate(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fallocate)
            yield

    return full


def test_all_of_a_file_lies_on_the_disk(tmp_path: Path) -> None:
    """A mapped counter file has no holes, whose first use on a full disk would kill the process."""
    path = tmp_path / "counter_1.db"
    file = CounterFile(str(path))
    for number, key in enumerate(MANY):
        file.write_value(key, number, 0.0)
        if number in (0, 10, 999):
            assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
    assert file.read_value(MANY[7]) == (7, 0.0)
    file.close()
    assert stored(path) == {key: number for number, key in enumerate(MANY)}
    again = CounterFile(str(path))
    assert again.has_room([*MANY, *(f"new {key}" for key in MANY * 2)])
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    again.write_value("new", 5, 1.0)
    again.close()
    assert stored(path)["new"] == 5


def test_counters_on_a_full_disk_are_kept(tmp_path: Path, full_disk: Full) -> None:
    """On a full disk counters are kept in memory and written when there is room; scrapes never find partial files."""
    path = tmp_path / "counter_1.db"
    file = CounterFile(str(path))
    with full_disk():
        assert file.read_value("a") == (0.0, 0.0)
        file.write_value("a", 3, 0.0)
        assert file.read_value("a") == (3, 0.0)
        assert list(tmp_path.iterdir()) == []
    file.write_value("a", 4, 0.0)
    file.close()
    assert stored(path) == {"a": 4}


def test_a_file_that_cannot_grow(tmp_path: Path, full_disk: Full) -> None:
    """A counter file that cannot grow goes on counting what it has, and adds counters while it has room."""
    path = tmp_path / "counter_1.db"
    file = CounterFile(str(path))
    file.write_value("a", 1, 0.0)
    with full_disk():
        for key in MANY:
            file.write_value(key, 1, 0.0)
        file.write_value("a", 2, 0.0)
        found = stored(path)
        assert found["a"] == 2
        assert 0 < len(found) < len(MANY)
        assert [file.read_value(key) for key in MANY] == [(1, 0.0)] * len(MANY)
    file.close()


def test_counters_of_an_ended_worker_stay_where_they_are(tmp_path: Path, full_disk: Full) -> None:
    """An ended worker's file is kept and scraped until there is room to merge it."""
    file = CounterFile(str(tmp_path / "counter_7.db"))
    file.write_value("a", 3, 0.0)
    file.close()
    with full_disk():
        merge_ended(tmp_path, 7)
    assert stored(tmp_path / "counter_7.db") == {"a": 3}
    merge_ended(tmp_path, 7)
    assert stored(tmp_path / "counter_ended.db") == {"a": 3}
    assert not (tmp_path / "counter_7.db").exists()


def test_the_librarys_counters_are_written_so(tmp_path: Path) -> None:
    """prometheus_client's multi-process counters, with every label, are in files without holes."""
    program = """
from mlflow_llm.serving.observability import metrics
from prometheus_client import values
for number in range(2000):
    metrics.REQUESTS.labels("endpoint", "entity", f"adapter {number}", "chat", "200").inc()
print(values.MmapedDict.__name__)
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "CounterFile\n"
    (path,) = tmp_path.glob("counter_*.db")
    assert path.stat().st_blocks * 512 >= path.stat().st_size > 1 << 16
    assert sum(stored(path).values()) == 2000
