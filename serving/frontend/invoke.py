"""Run a task of an endpoint: one request, from its received bytes to its response."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..dialects import Head, InferenceRoute, StreamEncoder
from ..interface.errors import InvalidField, ServingError
from ..interface.logits_size import logits_size
from ..interface.reply import Piece, Reply
from ..interface.request import RawRequest, ValidRequest
from ..metering.accounts.limits import Limit, shown_to_caller
from ..metering.ledger.slices import is_shared
from ..metering.proof.answers import OutputHashes, body_digest
from ..modes import Admission, Target
from ..observability import metrics
from ..routing.served_endpoints import ServedEntity
from ..tasks.input_guard import guarded
from ..tasks.prepare import Limits, prepare
from ..tasks.reply import generate
from ..tasks.reply.guarded_run import check_output
from ..tasks.reply_size import fixed_size
from ..tasks.request_weights import adapter_of
from . import end_users, receipts, scorers
from .addressing import address, candidates, check_limits, record_served
from .answer import Answer
from .background.shadow_queue import ShadowCopy
from .dialect_choice import choose, has_open_dialect
from .limits import rate_limit_headers
from .operation import Request
from .run_task import counted, run_task
from .shadow_copies import copies_of
from .streams.first_bytes import Patience
from .streams.in_flight import InterruptibleIterator, interrupt_at_deadline, interrupt_on_disconnect
from .streams.stream import Stream
from .streams.token_writer import token_writer
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
    wants_receipt = receipts.is_wanted(server, request)
    known = candidates(server.endpoints.seen_by(request.caller), request)
    check_limits(server, request, known, _inference(request).task)
    with server.memory.allocate(request.payer(server)) as allocation:
        with ExitStack() as held:
            entity, valid, echoed, copies, asked = _accept(
                server, request, held, is_known=len({e.endpoint for e in known}) == 1
            )
            if not valid.stream:
                info = entity.engine.info
                allocation.grow(fixed_size(valid, info.embedding_dim) + sum(logits_size(valid, info.vocab_size)))
            source, pull, pieces = _start(server, entity, valid, request, held, asked)
            for copy in copies:
                server.shadows.put(copy)
            if wants_receipt:  # a stream's headers are sent before it is settled
                receipts.name_place(request, valid)
            if valid.stream:
                encoder = request.dialect.stream(valid, echoed)
                judges = bool(entity.guardrails.output.scorers)  # of the whole reply
                tokens = None if judges else token_writer(source, encoder, request.record, request.sock)
                patience = Patience(
                    server.settings.stream_start_after, server.settings.stream_keep_alive, pull.interrupt
                )
                return _streamed(Stream(encoder, pieces, request.record, held.pop_all(), tokens, patience), encoder)
            reply = generate.gather(pieces)
            if wants_receipt:
                receipts.add(server, request, valid)
        size = reply.size + len(echoed) + (fixed_size(valid, 0) if valid.scoring is not None else 0)
        return server.offload(size, _whole, request, valid, echoed, reply)


class _Accepted(NamedTuple):
    """A request that has been prepared, with the part of its body that the reply repeats, its copies for shadows, and
    what scorers are asked about it, if there are any."""

    entity: ServedEntity
    valid: ValidRequest
    echoed: bytes
    copies: list[ShadowCopy]
    asked: scorers.Question | None


def _accept(server: WorkerState, request: Request, held: ExitStack, *, is_known: bool) -> _Accepted:
    """Receive, decode, address and prepare a request; ``held`` gets what must be released later.

    No part of the body is kept but the one that the reply repeats. ``is_known`` says that the endpoint's limits have
    been checked already.
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
        record.labels = end_users.named(server.settings.end_user_header, request, entity.view.labels(raw))
        if request.background is not None:
            record.labels = request.background.labels.over(record.labels)
        pixels = held.enter_context(server.pixels.allocate(request.payer(server)))
        raw = server.offload(len(body), guarded, raw, entity.guardrails.input)
        asked = _question(server, entity, request, raw, held)
        limits = _limits(server, entity, request, pixels.grow)
        if not is_known:
            check_limits(server, request, [entity], _inference(request).task)
        reserves = entity.mode is not None and entity.mode.profile.reserves
        sharer = request.caller if server.requires_key else None
        server.load_shedder.enter(entity.endpoint, entity.engine, reserves=reserves, caller=sharer)
        held.callback(server.load_shedder.leave, entity.engine, reserves=reserves, caller=sharer)
        valid = server.offload(len(body), prepare, raw, entity.view, limits)
        check_output(valid, entity.guardrails.output)
        record.accept(valid, body)
        if entity.mode is not None:
            record.body_digest = server.offload(len(body), body_digest, body)
        _capture(server, entity, request, body, held)
        copies = copies_of(entity, request, raw, valid, len(body))
    if raw.echoed:
        held.enter_context(server.memory.allocate(request.payer(server))).grow(len(raw.echoed))
    return _Accepted(entity, valid, raw.echoed, copies, asked)


def _question(
    server: WorkerState, entity: ServedEntity, request: Request, raw: RawRequest, held: ExitStack
) -> scorers.Question | None:
    """Return what scorers of the endpoint are asked about a request, within the memory budget; None without any."""
    if not (entity.guardrails.input.scorers or entity.guardrails.output.scorers):
        return None
    asked = scorers.question_of(raw)
    held.enter_context(server.memory.allocate(request.payer(server))).grow(asked.size)
    return asked


def _capture(server: WorkerState, entity: ServedEntity, request: Request, body: bytes, held: ExitStack) -> None:
    """Have the record keep the texts of the request, if its endpoint logs them and the request is in the sample."""
    settings = entity.payload_log
    if settings is None or server.payloads is None or random.random() >= settings.sample:
        return
    caller = request.caller
    capture = server.payloads.capture(settings, tenant=caller.tenant, key_id=caller.key_id, body=body)
    if capture.body is not None:
        held.enter_context(server.memory.allocate(request.payer(server))).grow(len(capture.body))
    request.record.keep_texts(capture)


def _limits(server: WorkerState, entity: ServedEntity, request: Request, keep_pixels: Callable[[int], None]) -> Limits:
    """Return the request's limits: the shorter of the server's and the header's timeout, the cache salt for shared
    prefixes, the tenant and weight by which the engine shares its time, and the room for its images."""
    sharing = entity.prefix_sharing or server.settings.prefix_sharing
    return Limits(
        timeout=_timeout(server, request),
        cache_salt=server.salts.of(sharing, tenant=request.caller.tenant, endpoint=entity.endpoint),
        tenant=server.salts.tenant(request.caller.tenant),
        weight=request.caller.weight,
        background=request.background is not None,
        keep_pixels=keep_pixels,
    )


def _timeout(server: WorkerState, request: Request) -> float:
    """Return the seconds that the request may take: the shorter of the server's and the header's."""
    header = request.headers.get(TIMEOUT_HEADER)
    timeout = server.settings.timeout if request.background is None else request.background.seconds
    return timeout if header is None else min(timeout, _seconds(header))


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
    server: WorkerState,
    entity: ServedEntity,
    valid: ValidRequest,
    request: Request,
    held: ExitStack,
    asked: scorers.Question | None,
) -> tuple[generate.Pieces, InterruptibleIterator[Piece], Iterator[Piece]]:
    """Admit a request, have it judged and submit it. Return its pieces, the same pieces interruptible, and these
    counted.

    Limits are reserved before scorers are asked, so that a caller beyond its limits takes nobody's turn.

    ``held`` gets everything that must be released, and releases it in reverse order.
    """
    admission: Admission | None = None
    if entity.mode is not None:
        target = Target(
            endpoint=entity.endpoint,
            entity=entity.entity,
            model=entity.identity,
            adapter_hash=entity.adapter_hash(valid.adapter),
        )
        proved = receipts.asked(entity, valid, request)
        admission = held.enter_context(entity.mode.admit(valid, request.caller, target, request.record.labels, proved))
        valid = admission.request
        request.record.price = admission.lease.price
        if admission.lease.proof_key is not None:
            request.record.output = OutputHashes(admission.lease.proof_key)
        if request.background is not None:
            admission.lease.hold()
            request.background.admitted(admission.lease)
        request.record.headers |= rate_limit_headers.headers(admission.lease.limits)
        if admission.lease.beyond:
            _report_exceeded(request, entity.endpoint, admission.lease.beyond)
    watch = partial(_watched, server, request)
    if asked is not None:
        scorers.check_input(server.scorers, entity.guardrails.input.scorers, asked, valid.deadline, watch)
    if request.record.capture is not None:
        request.record.capture.admitted = True
    source = run_task(entity, valid, admission)
    pull: InterruptibleIterator[Piece] = InterruptibleIterator(source)
    held.callback(pull.close)
    held.enter_context(watch(pull))
    held.enter_context(interrupt_at_deadline(valid.deadline, pull))
    pieces: Iterator[Piece] = pull
    judges = entity.guardrails.output.scorers
    if judges and asked is not None and valid.sampling is not None:
        reply = held.enter_context(server.memory.allocate(request.payer(server), "reply"))
        pieces = scorers.judged(server.scorers, judges, asked, pull, valid.deadline, reply.grow, watch)
    return source, pull, counted(pieces, admission, request.record, returns_trace=valid.return_trace)


@contextmanager
def _watched(server: WorkerState, request: Request, pull: InterruptibleIterator[Any]) -> Iterator[None]:
    """Interrupt ``pull`` when the caller has gone, or the server ends."""
    watch = request.watch or partial(interrupt_on_disconnect, request.sock)
    with server.in_flight.track(pull), watch(pull):
        yield


def _report_exceeded(request: Request, endpoint: str, soft: tuple[Limit, ...]) -> None:
    """Count the soft limits beyond which a request was admitted, and name to its caller those it may know of."""
    for limit in soft:
        metrics.SOFT_EXCEEDED.labels(endpoint, limit.scope, limit.kind).inc()
    shown = shown_to_caller(soft, is_shared=is_shared(request.caller.key_id))
    request.record.headers |= rate_limit_headers.exceeded(shown)


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
