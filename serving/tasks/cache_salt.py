"""Whose prompt prefixes a request may reuse: what keeps the prefix cache from telling one tenant what another asked.

``usage.cached_tokens``, the bill and the time to the first token all say whether the beginning of a prompt was known.
Were prefixes shared by everyone, a caller could ask for guesses at another's prompt and read from these which is right
(a timing side channel; "prompt theft by prefix caching"). So a prefix is found only under the salt that it was computed
under, and the salt is a keyed hash (BLAKE2b) of a random secret of the server and of whoever shares.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from ..settings import PrefixSharing

SECRET_BYTES = 32


class CacheSalts:
    """Salts of one server. Its workers have the same ``secret``, other servers and notebooks have their own, so that
    they share no prefix, even in an engine that they share."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    def salt(self, sharing: PrefixSharing, *, tenant: str, endpoint: str, asked: str | None) -> str | None:
        """``ValidRequest.cache_salt``; ``asked`` is the request's own ``cache_salt``, which only ever parts further."""
        if sharing == "off":
            return None
        return self._hash(sharing, tenant if sharing == "tenant" else endpoint, asked)

    def of(self, sharing: PrefixSharing, *, tenant: str, endpoint: str) -> Callable[[str | None], str | None]:
        """``salt`` of a caller's requests to an endpoint, by what each asks for itself (``prepare.Limits``)."""
        return lambda asked: self.salt(sharing, tenant=tenant, endpoint=endpoint, asked=asked)

    def tenant(self, name: str) -> str:
        """``ValidRequest.tenant``: an engine tells tenants apart and knows none by name."""
        return self._hash("turns", name)

    def _hash(self, *scope: str | None) -> str:
        return hashlib.blake2b(msgspec.msgpack.encode(scope), key=self._secret, digest_size=16).hexdigest()
