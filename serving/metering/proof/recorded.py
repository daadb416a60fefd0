"""A past answer as the ledger knows it, to repeat it and to recognise it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct

from ...interface.errors import Conflict, NotFound
from ..store.store import Store
from ..store.tables import ledger, payloads
from .answers import Proof, Said, body_digest, keyed, prompt_digest, request_key, text_hash
from .keys import keys_of

REPLY_IDS = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""Prefixes that dialects put before a request's id in the ids of their replies."""
WHICH_ID = (
    "give the `id` of the reply, which the access log has as `reply_id`; an X-Request-Id is the `request_id` of the "
    "access log alone, and is not kept in the ledger"
)
"""The words about ids in the error of an unknown request, since every answer has an ``X-Request-Id`` too."""
_COLUMNS = (
    "request_id",
    "endpoint",
    "entity",
    "adapter",
    "task",
    "status",
    "model_version",
    "content_hash",
    "adapter_hash",
)


class Recorded(Struct, frozen=True, kw_only=True):
    """A past request. ``said`` has the hashes of each choice of its whole answer, ``key`` makes them."""

    request_id: str
    endpoint: str
    entity: str
    adapter: str | None
    task: str
    status: str
    model_version: str | None
    content_hash: str | None
    adapter_hash: str | None = None
    proof: Proof
    said: tuple[Said, ...]
    key: bytes

    @property
    def model(self) -> str:
        """The model that answered, by the name and the hash that are known."""
        return " ".join(filter(None, (self.model_version, f"({(self.content_hash or 'no hash')[:12]})")))

    def has_body(self, body: bytes) -> bool:
        """Return whether ``body`` is the request's, byte for byte."""
        return keyed(self.key, body_digest(body)) == self.proof.body

    def has_prompts(self, prompts: Iterable[Sequence[int]]) -> bool:
        """Return whether the request had these prompts, as token ids."""
        return keyed(self.key, prompt_digest(prompts)) == self.proof.prompt

    def choices_with(self, text: str) -> list[int]:
        """Return the choices whose whole text is ``text``."""
        hashed = text_hash(self.key, text)
        return [index for index, said in enumerate(self.said) if said.text == hashed]

    def says(self, choices: Sequence[Mapping[str, str]]) -> bool:
        """Return whether the answer had these choices: text, reasoning and calls of each."""
        return tuple(self._said(one) for one in choices) == self.said

    def _said(self, choice: Mapping[str, str]) -> Said:
        kept = {name: text_hash(self.key, text) for name, text in choice.items() if text or name == "text"}
        return Said(**kept)

    def changes(self, other: Recorded) -> list[str]:
        """Return what of ``other``, a later answer, may have changed bits of this one."""
        found = []
        if other.content_hash != self.content_hash:
            found.append(f"model {self.model} then, {other.model} now")
        if other.adapter != self.adapter:
            found.append(f"adapter {self.adapter} then, {other.adapter} now")
        elif other.adapter_hash != self.adapter_hash:
            hashes = [(one.adapter_hash or "no hash")[:12] for one in (self, other)]
            found.append(f"adapter {self.adapter} ({hashes[0]}) then, ({hashes[1]}) now")
        before, now = self.proof.computed, other.proof.computed
        for name in sorted(before.keys() | now.keys()):
            is_moot = name == "threads" and before.get("kernels") == now.get("kernels") == "native"
            if before.get(name) != now.get(name) and not is_moot:
                found.append(f"{name} {before.get(name)} then, {now.get(name)} now")
        return found


def recorded(store: Store, request_id: str) -> Recorded:
    """Return the past request ``request_id``, which may be given as the id of its reply.

    Raises ``NotFound`` where the ledger has none, and ``Conflict`` where it has no whole answer to compare with.
    """
    request_id = request_of(request_id)
    columns = [ledger.c[name] for name in (*_COLUMNS, "proof", "output")]
    query = sa.select(*columns).where(ledger.c.request_id == request_id)
    row = store.read(lambda connection: connection.execute(query).mappings().one_or_none())
    if row is None:
        why = "it was never admitted, its day was folded, or this is an id of another kind"
        raise NotFound(f"request {request_id} is not in the ledger: {why}; {WHICH_ID}")
    if row["proof"] is None:
        why = "it generated no text" if row["task"] in ("embeddings", "score") else "it is of an earlier release"
        raise Conflict(f"request {request_id} has no hashes in the ledger: {why}")
    if row["output"] is None:
        raise Conflict(f"request {request_id} has no whole answer in the ledger: its status is {row['status']}")
    return Recorded(
        **{name: row[name] for name in _COLUMNS},
        proof=msgspec.convert(row["proof"], Proof),
        said=tuple(msgspec.json.decode(row["output"], type=list[Said])),
        key=request_key(keys_of(store).hashing, request_id),
    )


def request_of(reply_id: str) -> str:
    """Return the id of the request in the ledger, of the id of its reply."""
    for prefix in REPLY_IDS:
        reply_id = reply_id.removeprefix(prefix)
    return reply_id


def logged_body(store: Store, request_id: str) -> bytes | None:
    """Return the request's body from its endpoint's payload log; None where it is not there."""
    this = sa.and_(payloads.c.request_id == request_of(request_id), ~payloads.c.shadow)  # which have no body
    query = sa.select(payloads.c.request).where(this)
    found = store.read(lambda connection: connection.execute(query).scalars().first())
    return None if found is None else found.encode()
