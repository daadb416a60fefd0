"""Compiles grammars beside the engine's loop, on a thread of their own.

::

    core.add ── ask(request_id, grammar) ──► Compilation: known already, under way, or new
                                                 │ the compiling thread; llguidance releases the interpreter lock
    core.step ◄── take(): those that are done, or took too long ◄─┘ wake()

The thread reads the tokenizer when the first grammar comes, so an engine that never sees a grammar does not read it. A
grammar that takes longer than ``TIME_LIMIT`` is given up together with its thread, which ends once llguidance returns.
A new thread takes its place.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from ...interface.constraint import GIVEN, Grammar
from ...interface.errors import InternalError, InvalidField, Overloaded, ServingError, reason
from ...interface.request import Sampling
from .grammar_state import GrammarState, refusal_of, short
from .grammar_tokenizer import GrammarTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

TIME_LIMIT = 10.0  # seconds that a grammar may take to compile
MAX_SOURCE = 1 << 20  # characters
MAX_LINES = 4000  # in Lark's notation; each line may define a rule, and rules are followed recursively
STACK_BYTES = 512 << 20  # bytes of address space for that recursion; pages that are not used take no memory
SMALL_STACK_BYTES = 64 << 20  # the same if the system counts address space as memory
MAX_CACHED_GRAMMARS = 256
MAX_CACHED_CHARACTERS = 32 << 20  # of all cached grammars together
MAX_GIVEN_UP = 3  # threads that may still be at work on grammars that were given up
TEXTS = Grammar(source="", field="stop")
"""Stands in for a grammar when a beam search needs the tokens' texts to find stop strings."""
LIMITS = {"max_lexer_states": 50_000, "verbose_errors": False}  # a state takes 1 to 2 KB


class Compilation:
    """A grammar that is being compiled, or is compiled. The compiling thread fills in ``template`` or ``refusal``, then
    sets ``is_done``. Without a ``source`` there is no matcher, only the tokenizer (``TEXTS``)."""

    __slots__ = ("digest", "is_done", "refusal", "source", "started_at", "template", "waiting")

    def __init__(self, digest: bytes, source: str | None) -> None:
        self.digest, self.source = digest, source
        self.waiting: dict[str, Grammar] = {}  # by request id; only the engine's thread changes it
        self.started_at: float | None = None
        self.template: tuple[LLMatcher | None, GrammarTokenizer] | None = None
        self.refusal: str | ServingError = ""
        self.is_done = False

    def error(self, grammar: Grammar) -> ServingError | None:
        """Return why ``grammar``, which this compilation is of, cannot be used; None if it can."""
        if isinstance(self.refusal, ServingError):
            return self.refusal
        if self.refusal and grammar is TEXTS:
            return InvalidField(grammar.field, "stop strings", f"null with beam search: {self.refusal}")
        if self.refusal:
            return InvalidField(grammar.field, GIVEN, self.refusal)
        return None

    @property
    def tokenizer(self) -> GrammarTokenizer:
        assert self.template is not None
        return self.template[1]

    def new_state(self, sampling: Sampling) -> GrammarState:
        """Return the grammar state of a new sequence."""
        assert self.template is not None
        assert sampling.grammar is not None
        matcher, tokenizer = self.template
        assert matcher is not None
        return GrammarState(matcher.deep_copy(), tokenizer, sampling, sampling.grammar)


class Grammars:
    """Compiled grammars and those under way, for the engine's thread.

    ``load_tokenizer`` is called once, on the compiling thread. ``wake`` is called on that thread whenever ``take`` has
    something new."""

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer], wake: Callable[[], None]) -> None:
        self._wake = wake
        self._waiting: dict[str, Compilation] = {}
        self._cache: OrderedDict[bytes, Compilation] = OrderedDict()
        self.compiler = _Compiler(load_tokenizer, self._done)
        self.given_up: list[threading.Thread] = []
        self._is_closed = False

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        """Return whether a request waits, until ``take`` returns it: its grammar may be done before."""
        return request_id in self._waiting

    def ask(self, request_id: str, grammar: Grammar) -> Compilation:
        """Return the compilation of ``grammar``. If it is not done, the request now waits for it.

        Raises ``InvalidField`` for a grammar that is too large, and ``Overloaded``."""
        digest = _digest(grammar)
        found = self._cache.get(digest)
        if found is None or (found.is_done and found.template is None):  # refused after its last request had gone
            return self._begin(digest, request_id, grammar)
        self._cache.move_to_end(digest)
        if not found.is_done:
            self._wait(found, request_id, grammar)
        return found

    def _wait(self, compilation: Compilation, request_id: str, grammar: Grammar) -> None:
        compilation.waiting[request_id] = grammar
        self._waiting[request_id] = compilation

    def _begin(self, digest: bytes, request_id: str, grammar: Grammar) -> Compilation:
        _check_size(grammar)
        self.given_up = [thread for thread in self.given_up if thread.is_alive()]
        if len(self.given_up) >= MAX_GIVEN_UP:
            raise Overloaded(f"{grammar.field}: grammars that take too long are still being compiled", retry_after=5.0)
        compilation = Compilation(digest, None if grammar is TEXTS else grammar.source)
        self._cache[digest] = compilation
        self._wait(compilation, request_id, grammar)  # before it is put, as a grammar nobody waits for is skipped
        self.compiler.put(compilation)
        self._shrink()
        return compilation

    def _shrink(self) -> None:
        size = sum(len(one.source or "") for one in self._cache.values())
        for digest, oldest in list(self._cache.items())[:-1]:
            if len(self._cache) <= MAX_CACHED_GRAMMARS and size <= MAX_CACHED_CHARACTERS:
                break
            if not oldest.waiting:
                size -= len(oldest.source or "")
                del self._cache[digest]

    @property
    def is_due(self) -> bool:
        """Return whether ``take`` has something to return."""
        return any(one.is_done or _is_overdue(one) for one in self._waiting.values())

    def take(self) -> list[tuple[str, ServingError | None]]:
        """Take the requests whose wait is over, each with its error if it cannot be run."""
        over = []
        for compilation in list(dict.fromkeys(self._waiting.values())):
            if not compilation.is_done:
                if not _is_overdue(compilation):
                    continue
                self._give_up(compilation)
            if compilation.refusal:
                self.drop(compilation)
            for request_id, grammar in compilation.waiting.items():
                over.append((request_id, compilation.error(grammar)))
                del self._waiting[request_id]
            compilation.waiting.clear()
        return over

    def forget(self, request_id: str) -> None:
        """Forget a request that no longer waits. A grammar that nobody waits for is not begun."""
        compilation = self._waiting.pop(request_id, None)
        if compilation is not None:
            del compilation.waiting[request_id]
            if not compilation.waiting and compilation.started_at is None:
                self.drop(compilation)

    def spoil(self, grammar: Grammar) -> None:
        """Compile a grammar again when it is next asked for: its matchers share their state and the limits reached."""
        self._cache.pop(_digest(grammar), None)

    def drop(self, compilation: Compilation) -> None:
        """Remove a compilation from the cache."""
        if self._cache.get(compilation.digest) is compilation:
            del self._cache[compilation.digest]

    def _give_up(self, compilation: Compilation) -> None:
        compilation.refusal = f"a grammar that is compiled within {TIME_LIMIT:.0f} s"
        compilation.is_done = True
        self.given_up.append(self.compiler.replace())
        logger.warning("a grammar of %d characters took too long to compile", len(compilation.source or ""))

    def _done(self) -> None:
        if not self._is_closed:
            self._wake()

    def close(self) -> None:
        """End the thread once its current grammar is done."""
        self._is_closed = True
        self.compiler.close()


def _digest(grammar: Grammar) -> bytes:
    if grammar is TEXTS:
        return b""
    return hashlib.blake2b(grammar.source.encode(), digest_size=16).digest()


def _check_size(grammar: Grammar) -> None:
    if len(grammar.source) > MAX_SOURCE:
        raise InvalidField(grammar.field, GIVEN, f"a grammar of at most {MAX_SOURCE} characters")
    if _num_lines(grammar.source) > MAX_LINES:
        raise InvalidField(grammar.field, GIVEN, f"a grammar of at most {MAX_LINES} lines")


def _num_lines(source: str) -> int:
    """Return the number of lines in all parts in Lark's notation."""
    if not source.lstrip().startswith("{"):
        return source.count("\n")
    with suppress(msgspec.MsgspecError):
        parts: list[Any] = msgspec.json.decode(source)["grammars"]
        return sum(str(part.get("lark_grammar") or "").count("\n") for part in parts)
    return 0  # llguidance will report what is wrong with it


def _is_overdue(compilation: Compilation) -> bool:
    return compilation.started_at is not None and time.monotonic() - compilation.started_at > TIME_LIMIT


class _Compiler:
    """The compiling thread: one at a time, started for the first grammar, with a stack for deep grammars."""

    def __init__(self, load_tokenizer: Callable[[], GrammarTokenizer], done: Callable[[], None]) -> None:
        self.load_tokenizer, self._done = load_tokenizer, done
        self._tokenizer: GrammarTokenizer | str | None = None  # a string says why there is none
        self._jobs: queue.SimpleQueue[Compilation | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def put(self, compilation: Compilation) -> None:
        if self.thread is None:
            self._start()
        self._jobs.put(compilation)

    def replace(self) -> threading.Thread:
        """Abandon the stuck thread and start another for the jobs that wait behind it; return the abandoned one."""
        assert self.thread is not None
        left, behind, self._jobs = self.thread, self._jobs, queue.SimpleQueue()
        with suppress(queue.Empty):
            while True:
                self._jobs.put(behind.get_nowait())
        behind.put(None)
        self._start()
        return left

    def close(self) -> None:
        self._jobs.put(None)

    def _start(self) -> None:
        before = threading.stack_size()
        for size in (STACK_BYTES, SMALL_STACK_BYTES, before):
            threading.stack_size(size)
            try:
                self.thread = threading.Thread(target=self._work, args=(self._jobs,), name="grammars", daemon=True)
                self.thread.start()
                return
            except RuntimeError:  # not enough address space
                if size == before:
                    raise
            finally:
                threading.stack_size(before)

    def _work(self, jobs: queue.SimpleQueue[Compilation | None]) -> None:
        while (compilation := jobs.get()) is not None:
            if not compilation.waiting:
                continue  # nobody waits for it any more
            try:
                self._compile(compilation)
            except BaseException as error:  # a panic in llguidance is no Exception
                logger.exception("a grammar cannot be compiled")
                compilation.refusal = InternalError(f"a grammar could not be compiled ({type(error).__name__})")
            compilation.is_done = True
            self._done()

    def _compile(self, compilation: Compilation) -> None:
        if self._tokenizer is None:
            self._tokenizer = self._read_tokenizer()
        if isinstance(self._tokenizer, str):
            compilation.refusal = self._tokenizer
            return
        compilation.started_at = time.monotonic()
        if compilation.source is None:
            compilation.template = (None, self._tokenizer)
            return
        matcher = compile_grammar(compilation.source, self._tokenizer)
        if isinstance(matcher, str):
            compilation.refusal = matcher
        elif not _is_overdue(compilation):
            compilation.template = (matcher, self._tokenizer)

    def _read_tokenizer(self) -> GrammarTokenizer | str:
        began = time.monotonic()
        try:
            tokenizer = self.load_tokenizer()
            tokenizer.prepare()
        except Exception as error:
            logger.exception("the tokenizer cannot be read for grammars")
            return f"nothing: this model's tokenizer does not support grammars: {reason(error)}"
        logger.info("the tokenizer was read for grammars in %.2f s", time.monotonic() - began)
        return tokenizer


def compile_grammar(source: str, tokenizer: GrammarTokenizer) -> LLMatcher | str:
    """Make a matcher at a grammar's beginning, whose lexer has seen all tokens once; or say what is allowed instead."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer.matched, source, log_level=0, limits=LLParserLimits(**LIMITS))
    matcher.compute_bitmask()
    if not matcher.is_error():
        return matcher
    return refusal_of(matcher) or f"a valid grammar: {short(matcher.get_error())}"
