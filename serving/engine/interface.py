"""What the rest of the server knows of engines: ``Engine`` is what callers hold, ``Core`` what an engine process runs.

::

    caller ── Engine                                           Core
              transport.client.client.RemoteEngine ── ZeroMQ ─── engine.core.EngineCore                 "native"
              engine.in_process.InProcessEngine ── a thread ──── testing.instant_core.InstantCore       "instant"
              routing.replica_set.ReplicaSet: several of them    another: vLLM, OpenVINO GenAI, …

A new backend is a class with the methods of ``Core``, made by ``CoreFactory(bundle, settings)`` on the thread that then
drives it, and named as ``module:name`` where a process is started (``ProcessSpec.core`` of ``transport``). All that
clients rely on (recovery, back-pressure, metering, drain, adapters at run time) is done around it, and asks
``EngineInfo`` what it can. Settings that every backend has are fields of ``EngineSettings``; those of one backend alone
stand under its name in ``EngineSettings.backend``, which it reads into a ``Checked`` record by ``settings.of_backend``.

No method of these protocols is optional. Those with a body are defaults for classes that inherit from the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from ..bundle import Bundle
from ..events import Event
from ..request import Task, ValidRequest
from ..settings import EngineSettings

QUEUE_FLOOR = 16  # a tenant may always have this part of a queue, whatever others have in it


class Capabilities(Struct, frozen=True, kw_only=True):
    """What an engine can do beyond running a request to its end. What it cannot, its clients refuse or do without.

    ``resumes``: a request with ``resumed_token_ids`` goes on with the text that it would have had; without, one that
    has delivered tokens ends with its engine, and is not paused for a slow reader. ``adapters``: LoRA adapters, loaded
    and unloaded while it runs. ``structured_output``: generation within a grammar.
    ``beam_search``: ``Sampling.beams``. ``provisioned``: it keeps the
    pace of provisioned requests beside best-effort ones. ``lora_tasks``: adapters that come with a request.
    ``prompt_tables``: vectors of virtual tokens that do.
    """

    resumes: bool = True
    adapters: bool = True
    structured_output: bool = False
    beam_search: bool = False
    provisioned: bool = True
    lora_tasks: bool = False
    prompt_tables: bool = False


class PagedInfo(Struct, frozen=True, kw_only=True):
    """``kv_block_size`` tokens a block; decodes attend by "triton" or "torch" (``attention_reason``: why not by the
    first); ``cuda_graphs`` are the sizes of decode steps that are recorded (``cuda_graphs_reason``: why none is).
    ``launch_ahead``: whether a step is launched before the last one's tokens are read (``launch_ahead_reason``: why
    not)."""

    kv_block_size: int
    attention: Literal["triton", "torch"]
    attention_reason: str = ""
    cuda_graphs: tuple[int, ...] = ()
    cuda_graphs_reason: str = ""
    launch_ahead: bool = False
    launch_ahead_reason: str = ""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What validation must know of a loaded model. ``max_model_len`` is tokens, prompt and completion together.

    ``max_kv_tokens`` is what one request may occupy at most (prompt + max_tokens over all its sequences run one
    after another if need be, so it bounds a single sequence). ``embedding_dim`` is 0 for a generating model;
    ``hidden_size`` is the width of a generating model's token embeddings, 0 where nobody needs it.
    ``quantization_reason``: why weights in fp8 are multiplied as floats; empty where they are not.
    ``kernels`` is "native" where a whole step runs in ours, else "torch" (``kernels_reason`` says why), "none" without.
    ``instruction_set``: what our kernels were chosen for, "" where they do not run.
    ``kv_cache_memory`` is bytes, ``kv_cache_dtype`` what keys and values are kept in, ``num_standbys`` how many are to
    be kept beside it, ``threads`` how many of them compute on CPU, ``backend`` the name of the ``Core``.
    ``kv_cache_reason``: why a latent attention keeps whole keys and values; empty where it does not.
    ``max_logits_bytes``: of one request; 0 where none are given. ``paged`` says of a KV cache in blocks how it runs.
    ``max_num_batched_tokens``: of a step; 0 where steps are not ours to cut.
    """

    content_hash: str
    tasks: tuple[Task, ...]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_kv_tokens: int
    embedding_dim: int = 0
    hidden_size: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    quantization: str = "none"
    quantization_reason: str = ""
    kernels: str = "torch"
    kernels_reason: str = ""
    instruction_set: str = ""
    kv_cache_memory: int = 0
    kv_cache_dtype: str = ""
    kv_cache_reason: str = ""
    num_standbys: int = 0
    threads: int = 1
    pid: int = 0
    backend: str = "native"
    max_logits_bytes: int = 0
    paged: PagedInfo | None = None
    max_num_batched_tokens: int = 0
    capabilities: Capabilities = Capabilities()

    @property
    def kernels_summary(self) -> str:
        """Which kernels run, for which instruction set, or why not ours, in a line."""
        return _with_reason(self.kernels, self.kernels_reason or self.instruction_set)

    @property
    def kv_cache_summary(self) -> str:
        """What keys and values are kept in, and why whole ones are, in a line; empty where none are."""
        return _with_reason(self.kv_cache_dtype, self.kv_cache_reason)


def _with_reason(what: str, reason: str) -> str:
    return f"{what} ({reason})" if reason else what


class AdapterInfo(Struct, frozen=True, kw_only=True):
    """A LoRA adapter that is loaded. ``path`` is the peft directory on the engine's host that it was read from."""

    name: str
    rank: int
    path: str


class Health(Struct, frozen=True, kw_only=True):
    """Forward progress: ``steps`` grows with every forward. "stalled": work is waiting and no step came in time;
    "draining": the engine finishes what it has and ends.

    ``last_step_age`` is seconds, those included in which nothing was heard of the engine, and grows also while it is
    idle. What runs, waits and is held in the KV cache is 0 where there is no engine; what has been counted (steps and
    tokens) is the last that was heard, and begins at 0 with each engine process.

    Sequences that wait for their grammars to be compiled are not counted: they want nothing of the model yet.
    Of the ``draft_tokens`` that speculation proposed ``accepted_tokens`` were what was drawn there.
    ``num_standbys`` are loaded and ready to take the engine's place. ``num_tenants_waiting``: how many tenants share
    the queue.

    Of the sequences running and waiting ``num_provisioned`` are provisioned, of the tokens generated
    ``provisioned_tokens``, of those prefilled ``provisioned_prompt_tokens``. ``processor_wait`` is the part of
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
    draft_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    num_provisioned: int = 0
    provisioned_tokens: int = 0
    provisioned_prompt_tokens: int = 0
    processor_wait: float = 0.0
    num_standbys: int = 0
    num_tenants_waiting: int = 0


class EngineRecord(Struct, frozen=True, kw_only=True):
    """What the process that keeps an engine has seen of it: bytes of ``memory`` of a replica (by its files until it is
    ``measured``), the ``start_seconds`` that its last start took, why it is ``unloaded`` ("" where it is not), and how
    often it was."""

    memory: int = 0
    measured: bool = False
    start_seconds: float | None = None
    unloaded: str = ""
    unloads: int = 0


class EventStream(Protocol):
    """The events of one request; iterate from one thread. ``close`` (also on leaving early) aborts what still runs.

    ``finish(index)`` ends one sequence whose text is complete (a stop string matched above the engine) and lets the
    others run. The sequence still gets its ``Finished`` (reason "abort"), and tokens already under way may come before
    it. For an index that has ended it does nothing. Closing twice is harmless.
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
class TappableStream(Protocol):
    """An ``EventStream`` whose events may be taken as they come (``transport.client.event_stream.RemoteStream``)."""

    def tap(self, take: Callable[[Event], bool], /) -> bool: ...
    def have_reader(self, run: Callable[[], object], /) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """What a caller holds. Thread-safe: many callers submit at once and are batched together."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: ValidRequest) -> EventStream:
        """Start a request at once; never raises for the request's sake (a ``Failed`` event says what is wrong)."""
        ...

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Read a peft directory into the pool; with ``replace`` in place of one of that name, on whose weights running
        requests end; with ``pinned`` it is never evicted. Raises ``InvalidField`` where it does not fit the base,
        ``AlreadyExists``, ``LimitExceeded`` where there is no room for it beside pinned ones."""
        ...

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """Raises ``NotFound`` for an unknown name, ``Conflict`` while sequences use it; with ``at_once`` these end on
        its weights."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]: ...

    def health(self) -> Health: ...

    def close(self) -> None:
        """Give the engine up. Requests of this client end with ``Failed(kind="shutting_down")``."""
        ...

    @property
    def num_replicas(self) -> int:
        """Engine processes that serve it now; 0 while none is wanted or there."""
        return 1

    def record(self) -> EngineRecord:
        """What is known of it where another process keeps it."""
        return EngineRecord()

    def process_health(self) -> Mapping[str, Health]:
        """The last ``Health`` of each engine process that there was, by its generation."""
        return {f"{self.info.pid}.{id(self):x}": self.health()}

    def hand_over(self, stream: EventStream, other: Engine) -> bool:
        """Let ``other`` go on with what ``stream`` reads; False where it cannot be moved."""
        return False


Client: TypeAlias = Hashable
"""The client that submitted a request, by whatever the process that runs the core distinguishes clients by."""

EngineOutput: TypeAlias = tuple[Client, str, Event]
"""(client, request id, event)"""


class Core(Protocol):
    """An engine as its process drives it: one thread makes it, adds requests, aborts them and steps, and nothing else.

    Events go out by ``step`` and ``close`` alone, each request's in order: for each sequence any number of ``Tokens``
    with one or more tokens each, then one ``Finished``; or one ``Failed`` for the whole request (``events``). A request
    given up by ``abort`` ends the same way. ``step`` raises only for what the whole engine cannot go on after: then the
    process ends, and its clients submit again what ran, resumed after the tokens that they have.
    """

    backend: ClassVar[str]

    @property
    def info(self) -> EngineInfo: ...

    def add(self, request: ValidRequest, client: Client, *, continues: bool = False) -> None:
        """Take on a request. ``continues``: an engine had it before, so that no bound on new requests holds for it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early. An unknown or finished one is left alone."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence whose text is complete for its caller. One that has ended is left alone."""
        ...

    def has_work(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        ...

    def on_work(self, wake: Callable[[], None]) -> None:
        """``wake`` is to be called, on any thread, when there is work although nothing was added: what a request waits
        for beside the steps (a grammar that is compiled) has come."""
        ...

    def step(self) -> list[EngineOutput]:
        """Make some progress, shortly (a forward), and return what happened."""
        ...

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """See ``Engine.load_adapter``; ``InvalidField`` where ``capabilities.adapters`` is False."""
        ...

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """See ``Engine.unload_adapter``."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]: ...

    def health(self) -> Health:
        """Cheap: it is asked for after every step."""
        ...

    def close(self) -> list[EngineOutput]:
        """End everything and give memory back; the last events."""
        ...


CoreFactory: TypeAlias = Callable[[Bundle, EngineSettings], Core]
"""Raises ``PackagingError`` for a model or settings that this backend cannot run."""
