"""The messages between a client and an engine process: msgspec structs as msgpack, one ZeroMQ frame each.

A client opens with ``Hello`` and is answered with ``Welcome``. The engine sends one ``Events`` a step with all that
the step gave this client's requests, and a ``Heartbeat`` between steps. Both sides speak of a request by the number
that its client gave it (``Submit``), which counts on one connection; its id is its own everywhere.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..engine.interface import AdapterInfo, EngineInfo, Health
from ..events import Event
from ..request import ValidRequest

PROTOCOL = 4


class Hello(Struct, frozen=True, tag="hello", array_like=True):
    """The first message on a connection.

    ``client_id`` names the client's lock file in the state directory; "" for a client on another host. ``name`` is the
    same on all connections of a client: requests of an earlier one are aborted first. ``journal`` is the directory on
    this host for the journal of what the engine generates for this client (``serving.journal``), ``counts`` the one for
    its counters (``serving.counts``). ``client_id``, ``journal`` and ``counts`` of a client over TCP are ignored.
    """

    client_id: str
    protocol: int = PROTOCOL
    name: str = ""
    journal: str = ""
    counts: str = ""


class Submit(Struct, frozen=True, tag="submit", array_like=True):
    """Run a request.

    ``number`` is the client's number of the request; a continuation has that of its request. ``continues``: an engine
    had this request before, whether or not it gave a token. ``time_left`` is seconds to its deadline, None without one:
    another host's monotonic clock is not ours.
    """

    number: int
    request: ValidRequest
    continues: bool = False
    time_left: float | None = None


class Abort(Struct, frozen=True, tag="abort", array_like=True):
    number: int


class Finish(Struct, frozen=True, tag="finish", array_like=True):
    """End sequence ``index`` alone: its text is complete."""

    number: int
    index: int


class LoadAdapter(Struct, frozen=True, tag="load", array_like=True):
    """``replace``: in place of one of that name, if there is one. ``pinned``: never evicted."""

    call: int
    name: str
    path: str
    replace: bool = False
    pinned: bool = False


class UnloadAdapter(Struct, frozen=True, tag="unload", array_like=True):
    """``at_once``: also while requests use it, which end on its weights."""

    call: int
    name: str
    at_once: bool = False


class ListAdapters(Struct, frozen=True, tag="adapters", array_like=True):
    call: int


class Ping(Struct, frozen=True, tag="ping", array_like=True):
    """The keepalive of a client on another host: it has no lock file in the state directory."""


class Goodbye(Struct, frozen=True, tag="bye", array_like=True):
    """The client leaves; whatever it still runs is aborted."""


ToEngine: TypeAlias = Hello | Submit | Abort | Finish | LoadAdapter | UnloadAdapter | ListAdapters | Ping | Goodbye


class Welcome(Struct, frozen=True, tag="welcome", array_like=True):
    """The answer to ``Hello``. Each engine process has its own ``generation``, so that a restart is noticed."""

    generation: str
    info: EngineInfo
    health: Health


class Events(Struct, frozen=True, tag="events", array_like=True):
    """Everything one step gave this client: (number of the request, event) in order."""

    steps: int
    items: tuple[tuple[int, Event], ...]


class Heartbeat(Struct, frozen=True, tag="beat", array_like=True):
    health: Health


class Answer(Struct, frozen=True, tag="answer", array_like=True):
    """The reply to a call: what it returns, or the error's kind and message."""

    call: int
    adapters: tuple[AdapterInfo, ...] = ()
    kind: str | None = None
    message: str = ""
    param: str | None = None


class Closing(Struct, frozen=True, tag="closing", array_like=True):
    """The engine shuts down; no message follows."""

    reason: str


class Rejected(Struct, frozen=True, tag="stranger", array_like=True):
    """There was no ``Hello`` on this connection, or the protocol differs: connect anew."""

    reason: str


ToClient: TypeAlias = Welcome | Events | Heartbeat | Answer | Closing | Rejected

_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_client_decoder = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    """One frame of MessagePack; a struct is an array that begins with its tag."""
    return _encoder.encode(message)


def decode_for_engine(frame: bytes) -> ToEngine:
    """Raises ``msgspec.DecodeError`` for bytes that are no message."""
    message: ToEngine = _engine_decoder.decode(frame)
    return message


def decode_for_client(frame: bytes) -> ToClient:
    """Raises ``msgspec.DecodeError`` for bytes that are no message."""
    message: ToClient = _client_decoder.decode(frame)
    return message
