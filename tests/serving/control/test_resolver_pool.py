"""The processes that look models up: few at a time, the same question once, within a time, and none outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import gone
from server_calls import until

from mlflow_llm.serving.control import mlflow_resolver as entry
from mlflow_llm.serving.control import resolver_pool as resolvers
from mlflow_llm.serving.control.mlflow_resolver import ResolvedModel
from mlflow_llm.serving.control.resolver_pool import ResolverPool
from mlflow_llm.serving.interface.bundle import Bundle
from mlflow_llm.serving.interface.errors import NotFound, Overloaded, PackagingError, ShuttingDown
from mlflow_llm.serving.system.file_locks import try_acquire

HOLDER = """
import os, sys
from mlflow_llm.serving.control import mlflow_resolver as entry
looker = "import os, sys; sys.path[:0] = {path!r}; "
looker += "from mlflow_llm.serving.control import mlflow_resolver as entry; entry.end_with_parent(); "
looker += "print(os.getpid(), flush=True, file=sys.stderr); import threading; threading.Event().wait()"
entry.run_lookup([sys.executable, "-c", looker], None)
"""


class Lookups:
    """A stand-in for lookup processes that records lookups and their concurrency, and blocks each until released."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.at_once = self.maximum = 0
        self.entered = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self._lock = threading.Lock()

    def __call__(self, uris: tuple[str, ...], texts: tuple[str, ...], *, timeout: float) -> tuple[Any, ...]:
        with self._lock:
            self.asked.append(uris[0])
            self.at_once += 1
            self.maximum = max(self.maximum, self.at_once)
        self.entered.release()
        assert self.go.acquire(timeout=240)
        with self._lock:
            self.at_once -= 1
        if uris[0] == "missing":
            raise NotFound("no such model")
        return model(uris[0])


def model(uri: str) -> tuple[ResolvedModel, ...]:
    """Return the models that a lookup of ``uri`` finds."""
    bundle = Bundle(content_hash=uri, tasks=("chat",), model_dir="/model", tokenizer_dir="/tokenizer")
    return (ResolvedModel(bundle=bundle, config={"max_num_seqs": 4}, uri=f"models:/{uri}/1"),)


def ask(bounded: ResolverPool, *uris: str) -> tuple[list[threading.Thread], list[Any]]:
    """Look up each URI on a thread of its own; return the threads and the list of their results."""
    answers: list[Any] = []

    def one(uri: str) -> None:
        try:
            answers.append(bounded((uri,)))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=one, args=(uri,)) for uri in uris]
    for thread in threads:
        thread.start()
    return threads, answers


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive()


def test_lookups_beyond_the_limit_wait(tmp_path: Path) -> None:
    """At most two of six lookups by two workers run at a time, and all are answered."""
    lookups = Lookups()
    workers = [ResolverPool(tmp_path, limit=2, timeout=60, find=lookups) for _ in range(2)]
    first, answers = ask(workers[0], "a", "b", "c")
    second, more = ask(workers[1], "d", "e", "f")
    for _ in range(6):
        assert lookups.entered.acquire(timeout=240)
        lookups.go.release()
    join(first + second)
    assert sorted(answers + more, key=lambda found: found[0].uri) == [model(name) for name in "abcdef"]
    assert lookups.maximum <= 2


def test_one_lookup_answers_all_callers_of_a_process(tmp_path: Path) -> None:
    """Concurrent callers of one lookup share its answer or error; a later call looks up again."""
    lookups = Lookups()
    bounded = ResolverPool(tmp_path, limit=2, timeout=60, find=lookups)
    for uri, answer in (("a", model("a")), ("missing", None)):
        first, answers = ask(bounded, uri)
        assert lookups.entered.acquire(timeout=240)
        others, more = ask(bounded, uri, uri)
        until(lambda uri=uri: bounded.num_callers((uri,)) == 3)  # type: ignore[misc]
        lookups.go.release()
        join(first + others)
        answers += more
        assert lookups.asked.count(uri) == 1
        assert answers == [answer] * 3 if answer else all(isinstance(answer, NotFound) for answer in answers)
    lookups.go.release()
    assert bounded(("a",)) == model("a")
    assert lookups.asked.count("a") == 2


def test_a_lookup_whose_caller_was_stopped_is_done_by_another(tmp_path: Path) -> None:
    """Callers that joined a lookup are answered even if the caller that started it was stopped."""
    waits, stop = threading.Event(), threading.Event()
    calls: list[int] = []

    def find(uris: tuple[str, ...], texts: tuple[str, ...], *, timeout: float) -> Any:
        calls.append(1)
        if len(calls) == 1:
            waits.set()
            stop.wait(240)
            raise KeyboardInterrupt
        return model("a")

    bounded = ResolverPool(tmp_path, limit=1, timeout=60, find=find)

    def stopped() -> None:
        with pytest.raises(KeyboardInterrupt):
            bounded(("a",))

    first = threading.Thread(target=stopped)
    first.start()
    assert waits.wait(240)
    others, answers = ask(bounded, "a")
    until(lambda: bounded.num_callers(("a",)) == 2)
    stop.set()
    join([first, *others])
    assert answers == [model("a")]


def test_one_lookup_answers_all_processes(tmp_path: Path) -> None:
    """Workers share a running lookup's result, model or error; a later call looks up again."""
    lookups, polls = Lookups(), threading.Semaphore(0)

    def wait(seconds: float) -> None:
        polls.release()
        threading.Event().wait(seconds)

    first, second = (ResolverPool(tmp_path, limit=2, timeout=60, find=lookups, sleep=wait) for _ in range(2))
    for uri, answer in (("a", model("a")), ("missing", None)):
        asking, answers = ask(first, uri)
        assert lookups.entered.acquire(timeout=240)
        others, more = ask(second, uri, uri)
        assert polls.acquire(timeout=240)  # it is there to wait
        lookups.go.release()
        join(asking + others)
        assert lookups.asked.count(uri) == 1
        answers += more
        if answer is None:
            assert [(type(error), str(error)) for error in answers] == [(NotFound, "no such model")] * 3
        else:
            assert answers == [answer] * 3
    lookups.go.release()
    assert second(("a",)) == model("a")
    assert lookups.asked == ["a", "missing", "a"]


def test_a_lookup_whose_process_was_killed_is_done_by_another(tmp_path: Path) -> None:
    """Callers of a lookup that ended without an answer do not hang, and an older answer is not taken for its result."""
    lookups, polls = Lookups(), threading.Semaphore(0)

    def wait(seconds: float) -> None:
        polls.release()
        threading.Event().wait(seconds)

    bounded = ResolverPool(tmp_path, limit=1, timeout=60, find=lookups, sleep=wait)
    lookups.go.release()
    assert bounded(("a",)) == model("a")
    killed = resolvers._Answers(tmp_path, (("a",), ())).begin()
    assert killed is not None
    waiting, answers = ask(bounded, "a")
    assert polls.acquire(timeout=240)
    assert lookups.asked == ["a"]
    killed.release()
    lookups.go.release()
    join(waiting)
    assert answers == [model("a")]
    assert lookups.asked == ["a", "a"]


def test_old_answers_are_removed(tmp_path: Path) -> None:
    """Only the answers of the last minute are kept."""
    lookups = Lookups()
    bounded = ResolverPool(tmp_path, limit=1, timeout=60, find=lookups)
    for name in "abc":
        lookups.go.release()
        bounded((name,))
        for path in tmp_path.glob("lookup-*.json"):
            os.utime(path, (0, 0))
    lookups.go.release()
    bounded(("d",))
    assert [path.suffix for path in tmp_path.glob("lookup-*")] == [".json"]


def test_waiting_for_a_resolver_ends_with_overloaded(tmp_path: Path) -> None:
    """Waiting for a free lookup ends with a 503 after the time limit."""
    clock = iter(range(1000))
    bounded = ResolverPool(
        tmp_path, limit=1, timeout=30, find=Lookups(), clock=lambda: float(next(clock)), sleep=lambda seconds: None
    )
    taken = try_acquire(str(tmp_path / "resolver-0.lock"))
    assert taken is not None
    with pytest.raises(Overloaded, match="max_resolvers, 1,"):
        bounded(("a",))
    taken.release()


def test_an_overlong_queue_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While as many models as allowed are being looked up, a further one is refused at once."""
    monkeypatch.setattr(resolvers, "MAX_WAITING", 1)
    lookups = Lookups()
    bounded = ResolverPool(tmp_path, limit=2, timeout=60, find=lookups)
    first, answers = ask(bounded, "a")
    assert lookups.entered.acquire(timeout=240)
    with pytest.raises(Overloaded, match="1 models are being looked up"):
        bounded(("b",))
    lookups.go.release()
    join(first)
    assert answers == [model("a")]


def test_nothing_is_looked_up_after_the_servers_end(tmp_path: Path) -> None:
    """Without the server's directory nothing is looked up."""
    with pytest.raises(ShuttingDown):
        ResolverPool(tmp_path / "gone", limit=1, timeout=30)(("a",))


def test_a_lookup_that_takes_too_long_is_killed() -> None:
    """After the time limit it and what it started are killed, and the error names the limit."""
    script = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[1]])"
    )
    mark = f"mark-{os.getpid()}"
    with pytest.raises(PackagingError, match="resolve_timeout, 2 seconds"):
        entry.run_lookup([sys.executable, "-c", script, mark], 2.0)
    until(lambda: not any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))


def test_a_lookup_ends_with_the_worker_that_asked() -> None:
    """A worker that is killed takes its lookup along."""
    script = HOLDER.replace("{path!r}", repr([path for path in sys.path if path]))
    holder = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert holder.stderr is not None
    looking = psutil.Process(int(holder.stderr.readline()))
    holder.kill()
    holder.wait()
    until(lambda: gone(looking))
    holder.stderr.close()
