"""Run a task of an endpoint: one request, from its received bytes to its response."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import msgspec

from ..dialects import Head, InferenceRoute, StreamEncoder
from ..interface.errors import Aborted, InternalError, InvalidField, ServingError
from ..interface.logits_size import logits_size
from ..interface.reply import Done, Piece, Reply
from ..interface.request import RawRequest, ValidRequest
from ..modes import Admission, Target
from ..observability.access_record import AccessRecord
from ..routing.served_endpoints import ServedEntity
from ..system import logs
from ..tasks.prepare import Limits, prepare
from ..tasks.reply import embed, generate, score
from ..tasks.reply_size import fixed_size
from ..tasks.request_weights import adapter_of
from . import rate_limit_headers
from .addressing import address, candidates, check_limits, record_served
from .answer import Answer
from .dialect_choice import choose, has_open_dialect
from .first_bytes import FirstBytes, Patience
from .in_flight import ClientGone, InterruptibleIterator, interrupt_at_deadline, interrupt_on_disconnect
from .operation import Request
from .token_writer import TokenWriter, WriteFailed, token_writer
from .worker_state import WorkerState

TIMEOUT_HEADER = "X-Request-Timeout"
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def invoke(server: WorkerState, request: Request) -> Answer:
    """Run a task. Raises ``ServingError``, which names fields as they were sent, and ``ClientGone``, after releasing
    all resources."""
    try:
        return _invoked(server, request)
    except ServingError as error:
        error.name_as_sent(request.spoken.sent_as)
        raise


def _invoked(server: WorkerState, request: Request) -> Answer:
    server.load_shedder.check_open()
    known = candidates(server.endpoints.seen_by(request.caller), request)
    check_limits(server, request, known, _inference(request).task)
    with server.memory.allocate(request.payer(server)) as allocation:
        with ExitStack() as held:
            entity, valid, echoed = _accept(server, request, held, is_known=len({e.endpoint for e in known}) == 1)
            if not valid.stream:
                info = entity.engine.info
                allocation.grow(fixed_size(valid, info.embedding_dim) + sum(logits_size(valid, info.vocab_size)))
            source, pull, pieces = _start(server, entity, valid, request, held)
            if valid.stream:
                encoder = request.dialect.stream(valid, echoed)
                tokens = token_writer(source, encoder, request.record, request.sock)
                patience = Patience(
                    server.settings.stream_start_after, server.settings.stream_keep_alive, pull.interrupt
                )
                return _streamed(Stream(encoder, pieces, request.record, held.pop_all(), tokens, patience), encoder)
            reply = generate.gather(pieces)
        size = reply.size + len(echoed) + (fixed_size(valid, 0) if valid.scoring is not None else 0)
        return server.offload(size, _whole, request, valid, echoed, reply)


def _accept(
    server: WorkerState, request: Request, held: ExitStack, *, is_known: bool
) -> tuple[ServedEntity, ValidRequest, bytes]:
    """Receive, decode, address and prepare a request; ``held`` gets what must be released later.

    Return the served entity, the prepared request, and the part of the body that the reply repeats; no other part of
    the body is kept. ``is_known`` says that the endpoint's limits have been checked already.
    """
    record = request.record
    with server.memory.allocate(request.payer(server)) as allocation:
        body = request.receive(allocation)
        if has_open_dialect(request.operation):
            server.offload(len(body), choose, server.endpoints, request, body)
        raw = server.offload(len(body), _decode, request, body)
        request.spoken.sent_as = raw.sent_as
        entity, raw = address(server.endpoints.seen_by(request.caller), request, raw)
        record.endpoint, record.stream = entity.endpoint, raw.stream
        adapter = adapter_of(raw, entity.view)
        server.endpoints.check_use(request.caller, entity, adapter)
        record_served(request, entity)
        record.labels = entity.view.labels(raw)
        pixels = held.enter_context(server.pixels.allocate(request.payer(server)))
        limits = _limits(server, entity, request, pixels.grow)
        if not is_known:
            check_limits(server, request, [entity], _inference(request).task)
        reserves = entity.mode is not None and entity.mode.profile.reserves
        sharer = request.caller if server.requires_key else None
        server.load_shedder.enter(entity.endpoint, entity.engine, reserves=reserves, caller=sharer)
        held.callback(server.load_shedder.leave, entity.engine, reserves=reserves, caller=sharer)
        valid = server.offload(len(body), prepare, raw, entity.view, limits)
        record.accept(valid, body)
    if raw.echoed:
        held.enter_context(server.memory.allocate(request.payer(server))).grow(len(raw.echoed))
    return entity, valid, raw.echoed


def _limits(server: WorkerState, entity: ServedEntity, request: Request, keep_pixels: Callable[[int], None]) -> Limits:
    """Return the request's limits: the shorter of the server's and the header's timeout, the cache salt for shared
    prefixes, the tenant and weight by which the engine shares its time, and the room for its images."""
    header, timeout = request.headers.get(TIMEOUT_HEADER), server.settings.timeout
    sharing = entity.prefix_sharing or server.settings.prefix_sharing
    return Limits(
        timeout=timeout if header is None else min(timeout, _seconds(header)),
        cache_salt=server.salts.of(sharing, tenant=request.caller.tenant, endpoint=entity.endpoint),
        tenant=server.salts.tenant(request.caller.tenant),
        weight=request.caller.weight,
        keep_pixels=keep_pixels,
    )


def _whole(request: Request, valid: ValidRequest, echoed: bytes, reply: Reply) -> Answer:
    encoded = request.dialect.encode(valid, reply, echoed)
    headers = {**encoded.headers, **request.record.headers}
    return Answer(status=encoded.status, body=encoded.body, content_type=encoded.content_type, headers=headers)


def _decode(request: Request, body: bytes) -> RawRequest:
    return request.dialect.decode(Head(_inference(request), request.headers, request.path), body)


def _inference(request: Request) -> InferenceRoute:
    assert request.operation.inference is not None
    return request.operation.inference


def _seconds(header: str) -> float:
    value = float(header) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", header) else 0.0
    if not 0 < value < math.inf:
        raise InvalidField(TIMEOUT_HEADER, header, "seconds, a number above 0")
    return value


def _start(
    server: WorkerState, entity: ServedEntity, valid: ValidRequest, request: Request, held: ExitStack
) -> tuple[generate.Pieces, InterruptibleIterator[Piece], Iterator[Piece]]:
    """Admit and submit a request. Return its pieces, the same pieces interruptible, and these counted.

    ``held`` gets everything that must be released, and releases it in reverse order.
    """
    admission: Admission | None = None
    if entity.mode is not None:
        target = Target(endpoint=entity.endpoint, entity=entity.entity, model=entity.identity)
        admission = held.enter_context(entity.mode.admit(valid, request.caller, target, request.record.labels))
        valid = admission.request
        request.record.headers |= rate_limit_headers.headers(admission.lease.limits)
    source = _run(entity, valid, admission)
    pull: InterruptibleIterator[Piece] = InterruptibleIterator(source)
    held.callback(pull.close)
    held.enter_context(server.in_flight.track(pull))
    watch = request.watch or partial(interrupt_on_disconnect, request.sock)
    held.enter_context(watch(pull))
    held.enter_context(interrupt_at_deadline(valid.deadline, pull))
    return source, pull, _counted(pull, admission, request.record, returns_trace=valid.return_trace)


def _run(entity: ServedEntity, valid: ValidRequest, admission: Admission | None) -> generate.Pieces:
    if valid.task == "embeddings":
        return embed.run(entity.engine, valid)
    if valid.task == "score":
        return score.run(entity.engine, valid)
    on_tokens = None if admission is None else lambda _, count: admission.lease.count(count)
    return generate.run(entity.engine, valid, entity.view.text, on_tokens)


def _counted(
    pull: InterruptibleIterator[Piece], admission: Admission | None, record: AccessRecord, *, returns_trace: bool
) -> Iterator[Piece]:
    for piece in pull:
        record.see(piece)
        if admission is not None and isinstance(piece, Done):
            used = piece.usage
            admission.lease.settle(
                prompt=used.prompt_tokens,
                cached=used.cached_tokens,
                completion=used.completion_tokens,
                finish_reason=record.finish_reason,
                drafts=(used.draft_tokens, used.accepted_draft_tokens),
            )
        if returns_trace and isinstance(piece, Done):
            piece = msgspec.structs.replace(piece, trace=record.returned_trace())
        yield piece


def _streamed(stream: Stream, encoder: StreamEncoder) -> Answer:
    """Return a streamed response once its first bytes are ready, so that an earlier error still gets its own status."""
    try:
        stream.prime()
    except BaseException as error:
        stream.release(error)
        raise
    return Answer(
        body=stream,
        content_type=encoder.content_type,
        headers={**STREAM_HEADERS, **encoder.headers, **stream.record.headers},
    )


class Stream:
    """The bytes of a streamed reply. ``close``, which WSGI servers always call, releases everything.

    Nothing is buffered here: a slow reader stops the pulling, and its request leaves the engine while more than some
    thousand tokens wait for it (``event_stream``). A reader that takes nothing for ``io_timeout`` loses its connection.

    With ``patience``, the stream begins even if the reply does not (``StreamEncoder.waiting``), and shows signs of life
    until it does. While this iterator waits for a later piece, ``tokens`` writes arriving tokens. It starts after the
    first bytes of the reply were taken, when the response's head has been sent.
    """

    def __init__(
        self,
        encoder: StreamEncoder,
        pieces: Iterator[Piece],
        record: AccessRecord,
        held: ExitStack,
        tokens: TokenWriter | None = None,
        patience: Patience | None = None,
    ) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self.record = record
        self._held = held
        self._tokens = tokens
        self.patience = patience
        self._first: bytes | None = None
        self._awaited: FirstBytes | None = None
        self._complete = False
        self._over = False

    def prime(self) -> None:
        """Wait for the first bytes, within patience for those of the reply. Raises the same errors as ``invoke``."""
        if self.patience is not None:
            self._awaited = FirstBytes(self._next_bytes, self.patience)
        self._first = self._next_or_waiting()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if self._over:
            raise StopIteration
        if self._tokens is not None and self._awaited is None:
            self._tokens.begin()
            self._tokens = None
        try:
            data = self._next_or_waiting()
        except ServingError as error:
            return self._fail(error)
        except (ClientGone, WriteFailed):
            raise
        except Exception:
            logs.event("fault", level=40, exc_info=True, request_id=self.record.request_id)
            return self._fail(InternalError("internal error; the log has it under the request id"))
        if not data:
            self._over = True
            self.close()
            raise StopIteration
        return data

    def _next_or_waiting(self) -> bytes:
        """Return the next non-empty chunk, or b"" at the end; a sign of life if the reply's first one takes long."""
        while self._awaited is not None:
            if self._awaited.are_ready():
                awaited, self._awaited = self._awaited, None
                return awaited.get()
            if data := self._encoder.waiting():
                return data
        return self._next_bytes()

    def _next_bytes(self) -> bytes:
        """Return the next non-empty chunk of the reply, or b"" at the end."""
        for piece in self._pieces:
            data = self._encoder.encode(piece)
            if data:
                return data
        self._complete = True
        return b""

    def _fail(self, error: ServingError) -> bytes:
        self._over = True
        self.release(error)
        self.record.finish(error.status, error.logged)
        return self._encoder.error(error)

    def release(self, error: BaseException | None = None) -> None:
        """Abort what still runs and settle, with ``error`` if there was one. Later calls do nothing."""
        if self._awaited is not None:
            self._awaited.abandon()
            self._awaited = None
        self._held.__exit__(type(error) if error else None, error, None)

    def close(self) -> None:
        if self._complete:
            self.release()
            self.record.finish(200)
        else:
            self.release(ClientGone())
            self.record.finish(Aborted.status, "the client went away")
