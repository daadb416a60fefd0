"""An operation of the server and a request for it, whichever protocol it comes by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..dialects import DIALECTS, Dialect, InferenceRoute
from ..dialects.base import Headers
from ..dialects.json_body import read_object
from ..interface.errors import InvalidField
from ..interface.labels import Labels
from ..metering.accounts.audit import Actor
from ..metering.accounts.authorization import ANONYMOUS, Caller
from ..metering.ledger.lease import Lease
from ..observability.access_record import AccessRecord
from .answer import Answer
from .limits.memory_budget import Allocation
from .streams.in_flight import Watch
from .worker_state import WorkerState


@dataclass(slots=True)
class ResponseDialect:
    """The dialect in which a request is answered, if it is not the operation's own (``dialect_choice``), and the names
    under which its fields were sent (``Raw.sent_as``)."""

    dialect: Dialect | None = None
    sent_as: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Background:
    """The circumstances of a request of a batch. ``seconds`` is its time limit in place of the server's; ``labels`` are
    added to its own; ``admitted`` gets its lease, which the caller settles together with the reply (``Lease.hold``)."""

    seconds: float
    labels: Labels
    admitted: Callable[[Lease], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request whose caller is known and whose body has not been received yet.

    ``path`` has the values of the variables in the operation's path; ``parameters()`` returns each parameter's values.
    ``receive`` reads the body; ``is_large`` says whether the body may be large, judging by the head. ``address`` is
    what the request counts under if no keys are required. ``watch`` makes a context manager that interrupts its
    argument on a disconnect; without ``watch``, ``sock`` is watched. ``background`` is that of a request of a batch.
    """

    operation: Operation
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
    background: Background | None = None
    body: bytes = b""  # set for handlers made by ``with_body``
    spoken: ResponseDialect = field(default_factory=ResponseDialect)

    @property
    def dialect(self) -> Dialect:
        """The dialect in which the request is read and answered."""
        return self.spoken.dialect or self.operation.dialect

    @property
    def name(self) -> str:
        """The name in the path, such as that of an endpoint or a key."""
        return self.path.get("name", "")

    @property
    def actor(self) -> Actor:
        """The caller in the form for the audit log."""
        caller = self.caller
        return Actor(name=caller.key_id, via="http", tenant=caller.tenant, request_id=self.record.request_id)

    def payer(self, server: WorkerState) -> str:
        """Return the caller under which the request counts in the memory budget."""
        return self.caller.key_id if server.requires_key else self.address

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object. Raises ``RequestError``."""
        return read_object(self.body, dict)

    def single_parameters(self) -> dict[str, str]:
        """Return the query parameters. Raises ``InvalidField`` if one is given more than once."""
        given = self.parameters()
        for name, values in given.items():
            if len(values) > 1:
                raise InvalidField(name[:80], values, "one value")
        return {name: values[0] for name, values in given.items()}


Handler = Callable[[WorkerState, Request], Answer]  # raises ``ServingError``, ``ClientGone``


class Auth(Enum):
    """The authentication that an operation requires if the server requires keys.

    Open operations (OPEN, OPTIONAL) respond even while the store of keys is away, because probes depend on them.
    OPTIONAL ones show more to a caller with a key.
    """

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
        """The scope that a key must have; None if any key will do."""
        return self.value if self in (Auth.INVOKE, Auth.MANAGE) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation of the server: its handler, who may call it, and the dialect of its bodies and errors.

    ``path`` names the operation: over HTTP it is the route's path, in werkzeug's notation. ``inference`` says what an
    inference operation reads. A protocol adds what it needs to find an operation (``http.route.Route``).
    """

    path: str
    handler: Handler
    summary: str
    dialect: Dialect = DIALECTS["mlflow"]
    auth: Auth = Auth.ANY_KEY
    inference: InferenceRoute | None = None


def with_body(handler: Handler) -> Handler:
    """Return a handler that always receives the body, within the memory budget, then calls ``handler`` with it."""

    def received(server: WorkerState, request: Request) -> Answer:
        with server.memory.allocate(request.payer(server)) as allocation:
            return handler(server, dataclasses.replace(request, body=request.receive(allocation)))

    return received
