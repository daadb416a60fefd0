"""Choose the dialect on routes that two dialects share: OpenAI or MindIE by the endpoints' settings
(``openAiSupport``), MindIE's form of ``generate`` or Triton's own by the body."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ..dialects import DIALECTS, Dialect
from ..dialects.json_body import leniently
from ..dialects.mindie.dialect import SHARED_PATH
from ..dialects.triton.dialect import is_meant
from ..routing.served_endpoints import ServedEndpoints
from .operation import Operation, Request

MINDIE, GENERATE, TRITON = DIALECTS["mindie"], DIALECTS["generate"], DIALECTS["triton-generate"]


class _Named(Struct):
    """The field of a body that names its endpoint."""

    model: str | None = None


def has_open_dialect(route: Operation) -> bool:
    """Return whether the dialect depends on the body or on the endpoint that it names (``choose``)."""
    return route.dialect is GENERATE or _is_shared(route)


def choose(endpoints: ServedEndpoints, request: Request, body: bytes) -> None:
    """Set the dialect of ``request`` to the one of its body, if that is not the route's."""
    if request.operation.dialect is GENERATE:
        if is_meant(body):
            request.spoken.dialect = TRITON
        return
    if not any(spoken := _speaks_mindie(endpoints)):
        return
    entity = endpoints.meant_by(_model(body))
    if all(spoken) or (entity is not None and entity.view.profile.dialects.speaks_mindie):
        request.spoken.dialect = MINDIE


def default_dialect(endpoints: ServedEndpoints, route: Operation) -> Dialect:
    """Return the dialect for refusing a request whose endpoint is not known: MindIE's if all endpoints speak it."""
    spoken = _speaks_mindie(endpoints) if _is_shared(route) else []
    return MINDIE if spoken and all(spoken) else route.dialect


def _is_shared(route: Operation) -> bool:
    return route.inference is not None and route.inference.path == SHARED_PATH


def _speaks_mindie(endpoints: ServedEndpoints) -> list[bool]:
    return [one.view.profile.dialects.speaks_mindie for one in endpoints]


def _model(body: bytes) -> str | None:
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = leniently(body)
        model = found.get("model") if isinstance(found, dict) else None
        return model if isinstance(model, str) else None
