"""The life of one request, from its bytes to its answer. No web framework here: bytes in, ``Answer`` out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from .. import logs
from ..control.settings import ServerSettings
from ..dialects import Dialect, Head
from ..errors import Aborted, InternalError, InvalidField, ServingError
from ..metering.authorization import ANONYMOUS, Caller
from ..modes import Target
from ..observability import tracing
from ..observability.access_record import AccessRecord
from ..observability.tracing import Tracer
from ..reply import Done, Piece, Reply
from ..request import RawRequest, ValidRequest
from ..routing.load_shedding import LoadShedder
from ..routing.served_endpoints import ServedEndpoints, ServedEntity
from ..tasks import embed, generate
from ..tasks.cache_salt import CacheSalts
from ..tasks.prepare import Limits, prepare
from ..tasks.reply_size import fixed_size
from . import rate_limit_headers
from .answer import Answer
from .in_flight import (
    ClientGone,
    InFlightRequests,
    InterruptibleIterator,
    interrupt_at_deadline,
    interrupt_on_disconnect,
)
from .memory_budget import Allocation, MemoryBudget
from .offload import Offload
from .refusal_limit import RefusalLimit

TIMEOUT_HEADER = "X-Request-Timeout"
MAX_USER = 256  # characters of the caller's own id of its user that the log keeps
STICKY_HEADER = "X-Sticky-Key"
STICKY_MAX = 1000  # characters
SERVED_HEADER = "served-model-name"  # as Databricks names the entity that answered
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(slots=True, kw_only=True)
class Server:
    """What the requests of one worker share."""

    settings: ServerSettings
    endpoints: ServedEndpoints
    load_shedder: LoadShedder
    in_flight: InFlightRequests
    offload: Offload
    salts: CacheSalts
    memory: MemoryBudget
    refusals: RefusalLimit
    keys: Any = None
    tokens: Any = None
    ledger: Any = None
    tracer: Tracer = tracing.OFF
    store: Any = None
    management: Any = None
    follower: Any = None
    runtime_dir: str | None = None

    @property
    def asks_who(self) -> bool:
        """Whether a request without an API key or token is refused."""
        return self.keys is not None or self.tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """``name`` is the endpoint of the path, None where the body names it. ``sock`` is watched for a disconnect.

    ``receive`` reads the body, of which ``is_large`` says what is known before. Requests with the same ``sticky_key``
    go to the same served entity of an endpoint."""

    head: Head
    dialect: Dialect
    receive: Callable[[Allocation], bytes]
    is_large: bool = False
    address: str = ""
    name: str | None = None
    timeout: str | None = None
    sticky_key: str | None = None
    caller: Caller = ANONYMOUS
    sock: Any = None

    def payer(self, server: Server) -> str:
        """Whose share of the memory it takes."""
        return self.caller.key_id if server.asks_who else self.address


def invoke(server: Server, incoming: Incoming, record: AccessRecord) -> Answer:
    """Run a task. Raises ``ServingError`` and ``ClientGone``, with everything given back."""
    server.load_shedder.check_open()
    known = _meant(server.endpoints.seen_by(incoming.caller), incoming)
    _check_limits(server, incoming, known)
    with server.memory.allocate(incoming.payer(server)) as allocation:
        with ExitStack() as held:
            endpoint, valid = _accept(server, incoming, record, held, is_known=len({e.name for e in known}) == 1)
            if not valid.stream:
                allocation.grow(fixed_size(valid, endpoint.engine.info.embedding_dim))
            pieces = _start(server, endpoint, valid, incoming, record, held)
            if valid.stream:
                return _streamed(incoming.dialect, valid, pieces, record, held.pop_all())
            reply = generate.gather(pieces)
        return server.offload(reply.size, _whole, incoming.dialect, valid, reply, record)


def _accept(
    server: Server, incoming: Incoming, record: AccessRecord, held: ExitStack, *, is_known: bool
) -> tuple[ServedEntity, ValidRequest]:
    """Receive, decode, address and prepare; nothing of the body is kept. ``is_known``: the endpoint's limits have been
    looked at before."""
    with server.memory.allocate(incoming.payer(server)) as allocation:
        body = incoming.receive(allocation)
        raw = server.offload(len(body), _decode, incoming, body)
        endpoint, raw = _address(server.endpoints.seen_by(incoming.caller), incoming, raw)
        record.endpoint, record.stream = endpoint.name, raw.stream
        adapter = endpoint.view.find_adapter(None, raw.adapter)
        server.endpoints.check_use(incoming.caller, endpoint, adapter)
        user = endpoint.view.said(raw, "user")
        record.user = user and user[:MAX_USER]
        record.headers[SERVED_HEADER] = quote(endpoint.entity_shown_to(incoming.caller), safe="/:@ ")
        limits = _limits(server, endpoint, incoming)
        if not is_known:
            _check_limits(server, incoming, [endpoint])
        reserves = endpoint.mode is not None and endpoint.mode.profile.reserves
        sharer = incoming.caller if server.asks_who else None
        server.load_shedder.enter(endpoint.name, endpoint.engine, reserves=reserves, caller=sharer)
        held.callback(server.load_shedder.leave, endpoint.engine, reserves=reserves, caller=sharer)
        valid = server.offload(len(body), prepare, raw, endpoint.view, limits)
        record.accept(valid, body)
    return endpoint, valid


def _meant(endpoints: ServedEndpoints, incoming: Incoming) -> list[ServedEntity]:
    """The served entities that a request may be for, as far as that is known before its body is read."""
    served = list(endpoints.entities())
    return [one for one in served if one.name == incoming.name] or served


def _check_limits(server: Server, incoming: Incoming, meant: list[ServedEntity]) -> None:
    """Refuse a large request for limits that are used up, before it is received, and again before it is tokenised."""
    if server.ledger is None or not incoming.is_large or not meant or any(one.mode is None for one in meant):
        return
    names = {one.name for one in meant}
    paid = all(one.mode is not None and not one.mode.profile.reserves for one in meant)
    embeds = incoming.head.route.task == "embeddings" or any("embeddings" in one.tasks for one in meant)
    server.ledger.check(
        key_id=incoming.caller.key_id,
        tenant=incoming.caller.tenant,
        endpoint=names.pop() if len(names) == 1 else None,
        entities=[one.entity for one in meant] if paid else None,
        generates=incoming.head.route.task in ("chat", "completions") or not embeds,
    )


def _limits(server: Server, endpoint: ServedEntity, incoming: Incoming) -> Limits:
    """The shorter of the server's and the header's time, and with whom prefixes are shared."""
    header, timeout = incoming.timeout, server.settings.timeout
    sharing = endpoint.prefix_sharing or server.settings.prefix_sharing
    return Limits(
        timeout=timeout if header is None else min(timeout, _seconds(header)),
        cache_salt=server.salts.of(sharing, tenant=incoming.caller.tenant, endpoint=endpoint.name),
    )


def _whole(dialect: Dialect, valid: ValidRequest, reply: Reply, record: AccessRecord) -> Answer:
    encoded = dialect.encode(valid, reply)
    headers = {**encoded.headers, **record.headers}
    return Answer(status=encoded.status, body=encoded.body, content_type=encoded.content_type, headers=headers)


def _decode(incoming: Incoming, body: bytes) -> RawRequest:
    return incoming.dialect.decode(incoming.head, body)


def _address(endpoints: ServedEndpoints, incoming: Incoming, raw: RawRequest) -> tuple[ServedEntity, RawRequest]:
    """The endpoint meant, and ``raw`` with its name and adapter filled in."""
    endpoint, adapter = endpoints.route(
        incoming.name or raw.model,
        raw.model if incoming.name else None,
        sticky_key=_sticky_key(incoming.sticky_key),
        caller=incoming.caller.key_id,
    )
    if raw.adapter is not None and adapter is not None and raw.adapter != adapter:
        raise InvalidField("adapter", raw.adapter, f"the adapter that model names: {adapter}")
    adapter = adapter or raw.adapter
    if adapter is not None:  # before anything says which adapters there are
        endpoints.check_use(incoming.caller, endpoint, adapter)
    return endpoint, msgspec.structs.replace(raw, model=endpoint.name, adapter=adapter)


def _sticky_key(header: str | None) -> str | None:
    if header is not None and len(header) > STICKY_MAX:
        raise InvalidField(STICKY_HEADER, f"{len(header)} characters", f"at most {STICKY_MAX}")
    return header


def _seconds(header: str) -> float:
    value = float(header) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header) else 0.0
    if not 0 < value < math.inf:
        raise InvalidField(TIMEOUT_HEADER, header, "seconds, a number above 0")
    return value


def _start(
    server: Server,
    endpoint: ServedEntity,
    valid: ValidRequest,
    incoming: Incoming,
    record: AccessRecord,
    held: ExitStack,
) -> Iterator[Piece]:
    """Admit and submit. The pieces, interruptible and counted; ``held`` gives all of it back, last things first."""
    admission = None
    if endpoint.mode is not None:
        target = Target(endpoint=endpoint.name, entity=endpoint.entity)
        admission = held.enter_context(endpoint.mode.admit(valid, incoming.caller, target))
        valid = admission.request
        record.headers |= rate_limit_headers.headers(admission.limits)
    pull: InterruptibleIterator[Piece] = InterruptibleIterator(_run(endpoint, valid, admission))
    held.callback(pull.close)
    held.enter_context(server.in_flight.track(pull))
    held.enter_context(interrupt_on_disconnect(incoming.sock, pull))
    held.enter_context(interrupt_at_deadline(valid.deadline, pull))
    return _counted(pull, admission, record)


def _run(endpoint: ServedEntity, valid: ValidRequest, admission: Any) -> generate.Pieces:
    if valid.task == "embeddings":
        return embed.run(endpoint.engine, valid)
    on_tokens = None if admission is None else lambda _, count: admission.count(count)
    return generate.run(endpoint.engine, valid, endpoint.view.text, on_tokens)


def _counted(pull: InterruptibleIterator[Piece], admission: Any, record: AccessRecord) -> Iterator[Piece]:
    for piece in pull:
        record.see(piece)
        if admission is not None and isinstance(piece, Done):
            used = piece.usage
            admission.settle(
                prompt=used.prompt_tokens,
                cached=used.cached_tokens,
                completion=used.completion_tokens,
                finish_reason=record.finish_reason,
            )
        yield piece


def _streamed(
    dialect: Dialect, valid: ValidRequest, pieces: Iterator[Piece], record: AccessRecord, held: ExitStack
) -> Answer:
    """A stream whose first bytes are already there: what fails before them still gets its own HTTP status."""
    encoder = dialect.stream(valid)
    stream = Stream(encoder, pieces, record, held)
    try:
        stream.prime()
    except BaseException as error:
        stream.release(error)
        raise
    return Answer(
        body=stream,
        content_type=encoder.content_type,
        headers={**STREAM_HEADERS, **encoder.headers, **record.headers},
    )


class Stream:
    """The bytes of a streamed reply. ``close`` (which WSGI servers call, come what may) gives everything back.

    Nothing is buffered here: a slow reader stops the pulling, and its request leaves the engine while more than some
    thousand tokens wait for it (``transport.stream``). A reader that takes nothing for ``io_timeout`` loses its
    connection.
    """

    def __init__(self, encoder: Any, pieces: Iterator[Piece], record: AccessRecord, held: ExitStack) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self._record = record
        self._held = held
        self._first: bytes | None = None
        self._complete = False
        self._over = False

    def prime(self) -> None:
        """Wait for the first bytes. Raises what ``invoke`` raises."""
        self._first = self._next_bytes()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._over:
            raise StopIteration
        try:
            data = self._next_bytes()
        except ServingError as error:
            return self._fail(error)
        except ClientGone:
            raise
        except Exception:
            logs.event("fault", level=40, exc_info=True, request_id=self._record.request_id)
            return self._fail(InternalError("internal error; the log has it under the request id"))
        if not data:
            self._over = True
            self.close()
            raise StopIteration
        return data

    def _next_bytes(self) -> bytes:
        """The next non-empty chunk; b"" at the end."""
        for piece in self._pieces:
            data: bytes = self._encoder.encode(piece)
            if data:
                return data
        self._complete = True
        return b""

    def _fail(self, error: ServingError) -> bytes:
        self._over = True
        self.release(error)
        self._record.finish(error.status, error.logged)
        data: bytes = self._encoder.error(error)
        return data

    def release(self, error: BaseException | None = None) -> None:
        """Abort what still runs and settle, with ``error`` where there was one. Later calls do nothing."""
        self._held.__exit__(type(error) if error else None, error, None)

    def close(self) -> None:
        if self._complete:
            self.release()
            self._record.finish(200)
        else:
            self.release(ClientGone())
            self._record.finish(Aborted.status, "the client went away")
