"""Authentication: find the caller of a request by API key or token, if the server requires one."""

from __future__ import annotations

from ..dialects.base import Headers
from ..interface.errors import LimitExceeded, RequestError, ServingError, Unauthenticated
from ..metering.accounts.authorization import ANONYMOUS, UNKNOWN, Caller
from ..metering.accounts.keys import check_tenant
from ..observability.access_record import AccessRecord
from .operation import Auth
from .worker_state import WorkerState

KEY_HEADER = "x-api-key"  # where Anthropic's clients send an API key


def authenticate(server: WorkerState, auth: Auth, headers: Headers, address: str, record: AccessRecord) -> Caller:
    """Return the caller: ``UNKNOWN`` without a key on an open route, ``ANONYMOUS`` if the server requires no key.

    Raises ``Unauthenticated``, ``PermissionDenied`` if a scope is missing or the tenant's name is reserved, and
    ``LimitExceeded`` if too many of the caller's requests were refused.
    """
    if not auth.is_open:
        return _checked(server, auth, headers, address, record)
    if not server.requires_key:
        return ANONYMOUS
    if auth is Auth.OPEN or (headers.get("Authorization") is None and headers.get(KEY_HEADER) is None):
        return UNKNOWN
    try:
        return _checked(server, auth, headers, address, record)
    except Unauthenticated:  # counts as a refusal, so that open routes cannot be used to guess keys
        server.refusals.charge(address)
        return UNKNOWN
    except ServingError:  # probes must not depend on keys or on the store of keys
        return UNKNOWN


def charge(server: WorkerState, error: ServingError, record: AccessRecord, address: str) -> None:
    """Count ``error`` as a refusal of its caller, if it is one."""
    if isinstance(error, LimitExceeded) and error.limit == "refusals":
        return
    if isinstance(error, RequestError):
        server.refusals.charge(record.key or address)


def _checked(server: WorkerState, auth: Auth, headers: Headers, address: str, record: AccessRecord) -> Caller:
    credential = _credential(headers) if server.requires_key else ""
    server.refusals.check_stranger(address, credential)
    if not server.requires_key:
        return ANONYMOUS
    caller = _verified(server, credential)
    record.key = caller.key_id
    check_tenant(caller.tenant)
    caller.check_scope(auth.scope)
    server.refusals.remember_good(credential)
    server.refusals.check(caller.key_id, "key")
    return caller


def _credential(headers: Headers) -> str:
    """Return the credential in the form of an ``Authorization`` header.

    Raises ``Unauthenticated`` for two keys that differ, because it is unknown whose limits should then count.
    """
    given, key = headers.get("Authorization"), headers.get(KEY_HEADER)
    if key is None:
        return given or ""
    named = f"Bearer {key.strip()}"
    if given is not None and given.partition(" ")[2].strip() != key.strip():
        raise Unauthenticated(f"Authorization and {KEY_HEADER} have different keys; send one of them")
    return named


def _verified(server: WorkerState, credential: str) -> Caller:
    """Return the caller of a valid credential. Raises ``Unauthenticated``."""
    scheme, _, secret = credential.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret:
        raise Unauthenticated(f"send an API key: Authorization: Bearer sk-… (or {KEY_HEADER}: sk-…)")
    if server.tokens is not None and not secret.startswith("sk-"):
        return server.tokens.verify(secret)
    if server.keys is not None:
        return server.keys.verify(secret, scope=None)
    raise Unauthenticated("this server accepts tokens, not API keys")
