"""The gRPC status of each kind of error."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from ..interface.errors import ServingError

_CODES = grpc.StatusCode
STATUSES: Mapping[str, grpc.StatusCode] = {
    "internal": _CODES.INTERNAL,
    "bad_request": _CODES.INVALID_ARGUMENT,
    "invalid_field": _CODES.INVALID_ARGUMENT,
    "context_too_long": _CODES.INVALID_ARGUMENT,
    "unauthenticated": _CODES.UNAUTHENTICATED,
    "permission_denied": _CODES.PERMISSION_DENIED,
    "not_found": _CODES.NOT_FOUND,
    "method_not_allowed": _CODES.UNIMPLEMENTED,
    "already_exists": _CODES.ALREADY_EXISTS,
    "conflict": _CODES.FAILED_PRECONDITION,
    "payload_too_large": _CODES.RESOURCE_EXHAUSTED,
    "ends_engines": _CODES.FAILED_PRECONDITION,  # not a status on which clients retry by themselves
    "limit_exceeded": _CODES.RESOURCE_EXHAUSTED,
    "unavailable": _CODES.UNAVAILABLE,
    "overloaded": _CODES.UNAVAILABLE,
    "shutting_down": _CODES.UNAVAILABLE,
    "engine_died": _CODES.UNAVAILABLE,
    "deadline_exceeded": _CODES.DEADLINE_EXCEEDED,
    "aborted": _CODES.CANCELLED,
}


def status_of(error: ServingError) -> grpc.StatusCode:
    """Return the status with which a client's call ends."""
    return STATUSES[error.kind]
