"""A route: an operation with an HTTP method, and its description in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypedDict

from ..dialects import Dialect
from ..dialects.base import JSON, Headers
from ..frontend.operation import Operation, ResponseDialect
from ..interface.readers import Reader


class Listener(Enum):
    """The listener that has a route, if probes and metrics have a separate listener (``probe_port``)."""

    GATEWAY = "gateway"
    BOTH = "both"
    PROBES = "probes"


class NoFields(TypedDict):
    """An empty object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Operation):
    """A route of the server.

    ``dialect`` decides the form of errors, and for a route with ``inference`` also of bodies; ``by_header`` has others,
    by a header whose presence asks for them. ``content_types`` are the accepted media types of a route without
    ``inference`` (see ``InferenceRoute``).

    The following fields are for the OpenAPI document. ``body`` reads a body of a route without ``inference``; ``query``
    has the JSON schemas of query parameters; ``produces`` has the media types of responses, the usual one first;
    ``reply`` is the type of JSON responses (see ``interface.type_schema``); ``also`` describes, by status, further
    responses that have the same body as a 200; ``example`` is a body that runs.
    """

    method: str
    by_header: Mapping[str, Dialect] = field(default_factory=dict)
    listener: Listener = Listener.GATEWAY
    body: Reader[Any] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    produces: tuple[str, ...] = (JSON,)
    reply: Any = None
    also: Mapping[int, str] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    content_types: tuple[str, ...] = (JSON,)

    def spoken(self, headers: Headers) -> ResponseDialect:
        """Return what a request's headers say of the dialect of its answer."""
        return ResponseDialect(
            next((self.by_header[name] for name in self.by_header if headers.get(name) is not None), None)
        )

    @property
    def takes(self) -> tuple[str, ...]:
        """The accepted media types of bodies."""
        return self.content_types if self.inference is None else self.inference.content_types
