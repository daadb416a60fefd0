"""Handlers that prepare a prompt without running it: to return or count its tokens.

Such a request takes the same path as in ``invoke``, as far as the prompt: authentication, its body within the memory
budget, the endpoint and adapter. No engine sees it, it is not admitted, and so it is not billed.

A route with such a handler, in any dialect::

    Route(
        method="POST",
        path="/v1/…/count_tokens",
        handler=counting(read, answer),
        summary="…",
        dialect=DIALECTS["…"],
        auth=Auth.INVOKE,
        body=Reader(read, schema),
    )

``read(body)`` makes a ``Raw`` of the JSON object; ``answer(raw, view)`` makes the object of the reply, for example
from ``tasks.count.prompt_tokens(raw, view)``. Both may raise ``RequestError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ...dialects.json_body import json_bytes, read_object
from ...frontend.addressing import address, candidates, check_limits, record_served
from ...frontend.answer import Answer
from ...frontend.operation import Handler, Request
from ...frontend.worker_state import WorkerState
from ...interface.labels import NONE
from ...interface.request import Raw
from ...tasks.prompt.endpoint import EndpointView

R = TypeVar("R", bound=Raw)


def counting(read: Callable[[dict[str, Any]], R], answer: Callable[[R, EndpointView], Any]) -> Handler:
    """Make a handler that responds with ``answer(raw, view)`` as JSON. The handler raises ``ServingError``."""

    def handle(server: WorkerState, request: Request) -> Answer:
        server.load_shedder.check_open()
        endpoints, record = server.endpoints.seen_by(request.caller), request.record
        check_limits(server, request, candidates(endpoints, request), None)
        with server.memory.allocate(request.payer(server)) as allocation:
            body = request.receive(allocation)
            raw = server.offload(len(body), read_object, body, read)
            entity, raw = address(endpoints, request, raw)
            record.endpoint = entity.endpoint
            endpoints.check_use(request.caller, entity, entity.view.find_adapter(None, raw.adapter))
            record_served(request, entity)
            record.labels = raw.labels or NONE
            encoded = server.offload(len(body), lambda: json_bytes(answer(raw, entity.view)))
            allocation.grow(len(encoded))
        return Answer(body=encoded, headers=dict(record.headers))

    return handle
