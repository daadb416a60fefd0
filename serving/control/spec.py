"""The specification of a server, as one value that the command passes to the controller process and the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from ..endpoints.config import PlacementSetting, moves
from ..endpoints.scale import Scale
from ..interface.bundle import Bundle
from ..interface.canary import Canary
from ..interface.dialect_settings import BATCH, DialectSettings, batched
from ..interface.errors import InvalidField
from ..interface.guardrails import Guardrails, check_scorers, scorer_names
from ..interface.payload_log import PayloadLog
from ..interface.settings import EngineSettings, PrefixSharing, check_name
from .settings import ServerSettings

ProfileName = Literal["open", "databricks-provisioned", "databricks-pay-per-token"]


class EndpointSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An endpoint of the command line. ``entity`` is the URI of the served model as it was given, of which the name of
    the served entity is made; ``uri`` names its version even if ``entity`` names an alias ("": ``entity`` does).

    For ``core``, ``defaults``, ``addresses`` and ``key_file`` see ``endpoints.config.ModelSource``; of ``defaults``,
    ``given_defaults`` are those that do not come with the model, which updates of the endpoint keep. The last eight
    fields are those of the management API: the reserved tokens/s, whether an idle engine may end, whether the endpoint
    follows the alias that ``entity`` names, and its canaries, which are not for engines on other hosts; whether the
    engines run on joined hosts, how many do, and the hosts that a runtime starts for them.
    """

    name: str
    entity: str
    bundle: Bundle
    engine: EngineSettings = EngineSettings()
    profile: ProfileName = "open"
    prefix_sharing: PrefixSharing | None = None
    payload_log: PayloadLog | None = None
    guardrails: Guardrails | None = None
    dialects: DialectSettings = DialectSettings()
    created: int = 0
    defaults: dict[str, Any] = {}
    given_defaults: dict[str, Any] = {}
    core: str | None = None
    addresses: tuple[str, ...] = ()
    key_file: str | None = None
    uri: str = ""
    min_provisioned_throughput: int | None = None
    max_provisioned_throughput: int | None = None
    scale_to_zero_enabled: bool = False
    follow_alias: bool = False
    canary: Canary | None = None
    placement: PlacementSetting | None = None
    replicas: int | None = None
    scale: Scale | None = None

    def __post_init__(self) -> None:
        check_name(self.name)


class ServeSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The specification of a server. ``endpoints`` are those of the command line; the store may have more.

    ``engine`` (engine settings) and ``profile`` are for models that are served later, ``dialects`` for endpoints
    without such settings. ``runtime_dir`` is where engine processes are found; None is the user's own."""

    endpoints: tuple[EndpointSpec, ...] = ()
    settings: ServerSettings = ServerSettings()
    runtime_dir: str | None = None
    engine: dict[str, Any] = {}
    profile: ProfileName = "open"
    dialects: DialectSettings = DialectSettings()

    def resolved(self) -> ServeSpec:
        """Return the spec with complete dialect settings for each endpoint, some of which set its engine's settings.

        Raises ``InvalidField``.
        """
        for place, one in enumerate(self.endpoints):
            allowed_scorers = scorer_names(self.settings.guardrail_scorers)
            check_scorers(one.guardrails, allowed_scorers, f"endpoints[{place}].guardrails")
            if one.payload_log is not None and self.settings.database is None:
                allowed = "none without a database (--database), in which the log is kept"
                raise InvalidField(f"endpoints[{place}].payload_log", msgspec.to_builtins(one.payload_log), allowed)
            check_following(one, f"endpoints[{place}]")
        own = [one.dialects.over(self.dialects) for one in self.endpoints]
        for dialects in (self.dialects, *own):
            dialects.check()
        for one, dialects in zip(self.endpoints, own, strict=True):
            if one.addresses and dialects.maxPrefillTokens is not None:
                allowed = f"none for {one.name}: its engines run on other hosts, which have their own -C {BATCH}"
                raise InvalidField("maxPrefillTokens", dialects.maxPrefillTokens, allowed)
        endpoints = tuple(
            msgspec.structs.replace(one, dialects=dialects, engine=_with_batch(one.engine, dialects))
            for one, dialects in zip(self.endpoints, own, strict=True)
        )
        return msgspec.structs.replace(self, endpoints=endpoints, engine=batched(self.engine, self.dialects))

    @property
    def trusts_remote_code(self) -> bool:
        """Whether this server may run code that comes with a model."""
        own = any(endpoint.engine.trust_remote_code for endpoint in self.endpoints)
        return own or bool(self.engine.get("trust_remote_code"))


def check_following(endpoint: EndpointSpec, field: str) -> None:
    """Raise ``InvalidField`` for an endpoint that cannot follow an alias as it is told to."""
    canary = None if endpoint.canary is None else msgspec.to_builtins(endpoint.canary)
    if not endpoint.follow_alias:
        if canary is not None:
            raise InvalidField(f"{field}.canary", canary, "none without follow_alias")
        return
    if not moves(endpoint.entity):
        allowed = f"false for {endpoint.entity}: only an alias, or latest, can move"
        raise InvalidField(f"{field}.follow_alias", True, allowed)
    if endpoint.addresses:
        raise InvalidField(f"{field}.follow_alias", True, "false for engines on other hosts")
    if canary is not None and endpoint.max_provisioned_throughput is not None:
        allowed = "none with provisioned throughput, which would be reserved twice"
        raise InvalidField(f"{field}.canary", canary, allowed)


def _with_batch(engine: EngineSettings, dialects: DialectSettings) -> EngineSettings:
    return msgspec.structs.replace(engine, **batched({}, dialects))


def store_url(spec: ServeSpec, directory: Path) -> str:
    """Return the URL of the endpoint store: the server's database, or else one in ``directory``, which lives only as
    long as the server."""
    return spec.settings.database or f"sqlite:///{directory / 'endpoints.db'}"
