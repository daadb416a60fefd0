"""The pool of native threads (native/threads.h), through ``mlflow_llm_each``: a call of one phase."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlflow_llm.serving.engine.native.library import WORK, library, num_native_threads, use_threads

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler, or a CPU without AVX2")

FORK = """
import os, signal, sys
from mlflow_llm.serving.engine.native.library import WORK, library, use_threads

def count(n):
    seen = []
    library().mlflow_llm_each(n, WORK(lambda index: seen.append(index) or 0))
    return sorted(seen) == list(range(n))

use_threads(3)
assert count(50)
signal.alarm(120)  # what hangs is ended
child = os.fork()
if child == 0:
    signal.alarm(60)
    good = count(50) and len(os.listdir("/proc/self/task")) == 3
    use_threads(2)
    os._exit(0 if good and count(50) and len(os.listdir("/proc/self/task")) == 2 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert count(50)
"""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = num_native_threads()
    yield
    use_threads(before)


def each(n: int, work: Callable[[int], int]) -> None:
    found: Any = library()
    found.mlflow_llm_each(n, WORK(work))


def indexes(n: int) -> Counter[int]:
    seen: list[int] = []
    each(n, lambda index: seen.append(index) or 0)  # type: ignore[func-returns-value]
    return Counter(seen)


@pytest.mark.parametrize("threads", [1, 2, 3, 17])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 100, 1000])
def test_parallel_runs_each_index_once(n: int, threads: int) -> None:
    """Every index runs exactly once before the call returns, for any number of indexes and threads."""
    use_threads(threads)
    assert num_native_threads() == threads
    assert indexes(n) == Counter(range(n))


def test_parallel_does_not_wait_for_a_late_thread() -> None:
    """While one thread is held up in an index, another runs all the rest, its share too."""
    use_threads(2)
    done: list[int] = []
    rest = threading.Event()

    def work(index: int) -> int:
        if index == 0:
            return 0 if rest.wait(240) else 1
        done.append(index)
        if len(done) == 99:
            rest.set()
        return 0

    each(100, work)
    assert sorted(done) == list(range(1, 100))


def test_parallel_rethrows_to_its_caller() -> None:
    """A failure in any thread is raised by the call, once; the next call runs normally."""
    use_threads(3)
    for _ in range(20):
        with pytest.raises(RuntimeError, match=r"the native kernels: index \d+"):
            each(50, lambda index: index % 3 == 1)
        assert indexes(50) == Counter(range(50))


def test_callers_at_once_do_not_wait_for_each_other() -> None:
    """A caller that comes while the threads are busy works alone, and so does a nested call."""
    use_threads(3)
    inside, go, found = threading.Event(), threading.Event(), []

    def held(index: int) -> int:
        inside.set()
        return 0 if go.wait(240) else 1

    first = threading.Thread(target=each, args=(3, held))
    first.start()
    assert inside.wait(240)
    assert indexes(40) == Counter(range(40))  # the first one is still under way
    go.set()
    first.join()

    def nested(index: int) -> int:
        found.append(indexes(5))
        return 0

    each(6, nested)
    assert found == [Counter(range(5))] * 6


def test_many_callers_while_the_number_of_threads_changes() -> None:
    """Calls from several threads run all their indexes once while the pool grows and shrinks."""
    wrong: list[Counter[int]] = []

    def call() -> None:
        for n in range(40):
            seen = indexes(n)
            if seen != Counter(range(n)):
                wrong.append(seen)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for number in [1, 4, 2, 8, 3] * 4:
        use_threads(number)
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    """After fork() the child starts its own threads, as many as configured, and the parent's go on."""
    done = subprocess.run([sys.executable, "-c", FORK], env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
