"""A route: method and path, its handler, the authentication it needs, and what the OpenAPI document says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..dialects import DIALECTS, Dialect, InferenceRoute
from ..dialects.base import JSON, Headers
from ..dialects.json_body import read_object
from ..errors import InvalidField
from ..metering.audit import Actor
from ..metering.authorization import ANONYMOUS, Caller
from ..observability.access_record import AccessRecord
from ..readers import Reader
from .answer import Answer
from .in_flight import InterruptibleIterator
from .memory_budget import Allocation
from .server import Server

Watch = Callable[[InterruptibleIterator[Any]], AbstractContextManager[None]]


@dataclass(slots=True)
class Spoken:
    """The dialect in which a request is answered, where it is not its route's (``dialect_choice``)."""

    dialect: Dialect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request whose caller is known and whose body has not been received.

    ``path`` has the values of the route's ``<variables>``, ``parameters()`` those of each parameter of the query.
    ``receive`` reads the body; ``is_large`` is what the head says of its size. ``address`` is what the request counts
    under where no keys are required; ``sock`` is watched for a disconnect, where ``watch`` does not do so itself: it is
    entered with what is to be interrupted.
    """

    route: Route
    record: AccessRecord
    headers: Headers
    caller: Caller = ANONYMOUS
    path: Mapping[str, str] = field(default_factory=dict)
    parameters: Callable[[], Mapping[str, list[str]]] = dict
    receive: Callable[[Allocation], bytes] = lambda _: b""
    is_large: bool = False
    address: str = ""
    sock: Any = None
    watch: Watch | None = None
    body: bytes = b""  # of a route ``with_body``
    spoken: Spoken = field(default_factory=Spoken)

    @property
    def dialect(self) -> Dialect:
        """In which it is read and answered."""
        return self.spoken.dialect or self.route.dialect

    @property
    def name(self) -> str:
        """What the path names: an endpoint, a key."""
        return self.path.get("name", "")

    @property
    def actor(self) -> Actor:
        """The caller as the audit log has it."""
        caller = self.caller
        return Actor(name=caller.key_id, via="http", tenant=caller.tenant, request_id=self.record.request_id)

    def payer(self, server: Server) -> str:
        """Whose share of the memory budget it takes."""
        return self.caller.key_id if server.requires_key else self.address

    def json(self) -> dict[str, Any]:
        """The body, a JSON object. Raises ``RequestError``."""
        return read_object(self.body, dict)

    def single_parameters(self) -> dict[str, str]:
        """The parameters of the query, each given once. Raises ``InvalidField``."""
        given = self.parameters()
        for name, values in given.items():
            if len(values) > 1:
                raise InvalidField(name[:80], values, "one value")
        return {name: values[0] for name, values in given.items()}


Handler = Callable[[Server, Request], Answer]  # raises ``ServingError``, ``ClientGone``


class Auth(Enum):
    """What a caller must show, where the server requires keys. Open routes answer while the store of keys is away:
    probes depend on them. OPTIONAL ones show more to a caller with a key."""

    OPEN = "open"
    OPTIONAL = "optional"
    ANY_KEY = "any key"
    INVOKE = "invoke"
    MANAGE = "manage"

    @property
    def is_open(self) -> bool:
        return self in (Auth.OPEN, Auth.OPTIONAL)

    @property
    def scope(self) -> str | None:
        """What a key must have; None for any key."""
        return self.value if self in (Auth.INVOKE, Auth.MANAGE) else None


class Listener(Enum):
    """Where a route is, where probes and metrics have a listener of their own (``probe_port``)."""

    GATEWAY = "gateway"
    BOTH = "both"
    PROBES = "probes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """``path`` is in werkzeug's notation; ``dialect`` is the form of its errors, and of its bodies where it is one of
    ``inference``.

    For the OpenAPI document: ``body`` reads a body that is no dialect's, ``query`` has the JSON schemas of parameters,
    ``produces`` the media types of answers, the usual one first, and ``also`` answers beside a 200 with such a body, by
    status. ``content_types`` are those of bodies that are no dialect's (``InferenceRoute``).
    """

    method: str
    path: str
    handler: Handler
    summary: str
    dialect: Dialect = DIALECTS["mlflow"]
    auth: Auth = Auth.ANY_KEY
    listener: Listener = Listener.GATEWAY
    inference: InferenceRoute | None = None
    body: Reader[Any] | None = None
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    produces: tuple[str, ...] = (JSON,)
    also: Mapping[int, str] = field(default_factory=dict)
    content_types: tuple[str, ...] = (JSON,)

    @property
    def takes(self) -> tuple[str, ...]:
        """Media types of bodies."""
        return self.content_types if self.inference is None else self.inference.content_types


def with_body(handler: Handler) -> Handler:
    """``handler`` for requests whose ``body`` has been received, within the memory budget, needed or not."""

    def received(server: Server, request: Request) -> Answer:
        with server.memory.allocate(request.payer(server)) as allocation:
            return handler(server, dataclasses.replace(request, body=request.receive(allocation)))

    return received
