"""The state of a conversation in the terminal, and the requests that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import click

from ...system.escape import visible_line

Messages = list[dict[str, Any]]
TRUNCATING = ("temperature", "top_p", "top_k", "min_p", "typical_p")  # a model with one of these has been tuned to it
TEMPERATURE = 0.7
MAX_TOKENS = 1024


class Server(Protocol):
    """The other side of a conversation: a ``Client`` of a server, or a ``LocalModel``."""

    def get(self, path: str) -> Any: ...
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]: ...
    def understood(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An endpoint or ``endpoint:adapter``, with the sampling values that are its own."""

    name: str
    sampling: dict[str, Any]

    @property
    def base(self) -> str:
        return self.name.partition(":")[0]

    @property
    def adapter(self) -> str:
        return self.name.partition(":")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A reply as it came. ``finish`` is "stop", "length", …, or "stopped" by the user; ``usage`` is None for a reply
    that was stopped. Times are in seconds from the request on; ``first`` is None if nothing came."""

    text: str
    finish: str
    usage: dict[str, Any] | None
    request_id: str
    first: float | None
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """The pace after the first token, or None if there is no second one."""
        tokens = 0 if self.usage is None else self.usage["completion_tokens"]
        if tokens < 2 or self.first is None or self.seconds <= self.first:
            return None
        return float((tokens - 1) / (self.seconds - self.first))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message of the user and its reply. ``id`` and ``parent`` are those of the log; the parent is the turn before,
    so that a reply that was asked for again stays beside the new one."""

    user: dict[str, Any]
    asked: Asked
    id: str = ""
    parent: str = ""


@dataclass(slots=True)
class Conversation:
    """The state of a chat. ``fields`` are those that the user set; one of None leaves the value to the server.

    ``place`` names the server or model for the log. ``attached`` are the parts that go into the next message.
    """

    server: Server
    fields: dict[str, Any]
    system: str | None
    stats: bool
    place: str = ""
    turns: list[Turn] = field(default_factory=list)
    cards: dict[str, Card] = field(default_factory=dict)
    attached: list[dict[str, Any]] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)  # every reply, also those that were replaced
    created: int | None = None  # the server's time of the first reply, in Unix seconds
    told_defaults: bool = False
    log_id: str = ""

    @property
    def model(self) -> str:
        return str(self.fields["model"])

    @property
    def messages(self) -> Messages:
        """The messages so far, without the system message."""
        return [one for turn in self.turns for one in (turn.user, {"role": "assistant", "content": turn.asked.text})]

    def own(self) -> dict[str, Any]:
        """Return the sampling values that the model in use has of its own."""
        card = self.cards.get(self.model)
        return {} if card is None else card.sampling

    def defaults(self) -> dict[str, Any]:
        """Return the values that this command gives to a request: where neither the user nor the model has one.

        A temperature is given only if the model says nothing about sampling, since its values belong together.
        """
        own, found = self.own(), dict[str, Any]()
        if "temperature" not in self.fields and not any(name in own for name in TRUNCATING):
            found["temperature"] = TEMPERATURE
        if not any(name in part for name in ("max_tokens", "max_completion_tokens") for part in (own, self.fields)):
            found["max_tokens"] = MAX_TOKENS
        return found

    def body(self, messages: Messages, *, bounded: bool = True) -> dict[str, Any]:
        """Return the request for a reply to ``messages``; without ``bounded`` its default length is the server's."""
        start: Messages = [{"role": "system", "content": self.system}] if self.system else []
        fields = self.defaults() | self.fields
        if not bounded:
            fields.pop("max_tokens", None)
        return {name: value for name, value in fields.items() if value is not None} | {
            "messages": [*start, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read_cards(self) -> dict[str, Card]:
        """Ask the server for its endpoints and adapters. Raises ``ClickException``."""
        with self.server.understood():
            listed = self.server.get("/v1/models")["data"]
            found = [Card(name=one["id"], sampling=dict(one.get("sampling_defaults") or {})) for one in listed]
        self.cards = {card.name: card for card in found}
        return self.cards

    def choose(self, name: str) -> None:
        """Go on with another endpoint or ``endpoint:adapter``. Raises ``ClickException``."""
        cards = self.read_cards()
        if name.partition(":")[0] not in {card.base for card in cards.values()}:
            raise click.ClickException(f"there is no {visible_line(name)}; available: {listed(cards)}")
        self.fields["model"] = name

    def choose_adapter(self, adapter: str) -> None:
        """Go on with an adapter of the endpoint in use. Raises ``ClickException``, naming those that there are."""
        base = self.model.partition(":")[0]
        there = [card.adapter for card in self.read_cards().values() if card.base == base and card.adapter]
        if adapter not in there:
            has = visible_line(", ".join(there)) or "none"
            raise click.ClickException(f"{base} has no adapter {visible_line(adapter)!r}; it has {has}")
        self.fields["model"] = f"{base}:{adapter}"

    def restart(self) -> None:
        """Forget the turns; the settings stay."""
        self.turns, self.asked, self.attached = [], [], []
        self.created, self.log_id = None, ""


def listed(cards: dict[str, Card]) -> str:
    return visible_line(", ".join(cards))
