"""Authorization: the caller of a request, and the scopes that determine what it may see and do.

=========  =========================================================================================================
scope      may
=========  =========================================================================================================
invoke     run requests at the endpoints in its list, see those by name, see its own usage
usage      see its tenant's usage, and the endpoints in its list by name and state
manage     change and see everything: endpoints, keys, limits, prices, every tenant's usage, the audit log
end_users  name end users to whom limits apply: of a trusted front end, that tells for whom it calls
=========  =========================================================================================================
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from ...interface.errors import PermissionDenied

SCOPES = ("invoke", "manage", "usage", "end_users")
PermissionLevel: TypeAlias = Literal["CAN_MANAGE", "CAN_QUERY", "CAN_VIEW"]


class Caller(Struct, frozen=True, kw_only=True):
    """The authenticated caller of a request: an API key, or the subject of a token.

    ``endpoints`` are those that it may use: ``"chat"`` with all adapters, or ``"chat:legal"`` with only that adapter;
    None is all endpoints. ``weight`` is its tenant's share of an engine relative to other tenants (``engine.tenants``).
    """

    key_id: str
    tenant: str
    scopes: tuple[str, ...] = SCOPES
    endpoints: tuple[str, ...] | None = None
    weight: int = 1

    @property
    def manages(self) -> bool:
        return "manage" in self.scopes

    @property
    def names_end_users(self) -> bool:
        """Whether the end users that it names are believed, so that their limits apply."""
        return "end_users" in self.scopes

    @property
    def permission_level(self) -> PermissionLevel:
        """Databricks' name for the caller's permissions on an endpoint that it may see."""
        if self.manages:
            return "CAN_MANAGE"
        return "CAN_QUERY" if "invoke" in self.scopes else "CAN_VIEW"

    def may_see(self, endpoint: str) -> bool:
        """Return whether the caller may see ``endpoint``: it may use it or one of its adapters, or may manage
        everything."""
        if self.manages or self.endpoints is None:
            return True
        return any(entry.partition(":")[0] == endpoint for entry in self.endpoints)

    def may_use(self, endpoint: str, adapter: str | None) -> bool:
        """Return whether the caller may run requests at ``endpoint``; ``adapter`` None is the model itself."""
        if self.endpoints is None or endpoint in self.endpoints:
            return True
        return adapter is not None and f"{endpoint}:{adapter}" in self.endpoints

    def check_scope(self, scope: str | None) -> None:
        """Raise ``PermissionDenied`` if the caller lacks ``scope``; None requires no scope."""
        if scope is not None and scope not in self.scopes:
            raise PermissionDenied(f"the caller lacks the scope {scope!r}")


ANONYMOUS = Caller(key_id="anonymous", tenant="default")
"""Every caller of a server without keys; metered like any other."""

UNKNOWN = Caller(key_id="unknown", tenant="", scopes=(), endpoints=())
"""A caller without a key, at a server that requires keys, of what is open to all."""
