"""The public keys of a token issuer: a JWKS (RFC 7517) from a file or a URL, kept in memory and renewed.

A token names its key (``kid``). A known key is returned from memory; when the key set is too old, it is renewed in the
background while requests go on with the old one. An unknown key causes one fetch, then none for ``RETRY_SECONDS``,
whatever key ids other tokens name: bad tokens cannot make this server fetch again and again.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from ..interface.errors import Unauthenticated, Unavailable
from ..system import logs

MAX_AGE_SECONDS = 300.0  # seconds until a key set is renewed if its response does not say
FILE_MAX_AGE_SECONDS = 5.0
FRESHNESS = (10.0, 3600.0)  # bounds of that time: they limit how long a withdrawn key is still trusted
STALE_SECONDS = 86_400.0  # seconds after which keys that could not be renewed are not trusted any more
RETRY_SECONDS = 10.0
FETCH_SECONDS = 5.0
MAX_BYTES = 256 * 1024
MAX_KEYS = 100
MAX_KID = 256
RSA_BITS = (2048, 8192)

Fetched = tuple[bytes, float]  # a key set, and the seconds until it must be renewed
PublicKey = RSAKey | ECKey | OKPKey
KINDS: Mapping[str, type[PublicKey]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
# the public fields of a key: if a key set has private ones by mistake, they are not used
PUBLIC = ("kty", "kid", "use", "key_ops", "alg", "n", "e", "crv", "x", "y")


class BadKeySet(ValueError):
    """The fetched data is not a key set."""


def parsed(data: bytes) -> dict[str, PublicKey]:
    """Return the keys that can verify tokens, by ``kid`` (or by thumbprint if they have no ``kid``).

    Secret keys (``oct``), weak keys, keys for encryption and keys of other types are left out, because none of them may
    verify a token here. Raises ``BadKeySet``.
    """
    try:
        listed = json.loads(data)["keys"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BadKeySet('it is not a JSON object with "keys"') from None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise BadKeySet(f"its keys are not a list of at most {MAX_KEYS}")
    found: dict[str, PublicKey] = {}
    for one in listed:
        if isinstance(one, dict) and one.get("use") in (None, "sig") and one.get("kty") in KINDS:
            key = _key({name: one[name] for name in PUBLIC if name in one})
            if key is not None:
                found[key.kid or key.thumbprint()] = key
    return found


def _key(values: dict[str, Any]) -> PublicKey | None:
    if values["kty"] == "RSA" and not _is_strong(values.get("n")):
        return None
    try:
        return KINDS[values["kty"]].import_key(values)
    except (JoseError, ValueError, TypeError, LookupError):
        return None


def _is_strong(modulus: Any) -> bool:
    """Return whether an RSA modulus (base64url) has enough bits, but not so many that verifying takes long."""
    if not isinstance(modulus, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", modulus):
        return False
    low, high = RSA_BITS
    return low <= len(modulus) * 6 <= high + 16


class KeySource:
    """A source of an issuer's keys. ``location`` is a path or an ``https`` URL (``http`` only on this machine)."""

    def __init__(
        self,
        location: str,
        *,
        read: Callable[[str], Fetched] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._location = location
        self.read = read or (download if is_url(location) else _from_file)
        self._max_age = 0.0
        self._clock = clock
        self._keys: dict[str, PublicKey] = {}
        self._renewed: float | None = None
        self._tried: float | None = None
        self.turn = threading.Lock()  # held by the thread that renews

    def find(self, kid: str | None) -> PublicKey:
        """Return the key ``kid``; None means the only key in the set.

        Raises ``Unauthenticated``, and ``Unavailable`` if the keys cannot be fetched.
        """
        if kid is not None and (not isinstance(kid, str) or len(kid) > MAX_KID):
            raise Unauthenticated("the token is not valid here")
        found = self._known(kid)
        if found is not None and not self._is_older_than(self._max_age):
            return found
        if found is not None and not self._is_older_than(STALE_SECONDS):
            self._renew_beside()
            return found
        if self._may_try():
            self._renew(wait=True)
        if self._is_older_than(STALE_SECONDS):
            raise Unavailable("the keys that verify tokens are not available", retry_after=RETRY_SECONDS)
        found = self._known(kid)
        if found is None:
            raise Unauthenticated("the token is not valid here")
        return found

    def _known(self, kid: str | None) -> PublicKey | None:
        keys = self._keys
        if kid is None:
            return next(iter(keys.values())) if len(keys) == 1 else None
        return keys.get(kid)

    def _is_older_than(self, seconds: float) -> bool:
        return self._renewed is None or self._clock() - self._renewed >= seconds

    def _may_try(self) -> bool:
        return self._tried is None or self._clock() - self._tried >= RETRY_SECONDS

    def _renew_beside(self) -> None:
        if self._may_try() and not self.turn.locked():
            threading.Thread(target=self._renew, name="mlflow-llm-jwks", daemon=True).start()

    def _renew(self, *, wait: bool = False) -> None:
        """Renew the keys, one thread at a time; a thread that waited uses what the thread before it has fetched."""
        if not self.turn.acquire(blocking=wait):
            return
        try:
            if not self._may_try():
                return
            self._tried = self._clock()
            data, max_age = self.read(self._location)
            self._keys, self._max_age, self._renewed = parsed(data), max_age, self._clock()
        except (OSError, BadKeySet, http.client.HTTPException) as error:
            logs.event("jwks", level=30, error=f"{self._location}: {error}"[:300])
        finally:
            self.turn.release()


def is_url(location: str) -> bool:
    return urlsplit(location).scheme in ("http", "https")


def _from_file(path: str) -> Fetched:
    with Path(path).open("rb") as file:
        return _bounded(file.read(MAX_BYTES + 1)), FILE_MAX_AGE_SECONDS


def _bounded(data: bytes) -> bytes:
    if len(data) > MAX_BYTES:
        raise BadKeySet(f"it has more than {MAX_BYTES} bytes")
    return data


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A handler that follows no redirect: keys come only from the location that the operator configured."""

    def redirect_request(self, *_: Any) -> None:
        return None


def freshness(cache_control: str, age: str = "") -> float:
    """Return the seconds until a response with these headers must be renewed (RFC 9111, 5.1 and 5.2.2), within
    ``FRESHNESS``; without such a header, ``MAX_AGE_SECONDS``."""
    parts = [directive.partition("=") for directive in cache_control.split(",")]
    directives = {name.strip().lower(): value for name, _, value in parts}
    minimum, maximum = FRESHNESS
    if not directives.keys().isdisjoint(("no-cache", "no-store")):
        return minimum
    given = directives.get("max-age", "").strip().strip('"')
    if not (given.isascii() and given.isdigit()):
        return MAX_AGE_SECONDS
    spent = int(age[:12]) if age.isascii() and age.isdigit() else 0
    return min(max(float(int(given[:12]) - spent), minimum), maximum)


def _opened(request: urllib.request.Request) -> Any:
    """Open ``request``. Raises ``HTTPError`` with its connection closed, which it would otherwise keep open."""
    try:
        return urllib.request.build_opener(_NoRedirect).open(request, timeout=FETCH_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def download(url: str) -> Fetched:
    """Download a key set. Raises ``OSError`` (for a timeout or an HTTP status of 300 or above) and ``BadKeySet``."""
    until = time.monotonic() + FETCH_SECONDS
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    data = bytearray()
    with _opened(request) as answer:
        while chunk := answer.read1(65_536):
            data += chunk
            if len(data) > MAX_BYTES:
                break
            if time.monotonic() > until:
                raise TimeoutError(f"it took more than {FETCH_SECONDS:g} seconds")
        max_age = freshness(", ".join(answer.headers.get_all("Cache-Control", ())), answer.headers.get("Age", ""))
    return _bounded(bytes(data)), max_age
