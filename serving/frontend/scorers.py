"""Scorers of MLflow's as guardrails: they judge whole texts, in a process of their own beside each worker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import gevent
from gevent import socket
from gevent.lock import BoundedSemaphore
from msgspec import Struct, to_builtins

from ..interface.errors import DeadlineExceeded, RequestError, Unavailable
from ..interface.guardrails import ScorerRule, scorer_names
from ..interface.reply import Choice, Done, Ended, Piece, piece_size
from ..interface.request import Raw, RawChat, RawCompletion, RawEmbedding, RawScore, TextPart
from ..system import child, logs
from ..tasks.reply.generate import gather
from .streams.in_flight import InterruptibleIterator, Watch, unwatched

START_SECONDS = 120.0  # in which a process has imported MLflow and the scorers
RETRY_SECONDS = 5.0


class ScorerFailed(Exception):
    """No verdict: the scorer failed, took too long, or is none of the server's."""


class Question(Struct, frozen=True, kw_only=True):
    """The question about a request that scorers get: its ``inputs``, the ``text`` of it that they judge, and the
    ``field`` that has the text."""

    inputs: Any
    text: str
    field: str

    @property
    def size(self) -> int:
        """The bytes that it takes in memory, and again while a process is asked."""
        return 2 * (_size(self.inputs) + sys.getsizeof(self.text))


class Scorers:
    """The scorers that ``names`` allow, and the process that runs them, one text after another. It is started for the
    first question, and again after one that took too long. For greenlets only."""

    def __init__(self, names: str) -> None:
        self.names = scorer_names(names)
        self._turn = BoundedSemaphore()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def passes(
        self, rule: ScorerRule, inputs: Any, text: str, deadline: float | None = None, watch: Watch = unwatched
    ) -> bool:
        """Return whether a scorer lets ``text`` pass. Raises ``ScorerFailed``. Its time counts from its turn on, which
        it waits for until ``deadline`` (``time.monotonic``), when it raises ``DeadlineExceeded``, or until ``watch``
        interrupts it."""
        if rule.scorer not in self.names:
            raise ScorerFailed("the server was not started with it (--guardrail-scorers)")
        with self._held_turn(deadline, watch):
            try:
                self._start()
                question = {"scorer": rule.scorer, "inputs": inputs, "outputs": text}
                with gevent.Timeout(rule.timeout, TimeoutError(f"no answer within {rule.timeout:g} s")):
                    self._connection.sendall(json.dumps(question).encode() + b"\n")
                    found = json.loads(self._line())
            except BaseException as error:  # the answer to this question must not be read as that to the next
                self.close()
                if isinstance(error, OSError | ValueError):
                    raise ScorerFailed(str(error) or type(error).__name__) from error
                raise
        if "error" in found:
            raise ScorerFailed(str(found["error"]))
        return bool(found["passes"])

    @contextmanager
    def _held_turn(self, deadline: float | None, watch: Watch) -> Iterator[None]:
        waiting: InterruptibleIterator[None] = InterruptibleIterator(self._turns(deadline))
        with watch(waiting):
            next(waiting)  # only this is interrupted: a process that is not heard out would have to be started again
        try:
            yield
        finally:
            self._turn.release()

    def _turns(self, deadline: float | None) -> Iterator[None]:
        if not self._turn.acquire(timeout=None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("timeout: the request's time limit passed while it waited for a guardrail's scorer")
        yield

    def _start(self) -> None:
        if self._process is not None:
            return
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = child.python_command(
                "serving.control.mlflow_processes.scorer_process", str(theirs.fileno()), *self.names
            )
            self._process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child.environment(),
            )
        with gevent.Timeout(START_SECONDS, TimeoutError(f"it did not start within {START_SECONDS:g} s")):
            self._line()

    def _line(self) -> bytes:
        found = b""
        while not found.endswith(b"\n"):
            data = self._connection.recv(65536)
            if not data:
                raise ConnectionError("its process has ended; the server's log may say why")
            found += data
        return found

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            self._connection.close()
            process.kill()
            process.wait()


def check_input(
    scorers: Scorers, rules: Iterable[ScorerRule], asked: Question, deadline: float | None, watch: Watch = unwatched
) -> None:
    """Raise ``RequestError`` if a scorer blocks the texts of a request, ``Unavailable`` if one has failed, and
    ``DeadlineExceeded``."""
    for rule in rules:
        try:
            if scorers.passes(rule, asked.inputs, asked.text, deadline, watch):
                continue
        except ScorerFailed as error:
            _log(rule, error)
            if rule.on_error == "PASS":
                continue
            told = f"the input guardrail {rule.scorer!r} of this endpoint gave no verdict"
            raise Unavailable(told, retry_after=RETRY_SECONDS) from error
        told = f"{asked.field}: the input guardrail {rule.scorer!r} of this endpoint blocks the request"
        raise RequestError(told, param=asked.field)


def judged(
    scorers: Scorers,
    rules: tuple[ScorerRule, ...],
    asked: Question,
    pieces: Iterable[Piece],
    deadline: float | None,
    hold: Callable[[int], None],
    watch: Watch = unwatched,
) -> Iterator[Piece]:
    """Yield the pieces of a reply once it is complete; of a choice that a scorer blocks, only that it was filtered.

    ``hold`` counts the bytes that are held back, as they arrive, and may raise. Raises ``DeadlineExceeded``.
    """
    held: deque[Piece] = deque()
    for piece in pieces:
        hold(piece_size(piece))
        held.append(piece)
    reply = gather(held)
    passed = {choice.index for choice in reply.choices if _pass(scorers, rules, asked.inputs, choice, deadline, watch)}
    del reply
    while held:
        piece = held.popleft()
        if isinstance(piece, Done) or piece.index in passed:
            yield piece
        elif isinstance(piece, Ended):
            yield Ended(index=piece.index, finish_reason="content_filter")


def _pass(
    scorers: Scorers, rules: tuple[ScorerRule, ...], inputs: Any, choice: Choice, deadline: float | None, watch: Watch
) -> bool:
    calls = (f"{call.name}({call.arguments})" for call in choice.calls)
    text = "\n".join(filter(None, (choice.text, *calls)))
    for rule in rules:
        try:
            if not scorers.passes(rule, inputs, text, deadline, watch):
                return False
        except ScorerFailed as error:
            _log(rule, error)
            if rule.on_error == "BLOCK":
                return False
    return True


def _log(rule: ScorerRule, error: ScorerFailed) -> None:
    logs.event("guardrail without verdict", level=30, scorer=rule.scorer, on_error=rule.on_error, error=str(error))


def question_of(raw: Raw) -> Question:
    """Return what a request asks."""
    if isinstance(raw, RawChat):
        messages = [{"role": one.role, "content": _said(one.content)} for one in raw.messages]
        last = messages[-1]["content"] if messages else ""
        return Question(inputs={"messages": messages}, text=last, field="messages")
    texts: dict[str, Any] = {}
    if isinstance(raw, RawCompletion):
        texts = {"prompt": list(raw.prompts)}
    elif isinstance(raw, RawEmbedding):
        texts = {"input": list(raw.inputs)}
    elif isinstance(raw, RawScore):
        texts = {raw.names[0]: list(raw.queries), raw.names[1]: list(raw.documents)}
    plain = to_builtins(texts)
    text = "\n".join(str(one) for found in plain.values() for one in found)
    return Question(inputs=plain, text=text, field=next(iter(plain), "prompt"))


def _size(value: Any) -> int:
    """Return about how many bytes inputs take in memory."""
    parts: Iterable[Any] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list):
        parts = value
    return sys.getsizeof(value) + sum(_size(part) for part in parts)


def _said(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))
