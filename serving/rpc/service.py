"""``GRPCInferenceService``: each call runs as the same request does over HTTP."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import gevent
import grpc
from google.protobuf import json_format

from ..dialects.kserve.metadata import server_metadata
from ..frontend import kserve_queries
from ..frontend.addressing import VERSION
from ..frontend.answer import Answer
from ..frontend.authentication import authenticate, charge
from ..frontend.invoke import invoke
from ..frontend.operation import Auth, Operation, Request
from ..frontend.streams.in_flight import ClientGone
from ..frontend.worker_state import WorkerState
from ..interface.errors import Aborted, InternalError, NotFound, RequestError, ServingError
from ..metering.accounts.authorization import Caller
from ..observability.access_record import REQUEST_ID, AccessRecord, request_id_from
from ..routing.served_endpoints import ServedEntity
from ..system import logs
from .call import Call
from .codec import INFER, STREAM, RpcDialect, failure, frames, parsed
from .loop import Loop
from .messages import SERVICE, message
from .receive_limiter import Message, Permit, ReceiveLimiter, is_small

DIALECT = RpcDialect()
MAX_CONCURRENT_REQUESTS = 64  # concurrent requests of one stream
MAX_BUFFERED_RESPONSES = 256  # responses that may wait for a stream's client
POLL_SECONDS = 0.01  # seconds between checks of a client that reads too slowly

Response = Mapping[str, Any]
T = TypeVar("T")


def _operation(inference: Any) -> Operation:
    return Operation(
        path=inference.path,
        handler=invoke,
        summary=inference.summary,
        dialect=DIALECT,
        auth=Auth.INVOKE,
        inference=inference,
    )


_INFER, _STREAM = _operation(INFER), _operation(STREAM)


class _RequestDone:
    """An item among a stream's responses: one request is over or, with ``count``, the stream had so many in total."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count


class Service:
    """The calls of the service. ``_query_calls`` has those that only query the server, with their authentication."""

    def __init__(self, server: WorkerState, loop: Loop) -> None:
        self._server, self._loop = server, loop
        self._limiter = ReceiveLimiter.of(server.settings)
        self.num_active = 0
        self._query_calls: dict[str, tuple[Auth, Callable[[Any, Caller], Response]]] = {
            "ServerLive": (Auth.OPEN, lambda asked, caller: {"live": True}),
            "ServerReady": (Auth.OPEN, lambda asked, caller: {"ready": kserve_queries.takes_requests(server)}),
            "ServerMetadata": (Auth.OPEN, lambda asked, caller: server_metadata()),
            "ModelReady": (Auth.ANY_KEY, self._model_ready),
            "ModelMetadata": (Auth.ANY_KEY, self._model_metadata),
            "ModelConfig": (Auth.ANY_KEY, self._model_config),
            "RepositoryIndex": (Auth.ANY_KEY, self._index),
        }

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a gRPC server. Messages stay bytes until a call parses them."""
        found: dict[str, grpc.RpcMethodHandler] = {
            name: grpc.unary_unary_rpc_method_handler(partial(self._answer, name)) for name in self._query_calls
        }
        # as a stream of one message, so that the caller's key is checked before its message is in memory
        found["ModelInfer"] = grpc.stream_unary_rpc_method_handler(self._infer)
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler(SERVICE, found)

    # calls that query the server

    def _answer(self, name: str, data: bytes, context: grpc.ServicerContext) -> bytes:
        call, record = self._begun(context, f"/{SERVICE}/{name}")
        auth, answer = self._query_calls[name]
        try:
            asked = parsed(data, message(f"{name}Request"))
            found = self._loop.call(partial(self._handled, call, record, auth, lambda caller: answer(asked, caller)))
        except ServingError as error:
            call.abort(error, record.request_id, record.headers)
        if not auth.is_open:
            record.finish(200)
        response: bytes = json_format.ParseDict(found, message(f"{name}Response")()).SerializeToString()
        return response

    def _find(self, asked: Any, caller: Caller) -> ServedEntity:
        if not asked.name:
            raise NotFound("name: a model's name", param="name")
        return kserve_queries.find(self._server.endpoints.seen_by(caller), caller, asked.name, asked.version or None)

    def _model_ready(self, asked: Any, caller: Caller) -> Response:
        entity = self._find(asked, caller)
        return {"ready": not self._server.load_shedder.draining and kserve_queries.answers(entity)}

    def _model_metadata(self, asked: Any, caller: Caller) -> Response:
        entity = self._find(asked, caller)
        return kserve_queries.metadata_of(self._server.endpoints.seen_by(caller), entity)

    def _model_config(self, asked: Any, caller: Caller) -> Response:
        return {"config": kserve_queries.config_of(self._find(asked, caller))}

    def _index(self, asked: Any, caller: Caller) -> Response:
        if asked.repository_name:
            raise NotFound(
                f"repository_name: no repository {asked.repository_name[:80]!r}; there is one, without a name"
            )
        return {"models": list(kserve_queries.entries(self._server.endpoints.seen_by(caller), only_ready=asked.ready))}

    # inference

    def _infer(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        call, record = self._begun(context, INFER.path)
        caller = call.address
        try:
            if self._server.requires_key:
                caller = self._loop.call(partial(self._handled, call, record, Auth.INVOKE, lambda one: one.key_id))
            with contextlib.ExitStack() as held:
                message = self._received(requests, held.enter_context(self._permit(call, record, caller)))
                answer = self._loop.call(partial(self._run_unary, call, record, message))
        except ServingError as error:
            call.abort(error, record.request_id, record.headers)
        assert isinstance(answer.body, bytes)
        record.finish(answer.status)
        call.send_trailers(answer.headers | {REQUEST_ID: record.request_id})
        return answer.body

    @contextlib.contextmanager
    def _permit(self, call: Call, record: AccessRecord, caller: str) -> Iterator[Permit]:
        with contextlib.ExitStack() as held:
            try:
                permit = held.enter_context(self._limiter.permit(call, caller))
            except ServingError as error:
                record.finish(error.status, error.logged)
                raise
            yield permit

    def _received(self, requests: Iterator[bytes], permit: Permit) -> Message:
        """Return the one message of a call; the permit is released when it is counted. Raises ``RequestError``."""
        data = next(requests, None)
        if data is None:
            raise RequestError("the call has no message")
        permit.arrived = True
        if is_small(data):
            permit.release()
        return Message(data, permit.release)

    def _run_unary(self, call: Call, record: AccessRecord, message: Message) -> Answer:
        self.num_active += 1
        try:
            return self._run(_INFER, call, record, message)
        finally:
            self.num_active -= 1

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the responses to all requests of a stream; those of one request are in order.

        The error of a request that fails is a response with the request's id. If the caller is refused, the call ends
        with an error."""
        call, record = self._begun(context, STREAM.path)
        try:
            self._loop.call(partial(self._handled, call, record, Auth.INVOKE, lambda caller: None))
        except ServingError as error:
            call.abort(error, record.request_id, record.headers)
        responses: queue.SimpleQueue[bytes | _RequestDone] = queue.SimpleQueue()
        room = threading.Semaphore(MAX_CONCURRENT_REQUESTS)
        threading.Thread(target=self._read, args=(requests, call, responses, room), daemon=True).start()
        done, count = 0, None
        while done != count:
            one = responses.get()
            if isinstance(one, bytes):
                yield one
            elif one.count is None:
                done += 1
                room.release()
            else:
                count = one.count

    def _read(
        self,
        requests: Iterator[bytes],
        call: Call,
        responses: queue.SimpleQueue[bytes | _RequestDone],
        room: threading.Semaphore,
    ) -> None:
        """Start the requests of a stream as they arrive. Runs on its own thread.

        After a large request, the next one is read only when the large one is in the memory budget."""
        count = 0
        try:
            while (data := next(requests, None)) is not None:
                while not room.acquire(timeout=1.0):
                    if call.is_over:
                        return
                count += 1
                counted = None if is_small(data) else threading.Event()
                message = Message(data, None if counted is None else counted.set)
                del data  # hold no message while waiting for the next one
                self._loop.spawn(partial(self._serve, call, message, responses))
                if counted is not None:
                    counted.wait()
        except Exception:  # gRPC raises it to say that the call has ended
            call.is_over = True
        finally:
            responses.put(_RequestDone(count))

    def _serve(self, call: Call, message: Message, responses: queue.SimpleQueue[bytes | _RequestDone]) -> None:
        """Answer one request of a stream. Runs in the loop."""
        self.num_active += 1
        record = self._record(call, STREAM.path)
        try:
            answer = self._run(_STREAM, call, record, message)
            if isinstance(answer.body, bytes):
                record.finish(answer.status)
                responses.put(answer.body)
            else:
                self._follow(call, answer.body, responses)
        except ServingError as error:
            responses.put(failure(error, message.id).SerializeToString())
        except ClientGone:
            pass
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, request_id=record.request_id)
            responses.put(failure(InternalError("internal error"), message.id).SerializeToString())
        finally:
            message.counted()
            self.num_active -= 1
            responses.put(_RequestDone())

    def _follow(self, call: Call, body: Any, responses: queue.SimpleQueue[bytes | _RequestDone]) -> None:
        """Queue the responses of a body, at most about ``MAX_BUFFERED_RESPONSES`` of them ahead of the client.

        The call of a client that takes no response for ``io_timeout`` is cancelled."""
        try:
            for data in body:
                for one in frames(data):
                    responses.put(one)
                since, size = time.monotonic(), responses.qsize()
                while responses.qsize() > MAX_BUFFERED_RESPONSES and not call.is_over:
                    gevent.sleep(POLL_SECONDS)
                    if responses.qsize() < size:
                        since, size = time.monotonic(), responses.qsize()
                    if time.monotonic() - since > self._server.settings.io_timeout:
                        call.context.cancel()
                        raise ClientGone
                if call.is_over:
                    raise ClientGone
        finally:
            body.close()

    # steps of every call

    def _begun(self, context: grpc.ServicerContext, path: str) -> tuple[Call, AccessRecord]:
        call = Call(context, self._loop)
        return call, self._record(call, path)

    def _record(self, call: Call, path: str) -> AccessRecord:
        headers, tracer = call.headers, self._server.tracer
        return AccessRecord(
            request_id=request_id_from(headers.get(REQUEST_ID)),
            method="RPC",
            path=path,
            trace=tracer.context(headers.get("traceparent"), headers.get("tracestate")),
            tracer=tracer,
        )

    def _run(self, route: Operation, call: Call, record: AccessRecord, message: Message) -> Answer:
        """Run an inference request. Runs in the loop. Raises ``ServingError``."""

        def run(caller: Caller) -> Answer:
            name, wanted = message.address()
            if not name:
                raise NotFound("model_name: the name of a model", param="model_name")
            version = {VERSION: wanted} if wanted else {}
            request = Request(
                operation=route,
                record=record,
                caller=caller,
                headers=call.headers,
                path={"name": name} | version,
                receive=message.receive,
                is_large=message.size >= self._server.settings.offload_bytes,
                address=call.address,
                watch=call.watch,
            )
            return invoke(self._server, request)

        return self._handled(call, record, Auth.INVOKE, run)

    def _handled(self, call: Call, record: AccessRecord, auth: Auth, run: Callable[[Caller], T]) -> T:
        """Authenticate the caller and return ``run(caller)``. Raises ``ServingError``, after recording it and charging
        the caller for a refusal."""
        try:
            return run(authenticate(self._server, auth, call.headers, call.address, record))
        except ServingError as error:
            if not auth.is_open:
                charge(self._server, error, record, call.address)
            record.finish(error.status, error.logged)
            raise
        except ClientGone:
            record.finish(Aborted.status, "the client went away")
            raise Aborted("the client went away") from None
        except Exception:
            logs.event("fault", level=logging.ERROR, exc_info=True, request_id=record.request_id)
            record.finish(InternalError.status, "internal error")
            raise InternalError(f"internal error; the log has it under {record.request_id}") from None
