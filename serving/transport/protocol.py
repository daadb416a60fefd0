"""What a client and an engine process say to each other: msgspec structs as msgpack, one ZeroMQ frame each.

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

PROTOCOL = 3


class Hello(Struct, frozen=True, tag="hello", array_like=True):
    """``client_id`` names the client's lock file in the state directory; "" for a client on another host.

    ``name`` is the same on all connections of a client: what it asked for on an earlier one is aborted first.
    ``journal`` is a directory of this host in which the engine is to count what it generates for this client,
    ``counts`` one in which it is to keep what it counts in all (``serving.counts``); of a client that came over TCP
    neither is looked at, and ``client_id`` is not.
    """

    client_id: str
    protocol: int = PROTOCOL
    name: str = ""
    journal: str = ""
    counts: str = ""


class Submit(Struct, frozen=True, tag="submit", array_like=True):
    """``number``: another for each request of a client; a continuation keeps its request's. ``continues``: an engine
    was given this request before, whether or not any token came of it.

    ``time_left``: seconds to its deadline, which an engine on another host counts by a clock of its own; None without.
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
    call: int
    name: str
    path: str


class UnloadAdapter(Struct, frozen=True, tag="unload", array_like=True):
    call: int
    name: str


class ListAdapters(Struct, frozen=True, tag="adapters", array_like=True):
    call: int


class Ping(Struct, frozen=True, tag="ping", array_like=True):
    """Sent by a client on another host, whose life no lock file shows."""


class Goodbye(Struct, frozen=True, tag="bye", array_like=True):
    """The client leaves; whatever it still runs is aborted."""


ToEngine: TypeAlias = Hello | Submit | Abort | Finish | LoadAdapter | UnloadAdapter | ListAdapters | Ping | Goodbye


class Welcome(Struct, frozen=True, tag="welcome", array_like=True):
    """``generation`` is new for every engine process, so that a restart is seen."""

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
    """The engine ends on purpose; nothing follows."""

    reason: str


class Rejected(Struct, frozen=True, tag="stranger", array_like=True):
    """The engine knows no ``Hello`` of this connection, or speaks another protocol: connect anew."""

    reason: str


ToClient: TypeAlias = Welcome | Events | Heartbeat | Answer | Closing | Rejected

_encoder = msgspec.msgpack.Encoder()
_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_client_decoder = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    return _encoder.encode(message)


def decode_for_engine(frame: bytes) -> ToEngine:
    """Raises ``msgspec.DecodeError`` for bytes that are no message."""
    message: ToEngine = _engine_decoder.decode(frame)
    return message


def decode_for_client(frame: bytes) -> ToClient:
    message: ToClient = _client_decoder.decode(frame)
    return message
