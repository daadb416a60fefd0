"""Verify JWT bearer tokens (RFC 7519) and turn them into callers. A token must be signed by an issuer whose public keys
are known, and must be issued for this server.

The algorithms come from an allow-list that has no symmetric algorithm and not ``none``: otherwise a public key could be
used as a secret to sign with (algorithm confusion). A key is used only with the algorithms of its own type. A bearer is
told if the token has expired, but no other reason for a refusal.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from joserfc import jwt
from joserfc.errors import ClaimError, ExpiredTokenError, JoseError
from joserfc.jws import CompactSignature, JWSRegistry

from ..control.settings import ServerSettings
from ..interface.errors import Unauthenticated
from ..metering.accounts.accounts import TOKEN_PREFIX
from ..metering.accounts.authorization import SCOPES, Caller
from ..metering.accounts.keys import ALLOWED_ENDPOINT, MAX_ENDPOINTS, MAX_WEIGHT
from ..system import logs
from .jwks import KeySource, PublicKey

MAX_TOKEN = 8192  # characters
MAX_SUBJECT = 100
INVALID = "the token is not valid here"
_ABSENT = object()


class _Registry(JWSRegistry):
    """A registry that allows exactly the algorithms of the settings, without a warning per request for those that the
    library considers outdated."""

    def get_alg(self, name: str) -> Any:
        if self.allowed is None or name not in self.allowed:
            raise JoseError(f"algorithm {name}")
        return self.algorithms[name]


class Tokens:
    """A verifier of tokens with the issuer's keys from ``source``."""

    def __init__(self, settings: ServerSettings, source: KeySource, *, clock: Callable[[], float] = time.time) -> None:
        assert settings.jwt_issuer
        assert settings.jwt_audience
        self._settings = settings
        self._source = source
        self._algorithms = settings.algorithms
        self._registry = _Registry(algorithms=list(self._algorithms), strict_check_header=False)
        self._claims = jwt.JWTClaimsRegistry(
            now=lambda: int(clock()),
            leeway=int(settings.jwt_leeway),
            iss={"essential": True, "value": settings.jwt_issuer},
            aud={"essential": True, "value": settings.jwt_audience},
            exp={"essential": True},
        )

    def verify(self, token: str) -> Caller:
        """Return the caller that ``token`` identifies.

        Raises ``Unauthenticated``, and ``Unavailable`` if the issuer's keys cannot be fetched.
        """
        if len(token) > MAX_TOKEN or not token.isascii():
            raise Unauthenticated(INVALID)
        try:
            found = jwt.decode(token, self._key, algorithms=list(self._algorithms), registry=self._registry)
            self._claims.validate(found.claims)
            return self._caller(found.claims)
        except ExpiredTokenError:
            raise Unauthenticated("the token has expired") from None
        except (JoseError, ClaimError, ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
            logs.event("token refused", level=10, reason=f"{type(error).__name__}: {error}"[:200])
            raise Unauthenticated(INVALID) from None

    def _key(self, signature: Any) -> PublicKey:
        assert isinstance(signature, CompactSignature)
        return self._source.find(signature.headers().get("kid"))

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        settings = self._settings
        subject = _text(claims, settings.jwt_subject_claim, 1024)
        return Caller(
            key_id=TOKEN_PREFIX + _short(subject),
            tenant=_text(claims, settings.jwt_tenant_claim, 128),
            scopes=tuple(scope for scope in SCOPES if scope in (_words(claims, settings.jwt_scope_claim) or ())),
            endpoints=_endpoints(_words(claims, settings.jwt_endpoints_claim)),
            weight=1 if settings.jwt_weight_claim is None else _weight(claims, settings.jwt_weight_claim),
        )


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or else by its name as a dotted path, such as ``realm_access.roles``."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part, _ABSENT) if isinstance(found, Mapping) else _ABSENT
    return found


def _text(claims: Mapping[str, Any], name: str, maximum: int) -> str:
    value = _claim(claims, name)
    if not isinstance(value, str) or not 0 < len(value) <= maximum or not value.isprintable():
        raise ValueError(f"claim {name}")
    return value


def _words(claims: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    """Return the words of a claim that is a list of strings or one string with spaces; None without such a claim."""
    value = _claim(claims, name)
    if value is _ABSENT or value is None:
        return None
    words = [word for word in value.split(" ") if word] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError(f"claim {name}")
    return tuple(words)


def _endpoints(words: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if words is None or words == ("*",):
        return None
    if len(words) > MAX_ENDPOINTS or not all(ALLOWED_ENDPOINT.fullmatch(word) for word in words):
        raise ValueError("claim of endpoints")
    return words


def _weight(claims: Mapping[str, Any], name: str) -> int:
    """Return an integer claim, or 1 without such a claim. Digits in a string count too, because some issuers write
    every claim as a string."""
    value = _claim(claims, name)
    if value is _ABSENT or value is None:
        return 1
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= len(str(MAX_WEIGHT)):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_WEIGHT:
        raise ValueError(f"claim {name}: not an integer from 1 to {MAX_WEIGHT}")
    return value


def _short(subject: str) -> str:
    """Return the caller's name for ledger and limits: a long subject is shortened to its beginning and its SHA-256."""
    if len(subject) <= MAX_SUBJECT:
        return subject
    return f"{subject[:40]}…{hashlib.sha256(subject.encode()).hexdigest()[:32]}"
