"""The end user of a request, as a header of a trusted front end names it."""

from __future__ import annotations

import msgspec

from ..interface.errors import InvalidField, PermissionDenied
from ..interface.labels import MAX_USER, Labels
from .operation import Request


def named(header: str | None, request: Request, labels: Labels) -> Labels:
    """Return ``labels`` with the end user that ``header`` names, if the server has such a header and the request too.

    A front end passes on bodies that its users have written, so that the header goes before the body. Raises
    ``PermissionDenied`` for a caller whose end users are not believed: a front end whose key lacks the scope would
    otherwise have no limits, and not learn of it.
    """
    value = None if header is None else request.headers.get(header)
    if header is None or value is None:
        return labels
    if not request.caller.names_end_users:
        raise PermissionDenied(f"{header}: only a caller with the scope 'end_users' names end users by this header")
    if not 0 < len(value) <= MAX_USER or not value.isprintable():
        raise InvalidField(header, value, f"1 to {MAX_USER} printable characters")
    return msgspec.structs.replace(labels, user=value)
