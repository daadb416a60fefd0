"""Signed receipts: what was answered and billed for one request, signed with the key of the store."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any, TypedDict

import msgspec
import sqlalchemy as sa

from ...interface.errors import Conflict, NotFound
from ..accounts.money import currency_of, units
from ..store.store import Store
from ..store.tables import ledger
from .answers import Said, request_key
from .keys import is_signed, key_id, keys_of
from .recorded import WHICH_ID

VERSION = 1
ALGORITHM = "Ed25519"
_KEPT = (
    "request_id", "tenant", "endpoint", "entity", "adapter", "model_version", "content_hash", "task", "status",
    "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens", "started_ms", "ended_ms",
)  # fmt: skip
_MONEY = ("price_input", "price_cached", "price_output", "cost")


class Receipt(TypedDict):
    """A receipt: ``receipt`` as canonical JSON (UTF-8, sorted keys, no spaces) has the ``signature``, in base64.

    Its ``output`` has the hashes of each choice of a whole answer, which ``output_key`` makes: HMAC-SHA256 of the
    text's SHA-256.
    """

    receipt: dict[str, Any]
    algorithm: str
    key_id: str
    signature: str


class ReceiptKey(TypedDict):
    """A public key of receipts: 32 bytes in hexadecimal."""

    key_id: str
    algorithm: str
    public_key: str


class ReceiptKeys(TypedDict):
    """The public keys that verify this server's receipts."""

    keys: list[ReceiptKey]


def receipt_of(store: Store, request_id: str, *, tenant: str | None = None, caller: str | None = None) -> Receipt:
    """Return the receipt of a settled request.

    With ``tenant`` and ``caller`` (an id of a key), others' requests are not found. Raises ``NotFound``, and
    ``Conflict`` while the request is running.
    """
    columns = [ledger.c[name] for name in (*_KEPT, *_MONEY, "adapter_hash", "key_id", "proof", "output")]
    query = sa.select(*columns).where(ledger.c.request_id == request_id)
    row, currency = store.read(
        lambda connection: (connection.execute(query).mappings().one_or_none(), currency_of(connection))
    )
    if row is None or tenant not in (None, row["tenant"]) or caller not in (None, row["key_id"]):
        raise NotFound(f"there is no such request in the ledger; {WHICH_ID}")
    if row["status"] == "open":
        raise Conflict("the request is not settled yet; its receipt exists when it has ended")
    keys = keys_of(store)
    content: dict[str, Any] = {name: row[name] for name in _KEPT} | {name: units(row[name]) for name in _MONEY}
    content |= {"version": VERSION, "currency": currency}
    if row["adapter_hash"] is not None:
        content["adapter_hash"] = row["adapter_hash"]
    if row["proof"] is not None:
        content["seed"] = str(row["proof"]["seed"])  # as text: it may exceed what JSON readers count exactly
    if row["output"] is not None:
        content["output"] = msgspec.json.decode(row["output"])
        content["output_key"] = request_key(keys.hashing, request_id).hex()
    return Receipt(receipt=content, algorithm=ALGORITHM, key_id=keys.key_id, signature=keys.sign(content))


def public_keys(store: Store) -> ReceiptKeys:
    """Return the public keys that verify the receipts of ``store``."""
    keys = keys_of(store)
    return ReceiptKeys(keys=[ReceiptKey(key_id=keys.key_id, algorithm=ALGORITHM, public_key=keys.public.hex())])


def encode(receipt: Receipt) -> str:
    """Return a receipt as the value of a header: its JSON in URL-safe base64."""
    return base64.urlsafe_b64encode(msgspec.json.encode(receipt)).decode()


def decode(given: bytes) -> Receipt:
    """Return a receipt given as JSON, or as the value of a header. Raises ``ValueError``."""
    text = given.strip()
    if not text.startswith(b"{"):
        text = base64.urlsafe_b64decode(text)
    return msgspec.json.decode(text, type=Receipt)


def is_genuine(receipt: Receipt, public: bytes) -> bool:
    """Return whether the receipt was signed with the private key of ``public``."""
    known = receipt["algorithm"] == ALGORITHM and receipt["key_id"] == key_id(public)
    return known and is_signed(public, receipt["receipt"], receipt["signature"])


def choices_with(receipt: Receipt, text: str) -> list[int]:
    """Return the choices of the receipt whose whole text is ``text``. Raises ``ValueError`` for one without hashes."""
    content = receipt["receipt"]
    try:
        key, said = bytes.fromhex(content["output_key"]), msgspec.convert(content["output"], list[Said])
    except (KeyError, TypeError, msgspec.ValidationError):
        raise ValueError("the receipt has no hashes of an answer: it was cut short, or generated no text") from None
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    hashed = hmac.digest(key, digest, "sha256").hex()
    return [index for index, one in enumerate(said) if one.text == hashed]
