"""The processes that look models up (``mlflow_resolver``), few at a time: each imports MLflow and takes some 200 MB.

Each of the ``limit`` places is a lock on a file in the server's directory, which all processes of the server share; the
kernel releases it when its holder dies. If a lookup is already running in any process, the same question is not asked
again: its answer goes to all that wait for it. Other lookups wait for a place; those of one process in the order of
their arrival::

    resolver-<n>.lock       held by a lookup, for its place
    lookup-<key>.lock       held by the process that looks ``key`` up (the SHA-256 of the question)
    lookup-<key>.json       its answer, for processes that asked in the meantime
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from ..interface.errors import NotFound, Overloaded, PackagingError, ShuttingDown
from ..system.file_locks import FileLock, try_acquire
from ..system.files import replace_file
from .mlflow_resolver import ResolvedModel, resolve

POLL_SECONDS = 0.05
MAX_WAITING = 64  # lookups of a process, including those under way
RETRY_SECONDS = 5.0
ANSWER_SECONDS = 60.0  # seconds; each process that waits for an answer checks every POLL_SECONDS

Uris = tuple[str, ...]
SHARED = {kind.__name__: kind for kind in (NotFound, Overloaded, PackagingError)}


class _Answer(Struct, frozen=True, kw_only=True):
    """The result of lookup ``number``: models, or one of the ``SHARED`` errors."""

    number: str
    found: tuple[ResolvedModel, ...] = ()
    error: str | None = None
    message: str = ""

    def given(self) -> tuple[ResolvedModel, ...]:
        """Return the models, or raise the error."""
        if self.error is None:
            return self.found
        kind = SHARED[self.error]
        raise kind(self.message, retry_after=RETRY_SECONDS) if kind is Overloaded else kind(self.message)


class _Answers:
    """The files of one question. Raises ``ShuttingDown`` if the server's directory is gone."""

    def __init__(self, directory: Path, key: tuple[Uris, Uris]) -> None:
        name = f"lookup-{hashlib.sha256(msgspec.json.encode(key)).hexdigest()}"
        self._directory, self._lock, self._file = directory, directory / f"{name}.lock", directory / f"{name}.json"

    def begin(self) -> FileLock | None:
        """Return the question's lock, or None while another process looks it up."""
        return _locked(self._lock)

    def last(self) -> _Answer | None:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=_Answer)
        except FileNotFoundError:
            return None

    def give(self, answer: _Answer) -> None:
        """Write the answer. If this fails, those that wait look it up again."""
        with contextlib.suppress(OSError):
            self._remove_old()
            replace_file(self._file, msgspec.json.encode(answer))

    def _remove_old(self) -> None:
        for path in self._directory.glob("lookup-*.json"):
            with contextlib.suppress(FileNotFoundError):
                if abs(time.time() - path.stat().st_mtime) > ANSWER_SECONDS:
                    path.unlink()


def _locked(path: Path) -> FileLock | None:
    """Return the held lock, or None while another process has it."""
    try:
        return try_acquire(str(path))
    except FileNotFoundError:
        raise ShuttingDown("the server has ended") from None


class _Lookup:
    """A lookup that this process waits for.

    ``found`` and ``error`` stay None if the caller that began the lookup was interrupted. ``callers`` have
    asked for it.
    """

    def __init__(self) -> None:
        self.over = threading.Event()
        self.callers = 1
        self.found: tuple[ResolvedModel, ...] | None = None
        self.error: Exception | None = None


class ResolverPool:
    """A pool that looks models up; it is called like ``mlflow_resolver.resolve``.

    ``directory`` is the server's directory; ``timeout`` (seconds) is for each lookup, and the same for the wait for a
    place. Thread-safe, and safe for greenlets if gevent has patched the process."""

    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        timeout: float,
        find: Callable[..., tuple[ResolvedModel, ...]] = resolve,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._directory, self._limit, self._timeout = directory, limit, timeout
        self._find, self._clock, self._sleep = find, clock, sleep
        self._lookups: dict[tuple[Uris, Uris], _Lookup] = {}
        self._lock, self._turn = threading.Lock(), threading.Lock()

    def __call__(self, uris: Uris, texts: Uris = ()) -> tuple[ResolvedModel, ...]:
        """Look models up. Raises what ``mlflow_resolver.resolve`` raises, and ``Overloaded``, ``ShuttingDown``."""
        key = (uris, texts)
        while True:
            lookup, mine = self._join(key)
            if mine:
                return self._look_up(key, lookup)
            lookup.over.wait()
            if lookup.error is not None:
                raise lookup.error
            if lookup.found is not None:
                return lookup.found

    def num_callers(self, uris: Uris, texts: Uris = ()) -> int:
        """Return how many callers a lookup that is under way will answer; 0 if there is none."""
        with self._lock:
            lookup = self._lookups.get((uris, texts))
            return 0 if lookup is None else lookup.callers

    def _join(self, key: tuple[Uris, Uris]) -> tuple[_Lookup, bool]:
        with self._lock:
            if key in self._lookups:
                self._lookups[key].callers += 1
                return self._lookups[key], False
            if len(self._lookups) >= MAX_WAITING:
                raise Overloaded(f"{MAX_WAITING} models are being looked up already", retry_after=RETRY_SECONDS)
            self._lookups[key] = _Lookup()
            return self._lookups[key], True

    def _look_up(self, key: tuple[Uris, Uris], lookup: _Lookup) -> tuple[ResolvedModel, ...]:
        try:
            lookup.found = self._ask_once(key)
            return lookup.found
        except Exception as error:
            lookup.error = error
            raise
        finally:
            with self._lock:
                del self._lookups[key]
            lookup.over.set()

    def _ask_once(self, key: tuple[Uris, Uris]) -> tuple[ResolvedModel, ...]:
        """Ask, or take the answer of a process that is already asking, if it is newer than this call."""
        answers = _Answers(self._directory, key)
        before = answers.last()
        deadline = self._clock() + 2 * self._timeout  # enough for another's wait for a place and then its lookup
        while True:
            begun = answers.begin()
            try:
                answer = answers.last()
                if answer is not None and answer != before:
                    return answer.given()
                if begun is not None:
                    return self._ask(key, answers)
            finally:
                if begun is not None:
                    begun.release(unlink=True)
            if self._clock() > deadline:
                raise Overloaded("another process takes too long to look this model up", retry_after=RETRY_SECONDS)
            self._sleep(POLL_SECONDS)

    def _ask(self, key: tuple[Uris, Uris], answers: _Answers) -> tuple[ResolvedModel, ...]:
        uris, texts = key
        number = uuid.uuid4().hex
        try:
            place = self._place()
            try:
                found = self._find(uris, texts, timeout=self._timeout)
            finally:
                place.release()
        except tuple(SHARED.values()) as error:
            if type(error).__name__ in SHARED:
                answers.give(_Answer(number=number, error=type(error).__name__, message=str(error)))
            raise
        answers.give(_Answer(number=number, found=found))
        return found

    def _place(self) -> FileLock:
        deadline = self._clock() + self._timeout
        with self._turn:
            while True:
                for number in range(self._limit):
                    lock = _locked(self._directory / f"resolver-{number}.lock")
                    if lock is not None:
                        return lock
                if self._clock() > deadline:
                    text = f"max_resolvers, {self._limit}, are busy looking up other models"
                    raise Overloaded(text, retry_after=RETRY_SECONDS)
                self._sleep(POLL_SECONDS)
