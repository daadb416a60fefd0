"""The copies of a request for the shadows of its endpoint."""

from __future__ import annotations

import msgspec

from ..interface.request import RawRequest, ValidRequest
from ..routing.served_endpoints import ServedEntity
from .background.shadow_queue import ShadowCopy, is_drawn
from .operation import Request


def copies_of(
    entity: ServedEntity, request: Request, raw: RawRequest, valid: ValidRequest, size: int
) -> list[ShadowCopy]:
    """Return the copies of a request for those shadows of its endpoint that have it in their sample."""
    if not entity.shadows or request.background is not None:
        return []
    record = request.record
    return [
        ShadowCopy(
            request_id=valid.request_id,
            entity=shadow,
            raw=msgspec.structs.replace(raw, stream=False, return_trace=False),
            size=size,
            path=record.path,
            caller=request.caller,
            labels=record.labels,
            payload_log=None if record.capture is None else record.capture.settings,
        )
        for shadow in entity.shadows
        if is_drawn(shadow, valid.request_id)
    ]
