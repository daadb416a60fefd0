"""The keys of a store: one signs heads of the chain and receipts, the other hashes what could be guessed.

Both are made once and lie in the database, so that every server of it has them, and so does a copy of it. Whoever may
read the database's ``settings`` can sign; heads and receipts that are kept elsewhere stay what they were.
"""

from __future__ import annotations

import base64
import hashlib
import secrets

import sqlalchemy as sa

from ..store.store import Store
from ..store.tables import settings
from .canonical import canonical

_SIGNING, _HASHING = "proof_signing_key", "proof_hash_key"
KEY_BYTES = 32


class ProofKeys:
    """The keys of a store: ``signing`` is the seed of an Ed25519 key, ``hashing`` the key of an HMAC-SHA256."""

    def __init__(self, signing: bytes, hashing: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._private = Ed25519PrivateKey.from_private_bytes(signing)
        self.hashing = hashing
        self.public = self._private.public_key().public_bytes_raw()
        self.key_id = key_id(self.public)

    def sign(self, value: object) -> str:
        """Return the signature over the canonical JSON of ``value``, in base64."""
        return base64.b64encode(self._private.sign(canonical(value))).decode()


def key_id(public: bytes) -> str:
    """Return the short name of a public key: the beginning of its SHA-256."""
    return hashlib.sha256(public).hexdigest()[:16]


def is_signed(public: bytes, value: object, signature: str) -> bool:
    """Return whether ``signature`` is that of ``value`` by the private key of ``public``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        given = base64.b64decode(signature, validate=True)
        Ed25519PublicKey.from_public_bytes(public).verify(given, canonical(value))
    except (ValueError, InvalidSignature):
        return False
    return True


def find_keys(connection: sa.Connection) -> ProofKeys | None:
    """Return the keys of the store, None where it has none yet."""
    query = sa.select(settings.c.name, settings.c.value).where(settings.c.name.in_((_SIGNING, _HASHING)))
    found = {name: bytes.fromhex(value) for name, value in connection.execute(query)}
    return ProofKeys(found[_SIGNING], found[_HASHING]) if len(found) == len((_SIGNING, _HASHING)) else None


def make_keys(connection: sa.Connection, store: Store) -> ProofKeys:
    """Return the keys of the store, and make them where it has none yet."""
    if found := find_keys(connection):
        return found
    for name in (_HASHING, _SIGNING):
        row = store.insert(settings).values(name=name, value=secrets.token_hex(KEY_BYTES))
        connection.execute(row.on_conflict_do_nothing())
    found = find_keys(connection)
    assert found is not None
    return found


def keys_of(store: Store) -> ProofKeys:
    """Return the keys of ``store``, and make them where it has none yet."""
    return store.read(find_keys) or store.write(lambda connection: make_keys(connection, store))
