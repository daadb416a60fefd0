"""What the rest of the server knows of an engine. Ours, one in another process, vLLM or Ray Serve: same interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

from ..events import Event
from ..request import Task, ValidRequest


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What validation must know of a loaded model. ``max_model_len`` is tokens, prompt and completion together.

    ``max_kv_tokens`` is what one request may occupy at most (prompt + max_tokens over all its sequences run one
    after another if need be, so it bounds a single sequence). ``embedding_dim`` is 0 for a generating model.
    ``kernels`` is "native" where a whole step runs in ours, else "torch" (``kernels_reason`` says why), "none" without.
    ``kv_cache_memory``: bytes. ``num_standbys`` are to be kept beside it.
    ``threads`` is how many of them compute on CPU.
    """

    content_hash: str
    tasks: tuple[Task, ...]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_kv_tokens: int
    embedding_dim: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    quantization: str = "none"
    kernels: str = "torch"
    kernels_reason: str = ""
    kv_cache_memory: int = 0
    num_standbys: int = 0
    threads: int = 1
    pid: int = 0

    @property
    def kernels_summary(self) -> str:
        """In a line."""
        return f"{self.kernels} ({self.kernels_reason})" if self.kernels_reason else self.kernels


class AdapterInfo(Struct, frozen=True, kw_only=True):
    name: str
    rank: int
    path: str


class Health(Struct, frozen=True, kw_only=True):
    """Forward progress: ``steps`` grows with every forward. "stalled": work is waiting and no step came in time;
    "draining": the engine finishes what it has and ends.

    ``last_step_age`` is seconds, those included in which nothing was heard of the engine, and grows also while it is
    idle. What runs, waits and is held in the KV cache is 0 where there is no engine; what has been counted (steps and
    tokens) is the last that was heard, and begins at 0 with each engine process.

    ``num_standbys`` are loaded and ready to take the engine's place.

    ``num_provisioned`` of the sequences running and waiting, ``provisioned_tokens`` of those generated and
    ``provisioned_prompt_tokens`` of those read are within a provisioned reserve. ``processor_wait`` is the part of
    the time in which the engine's thread could have run, but had to wait for a processor (``contention.py``).
    """

    status: Literal["starting", "ready", "draining", "stalled", "dead"]
    steps: int = 0
    last_step_age: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    generated_tokens: int = 0
    num_provisioned: int = 0
    provisioned_tokens: int = 0
    provisioned_prompt_tokens: int = 0
    processor_wait: float = 0.0
    num_standbys: int = 0


class EventStream(Protocol):
    """Iterate for events; ``close`` (also on leaving early) aborts what still runs. Closing twice is harmless.

    ``finish(index)`` ends one sequence whose text is complete (a stop string matched above the engine) and lets the
    others run; the sequence still gets its ``Finished`` (reason "abort"; tokens already under way may come before it).
    For an index that has ended it does nothing. Callers find it with ``getattr``: an engine that cannot do it may leave
    it out, and the sequence then runs on unread.
    """

    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...
    def close(self) -> None: ...
    def finish(self, index: int) -> None: ...


class EventQueue(Protocol):
    """Where a stream's events wait for their reader. ``put`` is called on the engine's or its client's own thread."""

    def put(self, event: Event, /) -> None: ...
    def get(self) -> Event: ...
    def qsize(self) -> int: ...


@runtime_checkable
class Engine(Protocol):
    """Thread-safe: many callers submit at once and are batched together.

    ``figures()`` is the last ``Health`` of each engine process that there was, by its generation. Callers find it with
    ``getattr``: an engine that is always the same one may leave it out.
    """

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: ValidRequest) -> EventStream:
        """Start a request at once; never raises for the request's sake (a ``Failed`` event says what is wrong)."""
        ...

    def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read a peft directory into the pool. Raises ``InvalidField`` where it does not fit the base."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Raises ``NotFound`` for an unknown name, ``Conflict`` while sequences use it."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]: ...

    def health(self) -> Health: ...

    def close(self) -> None:
        """Give the engine up. Requests of this client end with ``Failed(kind="shutting_down")``."""
        ...
