"""The pieces of an admitted request, as its engine makes them, and what is counted of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..interface.reply import Done, Piece
from ..interface.request import ValidRequest
from ..modes import Admission
from ..observability.access_record import AccessRecord
from ..routing.served_endpoints import ServedEntity
from ..tasks.reply import embed, generate, score


def run_task(entity: ServedEntity, valid: ValidRequest, admission: Admission | None) -> generate.Pieces:
    """Submit a request to its engine, and return its pieces."""
    valid = entity.for_engine(valid)
    if valid.task == "embeddings":
        return embed.run(entity.engine, valid)
    if valid.task == "score":
        return score.run(entity.engine, valid)
    on_tokens = None if admission is None else lambda _, count: admission.lease.count(count)
    return generate.run(entity.engine, valid, entity.view.text, on_tokens, entity.guardrails.output)


def counted(
    pieces: Iterator[Piece], admission: Admission | None, record: AccessRecord, *, returns_trace: bool
) -> Iterator[Piece]:
    """Yield pieces, recorded, and settle the request with its last one."""
    for piece in pieces:
        record.see(piece)
        if admission is not None and isinstance(piece, Done):
            used = piece.usage
            admission.lease.settle(
                prompt=used.prompt_tokens,
                cached=used.cached_tokens,
                completion=used.completion_tokens,
                finish_reason=record.finish_reason,
                drafts=(used.draft_tokens, used.accepted_draft_tokens),
                said=None if record.output is None else record.output.said(),
            )
        if returns_trace and isinstance(piece, Done):
            piece = msgspec.structs.replace(piece, trace=record.returned_trace())
        yield piece
