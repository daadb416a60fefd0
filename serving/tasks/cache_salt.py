"""Cache salts: they decide whose prompt prefixes a request may reuse, so that the prefix cache does not tell one tenant
what another has asked.

``usage.cached_tokens``, the bill and the time to the first token all show whether the beginning of a prompt was cached.
If everyone shared prefixes, a caller could send guesses at another caller's prompt and see which one is right (a timing
side channel; "prompt theft by prefix caching"). A prefix is therefore found only under the salt that it was computed
under. The salt is a keyed hash (BLAKE2b) of whoever shares the prefix; the key is a random secret of the server.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

import msgspec

from ..interface.settings import PrefixSharing

SECRET_BYTES = 32


class CacheSalts:
    """The salts of one server.

    All workers of a server have the same ``secret``. Other servers and notebooks have their own, so they share no
    prefix with this server, even if they use the same engine.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    def salt(self, sharing: PrefixSharing, *, tenant: str, endpoint: str, asked: str | None) -> str | None:
        """Return ``ValidRequest.cache_salt``; None if nothing is shared.

        ``asked`` is the request's own ``cache_salt``, which can only divide callers further.
        """
        if sharing == "off":
            return None
        return self._hash(sharing, tenant if sharing == "tenant" else endpoint, asked)

    def of(self, sharing: PrefixSharing, *, tenant: str, endpoint: str) -> Callable[[str | None], str | None]:
        """Return a function from a request's own ``cache_salt`` to the ``salt`` of that caller and endpoint.

        ``prepare.Limits`` takes it.
        """
        return lambda asked: self.salt(sharing, tenant=tenant, endpoint=endpoint, asked=asked)

    def tenant(self, name: str) -> str:
        """Return ``ValidRequest.tenant``: an engine can distinguish tenants by it without knowing their names."""
        return self._hash("turns", name)

    def _hash(self, *scope: str | None) -> str:
        return hashlib.blake2b(msgspec.msgpack.encode(scope), key=self._secret, digest_size=16).hexdigest()
