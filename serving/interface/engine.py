"""The interface of engines: ``Engine`` is what callers hold, ``Core`` is what an engine process runs.

::

    caller ── Engine                                           Core
              transport.client.client.RemoteEngine ── ZeroMQ ─── engine.core.EngineCore                 "native"
              engine.in_process.InProcessEngine ── a thread ──── testing.instant_core.InstantCore       "instant"
              routing.replica_set.ReplicaSet: several of them    another: vLLM, OpenVINO GenAI, …

A new backend is a class with the methods of ``Core``. ``CoreFactory(bundle, settings)`` makes it on the thread that
then drives it; ``ProcessSpec.core`` of ``transport`` names the factory as ``module:name``. Everything that clients rely
on (recovery, backpressure, metering, drain, adapters at run time) is done around the core, which says in ``EngineInfo``
what it can do. Settings that every backend has are fields of ``EngineSettings``. Settings of a single backend are under
its name in ``EngineSettings.backend``; it reads them into a ``Checked`` record with ``settings.of_backend``.

No method of these protocols is optional. Methods with a body are defaults for classes that inherit from the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import cache
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeGuard, runtime_checkable

from msgspec import Struct

from .bundle import Bundle
from .events import Event
from .request import Task, ValidRequest
from .settings import EngineSettings

QUEUE_FLOOR = 16  # a tenant may always have 1 / QUEUE_FLOOR of a queue, whatever others have in it


class Capabilities(Struct, frozen=True, kw_only=True):
    """The abilities of an engine beyond running a request to its end. Its clients refuse, or do without, the rest.

    - ``resumes``: a request with ``resumed_token_ids`` goes on with the text that it would have had. Without it, a
      request that has delivered tokens ends with its engine, and is not paused for a slow reader.
    - ``adapters``: LoRA adapters are loaded and unloaded while the engine runs.
    - ``structured_output``: generation within a grammar.
    - ``beam_search``: ``Sampling.beams``.
    - ``provisioned``: the engine keeps the pace of provisioned requests beside best-effort ones.
    - ``lora_tasks``: adapters that come with a request.
    - ``prompt_tables``: vectors of virtual tokens that come with a request.
    - ``images``: images in prompts (``Bundle.images``).
    """

    resumes: bool = True
    adapters: bool = True
    structured_output: bool = False
    beam_search: bool = False
    provisioned: bool = True
    lora_tasks: bool = False
    prompt_tables: bool = False
    images: bool = False


class PagedInfo(Struct, frozen=True, kw_only=True):
    """The way in which a paged KV cache runs.

    - A block has ``kv_block_size`` tokens.
    - ``attention``: decodes attend by "triton" or "torch" (``attention_reason``: why not by Triton).
    - ``prefill``: chunks of prompts attend in one launch by torch's "varlen" operator or by "triton", or one after the
      other by "torch" (``prefill_reason``: why not by a kernel).
    - ``cuda_graphs``: the sizes of decode steps that are recorded (``cuda_graphs_reason``: why none are).
    - ``async_scheduling``: whether a step is launched before the tokens of the previous one are read
      (``async_scheduling_reason``: why not).
    - ``products``: for each shape of linears in floats, outputs x inputs, the numbers of rows that our kernels multiply
      faster than torch, with both times (``products_reason``: why torch multiplies all).
    - ``early_launch``: whether kernels begin while the one before still runs (``early_launch_reason``: why not).
    """

    kv_block_size: int
    attention: Literal["triton", "torch"]
    attention_reason: str = ""
    prefill: Literal["varlen", "triton", "torch"] = "torch"
    prefill_reason: str = ""
    cuda_graphs: tuple[int, ...] = ()
    cuda_graphs_reason: str = ""
    async_scheduling: bool = False
    async_scheduling_reason: str = ""
    products: tuple[str, ...] = ()
    products_reason: str = ""
    early_launch: bool = False
    early_launch_reason: str = ""


class EngineInfo(Struct, frozen=True, kw_only=True):
    """The facts about a loaded model that validation needs.

    - ``max_model_len``: most tokens of a sequence, prompt and completion together.
    - ``max_kv_tokens``: most tokens that a single sequence may occupy (prompt + max_tokens). A request's sequences run
      one after another if need be.
    - ``embedding_dim``: 0 for a generating model.
    - ``hidden_size``: width of a generating model's token embeddings; 0 if nobody needs it.
    - ``quantization_reason``: why fp8 weights are multiplied as floats; empty if they are not.
    - ``kernels``: "native" if a whole step runs in our kernels, else "torch" (``kernels_reason`` says why); "none" if
      there are none. ``instruction_set``: the one our kernels were chosen for; empty if they do not run.
    - ``kv_cache_memory``: bytes. ``kv_cache_dtype``: the type of keys and values. ``kv_cache_reason``: why a latent
      attention keeps whole keys and values; empty if it does not.
    - ``num_standbys``: how many standby engines are to be kept. ``threads``: how many threads compute on the CPU.
    - ``backend``: the name of the ``Core``.
    - ``max_logits_bytes``: most bytes of logits that one request may get; 0 if none are given.
    - ``paged``: how a paged KV cache runs; None for other caches.
    - ``max_num_batched_tokens``: most tokens in a step; 0 if the backend cuts its steps itself.
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
        """Return which kernels run, and for which instruction set or why not ours, in one line."""
        return _with_reason(self.kernels, self.kernels_reason or self.instruction_set)

    @property
    def kv_cache_summary(self) -> str:
        """The type of keys and values, and why whole ones are kept, in one line; empty if there are none."""
        return _with_reason(self.kv_cache_dtype, self.kv_cache_reason)


def _with_reason(what: str, reason: str) -> str:
    return f"{what} ({reason})" if reason else what


def engine_name(name: str, content_hash: str) -> str:
    """Return what engines call the adapter ``name`` with this content: another content is another adapter to them.

    A name that operators and callers use never has an ``@``. Without a hash, engines call the adapter as they do.
    """
    return f"{name}@{content_hash[:32]}" if content_hash else name


def public_name(name: str) -> str:
    """Return what callers call the adapter that engines call ``name``."""
    return name.partition("@")[0]


class AdapterInfo(Struct, frozen=True, kw_only=True):
    """A loaded LoRA adapter. ``path`` is the peft directory on the engine's host that it was read from."""

    name: str
    rank: int
    path: str


class Health(Struct, frozen=True, kw_only=True):
    """An engine's status and progress.

    "stalled": work is waiting and no step came in time. "draining": the engine finishes its requests and then ends.

    - ``steps`` grows with every forward.
    - ``last_step_age``: seconds, including those in which nothing was heard from the engine. It also grows while the
      engine is idle.
    - ``num_running``, ``num_waiting`` and ``kv_tokens_used`` are 0 if there is no engine. Sequences that wait for their
      grammars to be compiled are not counted, since they want nothing from the model yet.
    - Counts of steps and tokens are the last that were reported, and begin at 0 with each engine process.
    - ``accepted_tokens``: how many of the ``draft_tokens`` that speculation proposed were accepted.
    - ``num_standbys``: engines that are loaded and ready to take this one's place.
    - ``num_tenants_waiting``: how many tenants share the queue.
    - ``num_provisioned``: how many of the running and waiting sequences are provisioned. ``provisioned_tokens`` and
      ``provisioned_prompt_tokens`` are their parts of the tokens generated and prefilled.
    - ``cpu_wait``: share of the time the engine's thread wanted to run in which it waited for a CPU
      (``contention.py``).
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
    cpu_wait: float = 0.0
    num_standbys: int = 0
    num_tenants_waiting: int = 0


class EngineRecord(Struct, frozen=True, kw_only=True):
    """The facts that the process that keeps an engine knows about it.

    ``memory``: bytes of a replica, estimated from its files until ``measured``. ``start_seconds``: how long its last
    start took. ``unloaded``: why it is unloaded, "" if it is not. ``unloads``: how often it was unloaded."""

    memory: int = 0
    measured: bool = False
    start_seconds: float | None = None
    unloaded: str = ""
    unloads: int = 0


class EventStream(Protocol):
    """The events of one request; iterate from one thread.

    ``close`` (call it also if you stop early) aborts what still runs; closing twice is harmless. ``finish(index)`` ends
    one sequence whose text is complete (a stop string matched above the engine) and lets the others run. The sequence
    still gets its ``Finished`` (reason "abort"), and tokens already on the way may come before it. ``finish`` does
    nothing for an index that has ended. A stream that ``is_over``, read to its end or closed, needs its engine no more.
    """

    @property
    def is_over(self) -> bool: ...
    def __iter__(self) -> Iterator[Event]: ...
    def __next__(self) -> Event: ...
    def close(self) -> None: ...
    def finish(self, index: int) -> None: ...


class EventQueue(Protocol):
    """The queue in which a stream's events wait for their reader. The engine's or its client's thread calls ``put``."""

    def put(self, event: Event, /) -> None: ...
    def get(self) -> Event: ...
    def qsize(self) -> int: ...


@runtime_checkable
class TappableStream(Protocol):
    """An ``EventStream`` whose events may be taken as they come (``transport.client.event_stream.RemoteStream``)."""

    def tap(self, take: Callable[[Event], bool], /) -> bool: ...
    def have_reader(self, run: Callable[[], object], /) -> None: ...


def is_tappable(stream: EventStream) -> TypeGuard[TappableStream]:
    """Return whether a stream is a ``TappableStream``."""
    return _are_tappable(type(stream))


@cache  # a protocol asks for its own attributes by their names each time, which costs more than the rest of a stream
def _are_tappable(kind: type[EventStream]) -> bool:
    return issubclass(kind, TappableStream)


@runtime_checkable
class Engine(Protocol):
    """The engine as callers see it. Thread-safe: requests of many callers are batched together."""

    @property
    def info(self) -> EngineInfo: ...

    def submit(self, request: ValidRequest) -> EventStream:
        """Start a request at once. An invalid request does not raise; it gets a ``Failed`` event that says why."""
        ...

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """Load an adapter from a peft directory. With ``pinned`` it is never evicted.

        With ``replace`` it takes the place of the adapter of that name; running requests end on the old weights.
        Raises ``InvalidField`` if the adapter does not fit the base model, ``AlreadyExists``, and ``LimitExceeded`` if
        there is no room for it beside pinned ones."""
        ...

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """Unload an adapter. Raises ``NotFound`` for an unknown name and ``Conflict`` while sequences use it.

        With ``at_once`` there is no conflict: these sequences end on its weights."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]: ...

    def health(self) -> Health: ...

    def close(self) -> None:
        """Release the engine. Requests of this client end with ``Failed(kind="shutting_down")``."""
        ...

    @property
    def num_replicas(self) -> int:
        """How many engine processes serve it now; 0 while none is wanted or running."""
        return 1

    def record(self) -> EngineRecord:
        """Return what is known about the engine if another process keeps it."""
        return EngineRecord()

    def process_health(self) -> Mapping[str, Health]:
        """Return the last ``Health`` of each engine process so far, by its generation."""
        return {f"{self.info.pid}.{id(self):x}": self.health()}

    def hand_over(self, stream: EventStream, other: Engine) -> bool:
        """Let ``other`` continue the request that ``stream`` reads; False if it cannot be moved."""
        return False


Client: TypeAlias = Hashable
"""The client that submitted a request, as identified by the process that runs the core."""

EngineOutput: TypeAlias = tuple[Client, str, Event]
"""(client, request id, event)"""


class Core(Protocol):
    """An engine as its process drives it: a single thread makes it, adds requests, aborts them and takes steps.

    Only ``step`` and ``close`` return events, those of each request in order: for each sequence any number of
    ``Tokens`` with one or more tokens each, then one ``Finished``; or one ``Failed`` for the whole request
    (``events``). A request ended by ``abort`` ends the same way. ``step`` raises only if the whole engine cannot go on.
    The process then ends, and its clients submit the running requests again, resumed after the tokens that they have.
    """

    backend: ClassVar[str]

    @property
    def info(self) -> EngineInfo: ...

    def add(self, request: ValidRequest, client: Client, *, continues: bool = False) -> None:
        """Accept a request. ``continues``: an engine had it before, so limits on new requests do not apply to it."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early. Unknown or finished requests are ignored."""
        ...

    def finish(self, request_id: str, index: int) -> None:
        """End one sequence, whose text is complete for its caller. A sequence that has ended is ignored."""
        ...

    def has_work(self) -> bool:
        """Return whether ``step`` has something to do or to return."""
        ...

    def on_work(self, wake: Callable[[], None]) -> None:
        """Set ``wake``, to be called on any thread when there is work although nothing was added: something that a
        request waited for, such as a compiled grammar, is ready."""
        ...

    def step(self) -> list[EngineOutput]:
        """Make a little progress (one forward) and return what happened."""
        ...

    def load_adapter(self, name: str, path: str, *, replace: bool = False, pinned: bool = False) -> AdapterInfo:
        """See ``Engine.load_adapter``. Raises ``InvalidField`` if ``capabilities.adapters`` is False."""
        ...

    def unload_adapter(self, name: str, *, at_once: bool = False) -> None:
        """See ``Engine.unload_adapter``."""
        ...

    def adapters(self) -> tuple[AdapterInfo, ...]: ...

    def health(self) -> Health:
        """Return the engine's health. Must be cheap, since it is asked for after every step."""
        ...

    def close(self) -> list[EngineOutput]:
        """End all requests, free the memory and return the last events."""
        ...


CoreFactory: TypeAlias = Callable[[Bundle, EngineSettings], Core]
"""Makes a core. Raises ``PackagingError`` for a model or settings that this backend cannot run."""
