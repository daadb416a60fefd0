"""The messages between a client and an engine process: msgspec structs as msgpack, one ZeroMQ frame each.

A client starts with ``Hello`` and the engine answers with ``Welcome``. After each step, the engine sends one ``Events``
(several if there are many logits) with everything the step produced for this client's requests, and it sends a
``Heartbeat`` between steps. Both sides identify a request by the number that its client chose (``Submit``); the number
is valid on one connection only, while the request's id is the same everywhere.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..interface.engine import AdapterInfo, EngineInfo, Health
from ..interface.events import Event
from ..interface.request import ValidRequest
from ..system.journal import Generated

PROTOCOL_VERSION = 5


class Hello(Struct, frozen=True, tag="hello", array_like=True):
    """The first message on a connection.

    ``client_id`` names the client's lock file in the state directory; "" for a client on another host. ``name`` is the
    same on all connections of a client: the engine first aborts the requests of an earlier connection. ``journal`` is
    the directory on this host where the engine journals what it generates for this client (``serving.journal``), and
    ``counts`` the directory for its counters (``serving.counts``). The engine ignores ``client_id``, ``journal`` and
    ``counts`` of a client that connects over TCP; such a client says in ``store`` of which store its ledger is ("" for
    none), and the engine journals on its own host.
    """

    client_id: str
    protocol: int = PROTOCOL_VERSION
    name: str = ""
    journal: str = ""
    counts: str = ""
    store: str = ""


class Submit(Struct, frozen=True, tag="submit", array_like=True):
    """A request to be run.

    ``number`` is the client's number for the request; a continuation has the number of its request. ``continues`` says
    that an engine had this request before, whether or not it produced a token. ``time_left`` is the seconds until the
    deadline, None if there is none; it is relative because monotonic clocks differ between hosts.
    """

    number: int
    request: ValidRequest
    continues: bool = False
    time_left: float | None = None


class Abort(Struct, frozen=True, tag="abort", array_like=True):
    number: int


class Finish(Struct, frozen=True, tag="finish", array_like=True):
    """The end of only sequence ``index``, because its text is complete."""

    number: int
    index: int


class LoadAdapter(Struct, frozen=True, tag="load", array_like=True):
    """An adapter to be loaded. ``replace`` allows it to replace one of the same name; a ``pinned`` adapter is never
    evicted."""

    call: int
    name: str
    path: str
    replace: bool = False
    pinned: bool = False


class UnloadAdapter(Struct, frozen=True, tag="unload", array_like=True):
    """An adapter to be unloaded. ``at_once`` unloads it even while requests use it; they still end on its weights."""

    call: int
    name: str
    at_once: bool = False


class ListAdapters(Struct, frozen=True, tag="adapters", array_like=True):
    call: int


class ReadJournal(Struct, frozen=True, tag="journal", array_like=True):
    """A question for the journals that this engine's host keeps for the client's store.

    Without ``name``, it asks for their names. Else it asks for counts of the journal after ``position``, before which
    all is in the ledger and may be forgotten; ``DONE`` says that the whole journal is.
    """

    call: int
    name: str = ""
    position: int = 0


class Ping(Struct, frozen=True, tag="ping", array_like=True):
    """The keepalive of a client on another host, which has no lock file in the state directory."""


class Goodbye(Struct, frozen=True, tag="bye", array_like=True):
    """The client leaves; the engine aborts the requests that it still runs."""


ToEngine: TypeAlias = (
    Hello | Submit | Abort | Finish | LoadAdapter | UnloadAdapter | ListAdapters | ReadJournal | Ping | Goodbye
)


class Welcome(Struct, frozen=True, tag="welcome", array_like=True):
    """The answer to ``Hello``. Each engine process has its own ``generation``, so that clients notice a restart."""

    generation: str
    info: EngineInfo
    health: Health


class Events(Struct, frozen=True, tag="events", array_like=True):
    """The output of one step for this client: pairs (number of the request, event), in order."""

    steps: int
    items: tuple[tuple[int, Event], ...]


class Heartbeat(Struct, frozen=True, tag="beat", array_like=True):
    health: Health


class Answer(Struct, frozen=True, tag="answer", array_like=True):
    """The reply to a call: its result, or the error's kind and message."""

    call: int
    adapters: tuple[AdapterInfo, ...] = ()
    kind: str | None = None
    message: str = ""
    param: str | None = None


class JournalPage(Struct, frozen=True, tag="page", array_like=True):
    """The reply to ``ReadJournal``: names of journals, or counts up to ``position``; ``DONE`` if no more will
    follow."""

    call: int
    names: tuple[str, ...] = ()
    counts: tuple[Generated, ...] = ()
    position: int = 0


class Closing(Struct, frozen=True, tag="closing", array_like=True):
    """The engine shuts down; no message follows."""

    reason: str


class Rejected(Struct, frozen=True, tag="stranger", array_like=True):
    """The answer if there was no ``Hello``, the protocol differs, or a message cannot be read: the client has to
    reconnect."""

    reason: str


ToClient: TypeAlias = Welcome | Events | Heartbeat | Answer | JournalPage | Closing | Rejected

_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_client_decoder = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    """Encode a message as one frame of MessagePack; a struct becomes an array that begins with its tag."""
    return _encoder.encode(message)


def decode_for_engine(frame: bytes) -> ToEngine:
    """Decode a client's message. Raises ``msgspec.DecodeError`` if the bytes are not one."""
    message: ToEngine = _engine_decoder.decode(frame)
    return message


def decode_for_client(frame: bytes) -> ToClient:
    """Decode an engine's message. Raises ``msgspec.DecodeError`` if the bytes are not one."""
    message: ToClient = _client_decoder.decode(frame)
    return message
