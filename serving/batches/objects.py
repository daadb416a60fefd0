"""The objects of OpenAI's API for files and batches, made from rows of the store.

Source of the format: the API reference of ``/v1/files`` and ``/v1/batches``.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

import msgspec
import sqlalchemy as sa

PENDING, RUNNING, DONE, FAILED, EXPIRED = "pending", "running", "completed", "failed", "expired"
"""The statuses of rows, which only the database shows."""
ENDED = ("completed", "failed", "expired", "cancelled")
OPEN = ("validating", "in_progress", "cancelling")  # all others that are stored
BatchStatus: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"
]


def request_id_of(batch_id: str, number: int) -> str:
    """Return the id of the request of a row, the same in each attempt."""
    return f"{batch_id.replace('batch_', 'batch_req_')}_{number}"


class FileObject(TypedDict):
    """A file of requests, or of the replies of a batch."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(TypedDict):
    """A page of files, the newest first unless asked otherwise."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """The confirmation that a file is deleted."""

    id: str
    object: Literal["file"]
    deleted: bool


class LineError(TypedDict):
    """A reason why the input of a batch is refused; ``line`` is null for one of the whole file."""

    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(TypedDict):
    """The reasons why the input of a batch is refused."""

    object: Literal["list"]
    data: list[LineError]


class RequestCounts(TypedDict):
    """The number of requests of a batch."""

    total: int
    completed: int
    failed: int


class CachedTokens(TypedDict):
    """The prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """The part of generated tokens that is reasoning, which is not counted separately here: always 0."""

    reasoning_tokens: int


class BatchUsage(TypedDict):
    """The tokens of all answered requests of a batch."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(TypedDict):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: NotRequired[BatchUsage]
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """A page of batches, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(row: sa.Row[Any]) -> FileObject:
    return {
        "id": row.id,
        "object": "file",
        "bytes": int(row.bytes),
        "created_at": row.created_ms // 1000,
        "expires_at": _seconds(row.expires_ms),
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
    }


def batch_object(row: sa.Row[Any], counts: RequestCounts, usage: BatchUsage) -> BatchObject:
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": None if row.errors is None else {"object": "list", "data": msgspec.json.decode(row.errors)},
        "input_file_id": row.input_file_id,
        "completion_window": row.completion_window,
        "status": row.status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": row.created_ms // 1000,
        "expires_at": row.expires_ms // 1000,
        "in_progress_at": _seconds(row.in_progress_ms),
        "finalizing_at": _seconds(row.finalizing_ms),
        "completed_at": _seconds(row.completed_ms),
        "failed_at": _seconds(row.failed_ms),
        "expired_at": _seconds(row.expired_ms),
        "cancelling_at": _seconds(row.cancelling_ms),
        "cancelled_at": _seconds(row.cancelled_ms),
        "request_counts": counts,
        "usage": usage,
        "metadata": None if row.metadata is None else msgspec.json.decode(row.metadata),
    }


def page_of(found: list[Any], limit: int) -> dict[str, Any]:
    """Return a list object of the first ``limit`` of ``found``, which has one more if there are more."""
    data = found[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(found) > limit,
    }


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
